//! Nodes of the cluster, as any of them tells.

use std::path::PathBuf;
use std::sync::Arc;

use api::failure::{Failure, Result};
use api::types::{self, ClusterNode, NodeAdminState, NodeRemoveQuery};
use meta::{AdminState, Meta, NodeId, NodeState};
use service::cluster::Cluster;
use service::failures::{done_unseen, meta_failure};
use service::found::Work;
use service::pace::Paces;
use service::view::{View, part};
use storage::Devices;

use crate::control::Membership;

/// The nodes of the cluster, as people see and change them, and what lets others in.
pub struct Nodes {
    pub(crate) cluster: Cluster,
    /// Present on a node with a network.
    pub(crate) membership: Option<Membership>,
    /// Data directory of this node.
    pub(crate) data: PathBuf,
    devices: Arc<Devices>,
    paces: Arc<Paces>,
}

impl Nodes {
    /// The nodes of a cluster, shown with their `devices` and the pace at which they are emptied.
    pub fn new(
        cluster: Cluster,
        membership: Option<Membership>,
        data: PathBuf,
        devices: Arc<Devices>,
        paces: Arc<Paces>,
    ) -> Self {
        Self {
            cluster,
            membership,
            data,
            devices,
            paces,
        }
    }

    /// All nodes.
    pub async fn list(&self, reader: &Meta) -> Result<Vec<ClusterNode>> {
        let view = self.cluster.view_by(reader).await?;
        let nodes = view.map.nodes();
        Ok(nodes.map(|node| self.node_shown(&view, node)).collect())
    }

    /// One node, by name or number.
    pub async fn get(&self, name: &str) -> Result<ClusterNode> {
        let view = self.cluster.view().await?;
        let node = view.node(name)?;
        Ok(self.node_shown(&view, node))
    }

    /// Moves all data off a node, or calls that off.
    pub async fn drain(&self, name: &str, on: bool) -> Result<ClusterNode> {
        let id = self.cluster.view().await?.node(name)?.id;
        self.cluster
            .asked
            .drain_node(id, on)
            .await
            .map_err(meta_failure)?;
        self.get(&id.to_string()).await.map_err(done_unseen)
    }

    /// Removes a node: an unused one, one whose data is given up, or one that may be up and serve guests.
    pub async fn remove(&self, name: &str, query: &NodeRemoveQuery) -> Result<()> {
        let id = self.cluster.view().await?.node(name)?.id;
        let removed = match (query.accept_data_loss, query.evict) {
            (true, true) => {
                return Err(Failure::invalid(
                    "evict and accept_data_loss exclude each other",
                    "leave out evict if the node is down, or accept_data_loss if it is up",
                ));
            }
            (true, false) => self.cluster.asked.remove_lost(meta::Lost::Node(id)).await,
            (false, true) => self.cluster.asked.evict_node(id).await.map(drop),
            (false, false) => self.cluster.asked.remove_node(id).await.map(drop),
        };
        removed.map_err(meta_failure)
    }

    fn node_shown(&self, view: &View, node: &meta::Node) -> ClusterNode {
        let held = view.held_by(node.id);
        let is_draining = node.admin_state == AdminState::Draining;
        let devices = self.devices.shown(view);
        let name = node.name.as_str();
        let served = view.attachments.iter().filter(|a| a.node == node.id);
        // A node that has just joined counts as up for placement until its heartbeats are missed.
        let (state, since) = match node.state {
            _ if !node.incarnation.has_begun() => {
                (types::NodeState::NotStarted, Some(node.joined_at.into()))
            }
            NodeState::Up => (types::NodeState::Up, view.node_since(node.id)),
            NodeState::Down => (types::NodeState::Down, view.node_since(node.id)),
        };
        ClusterNode {
            id: node.id.0,
            name: name.to_owned(),
            state,
            since,
            admin_state: match node.admin_state {
                AdminState::Active => NodeAdminState::Active,
                AdminState::Absent => NodeAdminState::Absent,
                AdminState::Draining => NodeAdminState::Draining,
            },
            heard_ms_ago: heard(view, node.id),
            roles: node.roles.iter().map(meta::Role::to_string).collect(),
            host: node.labels.host.clone(),
            rack: node.labels.rack.clone(),
            control_address: node.control_address.clone(),
            data_address: node.data_address.clone(),
            version: node.version.clone(),
            joined_at: node.joined_at.into(),
            meta: part(&self.cluster.meta.raft_status(), node.id),
            groups: held.groups,
            groups_total: held.total,
            groups_left: is_draining.then_some(held.left),
            eta_s: is_draining
                .then(|| self.paces.of(Work::Node(node.id)).eta_s())
                .flatten(),
            attachments: served.count(),
            devices: devices.into_iter().filter(|d| d.node == name).collect(),
        }
    }
}

fn heard(view: &View, id: NodeId) -> Option<u64> {
    let heard = view.report.heard.iter().find(|one| one.node == id);
    heard.map(|one| one.ago_ms)
}
