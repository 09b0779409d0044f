//! The production [`Engine`](fabric_types::io::Engine): client, replica and store of this node, joined by
//! direct calls.
//!
//! [`Fabric`] is opened once. Each data thread takes a [`FabricEngine`] of its own with its own io_uring; a
//! volume is opened once and its [`VolumeHandle`] given to every thread that serves it.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fabric_replication::replica::store_op::ROUND;
use fabric_replication::volume::{
    Durability, HeldWrites, OnFull, VolumeCounters, VolumeParams, VolumeState,
};
use fabric_transport::control::{Network, PeerRoute};
use fabric_transport::counts::Count;
use fabric_transport::queue_pair::pair::Offered;
use fabric_transport::queue_pair::regions::RegionCounts;
use fabric_transport::queue_pair::registrar::Registrar;
use fabric_types::ids::LayerId;
use fabric_types::io::Volume;
use fabric_types::{Epoch, Generation, NodeId};

mod clean;
mod cluster;
pub mod config;
mod control;
mod damage;
mod data_thread;
mod devices;
mod evidence;
mod host_space;
mod io_driver;
mod mailbox;
mod maintenance;
mod mem;
mod open;
mod scrub;
mod shard_port;
mod shared;
mod store_port;
mod stored;
mod stores;
mod strays;
mod transport;
pub mod volume_io;

pub use cluster::traffic::Traffic;
pub use cluster::{ClusterView, GroupView, MetaRequest, SyncStall};
pub use config::{
    CleanConfig, DeviceConfig, FabricConfig, FabricError, Missing, ResyncConfig, ScrubConfig,
    StoreKind,
};
pub use control::DeviceStatus;
pub use damage::{FINDINGS_MAX, ScrubStatus};
pub use data_thread::FabricEngine;
pub use evidence::Evidence;
pub use fabric_replication::fence::Grant;
pub use fabric_replication::resync::rounds::Totals as ResyncTotals;
pub use fabric_transport::members::{MemberView, Reach};
pub use open::{Lacking, check_blank};
pub use scrub::{ScrubOrder, ScrubPass};
pub use shared::VOLUME_BYTES_MAX;
pub use stored::StoredBytes;
pub use stores::OpenStore;
pub use volume_io::VolumeIo;

use cluster::Cluster;
use cluster::worker::Worker;
use control::Control;
use shared::Shared;

/// How long a newer lease waits for the map that it was granted under.
const MAP_WAIT: Duration = Duration::from_secs(5);

/// The fabric of this node. Clones share it. Blocking calls: not for a data thread, and from async code
/// through a blocking task.
#[derive(Clone)]
pub struct Fabric {
    shared: Arc<Shared>,
    /// Declared before `control`, because it works on the stores.
    worker: Arc<Worker>,
    /// `None` with a null store.
    control: Option<Arc<Control>>,
    lacking: Arc<Vec<Lacking>>,
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
                Self::with_shared(Shared::new(config, None, network), None)
            }
            StoreKind::Devices(devices) => {
                let (stores, lacking) = open::open_devices(devices, &config)?;
                let fabric = Self::with_stores(config, stores)?;
                Ok(Self {
                    lacking: Arc::new(lacking),
                    ..fabric
                })
            }
        }
    }

    /// A fabric on stores that are open already.
    pub fn with_stores(config: FabricConfig, stores: Vec<OpenStore>) -> Result<Self, FabricError> {
        // What lies nowhere is kept by other nodes.
        let may_lack_all = config.may_lack && config.net.is_some();
        if stores.is_empty() && !may_lack_all {
            return Err(FabricError::NoDevice);
        }
        let stores = Arc::new(stores::Stores::new(stores)?);
        let control = Control::start(Arc::clone(&stores), (config.scrub, config.clean))?;
        let network = start_network(&config)?;
        let shared = Shared::new(config, Some(stores), network);
        Self::with_shared(shared, Some(Arc::new(control)))
    }

    fn with_shared(shared: Shared, control: Option<Arc<Control>>) -> Result<Self, FabricError> {
        let shared = Arc::new(shared);
        let worker = Worker::start(&shared, &shared.cluster)?;
        Ok(Self {
            shared,
            worker: Arc::new(worker),
            control,
            lacking: Arc::default(),
        })
    }

    /// An engine for one more data thread, which answers other nodes, too: it is to be reaped also while it
    /// has no guests.
    pub fn engine(&self) -> Result<FabricEngine, FabricError> {
        FabricEngine::new(&self.shared, true)
    }

    /// An engine that answers no other nodes: for a thread that has nothing but requests of its own.
    pub fn idle_engine(&self) -> Result<FabricEngine, FabricError> {
        FabricEngine::new(&self.shared, false)
    }

    /// Where other nodes reach this one; `None` if it is configured without a network.
    pub fn address(&self) -> Option<SocketAddr> {
        Some(self.shared.network.as_ref()?.address())
    }

    /// By which ways requests go to other nodes.
    pub fn peer_routes(&self) -> Vec<(NodeId, PeerRoute)> {
        let network = self.shared.network.as_ref();
        network.map_or_else(Vec::new, Network::peer_routes)
    }

    /// What opens guests' memory to the network.
    pub fn registrar(&self) -> Registrar {
        match &self.shared.network {
            Some(network) => Registrar::new(network.pairs().clone()),
            None => Registrar::none(),
        }
    }

    /// How much has gone over the network, of each kind.
    pub fn network_count(&self, count: Count) -> u64 {
        let network = self.shared.network.as_ref();
        network.map_or(0, |network| network.counters().get(count))
    }

    /// How much memory is open to this node's card.
    pub fn open_memory(&self) -> RegionCounts {
        match self.shared.network.as_ref().map(Network::pairs) {
            Some(Offered::Port(port)) => port.counts(),
            Some(Offered::No(_)) | None => RegionCounts::default(),
        }
    }

    /// Applies a newer cluster map; an older one is ignored. Before the first one no request is served.
    pub fn set_map(&self, view: ClusterView) {
        let cluster = &self.shared.cluster;
        if view.epoch < cluster.epoch() {
            return;
        }
        if let Some(network) = &self.shared.network {
            network.set_peers(view.peers.clone());
            network.set_members(view.members.clone());
        }
        cluster.set_map(view, self.shared.stores.as_deref());
    }

    /// Replaces the set of existing layers and their leases by those of the newest metadata that this node
    /// has applied. Must be called after each change; before the first call there are no layers. Changes of
    /// other layers are put off, and so are changes by other nodes under a generation that was not granted
    /// yet.
    pub fn set_layers(&self, layers: impl IntoIterator<Item = (LayerId, Grant)>) {
        self.shared.fences.set_layers(layers.into_iter().collect());
    }

    /// These layers have these leases now; nothing else has changed since
    /// [`set_layers`](Self::set_layers).
    pub fn set_grants(&self, grants: impl IntoIterator<Item = (LayerId, Grant)>) {
        self.shared.fences.set_grants(grants);
    }

    /// Which layers are open to nodes that reach no others, by the leases and attachments that this node has
    /// heard of.
    pub fn set_open_layers(&self, open: HashMap<NodeId, HashSet<LayerId>>) {
        if let Some(network) = &self.shared.network {
            network.set_open_layers(open);
        }
    }

    /// Sets what sends requests to meta; once. Data threads call it: it must neither block nor call back.
    pub fn set_meta_sender(&self, sender: Box<dyn Fn(MetaRequest) + Send + Sync>) {
        self.shared.cluster.set_meta_sender(sender);
    }

    /// What has been brought to this node's replicas since the start.
    pub fn resynced(&self) -> ResyncTotals {
        self.worker.totals()
    }

    /// Placement groups that this node's replicas cannot be brought up to date in: attempts fail. `None` if
    /// there are none.
    pub fn sync_stall(&self) -> Option<SyncStall> {
        let failing = self.worker.failing()?;
        Some(SyncStall {
            groups: failing.groups,
            since: self.shared.cluster.moment_at(failing.since_us),
        })
    }

    /// Requests between this node and others since the start.
    pub fn traffic(&self) -> Traffic {
        self.shared.cluster.traffic.sum()
    }

    /// The layers of which this node's devices hold something, without those that have nothing but a fence.
    pub fn layers(&self) -> Vec<LayerId> {
        self.control.as_ref().map_or_else(Vec::new, |c| c.layers())
    }

    /// Opens a volume under a lease, creating its layer if the node does not know it. From now on writes of
    /// older leases are refused, also after a crash.
    ///
    /// The lease must be newer than that of any earlier opening: its writes are numbered from one again, and
    /// would otherwise pass for older ones. One opening serves any number of threads and attachments through
    /// clones.
    ///
    /// Returns at once. Requests wait until the older lease's holder is fenced out and replicas agree on what
    /// it left behind.
    pub fn open_volume(&self, params: &VolumeParams) -> Result<VolumeHandle, FabricError> {
        self.shared.check_volume(params)?;
        let slot = self.shared.take_volume_slot()?;
        let volume = self.handle(slot, params);
        volume.state.begin_recovery(params.generation);
        self.worker.take_over(&volume.state);
        Ok(volume)
    }

    /// Opens a volume without a lease. Its requests wait until [`take_over`](Self::take_over).
    /// `params.generation` is ignored.
    pub fn open_without_lease(&self, params: &VolumeParams) -> Result<VolumeHandle, FabricError> {
        let params = VolumeParams {
            generation: Generation(0),
            ..*params
        };
        self.shared.check_volume(&params)?;
        let slot = self.shared.take_volume_slot()?;
        let volume = self.handle(slot, &params);
        volume.state.suspend();
        Ok(volume)
    }

    /// Opens a volume for reads without a lease, whoever has it. What is read must be acknowledged, flushed
    /// and never written again, as in the segments of a filesystem; anything else may read as it was before
    /// or after a write that is under way. Writes are refused. `params.generation` and `params.read_only` are
    /// ignored.
    ///
    /// A read needs a map that is not older than the flush: [`wait_for_map`](Self::wait_for_map). It goes to
    /// any replica in sync. A damaged block that it meets is left to the scrubber.
    pub fn open_for_reading(&self, params: &VolumeParams) -> Result<VolumeHandle, FabricError> {
        let params = VolumeParams {
            generation: Generation(0),
            read_only: true,
            ..*params
        };
        self.shared.check_volume(&params)?;
        let slot = self.shared.take_volume_slot()?;
        Ok(self.handle(slot, &params))
    }

    /// Version of the newest cluster map here; 0 before the first one. What was flushed before this call was
    /// flushed under this map at the latest.
    pub fn map_epoch(&self) -> Epoch {
        self.shared.cluster.epoch()
    }

    /// Waits until the cluster map here is at least this new; false if it is not after `patience`.
    pub fn wait_for_map(&self, epoch: Epoch, patience: Duration) -> bool {
        self.shared.cluster.wait_for(epoch, patience)
    }

    /// Goes on with a volume that has no lease, or had none for a while, under a new one. It returns at once,
    /// and requests wait until the older holder is fenced out and replicas agree on what it left behind.
    ///
    /// # Errors
    /// The lease is not newer than the last one here.
    pub fn take_over(
        &self,
        volume: &VolumeHandle,
        generation: Generation,
        epoch: Epoch,
    ) -> Result<(), FabricError> {
        if generation >= ROUND {
            return Err(FabricError::Generation(generation.0));
        }
        let state = &volume.state;
        state.suspend();
        state.set_epoch(epoch);
        if !state.renew_lease(generation) {
            return Err(FabricError::StaleLease {
                layer: state.layer(),
                given: generation,
                persisted: state.generation(),
            });
        }
        state.begin_recovery(generation);
        self.worker.take_over(state);
        Ok(())
    }

    fn handle(&self, slot: shared::VolumeSlot, params: &VolumeParams) -> VolumeHandle {
        // Distinct for the life of the process, so that a data thread tells a slot's users apart.
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        VolumeHandle {
            state: Arc::new(VolumeState::new(id, slot.index(), params)),
            _slot: Arc::new(slot),
            cluster: Arc::clone(&self.shared.cluster),
        }
    }

    /// Goes on under a newer lease without a pause: requests under the old one are repeated under the new.
    pub fn renew_lease(
        &self,
        volume: &VolumeHandle,
        generation: Generation,
        epoch: Epoch,
    ) -> Result<(), FabricError> {
        if generation >= ROUND {
            return Err(FabricError::Generation(generation.0));
        }
        let cluster = &self.shared.cluster;
        // Requests never claim a map that clients do not go by.
        if !cluster.wait_for(epoch, MAP_WAIT) {
            return Err(FabricError::NoMap {
                needed: epoch,
                known: cluster.epoch(),
            });
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
        // The older lease was this node's, too: nobody has to be fenced out.
        Ok(())
    }

    /// Deletes a layer's data and gives their space back. The caller sees to it that no handle on it is left.
    pub fn delete_volume(&self, layer: LayerId) -> Result<(), FabricError> {
        if let Some(control) = &self.control {
            control.drop_layer(layer)?;
        }
        self.shared.cluster.forget(layer);
        self.shared.fences.forget(layer);
        Ok(())
    }

    /// Changes a volume's size. What is cut off is freed; what is added reads as zeroes. Guests learn it
    /// through their attachments.
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

    /// Writes a checkpoint on all devices, so that the next opening has less to replay.
    pub fn checkpoint(&self) -> Result<(), FabricError> {
        match &self.control {
            Some(control) => control.checkpoint(false),
            None => Ok(()),
        }
    }

    /// Closes cleanly: the next opening replays nothing. All engines must have been dropped. Other clones are
    /// closed, too.
    pub fn close(&self) -> Result<(), FabricError> {
        self.worker.stop();
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
    cluster: Arc<Cluster>,
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

    /// The lease ends then: requests after that wait, and go on when it is moved. Until it is said, it does
    /// not end. To be said with a margin for clocks that run at different speeds.
    pub fn set_lease_until(&self, moment: Instant) {
        self.state.set_lease_until_us(self.cluster.us_at(moment));
    }

    /// The lease is another's for sure: nothing is sent under it any more, and all requests, those that wait
    /// among them, end with [`IoError::Fenced`](fabric_types::io::IoError::Fenced). For good: with another
    /// lease the volume is opened anew. A request that a replica has yet to answer ends when it does, or is
    /// lost.
    pub fn revoke(&self) {
        self.state.revoke();
        self.cluster.volume_revoked();
    }

    /// Whether that was said.
    pub fn is_revoked(&self) -> bool {
        self.state.is_revoked()
    }

    /// The lease is about to be given back: requests wait from now on, until
    /// [`Fabric::take_over`] or [`unsuspend`](Self::unsuspend). Those that have begun are not waited for.
    pub fn suspend(&self) {
        self.state.suspend();
    }

    /// The lease was not given back after all.
    pub fn unsuspend(&self) {
        self.state.unsuspend();
    }

    /// Changes the size that requests are checked against, as another holder of the lease did.
    pub fn set_size_bytes(&self, size_bytes: u64) {
        self.state.set_size_bytes(size_bytes);
    }

    /// Whether requests are served: there is a lease, and lease recovery is complete.
    pub fn is_recovered(&self) -> bool {
        self.state.is_recovered()
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

    /// Changes what becomes of writes that find no space, also of those that wait.
    pub fn set_on_full(&self, on_full: OnFull) {
        self.state.set_on_full(on_full);
    }

    /// Writes that wait for space on full devices, and how long they have.
    pub fn held_writes(&self) -> HeldWrites {
        self.state.held_writes()
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

    #[inline]
    fn knows_size(&self) -> bool {
        self.state.is_recovered()
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
