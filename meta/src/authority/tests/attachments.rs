//! Attachments of nodes that are down.

use super::*;

/// As [`asked_in`], while the node `down` is down.
fn asked_while_down(
    cluster: &mut (Machine, BTreeMap<Vec<u8>, Vec<u8>>),
    down: NodeId,
    from: NodeId,
    command: &Command,
) -> Result<(), Refusal> {
    let say = Command::SetNodeState {
        node: down,
        incarnation: Incarnation::default(),
        state: NodeState::Down,
        at: AT,
    };
    cluster.0.apply(&say).unwrap();
    asked_in(cluster, from, command)
}

#[test]
fn nobody_without_metadata_forgets_an_attachment_of_a_node_that_is_down() {
    let mut cluster = cluster();
    let delete = |id| Command::DeleteAttachment {
        attachment: AttachmentKey::Id(AttachmentId(id)),
    };
    let delete_mount = |id| Command::DeleteFilesystemAttachment {
        attachment: AttachmentKey::Id(AttachmentId(id)),
    };
    let by_socket = |node| Command::DeleteAttachment {
        attachment: AttachmentKey::Socket {
            node,
            socket: "/run/disk0".to_owned(),
        },
    };
    for command in [delete(1), delete_mount(3), by_socket(META)] {
        let refused = asked_while_down(&mut cluster, META, HOST, &command).unwrap_err();
        let told = refused.to_string();
        assert!(told.contains("role meta (node1)"), "{told}");
        let own = asked_while_down(&mut cluster, META, META, &command);
        assert_eq!(own, Ok(()), "{command:?}");
    }
    for own in [delete(2), delete_mount(4), by_socket(HOST)] {
        assert_eq!(asked_while_down(&mut cluster, META, HOST, &own), Ok(()));
        assert_eq!(asked_while_down(&mut cluster, HOST, META, &own), Ok(()));
    }
    let write_through = Command::SetWriteThrough {
        attachment: AttachmentId(1),
        on: true,
    };
    assert!(asked_while_down(&mut cluster, META, HOST, &write_through).is_err());
    let attach = attach(META, "disk0");
    assert!(asked_while_down(&mut cluster, META, HOST, &attach).is_err());
}

#[test]
fn an_nfs_node_forgets_what_the_one_before_it_had_attached() {
    let forget = |has_role: bool, is_assigned: bool, was_nfs_node: bool| {
        let mut cluster = cluster();
        let (machine, records) = &mut cluster;
        let node = |id, is_nfs_node| match is_nfs_node {
            true => spec(id, &[Role::Nfs]),
            false => spec(id, &[Role::Host]),
        };
        // Node 3 has volume 2 attached, and node 4 takes its export over.
        let commands = [
            register(node(HOST, true)),
            register(node(NEW, true)),
            Command::CreateExport {
                fsid: Uuid::from_u128(1),
                export: ExportSpec {
                    volume: "disk1".to_owned(),
                    ..export(if is_assigned { NEW } else { HOST })
                },
                at: AT,
            },
            register(node(HOST, was_nfs_node)),
            register(node(NEW, has_role)),
        ];
        for command in commands {
            take(machine, records, &command);
        }
        let attachment = AttachmentKey::Id(AttachmentId(2));
        let delete = Command::DeleteAttachment { attachment };
        let is_early = asked_in(&cluster, NEW, &delete).is_ok();
        assert!(!is_early, "its node is up");
        asked_while_down(&mut cluster, HOST, NEW, &delete).is_ok()
    };
    assert!(forget(true, true, true));
    assert!(!forget(false, true, true));
    assert!(!forget(true, false, true));
    assert!(!forget(true, true, false));
}
