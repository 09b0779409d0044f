//! A node that was alone becomes the first of a cluster: its metadata get the address by which others reach
//! it. What they say of volumes, devices and filesystems stays as it is.

use std::collections::BTreeMap;
use std::path::Path;

use uuid::Uuid;

use crate::error::OpenError;
use crate::ids::NodeId;
use crate::model::Device;
use crate::recovery::{RecoveryError, groups_voted_in, open};
use crate::state::tables::DEVICES;
use crate::storage::{Db, DbError};

/// What a node has that is alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alone {
    /// The cluster that it is. It keeps this identity.
    pub cluster: Uuid,
    /// The node.
    pub node: NodeId,
    /// The history of its metadata, after a recovery.
    pub history: Option<Uuid>,
    /// Its devices.
    pub devices: Vec<Device>,
}

/// What the node has whose metadata are in `dir`; nothing if there are none. Changes nothing.
///
/// # Errors
/// They are in use or damaged, or those of a node of a cluster of several.
pub fn look(dir: &Path) -> Result<Option<Alone>, RecoveryError> {
    if !Db::exists(dir) {
        return Ok(None);
    }
    let db = open(dir)?;
    let Some(identity) = db.identity()? else {
        // Its first start was cut short before anything was in them.
        return Ok(None);
    };
    let mut members = db.group.members()?.into_iter();
    if members.any(|(node, address)| node != identity.node || !address.is_empty()) {
        let (dir, found) = (dir.to_owned(), identity.node);
        return Err(OpenError::OneOfSeveral { dir, found }.into());
    }
    Ok(Some(Alone {
        cluster: identity.cluster,
        node: identity.node,
        history: identity.history,
        devices: db.read(|view| Ok::<_, DbError>(DEVICES.all(view)?))?,
    }))
}

fn corrupt(dir: &Path) -> impl Fn(DbError) -> OpenError + Copy {
    |error| OpenError::Corrupt {
        dir: dir.to_owned(),
        detail: error.to_string(),
    }
}

fn alone(node: NodeId) -> BTreeMap<NodeId, String> {
    BTreeMap::from([(node, String::new())])
}

/// Gives a node that was alone the address by which others reach it; nothing happens to others. For a start
/// of the first node of a cluster, before its groups run. A crash may come at any time: the next start does
/// what is left.
///
/// # Errors
/// The metadata cannot be read or written.
pub(crate) fn give_address(
    (db, dir): (&Db, &Path),
    node: NodeId,
    address: &str,
) -> Result<(), OpenError> {
    let corrupt = corrupt(dir);
    if db.group.members().map_err(corrupt)? != alone(node) {
        return Ok(());
    }
    // The metadata's own group last: it says whether all of it is done.
    let give = || {
        for (_, group) in groups_voted_in(db, node)? {
            group.go_on_alone(node, address, None)?;
            group.flush_wal()?;
        }
        db.group.go_on_alone(node, address, None)?;
        db.group.flush_wal()
    };
    give().map_err(corrupt)
}
