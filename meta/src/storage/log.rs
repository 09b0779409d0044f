//! The Raft log and votes.

use std::fmt::Debug;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use openraft::storage::{LogFlushed, RaftLogStorage};
use openraft::{
    AnyError, ErrorSubject, ErrorVerb, LogState, OptionalSend, RaftLogReader, StorageIOError,
};
use rocksdb::{Direction, IteratorMode, WriteBatch};

use super::{Db, DbError, KEY_COMMITTED, KEY_PURGED, KEY_VOTE, LOG, META, Sync, decode, encode};
use crate::raft::{Entry, LogId, StorageError, TypeConfig, Vote};

impl Db {
    pub(super) fn purged(&self) -> Result<Option<LogId>, DbError> {
        self.meta_get(KEY_PURGED)
    }

    /// The entry that every snapshot must hold: the last one that is, or at start will be, removed from the
    /// log.
    pub(super) fn log_begins_after(&self) -> Result<Option<LogId>, DbError> {
        let log = self.log_state()?;
        let applied = self.read(|view| view.applied())?.last;
        // A log that ends before what is applied is cut to that at start.
        Ok(if log.last_log_id < applied {
            applied
        } else {
            log.last_purged_log_id
        })
    }

    /// Visits all entries in order.
    pub(super) fn for_each_entry(&self, mut visit: impl FnMut(u64, Entry)) -> Result<(), DbError> {
        for item in self
            .rocks
            .iterator_cf(&self.family(LOG), IteratorMode::Start)
        {
            let (key, value) = item?;
            visit(index_of(&key)?, decode("a log entry", &value)?);
        }
        Ok(())
    }

    fn entries(&self, start: u64, end: Option<u64>) -> Result<Vec<Entry>, DbError> {
        let mut found = Vec::new();
        let from = start.to_be_bytes();
        for item in self.rocks.iterator_cf(
            &self.family(LOG),
            IteratorMode::From(&from, Direction::Forward),
        ) {
            let (key, value) = item?;
            if end.is_some_and(|end| index_of(&key).is_ok_and(|index| index >= end)) {
                break;
            }
            found.push(decode("a log entry", &value)?);
        }
        Ok(found)
    }

    pub(super) fn log_state(&self) -> Result<LogState<TypeConfig>, DbError> {
        let last_purged_log_id = self.purged()?;
        let last = self
            .rocks
            .iterator_cf(&self.family(LOG), IteratorMode::End)
            .next()
            .transpose()?;
        let last_log_id = match last {
            Some((_, value)) => Some(decode::<Entry>("a log entry", &value)?.log_id),
            None => last_purged_log_id,
        };
        Ok(LogState {
            last_purged_log_id,
            last_log_id,
        })
    }

    pub(super) fn append_entries(&self, entries: &[Entry]) -> Result<(), DbError> {
        let mut batch = WriteBatch::default();
        let family = self.family(LOG);
        for entry in entries {
            batch.put_cf(&family, entry.log_id.index.to_be_bytes(), encode(entry));
        }
        self.write(batch, Sync::Yes)
    }

    /// Removes entries from `index` on. Synced like an append: what replaces them must not meet them again.
    fn truncate_from(&self, index: u64) -> Result<(), DbError> {
        let mut batch = WriteBatch::default();
        let family = self.family(LOG);
        batch.delete_range_cf(&family, index.to_be_bytes(), u64::MAX.to_be_bytes());
        self.write(batch, Sync::Yes)
    }

    /// Removes entries up to `id`, which a snapshot holds.
    pub(crate) fn purge_to(&self, id: LogId) -> Result<(), DbError> {
        let mut batch = WriteBatch::default();
        let family = self.family(LOG);
        batch.delete_range_cf(&family, 0_u64.to_be_bytes(), (id.index + 1).to_be_bytes());
        batch.put_cf(&self.family(META), KEY_PURGED, encode(&id));
        self.write(batch, Sync::No)
    }
}

fn index_of(key: &[u8]) -> Result<u64, DbError> {
    let bytes: [u8; 8] = key.try_into().map_err(|_| DbError::Damaged {
        what: "the key of a log entry".to_owned(),
        detail: format!("it has {} bytes", key.len()),
    })?;
    Ok(u64::from_be_bytes(bytes))
}

/// Runs blocking database work off the threads that run tasks.
pub(super) async fn blocking<T: Send + 'static>(
    subject: ErrorSubject<crate::ids::NodeId>,
    verb: ErrorVerb,
    work: impl FnOnce() -> Result<T, DbError> + Send + 'static,
) -> Result<T, StorageError> {
    let result = tokio::task::spawn_blocking(work).await;
    match result {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(StorageIOError::new(subject, verb, AnyError::new(&error)).into()),
        Err(error) => Err(StorageIOError::new(subject, verb, AnyError::new(&error)).into()),
    }
}

/// Runs work that changes the database, again and again while it finds no space: it must not mind.
pub(super) async fn lasting<T: Send + 'static>(
    db: &Arc<Db>,
    subject: ErrorSubject<crate::ids::NodeId>,
    verb: ErrorVerb,
    work: impl Fn(&Db) -> Result<T, DbError> + Send + std::marker::Sync + 'static,
) -> Result<T, StorageError> {
    let work = Arc::new(work);
    let mut waited = false;
    loop {
        let (attempt, on) = (Arc::clone(&work), Arc::clone(db));
        let error = match tokio::task::spawn_blocking(move || attempt(&on)).await {
            Ok(Ok(value)) => {
                if waited {
                    db.space_was_found();
                }
                return Ok(value);
            }
            Ok(Err(error)) => error,
            Err(error) => {
                return Err(StorageIOError::new(subject, verb, AnyError::new(&error)).into());
            }
        };
        if !db.may_try_again(&error).await {
            return Err(StorageIOError::new(subject, verb, AnyError::new(&error)).into());
        }
        waited = true;
    }
}

/// The log of this node, as openraft uses it.
#[derive(Clone)]
pub(crate) struct LogStore {
    db: Arc<Db>,
}

impl LogStore {
    pub(crate) fn new(db: Arc<Db>) -> Self {
        Self { db }
    }

    async fn blocking<T: Send + 'static>(
        &self,
        subject: ErrorSubject<crate::ids::NodeId>,
        verb: ErrorVerb,
        work: impl FnOnce(&Db) -> Result<T, DbError> + Send + 'static,
    ) -> Result<T, StorageError> {
        let db = Arc::clone(&self.db);
        blocking(subject, verb, move || work(&db)).await
    }

    async fn lasting<T: Send + 'static>(
        &self,
        subject: ErrorSubject<crate::ids::NodeId>,
        verb: ErrorVerb,
        work: impl Fn(&Db) -> Result<T, DbError> + Send + std::marker::Sync + 'static,
    ) -> Result<T, StorageError> {
        lasting(&self.db, subject, verb, work).await
    }
}

impl RaftLogReader<TypeConfig> for LogStore {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> Result<Vec<Entry>, StorageError> {
        let start = match range.start_bound() {
            Bound::Included(start) => *start,
            Bound::Excluded(start) => start + 1,
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(end) => Some(end + 1),
            Bound::Excluded(end) => Some(*end),
            Bound::Unbounded => None,
        };
        self.blocking(ErrorSubject::Logs, ErrorVerb::Read, move |db| {
            db.entries(start, end)
        })
        .await
    }
}

impl RaftLogStorage<TypeConfig> for LogStore {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> Result<LogState<TypeConfig>, StorageError> {
        self.blocking(ErrorSubject::Logs, ErrorVerb::Read, Db::log_state)
            .await
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> Result<(), StorageError> {
        let vote = *vote;
        let save = move |db: &Db| db.meta_put(KEY_VOTE, &vote, Sync::Yes);
        self.lasting(ErrorSubject::Vote, ErrorVerb::Write, save)
            .await
    }

    async fn read_vote(&mut self) -> Result<Option<Vote>, StorageError> {
        self.blocking(ErrorSubject::Vote, ErrorVerb::Read, |db| {
            db.meta_get(KEY_VOTE)
        })
        .await
    }

    async fn save_committed(&mut self, committed: Option<LogId>) -> Result<(), StorageError> {
        // Advisory: a leader commits again what its log holds, so losing the last one to power loss loses
        // nothing.
        let save = move |db: &Db| db.meta_put(KEY_COMMITTED, &committed, Sync::No);
        self.lasting(ErrorSubject::Store, ErrorVerb::Write, save)
            .await
    }

    async fn read_committed(&mut self) -> Result<Option<LogId>, StorageError> {
        let read = |db: &Db| Ok(db.meta_get::<Option<LogId>>(KEY_COMMITTED)?.flatten());
        self.blocking(ErrorSubject::Store, ErrorVerb::Read, read)
            .await
    }

    async fn append<I>(
        &mut self,
        entries: I,
        callback: LogFlushed<TypeConfig>,
    ) -> Result<(), StorageError>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let entries: Vec<Entry> = entries.into_iter().collect();
        self.lasting(ErrorSubject::Logs, ErrorVerb::Write, move |db| {
            db.append_entries(&entries)
        })
        .await?;
        callback.log_io_completed(Ok(()));
        Ok(())
    }

    async fn truncate(&mut self, log_id: LogId) -> Result<(), StorageError> {
        let cut = move |db: &Db| db.truncate_from(log_id.index);
        self.lasting(ErrorSubject::Log(log_id), ErrorVerb::Delete, cut)
            .await
    }

    async fn purge(&mut self, log_id: LogId) -> Result<(), StorageError> {
        let subject = ErrorSubject::Log(log_id);
        let refused = |error: DbError| {
            StorageIOError::new(subject.clone(), ErrorVerb::Delete, AnyError::new(&error))
        };
        self.db.may_purge(log_id.index).await.map_err(refused)?;
        self.lasting(subject.clone(), ErrorVerb::Delete, move |db| {
            db.purge_to(log_id)
        })
        .await
    }
}
