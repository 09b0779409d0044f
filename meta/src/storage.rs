//! The RocksDB database of a metadata node.
//!
//! ```text
//! DIR/db/                    one RocksDB database
//!   column family `meta`     format, which state family counts, identity, vote, committed, purged
//!   column family `log`      Raft entries: index (8 bytes, big-endian) → JSON
//!   column family `state.N`  records of state.rs; under the byte 0x00 the last applied entry, membership
//! DIR/snapshots/N/           the current snapshot, see snapshot.rs
//! ```
//!
//! **One synced write per command.** Appending to the log and saving a vote sync the write-ahead log before
//! they count. What follows from the log (the committed position, applied records, the removal of old
//! entries) is written without a sync: all families share one write-ahead log, so after power loss the
//! database is a prefix of what was written, in which the log is never behind the records; what is missing of
//! the records is applied again from the log. A killed process loses none of it, as every write has left the
//! process.
//!
//! **Why a fresh family for an installed snapshot.** It is filled and checked beside the old one; one synced
//! write of the family's name in `meta` makes it count. A crash before that leaves the old records, after
//! that the new ones.

pub(crate) mod backup;
mod history;
pub(crate) mod log;
pub(crate) mod machine;
mod open;
pub(crate) mod snapshot;
mod space;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use rocksdb::{
    BoundColumnFamily, DBWithThreadMode, Direction, FlushOptions, IngestExternalFileOptions,
    IteratorMode, MultiThreaded, SnapshotWithThreadMode, WriteBatch, WriteOptions,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::{oneshot, watch};
use uuid::Uuid;

use crate::ids::NodeId;
use crate::layers::Layers;
use crate::level::Level;
use crate::map::ClusterMap;
use crate::raft::{LogId, StoredMembership};
use crate::state::tables::{ATTACHMENTS, LEASES, VOLUMES};
use crate::state::{Read, ReadError, Visit, Writes};
use space::SpaceState;

pub(crate) type Rocks = DBWithThreadMode<MultiThreaded>;

const META: &str = "meta";
const LOG: &str = "log";
const STATE_PREFIX: &str = "state.";

const KEY_FORMAT: &[u8] = b"format";
const KEY_STATE_FAMILY: &[u8] = b"state_family";
const KEY_IDENTITY: &[u8] = b"identity";
const KEY_VOTE: &[u8] = b"vote";
const KEY_COMMITTED: &[u8] = b"committed";
const KEY_PURGED: &[u8] = b"purged";

/// Key of [`Applied`] in the state family, below every record's.
const KEY_APPLIED: &[u8] = &[0];

/// Version of the layout described above.
const FORMAT: u32 = 1;

/// A failed access to the database.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum DbError {
    #[error("metadata database: {0}")]
    Rocks(#[from] rocksdb::Error),
    #[error(transparent)]
    Record(#[from] ReadError),
    #[error("metadata database: {what} is damaged: {detail}")]
    Damaged { what: String, detail: String },
    #[error(
        "this cluster has feature level {found}, and this program knows levels up to {known}: install a \
         newer version of penstock"
    )]
    Newer { found: Level, known: Level },
    #[error("metadata files: {0}")]
    Io(Arc<std::io::Error>),
}

impl From<std::io::Error> for DbError {
    fn from(error: std::io::Error) -> Self {
        Self::Io(Arc::new(error))
    }
}

/// Whose metadata these are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    pub(crate) node: NodeId,
    pub(crate) cluster: Uuid,
    /// See [`crate::recovery`]; none before the first recovery.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) history: Option<Uuid>,
}

/// How far the records have come. Lies among them, so that both change in one write.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Applied {
    pub(crate) last: Option<LogId>,
    pub(crate) membership: StoredMembership,
}

/// The open database. Fields are dropped in order: when `_closed` goes, RocksDB has let go of its files.
pub(crate) struct Db {
    rocks: Rocks,
    state_family: RwLock<String>,
    dir: PathBuf,
    progress: watch::Sender<Progress>,
    space: watch::Sender<SpaceState>,
    /// The cluster map that the records hold, for whoever follows it.
    map: watch::Sender<Arc<ClusterMap>>,
    /// The layers likewise.
    layers: watch::Sender<Arc<Layers>>,
    /// Counts the changes of volumes, leases and attachments.
    openings: watch::Sender<u64>,
    _closed: oneshot::Sender<()>,
}

/// How far the records are, and whether a snapshot is to replace them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Progress {
    applied: Option<u64>,
    installation: Installation,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Installation {
    None,
    Pending,
    Failed,
}

impl Db {
    pub(crate) fn snapshots_dir(&self) -> PathBuf {
        self.dir.join("snapshots")
    }

    fn family(&self, name: &str) -> Arc<BoundColumnFamily<'_>> {
        self.rocks
            .cf_handle(name)
            .expect("families are made at open, and the state family while it is named")
    }

    /// The cluster map as it is applied here, now and from now on.
    pub(crate) fn map(&self) -> watch::Receiver<Arc<ClusterMap>> {
        self.map.subscribe()
    }

    pub(crate) fn layers(&self) -> watch::Receiver<Arc<Layers>> {
        self.layers.subscribe()
    }

    /// Another number after every change of a volume, a lease or an attachment.
    pub(crate) fn openings(&self) -> watch::Receiver<u64> {
        self.openings.subscribe()
    }

    pub(crate) fn identity(&self) -> Result<Option<Identity>, DbError> {
        self.meta_get(KEY_IDENTITY)
    }

    pub(crate) fn set_identity(&self, identity: &Identity) -> Result<(), DbError> {
        self.meta_put(KEY_IDENTITY, identity, Sync::Yes)
    }

    fn meta_get<T: DeserializeOwned>(&self, key: &[u8]) -> Result<Option<T>, DbError> {
        let value = self.rocks.get_pinned_cf(&self.family(META), key)?;
        value
            .map(|value| decode(&String::from_utf8_lossy(key), &value))
            .transpose()
    }

    fn meta_put<T: Serialize>(&self, key: &[u8], value: &T, sync: Sync) -> Result<(), DbError> {
        let mut batch = WriteBatch::default();
        batch.put_cf(&self.family(META), key, encode(value));
        self.write(batch, sync)
    }

    fn write(&self, batch: WriteBatch, sync: Sync) -> Result<(), DbError> {
        let mut options = WriteOptions::default();
        options.set_sync(sync == Sync::Yes);
        Ok(self.rocks.write_opt(batch, &options)?)
    }

    /// Runs a function on a consistent view of the records.
    pub(crate) fn read<T, E: From<DbError>>(
        &self,
        read: impl FnOnce(&View<'_>) -> Result<T, E>,
    ) -> Result<T, E> {
        let name = self
            .state_family
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        let view = View {
            rocks: self.rocks.snapshot(),
            family: self.family(&name),
        };
        read(&view)
    }

    /// Writes changed records together with how far they have come.
    pub(crate) fn write_records(&self, writes: Writes, applied: &Applied) -> Result<(), DbError> {
        let name = self
            .state_family
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        let family = self.family(&name);
        let map = self.map.borrow().with(&writes)?;
        map.as_ref().map_or(Ok(()), check_level)?;
        let layers = self.layers.borrow().with(&writes)?;
        let opens = writes.keys().any(|key| opens(key));
        let mut batch = WriteBatch::default();
        for (key, value) in writes {
            match value {
                Some(value) => batch.put_cf(&family, key, value),
                None => batch.delete_cf(&family, key),
            }
        }
        batch.put_cf(&family, KEY_APPLIED, encode(applied));
        self.write(batch, Sync::No)?;
        if let Some(map) = map {
            self.map.send_replace(Arc::new(map));
        }
        if let Some(layers) = layers {
            self.layers.send_replace(Arc::new(layers));
        }
        if opens {
            self.openings.send_modify(|count| *count += 1);
        }
        self.progress
            .send_modify(|progress| progress.applied = applied.last.map(|last| last.index));
        Ok(())
    }

    /// A snapshot is coming, and the log will be cut to it.
    pub(crate) fn installation_begins(&self) {
        self.progress
            .send_modify(|progress| progress.installation = Installation::Pending);
    }

    pub(crate) fn installation_ended(&self, done: bool) {
        let installation = if done {
            Installation::None
        } else {
            Installation::Failed
        };
        self.progress
            .send_modify(|progress| progress.installation = installation);
    }

    /// Waits until entries up to `index` may be removed.
    ///
    /// openraft cuts the log to a received snapshot without waiting for its installation. A crash in between
    /// would leave neither the entries nor their effect.
    async fn may_purge(&self, index: u64) -> Result<(), DbError> {
        let mut progress = self.progress.subscribe();
        let ready = |progress: &Progress| {
            progress.applied >= Some(index) || progress.installation != Installation::Pending
        };
        let seen = progress.wait_for(ready).await.map(|progress| *progress);
        match seen {
            Ok(Progress {
                applied,
                installation: Installation::Failed,
            }) if applied < Some(index) => {
                let what = "a received snapshot".to_owned();
                Err(DbError::Damaged {
                    what,
                    detail: "it could not be installed".to_owned(),
                })
            }
            // The sender lives in `self`, so it cannot be gone.
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Replaces all records with those of an exported file, after checking that they are what `expected`
    /// says.
    pub(crate) fn replace_records(&self, file: &Path, expected: &Applied) -> Result<(), DbError> {
        let mut current = self
            .state_family
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        let next = open::next_state_family(&current)?;
        if self.rocks.cf_handle(&next).is_some() {
            // Left by an installation that failed.
            self.rocks.drop_cf(&next)?;
        }
        self.rocks.create_cf(&next, &open::family_options())?;
        self.rocks.ingest_external_file_cf_opts(
            &self.family(&next),
            &IngestExternalFileOptions::default(),
            vec![file],
        )?;
        let view = View {
            rocks: self.rocks.snapshot(),
            family: self.family(&next),
        };
        // Reading every record checks every block's checksum.
        view.scan(&[], &mut |_, _| Ok(true))?;
        let found = view.applied()?;
        if found != *expected {
            let detail = format!("it ends at {:?} instead of {:?}", found.last, expected.last);
            return Err(DbError::Damaged {
                what: "the received snapshot".to_owned(),
                detail,
            });
        }
        let map = ClusterMap::load(&view)?;
        check_level(&map)?;
        let layers = Layers::load(&view)?;
        drop(view);
        self.meta_put(KEY_STATE_FAMILY, &next, Sync::Yes)?;
        self.map.send_replace(Arc::new(map));
        self.layers.send_replace(Arc::new(layers));
        self.openings.send_modify(|count| *count += 1);
        let old = std::mem::replace(&mut *current, next);
        self.progress
            .send_modify(|progress| progress.applied = expected.last.map(|last| last.index));
        Ok(self.rocks.drop_cf(&old)?)
    }

    /// Moves everything from the write-ahead log to tables, so that the next open has nothing to recover.
    pub(crate) fn flush_wal(&self) -> Result<(), DbError> {
        let name = self
            .state_family
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        let families = [self.family(META), self.family(LOG), self.family(&name)];
        let families: Vec<&Arc<BoundColumnFamily<'_>>> = families.iter().collect();
        let mut options = FlushOptions::default();
        options.set_wait(true);
        Ok(self.rocks.flush_cfs_opt(&families, &options)?)
    }
}

/// Whether a record says which layers a node may reach.
fn opens(key: &[u8]) -> bool {
    let tables = [VOLUMES.prefix(), LEASES.prefix(), ATTACHMENTS.prefix()];
    key.first().is_some_and(|table| tables.contains(table))
}

/// What nodes of a higher level write does not mean to this program what it means to them.
fn check_level(map: &ClusterMap) -> Result<(), DbError> {
    let (found, known) = (map.level(), Level::KNOWN);
    match found > known {
        true => Err(DbError::Newer { found, known }),
        false => Ok(()),
    }
}

/// Whether a write waits until it is on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sync {
    Yes,
    No,
}

fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("stored values have text keys and finite numbers only")
}

fn decode<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T, DbError> {
    serde_json::from_slice(bytes).map_err(|error| DbError::Damaged {
        what: what.to_owned(),
        detail: error.to_string(),
    })
}

/// A consistent view of the records.
pub(crate) struct View<'a> {
    rocks: SnapshotWithThreadMode<'a, Rocks>,
    family: Arc<BoundColumnFamily<'a>>,
}

impl View<'_> {
    pub(crate) fn applied(&self) -> Result<Applied, DbError> {
        let value = self.rocks.get_cf(&self.family, KEY_APPLIED)?;
        Ok(value
            .map(|value| decode("the applied position", &value))
            .transpose()?
            .unwrap_or_default())
    }
}

impl Read for View<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, ReadError> {
        self.rocks
            .get_cf(&self.family, key)
            .map_err(|error| ReadError::new(key, error))
    }

    fn scan_towards(
        &self,
        prefix: &[u8],
        from: &[u8],
        direction: records::Direction,
        visit: &mut Visit<'_>,
    ) -> Result<(), ReadError> {
        assert!(from.starts_with(prefix), "a scan begins within its prefix");
        // In reverse, RocksDB begins at the last key at or before `from`.
        let direction = match direction {
            records::Direction::Forward => Direction::Forward,
            records::Direction::Backward => Direction::Reverse,
        };
        for item in self
            .rocks
            .iterator_cf(&self.family, IteratorMode::From(from, direction))
        {
            let (key, value) = item.map_err(|error| ReadError::new(prefix, error))?;
            if !key.starts_with(prefix) || !visit(&key, &value)? {
                break;
            }
        }
        Ok(())
    }
}
