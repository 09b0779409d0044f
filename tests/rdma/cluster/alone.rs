//! Three nodes of a cluster on one machine's RDMA device, and at a disk of the first a guest without a
//! machine of its own.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use cluster_rig::cluster::Cluster;
use cluster_rig::guest::{check, cluster_with_disk, goes_on, ledger};
use cluster_rig::load::{Load, Requests};
use guest_rig::Form;

use crate::kit::{
    self, COPIED, INSIDE, LONG, MESSAGES, NODES, PAIRED_LIMIT, PINNED, READS, REGIONS,
    REGISTRATIONS, SOON, metrics, sh,
};

/// How often each thing is done.
struct Repetitions {
    /// Requests under which something is measured.
    requests: u64,
    /// Nodes that are killed, one after the other.
    killed: &'static [u8],
    /// Front ends that come and go.
    front_ends: u32,
    /// Writes whose data each replica reads.
    long_writes: u64,
    /// The same whose buffer changes while they are under way.
    restless_writes: u64,
    /// Times that a volume is attached and detached.
    attachments: u64,
}

impl Repetitions {
    fn of(form: Form) -> Self {
        Self {
            requests: form.pick(200, 500),
            killed: form.pick(&[3], &[3, 2]),
            front_ends: form.pick(50, 1000),
            long_writes: form.pick(20, 100),
            restless_writes: form.pick(20, 50),
            attachments: form.pick(3, 20),
        }
    }
}

/// Pieces of memory that each hands over: of its ring, and of its buffers.
const REGIONS_EACH: u64 = 2;

/// Whether the data of node 1 go to all others over RDMA.
fn is_paired(cluster: &Cluster) -> Result<bool> {
    let (rdma, _) = kit::ways(cluster.node(1)?.daemon())?;
    Ok(rdma + 1 == usize::from(NODES))
}

fn wait_paired(cluster: &Cluster, wanted: bool, after: &str) -> Result<()> {
    cluster
        .wait("RDMA", PAIRED_LIMIT, |cluster| {
            Ok((is_paired(cluster)? == wanted).then_some(()))
        })
        .with_context(|| format!("after {after}: RDMA to all others, {wanted}"))
}

fn is_without_copies(cluster: &Cluster, load: &Load, requests: u64) -> Result<()> {
    let daemon = |node: u8| Ok::<_, anyhow::Error>(cluster.node(node)?.daemon());
    kit::steadily(|| {
        wait_paired(cluster, true, "nothing in particular")?;
        let before = (1..=NODES).map(|node| metrics(daemon(node)?));
        let before: Vec<_> = before.collect::<Result<_>>()?;
        load.progress(requests, SOON)?;
        for (node, before) in (1..).zip(&before) {
            kit::is_without_copies(daemon(node)?, before, requests / 4)
                .with_context(|| format!("node {node}"))?;
        }
        Ok(())
    })?;
    println!("no copy, no registration: ok");
    Ok(())
}

/// Faults under a load: the guest sees a pause at most, and everything is there.
fn faults(cluster: &mut Cluster, socket: &Path, repetitions: &Repetitions) -> Result<()> {
    let load = Load::start(socket, ledger());
    goes_on(cluster, &load, "the beginning")?;
    wait_paired(cluster, true, "the beginning")?;
    is_without_copies(cluster, &load, repetitions.requests)?;

    sh("ip link set eth0 down")?;
    wait_paired(cluster, false, "the link went down")?;
    goes_on(cluster, &load, "the link went down")?;
    println!("link down: ok");
    sh("ip link set eth0 up")?;
    wait_paired(cluster, true, "the link came up")?;
    goes_on(cluster, &load, "the link came up")?;
    println!("link up: ok");

    for &node in repetitions.killed {
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
fn front_ends(cluster: &Cluster, socket: &Path, count: u32) -> Result<()> {
    let resources = || sh("rdma resource show");
    let before = (metrics(cluster.node(1)?.daemon())?, resources()?);
    for nth in 0..count {
        let mut disk = Requests::connect(socket).with_context(|| format!("front end {nth}"))?;
        disk.write(u64::from(nth % 64) * 4096)?;
    }
    cluster.wait("memory to be given back", SOON, |cluster| {
        Ok((metrics(cluster.node(1)?.daemon())?[REGIONS] == before.0[REGIONS]).then_some(()))
    })?;
    let after = (metrics(cluster.node(1)?.daemon())?, resources()?);
    println!("before: {}after: {}", before.1, after.1);
    ensure!(before.1 == after.1, "the device keeps something");
    ensure!(before.0[REGIONS..] == after.0[REGIONS..]);
    let registered = after.0[REGISTRATIONS] - before.0[REGISTRATIONS];
    println!("{count} front ends, {registered} registrations");
    ensure!(registered == REGIONS_EACH * u64::from(count));
    ensure!(after.0[COPIED] == before.0[COPIED], "something was copied");
    println!("front ends: ok");
    Ok(())
}

/// Pieces of a long write at most: several beside another disk's small requests.
const PIECES_MAX: u64 = 8;

/// Long writes: one message each way and one READ for each piece and replica on another node, and nothing
/// copied.
fn long_writes(cluster: &Cluster, socket: &Path, count: u64) -> Result<()> {
    let all = || -> Result<Vec<_>> {
        let nodes = cluster.nodes().iter();
        nodes.map(|node| metrics(node.daemon())).collect()
    };
    let before = all()?;
    kit::write_long(socket, count, false)?;
    let after = all()?;
    let changed = |node: usize, what: usize| after[node][what] - before[node][what];
    let seen = |what| [0, 1, 2].map(|node| changed(node, what));
    println!(
        "{count} long writes: messages {:?}, READs {:?}, inside {:?}, copied {:?}",
        seen(MESSAGES),
        seen(READS),
        seen(INSIDE),
        seen(COPIED)
    );
    let pieces = seen(READS)[1];
    ensure!((count..=count * PIECES_MAX).contains(&pieces) && seen(READS) == [0, pieces, pieces]);
    ensure!((seen(COPIED), seen(INSIDE)) == ([0; 3], [0; 3]));
    // The cluster has something to say now and then besides.
    let spare = (count / 4).max(25);
    let least = [2 * pieces, pieces, pieces];
    let fits = |(seen, least): (u64, u64)| (least..least + spare).contains(&seen);
    ensure!(seen(MESSAGES).into_iter().zip(least).all(fits));
    println!("long writes: ok");
    Ok(())
}

/// A guest changes its buffers while they are written, and replicas read them at different moments: they hold
/// the same all the same.
fn restless_writes(cluster: &Cluster, socket: &Path, count: u64) -> Result<()> {
    let daemon = cluster.node(1)?.daemon();
    let before = metrics(daemon)?[COPIED];
    kit::write_long(socket, count, true)?;
    let copied = metrics(daemon)?[COPIED] - before;
    println!("{copied} bytes were sent once more, from a copy");
    ensure!(copied > 0, "no buffer changed too early");
    daemon.cli(&["detach", "disk"])?;
    kit::is_same_everywhere(cluster, "disk", count)?;
    println!("restless writes: ok");
    Ok(())
}

/// Attachments come and go; the memory of one that is not to be pinned is copied from, and stays as it is.
fn attachments(cluster: &Cluster, repetitions: &Repetitions) -> Result<()> {
    let (count, writes) = (repetitions.attachments, repetitions.long_writes);
    let daemon = cluster.node(1)?.daemon();
    daemon.cli(&["volume", "create", "other", "64M"])?;
    let before = metrics(daemon)?;
    for _ in 0..count {
        let socket = daemon.attach("other", 1)?;
        kit::write_long(&socket, 1, false)?;
        daemon.cli(&["detach", "other"])?;
    }
    let after = metrics(daemon)?;
    let opened = after[REGISTRATIONS] - before[REGISTRATIONS];
    ensure!(opened == REGIONS_EACH * count, "{opened}");
    ensure!((after[REGIONS], after[PINNED]) == (before[REGIONS], before[PINNED]));

    let socket = daemon.data().join("unpinned.sock");
    let path = socket.to_str().context("a path of ours")?;
    daemon.cli(&["attach", "volume", "other", "--socket", path, "--no-pin"])?;
    kit::write_long(&socket, writes, false)?;
    let unpinned = metrics(daemon)?;
    let copied = unpinned[COPIED] - after[COPIED];
    println!("--no-pin: {copied} bytes copied");
    ensure!(unpinned[REGISTRATIONS] == after[REGISTRATIONS]);
    // For each of the other nodes.
    ensure!(copied >= writes * LONG as u64);
    daemon.cli(&["detach", "other"])?;
    kit::is_same_everywhere(cluster, "other", writes)?;
    println!("attachments: ok");
    Ok(())
}

pub fn run(form: Form) -> Result<()> {
    let repetitions = Repetitions::of(form);
    let options = kit::nodes("10.77.1.")?;
    let (mut cluster, socket): (Cluster, PathBuf) = cluster_with_disk(options)?;
    faults(&mut cluster, &socket, &repetitions)?;
    front_ends(&cluster, &socket, repetitions.front_ends)?;
    cluster.wait_ready()?;
    wait_paired(&cluster, true, "all of this")?;
    kit::steadily(|| long_writes(&cluster, &socket, repetitions.long_writes))?;
    attachments(&cluster, &repetitions)?;
    restless_writes(&cluster, &socket, repetitions.restless_writes)
}
