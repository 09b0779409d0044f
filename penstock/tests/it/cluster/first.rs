//! A node that was alone becomes the first of a cluster, with what it has.

use super::{Cluster, image};
use crate::harness::{Daemon, eventually, one_error, text};

#[test]
fn a_node_with_volumes_becomes_the_first_and_its_data_get_copies() {
    let mut cluster = Cluster::empty();
    let (data, file) = (cluster.data(1), cluster.dir.path().join("image"));
    let bytes = image(&file);
    cluster.start(1);
    let alone = cluster.node(1);
    alone.ok(&["volume", "import", "disk", text(&file)]);
    let (id, uuid) = (
        alone.json(&["volume", "show", "disk"])["id"].clone(),
        alone.json(&["status"])["cluster_id"].clone(),
    );
    // Not while it runs.
    let told = one_error(&cluster.init("3"), 1);
    assert!(told.contains("in use"), "{told}");
    cluster.stop(1);
    let refused = cluster.init_with("3", &["--roles", "meta"]);
    let told = one_error(&refused, 2);
    assert!(told.contains("add storage"), "{told}");
    let made = cluster.init("3");
    assert!(made.status.success(), "{made:?}");
    let hint = String::from_utf8(made.stderr).unwrap();
    assert!(hint.contains("pool set default --replicas 3"), "{hint}");
    let told = one_error(&cluster.init("3"), 1);
    assert!(told.contains("holds node 1 of cluster"), "{told}");

    cluster.start(1);
    let one = cluster.node(1);
    let early = one.refused(&[
        "pool",
        "set",
        "default",
        "--replicas",
        "3",
        "--min-in-sync",
        "2",
    ]);
    assert!(early.contains("cannot require 2 replicas"), "{early}");
    assert_eq!(one.json(&["status"])["cluster_id"], uuid);
    assert_eq!(one.json(&["volume", "show", "disk"])["id"], id);
    assert_eq!(one.ok(&["health"]), "ok\n");
    cluster.export_is(1, "disk", &bytes);
    // Before others join: then nothing has to move.
    let set = one.run(&["pool", "set", "default", "--replicas", "3"]);
    assert!(set.status.success(), "{set:?}");
    let told = String::from_utf8(set.stderr).unwrap();
    assert!(told.contains("cannot have 3 replicas"), "{told}");
    for node in [2, 3] {
        let joined = cluster.join(node, &cluster.token());
        assert!(joined.status.success(), "{joined:?}");
        cluster.start(node);
    }
    cluster.wait_for_voters();

    let one = cluster.node(1);
    eventually(|| {
        let pool = one.json(&["pool", "show", "default"]);
        pool["groups"]["in_sync"] == pool["groups"]["total"]
    });
    one.ok(&["pool", "set", "default", "--min-in-sync", "2"]);
    let pool = one.json(&["pool", "show", "default"]);
    assert_eq!(
        (&pool["replicas"], &pool["min_in_sync"]),
        (&3.into(), &2.into())
    );
    // Where it all was before.
    cluster.stop(1);
    let two = cluster.node(2);
    cluster.export_is(2, "disk", &bytes);
    two.ok(&["volume", "create", "another", "64M"]);
    two.ok(&["volume", "set", "another", "--on-full", "wait:300"]);
    assert_eq!(
        two.json(&["volume", "show", "another"])["on_full_wait_s"],
        300
    );
    let told = two.ok(&["events"]);
    for what in [
        "keeps 3 copies now, 1 of them",
        "keeps 3 copies now, 2 of them",
        "wait 300 s",
    ] {
        assert!(told.contains(what), "{told}");
    }
    cluster.start(1);
    assert!(!data.join("cluster.new").exists());
}

#[test]
fn a_node_with_two_devices_stays_alone() {
    let cluster = Cluster::empty();
    let data = cluster.data(1);
    let second = cluster.dir.path().join("second");
    let devices = ["--device", &format!("{}:512M", text(&second))];
    let first = [
        "--device",
        &format!("{}:512M", text(&cluster.dir.path().join("first"))),
    ];
    let options = [&first[..], &devices[..], &super::THIN[..]].concat();
    let daemon = Daemon::start_with(&data, &options);
    daemon.ok(&["volume", "create", "disk", "64M"]);
    assert!(daemon.terminate().success());
    let told = one_error(&cluster.init("3"), 1);
    assert!(
        told.contains("has 2 devices") && told.contains("export"),
        "{told}"
    );
    assert!(!data.join("cluster").exists());
    let again = Daemon::start_with(&data, &options);
    again.ok(&["volume", "show", "disk"]);
}
