//! The Raft log and votes.

use std::fmt::Debug;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use fabric_types::ids::NodeId;
use openraft::storage::{LogFlushed, RaftLogStorage};
use openraft::{
    AnyError, ErrorSubject, ErrorVerb, LogState, OptionalSend, RaftLogReader, StorageIOError,
};
use rocksdb::{Direction, IteratorMode, WriteBatch};

use super::database::{Database, Sync};
use super::error::DbError;
use super::format::{KEY_COMMITTED, KEY_PURGED, KEY_VOTE, META, encode};
use super::group::GroupStore;
use crate::config::{self, Entry, LogId, StorageError, TypeConfig, Vote};

impl GroupStore {
    pub(super) fn purged(&self) -> Result<Option<LogId>, DbError> {
        self.database.get(&self.names.key(KEY_PURGED))
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
        let rocks = &self.database.rocks;
        for item in rocks.iterator_cf(&self.log_family(), IteratorMode::Start) {
            let (key, value) = item?;
            visit(index_of(&key)?, decode_entry(&value)?);
        }
        Ok(())
    }

    fn entries(&self, start: u64, end: Option<u64>) -> Result<Vec<Entry>, DbError> {
        let mut found = Vec::new();
        let from = start.to_be_bytes();
        for item in self.database.rocks.iterator_cf(
            &self.log_family(),
            IteratorMode::From(&from, Direction::Forward),
        ) {
            let (key, value) = item?;
            if end.is_some_and(|end| index_of(&key).is_ok_and(|index| index >= end)) {
                break;
            }
            found.push(decode_entry(&value)?);
        }
        Ok(found)
    }

    pub(super) fn log_state(&self) -> Result<LogState<TypeConfig>, DbError> {
        let last_purged_log_id = self.purged()?;
        let rocks = &self.database.rocks;
        let mut entries = rocks.iterator_cf(&self.log_family(), IteratorMode::End);
        let last_log_id = match entries.next().transpose()? {
            Some((_, value)) => Some(decode_entry(&value)?.log_id),
            None => last_purged_log_id,
        };
        Ok(LogState {
            last_purged_log_id,
            last_log_id,
        })
    }

    pub(super) fn append_entries(&self, entries: &[Entry]) -> Result<(), DbError> {
        let mut batch = WriteBatch::default();
        let family = self.log_family();
        for entry in entries {
            let key = entry.log_id.index.to_be_bytes();
            batch.put_cf(&family, key, config::encode_entry(entry));
        }
        self.database.write(batch, Sync::Yes)
    }

    /// Removes entries from `index` on. Synced like an append: what replaces them must not meet them again.
    fn truncate_from(&self, index: u64) -> Result<(), DbError> {
        let mut batch = WriteBatch::default();
        let family = self.log_family();
        batch.delete_range_cf(&family, index.to_be_bytes(), u64::MAX.to_be_bytes());
        self.database.write(batch, Sync::Yes)
    }

    /// Removes entries up to `id`, which a snapshot or a backup holds.
    ///
    /// # Errors
    /// The database cannot be written.
    pub fn purge_to(&self, id: LogId) -> Result<(), DbError> {
        let mut batch = WriteBatch::default();
        let family = self.log_family();
        batch.delete_range_cf(&family, 0_u64.to_be_bytes(), (id.index + 1).to_be_bytes());
        let key = self.names.key(KEY_PURGED);
        batch.put_cf(&self.database.family(META), key, encode(&id));
        self.database.write(batch, Sync::No)
    }

    pub(super) fn vote(&self) -> Result<Option<Vote>, DbError> {
        self.database.get(&self.names.key(KEY_VOTE))
    }

    pub(super) fn set_vote(&self, vote: &Vote) -> Result<(), DbError> {
        let key = self.names.key(KEY_VOTE);
        self.database.put(&key, vote, Sync::Yes)
    }

    /// Advisory: a leader commits again what its log holds, so losing the last one to power loss loses
    /// nothing.
    fn set_committed(&self, committed: Option<LogId>) -> Result<(), DbError> {
        let key = self.names.key(KEY_COMMITTED);
        self.database.put(&key, &committed, Sync::No)
    }

    fn committed(&self) -> Result<Option<LogId>, DbError> {
        let key = self.names.key(KEY_COMMITTED);
        Ok(self.database.get::<Option<LogId>>(&key)?.flatten())
    }
}

fn decode_entry(bytes: &[u8]) -> Result<Entry, DbError> {
    config::decode_entry(bytes).map_err(|detail| DbError::Damaged {
        what: "a log entry".to_owned(),
        detail,
    })
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
    subject: ErrorSubject<NodeId>,
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
    database: &Database,
    subject: ErrorSubject<NodeId>,
    verb: ErrorVerb,
    work: impl Fn() -> Result<T, DbError> + Send + std::marker::Sync + 'static,
) -> Result<T, StorageError> {
    let work = Arc::new(work);
    let mut waited = false;
    loop {
        let attempt = Arc::clone(&work);
        let error = match tokio::task::spawn_blocking(move || attempt()).await {
            Ok(Ok(value)) => {
                if waited {
                    database.space_was_found();
                }
                return Ok(value);
            }
            Ok(Err(error)) => error,
            Err(error) => {
                return Err(StorageIOError::new(subject, verb, AnyError::new(&error)).into());
            }
        };
        if !database.may_try_again(&error).await {
            return Err(StorageIOError::new(subject, verb, AnyError::new(&error)).into());
        }
        waited = true;
    }
}

/// The log of a group on this node, as openraft uses it.
#[derive(Clone)]
pub(crate) struct LogStore {
    store: Arc<GroupStore>,
}

impl LogStore {
    pub(crate) fn new(store: Arc<GroupStore>) -> Self {
        Self { store }
    }

    async fn blocking<T: Send + 'static>(
        &self,
        subject: ErrorSubject<NodeId>,
        verb: ErrorVerb,
        work: impl FnOnce(&GroupStore) -> Result<T, DbError> + Send + 'static,
    ) -> Result<T, StorageError> {
        let store = Arc::clone(&self.store);
        blocking(subject, verb, move || work(&store)).await
    }

    async fn lasting<T: Send + 'static>(
        &self,
        subject: ErrorSubject<NodeId>,
        verb: ErrorVerb,
        work: impl Fn(&GroupStore) -> Result<T, DbError> + Send + std::marker::Sync + 'static,
    ) -> Result<T, StorageError> {
        let store = Arc::clone(&self.store);
        let database = &self.store.database;
        lasting(database, subject, verb, move || work(&store)).await
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
        let read = move |store: &GroupStore| store.entries(start, end);
        self.blocking(ErrorSubject::Logs, ErrorVerb::Read, read)
            .await
    }
}

impl RaftLogStorage<TypeConfig> for LogStore {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> Result<LogState<TypeConfig>, StorageError> {
        self.blocking(ErrorSubject::Logs, ErrorVerb::Read, GroupStore::log_state)
            .await
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> Result<(), StorageError> {
        let vote = *vote;
        let save = move |store: &GroupStore| store.set_vote(&vote);
        self.lasting(ErrorSubject::Vote, ErrorVerb::Write, save)
            .await
    }

    async fn read_vote(&mut self) -> Result<Option<Vote>, StorageError> {
        self.blocking(ErrorSubject::Vote, ErrorVerb::Read, GroupStore::vote)
            .await
    }

    async fn save_committed(&mut self, committed: Option<LogId>) -> Result<(), StorageError> {
        let save = move |store: &GroupStore| store.set_committed(committed);
        self.lasting(ErrorSubject::Store, ErrorVerb::Write, save)
            .await
    }

    async fn read_committed(&mut self) -> Result<Option<LogId>, StorageError> {
        self.blocking(ErrorSubject::Store, ErrorVerb::Read, GroupStore::committed)
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
        let entries: Vec<_> = entries.into_iter().collect();
        let append = move |store: &GroupStore| store.append_entries(&entries);
        self.lasting(ErrorSubject::Logs, ErrorVerb::Write, append)
            .await?;
        callback.log_io_completed(Ok(()));
        Ok(())
    }

    async fn truncate(&mut self, log_id: LogId) -> Result<(), StorageError> {
        let cut = move |store: &GroupStore| store.truncate_from(log_id.index);
        self.lasting(ErrorSubject::Log(log_id), ErrorVerb::Delete, cut)
            .await
    }

    async fn purge(&mut self, log_id: LogId) -> Result<(), StorageError> {
        let subject = ErrorSubject::Log(log_id);
        let refused = |error: DbError| {
            StorageIOError::new(subject.clone(), ErrorVerb::Delete, AnyError::new(&error))
        };
        let may = self.store.may_purge(log_id.index).await;
        may.map_err(refused)?;
        let purge = move |store: &GroupStore| store.purge_to(log_id);
        self.lasting(subject.clone(), ErrorVerb::Delete, purge)
            .await
    }
}
