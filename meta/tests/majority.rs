//! What is told to somebody who waits while the metadata have no majority, and to a node that is not wanted any more.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{GIB, device};
use meta::net::{BoxFuture, MemNetwork, PeerReply, PeerRequest, Transport, TransportError};
use meta::refusal::MapRefusal;
use meta::{
    Incarnation, MetaConfig, MetaError, MetaNode, NodeId, NodeSpec, RaftTuning, Refusal, Start,
    VolumeSpec,
};
use openraft::BasicNode;

/// Bounds how long a test waits for what must happen; far beyond what it takes.
const PATIENCE: Duration = Duration::from_secs(60);
/// Somebody who does not wait long. An election takes less.
const HASTE: Duration = Duration::from_secs(2);

/// The way out of a node, which may hold back what would be kept, and let through all else.
struct Door {
    inner: Arc<dyn Transport>,
    holds: Arc<AtomicBool>,
}

impl Transport for Door {
    fn call<'a>(
        &'a self,
        target: NodeId,
        address: &'a BasicNode,
        request: PeerRequest,
    ) -> BoxFuture<'a, Result<PeerReply, TransportError>> {
        let is_held = match &request {
            PeerRequest::AppendEntries(rpc) => !rpc.entries.is_empty(),
            _ => false,
        };
        if is_held && self.holds.load(Ordering::Relaxed) {
            let detail = "held back".to_owned();
            return Box::pin(async move { Err(TransportError::Unreachable { target, detail }) });
        }
        self.inner.call(target, address, request)
    }
}

struct Cluster {
    network: MemNetwork,
    dir: tempfile::TempDir,
    nodes: Vec<MetaNode>,
    holds: Arc<AtomicBool>,
}

fn spec(id: u64) -> NodeSpec {
    NodeSpec {
        control_address: format!("mem:{id}"),
        incarnation: Incarnation(id),
        ..NodeSpec::new(NodeId(id), format!("node{id}"))
    }
}

impl Cluster {
    /// The first node leads.
    async fn of(count: u64) -> Self {
        let mut cluster = Self {
            network: MemNetwork::default(),
            dir: tempfile::tempdir().unwrap(),
            nodes: Vec::new(),
            holds: Arc::default(),
        };
        cluster.open(1, Start::NewCluster).await;
        let leader = cluster.nodes[0].meta();
        leader.register_device(device(1)).await.unwrap();
        let uuid = cluster.nodes[0].cluster_uuid();
        for id in 2..=count {
            cluster.open(id, Start::Join { cluster: uuid }).await;
            leader.register_node(spec(id)).await.unwrap();
        }
        until(async || (cluster.nodes[0].voters().len() == 3).then_some(())).await;
        cluster
    }

    async fn open(&mut self, id: u64, start: Start) {
        let dir: &Path = self.dir.path();
        let config = MetaConfig {
            node: spec(id),
            address: format!("mem:{id}"),
            start,
            tuning: RaftTuning {
                heartbeat: Duration::from_millis(50),
                election_timeout: Duration::from_millis(400),
                ..RaftTuning::default()
            },
            transport: Arc::new(Door {
                inner: self.network.transport_of(NodeId(id)),
                holds: Arc::clone(&self.holds),
            }),
        };
        let node = MetaNode::open(dir.join(id.to_string()), config)
            .await
            .unwrap();
        self.network.connect(NodeId(id), node.peer());
        self.nodes.push(node);
    }

    async fn stop(&mut self, id: u64) {
        let position = self.nodes.iter().position(|node| node.id() == NodeId(id));
        self.network.disconnect(NodeId(id));
        let node = self.nodes.remove(position.unwrap());
        node.shutdown().await.unwrap();
    }

    async fn end(self) {
        for node in self.nodes {
            node.shutdown().await.unwrap();
        }
    }
}

/// Waits until a question has an answer.
async fn until<T>(ask: impl AsyncFn() -> Option<T>) -> T {
    let wait = async {
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait)
        .await
        .expect("it never happened")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn somebody_who_waits_is_told_whom_the_majority_lacks() {
    for left in [1, 3] {
        let mut cluster = Cluster::of(3).await;
        for id in [1, 2, 3] {
            if id != left {
                cluster.stop(id).await;
            }
        }
        let meta = cluster.nodes[0].meta().within(HASTE);
        let spec = VolumeSpec::new("disk", GIB);
        let told = meta.create_volume(spec.clone()).await.unwrap_err();
        assert!(
            matches!(
                told,
                MetaError::NoLeader {
                    is_command: true,
                    ..
                }
            ),
            "{told:?}"
        );
        let told = told.to_string();
        assert!(
            told.contains("no majority, and nothing was changed: 2 of the 3 voters"),
            "{told}"
        );
        let away: Vec<String> = [1, 2, 3]
            .into_iter()
            .filter(|id| *id != left)
            .map(|id| format!("node{id}"))
            .collect();
        assert!(
            told.contains(&format!("does not reach {}:", away.join(", "))),
            "{told}"
        );
        assert!(told.contains(&format!("node{left} (this node)")), "{told}");
        let told = meta.list_volumes().await.unwrap_err().to_string();
        assert!(told.contains("no majority: 2 of the 3 voters"), "{told}");
        // It was true that nothing was changed.
        let uuid = cluster.nodes[0].cluster_uuid();
        for id in [1, 2, 3] {
            if id != left {
                cluster.open(id, Start::Join { cluster: uuid }).await;
            }
        }
        let patient = cluster.nodes[0].meta();
        assert_eq!(patient.list_volumes().await.unwrap(), []);
        patient.within(PATIENCE).create_volume(spec).await.unwrap();
        cluster.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_that_its_leader_cannot_commit_is_told_as_of_unknown_outcome() {
    let cluster = Cluster::of(3).await;
    let meta = cluster.nodes[0].meta();
    meta.create_volume(VolumeSpec::new("one", GIB))
        .await
        .unwrap();
    for node in &cluster.nodes {
        // All have what there is: from now on nobody needs more.
        node.meta().get_volume("one").await.unwrap();
    }
    cluster.holds.store(true, Ordering::Relaxed);
    let told = meta
        .within(HASTE)
        .create_volume(VolumeSpec::new("two", GIB))
        .await
        .unwrap_err();
    assert!(matches!(told, MetaError::Interrupted { .. }), "{told:?}");
    assert!(
        told.to_string().contains("may or may not be done"),
        "{told}"
    );
    cluster.holds.store(false, Ordering::Relaxed);
    until(async || meta.get_volume("two").await.ok()).await;
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn somebody_who_waits_does_not_notice_that_the_leader_changes() {
    let mut cluster = Cluster::of(3).await;
    cluster.stop(1).await;
    for node in &cluster.nodes {
        let name = format!("disk{}", node.id());
        let meta = node.meta().within(PATIENCE);
        meta.create_volume(VolumeSpec::new(name, GIB))
            .await
            .unwrap();
    }
    assert_eq!(
        cluster.nodes[0].meta().list_volumes().await.unwrap().len(),
        2
    );
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_was_removed_while_it_was_away_learns_of_it_from_any_other() {
    let mut cluster = Cluster::of(4).await;
    let uuid = cluster.nodes[0].cluster_uuid();
    let away = until(async || {
        let voters = cluster.nodes[0].voters();
        [2, 3, 4]
            .into_iter()
            .find(|id| voters.contains(&NodeId(*id)))
    });
    let away = away.await;
    cluster.stop(away).await;
    let leader = cluster.nodes[0].meta();
    leader.remove_node(NodeId(away)).await.unwrap();
    // The leader that it knew is gone.
    cluster.stop(1).await;
    cluster.open(away, Start::Join { cluster: uuid }).await;
    let removed = cluster.nodes.last().unwrap().meta();
    let why = tokio::time::timeout(PATIENCE, removed.ended()).await;
    let why = why.expect("it never learned of it");
    assert!(
        matches!(&why, MetaError::Refused(Refusal::Map(MapRefusal::WasRemoved { node })) if node.0 == away),
        "{why:?}"
    );
    let other = cluster.nodes[0].meta();
    let early = tokio::time::timeout(Duration::from_secs(3), other.ended()).await;
    assert!(early.is_err(), "the others stay");
    cluster.end().await;
}
