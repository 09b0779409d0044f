//! `cluster`: a disk with three copies on this machine, its daemons on the loopback device, and Ceph beside
//! it.
//!
//! The driver polls on one CPU, everything else shares the other one: all daemons of Penstock, or the
//! monitor, the OSDs and qemu-storage-daemon with librbd. So IOPS say what one core gives, and the time of
//! all these processes is counted. Then, of Penstock alone: what a node's return costs, and how long a guest
//! pauses when a node goes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use cluster_rig::{Cluster, ClusterOptions};
use guest_rig::paths::penstock_binary;
use serde::Serialize;
use tempfile::TempDir;

use crate::clock::Clock;
use crate::driver::{Direction, Driver, Load, Order};
use crate::ping_pong;
use crate::usage::cpu_time;
use ceph::Ceph;
use creators::CreatorLoad;
use failover::Event;

mod ceph;
mod creators;
mod failover;
mod report;
mod resync;

/// Nodes, and copies.
const NODES: u8 = 3;
/// Size of the disk.
const DISK_MIB: u64 = 1024;
/// Size of each node's device.
const DEVICE_BYTES: u64 = 4 << 30;
/// Depths of the loads.
const DEPTHS: [usize; 2] = [1, 32];

/// A part of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Loads on all systems
    Loads,
    /// A node that was away for 10 s, on Penstock with the first of the systems' wires
    Resync,
    /// Pauses of a guest while nodes are killed and cut off; needs root
    Failover,
}

/// Whom to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum System {
    /// Penstock, its data encrypted between nodes.
    PenstockTls,
    /// Penstock, its data with checksums only between nodes.
    PenstockCrc,
    /// Ceph.
    Ceph,
}

impl System {
    fn name(self) -> &'static str {
        match self {
            Self::PenstockTls => "penstock, tls",
            Self::PenstockCrc => "penstock, crc",
            Self::Ceph => "ceph",
        }
    }

    /// What Penstock's nodes are told; nothing if it is another system.
    fn wire(self) -> Option<&'static str> {
        match self {
            Self::PenstockTls => Some("tls"),
            Self::PenstockCrc => Some("crc"),
            Self::Ceph => None,
        }
    }
}

/// What is measured beside Penstock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Peer {
    /// Ceph: one monitor, three OSDs on files, librbd in qemu-storage-daemon.
    Ceph,
}

/// Options of `cluster`.
#[derive(Debug, Args)]
pub struct Options {
    /// Measure another system in the same run; its Debian packages are installed
    #[arg(long)]
    peer: Option<Peer>,
    /// Systems to measure [default: Penstock over both wires, and the peer]
    #[arg(long, value_delimiter = ',')]
    systems: Vec<System>,
    /// Parts to run [default: all]
    #[arg(long, value_delimiter = ',')]
    parts: Vec<Part>,
    /// What happens to nodes while the guest writes [default: everything]
    #[arg(long, value_delimiter = ',')]
    events: Vec<Event>,
    /// Measure each event also while so many processes of another guest make files in a filesystem
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=512))]
    creators: u32,
    /// Files that each of them makes in a second, at most [default: as many as it can]
    #[arg(long, requires = "creators", value_parser = clap::value_parser!(u32).range(1..=1000))]
    files_per_s: Option<u32>,
    /// Print JSON instead of tables
    #[arg(long)]
    json: bool,
    /// One short round: shows that everything works, measures little
    #[arg(long)]
    quick: bool,
    /// Alternations between the systems [default: 3, quick: 1]
    #[arg(long)]
    rounds: Option<usize>,
    /// Length of each run in seconds [default: 4, quick: 0.5]
    #[arg(long)]
    seconds: Option<f64>,
    /// Where the files live: a directory on a disk, not in memory [default: the system's temporary directory]
    #[arg(long)]
    directory: Option<PathBuf>,
    /// The driver's CPU, and that of everything else
    #[arg(long, value_delimiter = ',', default_values_t = [0, 1])]
    cpus: Vec<usize>,
}

/// One run.
#[derive(Debug, Serialize)]
pub(super) struct Run {
    system: System,
    load: Load,
    iops: f64,
    p50_us: f64,
    p99_us: f64,
    cpu_us_per_io: f64,
}

/// Three nodes in `directory` with all their threads on `cpu`, and the socket of a disk on the first.
fn start_penstock(wire: &str, directory: &Path, cpu: usize) -> Result<(Cluster, PathBuf)> {
    let mut options = ClusterOptions::new(penstock_binary()?, NODES);
    options.wire = Some(wire.to_owned());
    options.device_bytes = DEVICE_BYTES;
    // A write to a place without a block goes through a worker of the kernel's, which is no part of Penstock.
    options.full_files = true;
    options.loopback = true;
    options.cpu = Some(cpu);
    options.base = Some(directory.to_owned());
    options.serve_args = vec!["--threads".to_owned(), "1".to_owned()];
    let cluster = Cluster::start(options)?;
    let size = format!("{DISK_MIB}M");
    let socket = cluster.node(1)?.daemon().disk("bench", &size, 1)?;
    Ok((cluster, socket))
}

/// A running system.
enum Running {
    Penstock(Box<Cluster>, PathBuf),
    Ceph(Ceph),
}

impl Running {
    fn start(system: System, directory: &Path, cpu: usize) -> Result<Self> {
        let Some(wire) = system.wire() else {
            return Ok(Self::Ceph(Ceph::start(directory, cpu, DISK_MIB)?));
        };
        let (cluster, socket) = start_penstock(wire, directory, cpu)?;
        Ok(Self::Penstock(Box::new(cluster), socket))
    }

    fn socket(&self) -> Result<&Path> {
        match self {
            Self::Penstock(_, socket) => Ok(socket),
            Self::Ceph(ceph) => ceph.socket(),
        }
    }

    fn cpu_time(&self) -> Result<Duration> {
        let pids = match self {
            Self::Penstock(cluster, _) => {
                let nodes = cluster.nodes().iter();
                nodes
                    .map(|node| node.daemon().pid())
                    .collect::<Result<Vec<_>>>()?
            }
            Self::Ceph(ceph) => ceph.pids(),
        };
        pids.into_iter().map(cpu_time).sum()
    }
}

/// Runs the benchmark and prints its result.
pub fn run(options: &Options) -> Result<()> {
    let bench = Bench::new(options)?;
    let wants = |part| options.parts.is_empty() || options.parts.contains(&part);
    // The guest before this thread is pinned, as QEMU would be with it.
    let pauses = match wants(Part::Failover) {
        true => bench.failover(options)?,
        false => Vec::new(),
    };
    ping_pong::pin(bench.cpus[0])?;
    let runs = match wants(Part::Loads) {
        true => bench.loads()?,
        false => Vec::new(),
    };
    let resyncs = match wants(Part::Resync) {
        true => bench.resync()?,
        false => Vec::new(),
    };
    let summary = report::Summary::new(&runs, &resyncs, &pauses);
    if options.json {
        let all = serde_json::json!({
            "summary": summary, "runs": runs, "resyncs": resyncs, "pauses": pauses,
        });
        println!("{}", serde_json::to_string_pretty(&all)?);
    } else {
        summary.print();
    }
    Ok(())
}

/// What to do, with all defaults filled in.
struct Bench {
    systems: Vec<System>,
    quick: bool,
    rounds: usize,
    time: Duration,
    base: PathBuf,
    cpus: [usize; 2],
    clock: Clock,
}

impl Bench {
    fn new(options: &Options) -> Result<Self> {
        let cpus: [usize; 2] = options
            .cpus
            .as_slice()
            .try_into()
            .ok()
            .context("--cpus takes two numbers")?;
        if cpus[0] == cpus[1] {
            bail!("--cpus names {} twice", cpus[0]);
        }
        let quick = options.quick;
        let seconds = options.seconds.unwrap_or(if quick { 0.5 } else { 4.0 });
        let mut systems = vec![System::PenstockTls, System::PenstockCrc];
        systems.extend(options.peer.map(|Peer::Ceph| System::Ceph));
        if !options.systems.is_empty() {
            systems.clone_from(&options.systems);
        }
        Ok(Self {
            systems,
            quick,
            rounds: options.rounds.unwrap_or(if quick { 1 } else { 3 }).max(1),
            time: Duration::from_secs_f64(seconds),
            base: options.directory.clone().unwrap_or_else(std::env::temp_dir),
            cpus,
            clock: Clock::calibrate(),
        })
    }

    fn scratch(&self) -> Result<TempDir> {
        tempfile::Builder::new()
            .prefix("penstock-bench-")
            .tempdir_in(&self.base)
            .context("make a directory")
    }

    fn loads(&self) -> Result<Vec<Run>> {
        let mut runs = Vec::new();
        for round in 1..=self.rounds {
            for &system in &self.systems {
                let name = system.name();
                say(&format!("loads, round {round} of {}: {name}", self.rounds));
                let scratch = self.scratch()?;
                let running = Running::start(system, scratch.path(), self.cpus[1])?;
                measure(&running, system, self.time, self.clock, &mut runs)
                    .with_context(|| format!("measure {name}"))?;
            }
        }
        Ok(runs)
    }

    fn resync(&self) -> Result<Vec<resync::Round>> {
        let mut wires = self.systems.iter().filter_map(|system| system.wire());
        let wire = wires.next().context("--systems names no Penstock")?;
        (1..=self.rounds)
            .map(|round| {
                say(&format!("resync, round {round} of {}", self.rounds));
                let scratch = self.scratch()?;
                resync::round(scratch.path(), wire, self.cpus[1], self.clock, self.quick)
            })
            .collect()
    }

    fn failover(&self, options: &Options) -> Result<Vec<failover::Pause>> {
        let events = match options.events.as_slice() {
            [] => &Event::ALL,
            events => events,
        };
        let load = CreatorLoad {
            creators: options.creators,
            files_per_s: options.files_per_s,
        };
        let loads = match options.creators {
            0 => vec![CreatorLoad::NONE],
            _ => vec![CreatorLoad::NONE, load],
        };
        let with = |event: &Event| loads.iter().map(|load| (*event, *load)).collect::<Vec<_>>();
        let cases: Vec<(Event, CreatorLoad)> = events.iter().flat_map(with).collect();
        failover::run(self.scratch()?.path(), &cases, self.rounds)
    }
}

fn measure(
    running: &Running,
    system: System,
    time: Duration,
    clock: Clock,
    runs: &mut Vec<Run>,
) -> Result<()> {
    let mut driver = Driver::connect(running.socket()?, 1, clock)?;
    // Reads must find data, and nobody has to allocate while it is measured.
    driver.fill()?;
    for direction in [Direction::Write, Direction::Read] {
        for depth in DEPTHS {
            let load = Load {
                direction,
                order: Order::Random,
                block: 4096,
                depth,
            };
            driver.run(&load, time / 4)?;
            let before = running.cpu_time()?;
            let sample = driver.run(&load, time)?;
            let cpu = running.cpu_time()?.saturating_sub(before);
            let quantile = |q| sample.latency.value_at_quantile(q) as f64 / 1e3;
            let requests = sample.requests as f64;
            runs.push(Run {
                system,
                load,
                iops: requests / sample.elapsed.as_secs_f64(),
                p50_us: quantile(0.5),
                p99_us: quantile(0.99),
                cpu_us_per_io: cpu.as_secs_f64() * 1e6 / requests,
            });
        }
    }
    Ok(())
}

fn say(line: &str) {
    eprintln!("bench: {line}");
}
