//! Up to which feature level each node knows, and when the cluster's can be raised.

use std::collections::BTreeMap;

use crate::command::Command;
use crate::ids::{Incarnation, NodeId, UnixMillis};
use crate::level::Level;
use crate::map::ClusterMap;

/// What nodes have said to this leader.
#[derive(Debug, Default)]
pub(super) struct Levels {
    known_by: BTreeMap<NodeId, (Incarnation, Level)>,
}

impl Levels {
    pub(super) fn note(&mut self, node: NodeId, incarnation: Incarnation, level: Level) {
        self.known_by.insert(node, (incarnation, level));
    }

    /// Those of the starts that are in the map.
    pub(super) fn of(&self, map: &ClusterMap) -> impl Iterator<Item = (NodeId, Level)> {
        map.nodes().filter_map(|node| {
            let (incarnation, level) = self.known_by.get(&node.id)?;
            (*incarnation == node.incarnation).then_some((node.id, *level))
        })
    }

    /// What is to be proposed now. A node that is down, or was let in and has yet to start, holds the level:
    /// nobody knows what program it will run.
    pub(super) fn plan(&mut self, map: &ClusterMap, at: UnixMillis) -> Option<Command> {
        self.known_by.retain(|node, _| map.node(*node).is_some());
        if self.of(map).count() < map.nodes().count() {
            return None;
        }
        let to = self.of(map).map(|(_, level)| level).min()?;
        (to > map.level()).then_some(Command::RaiseLevel { to, at })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::NodeSpec;
    use crate::testing::Machine;

    const AT: UnixMillis = UnixMillis(7);
    const OLD: Level = Level(2);
    const NEW: Level = Level(3);

    fn spec(node: u64, incarnation: u64, level: Level) -> NodeSpec {
        NodeSpec {
            incarnation: Incarnation(incarnation),
            level,
            ..NodeSpec::new(NodeId(node), format!("n{node}"))
        }
    }

    /// Nodes that all know the old level.
    fn cluster(nodes: u64) -> (Machine, Levels) {
        let (mut machine, mut levels) = (Machine::default(), Levels::default());
        let node = spec(1, 1, OLD);
        let cluster = uuid::Uuid::from_u128(1);
        machine
            .apply(&Command::Bootstrap {
                cluster,
                node,
                pool: None,
                at: AT,
            })
            .unwrap();
        for node in 1..=nodes {
            start(&mut machine, &mut levels, node, 1, OLD);
        }
        (machine, levels)
    }

    fn start(machine: &mut Machine, levels: &mut Levels, node: u64, start: u64, level: Level) {
        let map = machine.map();
        let replaces = map.node(NodeId(node)).map(|node| node.incarnation);
        let node = spec(node, start, level);
        let (id, incarnation) = (node.id, node.incarnation);
        let replaces = replaces.unwrap_or_default();
        machine
            .apply(&Command::RegisterNode {
                node,
                replaces,
                at: AT,
            })
            .unwrap();
        levels.note(id, incarnation, level);
    }

    #[test]
    fn the_level_rises_when_the_last_node_knows_it() {
        let (mut machine, mut levels) = cluster(3);
        assert_eq!(machine.map().level(), OLD);
        for node in [1, 2] {
            start(&mut machine, &mut levels, node, 2, NEW);
            assert_eq!(levels.plan(&machine.map(), AT), None);
        }
        start(&mut machine, &mut levels, 3, 2, NEW);
        let raise = Command::RaiseLevel { to: NEW, at: AT };
        assert_eq!(levels.plan(&machine.map(), AT), Some(raise.clone()));
        machine.apply(&raise).unwrap();
        assert_eq!(levels.plan(&machine.map(), AT), None);
        assert_eq!(machine.map().level(), NEW);
    }

    #[test]
    fn who_was_not_heard_since_it_started_holds_the_level() {
        let (mut machine, mut levels) = cluster(2);
        start(&mut machine, &mut levels, 1, 2, NEW);
        start(&mut machine, &mut levels, 2, 2, NEW);
        // It started once more, and what it runs now has not been said.
        levels.note(NodeId(2), Incarnation(1), NEW);
        assert_eq!(levels.plan(&machine.map(), AT), None);
        levels.note(NodeId(2), Incarnation(2), OLD);
        assert_eq!(levels.plan(&machine.map(), AT), None);
        levels.note(NodeId(2), Incarnation(2), NEW);
        assert!(levels.plan(&machine.map(), AT).is_some());
        // A node without a word of this leader's time.
        let mut later = Levels::default();
        later.note(NodeId(1), Incarnation(2), NEW);
        assert_eq!(later.plan(&machine.map(), AT), None);
    }
}
