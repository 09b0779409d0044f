//! The rules of the state machine, one by one.

use std::collections::BTreeMap;

use uuid::Uuid;

use super::{Txn, apply, tables};
use crate::command::{
    AttachmentKey, AttachmentSpec, Command, DeviceSpec, NodeSpec, Outcome, PoolSpec, Reply,
    VolumeSpec,
};
use crate::ids::{DeviceId, Generation, NodeId, UnixMillis, VolumeId};
use crate::model::{
    Attachment, AttachmentOptions, DEFAULT_POOL, DeviceState, FailureDomain, Lease, Role, Volume,
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
}

impl World {
    /// Applies a command, and checks that a refused one changed nothing.
    pub(super) fn run(&mut self, command: &Command) -> Reply {
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
        let node = NodeSpec {
            id: NodeId(1),
            name: "one".to_owned(),
            roles: Role::all(),
        };
        world
            .run(&Command::Bootstrap {
                cluster: Uuid::from_u128(1),
                node,
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
            at: AT,
        }) {
            Ok(Outcome::Device(device)) => device.id,
            other => panic!("{other:?}"),
        }
    }

    fn node(&mut self, id: u64) {
        let node = NodeSpec {
            id: NodeId(id),
            name: format!("node{id}"),
            roles: Role::all(),
        };
        self.run(&Command::RegisterNode { node, at: AT }).unwrap();
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
fn nothing_is_done_before_the_cluster_is_made() {
    let mut world = World::default();
    assert_eq!(world.create("disk", GIB), Err(MapRefusal::NoCluster.into()));
    assert!(world.records.is_empty());
}

#[test]
fn bootstrap_may_be_repeated_but_not_for_another_cluster() {
    let mut world = World::ready();
    let before = world.records.clone();
    let node = NodeSpec {
        id: NodeId(1),
        name: "one".to_owned(),
        roles: Role::all(),
    };
    let again = |cluster| Command::Bootstrap {
        cluster,
        node: node.clone(),
        at: UnixMillis(9),
    };
    assert_eq!(world.run(&again(Uuid::from_u128(1))), Ok(Outcome::Done));
    assert!(matches!(
        world.run(&again(Uuid::from_u128(2))),
        Err(Refusal::Map(MapRefusal::OtherCluster { .. }))
    ));
    assert_eq!(world.records, before);
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
    let (before, first) = (world.records.clone(), counters(&world));
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
    let differing = world
        .records
        .iter()
        .filter(|(key, value)| before.get(*key) != Some(value))
        .count();
    assert_eq!(
        (world.records.len(), differing),
        (before.len(), 1),
        "the counters alone differ"
    );
}

#[test]
fn every_grant_has_a_higher_generation_and_an_older_one_is_refused() {
    let mut world = World::ready();
    let id = world.create("disk", GIB).unwrap().id;
    let generations: Vec<u64> = (0..3)
        .map(|_| world.grant("disk", 1, None).unwrap().generation.0)
        .collect();
    assert_eq!(generations, [1, 2, 3]);
    let superseded = LeaseRefusal::Superseded {
        volume: id,
        current: Generation(3),
        claimed: Generation(2),
    };
    assert_eq!(world.release(id, 1, 2), Err(superseded.into()));
    assert!(matches!(
        world.release(id, 1, 4),
        Err(Refusal::Lease(LeaseRefusal::NotHolder { .. }))
    ));
    world.release(id, 1, 3).unwrap();
    world.release(id, 1, 3).unwrap();
    assert_eq!(
        world.grant("disk", 1, None).unwrap().generation,
        Generation(4),
        "it survives release"
    );
}

#[test]
fn another_node_gets_a_lease_only_when_it_is_released_or_its_very_generation_ran_out() {
    let mut world = World::ready();
    world.node(2);
    let id = world.create("disk", GIB).unwrap().id;
    world.grant("disk", 1, None).unwrap();
    world.grant("disk", 1, None).unwrap();
    for expired in [None, Some(1), Some(3)] {
        let held = LeaseRefusal::Held {
            volume: "disk".to_owned(),
            holder: NodeId(1),
            generation: Generation(2),
        };
        assert_eq!(world.grant("disk", 2, expired), Err(held.into()));
    }
    assert_eq!(
        world.grant("disk", 2, Some(2)).unwrap().generation,
        Generation(3)
    );
    assert!(world.release(id, 1, 2).is_err());
    world.release(id, 2, 3).unwrap();
    assert_eq!(
        world.grant("disk", 1, None).unwrap().holder,
        Some(NodeId(1))
    );
    assert!(matches!(
        world.grant("disk", 9, None),
        Err(Refusal::Map(MapRefusal::UnknownNode { .. }))
    ));
}

#[test]
fn a_grant_carries_an_epoch_as_new_as_the_map() {
    let mut world = World::ready();
    world.create("disk", GIB).unwrap();
    let first = world.grant("disk", 1, None).unwrap().epoch;
    world.device(1);
    assert!(world.grant("disk", 1, None).unwrap().epoch > first);
}

#[test]
fn a_socket_serves_one_volume_and_is_free_again_after_detaching() {
    let mut world = World::ready();
    world.create("disk", GIB).unwrap();
    world.create("other", GIB).unwrap();
    world.attach(attachment("disk", "/run/a.sock")).unwrap();
    let taken = world
        .attach(attachment("other", "/run/a.sock"))
        .unwrap_err();
    let (socket, node, target) = ("/run/a.sock".to_owned(), NodeId(1), "disk".to_owned());
    assert_eq!(
        taken,
        AttachmentRefusal::SocketTaken {
            socket,
            node,
            target
        }
        .into()
    );
    world.node(2);
    let elsewhere = AttachmentSpec {
        node: NodeId(2),
        ..attachment("other", "/run/a.sock")
    };
    world.attach(elsewhere).unwrap();
    let key = AttachmentKey::Socket {
        node: NodeId(1),
        socket: "/run/a.sock".to_owned(),
    };
    world
        .run(&Command::DeleteAttachment {
            attachment: key.clone(),
        })
        .unwrap();
    let unknown = world.run(&Command::DeleteAttachment { attachment: key });
    assert!(matches!(
        unknown,
        Err(Refusal::Attachment(AttachmentRefusal::Unknown { .. }))
    ));
    world.attach(attachment("disk", "/run/a.sock")).unwrap();
}

#[test]
fn one_writes_or_many_read_or_all_say_that_they_share() {
    let mut world = World::ready();
    world.create("disk", GIB).unwrap();
    let reader = |socket: &str| AttachmentSpec {
        read_only: true,
        ..attachment("disk", socket)
    };
    let in_use = |result: Result<Attachment, Refusal>| {
        matches!(
            result,
            Err(Refusal::Attachment(AttachmentRefusal::VolumeInUse { .. }))
        )
    };
    let first = world.attach(reader("/r1")).unwrap();
    let second = world.attach(reader("/r2")).unwrap();
    assert!(in_use(world.attach(attachment("disk", "/w1"))));
    for id in [first.id, second.id] {
        world
            .run(&Command::DeleteAttachment {
                attachment: AttachmentKey::Id(id),
            })
            .unwrap();
    }
    let sharing = AttachmentOptions {
        shared: true,
        ..AttachmentOptions::default()
    };
    let shared = |socket: &str| AttachmentSpec {
        options: sharing.clone(),
        ..attachment("disk", socket)
    };
    world.attach(shared("/s1")).unwrap();
    world.attach(shared("/s2")).unwrap();
    assert!(in_use(world.attach(attachment("disk", "/w1"))));
    assert!(in_use(world.attach(reader("/r1"))));
}

#[test]
fn a_read_only_volume_is_attached_read_only() {
    let mut world = World::ready();
    world
        .create_in(VolumeSpec {
            read_only: true,
            ..VolumeSpec::new("image", GIB)
        })
        .unwrap();
    assert!(world.attach(attachment("image", "/a")).unwrap().read_only);
    assert!(world.attach(attachment("image", "/b")).unwrap().read_only);
}

#[test]
fn attachments_beyond_their_limits_are_refused() {
    let mut world = World::ready();
    world.create("disk", GIB).unwrap();
    for socket in [
        "relative",
        "",
        "/",
        "/run/",
        "/run/..",
        "/a\0b",
        &format!("/{}", "x".repeat(107)),
    ] {
        let refused = world.attach(attachment("disk", socket));
        assert!(
            matches!(
                refused,
                Err(Refusal::Attachment(AttachmentRefusal::BadSocketPath { .. }))
            ),
            "{socket:?}"
        );
    }
    for queues in [0, 257] {
        let refused = world.attach(AttachmentSpec {
            queues,
            ..attachment("disk", "/a")
        });
        assert_eq!(refused, Err(AttachmentRefusal::BadQueues { queues }.into()));
    }
    let many = (0..17)
        .map(|number| (format!("k{number}"), String::new()))
        .collect();
    let long = BTreeMap::from([("k".to_owned(), "x".repeat(1024))]);
    for extra in [many, long] {
        let options = AttachmentOptions {
            extra,
            ..AttachmentOptions::default()
        };
        let refused = world.attach(AttachmentSpec {
            options,
            ..attachment("disk", "/a")
        });
        assert!(matches!(
            refused,
            Err(Refusal::Attachment(AttachmentRefusal::BadOption { .. }))
        ));
    }
    world
        .attach(attachment("disk", &format!("/{}", "x".repeat(106))))
        .unwrap();
}

#[test]
fn an_empty_pool_is_placed_anew_and_one_with_volumes_keeps_its_placement() {
    let mut world = World::ready();
    let groups = |world: &World| tables::PLACEMENT_GROUPS.all(&world.records).unwrap();
    world.device(1);
    let spread: std::collections::BTreeSet<_> = groups(&world)
        .into_iter()
        .flat_map(|group| group.replicas)
        .collect();
    assert_eq!(spread.len(), 2, "both devices are used");
    world.create("disk", GIB).unwrap();
    let before = groups(&world);
    let third = world.device(1);
    assert_eq!(groups(&world), before);
    world.run(&Command::RemoveDevice { device: third }).unwrap();
    let refused = world.run(&Command::RemoveDevice {
        device: DeviceId(1),
    });
    assert!(matches!(
        refused,
        Err(Refusal::Map(MapRefusal::DeviceInUse { .. }))
    ));
}

#[test]
fn a_replica_that_joins_a_group_with_data_is_not_in_sync() {
    let mut world = World::ready();
    let pool = PoolSpec {
        min_in_sync: Some(1),
        failure_domain: FailureDomain::Device,
        ..PoolSpec::new("safe", 2)
    };
    world.run(&Command::CreatePool { pool, at: AT }).unwrap();
    world
        .create_in(VolumeSpec {
            pool: Some("safe".to_owned()),
            ..VolumeSpec::new("disk", GIB)
        })
        .unwrap();
    let joined = world.device(1);
    let pool = tables::POOLS.get(&world.records, "safe").unwrap().unwrap();
    for group in tables::PLACEMENT_GROUPS
        .all_below(&world.records, &pool.id)
        .unwrap()
    {
        assert_eq!(group.replicas, [DeviceId(1), joined]);
        assert!(group.in_sync.contains(&DeviceId(1)) && !group.in_sync.contains(&joined));
    }
}

#[test]
fn a_device_changes_path_and_size_but_not_identity() {
    let mut world = World::ready();
    let moved = DeviceSpec {
        path: "/dev/elsewhere".to_owned(),
        size_bytes: 7 * GIB,
        ..device(1, 1)
    };
    let reply = world
        .run(&Command::RegisterDevice {
            device: moved,
            at: UnixMillis(9),
        })
        .unwrap();
    let Outcome::Device(found) = reply else {
        panic!("{reply:?}")
    };
    assert_eq!(
        (found.id, found.size_bytes, found.added_at),
        (DeviceId(1), 7 * GIB, AT)
    );
    let swapped = DeviceSpec {
        path: "/dev/elsewhere".to_owned(),
        ..device(5, 1)
    };
    let refused = world
        .run(&Command::RegisterDevice {
            device: swapped,
            at: AT,
        })
        .unwrap_err();
    assert!(
        refused.to_string().contains("penstock device remove 1"),
        "{refused}"
    );
    for (path, size_bytes) in [("relative", GIB), ("/dev/x", 0)] {
        let bad = DeviceSpec {
            path: path.to_owned(),
            size_bytes,
            ..device(6, 1)
        };
        let refused = world
            .run(&Command::RegisterDevice {
                device: bad,
                at: AT,
            })
            .unwrap_err();
        assert_eq!(refused.kind(), RefusalKind::Invalid);
    }
}

#[test]
fn a_failed_device_gets_no_new_data() {
    let mut world = World::ready();
    world
        .run(&Command::SetDeviceState {
            device: DeviceId(1),
            state: DeviceState::Failed,
        })
        .unwrap();
    assert!(matches!(
        world.create("disk", GIB),
        Err(Refusal::Pool(PoolRefusal::TooFewDevices {
            available: 0,
            ..
        }))
    ));
    world
        .run(&Command::RegisterDevice {
            device: device(1, 1),
            at: AT,
        })
        .unwrap();
    world.create("disk", GIB).unwrap();
}

#[test]
fn pools_are_checked_and_the_default_and_used_ones_stay() {
    let mut world = World::ready();
    let create =
        |world: &mut World, pool: PoolSpec| world.run(&Command::CreatePool { pool, at: AT });
    for bad in [
        PoolSpec::new("p", 0),
        PoolSpec::new("p", 8),
        PoolSpec {
            min_in_sync: Some(3),
            ..PoolSpec::new("p", 2)
        },
        PoolSpec {
            min_in_sync: Some(0),
            ..PoolSpec::new("p", 2)
        },
        PoolSpec {
            placement_groups: Some(0),
            ..PoolSpec::new("p", 1)
        },
        PoolSpec {
            placement_groups: Some(16_385),
            ..PoolSpec::new("p", 1)
        },
    ] {
        assert_eq!(
            create(&mut world, bad).unwrap_err().kind(),
            RefusalKind::Invalid
        );
    }
    let before = world.records.len();
    create(&mut world, PoolSpec::new("p", 1)).unwrap();
    assert_eq!(
        create(&mut world, PoolSpec::new("p", 1))
            .unwrap_err()
            .kind(),
        RefusalKind::Conflict
    );
    let volume = world
        .create_in(VolumeSpec {
            pool: Some("p".to_owned()),
            ..VolumeSpec::new("disk", GIB)
        })
        .unwrap();
    let delete = |world: &mut World, name: &str| {
        world.run(&Command::DeletePool {
            name: name.to_owned(),
        })
    };
    let in_use = PoolRefusal::InUse {
        name: "p".to_owned(),
        volume: "disk".to_owned(),
    };
    assert_eq!(delete(&mut world, "p"), Err(in_use.into()));
    assert!(matches!(
        delete(&mut world, DEFAULT_POOL),
        Err(Refusal::Pool(PoolRefusal::IsDefault { .. }))
    ));
    world.delete("disk").unwrap();
    world
        .run(&Command::VolumeDataDropped { volume: volume.id })
        .unwrap();
    delete(&mut world, "p").unwrap();
    assert_eq!(world.records.len(), before, "its groups are gone with it");
}

#[test]
fn two_nodes_do_not_bear_one_name() {
    let mut world = World::ready();
    let named = |id: u64| NodeSpec {
        id: NodeId(id),
        name: "one".to_owned(),
        roles: Role::all(),
    };
    let refused = world.run(&Command::RegisterNode {
        node: named(2),
        at: AT,
    });
    assert!(matches!(
        refused,
        Err(Refusal::Map(MapRefusal::NodeNameTaken {
            holder: NodeId(1),
            ..
        }))
    ));
    let idle = NodeSpec {
        roles: [].into(),
        ..named(1)
    };
    assert!(matches!(
        world.run(&Command::RegisterNode { node: idle, at: AT }),
        Err(Refusal::Map(MapRefusal::NoRole { .. }))
    ));
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
