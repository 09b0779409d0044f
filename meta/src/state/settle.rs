//! A node that was alone becomes the first of a cluster. Alone, it kept each volume on one device as a whole,
//! whatever its placement groups said; in a cluster a chunk is looked for on the device that its group is on.
//! The node puts the chunks there first ([`crate::first`]), then each group has this device as its only
//! member.

use super::group::save;
use super::map::next_epoch;
use super::tables::{DEVICES, PLACEMENT_GROUPS, POOLS};
use super::{Stop, Txn};
use crate::command::Outcome;
use crate::ids::{DeviceId, Epoch, NodeId};
use crate::model::{Device, Member, PlacementGroup, ReplicaState};

/// The device that a group of a node that is alone is to be on: where it was placed last, although nothing
/// was moved there.
pub(crate) fn home(group: &PlacementGroup, devices: &[Device]) -> Option<DeviceId> {
    first(group.wanted(), devices).or_else(|| in_sync(group, devices))
}

/// The device among these that is in sync in a group.
pub(crate) fn in_sync(group: &PlacementGroup, devices: &[Device]) -> Option<DeviceId> {
    first(group.in_sync(), devices)
}

fn first<'a>(
    mut members: impl Iterator<Item = &'a Member>,
    devices: &[Device],
) -> Option<DeviceId> {
    let is_here = |member: &&Member| devices.iter().any(|device| device.id == member.device);
    members.find(is_here).map(|member| member.device)
}

/// The chunks of this node are on the homes of their groups.
pub(super) fn settle(txn: &mut Txn<'_>, node: NodeId) -> Result<Outcome, Stop> {
    let epoch = next_epoch(txn)?;
    let mut devices = DEVICES.all(txn)?;
    devices.retain(|device| device.node == node);
    for pool in POOLS.all(txn)? {
        for old in PLACEMENT_GROUPS.all_below(txn, &pool.id)? {
            let home = home(&old, &devices);
            let Some(device) = devices.iter().find(|one| Some(one.id) == home) else {
                continue;
            };
            let known = old.member(device.id).filter(|one| one.is_in_sync());
            let member = known.cloned().unwrap_or_else(|| new_member(device, epoch));
            let new = PlacementGroup {
                members: vec![Member {
                    leaving: false,
                    ..member
                }],
                ..old.clone()
            };
            save(txn, &pool, Some(&old), new, epoch)?;
        }
    }
    Ok(Outcome::Done)
}

fn new_member(device: &Device, epoch: Epoch) -> Member {
    Member {
        device: device.id,
        node: device.node,
        incarnation: device.incarnation,
        state: ReplicaState::InSync,
        since: epoch,
        leaving: false,
        in_sync_until: Epoch(0),
    }
}
