//! Filesystems, and the Raft groups that keep their names.

use namespace::FilesystemId;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::Name;
use crate::ids::{NamespaceGroupId, NodeId, PoolId, UnixMillis};

/// A filesystem. Its inodes and names are in its namespace group's records.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filesystem {
    /// Its number, never used again.
    pub id: FilesystemId,
    /// Its name.
    pub name: Name,
    /// Identity, drawn by whoever asked for it.
    pub uuid: Uuid,
    /// The pool that its data lie in.
    pub pool: PoolId,
    /// The group that keeps its names.
    pub group: NamespaceGroupId,
    /// When it was made.
    pub created_at: UnixMillis,
}

/// A Raft group that keeps the namespaces of some filesystems.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceGroup {
    /// Its number.
    pub id: NamespaceGroupId,
    /// The nodes that begin it.
    pub founders: Vec<NodeId>,
    /// The nodes that vote in it, and those that are about to or did a moment ago. Exactly, the group itself
    /// knows.
    pub voters: Vec<NodeId>,
    /// Whether it has had a leader: from then on no node begins it again.
    pub is_founded: bool,
}
