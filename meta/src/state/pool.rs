//! Pools and their placement groups.

use std::collections::BTreeMap;

use super::map::{cluster, next_epoch, nodes_by_id, take_number};
use super::tables::{
    CLUSTER, DEVICES, FILESYSTEMS, PLACEMENT_GROUPS, POOL_HEALTH, POOLS, VOLUMES, VOLUMES_BY_POOL,
};
use super::{Read, ReadError, Stop, Txn, group, placement};
use crate::command::{DEFAULT_PLACEMENT_GROUPS, Outcome, PoolSpec};
use crate::ids::{DeviceId, Epoch, PgIndex, PoolId, UnixMillis};
use crate::model::{DEFAULT_POOL, Device, Member, PlacementGroup, Pool, ReplicaState};
use crate::refusal::{MAX_PLACEMENT_GROUPS, MAX_REPLICAS, PoolRefusal, name};

pub(super) fn create(txn: &mut Txn<'_>, spec: &PoolSpec, at: UnixMillis) -> Result<Outcome, Stop> {
    cluster(txn)?;
    let name = name(&spec.name)?;
    let min_in_sync = spec.min_in_sync.unwrap_or(spec.replicas / 2 + 1);
    check_replicas(spec, min_in_sync)?;
    let device_class = spec
        .device_class
        .as_deref()
        .map(crate::refusal::name)
        .transpose()?;
    if POOLS.get(txn, &name)?.is_some() {
        return Err(PoolRefusal::NameTaken { name: name.into() }.into());
    }
    let placement_groups = match spec.placement_groups {
        Some(groups) => groups,
        None => placement::groups_for(
            DEVICES.all(txn)?.len(),
            spec.replicas,
            DEFAULT_PLACEMENT_GROUPS,
            MAX_PLACEMENT_GROUPS,
        ),
    };
    check_groups(spec, placement_groups)?;
    let id: PoolId = take_number(txn, |counters| &mut counters.pool)?;
    if id > PoolId::MAX {
        return Err(PoolRefusal::TooMany { name: name.into() }.into());
    }
    let pool = Pool {
        id,
        name,
        replicas: spec.replicas,
        min_in_sync,
        failure_domain: spec.failure_domain,
        device_class,
        placement_groups,
        created_at: at,
    };
    POOLS.put(txn, &pool.name, &pool);
    let epoch = next_epoch(txn)?;
    place(txn, &pool, epoch)?;
    Ok(Outcome::Pool(pool))
}

fn check_groups(spec: &PoolSpec, placement_groups: u32) -> Result<(), PoolRefusal> {
    if placement_groups == 0 || placement_groups > MAX_PLACEMENT_GROUPS {
        let name = spec.name.clone();
        return Err(PoolRefusal::BadPlacementGroups {
            name,
            placement_groups,
        });
    }
    Ok(())
}

fn check_replicas(spec: &PoolSpec, min_in_sync: u8) -> Result<(), PoolRefusal> {
    let (name, replicas) = (spec.name.clone(), spec.replicas);
    if replicas == 0 || replicas > MAX_REPLICAS {
        return Err(PoolRefusal::BadReplicas { name, replicas });
    }
    if min_in_sync == 0 || min_in_sync > replicas {
        return Err(PoolRefusal::BadMinInSync {
            name,
            min_in_sync,
            replicas,
        });
    }
    Ok(())
}

/// Copies that are to be made are made in the background. More that must be in sync than there are now would
/// stop all writes until they are made, and is refused.
pub(super) fn set(
    txn: &mut Txn<'_>,
    name: &str,
    replicas: Option<u8>,
    min_in_sync: Option<u8>,
) -> Result<Outcome, Stop> {
    let old = require(txn, name)?;
    let mut pool = Pool {
        replicas: replicas.unwrap_or(old.replicas),
        ..old.clone()
    };
    pool.min_in_sync = min_in_sync.unwrap_or(old.min_in_sync.min(pool.replicas));
    let spec = PoolSpec::new(name, pool.replicas);
    check_replicas(&spec, pool.min_in_sync)?;
    if pool == old {
        return Ok(Outcome::Pool(pool));
    }
    if pool.min_in_sync > old.min_in_sync {
        let groups = PLACEMENT_GROUPS.all_below(txn, &pool.id)?;
        let in_sync =
            |group: &PlacementGroup| group.members.iter().filter(|m| m.is_in_sync()).count();
        let least = groups.iter().map(in_sync).min().unwrap_or(0);
        if least < usize::from(pool.min_in_sync) {
            let (name, min_in_sync) = (name.to_owned(), pool.min_in_sync);
            return Err(PoolRefusal::TooFewInSync {
                name,
                min_in_sync,
                least,
            }
            .into());
        }
    }
    POOLS.put(txn, &pool.name, &pool);
    let epoch = next_epoch(txn)?;
    group::renew_all(txn, &pool, epoch)?;
    place(txn, &pool, epoch)?;
    Ok(Outcome::Pool(pool))
}

pub(super) fn delete(txn: &mut Txn<'_>, name: &str) -> Result<Outcome, Stop> {
    let pool = require(txn, name)?;
    if name == DEFAULT_POOL {
        return Err(PoolRefusal::IsDefault {
            name: name.to_owned(),
        }
        .into());
    }
    let filesystems = FILESYSTEMS.all(txn)?;
    if let Some(user) = filesystems.into_iter().find(|user| user.pool == pool.id) {
        return Err(PoolRefusal::HasFilesystem {
            name: name.to_owned(),
            filesystem: user.name.into(),
        }
        .into());
    }
    let mut volumes = VOLUMES.all(txn)?;
    volumes.retain(|volume| volume.pool == pool.name);
    if let Some(user) = volumes.iter().find(|user| user.segment.is_none()) {
        return Err(PoolRefusal::InUse {
            name: name.to_owned(),
            volume: user.name.to_string(),
        }
        .into());
    }
    if !volumes.is_empty() {
        return Err(PoolRefusal::StillFreeing {
            name: name.to_owned(),
        }
        .into());
    }
    for index in (0..pool.placement_groups).map(PgIndex) {
        PLACEMENT_GROUPS.delete(txn, &(pool.id, index));
    }
    POOLS.delete(txn, name);
    POOL_HEALTH.delete(txn, &pool.id);
    next_epoch(txn)?;
    Ok(Outcome::Pool(pool))
}

pub(super) fn require(view: &dyn Read, name: &str) -> Result<Pool, Stop> {
    Ok(POOLS.get(view, name)?.ok_or_else(|| PoolRefusal::Unknown {
        name: name.to_owned(),
    })?)
}

/// Refuses a pool whose writes could never be acknowledged.
pub(super) fn require_devices(view: &dyn Read, pool: &Pool) -> Result<(), Stop> {
    let groups = PLACEMENT_GROUPS.all_below(view, &pool.id)?;
    let available = groups
        .iter()
        .map(|group| group.wanted().count())
        .min()
        .unwrap_or(0);
    if available < usize::from(pool.min_in_sync) {
        let apart = pool.failure_domain.to_string();
        let (name, needed) = (pool.name.clone().into(), pool.min_in_sync);
        return Err(PoolRefusal::TooFewDevices {
            name,
            available,
            needed,
            apart,
        }
        .into());
    }
    Ok(())
}

/// Gives every placement group of the pool its members.
///
/// In a pool without volumes nothing has to be moved: members change at once, and new ones are in sync, as
/// there is nothing to have. In a pool with volumes a new member waits to be synced, and one whose place is
/// taken stays until then.
///
/// While replicas are to be chosen after a recovery, nothing is placed: members that nobody needs by their
/// state may be the ones that lack nothing.
pub(super) fn place(txn: &mut Txn<'_>, pool: &Pool, epoch: Epoch) -> Result<(), ReadError> {
    let cluster = CLUSTER.get(txn, &())?;
    let recovery = cluster.and_then(|cluster| cluster.recovery);
    if recovery.is_some_and(|recovery| recovery.chooses) {
        return Ok(());
    }
    let devices = DEVICES.all(txn)?;
    let candidates = placement::candidates(pool, &devices, &nodes_by_id(txn)?);
    let by_id: BTreeMap<DeviceId, Device> = devices
        .into_iter()
        .map(|device| (device.id, device))
        .collect();
    let holds_data = VOLUMES_BY_POOL.first_below(txn, &pool.id)?.is_some();
    let mut old: Vec<Option<PlacementGroup>> = vec![None; pool.placement_groups as usize];
    for group in PLACEMENT_GROUPS.all_below(txn, &pool.id)? {
        let index = group.index.0 as usize;
        old[index] = Some(group);
    }
    let wanted = |group: &Option<PlacementGroup>| match group {
        Some(group) => group.wanted().map(|member| member.device).collect(),
        None => Vec::new(),
    };
    let current: Vec<Vec<DeviceId>> = old.iter().map(wanted).collect();
    let arranged = placement::arrange(pool.id, usize::from(pool.replicas), &candidates, &current);
    for (index, (old, wanted)) in (0..pool.placement_groups).zip(old.into_iter().zip(arranged)) {
        let had = old.as_ref().map_or(&[][..], |group| &group.members);
        let members = members(had, &wanted, &by_id, holds_data, epoch);
        let new = PlacementGroup {
            pool: pool.id,
            index: PgIndex(index),
            epoch: old.as_ref().map_or(epoch, |group| group.epoch),
            members,
            power_lost: old.as_ref().map_or(Epoch(0), |group| group.power_lost),
        };
        group::save(txn, pool, old.as_ref(), new, epoch)?;
    }
    Ok(())
}

fn members(
    had: &[Member],
    wanted: &[DeviceId],
    devices: &BTreeMap<DeviceId, Device>,
    holds_data: bool,
    epoch: Epoch,
) -> Vec<Member> {
    let mut members = Vec::with_capacity(wanted.len());
    for member in had.iter().filter(|one| devices.contains_key(&one.device)) {
        let leaving = !wanted.contains(&member.device);
        if !leaving || (holds_data && member.is_in_sync()) {
            members.push(Member {
                leaving,
                ..member.clone()
            });
        }
    }
    let new = |id: &&DeviceId| had.iter().all(|member| member.device != **id);
    for device in wanted.iter().filter(new).filter_map(|id| devices.get(id)) {
        members.push(Member {
            device: device.id,
            node: device.node,
            incarnation: device.incarnation,
            state: match holds_data {
                true => ReplicaState::Out,
                false => ReplicaState::InSync,
            },
            since: epoch,
            leaving: false,
            in_sync_until: Epoch(0),
        });
    }
    members
}
