//! What a request costs on the network.

use std::net::Ipv4Addr;

use anyhow::{Result, ensure};
use cluster_rig::trace::Message;
use cluster_rig::{Cluster, ClusterOptions, Requests, Trace};
use guest_rig::paths::penstock_binary;

/// Where data travel.
const DATA_PORT: u16 = 7471;
/// Where the block lies.
const OFFSET: u64 = 40 << 20;

/// How often it is read.
const READS: usize = 40;

/// The messages that a node and others exchange about data while `act` goes on.
fn traced(
    cluster: &mut Cluster,
    node: u8,
    act: impl FnOnce() -> Result<()>,
) -> Result<Vec<Message>> {
    let trace = Trace::start(cluster.network()?, node)?;
    act()?;
    let mut messages = trace.stop()?;
    messages.retain(|message| message.port == DATA_PORT);
    for message in &messages {
        eprintln!("{message}");
    }
    Ok(messages)
}

#[test]
fn replicated_write_is_one_round_trip_and_a_local_read_is_none() -> Result<()> {
    let mut cluster = Cluster::start(ClusterOptions::new(penstock_binary()?, 3))?;
    // Wherever the own replica stands in the map.
    for node in [1, 3] {
        costs(&mut cluster, node)?;
    }
    Ok(())
}

fn costs(cluster: &mut Cluster, node: u8) -> Result<()> {
    let one: Ipv4Addr = cluster.address(node).parse()?;
    let daemon = cluster.node(node)?.daemon();
    let socket = daemon.disk(&format!("disk{node}"), "64M", 1)?;
    let mut requests = Requests::connect(&socket)?;
    // The first ones make connections and learn the map.
    for _ in 0..3 {
        requests.write(OFFSET)?;
        requests.read(OFFSET)?;
    }
    std::thread::sleep(std::time::Duration::from_secs(1));

    eprintln!("a write:");
    let messages = traced(cluster, node, || requests.write(OFFSET))?;
    for node in (1..=3).filter(|other| *other != node) {
        let other: Ipv4Addr = cluster.address(node).parse()?;
        let said = |from: Ipv4Addr, to: Ipv4Addr| {
            let between = messages.iter();
            between.filter(|m| m.from == from && m.to == to).count()
        };
        assert_eq!(
            (said(one, other), said(other, one)),
            (1, 1),
            "one message to node {node} and one back"
        );
    }

    // One that the local disk keeps waiting is asked of another replica, too; a busy machine has some such.
    eprintln!("{READS} reads:");
    let messages = traced(cluster, node, || {
        (0..READS).try_for_each(|_| requests.read(OFFSET))
    })?;
    let asked = messages.iter().filter(|m| m.from == one).count();
    ensure!(
        asked <= READS / 2,
        "of {READS} local reads {asked} asked others"
    );
    Ok(())
}
