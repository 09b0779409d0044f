//! How much volumes hold: told to the leader, and asked of it.

use crate::common::cluster::Cluster;
use crate::common::{GIB, until};
use meta::net::{PeerReply, PeerRequest};
use meta::{
    Level, NodeId, NodeSpec, NodeStored, PoolId, Role, StoredReport, Volume, VolumeSpec,
    VolumeStored,
};

/// A volume, and what a node may tell of it: every group whose index leaves this rest by three.
struct Told {
    volume: Volume,
    pool: PoolId,
    groups: Vec<u64>,
}

impl Told {
    async fn new(cluster: &Cluster) -> Self {
        let meta = cluster.nodes[0].meta();
        let volume = meta
            .create_volume(VolumeSpec::new("disk", GIB))
            .await
            .unwrap();
        let map = meta.map();
        let pool = map
            .pools()
            .find(|pool| pool.name == volume.pool)
            .unwrap()
            .id;
        let groups = map.groups().filter(|group| group.pool == pool);
        let groups: Vec<u64> = groups.map(|group| group.id().to_u64()).collect();
        assert!(groups.len() > 3);
        Self {
            volume,
            pool,
            groups,
        }
    }

    fn share(&self, nth: usize, bytes: u64) -> NodeStored {
        let groups = self.groups.iter().skip(nth).step_by(3);
        let volume = VolumeStored {
            volume: self.volume.id,
            pool: self.pool,
            bytes: Some(bytes),
        };
        NodeStored {
            groups: groups.copied().collect(),
            volumes: vec![volume],
            is_cut: false,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_node_hears_the_sum_of_what_all_have_counted() {
    let mut cluster = Cluster::of(3, Level::KNOWN, Box::new(|way| way)).await;
    let told = Told::new(&cluster).await;
    for (nth, node) in cluster.nodes.iter().enumerate() {
        let known = node.meta().stored().await.unwrap();
        assert_eq!(
            known,
            StoredReport::default(),
            "some groups are not counted"
        );
        let share = told.share(nth, 100 << nth);
        node.meta().tell_stored(share).await.unwrap();
    }
    for node in &cluster.nodes {
        // An answer may be some seconds old.
        let known = until(async || {
            let known = node.meta().stored().await.unwrap();
            (known.pools == [told.pool]).then_some(known)
        });
        let known = known.await;
        let bytes: Vec<_> = known
            .volumes
            .iter()
            .map(|one| (one.volume, one.bytes))
            .collect();
        assert_eq!(bytes, [(told.volume.id, Some(700))]);
    }
    let forged = PeerRequest::TellStored {
        node: NodeId(2),
        told: NodeStored::default(),
    };
    let reply = cluster.nodes[0].peer().handle_from(NodeId(3), forged).await;
    assert!(matches!(reply, PeerReply::Tell(Err(_))), "{reply:?}");

    // A host without storage cannot make the sums wrong.
    let host = NodeSpec {
        roles: [Role::Host].into(),
        ..NodeSpec::new(NodeId(9), "host")
    };
    cluster.nodes[0].meta().register_node(host).await.unwrap();
    let claims = PeerRequest::TellStored {
        node: NodeId(9),
        told: NodeStored {
            groups: told.groups.clone(),
            ..NodeStored::default()
        },
    };
    let reply = cluster.nodes[0].peer().handle_from(NodeId(9), claims).await;
    assert!(matches!(reply, PeerReply::Tell(Ok(()))), "{reply:?}");
    for (nth, node) in cluster.nodes.iter().enumerate() {
        let share = told.share(nth, 200 << nth);
        node.meta().tell_stored(share).await.unwrap();
    }
    let known = until(async || {
        let known = cluster.nodes[0].meta().stored().await.unwrap();
        let bytes = known.volumes.first()?.bytes?;
        (bytes == 1400).then_some(bytes)
    });
    assert_eq!(known.await, 1400);

    // Who leads next knows nothing of it until it is told.
    let leader = cluster.nodes[0].meta().raft_status().leader.unwrap();
    cluster.stop(leader.0).await;
    let rest = cluster.nodes[0].meta();
    let known = until(async || rest.stored().await.ok()).await;
    assert_eq!(known, StoredReport::default());
    cluster.end().await;
}
