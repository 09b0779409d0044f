//! One Raft group's part of the database: its log, its records, its vote.

use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use rocksdb::{
    BoundColumnFamily, Direction, FlushOptions, IngestExternalFileOptions, IteratorMode,
    SnapshotWithThreadMode, WriteBatch,
};
use tokio::sync::watch;

use super::database::{Database, Rocks, Sync};
use super::{Applied, DbError, KEY_APPLIED, KEY_STATE_FAMILY, META, decode, encode, open};
use crate::raft::GroupConfig;
use crate::state::{Read, ReadError, Visit, Writes};

/// Names of what a group has in the database and beside it.
pub(super) struct Names {
    /// The family of its log.
    pub(super) log: String,
    /// What the name of a family of its records begins with; a number follows.
    pub(super) state_prefix: String,
    /// What its keys in the family `meta` begin with.
    pub(super) key_prefix: String,
    /// Directory of its snapshots.
    pub(super) snapshots: PathBuf,
}

impl Names {
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

/// A group's log and records. `C` says what they hold.
pub(crate) struct GroupStore<C> {
    pub(crate) database: Arc<Database>,
    pub(super) names: Names,
    pub(super) state_family: RwLock<String>,
    pub(super) progress: watch::Sender<Progress>,
    kind: PhantomData<fn() -> C>,
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

impl<C: GroupConfig> GroupStore<C> {
    /// A group whose families are there; the first family of records counts.
    pub(super) fn new(database: Arc<Database>, names: Names) -> Self {
        Self {
            database,
            state_family: RwLock::new(names.first_state_family()),
            names,
            progress: watch::Sender::new(Progress {
                applied: None,
                installation: Installation::None,
            }),
            kind: PhantomData,
        }
    }

    pub(crate) fn snapshots_dir(&self) -> &Path {
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
    pub(crate) fn read<T, E: From<DbError>>(
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

    /// Writes changed records together with how far they have come.
    pub(crate) fn write_records(&self, writes: Writes, applied: &Applied) -> Result<(), DbError> {
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

    /// Replaces all records with those of an exported file, after checking that they are what `expected` says
    /// and pass `check`. Returns what `check` made of them.
    pub(crate) fn replace_records<T>(
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
        rocks.create_cf(&next, &open::options_of(&next))?;
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

    /// Moves everything of the group from the write-ahead log to tables, so that the next open has nothing to
    /// recover.
    pub(crate) fn flush_wal(&self) -> Result<(), DbError> {
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

/// A consistent view of the records.
pub(crate) struct View<'a> {
    pub(super) rocks: SnapshotWithThreadMode<'a, Rocks>,
    pub(super) family: Arc<BoundColumnFamily<'a>>,
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
