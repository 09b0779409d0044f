//! Disks die and nodes go on without them; what is lost for good is given up.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cluster_rig::guest::{check, cluster_with_disk, devices, goes_on, ledger};
use cluster_rig::{Cluster, ClusterOptions, Load, Promise, load};
use guest_rig::paths::penstock_binary;
use serde_json::Value;

/// A lost share is placed anew, and what a device missed is copied, within this.
const READY_LIMIT: Duration = Duration::from_secs(180);
/// Replicas of a node that is down are taken out within this, if others are heard of.
const OUT_AFTER: Duration = Duration::from_secs(2);
/// What is left of a dead disk: neither a label nor a superblock.
const WIPED: &[u8] = &[0xa5; 4 << 20];

fn device(cluster: &Cluster, node: u8, path: &Path) -> Result<Value> {
    let mut all = devices(cluster, node, node)?.into_iter();
    let found = all.find(|one| one["path"].as_str() == path.to_str());
    found.with_context(|| format!("node {node} tells nothing of {}", path.display()))
}

/// Starts a node that is without a device, and sees that it tells so and that the guest goes on.
fn starts_without(cluster: &mut Cluster, load: &Load, node: u8, path: &Path) -> Result<u64> {
    cluster.node_mut(node)?.start()?;
    goes_on(cluster, load, &format!("node {node} starts without a disk"))?;
    let told = device(cluster, node, path)?;
    ensure!(told["state"] == "offline", "{told}");
    let shown = path.display().to_string();
    let reason = told["reason"].as_str().unwrap_or_default();
    ensure!(reason.contains(&shown), "{told}");
    let daemon = cluster.node(node)?.daemon();
    let problems = daemon.json(&["status"])?.to_string();
    ensure!(
        problems.contains("goes on without it") && problems.contains(&shown),
        "{problems}"
    );
    let log = daemon.log();
    ensure!(log.contains("goes on without it"), "nothing in the log");
    let events = daemon.cli(&["events"])?;
    ensure!(events.contains("is not served by node"), "{events}");
    told["id"].as_u64().context("the device has no number")
}

fn wait_and_check(cluster: &Cluster, load: &Load, after: &str) -> Result<()> {
    cluster.wait(after, READY_LIMIT, |cluster| {
        Ok(cluster.is_ready()?.then_some(()))
    })?;
    goes_on(cluster, load, after)
}

#[test]
fn a_node_goes_on_without_a_dead_disk_and_takes_it_in_again() -> Result<()> {
    let (mut cluster, socket) = cluster_with_disk(ClusterOptions::new(penstock_binary()?, 3))?;
    let second = cluster.node(2)?.daemon().data().join("second.img");
    let spec = format!("{}:4G", second.display());
    let load = Load::start(&socket, ledger());
    goes_on(&cluster, &load, "the start")?;
    cluster.node(2)?.daemon().cli(&["device", "add", &spec])?;
    wait_and_check(&cluster, &load, "node 2 has a second disk")?;
    let held = device(&cluster, 2, &second)?["groups"].as_u64();
    ensure!(held > Some(0), "the second disk holds {held:?} groups");

    // Away, and back: it has what it missed copied.
    let away = second.with_extension("away");
    cluster.node_mut(2)?.kill()?;
    std::fs::rename(&second, &away)?;
    starts_without(&mut cluster, &load, 2, &second)?;
    ensure!(!second.exists(), "the disk was made anew");
    cluster.node_mut(2)?.stop()?;
    std::fs::rename(&away, &second)?;
    cluster.node_mut(2)?.start()?;
    wait_and_check(&cluster, &load, "the second disk is back")?;

    // Dead for good: the other one takes its share.
    cluster.node_mut(2)?.kill()?;
    let image = std::fs::OpenOptions::new().write(true).open(&second)?;
    std::os::unix::fs::FileExt::write_all_at(&image, WIPED, 0)?;
    image.set_len(WIPED.len() as u64)?;
    let number = starts_without(&mut cluster, &load, 2, &second)?;
    let content = std::fs::read(&second)?;
    ensure!(content == WIPED, "the dead disk was written to");
    let remove = ["device", "remove", &number.to_string(), "--yes"];
    cluster.node(2)?.daemon().cli(&remove)?;
    wait_and_check(&cluster, &load, "the second disk is given up")?;
    ensure!(devices(&cluster, 2, 2)?.len() == 1);
    cluster.node_mut(2)?.stop()?;
    cluster.node_mut(2)?.start()?;
    wait_and_check(&cluster, &load, "node 2 has forgotten the second disk")?;
    check(&cluster, &socket, load)
}

#[test]
fn node_whose_only_disk_is_dead_still_serves_and_votes() -> Result<()> {
    let (mut cluster, socket) = cluster_with_disk(ClusterOptions::new(penstock_binary()?, 3))?;
    let load = Load::start(&socket, ledger());
    goes_on(&cluster, &load, "the start")?;
    let image = cluster.node(1)?.daemon().data().join("devices/0.img");
    let away = image.with_extension("away");
    // The guest's own node.
    let mut ledger = load.stop()?;
    cluster.node_mut(1)?.stop()?;
    std::fs::rename(&image, &away)?;
    cluster.node_mut(1)?.start()?;
    load::check(&socket, &mut ledger, Promise::Acknowledged)
        .with_context(|| format!("read from the others\n{}", cluster.report()))?;
    let load = Load::start(&socket, ledger);
    goes_on(&cluster, &load, "node 1 has no disk")?;
    ensure!(!image.exists(), "the disk was made anew");
    let told = device(&cluster, 1, &image)?;
    ensure!(told["state"] == "offline", "{told}");
    // Two are a majority only if this one is of it.
    cluster.node_mut(3)?.stop()?;
    let made = cluster
        .node(1)?
        .daemon()
        .cli(&["pool", "create", "more", "--replicas", "1"]);
    made.context("change metadata with node 1")?;
    cluster.node_mut(3)?.start()?;
    goes_on(&cluster, &load, "the return of node 3")?;
    let mut ledger = load.stop()?;
    cluster.node_mut(1)?.stop()?;
    std::fs::rename(&away, &image)?;
    cluster.node_mut(1)?.start()?;
    cluster.wait_ready()?;
    load::check(&socket, &mut ledger, Promise::Acknowledged)
        .with_context(|| format!("read all back\n{}", cluster.report()))
}

#[test]
fn only_last_copies_of_a_lost_node_are_given_up_on_demand() -> Result<()> {
    let options = ClusterOptions {
        replicas: 2,
        ..ClusterOptions::new(penstock_binary()?, 3)
    };
    let (mut cluster, socket) = cluster_with_disk(options)?;
    let load = Load::start(&socket, ledger());
    goes_on(&cluster, &load, "the start")?;
    let mut ledger = load.stop()?;
    // Node 2 goes first, so that node 3 alone is in sync in what both had, and never comes back.
    cluster.node_mut(2)?.kill()?;
    cluster.wait("node 2 is out", READY_LIMIT, |cluster| {
        let node = cluster.node(1)?.daemon().json(&["node", "show", "node2"])?;
        let pools = cluster.node(1)?.daemon().json(&["pool", "list"])?;
        let waiting = pools[0]["groups"]["waiting"].as_u64();
        Ok((node["state"] == "down" && waiting > Some(0)).then_some(()))
    })?;
    // Its replicas are taken out once node 3 was heard of after that.
    std::thread::sleep(OUT_AFTER);
    cluster.discard(3)?;
    cluster.node_mut(2)?.start()?;
    let down = |cluster: &Cluster| -> Result<Option<()>> {
        let node = cluster.node(1)?.daemon().json(&["node", "show", "node3"])?;
        Ok((node["state"] == "down").then_some(()))
    };
    cluster.wait("node 3 is down", READY_LIMIT, down)?;
    let daemon = cluster.node(1)?.daemon();
    let refused = daemon.cli(&["node", "remove", "node3", "--yes"]);
    let told = format!("{refused:?}");
    ensure!(
        told.contains("only node 'node3' has") && told.contains("volume \"disk\""),
        "{told}"
    );
    ensure!(told.contains("--accept-data-loss"), "{told}");
    let unasked = daemon.cli(&["node", "remove", "node3", "--accept-data-loss"]);
    ensure!(unasked.is_err(), "nobody was asked");
    daemon.cli(&["node", "remove", "node3", "--accept-data-loss", "--yes"])?;
    let events = daemon.cli(&["events"])?;
    ensure!(
        events.contains("gave up data that only node 3 had"),
        "{events}"
    );
    cluster.wait_ready()?;
    load::check(&socket, &mut ledger, Promise::Flushed)
        .with_context(|| format!("read all back\n{}", cluster.report()))
}

#[test]
fn an_export_of_what_is_away_says_so_and_leaves_the_volume_alone_when_it_is_given_up() -> Result<()>
{
    let (mut cluster, _) = cluster_with_disk(ClusterOptions::new(penstock_binary()?, 3))?;
    let one = cluster.node(1)?.daemon();
    one.cli(&["pool", "create", "single", "--replicas", "1"])?;
    let image = one.data().join("image");
    std::fs::write(&image, vec![0x5a; 64 << 20])?;
    let image = image.to_str().context("the data directory is not UTF-8")?;
    for name in ["kept", "gone"] {
        one.cli(&["volume", "import", name, image, "--pool", "single"])?;
    }
    cluster.node_mut(3)?.kill()?;
    let one = cluster.node(1)?.daemon();
    // It is interrupted by whoever waits; by itself it gives up after a minute.
    let export = std::process::Command::new("timeout")
        .args(["--signal", "INT", "20"])
        .arg(penstock_binary()?)
        .args(["volume", "export", "gone", "-", "--data"])
        .arg(one.data())
        .stdout(std::process::Stdio::null())
        .output()?;
    let told = String::from_utf8_lossy(&export.stderr);
    ensure!(
        told.contains("no data have come") && told.contains("interrupted"),
        "{told}"
    );
    let health = one.json(&["status"])?.to_string();
    ensure!(
        health.contains("nobody else has all data of some placement groups"),
        "{health}"
    );
    cluster.wait("the volume is free", Duration::from_secs(30), |cluster| {
        let deleted = cluster
            .node(1)?
            .daemon()
            .cli(&["volume", "delete", "gone", "--yes"]);
        Ok(deleted.is_ok().then_some(()))
    })?;
    cluster.node_mut(3)?.start()?;
    cluster.wait_ready()?;
    let one = cluster.node(1)?.daemon();
    let copy = one.data().join("copy");
    let path = copy.to_str().context("the data directory is not UTF-8")?;
    one.cli(&["volume", "export", "kept", path])?;
    ensure!(
        std::fs::read(&copy)? == vec![0x5a; 64 << 20],
        "other content"
    );
    Ok(())
}
