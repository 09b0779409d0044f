//! What only an operator can decide, on nodes that have lost more than their metadata.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use serde_json::{Value, json};

use super::{Cluster, THIN, image};
use crate::front::Front;
use crate::harness::{DEVICE_SIZE, Daemon, eventually, one_error, penstock, run, text};

/// Sectors that guests write, each in a chunk of its own.
pub(super) const SECTORS: u64 = 16;
/// Sectors of a chunk.
const CHUNK_SECTORS: u64 = 8192;

/// A device outside of a node's data directory, which it outlives.
fn device(cluster: &Cluster, node: usize) -> String {
    let path = cluster.dir.path().join(format!("device-{node}"));
    format!("{}:{DEVICE_SIZE}", text(&path))
}

fn start(cluster: &mut Cluster, node: usize) {
    let device = device(cluster, node);
    cluster.start_with(node, &["--device", &device]);
}

/// Three nodes with devices outside of their data directories; the second stands elsewhere, and the third
/// does less than the others.
fn of_three_with_devices() -> Cluster {
    let mut cluster = Cluster::empty();
    let made = cluster.init("3");
    assert!(made.status.success(), "{made:?}");
    start(&mut cluster, 1);
    let options: [&[&str]; 2] = [&["--rack", "there"], &["--roles", "meta,storage,host"]];
    for (node, options) in [2, 3].into_iter().zip(options) {
        let joined = cluster.join_with(node, &cluster.token(), options);
        assert!(joined.status.success(), "{joined:?}");
        start(&mut cluster, node);
    }
    cluster.wait_for_voters();
    wait_well(cluster.node(1));
    cluster
}

pub(super) fn wait_well(daemon: &Daemon) {
    eventually(|| daemon.run(&["health"]).status.success());
}

/// What nodes are, apart from how they are now.
fn nodes(daemon: &Daemon) -> Vec<Value> {
    let listed = daemon.json(&["node", "list"]);
    let node = |node: &Value| {
        let device = |device: &Value| json!([device["id"], device["path"]]);
        let devices: Vec<Value> = node["devices"]
            .as_array()
            .unwrap()
            .iter()
            .map(device)
            .collect();
        json!({
            "id": node["id"], "name": node["name"], "roles": node["roles"], "rack": node["rack"],
            "control": node["control_address"], "data": node["data_address"], "devices": devices,
        })
    };
    listed.as_array().unwrap().iter().map(node).collect()
}

/// Sector that a guest writes in chunk `number`.
pub(super) fn sector(number: u64) -> u64 {
    number * CHUNK_SECTORS + number
}

pub(super) fn write_all(guest: &mut Front, byte: u8) {
    (0..SECTORS).for_each(|number| guest.write_patiently(sector(number), byte));
}

pub(super) fn all_are(guest: &mut Front, byte: u8) {
    for number in 0..SECTORS {
        assert_eq!(
            guest.read(0, sector(number)),
            [byte; 512],
            "sector {number}"
        );
    }
}

/// A command for a node whose daemon does not run.
pub(super) fn offline(cluster: &Cluster, node: usize, args: &[&str]) -> Output {
    run(&[args, &["--data", text(&cluster.data(node))]].concat())
}

/// The same; it must succeed. Returns its standard output.
pub(super) fn offline_ok(cluster: &Cluster, node: usize, args: &[&str]) -> String {
    let output = offline(cluster, node, args);
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Starts a daemon on an old data directory, and kills it when it says this or is ready. Returns what it
/// said.
fn start_outcast(data: &Path, until: &str) -> String {
    let mut child = penstock()
        .args(["serve", "--data", text(data)])
        .args(THIN)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    for line in BufReader::new(child.stderr.take().unwrap()).lines() {
        let line = line.unwrap();
        said += &format!("{line}\n");
        if line.contains(until) || line.contains("penstock: ready:") {
            break;
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(
        said.contains(until) && !said.contains("penstock: ready:"),
        "{said}"
    );
    said
}

/// Moves the data directories of all nodes away, and returns where they are.
fn lose_data_directories(cluster: &mut Cluster) -> Vec<PathBuf> {
    // The host first: it ends its attachment while the others are there.
    [3, 2, 1].into_iter().for_each(|node| cluster.stop(node));
    let lose = |node: usize| {
        let lost = cluster.dir.path().join(format!("lost-{node}"));
        fs::rename(cluster.data(node), &lost).unwrap();
        lost
    };
    (1..=3).map(lose).collect()
}

/// Restores node 1, whose data directory is lost, from a backup. Returns the history.
fn restore_first(cluster: &Cluster, backup: &str) -> String {
    let restore = ["meta", "restore", backup, "--accept-data-loss"];
    let told = one_error(&offline(cluster, 1, &restore), 1);
    assert!(told.contains("add --node NUMBER"), "{told}");
    let as_nobody = [&restore[..], &["--node", "9", "--listen", "127.0.0.1"]].concat();
    let told = one_error(&offline(cluster, 1, &as_nobody), 1);
    assert!(
        told.contains("no node 9") && told.contains("1 ('node1')"),
        "{told}"
    );
    assert!(!cluster.data(1).join("cluster").exists());
    let address = cluster.address(1);
    let as_first = [&restore[..], &["--node", "1", "--listen", &address]].concat();
    let history = offline_ok(cluster, 1, &as_first);
    let as_third = [&restore[..], &["--node", "3"]].concat();
    let told = one_error(&offline(cluster, 1, &as_third), 1);
    assert!(told.contains("holds node 1, not node 3"), "{told}");
    history
}

/// Rejoins a node whose data directory is lost, after node 1 was restored.
fn rejoin_lost(cluster: &Cluster, node: usize, history: &str, backup: &str) {
    let rejoin = ["cluster", "rejoin", history];
    let told = one_error(&offline(cluster, node, &rejoin), 1);
    assert!(told.contains("holds no node of a cluster"), "{told}");
    let as_nobody = ["--backup", backup, "--node", "9", "--listen", "127.0.0.1"];
    let told = one_error(
        &offline(cluster, node, &[&rejoin[..], &as_nobody].concat()),
        1,
    );
    assert!(told.contains("no node 9"), "{told}");
    let (number, address) = (node.to_string(), cluster.address(node));
    let as_it_was = ["--backup", backup, "--node", &number, "--listen", &address];
    offline_ok(cluster, node, &[&rejoin[..], &as_it_was].concat());
    let as_first = ["--backup", backup, "--node", "1", "--listen", &address];
    let told = one_error(
        &offline(cluster, node, &[&rejoin[..], &as_first].concat()),
        1,
    );
    assert!(
        told.contains(&format!("holds node {node}, not node 1")),
        "{told}"
    );
}

#[test]
fn nodes_that_lost_their_data_directories_are_made_anew_and_their_devices_keep_what_they_hold() {
    let mut cluster = of_three_with_devices();
    let before = nodes(cluster.node(1));
    let path = cluster.dir.path().join("image");
    let bytes = image(&path);
    let (socket, file) = (
        cluster.dir.path().join("disk.sock"),
        cluster.dir.path().join("backup"),
    );
    let backup = text(&file);
    cluster
        .node(2)
        .ok(&["volume", "import", "image", text(&path)]);
    let three = cluster.node(3);
    three.ok(&["volume", "create", "disk", "64M"]);
    three.ok(&["attach", "volume", "disk", "--socket", text(&socket)]);
    let mut guest = Front::start(&socket, 1);
    write_all(&mut guest, 1);
    cluster.node(1).ok(&["meta", "backup", backup]);
    write_all(&mut guest, 2);
    drop(guest);
    let lost = lose_data_directories(&mut cluster);

    let history = restore_first(&cluster, backup);
    start(&mut cluster, 1);
    // Where the others look for the node there is an old directory: they turn it away, and it says so.
    let said = start_outcast(&lost[1], "penstock cluster rejoin");
    assert!(said.contains(&history), "{said}");
    rejoin_lost(&cluster, 2, &history, backup);
    start(&mut cluster, 2);
    let early = cluster.node(1).refused(&["meta", "resume", "--yes"]);
    assert!(early.contains("not back"), "{early}");
    rejoin_lost(&cluster, 3, &history, backup);
    start(&mut cluster, 3);
    cluster.node(2).ok(&["meta", "resume", "--yes"]);

    let mut guest = Front::start(&socket, 1);
    all_are(&mut guest, 2);
    write_all(&mut guest, 3);
    (1..=3).for_each(|node| cluster.export_is(node, "image", &bytes));
    cluster.node(1).ok(&["meta", "forget-unknown", "--yes"]);
    wait_well(cluster.node(1));
    assert_eq!(nodes(cluster.node(1)), before);
    all_are(&mut guest, 3);
}

#[test]
fn a_backup_says_that_it_holds_no_files() {
    let mut cluster = Cluster::empty();
    let file = cluster.dir.path().join("backup");
    cluster.start(1);
    let alone = cluster.node(1);
    let backup = ["meta", "backup", text(&file), "--force"];
    for (filesystem, says) in [(None, false), (Some("home"), true)] {
        if let Some(name) = filesystem {
            alone.ok(&["fs", "create", name]);
        }
        let taken = alone.run(&backup);
        assert!(taken.status.success(), "{taken:?}");
        let told = String::from_utf8(taken.stderr).unwrap();
        let names = told.contains("loses all filesystems") && told.contains("(home)");
        assert_eq!(names, says, "{told}");
    }
}

#[test]
fn a_device_that_went_with_its_data_directory_is_given_up_and_replaced() {
    let mut cluster = Cluster::of_three();
    let path = cluster.dir.path().join("image");
    let bytes = image(&path);
    let file = cluster.dir.path().join("backup");
    let backup = text(&file);
    cluster
        .node(1)
        .ok(&["volume", "import", "image", text(&path)]);
    cluster.node(1).ok(&["meta", "backup", backup]);
    (1..=3).for_each(|node| cluster.stop(node));
    fs::remove_dir_all(cluster.data(1).join("meta")).unwrap();
    fs::remove_dir_all(cluster.data(2).join("meta")).unwrap();
    fs::remove_dir_all(cluster.data(3)).unwrap();

    let restore = ["meta", "restore", backup, "--accept-data-loss"];
    let history = offline_ok(&cluster, 1, &restore);
    cluster.start(1);
    offline_ok(&cluster, 2, &["cluster", "rejoin", &history]);
    cluster.start(2);
    rejoin_lost(&cluster, 3, &history, backup);
    cluster.start(3);
    assert!(!cluster.data(3).join("devices/0.img").exists());
    let told = cluster.node(3).refused(&["meta", "resume", "--yes"]);
    assert!(
        told.contains("not back") && told.contains("--without-missing"),
        "{told}"
    );
    let three = cluster.node(3);
    three.ok(&["meta", "resume", "--without-missing", "--yes"]);
    cluster.export_is(3, "image", &bytes);

    let devices = three.json(&["device", "list"]);
    let of_three = |one: &&Value| one["node"] == "node3";
    let lost = devices.as_array().unwrap().iter().find(of_three).unwrap();
    assert_eq!(lost["state"], "offline", "{devices}");
    three.ok(&["device", "remove", &lost["id"].to_string(), "--yes"]);
    three.ok(&["device", "add", &device(&cluster, 3)]);
    three.ok(&["meta", "forget-unknown", "--yes"]);
    wait_well(three);
    let groups = three.json(&["pool", "show", "default"])["groups"].clone();
    assert_eq!(groups["in_sync"], groups["total"], "{groups}");
    (1..=3).for_each(|node| cluster.export_is(node, "image", &bytes));
}
