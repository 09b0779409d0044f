//! Why a filesystem is not made, used or deleted.

use namespace::FilesystemId;
use serde::{Deserialize, Serialize};

use super::{NamedNode, RefusalKind};

/// Refusals about filesystems.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FilesystemRefusal {
    /// Another filesystem has the name.
    #[error("filesystem {name:?} exists already: choose another name")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// No filesystem has the name.
    #[error("there is no filesystem {name:?}: see `penstock fs list`")]
    Unknown {
        /// The name.
        name: String,
    },
    /// No filesystem has the number.
    #[error("there is no filesystem with number {}: see `penstock fs list`", id.0)]
    UnknownId {
        /// The number.
        id: FilesystemId,
    },
    /// Its deletion has begun.
    #[error("filesystem {name:?} is being deleted: wait until `penstock fs list` shows it no more")]
    Deleting {
        /// The filesystem.
        name: String,
    },
    /// Nobody has its names any more.
    #[error(
        "filesystem {name:?} is lost: the metadata were recovered without the nodes that kept its names, or \
         from a backup, which holds none: delete it with `penstock fs delete`, and make it anew"
    )]
    Lost {
        /// The filesystem.
        name: String,
    },
    /// An attachment serves it.
    #[error(
        "filesystem {name:?} is in use at {socket:?} on node {node}: detach it first with `penstock detach \
         {socket}`"
    )]
    InUse {
        /// The filesystem.
        name: String,
        /// Socket of an attachment.
        socket: String,
        /// The attachment's node.
        node: NamedNode,
    },
    /// Its records were said to be gone although nobody deleted it.
    #[error("filesystem {name:?} is not being deleted: it stays")]
    NotDeleting {
        /// The filesystem.
        name: String,
    },
    /// Its deletion is not that far.
    #[error("filesystem {name:?} has volume {volume:?} still: delete its segments first")]
    HasSegment {
        /// The filesystem.
        name: String,
        /// The volume of one of its segments.
        volume: String,
    },
    /// Nobody could keep its names.
    #[error(
        "no node with the role meta is up and not draining, so nobody can keep the names of filesystem \
         {name:?}: start one"
    )]
    NoVoters {
        /// The name.
        name: String,
    },
}

impl FilesystemRefusal {
    pub(super) fn kind(&self) -> RefusalKind {
        match self {
            Self::Unknown { .. } | Self::UnknownId { .. } => RefusalKind::NotFound,
            Self::NameTaken { .. }
            | Self::Deleting { .. }
            | Self::Lost { .. }
            | Self::InUse { .. }
            | Self::NotDeleting { .. }
            | Self::HasSegment { .. }
            | Self::NoVoters { .. } => RefusalKind::Conflict,
        }
    }
}
