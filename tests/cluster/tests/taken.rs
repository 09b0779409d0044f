//! What a node had is taken from it while it is cut off: its attachment, or the lease of its volume.

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cluster_rig::guest::{SOON, cluster_with_disk, goes_on, ledger};
use cluster_rig::{Cluster, ClusterOptions, CutDirection, Load, Promise, load};
use guest_rig::paths::penstock_binary;
use guest_rig::process::Guarded;

/// Longer than a node's lease.
const CUT: Duration = Duration::from_secs(12);
/// Enough that a copy of it does not fit the buffers on its way.
const WRITES: u64 = 6000;

fn is_down(cluster: &Cluster, node: u8) -> Result<Option<()>> {
    let name = format!("node{node}");
    // Without an answer while a leader is elected.
    let shown = cluster.node(2)?.daemon().json(&["node", "show", &name]);
    Ok(shown
        .is_ok_and(|node| node["state"] == "down")
        .then_some(()))
}

/// What attachments of a node are.
fn states(cluster: &Cluster, node: u8) -> Result<Vec<String>> {
    let daemon = cluster.node(node)?.daemon();
    let list = daemon.json(&["attachments", "list"])?;
    let list = list.as_array().context("no list")?.iter();
    Ok(list
        .map(|one| one["state"].as_str().unwrap_or_default().to_owned())
        .collect())
}

#[test]
fn forgotten_attachment_ends_and_its_volume_is_served_elsewhere() -> Result<()> {
    let (mut cluster, old) = cluster_with_disk(ClusterOptions::new(penstock_binary()?, 3))?;
    let before = Load::start(&old, ledger());
    goes_on(&cluster, &before, "the start")?;
    cluster.network()?.cut(1, CutDirection::Both)?;
    cluster.wait("node 1 is down", SOON, |cluster| is_down(cluster, 1))?;
    let two = cluster.node(2)?.daemon();
    two.cli(&["detach", "disk", "--force", "--yes"])?;
    // It waits for the lease of node 1 to run out.
    let new = two.attach("disk", 1)?;
    let mut now = before.ledger()?;
    load::check(&new, &mut now, Promise::Acknowledged)
        .with_context(|| format!("read elsewhere\n{}", cluster.report()))?;
    let after = Load::start(&new, now);
    goes_on(&cluster, &after, "the move")?;

    cluster.network()?.heal(1)?;
    let (_, error) = before
        .fails(SOON)
        .with_context(|| format!("the old guest waits for ever\n{}", cluster.report()))?;
    eprintln!("the old guest: {error:#}");
    cluster.wait("the old attachment is gone", SOON, |cluster| {
        Ok((states(cluster, 1)?.is_empty() && !old.exists()).then_some(()))
    })?;
    let log = cluster.node(1)?.daemon().log();
    let told = "an operator removed this attachment";
    ensure!(
        log.contains(told),
        "nothing in the log\n{}",
        cluster.report()
    );
    goes_on(&cluster, &after, "healing node 1")?;
    cluster.wait("all is well", SOON, |cluster| {
        let well = cluster.node(1)?.daemon().cli(&["health"]).is_ok();
        Ok(well.then_some(()))
    })?;
    cluster.wait_ready()?;
    let mut now = after.stop()?;
    load::check(&new, &mut now, Promise::Acknowledged)
        .with_context(|| format!("read all back\n{}", cluster.report()))?;
    // The node that lost it may have it again.
    cluster.node(2)?.daemon().cli(&["detach", "disk"])?;
    let again = cluster.node(1)?.daemon().attach("disk", 1)?;
    load::check(&again, &mut now, Promise::Acknowledged)
}

#[test]
fn a_forgotten_attachment_ends_also_if_nobody_took_the_volume() -> Result<()> {
    let (mut cluster, old) = cluster_with_disk(ClusterOptions::new(penstock_binary()?, 3))?;
    let load = Load::start(&old, ledger());
    goes_on(&cluster, &load, "the start")?;
    cluster.network()?.cut(1, CutDirection::Both)?;
    cluster.wait("node 1 is down", SOON, |cluster| is_down(cluster, 1))?;
    let two = cluster.node(2)?.daemon();
    two.cli(&["detach", "disk", "--force", "--yes"])?;
    cluster.network()?.heal(1)?;
    // Its lease is its own still, and is given back.
    cluster.wait("the attachment is gone", SOON, |cluster| {
        Ok((states(cluster, 1)?.is_empty() && !old.exists()).then_some(()))
    })?;
    // Its last requests have failed, or have no answer.
    let mut now = load.cut_short()?;
    let new = cluster.wait("the volume is served elsewhere", SOON, |cluster| {
        Ok(cluster.node(2)?.daemon().attach("disk", 1).ok())
    })?;
    load::check(&new, &mut now, Promise::Acknowledged)
        .with_context(|| format!("read elsewhere\n{}", cluster.report()))
}

/// Copies the disk on node 2, and holds the copy up: until it is killed that node uses the volume.
fn hold(cluster: &Cluster) -> Result<Guarded> {
    let daemon = cluster.node(2)?.daemon();
    let generation = || -> Result<Option<u64>> {
        let shown = daemon.json(&["volume", "show", "disk"])?;
        Ok(shown["generation"].as_u64())
    };
    let start = || {
        Guarded::spawn(
            Command::new(penstock_binary()?)
                .args(["volume", "export", "disk", "-", "--data"])
                .arg(daemon.data())
                .stdin(Stdio::null())
                .stdout(Stdio::piped()),
            "a copy that nobody reads",
        )
    };
    let before = generation()?;
    let mut copy = start()?;
    cluster.wait("node 2 has the lease", SOON, |_| {
        // Refused while node 1 may still have it.
        if copy.ended()?.is_some() {
            copy = start()?;
        }
        Ok((generation()? > before).then_some(()))
    })?;
    Ok(copy)
}

#[test]
fn node_serves_again_when_another_holder_releases_its_lease() -> Result<()> {
    let (mut cluster, socket) = cluster_with_disk(ClusterOptions::new(penstock_binary()?, 3))?;
    let load = Load::start(&socket, ledger());
    load.progress(WRITES, SOON)?;
    cluster.network()?.cut(1, CutDirection::Both)?;
    std::thread::sleep(CUT);
    let mut copy = hold(&cluster)?;
    cluster.network()?.heal(1)?;
    let (mut now, error) = load
        .fails(SOON)
        .with_context(|| format!("the guest waits for ever\n{}", cluster.report()))?;
    eprintln!("the guest: {error:#}");
    cluster.wait("the attachment waits", SOON, |cluster| {
        Ok((states(cluster, 1)? == ["failed"]).then_some(()))
    })?;
    let health = cluster.node(1)?.daemon().json(&["status"])?["health"].to_string();
    ensure!(
        health.contains("is not served") && health.contains("served again"),
        "{health}"
    );
    ensure!(copy.ended()?.is_none(), "the copy has ended");
    copy.kill()?;
    cluster.wait("the attachment is served again", SOON, |cluster| {
        Ok((states(cluster, 1)? == ["listening"]).then_some(()))
    })?;
    load::check(&socket, &mut now, Promise::Acknowledged)
        .with_context(|| format!("read back\n{}", cluster.report()))?;
    let load = Load::start(&socket, now);
    goes_on(&cluster, &load, "the return of the lease")?;
    cluster.wait_ready()?;
    let mut now = load.stop()?;
    load::check(&socket, &mut now, Promise::Acknowledged)
        .with_context(|| format!("read all back\n{}", cluster.report()))
}
