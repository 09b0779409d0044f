//! Leases.

use super::*;
use crate::refusal::NamedVolume;

#[test]
fn every_grant_raises_the_generation_and_older_ones_are_refused() {
    let mut world = World::ready();
    let id = world.create("disk", GIB).unwrap().id;
    let generations: Vec<u64> = (0..3)
        .map(|_| world.grant("disk", 1, None).unwrap().generation.0)
        .collect();
    assert_eq!(generations, [1, 2, 3]);
    let superseded = LeaseRefusal::Superseded {
        volume: NamedVolume::from("disk"),
        current: Generation(3),
        claimed: Generation(2),
    };
    assert_eq!(world.release(id, 1, 2), Err(superseded.into()));
    assert_eq!(
        world.release(id, 1, 4).unwrap_err().to_string(),
        "node one does not hold the lease of volume disk (generation 3): ask for it first"
    );
    world.release(id, 1, 3).unwrap();
    world.release(id, 1, 3).unwrap();
    assert_eq!(
        world.grant("disk", 1, None).unwrap().generation,
        Generation(4),
        "it survives release"
    );
}

#[test]
fn lease_moves_only_after_release_or_expiry_of_its_generation() {
    let mut world = World::ready();
    world.node(2);
    let id = world.create("disk", GIB).unwrap().id;
    world.grant("disk", 1, None).unwrap();
    world.grant("disk", 1, None).unwrap();
    for expired in [None, Some(1), Some(3)] {
        let held = LeaseRefusal::Held {
            volume: "disk".to_owned(),
            holder: "one".into(),
            generation: Generation(2),
        };
        assert_eq!(world.grant("disk", 2, expired), Err(held.into()));
    }
    assert_eq!(
        world.grant("disk", 2, Some(2)).unwrap().generation,
        Generation(3)
    );
    assert!(world.release(id, 1, 2).is_err());
    world.release(id, 2, 3).unwrap();
    assert_eq!(
        world.grant("disk", 1, None).unwrap().holder,
        Some(NodeId(1))
    );
    assert!(matches!(
        world.grant("disk", 9, None),
        Err(Refusal::Map(MapRefusal::UnknownNode { .. }))
    ));
}

#[test]
fn a_grant_carries_an_epoch_as_new_as_the_map() {
    let mut world = World::ready();
    world.create("disk", GIB).unwrap();
    let first = world.grant("disk", 1, None).unwrap().epoch;
    world.device(1);
    assert!(world.grant("disk", 1, None).unwrap().epoch > first);
}
