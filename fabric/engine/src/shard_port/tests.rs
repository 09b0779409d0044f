use std::os::fd::AsFd;
use std::path::Path;

use fabric_store::api::StoreOp;
use fabric_store::file::{Allocation, DeviceFile};
use fabric_types::ids::{ChunkKey, LayerId, Sequence};
use fabric_types::iov::IoVecs;
use fabric_types::membership::ReplicaState;
use fabric_types::slab::Slab;
use fabric_types::{Epoch, Generation, Incarnation, NodeId, PgId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;
use crate::config::{DeviceConfig, FabricConfig, Missing, StoreKind};
use crate::shared::Shared;

const PG: PgId = PgId(0);
/// A group on the second device, if there is one.
const OTHER: PgId = PgId(1);

/// A device that gets two shards.
const TWO_SHARDS_BYTES: u64 = 9 << 30;
/// Waits for the device before an answer counts as lost; each is a second at most.
const WAITS_MAX: u32 = 60;
/// Looks at a shard before it counts as not told; 10 ms lie between them.
const LOOKS_MAX: u32 = 6000;

/// Two threads' ports to stores of which the last one's device takes every write, and fails every flush.
struct Rig {
    ports: [ShardPort; 2],
    stores: Arc<Stores>,
    groups: Arc<Groups>,
    keys: Slab<()>,
    /// The group that is asked.
    pg: PgId,
    _dir: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        Self::with_devices(1)
    }

    fn with_devices(count: usize) -> Self {
        let exe = std::env::current_exe().expect("a test has a path");
        let dir = tempfile::tempdir_in(exe.parent().expect("it lies in a directory")).unwrap();
        let device = |number| DeviceConfig {
            path: dir.path().join(format!("device{number}")),
            missing: Missing::CreateFile {
                size_bytes: TWO_SHARDS_BYTES,
                allocation: Allocation::Sparse,
            },
        };
        let devices: Vec<_> = (0..count).map(device).collect();
        let kind = StoreKind::Devices(devices.clone());
        let config = FabricConfig::new(NodeId(1), Incarnation(1), [7; 16], kind);
        let (mut open, _) = crate::open::open_devices(&devices, &config).unwrap();
        // The null device has no fsync.
        open[count - 1].device = DeviceFile::unchecked(Path::new("/dev/null")).unwrap();
        let stores = Arc::new(Stores::new(open).unwrap());
        let groups = Arc::new(Groups::default());
        groups.set(PG, ReplicaState::InSync, Epoch(1));
        if count > 1 {
            groups.place(OTHER, 1, 2, Epoch(1));
            groups.set(OTHER, ReplicaState::Syncing, Epoch(1));
            groups.get(OTHER).unwrap().fenced(LayerId(1));
        }
        groups.applied(Epoch(2));
        let shared = Shared::new(config, Some(Arc::clone(&stores)), None);
        let port = || {
            let lane = shared.take_lane().unwrap();
            let (stores, groups) = (Arc::clone(&stores), Arc::clone(&groups));
            ShardPort::new(stores, Arc::clone(&shared.fences), groups, lane).unwrap()
        };
        Self {
            ports: [port(), port()],
            stores: Arc::clone(&stores),
            groups: Arc::clone(&groups),
            keys: Slab::new(16, || ()),
            pg: PG,
            _dir: dir,
        }
    }

    /// Queues a request, and does `meanwhile` before its turn comes.
    fn run_after(
        &mut self,
        port: usize,
        command: Command,
        meanwhile: impl FnOnce(&Groups),
    ) -> Result<(), StoreFailure> {
        let slot = self.keys.take().expect("one request at a time");
        let key = self.keys.key(slot);
        let request = Request {
            pg: self.pg,
            generation: Generation(1),
            sequence: Sequence(1),
            epoch: Epoch(1),
            command,
            ..Request::NOTHING
        };
        let port = &mut self.ports[port];
        assert!(port.submit(key, &request).is_none());
        meanwhile(&self.groups);
        port.kick();
        for _ in 0..WAITS_MAX {
            if let Some((done, result)) = port.next_completion() {
                assert!(done == key);
                self.keys.give_back(slot);
                return result;
            }
            let fd = port.wait_fd();
            let second = Timespec {
                tv_sec: 1,
                tv_nsec: 0,
            };
            poll(
                &mut [PollFd::new(&fd.as_fd(), PollFlags::IN)],
                Some(&second),
            )
            .unwrap();
            port.reap();
        }
        panic!("no answer");
    }

    fn run(&mut self, port: usize, command: Command) -> Result<(), StoreFailure> {
        self.run_after(port, command, |_| ())
    }

    fn write(&mut self, port: usize, chunk: u32) -> Result<(), StoreFailure> {
        self.write_after(port, chunk, |_| ())
    }

    fn write_after(
        &mut self,
        port: usize,
        chunk: u32,
        meanwhile: impl FnOnce(&Groups),
    ) -> Result<(), StoreFailure> {
        let bytes = [1u8; 4096];
        let iovec = libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        };
        let buffers = IoVecs {
            ptr: &iovec,
            len: 1,
        };
        let chunk = ChunkKey {
            layer: LayerId(1),
            index: chunk,
        };
        let command = Command::Write {
            chunk,
            offset: 0,
            buffers,
            len: 4096,
            fua: false,
            urgent: false,
        };
        self.run_after(port, command, meanwhile)
    }

    fn flush(&mut self, port: usize) -> Result<(), StoreFailure> {
        let layer = LayerId(1);
        self.run(port, Command::Flush { layer })
    }
}

#[test]
fn a_failed_device_flush_fails_every_shard_for_every_thread() {
    let mut rig = Rig::new();
    assert_eq!(rig.stores.shard_count(), 2);
    assert_eq!(rig.flush(0), Ok(()), "nothing was written yet");
    let chunk_of = |rig: &Rig, shard| {
        let mut chunks = 0..64;
        chunks.find(|&chunk| rig.stores.shard_for(0, LayerId(1), chunk) == shard)
    };
    let chunks = [0, 1].map(|shard| chunk_of(&rig, shard).expect("chunks go everywhere"));
    assert_eq!(rig.write(0, chunks[0]), Ok(()));
    assert_eq!(rig.flush(0), Err(StoreFailure::Device(libc::EINVAL)));
    for port in [0, 1] {
        let refused = Err(StoreFailure::Device(libc::EROFS));
        assert_eq!(rig.flush(port), refused);
        for chunk in chunks {
            assert_eq!(rig.write(port, chunk), refused);
        }
    }
}

#[test]
fn failed_device_without_a_group_in_sync_fails_no_other_flush() {
    let mut rig = Rig::with_devices(2);
    rig.pg = OTHER;
    assert_eq!(rig.write(0, 0), Ok(()));
    assert_eq!(rig.flush(0), Err(StoreFailure::Device(libc::EINVAL)));
    rig.pg = PG;
    assert_eq!(rig.write(0, 0), Ok(()));
    assert_eq!(rig.flush(0), Ok(()), "what is there is yet to be compared");
    rig.groups.set(OTHER, ReplicaState::InSync, Epoch(2));
    assert_eq!(rig.flush(0), Err(StoreFailure::Device(libc::EROFS)));
    rig.groups.set(OTHER, ReplicaState::Out, Epoch(3));
    rig.groups.applied(Epoch(3));
    assert_eq!(rig.flush(1), Ok(()), "nothing there is sent writes");
}

#[test]
fn queued_request_is_refused_after_a_returning_replica_joins() {
    let mut rig = Rig::new();
    assert_eq!(rig.write(0, 0), Ok(()));
    let joined = rig.write_after(0, 0, |groups| groups.join(PG, Epoch(2)));
    let refused = Err(StoreFailure::Fenced(Refusal::StaleEpoch(Epoch(2))));
    assert_eq!(joined, refused);
}

#[test]
fn a_shards_own_failed_flush_fails_the_others_of_its_device() {
    let mut rig = Rig::new();
    assert_eq!(rig.write(1, 0), Ok(()));
    let fence = fabric_store::api::Fence {
        generation: 1,
        epoch: 1,
    };
    let op = StoreOp::SetFence {
        layer: LayerId(9),
        fence,
    };
    let driver = &mut rig.ports[0].driver;
    let mut state = rig.stores.lock(0);
    // SAFETY: a fence has no buffers.
    let submitted = unsafe { state.core.submit(op_id(driver.lane, 1), op) };
    assert_eq!(submitted, Submitted::Accepted);
    driver.work(0, 0, &mut state);
    drop(state);
    driver.send(&rig.stores);
    for _ in 0..LOOKS_MAX {
        if rig.stores.lock(1).core.flush_mark().is_err() {
            break;
        }
        rig.ports[0].reap();
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(rig.flush(1), Err(StoreFailure::Device(libc::EROFS)));
}

/// A request is queued, and its device is closed before its turn comes.
#[test]
fn requests_for_a_device_that_is_closed_go_by_an_older_map() {
    for is_flush in [false, true] {
        let mut rig = Rig::with_devices(2);
        rig.pg = OTHER;
        rig.groups.set(PG, ReplicaState::Out, Epoch(3));
        rig.groups.applied(Epoch(3));
        assert_eq!(rig.write(0, 0), Ok(()));
        let stores = Arc::clone(&rig.stores);
        let closes = |_: &Groups| {
            stores.remove(1);
            while !stores.close_removed(1) {
                std::thread::sleep(Duration::from_millis(10));
            }
            assert!(!stores.device(1).is_open());
        };
        let layer = LayerId(1);
        let refused = match is_flush {
            true => rig.run_after(0, Command::Flush { layer }, closes),
            false => rig.write_after(0, 0, closes),
        };
        let newer = Refusal::StaleEpoch(Epoch(2));
        assert_eq!(refused, Err(StoreFailure::Fenced(newer)), "{is_flush}");
        // A thread that has nothing to do with it takes it out of its ring, too.
        for port in &mut rig.ports {
            port.reap();
            assert!(!port.must_look());
        }
    }
}

#[test]
fn a_node_without_devices_refuses_whatever_concerns_all_of_them() {
    let kind = StoreKind::Devices(Vec::new());
    let config = FabricConfig::new(NodeId(1), Incarnation(1), [7; 16], kind);
    let stores = Arc::new(Stores::new(Vec::new()).unwrap());
    let shared = Shared::new(config, Some(Arc::clone(&stores)), None);
    let (fences, groups) = (Arc::clone(&shared.fences), Arc::<Groups>::default());
    let lane = shared.take_lane().unwrap();
    let mut port = ShardPort::new(stores, fences, groups, lane).unwrap();
    let mut keys = Slab::new(16, || ());
    let layer = LayerId(1);
    let fence = Command::Fence {
        layer,
        buffers: IoVecs {
            ptr: std::ptr::null(),
            len: 0,
        },
        len: 0,
    };
    for command in [Command::Flush { layer }, fence] {
        let slot = keys.take().unwrap();
        let request = Request {
            command,
            ..Request::NOTHING
        };
        let refused = port.submit(keys.key(slot), &request);
        assert!(
            matches!(refused, Some(Err(StoreFailure::Invalid))),
            "{refused:?}"
        );
    }
}
