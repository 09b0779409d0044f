//! Attachments of filesystems.

use super::*;
use crate::model::{NodeState, Role};

#[test]
fn a_socket_serves_one_volume_or_filesystem() {
    let mut world = World::ready();
    let filesystem = world.filesystem("home").unwrap();
    world.create("disk", GIB).unwrap();
    let disk = world.attach(attachment("disk", "/run/disk")).unwrap();
    let one = world.mount(mount("home", "/run/one")).unwrap();
    assert_eq!((one.filesystem, one.name), (filesystem.id, filesystem.name));
    assert!(one.id > disk.id, "they share a counter");
    // Any number of guests use it.
    let two = world.mount(mount("home", "/run/two")).unwrap();
    let taken = |socket: &str, target: &str| {
        let (socket, target) = (socket.to_owned(), target.to_owned());
        Refusal::from(AttachmentRefusal::SocketTaken {
            socket,
            node: "one".into(),
            target,
        })
    };
    let refused = world.mount(mount("home", "/run/disk"));
    assert_eq!(refused, Err(taken("/run/disk", "disk")));
    let again = world.mount(mount("home", "/run/one")).unwrap();
    assert_eq!(again.id, one.id, "said twice");
    let refused = world.mount(FilesystemAttachmentSpec {
        read_only: true,
        ..mount("home", "/run/one")
    });
    assert_eq!(refused, Err(taken("/run/one", "home")), "as of a volume");
    let refused = world.attach(attachment("disk", "/run/two"));
    assert_eq!(refused, Err(taken("/run/two", "home")));
    // Neither is forgotten as the other kind.
    let socket = |path: &str| AttachmentKey::Socket {
        node: NodeId(1),
        socket: path.to_owned(),
    };
    for attachment in [socket("/run/disk"), AttachmentKey::Id(disk.id)] {
        let unknown = world.run(&Command::DeleteFilesystemAttachment { attachment });
        let refusal = unknown.unwrap_err();
        assert!(
            refusal.to_string().contains("there is no attachment"),
            "{refusal}"
        );
    }
    for attachment in [socket("/run/one"), AttachmentKey::Id(one.id)] {
        world
            .run(&Command::DeleteAttachment { attachment })
            .unwrap_err();
    }
    let incoming = AttachmentKey::Incoming(one.id);
    let refused = world.run(&Command::DeleteFilesystemAttachment {
        attachment: incoming,
    });
    assert_eq!(
        refused.unwrap_err().to_string(),
        format!("attachment {} is not incoming", one.id)
    );
    for attachment in [socket("/run/one"), AttachmentKey::Id(two.id)] {
        world
            .run(&Command::DeleteFilesystemAttachment { attachment })
            .unwrap();
    }
    world.attach(attachment("disk", "/run/one")).unwrap_err();
    world.create("other", GIB).unwrap();
    world.attach(attachment("other", "/run/one")).unwrap();
}

#[test]
fn what_no_guest_could_use_is_refused_with_the_culprit() {
    let mut world = World::ready();
    world.filesystem("home").unwrap();
    let good = || mount("home", "/run/fs");
    let bad = [
        (mount("away", "/run/fs"), "no filesystem \"away\""),
        (mount("home", "run/fs"), "\"run/fs\""),
        (mount("home", "/run/"), "\"/run/\""),
        (
            FilesystemAttachmentSpec {
                queues: 0,
                ..good()
            },
            "0 queues",
        ),
        (
            FilesystemAttachmentSpec {
                queues: 65,
                ..good()
            },
            "65 queues",
        ),
        (
            FilesystemAttachmentSpec {
                node: NodeId(9),
                ..good()
            },
            "node 9",
        ),
    ];
    for (spec, culprit) in bad {
        let refusal = world.mount(spec).unwrap_err().to_string();
        assert!(
            refusal.contains(culprit) && refusal.contains(':'),
            "{refusal}"
        );
    }
    for tag in ["", "a\nb", "a\0b", &"t".repeat(37), &"\u{e4}".repeat(19)] {
        let tag = tag.to_owned();
        let spec = FilesystemAttachmentSpec { tag, ..good() };
        let refused = world.mount(spec).unwrap_err();
        let is_tag = matches!(
            refused,
            Refusal::Attachment(AttachmentRefusal::BadTag { .. })
        );
        assert!(is_tag && !refused.to_string().contains('\n'), "{refused}");
        assert_eq!(refused.kind(), RefusalKind::Invalid);
    }
    let longest = FilesystemAttachmentSpec {
        tag: "\u{e4}".repeat(18),
        queues: 64,
        ..good()
    };
    world.mount(longest).unwrap();
}

#[test]
fn only_nodes_with_the_role_host_serve_guests() {
    let mut world = World::ready();
    world.filesystem("home").unwrap();
    let node = NodeSpec {
        roles: [Role::Storage].into(),
        ..NodeSpec::new(NodeId(2), "store")
    };
    let register = Command::RegisterNode {
        node,
        replaces: Incarnation::default(),
        at: AT,
    };
    world.run(&register).unwrap();
    let elsewhere = FilesystemAttachmentSpec {
        node: NodeId(2),
        ..mount("home", "/run/fs")
    };
    let node = "store".to_owned();
    let refused = world.mount(elsewhere);
    assert_eq!(refused, Err(AttachmentRefusal::NotHost { node }.into()));
}

#[test]
fn attachments_go_with_their_node() {
    let mut world = World::ready();
    (2..=3).for_each(|node| world.node(node));
    world.filesystem("home").unwrap();
    let elsewhere = FilesystemAttachmentSpec {
        node: NodeId(3),
        ..mount("home", "/run/fs")
    };
    world.mount(elsewhere).unwrap();
    let node = NodeId(3);
    let remove = Command::RemoveNode { node, at: AT };
    let serves = MapRefusal::NodeServes {
        node: "node3".into(),
        socket: "/run/fs".to_owned(),
    };
    assert_eq!(world.run(&remove), Err(serves.into()));
    let down = Command::SetNodeState {
        node,
        incarnation: Incarnation::default(),
        state: NodeState::Down,
        at: AT,
    };
    world.run(&down).unwrap();
    world.run(&remove).unwrap();
    assert_eq!(
        tables::FILESYSTEM_ATTACHMENTS.all(&world.records).unwrap(),
        []
    );
    assert_eq!(
        tables::ATTACHMENTS_BY_SOCKET.all(&world.records).unwrap(),
        []
    );
    world.delete_filesystem("home").unwrap();
}
