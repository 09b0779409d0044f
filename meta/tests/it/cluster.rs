//! Three nodes in one process, on the code that a cluster of one runs.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use crate::common::{GIB, WAIT_MAX, copy_tree, device, until, until_three_vote};
use meta::command::AttachmentKey;
use meta::net::{MemNetwork, PeerReply, PeerRequest};
use meta::{
    AttachmentOptions, AttachmentSpec, ClusterMap, DeviceId, DeviceReport, Generation, Incarnation,
    MetaConfig, MetaError, MetaNode, NodeId, NodeReport, NodeSpec, NodeState, PoolId, PoolSpec,
    RaftTuning, Refusal, ReplicaState, Start, VolumeSpec,
};

fn tuning() -> RaftTuning {
    RaftTuning {
        heartbeat: Duration::from_millis(50),
        election_timeout: Duration::from_millis(400),
        ..RaftTuning::default()
    }
}

fn spec(id: u64) -> NodeSpec {
    NodeSpec {
        incarnation: Incarnation(id),
        ..NodeSpec::new(NodeId(id), format!("node{id}"))
    }
}

fn config(network: &MemNetwork, id: u64, start: Start, tuning: RaftTuning) -> MetaConfig {
    MetaConfig {
        node: spec(id),
        address: format!("mem:{id}"),
        history: None,
        start,
        tuning,
        transport: network.transport_of(NodeId(id)),
        group_runtime: None,
    }
}

struct Cluster {
    network: MemNetwork,
    dir: tempfile::TempDir,
    nodes: Vec<MetaNode>,
    tuning: RaftTuning,
}

impl Cluster {
    /// One node that leads.
    async fn of_one(tuning: RaftTuning) -> Self {
        let (network, dir) = (MemNetwork::default(), tempfile::tempdir().unwrap());
        let config = config(&network, 1, Start::NewCluster, tuning.clone());
        let node = MetaNode::open(dir.path().join("1"), config).await.unwrap();
        network.connect(NodeId(1), node.peer());
        node.meta().register_device(device(1)).await.unwrap();
        Self {
            network,
            dir,
            nodes: vec![node],
            tuning,
        }
    }

    async fn of_three() -> Self {
        let mut cluster = Self::of_one(tuning()).await;
        for id in [2, 3] {
            cluster.open(id).await;
            cluster.nodes[0]
                .add_learner(NodeId(id), &format!("mem:{id}"))
                .await
                .unwrap();
            let meta = cluster.nodes[0].meta();
            meta.register_node(spec(id)).await.unwrap();
        }
        cluster.nodes[0]
            .set_voters([1, 2, 3].map(NodeId).into())
            .await
            .unwrap();
        cluster
    }

    /// Four nodes of which three vote, chosen by the leader.
    async fn of_four() -> Self {
        let mut cluster = Self::of_one(tuning()).await;
        for id in 1..=4 {
            if id > 1 {
                cluster.open(id).await;
            }
            let node = NodeSpec {
                control_address: format!("mem:{id}"),
                ..spec(id)
            };
            cluster.nodes[0].meta().register_node(node).await.unwrap();
        }
        until_three_vote(&cluster.nodes).await;
        cluster
    }

    async fn open(&mut self, id: u64) {
        let start = Start::Join {
            cluster: self.nodes[0].cluster_uuid(),
        };
        let config = config(&self.network, id, start, self.tuning.clone());
        let node = MetaNode::open(self.path(id), config).await.unwrap();
        self.network.connect(NodeId(id), node.peer());
        self.nodes.push(node);
    }

    fn path(&self, id: u64) -> std::path::PathBuf {
        let dir: &Path = self.dir.path();
        dir.join(id.to_string())
    }

    /// Stops a node and gives back its number.
    async fn stop(&mut self, id: NodeId) {
        let position = self.nodes.iter().position(|node| node.id() == id).unwrap();
        self.network.disconnect(id);
        self.nodes.remove(position).shutdown().await.unwrap();
    }

    async fn leader(&self) -> NodeId {
        until(async || {
            let mut leaders = BTreeSet::new();
            for node in &self.nodes {
                leaders.insert(node.leader().await);
            }
            let agreed = if leaders.len() == 1 {
                leaders.pop_first().flatten()
            } else {
                None
            };
            agreed.filter(|leader| self.nodes.iter().any(|node| node.id() == *leader))
        })
        .await
    }

    fn node(&self, id: NodeId) -> &MetaNode {
        self.nodes.iter().find(|node| node.id() == id).unwrap()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_node_writes_and_reads_what_any_other_was_told() {
    let cluster = Cluster::of_three().await;
    for (number, node) in cluster.nodes.iter().enumerate() {
        let name = format!("disk{number}");
        let made = node
            .meta()
            .create_volume(VolumeSpec::new(&name, GIB))
            .await
            .unwrap();
        for other in &cluster.nodes {
            assert_eq!(
                other.meta().get_volume(&name).await.unwrap(),
                made,
                "read after write, everywhere"
            );
        }
        let refused = node.meta().create_volume(VolumeSpec::new(&name, GIB)).await;
        assert!(
            matches!(refused, Err(MetaError::Refused(Refusal::Volume(_)))),
            "{refused:?}"
        );
    }
    // What a node has read tells that it has taken in the membership before it.
    assert_eq!(cluster.nodes[2].voters(), [1, 2, 3].map(NodeId).into());
    for node in cluster.nodes {
        node.shutdown().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cluster_goes_on_without_its_leader_and_takes_it_back() {
    let mut cluster = Cluster::of_three().await;
    let meta = cluster.nodes[1].meta();
    let before = meta
        .create_volume(VolumeSpec::new("before", GIB))
        .await
        .unwrap();
    let granted = meta.grant_lease("before", NodeId(1)).await.unwrap();
    let first = cluster.leader().await;
    cluster.stop(first).await;
    let meta = cluster.nodes[0].meta();
    assert_eq!(meta.get_volume("before").await.unwrap(), before);
    meta.create_volume(VolumeSpec::new("after", GIB))
        .await
        .unwrap();
    assert_ne!(cluster.leader().await, first);
    let again = meta.grant_lease("before", NodeId(1)).await.unwrap();
    assert!(again.generation > granted.generation);

    cluster.open(first.0).await;
    let back = cluster.node(first).meta();
    let names: Vec<String> = back
        .list_volumes()
        .await
        .unwrap()
        .into_iter()
        .map(|volume| volume.name.into())
        .collect();
    assert_eq!(names, ["after", "before"]);
    for node in cluster.nodes {
        node.shutdown().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn follower_with_an_old_metadata_copy_does_not_harm_the_leader() {
    let mut cluster = Cluster::of_three().await;
    let leader = cluster.leader().await;
    let id = [1, 2, 3]
        .map(NodeId)
        .into_iter()
        .find(|id| *id != leader)
        .unwrap();
    let meta = cluster.node(leader).meta();
    cluster.stop(id).await;
    let (now, old) = (cluster.path(id.0), cluster.path(9));
    copy_tree(&now, &old);
    cluster.open(id.0).await;
    for number in 0..20 {
        let spec = VolumeSpec::new(format!("disk{number}"), GIB);
        meta.create_volume(spec).await.unwrap();
    }
    // It has all of that now, and the leader knows.
    cluster.node(id).meta().get_volume("disk19").await.unwrap();
    cluster.stop(id).await;
    std::fs::remove_dir_all(&now).unwrap();
    std::fs::rename(&old, &now).unwrap();
    cluster.open(id.0).await;
    cluster.node(id).meta().get_volume("disk19").await.unwrap();
    assert_eq!(cluster.node(leader).meta().problem(), None);
    for node in cluster.nodes {
        node.shutdown().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn isolated_leader_neither_writes_nor_serves_stale_reads() {
    let cluster = Cluster::of_three().await;
    let old = cluster.leader().await;
    cluster.network.set_cut_off(old, true);
    let others: Vec<&MetaNode> = cluster
        .nodes
        .iter()
        .filter(|node| node.id() != old)
        .collect();
    until(async || {
        let leader = others[0].leader().await;
        leader.filter(|leader| *leader != old)
    })
    .await;
    others[0]
        .meta()
        .create_volume(VolumeSpec::new("new", GIB))
        .await
        .unwrap();
    // The cut-off node still has no such volume among its records; it must not answer from them.
    let alone = cluster.node(old).meta();
    let stale = tokio::spawn(async move { alone.get_volume("new").await });
    cluster.network.set_cut_off(old, false);
    assert_eq!(stale.await.unwrap().unwrap().name.as_str(), "new");
    for node in cluster.nodes {
        node.shutdown().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_joins_late_is_brought_up_by_a_snapshot() {
    let short_log = RaftTuning {
        snapshot_every_entries: 20,
        keep_entries: 1,
        ..tuning()
    };
    let mut cluster = Cluster::of_one(short_log).await;
    let meta = cluster.nodes[0].meta();
    for number in 0..60 {
        meta.create_volume(VolumeSpec::new(format!("disk{number}"), GIB))
            .await
            .unwrap();
    }
    until(async || {
        cluster.nodes[0]
            .snapshot_index()
            .filter(|index| *index >= 40)
    })
    .await;
    cluster.open(2).await;
    cluster.nodes[0]
        .add_learner(NodeId(2), "mem:2")
        .await
        .unwrap();
    until(async || {
        cluster.nodes[1]
            .snapshot_index()
            .filter(|index| *index >= 40)
    })
    .await;
    assert_eq!(
        cluster.nodes[1].meta().list_volumes().await.unwrap().len(),
        60
    );

    // It keeps what it got, and what came after, over a restart; as a voter it serves alone with node 1.
    cluster.nodes[0]
        .set_voters([1, 2].map(NodeId).into())
        .await
        .unwrap();
    meta.delete_volume("disk0").await.unwrap();
    cluster.stop(NodeId(2)).await;
    cluster.open(2).await;
    assert_eq!(
        cluster.nodes[1]
            .meta()
            .list_unfinished_volumes()
            .await
            .unwrap()
            .len(),
        1
    );
    for node in cluster.nodes {
        node.shutdown().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_held_elsewhere_is_refused_and_can_be_handed_over() {
    let cluster = Cluster::of_three().await;
    let (one, two) = (cluster.nodes[0].meta(), cluster.nodes[1].meta());
    let volume = one
        .create_volume(VolumeSpec::new("disk", GIB))
        .await
        .unwrap()
        .id;
    let lease = one.grant_lease("disk", NodeId(1)).await.unwrap();
    let held = two
        .grant_lease("disk", NodeId(2))
        .await
        .unwrap_err()
        .to_string();
    assert!(
        held.contains("leased to node node1 (generation 1)"),
        "{held}"
    );
    assert_eq!(
        two.renew_lease(volume, NodeId(1), lease.generation)
            .await
            .unwrap(),
        lease
    );
    one.release_lease(volume, NodeId(1), lease.generation)
        .await
        .unwrap();
    assert!(
        one.renew_lease(volume, NodeId(1), lease.generation)
            .await
            .is_err()
    );
    let next = two.grant_lease("disk", NodeId(2)).await.unwrap();
    assert_eq!(next.generation, Generation(2));
    assert!(
        one.renew_lease(volume, NodeId(1), lease.generation)
            .await
            .is_err(),
        "the old generation is refused"
    );
    assert!(
        one.release_lease(volume, NodeId(1), lease.generation)
            .await
            .is_err()
    );
    for node in cluster.nodes {
        node.shutdown().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attachment_of_one_node_is_seen_and_ended_from_another() {
    let cluster = Cluster::of_three().await;
    cluster.nodes[0]
        .meta()
        .create_volume(VolumeSpec::new("disk", GIB))
        .await
        .unwrap();
    let spec = AttachmentSpec {
        volume: "disk".to_owned(),
        node: NodeId(2),
        socket: "/run/disk.sock".to_owned(),
        queues: 4,
        read_only: false,
        options: AttachmentOptions::default(),
    };
    let made = cluster.nodes[1]
        .meta()
        .create_attachment(spec)
        .await
        .unwrap();
    assert_eq!(
        cluster.nodes[2]
            .meta()
            .list_attachments_of(NodeId(2))
            .await
            .unwrap(),
        [made]
    );
    assert_eq!(
        cluster.nodes[2]
            .meta()
            .list_attachments_of(NodeId(1))
            .await
            .unwrap(),
        []
    );
    let key = AttachmentKey::Socket {
        node: NodeId(2),
        socket: "/run/disk.sock".to_owned(),
    };
    cluster.nodes[2]
        .meta()
        .delete_attachment(key)
        .await
        .unwrap();
    assert_eq!(
        cluster.nodes[0].meta().list_attachments().await.unwrap(),
        []
    );
    for node in cluster.nodes {
        node.shutdown().await.unwrap();
    }
}

/// Gives every node a device, and makes a pool of three replicas with a volume.
async fn replicated_pool(cluster: &Cluster) -> PoolId {
    for node in &cluster.nodes[1..] {
        let spec = meta::DeviceSpec {
            node: node.id(),
            ..device(node.id().0)
        };
        node.meta().register_device(spec).await.unwrap();
    }
    let pool = PoolSpec {
        placement_groups: Some(4),
        ..PoolSpec::new("safe", 3)
    };
    let meta = cluster.nodes[0].meta();
    let pool = meta.create_pool(pool).await.unwrap();
    let volume = VolumeSpec {
        pool: Some("safe".to_owned()),
        ..VolumeSpec::new("disk", GIB)
    };
    meta.create_volume(volume).await.unwrap();
    pool.id
}

/// Whether every group of the pool has so many members in sync.
fn in_sync(map: &ClusterMap, pool: PoolId, count: usize) -> bool {
    let mut groups = map.groups().filter(|group| group.pool == pool);
    groups.all(|group| group.in_sync().count() == count)
}

/// Says for the replicas of a map that they have compared everything.
async fn promote_all(map: &ClusterMap, meta: &meta::Meta) {
    for group in map.groups() {
        for member in &group.members {
            if member.state == ReplicaState::Syncing {
                let (group, since) = (group.id(), member.since);
                let (device, incarnation) = (member.device, member.incarnation);
                // Refused if it was promoted already.
                let _ = meta.promote_member(group, device, incarnation, since).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_cut_off_learns_it_and_is_taken_out() {
    let cluster = Cluster::of_three().await;
    let pool = replicated_pool(&cluster).await;
    let away = &cluster.nodes[1];
    let stays = cluster.nodes[0].meta();
    let mut valid = away.meta().watch_heartbeat();
    valid.wait_for(Option::is_some).await.unwrap();

    cluster.network.set_cut_off(away.id(), true);
    let mut map = stays.watch_map();
    let shrunk = tokio::time::timeout(WAIT_MAX, map.wait_for(|map| in_sync(map, pool, 2)));
    let shrunk = shrunk.await.expect("it stays").unwrap().clone();
    assert_eq!(shrunk.node(away.id()).unwrap().state, NodeState::Down);
    let until = away.meta().heartbeat_valid_until().unwrap();
    let left = until.saturating_duration_since(std::time::Instant::now());
    assert!(
        left <= meta::HEARTBEAT_LEASE,
        "it counts from before it was cut off"
    );

    cluster.network.set_cut_off(away.id(), false);
    let heal = async {
        loop {
            let seen = map.borrow_and_update().clone();
            if in_sync(&seen, pool, 3) {
                return seen;
            }
            promote_all(&seen, &away.meta()).await;
            map.changed().await.unwrap();
        }
    };
    let healed = tokio::time::timeout(WAIT_MAX, heal).await;
    let healed = healed.expect("it is never taken in");
    assert_eq!(healed.node(away.id()).unwrap().state, NodeState::Up);

    let events = stays.list_events(0, usize::MAX).await.unwrap();
    let told: Vec<String> = events.iter().map(|event| event.what.to_string()).collect();
    for text in [
        format!("node {} is down", away.id()),
        format!("node {} is up", away.id()),
        "pool safe: all replicas are in sync".to_owned(),
    ] {
        assert!(told.contains(&text), "{text} is not in {told:?}");
    }
    let later = stays.list_events(events[1].number, 2).await.unwrap();
    assert_eq!(later, events[2..4]);
    let health = stays.pool_health(pool).await.unwrap();
    assert_eq!(health, meta::PoolHealth::default());
    for node in cluster.nodes {
        node.shutdown().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_node_shows_the_leaders_reports_and_refuses_forged_ones() {
    let mut cluster = Cluster::of_three().await;
    let word = NodeReport {
        devices: vec![DeviceReport {
            device: DeviceId(1),
            capacity_bytes: 100 * GIB,
            used_bytes: GIB,
            is_bad: false,
            is_full: false,
        }],
        problems: Vec::new(),
    };
    for node in &cluster.nodes {
        node.meta().tell(word.clone()).await.unwrap();
    }
    for node in &cluster.nodes {
        let meta = node.meta();
        let all = until(async || {
            let report = meta.leader_report().await.unwrap();
            (report.heard.len() == 3).then_some(report)
        });
        let words: Vec<_> = all.await.words.into_iter().map(|one| one.word).collect();
        assert_eq!(words, vec![word.clone(); 3]);
        let status = meta.raft_status();
        assert_eq!(status.voters, [1, 2, 3].map(NodeId).into());
        assert_eq!(status.leader, Some(cluster.leader().await));
    }
    let forged = PeerRequest::Tell {
        node: NodeId(2),
        word: NodeReport::default(),
    };
    let reply = cluster.nodes[0].peer().handle_from(NodeId(3), forged).await;
    assert!(matches!(reply, PeerReply::Tell(Err(_))), "{reply:?}");

    // Without a quorum the records that a node has applied are read all the same.
    cluster.stop(NodeId(3)).await;
    cluster.stop(NodeId(2)).await;
    let meta = cluster.nodes[0].meta();
    let events = meta.applied().events(0, usize::MAX).unwrap();
    assert!(!events.is_empty());
    assert_eq!(meta.applied().volumes().unwrap(), []);
    assert_eq!(meta.applied().attachments().unwrap(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removed_node_and_another_may_fail_once_the_removal_returns() {
    let mut cluster = Cluster::of_four().await;
    let meta = cluster.nodes[0].meta();
    let voters = cluster.nodes[0].voters();
    let mut others = voters.into_iter().filter(|node| *node != NodeId(1));
    let (gone, lost) = (others.next().unwrap(), others.next().unwrap());
    meta.remove_node(gone).await.unwrap();
    cluster.stop(gone).await;
    cluster.stop(lost).await;
    meta.create_volume(VolumeSpec::new("disk", GIB))
        .await
        .unwrap();
}
