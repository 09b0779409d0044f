//! Why a pool is not made, changed or deleted.

use serde::{Deserialize, Serialize};

use super::{MAX_PLACEMENT_GROUPS, MAX_REPLICAS, RefusalKind};
use crate::ids::PoolId;

/// Refusals about pools.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolRefusal {
    /// Another pool has the name.
    #[error("pool {name:?} exists already: choose another name")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// No pool has the name.
    #[error("there is no pool {name:?}: see `penstock pool list`")]
    Unknown {
        /// The name.
        name: String,
    },
    /// None, or more than [`MAX_REPLICAS`].
    #[error("pool {name:?} cannot have {replicas} replicas: give 1 to {MAX_REPLICAS}")]
    BadReplicas {
        /// The pool.
        name: String,
        /// The number asked for.
        replicas: u8,
    },
    /// None, or more than there are replicas.
    #[error(
        "pool {name:?} cannot require {min_in_sync} of {replicas} replicas in sync: give 1 to {replicas}"
    )]
    BadMinInSync {
        /// The pool.
        name: String,
        /// The number asked for.
        min_in_sync: u8,
        /// Replicas of the pool.
        replicas: u8,
    },
    /// More than there are in some placement group: its writes would stop.
    #[error(
        "pool {name:?} cannot require {min_in_sync} replicas in sync: some of its placement groups have \
         {least} now; wait until `penstock pool show` says that all are in sync"
    )]
    TooFewInSync {
        /// The pool.
        name: String,
        /// The number asked for.
        min_in_sync: u8,
        /// Replicas in sync of the placement group that has the fewest.
        least: usize,
    },
    /// None, or more than [`MAX_PLACEMENT_GROUPS`].
    #[error(
        "pool {name:?} cannot have {placement_groups} placement groups: give 1 to {MAX_PLACEMENT_GROUPS}"
    )]
    BadPlacementGroups {
        /// The pool.
        name: String,
        /// The number asked for.
        placement_groups: u32,
    },
    /// Numbers of pools are part of the numbers of layers, and these have run out.
    #[error(
        "pool {name:?} cannot be made: this cluster has had {} pools, deleted ones too, and can have no \
         more; use one \
         that exists",
        PoolId::MAX
    )]
    TooMany {
        /// The name.
        name: String,
    },
    /// Volumes lie in it.
    #[error("pool {name:?} is in use by volume {volume:?}: delete its volumes first")]
    InUse {
        /// The pool.
        name: String,
        /// One of its volumes.
        volume: String,
    },
    /// A filesystem's data lie in it.
    #[error("pool {name:?} is in use by filesystem {filesystem:?}: delete its filesystems first")]
    HasFilesystem {
        /// The pool.
        name: String,
        /// One of its filesystems.
        filesystem: String,
    },
    /// Nothing that people know of is in it any more.
    #[error(
        "pool {name:?} still gives back the space of a filesystem that was deleted: repeat in a moment"
    )]
    StillFreeing {
        /// The pool.
        name: String,
    },
    /// The pool that volumes without a pool go to.
    #[error("pool {name:?} is the default and stays: delete volumes instead")]
    IsDefault {
        /// The pool.
        name: String,
    },
    /// Fewer devices than writes need.
    #[error(
        "pool {name:?} has {available} usable device(s) and needs {needed} on different {apart}s: add one \
         with \
         `penstock device add`"
    )]
    TooFewDevices {
        /// The pool.
        name: String,
        /// Members of its emptiest placement group.
        available: usize,
        /// The pool's `min_in_sync`.
        needed: u8,
        /// `device`, `node`, `host` or `rack`.
        apart: String,
    },
}

impl PoolRefusal {
    pub(super) fn kind(&self) -> RefusalKind {
        match self {
            Self::BadReplicas { .. }
            | Self::BadMinInSync { .. }
            | Self::BadPlacementGroups { .. } => RefusalKind::Invalid,
            Self::Unknown { .. } => RefusalKind::NotFound,
            Self::NameTaken { .. }
            | Self::TooMany { .. }
            | Self::InUse { .. }
            | Self::HasFilesystem { .. }
            | Self::StillFreeing { .. }
            | Self::IsDefault { .. }
            | Self::TooFewInSync { .. }
            | Self::TooFewDevices { .. } => RefusalKind::Conflict,
        }
    }
}
