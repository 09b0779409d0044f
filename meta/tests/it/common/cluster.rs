//! Several nodes in one process, of which the leader chooses who votes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use meta::net::{MemNetwork, Transport};
use meta::{Incarnation, Level, MetaConfig, MetaNode, NodeId, NodeSpec, RaftTuning, Start};

use super::{device, until_three_vote};

/// What stands between a node and its way out.
pub type Gate = dyn Fn(Arc<dyn Transport>) -> Arc<dyn Transport>;

/// The nodes that run.
pub struct Cluster {
    pub network: MemNetwork,
    dir: tempfile::TempDir,
    gate: Box<Gate>,
    /// How often nodes have been started.
    starts: u64,
    uuid: uuid::Uuid,
    /// That of nodes that are started from now on.
    pub history: Option<uuid::Uuid>,
    pub nodes: Vec<MetaNode>,
}

impl Cluster {
    /// The first node leads, and up to three vote. All know `level`.
    pub async fn of(count: u64, level: Level, gate: Box<Gate>) -> Self {
        let mut cluster = Self::empty(gate);
        cluster.start(1, Start::NewCluster, level).await;
        cluster.uuid = cluster.nodes[0].cluster_uuid();
        let leader = cluster.nodes[0].meta();
        leader.register_device(device(1)).await.unwrap();
        for id in 2..=count {
            let spec = cluster.join(id, level).await;
            leader.register_node(spec).await.unwrap();
        }
        if count >= 3 {
            until_three_vote(&cluster.nodes).await;
        }
        cluster
    }

    /// No node yet.
    pub fn empty(gate: Box<Gate>) -> Self {
        Self {
            network: MemNetwork::default(),
            dir: tempfile::tempdir().unwrap(),
            gate,
            starts: 0,
            uuid: uuid::Uuid::nil(),
            history: None,
            nodes: Vec::new(),
        }
    }

    /// Starts the first node of a cluster of several.
    pub async fn found(&mut self, cluster: uuid::Uuid, level: Level) {
        self.uuid = cluster;
        let start = Start::Found {
            cluster,
            replicas: 3,
            min_in_sync: 2,
        };
        self.start(1, start, level).await;
    }

    /// Starts a node for the first time or again. The start that it tells of.
    pub async fn join(&mut self, id: u64, level: Level) -> NodeSpec {
        let cluster = self.nodes[0].cluster_uuid();
        self.start(id, Start::Join { cluster }, level).await
    }

    /// Starts a node again when none may be running.
    pub async fn start_again(&mut self, id: u64, level: Level) -> NodeSpec {
        let cluster = self.uuid;
        self.start(id, Start::Join { cluster }, level).await
    }

    /// Where a node keeps its metadata.
    pub fn dir_of(&self, id: u64) -> PathBuf {
        self.dir.path().join(id.to_string())
    }

    async fn start(&mut self, id: u64, start: Start, level: Level) -> NodeSpec {
        let dir: &Path = &self.dir_of(id);
        self.starts += 1;
        let spec = NodeSpec {
            control_address: format!("mem:{id}"),
            incarnation: Incarnation(self.starts),
            level,
            ..NodeSpec::new(NodeId(id), format!("node{id}"))
        };
        let config = MetaConfig {
            node: spec.clone(),
            address: format!("mem:{id}"),
            history: self.history,
            start,
            tuning: RaftTuning {
                heartbeat: Duration::from_millis(50),
                election_timeout: Duration::from_millis(400),
                ..RaftTuning::default()
            },
            transport: (self.gate)(self.network.transport_of(NodeId(id))),
            group_runtime: None,
        };
        let node = MetaNode::open(dir, config).await.unwrap();
        self.network.connect(NodeId(id), node.peer());
        self.nodes.push(node);
        spec
    }

    /// Stops a node, in order.
    pub async fn stop(&mut self, id: u64) {
        let position = self.nodes.iter().position(|node| node.id() == NodeId(id));
        self.network.disconnect(NodeId(id));
        let node = self.nodes.remove(position.unwrap());
        node.shutdown().await.unwrap();
    }

    /// Stops all.
    pub async fn end(self) {
        for node in self.nodes {
            node.shutdown().await.unwrap();
        }
    }
}
