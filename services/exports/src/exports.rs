//! This node as an NFS node: it serves NFS exports that are assigned to it, and takes over those of NFS nodes
//! that are down.
//!
//! What to do next is said by [`nfs::core`], from what is seen of meta, of the lease and of the machine.
//! What needs rights is done by the helper. Decision 0014 explains it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::failure::{Failure, Kind, Result};
use attachments::{Attachments, FailingDevice};
use meta::VolumeId;
use nfs::client::{Client, NfsError};
use nfs::plan::{ExportPlan, FloatingAddress, Network, PlanError};
use nfs::wire::Question;
use service::cluster::Cluster;
use service::waiting::HelperCalls;
use volumes::Volumes;

/// The NFS exports of the cluster, and what this node remembers of its own.
pub struct Exports {
    pub(crate) cluster: Cluster,
    pub(crate) volumes: Arc<Volumes>,
    pub(crate) attachments: Arc<Attachments>,
    client: Client,
    calls: HelperCalls,
    progress: Mutex<BTreeMap<String, Progress>>,
    /// Volumes of exports whose address is here. Whoever sets or drops an address holds it until the helper
    /// has answered, so that a renewal never brings back what was dropped.
    pub(crate) addresses: tokio::sync::Mutex<BTreeMap<String, VolumeId>>,
    /// Devices of exports that were taken from this node, until they are let go.
    pub(crate) failing: tokio::sync::Mutex<BTreeMap<String, FailingDevice>>,
}

/// How far an export is on this node.
#[derive(Debug, Clone, Default)]
pub(crate) struct Progress {
    /// A step is being taken.
    pub(crate) is_busy: bool,
    /// All is as it should be.
    pub(crate) is_at_rest: bool,
    /// What is waited for.
    pub(crate) waits_for: Option<&'static str>,
    /// Why the last step failed.
    pub(crate) failure: Option<Failure>,
}

impl Exports {
    /// Exports of `volumes`, which `attachments` makes block devices of this node.
    pub fn new(cluster: Cluster, volumes: Arc<Volumes>, attachments: Arc<Attachments>) -> Self {
        Self {
            cluster,
            volumes,
            attachments,
            client: Client::default(),
            calls: HelperCalls::default(),
            progress: Mutex::default(),
            addresses: tokio::sync::Mutex::default(),
            failing: tokio::sync::Mutex::default(),
        }
    }

    /// The cluster that the exports belong to.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    pub(crate) fn progress(&self) -> MutexGuard<'_, BTreeMap<String, Progress>> {
        // Each entry is whole after every statement.
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn progress_of(&self, name: &str) -> Progress {
        self.progress().get(name).cloned().unwrap_or_default()
    }

    /// Asks the helper, which may take minutes.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Client) -> std::result::Result<T, NfsError> + Send + 'static,
    ) -> Result<T> {
        let client = self.client.clone();
        let answer = self.calls.ask(move || question(&client)).await?;
        answer.map_err(failure)
    }

    pub(crate) async fn carry_out(&self, question: Question) -> Result<()> {
        self.ask(move |client| client.carry_out(&question)).await
    }
}

fn failure(error: NfsError) -> Failure {
    match error {
        NfsError::Refused { error, hint } => Failure::new(Kind::Failed, error, hint),
        NfsError::Unreachable { .. } => Failure::new(
            Kind::Failed,
            error,
            "systemctl enable --now penstock-nfs.socket; without the package, run `penstock \
             nfs-helper` as root",
        ),
    }
}

pub(crate) fn invalid(error: &PlanError) -> Failure {
    Failure::plain(Kind::Invalid, error)
}

/// What the helper is told of an export.
pub(crate) fn plan(export: &meta::Export) -> Result<ExportPlan> {
    let clients = export.clients.iter().map(|text| text.parse::<Network>());
    let clients: std::result::Result<Vec<Network>, PlanError> = clients.collect();
    let address = export
        .address
        .as_deref()
        .map(str::parse::<FloatingAddress>)
        .transpose();
    Ok(ExportPlan {
        name: export.name.to_string(),
        volume: export.volume.to_string(),
        fsid: export.fsid.to_string(),
        clients: clients.map_err(|e| invalid(&e))?,
        read_only: export.read_only,
        root_squash: export.root_squash,
        address: address.map_err(|e| invalid(&e))?,
    })
}
