//! Metadata and storage of a node without a network, for tests that run a service without a daemon.

use std::path::Path;
use std::sync::Arc;

use config::datadir::{self, DataDir};
use config::{Config, Preallocation};
use membership::Control;
use service::Service;
use service::cluster::Cluster;
use service::prepared::Prepared;
use storage::{Storage, StorageService};
use volumes::Volumes;

/// Size of the node's only device.
const DEVICE_SIZE: &str = "512M";

/// Metadata and storage of a node.
pub struct TestNode {
    /// Handle of the metadata.
    pub cluster: Cluster,
    /// Configuration of the node.
    pub config: Prepared,
    /// The storage service, which is started.
    pub storage: Arc<StorageService>,
    control: Control,
    _data: DataDir,
}

impl TestNode {
    /// Opens the node in a data directory, and creates it at the first time.
    pub async fn open(data: &Path) -> Self {
        let config = Prepared::new(configuration(data));
        let data = DataDir::take(data).expect("the directory is free");
        let meta_dir = datadir::meta(&config.data, config.store);
        let control = Control::open(&config, meta_dir, &|_| {}).await;
        let control = control.expect("the metadata open");
        let cluster = Cluster::new(control.meta(), false, config.space_warnings);
        let net = (control.data(), control.stores_data());
        let storage = Storage::open(&config, &data, &cluster.meta, net).await;
        let storage = Arc::new(storage.expect("the device opens"));
        let background = storage.join(&cluster.meta, &control.runtime());
        let threads = storage.start_threads(&config).expect("threads start");
        let storage = StorageService::new(
            cluster.clone(),
            config.clone(),
            storage,
            (threads, background),
        );
        let storage = Arc::new(storage);
        let started = Arc::clone(&storage).start().await;
        started.expect("the storage service starts");
        Self {
            cluster,
            config,
            storage,
            control,
            _data: data,
        }
    }

    /// The volume service of this node, not started.
    pub fn volumes(&self) -> Arc<Volumes> {
        Arc::new(Volumes::new(
            self.cluster.clone(),
            Arc::clone(&self.storage.storage),
            Arc::clone(&self.storage.devices),
            Arc::clone(&self.storage.used),
            self.control.runtime(),
        ))
    }

    /// Ends the node in order. The services upon it have stopped before.
    pub async fn close(self) {
        self.storage.stop().await;
        self.control.shutdown().await;
    }
}

fn configuration(data: &Path) -> Config {
    let file = config::File {
        data: Some(data.into()),
        device_size: Some(DEVICE_SIZE.parse().expect("it is a size")),
        device_preallocation: Some(Preallocation::Off),
        threads: Some(1),
        ..config::File::default()
    };
    config::resolve(file).expect("the configuration is valid")
}
