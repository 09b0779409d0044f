//! Who may ask for what.

mod attachments;

use std::collections::BTreeMap;

use namespace::SegmentId;
use uuid::Uuid;

use super::*;
use crate::command::{
    AttachmentSpec, DeviceSpec, ExportSpec, FilesystemAttachmentSpec, FilesystemSpec, PoolSpec,
    VolumeSpec,
};
use crate::ids::{AttachmentId, Generation, Incarnation, NamespaceGroupId, UnixMillis, VolumeId};
use crate::model::{AdminState, AttachmentOptions, Author, DeviceState, NodeState};
use crate::pki::JoinToken;
use crate::state::{Txn, apply};
use crate::testing::Machine;

const AT: UnixMillis = UnixMillis(1);
/// Keeps the metadata.
const META: NodeId = NodeId(1);
/// Stores data, and nothing else.
const STORAGE: NodeId = NodeId(2);
/// Serves guests, and nothing else.
const HOST: NodeId = NodeId(3);
/// In the Raft group, and not in the map yet.
const NEW: NodeId = NodeId(4);

fn spec(id: NodeId, roles: &[Role]) -> NodeSpec {
    NodeSpec {
        roles: roles.iter().copied().collect(),
        ..NodeSpec::new(id, format!("node{id}"))
    }
}

fn register(node: NodeSpec) -> Command {
    Command::RegisterNode {
        node,
        replaces: Incarnation::default(),
        at: AT,
    }
}

/// A cluster of the three, with the devices 1 and 2 of the first two and the attachments 1 and 2 of the first
/// and the third, which holds the lease of volume 2. They have the filesystems 1 and 2 attached, too, each
/// with a segment.
fn cluster() -> (Machine, BTreeMap<Vec<u8>, Vec<u8>>) {
    let bootstrap = Command::Bootstrap {
        cluster: Uuid::from_u128(1),
        node: spec(META, &[Role::Meta, Role::Storage, Role::Host]),
        pool: None,
        at: AT,
    };
    let mut commands = vec![
        bootstrap,
        register(NodeSpec {
            granted: [Role::Storage, Role::Nfs].into(),
            ..spec(STORAGE, &[Role::Storage])
        }),
        register(spec(HOST, &[Role::Host])),
        device(META, 1),
        device(STORAGE, 2),
    ];
    for (number, node) in [META, HOST].into_iter().enumerate() {
        let name = format!("disk{number}");
        let volume = VolumeSpec::new(&name, 1 << 30);
        let uuid = Uuid::from_u128(number as u128);
        commands.push(Command::CreateVolume {
            uuid,
            volume,
            at: AT,
        });
        commands.push(attach(node, &name));
    }
    commands.push(Command::GrantLease {
        volume: "disk1".to_owned(),
        node: HOST,
        expired: None,
        at: AT,
    });
    let (mut machine, mut records) = (Machine::default(), BTreeMap::new());
    for (number, node) in [META, HOST].into_iter().enumerate() {
        let name = format!("fs{number}");
        let filesystem = FilesystemSpec {
            name: name.clone(),
            pool: "default".to_owned(),
        };
        commands.push(Command::CreateFilesystem {
            uuid: Uuid::from_u128(number as u128),
            filesystem,
            at: AT,
        });
        let id = FilesystemId(number as u32 + 1);
        commands.push(mount(node, &name));
        commands.push(make_segment(id, 1));
    }
    for command in commands {
        take(&mut machine, &mut records, &command);
    }
    (machine, records)
}

fn take(machine: &mut Machine, records: &mut BTreeMap<Vec<u8>, Vec<u8>>, command: &Command) {
    machine.apply(command).unwrap();
    let writes = {
        let mut txn = Txn::over(&*records);
        apply(&mut txn, command).unwrap().unwrap();
        txn.into_writes()
    };
    for (key, value) in writes {
        match value {
            Some(value) => records.insert(key, value),
            None => records.remove(&key),
        };
    }
}

fn device(node: NodeId, number: u128) -> Command {
    Command::RegisterDevice {
        device: DeviceSpec {
            uuid: Uuid::from_u128(number),
            node,
            path: format!("/dev/{number}"),
            size_bytes: 1 << 40,
            class: "ssd".to_owned(),
        },
        incarnation: Incarnation::default(),
        at: AT,
    }
}

fn attach(node: NodeId, volume: &str) -> Command {
    Command::CreateAttachment {
        attachment: AttachmentSpec {
            volume: volume.to_owned(),
            node,
            socket: format!("/run/{volume}"),
            queues: 1,
            read_only: false,
            options: AttachmentOptions::default(),
        },
        at: AT,
    }
}

fn mount(node: NodeId, filesystem: &str) -> Command {
    Command::CreateFilesystemAttachment {
        attachment: FilesystemAttachmentSpec {
            filesystem: filesystem.to_owned(),
            node,
            socket: format!("/run/{filesystem}"),
            tag: "tree".to_owned(),
            queues: 1,
            read_only: false,
        },
        at: AT,
    }
}

fn make_segment(filesystem: FilesystemId, segment: u64) -> Command {
    Command::CreateSegmentVolume {
        filesystem,
        segment: SegmentId(segment),
        uuid: Uuid::from_u128(u128::from(filesystem.0) << 32 | u128::from(segment)),
        size_bytes: 1 << 30,
        at: AT,
    }
}

fn delete_segment(filesystem: FilesystemId, segment: u64) -> Command {
    Command::DeleteSegmentVolume {
        filesystem,
        segment: SegmentId(segment),
    }
}

fn offer(attachment: u64, to: NodeId) -> Command {
    Command::OfferAttachment {
        attachment: AttachmentId(attachment),
        to,
        lifetime_s: 1,
        at: AT,
    }
}

fn lease(node: NodeId) -> Command {
    Command::GrantLease {
        volume: "disk0".to_owned(),
        node,
        expired: None,
        at: AT,
    }
}

fn export(node: NodeId) -> ExportSpec {
    ExportSpec {
        name: "export".to_owned(),
        volume: "disk0".to_owned(),
        node,
        clients: vec!["10.0.0.0/24".to_owned()],
        read_only: false,
        root_squash: true,
        address: None,
    }
}

fn assign_export(from: NodeId, to: NodeId, planned: bool) -> Command {
    Command::AssignExport {
        name: "export".to_owned(),
        from,
        to,
        planned,
        at: AT,
    }
}

/// Administration of the cluster.
fn administration() -> Vec<Command> {
    let (node, token) = (META, JoinToken::draw().hash());
    vec![
        Command::CreateToken {
            token,
            roles: None,
            expires_at: AT,
            at: AT,
        },
        Command::RedeemToken {
            token,
            roles: Role::all(),
            at: AT,
        },
        register(spec(NodeId(9), &[Role::Host])),
        register(spec(META, &[Role::Host])),
        Command::CreatePool {
            pool: PoolSpec::new("pool", 1),
            at: AT,
        },
        Command::DeletePool {
            name: "default".to_owned(),
        },
        Command::RemoveNode { node, at: AT },
        Command::EvictNode { node, at: AT },
        Command::SetNamespaceGroupVoters {
            group: NamespaceGroupId(1),
            voters: vec![node],
        },
        Command::RemoveLost {
            lost: Lost::Node(node),
            at: AT,
        },
        Command::SetNodeAdminState {
            node,
            admin_state: AdminState::Draining,
            at: AT,
        },
        Command::Regroup {
            changes: Vec::new(),
            heard: Vec::new(),
            at: AT,
        },
        // What is another node's.
        device(META, 3),
        attach(META, "disk0"),
        lease(META),
        Command::ReleaseLease {
            volume: VolumeId(1),
            node: META,
            generation: Generation(1),
        },
        Command::RemoveDevice {
            device: DeviceId(1),
            at: AT,
        },
        Command::DrainDevice {
            device: DeviceId(1),
            on: true,
            at: AT,
        },
        Command::SetDeviceState {
            device: DeviceId(1),
            state: DeviceState::Failed,
            at: AT,
        },
        Command::RemoveLost {
            lost: Lost::Device(DeviceId(1)),
            at: AT,
        },
        Command::SetWriteThrough {
            attachment: AttachmentId(1),
            on: true,
        },
        Command::DeleteAttachment {
            attachment: AttachmentKey::Id(AttachmentId(1)),
        },
        offer(1, HOST),
        Command::WithdrawOffer {
            attachment: AttachmentId(1),
        },
        Command::ExpireOffers { at: AT },
        Command::MoveAttachment {
            attachment: AttachmentId(1),
            to: HOST,
            socket: "/run/disk0".to_owned(),
            at: AT,
        },
        Command::TakeOverAttachment {
            attachment: AttachmentId(1),
            expired: None,
            at: AT,
        },
        Command::CreateExport {
            fsid: Uuid::from_u128(1),
            export: export(META),
            at: AT,
        },
        mount(META, "fs0"),
        Command::DeleteFilesystemAttachment {
            attachment: AttachmentKey::Id(AttachmentId(3)),
        },
        Command::FilesystemDropped {
            id: FilesystemId(2),
        },
        make_segment(FilesystemId(1), 2),
        delete_segment(FilesystemId(1), 1),
        assign_export(META, STORAGE, true),
        assign_export(STORAGE, META, false),
        Command::ExportWithdrawn {
            name: "export".to_owned(),
            node: META,
            at: AT,
        },
        Command::DeleteAttachment {
            attachment: AttachmentKey::Socket {
                node: META,
                socket: "/run/disk0".to_owned(),
            },
        },
    ]
}

fn asked(from: NodeId, command: &Command) -> Result<(), Refusal> {
    asked_in(&cluster(), from, command)
}

fn asked_in(
    (machine, records): &(Machine, BTreeMap<Vec<u8>, Vec<u8>>),
    from: NodeId,
    command: &Command,
) -> Result<(), Refusal> {
    let map = machine.map();
    let sender = Sender {
        id: from,
        node: map.node(from),
        is_in_group: true,
    };
    check(sender, command, &map, records).unwrap()
}

#[test]
fn a_node_without_the_role_meta_does_not_administer() {
    for command in administration() {
        assert_eq!(asked(META, &command), Ok(()), "{command:?}");
        for node in [HOST, STORAGE] {
            let refused = asked(node, &command).unwrap_err();
            assert_eq!(refused.kind(), crate::RefusalKind::Denied, "{command:?}");
            let told = refused.to_string();
            assert!(told.contains("with the role meta (node1)"), "{told}");
        }
    }
}

#[test]
fn a_host_serves_its_guests_and_keeps_its_volumes() {
    let own = [
        register(spec(HOST, &[Role::Host])),
        attach(HOST, "disk0"),
        lease(HOST),
        Command::ReleaseLease {
            volume: VolumeId(2),
            node: HOST,
            generation: Generation(1),
        },
        Command::SetWriteThrough {
            attachment: AttachmentId(2),
            on: true,
        },
        Command::DeleteAttachment {
            attachment: AttachmentKey::Id(AttachmentId(2)),
        },
        offer(2, META),
        Command::WithdrawOffer {
            attachment: AttachmentId(2),
        },
        Command::CreateVolume {
            uuid: Uuid::from_u128(5),
            volume: VolumeSpec::new("disk", 1 << 30),
            at: AT,
        },
        Command::DeleteVolume {
            name: "disk1".to_owned(),
        },
    ];
    for command in own {
        assert_eq!(asked(HOST, &command), Ok(()), "{command:?}");
    }
    assert!(asked(HOST, &device(HOST, 4)).is_err(), "it has no devices");
    assert_eq!(asked(STORAGE, &device(STORAGE, 4)), Ok(()));
    let drain = Command::DrainDevice {
        device: DeviceId(2),
        on: true,
        at: AT,
    };
    assert_eq!(asked(STORAGE, &drain), Ok(()));
}

#[test]
fn only_who_holds_the_lease_says_that_a_tail_is_dropped() {
    let dropped = |volume| Command::VolumeTailDropped {
        volume: VolumeId(volume),
    };
    assert_eq!(asked(HOST, &dropped(2)), Ok(()));
    let refused = asked(STORAGE, &dropped(2)).unwrap_err();
    assert_eq!(refused.kind(), crate::RefusalKind::Denied);
    assert!(asked(HOST, &dropped(1)).is_err(), "nobody holds it");
    for volume in [1, 2] {
        assert_eq!(asked(META, &dropped(volume)), Ok(()));
    }
    assert_eq!(asked(HOST, &dropped(9)), Ok(()), "it is not there");
}

#[test]
fn a_host_says_data_are_dropped_only_of_what_is_deleted() {
    let volume = VolumeId(1);
    let dropped = Command::VolumeDataDropped { volume };
    assert_eq!(asked(HOST, &dropped), Ok(()));
    let (mut machine, _) = cluster();
    assert!(machine.apply(&dropped).is_err(), "disk0 is in use");
}

#[test]
fn a_node_gives_itself_no_role_that_it_was_not_granted() {
    let all = spec(HOST, &[Role::Host, Role::Meta]);
    let refused = asked(HOST, &register(all)).unwrap_err().to_string();
    assert!(
        refused.contains("start it with `--roles host`"),
        "{refused}"
    );
    // Granted by its token, and taken at a later start.
    let more = spec(STORAGE, &[Role::Storage, Role::Nfs]);
    assert_eq!(asked(STORAGE, &register(more)), Ok(()));
    let more = spec(STORAGE, &[Role::Storage, Role::Host]);
    assert!(asked(STORAGE, &register(more)).is_err());
}

#[test]
fn an_nfs_node_gives_away_its_own_exports_and_takes_them_for_itself_alone() {
    for own in [
        assign_export(HOST, META, true),
        assign_export(META, HOST, false),
        Command::CreateExport {
            fsid: Uuid::from_u128(1),
            export: export(HOST),
            at: AT,
        },
    ] {
        assert_eq!(asked(HOST, &own), Ok(()), "{own:?}");
    }
}

#[test]
fn a_node_that_is_not_in_the_map_only_registers_itself() {
    let itself = register(spec(NEW, &[Role::Host]));
    assert_eq!(asked(NEW, &itself), Ok(()));
    let other = register(spec(NodeId(5), &[Role::Host]));
    assert!(asked(NEW, &other).is_err());
    let (machine, records) = cluster();
    let stranger = Sender {
        id: NEW,
        node: None,
        is_in_group: false,
    };
    let checked = check(stranger, &itself, &machine.map(), &records).unwrap();
    assert!(checked.is_err());
}

#[test]
fn raft_messages_come_from_who_votes_or_may_vote() {
    let (machine, _) = cluster();
    let map = machine.map();
    let (voters, learners) = ([META].into(), [STORAGE, HOST].into());
    let judged = |id, was_removed| raft_sender(id, &map, was_removed, &voters, &learners);
    assert_eq!(judged(META, false), RaftSender::Trusted);
    assert_eq!(judged(META, true), RaftSender::Trusted, "it votes still");
    assert_eq!(judged(HOST, false), RaftSender::Refused);
    assert_eq!(judged(STORAGE, false), RaftSender::Refused);
    assert_eq!(judged(NEW, false), RaftSender::Unknown);
    assert_eq!(judged(NEW, true), RaftSender::Refused);
    // Whoever has just been let in knows nobody.
    let nothing = ClusterMap::default();
    let none = BTreeSet::new();
    let judged = raft_sender(META, &nothing, false, &none, &none);
    assert_eq!(judged, RaftSender::Trusted);
}

#[test]
fn a_host_writes_segments_of_filesystems_that_are_attached_to_it() {
    let lease_of = |filesystem: u32, node| Command::GrantLease {
        volume: format!(".segment-{filesystem}-1"),
        node,
        expired: None,
        at: AT,
    };
    let (own, other) = (FilesystemId(2), FilesystemId(1));
    for command in [
        mount(HOST, "fs0"),
        make_segment(own, 2),
        delete_segment(own, 1),
        lease_of(2, HOST),
        Command::DeleteFilesystemAttachment {
            attachment: AttachmentKey::Id(AttachmentId(4)),
        },
        Command::DeleteFilesystem {
            name: "fs0".to_owned(),
            at: AT,
        },
    ] {
        assert_eq!(asked(HOST, &command), Ok(()), "{command:?}");
    }
    for command in [
        make_segment(other, 2),
        delete_segment(other, 1),
        lease_of(1, HOST),
        lease_of(2, META),
    ] {
        let refused = asked(HOST, &command).unwrap_err();
        assert_eq!(refused.kind(), crate::RefusalKind::Denied, "{command:?}");
        assert_eq!(asked(META, &command), Ok(()), "{command:?}");
    }
    assert!(asked(STORAGE, &lease_of(2, STORAGE)).is_err());
}

#[test]
fn a_node_asks_in_its_own_name_and_only_for_what_people_ask_for() {
    let delete = Command::DeleteVolume {
        name: "disk0".to_owned(),
    };
    let in_name_of = |node: NodeId, command: &Command| Command::Authored {
        by: Author {
            node,
            uid: Some(0),
            forced: false,
        },
        at: AT,
        command: Box::new(command.clone()),
    };
    let refused = Err(AccessRefusal::NoSuchAuthor.into());
    assert_eq!(asked(HOST, &in_name_of(HOST, &delete)), Ok(()));
    for from in [HOST, META] {
        assert_eq!(asked(from, &in_name_of(STORAGE, &delete)), refused);
        let own = in_name_of(from, &delete);
        assert_eq!(asked(from, &in_name_of(from, &own)), refused);
        let dropped = Command::VolumeDataDropped {
            volume: VolumeId(1),
        };
        assert_eq!(asked(from, &in_name_of(from, &dropped)), refused);
    }
    // A name gives no rights.
    let admin = Command::DeletePool {
        name: "default".to_owned(),
    };
    let refused = asked(HOST, &in_name_of(HOST, &admin)).unwrap_err();
    assert!(matches!(
        refused,
        Refusal::Access(AccessRefusal::NeedsMeta { .. })
    ));
}

#[test]
fn a_node_says_what_it_noticed_itself() {
    let note = |notice| Command::RecordNotice { notice, at: AT };
    let damaged = |node| {
        note(Notice::DataDamaged {
            what: "device /dev/sda: 1 bad block".to_owned(),
            node,
        })
    };
    asked(HOST, &damaged(HOST)).unwrap();
    asked(HOST, &damaged(STORAGE)).unwrap_err();
    let full = note(Notice::PoolNearFull {
        pool: "default".parse().unwrap(),
        percent: 80,
    });
    asked(HOST, &full).unwrap_err();
    asked(META, &full).unwrap();
}
