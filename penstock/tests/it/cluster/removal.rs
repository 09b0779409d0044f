//! Nodes and volumes that are removed, and what goes with them.

use std::fs;

use super::{Cluster, THIN};
use crate::harness::{Daemon, eventually, one_error, serve_with, text};

#[test]
fn a_removed_node_ends_by_itself_and_touches_nothing() {
    let mut cluster = Cluster::of_three();
    // One is away meanwhile, and learns of it when it starts.
    cluster.kill(3);
    let remove = |node: &str| cluster.node(1).run(&["node", "remove", node, "--yes"]);
    eventually(|| remove("node3").status.success());
    let data = cluster.data(3);
    let device = data.join("devices/0.img");
    let touched = || fs::metadata(&device).unwrap().modified().unwrap();
    let before = touched();
    let told = one_error(&serve_with(&data, &THIN), 1);
    assert!(
        told.contains("node node3 was removed from the cluster") && told.contains("penstock join"),
        "{told}"
    );
    assert_eq!(touched(), before);
    // The other one runs.
    assert!(remove("node2").status.success());
    let two = cluster.nodes[1].take().unwrap();
    assert_eq!(two.wait().code(), Some(1));
    cluster.node(1).ok(&["volume", "list"]);
}

#[test]
fn node_with_last_copies_is_removed_only_if_loss_is_accepted() {
    let mut cluster = Cluster::found("1");
    cluster.add(2);
    cluster.node(1).ok(&["volume", "create", "disk", "64M"]);
    let lost = ["node", "remove", "node2", "--accept-data-loss", "--yes"];
    let told = cluster.node(1).refused(&lost);
    assert!(told.contains("is up and holds data"), "{told}");
    // The metadata stay with the first node: of two nodes only that one votes.
    cluster.kill(2);
    let is_down = || cluster.node(1).json(&["node", "show", "node2"])["state"] == "down";
    eventually(is_down);
    let told = cluster
        .node(1)
        .refused(&["node", "remove", "node2", "--yes"]);
    assert!(told.contains("only node 'node2' has"), "{told}");
    assert!(told.contains("of volume \"disk\""), "{told}");
    assert!(
        told.contains("repeat this with --accept-data-loss"),
        "{told}"
    );
    let told = one_error(&cluster.node(1).run(&lost[..4]), 2);
    assert!(told.contains("all data that only it has"), "{told}");
    cluster.node(1).ok(&lost);
    let nodes = cluster.node(1).json(&["node", "list"]);
    assert_eq!(nodes.as_array().unwrap().len(), 1);
    let events = cluster.node(1).ok(&["events"]);
    assert!(
        events.contains("gave up data that only node 2 had"),
        "{events}"
    );
    assert!(events.contains("have no complete replica"), "{events}");
    // The volume is there, with a hole where that was.
    let out = cluster.dir.path().join("out.raw");
    cluster
        .node(1)
        .ok(&["volume", "export", "disk", text(&out)]);
}

#[test]
fn data_of_a_deleted_volume_go_from_every_node() {
    let mut cluster = Cluster::of_three();
    let image = cluster.dir.path().join("in.raw");
    fs::write(&image, vec![7; 8 << 20]).unwrap();
    cluster
        .node(1)
        .ok(&["volume", "import", "disk", text(&image)]);
    let used = |daemon: &Daemon| daemon.json(&["status"])["used_bytes"].as_u64().unwrap();
    for node in 1..=3 {
        eventually(|| used(cluster.node(node)) >= 8 << 20);
    }
    cluster.node(1).ok(&["volume", "delete", "disk", "--yes"]);
    eventually(|| used(cluster.node(1)) < 8 << 20);
    // Another looks when it starts, and from time to time.
    cluster.stop(2);
    cluster.start(2);
    eventually(|| used(cluster.node(2)) < 8 << 20);
}
