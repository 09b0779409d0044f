//! Nodes of the cluster, as any of them tells.

use api::failure::{Failure, Result};
use api::types::{self, ClusterNode, NodeAdminState, NodeRemoveQuery};
use meta::{AdminState, Meta, NodeId, NodeState};
use service::failures::{done_unseen, meta_failure};
use service::found::Work;
use service::view::{View, part};

use super::node::Node;

impl Node {
    /// All nodes.
    pub async fn nodes(&self, reader: &Meta) -> Result<Vec<ClusterNode>> {
        let view = self.view_by(reader).await?;
        let nodes = view.map.nodes();
        Ok(nodes.map(|node| self.node_shown(&view, node)).collect())
    }

    /// One node, by name or number.
    pub async fn node(&self, name: &str) -> Result<ClusterNode> {
        let view = self.view().await?;
        let node = view.node(name)?;
        Ok(self.node_shown(&view, node))
    }

    /// Moves all data off a node, or calls that off.
    pub async fn node_drain(&self, name: &str, on: bool) -> Result<ClusterNode> {
        let id = self.view().await?.node(name)?.id;
        self.asked.drain_node(id, on).await.map_err(meta_failure)?;
        self.node(&id.to_string()).await.map_err(done_unseen)
    }

    /// Removes a node: an unused one, one whose data is given up, or one that may be up and serve guests.
    pub async fn node_remove(&self, name: &str, query: &NodeRemoveQuery) -> Result<()> {
        let id = self.view().await?.node(name)?.id;
        let removed = match (query.accept_data_loss, query.evict) {
            (true, true) => {
                return Err(Failure::invalid(
                    "evict and accept_data_loss exclude each other",
                    "leave out evict if the node is down, or accept_data_loss if it is up",
                ));
            }
            (true, false) => self.asked.remove_lost(meta::Lost::Node(id)).await,
            (false, true) => self.asked.evict_node(id).await.map(drop),
            (false, false) => self.asked.remove_node(id).await.map(drop),
        };
        removed.map_err(meta_failure)
    }

    fn node_shown(&self, view: &View, node: &meta::Node) -> ClusterNode {
        let held = view.held_by(node.id);
        let is_draining = node.admin_state == AdminState::Draining;
        let devices = self.devices_shown(view);
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
            meta: part(&self.meta.raft_status(), node.id),
            groups: held.groups,
            groups_total: held.total,
            groups_left: is_draining.then_some(held.left),
            eta_s: is_draining
                .then(|| self.monitor.pace(Work::Node(node.id)).eta_s())
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
