//! Changes of placement groups that the leader decides on, and the signs of life that speak for them.

use serde::{Deserialize, Serialize};

use crate::ids::{DeviceId, Incarnation, NodeId};
use crate::model::GroupId;

/// A start of a node's process that was heard of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heard {
    /// The node.
    pub node: NodeId,
    /// The start.
    pub incarnation: Incarnation,
}

/// A change of a group's members.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "to", rename_all = "snake_case")]
pub enum Change {
    /// A member that is not valid any more goes out, if another in sync was heard of.
    Demote {
        /// The group.
        group: GroupId,
        /// The member.
        device: DeviceId,
        /// The start of its process that is in the map.
        incarnation: Incarnation,
    },
    /// No member in sync is valid: one that has come back is made the authority.
    ChooseAuthority {
        /// The group.
        group: GroupId,
        /// The authority.
        device: DeviceId,
        /// The start of its process that serves it now.
        incarnation: Incarnation,
        /// Whether those that have not come back have had their grace time.
        after_grace: bool,
    },
    /// A member that is out begins to be synced.
    StartSync {
        /// The group.
        group: GroupId,
        /// The member.
        device: DeviceId,
        /// The start of its process that serves it now.
        incarnation: Incarnation,
    },
    /// Members whose places are taken go, if that may be by now.
    LetGo {
        /// The group.
        group: GroupId,
    },
}

impl Change {
    /// The group that it changes.
    #[must_use]
    pub fn group(&self) -> GroupId {
        match self {
            Self::Demote { group, .. }
            | Self::ChooseAuthority { group, .. }
            | Self::StartSync { group, .. }
            | Self::LetGo { group } => *group,
        }
    }
}
