//! Pools and their placement groups.

use super::map::{cluster, next_epoch, take_number};
use super::tables::{DEVICES, PLACEMENT_GROUPS, POOLS, VOLUME_NAMES, VOLUMES_BY_POOL};
use super::{Read, ReadError, Stop, Txn, placement};
use crate::command::{DEFAULT_PLACEMENT_GROUPS, Outcome, PoolSpec};
use crate::ids::{Epoch, PgIndex, UnixMillis};
use crate::model::{DEFAULT_POOL, FailureDomain, PlacementGroup, Pool};
use crate::refusal::{MAX_PLACEMENT_GROUPS, MAX_REPLICAS, PoolRefusal, name};

pub(super) fn create(txn: &mut Txn<'_>, spec: &PoolSpec, at: UnixMillis) -> Result<Outcome, Stop> {
    cluster(txn)?;
    let name = name(&spec.name)?;
    let min_in_sync = spec.min_in_sync.unwrap_or(spec.replicas / 2 + 1);
    let placement_groups = spec.placement_groups.unwrap_or(DEFAULT_PLACEMENT_GROUPS);
    check(spec, min_in_sync, placement_groups)?;
    let device_class = spec
        .device_class
        .as_deref()
        .map(crate::refusal::name)
        .transpose()?;
    if POOLS.get(txn, &name)?.is_some() {
        return Err(PoolRefusal::NameTaken { name: name.into() }.into());
    }
    let pool = Pool {
        id: take_number(txn, |counters| &mut counters.pool)?,
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

fn check(spec: &PoolSpec, min_in_sync: u8, placement_groups: u32) -> Result<(), PoolRefusal> {
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
    if placement_groups == 0 || placement_groups > MAX_PLACEMENT_GROUPS {
        return Err(PoolRefusal::BadPlacementGroups {
            name,
            placement_groups,
        });
    }
    Ok(())
}

pub(super) fn delete(txn: &mut Txn<'_>, name: &str) -> Result<Outcome, Stop> {
    let pool = require(txn, name)?;
    if name == DEFAULT_POOL {
        return Err(PoolRefusal::IsDefault {
            name: name.to_owned(),
        }
        .into());
    }
    if let Some(id) = VOLUMES_BY_POOL.first_below(txn, &pool.id)? {
        let volume = VOLUME_NAMES
            .get(txn, &id)?
            .map(String::from)
            .unwrap_or_default();
        return Err(PoolRefusal::InUse {
            name: name.to_owned(),
            volume,
        }
        .into());
    }
    for index in (0..pool.placement_groups).map(PgIndex) {
        PLACEMENT_GROUPS.delete(txn, &(pool.id, index));
    }
    POOLS.delete(txn, name);
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
        .map(|group| group.replicas.len())
        .min()
        .unwrap_or(0);
    if available < usize::from(pool.min_in_sync) {
        let apart = match pool.failure_domain {
            FailureDomain::Device => "device",
            FailureDomain::Node => "node",
        };
        let (name, needed, apart) = (pool.name.clone().into(), pool.min_in_sync, apart.to_owned());
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

/// Gives every placement group of the pool its replica set.
///
/// A pool without volumes has nothing to move, so it is placed anew as the present devices suit best. In a pool with
/// volumes members stay and only missing ones are added; a group that had members does not count an added one as
/// in sync, because it has yet to be filled.
pub(super) fn place(txn: &mut Txn<'_>, pool: &Pool, epoch: Epoch) -> Result<(), ReadError> {
    let devices = DEVICES.all(txn)?;
    let holds_data = VOLUMES_BY_POOL.first_below(txn, &pool.id)?.is_some();
    for index in (0..pool.placement_groups).map(PgIndex) {
        let old = PLACEMENT_GROUPS.get(txn, &(pool.id, index))?;
        let kept = old
            .as_ref()
            .filter(|group| holds_data && !group.replicas.is_empty());
        let replicas = placement::choose(
            pool,
            index,
            &devices,
            kept.map_or(&[], |group| &group.replicas),
        );
        let in_sync = match kept {
            Some(group) => group.in_sync.clone(),
            None => replicas.iter().copied().collect(),
        };
        let unchanged =
            old.is_some_and(|group| group.replicas == replicas && group.in_sync == in_sync);
        if !unchanged {
            let group = PlacementGroup {
                pool: pool.id,
                index,
                replicas,
                in_sync,
                epoch,
            };
            PLACEMENT_GROUPS.put(txn, &(pool.id, index), &group);
        }
    }
    Ok(())
}
