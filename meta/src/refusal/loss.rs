//! Why data are not given up.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::RefusalKind;
use crate::ids::DeviceId;
use crate::model::GroupId;

/// Refusals to lose data.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossRefusal {
    /// Nobody else has it, not even somebody who may come back.
    #[error(
        "only {culprit} has what was written last in {groups} placement groups of {}: bring it back; if it \
         is gone for good, \
         repeat this with --accept-data-loss, which gives those writes up and goes on with what others \
         have{}",
        Volumes(.volumes, *.others), Orphans(*.orphans)
    )]
    WouldLose {
        /// What people call the node or device.
        culprit: String,
        /// Groups whose replicas in sync are all there.
        groups: usize,
        /// Of those, the ones of which no other replica is known to have been in sync.
        orphans: usize,
        /// Volumes in their pools, the first ones.
        volumes: Vec<String>,
        /// Further ones.
        others: usize,
    },
    /// One that is away may lack less than any that is there.
    #[error(
        "device {device} of node '{node}' may have newer data in placement group {group} than any that is \
         there: start that \
         node; if it is gone for good, too, remove it first with --accept-data-loss"
    )]
    NewerAway {
        /// The group.
        group: GroupId,
        /// The device that may have them.
        device: DeviceId,
        /// Its node.
        node: String,
    },
    /// The group could not even be made anew.
    #[error(
        "no device that is there can take over placement group {group}: start a node, or add one"
    )]
    NobodyLeft {
        /// The group.
        group: GroupId,
    },
    /// Nothing need be lost.
    #[error(
        "device {device} is served by its node, and nothing on it need be lost: repeat without \
         --accept-data-loss, which moves \
         its data first"
    )]
    Served {
        /// The device.
        device: DeviceId,
    },
}

impl LossRefusal {
    pub(super) fn kind(&self) -> RefusalKind {
        RefusalKind::Conflict
    }
}

/// `volumes "a", "b" and 3 more`.
struct Volumes<'a>(&'a [String], usize);

impl fmt::Display for Volumes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(named, others) = self;
        let is_one = named.len() + others == 1;
        f.write_str(if is_one { "volume " } else { "volumes " })?;
        for (index, name) in named.iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            write!(f, "{comma}{name:?}")?;
        }
        match others {
            0 => Ok(()),
            others => write!(f, " and {others} more"),
        }
    }
}

/// What has no replica at all.
struct Orphans(usize);

impl fmt::Display for Orphans {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            count => write!(
                f,
                "; of {count} of these groups no other replica is known to have been complete, so all that \
                 these held is lost"
            ),
        }
    }
}
