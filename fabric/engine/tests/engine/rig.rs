//! A fabric on files in the build directory, and a guest that waits for each request.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use fabric::{
    DeviceConfig, Fabric, FabricConfig, FabricEngine, FabricError, Missing, StoreKind, VolumeHandle,
};
use fabric_replication::volume::{Durability, OnFull, VolumeParams};
use fabric_store::file::Allocation;
use fabric_types::ids::LayerId;
use fabric_types::io::{Engine, IoResult, Op, Request, Submit, Tag};
use fabric_types::{Epoch, Generation};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::single_node::{INCARNATION, NODE, open, wait_until_served};

pub const CLUSTER: [u8; 16] = [7; 16];
pub const MIB: u64 = 1 << 20;
/// After which a test hangs.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// A directory for one test, and the path of its device.
pub struct Rig {
    _dir: tempfile::TempDir,
    pub device: PathBuf,
    pub size_bytes: u64,
}

impl Rig {
    pub fn new(size_bytes: u64) -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let device = dir.path().join("device");
        Self {
            _dir: dir,
            device,
            size_bytes,
        }
    }

    pub fn config(&self) -> FabricConfig {
        let device = DeviceConfig {
            path: self.device.clone(),
            missing: Missing::CreateFile {
                size_bytes: self.size_bytes,
                allocation: Allocation::Sparse,
            },
        };
        let store = StoreKind::Devices(vec![device]);
        let mut config = FabricConfig::new(NODE, INCARNATION, CLUSTER, store);
        config.scrub.enabled = false;
        config.params.buffer_bytes = 16 << 20;
        config.params.leaf_cache_bytes = 16 << 20;
        config
    }

    pub fn open(&self) -> Fabric {
        open(self.config())
    }
}

pub fn params(layer: u64, generation: u64, size_bytes: u64) -> VolumeParams {
    VolumeParams {
        layer: LayerId(layer),
        size_bytes,
        generation: Generation(generation),
        epoch: Epoch(1),
        read_only: false,
        durability: Durability::Flush,
        on_full: OnFull::default(),
    }
}

/// A data thread with one volume.
pub struct Guest {
    pub engine: FabricEngine,
    pub volume: VolumeHandle,
}

impl Guest {
    pub fn new(fabric: &Fabric, volume: &VolumeHandle) -> Self {
        wait_until_served(volume);
        Self {
            engine: fabric.engine().unwrap(),
            volume: volume.clone(),
        }
    }

    pub fn open(fabric: &Fabric, layer: u64, generation: u64, size_bytes: u64) -> Self {
        let volume = fabric
            .open_volume(&params(layer, generation, size_bytes))
            .unwrap();
        Self::new(fabric, &volume)
    }

    pub fn read(&mut self, offset: u64, buf: &mut [u8]) -> IoResult {
        let buffers = [libc::iovec {
            iov_base: buf.as_mut_ptr().cast(),
            iov_len: buf.len(),
        }];
        self.run(Op::Read, offset, buf.len() as u64, &buffers)
    }

    pub fn read_vec(&mut self, offset: u64, len: usize) -> Vec<u8> {
        let mut buf = vec![0xee; len];
        self.read(offset, &mut buf).unwrap();
        buf
    }

    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> IoResult {
        let buffers = [libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        }];
        self.run(
            Op::Write { fua: false },
            offset,
            bytes.len() as u64,
            &buffers,
        )
    }

    pub fn flush(&mut self) -> IoResult {
        self.run(Op::Flush, 0, 0, &[])
    }

    pub fn discard(&mut self, offset: u64, len: u64) -> IoResult {
        self.run(Op::Discard, offset, len, &[])
    }

    pub fn run(&mut self, op: Op, offset: u64, len: u64, buffers: &[libc::iovec]) -> IoResult {
        self.run_late(op, offset, len, buffers, || ())
    }

    /// Lets something happen between numbering the request and handing it to its shard.
    pub fn run_late(
        &mut self,
        op: Op,
        offset: u64,
        len: u64,
        buffers: &[libc::iovec],
        meanwhile: impl FnOnce(),
    ) -> IoResult {
        let request = Request {
            tag: Tag(42),
            op,
            offset,
            len,
            buffers,
        };
        // A newer map or lease has it wait, as in a data thread.
        let start = Instant::now();
        loop {
            // SAFETY: the buffers outlive this call, which waits for the completion.
            match unsafe { self.engine.submit(&self.volume, &request) } {
                Submit::Done(result) => return result,
                Submit::Pending => break,
                Submit::Busy => {
                    assert!(start.elapsed() < WAIT_MAX, "never begun");
                    self.engine
                        .reap(&mut |_, _| panic!("nothing else is in flight"));
                    wait_up_to(&self.engine, Duration::from_millis(1));
                }
            }
        }
        meanwhile();
        self.engine.kick();
        let mut outcome = None;
        while outcome.is_none() {
            if self.engine.reap(&mut |_, result| outcome = Some(result)) == 0 {
                wait(&self.engine);
            }
        }
        outcome.unwrap()
    }
}

/// Sleeps as a data thread does.
pub fn wait(engine: &FabricEngine) {
    let fd = engine.wait_fd();
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], None).unwrap();
}

/// The same, at most for so long.
pub fn wait_up_to(engine: &FabricEngine, timeout: Duration) {
    let fd = engine.wait_fd();
    let timeout = Timespec::try_from(timeout).unwrap();
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).unwrap();
}

pub fn open_error(config: FabricConfig) -> FabricError {
    Fabric::open(config).err().expect("refused")
}
