//! What the machines' programs share: the nodes of a machine, and what daemons tell of RDMA.

use anyhow::{Result, ensure};
use cluster_rig::cluster::ClusterOptions;
use guest_rig::Daemon;

/// Nodes of a machine that stores.
pub const NODES: u8 = 3;
/// Size of each node's disk, of which only what is used takes memory.
const DISK_MIB: u32 = 768;

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

/// Addresses of the machine's card, which begin so and end with the node's number, and disks in its memory, one for each node.
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

/// To how many others the data of a daemon go over RDMA alone, and to how many those of some thread over TCP. A thread that asks nothing does not notice that its
/// queue pairs have failed.
pub fn ways(daemon: &Daemon) -> Result<(usize, usize)> {
    let status = daemon.json(&["status"])?;
    let ways = status["transports"].as_array().cloned().unwrap_or_default();
    let tcp = ways.iter().filter(|way| way["tcp"] != 0).count();
    let rdma = ways
        .iter()
        .filter(|way| way["rdma"] != 0 && way["tcp"] == 0);
    Ok((rdma.count(), tcp))
}

pub const METRICS: [&str; 10] = [
    "penstock_rdma_messages_total",
    "penstock_rdma_inside_total",
    "penstock_rdma_reads_total",
    "penstock_rdma_writes_total",
    "penstock_rdma_copied_bytes_total",
    "penstock_rdma_credits_exhausted_total",
    "penstock_rdma_torn_total",
    "penstock_rdma_registrations_total",
    "penstock_rdma_regions",
    "penstock_rdma_pinned_bytes",
];
/// Where in [`METRICS`] each is.
pub const MESSAGES: usize = 0;
pub const INSIDE: usize = 1;
pub const READS: usize = 2;
pub const COPIED: usize = 4;
pub const TORN: usize = 6;
pub const REGISTRATIONS: usize = 7;
pub const REGIONS: usize = 8;

pub fn metrics(daemon: &Daemon) -> Result<[u64; METRICS.len()]> {
    let mut values = [0; METRICS.len()];
    for (value, name) in values.iter_mut().zip(METRICS) {
        *value = daemon.metric(name)? as u64;
    }
    Ok(values)
}

/// Tries something until it is so, a few times: a machine that is emulated, and beside others, may lose a queue pair or a peer at any moment.
pub fn steadily(mut attempt: impl FnMut() -> Result<()>) -> Result<()> {
    for _ in 1..ATTEMPTS {
        match attempt() {
            Ok(()) => return Ok(()),
            Err(error) => println!("not now: {error:#}"),
        }
    }
    attempt()
}

/// What a load has cost a daemon since `before`: data by messages alone, `least` of them, nothing copied, nothing registered.
pub fn is_without_copies(daemon: &Daemon, before: &[u64; METRICS.len()], least: u64) -> Result<()> {
    let after = metrics(daemon)?;
    let changed: [u64; METRICS.len()] = std::array::from_fn(|at| after[at] - before[at]);
    println!("{:?}", METRICS.iter().zip(changed).collect::<Vec<_>>());
    ensure!(changed[MESSAGES] > least, "{} messages", changed[MESSAGES]);
    ensure!((changed[COPIED], changed[TORN], changed[REGISTRATIONS]) == (0, 0, 0));
    Ok(())
}
