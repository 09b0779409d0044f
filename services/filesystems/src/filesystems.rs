//! Filesystems: meta and the namespace groups say what there is, clients of this node serve it to guests, and
//! whoever leads a group gives back what is not used any more.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use api::failure::{Failure, Kind, Result};
use api::types::{Filesystem, FilesystemCreate};
use fs_client::{Client, ClientOptions, DIRTY_BYTES_MAX, DataCache, Space};
use fs_device::FsEngine;
use fs_service::ClientService;
use meta::{AttachmentId, FilesystemSpec, FilesystemState};
use namespace::FilesystemId;
use service::cluster::Cluster;
use service::failures::meta_failure;
use service::prepared::Prepared;
use storage::{Pools, Storage};
use tokio::sync::{Mutex, OnceCell};
use tokio::task::JoinSet;
use vhost_backend::data_thread::{ThreadOptions, Threads};
use vhost_backend::memory::budget::MemoryBudget;
use volumes::Volumes;

use crate::attachments::ServedFilesystem;
use crate::backend::{ClusterBackend, Parts};
use crate::damaged::DamagedFiles;
use crate::segment_io::SegmentIo;
use crate::{attachments, reclaim};

/// Pause between two looks at leases and space.
const PAUSE: Duration = Duration::from_secs(3);
/// Requests in flight have this long to end while the node closes.
const FINISH_MAX: Duration = Duration::from_secs(5);
/// A client that ends has this long to seal its segments.
const SHUTDOWN_MAX: Duration = Duration::from_secs(3);
/// One with buffered writes has this long to write them back.
const WRITE_BACK_MAX: Duration = Duration::from_secs(30);
/// Data threads for filesystems: they only move requests, what serves them are tasks of the control plane.
const DATA_THREADS: usize = 1;

/// The data threads of filesystems.
type FsThreads = Arc<Threads<FsEngine<ClientService<ClusterBackend>>>>;

/// Filesystems of the cluster, and what serves them on this node. Nothing of it runs before it is needed.
pub struct FilesystemService {
    pub(crate) cluster: Cluster,
    pub(crate) config: Prepared,
    pub(crate) storage: Arc<Storage>,
    pub(crate) volumes: Arc<Volumes>,
    pub(crate) pools: Arc<Pools>,
    pub(crate) memory_budget: MemoryBudget,
    io: OnceCell<Arc<SegmentIo>>,
    threads: OnceCell<FsThreads>,
    data_cache: OnceLock<Arc<DataCache>>,
    pub(crate) damaged_files: Arc<DamagedFiles>,
    /// The node ends: nobody waits for a leader any more.
    is_closing: Arc<AtomicBool>,
    /// Whoever changes attachments holds this from the first look to the last step.
    pub(crate) live: Mutex<LiveFilesystems>,
}

/// Clients and attachments that are open now.
#[derive(Default)]
pub(crate) struct LiveFilesystems {
    /// A client stays for as long as the node runs: its session counts its requests.
    pub(crate) clients: BTreeMap<FilesystemId, Arc<Client<ClusterBackend>>>,
    pub(crate) attachments: BTreeMap<AttachmentId, ServedFilesystem>,
}

impl FilesystemService {
    /// Filesystems whose segments lie in `volumes`. Sessions of guests map at most `memory_budget`.
    pub fn new(
        cluster: Cluster,
        config: Prepared,
        (storage, pools): (Arc<Storage>, Arc<Pools>),
        volumes: Arc<Volumes>,
        memory_budget: MemoryBudget,
    ) -> Self {
        Self {
            cluster,
            config,
            storage,
            volumes,
            pools,
            memory_budget,
            io: OnceCell::new(),
            threads: OnceCell::new(),
            data_cache: OnceLock::new(),
            damaged_files: Arc::default(),
            is_closing: Arc::default(),
            live: Mutex::default(),
        }
    }

    /// The cluster that the filesystems belong to.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Reads and writes of segments.
    pub(crate) async fn io(&self) -> Result<Arc<SegmentIo>> {
        let start = || async {
            let fabric = self.storage.fabric().clone();
            SegmentIo::start(fabric).await.map(Arc::new)
        };
        self.io.get_or_try_init(start).await.cloned()
    }

    pub(crate) async fn threads(&self) -> Result<FsThreads> {
        let start = || async {
            let runtime = tokio::runtime::Handle::current();
            let options = ThreadOptions {
                threads: DATA_THREADS,
                ..ThreadOptions::default()
            };
            let make = move |_| ClientService::new(runtime.clone()).map(FsEngine::new);
            Threads::start(&options, make).map_err(|e| Failure::plain(Kind::Failed, e))
        };
        self.threads.get_or_try_init(start).await.cloned()
    }
}

/// Looks after clients for as long as filesystems are served.
pub fn keep(service: &Arc<FilesystemService>) {
    tokio::spawn(look_after(Arc::downgrade(service)));
    reclaim::keep(service);
}

async fn look_after(service: Weak<FilesystemService>) {
    loop {
        tokio::time::sleep(PAUSE).await;
        let Some(service) = service.upgrade() else {
            return;
        };
        service.end_forgotten_attachments().await;
        let clients = service.used_clients().await;
        if clients.is_empty() {
            continue;
        }
        for client in &clients {
            client.backend().let_go_of_lost();
        }
        let pools = service.pools.list(&service.cluster.list_reader()).await;
        for client in clients {
            let backend = client.backend();
            if let Ok(pools) = &pools {
                backend.set_space(space_of(pools, backend.pool()));
            }
        }
    }
}

/// Whether something that guests wrote is not durable yet.
fn has_buffered(client: &Arc<Client<ClusterBackend>>) -> bool {
    client.counters().dirty_bytes > 0
}

async fn end_client(client: Arc<Client<ClusterBackend>>) {
    let limit = match has_buffered(&client) {
        true => WRITE_BACK_MAX,
        false => SHUTDOWN_MAX,
    };
    // What it leaves undone, the group's leader does for it.
    let _ = tokio::time::timeout(limit, client.shutdown()).await;
    let buffered = client.counters().dirty_bytes;
    if buffered > 0 {
        let name = client.backend().name();
        tracing::error!(
            filesystem = name,
            buffered,
            "the last writes of guests are lost"
        );
    }
}

pub(crate) fn space_of(pools: &[api::types::Pool], name: &str) -> Option<Space> {
    let pool = pools.iter().find(|pool| pool.name == name)?;
    let copies = u64::from(pool.replicas.max(1));
    Some(Space {
        total_bytes: pool.capacity_bytes / copies,
        free_bytes: pool.free_bytes / copies,
    })
}

impl FilesystemService {
    /// All filesystems.
    pub async fn list(&self, reader: &meta::Meta) -> Result<Vec<Filesystem>> {
        let mut shown = Vec::new();
        let attachments = self.attachments_everywhere(reader).await?;
        for filesystem in reader.list_filesystems().await.map_err(meta_failure)? {
            let found = self.statistics_of(&filesystem).await;
            shown.push(self.show(&filesystem, found, &attachments));
        }
        Ok(shown)
    }

    /// One filesystem, with who uses it.
    pub async fn get(&self, name: &str) -> Result<Filesystem> {
        let filesystem = self
            .cluster
            .asked
            .get_filesystem(name)
            .await
            .map_err(meta_failure)?;
        let attachments = self.attachments_everywhere(&self.cluster.asked).await?;
        let found = self.statistics_of(&filesystem).await;
        let is_known = found.is_ok();
        let mut shown = self.show(&filesystem, found, &attachments);
        if is_known {
            match self.sessions_of(&filesystem).await {
                Ok(sessions) => shown.sessions = Some(sessions),
                Err(failure) => shown.problem = Some(failure.error),
            }
            match self.capabilities_of(&filesystem).await {
                Ok(held) => shown.capabilities = Some(held),
                Err(failure) => shown.problem = Some(failure.error),
            }
        }
        Ok(shown)
    }

    /// Makes an empty filesystem.
    pub async fn create(&self, request: FilesystemCreate) -> Result<Filesystem> {
        let spec = FilesystemSpec {
            name: request.name,
            pool: request
                .pool
                .unwrap_or_else(|| meta::DEFAULT_POOL.to_owned()),
        };
        let uuid = uuid::Uuid::new_v4();
        let made = self.cluster.meta.create_filesystem(uuid, spec).await;
        let made = made.map_err(meta_failure)?;
        let found = self.statistics_of(&made).await;
        Ok(self.show(&made, found, &[]))
    }

    /// Begins to delete a filesystem with all its files. Its name is free once that is done.
    pub async fn delete(&self, name: &str) -> Result<()> {
        let mut live = self.live.lock().await;
        let deleted = self.cluster.asked.delete_filesystem(name).await;
        let deleted = deleted.map_err(meta_failure)?;
        if let Some(client) = live.clients.remove(&deleted.id) {
            // Its session is ended by the group's leader, too.
            tokio::spawn(async move { client.shutdown().await });
        }
        Ok(())
    }

    /// The clients of filesystems that are there. Those of deleted ones are ended.
    async fn used_clients(&self) -> Vec<Arc<Client<ClusterBackend>>> {
        let mut live = self.live.lock().await;
        let map = self.cluster.meta.map();
        let ready = map
            .filesystems()
            .filter(|one| one.state == FilesystemState::Ready);
        let ready: BTreeSet<FilesystemId> = ready.map(|one| one.id).collect();
        let gone = live
            .clients
            .keys()
            .filter(|id| !ready.contains(id))
            .copied();
        for id in gone.collect::<Vec<_>>() {
            if let Some(client) = live.clients.remove(&id) {
                tokio::spawn(async move { client.shutdown().await });
            }
        }
        live.clients.values().cloned().collect()
    }

    /// Ends sessions and clients; meta keeps the attachments for the next start.
    pub(crate) async fn close(&self) {
        let service = self;
        let live = std::mem::take(&mut *service.live.lock().await);
        let has_buffered = live.clients.values().any(has_buffered);
        // What guests wrote last is to be written back: for that a leader is waited for a little.
        service.is_closing.store(!has_buffered, Ordering::Release);
        let mut closing =
            std::pin::pin!(attachments::close(live.attachments.into_values().collect()));
        if tokio::time::timeout(FINISH_MAX, &mut closing)
            .await
            .is_err()
        {
            service.is_closing.store(true, Ordering::Release);
            // What waits for a lease or for replicas is given up: no guest comes back to its mount anyway.
            if let Some(io) = service.io.get() {
                io.close().await;
            }
            closing.await;
        }
        let ending: JoinSet<()> = live.clients.into_values().map(end_client).collect();
        ending.join_all().await;
        service.is_closing.store(true, Ordering::Release);
        if let Some(threads) = service.threads.get().cloned() {
            let ended = tokio::task::spawn_blocking(move || threads.shutdown());
            if let Err(error) = ended.await {
                tracing::error!(%error, "end the data threads of filesystems");
            }
        }
        if let Some(io) = service.io.get() {
            io.close().await;
        }
    }

    async fn parts(&self) -> Result<Parts> {
        Ok(Parts {
            meta: self.cluster.meta.clone(),
            storage: Arc::clone(&self.storage),
            leases: Arc::clone(self.volumes.leases()),
            io: self.io().await?,
            is_closing: Arc::clone(&self.is_closing),
        })
    }

    /// Where file data of all filesystems are cached. It takes memory only as it is filled.
    pub(crate) fn data_cache(&self) -> &Arc<DataCache> {
        let bytes = self.config.filesystem_cache_bytes;
        let cache = &self.data_cache;
        cache.get_or_init(|| DataCache::new(bytes))
    }

    /// This node's client of a filesystem.
    pub(crate) async fn client(
        &self,
        live: &mut LiveFilesystems,
        filesystem: &meta::Filesystem,
    ) -> Result<Arc<Client<ClusterBackend>>> {
        if let Some(client) = live.clients.get(&filesystem.id) {
            return Ok(Arc::clone(client));
        }
        let map = self.cluster.meta.map();
        let pool = map.pool(filesystem.pool);
        let pool = pool.map_or_else(String::new, |pool| pool.name.to_string());
        let backend = ClusterBackend::new(self.parts().await?, filesystem.clone(), pool);
        let options = ClientOptions {
            dirty_bytes_max: DIRTY_BYTES_MAX,
            data_cache: Arc::clone(self.data_cache()),
            ..ClientOptions::default()
        };
        let client = Client::new(backend, options);
        tokio::spawn(Arc::clone(&client).run());
        live.clients.insert(filesystem.id, Arc::clone(&client));
        Ok(client)
    }
}
