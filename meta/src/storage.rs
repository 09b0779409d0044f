//! The RocksDB database of a metadata node, which all of its Raft groups share.
//!
//! ```text
//! DIR/db/                    one RocksDB database
//!   column family `meta`     format, which state family counts, identity, vote, committed, purged
//!   column family `log`      Raft entries: index (8 bytes, big-endian) → JSON
//!   column family `state.N`  records of state.rs; under the byte 0x00 the last applied entry, membership
//!   column families `log.G`, `ns.G.N`  the same of namespace group G: postcard, its keys in `meta` begin
//!                            with `group.G.`
//! DIR/snapshots/N/           the current snapshot, see snapshot.rs
//! DIR/groups/G/N/            that of namespace group G
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
mod ballast;
pub(crate) mod database;
pub(crate) mod group;
mod history;
pub(crate) mod log;
pub(crate) mod machine;
mod open;
pub(crate) mod snapshot;
mod space;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use uuid::Uuid;

use crate::ids::NodeId;
use crate::layers::{LayerWrites, Layers};
use crate::level::Level;
use crate::map::ClusterMap;
use crate::raft::{LogId, StoredMembership, TypeConfig};
use crate::state::tables::{ATTACHMENTS, FILESYSTEM_ATTACHMENTS, LEASES, VOLUMES};
use crate::state::{ReadError, Writes};
use database::{Database, Sync};
use group::GroupStore;

pub(crate) use group::View;
pub(crate) use open::open_namespace_group;

const META: &str = "meta";
const LOG: &str = "log";
const STATE_PREFIX: &str = "state.";
const NAMESPACE_PREFIX: &str = "ns.";

const KEY_FORMAT: &[u8] = b"format";
const KEY_IDENTITY: &[u8] = b"identity";
// Of each group:
const KEY_STATE_FAMILY: &str = "state_family";
const KEY_VOTE: &str = "vote";
const KEY_COMMITTED: &str = "committed";
const KEY_PURGED: &str = "purged";

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
    pub(crate) history: Option<Uuid>,
}

/// How far the records have come. Lies among them, so that both change in one write.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Applied {
    pub(crate) last: Option<LogId>,
    pub(crate) membership: StoredMembership,
}

/// The cluster map's group: its part of the database, and what others follow of its records.
pub(crate) struct Db {
    pub(crate) group: GroupStore<TypeConfig>,
    /// The cluster map that the records hold, for whoever follows it.
    map: watch::Sender<Arc<ClusterMap>>,
    /// The layers likewise.
    layers: watch::Sender<Layers>,
    /// Counts the changes of volumes, leases and attachments.
    openings: watch::Sender<u64>,
}

impl Db {
    /// What it shares with the node's other groups.
    pub(crate) fn database(&self) -> &Arc<Database> {
        &self.group.database
    }

    /// The cluster map as it is applied here, now and from now on.
    pub(crate) fn map(&self) -> watch::Receiver<Arc<ClusterMap>> {
        self.map.subscribe()
    }

    pub(crate) fn layers(&self) -> watch::Receiver<Layers> {
        self.layers.subscribe()
    }

    /// Another number after every change of a volume, a lease or an attachment.
    pub(crate) fn openings(&self) -> watch::Receiver<u64> {
        self.openings.subscribe()
    }

    pub(crate) fn identity(&self) -> Result<Option<Identity>, DbError> {
        self.database().get(KEY_IDENTITY)
    }

    pub(crate) fn set_identity(&self, identity: &Identity) -> Result<(), DbError> {
        self.database().put(KEY_IDENTITY, identity, Sync::Yes)
    }

    /// Runs a function on a consistent view of the records.
    pub(crate) fn read<T, E: From<DbError>>(
        &self,
        read: impl FnOnce(&View<'_>) -> Result<T, E>,
    ) -> Result<T, E> {
        self.group.read(read)
    }

    /// Writes changed records together with how far they have come.
    pub(crate) fn write_records(&self, writes: Writes, applied: &Applied) -> Result<(), DbError> {
        let map = self.map.borrow().with(&writes)?;
        map.as_ref().map_or(Ok(()), check_level)?;
        let layers = LayerWrites::of(&writes)?;
        let opens = writes.keys().any(|key| opens(key));
        self.group.write_records(writes, applied)?;
        if let Some(map) = map {
            self.map.send_replace(Arc::new(map));
        }
        self.layers.send_if_modified(|known| known.apply(&layers));
        if opens {
            self.openings.send_modify(|count| *count += 1);
        }
        Ok(())
    }

    /// Replaces all records with those of an exported file, after checking that they are what `expected`
    /// says.
    pub(crate) fn replace_records(&self, file: &Path, expected: &Applied) -> Result<(), DbError> {
        let (map, layers) = self.group.replace_records(file, expected, |view| {
            let map = ClusterMap::load(view)?;
            check_level(&map)?;
            Ok((map, Layers::load(view)?))
        })?;
        self.map.send_replace(Arc::new(map));
        self.layers.send_modify(|known| known.replace(layers));
        self.openings.send_modify(|count| *count += 1);
        Ok(())
    }
}

/// Whether a record says which layers a node may reach.
fn opens(key: &[u8]) -> bool {
    let tables = [
        VOLUMES.prefix(),
        LEASES.prefix(),
        ATTACHMENTS.prefix(),
        FILESYSTEM_ATTACHMENTS.prefix(),
    ];
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

fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("stored values have text keys and finite numbers only")
}

fn decode<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T, DbError> {
    serde_json::from_slice(bytes).map_err(|error| DbError::Damaged {
        what: what.to_owned(),
        detail: error.to_string(),
    })
}
