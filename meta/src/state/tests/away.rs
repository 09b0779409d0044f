//! Nodes that are away while another's share is to be given to somebody.

use super::*;
use crate::model::{AdminState, NodeState};

impl World {
    fn is_told(&mut self, node: u64, state: NodeState) {
        let known = tables::NODES.get(&self.records, &NodeId(node)).unwrap();
        self.run(&Command::SetNodeState {
            node: NodeId(node),
            incarnation: known.unwrap().incarnation,
            state,
            at: AT,
        })
        .unwrap();
    }

    /// Members of the pool's only group that are to stay.
    fn wanted(&self, pool: PoolId) -> Vec<DeviceId> {
        let groups = tables::PLACEMENT_GROUPS.all(&self.records).unwrap();
        let group = groups.iter().find(|group| group.pool == pool);
        group
            .unwrap()
            .wanted()
            .map(|member| member.device)
            .collect()
    }
}

/// Four nodes with a device each, and a pool of three replicas with a volume; one has no replica. It is away
/// while another one's share is given away, so that nobody takes it.
fn nobody_takes_a_share() -> (World, PoolId, u64) {
    let mut world = World::ready();
    for node in [2, 3, 4] {
        world.node(node);
        world.device(node);
    }
    let pool = PoolSpec {
        placement_groups: Some(1),
        ..PoolSpec::new("safe", 3)
    };
    let reply = world.run(&Command::CreatePool { pool, at: AT }).unwrap();
    let Outcome::Pool(pool) = reply else {
        panic!("{reply:?}")
    };
    let volume = VolumeSpec {
        pool: Some("safe".to_owned()),
        ..VolumeSpec::new("disk", GIB)
    };
    world.create_in(volume).unwrap();
    let members = world.wanted(pool.id);
    let spare = (1..=4).find(|node| !members.contains(&DeviceId(*node)));
    let spare = spare.expect("three of four");
    let gone = members[2].0;
    world.is_told(spare, NodeState::Down);
    world.is_told(gone, NodeState::Down);
    world
        .run(&Command::SetNodeAdminState {
            node: NodeId(gone),
            admin_state: AdminState::Absent,
            at: AT,
        })
        .unwrap();
    assert_eq!(world.wanted(pool.id).len(), 2);
    (world, pool.id, spare)
}

#[test]
fn node_heard_from_again_takes_the_unplaced_share() {
    let (mut world, pool, spare) = nobody_takes_a_share();
    world.is_told(spare, NodeState::Up);
    assert_eq!(world.wanted(pool).len(), 3);
}

#[test]
fn restarted_node_takes_the_unplaced_share() {
    let (mut world, pool, spare) = nobody_takes_a_share();
    let node = NodeSpec {
        incarnation: Incarnation(77),
        ..NodeSpec::new(NodeId(spare), format!("node{spare}"))
    };
    let replaces = Incarnation::default();
    world
        .run(&Command::RegisterNode {
            node,
            replaces,
            at: AT,
        })
        .unwrap();
    assert_eq!(world.wanted(pool).len(), 3);
}
