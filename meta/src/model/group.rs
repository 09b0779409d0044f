//! Placement groups and the state of their members. The rules by which they change are in
//! `state/group.rs`.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::{DeviceId, Epoch, Incarnation, NodeId, PgIndex, PoolId};

/// Names a placement group in the whole cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct GroupId {
    /// The pool it belongs to.
    pub pool: PoolId,
    /// Its index within the pool.
    pub index: PgIndex,
}

impl GroupId {
    /// One number for it: what goes over the wire.
    #[must_use]
    pub fn to_u64(self) -> u64 {
        u64::from(self.pool.0) << 32 | u64::from(self.index.0)
    }

    /// Back from that number.
    #[must_use]
    pub fn from_u64(number: u64) -> Self {
        Self {
            pool: PoolId((number >> 32) as u32),
            index: PgIndex(number as u32),
        }
    }
}

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.pool, self.index)
    }
}

/// What a member of a group has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReplicaState {
    /// Every acknowledged write. It may be read.
    InSync,
    /// Every write since [`Member::since`]; the rest is being compared. It is never read.
    Syncing,
    /// Nothing that counts. It is sent nothing.
    Out,
}

/// A device that holds, or is to hold, a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The device.
    pub device: DeviceId,
    /// The node that served it when it came to its state.
    pub node: NodeId,
    /// The start of that node's process; another one is not trusted.
    pub incarnation: Incarnation,
    /// What it has.
    pub state: ReplicaState,
    /// Epoch since when it is sent every write, or since when it is out.
    pub since: Epoch,
    /// Another device takes its place: it goes once the others are in sync.
    pub leaving: bool,
    /// Epoch at which it was in sync last, of one that is not: it held every acknowledged write until then.
    /// 0: it never was, or nobody knows.
    pub in_sync_until: Epoch,
}

impl Member {
    /// Whether it is sent writes.
    #[must_use]
    pub fn is_receiving(&self) -> bool {
        self.state != ReplicaState::Out
    }

    /// Whether it holds every acknowledged write.
    #[must_use]
    pub fn is_in_sync(&self) -> bool {
        self.state == ReplicaState::InSync
    }
}

/// A share of a pool's chunks with one ordered replica set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementGroup {
    /// The pool it belongs to.
    pub pool: PoolId,
    /// Its index within the pool.
    pub index: PgIndex,
    /// Epoch of its last change.
    pub epoch: Epoch,
    /// Devices that hold its chunks, in order of preference. Fewer than the pool's `replicas` while devices
    /// lack, more while some are leaving.
    pub members: Vec<Member>,
    /// Epoch since when writes may be missing that were acknowledged before it and not flushed: all replicas
    /// in sync had lost power. 0: never.
    pub power_lost: Epoch,
}

impl PlacementGroup {
    /// Its name.
    #[must_use]
    pub fn id(&self) -> GroupId {
        GroupId {
            pool: self.pool,
            index: self.index,
        }
    }

    /// The member on a device.
    #[must_use]
    pub fn member(&self, device: DeviceId) -> Option<&Member> {
        self.members.iter().find(|member| member.device == device)
    }

    /// The members that hold every acknowledged write.
    pub fn in_sync(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|member| member.is_in_sync())
    }

    /// The members that are to stay.
    pub fn wanted(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|member| !member.leaving)
    }
}

/// How the groups of a pool are, counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolHealth {
    /// Groups with fewer replicas in sync than the pool wants.
    pub degraded: u32,
    /// Groups with fewer replicas in sync than `min_in_sync`: their writes wait.
    pub waiting: u32,
    /// Groups that have a member which is leaving.
    pub moving: u32,
    /// The newest [`PlacementGroup::power_lost`].
    pub power_lost: Epoch,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_one_number_on_the_wire() {
        let id = GroupId {
            pool: PoolId(3),
            index: PgIndex(u32::MAX),
        };
        assert_eq!(GroupId::from_u64(id.to_u64()), id);
    }
}
