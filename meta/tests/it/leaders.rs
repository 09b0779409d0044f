//! A node that no leader reaches: which nodes it asks and believes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use meta::net::{BoxFuture, PeerReply, PeerRequest, ProposeError, Transport, TransportError};
use meta::{GroupCall, GroupReply, Level, NodeId, NodeSpec, Role};
use openraft::BasicNode;

use crate::common::cluster::Cluster;
use crate::common::until;

/// A node with the role `host` alone.
const HOST: NodeId = NodeId(4);

/// Questions that nodes asked each other, and the answers.
#[derive(Default)]
struct Network {
    /// Questions who leads, by the node that was asked.
    searches: Mutex<BTreeMap<NodeId, usize>>,
    /// Questions for a removal likewise.
    removals: Mutex<BTreeMap<NodeId, usize>>,
    /// Nodes are named that do not exist.
    misleads: AtomicBool,
    /// Nodes that were called and do not exist.
    strangers: AtomicUsize,
    /// Heartbeats and searches get no answer.
    holds: AtomicBool,
    /// A heartbeat began while its node searched for a leader.
    beat_beside_search: AtomicBool,
    /// Most nodes that one node asked at a time.
    asked_at_once_max: AtomicUsize,
}

impl Network {
    fn count(counts: &Mutex<BTreeMap<NodeId, usize>>, node: NodeId) {
        *counts.lock().unwrap().entry(node).or_default() += 1;
    }

    fn of(counts: &Mutex<BTreeMap<NodeId, usize>>, node: NodeId) -> usize {
        counts.lock().unwrap().get(&node).copied().unwrap_or(0)
    }
}

/// The way out of one node.
struct Way {
    inner: Arc<dyn Transport>,
    network: Arc<Network>,
    searching: AtomicUsize,
}

/// Counts a question until it is answered or given up.
struct Searching<'a>(&'a AtomicUsize);

impl Drop for Searching<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Way {
    fn hold_search(&self) -> Searching<'_> {
        let count = self.searching.fetch_add(1, Ordering::Relaxed) + 1;
        let most = &self.network.asked_at_once_max;
        most.fetch_max(count, Ordering::Relaxed);
        Searching(&self.searching)
    }
}

/// Answers of a hostile host.
fn lie(request: &PeerRequest) -> Result<PeerReply, TransportError> {
    match request {
        PeerRequest::WasRemoved { .. } => Ok(PeerReply::WasRemoved(true)),
        PeerRequest::Raft(_) => Err(TransportError::Gone { target: HOST }),
        _ => Err(TransportError::Removed { target: HOST }),
    }
}

impl Transport for Way {
    fn call<'a>(
        &'a self,
        target: NodeId,
        address: &'a BasicNode,
        request: PeerRequest,
    ) -> BoxFuture<'a, Result<PeerReply, TransportError>> {
        let network = &self.network;
        let is_search = matches!(request, PeerRequest::FindLeader);
        match request {
            PeerRequest::FindLeader => Network::count(&network.searches, target),
            PeerRequest::WasRemoved { .. } => Network::count(&network.removals, target),
            PeerRequest::ReadIndex if network.misleads.load(Ordering::Relaxed) => {
                let stranger = NodeId(4000 + target.0);
                let error = ProposeError::NotLeader {
                    leader: Some(stranger),
                };
                let is_stranger = target.0 >= 4000;
                let known = usize::from(is_stranger);
                network.strangers.fetch_add(known, Ordering::Relaxed);
                return Box::pin(async move { Ok(PeerReply::ReadIndex(Err(error))) });
            }
            PeerRequest::Heartbeat { .. } if self.searching.load(Ordering::Relaxed) > 0 => {
                network.beat_beside_search.store(true, Ordering::Relaxed);
            }
            _ => {}
        }
        let is_held = network.holds.load(Ordering::Relaxed);
        if is_held && is_search {
            return Box::pin(async {
                let _searching = self.hold_search();
                std::future::pending().await
            });
        }
        if is_held && matches!(request, PeerRequest::Heartbeat { .. }) {
            return Box::pin(std::future::pending());
        }
        if target == HOST {
            let answer = lie(&request);
            return Box::pin(async move { answer });
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

/// Three nodes that vote.
async fn cluster() -> (Cluster, Arc<Network>) {
    let network = Arc::<Network>::default();
    let of = Arc::clone(&network);
    let gate = move |inner| -> Arc<dyn Transport> {
        Arc::new(Way {
            inner,
            network: Arc::clone(&of),
            searching: AtomicUsize::default(),
        })
    };
    (Cluster::of(3, Level::KNOWN, Box::new(gate)).await, network)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_says_so_removes_nobody_and_is_not_even_asked() {
    let (mut cluster, network) = cluster().await;
    let host = NodeSpec {
        roles: [Role::Host].into(),
        control_address: "mem:4".to_owned(),
        ..NodeSpec::new(HOST, "host")
    };
    let left = cluster.nodes[0].meta();
    left.register_node(host).await.unwrap();
    until(async || left.raft_status().learners.contains(&HOST).then_some(())).await;
    until(async || left.map().node(HOST).map(drop)).await;
    // No majority is left: nobody leads.
    for id in [2, 3] {
        cluster.stop(id).await;
    }
    let rounds = |counts| Network::of(counts, NodeId(2));
    until(async || {
        let has_asked = rounds(&network.searches) >= 2 && rounds(&network.removals) >= 2;
        has_asked.then_some(())
    })
    .await;
    let asked = [&network.searches, &network.removals].map(|counts| Network::of(counts, HOST));
    assert_eq!(asked, [0, 0]);
    let ended = tokio::time::timeout(Duration::ZERO, left.ended()).await;
    assert!(ended.is_err(), "{ended:?}");
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heartbeats_go_on_while_a_leader_is_searched_for() {
    let (cluster, network) = cluster().await;
    network.holds.store(true, Ordering::Relaxed);
    let beats = &network.beat_beside_search;
    until(async || beats.load(Ordering::Relaxed).then_some(())).await;
    let most = network.asked_at_once_max.load(Ordering::Relaxed);
    assert!(
        most <= 2,
        "one search at a time asks the two others: {most}"
    );
    network.holds.store(false, Ordering::Relaxed);
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_does_not_exist_is_not_asked() {
    let (cluster, network) = cluster().await;
    network.misleads.store(true, Ordering::Relaxed);
    for node in &cluster.nodes {
        let asked = node.meta().within(Duration::from_secs(1));
        // The leader answers by itself.
        let _ = asked.list_volumes().await;
    }
    assert_eq!(network.strangers.load(Ordering::Relaxed), 0);
    network.misleads.store(false, Ordering::Relaxed);
    cluster.end().await;
}
