//! Runs inside a virtual machine: three nodes of a cluster on the machine's RDMA device, and at a disk of the first a guest without a machine
//! of its own. What it prints and promises is looked at in `tests/cluster.rs`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cluster_rig::cluster::{Cluster, ClusterOptions};
use cluster_rig::guest::{check, cluster_with_disk, goes_on, ledger};
use cluster_rig::load::{Load, Requests};

const NODES: u8 = 3;
/// Size of each node's disk, of which only what is used takes memory.
const DISK_MIB: u32 = 768;
/// Requests under which something is measured.
const SOME: u64 = 500;
const SOON: Duration = Duration::from_secs(60);
/// A queue pair is offered again after a pause that grows with failures.
const PAIRED_LIMIT: Duration = Duration::from_secs(150);
/// Front ends that come and go.
const FRONT_ENDS: u32 = 1000;
/// Pieces of memory that each hands over: of its ring, and of its buffers.
const REGIONS_EACH: u64 = 2;

fn sh(script: &str) -> Result<String> {
    let output = std::process::Command::new("/bin/sh")
        .args(["-c", script])
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{script}: {text}{error}");
    Ok(text)
}

/// Addresses of the machine's card and disks in its memory, one for each node.
fn machine() -> Result<ClusterOptions> {
    let mut options = ClusterOptions::new("/usr/bin/penstock".into(), NODES);
    for number in 1..=NODES {
        let address = format!("10.77.1.{number}");
        sh(&format!("ip addr add {address}/24 dev eth0"))?;
        let device = format!("/dev/loop{number}");
        sh(&format!(
            "[ -e {device} ] || mknod {device} b 7 {number}
             truncate -s {DISK_MIB}M /run/disk{number} && losetup {device} /run/disk{number}"
        ))?;
        options.addresses.push(address);
        options.block_devices.push(device.into());
    }
    options.wire = Some("crc".to_owned());
    options.base = Some("/run".into());
    let args = ["--transport", "auto", "--threads", "1"];
    options.serve_args = args.map(str::to_owned).into();
    Ok(options)
}

/// Whether the data of node 1 go to all others over RDMA.
fn is_paired(cluster: &Cluster) -> Result<bool> {
    let status = cluster.node(1)?.daemon().json(&["status"])?;
    let ways = status["transports"].as_array().cloned();
    let ways = ways.unwrap_or_default();
    let rdma = ways
        .iter()
        .filter(|way| way["rdma"] != 0 && way["tcp"] == 0);
    Ok(rdma.count() + 1 == usize::from(NODES))
}

fn wait_paired(cluster: &Cluster, wanted: bool, after: &str) -> Result<()> {
    cluster
        .wait("RDMA", PAIRED_LIMIT, |cluster| {
            Ok((is_paired(cluster)? == wanted).then_some(()))
        })
        .with_context(|| format!("after {after}: RDMA to all others, {wanted}"))
}

const METRICS: [&str; 10] = [
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

fn metrics(cluster: &Cluster, node: u8) -> Result<[u64; METRICS.len()]> {
    let mut values = [0; METRICS.len()];
    for (value, name) in values.iter_mut().zip(METRICS) {
        *value = cluster.node(node)?.daemon().metric(name)? as u64;
    }
    Ok(values)
}

/// What a load costs: data by messages alone, nothing copied, nothing registered.
fn is_without_copies(cluster: &Cluster, load: &Load) -> Result<()> {
    let all = || -> Result<Vec<_>> { (1..=NODES).map(|node| metrics(cluster, node)).collect() };
    let before = all()?;
    load.progress(SOME, SOON)?;
    let after = all()?;
    for (node, (before, after)) in (1..).zip(before.iter().zip(&after)) {
        let changed: [u64; METRICS.len()] = std::array::from_fn(|at| after[at] - before[at]);
        println!(
            "node {node}: {:?}",
            METRICS.iter().zip(changed).collect::<Vec<_>>()
        );
        let [messages, .., copied, _, torn, registrations, _, _] = changed;
        ensure!(messages > SOME / 4, "node {node} sent {messages} messages");
        ensure!((copied, torn, registrations) == (0, 0, 0), "node {node}");
    }
    println!("no copy, no registration: ok");
    Ok(())
}

/// Faults under a load: the guest sees a pause at most, and everything is there.
fn faults(cluster: &mut Cluster, socket: &Path) -> Result<()> {
    let load = Load::start(socket, ledger());
    goes_on(cluster, &load, "the beginning")?;
    wait_paired(cluster, true, "the beginning")?;
    is_without_copies(cluster, &load)?;

    sh("ip link set eth0 down")?;
    wait_paired(cluster, false, "the link went down")?;
    goes_on(cluster, &load, "the link went down")?;
    println!("link down: ok");
    sh("ip link set eth0 up")?;
    wait_paired(cluster, true, "the link came up")?;
    goes_on(cluster, &load, "the link came up")?;
    println!("link up: ok");

    for node in [3, 2] {
        cluster.node_mut(node)?.kill()?;
        goes_on(cluster, &load, &format!("node {node} was killed"))?;
        cluster.node_mut(node)?.start()?;
        cluster.wait_ready()?;
        wait_paired(cluster, true, &format!("node {node} came back"))?;
        goes_on(cluster, &load, &format!("node {node} came back"))?;
    }
    println!("kill -9: ok");
    check(cluster, socket, load)?;
    println!("all read back: ok");
    Ok(())
}

/// Front ends connect, hand their memory over, use it, and go.
fn front_ends(cluster: &Cluster, socket: &Path) -> Result<()> {
    let resources = || sh("rdma resource show");
    let before = (metrics(cluster, 1)?, resources()?);
    for nth in 0..FRONT_ENDS {
        let mut disk = Requests::connect(socket).with_context(|| format!("front end {nth}"))?;
        disk.write(u64::from(nth % 64) * 4096)?;
    }
    let regions = METRICS.len() - 2;
    cluster.wait("memory to be given back", SOON, |cluster| {
        Ok((metrics(cluster, 1)?[regions] == before.0[regions]).then_some(()))
    })?;
    let after = (metrics(cluster, 1)?, resources()?);
    println!("before: {}after: {}", before.1, after.1);
    ensure!(before.1 == after.1, "the device keeps something");
    ensure!(before.0[regions..] == after.0[regions..]);
    let registered = after.0[regions - 1] - before.0[regions - 1];
    println!("{FRONT_ENDS} front ends, {registered} registrations");
    ensure!(registered == REGIONS_EACH * u64::from(FRONT_ENDS));
    ensure!(after.0[4] == before.0[4], "something was copied");
    println!("front ends: ok");
    Ok(())
}

fn main() -> Result<()> {
    let options = machine()?;
    let (mut cluster, socket): (Cluster, PathBuf) = cluster_with_disk(options)?;
    faults(&mut cluster, &socket)?;
    front_ends(&cluster, &socket)
}
