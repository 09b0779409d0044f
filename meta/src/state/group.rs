//! The rules by which members of placement groups change their state; `docs/REPLICATION.md` says why.
//!
//! **Architecture Invariant:** a group that holds data and has had a member in sync always has one. A member
//! comes to be in sync only by `promote`, by `choose_authority`, or by being placed into a pool that holds
//! no data; and it is promoted only as the start of its process, and in the round, that began to be synced.
//! There is one exception, `loss`: an operator gives all members in sync up.

use super::map::cluster;
use super::tables::{DEVICES, NODES, PLACEMENT_GROUPS, POOL_HEALTH, POOLS};
use super::{Read, ReadError, Stop, Txn, within};
use crate::command::{Change, Heard, Outcome};
use crate::ids::{DeviceId, Epoch, Incarnation, NodeId};
use crate::model::{
    Device, DeviceState, GroupId, Member, Node, NodeState, PlacementGroup, Pool, PoolHealth,
    ReplicaState,
};
use crate::refusal::{GroupRefusal, Refusal};

/// What has become of the process that a member was when it came to its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Presence {
    /// It serves the device, as far as is known.
    Valid,
    /// It is the same one as far as is known, but its node is down or the device offline.
    Silent,
    /// Another start serves the device.
    Returned(NodeId, Incarnation),
    /// Another start has registered, and does not serve the device (yet), or is down.
    Restarting,
    /// The device failed, or is not in the cluster any more.
    Gone,
}

/// Compares a member with what is known of its device and node.
pub(super) fn presence(view: &dyn Read, member: &Member) -> Result<Presence, ReadError> {
    let device = DEVICES.get(view, &member.device)?;
    let node = match &device {
        Some(device) => NODES.get(view, &device.node)?,
        None => None,
    };
    Ok(presence_of(member, device.as_ref(), node.as_ref()))
}

/// The same with its device, and that device's node, at hand.
pub(crate) fn presence_of(
    member: &Member,
    device: Option<&Device>,
    node: Option<&Node>,
) -> Presence {
    let device = device.filter(|device| device.state != DeviceState::Failed);
    let (Some(device), Some(node)) = (device, node) else {
        return Presence::Gone;
    };
    let there = node.state == NodeState::Up && device.state == DeviceState::Online;
    let same = member.node == node.id && member.incarnation == node.incarnation;
    match (same, there) {
        (true, true) => Presence::Valid,
        (true, false) => Presence::Silent,
        (false, true) if device.incarnation == node.incarnation => {
            Presence::Returned(node.id, node.incarnation)
        }
        (false, _) => Presence::Restarting,
    }
}

pub(super) fn load(view: &dyn Read, group: GroupId) -> Result<PlacementGroup, Stop> {
    Ok(PLACEMENT_GROUPS
        .get(view, &(group.pool, group.index))?
        .ok_or(GroupRefusal::Unknown { group })?)
}

/// Writes a group back if it changed, with the epoch of the change and without members that may go.
pub(super) fn save(
    txn: &mut Txn<'_>,
    pool: &Pool,
    old: Option<&PlacementGroup>,
    mut new: PlacementGroup,
    epoch: Epoch,
) -> Result<PlacementGroup, ReadError> {
    let_go(txn, &mut new)?;
    if old.is_some_and(|old| old.members == new.members) {
        return Ok(new);
    }
    new.epoch = epoch;
    let mut health = POOL_HEALTH.get(txn, &pool.id)?.unwrap_or_default();
    if let Some(old) = old {
        count(&mut health, pool, old, -1);
    }
    count(&mut health, pool, &new, 1);
    health.power_lost = health.power_lost.max(new.power_lost);
    POOL_HEALTH.put(txn, &pool.id, &health);
    PLACEMENT_GROUPS.put(txn, &(new.pool, new.index), &new);
    Ok(new)
}

/// The pool's groups, counted anew.
fn counted(view: &dyn Read, pool: &Pool) -> Result<PoolHealth, ReadError> {
    let mut health = PoolHealth::default();
    for group in PLACEMENT_GROUPS.all_below(view, &pool.id)? {
        count(&mut health, pool, &group, 1);
    }
    Ok(health)
}

/// All groups of a pool whose numbers of replicas have changed begin a new period: clients take a group's
/// numbers in with its epoch.
pub(super) fn renew_all(txn: &mut Txn<'_>, pool: &Pool, epoch: Epoch) -> Result<(), ReadError> {
    let power_lost = POOL_HEALTH
        .get(txn, &pool.id)?
        .map_or(Epoch(0), |health| health.power_lost);
    for mut group in PLACEMENT_GROUPS.all_below(txn, &pool.id)? {
        group.epoch = epoch;
        PLACEMENT_GROUPS.put(txn, &(group.pool, group.index), &group);
    }
    let health = PoolHealth {
        power_lost,
        ..counted(txn, pool)?
    };
    POOL_HEALTH.put(txn, &pool.id, &health);
    Ok(())
}

fn count(health: &mut PoolHealth, pool: &Pool, group: &PlacementGroup, sign: i32) {
    let add = |count: &mut u32, is: bool| {
        *count = count.saturating_add_signed(i32::from(is) * sign);
    };
    let in_sync = group.in_sync().count();
    add(&mut health.degraded, in_sync < usize::from(pool.replicas));
    add(&mut health.waiting, in_sync < usize::from(pool.min_in_sync));
    let moving = group.members.iter().any(|member| member.leaving);
    add(&mut health.moving, moving);
}

/// A member whose place is taken goes at once unless it is in sync, and else when those that stay all are,
/// and are there.
fn let_go(view: &dyn Read, group: &mut PlacementGroup) -> Result<(), ReadError> {
    let mut others_hold_all = group.wanted().next().is_some();
    for member in group.wanted() {
        others_hold_all &= member.is_in_sync() && presence(view, member)? == Presence::Valid;
    }
    let stays = |member: &Member| {
        !member.leaving || (member.state == ReplicaState::InSync && !others_hold_all)
    };
    group.members.retain(stays);
    Ok(())
}

fn pool_of(view: &dyn Read, group: GroupId) -> Result<Pool, Stop> {
    let pools = POOLS.all(view)?;
    let pool = pools.into_iter().find(|pool| pool.id == group.pool);
    Ok(pool.ok_or(GroupRefusal::Unknown { group })?)
}

fn position(group: &PlacementGroup, device: DeviceId) -> Result<usize, GroupRefusal> {
    let found = group
        .members
        .iter()
        .position(|member| member.device == device);
    found.ok_or(GroupRefusal::NotMember {
        group: group.id(),
        device,
    })
}

/// The epoch that a change of the map would have.
fn coming_epoch(view: &dyn Read) -> Result<Epoch, Stop> {
    Ok(Epoch(cluster(view)?.epoch.0 + 1))
}

/// Saves a changed group, and begins a new version of the map if it did change.
fn commit(
    txn: &mut Txn<'_>,
    old: &PlacementGroup,
    new: PlacementGroup,
    epoch: Epoch,
) -> Result<PlacementGroup, Stop> {
    let pool = pool_of(txn, old.id())?;
    let saved = save(txn, &pool, Some(old), new, epoch)?;
    if saved.epoch == epoch {
        super::map::set_epoch(txn, epoch)?;
    }
    Ok(saved)
}

/// A client says that a member failed it. Granted, the write that it failed may be acknowledged without it.
pub(super) fn report_failed(
    txn: &mut Txn<'_>,
    id: GroupId,
    device: DeviceId,
    incarnation: Incarnation,
    seen: Epoch,
    heard: &[Heard],
) -> Result<Outcome, Stop> {
    let epoch = coming_epoch(txn)?;
    let group = load(txn, id)?;
    let member = &group.members[position(&group, device)?];
    if member.state == ReplicaState::Out {
        return Ok(Outcome::Group(group));
    }
    check_start(id, member, incarnation)?;
    if seen < member.since {
        let (group, since) = (id, member.since);
        return Err(GroupRefusal::StaleReport {
            group,
            device,
            since,
            epoch: seen,
        }
        .into());
    }
    let new = taken_out(txn, &group, device, heard, epoch)?;
    commit(txn, &group, new, epoch).map(Outcome::Group)
}

fn check_start(group: GroupId, member: &Member, claimed: Incarnation) -> Result<(), GroupRefusal> {
    if member.incarnation == claimed {
        return Ok(());
    }
    Err(GroupRefusal::OtherStart {
        group,
        device: member.device,
        known: member.incarnation,
        claimed,
    })
}

/// The group without the member's state. One in sync goes only if another, valid one is known to be alive.
fn taken_out(
    view: &dyn Read,
    group: &PlacementGroup,
    device: DeviceId,
    heard: &[Heard],
    epoch: Epoch,
) -> Result<PlacementGroup, Stop> {
    let mut new = group.clone();
    let index = position(group, device)?;
    if group.members[index].is_in_sync() {
        let mut witnessed = false;
        for other in group.in_sync().filter(|other| other.device != device) {
            let alive = heard
                .iter()
                .any(|one| one.node == other.node && one.incarnation == other.incarnation);
            witnessed |= alive && presence(view, other)? == Presence::Valid;
        }
        if !witnessed {
            let group = group.id();
            return Err(GroupRefusal::LastInSync { group, device }.into());
        }
    }
    put_out(&mut new.members[index], epoch);
    Ok(new)
}

/// It is sent nothing any more.
pub(super) fn put_out(member: &mut Member, epoch: Epoch) {
    if member.is_in_sync() {
        member.in_sync_until = epoch;
    }
    member.state = ReplicaState::Out;
    member.since = epoch;
}

/// Several changes that the leader decided on, each granted or refused by itself.
pub(super) fn regroup(
    txn: &mut Txn<'_>,
    changes: &[Change],
    heard: &[Heard],
) -> Result<Outcome, Stop> {
    let epoch = coming_epoch(txn)?;
    let mut refused: Vec<Refusal> = Vec::new();
    let mut granted = 0;
    for change in changes {
        let group = match load(txn, change.group()) {
            Ok(group) => group,
            Err(Stop::Refused(refusal)) => {
                refused.push(refusal);
                continue;
            }
            Err(stop) => return Err(stop),
        };
        match changed(txn, &group, change, heard, epoch) {
            Ok(new) => {
                commit(txn, &group, new, epoch)?;
                granted += 1;
            }
            Err(Stop::Refused(refusal)) => refused.push(refusal),
            Err(stop) => return Err(stop),
        }
    }
    Ok(Outcome::Regrouped { granted, refused })
}

fn changed(
    view: &dyn Read,
    group: &PlacementGroup,
    change: &Change,
    heard: &[Heard],
    epoch: Epoch,
) -> Result<PlacementGroup, Stop> {
    match change {
        Change::Demote {
            device,
            incarnation,
            ..
        } => demoted(view, group, *device, *incarnation, heard, epoch),
        Change::ChooseAuthority {
            device,
            incarnation,
            after_grace,
            ..
        } => {
            let index = position(group, *device)?;
            check_choose_authority(view, group, index, *incarnation, *after_grace)?;
            let node = returned(view, &group.members[index])?;
            let node = node.ok_or(GroupRefusal::NotServed {
                device: *device,
                incarnation: *incarnation,
            })?;
            Ok(with_authority(view, group, index, node, epoch)?)
        }
        Change::StartSync {
            device,
            incarnation,
            ..
        } => sync_started(view, group, *device, *incarnation, epoch),
        // Saving it does that.
        Change::LetGo { .. } => Ok(group.clone()),
    }
}

fn demoted(
    view: &dyn Read,
    group: &PlacementGroup,
    device: DeviceId,
    incarnation: Incarnation,
    heard: &[Heard],
    epoch: Epoch,
) -> Result<PlacementGroup, Stop> {
    let member = &group.members[position(group, device)?];
    if member.state == ReplicaState::Out {
        return Ok(group.clone());
    }
    check_start(group.id(), member, incarnation)?;
    if presence(view, member)? == Presence::Valid {
        let group = group.id();
        return Err(GroupRefusal::NothingWrong { group, device }.into());
    }
    taken_out(view, group, device, heard, epoch)
}

/// The start of a process that serves the member's device now, if it is another one.
fn returned(view: &dyn Read, member: &Member) -> Result<Option<(NodeId, Incarnation)>, ReadError> {
    Ok(match presence(view, member)? {
        Presence::Returned(node, incarnation) => Some((node, incarnation)),
        _ => None,
    })
}

/// The start of a process that serves the member's device now, whichever it is.
pub(super) fn served_by(view: &dyn Read, member: &Member) -> Result<Option<Node>, ReadError> {
    let Some(device) = DEVICES.get(view, &member.device)? else {
        return Ok(None);
    };
    let node = NODES.get(view, &device.node)?;
    Ok(node.filter(|node| is_served(&device, node)))
}

/// Whether a node that is up serves the device.
pub(crate) fn is_served(device: &Device, node: &Node) -> bool {
    device.state == DeviceState::Online
        && node.state == NodeState::Up
        && device.incarnation == node.incarnation
}

fn check_choose_authority(
    view: &dyn Read,
    group: &PlacementGroup,
    authority: usize,
    incarnation: Incarnation,
    after_grace: bool,
) -> Result<(), Stop> {
    let id = group.id();
    let member = &group.members[authority];
    let device = member.device;
    if !member.is_in_sync() {
        return Err(GroupRefusal::NotInSync { group: id, device }.into());
    }
    for other in group.in_sync() {
        let device = other.device;
        match presence(view, other)? {
            Presence::Valid => {
                return Err(GroupRefusal::StillValid { group: id, device }.into());
            }
            Presence::Returned(..) => {}
            Presence::Silent | Presence::Restarting | Presence::Gone if after_grace => {}
            Presence::Silent | Presence::Restarting | Presence::Gone => {
                return Err(GroupRefusal::NotAllReturned { group: id, device }.into());
            }
        }
    }
    match returned(view, member)? {
        Some((_, found)) if found == incarnation => Ok(()),
        _ => Err(GroupRefusal::NotServed {
            device,
            incarnation,
        }
        .into()),
    }
}

/// With `authority`, in its present start, as the only replica that counts.
fn with_authority(
    view: &dyn Read,
    group: &PlacementGroup,
    authority: usize,
    (node, incarnation): (NodeId, Incarnation),
    epoch: Epoch,
) -> Result<PlacementGroup, ReadError> {
    let mut new = group.clone();
    let was = &group.members[authority];
    let now = NODES.get(view, &node)?;
    if !now.is_some_and(|now| kept_power(was, &now)) {
        new.power_lost = epoch;
    }
    for (index, member) in new.members.iter_mut().enumerate() {
        if index == authority {
            (member.node, member.incarnation) = (node, incarnation);
            member.since = epoch;
        } else if member.state != ReplicaState::Out {
            put_out(member, epoch);
        }
    }
    Ok(new)
}

/// Whether a member that has come back has everything that it took, flushed or not.
pub(crate) fn kept_power(member: &Member, now: &Node) -> bool {
    member.node == now.id && now.kept_power_since(member.incarnation)
}

/// After a device was registered by a new start of its node: in groups where with it all members in sync have
/// come back, one of them is made the authority. No clock is needed to know that nobody else can come.
pub(super) fn choose_authority_if_complete(
    view: &dyn Read,
    group: &PlacementGroup,
    epoch: Epoch,
) -> Result<Option<PlacementGroup>, ReadError> {
    let mut authority: Option<(bool, usize, (NodeId, Incarnation))> = None;
    for (index, member) in group.members.iter().enumerate() {
        if !member.is_in_sync() {
            continue;
        }
        let Some(process) = returned(view, member)? else {
            return Ok(None);
        };
        let now = NODES.get(view, &process.0)?;
        // One that kept power lacks nothing.
        let rank = now.is_some_and(|now| kept_power(member, &now));
        if authority.is_none_or(|(best, ..)| rank && !best) {
            authority = Some((rank, index, process));
        }
    }
    authority
        .map(|(_, index, process)| with_authority(view, group, index, process, epoch))
        .transpose()
}

fn sync_started(
    view: &dyn Read,
    group: &PlacementGroup,
    device: DeviceId,
    incarnation: Incarnation,
    epoch: Epoch,
) -> Result<PlacementGroup, Stop> {
    let index = position(group, device)?;
    if group.members[index].state != ReplicaState::Out || group.members[index].leaving {
        let group = group.id();
        return Err(GroupRefusal::NotOut { group, device }.into());
    }
    let not_served = GroupRefusal::NotServed {
        device,
        incarnation,
    };
    let found = DEVICES
        .get(view, &device)?
        .filter(|found| found.state == DeviceState::Online && found.incarnation == incarnation);
    let Some(found) = found else {
        return Err(not_served.into());
    };
    let node = NODES
        .get(view, &found.node)?
        .filter(|node| node.state == NodeState::Up && node.incarnation == incarnation);
    let Some(node) = node else {
        return Err(not_served.into());
    };
    within::check_sync(view, group, node.id, device)?;
    if !has_valid_source(view, group)? {
        return Err(GroupRefusal::NoSource { group: group.id() }.into());
    }
    let mut new = group.clone();
    new.members[index] = Member {
        device,
        node: node.id,
        incarnation,
        state: ReplicaState::Syncing,
        since: epoch,
        leaving: false,
        in_sync_until: group.members[index].in_sync_until,
    };
    Ok(new)
}

fn has_valid_source(view: &dyn Read, group: &PlacementGroup) -> Result<bool, ReadError> {
    for member in group.in_sync() {
        if presence(view, member)? == Presence::Valid {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A syncing replica says that it has compared everything.
pub(super) fn promote(
    txn: &mut Txn<'_>,
    id: GroupId,
    device: DeviceId,
    incarnation: Incarnation,
    since: Epoch,
) -> Result<Outcome, Stop> {
    let epoch = coming_epoch(txn)?;
    let group = load(txn, id)?;
    let index = position(&group, device)?;
    let member = &group.members[index];
    check_start(id, member, incarnation)?;
    if member.since != since || member.state == ReplicaState::Out {
        let group = id;
        return Err(GroupRefusal::NotSyncing {
            group,
            device,
            since,
        }
        .into());
    }
    if member.is_in_sync() {
        // Said twice, because the first answer was lost.
        return Ok(Outcome::Group(group));
    }
    if presence(txn, member)? != Presence::Valid {
        return Err(GroupRefusal::NotServed {
            device,
            incarnation,
        }
        .into());
    }
    let mut new = group.clone();
    new.members[index].state = ReplicaState::InSync;
    within::take_place(&mut new, index, epoch);
    commit(txn, &group, new, epoch).map(Outcome::Group)
}

/// Whether the group would keep a replica in sync without the devices of a node.
pub(super) fn survives_without(
    view: &dyn Read,
    group: &PlacementGroup,
    devices: &[DeviceId],
) -> Result<bool, ReadError> {
    let mut others = group
        .in_sync()
        .filter(|member| !devices.contains(&member.device));
    others.try_fold(false, |found, member| {
        Ok(found || presence(view, member)? == Presence::Valid)
    })
}
