//! The production [`Engine`](crate::io::Engine): client, replica and store of this node, joined by direct calls.
//!
//! [`Fabric`] is opened once. Each data thread takes a [`FabricEngine`] of its own with its own io_uring; a volume is
//! opened once and its [`VolumeHandle`] given to every thread that serves it.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::core::client::{Client, PIECES_MAX};
use crate::core::replica::Replica;
use crate::core::volume::{Durability, VolumeCounters, VolumeParams, VolumeState};
use crate::io::{Engine, IoResult, Request, Submit, Tag, Volume};
use crate::net::mem::MemTransport;
use crate::proto::{Epoch, Generation, NodeId};

pub mod config;
mod shared;
mod store_port;

pub use config::{FabricConfig, FabricError, StoreKind};

use shared::Shared;
use store_port::StorePorts;

/// The fabric of this node. Clones share it.
#[derive(Clone)]
pub struct Fabric {
    shared: Arc<Shared>,
}

impl Fabric {
    /// Opens the stores of this node.
    pub fn open(config: FabricConfig) -> Result<Self, FabricError> {
        Ok(Self {
            shared: Arc::new(Shared::open(config)?),
        })
    }

    /// An engine for one more data thread.
    pub fn engine(&self) -> Result<FabricEngine, FabricError> {
        let lane = self.shared.take_lane()?;
        let config = &self.shared.config;
        let fences = Arc::clone(&self.shared.fences);
        let replica = Replica::new(config.incarnation, fences, PIECES_MAX);
        let client = Client::new(lane.index(), vec![self.shared.replica_set()]);
        let ports = StorePorts::new(&self.shared, lane)?;
        Ok(FabricEngine {
            client,
            transport: MemTransport::new(replica, ports),
            node: config.node,
        })
    }

    /// Opens a volume under a lease.
    pub fn open_volume(&self, params: &VolumeParams) -> Result<VolumeHandle, FabricError> {
        self.shared.check_volume(params)?;
        let slot = self.shared.take_volume_slot()?;
        // Distinct for the life of the process, so that a data thread tells a slot's users apart.
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Ok(VolumeHandle {
            state: Arc::new(VolumeState::new(id, slot.index(), params)),
            _slot: Arc::new(slot),
        })
    }
}

/// An open volume. Clones are handles on the same.
#[derive(Clone, Debug)]
pub struct VolumeHandle {
    state: Arc<VolumeState>,
    _slot: Arc<shared::VolumeSlot>,
}

impl VolumeHandle {
    /// Changes the size for requests submitted from now on; guests learn it through their attachments.
    pub fn set_size_bytes(&self, size_bytes: u64) {
        self.state.set_size_bytes(size_bytes);
    }

    /// Goes on under a newer map.
    pub fn set_epoch(&self, epoch: Epoch) {
        self.state.set_epoch(epoch);
    }

    /// Goes on under a newer lease; false if it is not newer.
    pub fn renew_lease(&self, generation: Generation) -> bool {
        self.state.renew_lease(generation)
    }

    /// Writes that the lease can still number; renew it well before zero.
    pub fn sequences_left(&self) -> u64 {
        self.state.sequences_left()
    }

    /// The lease in use.
    pub fn generation(&self) -> Generation {
        self.state.generation()
    }

    /// Refuses writes from now on, or takes them again.
    pub fn set_read_only(&self, read_only: bool) {
        self.state.set_read_only(read_only);
    }

    /// True if writes are refused.
    pub fn read_only(&self) -> bool {
        self.state.read_only()
    }

    /// Changes when writes submitted from now on are acknowledged.
    pub fn set_durability(&self, durability: Durability) {
        self.state.set_durability(durability);
    }

    /// Requests and bytes since it was opened.
    pub fn counters(&self) -> VolumeCounters {
        self.state.counters()
    }
}

impl Volume for VolumeHandle {
    #[inline]
    fn size_bytes(&self) -> u64 {
        self.state.size_bytes()
    }
}

/// The engine of one data thread.
pub struct FabricEngine {
    client: Client,
    transport: MemTransport<StorePorts>,
    node: NodeId,
}

impl Engine for FabricEngine {
    type Volume = VolumeHandle;

    #[inline]
    unsafe fn submit(&mut self, volume: &VolumeHandle, request: &Request<'_>) -> Submit {
        self.client
            .submit(&volume.state, request, &mut self.transport)
    }

    #[inline]
    fn kick(&mut self) {
        self.transport.store().kick();
    }

    #[inline]
    fn reap(&mut self, done: &mut dyn FnMut(Tag, IoResult)) -> usize {
        if self.client.in_flight() == 0 {
            return 0;
        }
        let mut reported = 0;
        let mut count = |tag, result| {
            reported += 1;
            done(tag, result);
        };
        self.transport.store().reap();
        while let Some((key, result)) = self.transport.store().next_completion() {
            if let Some(reply) = self.transport.on_store(key, result) {
                self.client
                    .on_reply(self.node, &reply, &mut self.transport, &mut count);
            }
        }
        reported
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.client.in_flight()
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.transport.store_ref().wait_fd()
    }
}
