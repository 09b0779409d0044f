//! Nodes start again, wait for others, and do not begin anew.

use std::fs;

use super::{Cluster, waits_and};
use crate::harness::{one_error, run, serve, text};

#[test]
fn three_nodes_are_one_cluster_and_each_may_restart() {
    let mut cluster = Cluster::of_three();
    let id = cluster.node(1).json(&["status"])["cluster_id"].clone();
    for node in 1..=3 {
        assert_eq!(cluster.node(node).json(&["status"])["cluster_id"], id);
    }
    let made = cluster.node(2).json(&["volume", "create", "disk", "64M"]);
    let seen = cluster.node(3).json(&["volume", "show", "disk"]);
    assert_eq!(seen["id"], made["id"]);
    for node in [3, 2, 1] {
        cluster.stop(node);
        // The others go on without it, whoever led.
        let other = cluster.node(node % 3 + 1);
        other.ok(&["volume", "create", &format!("without-{node}"), "64M"]);
        cluster.start(node);
        let volumes = cluster.node(node).json(&["volume", "list"]);
        assert_eq!(volumes.as_array().unwrap().len(), 5 - node);
    }
    cluster.node(3).ok(&["volume", "delete", "disk", "--yes"]);
    cluster.node(1).refused(&["volume", "show", "disk"]);
    (1..=3).for_each(|node| cluster.stop(node));
}

#[test]
fn a_node_that_is_elsewhere_after_a_restart_is_found_there() {
    let mut cluster = Cluster::of_three();
    cluster.stop(3);
    let elsewhere = cluster.address(33);
    cluster.start_with(3, &["--listen", &elsewhere]);
    cluster.node(3).ok(&["volume", "create", "disk", "64M"]);
    // Two are a majority only if they reach each other.
    cluster.stop(1);
    let volumes = cluster.node(3).json(&["volume", "list"]);
    assert_eq!(volumes.as_array().unwrap().len(), 1);
    cluster.start(1);
}

#[test]
fn daemon_waiting_for_its_cluster_is_not_reported_as_absent() {
    let mut cluster = Cluster::found("1");
    let joined = cluster.join(2, &cluster.token());
    assert!(joined.status.success(), "{joined:?}");
    cluster.stop(1);
    let data = cluster.data(2);
    let asked = waits_and(&data, || {
        let health = run(&["health", "--data", text(&data)]);
        assert_eq!(health.status.code(), Some(1));
        let told = String::from_utf8(health.stdout).unwrap();
        assert!(told.contains("this node is starting, and "), "{told}");
        let status = run(&["status", "--json", "--data", text(&data)]);
        let status: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
        assert_eq!(status["is_starting"], true, "{status}");
        let told = one_error(&run(&["volume", "list", "--data", text(&data)]), 1);
        assert!(told.contains("this node is starting"), "{told}");
    });
    assert!(asked);
    let told = one_error(&run(&["health", "--data", text(&data)]), 1);
    assert!(told.contains("no daemon answers on"), "{told}");
}

#[test]
fn node_that_lost_its_metadata_does_not_bootstrap_again() {
    let mut cluster = Cluster::found("1");
    cluster.stop(1);
    let data = cluster.data(1);
    for lost in ["meta", "devices"] {
        fs::remove_dir_all(data.join(lost)).unwrap();
    }
    let told = one_error(&serve(&data), 1);
    assert!(told.contains("node remove 1"), "{told}");
    assert!(!data.join("meta").exists() && !data.join("devices").exists());
}

#[test]
fn a_node_that_has_lost_its_identity_is_not_one_of_its_own() {
    let mut ours = Cluster::found("1");
    assert!(ours.join(2, &ours.token()).status.success());
    ours.start(2);
    for node in [2, 1] {
        ours.stop(node);
        let data = ours.data(node);
        fs::rename(data.join("cluster"), data.join("elsewhere")).unwrap();
        let told = one_error(&serve(&data), 1);
        let culprit = format!("belong to node {node} of a cluster of several");
        assert!(told.contains(&culprit), "{told}");
        assert!(told.contains("bring it back from a backup"), "{told}");
        fs::rename(data.join("elsewhere"), data.join("cluster")).unwrap();
    }
}
