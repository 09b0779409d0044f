//! Pools that get other numbers of replicas.

use super::*;
use crate::model::{EventKind, Name, Pool};
use crate::refusal::PoolRefusal;

/// A node with a volume in the default pool of one replica, and two more nodes.
fn one_and_two_more() -> (World, GroupId) {
    let mut world = World::ready();
    world.create("disk", GIB).unwrap();
    for node in [2, 3] {
        world.node(node);
        world.device(node);
    }
    let pool = tables::POOLS
        .get(&world.records, DEFAULT_POOL)
        .unwrap()
        .unwrap();
    let index = crate::ids::PgIndex(0);
    (
        world,
        GroupId {
            pool: pool.id,
            index,
        },
    )
}

fn set(world: &mut World, replicas: Option<u8>, min_in_sync: Option<u8>) -> Result<Pool, Refusal> {
    let set = Command::SetPool {
        name: DEFAULT_POOL.to_owned(),
        replicas,
        min_in_sync,
    };
    match world.run(&set)? {
        Outcome::Pool(pool) => Ok(pool),
        other => panic!("{other:?}"),
    }
}

#[test]
fn new_replicas_are_synced_before_they_count() {
    let (mut world, id) = one_and_two_more();
    let pool = set(&mut world, Some(3), None).unwrap();
    assert_eq!((pool.replicas, pool.min_in_sync), (3, 1));
    let states: Vec<ReplicaState> = world
        .states(id)
        .into_iter()
        .map(|(_, state)| state)
        .collect();
    assert_eq!(states.iter().filter(|state| **state == InSync).count(), 1);
    assert_eq!(states.iter().filter(|state| **state == Out).count(), 2);
    let least = 1;
    let early = PoolRefusal::TooFewInSync {
        name: DEFAULT_POOL.to_owned(),
        min_in_sync: 2,
        least,
    };
    assert_eq!(set(&mut world, None, Some(2)), Err(early.into()));

    let groups = tables::PLACEMENT_GROUPS.all(&world.records).unwrap();
    for group in groups {
        let id = GroupId {
            pool: id.pool,
            index: group.index,
        };
        for member in group.members.iter().filter(|member| !member.is_in_sync()) {
            world.sync(id, member.device.0, 0).unwrap();
            world.promote(id, member.device.0).unwrap();
        }
    }
    let pool = set(&mut world, None, Some(2)).unwrap();
    assert_eq!((pool.replicas, pool.min_in_sync), (3, 2));
}

#[test]
fn superfluous_replicas_go_and_the_volumes_keep_one_in_sync() {
    let (mut world, id) = three();
    let lower = |replicas, min_in_sync| Command::SetPool {
        name: "safe".to_owned(),
        replicas: Some(replicas),
        min_in_sync,
    };
    world.run(&lower(1, None)).unwrap();
    let group = world.group(id);
    let kept = group
        .members
        .iter()
        .filter(|one| !one.leaving && one.is_in_sync());
    assert_eq!(kept.count(), 1, "{group:?}");
    let pool = tables::POOLS.get(&world.records, "safe").unwrap().unwrap();
    assert_eq!((pool.replicas, pool.min_in_sync), (1, 1));
}

#[test]
fn numbers_that_cannot_be_are_refused_and_changes_are_told() {
    let (mut world, _) = one_and_two_more();
    let none = set(&mut world, Some(0), None);
    assert!(
        matches!(none, Err(Refusal::Pool(PoolRefusal::BadReplicas { .. }))),
        "{none:?}"
    );
    let many = set(&mut world, Some(2), Some(3));
    assert!(
        matches!(many, Err(Refusal::Pool(PoolRefusal::BadMinInSync { .. }))),
        "{many:?}"
    );
    let unknown = Command::SetPool {
        name: "nothing".to_owned(),
        replicas: Some(2),
        min_in_sync: None,
    };
    let unknown = world.run(&unknown);
    assert!(
        matches!(unknown, Err(Refusal::Pool(PoolRefusal::Unknown { .. }))),
        "{unknown:?}"
    );

    let author = Author {
        node: NodeId(1),
        uid: None,
        forced: false,
    };
    world.author = Some((author, UnixMillis(5_000)));
    let told = |world: &World| tables::EVENTS.all(&world.records).unwrap().len();
    let before = told(&world);
    set(&mut world, Some(2), None).unwrap();
    set(&mut world, Some(2), None).unwrap();
    let events = tables::EVENTS
        .all(&world.records)
        .unwrap()
        .split_off(before);
    let changed = EventKind::PoolChanged {
        pool: Name::parse(DEFAULT_POOL).unwrap(),
        replicas: 2,
        min_in_sync: 1,
    };
    let what: Vec<&EventKind> = events.iter().map(|event| &event.what).collect();
    assert_eq!(
        what.iter().filter(|one| ***one == changed).count(),
        1,
        "{what:?}"
    );
}
