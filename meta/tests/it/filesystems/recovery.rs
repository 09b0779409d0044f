//! The metadata go on without a majority of their nodes: filesystems whose names are left go on with them,
//! the others are lost, and are told so.

use meta::recovery::{self, Backup};
use meta::{FilesystemState, Meta, NodeId};
use uuid::Uuid;

use super::*;

const HISTORY: Uuid = Uuid::from_u128(7);

async fn state_of(meta: &Meta, name: &str) -> FilesystemState {
    meta.get_filesystem(name).await.unwrap().state
}

/// The last entry that a node has applied of the group that keeps a filesystem's names.
fn applied(node: &meta::MetaNode, filesystem: &Filesystem) -> Option<u64> {
    Some(status(&node.meta(), filesystem)?.applied_index)
}

/// Deletes a filesystem, and waits until nothing of it is left.
async fn delete(meta: &Meta, name: &str) {
    meta.delete_filesystem(name).await.unwrap();
    until(async || meta.get_filesystem(name).await.is_err().then_some(())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_go_on_with_the_last_of_three_nodes() {
    let mut cluster = Cluster::of(3, Level::KNOWN, Box::new(|transport| transport)).await;
    let one = cluster.nodes[0].meta();
    let tree = create(&one, "tree").await.unwrap();
    let host = Host::open(&one, &tree).await;
    make_many(&host, 4, 1..=25).await;
    // Each of the three has them.
    let last = applied(&cluster.nodes[0], &tree).unwrap();
    until(async || {
        let mut all = cluster.nodes.iter();
        all.all(|node| applied(node, &tree) >= Some(last))
            .then_some(())
    })
    .await;
    for id in [1, 2, 3] {
        cluster.stop(id).await;
    }
    let position = recovery::position(&cluster.dir_of(3)).unwrap();
    assert!(position.filesystems["tree"].is_some(), "{position:?}");
    recovery::go_on_alone(&cluster.dir_of(3), "mem:3", (HISTORY, false)).unwrap();
    cluster.history = Some(HISTORY);
    let spec = cluster.start_again(3, Level::KNOWN).await;
    let three = cluster.nodes[0].meta();
    three.register_node(spec).await.unwrap();
    assert_eq!(state_of(&three, "tree").await, FilesystemState::Ready);
    // Those sessions have ended with their nodes' starts.
    let again = Host::open(&three, &tree).await;
    assert!(
        again.session.0 > host.session.0 + 1000,
        "{:?}",
        again.session
    );
    assert_eq!(again.names().await.len(), 100);
    let Ok(Outcome::Inode(made)) = again.make(0, 1, "since").await else {
        panic!("a filesystem that goes on takes changes");
    };
    assert!(made.ino.0 > 1 << 32, "{made:?}");
    // The second one gets the names anew, and votes again.
    std::fs::remove_dir_all(cluster.dir_of(2)).unwrap();
    let spec = cluster.start_again(2, Level::KNOWN).await;
    three.register_node(spec).await.unwrap();
    let last = applied(&cluster.nodes[0], &tree);
    until(async || (applied(&cluster.nodes[1], &tree) >= last).then_some(())).await;
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_filesystem_whose_names_no_node_has_any_more_can_only_be_deleted() {
    let mut cluster = Cluster::of(4, Level::KNOWN, Box::new(|transport| transport)).await;
    let one = cluster.nodes[0].meta();
    let tree = create(&one, "tree").await.unwrap();
    let host = Host::open(&one, &tree).await;
    make_many(&host, 1, 1..=5).await;
    let map = one.map();
    let voters = &map.namespace_groups().next().unwrap().voters;
    let without = (1..=4).find(|id| !voters.contains(&NodeId(*id)));
    let without = without.expect("three of four vote");
    for id in 1..=4 {
        cluster.stop(id).await;
    }
    let dir = cluster.dir_of(without);
    let position = recovery::position(&dir).unwrap();
    assert_eq!(position.filesystems["tree"], None);
    let address = format!("mem:{without}");
    recovery::go_on_alone(&dir, &address, (HISTORY, false)).unwrap();
    cluster.history = Some(HISTORY);
    let spec = cluster.start_again(without, Level::KNOWN).await;
    let meta = cluster.nodes[0].meta();
    meta.register_node(spec).await.unwrap();
    assert_eq!(state_of(&meta, "tree").await, FilesystemState::Lost);
    let refused = create(&meta, "tree").await.unwrap_err();
    assert!(
        refused.to_string().contains("is lost") && refused.to_string().contains("fs delete"),
        "{refused}"
    );
    delete(&meta, "tree").await;
    let anew = create(&meta, "tree").await.unwrap();
    assert!(anew.id > tree.id);
    let host = Host::open(&meta, &anew).await;
    assert_eq!(host.names().await.len(), 0);
    host.make(0, 1, "first").await.unwrap();
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_holds_no_names() {
    let dir = tempfile::tempdir().unwrap();
    let node = open_with_device(&dir.path().join("first")).await;
    create(&node.meta(), "tree").await.unwrap();
    let backup = node.meta().backup(None).await.unwrap();
    node.shutdown().await.unwrap();
    let restored = dir.path().join("second");
    let backup = Backup::parse(&backup).unwrap();
    recovery::restore(&restored, &backup, (NodeId(1), ""), HISTORY).unwrap();
    let node = open(&restored).await;
    assert_eq!(state_of(&node.meta(), "tree").await, FilesystemState::Lost);
    delete(&node.meta(), "tree").await;
    create(&node.meta(), "tree").await.unwrap();
    node.shutdown().await.unwrap();
}
