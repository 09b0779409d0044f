//! Filesystems and their namespace groups.

use super::*;
use crate::command::FilesystemSpec;
use crate::ids::NamespaceGroupId;
use crate::model::{Filesystem, NamespaceGroup, NodeState};
use crate::refusal::{FilesystemRefusal, MapRefusal};

fn create(world: &mut World, name: &str) -> Result<Filesystem, Refusal> {
    let uuid = Uuid::from_bytes(std::array::from_fn(|at| {
        name.as_bytes().get(at).copied().unwrap_or_default()
    }));
    let filesystem = FilesystemSpec {
        name: name.to_owned(),
        pool: "default".to_owned(),
    };
    let reply = world.run(&Command::CreateFilesystem {
        uuid,
        filesystem,
        at: AT,
    });
    reply.map(|outcome| match outcome {
        Outcome::Filesystem(filesystem) => filesystem,
        other => panic!("{other:?}"),
    })
}

fn groups(world: &World) -> Vec<NamespaceGroup> {
    tables::NAMESPACE_GROUPS.all(&world.records).unwrap()
}

fn set_state(world: &mut World, node: u64, state: NodeState) {
    let (node, incarnation, at) = (NodeId(node), Incarnation::default(), AT);
    let command = Command::SetNodeState {
        node,
        incarnation,
        state,
        at,
    };
    world.run(&command).unwrap();
}

fn ids(ids: &[u64]) -> Vec<NodeId> {
    ids.iter().copied().map(NodeId).collect()
}

#[test]
fn groups_begin_where_few_have_begun_and_then_filesystems_share_them() {
    let mut world = World::ready();
    (2..=4).for_each(|node| world.node(node));
    for number in 0..8 {
        let made = create(&mut world, &format!("fs{number}")).unwrap();
        assert_eq!(made.group, NamespaceGroupId(number + 1));
    }
    let begun = |node: u64| {
        let groups = groups(&world).into_iter();
        groups
            .filter(|group| group.founders.contains(&NodeId(node)))
            .count()
    };
    assert_eq!((1..=4).map(begun).collect::<Vec<_>>(), [6, 6, 6, 6]);
    let ninth = create(&mut world, "fs8").unwrap();
    assert_eq!(ninth.group, NamespaceGroupId(1));
    assert_eq!(create(&mut world, "fs8").unwrap(), ninth, "said twice");
    assert_eq!(groups(&world).len(), 8);
}

#[test]
fn only_nodes_that_are_up_and_stay_begin_a_group() {
    let mut world = World::ready();
    (2..=3).for_each(|node| world.node(node));
    set_state(&mut world, 3, NodeState::Down);
    create(&mut world, "one").unwrap();
    assert_eq!(
        groups(&world)[0].founders,
        ids(&[1]),
        "two tolerate no failure"
    );
    set_state(&mut world, 1, NodeState::Down);
    set_state(&mut world, 2, NodeState::Down);
    let refused = create(&mut world, "two").unwrap_err();
    let name = "two".to_owned();
    assert_eq!(refused, FilesystemRefusal::NoVoters { name }.into());
}

#[test]
fn a_node_goes_once_a_group_does_without_its_vote() {
    let mut world = World::ready();
    (2..=3).for_each(|node| world.node(node));
    let group = create(&mut world, "one").unwrap().group;
    assert_eq!(groups(&world)[0].voters, ids(&[1, 2, 3]));
    let remove = |world: &mut World, node: u64| {
        let (node, at) = (NodeId(node), AT);
        world.run(&Command::RemoveNode { node, at })
    };
    set_state(&mut world, 3, NodeState::Down);
    let refused = remove(&mut world, 2).unwrap_err();
    let node = NodeId(2);
    assert_eq!(refused, MapRefusal::GroupNeedsNode { node, group }.into());
    remove(&mut world, 3).unwrap();
    assert!(
        remove(&mut world, 2).is_err(),
        "1 alone is no majority of 3"
    );
    let voters = ids(&[1]);
    world
        .run(&Command::SetNamespaceGroupVoters { group, voters })
        .unwrap();
    remove(&mut world, 2).unwrap();
}
