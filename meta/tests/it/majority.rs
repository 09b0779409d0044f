//! What is told to somebody who waits while the metadata have no majority, and to a node that is not wanted
//! any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::cluster::Cluster;
use crate::common::{GIB, WAIT_MAX, until};
use meta::net::{BoxFuture, PeerReply, PeerRequest, Transport, TransportError};
use meta::refusal::MapRefusal;
use meta::{
    Confirmed, GroupCall, GroupReply, Level, MetaError, NodeId, RaftMessage, Refusal, VolumeSpec,
};
use openraft::BasicNode;

/// Somebody who does not wait long. An election takes less.
const DEADLINE: Duration = Duration::from_secs(2);

/// The way out of a node, which may hold back what would be kept, and let through all else.
struct GatedTransport {
    inner: Arc<dyn Transport>,
    holds: Arc<AtomicBool>,
}

impl Transport for GatedTransport {
    fn call<'a>(
        &'a self,
        target: NodeId,
        address: &'a BasicNode,
        request: PeerRequest,
    ) -> BoxFuture<'a, Result<PeerReply, TransportError>> {
        let is_held = match &request {
            PeerRequest::Raft(RaftMessage::AppendEntries(rpc)) => !rpc.entries.is_empty(),
            _ => false,
        };
        if is_held && self.holds.load(Ordering::Relaxed) {
            let detail = "held back".to_owned();
            return Box::pin(async move { Err(TransportError::Unreachable { target, detail }) });
        }
        self.inner.call(target, address, request)
    }

    fn call_group<'a>(
        &'a self,
        target: NodeId,
        address: &'a BasicNode,
        call: GroupCall,
    ) -> BoxFuture<'a, Result<GroupReply, TransportError>> {
        self.inner.call_group(target, address, call)
    }
}

/// Nodes whose way out may be held back.
async fn cluster_of(count: u64) -> (Cluster, Arc<AtomicBool>) {
    let holds = Arc::new(AtomicBool::new(false));
    let gate = Arc::clone(&holds);
    let transport = move |inner| -> Arc<dyn Transport> {
        let holds = Arc::clone(&gate);
        Arc::new(GatedTransport { inner, holds })
    };
    let cluster = Cluster::of(count, Level::KNOWN, Box::new(transport)).await;
    (cluster, holds)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn somebody_who_waits_is_told_who_is_missing() {
    for left in [1, 3] {
        let (mut cluster, _) = cluster_of(3).await;
        for id in [1, 2, 3] {
            if id != left {
                cluster.stop(id).await;
            }
        }
        let meta = cluster.nodes[0].meta().within(DEADLINE);
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
        let reader = meta.or_last_known();
        assert_eq!(reader.list_volumes().await.unwrap(), []);
        assert!(
            matches!(reader.confirmed(), Confirmed::Ago(_)),
            "{:?}",
            reader.confirmed()
        );
        // It was true that nothing was changed.
        for id in [1, 2, 3] {
            if id != left {
                cluster.join(id, Level::KNOWN).await;
            }
        }
        let patient = cluster.nodes[0].meta();
        let reader = patient.or_last_known();
        assert_eq!(reader.list_volumes().await.unwrap(), []);
        assert_eq!(reader.confirmed(), Confirmed::Now);
        patient.within(WAIT_MAX).create_volume(spec).await.unwrap();
        cluster.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn command_the_leader_cannot_commit_has_an_unknown_outcome() {
    let (cluster, holds) = cluster_of(3).await;
    let meta = cluster.nodes[0].meta();
    meta.create_volume(VolumeSpec::new("one", GIB))
        .await
        .unwrap();
    for node in &cluster.nodes {
        // All have what there is: from now on nobody needs more.
        node.meta().get_volume("one").await.unwrap();
    }
    holds.store(true, Ordering::Relaxed);
    let told = meta
        .within(DEADLINE)
        .create_volume(VolumeSpec::new("two", GIB))
        .await
        .unwrap_err();
    assert!(matches!(told, MetaError::Interrupted { .. }), "{told:?}");
    assert!(
        told.to_string().contains("may or may not be done"),
        "{told}"
    );
    holds.store(false, Ordering::Relaxed);
    until(async || meta.get_volume("two").await.ok()).await;
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn somebody_who_waits_does_not_notice_that_the_leader_changes() {
    let (mut cluster, _) = cluster_of(3).await;
    cluster.stop(1).await;
    for node in &cluster.nodes {
        let name = format!("disk{}", node.id());
        let meta = node.meta().within(WAIT_MAX);
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
async fn node_removed_while_away_learns_of_it_from_any_other_node() {
    let (mut cluster, _) = cluster_of(4).await;
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
    cluster.join(away, Level::KNOWN).await;
    let removed = cluster.nodes.last().unwrap().meta();
    let why = tokio::time::timeout(WAIT_MAX, removed.ended()).await;
    let why = why.expect("it never learned of it");
    let MetaError::Refused(Refusal::Map(MapRefusal::WasRemoved { node, .. })) = &why else {
        panic!("{why:?}");
    };
    assert_eq!(node.0, away);
    let text = why.to_string();
    assert!(
        text.starts_with(&format!("node node{away} was removed")),
        "{text}"
    );
    let other = cluster.nodes[0].meta();
    let early = tokio::time::timeout(Duration::from_secs(3), other.ended()).await;
    assert!(early.is_err(), "the others stay");
    cluster.end().await;
}
