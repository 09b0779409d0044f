//! One node: metadata, storage and services, put together.

use std::sync::Arc;

use api::failure::{Failure, Kind, Result};
use attachments::{Attachments, BlockDevices};
use config::StoreKind;
use config::datadir::{self, DataDir};
use config::identity;
use exports::Exports;
use filesystems::FilesystemService;
use health::Health;
use membership::{Control, Nodes};
use meta::MetaNode;
use service::Service;
use service::cluster::Cluster;
use service::ending::Ending;
use service::failures::ended_failure;
use service::pace::Paces;
use service::prepared::Prepared;
use service::waiting::blocking;
use storage::{Storage, StorageService, selection};
use tokio::sync::Mutex;
use vhost_backend::memory::budget::MemoryBudget;
use volumes::Volumes;

use super::starting::Starting;

/// A running node: owns the parts of the process, starts them and ends them in order.
pub struct Node {
    config: Prepared,
    pub(super) cluster: Cluster,
    pub(super) storage: Arc<StorageService>,
    pub(super) volumes: Arc<Volumes>,
    pub(super) attachments: Arc<Attachments>,
    pub(super) health: Arc<Health>,
    /// In the order of their start.
    services: Vec<Arc<dyn Service>>,
    ending: Ending,
    /// Taken by `close`.
    control: Mutex<Option<Control>>,
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

impl Node {
    /// Opens metadata and storage, and creates the services; [`serve`](Self::serve) starts them.
    pub async fn open(
        config: Prepared,
        block_devices: BlockDevices,
        purpose: Purpose,
        starting: &mut Starting,
    ) -> Result<Self> {
        let data = take_data_dir(&config, purpose).await?;
        if purpose == Purpose::Daemon {
            starting.listen()?;
        }
        let meta_dir = datadir::meta(&config.data, config.store);
        let control = Control::open(&config, meta_dir, &starting.waits()).await?;
        let has_network = control.membership().is_some();
        let cluster = Cluster::new(control.meta(), has_network, config.space_warnings);
        let storage = match open_storage(&config, &data, &control, &cluster).await {
            Ok(storage) => Arc::new(storage),
            Err(failure) => {
                control.shutdown().await;
                return Err(failure);
            }
        };
        Ok(Self::assemble(
            config,
            block_devices,
            (control, data),
            cluster,
            storage,
        ))
    }

    fn assemble(
        config: Prepared,
        block_devices: BlockDevices,
        (control, data): (Control, DataDir),
        cluster: Cluster,
        storage: Arc<StorageService>,
    ) -> Self {
        let memory_budget = MemoryBudget::new(config.guest_memory, config.pinned_memory);
        let (ending, paces) = (Ending::default(), Arc::<Paces>::default());
        let volumes = Arc::new(Volumes::new(
            cluster.clone(),
            Arc::clone(&storage.storage),
            Arc::clone(&storage.devices),
            Arc::clone(&storage.used),
            control.runtime(),
        ));
        let attachments = Attachments::new(
            cluster.clone(),
            attachments::Parts {
                config: config.clone(),
                storage: Arc::clone(&storage.storage),
                threads: storage.threads.clone(),
                memory_budget: memory_budget.clone(),
                block_devices,
                volumes: Arc::clone(&volumes),
                ending: ending.clone(),
            },
        );
        let filesystems = Arc::new(FilesystemService::new(
            cluster.clone(),
            config.clone(),
            (Arc::clone(&storage.storage), Arc::clone(&storage.pools)),
            Arc::clone(&volumes),
            memory_budget,
        ));
        let names: std::sync::Weak<FilesystemService> = Arc::downgrade(&filesystems);
        storage.set_file_names(names);
        let exports = Arc::new(Exports::new(
            cluster.clone(),
            Arc::clone(&volumes),
            Arc::clone(&attachments),
        ));
        let nodes = Arc::new(Nodes::new(
            cluster.clone(),
            control.membership(),
            config.data.clone(),
            Arc::clone(&storage.devices),
            Arc::clone(&paces),
        ));
        // A filesystem that ends writes back for long: guests' disks end before it.
        let mut services: Vec<Arc<dyn Service>> = vec![
            storage.clone(),
            volumes.clone(),
            filesystems,
            attachments.clone(),
            exports,
            nodes,
        ];
        let health = Arc::new(Health::new(
            cluster.clone(),
            (Arc::clone(&storage.storage), Arc::clone(&storage.devices)),
            paces,
            services.clone(),
        ));
        services.push(health.clone());
        Node {
            config,
            cluster,
            storage,
            volumes,
            attachments,
            health,
            services,
            ending,
            control: Mutex::new(Some(control)),
            _data: data,
        }
    }

    /// Starts the services that the purpose needs.
    pub async fn serve(&self, purpose: Purpose) -> Result<()> {
        match purpose {
            Purpose::Daemon => {
                for service in &self.services {
                    Arc::clone(service).start().await?;
                }
            }
            Purpose::OneVolume => {
                Arc::clone(&self.storage).start().await?;
                self.volumes.keep_leases();
            }
        }
        Ok(())
    }

    /// All services, in the order of their start.
    pub fn services(&self) -> &[Arc<dyn Service>] {
        &self.services
    }

    /// Ends everything in order: guests first, then data, then metadata. Requests in flight are finished.
    pub async fn close(&self) {
        for service in self.services.iter().rev() {
            tracing::debug!(service = service.name(), "stop");
            service.stop().await;
        }
        if let Some(control) = self.control.lock().await.take() {
            control.shutdown().await;
        }
    }

    /// Returns when the metadata service of a node with a network has ended. Never on a node without one,
    /// whose guests go on without it.
    pub async fn meta_ended(&self) -> Failure {
        match self.cluster.has_network {
            true => ended_failure(self.cluster.meta.ended().await, &self.config.data),
            false => std::future::pending().await,
        }
    }

    /// Returns when a service has requested the end of the daemon.
    pub async fn end_requested(&self) -> Failure {
        self.ending.requested().await
    }

    /// The configuration it runs with.
    pub fn config(&self) -> &Prepared {
        &self.config
    }

    /// What opening the store did.
    pub fn recovery(&self) -> &[String] {
        self.storage.storage.recovery()
    }
}

/// Takes the data directory, unless it holds devices and has lost its metadata.
async fn take_data_dir(config: &Prepared, purpose: Purpose) -> Result<DataDir> {
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
        let (config, default) = (config.clone(), data.default_device());
        let refuse = move || selection::refuse_without_metadata(&config, &default, &meta_dir);
        blocking(refuse).await?;
    }
    Ok(data)
}

async fn open_storage(
    config: &Prepared,
    data: &DataDir,
    control: &Control,
    cluster: &Cluster,
) -> Result<StorageService> {
    let net = (control.data(), control.stores_data());
    let storage = Arc::new(Storage::open(config, data, &cluster.meta, net).await?);
    let background = storage.join(&cluster.meta, &control.runtime());
    match storage.start_threads(config) {
        Ok(threads) => Ok(StorageService::new(
            cluster.clone(),
            config.clone(),
            storage,
            (threads, background),
        )),
        Err(failure) => {
            // The failure to be told is the first one.
            let _ = storage.close();
            Err(failure)
        }
    }
}
