//! Whose metadata these are.

use std::path::Path;

use uuid::Uuid;

use super::{MetaConfig, Start};
use crate::error::OpenError;
use crate::storage::{Db, DbError, Identity};

/// Finds out whose metadata these are, or writes it at the first start.
pub(super) fn identify(db: &Db, dir: &Path, config: &MetaConfig) -> Result<Uuid, OpenError> {
    let unreadable = |error: DbError| OpenError::Corrupt {
        dir: dir.to_owned(),
        detail: error.to_string(),
    };
    let configured = config.node.id;
    if let Some(found) = db.identity().map_err(unreadable)? {
        let is_alone = matches!(config.start, Start::NewCluster);
        if is_alone && (found.node != configured || has_peers(db).map_err(unreadable)?) {
            let (dir, found) = (dir.to_owned(), found.node);
            return Err(OpenError::OneOfSeveral { dir, found });
        }
        if found.node != configured {
            return Err(OpenError::OtherNode {
                dir: dir.to_owned(),
                found: found.node,
                configured,
            });
        }
        if let Start::Join { cluster } | Start::Found { cluster, .. } = config.start {
            if cluster != found.cluster {
                return Err(OpenError::OtherCluster {
                    dir: dir.to_owned(),
                    found: found.cluster,
                    configured: cluster,
                });
            }
        }
        if !is_alone && found.history != config.history {
            return Err(OpenError::OtherHistory {
                dir: dir.to_owned(),
                found: found.history.unwrap_or_default(),
                configured: config.history.unwrap_or_default(),
            });
        }
        return Ok(found.cluster);
    }
    let cluster = match config.start {
        Start::NewCluster => Uuid::new_v4(),
        Start::Join { cluster } | Start::Found { cluster, .. } => cluster,
    };
    db.set_identity(&Identity {
        node: configured,
        cluster,
        history: config.history,
    })
    .map_err(unreadable)?;
    Ok(cluster)
}

/// Whether the node was made to have peers: those reach it at an address.
fn has_peers(db: &Db) -> Result<bool, DbError> {
    let applied = db.read(|view| view.applied())?;
    let mut members = applied.membership.nodes();
    Ok(members.any(|(_, member)| !member.addr.is_empty()))
}
