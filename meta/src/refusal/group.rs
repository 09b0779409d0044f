//! Why the state of a placement group's member does not change.

use serde::{Deserialize, Serialize};

use super::{NamedNode, RefusalKind};
use crate::ids::{DeviceId, Epoch, Incarnation};
use crate::model::GroupId;

/// Refusals about placement groups. They tell a component of the cluster what it does not know yet; it reads
/// the map anew and tries again, or gives up.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupRefusal {
    /// No such group.
    #[error("there is no placement group {group}: read the map anew")]
    Unknown {
        /// The group.
        group: GroupId,
    },
    /// The device has no part in it.
    #[error("device {device} is no member of placement group {group}: read the map anew")]
    NotMember {
        /// The group.
        group: GroupId,
        /// The device.
        device: DeviceId,
    },
    /// Another start of the process is known.
    #[error(
        "device {device} is in placement group {group} as start {known:x} of its node, not {claimed:x}: read \
         the map \
         anew", known = .known.0, claimed = .claimed.0
    )]
    OtherStart {
        /// The group.
        group: GroupId,
        /// The device.
        device: DeviceId,
        /// In the map.
        known: Incarnation,
        /// In the request.
        claimed: Incarnation,
    },
    /// The member was taken in again since.
    #[error(
        "device {device} joined placement group {group} at epoch {since}, and the report is based on the \
         older map of epoch {epoch}: read the map again"
    )]
    StaleReport {
        /// The group.
        group: GroupId,
        /// The device.
        device: DeviceId,
        /// When it was taken in.
        since: Epoch,
        /// What the reporter saw.
        epoch: Epoch,
    },
    /// Without it nobody known to be alive would hold every write.
    #[error(
        "device {device} stays in placement group {group}: no other replica in sync there has been heard of \
         since; \
         repeat in a moment"
    )]
    LastInSync {
        /// The group.
        group: GroupId,
        /// The device.
        device: DeviceId,
    },
    /// The member is as it should be.
    #[error(
        "device {device} stays in placement group {group}: nothing is known to be wrong with it"
    )]
    NothingWrong {
        /// The group.
        group: GroupId,
        /// The device.
        device: DeviceId,
    },
    /// Only a member that is out, and is to stay, begins to be synced.
    #[error("device {device} in placement group {group} is not waiting to be synced")]
    NotOut {
        /// The group.
        group: GroupId,
        /// The device.
        device: DeviceId,
    },
    /// Another device of the node is a member, and does not leave or is being synced itself.
    #[error(
        "device {device} is not synced into placement group {group}: another device of node {node} is, or \
         stays, its member"
    )]
    SecondOnNode {
        /// The group.
        group: GroupId,
        /// The device.
        device: DeviceId,
        /// Their node.
        node: NamedNode,
    },
    /// The device is not served by that start of its node.
    #[error(
        "device {device} is not served by start {incarnation:x} of a node that is \
         up", incarnation = .incarnation.0
    )]
    NotServed {
        /// The device.
        device: DeviceId,
        /// The start of the process that was named.
        incarnation: Incarnation,
    },
    /// Nobody to copy from.
    #[error("placement group {group} has no valid replica in sync to copy from")]
    NoSource {
        /// The group.
        group: GroupId,
    },
    /// Only a syncing member is promoted, and only in the round that it completed.
    #[error(
        "device {device} in placement group {group} is not syncing since epoch {since}: begin anew"
    )]
    NotSyncing {
        /// The group.
        group: GroupId,
        /// The device.
        device: DeviceId,
        /// The round that was named.
        since: Epoch,
    },
    /// A replica in sync is valid and needs nobody to replace it.
    #[error(
        "placement group {group} has a valid replica in sync on device {device}: it needs no other authority"
    )]
    StillValid {
        /// The group.
        group: GroupId,
        /// The valid one.
        device: DeviceId,
    },
    /// The authority must have been in sync.
    #[error(
        "device {device} was not in sync in placement group {group}: it cannot be the authority"
    )]
    NotInSync {
        /// The group.
        group: GroupId,
        /// The device.
        device: DeviceId,
    },
    /// Another replica in sync may still come back.
    #[error(
        "placement group {group} waits for device {device}, which was in sync and has not come back within \
         its grace time"
    )]
    NotAllReturned {
        /// The group.
        group: GroupId,
        /// The device that is missing.
        device: DeviceId,
    },
}

impl GroupRefusal {
    pub(super) fn kind(&self) -> RefusalKind {
        match self {
            Self::Unknown { .. } | Self::NotMember { .. } => RefusalKind::NotFound,
            _ => RefusalKind::Conflict,
        }
    }
}
