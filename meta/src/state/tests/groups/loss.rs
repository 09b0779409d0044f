//! Devices that are missing, and what only one node or device has and is given up.

use super::*;
use crate::command::Lost;
use crate::model::EventKind;

impl World {
    fn lose(&mut self, device: u64, incarnation: u64) -> Reply {
        self.run(&Command::LoseDevice {
            device: DeviceId(device),
            incarnation: Incarnation(incarnation),
            for_long: false,
            at: AT,
        })
    }

    fn drain(&mut self, device: u64) -> Reply {
        self.run(&Command::DrainDevice {
            device: DeviceId(device),
            on: true,
            at: AT,
        })
    }

    fn forget_device(&mut self, device: u64) -> Reply {
        self.run(&Command::RemoveDevice {
            device: DeviceId(device),
            at: AT,
        })
    }

    fn remove(&mut self, node: u64) -> Reply {
        self.run(&Command::RemoveNode {
            node: NodeId(node),
            at: AT,
        })
    }

    fn give_up(&mut self, node: u64) -> Reply {
        let lost = Lost::Node(NodeId(node));
        self.run(&Command::RemoveLost { lost, at: AT })
    }

    fn give_up_device(&mut self, device: u64) -> Reply {
        let lost = Lost::Device(DeviceId(device));
        self.run(&Command::RemoveLost { lost, at: AT })
    }

    /// The node goes, and its member is taken out.
    fn goes_out(&mut self, id: GroupId, device: u64, witness: u64) {
        self.down(device);
        self.report(id, device, &[witness]).unwrap();
    }

    fn events(&self) -> Vec<EventKind> {
        let events = tables::EVENTS.all(&self.records).unwrap();
        events.into_iter().map(|event| event.what).collect()
    }
}

fn loss(reply: Reply) -> LossRefusal {
    match reply {
        Err(Refusal::Loss(refusal)) => refusal,
        other => panic!("{other:?}"),
    }
}

/// Members 2 and 3 went out, in this order, and their nodes are back; 1 is the last in sync, and down.
fn only_the_first_has_all() -> (World, GroupId) {
    let (mut world, id) = three();
    for (boot, node) in ["a", "b", "c"].into_iter().zip(1..) {
        world.restart_in(boot, node, node * 10);
    }
    let out = world.states(id).into_iter().filter(|(_, s)| *s == Out);
    for (node, _) in out.collect::<Vec<_>>() {
        world.sync(id, node, node * 10).unwrap();
        world.promote(id, node).unwrap();
    }
    assert_eq!(world.states(id), [(1, InSync), (2, InSync), (3, InSync)]);
    world.goes_out(id, 2, 1);
    world.goes_out(id, 3, 1);
    world.restart_in("b", 2, 21);
    world.restart_in("c", 3, 31);
    world.down(1);
    (world, id)
}

#[test]
fn offline_device_is_not_trusted_and_gets_no_new_data() {
    let (mut world, id) = three();
    world.start(3, 33);
    assert!(matches!(
        world.lose(3, 0),
        Err(Refusal::Map(MapRefusal::OtherStart { .. }))
    ));
    world.lose(3, 33).unwrap();
    world.lose(3, 33).unwrap();
    let told = |world: &World, what: EventKind| {
        let events = world.events();
        events.iter().filter(|one| **one == what).count()
    };
    let (device, node) = (DeviceId(3), NodeId(3));
    assert_eq!(told(&world, EventKind::DeviceOffline { device, node }), 1);
    let demote = Change::Demote {
        group: id,
        device,
        incarnation: Incarnation(0),
    };
    world.change(demote, &[1]).unwrap();
    assert!(matches!(
        refused(world.sync(id, 3, 33)),
        GroupRefusal::NotServed { .. }
    ));
    let pool = PoolSpec::new("more", 3);
    world.run(&Command::CreatePool { pool, at: AT }).unwrap();
    let more = tables::POOLS.get(&world.records, "more").unwrap().unwrap();
    let groups = tables::PLACEMENT_GROUPS.all_below(&world.records, &more.id);
    for group in groups.unwrap() {
        assert_eq!(group.members.len(), 2);
        assert!(group.member(device).is_none());
    }
    // The disk is back.
    world.restart(3, 34);
    assert_eq!(told(&world, EventKind::DeviceOnline { device, node }), 1);
    assert_eq!(world.on(id, 3).state, Out, "it is to be compared");
    world.sync(id, 3, 34).unwrap();
    world.promote(id, 3).unwrap();
}

#[test]
fn dead_device_is_removed_even_with_no_room_for_its_share() {
    let (mut world, id) = three();
    assert!(world.drain(3).is_err(), "its share has no place to go to");
    world.start(3, 33);
    world.lose(3, 33).unwrap();
    world.report(id, 3, &[1]).unwrap();
    world.drain(3).unwrap();
    assert_eq!(world.states(id), [(1, InSync), (2, InSync)]);
    world.forget_device(3).unwrap();
    assert!(
        tables::DEVICES
            .get(&world.records, &DeviceId(3))
            .unwrap()
            .is_none()
    );
}

#[test]
fn a_dead_device_that_alone_has_something_is_not_removed() {
    let (mut world, id) = three();
    world.report(id, 1, &[3]).unwrap();
    world.report(id, 2, &[3]).unwrap();
    world.start(3, 33);
    world.lose(3, 33).unwrap();
    for reply in [world.drain(3), world.forget_device(3)] {
        let told = loss(reply).to_string();
        assert!(told.starts_with("only device 3 has"), "{told}");
        assert!(
            told.contains("1 placement groups of volume \"disk\""),
            "{told}"
        );
        assert!(told.contains("--accept-data-loss"), "{told}");
    }
    // Both were in sync; the second one longer.
    world.give_up_device(3).unwrap();
    assert_eq!(world.states(id), [(1, Out), (2, InSync)]);
    let group = world.group(id);
    assert_eq!(group.power_lost, group.epoch);
    let given_up = EventKind::DataGivenUp {
        pool: Name::parse("safe").unwrap(),
        node: NodeId(3),
        device: Some(DeviceId(3)),
        groups: 1,
        lost: 0,
    };
    assert!(world.events().contains(&given_up));
    world.sync(id, 1, 0).unwrap();
}

#[test]
fn served_device_or_running_node_is_never_given_up() {
    let (mut world, id) = three();
    world.report(id, 1, &[3]).unwrap();
    world.report(id, 2, &[3]).unwrap();
    let served = LossRefusal::Served {
        device: DeviceId(3),
    };
    assert_eq!(loss(world.give_up_device(3)), served);
    assert!(matches!(
        world.give_up(3),
        Err(Refusal::Map(MapRefusal::NodeInUse { .. }))
    ));
    assert_eq!(world.states(id), [(1, Out), (2, Out), (3, InSync)]);
}

#[test]
fn removing_a_lost_node_loses_nothing_if_another_is_in_sync() {
    let (mut world, id) = three();
    world.down(3);
    let before = world.group(id).power_lost;
    world.give_up(3).unwrap();
    assert_eq!(world.states(id), [(1, InSync), (2, InSync)]);
    assert_eq!(world.group(id).power_lost, before);
    let given_up = |what: &EventKind| matches!(what, EventKind::DataGivenUp { .. });
    assert!(!world.events().iter().any(given_up));
}

#[test]
fn in_sync_member_that_may_return_is_not_given_up_with_another() {
    let (mut world, id) = three();
    world.report(id, 3, &[1]).unwrap();
    world.down(1);
    world.down(2);
    assert!(matches!(
        refused(world.remove(1)),
        GroupRefusal::LastInSync { .. }
    ));
    world.give_up(1).unwrap();
    assert_eq!(
        world.states(id),
        [(2, InSync), (3, Out)],
        "who lacks nothing is waited for"
    );
    assert!(matches!(
        loss(world.remove(2)),
        LossRefusal::WouldLose { groups: 1, .. }
    ));
    world.give_up(2).unwrap();
    assert_eq!(world.states(id), [(3, InSync)]);
}

#[test]
fn who_was_in_sync_last_takes_over_under_its_present_start() {
    let (mut world, id) = only_the_first_has_all();
    let before = world.group(id);
    let told = loss(world.remove(1)).to_string();
    assert!(told.starts_with("only node 'one' has"), "{told}");
    assert!(!told.contains("all that these held"), "{told}");
    world.give_up(1).unwrap();
    assert_eq!(world.states(id), [(2, Out), (3, InSync)]);
    let (group, heir) = (world.group(id), world.on(id, 3));
    assert_eq!(
        (heir.incarnation, heir.since),
        (Incarnation(31), group.epoch)
    );
    assert!(group.epoch > before.epoch);
    assert_eq!(group.power_lost, group.epoch);
    // The others are compared with it.
    world.sync(id, 2, 21).unwrap();
    world.promote(id, 2).unwrap();
}

#[test]
fn how_far_a_member_was_synced_does_not_count() {
    let (mut world, id) = three();
    world.report(id, 2, &[1]).unwrap();
    world.report(id, 3, &[1]).unwrap();
    world.sync(id, 2, 0).unwrap();
    assert!(world.on(id, 2).since > world.on(id, 3).since);
    world.down(1);
    world.give_up(1).unwrap();
    assert_eq!(world.states(id), [(2, Out), (3, InSync)]);
}

#[test]
fn of_members_out_together_one_that_kept_power_takes_over() {
    for (boots, heir) in [(["b", "x"], 2), (["x", "c"], 3)] {
        let (mut world, id) = only_the_first_has_all();
        // As if one change of the map had taken both out.
        let mut group = world.group(id);
        for member in &mut group.members {
            if member.state == Out {
                member.in_sync_until = Epoch(7);
            }
        }
        let mut key = vec![tables::PLACEMENT_GROUPS.prefix()];
        key.extend(id.pool.0.to_be_bytes());
        key.extend(id.index.0.to_be_bytes());
        let record = serde_json::to_vec(&group).unwrap();
        assert!(world.records.insert(key, record).is_some());
        world.restart_in(boots[0], 2, 22);
        world.restart_in(boots[1], 3, 32);
        world.give_up(1).unwrap();
        assert_eq!(world.on(id, heir).state, InSync, "{boots:?}");
    }
}

#[test]
fn absent_member_in_sync_longer_must_be_given_up_first() {
    let (mut world, id) = only_the_first_has_all();
    world.down(3);
    let refused = loss(world.give_up(1));
    assert!(
        matches!(
            refused,
            LossRefusal::NewerAway {
                device: DeviceId(3),
                ..
            }
        ),
        "{refused}"
    );
    assert!(refused.to_string().contains("of node 'node3'"), "{refused}");
    world.give_up(3).unwrap();
    world.give_up(1).unwrap();
    assert_eq!(world.states(id), [(2, InSync)]);
}

#[test]
fn never_in_sync_replica_takes_over_only_if_there_is_no_other() {
    let (mut world, id) = three();
    world.goes_out(id, 2, 1);
    world.goes_out(id, 3, 1);
    world.node(4);
    world.device(4);
    world
        .run(&Command::SetNodeAdminState {
            node: NodeId(3),
            admin_state: AdminState::Absent,
            at: AT,
        })
        .unwrap();
    world.sync(id, 4, 0).unwrap();
    world.down(1);
    assert!(matches!(
        loss(world.give_up(1)),
        LossRefusal::NewerAway {
            device: DeviceId(2),
            ..
        }
    ));
    let mut with_second = world.clone();
    with_second.restart(2, 22);
    with_second.give_up(1).unwrap();
    assert_eq!(with_second.on(id, 2).state, InSync);

    world.give_up(2).unwrap();
    let told = loss(world.remove(1)).to_string();
    assert!(told.contains("all that these held is lost"), "{told}");
    world.give_up(1).unwrap();
    assert_eq!(world.on(id, 4).state, InSync);
    let lost = |what: &EventKind| matches!(what, EventKind::DataGivenUp { lost: 1, .. });
    assert!(world.events().iter().any(lost));
}

#[test]
fn group_without_other_members_restarts_empty_on_a_free_device() {
    let mut world = World::ready();
    world.create("disk", GIB).unwrap();
    world.node(2);
    world.down(1);
    assert!(matches!(
        loss(world.remove(1)),
        LossRefusal::WouldLose { groups, orphans, .. } if groups == orphans && groups > 0
    ));
    assert!(matches!(
        loss(world.give_up(1)),
        LossRefusal::NobodyLeft { .. }
    ));
    world.device(2);
    // It has been placed beside the lost one meanwhile, and never was in sync.
    world.give_up(1).unwrap();
    for group in tables::PLACEMENT_GROUPS.all(&world.records).unwrap() {
        assert_eq!(group.members.len(), 1);
        let member = &group.members[0];
        assert_eq!((member.device, member.state), (DeviceId(2), InSync));
    }
}
