//! What the admin API asks for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use api::failure::{Failure, Kind, Result};
use api::types::{
    Export, ExportCreate, ExportShownState, NfsNode, NfsServer, NfsStatus, VolumeCreate,
};
use meta::refusal::ExportRefusal;
use meta::{ExportSpec, Meta, MetaError, NodeState, Refusal, Role};
use nfs::plan::{CLIENTS_MAX, FloatingAddress, Network};
use nfs::wire::{Question, Signature};
use service::failures::{done_unseen, meta_failure};
use service::view::View;

use crate::exports::Exports;

use crate::exports::invalid;
use crate::health::told_by_node;
use crate::steps::block_request;

/// Longest that somebody who asks waits for an export to be served, moved or taken down. It goes on after
/// that, too.
const PEOPLE_WAIT_MAX: Duration = Duration::from_secs(90);
const LOOK_PAUSE: Duration = Duration::from_millis(200);

/// A request whose texts are understood.
struct Checked {
    clients: Vec<String>,
    address: Option<FloatingAddress>,
}

fn check(request: &ExportCreate) -> Result<Checked> {
    let address: Option<FloatingAddress> = request
        .address
        .as_deref()
        .map(str::parse)
        .transpose()
        .map_err(|e| invalid(&e))?;
    let mut clients = Vec::new();
    for text in &request.clients {
        let network: Network = text.parse().map_err(|e| invalid(&e))?;
        clients.push(network.to_string());
    }
    if let (true, Some(address)) = (clients.is_empty(), &address) {
        clients.push(address.network().to_string());
    }
    if clients.is_empty() || clients.len() > CLIENTS_MAX {
        return Err(Failure::invalid(
            format!(
                "export '{}' has {} networks of clients",
                request.name,
                clients.len()
            ),
            format!("say who may mount it with --clients CIDR: 1 to {CLIENTS_MAX} networks"),
        ));
    }
    clients.sort();
    clients.dedup();
    Ok(Checked { clients, address })
}

impl Exports {
    /// Exports a volume from this node. On an error nothing of it is left.
    pub async fn create(self: &Arc<Self>, request: ExportCreate) -> Result<Export> {
        let checked = check(&request)?;
        self.check_exportable(&request, &checked).await?;
        let made = self.provide_volume(&request).await?;
        let served = self.export_volume(&request, &checked).await;
        let Err(failure) = served else {
            return self.get(&request.name).await.map_err(done_unseen);
        };
        if made && let Err(error) = self.volumes.delete(&request.volume).await {
            tracing::warn!(volume = request.volume, failure = %error, "undo a volume");
        }
        Err(failure)
    }

    /// All that can be found out before anything is changed.
    async fn check_exportable(&self, request: &ExportCreate, checked: &Checked) -> Result<()> {
        self.require_nfs_role()?;
        let exports = self
            .cluster
            .asked
            .list_exports()
            .await
            .map_err(meta_failure)?;
        let taken = |what: String, hint: &str| Err(Failure::new(Kind::Conflict, what, hint));
        for other in exports {
            if other.name.as_str() == request.name {
                return taken(
                    format!("NFS export '{}' exists already", request.name),
                    "choose another name, or delete it first",
                );
            }
            if other.volume.as_str() == request.volume {
                return taken(
                    format!(
                        "volume '{}' is exported already, as '{}'",
                        request.volume, other.name
                    ),
                    "a volume has one export",
                );
            }
        }
        let abilities = self.ask(|client| client.probe()).await?;
        if let Some(missing) = abilities.missing.first() {
            let text = format!("this node cannot serve NFS exports: {missing}");
            return Err(Failure::plain(Kind::Failed, text));
        }
        let Some(address) = checked.address else {
            return Ok(());
        };
        let asked = self.carry_out(Question::CheckAddress { address }).await;
        asked.map_err(|failure| Failure {
            kind: Kind::Invalid,
            ..failure
        })
    }

    fn require_nfs_role(&self) -> Result<()> {
        let map = self.cluster.meta.map();
        let is_nfs_node = |node: &meta::Node| node.roles.contains(&Role::Nfs);
        if map.node(self.cluster.node_id()).is_some_and(is_nfs_node) {
            return Ok(());
        }
        let names = map
            .nodes()
            .filter(|node| is_nfs_node(node))
            .map(|node| node.name.to_string());
        let names: Vec<String> = names.collect();
        Err(Failure::new(
            Kind::Conflict,
            "this node is no NFS node",
            match names.is_empty() {
                true => "no node of the cluster is one: start one with the role nfs".to_owned(),
                false => format!("run this on an NFS node: {}", names.join(", ")),
            },
        ))
    }

    /// The volume to export. True if it was made for that.
    async fn provide_volume(&self, request: &ExportCreate) -> Result<bool> {
        match (
            self.cluster.asked.get_volume(&request.volume).await,
            request.size_bytes,
        ) {
            (Ok(volume), Some(_)) => Err(Failure::new(
                Kind::Conflict,
                format!("volume '{}' exists already", volume.name),
                "leave --size out to export it, or choose another name",
            )),
            (Ok(volume), None) if volume.read_only => Err(Failure::new(
                Kind::Conflict,
                format!(
                    "volume '{}' can only be read, and the file system keeps a log",
                    volume.name
                ),
                "export another volume",
            )),
            (Ok(_), None) => Ok(false),
            (Err(MetaError::Refused(refusal)), None) => {
                let failure = meta_failure(MetaError::Refused(refusal));
                Err(Failure {
                    hint: Some("give --size to create it".to_owned()),
                    ..failure
                })
            }
            (Err(MetaError::Refused(_)), Some(size_bytes)) => {
                let volume = VolumeCreate {
                    name: request.volume.clone(),
                    size_bytes,
                    pool: request.pool.clone(),
                    on_full_wait_s: None,
                };
                self.volumes.create(volume).await.map(|_| true)
            }
            (Err(error), _) => Err(meta_failure(error)),
        }
    }

    async fn export_volume(
        self: &Arc<Self>,
        request: &ExportCreate,
        checked: &Checked,
    ) -> Result<()> {
        self.attachments
            .attach(block_request(&request.volume))
            .await?;
        let recorded = match self.format_for_export(&request.volume).await {
            Ok(()) => self.record_export(request, checked).await,
            Err(failure) => Err(failure),
        };
        if let Err(failure) = recorded {
            if let Err(error) = self.detach_block(&request.volume).await {
                tracing::warn!(volume = request.volume, failure = %error, "undo an attachment");
            }
            return Err(failure);
        }
        let served = self.wait_until_served(&request.name).await;
        if served.is_err()
            && let Err(error) = self.delete(&request.name).await
        {
            tracing::warn!(export = request.name, failure = %error, "undo an export");
        }
        served
    }

    /// Gives an empty volume its file system. What holds anything else is left alone.
    async fn format_for_export(&self, name: &str) -> Result<()> {
        let volume = name.to_owned();
        match self.ask(move |client| client.inspect(&volume)).await? {
            Signature::Xfs => Ok(()),
            Signature::Empty => {
                let volume = name.to_owned();
                self.carry_out(Question::Format { volume }).await
            }
            Signature::Other(found) => Err(Failure::new(
                Kind::Conflict,
                format!("volume '{name}' holds {found}, which is never overwritten"),
                "export an empty volume, or one with XFS",
            )),
        }
    }

    async fn record_export(&self, request: &ExportCreate, checked: &Checked) -> Result<()> {
        let spec = ExportSpec {
            name: request.name.clone(),
            volume: request.volume.clone(),
            node: self.cluster.node_id(),
            clients: checked.clients.clone(),
            read_only: request.read_only,
            root_squash: request.root_squash,
            address: checked.address.map(|address| address.to_string()),
        };
        let made = self
            .cluster
            .asked
            .create_export(uuid::Uuid::new_v4(), spec)
            .await;
        made.map(drop).map_err(meta_failure)
    }

    /// Waits for an export of this node.
    async fn wait_until_served(self: &Arc<Self>, name: &str) -> Result<()> {
        let begin = Instant::now();
        loop {
            let progress = self.progress_of(name);
            if progress.is_at_rest {
                return Ok(());
            }
            if let Some(failure) = progress.failure {
                return Err(failure);
            }
            if begin.elapsed() > PEOPLE_WAIT_MAX {
                return Err(Failure::new(
                    Kind::Failed,
                    format!(
                        "export '{name}' is not served after {} s",
                        PEOPLE_WAIT_MAX.as_secs()
                    ),
                    "look at the daemon's log and at `penstock health`",
                ));
            }
            tokio::time::sleep(LOOK_PAUSE).await;
        }
    }

    /// All exports.
    pub async fn list(&self, reader: &Meta) -> Result<Vec<Export>> {
        let exports = reader.list_exports().await.map_err(meta_failure)?;
        let view = self.cluster.view_by(reader).await?;
        let own = self.cluster.node_id();
        let has_own = exports.iter().any(|export| export.node == own);
        let here = match has_own {
            // Without the helper they are shown as well.
            true => self.ask(|client| client.look()).await.unwrap_or_default(),
            false => nfs::wire::State::default(),
        };
        Ok(exports
            .iter()
            .map(|export| self.export_shown(&view, &here, export))
            .collect())
    }

    /// One export.
    pub async fn get(&self, name: &str) -> Result<Export> {
        self.cluster
            .asked
            .get_export(name)
            .await
            .map_err(meta_failure)?;
        let mut all = self.list(&self.cluster.asked).await?.into_iter();
        let found = all.find(|export| export.name == name);
        found.ok_or_else(|| {
            Failure::plain(Kind::NotFound, format!("there is no NFS export '{name}'"))
        })
    }

    fn export_shown(&self, view: &View, here: &nfs::wire::State, export: &meta::Export) -> Export {
        let (state, problem) = self.export_state(view, export);
        let of_name = here
            .exports
            .iter()
            .find(|one| one.plan.name == export.name.as_str());
        let space = of_name.and_then(|one| one.space_bytes);
        Export {
            name: export.name.to_string(),
            volume: export.volume.to_string(),
            node: view.node_name(export.node),
            state,
            problem,
            clients: export.clients.clone(),
            address: export.address.clone(),
            read_only: export.read_only,
            root_squash: export.root_squash,
            fsid: export.fsid.to_string(),
            size_bytes: space.map(|(size, _)| size),
            free_bytes: space.map(|(_, free)| free),
            created_at: export.created_at.into(),
        }
    }

    fn export_state(
        &self,
        view: &View,
        export: &meta::Export,
    ) -> (ExportShownState, Option<String>) {
        use ExportShownState::{Deleting, Down, Moving, Served, Starting};
        if export.state == meta::ExportState::Deleting {
            return (Deleting, None);
        }
        if view.is_down(export.node) {
            let why = format!("NFS node {} is down", view.node_name(export.node));
            return (Down, Some(why));
        }
        let mut attached = view.attachments.iter();
        let attachment = attached.find(|one| one.target.name() == &export.volume);
        if attachment.is_some_and(|one| one.node != export.node) {
            return (Moving, None);
        }
        if export.node == self.cluster.node_id() {
            let progress = self.progress_of(&export.name);
            return match (progress.is_at_rest, progress.failure) {
                (true, _) => (Served, None),
                (false, Some(failure)) => (Down, Some(failure.to_string())),
                (false, None) => (Starting, progress.waits_for.map(str::to_owned)),
            };
        }
        match (told_by_node(view, export), attachment) {
            (Some(why), _) => (Down, Some(why)),
            (None, Some(_)) => (Served, None),
            (None, None) => (Starting, None),
        }
    }

    /// Moves an export to another NFS node, and waits for it.
    pub async fn move_to(&self, name: &str, to: &str) -> Result<Export> {
        let export = self
            .cluster
            .asked
            .get_export(name)
            .await
            .map_err(meta_failure)?;
        let view = self.cluster.view().await?;
        let target = view.node(to)?;
        let assigned = self
            .cluster
            .asked
            .assign_export(name, (export.node, target.id), true)
            .await;
        assigned.map_err(meta_failure)?;
        let begin = Instant::now();
        loop {
            let shown = self.get(name).await?;
            if shown.state == ExportShownState::Served || begin.elapsed() > PEOPLE_WAIT_MAX {
                return Ok(shown);
            }
            tokio::time::sleep(LOOK_PAUSE).await;
        }
    }

    /// Takes an export down, and waits until it is.
    pub async fn delete(&self, name: &str) -> Result<()> {
        self.cluster
            .asked
            .delete_export(name)
            .await
            .map_err(meta_failure)?;
        let begin = Instant::now();
        loop {
            match self.cluster.asked.get_export(name).await {
                Err(MetaError::Refused(Refusal::Export(ExportRefusal::Unknown { .. }))) => {
                    return Ok(());
                }
                Err(error) => return Err(meta_failure(error)),
                Ok(export) if begin.elapsed() > PEOPLE_WAIT_MAX => {
                    let view = self.cluster.view().await?;
                    return Err(Failure::new(
                        Kind::Failed,
                        format!(
                            "export '{name}' is not down after {} s: NFS node {} takes it down",
                            PEOPLE_WAIT_MAX.as_secs(),
                            view.node_name(export.node)
                        ),
                        "it goes on by itself; see `penstock health`",
                    ));
                }
                Ok(_) => tokio::time::sleep(LOOK_PAUSE).await,
            }
        }
    }

    /// This node as an NFS node.
    pub async fn status(&self) -> Result<NfsStatus> {
        let all = self.list(&self.cluster.asked).await?;
        let view = self.cluster.view().await?;
        let own = view.node_name(self.cluster.node_id());
        let is_nfs_node = self.require_nfs_role().is_ok();
        let (mut missing, mut rdma_devices, mut server) = (Vec::new(), Vec::new(), None);
        if is_nfs_node {
            match self
                .ask(|client| Ok((client.probe()?, client.look()?)))
                .await
            {
                Ok((abilities, state)) => {
                    (missing, rdma_devices) = (abilities.missing, abilities.rdma_devices);
                    server = state.server;
                }
                Err(failure) => missing.push(failure.to_string()),
            }
        }
        let nodes = view
            .map
            .nodes()
            .filter(|node| node.roles.contains(&Role::Nfs));
        let nodes = nodes.map(|node| NfsNode {
            node: node.name.to_string(),
            is_up: node.state == NodeState::Up,
            exports: all
                .iter()
                .filter(|export| export.node == node.name.as_str())
                .count(),
        });
        Ok(NfsStatus {
            is_nfs_node,
            missing,
            rdma_devices,
            server: server.map(|server| NfsServer {
                threads: server.threads,
                ports: server.ports,
                clients: server.clients,
                in_grace: server.in_grace,
            }),
            nodes: nodes.collect(),
            exports: all
                .into_iter()
                .filter(|export| export.node == own)
                .collect(),
            node: own,
        })
    }
}
