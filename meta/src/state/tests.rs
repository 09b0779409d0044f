//! The rules of the state machine, one by one.

mod attachments;
mod audit;
mod away;
mod eviction;
mod exports;
mod filesystem_attachments;
mod filesystems;
mod groups;
mod leases;
mod levels;
mod map;
mod migration;
mod promotion;
mod segments;
mod tokens;

use std::collections::BTreeMap;

use uuid::Uuid;

use super::{Txn, apply, tables};
use crate::command::{
    AttachmentKey, AttachmentSpec, Command, DeviceSpec, FilesystemAttachmentSpec, FilesystemSpec,
    NodeSpec, Outcome, PoolSpec, Reply, VolumeSpec,
};
use crate::ids::{
    AttachmentId, DeviceId, Generation, Incarnation, NodeId, PoolId, UnixMillis, VolumeId,
};
use crate::model::{
    Attachment, AttachmentOptions, AttachmentTarget, Author, DEFAULT_POOL, DeviceState,
    FailureDomain, Filesystem, FilesystemAttachment, Lease, Name, ReplicaState, Volume,
    VolumeState,
};
use crate::refusal::{
    AttachmentRefusal, LeaseRefusal, MapRefusal, PoolRefusal, Refusal, RefusalKind, VolumeRefusal,
};

const AT: UnixMillis = UnixMillis(1_000);
const GIB: u64 = 1 << 30;

/// Records in memory, and commands on them.
#[derive(Default, Clone)]
pub(super) struct World {
    pub(super) records: BTreeMap<Vec<u8>, Vec<u8>>,
    devices: u64,
    /// Who wants what is done, and when.
    author: Option<(Author, UnixMillis)>,
}

impl World {
    /// The records without the log of events.
    fn without_events(&self) -> BTreeMap<Vec<u8>, Vec<u8>> {
        let is_event = |key: &[u8]| key.first() == Some(&tables::EVENTS.prefix());
        let mut records = self.records.clone();
        records.retain(|key, _| !is_event(key));
        records
    }

    /// Applies a command, and checks that a refused one changed nothing.
    pub(super) fn run(&mut self, command: &Command) -> Reply {
        let command = match self.author {
            Some((by, at)) => &command.clone().by(by, at),
            None => command,
        };
        let (reply, writes) = {
            let mut txn = Txn::over(&self.records);
            let reply = apply(&mut txn, command).unwrap();
            (reply, txn.into_writes())
        };
        assert!(
            reply.is_ok() || writes.is_empty(),
            "{command:?} was refused and wrote"
        );
        for (key, value) in writes {
            match value {
                Some(value) => self.records.insert(key, value),
                None => self.records.remove(&key),
            };
        }
        reply
    }

    /// A cluster of one node with one device.
    pub(super) fn ready() -> Self {
        let mut world = Self::default();
        let node = NodeSpec::new(NodeId(1), "one".to_owned());
        world
            .run(&Command::Bootstrap {
                cluster: Uuid::from_u128(1),
                node,
                pool: None,
                at: AT,
            })
            .unwrap();
        world.device(1);
        world
    }

    fn device(&mut self, node: u64) -> DeviceId {
        self.devices += 1;
        let number = self.devices;
        match self.run(&Command::RegisterDevice {
            device: device(number, node),
            incarnation: Incarnation::default(),
            at: AT,
        }) {
            Ok(Outcome::Device(device)) => device.id,
            other => panic!("{other:?}"),
        }
    }

    /// A filesystem of the default pool.
    fn filesystem(&mut self, name: &str) -> Result<Filesystem, Refusal> {
        let uuid = Uuid::from_bytes(std::array::from_fn(|at| {
            name.as_bytes().get(at).copied().unwrap_or_default()
        }));
        let filesystem = FilesystemSpec {
            name: name.to_owned(),
            pool: DEFAULT_POOL.to_owned(),
        };
        filesystem_of(self.run(&Command::CreateFilesystem {
            uuid,
            filesystem,
            at: AT,
        }))
    }

    fn delete_filesystem(&mut self, name: &str) -> Result<Filesystem, Refusal> {
        let name = name.to_owned();
        filesystem_of(self.run(&Command::DeleteFilesystem { name, at: AT }))
    }

    fn mount(&mut self, spec: FilesystemAttachmentSpec) -> Result<FilesystemAttachment, Refusal> {
        mount_of(self.run(&Command::CreateFilesystemAttachment {
            attachment: spec,
            at: AT,
        }))
    }

    fn node(&mut self, id: u64) {
        let node = NodeSpec::new(NodeId(id), format!("node{id}"));
        self.run(&Command::RegisterNode {
            node,
            replaces: Incarnation::default(),
            at: AT,
        })
        .unwrap();
    }

    fn create(&mut self, name: &str, size_bytes: u64) -> Result<Volume, Refusal> {
        self.create_in(VolumeSpec::new(name, size_bytes))
    }

    fn create_in(&mut self, volume: VolumeSpec) -> Result<Volume, Refusal> {
        let uuid = Uuid::from_u128(self.records.len() as u128 + 1000);
        volume_of(self.run(&Command::CreateVolume {
            uuid,
            volume,
            at: AT,
        }))
    }

    fn resize(
        &mut self,
        name: &str,
        size_bytes: u64,
        allow_shrink: bool,
    ) -> Result<Volume, Refusal> {
        volume_of(self.run(&Command::ResizeVolume {
            name: name.to_owned(),
            size_bytes,
            allow_shrink,
        }))
    }

    fn delete(&mut self, name: &str) -> Result<Volume, Refusal> {
        volume_of(self.run(&Command::DeleteVolume {
            name: name.to_owned(),
        }))
    }

    fn attach(&mut self, spec: AttachmentSpec) -> Result<Attachment, Refusal> {
        match self.run(&Command::CreateAttachment {
            attachment: spec,
            at: AT,
        })? {
            Outcome::Attachment(attachment) => Ok(attachment),
            other => panic!("{other:?}"),
        }
    }

    fn grant(&mut self, volume: &str, node: u64, expired: Option<u64>) -> Result<Lease, Refusal> {
        let (volume, node, expired) = (volume.to_owned(), NodeId(node), expired.map(Generation));
        lease_of(self.run(&Command::GrantLease {
            volume,
            node,
            expired,
            at: AT,
        }))
    }

    fn release(&mut self, volume: VolumeId, node: u64, generation: u64) -> Result<Lease, Refusal> {
        let (node, generation) = (NodeId(node), Generation(generation));
        lease_of(self.run(&Command::ReleaseLease {
            volume,
            node,
            generation,
        }))
    }
}

fn device(number: u64, node: u64) -> DeviceSpec {
    DeviceSpec {
        uuid: Uuid::from_u128(u128::from(number)),
        node: NodeId(node),
        path: format!("/dev/d{number}"),
        size_bytes: 100 * GIB,
        class: "ssd".to_owned(),
    }
}

fn attachment(volume: &str, socket: &str) -> AttachmentSpec {
    let options = AttachmentOptions::default();
    let (volume, socket) = (volume.to_owned(), socket.to_owned());
    AttachmentSpec {
        volume,
        node: NodeId(1),
        socket,
        queues: 1,
        read_only: false,
        options,
    }
}

/// An attachment of a filesystem to node 1.
fn mount(filesystem: &str, socket: &str) -> FilesystemAttachmentSpec {
    FilesystemAttachmentSpec {
        filesystem: filesystem.to_owned(),
        node: NodeId(1),
        socket: socket.to_owned(),
        tag: "tree".to_owned(),
        queues: 1,
        read_only: false,
    }
}

fn filesystem_of(reply: Reply) -> Result<Filesystem, Refusal> {
    match reply? {
        Outcome::Filesystem(filesystem) => Ok(filesystem),
        other => panic!("{other:?}"),
    }
}

fn mount_of(reply: Reply) -> Result<FilesystemAttachment, Refusal> {
    match reply? {
        Outcome::FilesystemAttachment(attachment) => Ok(attachment),
        other => panic!("{other:?}"),
    }
}

fn volume_of(reply: Reply) -> Result<Volume, Refusal> {
    match reply? {
        Outcome::Volume(volume) => Ok(volume),
        other => panic!("{other:?}"),
    }
}

fn lease_of(reply: Reply) -> Result<Lease, Refusal> {
    match reply? {
        Outcome::Lease(lease) => Ok(lease),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_volume_is_rounded_up_and_gets_numbers_of_its_own() {
    let mut world = World::ready();
    let one = world.create("one", 512).unwrap();
    let two = world.create("two", 10 * GIB + 1).unwrap();
    assert_eq!((one.size_bytes, two.size_bytes), (4096, 10 * GIB + 4096));
    assert_eq!((&*one.pool, one.state), (DEFAULT_POOL, VolumeState::Ready));
    assert!(one.id != two.id && one.top_layer() != two.top_layer());
}

#[test]
fn a_taken_or_bad_name_size_or_pool_is_refused_by_name() {
    let mut world = World::ready();
    world.create("disk", GIB).unwrap();
    assert_eq!(
        world.create("disk", GIB),
        Err(VolumeRefusal::NameTaken {
            name: "disk".to_owned()
        }
        .into())
    );
    assert!(matches!(world.create("a b", GIB), Err(Refusal::Name(_))));
    assert!(matches!(
        world.create("zero", 0),
        Err(Refusal::Volume(VolumeRefusal::Size { .. }))
    ));
    let unknown = VolumeSpec {
        pool: Some("fast".to_owned()),
        ..VolumeSpec::new("x", GIB)
    };
    assert_eq!(
        world.create_in(unknown),
        Err(PoolRefusal::Unknown {
            name: "fast".to_owned()
        }
        .into())
    );
}

#[test]
fn the_same_creation_again_answers_with_the_volume_it_made() {
    let mut world = World::ready();
    let command = Command::CreateVolume {
        uuid: Uuid::from_u128(5),
        volume: VolumeSpec::new("disk", GIB),
        at: AT,
    };
    let first = world.run(&command).unwrap();
    assert_eq!(world.run(&command).unwrap(), first);
}

#[test]
fn a_pool_without_enough_devices_takes_no_volume() {
    let mut world = World::ready();
    let pool = PoolSpec::new("safe", 3);
    world.run(&Command::CreatePool { pool, at: AT }).unwrap();
    let spec = || VolumeSpec {
        pool: Some("safe".to_owned()),
        ..VolumeSpec::new("disk", GIB)
    };
    let refused = world.create_in(spec()).unwrap_err();
    assert!(
        refused
            .to_string()
            .contains("1 usable device(s) and needs 2 on different nodes"),
        "{refused}"
    );
    world.node(2);
    world.device(2);
    world.create_in(spec()).unwrap();
}

#[test]
fn growing_is_free_and_shrinking_needs_the_word() {
    let mut world = World::ready();
    world.create("disk", 4 * GIB).unwrap();
    assert_eq!(
        world.resize("disk", 5 * GIB, false).unwrap().size_bytes,
        5 * GIB
    );
    assert!(matches!(
        world.resize("disk", GIB, false),
        Err(Refusal::Volume(VolumeRefusal::WouldShrink {
            asked_bytes: GIB,
            ..
        }))
    ));
    world.attach(attachment("disk", "/run/a.sock")).unwrap();
    assert!(matches!(
        world.resize("disk", GIB, true),
        Err(Refusal::Volume(VolumeRefusal::InUse { .. }))
    ));
    assert_eq!(
        world.resize("disk", 6 * GIB, false).unwrap().size_bytes,
        6 * GIB,
        "growing is live"
    );
}

#[test]
fn a_shrunk_volume_grows_again_only_after_its_tail_is_dropped() {
    let mut world = World::ready();
    let id = world.create("disk", 4 * GIB).unwrap().id;
    assert_eq!(
        world
            .resize("disk", 2 * GIB, true)
            .unwrap()
            .stale_tail_end_bytes,
        Some(4 * GIB)
    );
    assert_eq!(
        world
            .resize("disk", GIB, true)
            .unwrap()
            .stale_tail_end_bytes,
        Some(4 * GIB)
    );
    assert!(matches!(
        world.resize("disk", 3 * GIB, true),
        Err(Refusal::Volume(VolumeRefusal::StillShrinking { .. }))
    ));
    world
        .run(&Command::VolumeTailDropped { volume: id })
        .unwrap();
    assert_eq!(
        world
            .resize("disk", 3 * GIB, false)
            .unwrap()
            .stale_tail_end_bytes,
        None
    );
}

#[test]
fn a_volume_being_deleted_can_neither_be_used_nor_made_again() {
    let mut world = World::ready();
    let id = world.create("disk", GIB).unwrap().id;
    world.grant("disk", 1, None).unwrap();
    world.delete("disk").unwrap();
    let deleting = || {
        Refusal::from(VolumeRefusal::Deleting {
            name: "disk".to_owned(),
        })
    };
    assert_eq!(world.create("disk", GIB), Err(deleting()));
    assert_eq!(
        world.attach(attachment("disk", "/run/a.sock")),
        Err(deleting())
    );
    assert_eq!(world.resize("disk", 2 * GIB, false), Err(deleting()));
    assert_eq!(world.grant("disk", 1, None), Err(deleting()));
    assert!(world.release(id, 1, 1).is_err(), "deletion took the lease");
    assert_eq!(
        world.delete("disk").unwrap().id,
        id,
        "deletion may be asked for again"
    );
    world
        .run(&Command::VolumeDataDropped { volume: id })
        .unwrap();
    assert_eq!(
        world.run(&Command::VolumeDataDropped { volume: id }),
        Ok(Outcome::Done)
    );
    assert!(world.create("disk", GIB).unwrap().id > id);
}

#[test]
fn data_of_a_volume_that_nobody_deleted_must_not_be_dropped() {
    let mut world = World::ready();
    let volume = world.create("disk", GIB).unwrap().id;
    let refused = world.run(&Command::VolumeDataDropped { volume });
    assert_eq!(
        refused,
        Err(VolumeRefusal::NotDeleting {
            name: "disk".to_owned()
        }
        .into())
    );
}

#[test]
fn nothing_of_a_deleted_volume_is_left() {
    let mut world = World::ready();
    let counters = |world: &World| tables::COUNTERS.get(&world.records, &()).unwrap();
    let (before, first) = (world.without_events(), counters(&world));
    let id = world.create("disk", GIB).unwrap().id;
    let attached = world.attach(attachment("disk", "/run/a.sock")).unwrap().id;
    world.grant("disk", 1, None).unwrap();
    world
        .run(&Command::DeleteAttachment {
            attachment: AttachmentKey::Id(attached),
        })
        .unwrap();
    world.delete("disk").unwrap();
    world
        .run(&Command::VolumeDataDropped { volume: id })
        .unwrap();
    assert_ne!(counters(&world), first, "numbers are used up");
    let left = world.without_events();
    let differing = left
        .iter()
        .filter(|(key, value)| before.get(*key) != Some(value))
        .count();
    assert_eq!(
        (left.len(), differing),
        (before.len(), 1),
        "the counters alone differ"
    );
}

#[test]
fn every_refusal_is_one_line() {
    let mut world = World::ready();
    world.create("disk", GIB).unwrap();
    world.attach(attachment("disk", "/a")).unwrap();
    let refusals = [
        world.create("disk", GIB).unwrap_err(),
        world.create("a\nb", GIB).unwrap_err(),
        world.delete("no\nsuch").unwrap_err(),
        world.delete("disk").unwrap_err(),
        world.attach(attachment("disk", "x\ny")).unwrap_err(),
        world.attach(attachment("disk", "/b")).unwrap_err(),
    ];
    for refusal in refusals {
        let text = refusal.to_string();
        assert!(!text.contains('\n') && text.contains(':'), "{text}");
    }
}
