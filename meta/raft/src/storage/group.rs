//! One Raft group's part of the database: its log, its records, its vote.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use records::{Read, ReadError, Visit, Writes};
use rocksdb::{
    BoundColumnFamily, Direction, FlushOptions, IngestExternalFileOptions, IteratorMode,
    SnapshotWithThreadMode, SstFileWriter, WriteBatch,
};
use tokio::sync::watch;

use super::database::{Database, Rocks, Sync};
use super::error::DbError;
use super::format::{
    Applied, GROUP_STATE_PREFIX, KEY_APPLIED, KEY_STATE_FAMILY, LOG, META, STATE_PREFIX, decode,
    encode,
};
use super::options::{family_options, options_of};

/// Group of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GroupId {
    /// Group that the database is made with.
    Main,
    /// Group that is added later. Its families get more memory for writes, so that a flood of its commands
    /// does not stop the main group.
    Numbered(u32),
}

/// Names of a group's parts in the database and beside it.
pub(super) struct Names {
    /// Family of its log.
    pub(super) log: String,
    /// Prefix of the families of its records; a number follows.
    pub(super) state_prefix: String,
    /// Prefix of its keys in the family `meta`.
    key_prefix: String,
    /// Directory of its snapshots.
    snapshots: PathBuf,
}

impl Names {
    pub(super) fn new(dir: &Path, group: GroupId) -> Self {
        match group {
            GroupId::Main => Self {
                log: LOG.to_owned(),
                state_prefix: STATE_PREFIX.to_owned(),
                key_prefix: String::new(),
                snapshots: dir.join("snapshots"),
            },
            GroupId::Numbered(number) => Self {
                log: format!("{LOG}.{number}"),
                state_prefix: format!("{GROUP_STATE_PREFIX}{number}."),
                key_prefix: format!("group.{number}."),
                snapshots: dir.join(format!("groups/{number}")),
            },
        }
    }

    pub(super) fn key(&self, name: &str) -> Vec<u8> {
        [self.key_prefix.as_bytes(), name.as_bytes()].concat()
    }

    pub(super) fn first_state_family(&self) -> String {
        format!("{}1", self.state_prefix)
    }

    /// The family that a received snapshot goes to.
    fn next_state_family(&self, current: &str) -> Result<String, DbError> {
        let number = current
            .strip_prefix(&self.state_prefix)
            .and_then(|number| number.parse::<u64>().ok());
        let number = number.ok_or_else(|| DbError::Damaged {
            what: "the name of the state family".to_owned(),
            detail: format!("{current:?}"),
        })?;
        Ok(format!("{}{}", self.state_prefix, number + 1))
    }
}

/// Log, votes and records of a group.
pub struct GroupStore {
    pub(super) database: Arc<Database>,
    group: GroupId,
    pub(super) names: Names,
    pub(super) state_family: RwLock<String>,
    pub(super) progress: watch::Sender<Progress>,
}

/// How far the records are, and whether a snapshot is to replace them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Progress {
    pub(super) applied: Option<u64>,
    installation: Installation,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Installation {
    None,
    Pending,
    Failed,
}

impl GroupStore {
    /// Returns a group whose families exist. The first family of records counts.
    pub(super) fn new(database: Arc<Database>, group: GroupId) -> Self {
        let names = Names::new(database.dir(), group);
        Self {
            database,
            group,
            state_family: RwLock::new(names.first_state_family()),
            names,
            progress: watch::Sender::new(Progress {
                applied: None,
                installation: Installation::None,
            }),
        }
    }

    /// The group.
    #[must_use]
    pub fn group(&self) -> GroupId {
        self.group
    }

    /// Database that the group shares with the node's other groups.
    #[must_use]
    pub fn database(&self) -> &Arc<Database> {
        &self.database
    }

    /// Directory of the group's snapshots. A start removes all other files in it.
    #[must_use]
    pub fn snapshots_dir(&self) -> &Path {
        &self.names.snapshots
    }

    fn state_family(&self) -> String {
        let name = self.state_family.read();
        name.unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn log_family(&self) -> Arc<BoundColumnFamily<'_>> {
        self.database.family(&self.names.log)
    }

    /// Runs a function on a consistent view of the records.
    ///
    /// # Errors
    /// Those of the function.
    pub fn read<T, E: From<DbError>>(
        &self,
        read: impl FnOnce(&View<'_>) -> Result<T, E>,
    ) -> Result<T, E> {
        let name = self
            .state_family
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        read(&self.view(&name))
    }

    fn view(&self, family: &str) -> View<'_> {
        View {
            rocks: self.database.rocks.snapshot(),
            family: self.database.family(family),
        }
    }

    /// Writes changed records together with the position that they have reached.
    ///
    /// # Errors
    /// The database cannot be written.
    pub fn write_records(&self, writes: Writes, applied: &Applied) -> Result<(), DbError> {
        let name = self
            .state_family
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        let family = self.database.family(&name);
        let mut batch = WriteBatch::default();
        for (key, value) in writes {
            match value {
                Some(value) => batch.put_cf(&family, key, value),
                None => batch.delete_cf(&family, key),
            }
        }
        batch.put_cf(&family, KEY_APPLIED, encode(applied));
        self.database.write(batch, Sync::No)?;
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
    pub(super) async fn may_purge(&self, index: u64) -> Result<(), DbError> {
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

    /// Replaces all records with those of an exported file, after checking that they are at the position
    /// `expected` and pass `check`. Returns the result of `check`.
    ///
    /// # Errors
    /// The file is damaged or at another position, `check` fails, or the database cannot be written.
    pub fn replace_records<T>(
        &self,
        file: &Path,
        expected: &Applied,
        check: impl FnOnce(&View<'_>) -> Result<T, DbError>,
    ) -> Result<T, DbError> {
        // Nobody else replaces records: snapshots are installed one after the other.
        let next = self.names.next_state_family(&self.state_family())?;
        let rocks = &self.database.rocks;
        if rocks.cf_handle(&next).is_some() {
            // Left by an installation that failed.
            rocks.drop_cf(&next)?;
        }
        rocks.create_cf(&next, &options_of(&next))?;
        rocks.ingest_external_file_cf_opts(
            &self.database.family(&next),
            &IngestExternalFileOptions::default(),
            vec![file],
        )?;
        let view = self.view(&next);
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
        let checked = check(&view)?;
        drop(view);
        let key = self.names.key(KEY_STATE_FAMILY);
        self.database.put(&key, &next, Sync::Yes)?;
        let old = {
            let mut current = self
                .state_family
                .write()
                .unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *current, next)
        };
        self.progress
            .send_modify(|progress| progress.applied = expected.last.map(|last| last.index));
        if let Err(error) = rocks.drop_cf(&old) {
            // The next start removes it.
            tracing::warn!(family = old, %error, "cannot remove metadata records that were replaced");
        }
        Ok(checked)
    }

    /// Copies all records to a table file. Returns their position, or nothing if they have more than
    /// `bytes_max` bytes.
    ///
    /// # Errors
    /// The database cannot be read, or the file cannot be written.
    pub fn export(&self, to: &Path, bytes_max: u64) -> Result<Option<Applied>, DbError> {
        let mut bytes = 0;
        self.read(|view| {
            let options = family_options();
            let mut writer = SstFileWriter::create(&options);
            writer.open(to)?;
            for item in view.rocks.iterator_cf(&view.family, IteratorMode::Start) {
                let (key, value) = item?;
                bytes += (key.len() + value.len()) as u64;
                if bytes > bytes_max {
                    return Ok(None);
                }
                writer.put(key, value)?;
            }
            writer.finish()?;
            view.applied().map(Some)
        })
    }

    /// Moves all data of the group from the write-ahead log to tables, so that the next open has nothing to
    /// recover.
    ///
    /// # Errors
    /// The database cannot be written.
    pub fn flush_wal(&self) -> Result<(), DbError> {
        let name = self
            .state_family
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        let families = [
            self.database.family(META),
            self.log_family(),
            self.database.family(&name),
        ];
        let families: Vec<&Arc<BoundColumnFamily<'_>>> = families.iter().collect();
        let mut options = FlushOptions::default();
        options.set_wait(true);
        Ok(self.database.rocks.flush_cfs_opt(&families, &options)?)
    }
}

/// Consistent view of the records.
pub struct View<'a> {
    rocks: SnapshotWithThreadMode<'a, Rocks>,
    family: Arc<BoundColumnFamily<'a>>,
}

impl View<'_> {
    /// Returns the position of the records.
    ///
    /// # Errors
    /// The database cannot be read.
    pub fn applied(&self) -> Result<Applied, DbError> {
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
