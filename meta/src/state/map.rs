//! The cluster itself, its nodes and its devices.

use std::path::Path;

use uuid::Uuid;

use super::tables::{CLUSTER, COUNTERS, DEVICES, NODES, PLACEMENT_GROUPS, POOLS, VOLUMES_BY_POOL};
use super::{Read, ReadError, Stop, Txn, pool};
use crate::command::{DeviceSpec, NodeSpec, Outcome, PoolSpec};
use crate::ids::{DeviceId, Epoch, NodeId, UnixMillis};
use crate::model::{Cluster, DEFAULT_POOL, Device, DeviceState, Node, Pool};
use crate::refusal::{MAX_DEVICE_PATH_BYTES, MapRefusal, name};

/// The cluster's record, which is there after bootstrap.
pub(super) fn cluster(view: &dyn Read) -> Result<Cluster, Stop> {
    Ok(CLUSTER.get(view, &())?.ok_or(MapRefusal::NoCluster)?)
}

/// Begins a new version of the cluster map.
pub(super) fn next_epoch(txn: &mut Txn<'_>) -> Result<Epoch, Stop> {
    let mut cluster = cluster(txn)?;
    cluster.epoch.0 += 1;
    CLUSTER.put(txn, &(), &cluster);
    Ok(cluster.epoch)
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
        .ok_or(MapRefusal::UnknownNode { node })?)
}

pub(super) fn bootstrap(
    txn: &mut Txn<'_>,
    uuid: Uuid,
    node: &NodeSpec,
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
            created_at: at,
        },
    );
    register_node(txn, node, at)?;
    pool::create(txn, &PoolSpec::new(DEFAULT_POOL, 1), at)?;
    Ok(Outcome::Done)
}

pub(super) fn register_node(
    txn: &mut Txn<'_>,
    spec: &NodeSpec,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    cluster(txn)?;
    let name = name(&spec.name)?;
    if spec.roles.is_empty() {
        return Err(MapRefusal::NoRole { node: spec.id }.into());
    }
    if let Some(other) = NODES
        .all(txn)?
        .into_iter()
        .find(|other| other.name == name && other.id != spec.id)
    {
        return Err(MapRefusal::NodeNameTaken {
            name: name.into(),
            holder: other.id,
        }
        .into());
    }
    let old = NODES.get(txn, &spec.id)?;
    let joined_at = old.as_ref().map_or(at, |node| node.joined_at);
    let node = Node {
        id: spec.id,
        name,
        roles: spec.roles.clone(),
        joined_at,
    };
    if old.as_ref() != Some(&node) {
        NODES.put(txn, &node.id, &node);
        next_epoch(txn)?;
    }
    Ok(Outcome::Node(node))
}

pub(super) fn register_device(
    txn: &mut Txn<'_>,
    spec: &DeviceSpec,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    cluster(txn)?;
    require_node(txn, spec.node)?;
    check_device(spec)?;
    let class = name(&spec.class)?;
    let known = DEVICES.all(txn)?;
    let there = known
        .iter()
        .find(|device| device.node == spec.node && device.path == spec.path);
    if let Some(other) = there.filter(|device| device.uuid != spec.uuid) {
        let (path, node, device) = (spec.path.clone(), spec.node, other.id);
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
        added_at: old.map_or(at, |device| device.added_at),
    };
    if old != Some(&device) {
        DEVICES.put(txn, &device.id, &device);
        place_all(txn)?;
    }
    Ok(Outcome::Device(device))
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
) -> Result<Outcome, Stop> {
    let mut device = require_device(txn, id)?;
    if device.state != state {
        device.state = state;
        DEVICES.put(txn, &id, &device);
        place_all(txn)?;
    }
    Ok(Outcome::Device(device))
}

pub(super) fn remove_device(txn: &mut Txn<'_>, id: DeviceId) -> Result<Outcome, Stop> {
    let device = require_device(txn, id)?;
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
    place_all(txn)?;
    Ok(Outcome::Device(device))
}

fn require_device(view: &dyn Read, device: DeviceId) -> Result<Device, Stop> {
    Ok(DEVICES
        .get(view, &device)?
        .ok_or(MapRefusal::UnknownDevice { device })?)
}

fn holds_group(view: &dyn Read, pool: &Pool, device: DeviceId) -> Result<bool, ReadError> {
    let groups = PLACEMENT_GROUPS.all_below(view, &pool.id)?;
    Ok(groups.iter().any(|group| group.replicas.contains(&device)))
}

/// The device set changed: a new epoch, and placement of every pool anew.
fn place_all(txn: &mut Txn<'_>) -> Result<(), Stop> {
    let epoch = next_epoch(txn)?;
    for pool in POOLS.all(txn)? {
        pool::place(txn, &pool, epoch)?;
    }
    Ok(())
}
