//! Filesystems and their namespace groups.

use super::*;
use crate::ids::NamespaceGroupId;
use crate::model::{EventKind, FilesystemState, NamespaceGroup, NodeState};
use crate::refusal::FilesystemRefusal;

fn create(world: &mut World, name: &str) -> Result<Filesystem, Refusal> {
    world.filesystem(name)
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
    let node = "node2".into();
    let needed = MapRefusal::GroupNeedsNode { node, group };
    assert_eq!(refused, needed.into());
    let node = NodeId(2);
    let evicted = world.run(&Command::EvictNode { node, at: AT });
    assert_eq!(
        evicted,
        Err(refused),
        "eviction does not remove a voter either"
    );
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

#[test]
fn a_filesystem_that_is_deleted_keeps_its_name_until_nothing_is_left() {
    let mut world = World::ready();
    let made = create(&mut world, "home").unwrap();
    let id = made.id;
    let dropped = |world: &mut World| world.run(&Command::FilesystemDropped { id });
    let name = || "home".to_owned();
    let not_yet = FilesystemRefusal::NotDeleting { name: name() };
    assert_eq!(dropped(&mut world), Err(not_yet.into()));
    let attached = world.mount(mount("home", "/run/fs.sock")).unwrap();
    let in_use = FilesystemRefusal::InUse {
        name: name(),
        socket: "/run/fs.sock".to_owned(),
        node: "one".into(),
    };
    assert_eq!(world.delete_filesystem("home"), Err(in_use.into()));
    let attachment = AttachmentKey::Id(attached.id);
    world
        .run(&Command::DeleteFilesystemAttachment { attachment })
        .unwrap();
    let epoch = |world: &World| {
        tables::CLUSTER
            .get(&world.records, &())
            .unwrap()
            .unwrap()
            .epoch
    };
    let before = epoch(&world);
    let deleted = world.delete_filesystem("home").unwrap();
    assert_eq!((deleted.id, deleted.state), (id, FilesystemState::Deleting));
    assert!(epoch(&world) > before, "the map says so");
    let records = world.records.clone();
    assert_eq!(world.delete_filesystem("home").unwrap(), deleted);
    assert_eq!(world.records, records, "said twice");
    let deleting = || Refusal::from(FilesystemRefusal::Deleting { name: name() });
    assert_eq!(create(&mut world, "home"), Err(deleting()));
    assert_eq!(world.mount(mount("home", "/run/fs.sock")), Err(deleting()));
    assert_eq!(dropped(&mut world), Ok(Outcome::Filesystem(deleted)));
    assert_eq!(dropped(&mut world), Ok(Outcome::Done), "said twice");
    let unknown = FilesystemRefusal::Unknown { name: name() };
    assert_eq!(world.delete_filesystem("home"), Err(unknown.into()));
    let again = create(&mut world, "home").unwrap();
    assert!(again.id > id && again.group == made.group);
    let events = tables::EVENTS.all(&world.records).unwrap().into_iter();
    let told: Vec<_> = events
        .map(|event| event.what)
        .filter(|what| {
            let text = what.to_string();
            text.contains("filesystem") && !text.contains("tached")
        })
        .collect();
    let filesystem = made.name;
    let created = EventKind::FilesystemCreated {
        filesystem: filesystem.clone(),
    };
    let gone = EventKind::FilesystemDeleted { filesystem };
    assert_eq!(told, [created.clone(), gone, created]);
}
