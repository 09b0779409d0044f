//! How the daemon runs this service.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use api::failure::Result;
use api::metrics::Page;
use axum::Router;
use meta::LeaderReport;
use service::cluster::Cluster;
use service::code::Code;
use service::found::Found;
use service::pace::LOOK_PAUSE;
use service::prepared::Prepared;
use service::waiting::blocking;
use service::{BoxFuture, Service};

use crate::damage::{KnownFiles, Owners, SegmentBlock};
use crate::devices::Devices;
use crate::pools::Pools;
use crate::storage::{Background, Storage, Threads};
use crate::used::UsedBytes;
use crate::{garbage, metrics, routes};

/// Devices that take longer to answer are reported as a problem.
const LOOK_WAIT_MAX: Duration = Duration::from_millis(800);

/// Names of files, for reports of damaged blocks.
pub trait FileNames: Send + Sync {
    /// Files that these blocks belong to, as far as that is known soon.
    fn files_of(&self, blocks: BTreeSet<SegmentBlock>) -> BoxFuture<'_, KnownFiles>;
}

/// Parts of the storage service.
pub struct StorageService {
    /// Data path.
    pub storage: Arc<Storage>,
    /// Data threads.
    pub threads: Threads,
    /// Devices, as people see and change them.
    pub devices: Arc<Devices>,
    /// Pools, as people see and change them.
    pub pools: Arc<Pools>,
    /// Bytes that volumes store.
    pub used: Arc<UsedBytes>,
    cluster: Cluster,
    /// Joins data path and cluster.
    background: Background,
    file_names: OnceLock<Weak<dyn FileNames>>,
}

impl StorageService {
    /// The service of an open store, which `background` joins with the cluster.
    pub fn new(
        cluster: Cluster,
        config: Prepared,
        storage: Arc<Storage>,
        (threads, background): (Threads, Background),
    ) -> Self {
        let devices = Devices::new(cluster.clone(), config, Arc::clone(&storage));
        let devices = Arc::new(devices);
        let pools = Pools::new(cluster.clone(), Arc::clone(&devices));
        let used = UsedBytes::new(cluster.clone(), Arc::clone(&storage));
        Self {
            storage,
            threads,
            devices,
            pools: Arc::new(pools),
            used: Arc::new(used),
            cluster,
            background,
            file_names: OnceLock::new(),
        }
    }

    /// Sets who knows the names of files; once.
    pub fn set_file_names(&self, names: Weak<dyn FileNames>) {
        assert!(self.file_names.set(names).is_ok(), "names are set once");
    }

    /// Repeats registrations that failed, and removes devices that are empty now, for as long as the service
    /// runs.
    fn keep_devices(self: &Arc<Self>) {
        let (weak, cluster) = (Arc::downgrade(&self.devices), self.cluster.clone());
        tokio::spawn(async move {
            let mut has_failed = false;
            while let Some(devices) = weak.upgrade() {
                let registered = devices.register_added().await;
                let removed = match cluster.applied(LeaderReport::default()) {
                    Ok(view) => devices.forget_emptied(&view).await,
                    Err(failure) => Err(failure),
                };
                let done = registered.and(removed);
                if let (Err(failure), false) = (&done, has_failed) {
                    // Logged once: it is repeated.
                    tracing::warn!(%failure, "failed to register or remove devices");
                }
                has_failed = done.is_err();
                drop(devices);
                tokio::time::sleep(LOOK_PAUSE).await;
            }
        });
    }

    /// Problems of this node's devices, by the names of volumes and files whose data are damaged.
    async fn device_problems(&self) -> Vec<Found> {
        let (storage, map) = (self.storage.clone(), self.cluster.meta.map());
        let applied = self.cluster.meta.applied();
        let volumes = applied.volumes().unwrap_or_default();
        let filesystems = applied.filesystems().unwrap_or_default();
        let mut owners = Owners::new(&volumes, &filesystems);
        let devices = storage.clone();
        let bad = blocking(move || Ok(devices.bad_blocks()));
        // Devices that do not answer are reported below.
        if let Ok(Ok(bad)) = tokio::time::timeout(LOOK_WAIT_MAX, bad).await {
            let blocks = owners.segment_blocks(&bad);
            if let Some(names) = self.file_names.get().and_then(Weak::upgrade) {
                owners.set_files(names.files_of(blocks).await);
            }
        }
        let look = blocking(move || Ok(storage.problems(&map, &owners)));
        match tokio::time::timeout(LOOK_WAIT_MAX, look).await {
            Ok(Ok(problems)) => problems,
            Ok(Err(failure)) => {
                vec![Found::new(Code::DevicesSilent, "", failure.to_string(), "")]
            }
            Err(_) => vec![Found::new(
                Code::DevicesSilent,
                "",
                "the devices of this node do not answer",
                "look at its log and the kernel's",
            )],
        }
    }
}

impl Service for StorageService {
    fn name(&self) -> &'static str {
        "storage"
    }

    fn start(self: Arc<Self>) -> BoxFuture<'static, Result<()>> {
        Box::pin(async move {
            garbage::keep_dropping(self.cluster.meta.clone(), &self.storage);
            self.used.keep();
            self.keep_devices();
            Ok(())
        })
    }

    fn stop(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            self.background.end();
            let (threads, storage) = (self.threads.clone(), self.storage.clone());
            let closed = tokio::task::spawn_blocking(move || {
                threads.shutdown();
                storage.close()
            });
            match closed.await {
                Ok(Ok(())) => {}
                Ok(Err(failure)) => tracing::error!(%failure, "failed to close the store"),
                Err(error) => {
                    tracing::error!(%error, "failed to close the store: its thread ended")
                }
            }
        })
    }

    fn problems(&self) -> BoxFuture<'_, Vec<Found>> {
        Box::pin(self.device_problems())
    }

    /// Two looks at the devices, and one for names of files.
    fn answers_within(&self) -> Duration {
        3 * LOOK_WAIT_MAX
    }

    fn put_metrics<'a>(&'a self, page: &'a mut Page) -> BoxFuture<'a, ()> {
        Box::pin(async { metrics::put(page, &self.storage) })
    }

    fn routes(self: Arc<Self>) -> Router {
        routes::routes(Arc::clone(&self.devices), Arc::clone(&self.pools))
    }
}
