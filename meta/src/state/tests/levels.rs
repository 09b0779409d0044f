//! The feature level of the cluster.

use super::*;
use crate::level::Level;
use crate::model::EventKind;

fn start(world: &mut World, level: Level, incarnation: u64) -> Reply {
    let node = NodeSpec {
        incarnation: Incarnation(incarnation),
        level,
        ..NodeSpec::new(NodeId(1), "one")
    };
    let known = tables::NODES.get(&world.records, &NodeId(1)).unwrap();
    world.run(&Command::RegisterNode {
        node,
        replaces: known.unwrap().incarnation,
        at: AT,
    })
}

fn level(world: &World) -> Level {
    let cluster = tables::CLUSTER.get(&world.records, &()).unwrap();
    cluster.unwrap().level
}

#[test]
fn level_only_rises_and_older_programs_are_then_refused() {
    let mut world = World::ready();
    let known = level(&world);
    assert_eq!(known, Level::KNOWN, "a new cluster uses all that is there");
    let newer = Level(known.0 + 1);
    start(&mut world, known, 1).unwrap();
    let raise = |to| Command::RaiseLevel { to, at: AT };
    world.run(&raise(newer)).unwrap();
    assert_eq!(level(&world), newer);
    let events = tables::EVENTS.all(&world.records).unwrap();
    assert_eq!(
        events.last().unwrap().what,
        EventKind::LevelRaised { to: newer }
    );
    let before = world.records.clone();
    for to in [newer, known] {
        world.run(&raise(to)).unwrap();
        assert_eq!(world.records, before);
    }
    assert!(matches!(
        start(&mut world, known, 2),
        Err(Refusal::Map(MapRefusal::TooOld { .. }))
    ));
    start(&mut world, newer, 2).unwrap();
}
