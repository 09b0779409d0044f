//! This node as an NFS node: it serves NFS exports that are assigned to it, and takes over those of NFS nodes
//! that are down.
//!
//! What to do next is said by [`nfs::core`], from what is seen of meta, of the lease and of the machine.
//! What needs rights is done by the helper. Decision 0014 explains it.

mod health;
pub mod helper;
mod keeper;
mod steps;
mod verbs;

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use api::failure::{Failure, Kind, Result};
use meta::VolumeId;
use nfs::client::{Client, NfsError};
use nfs::plan::{ExportPlan, FloatingAddress, Network, PlanError};
use nfs::wire::Question;
use service::waiting::HelperCalls;

use crate::serve::attachments::leftover_device::FailingDevice;

pub use health::orphans;
pub use keeper::keep;

/// What this node remembers of exports, and how it reaches the helper.
#[derive(Default)]
pub struct Exports {
    client: Client,
    calls: HelperCalls,
    progress: Mutex<BTreeMap<String, Progress>>,
    /// Volumes of exports whose address is here. Whoever sets or drops an address holds it until the helper
    /// has answered, so that a renewal never brings back what was dropped.
    addresses: tokio::sync::Mutex<BTreeMap<String, VolumeId>>,
    /// Devices of exports that were taken from this node, until they are let go.
    failing: tokio::sync::Mutex<BTreeMap<String, FailingDevice>>,
}

/// How far an export is on this node.
#[derive(Debug, Clone, Default)]
struct Progress {
    /// A step is being taken.
    is_busy: bool,
    /// All is as it should be.
    is_at_rest: bool,
    /// What is waited for.
    waits_for: Option<&'static str>,
    /// Why the last step failed.
    failure: Option<Failure>,
}

impl Exports {
    fn progress(&self) -> MutexGuard<'_, BTreeMap<String, Progress>> {
        // Each entry is whole after every statement.
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn progress_of(&self, name: &str) -> Progress {
        self.progress().get(name).cloned().unwrap_or_default()
    }

    /// Asks the helper, which may take minutes.
    async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Client) -> std::result::Result<T, NfsError> + Send + 'static,
    ) -> Result<T> {
        let client = self.client.clone();
        let answer = self.calls.ask(move || question(&client)).await?;
        answer.map_err(failure)
    }

    async fn carry_out(&self, question: Question) -> Result<()> {
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

fn invalid(error: &PlanError) -> Failure {
    Failure::plain(Kind::Invalid, error)
}

/// What the helper is told of an export.
fn plan(export: &meta::Export) -> Result<ExportPlan> {
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
