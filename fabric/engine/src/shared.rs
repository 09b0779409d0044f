//! What all data threads and the control plane share.

use std::sync::{Arc, Mutex};

use fabric_replication::fence::Fences;
use fabric_replication::replica::store_op::ROUND;
use fabric_replication::volume::VolumeParams;
use fabric_replication::watermark::LANES_MAX;
use fabric_transport::control::Network;
use fabric_types::ids::CHUNK_BYTES;
use fabric_types::io::SECTOR_BYTES;

use super::cluster::Cluster;
use super::config::{FabricConfig, FabricError};
use super::stores::Stores;

/// Volumes open at once on a node; one more is refused.
pub const VOLUMES_MAX: u32 = 4096;

/// Largest volume: chunk indexes have 32 bits, and the end of the last chunk must have one, too.
pub const VOLUME_BYTES_MAX: u64 = CHUNK_BYTES * u32::MAX as u64 - CHUNK_BYTES;

/// Numbers that are taken and given back, the smallest first.
#[derive(Debug)]
struct Numbers {
    free: Mutex<Vec<u32>>,
}

impl Numbers {
    fn new(count: u32) -> Arc<Self> {
        Arc::new(Self {
            free: Mutex::new((0..count).rev().collect()),
        })
    }

    fn in_use(&self, count: usize) -> usize {
        count - self.free.lock().expect("no panic under this lock").len()
    }

    fn take(self: &Arc<Self>) -> Option<Number> {
        let number = self.free.lock().expect("no panic under this lock").pop()?;
        Some(Number {
            number,
            home: Arc::clone(self),
        })
    }
}

/// A number in use; dropping it gives it back.
#[derive(Debug)]
pub struct Number {
    number: u32,
    home: Arc<Numbers>,
}

impl Drop for Number {
    fn drop(&mut self) {
        let mut free = self.home.free.lock().expect("no panic under this lock");
        free.push(self.number);
    }
}

/// A data thread's number.
#[derive(Debug)]
pub struct Lane(Number);

impl Lane {
    pub fn index(&self) -> usize {
        self.0.number as usize
    }
}

/// An open volume's place in the threads' tables.
#[derive(Debug)]
pub struct VolumeSlot(Number);

impl VolumeSlot {
    pub fn index(&self) -> u32 {
        self.0.number
    }
}

/// See the module.
pub struct Shared {
    pub config: FabricConfig,
    /// `None` with a null store.
    pub stores: Option<Arc<Stores>>,
    pub fences: Arc<Fences>,
    /// `None` on a node that is configured without a network.
    pub network: Option<Network>,
    pub cluster: Arc<Cluster>,
    lanes: Arc<Numbers>,
    volume_slots: Arc<Numbers>,
}

impl Shared {
    pub fn new(
        config: FabricConfig,
        stores: Option<Arc<Stores>>,
        network: Option<Network>,
    ) -> Self {
        Self {
            cluster: Arc::new(Cluster::new(config.node, config.incarnation)),
            network,
            config,
            stores,
            fences: Arc::new(Fences::default()),
            lanes: Numbers::new(LANES_MAX as u32),
            volume_slots: Numbers::new(VOLUMES_MAX),
        }
    }

    /// Data threads (and importers) that have an engine now.
    pub fn lanes_in_use(&self) -> usize {
        self.lanes.in_use(LANES_MAX)
    }

    pub fn take_lane(&self) -> Result<Lane, FabricError> {
        let number = self.lanes.take();
        number
            .map(Lane)
            .ok_or(FabricError::TooManyThreads(LANES_MAX))
    }

    pub fn take_volume_slot(&self) -> Result<VolumeSlot, FabricError> {
        let number = self.volume_slots.take();
        number
            .map(VolumeSlot)
            .ok_or(FabricError::TooManyVolumes(VOLUMES_MAX))
    }

    pub fn check_volume(&self, params: &VolumeParams) -> Result<(), FabricError> {
        check_size(params.size_bytes)?;
        if params.generation >= ROUND {
            return Err(FabricError::Generation(params.generation.0));
        }
        Ok(())
    }
}

/// Refuses sizes that a volume cannot have.
pub fn check_size(size_bytes: u64) -> Result<(), FabricError> {
    if size_bytes % SECTOR_BYTES != 0 || size_bytes > VOLUME_BYTES_MAX {
        return Err(FabricError::VolumeSize {
            size_bytes,
            max_bytes: VOLUME_BYTES_MAX,
        });
    }
    Ok(())
}
