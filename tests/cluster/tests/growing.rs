//! A cluster grows, shrinks and has its nodes replaced while a guest writes.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cluster_rig::guest::{cluster_with_disk, goes_on, ledger};
use cluster_rig::{Cluster, ClusterOptions, CutDirection, Load, Promise, load};
use guest_rig::paths::penstock_binary;

/// Copies move within this: some hundred megabytes, beside a load, on a busy machine.
const MOVED_LIMIT: Duration = Duration::from_secs(180);
/// Longer than a node's lease, and than it takes the others to replace it in all that it did.
const CUT: Duration = Duration::from_secs(20);

/// How many placement groups have a replica on a node, and how many there are.
fn groups(cluster: &Cluster, node: u8) -> Result<(u64, u64)> {
    let name = format!("node{node}");
    let shown = cluster.any()?.daemon().json(&["node", "show", &name])?;
    let count = |key: &str| {
        shown[key]
            .as_u64()
            .with_context(|| format!("`node show` tells no {key}"))
    };
    Ok((count("groups")?, count("groups_total")?))
}

/// Waits until every node says that all is well, and the load goes on.
fn wait_and_check(cluster: &Cluster, load: &Load, after: &str) -> Result<()> {
    let after = format!("{after}, complete");
    wait_well(cluster).with_context(|| after.clone())?;
    goes_on(cluster, load, &after)
}

fn wait_well(cluster: &Cluster) -> Result<()> {
    cluster.wait("all nodes are well", MOVED_LIMIT, |cluster| {
        let running = cluster.nodes().iter().map(|node| node.daemon());
        let mut running = running.filter(|daemon| daemon.is_started());
        let well = running.all(|daemon| daemon.cli(&["health"]).is_ok());
        Ok((well && cluster.is_ready()?).then_some(()))
    })
}

/// Empties a node, has the cluster forget it, and throws it away.
fn drain_and_remove(cluster: &mut Cluster, load: &Load, node: u8) -> Result<()> {
    let name = format!("node{node}");
    cluster
        .any()?
        .daemon()
        .cli(&["node", "drain", &name, "--yes"])?;
    goes_on(cluster, load, &format!("draining node {node}"))?;
    cluster.wait("a node is empty", MOVED_LIMIT, |cluster| {
        Ok((groups(cluster, node)?.0 == 0).then_some(()))
    })?;
    goes_on(cluster, load, &format!("node {node} is empty"))?;
    cluster.forget(node)?;
    goes_on(cluster, load, &format!("removing node {node}"))?;
    cluster.discard(node)?;
    wait_and_check(cluster, load, &format!("node {node} is gone"))
}

/// A node dies for good, and the cluster is told so.
fn lose(cluster: &mut Cluster, load: &Load, node: u8) -> Result<()> {
    cluster.discard(node)?;
    goes_on(cluster, load, &format!("kill -9 of node {node}"))?;
    cluster.forget(node)?;
    goes_on(cluster, load, &format!("node {node} is forgotten"))
}

/// A node joins and gets its share.
fn join(cluster: &mut Cluster, load: &Load) -> Result<u8> {
    let node = cluster.join()?;
    goes_on(cluster, load, &format!("node {node} joined"))?;
    wait_and_check(cluster, load, &format!("node {node} joined"))?;
    let (held, total) = groups(cluster, node)?;
    let copies = 3 * total / cluster.nodes().len() as u64;
    ensure!(
        held >= copies * 9 / 10 && held <= total,
        "node {node} holds {held} of {total} groups"
    );
    Ok(node)
}

#[test]
fn cluster_grows_shrinks_and_replaces_lost_nodes_under_load() -> Result<()> {
    let (mut cluster, socket) = cluster_with_disk(ClusterOptions::new(penstock_binary()?, 3))?;
    let load = Load::start(&socket, ledger());
    goes_on(&cluster, &load, "the start")?;
    join(&mut cluster, &load)?;
    drain_and_remove(&mut cluster, &load, 2)?;
    lose(&mut cluster, &load, 3)?;
    join(&mut cluster, &load)?;
    // Where there are enough nodes the rest makes up for a lost one.
    join(&mut cluster, &load)?;
    lose(&mut cluster, &load, 5)?;
    wait_and_check(&cluster, &load, "node 5 is gone")?;
    let mut ledger = load.stop()?;
    load::check(&socket, &mut ledger, Promise::Acknowledged)
        .with_context(|| format!("read all back\n{}", cluster.report()))
}

/// Cuts a node off, heals the cut, and kills the node as soon as it is healed or `after` that.
fn cut_off_and_killed(node: u8, after: Duration) -> Result<()> {
    let (mut cluster, socket) = cluster_with_disk(ClusterOptions::new(penstock_binary()?, 3))?;
    let mut load = Load::start(&socket, ledger());
    goes_on(&cluster, &load, "the start")?;
    cluster.network()?.cut(node, CutDirection::Both)?;
    std::thread::sleep(CUT);
    cluster.network()?.heal(node)?;
    std::thread::sleep(after);
    cluster.node_mut(node)?.kill()?;
    if node == 1 {
        // The guest's connection went with its daemon.
        let mut ledger = load.abandon()?;
        cluster.node_mut(node)?.start()?;
        load::check(&socket, &mut ledger, Promise::Acknowledged)
            .with_context(|| format!("read all back\n{}", cluster.report()))?;
        load = Load::start(&socket, ledger);
    } else {
        cluster.node_mut(node)?.start()?;
    }
    goes_on(&cluster, &load, "the return")?;
    wait_and_check(&cluster, &load, "the return")?;
    let mut ledger = load.stop()?;
    load::check(&socket, &mut ledger, Promise::Acknowledged)
        .with_context(|| format!("read all back\n{}", cluster.report()))
}

#[test]
fn isolated_guest_node_killed_on_return_serves_again() -> Result<()> {
    for after in [0, 2] {
        cut_off_and_killed(1, Duration::from_secs(after))?;
    }
    Ok(())
}

#[test]
fn isolated_replica_killed_on_return_is_resynced() -> Result<()> {
    cut_off_and_killed(2, Duration::from_secs(1))
}
