//! What the machines' programs share: the nodes of a machine, and what daemons tell of RDMA.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use cluster_rig::cluster::{Cluster, ClusterOptions};
use cluster_rig::load::Requests;
use guest_rig::Daemon;
use serde_json::Value;

/// Nodes of a machine that stores.
pub const NODES: u8 = 3;
/// Size of each node's disk, of which only what is used takes memory.
const DISK_MIB: u32 = 768;

/// What is to happen has happened within this.
pub const SOON: Duration = Duration::from_secs(60);
/// A queue pair is offered again after a pause that grows with failures.
pub const PAIRED_LIMIT: Duration = Duration::from_secs(150);
/// See [`steadily`].
const ATTEMPTS: u32 = 5;

/// The program under test.
pub const PENSTOCK: &str = "/usr/bin/penstock";
/// Arguments of every daemon.
pub const SERVE_ARGS: [&str; 4] = ["--transport", "auto", "--threads", "1"];
/// How data travel: a card does not encrypt.
pub const WIRE: &str = "crc";

pub fn sh(script: &str) -> Result<String> {
    let output = std::process::Command::new("/bin/sh")
        .args(["-c", script])
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{script}: {text}{error}");
    Ok(text)
}

/// Addresses of the machine's card, which begin so and end with the node's number, and disks in its memory,
/// one for each node.
pub fn nodes(addresses: &str) -> Result<ClusterOptions> {
    let mut options = ClusterOptions::new(PENSTOCK.into(), NODES);
    for number in 1..=NODES {
        let address = format!("{addresses}{number}");
        sh(&format!("ip addr add {address}/24 dev eth0"))?;
        let device = format!("/dev/loop{number}");
        sh(&format!(
            "[ -e {device} ] || mknod {device} b 7 {number}
             truncate -s {DISK_MIB}M /run/disk{number} && losetup {device} /run/disk{number}"
        ))?;
        options.addresses.push(address);
        options.block_devices.push(device.into());
    }
    options.wire = Some(WIRE.to_owned());
    options.base = Some("/run".into());
    options.serve_args = SERVE_ARGS.map(str::to_owned).into();
    Ok(options)
}

/// Length of long writes, whose data each replica reads, or whose buffer changes while they are under way.
pub const LONG: usize = 256 << 10;

/// Writes so many one after the other, from the beginning of a disk.
pub fn write_long(socket: &Path, count: u64, restless: bool) -> Result<()> {
    let mut disk = Requests::connect_long(socket)?;
    for nth in 0..count {
        disk.write_long(nth * LONG as u64, LONG, restless)?;
    }
    Ok(())
}

/// Reads them back.
pub fn read_long(socket: &Path, count: u64) -> Result<Vec<Vec<u8>>> {
    let mut disk = Requests::connect_long(socket)?;
    let all = (0..count).map(|nth| disk.read_long(nth * LONG as u64, LONG));
    all.collect()
}

/// A volume that is attached nowhere holds the same at each node, of which each reads its own replica.
pub fn is_same_everywhere(cluster: &Cluster, volume: &str, count: u64) -> Result<()> {
    let mut first: Option<Vec<Vec<u8>>> = None;
    for node in 1..=NODES {
        let daemon = cluster.node(node)?.daemon();
        let all = read_long(&daemon.attach(volume, 1)?, count)?;
        daemon.cli(&["detach", volume])?;
        let same = first.get_or_insert_with(|| all.clone()) == &all;
        ensure!(same, "node {node} holds other bytes than node 1");
    }
    Ok(())
}

/// The ways of a daemon's data to others, as `penstock status --json` tells.
pub fn transports(daemon: &Daemon) -> Result<Vec<Value>> {
    let status = daemon.json(&["status"])?;
    Ok(status["transports"].as_array().cloned().unwrap_or_default())
}

/// To how many others the data of a daemon go over RDMA alone, and to how many those of some thread over TCP.
/// A thread that asks nothing does not notice that its queue pairs have failed.
pub fn ways(daemon: &Daemon) -> Result<(usize, usize)> {
    let ways = transports(daemon)?;
    let tcp = ways.iter().filter(|way| way["tcp"] != 0).count();
    let rdma = ways
        .iter()
        .filter(|way| way["rdma"] != 0 && way["tcp"] == 0);
    Ok((rdma.count(), tcp))
}

pub const METRICS: [&str; 11] = [
    "penstock_rdma_messages_total",
    "penstock_rdma_inside_total",
    "penstock_rdma_reads_total",
    "penstock_rdma_writes_total",
    "penstock_rdma_copied_bytes_total",
    "penstock_rdma_credits_exhausted_total",
    "penstock_rdma_qp_failures_total",
    "penstock_rdma_registrations_total",
    "penstock_rdma_regions",
    "penstock_rdma_pinned_bytes",
    "penstock_network_sent_bytes_total{transport=\"tcp\"}",
];
/// Where in [`METRICS`] each is.
pub const MESSAGES: usize = 0;
pub const INSIDE: usize = 1;
pub const READS: usize = 2;
pub const COPIED: usize = 4;
pub const NO_CREDIT: usize = 5;
pub const TORN: usize = 6;
pub const REGISTRATIONS: usize = 7;
pub const REGIONS: usize = 8;
pub const PINNED: usize = 9;
pub const BY_TCP: usize = 10;

pub fn metrics(daemon: &Daemon) -> Result<[u64; METRICS.len()]> {
    let mut values = [0; METRICS.len()];
    for (value, name) in values.iter_mut().zip(METRICS) {
        *value = daemon.metric(name)? as u64;
    }
    Ok(values)
}

/// Tries something until it is so, a few times: a machine that is emulated, and beside others, may lose a
/// queue pair or a peer at any moment.
pub fn steadily(mut attempt: impl FnMut() -> Result<()>) -> Result<()> {
    for _ in 1..ATTEMPTS {
        match attempt() {
            Ok(()) => return Ok(()),
            Err(error) => println!("not now: {error:#}"),
        }
    }
    attempt()
}

/// What a load has cost a daemon since `before`: data by RDMA alone, at least so many messages, nothing
/// copied, nothing registered.
pub fn is_without_copies(daemon: &Daemon, before: &[u64; METRICS.len()], least: u64) -> Result<()> {
    let after = metrics(daemon)?;
    let changed: [u64; METRICS.len()] = std::array::from_fn(|at| after[at] - before[at]);
    println!("{:?}", METRICS.iter().zip(changed).collect::<Vec<_>>());
    ensure!(changed[MESSAGES] > least, "{} messages", changed[MESSAGES]);
    let none = [COPIED, NO_CREDIT, TORN, REGISTRATIONS, BY_TCP];
    ensure!(none.iter().all(|at| changed[*at] == 0));
    Ok(())
}
