//! One node: first start, restart, a kill, and a data directory that is not as it should be.

use std::path::Path;

use crate::common::{GIB, attachment, device, open, open_with_device};
use meta::{
    AttachmentKey, Generation, MetaConfig, MetaError, MetaNode, NodeId, OpenError, Start,
    VolumeSpec, VolumeState,
};

fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_dir(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[tokio::test]
async fn first_start_creates_a_one_node_cluster_with_a_default_pool() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(dir.path()).await;
    let meta = node.meta();
    let cluster = meta.cluster().await.unwrap();
    assert_eq!(cluster.uuid, node.cluster_uuid());
    let nodes = meta.list_nodes().await.unwrap();
    assert_eq!(
        (nodes.len(), nodes[0].id, nodes[0].roles.len()),
        (1, NodeId(1), 4)
    );
    let pools = meta.list_pools().await.unwrap();
    assert_eq!(
        (pools.len(), pools[0].name.as_str(), pools[0].replicas),
        (1, meta::DEFAULT_POOL, 1)
    );
    assert_eq!(node.leader().await, Some(NodeId(1)));
    node.shutdown().await.unwrap();
}

#[tokio::test]
async fn everything_is_there_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let node = open_with_device(dir.path()).await;
    let meta = node.meta();
    let volume = meta
        .create_volume(VolumeSpec::new("disk", 10 * GIB))
        .await
        .unwrap();
    let attached = meta
        .create_attachment(attachment("disk", "/run/disk.sock"))
        .await
        .unwrap();
    let lease = meta.grant_lease("disk", node.id()).await.unwrap();
    let before = (
        meta.cluster().await.unwrap(),
        meta.list_devices().await.unwrap(),
    );
    node.shutdown().await.unwrap();

    let node = open(dir.path()).await;
    let meta = node.meta();
    assert_eq!(meta.get_volume("disk").await.unwrap(), volume);
    assert_eq!(
        meta.list_attachments_of(NodeId(1)).await.unwrap(),
        [attached]
    );
    assert_eq!(meta.get_lease(volume.id).await.unwrap(), Some(lease));
    let (cluster, devices) = &before;
    assert_eq!(meta.list_devices().await.unwrap(), *devices);
    let now = meta.cluster().await.unwrap();
    assert_eq!(
        (now.uuid, now.created_at),
        (cluster.uuid, cluster.created_at)
    );
    // The node has a new incarnation, which the map tells.
    assert!(now.epoch > cluster.epoch);
    let again = meta.grant_lease("disk", node.id()).await.unwrap();
    assert_eq!(
        again.generation,
        Generation(2),
        "a restarted daemon writes with a new generation"
    );
    node.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_killed_node_comes_back_with_everything_it_acknowledged() {
    let dir = tempfile::tempdir().unwrap();
    let node = open_with_device(dir.path()).await;
    let meta = node.meta();
    for round in 0..5 {
        meta.create_volume(VolumeSpec::new(format!("disk{round}"), GIB))
            .await
            .unwrap();
        let deleted = meta
            .create_volume(VolumeSpec::new("short-lived", GIB))
            .await
            .unwrap();
        meta.delete_volume("short-lived").await.unwrap();
        if round == 2 {
            node.begin_snapshot().await.unwrap();
        }
        // The directory of a running process, as it is at this moment: what a kill leaves.
        let killed = tempfile::tempdir().unwrap();
        copy_dir(dir.path(), killed.path());
        let copy = open(killed.path()).await;
        assert_eq!(copy.cluster_uuid(), node.cluster_uuid());
        let volumes = copy.meta().list_volumes().await.unwrap();
        assert_eq!(volumes, meta.list_volumes().await.unwrap());
        assert_eq!(volumes.len(), round + 2);
        let unfinished = copy.meta().list_unfinished_volumes().await.unwrap();
        assert_eq!(
            unfinished
                .iter()
                .map(|volume| volume.id)
                .collect::<Vec<_>>(),
            [deleted.id]
        );
        copy.meta().volume_data_dropped(deleted.id).await.unwrap();
        assert!(copy.meta().get_volume("short-lived").await.is_err());
        copy.shutdown().await.unwrap();
        meta.volume_data_dropped(deleted.id).await.unwrap();
    }
    node.shutdown().await.unwrap();
}

#[tokio::test]
async fn deletion_takes_two_steps_and_each_may_be_repeated() {
    let dir = tempfile::tempdir().unwrap();
    let node = open_with_device(dir.path()).await;
    let meta = node.meta();
    let volume = meta
        .create_volume(VolumeSpec::new("disk", GIB))
        .await
        .unwrap();
    let attached = meta
        .create_attachment(attachment("disk", "/run/disk.sock"))
        .await
        .unwrap();
    let refused = meta.delete_volume("disk").await.unwrap_err().to_string();
    assert!(
        refused.contains("/run/disk.sock") && refused.contains("penstock detach"),
        "{refused}"
    );
    meta.delete_attachment(AttachmentKey::Id(attached.id))
        .await
        .unwrap();
    for _ in 0..2 {
        let deleting = meta.delete_volume("disk").await.unwrap();
        assert_eq!(
            (deleting.state, &deleting.layers),
            (VolumeState::Deleting, &volume.layers)
        );
    }
    assert!(
        meta.create_volume(VolumeSpec::new("disk", GIB))
            .await
            .is_err(),
        "the name is taken until the data are gone"
    );
    for _ in 0..2 {
        meta.volume_data_dropped(volume.id).await.unwrap();
    }
    let new = meta
        .create_volume(VolumeSpec::new("disk", GIB))
        .await
        .unwrap();
    assert!(
        new.id > volume.id && new.top_layer() > volume.top_layer(),
        "numbers are never used again"
    );
    node.shutdown().await.unwrap();
}

#[tokio::test]
async fn two_processes_on_one_directory_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(dir.path()).await;
    let error = MetaNode::open(dir.path(), MetaConfig::embedded("other"))
        .await
        .err()
        .unwrap();
    assert!(matches!(error, OpenError::Locked { .. }), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains(dir.path().to_str().unwrap()) && text.contains("--data"),
        "{text}"
    );
    assert_eq!(
        node.meta().list_pools().await.unwrap().len(),
        1,
        "the first goes on"
    );
    node.shutdown().await.unwrap();
    open(dir.path()).await.shutdown().await.unwrap();
}

#[tokio::test]
async fn another_node_or_cluster_does_not_open_the_directory() {
    let dir = tempfile::tempdir().unwrap();
    open(dir.path()).await.shutdown().await.unwrap();
    let mut config = MetaConfig::embedded("test");
    config.node.id = NodeId(7);
    let error = MetaNode::open(dir.path(), config.clone()).await;
    let error = error.err().unwrap();
    assert!(matches!(error, OpenError::OneOfSeveral { .. }), "{error:?}");
    config.start = Start::Join {
        cluster: uuid::Uuid::from_u128(5),
    };
    let error = MetaNode::open(dir.path(), config).await.err().unwrap();
    assert!(
        matches!(
            error,
            OpenError::OtherNode {
                found: NodeId(1),
                configured: NodeId(7),
                ..
            }
        ),
        "{error:?}"
    );
    let mut config = MetaConfig::embedded("test");
    config.start = Start::Join {
        cluster: uuid::Uuid::from_u128(5),
    };
    let error = MetaNode::open(dir.path(), config).await.err().unwrap();
    assert!(matches!(error, OpenError::OtherCluster { .. }), "{error:?}");
    open(dir.path()).await.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_node_with_peers_is_not_opened_as_a_cluster_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = MetaConfig::embedded("test");
    config.address = "127.0.0.1:7470".to_owned();
    config.start = Start::Found {
        cluster: uuid::Uuid::from_u128(5),
        replicas: 1,
        min_in_sync: 1,
    };
    let founded = MetaNode::open(dir.path(), config).await.unwrap();
    founded.shutdown().await.unwrap();
    let config = MetaConfig::embedded("test");
    let error = MetaNode::open(dir.path(), config).await.err().unwrap();
    assert!(matches!(error, OpenError::OneOfSeveral { .. }), "{error:?}");
}

#[tokio::test]
async fn clients_of_a_stopped_node_are_told_so() {
    let dir = tempfile::tempdir().unwrap();
    let node = open_with_device(dir.path()).await;
    let meta = node.meta();
    node.shutdown().await.unwrap();
    assert!(matches!(meta.list_volumes().await, Err(MetaError::Stopped)));
    assert!(matches!(
        meta.create_volume(VolumeSpec::new("disk", GIB)).await,
        Err(MetaError::Stopped)
    ));
    // A client that lives on does not keep the directory in use.
    open(dir.path()).await.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_device_that_is_back_keeps_its_number_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(dir.path()).await;
    let meta = node.meta();
    let first = meta.register_device(device(1)).await.unwrap();
    let epoch = meta.cluster().await.unwrap().epoch;
    assert_eq!(meta.register_device(device(1)).await.unwrap(), first);
    assert_eq!(meta.cluster().await.unwrap().epoch, epoch);
    let groups = meta
        .list_placement_groups(meta::DEFAULT_POOL)
        .await
        .unwrap();
    assert!(
        groups
            .iter()
            .all(|group| group.members.len() == 1 && group.member(first.id).unwrap().is_in_sync())
    );
    node.shutdown().await.unwrap();
}

/// A handler of a server may be moved between threads while it waits.
#[tokio::test]
async fn calls_can_be_awaited_in_spawned_tasks() {
    let dir = tempfile::tempdir().unwrap();
    let node = open_with_device(dir.path()).await;
    let meta = node.meta();
    let task = tokio::spawn(async move {
        meta.create_volume(VolumeSpec::new("disk", GIB)).await?;
        let lease = meta.grant_lease("disk", NodeId(1)).await?;
        meta.renew_lease(lease.volume, NodeId(1), lease.generation)
            .await?;
        meta.list_placement_groups(meta::DEFAULT_POOL).await?;
        meta.get_volume("disk").await
    });
    assert_eq!(task.await.unwrap().unwrap().size_bytes, GIB);
    let other = tempfile::tempdir().unwrap();
    let path = other.path().to_owned();
    let opened =
        tokio::spawn(async move { MetaNode::open(path, MetaConfig::embedded("test")).await });
    let opened = opened.await.unwrap().unwrap();
    tokio::spawn(opened.shutdown()).await.unwrap().unwrap();
    node.shutdown().await.unwrap();
}
