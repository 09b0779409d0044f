//! What a guest wrote is there, and no request ever fails, whatever happens to the nodes and the network.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cluster_rig::guest::{cluster_with_disk, goes_on, ledger};
use cluster_rig::{Cluster, ClusterOptions, CutDirection, Load, Promise, load};
use guest_rig::paths::penstock_binary;
use serde_json::Value;

/// Far beyond what a node needs to notice something.
const SOON: Duration = Duration::from_secs(60);

#[test]
fn a_guest_goes_on_while_nodes_are_killed_and_cut_off() -> Result<()> {
    let (mut cluster, socket) = cluster_with_disk(ClusterOptions::new(penstock_binary()?, 3))?;
    let load = Load::start(&socket, ledger());
    goes_on(&cluster, &load, "the start")?;
    for node in [3, 2] {
        cluster.node_mut(node)?.kill()?;
        goes_on(&cluster, &load, &format!("kill -9 of node {node}"))?;
        cluster.node_mut(node)?.start()?;
        cluster.wait_ready()?;
        goes_on(&cluster, &load, &format!("the return of node {node}"))?;
    }
    for (node, way) in [
        (3, CutDirection::Both),
        (2, CutDirection::In),
        (3, CutDirection::Out),
    ] {
        cluster.network()?.cut(node, way)?;
        goes_on(&cluster, &load, &format!("a cut at node {node}, {way:?}"))?;
        cluster.network()?.heal(node)?;
        cluster.wait_ready()?;
        goes_on(&cluster, &load, &format!("healing node {node}"))?;
    }
    // Two of the three that do not hear each other, while both hear the third.
    cluster.network()?.cut_pair(2, 3, CutDirection::Both)?;
    goes_on(&cluster, &load, "a cut between nodes 2 and 3")?;
    cluster.network()?.heal_all()?;
    cluster.wait_ready()?;
    goes_on(&cluster, &load, "healing it")?;
    let mut ledger = load.stop()?;
    load::check(&socket, &mut ledger, Promise::Acknowledged)
}

/// Names of the nodes that are down, as `teller` tells; nothing while it cannot.
fn down(cluster: &Cluster, teller: u8) -> Result<Option<Vec<String>>> {
    let Ok(nodes) = cluster.node(teller)?.daemon().json(&["node", "list"]) else {
        return Ok(None);
    };
    let nodes = nodes.as_array().context("it is a list")?;
    let down = nodes.iter().filter(|node| node["state"] == "down");
    let names = down.filter_map(|node| node["name"].as_str());
    Ok(Some(names.map(str::to_owned).collect()))
}

#[test]
fn a_guest_goes_on_while_nothing_arrives_at_one_node() -> Result<()> {
    let (mut cluster, socket) = cluster_with_disk(ClusterOptions::new(penstock_binary()?, 3))?;
    // One of the others leads then.
    cluster.node_mut(1)?.stop()?;
    cluster.node_mut(1)?.start()?;
    cluster.wait_ready()?;
    let load = Load::start(&socket, ledger());
    goes_on(&cluster, &load, "the start")?;
    for node in [2, 3] {
        cluster.network()?.cut(node, CutDirection::InToPorts)?;
        goes_on(&cluster, &load, &format!("a firewall at node {node}"))?;
        cluster.wait("it alone is down", SOON, |cluster| {
            let only = format!("node{node}");
            Ok(down(cluster, 5 - node)?.filter(|down| *down == [only.as_str()]))
        })?;
        cluster.network()?.heal(node)?;
        cluster.wait_ready()?;
        goes_on(&cluster, &load, &format!("the end of it at node {node}"))?;
    }
    let mut ledger = load.stop()?;
    load::check(&socket, &mut ledger, Promise::Acknowledged)
}

#[test]
fn the_guest_of_a_node_that_is_cut_off_waits_and_gets_no_error() -> Result<()> {
    let (mut cluster, socket) = cluster_with_disk(ClusterOptions::new(penstock_binary()?, 3))?;
    let load = Load::start(&socket, ledger());
    goes_on(&cluster, &load, "the start")?;
    cluster.network()?.cut(1, CutDirection::Both)?;
    // Long enough that the others have replaced it in all that it did, and its lease has ended.
    std::thread::sleep(Duration::from_secs(20));
    let before = load.completed();
    std::thread::sleep(Duration::from_secs(1));
    ensure!(
        load.completed() == before,
        "a node that is cut off acknowledges writes"
    );
    cluster.network()?.heal(1)?;
    goes_on(&cluster, &load, "healing node 1")?;
    cluster.wait_ready()?;
    let mut ledger = load.stop()?;
    load::check(&socket, &mut ledger, Promise::Acknowledged)
}

#[test]
fn nodes_restart_in_turn_and_the_guest_notices_nothing() -> Result<()> {
    let (mut cluster, socket) = cluster_with_disk(ClusterOptions::new(penstock_binary()?, 3))?;
    let load = Load::start(&socket, ledger());
    goes_on(&cluster, &load, "the start")?;
    for node in [2, 3] {
        cluster.node_mut(node)?.stop()?;
        goes_on(&cluster, &load, &format!("SIGTERM of node {node}"))?;
        cluster.node_mut(node)?.start()?;
        cluster.wait_ready()?;
    }
    let mut ledger = load.stop()?;
    cluster.node_mut(1)?.stop()?;
    cluster.node_mut(1)?.start()?;
    cluster.wait_ready()?;
    load::check(&socket, &mut ledger, Promise::Acknowledged)
}

/// Each group waits until the replica that is not there has no lease any more. How long is printed.
#[test]
fn a_guest_goes_on_after_two_of_three_nodes_are_started() -> Result<()> {
    let (mut cluster, socket) = cluster_with_disk(ClusterOptions::new(penstock_binary()?, 3))?;
    let load = Load::start(&socket, ledger());
    goes_on(&cluster, &load, "the start")?;
    let ledger = load.stop()?;
    (1..=3).try_for_each(|node| cluster.node_mut(node)?.kill())?;
    let begun = Instant::now();
    (1..=2).try_for_each(|node| cluster.node_mut(node)?.spawn())?;
    cluster.wait("both serve", SOON, |cluster| {
        let serves = |node| cluster.node(node).is_ok_and(|node| node.daemon().serves());
        Ok((serves(1) && serves(2)).then_some(()))
    })?;
    eprintln!("both serve after {} ms", begun.elapsed().as_millis());
    let told = cluster.wait("health tells how long I/O waits", SOON, |cluster| {
        let Ok(status) = cluster.node(1)?.daemon().json(&["status"]) else {
            return Ok(None);
        };
        let problems = status["health"]["problems"].as_array().cloned();
        let mut problems = problems.into_iter().flatten();
        let waits = |one: &Value| one["doing"].to_string().contains("go on without them then");
        Ok(problems.find(waits))
    })?;
    eprintln!("health: {told}");
    let load = Load::start(&socket, ledger);
    goes_on(&cluster, &load, "two of three nodes were started")?;
    eprintln!("I/O after {} ms", begun.elapsed().as_millis());
    let mut ledger = load.stop()?;
    load::check(&socket, &mut ledger, Promise::Acknowledged)
}

#[test]
fn what_was_flushed_survives_the_loss_of_power_of_all_nodes() -> Result<()> {
    let options = ClusterOptions::new(penstock_binary()?, 3).powered(1 << 30);
    let (mut cluster, socket) = cluster_with_disk(options)?;
    let mut ledger = ledger();
    for seed in 1..=3 {
        let load = Load::start(&socket, ledger);
        goes_on(&cluster, &load, "the start")?;
        let lost = cluster.cut_power_of_all(seed)?;
        ledger = load.abandon()?;
        eprintln!("seed {seed}: lost blocks {lost:?}");
        cluster.start_all()?;
        cluster.wait_ready()?;
        load::check(&socket, &mut ledger, Promise::Flushed)
            .with_context(|| format!("after a loss of power, seed {seed}\n{}", cluster.report()))?;
    }
    Ok(())
}
