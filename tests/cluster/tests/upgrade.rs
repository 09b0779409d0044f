//! Nodes are upgraded one after the other from the version before this one, and the guest notices nothing.

use std::time::Duration;

use anyhow::{Result, ensure};
use cluster_rig::guest::{cluster_with_disk, goes_on, ledger};
use cluster_rig::{Cluster, ClusterOptions, Load, Promise, load};
use guest_rig::paths::{penstock_binary, previous_binary};

/// Far beyond what the leader takes to hear all nodes.
const LEVEL_LIMIT: Duration = Duration::from_secs(60);
/// What the version before knows, which tells of no levels.
const BEFORE: u64 = 1;

/// The feature level that a node tells.
fn level(cluster: &Cluster, node: u8) -> Result<u64> {
    let status = cluster.node(node)?.daemon().json(&["status"])?;
    Ok(status["feature_level"].as_u64().unwrap_or(BEFORE))
}

/// Nodes of both versions change what the cluster knows, and see what the other one changed.
fn understand_each_other(cluster: &Cluster, when: &str) -> Result<()> {
    for one in cluster.nodes() {
        let name = format!("{when}-{}", one.number());
        one.daemon().cli(&["volume", "create", &name, "64M"])?;
        for other in cluster.nodes() {
            let volumes = other.daemon().json(&["volume", "list"])?;
            let mut volumes = volumes.as_array().into_iter().flatten();
            ensure!(
                volumes.any(|volume| volume["name"] == name.as_str()),
                "{} does not know volume {name} of {}\n{}",
                other.name(),
                one.name(),
                cluster.report()
            );
        }
    }
    Ok(())
}

#[test]
fn rolling_upgrade_goes_unnoticed_by_the_guest() -> Result<()> {
    let (mut cluster, socket) = cluster_with_disk(ClusterOptions::new(previous_binary()?, 3))?;
    let load = Load::start(&socket, ledger());
    goes_on(&cluster, &load, "the start")?;
    for (upgraded, killed) in [(2, 3), (3, 2)] {
        cluster.node_mut(upgraded)?.upgrade(penstock_binary()?)?;
        goes_on(&cluster, &load, &format!("the upgrade of node {upgraded}"))?;
        cluster.wait_ready()?;
        understand_each_other(&cluster, &format!("after{upgraded}"))?;
        ensure!(level(&cluster, upgraded)? == BEFORE, "node 1 is of before");
        // A replica of the version before catches up with one of this version, and one of this with what one
        // of before wrote.
        cluster.node_mut(killed)?.kill()?;
        goes_on(&cluster, &load, &format!("kill -9 of node {killed}"))?;
        cluster.node_mut(killed)?.start()?;
        cluster.wait_ready()?;
        goes_on(&cluster, &load, &format!("the return of node {killed}"))?;
    }
    // The driver of this load does not connect again.
    let mut ledger = load.stop()?;
    cluster.node_mut(1)?.upgrade(penstock_binary()?)?;
    cluster.wait_ready()?;
    load::check(&socket, &mut ledger, Promise::Acknowledged)?;
    for node in 1..=3 {
        cluster.wait("the level rises", LEVEL_LIMIT, |cluster| {
            Ok((level(cluster, node)? > BEFORE).then_some(()))
        })?;
    }
    understand_each_other(&cluster, "done")
}
