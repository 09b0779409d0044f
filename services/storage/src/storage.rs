//! The devices of this node and the fabric upon them.

mod hotplug;
mod problems;

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use api::failure::{Context, Failure, Kind, Result};
use api::types;
use config::datadir::DataDir;
use config::{Poll, StoreKind};
use fabric::{
    DeviceStatus, Fabric, FabricConfig, FabricEngine, FabricError, ScrubOrder, ScrubPass,
    VolumeHandle,
};
use fabric_replication::volume::{Durability, OnFull, VolumeParams};
use fabric_store::metrics::StoreMetrics;
use fabric_transport::control::NetConfig;
use fabric_types::PgId;
use fabric_types::io::IoError;
use meta::Meta;
use service::failures::meta_failure;
use service::prepared::Prepared;
use service::waiting::blocking;
use uuid::Uuid;
use vhost_backend::blk::BlkDevice;
use vhost_backend::data_thread::{PollMode, ThreadOptions};

use crate::copier::Copier;
use crate::meta_requests::{self, MetaRequests};
use crate::selection::uses::Uses;
use crate::selection::{self, LeftOut, Origin, Owner};
use crate::{cluster_map, marks};

pub use problems::MAKE_ROOM;

/// What data threads work with.
pub type Handle = VolumeHandle;
/// A disk as a guest sees it.
pub type Device = BlkDevice<VolumeHandle>;
/// The data threads.
pub type Threads = Arc<vhost_backend::data_thread::Threads<FabricEngine>>;
/// An attachment being served.
pub type Session = vhost_backend::session::Attachment;

/// Devices' class in the cluster map.
const CLASS_FILE: &str = "file";
const CLASS_DISK: &str = "disk";
const CLASS_NULL: &str = "null";
/// What the null device pretends to hold, so that volumes of any size can be made on it.
const NULL_BYTES: u64 = 1 << 50;

/// A device of this node, as it is.
pub struct LocalDevice {
    /// The identity in its label.
    pub uuid: Uuid,
    /// Where it is.
    pub path: String,
    /// Bytes it can hold.
    pub capacity_bytes: u64,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Memory that its map takes in the daemon.
    pub memory_bytes: u64,
    /// The scrub's progress.
    pub scrub: types::Scrub,
    /// Counters of its shards.
    pub shards: Vec<StoreMetrics>,
    /// Whether errors were seen.
    pub is_bad: bool,
    /// Whether it refuses writes for lack of space.
    pub is_full: bool,
    /// Whether it stores nothing.
    pub is_null: bool,
}

/// The devices of this node and the fabric upon them.
pub struct Storage {
    fabric: Fabric,
    kind: StoreKind,
    recovery: Vec<String>,
    /// What could not be opened at the start and was not taken back or opened since.
    left_out: Mutex<Vec<LeftOut>>,
    /// Devices that were added and that the cluster does not know yet.
    unregistered: Mutex<Vec<Uuid>>,
    /// `None` if the node had peers at its start: those may have what a device lacks.
    uses: Mutex<Option<Uses>>,
}

/// Tasks that end when they are told, or dropped.
#[derive(Default)]
pub struct Background(Vec<tokio::task::JoinHandle<()>>);

impl Background {
    /// Ends them.
    pub fn end(&self) {
        self.0.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.end();
    }
}

impl Storage {
    /// Opens what `config` names, creating the default device at the first start of a node that stores data.
    pub async fn open(
        config: &Prepared,
        data: &DataDir,
        meta: &Meta,
        (net, stores_data): (Option<NetConfig>, bool),
    ) -> Result<Self> {
        let id = meta.node_id();
        let cluster = meta.cluster().await.map_err(meta_failure)?.uuid;
        let has_peers = net.is_some() && meta.list_nodes().await.map_err(meta_failure)?.len() > 1;
        let (mut known, mut stores, mut left_out) = (Vec::new(), Vec::new(), Vec::new());
        let store = match config.store {
            StoreKind::Null => fabric::StoreKind::Null,
            StoreKind::File => {
                known = meta.list_devices().await.map_err(meta_failure)?;
                known.retain(|device| device.node == id);
                let (selected, default) = (config.clone(), data.default_device());
                let known = known.clone();
                let owner = Owner {
                    cluster,
                    has_peers,
                    stores_data,
                };
                let found = blocking(move || selection::select(&selected, &default, &known, owner));
                let found = found.await?;
                (stores, left_out) = (found.stores, found.left_out);
                fabric::StoreKind::Devices(found.devices)
            }
        };
        let counts_uses = !has_peers && config.store == StoreKind::File;
        let incarnation = meta.incarnation();
        let mut options = FabricConfig::new(id, incarnation, *cluster.as_bytes(), store);
        options.net = net;
        options.may_lack = has_peers || !stores_data;
        options.opened = config.opened.clone();
        let fabric = blocking(move || Fabric::open(options).map_err(fabric_failure)).await?;
        // What the store has it keeps. What it could not open is free for others.
        config.opened.close();
        let lines = |d: DeviceStatus| format!("{}: {}", d.path.display(), d.report);
        let recovery = fabric.devices().into_iter().map(lines).collect();
        for (path, error) in fabric.lacking() {
            let store = stores.iter().find(|(store, _)| store == path);
            let device = store.and_then(|(_, id)| known.iter().find(|one| one.uuid == *id));
            left_out.push(LeftOut::unopened(path, device, error));
        }
        let uses = match counts_uses {
            true => Some(count_use(&fabric, &config.data).await?),
            false => None,
        };
        let storage = Storage {
            fabric,
            kind: config.store,
            recovery,
            left_out: Mutex::new(left_out),
            unregistered: Mutex::default(),
            uses: Mutex::new(uses),
        };
        if !has_peers {
            storage.refuse_older_metadata(meta, &config.data).await?;
        }
        storage.register(meta).await?;
        marks::report_evidence(&storage.fabric, meta).await?;
        storage.tell_lost(meta, &known).await?;
        Ok(storage)
    }

    /// Tells meta, and whoever reads the log, which devices this node goes on without.
    async fn tell_lost(&self, meta: &Meta, known: &[meta::Device]) -> Result<()> {
        let left_out = self.left_out().clone();
        for one in left_out {
            let (what, doing) = one.describe();
            tracing::error!(path = %one.path.display(), "{what}; {doing}");
            let Origin::Known(id) = one.origin else {
                continue;
            };
            let is_online = |device: &meta::Device| device.state == meta::DeviceState::Online;
            if known
                .iter()
                .any(|device| device.id == id && is_online(device))
            {
                meta.lose_device(id).await.map_err(meta_failure)?;
            }
        }
        Ok(())
    }

    /// Refuses metadata that are older than a device: without peers no other node has newer ones. They do not
    /// know which device has the newest data of a group, nor volumes that were created since.
    async fn refuse_older_metadata(&self, meta: &Meta, data: &Path) -> Result<()> {
        let (fabric, known) = (self.fabric.clone(), meta.map().epoch());
        let older_than = blocking(move || {
            let mut devices = fabric.devices().into_iter();
            Ok(devices.find(|one| fabric.newest_epoch(&one.label.device) > known))
        });
        let Some(device) = older_than.await? else {
            return Ok(());
        };
        Err(Failure::new(
            Kind::Conflict,
            format!(
                "the metadata in {} are older than device {}: the device was used with newer ones since",
                data.display(),
                device.path.display()
            ),
            "bring the newest metadata back; if they are lost, `penstock meta restore` takes a backup and \
             finds out by the devices what is newest",
        ))
    }

    /// Why a device of this node is not open.
    pub fn why_lost(&self, device: meta::DeviceId) -> Option<LeftOut> {
        let left_out = self.left_out();
        let mut all = left_out.iter();
        all.find(|one| one.origin == Origin::Known(device)).cloned()
    }

    fn left_out(&self) -> MutexGuard<'_, Vec<LeftOut>> {
        lock(&self.left_out)
    }

    fn unregistered(&self) -> MutexGuard<'_, Vec<Uuid>> {
        lock(&self.unregistered)
    }

    fn lock_uses(&self) -> MutexGuard<'_, Option<Uses>> {
        lock(&self.uses)
    }

    /// What counts requests and copies.
    pub fn fabric(&self) -> &Fabric {
        &self.fabric
    }

    /// Tells meta which devices there are.
    async fn register(&self, meta: &Meta) -> Result<()> {
        let mut specs: Vec<meta::DeviceSpec> = {
            let of = |device: &DeviceStatus| spec(device, meta.node_id());
            self.fabric.devices().iter().map(of).collect()
        };
        if self.kind == StoreKind::Null {
            specs.push(meta::DeviceSpec {
                uuid: Uuid::nil(),
                node: meta.node_id(),
                path: "/dev/null".to_owned(),
                size_bytes: NULL_BYTES,
                class: CLASS_NULL.to_owned(),
            });
        }
        for spec in specs {
            meta.register_device(spec).await.map_err(meta_failure)?;
        }
        Ok(())
    }

    /// Connects the data path to the cluster's map and to meta while the result lives. Guests' writes wait
    /// for this when a node fails, so it uses the runtime of heartbeats and leases.
    pub fn join(&self, meta: &Meta, runtime: &tokio::runtime::Handle) -> Background {
        let asks = Arc::<MetaRequests>::default();
        let requests = Arc::clone(&asks);
        self.fabric
            .set_meta_sender(Box::new(move |request| requests.put(request)));
        Background(vec![
            runtime.spawn(meta_requests::serve(asks, meta.clone())),
            runtime.spawn(cluster_map::follow(self.fabric.clone(), meta.clone())),
            runtime.spawn(marks::keep_marking(self.fabric.clone(), meta.clone())),
            runtime.spawn(cluster_map::follow_layers(
                self.fabric.clone(),
                meta.clone(),
            )),
            runtime.spawn(cluster_map::follow_openings(
                self.fabric.clone(),
                meta.clone(),
            )),
        ])
    }

    /// The layers of which this node's devices hold something.
    pub async fn layers(&self) -> Result<Vec<meta::LayerId>> {
        let fabric = self.fabric.clone();
        blocking(move || Ok(fabric.layers())).await
    }

    /// Starts the data threads.
    pub fn start_threads(&self, config: &Prepared) -> Result<Threads> {
        let options = ThreadOptions {
            threads: config.threads,
            poll: match config.poll {
                Poll::Adaptive => PollMode::Adaptive {
                    spin_us: config.poll_spin_us,
                },
                Poll::Always => PollMode::Always,
                Poll::Never => PollMode::Never,
            },
            pin: config.pin.clone(),
        };
        let fabric = self.fabric.clone();
        let engine = move |_| fabric.engine().map_err(std::io::Error::other);
        vhost_backend::data_thread::Threads::start(&options, engine).map_err(|e| {
            // The reason is in the chain of sources.
            let source = std::error::Error::source(&e)
                .map(|s| format!(": {s}"))
                .unwrap_or_default();
            Failure::new(
                Kind::Failed,
                format!("{e}{source}"),
                "configure fewer threads or other CPUs to pin them to",
            )
        })
    }

    /// Opens a volume under a lease.
    pub async fn open_volume(&self, volume: &meta::Volume, lease: &meta::Lease) -> Result<Handle> {
        let params = params(volume, lease.generation, lease.epoch);
        let fabric = self.fabric.clone();
        blocking(move || fabric.open_volume(&params).map_err(fabric_failure)).await
    }

    /// Opens a volume whose lease is another node's: its requests wait until [`take_over`](Self::take_over).
    pub async fn open_without_lease(
        &self,
        volume: &meta::Volume,
        epoch: meta::Epoch,
    ) -> Result<Handle> {
        let params = params(volume, meta::Generation(0), epoch);
        let fabric = self.fabric.clone();
        blocking(move || fabric.open_without_lease(&params).map_err(fabric_failure)).await
    }

    /// Opens a volume to read what is never written again, whoever has its lease.
    pub async fn open_for_reading(
        &self,
        volume: &meta::Volume,
        epoch: meta::Epoch,
    ) -> Result<Handle> {
        let params = params(volume, meta::Generation(0), epoch);
        let fabric = self.fabric.clone();
        blocking(move || fabric.open_for_reading(&params).map_err(fabric_failure)).await
    }

    /// Goes on with a volume whose lease was another node's, or nobody's, under a new one.
    pub async fn take_over(&self, handle: &Handle, lease: &meta::Lease) -> Result<()> {
        let (fabric, handle) = (self.fabric.clone(), handle.clone());
        let (generation, epoch) = (lease.generation, lease.epoch);
        blocking(move || {
            let taken = fabric.take_over(&handle, generation, epoch);
            taken.map_err(fabric_failure)
        })
        .await
    }

    /// Makes all that was written to a volume durable. Waits as long as that takes.
    pub async fn flush(&self, handle: &Handle) -> Result<()> {
        let (fabric, handle) = (self.fabric.clone(), handle.clone());
        blocking(move || {
            let mut io = fabric.volume_io(&handle).map_err(fabric_failure)?;
            io.flush().map_err(|source| {
                let verb = "flush";
                fabric_failure(FabricError::Request { verb, source })
            })
        })
        .await
    }

    /// Changes an open volume's size. What is cut off is given back.
    pub async fn resize_volume(&self, handle: &Handle, size_bytes: u64) -> Result<()> {
        let (fabric, handle) = (self.fabric.clone(), handle.clone());
        blocking(move || {
            fabric
                .resize_volume(&handle, size_bytes)
                .map_err(fabric_failure)
        })
        .await
    }

    /// Goes on under a newer lease.
    pub async fn renew_lease(&self, handle: &Handle, lease: &meta::Lease) -> Result<()> {
        let (fabric, handle) = (self.fabric.clone(), handle.clone());
        let (generation, epoch) = (lease.generation, lease.epoch);
        blocking(move || {
            fabric
                .renew_lease(&handle, generation, epoch)
                .map_err(fabric_failure)
        })
        .await
    }

    /// Gives back all data of layers that no volume uses any more.
    pub async fn drop_layers(&self, layers: &[meta::LayerId]) -> Result<()> {
        let (fabric, layers) = (self.fabric.clone(), layers.to_vec());
        blocking(move || {
            layers
                .iter()
                .try_for_each(|layer| fabric.delete_volume(*layer))
                .map_err(fabric_failure)
        })
        .await
    }

    /// Gives back what groups left behind that moved elsewhere, if they are `complete` by the map of `epoch`;
    /// how many chunks.
    pub async fn drop_strays(&self, epoch: meta::Epoch, complete: HashSet<PgId>) -> Result<usize> {
        let fabric = self.fabric.clone();
        blocking(move || fabric.drop_strays(epoch, &complete).map_err(fabric_failure)).await
    }

    /// An open volume for the control plane to read and write.
    pub async fn copier(&self, handle: &Handle) -> Result<Copier> {
        Copier::start(self.fabric.clone(), handle.clone()).await
    }

    /// What opening the devices did, one line each.
    pub fn recovery(&self) -> &[String] {
        &self.recovery
    }

    /// Begins or ends a pass of the scrub over a device; false if it is not open here.
    pub fn scrub(&self, device: Uuid, order: ScrubOrder) -> bool {
        self.fabric.scrub(device.as_bytes(), order)
    }

    /// The devices of this node.
    pub fn local(&self) -> Vec<LocalDevice> {
        if self.kind == StoreKind::Null {
            return vec![LocalDevice {
                uuid: Uuid::nil(),
                path: "/dev/null".to_owned(),
                capacity_bytes: NULL_BYTES,
                used_bytes: 0,
                memory_bytes: 0,
                scrub: types::Scrub::default(),
                shards: Vec::new(),
                is_bad: false,
                is_full: false,
                is_null: true,
            }];
        }
        self.fabric.devices().into_iter().map(local).collect()
    }

    /// Makes everything durable and marks the devices as closed. The data threads have ended before.
    pub fn close(&self) -> Result<()> {
        let uses = self.lock_uses().take();
        if let Some(mut uses) = uses {
            uses.raise(&self.fabric);
        }
        self.fabric.close().map_err(fabric_failure)
    }
}

fn lock<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Refuses older copies of devices, and counts this start.
async fn count_use(fabric: &Fabric, data: &Path) -> Result<Uses> {
    let (fabric, data) = (fabric.clone(), data.to_owned());
    blocking(move || {
        let mut uses = Uses::read(&data)?;
        uses.check(&fabric)?;
        uses.raise(&fabric);
        Ok(uses)
    })
    .await
}

/// How writes of a volume behave without space. Those of filesystems' data fail at once: a filesystem knows
/// by file which writes wait, and repeats them.
pub fn on_full(volume: &meta::Volume) -> OnFull {
    match volume.segment {
        Some(_) => OnFull::ERROR,
        None => OnFull {
            wait: Duration::from_secs(volume.on_full.wait_s.into()),
        },
    }
}

fn params(volume: &meta::Volume, generation: meta::Generation, epoch: meta::Epoch) -> VolumeParams {
    VolumeParams {
        layer: volume.top_layer(),
        size_bytes: volume.size_bytes,
        generation,
        epoch,
        read_only: volume.read_only,
        durability: match volume.durability {
            meta::Durability::Flush => Durability::Flush,
            meta::Durability::Write => Durability::Write,
        },
        on_full: on_full(volume),
    }
}

fn local(device: DeviceStatus) -> LocalDevice {
    let scrub = &device.scrub;
    LocalDevice {
        uuid: Uuid::from_bytes(device.label.device),
        path: device.path.display().to_string(),
        capacity_bytes: device.total_bytes,
        used_bytes: device.used_bytes,
        memory_bytes: device.memory_bytes,
        scrub: types::Scrub {
            state: match device.scrub_pass {
                ScrubPass::Running { .. } => types::ScrubState::Running,
                ScrubPass::Resting { .. } => types::ScrubState::Resting,
                ScrubPass::Off => types::ScrubState::Off,
            },
            pass_blocks: match device.scrub_pass {
                ScrubPass::Running { blocks } => Some(blocks),
                _ => None,
            },
            next_s: match device.scrub_pass {
                ScrubPass::Resting { rest } => Some(rest.as_secs()),
                _ => None,
            },
            passes: scrub.passes,
            blocks: scrub.blocks,
            errors: scrub.bad_blocks,
            repaired: scrub.repaired_blocks,
            bad: scrub.findings.len() as u64,
        },
        is_bad: !scrub.findings.is_empty(),
        is_full: device.is_full,
        is_null: false,
        shards: device.shards,
    }
}

fn spec(device: &DeviceStatus, node: meta::NodeId) -> meta::DeviceSpec {
    let file = std::fs::metadata(&device.path).is_ok_and(|m| m.is_file());
    meta::DeviceSpec {
        uuid: Uuid::from_bytes(device.label.device),
        node,
        path: device.path.display().to_string(),
        size_bytes: device.total_bytes,
        class: if file { CLASS_FILE } else { CLASS_DISK }.to_owned(),
    }
}

/// Bytes that a filesystem can still take.
pub fn free_bytes(dir: &Path) -> Result<u64> {
    let stat = rustix::fs::statvfs(dir)
        .map_err(std::io::Error::from)
        .context(|| format!("look at {}", dir.display()))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Bytes by which a sparse file may still grow within its length.
pub fn holes(file: &std::fs::Metadata) -> u64 {
    file.len().saturating_sub(file.blocks() * 512)
}

/// What the fabric refuses, and why.
pub fn fabric_failure(e: FabricError) -> Failure {
    if let FabricError::Device(e) = &e {
        return config::devices::refused::failure(e);
    }
    let kind = match &e {
        FabricError::Request {
            source: IoError::NoSpace,
            ..
        } => Kind::NoSpace,
        FabricError::VolumeSize { .. } => Kind::Invalid,
        FabricError::NotBlank(_) => Kind::Conflict,
        _ => Kind::Failed,
    };
    Failure::plain(kind, e)
}
