//! Nodes of different versions in one cluster, as while it is upgraded.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::common::cluster::Cluster;
use crate::common::{GIB, WAIT_MAX, until};
use meta::net::{BoxFuture, PeerReply, PeerRequest, Transport, TransportError};
use meta::refusal::MapRefusal;
use meta::{GroupCall, GroupReply, Level, MetaError, NodeId, Refusal, VolumeSpec};

/// The feature level of a cluster, as a node has applied it.
fn level(cluster: &Cluster, node: u64) -> Level {
    let node = cluster.nodes.iter().find(|one| one.id() == NodeId(node));
    node.unwrap().meta().map().level()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rolling_upgrade_enables_features_once_all_nodes_know_them() {
    let mut cluster = Cluster::of(3, Level::FIRST, Box::new(|way| way)).await;
    for id in [3, 2, 1] {
        let told = cluster.nodes[0].meta();
        let spec = VolumeSpec::new(format!("before{id}"), GIB);
        told.create_volume(spec).await.unwrap();
        cluster.stop(id).await;
        cluster.join(id, Level::KNOWN).await;
        // Whoever leads has heard the new start.
        let known = async || {
            let meta = cluster.nodes.last().unwrap().meta();
            let report = meta.leader_report().await.ok()?;
            let mut levels = report.levels.iter();
            levels.find(|one| one.node == NodeId(id) && one.level == Level::KNOWN)?;
            Some(())
        };
        until(known).await;
        if id > 1 {
            assert_eq!(level(&cluster, id), Level::FIRST);
        }
    }
    for id in [1, 2, 3] {
        until(async || (level(&cluster, id) == Level::KNOWN).then_some(())).await;
    }
    let volumes = cluster.nodes[0].meta().list_volumes().await.unwrap();
    assert_eq!(volumes.len(), 3);
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_that_is_too_old_for_the_cluster_is_turned_away() {
    let mut cluster = Cluster::of(3, Level::KNOWN, Box::new(|way| way)).await;
    assert_eq!(level(&cluster, 2), Level::KNOWN);
    cluster.stop(3).await;
    let spec = cluster.join(3, Level::FIRST).await;
    let refused = cluster.nodes[0].meta().register_node(spec).await;
    let why = refused.unwrap_err();
    assert!(
        matches!(&why, MetaError::Refused(Refusal::Map(MapRefusal::TooOld { node, .. })) if node.0 == 3),
        "{why:?}"
    );
    let old = cluster.nodes.last().unwrap().meta();
    let ended = tokio::time::timeout(WAIT_MAX, old.ended()).await;
    let ended = ended.expect("it never learned of it").to_string();
    assert!(ended.contains("install a newer version"), "{ended}");
    cluster.end().await;
}

/// A way out that counts questions which the previous version cannot read.
struct Counting {
    way: Arc<dyn Transport>,
    count: Arc<AtomicU32>,
}

impl Transport for Counting {
    fn call<'a>(
        &'a self,
        target: NodeId,
        address: &'a openraft::BasicNode,
        request: PeerRequest,
    ) -> BoxFuture<'a, Result<PeerReply, TransportError>> {
        if matches!(request, PeerRequest::FindLeader) {
            self.count.fetch_add(1, Ordering::SeqCst);
        }
        self.way.call(target, address, request)
    }

    fn call_group<'a>(
        &'a self,
        target: NodeId,
        address: &'a openraft::BasicNode,
        call: GroupCall,
    ) -> BoxFuture<'a, Result<GroupReply, TransportError>> {
        self.way.call_group(target, address, call)
    }
}

/// A cluster of a level of which one follower is left, and the number of questions who leads.
async fn alone_at(level: Level) -> (Cluster, Arc<AtomicU32>) {
    let count = Arc::<AtomicU32>::default();
    let counted = Arc::clone(&count);
    let gate = move |way| {
        let count = Arc::clone(&counted);
        Arc::new(Counting { way, count }) as Arc<dyn Transport>
    };
    let mut cluster = Cluster::of(3, level, Box::new(gate)).await;
    let leader = cluster.nodes[0].meta().raft_status().leader.unwrap().0;
    let follower = (1..=3).find(|id| *id != leader).unwrap();
    cluster.stop(follower).await;
    cluster.stop(leader).await;
    (cluster, count)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_ask_who_leads_once_all_of_them_know_the_question() {
    let (cluster, asked) = alone_at(Level(Level::OFFERS.0 - 1)).await;
    // Several heartbeats have no answer meanwhile.
    let meta = cluster.nodes[0].meta().within(Duration::from_secs(5));
    let unread = meta.list_nodes().await;
    assert!(
        matches!(unread, Err(MetaError::NoLeader { .. })),
        "{unread:?}"
    );
    assert_eq!(asked.load(Ordering::SeqCst), 0);
    cluster.end().await;

    let (cluster, asked) = alone_at(Level::OFFERS).await;
    until(async || (asked.load(Ordering::SeqCst) > 0).then_some(())).await;
    cluster.end().await;
}
