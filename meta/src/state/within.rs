//! A group that moves from one device of a node to another: for that time both are its members. What the data
//! path does with them is in `docs/decisions/0005-placement.md`.
//!
//! **Architecture Invariant:** a node has at most one member of a group in sync, and besides at most one that
//! is syncing. So whoever reads the map knows which is meant by the node alone, and the one that comes.

use super::group::put_out;
use super::map::named;
use super::{Read, Stop};
use crate::ids::{DeviceId, Epoch, NodeId};
use crate::model::{Member, PlacementGroup};
use crate::refusal::GroupRefusal;

/// The group's other members that this node is sent writes for.
fn others(members: &[Member], node: NodeId, device: DeviceId) -> impl Iterator<Item = &Member> {
    members
        .iter()
        .filter(move |m| m.node == node && m.device != device && m.is_receiving())
}

/// Whether a device of this node may begin to be synced: it is the node's only one, or it takes the place of
/// one that leaves.
pub(crate) fn may_sync(group: &PlacementGroup, node: NodeId, device: DeviceId) -> bool {
    let leaves = |other: &Member| other.is_in_sync() && other.leaving;
    others(&group.members, node, device).all(leaves)
}

/// Refuses to begin the sync of a device that may not be synced.
pub(super) fn check_sync(
    view: &dyn Read,
    group: &PlacementGroup,
    node: NodeId,
    device: DeviceId,
) -> Result<(), Stop> {
    if may_sync(group, node, device) {
        return Ok(());
    }
    Err(GroupRefusal::SecondOnNode {
        group: group.id(),
        device,
        node: named(view, node)?,
    }
    .into())
}

/// The member of this index has come to be in sync: it is the node's from now on.
pub(super) fn take_place(group: &mut PlacementGroup, index: usize, epoch: Epoch) {
    let (node, device) = (group.members[index].node, group.members[index].device);
    let of_node = |m: &&mut Member| m.node == node && m.device != device && m.is_receiving();
    let replaced = group.members.iter_mut().filter(of_node);
    replaced.for_each(|member| put_out(member, epoch));
}
