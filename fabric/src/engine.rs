//! The production [`Engine`](crate::io::Engine): client, replica and store of this node, joined by direct calls.
//!
//! [`Fabric`] is opened once. Each data thread takes a [`FabricEngine`] of its own with its own io_uring; a volume is
//! opened once and its [`VolumeHandle`] given to every thread that serves it.

use std::cell::Cell;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

use crate::core::client::{Client, ClientAction};
use crate::core::membership::ReplicaSet;
use crate::core::replica::Replica;
use crate::core::volume::{Durability, VolumeCounters, VolumeParams, VolumeState};
use crate::io::{Engine, IoResult, Request, Submit, Tag, Volume};
use crate::net::mem::MemTransport;
use crate::net::tcp::control::Network;
use crate::proto::ids::LayerId;
use crate::proto::{Epoch, Generation, NodeId};

mod clean;
pub mod config;
mod control;
mod mailbox;
mod maintenance;
mod open;
pub mod scrub;
mod shard_port;
mod shared;
mod store_port;
mod stores;
mod transport;
pub mod volume_io;

pub use config::{
    CleanConfig, DeviceConfig, FabricConfig, FabricError, Missing, ScrubConfig, StoreKind,
};
pub use control::DeviceStatus;
pub use scrub::ScrubStatus;
pub use shared::VOLUME_BYTES_MAX;
pub use stores::OpenStore;
pub use volume_io::VolumeIo;

use control::Control;
use shared::Shared;
use store_port::StorePorts;
use stores::HELD_MAX;
use transport::{NodeTransport, Told};

/// The fabric of this node. Clones share it. Blocking calls: not for a data thread, and from async code through a
/// blocking task.
#[derive(Clone)]
pub struct Fabric {
    shared: Arc<Shared>,
    /// `None` with a null store.
    control: Option<Arc<Control>>,
}

impl Fabric {
    /// Opens (and where told so, formats) the stores of this node, recovering them as needed.
    pub fn open(config: FabricConfig) -> Result<Self, FabricError> {
        match &config.store {
            StoreKind::Null => {
                tracing::warn!(
                    node = config.node.0,
                    "null store: WRITES ARE DROPPED and reads return garbage; for benchmarks only"
                );
                let network = start_network(&config)?;
                Ok(Self {
                    shared: Arc::new(Shared::new(config, None, network)),
                    control: None,
                })
            }
            StoreKind::Devices(devices) => {
                let stores = open::open_devices(devices, &config)?;
                Self::with_stores(config, stores)
            }
        }
    }

    /// A fabric on stores that are open already.
    pub fn with_stores(config: FabricConfig, stores: Vec<OpenStore>) -> Result<Self, FabricError> {
        if stores.is_empty() {
            return Err(FabricError::NoDevice);
        }
        let stores = Arc::new(stores::Stores::new(stores)?);
        let control = Control::start(Arc::clone(&stores), (config.scrub, config.clean))?;
        let network = start_network(&config)?;
        Ok(Self {
            shared: Arc::new(Shared::new(config, Some(stores), network)),
            control: Some(Arc::new(control)),
        })
    }

    /// An engine for one more data thread, which answers other nodes, too: it is to be reaped also while it has no guests.
    pub fn engine(&self) -> Result<FabricEngine, FabricError> {
        self.engine_that(true)
    }

    /// An engine that may be left alone between its own requests.
    pub(crate) fn idle_engine(&self) -> Result<FabricEngine, FabricError> {
        self.engine_that(false)
    }

    fn engine_that(&self, serves: bool) -> Result<FabricEngine, FabricError> {
        let lane = self.shared.take_lane()?;
        let config = &self.shared.config;
        let fences = Arc::clone(&self.shared.fences);
        let replica = Replica::new(config.incarnation, fences, HELD_MAX);
        let index = lane.index();
        let client = Client::new(index, self.shared.replica_sets());
        let local = MemTransport::new(replica, StorePorts::new(&self.shared, lane)?);
        let transport = match &self.shared.network {
            None => NodeTransport::alone(config.node, local),
            Some(network) => {
                let control = Arc::clone(network.control());
                NodeTransport::connected(config.node, local, control, index, serves)?
            }
        };
        Ok(FabricEngine { client, transport })
    }

    /// Where other nodes reach this one; `None` if it is configured without a network.
    pub fn address(&self) -> Option<SocketAddr> {
        Some(self.shared.network.as_ref()?.address())
    }

    /// Tells where the other nodes are. One that is left out is not connected to again.
    pub fn set_peers(&self, peers: HashMap<NodeId, SocketAddr>) {
        if let Some(network) = &self.shared.network {
            network.set_peers(peers);
        }
    }

    /// Which nodes replicate, for engines made from now on. Until it is told, this node is the only replica.
    pub fn set_replica_sets(&self, sets: Vec<ReplicaSet>) {
        self.shared.set_replica_sets(sets);
    }

    /// Opens a volume under a lease, creating its layer if the node does not know it. From now on writes of older
    /// leases are refused, also after a crash.
    ///
    /// The lease must be newer than that of any earlier opening: its writes are numbered from one again, and would
    /// otherwise pass for older ones. One opening serves any number of threads and attachments through clones.
    pub fn open_volume(&self, params: &VolumeParams) -> Result<VolumeHandle, FabricError> {
        self.shared.check_volume(params)?;
        let slot = self.shared.take_volume_slot()?;
        if let Some(control) = &self.control {
            control.admit(params)?;
            self.raise_fence(params.layer, params.generation, params.epoch)?;
        }
        // Distinct for the life of the process, so that a data thread tells a slot's users apart.
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Ok(VolumeHandle {
            state: Arc::new(VolumeState::new(id, slot.index(), params)),
            _slot: Arc::new(slot),
        })
    }

    /// Goes on under a newer lease without a pause: requests under the old one are repeated under the new.
    pub fn renew_lease(
        &self,
        volume: &VolumeHandle,
        generation: Generation,
        epoch: Epoch,
    ) -> Result<(), FabricError> {
        if generation > Generation::MAX {
            return Err(FabricError::Generation(generation.0));
        }
        // The client first: a refusal then finds the newer lease in place.
        volume.state.set_epoch(epoch);
        if !volume.state.renew_lease(generation) {
            return Err(FabricError::StaleLease {
                layer: volume.state.layer(),
                given: generation,
                persisted: volume.state.generation(),
            });
        }
        self.raise_fence(volume.state.layer(), generation, epoch)
    }

    /// Refuses writes to a layer under older leases and maps, durably.
    pub fn raise_fence(
        &self,
        layer: LayerId,
        generation: Generation,
        epoch: Epoch,
    ) -> Result<(), FabricError> {
        // In memory first: no write slips in between.
        self.shared.fences.of(layer).raise(generation, epoch);
        match &self.control {
            Some(control) => control.set_fence(layer, generation, epoch),
            None => Ok(()),
        }
    }

    /// Deletes a layer's data and gives their space back. The caller sees to it that no handle on it is left.
    pub fn delete_volume(&self, layer: LayerId) -> Result<(), FabricError> {
        if let Some(control) = &self.control {
            control.drop_layer(layer)?;
        }
        self.shared.fences.forget(layer);
        Ok(())
    }

    /// Changes a volume's size. What is cut off is freed; what is added reads as zeroes. Guests learn it through their
    /// attachments.
    pub fn resize_volume(&self, volume: &VolumeHandle, size_bytes: u64) -> Result<(), FabricError> {
        shared::check_size(size_bytes)?;
        let old = volume.size_bytes();
        if size_bytes < old {
            let zeroed = VolumeIo::new(self, volume)?.zero(size_bytes, old - size_bytes);
            zeroed.map_err(|source| FabricError::Request {
                verb: "free the end of the volume",
                source,
            })?;
        }
        volume.state.set_size_bytes(size_bytes);
        Ok(())
    }

    /// A volume for blocking I/O from this thread.
    pub fn volume_io(&self, volume: &VolumeHandle) -> Result<VolumeIo, FabricError> {
        VolumeIo::new(self, volume)
    }

    /// The devices: space, counters, scrubbing, what opening did. Empty with a null store.
    pub fn devices(&self) -> Vec<DeviceStatus> {
        self.control.as_ref().map_or_else(Vec::new, |c| c.devices())
    }

    /// Writes a checkpoint on all devices, so that the next opening has less to replay.
    pub fn checkpoint(&self) -> Result<(), FabricError> {
        match &self.control {
            Some(control) => control.checkpoint(false),
            None => Ok(()),
        }
    }

    /// Closes cleanly: the next opening replays nothing. All engines must have been dropped. Other clones are closed,
    /// too.
    pub fn close(&self) -> Result<(), FabricError> {
        match self.shared.lanes_in_use() {
            0 => {}
            lanes => return Err(FabricError::InUse(lanes)),
        }
        match &self.control {
            Some(control) => control.close(),
            None => Ok(()),
        }
    }
}

/// An open volume. Clones are handles on the same.
#[derive(Clone, Debug)]
pub struct VolumeHandle {
    state: Arc<VolumeState>,
    _slot: Arc<shared::VolumeSlot>,
}

impl VolumeHandle {
    /// The layer that takes writes.
    pub fn layer(&self) -> LayerId {
        self.state.layer()
    }

    /// Writes that the lease can still number; [`Fabric::renew_lease`] well before zero.
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
    transport: NodeTransport,
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
        self.transport.kick();
    }

    #[inline]
    fn reap(&mut self, done: &mut dyn FnMut(Tag, IoResult)) -> usize {
        let reported = Cell::new(0);
        let mut count = |tag, result| {
            reported.set(reported.get() + 1);
            done(tag, result);
        };
        let mut more = self.transport.reap();
        if let Some(now_us) = self.transport.now_us() {
            self.client.set_now_us(now_us);
        }
        if self.transport.tick(self.client.needs_tick()) {
            self.client.on_tick(&mut self.transport, &mut count);
            self.transport.kick();
        }
        loop {
            let mut answered = false;
            while let Some(told) = self.transport.next(&mut answered) {
                match told {
                    Told::Reply(node, reply) => {
                        self.client
                            .on_reply(node, &reply, &mut self.transport, &mut count);
                    }
                    Told::Lost(node) => {
                        self.client.on_lost(node, &mut self.transport, &mut count);
                    }
                }
            }
            if !answered {
                // Nothing to report means that there is nothing: the caller may go to sleep on it.
                if !more || reported.get() > 0 {
                    break;
                }
                more = self.transport.reap();
                continue;
            }
            // An answer may have made the client send the next piece of a range, and nobody else kicks for that one.
            // What is answered in place is looked at here, too: no descriptor would tell of it. The turns end with the
            // ranges in flight.
            self.transport.kick();
        }
        // What came just now may have made a request wait for the next tick.
        self.transport.tick(self.client.needs_tick());
        reported.get()
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.client.in_flight()
    }

    #[inline]
    fn must_reap(&self) -> bool {
        self.client.in_flight() > 0 || self.transport.must_reap()
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.transport.wait_fd()
    }
}

impl FabricEngine {
    /// Takes in what the devices still owe other threads' requests, for an engine that nobody reaps from now on.
    pub(crate) fn settle(&mut self) {
        self.transport.local.store().settle();
    }

    /// Goes on with a newer map; what waited for it is finished, or sent again.
    pub fn set_map(&mut self, set: ReplicaSet, done: &mut dyn FnMut(Tag, IoResult)) {
        self.client.on_map(vec![set], &mut self.transport, done);
        self.transport.kick();
    }

    /// Next thing to be asked of the control plane.
    pub fn next_action(&mut self) -> Option<ClientAction> {
        self.client.poll_action()
    }
}

fn start_network(config: &FabricConfig) -> Result<Option<Network>, FabricError> {
    let Some(net) = &config.net else {
        return Ok(None);
    };
    let network = Network::start(net, config.cluster, config.node, config.incarnation);
    network
        .map(Some)
        .map_err(FabricError::os("listen for other nodes"))
}

/// How long dropping an engine waits for its requests, whose buffers are in use until they end.
const DROP_WAIT: Duration = Duration::from_secs(30);

/// Pause between two looks while waiting.
const DROP_POLL: rustix::time::Timespec = rustix::time::Timespec {
    tv_sec: 0,
    tv_nsec: 10_000_000,
};

impl Drop for FabricEngine {
    fn drop(&mut self) {
        let start = Instant::now();
        self.transport.stop_serving();
        while self.in_flight() > 0 || self.transport.serving() > 0 {
            self.kick();
            if self.reap(&mut |_, _| ()) > 0 {
                continue;
            }
            if start.elapsed() > DROP_WAIT {
                tracing::error!(
                    requests = self.in_flight() + self.transport.serving(),
                    "data thread ends with requests that were never answered"
                );
                self.transport.abandon();
                return;
            }
            let fd = self.wait_fd();
            // Interrupted or not, `reap` says what there is.
            let _ = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&DROP_POLL));
        }
    }
}
