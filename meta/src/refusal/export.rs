//! Why an NFS export is not made, moved or deleted.

use serde::{Deserialize, Serialize};

use super::{NamedNode, RefusalKind};

/// Most networks of clients of one export; more are refused.
pub const MAX_EXPORT_CLIENTS: usize = 64;
/// Longest network or address of an export, in bytes; a longer one is refused. IPv6 needs 43.
pub const MAX_EXPORT_TEXT_BYTES: usize = 64;

/// Refusals about NFS exports.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExportRefusal {
    /// Another export has the name.
    #[error("NFS export {name:?} exists already: choose another name, or delete it first")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// No export has the name.
    #[error("there is no NFS export {name:?}: see `penstock nfs export list`")]
    Unknown {
        /// The name.
        name: String,
    },
    /// Nobody could mount it.
    #[error("NFS export {name:?} has no clients: say who may mount it with --clients CIDR")]
    NoClients {
        /// The export.
        name: String,
    },
    /// Beyond [`MAX_EXPORT_CLIENTS`] or [`MAX_EXPORT_TEXT_BYTES`].
    #[error(
        "NFS export {name:?}: give at most {MAX_EXPORT_CLIENTS} networks of clients, each of at most \
         {MAX_EXPORT_TEXT_BYTES} characters"
    )]
    TooManyClients {
        /// The export.
        name: String,
    },
    /// The volume has an export.
    #[error(
        "volume {volume:?} is exported over NFS already, as {export:?}: a volume has one export"
    )]
    VolumeTaken {
        /// The volume.
        volume: String,
        /// Its export.
        export: String,
    },
    /// The address follows another export.
    #[error(
        "NFS export {name:?} cannot have address {address}: it is that of {export:?}; give each export its \
         own"
    )]
    AddressTaken {
        /// The export.
        name: String,
        /// The address.
        address: String,
        /// Whose it is.
        export: String,
    },
    /// The node does not serve clients outside of VMs.
    #[error(
        "node {node:?} is no NFS node: give it the role nfs in its configuration, or choose another node"
    )]
    NotNfsNode {
        /// The node.
        node: String,
    },
    /// The node is not heard of.
    #[error("node {node:?} is down: start it, or choose another NFS node")]
    NodeDown {
        /// The node.
        node: String,
    },
    /// The NFS node is up and serves the export.
    #[error("NFS export {name:?} stays on node {node}, which is up: nobody needs to take it over")]
    NodeUp {
        /// The export.
        name: String,
        /// Its NFS node.
        node: NamedNode,
    },
    /// Another NFS node has it by now.
    #[error("NFS export {name:?} is on node {node} by now: look at it and try again")]
    MovedMeanwhile {
        /// The export.
        name: String,
        /// Its NFS node.
        node: NamedNode,
    },
    /// It is not being deleted, or not by that node.
    #[error("NFS export {name:?} is not being deleted by that node")]
    NotWithdrawn {
        /// The export.
        name: String,
    },
}

impl ExportRefusal {
    pub(super) fn kind(&self) -> RefusalKind {
        match self {
            Self::NoClients { .. } | Self::TooManyClients { .. } => RefusalKind::Invalid,
            Self::Unknown { .. } => RefusalKind::NotFound,
            Self::NameTaken { .. }
            | Self::VolumeTaken { .. }
            | Self::AddressTaken { .. }
            | Self::NotNfsNode { .. }
            | Self::NodeDown { .. }
            | Self::NodeUp { .. }
            | Self::MovedMeanwhile { .. }
            | Self::NotWithdrawn { .. } => RefusalKind::Conflict,
        }
    }
}
