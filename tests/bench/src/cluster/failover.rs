//! How long the writes of a real guest pause when a node is killed or cut off, as fio in the guest sees it.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use cluster_rig::{Cluster, ClusterOptions, CutDirection};
use guest_rig::paths::penstock_binary;
use guest_rig::process::wait_until;
use guest_rig::{Disk, GuestImage, Vm, VmConfig};
use serde::Serialize;

use super::creators::{CreatorLoad, Creators};
use super::say;

/// Nodes, and copies. The guest is on the first one.
const NODES: u8 = 3;
const HOST: u8 = 1;
/// The guest's disk.
const DISK_MIB: u64 = 512;
/// Size of each node's device.
const DEVICE_BYTES: u64 = 4 << 30;
/// Writes in each second, at most: far below what the machine can do, as it carries all nodes and the guest.
const WRITES_PER_S: u32 = 1000;
/// How long the guest writes before each event, and after it: longer than any pause may be.
const BEFORE: Duration = Duration::from_secs(1);
const AFTER: Duration = Duration::from_secs(8);
/// Longest wait for the last writes.
const END_LIMIT: Duration = Duration::from_secs(120);
/// Nodes that are up elect a leader within this.
const LEADER_LIMIT: Duration = Duration::from_secs(60);

/// What happens to a node other than the guest's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Event {
    /// Nothing, for comparison
    Nothing,
    /// `kill -9` of a node that keeps data
    Kill,
    /// `kill -9` of the one that leads the metadata, too
    KillLeader,
    /// A node that keeps data hears nobody and is not heard
    CutOff,
    /// The one that leads the metadata, likewise
    CutOffLeader,
}

impl Event {
    /// All of them.
    pub(super) const ALL: [Self; 5] = [
        Self::Nothing,
        Self::Kill,
        Self::KillLeader,
        Self::CutOff,
        Self::CutOffLeader,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Kill => "kill -9 of a storage node",
            Self::KillLeader => "kill -9 of the metadata leader",
            Self::CutOff => "a storage node is cut off",
            Self::CutOffLeader => "the metadata leader is cut off",
        }
    }

    fn is_about_leader(self) -> bool {
        matches!(self, Self::KillLeader | Self::CutOffLeader)
    }
}

/// What the guest saw of one event.
#[derive(Debug, Serialize)]
pub(super) struct Pause {
    pub(super) event: Event,
    /// Processes of another guest that made files, and how many files they made in a second.
    pub(super) creators: u32,
    pub(super) files_per_s: f64,
    /// How QEMU ran the guest.
    pub(super) accel: &'static str,
    /// Writes that fio has timed.
    pub(super) writes: u64,
    pub(super) p50_ms: f64,
    /// The longest one.
    pub(super) longest_ms: f64,
}

/// Measures each case `rounds` times.
pub(super) fn run(
    directory: &Path,
    cases: &[(Event, CreatorLoad)],
    rounds: usize,
) -> Result<Vec<Pause>> {
    let image = GuestImage::get(say)?;
    let mut options = ClusterOptions::new(penstock_binary()?, NODES);
    options.device_bytes = DEVICE_BYTES;
    options.base = Some(directory.to_owned());
    let mut cluster = Cluster::start(options)?;
    let size = format!("{DISK_MIB}M");
    let socket = cluster.node(HOST)?.daemon().disk("bench", &size, 1)?;
    let mut config = VmConfig::new(vec![Disk::new(socket)]);
    config.memory_mib = 512;
    let mut vm = Vm::boot(&image, &config)?;
    vm.sh("fio --name=fill --filename=/dev/vda --rw=write --bs=1M --direct=1 --output=/dev/null")?;
    let mut pauses = Vec::new();
    for round in 1..=rounds {
        for &(event, load) in cases {
            let beside = match load.creators {
                0 => String::new(),
                count => format!(", {count} creators"),
            };
            say(&format!(
                "round {round} of {rounds}: {}{beside}",
                event.name()
            ));
            let pause = watch(&mut cluster, &mut vm, event, load)
                .with_context(|| format!("{}\n{}", event.name(), cluster.report()))?;
            pauses.push(pause);
        }
    }
    let errors = vm.io_errors()?;
    ensure!(
        errors.is_empty(),
        "the guest saw errors:\n{}",
        errors.join("\n")
    );
    vm.power_off()?;
    Ok(pauses)
}

fn watch(cluster: &mut Cluster, vm: &mut Vm, event: Event, load: CreatorLoad) -> Result<Pause> {
    let node = victim(cluster, event)?;
    // Anew each time: its mount does not outlive a restart of its node.
    let creating = match load.creators {
        0 => None,
        _ => Some(Creators::start(cluster.node(HOST)?.daemon(), load)?),
    };
    vm.sh(&format!(
        "rm -f /tmp/fio*; fio --name=pulse --filename=/dev/vda --rw=randwrite --bs=4k --direct=1 \
         --ioengine=libaio \
         --iodepth=4 --rate_iops={WRITES_PER_S} --time_based --runtime=3600 --output-format=json \
         --output=/tmp/fio.json > /dev/null 2>&1 & echo $! > /tmp/fio.pid"
    ))?;
    std::thread::sleep(BEFORE);
    match event {
        Event::Nothing => {}
        Event::Kill | Event::KillLeader => cluster.node_mut(node)?.kill()?,
        Event::CutOff | Event::CutOffLeader => cluster.network()?.cut(node, CutDirection::Both)?,
    }
    std::thread::sleep(AFTER);
    let mut pause = read(vm, event)?;
    if let Some(creating) = creating {
        pause.creators = load.creators;
        pause.files_per_s = creating.end(cluster.node(HOST)?.daemon())?;
    }
    match event {
        Event::Nothing => {}
        Event::Kill | Event::KillLeader => cluster.node_mut(node)?.start()?,
        Event::CutOff | Event::CutOffLeader => cluster.network()?.heal(node)?,
    }
    cluster.wait_ready()?;
    Ok(pause)
}

/// The node that an event happens to: never the guest's own. If that one leads the metadata and must not, it
/// is stopped until another one does: a leader that is back before the others have missed it goes on leading.
fn victim(cluster: &mut Cluster, event: Event) -> Result<u8> {
    let mut leader = leader_known_to(cluster, HOST)?;
    if leader == HOST && event.is_about_leader() {
        cluster.node_mut(HOST)?.stop()?;
        leader = wait_until(LEADER_LIMIT, || {
            let other = leader_known_to(cluster, HOST + 1)?;
            Ok((other != HOST).then_some(other))
        })
        .context("nobody takes the lead over")?;
        cluster.node_mut(HOST)?.start()?;
        cluster.wait_ready()?;
    }
    let mut others = (1..=NODES).filter(|node| *node != HOST && *node != leader);
    match event.is_about_leader() {
        true => Ok(leader),
        false => others.next().context("three nodes and one leader"),
    }
}

fn leader_known_to(cluster: &Cluster, node: u8) -> Result<u8> {
    wait_until(LEADER_LIMIT, || {
        // Nobody answers while there is none.
        let Ok(nodes) = cluster.node(node)?.daemon().json(&["node", "list"]) else {
            return Ok(None);
        };
        let nodes = nodes.as_array().context("`node list` is no array")?;
        let leader = nodes.iter().find(|node| node["meta"] == "leader");
        let own = |leader: &serde_json::Value| {
            let mut nodes = cluster.nodes().iter();
            nodes.find(|node| leader["name"] == *node.name())
        };
        Ok(leader.and_then(own).map(cluster_rig::Node::number))
    })
    .context("nobody leads the metadata")
}

/// Ends fio, and reads what it has seen.
fn read(vm: &mut Vm, event: Event) -> Result<Pause> {
    vm.sh("kill -INT $(cat /tmp/fio.pid)")?;
    vm.sh_until("! kill -0 $(cat /tmp/fio.pid) 2> /dev/null", END_LIMIT)?;
    let text = vm.sh("cat /tmp/fio.json")?;
    // It notes above the report that it was told to end.
    let json = text.find('{').map_or("", |at| &text[at..]);
    let report: serde_json::Value =
        serde_json::from_str(json).with_context(|| format!("fio says {text}"))?;
    let job = &report["jobs"][0];
    ensure!(job["error"] == 0, "fio saw an error: {}", job["error"]);
    let write = &job["write"];
    let ms = |value: &serde_json::Value| value.as_f64().map(|ns| ns / 1e6);
    Ok(Pause {
        event,
        creators: 0,
        files_per_s: 0.0,
        accel: vm.accel().name(),
        writes: write["total_ios"].as_u64().context("fio's total")?,
        p50_ms: ms(&write["clat_ns"]["percentile"]["50.000000"]).context("fio's median")?,
        longest_ms: ms(&write["lat_ns"]["max"]).context("fio's longest")?,
    })
}
