//! A group that moves from one device of a node to another: for that time both are its members. What the data
//! path does with them is in `docs/decisions/0005-placement.md`.
//!
//! **Architecture Invariant:** from [`Level::WITHIN_NODES`] on, a node has at most one member of a group in
//! sync, and besides at most one that is syncing. So whoever reads the map knows which is meant by the node
//! alone, and the one that comes.
//!
//! Before that level the data path knows one member for each node, and leaves a second one waiting.

use super::group::{put_out, save};
use super::map::{cluster, named, next_epoch};
use super::tables::{PLACEMENT_GROUPS, POOLS};
use super::{Read, Stop, Txn};
use crate::ids::{DeviceId, Epoch, NodeId};
use crate::level::Level;
use crate::model::{Member, PlacementGroup, ReplicaState};
use crate::refusal::GroupRefusal;

/// The group's other members that this node is sent writes for.
fn others(members: &[Member], node: NodeId, device: DeviceId) -> impl Iterator<Item = &Member> {
    members
        .iter()
        .filter(move |m| m.node == node && m.device != device && m.is_receiving())
}

/// Whether a device of this node may begin to be synced at this feature level: it is the node's only one, or
/// the data path knows of second ones, and it takes the place of one that leaves.
pub(crate) fn may_sync(
    level: Level,
    group: &PlacementGroup,
    node: NodeId,
    device: DeviceId,
) -> bool {
    let is_known = level >= Level::WITHIN_NODES;
    let leaves = |other: &Member| is_known && other.is_in_sync() && other.leaving;
    others(&group.members, node, device).all(leaves)
}

/// The same when the state machine is asked to, which takes whatever it is told before that level.
pub(super) fn check_sync(
    view: &dyn Read,
    group: &PlacementGroup,
    node: NodeId,
    device: DeviceId,
) -> Result<(), Stop> {
    let level = cluster(view)?.level;
    if level < Level::WITHIN_NODES || may_sync(level, group, node, device) {
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
pub(super) fn take_place(
    view: &dyn Read,
    group: &mut PlacementGroup,
    index: usize,
    epoch: Epoch,
) -> Result<(), Stop> {
    if cluster(view)?.level < Level::WITHIN_NODES {
        return Ok(());
    }
    let (node, device) = (group.members[index].node, group.members[index].device);
    let of_node = |m: &&mut Member| m.node == node && m.device != device && m.is_receiving();
    let replaced = group.members.iter_mut().filter(of_node);
    replaced.for_each(|member| put_out(member, epoch));
    Ok(())
}

/// The data path begins to know of second members. It has not sent them anything so far: those that are
/// syncing begin anew, and those that count as in sync (in a pool of the failure domain `device`) never were.
pub(super) fn begin(txn: &mut Txn<'_>) -> Result<(), Stop> {
    let epoch = next_epoch(txn)?;
    for pool in POOLS.all(txn)? {
        for old in PLACEMENT_GROUPS.all_below(txn, &pool.id)? {
            let mut new = old.clone();
            for (nth, member) in new.members.iter_mut().enumerate() {
                let mut before = others(&old.members[..nth], member.node, member.device);
                let mut all = others(&old.members, member.node, member.device);
                let is_second = match member.state {
                    ReplicaState::InSync => before.any(Member::is_in_sync),
                    ReplicaState::Syncing => all.next().is_some(),
                    ReplicaState::Out => false,
                };
                if is_second && member.is_in_sync() {
                    put_out(member, epoch);
                    member.in_sync_until = Epoch::default();
                } else if is_second {
                    put_out(member, epoch);
                }
            }
            save(txn, &pool, Some(&old), new, epoch)?;
        }
    }
    Ok(())
}
