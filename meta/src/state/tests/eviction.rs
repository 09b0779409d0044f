//! Nodes that are removed while they are up.

use super::*;
use crate::model::{Event, EventKind};

const HOST: NodeId = NodeId(2);

/// Creates a storage node, a host, and a second host, with volumes that the hosts use.
fn world() -> World {
    let mut world = World::ready();
    (2..=3).for_each(|node| world.node(node));
    for volume in ["disk", "other", "moving"] {
        world.create(volume, GIB).unwrap();
    }
    world.filesystem("home").unwrap();
    world
}

fn on(node: u64, volume: &str, socket: &str) -> AttachmentSpec {
    AttachmentSpec {
        node: NodeId(node),
        ..attachment(volume, socket)
    }
}

fn evict(world: &mut World) -> Reply {
    world.run(&Command::EvictNode { node: HOST, at: AT })
}

fn last_event(world: &World) -> Event {
    let events = tables::EVENTS.all(&world.records).unwrap();
    events.into_iter().next_back().unwrap()
}

#[test]
fn a_node_that_serves_guests_is_evicted_with_all_its_attachments() {
    let mut world = world();
    world.attach(on(2, "disk", "/run/disk")).unwrap();
    let stays = world.attach(on(3, "other", "/run/other")).unwrap();
    let mount = |node: u64| FilesystemAttachmentSpec {
        node: NodeId(node),
        ..mount("home", "/run/fs")
    };
    world.mount(mount(2)).unwrap();
    let mount_stays = world.mount(mount(3)).unwrap();
    // The evicted node waits to take over an attachment of another node.
    let source = world.attach(on(3, "moving", "/run/moving")).unwrap();
    let offer = Command::MoveAttachment {
        attachment: source.id,
        to: HOST,
        socket: "/run/moving".to_owned(),
        at: AT,
    };
    world.run(&offer).unwrap();
    let remove = Command::RemoveNode { node: HOST, at: AT };
    let refused = world.run(&remove).unwrap_err().to_string();
    assert!(refused.contains("--evict"), "{refused}");

    evict(&mut world).unwrap();
    assert!(tables::NODES.get(&world.records, &HOST).unwrap().is_none());
    let left = tables::ATTACHMENTS.all(&world.records).unwrap();
    assert_eq!(left, [stays, source]);
    let left = tables::FILESYSTEM_ATTACHMENTS.all(&world.records).unwrap();
    assert_eq!(left, [mount_stays]);
    let by_socket = tables::ATTACHMENTS_BY_SOCKET.all(&world.records).unwrap();
    assert_eq!(by_socket.len(), 3);
    let what = EventKind::NodeEvicted { node: HOST };
    assert_eq!(last_event(&world).what, what);
    // Said twice, because the first answer was lost.
    let unknown = MapRefusal::unknown_node(HOST);
    assert_eq!(evict(&mut world), Err(unknown.into()));
}

#[test]
fn an_evicted_node_gets_no_lease_and_its_leases_expire() {
    let mut world = world();
    world.attach(on(2, "disk", "/run/disk")).unwrap();
    let lease = world.grant("disk", 2, None).unwrap();
    evict(&mut world).unwrap();
    let refused = [
        world.grant("disk", 2, None).unwrap_err(),
        world.grant("other", 2, None).unwrap_err(),
        world.attach(on(2, "disk", "/run/disk")).unwrap_err(),
    ];
    let unknown = Refusal::from(MapRefusal::unknown_node(HOST));
    assert!(refused.iter().all(|one| *one == unknown), "{refused:?}");
    let again = world.run(&Command::RegisterNode {
        node: NodeSpec::new(HOST, "node2"),
        replaces: Incarnation::default(),
        at: AT,
    });
    let (node, name) = (HOST, "node2".to_owned());
    assert_eq!(again, Err(MapRefusal::WasRemoved { node, name }.into()));
    // Another node is granted the lease once its time is over, with a newer generation.
    world.attach(on(3, "disk", "/run/disk")).unwrap();
    let held = world.grant("disk", 3, None).unwrap_err();
    assert!(
        matches!(
            &held,
            Refusal::Lease(LeaseRefusal::Held { holder, .. }) if *holder == HOST.into()
        ),
        "{held:?}"
    );
    let granted = world.grant("disk", 3, Some(lease.generation.0)).unwrap();
    assert_eq!(granted.holder, Some(NodeId(3)));
    assert!(granted.generation > lease.generation);
}

#[test]
fn a_node_that_holds_data_is_not_evicted() {
    let mut world = world();
    world.device(2);
    let command = Command::CreatePool {
        pool: PoolSpec::new("two", 2),
        at: AT,
    };
    world.run(&command).unwrap();
    let volume = VolumeSpec {
        pool: Some("two".to_owned()),
        ..VolumeSpec::new("copied", GIB)
    };
    world.create_in(volume).unwrap();
    let refused = evict(&mut world).unwrap_err();
    assert!(
        matches!(refused, Refusal::Map(MapRefusal::NodeInUse { .. })),
        "{refused:?}"
    );
    assert!(refused.to_string().contains("node drain"), "{refused}");
}
