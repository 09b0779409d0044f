//! Why a filesystem is not made.

use serde::{Deserialize, Serialize};

use super::RefusalKind;

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
    /// Nobody could keep its names.
    #[error(
        "no node with the role meta is up and not draining, so nobody can keep the names of filesystem \
         {name:?}: start one"
    )]
    NoVoters {
        /// The name.
        name: String,
    },
    /// Some node does not know of filesystems.
    #[error(
        "filesystems can be made once all nodes of the cluster run this version: `penstock status` says \
         which do not"
    )]
    LevelTooLow,
}

impl FilesystemRefusal {
    pub(super) fn kind(&self) -> RefusalKind {
        match self {
            Self::Unknown { .. } => RefusalKind::NotFound,
            Self::NameTaken { .. } | Self::NoVoters { .. } | Self::LevelTooLow => {
                RefusalKind::Conflict
            }
        }
    }
}
