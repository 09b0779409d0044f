//! Nodes: registered, heard of or not, emptied, removed.

use std::collections::BTreeSet;

use super::map::{cluster, named, next_epoch, place_all, place_all_at, require_node};
use super::tables::{
    ATTACHMENTS, DEVICES, FILESYSTEM_ATTACHMENTS, NODES, PLACEMENT_GROUPS, POOLS, REMOVED_NODES,
    VOLUMES_BY_POOL,
};
use super::{
    Read, ReadError, Stop, Txn, attachment, event, filesystem, filesystem_attachment, loss,
    placement,
};
use crate::command::{AttachmentKey, NodeSpec, Outcome};
use crate::ids::{DeviceId, Incarnation, NodeId, UnixMillis};
use crate::model::{
    AdminState, Device, EventKind, Node, NodeState, PlacementGroup, Pool, Role, STARTS_MAX,
};
use crate::refusal::{MAX_ADDRESS_BYTES, MapRefusal, NamedNode, name};

pub(super) fn register(
    txn: &mut Txn<'_>,
    spec: &NodeSpec,
    replaces: Incarnation,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    let level = cluster(txn)?.level;
    if spec.level < level {
        return Err(MapRefusal::TooOld {
            node: spec.id,
            name: spec.name.clone(),
            knows: spec.level,
            level,
        }
        .into());
    }
    check(txn, spec)?;
    if REMOVED_NODES.get(txn, &spec.id)?.is_some() {
        let (node, name) = (spec.id, spec.name.clone());
        return Err(MapRefusal::WasRemoved { node, name }.into());
    }
    let old = NODES.get(txn, &spec.id)?;
    let known = old.as_ref().map_or(replaces, |node| node.incarnation);
    if known != spec.incarnation && known != replaces {
        let node = NamedNode::from(spec.name.as_str());
        let claimed = spec.incarnation;
        return Err(MapRefusal::OtherStart {
            node,
            known,
            claimed,
        }
        .into());
    }
    let node = Node {
        id: spec.id,
        name: name(&spec.name)?,
        roles: spec.roles.clone(),
        granted: granted(old.as_ref(), spec),
        incarnation: spec.incarnation,
        state: NodeState::Up,
        admin_state: active_again(old.as_ref()),
        labels: spec.labels.clone(),
        control_address: spec.control_address.clone(),
        data_address: spec.data_address.clone(),
        version: spec.version.clone(),
        boot: spec.boot.clone(),
        starts: starts(old.as_ref(), spec),
        joined_at: old.as_ref().map_or(at, |node| node.joined_at),
    };
    if old.as_ref() == Some(&node) {
        return Ok(Outcome::Node(node));
    }
    NODES.put(txn, &node.id, &node);
    if let Some(what) = event_of(old.as_ref(), &node) {
        event::push(txn, at, what)?;
    }
    let is_back = old.as_ref().is_some_and(|old| old.state == NodeState::Down);
    let moves = old.is_some_and(|old| {
        (old.admin_state, &old.labels, &old.roles) != (node.admin_state, &node.labels, &node.roles)
    });
    let moves = moves || (is_back && lacks_members(txn)?);
    if moves {
        place_all(txn)?;
    } else {
        next_epoch(txn)?;
    }
    Ok(Outcome::Node(node))
}

/// What a registration tells of the node.
fn event_of(old: Option<&Node>, node: &Node) -> Option<EventKind> {
    let (id, start) = (node.id, node.incarnation);
    match old {
        None => Some(EventKind::NodeJoined { node: id }),
        Some(old) if !old.incarnation.has_begun() && start.has_begun() => {
            Some(EventKind::NodeUp { node: id })
        }
        Some(old) if old.incarnation != start => Some(EventKind::NodeRestarted { node: id }),
        Some(_) => None,
    }
}

/// Roles that the node may have: kept as they were when it was let in. No token let the first node in: it may
/// have the roles that it started with.
fn granted(old: Option<&Node>, spec: &NodeSpec) -> BTreeSet<Role> {
    match old {
        None => spec.granted.clone(),
        Some(old) if old.granted.is_empty() => old.roles.clone(),
        Some(old) => old.granted.clone(),
    }
}

/// The starts since the boot that this one belongs to.
fn starts(old: Option<&Node>, spec: &NodeSpec) -> Vec<Incarnation> {
    let same_boot = |old: &&Node| !spec.boot.is_empty() && old.boot == spec.boot;
    let mut starts = old
        .filter(same_boot)
        .map_or_else(Vec::new, |old| old.starts.clone());
    if starts.last() != Some(&spec.incarnation) {
        starts.push(spec.incarnation);
    }
    let forgotten = starts.len().saturating_sub(STARTS_MAX);
    starts.drain(..forgotten);
    starts
}

/// Who was only away takes its share again.
fn active_again(node: Option<&Node>) -> AdminState {
    match node.map(|node| node.admin_state) {
        Some(AdminState::Draining) => AdminState::Draining,
        Some(AdminState::Active | AdminState::Absent) | None => AdminState::Active,
    }
}

fn check(view: &dyn Read, spec: &NodeSpec) -> Result<(), Stop> {
    let name_of = name(&spec.name)?;
    if spec.roles.is_empty() {
        let node = NamedNode::from(spec.name.as_str());
        return Err(MapRefusal::NoRole { node }.into());
    }
    let mut nodes = NODES.all(view)?.into_iter();
    if let Some(other) = nodes.find(|other| other.name == name_of && other.id != spec.id) {
        let (name, holder) = (name_of.into(), other.id);
        return Err(MapRefusal::NodeNameTaken { name, holder }.into());
    }
    for label in [&spec.labels.host, &spec.labels.rack].into_iter().flatten() {
        name(label)?;
    }
    let texts = [
        &spec.control_address,
        &spec.data_address,
        &spec.version,
        &spec.boot,
    ];
    if let Some(text) = texts
        .into_iter()
        .find(|text| text.len() > MAX_ADDRESS_BYTES)
    {
        let node = NamedNode::from(spec.name.as_str());
        let text = text.chars().take(32).collect();
        return Err(MapRefusal::LongAddress { node, text }.into());
    }
    Ok(())
}

pub(super) fn set_state(
    txn: &mut Txn<'_>,
    id: NodeId,
    incarnation: Incarnation,
    state: NodeState,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    let mut node = require_node(txn, id)?;
    if node.incarnation != incarnation {
        return Err(MapRefusal::OtherStart {
            node: NamedNode::from(node.name.as_str()),
            known: node.incarnation,
            claimed: incarnation,
        }
        .into());
    }
    if node.state == state {
        return Ok(Outcome::Node(node));
    }
    node.state = state;
    let admin_state = node.admin_state;
    if state == NodeState::Up {
        node.admin_state = active_again(Some(&node));
    }
    NODES.put(txn, &id, &node);
    let what = match state {
        NodeState::Up => Some(EventKind::NodeUp { node: id }),
        // Who was let in and has yet to start was not up before.
        NodeState::Down => incarnation
            .has_begun()
            .then_some(EventKind::NodeDown { node: id }),
    };
    if let Some(what) = what {
        event::push(txn, at, what)?;
    }
    if node.admin_state != admin_state || (state == NodeState::Up && lacks_members(txn)?) {
        place_all(txn)?;
    } else {
        next_epoch(txn)?;
    }
    Ok(Outcome::Node(node))
}

/// Whether a group has fewer members than it should have, for want of devices while it was placed: a node
/// that is there again may take the share that nobody took.
fn lacks_members(view: &dyn Read) -> Result<bool, ReadError> {
    for pool in POOLS.all(view)? {
        let groups = PLACEMENT_GROUPS.all_below(view, &pool.id)?;
        let lacks = |group: &PlacementGroup| group.wanted().count() < usize::from(pool.replicas);
        if groups.iter().any(lacks) {
            return Ok(true);
        }
    }
    Ok(false)
}

pub(super) fn set_admin_state(
    txn: &mut Txn<'_>,
    id: NodeId,
    admin_state: AdminState,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    let mut node = require_node(txn, id)?;
    // A node to be emptied stays that when it is away; one that is there is not absent.
    let moot = admin_state == AdminState::Absent
        && (node.admin_state == AdminState::Draining || node.state == NodeState::Up);
    if node.admin_state == admin_state || moot {
        return Ok(Outcome::Node(node));
    }
    if admin_state == AdminState::Draining {
        check_room_without(txn, id)?;
    }
    node.admin_state = admin_state;
    NODES.put(txn, &id, &node);
    let what = match admin_state {
        AdminState::Active => Some(EventKind::NodeActive { node: id }),
        // Who has yet to start has no share.
        AdminState::Absent => node
            .incarnation
            .has_begun()
            .then_some(EventKind::NodeReplaced { node: id }),
        AdminState::Draining => Some(EventKind::NodeDraining { node: id }),
    };
    if let Some(what) = what {
        event::push(txn, at, what)?;
    }
    place_all(txn)?;
    Ok(Outcome::Node(node))
}

pub(super) fn pools_with_data(view: &dyn Read) -> Result<Vec<Pool>, Stop> {
    let mut found = Vec::new();
    for pool in POOLS.all(view)? {
        if VOLUMES_BY_POOL.first_below(view, &pool.id)?.is_some() {
            found.push(pool);
        }
    }
    Ok(found)
}

/// Emptying a node must not leave a pool with fewer replicas than it has now: there would be no end to it.
fn check_room_without(view: &dyn Read, id: NodeId) -> Result<(), Stop> {
    match shortage_without(view, |device| device.node == id)? {
        None => Ok(()),
        Some((pool, possible)) => Err(MapRefusal::TooFewLeft {
            node: named(view, id)?,
            pool: pool.name.into(),
            possible,
            replicas: pool.replicas,
            apart: pool.failure_domain.to_string(),
        }
        .into()),
    }
}

/// The same of a device.
pub(super) fn check_room_without_device(view: &dyn Read, id: DeviceId) -> Result<(), Stop> {
    match shortage_without(view, |device| device.id == id)? {
        None => Ok(()),
        Some((pool, possible)) => Err(MapRefusal::TooFewDevicesLeft {
            device: id,
            pool: pool.name.into(),
            possible,
            replicas: pool.replicas,
            apart: pool.failure_domain.to_string(),
        }
        .into()),
    }
}

/// A pool with volumes that could place fewer replicas than now without some devices, and how many.
fn shortage_without(
    view: &dyn Read,
    is_left_out: impl Fn(&Device) -> bool,
) -> Result<Option<(Pool, usize)>, Stop> {
    let nodes = super::map::nodes_by_id(view)?;
    let all = DEVICES.all(view)?;
    let mut rest = all.clone();
    rest.retain(|device| !is_left_out(device));
    for pool in pools_with_data(view)? {
        let capacity = |devices: &[Device]| {
            let candidates = placement::candidates(&pool, devices, &nodes);
            placement::domains(&candidates).min(usize::from(pool.replicas))
        };
        let possible = capacity(&rest);
        if possible < capacity(&all) {
            return Ok(Some((pool, possible)));
        }
    }
    Ok(None)
}

/// Manner of a node's removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Removal {
    /// The node is down, or serves no guests.
    Unused,
    /// The node is down, and data that only it holds is given up.
    Lost,
    /// The node may be up and serve guests. Its attachments are deleted.
    Evicted,
}

/// Removes a node.
///
/// Leases that it holds stay in its name until they have run out: they are not renewed any more, and a node
/// that learns of its removal late reads no stale data until then. From this epoch of the map on, replicas
/// refuse whatever the node sends.
pub(super) fn remove(
    txn: &mut Txn<'_>,
    id: NodeId,
    how: Removal,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    let node = require_node(txn, id)?;
    if NODES.all(txn)?.len() == 1 {
        let node = named(txn, id)?;
        return Err(MapRefusal::LastNode { node }.into());
    }
    let mut devices = DEVICES.all(txn)?;
    devices.retain(|device| device.node == id);
    let mut attachments = ATTACHMENTS.all(txn)?;
    attachments.retain(|attachment| attachment.node == id);
    let mut mounts = FILESYSTEM_ATTACHMENTS.all(txn)?;
    mounts.retain(|mount| mount.node == id);
    if node.state == NodeState::Up && how != Removal::Evicted {
        let sockets = attachments.iter().map(|one| &one.socket);
        let mut sockets = sockets.chain(mounts.iter().map(|one| &one.socket));
        if let Some(socket) = sockets.next().cloned() {
            let node = named(txn, id)?;
            return Err(MapRefusal::NodeServes { node, socket }.into());
        }
    }
    let ids: Vec<DeviceId> = devices.iter().map(|device| device.id).collect();
    let epoch = next_epoch(txn)?;
    let given = if how == Removal::Lost && node.state == NodeState::Down {
        loss::give_up(txn, &ids, epoch)?
    } else {
        filesystem::require_no_vote(txn, &node)?;
        check_data(txn, &node, &ids)?;
        Vec::new()
    };
    for attachment in attachments {
        attachment::delete(txn, &AttachmentKey::Id(attachment.id))?;
    }
    for mount in mounts {
        filesystem_attachment::delete(txn, &AttachmentKey::Id(mount.id))?;
    }
    for device in &devices {
        DEVICES.delete(txn, &device.id);
    }
    NODES.delete(txn, &id);
    REMOVED_NODES.put(txn, &id, &at);
    let what = match how {
        Removal::Evicted => EventKind::NodeEvicted { node: id },
        Removal::Unused | Removal::Lost => EventKind::NodeRemoved { node: id },
    };
    event::push(txn, at, what)?;
    place_all_at(txn, epoch)?;
    loss::complete(txn, given, (id, None), (epoch, at))?;
    Ok(Outcome::Node(node))
}

/// A node that is up must be empty; of one that is down all data must be elsewhere.
fn check_data(view: &dyn Read, node: &Node, ids: &[DeviceId]) -> Result<(), Stop> {
    if node.state == NodeState::Down {
        let culprit = format!("node '{}'", node.name);
        return loss::refuse_while_others_are_away(view, ids, &culprit);
    }
    for pool in pools_with_data(view)? {
        let groups = PLACEMENT_GROUPS.all_below(view, &pool.id)?;
        let mut members = groups.iter().flat_map(|group| &group.members);
        if members.any(|member| ids.contains(&member.device)) {
            let (node, pool) = (named(view, node.id)?, pool.name.into());
            return Err(MapRefusal::NodeInUse { node, pool }.into());
        }
    }
    Ok(())
}
