//! The records of the cluster map's group in the database that the node's Raft groups share (crate
//! `raft-host`), and what others follow of them.

pub(crate) mod backup;
mod machine;
mod open;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::Arc;

use raft_host::{GroupStore, Sync};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use uuid::Uuid;

use crate::ids::NodeId;
use crate::layers::{LayerWrites, Layers};
use crate::level::Level;
use crate::map::ClusterMap;
use crate::state::Writes;
use crate::state::tables::{ATTACHMENTS, FILESYSTEM_ATTACHMENTS, LEASES, VOLUMES};

pub(crate) use raft_host::{Applied, Database, DbError, View};

/// Key of [`Identity`] among the node's values in the database.
const KEY_IDENTITY: &[u8] = b"identity";

/// Whose metadata these are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    pub(crate) node: NodeId,
    pub(crate) cluster: Uuid,
    /// See [`crate::recovery`]; none before the first recovery.
    pub(crate) history: Option<Uuid>,
}

/// The cluster map's group: its part of the database, and what others follow of its records.
pub(crate) struct Db {
    pub(crate) group: Arc<GroupStore>,
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
        self.group.database()
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

/// Returns the level of a map and the level that this program knows, if the former is higher. Records of a
/// higher level have a meaning that this program does not know.
fn newer_level(map: &ClusterMap) -> Option<(Level, Level)> {
    let (found, known) = (map.level(), Level::KNOWN);
    (found > known).then_some((found, known))
}

fn check_level(map: &ClusterMap) -> Result<(), DbError> {
    let Some((found, known)) = newer_level(map) else {
        return Ok(());
    };
    Err(DbError::Refused(format!(
        "this cluster has feature level {found}, and this program knows levels up to {known}: install a \
         newer version of penstock"
    )))
}
