//! Balance and movement, up to a thousand nodes.

use std::collections::BTreeSet;

use uuid::Uuid;

use super::*;
use crate::ids::{Incarnation, PoolId, UnixMillis};
use crate::model::{Labels, Name, Role};
use crate::refusal::MAX_PLACEMENT_GROUPS;

const TIB: u64 = 1 << 40;

fn pool(replicas: u8, failure_domain: FailureDomain, groups: u32) -> Pool {
    Pool {
        id: PoolId(1),
        name: Name::parse("p").unwrap(),
        replicas,
        min_in_sync: 1,
        failure_domain,
        device_class: None,
        placement_groups: groups,
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
        incarnation: Incarnation::default(),
        draining: false,
        added_at: UnixMillis(0),
    }
}

fn node(id: u64) -> Node {
    Node {
        id: NodeId(id),
        name: Name::parse(&format!("n{id}")).unwrap(),
        roles: Role::all(),
        incarnation: Incarnation::default(),
        state: NodeState::Up,
        admin_state: crate::model::AdminState::Active,
        labels: Labels::default(),
        control_address: String::new(),
        data_address: String::new(),
        version: String::new(),
        boot: String::new(),
        starts: Vec::new(),
        granted: std::collections::BTreeSet::new(),
        joined_at: UnixMillis(0),
    }
}

/// Nodes for all devices.
fn nodes(devices: &[Device]) -> BTreeMap<NodeId, Node> {
    devices
        .iter()
        .map(|device| (device.node, node(device.node.0)))
        .collect()
}

type Sets = Vec<Vec<DeviceId>>;

fn place_on(pool: &Pool, devices: &[Device], nodes: &BTreeMap<NodeId, Node>, old: &Sets) -> Sets {
    let candidates = candidates(pool, devices, nodes);
    let mut current = old.clone();
    current.resize(pool.placement_groups as usize, Vec::new());
    arrange(pool.id, usize::from(pool.replicas), &candidates, &current)
}

fn place(pool: &Pool, devices: &[Device], old: &Sets) -> Sets {
    place_on(pool, devices, &nodes(devices), old)
}

fn held(sets: &Sets, id: DeviceId) -> usize {
    sets.iter().filter(|set| set.contains(&id)).count()
}

/// One device each on this many nodes, of 1 to 4 TiB.
fn mixed(count: u64) -> Vec<Device> {
    (1..=count)
        .map(|id| device(id, id, TIB + score::mix(id) % (3 * TIB)))
        .collect()
}

/// Checks that every device holds its part of the capacity within 5 %, or within the one group that cannot be
/// split. No device here is so large that it could not.
fn assert_balanced(pool: &Pool, devices: &[Device], sets: &Sets) {
    let total: u128 = devices
        .iter()
        .map(|device| u128::from(device.size_bytes))
        .sum();
    let slots = u128::from(pool.placement_groups) * u128::from(pool.replicas);
    for device in devices {
        let share = (slots * u128::from(device.size_bytes)) as f64 / total as f64;
        let held = held(sets, device.id) as f64;
        let off = (held - share).abs();
        assert!(
            off <= (share * 0.05).max(1.0),
            "{} holds {held} for a share of {share:.1}",
            device.id
        );
    }
}

/// How many replicas lie elsewhere than before.
fn moved(before: &Sets, after: &Sets) -> usize {
    let new = |(old, new): (&Vec<DeviceId>, &Vec<DeviceId>)| {
        new.iter().filter(|id| !old.contains(id)).count()
    };
    before.iter().zip(after).map(new).sum()
}

#[test]
fn device_shares_stay_within_5_percent_up_to_1000_nodes() {
    for (count, replicas) in [(3, 1), (5, 2), (10, 3), (64, 3), (200, 3), (1000, 3)] {
        let devices = mixed(count);
        let groups = groups_for(devices.len(), replicas, 256, MAX_PLACEMENT_GROUPS);
        let pool = pool(replicas, FailureDomain::Node, groups);
        let sets = place(&pool, &devices, &Sets::new());
        assert!(sets.iter().all(|set| set.len() == usize::from(replicas)));
        assert_balanced(&pool, &devices, &sets);
    }
}

#[test]
fn a_node_that_comes_takes_its_share_and_nothing_else_moves() {
    for (count, groups) in [(4, 256), (64, 1024), (999, MAX_PLACEMENT_GROUPS)] {
        let pool = pool(3, FailureDomain::Node, groups);
        let mut devices = mixed(count);
        let before = place(&pool, &devices, &Sets::new());
        devices.push(device(count + 1, count + 1, 2 * TIB));
        let after = place(&pool, &devices, &before);
        let new = held(&after, DeviceId(count + 1));
        let moved = moved(&before, &after);
        assert!(moved <= new + new / 10 + 2, "{moved} moved for {new}");
        assert_balanced(&pool, &devices, &after);
    }
}

#[test]
fn a_node_that_goes_leaves_what_it_held_and_nothing_else_moves() {
    for (count, groups) in [(5, 256), (64, 1024), (1000, MAX_PLACEMENT_GROUPS)] {
        let pool = pool(3, FailureDomain::Node, groups);
        let mut devices = mixed(count);
        let before = place(&pool, &devices, &Sets::new());
        let gone = devices.remove(devices.len() / 2).id;
        let lost = held(&before, gone);
        let after = place(&pool, &devices, &before);
        let moved = moved(&before, &after);
        assert!(moved <= lost + lost / 10 + 2, "{moved} moved for {lost}");
        assert_balanced(&pool, &devices, &after);
    }
}

#[test]
fn cluster_stays_balanced_as_nodes_come_and_go() {
    let pool = pool(3, FailureDomain::Node, 1024);
    let mut devices = mixed(12);
    let mut sets = place(&pool, &devices, &Sets::new());
    for round in 0..40_u64 {
        match round % 4 {
            0 | 2 => {
                devices.remove((score::mix(round) % devices.len() as u64) as usize);
            }
            _ => devices.push(device(
                100 + round,
                100 + round,
                TIB + score::mix(round) % TIB,
            )),
        }
        sets = place(&pool, &devices, &sets);
        assert_balanced(&pool, &devices, &sets);
    }
}

#[test]
fn replicas_never_share_their_failure_domain() {
    let devices: Vec<Device> = (1..=12).map(|id| device(id, (id - 1) / 2, TIB)).collect();
    let mut nodes = nodes(&devices);
    for node in nodes.values_mut() {
        node.labels = Labels {
            host: Some(format!("h{}", node.id.0 / 2)),
            rack: Some(format!("r{}", node.id.0 / 3)),
        };
    }
    let apart = |domain, replicas, of: &dyn Fn(u64) -> u64, most: usize| {
        let pool = pool(replicas, domain, 256);
        for set in place_on(&pool, &devices, &nodes, &Sets::new()) {
            let domains: BTreeSet<u64> = set.iter().map(|id| of(id.0 - 1)).collect();
            assert_eq!((set.len(), domains.len()), (most, most), "{domain}");
        }
    };
    apart(FailureDomain::Device, 5, &|index| index, 5);
    apart(FailureDomain::Node, 3, &|index| index / 2, 3);
    apart(FailureDomain::Host, 3, &|index| index / 4, 3);
    apart(FailureDomain::Rack, 3, &|index| index / 6, 2);
}

#[test]
fn unlabelled_node_is_its_own_host_but_has_no_rack_of_its_own() {
    let devices: Vec<Device> = (1..=3).map(|id| device(id, id, TIB)).collect();
    let hosts = place(&pool(3, FailureDomain::Host, 64), &devices, &Sets::new());
    assert!(hosts.iter().all(|set| set.len() == 3));
    let racks = place(&pool(3, FailureDomain::Rack, 64), &devices, &Sets::new());
    assert!(racks.iter().all(|set| set.len() == 1));
}

#[test]
fn oversized_device_holds_one_replica_of_every_group() {
    let mut devices: Vec<Device> = (2..=5).map(|id| device(id, id, TIB)).collect();
    devices.push(device(1, 1, 100 * TIB));
    let pool = pool(3, FailureDomain::Node, 256);
    let sets = place(&pool, &devices, &Sets::new());
    assert_eq!(held(&sets, DeviceId(1)), 256);
    for id in 2..=5 {
        assert_eq!(held(&sets, DeviceId(id)), 128, "the others share the rest");
    }
}

#[test]
fn who_may_not_join_keeps_what_it_has() {
    let mut devices: Vec<Device> = (1..=4).map(|id| device(id, id, TIB)).collect();
    let pool = pool(2, FailureDomain::Node, 256);
    let before = place(&pool, &devices, &Sets::new());
    devices[0].state = DeviceState::Offline;
    devices.push(device(5, 5, TIB));
    devices[4].state = DeviceState::Offline;
    let mut down = nodes(&devices);
    down.get_mut(&NodeId(2)).unwrap().state = NodeState::Down;
    assert_eq!(place_on(&pool, &devices, &down, &before), before);
    devices[3].state = DeviceState::Failed;
    let after = place_on(&pool, &devices, &down, &before);
    assert_eq!(held(&after, DeviceId(4)), 0);
    assert_eq!(held(&after, DeviceId(5)), 0, "it is not there to take any");
    for id in [1, 2] {
        assert_eq!(held(&after, DeviceId(id)), held(&before, DeviceId(id)));
    }
}

#[test]
fn kept_members_stay_in_front_and_other_classes_are_not_used() {
    let devices: Vec<Device> = (1..=4).map(|id| device(id, id, TIB)).collect();
    let current = vec![vec![DeviceId(2)]; 64];
    let set = &place(&pool(3, FailureDomain::Node, 64), &devices, &current)[0];
    assert_eq!(set.len(), 3);
    let mut picky = pool(1, FailureDomain::Node, 64);
    picky.device_class = Some(Name::parse("hdd").unwrap());
    assert_eq!(place(&picky, &devices, &Sets::new())[0], []);
}

#[test]
fn the_number_of_groups_follows_the_devices_within_its_bounds() {
    assert_eq!(groups_for(0, 1, 1024, MAX_PLACEMENT_GROUPS), 1024);
    assert_eq!(groups_for(76, 3, 1024, MAX_PLACEMENT_GROUPS), 1024);
    assert_eq!(groups_for(100, 3, 1024, MAX_PLACEMENT_GROUPS), 2048);
    assert_eq!(groups_for(1000, 3, 1024, MAX_PLACEMENT_GROUPS), 16_384);
    assert_eq!(
        groups_for(usize::MAX, 1, 1024, MAX_PLACEMENT_GROUPS),
        16_384
    );
}
