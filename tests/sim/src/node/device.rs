//! A node's devices.

use std::fmt;

use fabric_store as store;
use fabric_store::ShardCore;
use fabric_store::api::{CoreParams, DeviceLabel};
use fabric_store::testing::sim_disk::{CrashKind, SimDisk};
use fabric_types::ids::ChunkKey;

use super::store::Store;

/// Cluster of all simulated devices.
const CLUSTER: [u8; 16] = [0xc1; 16];

/// Names a device: its node, and which of that node's devices it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceAt {
    /// Node.
    pub node: usize,
    /// Index among the node's.
    pub device: usize,
}

impl DeviceAt {
    /// The first of a node's, of most nodes the only one.
    pub fn first_of(node: usize) -> Self {
        Self { node, device: 0 }
    }
}

impl fmt::Display for DeviceAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {} of node {}", self.device, self.node)
    }
}

/// A device of a node. It stays when processes come and go.
pub struct Device {
    /// The disk.
    pub disk: SimDisk,
    /// How many times slower than planned the disk is.
    pub slowness: u64,
    /// The file system below it has no room.
    pub is_full: bool,
}

impl Device {
    /// A device with what this disk holds.
    pub fn new(disk: &SimDisk, seed: u64) -> Self {
        Self {
            disk: disk.crash(CrashKind::Process, seed),
            slowness: 1,
            is_full: false,
        }
    }

    /// Opens its store.
    ///
    /// # Errors
    /// What the store says when it cannot be opened.
    pub fn open(&mut self, nonce: [u8; 16]) -> Result<ShardCore, String> {
        let opened = store::open(&mut self.disk, &params(), nonce);
        let (mut cores, _) = opened.map_err(|e| e.to_string())?;
        assert_eq!(cores.len(), 1, "a small device has one shard");
        Ok(cores.remove(0))
    }

    /// What a loss of power would leave now, on a copy.
    ///
    /// # Errors
    /// What the store says when it cannot be opened.
    pub fn after_power_loss(&self, seed: u64) -> Result<Left, String> {
        let mut left = Self {
            disk: self.disk.crash(CrashKind::Power, seed),
            slowness: 1,
            is_full: false,
        };
        let core = left.open([0xd0; 16])?;
        let (disk, store) = (left.disk, Store::new(core));
        Ok(Left { disk, store })
    }

    /// Its process dies; with `Power` so does what the disk had not flushed.
    pub fn crash(&mut self, kind: CrashKind, seed: u64) {
        self.disk = self.disk.crash(kind, seed);
        self.disk.set_host_room(self.is_full.then_some(0));
    }
}

/// A device after a simulated loss of power, and the store on it.
pub struct Left {
    disk: SimDisk,
    store: Store,
}

impl Left {
    /// Reads a range of a chunk.
    ///
    /// # Errors
    /// What the store says when it cannot read it.
    pub fn peek(&mut self, chunk: ChunkKey, range: (u32, u32)) -> Result<Vec<u8>, String> {
        self.store.peek(&mut self.disk, chunk, range)
    }
}

fn params() -> CoreParams {
    CoreParams {
        cluster: Some(CLUSTER),
        ops_max: 128,
        leaf_cache_bytes: 256 << 10,
        buffer_bytes: 4 << 20,
    }
}

/// An empty store on a disk of this size. Disks of one size differ in nothing, so the caller may clone it.
pub fn formatted(bytes: u64) -> SimDisk {
    let mut disk = SimDisk::new(bytes, 0);
    let label = DeviceLabel {
        cluster: CLUSTER,
        device: [0xde; 16],
    };
    store::format(&mut disk, label, false).expect("a blank disk can be formatted");
    disk
}
