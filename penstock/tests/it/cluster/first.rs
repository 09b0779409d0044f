//! A node that was alone becomes the first of a cluster, with what it has.

use std::path::Path;
use std::process::Command;

use super::{Cluster, THIN, image};
use crate::harness::{eventually, one_error, run, text};

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
    assert!(told.contains("holds node node1 of cluster"), "{told}");

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
        cluster.add(node);
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

fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").args([from, to]).status();
    assert!(copied.unwrap().success());
}

const VOLUMES: [&str; 4] = ["a", "b", "c", "d"];

/// The second device is added after volumes were made.
#[test]
fn a_node_with_two_devices_becomes_the_first_and_no_data_move() {
    let mut cluster = Cluster::empty();
    let (data, file) = (cluster.data(1), cluster.dir.path().join("image"));
    let bytes = image(&file);
    let paths = ["one", "two"].map(|name| cluster.dir.path().join(name));
    let [first, second] = paths.each_ref().map(|path| format!("{}:512M", text(path)));
    cluster.start_with(1, &["--device", &first]);
    let alone = cluster.node(1);
    for volume in &VOLUMES[..2] {
        alone.ok(&["volume", "import", volume, text(&file)]);
    }
    let (meta, older) = (data.join("meta"), cluster.dir.path().join("older"));
    cluster.stop(1);
    copy(&meta, &older);
    cluster.start_with(1, &["--device", &first]);
    let alone = cluster.node(1);
    alone.ok(&["device", "add", &second]);
    for volume in &VOLUMES[2..] {
        alone.ok(&["volume", "import", volume, text(&file)]);
    }
    // Groups move to the device that was added, as in a cluster.
    let listed = |cluster: &Cluster, what: &str| {
        let listed = cluster.node(1).json(&["device", "list"]);
        let devices = listed.as_array().unwrap().iter();
        let figures = devices.map(|device| device[what].as_u64().unwrap());
        figures.collect::<Vec<u64>>()
    };
    eventually(|| cluster.node(1).ok(&["health"]) == "ok\n");
    let groups = listed(&cluster, "groups");
    assert_eq!(groups.len(), 2);
    assert!(groups.iter().all(|groups| *groups > 0), "{groups:?}");
    let used = listed(&cluster, "used_bytes");
    assert!(
        used.iter().all(|used| *used > bytes.len() as u64),
        "{used:?}"
    );

    // Metadata from before the device was added are refused.
    cluster.stop(1);
    let newer = cluster.dir.path().join("newer");
    std::fs::rename(&meta, &newer).unwrap();
    std::fs::rename(&older, &meta).unwrap();
    let args = [
        &["serve", "--data", text(&data)][..],
        &THIN,
        &["--device", &first],
    ]
    .concat();
    let told = one_error(&run(&args), 1);
    assert!(told.contains("are older than device"), "{told}");
    std::fs::remove_dir_all(&meta).unwrap();
    std::fs::rename(&newer, &meta).unwrap();

    let made = cluster.init("2");
    assert!(made.status.success(), "{made:?}");
    cluster.start_with(1, &["--device", &first]);
    for volume in VOLUMES {
        cluster.export_is(1, volume, &bytes);
    }
    assert_eq!(cluster.node(1).ok(&["health"]), "ok\n");
    assert_eq!(listed(&cluster, "groups"), groups, "nothing moves");
}
