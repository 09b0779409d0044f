//! The newest metadata are on a node that cannot lead them: the node that goes on has older ones, and devices
//! say which replicas count.

use std::fs;
use std::sync::mpsc::{self, TryRecvError};
use std::time::Duration;

use serde_json::Value;

use super::Cluster;
use super::recovery::{SECTORS, all_are, offline, offline_ok, sector, wait_well, write_all};
use crate::front::Front;
use crate::harness::{eventually, one_error, text};

/// Bytes of a volume that the metadata which go on do not know.
const SINCE_BYTES: usize = 8 << 20;
/// A device to which nothing was written for so long has noted what it had to note.
const QUIET: Duration = Duration::from_secs(2);

/// Nodes 1, 2 and 3 vote, and only they may; 1, 2 and 4 have devices, and the three replicas of everything. A
/// pool of two replicas is there, too.
fn of_four() -> Cluster {
    let mut cluster = Cluster::found("3");
    let pairs = [
        "pool",
        "create",
        "pairs",
        "--replicas",
        "2",
        "--min-in-sync",
        "1",
    ];
    cluster.node(1).ok(&pairs);
    for (node, roles) in [(2, "meta,storage,host"), (3, "meta"), (4, "storage,host")] {
        let token = cluster.node(1).ok(&["token", "create", "--roles", roles]);
        cluster.add_by(node, token.trim(), &["--roles", roles]);
    }
    cluster.wait_for_voters();
    wait_well(cluster.node(1));
    cluster
}

/// Waits until nothing has been written to a node's device for a while: it notes what it is in sync in, a
/// moment after the map says so.
fn wait_noted(cluster: &Cluster, node: usize) {
    let device = cluster.data(node).join("devices/0.img");
    eventually(|| {
        let written = fs::metadata(&device).unwrap().modified().unwrap();
        written.elapsed().is_ok_and(|ago| ago >= QUIET)
    });
}

/// A guest of node 4 on a volume of a pool.
fn attach(cluster: &Cluster, volume: &str, pool: &str) -> Front {
    let socket = cluster.dir.path().join(format!("{volume}.sock"));
    let four = cluster.node(4);
    four.ok(&["volume", "create", volume, "64M", "--pool", pool]);
    four.ok(&["attach", "volume", volume, "--socket", text(&socket)]);
    Front::start(&socket, 1)
}

/// Term and index of the last entry that a stopped node has.
fn last_entry(cluster: &Cluster, node: usize) -> (u64, u64) {
    let shown = offline_ok(cluster, node, &["cluster", "recover", "--json"]);
    let shown: Value = serde_json::from_str(&shown).unwrap();
    let (term, index) = shown["entry"].as_str().unwrap().split_once('.').unwrap();
    (term.parse().unwrap(), index.parse().unwrap())
}

/// Node 1 is away while guests write and a volume is made; then it and node 4 are left. Both are stopped.
fn lose_two_after_node_one_was_away(cluster: &mut Cluster) {
    let (mut disk, mut pair) = (
        attach(cluster, "disk", "default"),
        attach(cluster, "pair", "pairs"),
    );
    for guest in [&mut disk, &mut pair] {
        write_all(guest, 1);
    }
    wait_noted(cluster, 1);
    cluster.kill(1);
    for guest in [&mut disk, &mut pair] {
        write_all(guest, 2);
    }
    let image = cluster.dir.path().join("image");
    fs::write(&image, vec![7; SINCE_BYTES]).unwrap();
    cluster
        .node(4)
        .ok(&["volume", "import", "since", text(&image)]);
    drop((disk, pair));
    wait_noted(cluster, 4);
    (2..=4).for_each(|node| cluster.kill(node));
    for lost in [2, 3] {
        fs::remove_dir_all(cluster.data(lost)).unwrap();
    }
}

/// Has node 1 go on, as the only one that may. Returns the history.
fn recover_on_node_one(cluster: &Cluster) -> String {
    assert!(last_entry(cluster, 4) > last_entry(cluster, 1));
    let recover = ["cluster", "recover", "--accept-data-loss"];
    let told = one_error(&offline(cluster, 4, &recover), 1);
    assert!(told.contains("node 4 may not have the role meta"), "{told}");
    assert!(told.contains("--choose-replicas"), "{told}");
    let usage = offline(cluster, 1, &["cluster", "recover", "--choose-replicas"]);
    assert!(one_error(&usage, 2).contains("--accept-data-loss"));
    let done = offline(cluster, 1, &[&recover[..], &["--choose-replicas"]].concat());
    let hint = String::from_utf8(done.stderr).unwrap();
    assert!(
        done.status.success() && hint.contains("penstock meta resume"),
        "{hint}"
    );
    String::from_utf8(done.stdout).unwrap().trim().to_owned()
}

/// Chooses, while a guest's read waits for that.
fn choose_while_a_guest_reads(cluster: &Cluster) -> Front {
    let one = cluster.node(1);
    let groups = one.json(&["pool", "show", "default"])["groups"].clone();
    assert_eq!(groups["waiting"], groups["total"], "{groups}");
    let health = one.run(&["health"]).stdout;
    let health = String::from_utf8(health).unwrap();
    assert!(health.contains("penstock meta resume"), "{health}");
    assert!(!health.contains("backup"), "none was restored: {health}");
    let socket = cluster.dir.path().join("disk.sock");
    let (sender, receiver) = mpsc::channel();
    let reads = std::thread::spawn(move || {
        let mut guest = Front::start(&socket, 1);
        let read = guest.read_patiently(sector(0));
        sender.send(()).unwrap();
        (guest, read)
    });
    let told = one.refused(&["meta", "resume", "--yes"]);
    assert!(told.contains("not back"), "{told}");
    for lost in ["node2", "node3"] {
        one.ok(&["node", "remove", lost, "--accept-data-loss", "--yes"]);
    }
    assert_eq!(
        receiver.try_recv(),
        Err(TryRecvError::Empty),
        "it did not wait"
    );
    one.ok(&["meta", "resume", "--yes"]);
    let (guest, read) = reads.join().unwrap();
    assert_eq!(read, [2; 512]);
    guest
}

#[test]
fn older_metadata_go_on_with_the_replicas_that_were_in_sync_last() {
    let mut cluster = of_four();
    lose_two_after_node_one_was_away(&mut cluster);
    let history = recover_on_node_one(&cluster);
    cluster.start(1);
    offline_ok(&cluster, 4, &["cluster", "rejoin", &history]);
    cluster.start(4);
    let mut guest = choose_while_a_guest_reads(&cluster);
    // By the metadata that went on node 1 was in sync, and it has only what was written before.
    all_are(&mut guest, 2);
    write_all(&mut guest, 3);
    all_are(&mut guest, 3);
    // What only nodes 1 and 2 had is as it was when node 1 left.
    let socket = cluster.dir.path().join("pair.sock");
    let mut pair = Front::start(&socket, 1);
    let read: Vec<Vec<u8>> = (0..SECTORS)
        .map(|number| pair.read(0, sector(number)))
        .collect();
    assert!(
        read.iter().all(|one| *one == [1; 512] || *one == [2; 512]),
        "{read:?}"
    );
    assert!(read.contains(&vec![2; 512]), "nothing of what node 4 has");

    let one = cluster.node(1);
    one.refused(&["volume", "show", "since"]);
    cluster.add(5);
    let (one, four) = (cluster.node(1), cluster.node(4));
    let used = || four.json(&["status"])["used_bytes"].as_u64().unwrap();
    assert!(used() >= SINCE_BYTES as u64, "unknown data are kept");
    one.ok(&["meta", "forget-unknown", "--yes"]);
    wait_well(one);
    eventually(|| used() < SINCE_BYTES as u64);
    let nodes = one.json(&["node", "list"]);
    let names: Vec<&Value> = nodes
        .as_array()
        .unwrap()
        .iter()
        .map(|node| &node["name"])
        .collect();
    assert_eq!(names, ["node1", "node4", "node5"]);
    all_are(&mut guest, 3);
    let events = one.ok(&["events"]);
    for told in [
        "a majority of the metadata nodes was given up",
        "; 0 groups have none that was in sync",
    ] {
        assert!(events.contains(told), "{events}");
    }
}
