//! Filesystems and their attachments in the admin API.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::AttachmentState;
use crate::moment::Moment;

/// A filesystem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Filesystem {
    /// Name, unique among the cluster's filesystems.
    pub name: String,
    /// Identity, a UUID.
    pub id: String,
    /// Pool that its files' data lie in.
    pub pool: String,
    /// State word.
    pub state: FilesystemState,
    /// Names of the nodes that keep its names of files: its metadata group.
    pub names_on: Vec<String>,
    /// Name of the one that leads them, as far as the node knows that was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leader: Option<String>,
    /// Files, directories and other inodes, the root included. Absent if the nodes that keep its names do not
    /// answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inodes: Option<u64>,
    /// Bytes of data that files name, each counted once; absent as before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub named_bytes: Option<u64>,
    /// Bytes of data that nothing names any more and that are still to be given back; absent as before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub freed_bytes: Option<u64>,
    /// Nodes that use it now; absent as before, and in listings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sessions: Option<Vec<FilesystemSession>>,
    /// Directories and files that nodes may answer about without asking the leader. Not in lists.
    pub capabilities: Option<u64>,
    /// Why something is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Its attachments on all nodes.
    pub attachments: Vec<FilesystemAttachment>,
    /// When it was made.
    pub created_at: Moment,
}

/// State word of a [`Filesystem`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum FilesystemState {
    /// It can be attached.
    Ready,
    /// Its files are being removed. Then its name is free again.
    Deleting,
    /// Its names are lost with the nodes that kept them: it can only be deleted.
    Lost,
}

impl FilesystemState {
    /// The word.
    pub fn word(self) -> &'static str {
        match self {
            FilesystemState::Ready => "ready",
            FilesystemState::Deleting => "deleting",
            FilesystemState::Lost => "lost",
        }
    }
}

/// A node that uses a [`Filesystem`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FilesystemSession {
    /// Name of the node.
    pub node: String,
    /// Since when.
    pub since: Moment,
}

/// Creates a filesystem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FilesystemCreate {
    /// Name of the new filesystem.
    pub name: String,
    /// Pool for its files' data; the default one if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
}

/// Attaches a filesystem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FilesystemAttach {
    /// Name of the filesystem.
    pub filesystem: String,
    /// Absolute path of the socket to listen on.
    pub socket: String,
    /// What the guest mounts it by: 1 to 36 bytes without newlines.
    pub tag: String,
    /// Request queues to offer, 1 to 64.
    #[serde(default = "request_queues_default")]
    pub queues: u16,
    /// Let the guest only read.
    #[serde(default)]
    pub read_only: bool,
}

/// Request queues offered when nothing is said: guests before Linux 6.11 use no more.
pub fn request_queues_default() -> u16 {
    1
}

/// An attachment of a filesystem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FilesystemAttachment {
    /// Name of the filesystem it serves.
    pub filesystem: String,
    /// The vhost-user socket.
    pub socket: String,
    /// Name of the node that the socket is on.
    pub node: String,
    /// What the guest mounts it by.
    pub tag: String,
    /// Request queues offered.
    pub queues: u16,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// State word.
    pub state: AttachmentState,
    /// How the last connection ended, if not by the guest's hanging up, or why it is not served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Query of a filesystem's detach.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct FilesystemDetachQuery {
    /// Socket of the attachment, or the name of its filesystem if that has one attachment on the node.
    pub target: String,
    /// Detach although a guest is connected.
    #[serde(default)]
    pub force: bool,
    /// Forget an attachment of another node that is down.
    #[serde(default)]
    pub forget: bool,
    /// Name or number of that node, if several have an attachment of this name.
    #[serde(default)]
    pub node: Option<String>,
}

/// An attachment of a filesystem that was ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FilesystemDetached {
    /// Name of the filesystem.
    pub filesystem: String,
    /// The vhost-user socket.
    pub socket: String,
    /// Name of the node.
    pub node: String,
}
