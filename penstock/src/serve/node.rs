//! One node: meta, storage, data threads and attachments, put together. What the admin API asks for is done
//! here and in its neighbours `volumes`, `attachments` and `transfer`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::failure::{Failure, Kind, Result};
use config::StoreKind;
use config::datadir::{self, DataDir};
use config::identity;
use meta::{AttachmentId, Meta, MetaNode, VolumeId};
use service::failures::ended_failure;
use service::waiting::blocking;
use tokio::runtime::Handle;
use tokio::sync::{Mutex, Notify, watch};
use vhost_backend::memory::budget::MemoryBudget;

use crate::serve::prepared::Prepared;

use super::attachments::Served;
use super::devices;
use super::filesystems::FilesystemService;
use super::leases::Leases;
use super::leftovers::Leftovers;
use super::monitor::Monitor;
use super::nfs::Exports;
use super::notices::Notices;
use super::peers::{Control, Membership};
use super::spreading;
use super::starting::Starting;
use super::storage::{Background, Storage, Threads};
use super::used::UsedMemory;
use super::volumes::OpenVolume;

/// Somebody who asks for something waits this long for metadata without a leader. Several times what an
/// election takes.
pub const PEOPLE_WAIT_MAX: Duration = Duration::from_secs(5);
/// How often a closing node looks whether copies have ended, and how long it pauses between: five seconds in
/// all.
const COPIES_LOOKS_MAX: usize = 100;
const COPIES_PAUSE: Duration = Duration::from_millis(50);

/// A running node.
///
/// It has more fields than other types, because it is the one owner of the parts of a process: each field is
/// a part with a type and rules of its own, and the node only starts them, joins them and ends them in order.
pub struct Node {
    config: Prepared,
    pub(super) meta: Meta,
    /// The same for what people ask for, who do not wait as long.
    pub(super) asked: Meta,
    /// Taken by `close`.
    control: Mutex<Option<Control>>,
    /// Runtime for heartbeats, leases and failovers.
    pub(super) cluster_runtime: Handle,
    /// Of one of several nodes.
    pub(super) membership: Option<Membership>,
    pub(super) storage: Arc<Storage>,
    pub(super) threads: Threads,
    /// What all attachments may have mapped and pinned.
    pub(super) memory_budget: MemoryBudget,
    /// Whoever changes volumes or attachments holds this from the first look to the last step, so that meta
    /// and what is served never disagree.
    pub(super) live: Mutex<Live>,
    /// Held while a device is added. Taken before `live`, or not waited for.
    pub(super) adding: Mutex<()>,
    /// Rings of an attachment were started or stopped.
    pub(super) rings_changed: Arc<Notify>,
    pub(super) leftovers: Leftovers,
    pub(super) leases: Arc<Leases>,
    pub(super) filesystems: FilesystemService,
    pub(super) exports: Exports,
    /// What joins data path and cluster; ended before either is.
    background: Background,
    pub(super) monitor: Monitor,
    pub(super) notices: Notices,
    pub(super) used: UsedMemory,
    started: Instant,
    /// Why this process has to end, if it has to.
    ending: watch::Sender<Option<Failure>>,
    /// Freed last.
    _data: DataDir,
}

/// What a node is started for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// To serve all that it has.
    Daemon,
    /// To serve one volume that is not attached, and leave everything else alone.
    OneVolume,
}

/// What is open and served now.
#[derive(Default)]
pub struct Live {
    /// Volumes that are attached or being copied.
    pub volumes: BTreeMap<VolumeId, OpenVolume>,
    /// Attachments, as many as meta has for this node.
    pub attachments: BTreeMap<AttachmentId, Served>,
    /// Volumes that an import is going to replace.
    pub replaced: BTreeSet<VolumeId>,
    /// Attachments about whose move something is being done.
    pub migrating: BTreeSet<AttachmentId>,
}

impl Node {
    /// Starts everything and, for a daemon, restores the attachments. What an earlier process left undone is
    /// noted, to be finished while guests run.
    pub async fn start(
        config: Prepared,
        purpose: Purpose,
        starting: &mut Starting,
    ) -> Result<Self> {
        let meta_dir = datadir::meta(&config.data, config.store);
        if purpose == Purpose::OneVolume && !MetaNode::exists(&meta_dir) {
            // Nor is one made: it would take half the file system for nothing.
            return Err(Failure::new(
                Kind::NotFound,
                format!(
                    "there is no volume: {} holds no node",
                    config.data.display()
                ),
                "name the daemon's data directory with --data; `penstock serve` makes one",
            ));
        }
        let data = DataDir::take(&config.data)?;
        let is_without = !MetaNode::exists(&meta_dir);
        if is_without {
            identity::refuse_forgetful(&config.data, &meta_dir)?;
        }
        if is_without && config.store == StoreKind::File && !identity::rejoins(&config.data) {
            let (config, default, dir) = (config.clone(), data.default_device(), meta_dir.clone());
            blocking(move || devices::refuse_without_metadata(&config, &default, &dir)).await?;
        }
        if purpose == Purpose::Daemon {
            starting.listen()?;
        }
        spreading::copy_if_due(&config, (&data, &meta_dir), purpose, starting).await?;
        let control = Control::open(&config, meta_dir, starting).await?;
        let meta = control.meta();
        let (storage, threads, background) = match start_storage(&config, &data, &control).await {
            Ok(started) => started,
            Err(failure) => {
                control.shutdown().await;
                return Err(failure);
            }
        };
        let node = Node {
            memory_budget: MemoryBudget::new(config.guest_memory, config.pinned_memory),
            config,
            asked: meta.within(PEOPLE_WAIT_MAX),
            meta,
            membership: control.membership(),
            cluster_runtime: control.runtime(),
            control: Mutex::new(Some(control)),
            storage,
            threads,
            live: Mutex::default(),
            adding: Mutex::default(),
            rings_changed: Arc::default(),
            leftovers: Leftovers::default(),
            leases: Arc::default(),
            filesystems: FilesystemService::default(),
            exports: Exports::default(),
            background,
            monitor: Monitor::default(),
            notices: Notices::default(),
            used: UsedMemory::default(),
            started: Instant::now(),
            ending: watch::Sender::new(None),
            _data: data,
        };
        let restored = match purpose {
            Purpose::Daemon => node.restore().await,
            Purpose::OneVolume => Ok(()),
        };
        match restored {
            Ok(()) => Ok(node),
            Err(failure) => {
                node.close().await;
                Err(failure)
            }
        }
    }

    /// Guests first: each of them waits.
    async fn restore(&self) -> Result<()> {
        self.restore_attachments().await?;
        self.restore_filesystem_attachments().await?;
        self.find_leftovers().await
    }

    /// Ends everything in order: guests first, then data, then metadata. Requests in flight are finished.
    pub async fn close(&self) {
        self.close_attachments().await;
        self.close_filesystems().await;
        self.wait_for_copies().await;
        self.background.end();
        let (threads, storage) = (self.threads.clone(), self.storage.clone());
        let closed = tokio::task::spawn_blocking(move || {
            threads.shutdown();
            storage.close()
        });
        match closed.await {
            Ok(Ok(())) => {}
            Ok(Err(failure)) => tracing::error!(%failure, "close the store"),
            Err(e) => tracing::error!(error = %e, "close the store"),
        }
        if let Some(control) = self.control.lock().await.take() {
            control.shutdown().await;
        }
    }

    /// Imports and exports end by themselves when their streams are cut.
    async fn wait_for_copies(&self) {
        for _ in 0..COPIES_LOOKS_MAX {
            if self.live.lock().await.volumes.is_empty() {
                return;
            }
            tokio::time::sleep(COPIES_PAUSE).await;
        }
        tracing::warn!("a copy is still running; the store recovers at the next start");
    }

    /// Returns when the metadata service of a node of several has ended. Never in a cluster of one, whose
    /// guests go on without it.
    pub async fn meta_ended(&self) -> Failure {
        match self.membership {
            Some(_) => ended_failure(self.meta.ended().await, &self.config.data),
            None => std::future::pending().await,
        }
    }

    /// Ends the daemon: only a new process helps.
    pub(super) fn end_for(&self, failure: Failure) {
        self.ending.send_replace(Some(failure));
    }

    /// Returns when [`Self::end_for`] was called.
    pub async fn told_to_end(&self) -> Failure {
        let mut ending = self.ending.subscribe();
        match ending.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(failure)) => failure.clone(),
            // The node lives for as long as somebody waits here.
            Ok(None) | Err(_) => std::future::pending().await,
        }
    }

    /// The configuration it runs with.
    pub fn config(&self) -> &Prepared {
        &self.config
    }

    /// What opening the store did.
    pub fn recovery(&self) -> &[String] {
        self.storage.recovery()
    }

    /// Since the start.
    pub(super) fn uptime(&self) -> Duration {
        self.started.elapsed()
    }
}

async fn start_storage(
    config: &Prepared,
    data: &DataDir,
    control: &Control,
) -> Result<(Arc<Storage>, Threads, Background)> {
    let (meta, net) = (control.meta(), control.data());
    let storage = Storage::open(config, data, &meta, (net, control.stores_data())).await?;
    let storage = Arc::new(storage);
    let background = match control.data() {
        Some(_) => storage.join(&control.meta(), &control.runtime()),
        None => Background::default(),
    };
    match storage.start_threads(config) {
        Ok(threads) => Ok((storage, threads, background)),
        Err(failure) => {
            // The failure to be told is the first one.
            let _ = storage.close();
            Err(failure)
        }
    }
}
