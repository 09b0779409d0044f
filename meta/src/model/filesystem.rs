//! Filesystems, what serves them to guests, and the Raft groups that keep their names.

use namespace::{FilesystemId, SegmentId};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::Name;
use crate::ids::{AttachmentId, NamespaceGroupId, NodeId, PoolId, UnixMillis};

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
    /// Life of the filesystem.
    pub state: FilesystemState,
    /// When it was made.
    pub created_at: UnixMillis,
}

/// Life of a filesystem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FilesystemState {
    /// Can be attached.
    Ready,
    /// Being deleted: its name is still taken until its names and segments are gone.
    Deleting,
    /// The nodes that kept its names are gone for good, with them: it can only be deleted.
    Lost,
}

/// Which segment of which filesystem a hidden volume is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SegmentOf {
    /// The filesystem.
    pub filesystem: FilesystemId,
    /// The segment.
    pub segment: SegmentId,
}

/// A vhost-user socket that serves one filesystem to one guest. Several may serve the same one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesystemAttachment {
    /// Its number, from the same counter as those of volumes' attachments.
    pub id: AttachmentId,
    /// The filesystem's number.
    pub filesystem: FilesystemId,
    /// The filesystem's name.
    pub name: Name,
    /// The node that serves it.
    pub node: NodeId,
    /// Absolute path of the socket on that node.
    pub socket: String,
    /// What the guest mounts it by.
    pub tag: String,
    /// Number of request queues offered.
    pub queues: u16,
    /// Whether the guest may only read.
    pub read_only: bool,
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
