//! Snapshots: RocksDB checkpoints, exported to one file only when a follower asks for it.
//!
//! ```text
//! DIR/snapshots/N/meta.json    written last, so a slot without it is rubbish of a crash
//! DIR/snapshots/N/checkpoint/  hard links to the database's tables: made here, whatever its size
//! DIR/snapshots/N/state.sst    the records in one table file: from a leader, or from the checkpoint
//! ```
//!
//! The slot with the highest number counts, and the others are removed. A slot that is being read when a
//! newer one takes its place is removed with its last reader.

mod file;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rocksdb::checkpoint::Checkpoint;
use rocksdb::{IteratorMode, Options, SstFileWriter};
use tokio::io::AsyncWriteExt;

use super::database::Rocks;
use super::error::DbError;
use super::format::{Applied, KEY_APPLIED, KEY_STATE_FAMILY, META, decode, encode};
use super::group::GroupStore;
use super::options::family_options;
use super::state_machine::StateMachine;
use crate::config::SnapshotMeta;

pub use file::SnapshotFile;

const META_FILE: &str = "meta.json";
const CHECKPOINT: &str = "checkpoint";
const TABLE_FILE: &str = "state.sst";

/// The directory of one snapshot; removed with the last reference once it is obsolete.
pub(crate) struct Slot {
    path: PathBuf,
    /// Key under which a checkpoint names the family of the group's records.
    family_key: Arc<[u8]>,
    obsolete: AtomicBool,
}

impl Drop for Slot {
    fn drop(&mut self) {
        if *self.obsolete.get_mut() {
            if let Err(error) = fs::remove_dir_all(&self.path) {
                // The next start removes it.
                tracing::warn!(path = %self.path.display(), %error, "cannot remove an old metadata snapshot");
            }
        }
    }
}

impl Slot {
    fn table(&self) -> PathBuf {
        self.path.join(TABLE_FILE)
    }

    /// Copies a received snapshot to this slot.
    pub(super) async fn fill(&self, from: &mut SnapshotFile) -> io::Result<()> {
        use tokio::io::AsyncSeekExt;
        from.flush().await?;
        from.rewind().await?;
        let mut to = tokio::fs::File::create(self.table()).await?;
        tokio::io::copy(from, &mut to).await?;
        to.sync_all().await
    }

    /// The records as one file, exported from the checkpoint when first asked for.
    fn export(&self) -> Result<File, DbError> {
        if !self.table().exists() {
            let partial = self.path.join("state.sst.partial");
            if partial.exists() {
                fs::remove_file(&partial)?;
            }
            write_table(&self.path.join(CHECKPOINT), &self.family_key, &partial)?;
            File::open(&partial)?.sync_all()?;
            fs::rename(&partial, self.table())?;
        }
        Ok(File::open(self.table())?)
    }
}

fn write_table(checkpoint: &Path, family_key: &[u8], to: &Path) -> Result<(), DbError> {
    let (rocks, family) = open_checkpoint(checkpoint, family_key)?;
    let family = rocks
        .cf_handle(&family)
        .ok_or_else(|| damaged("it lacks the records".to_owned()))?;
    let options: Options = family_options();
    let mut writer = SstFileWriter::create(&options);
    writer.open(to)?;
    for item in rocks.iterator_cf(&family, IteratorMode::Start) {
        let (key, value) = item?;
        writer.put(key, value)?;
    }
    Ok(writer.finish()?)
}

fn damaged(detail: String) -> DbError {
    DbError::Damaged {
        what: "a metadata snapshot".to_owned(),
        detail,
    }
}

/// Opens a checkpoint and finds the name of a group's state family.
fn open_checkpoint(path: &Path, family_key: &[u8]) -> Result<(Rocks, String), DbError> {
    let options = Options::default();
    let families = Rocks::list_cf(&options, path)?;
    let rocks = Rocks::open_cf_for_read_only(&options, path, families, false)?;
    let meta = rocks
        .cf_handle(META)
        .ok_or_else(|| damaged("it lacks its description".to_owned()))?;
    let name = rocks
        .get_cf(&meta, family_key)?
        .ok_or_else(|| damaged("it lacks its description".to_owned()))?;
    let name = decode("a metadata snapshot", &name)?;
    drop(meta);
    Ok((rocks, name))
}

fn applied_in(checkpoint: &Path, family_key: &[u8]) -> Result<Applied, DbError> {
    let (rocks, family) = open_checkpoint(checkpoint, family_key)?;
    let family = rocks
        .cf_handle(&family)
        .ok_or_else(|| damaged("it lacks the records".to_owned()))?;
    let applied = rocks.get_cf(&family, KEY_APPLIED)?;
    Ok(applied
        .map(|applied| decode("a metadata snapshot", &applied))
        .transpose()?
        .unwrap_or_default())
}

/// A complete snapshot.
pub(crate) struct Current {
    meta: SnapshotMeta,
    slot: Slot,
}

impl Current {
    pub(crate) fn meta(&self) -> &SnapshotMeta {
        &self.meta
    }

    fn export(&self) -> Result<File, DbError> {
        self.slot.export()
    }
}

fn load(path: PathBuf, family_key: Arc<[u8]>) -> Result<Current, DbError> {
    let meta = decode("a metadata snapshot", &fs::read(path.join(META_FILE))?)?;
    Ok(Current {
        meta,
        slot: Slot {
            path,
            family_key,
            obsolete: AtomicBool::new(false),
        },
    })
}

/// The snapshots of a group on this node.
pub(crate) struct Snapshots {
    dir: PathBuf,
    family_key: Arc<[u8]>,
    next: AtomicU64,
    /// Held while a snapshot is made or installed, so that the newest one is also the one with the most.
    current: Mutex<Option<Arc<Current>>>,
}

impl Snapshots {
    /// Finds the newest complete snapshot and removes everything else.
    pub(crate) fn open(store: &GroupStore) -> Result<Self, DbError> {
        let dir = store.snapshots_dir().to_owned();
        let family_key: Arc<[u8]> = store.names.key(KEY_STATE_FAMILY).into();
        let mut numbers = Vec::new();
        for entry in fs::read_dir(&dir)? {
            let path = entry?.path();
            let number = path
                .file_name()
                .and_then(|name| name.to_str())
                .and_then(|name| name.parse::<u64>().ok());
            match number {
                Some(number) if path.join(META_FILE).exists() => numbers.push(number),
                _ if path.is_dir() => fs::remove_dir_all(&path)?,
                _ => fs::remove_file(&path)?,
            }
        }
        numbers.sort_unstable();
        let newest = numbers.pop();
        for old in numbers {
            fs::remove_dir_all(dir.join(old.to_string()))?;
        }
        let current = newest
            .map(|number| load(dir.join(number.to_string()), Arc::clone(&family_key)))
            .transpose()?;
        // A crash between replacing the records and completing their snapshot leaves one from before that. It
        // does not reach to the beginning of the log, so it is of no use to anyone.
        let needed = store.log_begins_after()?;
        let current = current
            .filter(|current| current.meta.last_log_id >= needed)
            .map(Arc::new);
        Ok(Self {
            dir,
            family_key,
            next: AtomicU64::new(newest.map_or(1, |number| number + 1)),
            current: Mutex::new(current),
        })
    }

    pub(crate) fn current(&self) -> Option<Arc<Current>> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<Current>>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new directory, which is rubbish unless it is completed.
    pub(crate) fn new_slot(&self) -> io::Result<Slot> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let path = self.dir.join(number.to_string());
        fs::create_dir(&path)?;
        Ok(Slot {
            path,
            family_key: Arc::clone(&self.family_key),
            obsolete: AtomicBool::new(true),
        })
    }

    /// Makes a snapshot of what is applied now.
    pub(crate) fn build(&self, store: &GroupStore) -> Result<Arc<Current>, DbError> {
        let mut current = self.lock();
        let slot = self.new_slot()?;
        let checkpoint = slot.path.join(CHECKPOINT);
        Checkpoint::new(&store.database.rocks)?.create_checkpoint(&checkpoint)?;
        // Entries may have been applied since this was asked for: the checkpoint itself says what it holds.
        let applied = applied_in(&checkpoint, &self.family_key)?;
        let last = applied
            .last
            .map_or_else(|| "none".to_owned(), |last| last.to_string());
        let number = slot
            .path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let meta = SnapshotMeta {
            last_log_id: applied.last,
            last_membership: applied.membership,
            snapshot_id: format!("{last}-{number}"),
        };
        self.complete(&mut current, slot, meta)
    }

    /// Replaces the records with a received snapshot.
    pub(crate) fn install(
        &self,
        machine: &dyn StateMachine,
        slot: Slot,
        meta: SnapshotMeta,
    ) -> Result<(), DbError> {
        let mut current = self.lock();
        let expected = Applied {
            last: meta.last_log_id,
            membership: meta.last_membership.clone(),
        };
        machine.replace_records(&slot.table(), &expected)?;
        self.complete(&mut current, slot, meta)?;
        Ok(())
    }

    fn complete(
        &self,
        current: &mut Option<Arc<Current>>,
        mut slot: Slot,
        meta: SnapshotMeta,
    ) -> Result<Arc<Current>, DbError> {
        let partial = slot.path.join("meta.json.partial");
        fs::write(&partial, encode(&meta))?;
        File::open(&partial)?.sync_all()?;
        fs::rename(&partial, slot.path.join(META_FILE))?;
        File::open(&slot.path)?.sync_all()?;
        File::open(&self.dir)?.sync_all()?;
        *slot.obsolete.get_mut() = false;
        let new = Arc::new(Current { meta, slot });
        if let Some(old) = current.replace(Arc::clone(&new)) {
            old.slot.obsolete.store(true, Ordering::Relaxed);
        }
        Ok(new)
    }

    /// A nameless file for a snapshot that is being received.
    pub(crate) fn receive(&self) -> Result<SnapshotFile, DbError> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let path = self.dir.join(format!("{number}.incoming"));
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)?;
        fs::remove_file(&path)?;
        Ok(SnapshotFile::receiving(file))
    }
}
