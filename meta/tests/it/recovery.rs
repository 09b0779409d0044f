//! A majority of the nodes is gone for good, or all metadata are and there is a backup.

use std::path::Path;

use meta::recovery::{self, Backup, BackupError, RecoveryError};
use meta::{DeviceEvidence, Epoch, Level, MetaConfig, MetaNode, NodeId, VolumeSpec};
use uuid::Uuid;

use crate::common::cluster::Cluster;
use crate::common::{GIB, device, open, open_with_device, until};

const HISTORY: Uuid = Uuid::from_u128(7);

async fn volumes(node: &MetaNode) -> Vec<String> {
    let volumes = node.meta().list_volumes().await.unwrap();
    volumes
        .iter()
        .map(|volume| volume.name.to_string())
        .collect()
}

async fn create(node: &MetaNode, name: &str) -> u64 {
    let made = node.meta().create_volume(VolumeSpec::new(name, GIB)).await;
    made.unwrap().id.0
}

/// A backup of a node with a volume, and the number of the volume that was made after it.
async fn backed_up(dir: &Path) -> (Vec<u8>, u64) {
    let node = open_with_device(dir).await;
    create(&node, "before").await;
    node.meta().grant_lease("before", node.id()).await.unwrap();
    let backup = node.meta().backup(None).await.unwrap();
    let since = create(&node, "since").await;
    node.shutdown().await.unwrap();
    (backup, since)
}

#[tokio::test]
async fn a_backup_brings_back_what_was_there_when_it_was_taken() {
    let dir = tempfile::tempdir().unwrap();
    let (bytes, since) = backed_up(&dir.path().join("first")).await;
    let backup = Backup::parse(&bytes).unwrap();
    assert!(backup.header.is_alone());
    let restored = dir.path().join("second");
    recovery::restore(&restored, &backup, (NodeId(1), ""), HISTORY).unwrap();
    let node = open(&restored).await;
    assert_eq!(volumes(&node).await, ["before"]);
    let cluster = node.meta().cluster().await.unwrap();
    assert_eq!(cluster.uuid, backup.header.cluster);
    let begun = cluster.recovery.unwrap();
    assert_eq!(
        (begun.history, begun.backup_at),
        (HISTORY, Some(backup.header.taken_at))
    );
    let early = node
        .meta()
        .create_volume(VolumeSpec::new("early", GIB))
        .await;
    assert!(
        early.is_err(),
        "which replicas count is not decided: {early:?}"
    );
    node.meta().register_device(device(1)).await.unwrap();
    let map = node.meta().map();
    let evidence = DeviceEvidence {
        device: map.devices().next().unwrap().id,
        incarnation: node.meta().incarnation(),
        epoch: Epoch(1),
        in_sync: map.groups().map(|group| (group.id(), Epoch(1))).collect(),
        layers: Default::default(),
    };
    node.meta().report_evidence(evidence).await.unwrap();
    node.meta().choose_replicas(false).await.unwrap();
    assert!(
        create(&node, "more").await > since,
        "no number is given twice"
    );
    let lease = node.meta().grant_lease("before", node.id()).await.unwrap();
    assert!(lease.generation.0 > 2, "leases may have been granted since");
    node.shutdown().await.unwrap();
    // It is as any other from now on.
    let node = open(&restored).await;
    assert_eq!(volumes(&node).await, ["before", "more"]);
    let again = node.meta().backup(None).await.unwrap();
    assert!(Backup::parse(&again).is_ok());
    node.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_damaged_backup_is_refused_and_makes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (bytes, _) = backed_up(&dir.path().join("first")).await;
    let damaged = |bytes: &[u8]| matches!(Backup::parse(bytes), Err(BackupError::Damaged(_)));
    for at in [40, 200, bytes.len() / 2, bytes.len() - 1] {
        let mut flipped = bytes.clone();
        flipped[at] ^= 1;
        assert!(damaged(&flipped), "byte {at}");
        assert!(damaged(&bytes[..at]), "{at} bytes");
    }
    assert!(matches!(
        Backup::parse(b"#!/bin/sh\n"),
        Err(BackupError::NotOne)
    ));
    assert!(matches!(Backup::parse(&[]), Err(BackupError::NotOne)));
    let newer = String::from_utf8_lossy(&bytes).replacen("\"format\":1", "\"format\":9", 1);
    assert!(matches!(
        Backup::parse(newer.as_bytes()),
        Err(BackupError::Newer { found: 9 })
    ));
    // Nor over what is there, nor for a node that it does not know.
    let backup = Backup::parse(&bytes).unwrap();
    let first = dir.path().join("first");
    assert!(recovery::restore(&first, &backup, (NodeId(1), ""), HISTORY).is_err());
    let other = recovery::restore(&dir.path().join("x"), &backup, (NodeId(5), ""), HISTORY);
    assert!(
        matches!(&other, Err(RecoveryError::UnknownNode { known, .. }) if known.len() == 1),
        "{other:?}"
    );
}

#[tokio::test]
async fn nothing_goes_on_where_there_are_no_metadata_or_they_are_in_use() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(
        recovery::position(&dir.path().join("none")),
        Err(RecoveryError::NoMetadata { .. })
    ));
    assert!(
        !dir.path().join("none").exists(),
        "nothing is made by looking"
    );
    let node = open(dir.path()).await;
    assert!(matches!(
        recovery::go_on_alone(dir.path(), "", (HISTORY, false)),
        Err(RecoveryError::Open(_))
    ));
    node.shutdown().await.unwrap();
}

/// What a node keeps must be of the history that it says it is of: its log would be cut where it differs from
/// the others', and what it has applied would stay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metadata_of_another_history_are_not_opened() {
    let mut cluster = Cluster::of(3, Level::KNOWN, Box::new(|transport| transport)).await;
    for id in [1, 2, 3] {
        cluster.stop(id).await;
    }
    let uuid = recovery::position(&cluster.dir_of(2)).unwrap().cluster;
    let open = async |history| {
        let config = MetaConfig {
            node: meta::NodeSpec::new(NodeId(2), "node2"),
            address: "mem:2".to_owned(),
            history,
            start: meta::Start::Join { cluster: uuid },
            ..MetaConfig::embedded("node2")
        };
        let opened = MetaNode::open(cluster.dir_of(2), config).await;
        opened.map(drop).map_err(|error| error.to_string())
    };
    let told = open(Some(HISTORY)).await.unwrap_err();
    assert!(
        told.contains(&format!("cluster rejoin {HISTORY}")),
        "{told}"
    );
    recovery::go_on_alone(&cluster.dir_of(2), "mem:2", (HISTORY, false)).unwrap();
    assert!(open(None).await.is_err());
    assert!(open(Some(Uuid::from_u128(8))).await.is_err());
    open(Some(HISTORY)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_of_three_goes_on_and_the_second_follows_it() {
    let mut cluster = Cluster::of(3, Level::KNOWN, Box::new(|transport| transport)).await;
    create(&cluster.nodes[0], "before").await;
    let applied = cluster.nodes[0].applied_index();
    until(async || {
        (cluster
            .nodes
            .iter()
            .all(|one| one.applied_index() >= applied))
        .then_some(())
    })
    .await;
    cluster.stop(1).await;
    cluster.stop(2).await;
    cluster.stop(3).await;
    let positions: Vec<_> = [2, 3]
        .map(|id| recovery::position(&cluster.dir_of(id)).unwrap())
        .into();
    assert!(
        positions
            .iter()
            .all(|one| one.voters.len() == 3 && one.nodes.len() == 3)
    );
    assert!(positions.iter().all(|one| one.last.1 >= applied));
    recovery::go_on_alone(&cluster.dir_of(3), "mem:3", (HISTORY, false)).unwrap();
    let behind = recovery::position(&cluster.dir_of(3)).unwrap();
    assert!(
        behind.last > positions[1].last,
        "of both it is the newest now"
    );
    cluster.history = Some(HISTORY);
    let spec = cluster.start_again(3, Level::KNOWN).await;
    let three = cluster.nodes[0].meta();
    three.register_node(spec).await.unwrap();
    assert_eq!(volumes(&cluster.nodes[0]).await, ["before"]);
    // The second one begins anew: its log is not one that this one was made from.
    std::fs::remove_dir_all(cluster.dir_of(2)).unwrap();
    let spec = cluster.start_again(2, Level::KNOWN).await;
    three.register_node(spec).await.unwrap();
    create(&cluster.nodes[0], "after").await;
    until(async || (volumes(&cluster.nodes[1]).await == ["after", "before"]).then_some(())).await;
    let mut spare = device(3);
    spare.node = NodeId(3);
    three.register_device(spare).await.unwrap();
    // The first one never comes back: with its vote gone, two are not made to wait for it.
    three
        .remove_lost(meta::Lost::Node(NodeId(1)))
        .await
        .unwrap();
    let nodes = three.list_nodes().await.unwrap();
    assert_eq!(nodes.len(), 2);
    cluster.end().await;
}

#[tokio::test]
async fn nothing_is_lost_however_often_a_node_goes_on_alone() {
    let dir = tempfile::tempdir().unwrap();
    let node = MetaNode::open(dir.path(), MetaConfig::embedded("test"))
        .await
        .unwrap();
    node.meta().register_device(device(1)).await.unwrap();
    for number in 0..20 {
        create(&node, &format!("v{number}")).await;
    }
    node.shutdown().await.unwrap();
    for history in 1..=3 {
        recovery::go_on_alone(dir.path(), "", (Uuid::from_u128(history), false)).unwrap();
    }
    let node = open(dir.path()).await;
    assert_eq!(volumes(&node).await.len(), 20);
    let cluster = node.meta().cluster().await.unwrap();
    assert_eq!(cluster.recovery.unwrap().history, Uuid::from_u128(3));
    node.shutdown().await.unwrap();
}
