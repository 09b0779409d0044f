//! Who is the authority once no member in sync is valid.

use super::*;

#[test]
fn the_only_replica_is_authority_as_soon_as_its_device_is_back() {
    let mut world = World::ready();
    world.create("disk", GIB).unwrap();
    world.start(1, 11);
    let groups = |world: &World| tables::PLACEMENT_GROUPS.all(&world.records).unwrap();
    assert!(
        groups(&world)
            .iter()
            .all(|group| group.members[0].incarnation == Incarnation(0))
    );
    world.restart(1, 12);
    for group in groups(&world) {
        let member = &group.members[0];
        assert_eq!(
            (member.state, member.incarnation),
            (InSync, Incarnation(12))
        );
    }
}

#[test]
fn group_has_one_authority_once_all_restarted_members_are_back() {
    let (mut world, id) = three();
    world.restart(1, 11);
    world.restart(2, 12);
    assert_eq!(world.states(id), [(1, InSync), (2, InSync), (3, InSync)]);
    assert!(
        refused(world.sync(id, 1, 11))
            .to_string()
            .contains("not waiting")
    );
    world.restart(3, 13);
    let authority: Vec<_> = world.group(id).in_sync().cloned().collect();
    assert_eq!(authority.len(), 1);
    assert_eq!(authority[0].incarnation.0, authority[0].device.0 + 10);
    assert_eq!(authority[0].since, world.group(id).epoch);
}

/// All three are started in these boots and brought in sync, and all started once more in those. The group
/// then, and its epoch before.
fn authority_after(before: [&str; 3], after: [&str; 3]) -> (PlacementGroup, Epoch) {
    let (mut world, id) = three();
    for (boot, node) in before.into_iter().zip(1..) {
        world.restart_in(boot, node, 10 + node);
    }
    let out = world.states(id).into_iter().filter(|(_, s)| *s == Out);
    for (node, _) in out.collect::<Vec<_>>() {
        world.sync(id, node, 10 + node).unwrap();
        world.promote(id, node).unwrap();
    }
    assert_eq!(world.states(id), [(1, InSync), (2, InSync), (3, InSync)]);
    let epoch = world.group(id).epoch;
    for (boot, node) in after.into_iter().zip(1..) {
        world.restart_in(boot, node, 20 + node);
    }
    assert_eq!(world.group(id).in_sync().count(), 1);
    (world.group(id), epoch)
}

#[test]
fn map_records_a_power_loss_but_not_a_restart() {
    let (group, before) = authority_after(["a", "b", "c"], ["x", "y", "z"]);
    assert_eq!(group.power_lost, group.epoch, "all were booted again");
    assert!(group.power_lost > before);
    let (group, before) = authority_after(["a", "b", "c"], ["a", "b", "c"]);
    assert!(group.power_lost < before, "all were only started again");
    let (group, before) = authority_after(["", "", ""], ["", "", ""]);
    assert!(group.power_lost > before, "nobody knows");
}

#[test]
fn who_kept_its_power_is_made_the_authority() {
    let (group, before) = authority_after(["a", "b", "c"], ["x", "y", "c"]);
    let authority = group.in_sync().next().unwrap();
    assert_eq!(authority.device, DeviceId(3));
    assert!(group.power_lost < before);
}

#[test]
fn group_recovers_without_a_down_member_only_after_its_grace() {
    let (mut world, id) = three();
    world.report(id, 3, &[1]).unwrap();
    world.restart(1, 11);
    let choose_authority = |after_grace| Change::ChooseAuthority {
        group: id,
        device: DeviceId(1),
        incarnation: Incarnation(11),
        after_grace,
    };
    assert!(matches!(
        refused(world.change(choose_authority(true), &[])),
        GroupRefusal::StillValid {
            device: DeviceId(2),
            ..
        }
    ));
    world.down(2);
    assert!(matches!(
        refused(world.change(choose_authority(false), &[])),
        GroupRefusal::NotAllReturned {
            device: DeviceId(2),
            ..
        }
    ));
    let out = Change::ChooseAuthority {
        group: id,
        device: DeviceId(3),
        incarnation: Incarnation(0),
        after_grace: true,
    };
    assert!(matches!(
        refused(world.change(out, &[])),
        GroupRefusal::NotInSync { .. }
    ));
    world.change(choose_authority(true), &[]).unwrap();
    assert_eq!(world.states(id), [(1, InSync), (2, Out), (3, Out)]);
}
