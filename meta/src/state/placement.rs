//! Which devices hold which placement group: weighted rendezvous hashing, in integers only.
//!
//! Every device draws lots for every group, more lots the larger it is, and the highest lots win. When a device comes
//! or goes only the groups it wins or held change hands.

use std::collections::BTreeSet;

use crate::ids::{DeviceId, NodeId, PgIndex, VolumeId};
use crate::model::{Device, DeviceState, FailureDomain, Pool};

/// Lots of the largest device; a smaller one gets its share of them, and at least one.
const LOTS_MAX: u64 = 64;

/// The placement group of a chunk. Part of the on-disk contract: it must never change.
pub(crate) fn group_of_chunk(volume: VolumeId, chunk_index: u64, groups: u32) -> PgIndex {
    let mixed = mix(mix(volume.0) ^ chunk_index);
    let index = mixed % u64::from(groups.max(1));
    PgIndex(u32::try_from(index).expect("a remainder is smaller than its divisor"))
}

/// Bijective mixing of 64 bits (the finaliser of SplitMix64).
fn mix(value: u64) -> u64 {
    let mut x = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Whether the pool may put new data on the device.
pub(crate) fn usable(pool: &Pool, device: &Device) -> bool {
    device.state == DeviceState::Online
        && pool
            .device_class
            .as_ref()
            .is_none_or(|class| *class == device.class)
}

/// The replica set of a group: `keep` first and in its order, then the best of `devices` up to the pool's replicas.
///
/// `devices` are all devices of the cluster. Two members never share the pool's failure domain, so the set may be
/// shorter than the pool's replicas.
pub(crate) fn choose(
    pool: &Pool,
    group: PgIndex,
    devices: &[Device],
    keep: &[DeviceId],
) -> Vec<DeviceId> {
    let wanted = usize::from(pool.replicas);
    let mut chosen: Vec<DeviceId> = keep.to_vec();
    if chosen.len() >= wanted {
        return chosen;
    }
    let node_of = |id: DeviceId| {
        devices
            .iter()
            .find(|device| device.id == id)
            .map(|device| device.node)
    };
    let mut nodes: BTreeSet<NodeId> = chosen.iter().filter_map(|id| node_of(*id)).collect();
    for device in ranked(pool, group, devices) {
        if chosen.len() >= wanted {
            break;
        }
        let apart = match pool.failure_domain {
            FailureDomain::Device => !chosen.contains(&device.id),
            FailureDomain::Node => !nodes.contains(&device.node),
        };
        if apart {
            chosen.push(device.id);
            nodes.insert(device.node);
        }
    }
    chosen
}

/// Usable devices, the winner of the group's draw first.
fn ranked<'a>(pool: &Pool, group: PgIndex, devices: &'a [Device]) -> Vec<&'a Device> {
    let usable: Vec<&Device> = devices
        .iter()
        .filter(|device| usable(pool, device))
        .collect();
    let largest = usable
        .iter()
        .map(|device| device.size_bytes)
        .max()
        .unwrap_or(1)
        .max(1);
    let seed = mix(u64::from(pool.id.0) << 32 | u64::from(group.0));
    let mut drawn: Vec<(u64, &Device)> = usable
        .into_iter()
        .map(|device| {
            let lots =
                (u128::from(device.size_bytes) * u128::from(LOTS_MAX) / u128::from(largest)).max(1);
            let lots = u64::try_from(lots).unwrap_or(LOTS_MAX);
            let best = (0..lots)
                .map(|lot| mix(seed ^ mix(device.id.0 << 8 | lot)))
                .max()
                .unwrap_or(0);
            (best, device)
        })
        .collect();
    drawn.sort_by_key(|(best, device)| (std::cmp::Reverse(*best), device.id));
    drawn.into_iter().map(|(_, device)| device).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{PoolId, UnixMillis};
    use crate::model::Name;
    use uuid::Uuid;

    fn pool(replicas: u8, failure_domain: FailureDomain) -> Pool {
        Pool {
            id: PoolId(1),
            name: Name::parse("p").unwrap(),
            replicas,
            min_in_sync: 1,
            failure_domain,
            device_class: None,
            placement_groups: 256,
            created_at: UnixMillis(0),
        }
    }

    fn device(id: u64, node: u64, size_bytes: u64) -> Device {
        Device {
            id: DeviceId(id),
            uuid: Uuid::from_u128(u128::from(id)),
            node: NodeId(node),
            path: format!("/dev/{id}"),
            size_bytes,
            class: Name::parse("ssd").unwrap(),
            state: DeviceState::Online,
            added_at: UnixMillis(0),
        }
    }

    fn sets(pool: &Pool, devices: &[Device]) -> Vec<Vec<DeviceId>> {
        (0..pool.placement_groups)
            .map(|index| choose(pool, PgIndex(index), devices, &[]))
            .collect()
    }

    #[test]
    fn the_group_of_a_chunk_is_a_contract() {
        // Values computed once: data written with them would be lost by any other function.
        let groups: Vec<u32> = (0..4)
            .map(|chunk| group_of_chunk(VolumeId(7), chunk, 256).0)
            .collect();
        assert_eq!(groups, GROUPS_OF_VOLUME_7);
    }

    const GROUPS_OF_VOLUME_7: [u32; 4] = [69, 95, 37, 149];

    #[test]
    fn replicas_never_share_their_failure_domain() {
        let devices: Vec<Device> = (1..=9).map(|id| device(id, (id - 1) / 3, 1000)).collect();
        for set in sets(&pool(3, FailureDomain::Node), &devices) {
            let nodes: BTreeSet<u64> = set.iter().map(|id| (id.0 - 1) / 3).collect();
            assert_eq!((set.len(), nodes.len()), (3, 3));
        }
        for set in sets(&pool(5, FailureDomain::Device), &devices) {
            assert_eq!(set.iter().collect::<BTreeSet<_>>().len(), 5);
        }
        for set in sets(&pool(5, FailureDomain::Node), &devices) {
            assert_eq!(set.len(), 3, "three nodes hold at most three replicas");
        }
    }

    #[test]
    fn a_larger_device_gets_more_groups() {
        let devices = [device(1, 1, 1000), device(2, 2, 1000), device(3, 3, 2000)];
        let sets = sets(&pool(1, FailureDomain::Node), &devices);
        let held = |id: u64| sets.iter().filter(|set| set[0] == DeviceId(id)).count();
        assert_eq!(held(1) + held(2) + held(3), 256);
        assert!(
            held(3) > held(1) && held(3) > held(2),
            "{} {} {}",
            held(1),
            held(2),
            held(3)
        );
        assert!(
            held(1) > 32 && held(2) > 32 && held(3) > 96,
            "{} {} {}",
            held(1),
            held(2),
            held(3)
        );
    }

    #[test]
    fn a_new_device_takes_groups_and_leaves_the_others_alone() {
        let mut devices: Vec<Device> = (1..=4).map(|id| device(id, id, 1000)).collect();
        let before = sets(&pool(1, FailureDomain::Node), &devices);
        devices.push(device(5, 5, 1000));
        let after = sets(&pool(1, FailureDomain::Node), &devices);
        let moved = before
            .iter()
            .zip(&after)
            .filter(|(old, new)| old != new)
            .count();
        assert!(
            before
                .iter()
                .zip(&after)
                .all(|(old, new)| old == new || new[0] == DeviceId(5))
        );
        assert!((20..100).contains(&moved), "{moved} of 256 moved");
    }

    #[test]
    fn kept_members_stay_in_front_and_only_usable_devices_join() {
        let mut devices: Vec<Device> = (1..=4).map(|id| device(id, id, 1000)).collect();
        devices[0].state = DeviceState::Offline;
        devices[1].state = DeviceState::Failed;
        let set = choose(
            &pool(3, FailureDomain::Node),
            PgIndex(0),
            &devices,
            &[DeviceId(1)],
        );
        assert_eq!(set[0], DeviceId(1));
        assert_eq!(
            set[1..].iter().collect::<BTreeSet<_>>(),
            BTreeSet::from([&DeviceId(3), &DeviceId(4)])
        );
        let mut picky = pool(1, FailureDomain::Node);
        picky.device_class = Some(Name::parse("hdd").unwrap());
        assert_eq!(choose(&picky, PgIndex(0), &devices, &[]), []);
    }
}
