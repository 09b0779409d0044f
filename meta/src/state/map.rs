//! The cluster itself and its devices.

use std::collections::BTreeMap;
use std::path::Path;

use uuid::Uuid;

use super::tables::{CLUSTER, COUNTERS, DEVICES, NODES, PLACEMENT_GROUPS, POOLS, VOLUMES_BY_POOL};
use super::{Read, ReadError, Stop, Txn, event, group, loss, node, pool};
use crate::command::{DeviceSpec, NodeSpec, Outcome, PoolSpec};
use crate::ids::{DeviceId, Epoch, Incarnation, NodeId, UnixMillis};
use crate::level::Level;
use crate::model::{
    Cluster, DEFAULT_POOL, Device, DeviceState, EventKind, Node, PlacementGroup, Pool,
};
use crate::refusal::{LossRefusal, MAX_DEVICE_PATH_BYTES, MapRefusal, NamedNode, name};

/// The cluster's record, which is there after bootstrap.
pub(super) fn cluster(view: &dyn Read) -> Result<Cluster, Stop> {
    Ok(CLUSTER.get(view, &())?.ok_or(MapRefusal::NoCluster)?)
}

/// Begins a new version of the cluster map.
pub(super) fn next_epoch(txn: &mut Txn<'_>) -> Result<Epoch, Stop> {
    let epoch = Epoch(cluster(txn)?.epoch.0 + 1);
    set_epoch(txn, epoch)?;
    Ok(epoch)
}

/// Makes this the version of the cluster map, unless it is already.
pub(super) fn set_epoch(txn: &mut Txn<'_>, epoch: Epoch) -> Result<(), Stop> {
    let mut cluster = cluster(txn)?;
    assert!(cluster.epoch <= epoch, "epochs only grow");
    cluster.epoch = epoch;
    CLUSTER.put(txn, &(), &cluster);
    Ok(())
}

pub(super) fn nodes_by_id(view: &dyn Read) -> Result<BTreeMap<NodeId, Node>, ReadError> {
    let nodes = NODES.all(view)?;
    Ok(nodes.into_iter().map(|node| (node.id, node)).collect())
}

/// Takes a number from the counters.
pub(super) fn take_number<N: Copy + From<T>, T>(
    txn: &mut Txn<'_>,
    counter: impl FnOnce(&mut super::tables::Counters) -> &mut T,
) -> Result<N, ReadError>
where
    T: Copy + std::ops::AddAssign + From<u8>,
{
    let mut counters = COUNTERS.get(txn, &())?.unwrap_or_default();
    let next = counter(&mut counters);
    let taken = *next;
    *next += T::from(1);
    COUNTERS.put(txn, &(), &counters);
    Ok(N::from(taken))
}

pub(super) fn require_node(view: &dyn Read, node: NodeId) -> Result<Node, Stop> {
    Ok(NODES
        .get(view, &node)?
        .ok_or_else(|| MapRefusal::unknown_node(node))?)
}

/// Name of a node, or its number if it was removed.
pub(super) fn node_name(view: &dyn Read, id: NodeId) -> Result<String, ReadError> {
    let node = NODES.get(view, &id)?;
    Ok(node.map_or_else(|| id.to_string(), |node| node.name.into()))
}

/// Name of a node for a refusal; its number if it was removed.
pub(super) fn named(view: &dyn Read, id: NodeId) -> Result<NamedNode, ReadError> {
    let node = NODES.get(view, &id)?;
    Ok(node.map_or(NamedNode::Number(id), |node| {
        NamedNode::from(node.name.as_str())
    }))
}

pub(super) fn bootstrap(
    txn: &mut Txn<'_>,
    uuid: Uuid,
    node: &NodeSpec,
    pool: Option<&PoolSpec>,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    if let Some(cluster) = CLUSTER.get(txn, &())? {
        if cluster.uuid != uuid {
            return Err(MapRefusal::OtherCluster {
                ours: cluster.uuid,
                theirs: uuid,
            }
            .into());
        }
        return Ok(Outcome::Done);
    }
    CLUSTER.put(
        txn,
        &(),
        &Cluster {
            uuid,
            epoch: Epoch(0),
            level: node.level,
            created_at: at,
            recovery: None,
        },
    );
    node::register(txn, node, Incarnation::default(), at)?;
    let alone = PoolSpec::new(DEFAULT_POOL, 1);
    pool::create(txn, pool.unwrap_or(&alone), at)?;
    Ok(Outcome::Done)
}

/// Raises the level of the cluster: the leader has heard of all nodes that they know it.
pub(super) fn raise_level(txn: &mut Txn<'_>, to: Level, at: UnixMillis) -> Result<Outcome, Stop> {
    let mut cluster = cluster(txn)?;
    if to > cluster.level {
        cluster.level = to;
        CLUSTER.put(txn, &(), &cluster);
        event::push(txn, at, EventKind::LevelRaised { to })?;
        next_epoch(txn)?;
    }
    Ok(Outcome::Done)
}

pub(super) fn register_device(
    txn: &mut Txn<'_>,
    spec: &DeviceSpec,
    incarnation: Incarnation,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    cluster(txn)?;
    let node = require_node(txn, spec.node)?;
    if ![Incarnation::default(), node.incarnation].contains(&incarnation) {
        return Err(MapRefusal::OtherStart {
            node: NamedNode::from(node.name.as_str()),
            known: node.incarnation,
            claimed: incarnation,
        }
        .into());
    }
    check_device(spec)?;
    let class = name(&spec.class)?;
    let known = DEVICES.all(txn)?;
    let there = known
        .iter()
        .find(|device| device.node == spec.node && device.path == spec.path);
    if let Some(other) = there.filter(|device| device.uuid != spec.uuid) {
        let (path, node, device) = (spec.path.clone(), named(txn, spec.node)?, other.id);
        return Err(MapRefusal::DevicePathTaken { path, node, device }.into());
    }
    let old = known.iter().find(|device| device.uuid == spec.uuid);
    let device = Device {
        id: match old {
            Some(device) => device.id,
            None => take_number(txn, |counters| &mut counters.device)?,
        },
        uuid: spec.uuid,
        node: spec.node,
        path: spec.path.clone(),
        size_bytes: spec.size_bytes,
        class,
        state: DeviceState::Online,
        incarnation: node.incarnation,
        draining: old.is_some_and(|device| device.draining),
        added_at: old.map_or(at, |device| device.added_at),
    };
    if old == Some(&device) {
        return Ok(Outcome::Device(device));
    }
    DEVICES.put(txn, &device.id, &device);
    let (id, node) = (device.id, device.node);
    match old {
        None => event::push(txn, at, EventKind::DeviceAdded { device: id, node })?,
        Some(old) if old.state != device.state => {
            event::push(txn, at, EventKind::DeviceOnline { device: id, node })?;
        }
        Some(_) => {}
    }
    let same_place = |old: &&Device| {
        (old.node, old.size_bytes, &old.class, old.state)
            == (device.node, device.size_bytes, &device.class, device.state)
    };
    if old.filter(same_place).is_some() {
        next_epoch(txn)?;
    } else {
        place_all(txn)?;
    }
    if old.is_some_and(|old| old.incarnation != device.incarnation || old.node != device.node) {
        choose_authorities_of(txn, device.id)?;
    }
    Ok(Outcome::Device(device))
}

/// A device came back with another start of its node: groups that waited for it alone have an authority now.
fn choose_authorities_of(txn: &mut Txn<'_>, device: DeviceId) -> Result<(), Stop> {
    let epoch = cluster(txn)?.epoch;
    for pool in POOLS.all(txn)? {
        for old in PLACEMENT_GROUPS.all_below(txn, &pool.id)? {
            if old.in_sync().all(|member| member.device != device) {
                continue;
            }
            if let Some(new) = group::choose_authority_if_complete(txn, &old, epoch)? {
                group::save(txn, &pool, Some(&old), new, epoch)?;
            }
        }
    }
    Ok(())
}

fn check_device(spec: &DeviceSpec) -> Result<(), MapRefusal> {
    let path = spec.path.clone();
    if !Path::new(&path).is_absolute() || path.len() > MAX_DEVICE_PATH_BYTES || path.contains('\0')
    {
        return Err(MapRefusal::BadDevicePath { path });
    }
    if spec.size_bytes == 0 {
        return Err(MapRefusal::EmptyDevice { path });
    }
    Ok(())
}

pub(super) fn set_device_state(
    txn: &mut Txn<'_>,
    id: DeviceId,
    state: DeviceState,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    let mut device = require_device(txn, id)?;
    if device.state != state {
        device.state = state;
        DEVICES.put(txn, &id, &device);
        let (device, node) = (id, device.node);
        let what = match state {
            DeviceState::Online => EventKind::DeviceOnline { device, node },
            DeviceState::Offline => EventKind::DeviceOffline { device, node },
            DeviceState::Failed => EventKind::DeviceFailed { device, node },
        };
        event::push(txn, at, what)?;
        place_all(txn)?;
    }
    Ok(Outcome::Device(device))
}

/// A start of the device's node goes on without it: first it is only not served, and after long others take
/// its share.
pub(super) fn lose_device(
    txn: &mut Txn<'_>,
    id: DeviceId,
    incarnation: Incarnation,
    for_long: bool,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    let device = require_device(txn, id)?;
    let node = require_node(txn, device.node)?;
    if node.incarnation != incarnation {
        return Err(MapRefusal::OtherStart {
            node: NamedNode::from(node.name.as_str()),
            known: node.incarnation,
            claimed: incarnation,
        }
        .into());
    }
    match (device.state, for_long) {
        (DeviceState::Online, false) => set_device_state(txn, id, DeviceState::Offline, at),
        (DeviceState::Offline, true) => set_device_state(txn, id, DeviceState::Failed, at),
        _ => Ok(Outcome::Device(device)),
    }
}

pub(super) fn drain_device(
    txn: &mut Txn<'_>,
    id: DeviceId,
    on: bool,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    let mut device = require_device(txn, id)?;
    if device.draining != on {
        match device.state {
            DeviceState::Online if on => node::check_room_without_device(txn, id)?,
            // Nothing can be moved off it, and there is no end to waiting for that.
            DeviceState::Offline | DeviceState::Failed if on => {
                loss::refuse(txn, &[id], &format!("device {id}"))?;
            }
            _ => {}
        }
        device.draining = on;
        DEVICES.put(txn, &id, &device);
        let (device, node) = (id, device.node);
        let what = match on {
            true => EventKind::DeviceDraining { device, node },
            false => EventKind::DeviceActive { device, node },
        };
        event::push(txn, at, what)?;
        place_all(txn)?;
    }
    Ok(Outcome::Device(device))
}

pub(super) fn remove_device(
    txn: &mut Txn<'_>,
    id: DeviceId,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    let device = require_device(txn, id)?;
    if !is_served(txn, &device)? {
        loss::refuse(txn, &[id], &format!("device {id}"))?;
    }
    for pool in POOLS.all(txn)? {
        if VOLUMES_BY_POOL.first_below(txn, &pool.id)?.is_some() && holds_group(txn, &pool, id)? {
            return Err(MapRefusal::DeviceInUse {
                device: id,
                pool: pool.name.into(),
            }
            .into());
        }
    }
    DEVICES.delete(txn, &id);
    let node = device.node;
    event::push(txn, at, EventKind::DeviceRemoved { device: id, node })?;
    place_all(txn)?;
    Ok(Outcome::Device(device))
}

/// Forgets a device that is not served, and gives up what only that has.
pub(super) fn remove_lost_device(
    txn: &mut Txn<'_>,
    id: DeviceId,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    let device = require_device(txn, id)?;
    if is_served(txn, &device)? {
        return Err(LossRefusal::Served { device: id }.into());
    }
    let epoch = next_epoch(txn)?;
    let given = loss::give_up(txn, &[id], epoch)?;
    DEVICES.delete(txn, &id);
    let node = device.node;
    event::push(txn, at, EventKind::DeviceRemoved { device: id, node })?;
    place_all_at(txn, epoch)?;
    loss::complete(txn, given, (node, Some(id)), (epoch, at))?;
    Ok(Outcome::Device(device))
}

fn is_served(view: &dyn Read, device: &Device) -> Result<bool, ReadError> {
    let node = NODES.get(view, &device.node)?;
    Ok(node.is_some_and(|node| group::is_served(device, &node)))
}

fn require_device(view: &dyn Read, device: DeviceId) -> Result<Device, Stop> {
    Ok(DEVICES
        .get(view, &device)?
        .ok_or(MapRefusal::UnknownDevice { device })?)
}

fn holds_group(view: &dyn Read, pool: &Pool, device: DeviceId) -> Result<bool, ReadError> {
    let groups = PLACEMENT_GROUPS.all_below(view, &pool.id)?;
    let holds = |group: &PlacementGroup| group.in_sync().any(|member| member.device == device);
    Ok(groups.iter().any(holds))
}

/// The device set changed: a new epoch, and placement of every pool anew.
pub(super) fn place_all(txn: &mut Txn<'_>) -> Result<(), Stop> {
    let epoch = next_epoch(txn)?;
    place_all_at(txn, epoch)
}

/// The same in an epoch that has begun.
pub(super) fn place_all_at(txn: &mut Txn<'_>, epoch: Epoch) -> Result<(), Stop> {
    for pool in POOLS.all(txn)? {
        pool::place(txn, &pool, epoch)?;
    }
    Ok(())
}
