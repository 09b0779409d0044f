//! Members that fail again and again pause longer each time.

use super::*;

#[test]
fn a_sync_that_fails_pauses_longer_each_time() {
    let mut world = World::new(3, 3, 1);
    world.run(STEP);
    world.syncs_succeed = false;
    world.start(3, 301);
    let mut failures = 0;
    for _ in 0..400 {
        let map = world.machine.map();
        let first = map.groups().find(|group| group.members.len() == 3).unwrap();
        let syncing = first
            .members
            .iter()
            .find(|one| one.state == ReplicaState::Syncing);
        if let Some(member) = syncing {
            failures += 1;
            world.report(first.id(), member, Vec::new());
        }
        world.step();
    }
    // 100 s hold pauses of 1, 2, 4, ... 60 s and not a failure in every interval.
    assert!((2..=9).contains(&failures), "{failures}");
    let told = world.watch.failing(world.now);
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(
        told[0].failures >= 2 && told[0].again_in_ms <= 60_000,
        "{told:?}"
    );
    assert_eq!(world.watch.last_heard(world.now).count(), 3);
    world.syncs_succeed = true;
    world.run(Duration::from_secs(90));
    assert_eq!(world.count(ReplicaState::InSync), 3);
}

/// A full device: what its replicas lack while they are out they get, and the next write to each fails.
#[test]
fn flapping_device_pauses_longer_each_time_for_all_its_groups() {
    let mut world = World::new(3, 3, 8);
    world.run(STEP);
    let (mut falls, mut last) = (Vec::new(), Duration::ZERO);
    for _ in 0..1200 {
        let map = world.machine.map();
        for group in map.groups() {
            let full = group.in_sync().find(|member| member.node == NodeId(3));
            let Some(member) = full.filter(|_| group.members.len() == 3) else {
                continue;
            };
            if world.now - last > STEP * 2 {
                falls.push(world.now);
            }
            last = world.now;
            let heard = world.watch.heard_since(world.now);
            world.report(group.id(), member, heard);
        }
        world.step();
    }
    // 300 s hold pauses of 1, 2, 4, ... 60 s.
    assert!((7..=12).contains(&falls.len()), "{falls:?}");
    let told = world.watch.failing(world.now);
    assert_eq!(told.len(), 8, "{told:?}");
    assert!(
        told.iter()
            .all(|one| one.failures >= 6 && one.again_in_ms <= 60_000)
    );
    // Space is made: after the pause it returns, and after a while nothing is held against it.
    world.run(Duration::from_secs(61));
    assert_eq!(world.count(ReplicaState::InSync), 24);
    assert_eq!(world.watch.failing(world.now), []);
}

#[test]
fn a_device_that_falls_does_not_pause_while_writes_wait_for_it() {
    let mut world = World::new(3, 3, 1);
    world.run(STEP);
    let mut returns = 0;
    for _ in 0..80 {
        let map = world.machine.map();
        let group = map.groups().find(|group| group.members.len() == 3).unwrap();
        let away = group.in_sync().find(|member| member.node == NodeId(2));
        let full = group.in_sync().find(|member| member.node == NodeId(3));
        for member in away.into_iter().chain(full) {
            returns += 1;
            let heard = world.watch.heard_since(world.now);
            world.report(group.id(), member, heard);
        }
        // It is in sync for a moment, else its sync has failed.
        world.run(STEP * 2);
    }
    // Forty seconds, in which a pause would have grown to sixteen.
    assert!(returns > 40, "{returns}");
}
