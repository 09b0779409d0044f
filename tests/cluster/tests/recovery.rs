//! What only an operator can decide: a majority of the metadata nodes is gone for good, or all metadata are.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use cluster_rig::guest::{cluster_with_disk, goes_on, ledger};
use cluster_rig::{Cluster, ClusterOptions, Ledger, Load, Promise, load};
use guest_rig::paths::penstock_binary;
use serde_json::Value;

/// A node that was turned away has heard so within this, and has tried again.
const TURNED_AWAY: Duration = Duration::from_secs(5);
/// What is waited for comes within this.
const LIMIT: Duration = Duration::from_secs(120);
/// Size of the guest's disk, which the ledger knows.
const DISK: &str = "256M";
/// Bytes of a volume that the backup does not know.
const SINCE_BYTES: usize = 48 << 20;

/// What an error tells.
fn told(outcome: Result<String>) -> Result<String> {
    match outcome {
        Ok(printed) => bail!("it was done: {printed}"),
        Err(error) => Ok(format!("{error:#}")),
    }
}

/// Ends all daemons in order.
fn stop_all(cluster: &mut Cluster) -> Result<()> {
    let numbers: Vec<u8> = cluster.nodes().iter().map(|node| node.number()).collect();
    for number in numbers {
        if cluster.node(number)?.daemon().is_started() {
            cluster.node_mut(number)?.stop()?;
        }
    }
    Ok(())
}

fn read_back(cluster: &Cluster, socket: &Path, ledger: &mut Ledger) -> Result<()> {
    load::check(socket, ledger, Promise::Acknowledged)
        .with_context(|| format!("read all back\n{}", cluster.report()))
}

/// Two nodes that vote, node 1 not among them, by what node 1 has.
fn others_that_vote(cluster: &Cluster) -> Result<Vec<u8>> {
    let shown = cluster.node(1)?.daemon().json(&["cluster", "recover"])?;
    let nodes = shown["nodes"].as_array().cloned().unwrap_or_default();
    let votes = nodes
        .iter()
        .filter(|node| node["votes"] == true && node["node"] != 1);
    let votes: Vec<u8> = votes
        .filter_map(|node| u8::try_from(node["node"].as_u64()?).ok())
        .collect();
    ensure!(votes.len() == 2, "{shown}");
    Ok(votes)
}

/// Makes a filesystem, and attaches it on all nodes.
fn attach_tree(cluster: &Cluster) -> Result<()> {
    cluster.node(1)?.daemon().cli(&["fs", "create", "tree"])?;
    for node in cluster.nodes() {
        let socket = node.daemon().data().join("tree.sock");
        let path = socket.to_str().context("a path in UTF-8")?;
        let attach = ["attach", "fs", "tree", "--socket", path, "--tag", "tree"];
        node.daemon().cli(&attach)?;
        // Said again, it is what is there.
        node.daemon().cli(&attach)?;
    }
    Ok(())
}

/// Forgets what a node that is gone for good had attached.
fn forget_tree(cluster: &Cluster, node: &str) -> Result<()> {
    let one = cluster.node(1)?.daemon();
    let own = one.cli(&["detach", "tree", "--force", "--node", "node1", "--yes"]);
    ensure!(told(own)?.contains("attached on node 'node1'"));
    one.cli(&["detach", "tree", "--force", "--node", node, "--yes"])?;
    let again = one.cli(&["detach", "tree", "--force", "--node", node, "--yes"]);
    ensure!(told(again)?.contains("nothing is attached"));
    Ok(())
}

/// The filesystem is what node 1 has of it, and can be deleted either way.
fn delete_tree(cluster: &Cluster, left: u8, is_here: bool) -> Result<()> {
    let one = cluster.node(1)?.daemon();
    let listed = one.json(&["fs", "list"])?;
    let expected = if is_here { "ready" } else { "lost" };
    ensure!(listed[0]["state"] == expected, "{listed}");
    ensure!(listed[0]["problem"].is_null() == is_here, "{listed}");
    for number in [1, left] {
        cluster.node(number)?.daemon().cli(&["detach", "tree"])?;
    }
    one.cli(&["fs", "delete", "tree", "--yes"])?;
    cluster.wait("the filesystem is gone", LIMIT, |cluster| {
        let listed = cluster.node(1)?.daemon().json(&["fs", "list"])?;
        Ok(listed.as_array().is_some_and(Vec::is_empty).then_some(()))
    })
}

/// Four nodes. Two voters are lost, and the other two have no majority.
#[test]
fn two_of_four_go_on_without_a_majority_and_nothing_they_had_is_lost() -> Result<()> {
    let (mut cluster, socket) = cluster_with_disk(ClusterOptions::new(penstock_binary()?, 4))?;
    attach_tree(&cluster)?;
    let load = Load::start(&socket, ledger());
    goes_on(&cluster, &load, "the start")?;
    let in_use = cluster
        .node(1)?
        .daemon()
        .cli(&["cluster", "recover", "--accept-data-loss"]);
    ensure!(told(in_use)?.contains("in use by another daemon"));
    let mut ledger = load.stop()?;
    stop_all(&mut cluster)?;
    let lost = others_that_vote(&cluster)?;
    for number in &lost {
        cluster.discard(*number)?;
    }
    let left = [2, 3, 4].into_iter().find(|number| !lost.contains(number));
    let left = left.context("one is left")?;
    let shown = cluster.node(1)?.daemon().json(&["cluster", "recover"])?;
    let is_here = shown["filesystems"][0]["entry"].is_string();

    let history = cluster
        .node(1)?
        .daemon()
        .cli(&["cluster", "recover", "--accept-data-loss"])?;
    let history = history.trim().to_owned();
    cluster.node_mut(1)?.start()?;
    // Its log is of before: it is turned away, whatever it says.
    cluster.node_mut(left)?.spawn()?;
    std::thread::sleep(TURNED_AWAY);
    ensure!(!cluster.node(left)?.daemon().serves(), "it serves");
    cluster.node_mut(left)?.kill()?;
    let log = cluster.node(1)?.daemon().log();
    ensure!(log.contains("penstock cluster rejoin"), "{log}");
    cluster
        .node(left)?
        .daemon()
        .cli(&["cluster", "rejoin", &history])?;
    cluster.node_mut(left)?.start()?;
    for number in &lost {
        let name = format!("node{number}");
        forget_tree(&cluster, &name)?;
        let remove = ["node", "remove", &name, "--accept-data-loss", "--yes"];
        cluster.node(1)?.daemon().cli(&remove)?;
    }
    cluster.join()?;
    cluster.wait_ready()?;
    delete_tree(&cluster, left, is_here)?;
    read_back(&cluster, &socket, &mut ledger)?;
    let load = Load::start(&socket, ledger);
    goes_on(&cluster, &load, "the recovery")?;
    let mut ledger = load.stop()?;
    read_back(&cluster, &socket, &mut ledger)?;
    let events = cluster.node(left)?.daemon().cli(&["events"])?;
    ensure!(
        events.contains("a majority of the metadata nodes was given up"),
        "{events}"
    );
    Ok(())
}

/// A backup, and then: node 1 dies, the guest overwrites its disk, a volume is made.
fn back_up_and_go_on(cluster: &mut Cluster, socket: &Path, backup: &str) -> Result<Ledger> {
    let load = Load::start(socket, ledger());
    goes_on(cluster, &load, "the start")?;
    cluster.node(2)?.daemon().cli(&["meta", "backup", backup])?;
    let again = cluster.node(2)?.daemon().cli(&["meta", "backup", backup]);
    ensure!(told(again)?.contains("--force"));
    cluster.node_mut(1)?.kill()?;
    goes_on(cluster, &load, "the death of node 1")?;
    goes_on(cluster, &load, "the death of node 1, and on")?;
    let image = cluster.directory().join("since.raw");
    let bytes: Vec<u8> = (0..SINCE_BYTES).map(|at| (at * 31 % 251) as u8).collect();
    std::fs::write(&image, bytes)?;
    let path = image.to_str().context("a path in UTF-8")?;
    cluster
        .node(2)?
        .daemon()
        .cli(&["volume", "import", "since", path])?;
    load.stop()
}

/// Whether health tells of something with these words.
fn health_tells(cluster: &Cluster, number: u8, words: &str) -> Result<bool> {
    // What is wrong makes it fail; its text is on standard output all the same.
    let status: Value = cluster.node(number)?.daemon().json(&["status"])?;
    Ok(status["health"].to_string().contains(words))
}

#[test]
fn after_a_restore_the_replicas_that_were_in_sync_last_count() -> Result<()> {
    let mut cluster = Cluster::start(ClusterOptions::new(penstock_binary()?, 3))?;
    let socket = cluster.node(2)?.daemon().disk("disk", DISK, 1)?;
    let file = cluster.directory().join("backup");
    let backup = file.to_str().context("a path in UTF-8")?.to_owned();
    let mut ledger = back_up_and_go_on(&mut cluster, &socket, &backup)?;
    stop_all(&mut cluster)?;
    for number in 1..=3 {
        std::fs::remove_dir_all(cluster.node(number)?.daemon().data().join("meta"))?;
    }
    let forgetful = cluster.node_mut(3)?.start();
    ensure!(forgetful.is_err(), "it began anew");

    let looked = cluster
        .node(2)?
        .daemon()
        .json(&["meta", "restore", &backup])?;
    ensure!(
        looked["lets_nodes_in"] == true && looked["node"] == 2,
        "{looked}"
    );
    let history =
        cluster
            .node(2)?
            .daemon()
            .cli(&["meta", "restore", &backup, "--accept-data-loss"])?;
    let history = history.trim().to_owned();
    cluster.node_mut(2)?.start()?;
    cluster
        .node(3)?
        .daemon()
        .cli(&["cluster", "rejoin", &history])?;
    cluster.node_mut(3)?.start()?;
    ensure!(
        health_tells(&cluster, 2, "penstock meta resume")?,
        "health is silent"
    );
    let early = told(cluster.node(2)?.daemon().cli(&["meta", "resume", "--yes"]))?;
    ensure!(early.contains("not back"), "{early}");
    // By the backup node 1 was in sync, and its device comes first: it lacks all that was written since.
    cluster
        .node(1)?
        .daemon()
        .cli(&["cluster", "rejoin", &history])?;
    cluster.node_mut(1)?.start()?;
    cluster
        .node(3)?
        .daemon()
        .cli(&["meta", "resume", "--yes"])?;
    cluster.wait_ready()?;
    read_back(&cluster, &socket, &mut ledger)?;
    let load = Load::start(&socket, ledger);
    goes_on(&cluster, &load, "the restoration")?;
    let mut ledger = load.stop()?;
    read_back(&cluster, &socket, &mut ledger)?;

    let volumes = cluster.node(1)?.daemon().cli(&["volume", "list"])?;
    ensure!(!volumes.contains("since"), "{volumes}");
    ensure!(
        health_tells(&cluster, 1, "penstock meta forget-unknown")?,
        "health is silent"
    );
    let daemon = cluster.node(1)?.daemon();
    let kept = daemon.used_bytes()?;
    daemon.cli(&["meta", "forget-unknown", "--yes"])?;
    let freed = (SINCE_BYTES / 2) as u64;
    daemon.wait_used(LIMIT, |used| used + freed < kept)?;
    read_back(&cluster, &socket, &mut ledger)
}
