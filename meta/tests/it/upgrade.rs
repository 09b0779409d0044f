//! Nodes of different versions in one cluster, as while it is upgraded.

use crate::common::cluster::Cluster;
use crate::common::{GIB, WAIT_MAX, until};
use meta::refusal::MapRefusal;
use meta::{Level, MetaError, NodeId, Refusal, VolumeSpec};

/// Level of a program before this one.
const BEFORE: Level = Level(Level::KNOWN.0 - 1);

/// The feature level of a cluster, as a node has applied it.
fn level(cluster: &Cluster, node: u64) -> Level {
    let node = cluster.nodes.iter().find(|one| one.id() == NodeId(node));
    node.unwrap().meta().map().level()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rolling_upgrade_enables_features_once_all_nodes_know_them() {
    let mut cluster = Cluster::of(3, BEFORE, Box::new(|way| way)).await;
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
            assert_eq!(level(&cluster, id), BEFORE);
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
    let spec = cluster.join(3, BEFORE).await;
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
