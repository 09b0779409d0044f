//! Opening the database of the cluster map's group.

use std::path::Path;
use std::sync::Arc;

use raft_host::{Database, DatabaseError, DbError, GroupId, GroupStore};
use tokio::sync::{oneshot, watch};

use super::{Db, newer_level};
use crate::command::check_command;
use crate::error::OpenError;
use crate::ids::NamespaceGroupId;
use crate::layers::Layers;
use crate::map::ClusterMap;

impl Db {
    /// Returns whether there is a database in `dir`, intact or damaged.
    pub(crate) fn exists(dir: &Path) -> bool {
        Database::exists(dir)
    }

    /// Opens or makes the database in `dir`. The receiver is notified when it is closed again.
    ///
    /// # Errors
    /// In use, damaged, not accessible, or made by a newer version.
    pub(crate) fn open(dir: &Path) -> Result<(Self, oneshot::Receiver<()>), OpenError> {
        let (database, on_closed) = Database::open(dir).map_err(|error| explain(dir, error))?;
        let opened = GroupStore::open(database, GroupId::Main);
        let group = opened.map_err(|error| explain(dir, error.into()))?;
        let loaded = group.read(|view| {
            let map = ClusterMap::load(view)?;
            // Records of a newer level may not be readable.
            let layers = match newer_level(&map) {
                Some(_) => Layers::default(),
                None => Layers::load(view)?,
            };
            Ok::<_, DbError>((map, layers))
        });
        let (map, layers) = loaded.map_err(|error| explain(dir, error.into()))?;
        if let Some((found, known)) = newer_level(&map) {
            return Err(OpenError::NewerLevel {
                dir: dir.to_owned(),
                found,
                known,
            });
        }
        let checked = group.check_log(check_command);
        checked.map_err(|error| explain(dir, error.into()))?;
        let db = Self {
            group: Arc::new(group),
            map: watch::Sender::new(Arc::new(map)),
            layers: watch::Sender::new(layers),
            openings: watch::Sender::default(),
        };
        Ok((db, on_closed))
    }

    /// Namespace groups that were ever opened here.
    pub(crate) fn namespace_groups(&self) -> Vec<NamespaceGroupId> {
        let groups = self.database().numbered_groups();
        groups.into_iter().map(NamespaceGroupId).collect()
    }
}

fn explain(dir: &Path, error: DatabaseError) -> OpenError {
    let dir = dir.to_owned();
    match error {
        DatabaseError::Locked => OpenError::Locked { dir },
        DatabaseError::Io(detail) => OpenError::Io { dir, detail },
        DatabaseError::Corrupt(detail) => OpenError::Corrupt { dir, detail },
        DatabaseError::NewerFormat { found, known } => OpenError::NewerFormat { dir, found, known },
    }
}
