//! A node that was alone becomes the first of a cluster, with what it has.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use super::{Cluster, THIN, image};
use crate::harness::{eventually, one_error, penstock, run, text};

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

/// A node with two devices. The second one was added after volumes were made.
struct TwoDevices {
    cluster: Cluster,
    paths: [PathBuf; 2],
    /// What each volume holds.
    bytes: Vec<u8>,
}

const VOLUMES: [&str; 4] = ["a", "b", "c", "d"];

impl TwoDevices {
    fn new() -> Self {
        let mut cluster = Cluster::empty();
        let file = cluster.dir.path().join("image");
        let bytes = image(&file);
        let paths = ["one", "two"].map(|name| cluster.dir.path().join(name));
        let [first, second] = paths.each_ref().map(|path| format!("{}:512M", text(path)));
        cluster.start_with(1, &["--device", &first]);
        let alone = cluster.node(1);
        for volume in &VOLUMES[..2] {
            alone.ok(&["volume", "import", volume, text(&file)]);
        }
        alone.ok(&["device", "add", &second]);
        for volume in &VOLUMES[2..] {
            alone.ok(&["volume", "import", volume, text(&file)]);
        }
        alone.ok(&["volume", "create", "empty", "64M"]);
        let mut two = Self {
            cluster,
            paths,
            bytes,
        };
        two.cluster.stop(1);
        two
    }

    fn options(&self) -> [String; 2] {
        [
            "--device".to_owned(),
            format!("{}:512M", text(&self.paths[0])),
        ]
    }

    fn start(&mut self) {
        let options = self.options();
        self.cluster.start_with(1, &[&options[0], &options[1]]);
    }

    /// What the daemon says that does not start.
    fn refused(&self) -> String {
        let (data, options) = (self.cluster.data(1), self.options());
        let options = [options[0].as_str(), options[1].as_str()];
        let args = [&["serve", "--data", text(&data)][..], &THIN, &options].concat();
        one_error(&run(&args), 1)
    }

    /// A start that is killed after this time.
    fn cut_start(&self, after: Duration) {
        let (data, options) = (self.cluster.data(1), self.options());
        let mut command = penstock();
        command.args(["serve", "--data", text(&data)]).args(THIN);
        let mut daemon = command.args(options).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(after);
        daemon.kill().unwrap();
        daemon.wait().unwrap();
    }

    fn check(&self) {
        for volume in VOLUMES {
            self.cluster.export_is(1, volume, &self.bytes);
        }
    }

    fn used(&self) -> Vec<u64> {
        let listed = self.cluster.node(1).json(&["device", "list"]);
        let listed = listed.as_array().unwrap().iter();
        let used = listed.map(|device| device["used_bytes"].as_u64().unwrap());
        used.collect()
    }
}

fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").args([from, to]).status();
    assert!(copied.unwrap().success());
}

#[test]
fn a_node_with_two_devices_spreads_its_data_over_them() {
    let mut two = TwoDevices::new();
    let data = two.cluster.data(1);
    let [there, aside, meta, older] = [
        data.join("cluster"),
        two.cluster.dir.path().join("aside"),
        data.join("meta"),
        two.cluster.dir.path().join("older"),
    ];
    copy(&meta, &older);
    let made = two.cluster.init("2");
    assert!(made.status.success(), "{made:?}");
    let hint = String::from_utf8(made.stderr).unwrap();
    assert!(hint.contains("spreads the data"), "{hint}");
    let flagged = two.cluster.dir.path().join("flagged");
    copy(&there, &flagged);
    let recover = ["cluster", "recover", "--accept-data-loss", "--data"];
    let told = one_error(&run(&[&recover[..], &[text(&data)]].concat()), 1);
    assert!(told.contains("never been started"), "{told}");
    let socket = two.cluster.dir.path().join("blk.sock");
    let program = ["vhost-user-blk", "--volume", "a", "--socket-path"];
    let early = run(&[&program[..], &[text(&socket), "--data", text(&data)]].concat());
    let told = one_error(&early, 1);
    assert!(told.contains("not spread over its devices yet"), "{told}");

    // Without one of them nothing is changed, and it can go on alone.
    let away = two.paths[1].with_extension("away");
    std::fs::rename(&two.paths[1], &away).unwrap();
    let told = two.refused();
    assert!(
        told.contains("two") && told.contains("to go on alone"),
        "{told}"
    );
    std::fs::rename(&away, &two.paths[1]).unwrap();
    std::fs::rename(&there, &aside).unwrap();
    two.start();
    two.check();
    two.cluster.stop(1);
    std::fs::rename(&aside, &there).unwrap();

    for millis in [20, 40, 80, 120, 200, 400] {
        two.cut_start(Duration::from_millis(millis));
    }
    two.start();
    two.check();
    let one = two.cluster.node(1);
    assert_eq!(one.ok(&["health"]), "ok\n");
    let (used, whole) = (two.used(), two.bytes.len() as u64);
    assert!(used.iter().all(|used| *used > whole), "{used:?}");
    // What lies twice is freed in the background.
    eventually(|| two.used().iter().sum::<u64>() < 5 * whole);

    // From now on it does not start alone, also not by metadata from before.
    two.cluster.stop(1);
    std::fs::rename(&there, &aside).unwrap();
    let told = two.refused();
    assert!(told.contains("cluster"), "{told}");
    let newer = two.cluster.dir.path().join("newer");
    std::fs::rename(&meta, &newer).unwrap();
    std::fs::rename(&older, &meta).unwrap();
    let told = two.refused();
    assert!(told.contains("was used in a cluster since"), "{told}");
    std::fs::rename(&aside, &there).unwrap();
    let told = two.refused();
    assert!(told.contains("older than the data"), "{told}");
    std::fs::rename(&meta, &older).unwrap();
    std::fs::rename(&newer, &meta).unwrap();
    // It says once more that the data are to be spread.
    std::fs::rename(&there, &aside).unwrap();
    std::fs::rename(&flagged, &there).unwrap();
    std::fs::rename(aside.join("begun"), there.join("begun")).unwrap();
    two.start();
    two.check();

    let one = two.cluster.node(1);
    one.run(&["pool", "set", "default", "--replicas", "2"]);
    assert!(two.cluster.join(2, &two.cluster.token()).status.success());
    two.cluster.start(2);
    let one = two.cluster.node(1);
    eventually(|| {
        let pool = one.json(&["pool", "show", "default"]);
        pool["groups"]["in_sync"] == pool["groups"]["total"]
    });
    // From its own copies: those that are nearest are read.
    for volume in VOLUMES {
        two.cluster.export_is(2, volume, &two.bytes);
    }
}
