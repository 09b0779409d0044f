//! The RocksDB database that all Raft groups of a node share: one write-ahead log, so that one flush of it
//! makes durable what any of them wrote before.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rocksdb::{BoundColumnFamily, DBWithThreadMode, MultiThreaded, WriteBatch, WriteOptions};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{oneshot, watch};

use super::error::DbError;
use super::format::{META, decode, encode};

pub(super) type Rocks = DBWithThreadMode<MultiThreaded>;

/// Durability of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sync {
    /// It is on the device when the call returns.
    Yes,
    /// It has left the process when the call returns.
    No,
}

/// Space for writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SpaceState {
    Enough,
    /// A write waits.
    Full,
    /// The node ends, and no write waits any more.
    Closing,
}

/// The open database. Fields are dropped in order: when `_closed` goes, RocksDB has let go of its files.
pub struct Database {
    pub(super) rocks: Rocks,
    /// The families that were there when it was opened.
    pub(super) families: Vec<String>,
    dir: PathBuf,
    pub(super) space: watch::Sender<SpaceState>,
    _closed: oneshot::Sender<()>,
}

impl Database {
    /// A database of `dir`. The receiver learns when it is closed again.
    pub(super) fn new(
        rocks: Rocks,
        families: Vec<String>,
        dir: PathBuf,
    ) -> (Self, oneshot::Receiver<()>) {
        let (closed, on_closed) = oneshot::channel();
        let database = Self {
            rocks,
            families,
            dir,
            space: watch::Sender::new(SpaceState::Enough),
            _closed: closed,
        };
        (database, on_closed)
    }

    /// Directory of the database.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub(super) fn family(&self, name: &str) -> Arc<BoundColumnFamily<'_>> {
        self.rocks
            .cf_handle(name)
            .expect("families are made at open, and the state family while it is named")
    }

    /// Returns a value that the node stores about itself or one of its groups.
    ///
    /// # Errors
    /// The database cannot be read, or the value is damaged.
    pub fn get<T: DeserializeOwned>(&self, key: &[u8]) -> Result<Option<T>, DbError> {
        let value = self.rocks.get_pinned_cf(&self.family(META), key)?;
        value
            .map(|value| decode(&String::from_utf8_lossy(key), &value))
            .transpose()
    }

    /// Stores a value that the node keeps about itself or one of its groups.
    ///
    /// # Errors
    /// The database cannot be written.
    pub fn put<T: Serialize>(&self, key: &[u8], value: &T, sync: Sync) -> Result<(), DbError> {
        let mut batch = WriteBatch::default();
        batch.put_cf(&self.family(META), key, encode(value));
        self.write(batch, sync)
    }

    pub(super) fn write(&self, batch: WriteBatch, sync: Sync) -> Result<(), DbError> {
        let mut options = WriteOptions::default();
        options.set_sync(sync == Sync::Yes);
        Ok(self.rocks.write_opt(batch, &options)?)
    }
}
