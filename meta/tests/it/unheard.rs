//! A node that reaches the others and that none of them reaches.

use std::time::Duration;

use meta::{EventKind, Level, Meta, MetaNode, NodeId, NodeState, VolumeSpec};

use crate::common::cluster::Cluster;
use crate::common::{GIB, until};

/// Somebody who does not wait long. An election takes less.
const DEADLINE: Duration = Duration::from_secs(4);

async fn create(meta: &Meta, name: String) -> bool {
    let meta = meta.within(DEADLINE);
    meta.create_volume(VolumeSpec::new(name, GIB)).await.is_ok()
}

fn node(cluster: &Cluster, id: NodeId) -> &MetaNode {
    let mut nodes = cluster.nodes.iter();
    nodes.find(|node| node.id() == id).unwrap()
}

fn state_of(meta: &Meta, id: NodeId) -> NodeState {
    meta.map().node(id).unwrap().state
}

/// Three nodes. No message of the others reaches one of them: the leader, or a follower.
async fn unheard_node(leads: bool) -> (Cluster, NodeId, Meta) {
    let cluster = Cluster::of(3, Level::KNOWN, Box::new(|way| way)).await;
    let leader = until(async || cluster.nodes[0].leader().await).await;
    let others = [1, 2, 3].map(NodeId);
    let mut others = others.into_iter().filter(|id| *id != leader);
    let (id, witness) = match leads {
        true => (leader, others.next().unwrap()),
        false => (others.next().unwrap(), leader),
    };
    let witness = node(&cluster, witness).meta();
    until(async || (state_of(&witness, id) == NodeState::Up).then_some(())).await;
    cluster.network.set_unheard(id, true);
    (cluster, id, witness)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_that_nobody_reaches_is_down_and_the_others_go_on() {
    for leads in [false, true] {
        let (cluster, id, others) = unheard_node(leads).await;
        until(async || (state_of(&others, id) == NodeState::Down).then_some(())).await;
        for number in 0..20 {
            assert!(
                create(&others, format!("disk{number}")).await,
                "{leads}: {number}"
            );
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let events = others.list_events(0, usize::MAX).await.unwrap();
        let lost = events.iter().filter_map(|event| match event.what {
            EventKind::NodeDown { node, .. } => Some(node),
            _ => None,
        });
        assert_eq!(lost.collect::<Vec<_>>(), [id], "{leads}");

        let alone = node(&cluster, id).meta();
        let problem = until(async || alone.problem()).await;
        assert!(
            problem.contains("nothing that other nodes send"),
            "{problem}"
        );
        assert_eq!(alone.raft_status().leader, None);
        let asked = alone.within(DEADLINE).list_volumes().await;
        let told = asked.unwrap_err().to_string();
        assert!(told.contains("firewall"), "{told}");

        cluster.network.set_unheard(id, false);
        until(async || (state_of(&others, id) == NodeState::Up).then_some(())).await;
        until(async || alone.problem().is_none().then_some(())).await;
        assert_eq!(alone.list_volumes().await.unwrap().len(), 20);
        cluster.end().await;
    }
}
