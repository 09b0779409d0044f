//! Groups that move between two devices of a node.

use super::*;
use crate::refusal::NamedNode;

/// The three, of which the third node has a fourth device that is to take the place of its first.
fn four() -> (World, GroupId) {
    let (mut world, id) = three();
    assert_eq!(world.device(3), DeviceId(4));
    empty(&mut world, 3, true);
    assert!(world.on(id, 3).leaving);
    assert_eq!(
        world.states(id),
        [(1, InSync), (2, InSync), (3, InSync), (4, Out)]
    );
    (world, id)
}

fn empty(world: &mut World, device: u64, draining: bool) {
    world
        .run(&Command::DrainDevice {
            device: DeviceId(device),
            on: draining,
            at: AT,
        })
        .unwrap();
}

#[test]
fn new_device_replaces_the_old_one_once_it_has_everything() {
    let (mut world, id) = four();
    // Another replica that is missing does not hold the move up, and no node is ever in sync twice.
    world.report(id, 2, &[1]).unwrap();
    world.sync(id, 4, 0).unwrap();
    assert_eq!(
        world.states(id),
        [(1, InSync), (2, Out), (3, InSync), (4, Syncing)]
    );
    world.promote(id, 4).unwrap();
    assert_eq!(world.states(id), [(1, InSync), (2, Out), (4, InSync)]);
}

#[test]
fn either_device_carries_on_when_the_other_one_fails() {
    let (mut world, id) = four();
    world.sync(id, 4, 0).unwrap();
    world.report(id, 4, &[]).unwrap();
    assert_eq!(world.on(id, 3).state, InSync);
    world.sync(id, 4, 0).unwrap();
    let since = world.on(id, 4).since;
    world.report(id, 3, &[1]).unwrap();
    assert_eq!(world.states(id), [(1, InSync), (2, InSync), (4, Syncing)]);
    assert_eq!(world.on(id, 4).since, since, "its receiving period goes on");
    world.promote(id, 4).unwrap();
}

#[test]
fn a_node_syncs_no_second_device_but_for_one_that_leaves() {
    let (mut world, id) = four();
    // A node with more devices than that: the one that was begun goes first.
    assert_eq!(world.device(3), DeviceId(5));
    world.sync(id, 4, 0).unwrap();
    let mut group = world.group(id);
    let mut third = world.on(id, 4);
    (third.device, third.state) = (DeviceId(5), Out);
    group.members.push(third);
    let mut txn = Txn::over(&world.records);
    tables::PLACEMENT_GROUPS.put(&mut txn, &(id.pool, id.index), &group);
    for (key, value) in txn.into_writes() {
        world.records.insert(key, value.unwrap());
    }
    let second = GroupRefusal::SecondOnNode {
        group: id,
        device: DeviceId(5),
        node: NamedNode::from("node3"),
    };
    assert_eq!(refused(world.sync(id, 5, 0)), second);
}
