//! Any commands in any order: the records stay consistent, and they are a function of the commands.

use std::collections::{BTreeMap, BTreeSet};

use namespace::{FilesystemId, SegmentId};
use proptest::prelude::*;
use uuid::Uuid;

mod groups;

use super::tables::{self, Counters};
use super::tests::World;
use super::{Txn, apply};
use crate::command::{
    AttachmentKey, AttachmentSpec, Command, DeviceSpec, ExportSpec, FilesystemAttachmentSpec,
    FilesystemSpec, NodeSpec, PoolSpec, VolumeSpec,
};
use crate::ids::{
    AttachmentId, DeviceId, Generation, Incarnation, NamespaceGroupId, NodeId, UnixMillis, VolumeId,
};
use crate::model::{
    Attachment, AttachmentOptions, DeviceState, Durability, FailureDomain, FilesystemState,
    Incoming, Name, OnFull, VolumeState,
};

const AT: UnixMillis = UnixMillis(1);
const STEP: u64 = 4096;

/// Few names and numbers, so that commands meet. Some are of segments' volumes.
fn name() -> impl Strategy<Value = String> {
    prop_oneof![
        9 => (0..4_u8).prop_map(|number| format!("n{number}")),
        1 => (1..4_u8, 0..3_u8).prop_map(|(id, segment)| format!(".segment-{id}-{segment}")),
        1 => "[ -~]{0,70}",
    ]
}

fn on_full() -> impl Strategy<Value = OnFull> {
    prop_oneof![Just(OnFull::default()), Just(OnFull::ERROR)]
}

fn volume_command() -> impl Strategy<Value = Command> {
    let spec = (
        name(),
        0..9 * STEP,
        proptest::option::of(name()),
        any::<bool>(),
        on_full(),
    );
    let spec = spec.prop_map(|(name, size_bytes, pool, read_only, on_full)| {
        let pool = pool.filter(|pool| pool == "n0");
        VolumeSpec {
            name,
            size_bytes,
            pool,
            read_only,
            durability: Durability::Flush,
            on_full,
        }
    });
    prop_oneof![
        4 => (spec, 0..20_u128).prop_map(|(volume, uuid)| {
            Command::CreateVolume { uuid: Uuid::from_u128(uuid), volume, at: AT }
        }),
        2 => (name(), 0..9 * STEP, any::<bool>()).prop_map(|(name, size_bytes, allow_shrink)| {
            Command::ResizeVolume { name, size_bytes, allow_shrink }
        }),
        1 => (0..8_u64).prop_map(|id| Command::VolumeTailDropped { volume: VolumeId(id) }),
        2 => name().prop_map(|name| Command::DeleteVolume { name }),
        2 => (0..8_u64).prop_map(|id| Command::VolumeDataDropped { volume: VolumeId(id) }),
        1 => (name(), name()).prop_map(|(from, to)| Command::PromoteVolume { from, to }),
        1 => (name(), on_full()).prop_map(|(name, on_full)| Command::SetVolume { name, on_full }),
    ]
}

fn lease_command() -> impl Strategy<Value = Command> {
    let generation = || (0..6_u64).prop_map(Generation);
    prop_oneof![
        (name(), 0..4_u64, proptest::option::of(generation())).prop_map(
            |(volume, node, expired)| {
                Command::GrantLease {
                    volume,
                    node: NodeId(node),
                    expired,
                    at: AT,
                }
            }
        ),
        (0..8_u64, 0..4_u64, generation()).prop_map(|(volume, node, generation)| {
            Command::ReleaseLease {
                volume: VolumeId(volume),
                node: NodeId(node),
                generation,
            }
        }),
    ]
}

fn attachment_command() -> impl Strategy<Value = Command> {
    let spec = (name(), 0..4_u64, 0..4_u8, any::<bool>(), any::<bool>());
    let socket = |number: u8| format!("/run/{number}");
    prop_oneof![
        2 => spec.prop_map(move |(volume, node, number, read_only, shared)| {
            // A guest that is migrated is one that nobody shares a disk with.
            let incoming = (read_only != shared && number == 3).then_some(Incoming::Guest);
            let options = AttachmentOptions { shared, incoming, ..AttachmentOptions::default() };
            let node = NodeId(node);
            let socket = socket(number);
            let attachment = AttachmentSpec { volume, node, socket, queues: 1, read_only, options };
            Command::CreateAttachment { attachment, at: AT }
        }),
        1 => (0..4_u64, 0..4_u8).prop_map(move |(node, number)| {
            let attachment = AttachmentKey::Socket { node: NodeId(node), socket: socket(number) };
            Command::DeleteAttachment { attachment }
        }),
        1 => (0..8_u64, any::<bool>()).prop_map(|(id, on)| {
            Command::SetWriteThrough { attachment: AttachmentId(id), on }
        }),
        1 => (0..8_u64, proptest::option::of((0..4_u64).prop_map(Generation))).prop_map(|(id, expired)| {
            Command::TakeOverAttachment { attachment: AttachmentId(id), expired, at: AT }
        }),
        1 => (0..8_u64, 0..4_u64, 0..4_u8).prop_map(move |(id, to, number)| {
            let (attachment, to) = (AttachmentId(id), NodeId(to));
            Command::MoveAttachment { attachment, to, socket: socket(number), at: AT }
        }),
        2 => (0..8_u64, 0..4_u64, 0..3_u64).prop_map(|(id, to, lifetime_s)| {
            let (attachment, to) = (AttachmentId(id), NodeId(to));
            Command::OfferAttachment { attachment, to, lifetime_s, at: AT }
        }),
        1 => (0..8_u64).prop_map(|id| Command::WithdrawOffer { attachment: AttachmentId(id) }),
        1 => (0..3_u64).prop_map(|days| {
            Command::ExpireOffers { at: UnixMillis(AT.0 + days * 24 * 3600 * 1000) }
        }),
        1 => (0..8_u64).prop_map(|id| Command::DeleteAttachment {
            attachment: AttachmentKey::Id(AttachmentId(id)),
        }),
    ]
}

fn export_command() -> impl Strategy<Value = Command> {
    let spec = (name(), name(), 0..4_u64, 0..3_u8);
    prop_oneof![
        3 => (spec, 0..20_u128).prop_map(|((name, volume, node, address), fsid)| {
            let export = ExportSpec {
                name,
                volume,
                node: NodeId(node),
                clients: vec!["10.0.0.0/24".to_owned()],
                read_only: false,
                root_squash: true,
                address: (address > 0).then(|| format!("10.0.0.{address}/24")),
            };
            Command::CreateExport { fsid: Uuid::from_u128(fsid), export, at: AT }
        }),
        2 => (name(), 0..4_u64, 0..4_u64, any::<bool>()).prop_map(|(name, from, to, planned)| {
            Command::AssignExport { name, from: NodeId(from), to: NodeId(to), planned, at: AT }
        }),
        1 => name().prop_map(|name| Command::DeleteExport { name }),
        1 => (name(), 0..4_u64).prop_map(|(name, node)| {
            Command::ExportWithdrawn { name, node: NodeId(node), at: AT }
        }),
    ]
}

fn filesystem_command() -> impl Strategy<Value = Command> {
    let voters = proptest::collection::vec((0..4_u64).prop_map(NodeId), 0..4);
    prop_oneof![
        2 => (name(), name(), 0..20_u128).prop_map(|(name, pool, uuid)| {
            let filesystem = FilesystemSpec { name, pool };
            Command::CreateFilesystem { uuid: Uuid::from_u128(uuid), filesystem, at: AT }
        }),
        1 => (0..4_u32, voters).prop_map(|(group, voters)| {
            Command::SetNamespaceGroupVoters { group: NamespaceGroupId(group), voters }
        }),
        1 => name().prop_map(|name| Command::DeleteFilesystem { name, at: AT }),
        1 => (0..5_u32).prop_map(|id| Command::FilesystemDropped { id: FilesystemId(id) }),
        2 => (0..5_u32, 0..3_u64, 1..9 * STEP).prop_map(|(id, segment, size_bytes)| {
            Command::CreateSegmentVolume {
                filesystem: FilesystemId(id),
                segment: SegmentId(segment),
                uuid: Uuid::from_u128(u128::from(segment)),
                size_bytes,
                at: AT,
            }
        }),
        1 => (0..5_u32, 0..3_u64).prop_map(|(id, segment)| {
            let (filesystem, segment) = (FilesystemId(id), SegmentId(segment));
            Command::DeleteSegmentVolume { filesystem, segment }
        }),
        2 => (name(), 0..4_u64, 0..4_u8, 0..66_u16).prop_map(|(filesystem, node, number, queues)| {
            let attachment = FilesystemAttachmentSpec {
                filesystem,
                node: NodeId(node),
                socket: format!("/run/{number}"),
                tag: "tree".to_owned(),
                queues,
                read_only: false,
            };
            Command::CreateFilesystemAttachment { attachment, at: AT }
        }),
        1 => (0..4_u64, 0..4_u8).prop_map(|(node, number)| {
            let (node, socket) = (NodeId(node), format!("/run/{number}"));
            let attachment = AttachmentKey::Socket { node, socket };
            Command::DeleteFilesystemAttachment { attachment }
        }),
    ]
}

fn replicas() -> impl Strategy<Value = Option<u8>> {
    proptest::option::of(0..5_u8)
}

fn map_command() -> impl Strategy<Value = Command> {
    let node = (0..4_u64, name()).prop_map(|(id, name)| NodeSpec::new(NodeId(id), name));
    let device = (0..5_u64, 0..4_u64, 0..5_u8).prop_map(|(number, node, path)| DeviceSpec {
        uuid: Uuid::from_u128(u128::from(number)),
        node: NodeId(node),
        path: format!("/dev/{path}"),
        size_bytes: (number + 1) << 30,
        class: "ssd".to_owned(),
    });
    let pool = (name(), 1..4_u8, any::<bool>()).prop_map(|(name, replicas, by_node)| {
        let failure_domain = if by_node {
            FailureDomain::Node
        } else {
            FailureDomain::Device
        };
        PoolSpec {
            failure_domain,
            placement_groups: Some(4),
            ..PoolSpec::new(name, replicas)
        }
    });
    let state = prop_oneof![
        Just(DeviceState::Online),
        Just(DeviceState::Offline),
        Just(DeviceState::Failed)
    ];
    prop_oneof![
        node.prop_map(|node| Command::RegisterNode {
            node,
            replaces: Incarnation::default(),
            at: AT
        }),
        device.prop_map(|device| Command::RegisterDevice {
            device,
            incarnation: Incarnation::default(),
            at: AT
        }),
        (0..5_u64, state).prop_map(|(id, state)| Command::SetDeviceState {
            device: DeviceId(id),
            state,
            at: AT
        }),
        (0..5_u64).prop_map(|id| Command::RemoveDevice {
            device: DeviceId(id),
            at: AT
        }),
        pool.prop_map(|pool| Command::CreatePool { pool, at: AT }),
        (name(), replicas(), replicas()).prop_map(|(name, replicas, min_in_sync)| {
            Command::SetPool {
                name,
                replicas,
                min_in_sync,
            }
        }),
        name().prop_map(|name| Command::DeletePool { name }),
    ]
}

fn command() -> impl Strategy<Value = Command> {
    prop_oneof![4 => volume_command(), 3 => lease_command(), 3 => attachment_command(), 2 => map_command(),
        1 => export_command(), 2 => filesystem_command()]
}

/// What must never go back: numbers, the epoch, and every volume's generation.
#[derive(Default)]
struct HighWater {
    counters: Option<Counters>,
    epoch: u64,
    generations: BTreeMap<VolumeId, Generation>,
}

impl HighWater {
    fn check(&mut self, world: &World) {
        let records = &world.records;
        let epoch = tables::CLUSTER.get(records, &()).unwrap().unwrap().epoch.0;
        assert!(epoch >= self.epoch);
        self.epoch = epoch;
        let counters = tables::COUNTERS
            .get(records, &())
            .unwrap()
            .unwrap_or_default();
        if let Some(old) = self.counters.replace(counters.clone()) {
            assert!(counters.device >= old.device && counters.pool >= old.pool);
            assert!(counters.volume >= old.volume && counters.attachment >= old.attachment);
            assert!(counters.filesystem >= old.filesystem);
            assert!(counters.namespace_group >= old.namespace_group);
        }
        for lease in tables::LEASES.all(records).unwrap() {
            let known = self.generations.entry(lease.volume).or_default();
            assert!(lease.generation >= *known, "{lease:?} after {known}");
            *known = lease.generation;
        }
    }
}

fn check_volumes(world: &World) {
    let records = &world.records;
    let volumes = tables::VOLUMES.all(records).unwrap();
    let distinct = |count: usize| assert_eq!(count, volumes.len());
    distinct(
        volumes
            .iter()
            .map(|volume| &volume.name)
            .collect::<BTreeSet<_>>()
            .len(),
    );
    distinct(
        volumes
            .iter()
            .map(|volume| volume.id)
            .collect::<BTreeSet<_>>()
            .len(),
    );
    distinct(
        volumes
            .iter()
            .map(|volume| volume.top_layer())
            .collect::<BTreeSet<_>>()
            .len(),
    );
    distinct(tables::VOLUME_NAMES.all(records).unwrap().len());
    distinct(tables::VOLUMES_BY_POOL.all(records).unwrap().len());
    for volume in &volumes {
        assert!(volume.size_bytes > 0 && volume.size_bytes % STEP == 0);
        assert!(
            volume
                .stale_tail_end_bytes
                .is_none_or(|end| end > volume.size_bytes)
        );
        assert_eq!(
            tables::VOLUME_NAMES
                .get(records, &volume.id)
                .unwrap()
                .as_ref(),
            Some(&volume.name)
        );
        assert!(tables::POOLS.get(records, &volume.pool).unwrap().is_some());
        let name = match volume.segment {
            Some(of) => Name::of_segment(of),
            None => Name::parse(&volume.name).expect("a name that somebody gave"),
        };
        assert_eq!(name, volume.name);
    }
    let ids: BTreeSet<VolumeId> = volumes.iter().map(|volume| volume.id).collect();
    assert!(
        tables::LEASES
            .all(records)
            .unwrap()
            .iter()
            .all(|lease| ids.contains(&lease.volume))
    );
}

/// Each filesystem has its pool and its group.
fn check_filesystems(world: &World) {
    let records = &world.records;
    let groups = tables::NAMESPACE_GROUPS.all(records).unwrap();
    let pools = tables::POOLS.all(records).unwrap();
    let filesystems = tables::FILESYSTEMS.all(records).unwrap();
    for one in &filesystems {
        assert!(groups.iter().any(|group| group.id == one.group));
        assert!(pools.iter().any(|pool| pool.id == one.pool));
    }
    let ids: BTreeSet<_> = filesystems.iter().map(|one| one.id).collect();
    assert_eq!(ids.len(), filesystems.len());
    for volume in tables::VOLUMES.all(records).unwrap() {
        // What nobody deletes any more is nobody's.
        let is_ready = volume.state == VolumeState::Ready;
        let of = volume.segment.filter(|_| is_ready);
        assert!(of.is_none_or(|of| ids.contains(&of.filesystem)));
    }
    for mount in tables::FILESYSTEM_ATTACHMENTS.all(records).unwrap() {
        let of = filesystems.iter().find(|one| one.id == mount.filesystem);
        let of = of.expect("the filesystem of an attachment");
        assert_eq!((&of.name, of.state), (&mount.name, FilesystemState::Ready));
        let by_socket = (mount.node, mount.socket);
        let id = tables::ATTACHMENTS_BY_SOCKET.get(records, &by_socket);
        assert_eq!(id.unwrap(), Some(mount.id));
    }
}

fn check_attachments(world: &World) {
    let records = &world.records;
    let attachments = tables::ATTACHMENTS.all(records).unwrap();
    let mounts = tables::FILESYSTEM_ATTACHMENTS.all(records).unwrap();
    assert_eq!(
        tables::ATTACHMENTS_BY_SOCKET.all(records).unwrap().len(),
        attachments.len() + mounts.len()
    );
    assert_eq!(
        tables::ATTACHMENTS_BY_VOLUME.all(records).unwrap().len(),
        attachments.len()
    );
    for one in &attachments {
        let volume = tables::VOLUMES
            .get(records, one.target.name())
            .unwrap()
            .expect("the volume of an attachment");
        assert_eq!(volume.state, VolumeState::Ready);
        assert_eq!(one.options.incoming.is_some(), one.expires_at.is_some());
        assert!(one.offer.is_none() || one.expires_at.is_none());
        assert!(one.offer.is_none_or(|offer| offer.to != one.node));
        for other in attachments
            .iter()
            .filter(|other| other.id != one.id && other.target == one.target)
        {
            let comes_in = |one: &Attachment| one.options.incoming.is_some();
            match (comes_in(one), comes_in(other)) {
                (false, false) => assert!(
                    (one.read_only && other.read_only)
                        || (one.options.shared && other.options.shared)
                ),
                (true, true) => panic!("two wait for one volume"),
                _ => assert_ne!(one.node, other.node),
            }
        }
    }
}

fn check_exports(world: &World) {
    let records = &world.records;
    let exports = tables::EXPORTS.all(records).unwrap();
    let (mut volumes, mut addresses) = (BTreeSet::new(), BTreeSet::new());
    for export in &exports {
        let volume = tables::VOLUMES.get(records, &export.volume).unwrap();
        let volume = volume.expect("the volume of an export");
        assert_eq!(
            (volume.id, volume.state),
            (export.volume_id, VolumeState::Ready)
        );
        assert!(volumes.insert(export.volume_id), "a volume has one export");
        let address = export.address.as_ref();
        assert!(address.is_none_or(|address| addresses.insert(address)));
    }
}

fn check_placement(world: &World) {
    let records = &world.records;
    let devices: BTreeSet<DeviceId> = tables::DEVICES
        .all(records)
        .unwrap()
        .into_iter()
        .map(|device| device.id)
        .collect();
    for pool in tables::POOLS.all(records).unwrap() {
        let groups = tables::PLACEMENT_GROUPS
            .all_below(records, &pool.id)
            .unwrap();
        assert_eq!(groups.len(), pool.placement_groups as usize);
        for group in groups {
            let members: BTreeSet<DeviceId> =
                group.members.iter().map(|member| member.device).collect();
            assert_eq!(members.len(), group.members.len(), "no device twice");
            assert!(members.is_subset(&devices));
            assert!(group.wanted().count() <= usize::from(pool.replicas));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn records_stay_consistent_whatever_is_asked(commands in proptest::collection::vec(command(), 0..60)) {
        let mut world = World::ready();
        let mut high_water = HighWater::default();
        for command in &commands {
            let _ = world.run(command);
            high_water.check(&world);
            check_volumes(&world);
            check_attachments(&world);
            check_filesystems(&world);
            check_exports(&world);
            check_placement(&world);
        }
    }

    #[test]
    fn commands_give_the_same_bytes_one_by_one_or_in_one_batch(
        commands in proptest::collection::vec(command(), 0..60),
    ) {
        let mut one_by_one = World::ready();
        let replies: Vec<_> = commands.iter().map(|command| one_by_one.run(command)).collect();
        // Through the log and back, all in one transaction, as a node does that catches up.
        let mut caught_up = World::ready();
        let mut batch = Txn::over(&caught_up.records);
        let mut again = Vec::new();
        for command in &commands {
            let stored = serde_json::to_vec(command).unwrap();
            again.push(apply(&mut batch, &serde_json::from_slice(&stored).unwrap()).unwrap());
        }
        let writes = batch.into_writes();
        for (key, value) in writes {
            match value {
                Some(value) => caught_up.records.insert(key, value),
                None => caught_up.records.remove(&key),
            };
        }
        prop_assert_eq!(replies, again);
        prop_assert_eq!(one_by_one.records, caught_up.records);
    }
}
