//! `neighbours`: what a guest that asks for everything costs a quiet one on the same data thread.
//!
//! Three nodes on the loopback device share one CPU, the driver polls on the other: two disks of node 1,
//! whose one data thread serves both. The quiet guest reads and writes 4 KiB at random places, one request at
//! a time; it is measured alone and beside each flood in turn, in the same run, and the result is the ratio
//! of both 99th percentiles.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use cluster_rig::{Cluster, ClusterOptions};
use guest_rig::paths::penstock_binary;
use serde::Serialize;

use crate::clock::Clock;
use crate::driver::Driver;
use crate::median::median;
use crate::ping_pong;
use flood::Flood;
use quiet::Quiet;

mod flood;
mod quiet;

/// Size of each disk.
const DISK_MIB: u64 = 512;
/// Size of each node's device.
const DEVICE_BYTES: u64 = 4 << 30;
/// The nodes know within this time that one is gone, on a busy machine.
const NOTICE_LIMIT: Duration = Duration::from_secs(60);

/// What the other guest does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum FloodKind {
    /// 1,024 writes of 16 MiB at a time, each over the others.
    OverlappingWrites,
    /// 256 reads of 63 MiB, the longest that a disk takes, at a time.
    LongReads,
    /// 1,024 writes of 4 KiB at a time to a pool that is below its `min_in_sync`.
    StuckWrites,
}

impl FloodKind {
    fn name(self) -> &'static str {
        match self {
            Self::OverlappingWrites => "1,024 overlapping writes of 16 MiB",
            Self::LongReads => "256 reads of 63 MiB",
            Self::StuckWrites => "1,024 writes below min_in_sync",
        }
    }
}

/// Options of `neighbours`.
#[derive(Debug, Args)]
pub struct Options {
    /// What the other guest does [default: each in turn]
    #[arg(long, value_delimiter = ',')]
    floods: Vec<FloodKind>,
    /// Copies of both guests' data; with writes below min_in_sync there are three
    #[arg(long, value_delimiter = ',', default_values_t = [1, 3])]
    copies: Vec<u8>,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
    /// One short round: shows that everything works, measures little
    #[arg(long)]
    quick: bool,
    /// Times that the quiet guest is measured alone and beside each flood [default: 5, quick: 1]
    #[arg(long)]
    rounds: Option<usize>,
    /// Length of each measurement in seconds [default: 4, quick: 0.5]
    #[arg(long)]
    seconds: Option<f64>,
    /// Where the files live: a directory on a disk, not in memory [default: the system's temporary directory]
    #[arg(long)]
    directory: Option<PathBuf>,
    /// The driver's CPU, and that of everything else
    #[arg(long, value_delimiter = ',', default_values_t = [0, 1])]
    cpus: Vec<usize>,
}

/// One round.
#[derive(Debug, Serialize)]
struct Round {
    flood: FloodKind,
    copies: u8,
    alone_p99_us: f64,
    beside_p99_us: f64,
    /// Data of the flood that were answered, in MB/s.
    flood_mb_s: f64,
}

/// The medians of all rounds of a flood.
#[derive(Debug, Serialize)]
struct Row {
    flood: FloodKind,
    copies: u8,
    alone_p99_us: f64,
    beside_p99_us: f64,
    ratio: f64,
    flood_mb_s: f64,
}

/// Runs the benchmark and prints its result.
pub fn run(options: &Options) -> Result<()> {
    let &[driver_cpu, daemons_cpu] = options.cpus.as_slice() else {
        bail!("--cpus takes two numbers");
    };
    ping_pong::pin(driver_cpu)?;
    let all = [
        FloodKind::OverlappingWrites,
        FloodKind::LongReads,
        FloodKind::StuckWrites,
    ];
    let floods = match options.floods.is_empty() {
        true => &all,
        false => options.floods.as_slice(),
    };
    let mut rounds = Vec::new();
    let last = options.copies.last();
    for &copies in &options.copies {
        for &flood in floods {
            // It needs three copies, and is measured once.
            let copies = match flood == FloodKind::StuckWrites {
                true if Some(&copies) != last => continue,
                true => 3,
                false => copies,
            };
            let name = flood.name();
            eprintln!("bench: {name}, {copies} copies");
            for _ in 0..options
                .rounds
                .unwrap_or(if options.quick { 1 } else { 5 })
                .max(1)
            {
                let round = measure(options, flood, copies, daemons_cpu)
                    .with_context(|| format!("measure {name}"))?;
                rounds.push(round);
            }
        }
    }
    let rows = summarize(&rounds);
    if options.json {
        let all = serde_json::json!({ "summary": rows, "rounds": rounds });
        println!("{}", serde_json::to_string_pretty(&all)?);
        return Ok(());
    }
    println!("| flood | copies | p99 alone, µs | p99 beside, µs | times | flood, MB/s |");
    println!("|---|---|---|---|---|---|");
    for row in rows {
        println!(
            "| {} | {} | {:.0} | {:.0} | {:.1} | {:.0} |",
            row.flood.name(),
            row.copies,
            row.alone_p99_us,
            row.beside_p99_us,
            row.ratio,
            row.flood_mb_s
        );
    }
    Ok(())
}

fn summarize(rounds: &[Round]) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for round in rounds {
        let (flood, copies) = (round.flood, round.copies);
        if rows
            .iter()
            .any(|row| (row.flood, row.copies) == (flood, copies))
        {
            continue;
        }
        let alike = || {
            let all = rounds.iter();
            all.filter(|other| (other.flood, other.copies) == (flood, copies))
        };
        rows.push(Row {
            flood,
            copies,
            alone_p99_us: median(alike().map(|round| round.alone_p99_us)),
            beside_p99_us: median(alike().map(|round| round.beside_p99_us)),
            ratio: median(alike().map(|round| round.beside_p99_us / round.alone_p99_us)),
            flood_mb_s: median(alike().map(|round| round.flood_mb_s)),
        });
    }
    rows
}

/// Measures the quiet guest alone and then beside a flood, on nodes of their own: what a flood leaves behind
/// is answered for seconds after its end.
fn measure(options: &Options, kind: FloodKind, copies: u8, cpu: usize) -> Result<Round> {
    let base = options.directory.clone().unwrap_or_else(std::env::temp_dir);
    let scratch = tempfile::Builder::new()
        .prefix("penstock-bench-")
        .tempdir_in(&base)
        .context("make a directory")?;
    let mut cluster_options = ClusterOptions::new(penstock_binary()?, 3);
    cluster_options.device_bytes = DEVICE_BYTES;
    cluster_options.loopback = true;
    cluster_options.cpu = Some(cpu);
    cluster_options.base = Some(scratch.path().to_owned());
    cluster_options.serve_args = vec!["--threads".to_owned(), "1".to_owned()];
    let mut cluster = Cluster::start(cluster_options)?;
    let clock = Clock::calibrate();
    let quiet_socket = disk(&cluster, "quiet", &["--replicas", &copies.to_string()], 1)?;
    Driver::connect(&quiet_socket, 1, clock)?.fill()?;
    let stuck = kind == FloodKind::StuckWrites;
    let flood_pool = match stuck {
        true => vec![
            "--replicas".to_owned(),
            "3".to_owned(),
            "--min-in-sync".to_owned(),
            "3".to_owned(),
        ],
        false => vec!["--replicas".to_owned(), copies.to_string()],
    };
    let flood_pool: Vec<&str> = flood_pool.iter().map(String::as_str).collect();
    let flood_socket = disk(&cluster, "flood", &flood_pool, flood::QUEUES)?;
    if kind == FloodKind::LongReads {
        Driver::connect(&flood_socket, 1, clock)?.fill()?;
    }
    if stuck {
        cluster.node_mut(3)?.kill()?;
        wait_below_min_in_sync(&cluster)?;
    }
    let quick = options.quick;
    let seconds = options.seconds.unwrap_or(if quick { 0.5 } else { 4.0 });
    let time = Duration::from_secs_f64(seconds);
    let mut quiet = Quiet::connect(&quiet_socket, clock)?;
    quiet.run(time / 2, || Ok(()))?;
    let alone = quiet.run(time, || Ok(()))?;
    let mut flood = Flood::connect(&flood_socket, kind)?;
    flood.fill()?;
    quiet.run(time / 4, || flood.turn())?;
    let before = flood.bytes();
    let beside = quiet.run(time, || flood.turn())?;
    let mb = (flood.bytes() - before) as f64 / 1e6;
    Ok(Round {
        flood: kind,
        copies,
        alone_p99_us: alone,
        beside_p99_us: beside,
        flood_mb_s: mb / time.as_secs_f64(),
    })
}

/// Creates a pool and a disk in it, attached to node 1.
fn disk(cluster: &Cluster, name: &str, pool: &[&str], queues: u16) -> Result<PathBuf> {
    let daemon = cluster.node(1)?.daemon();
    daemon.cli(&[&["pool", "create", name], pool].concat())?;
    let size = format!("{DISK_MIB}M");
    daemon.cli(&["volume", "create", name, &size, "--pool", name])?;
    daemon.attach(name, queues)
}

/// Waits until the nodes know that writes to the pool of the flood cannot be committed.
fn wait_below_min_in_sync(cluster: &Cluster) -> Result<()> {
    let daemon = cluster.node(1)?.daemon();
    cluster.wait(
        "the pool `flood` to be below its min_in_sync",
        NOTICE_LIMIT,
        |_| {
            let nodes = daemon.json(&["node", "list"])?;
            let nodes = nodes.as_array().cloned().unwrap_or_default();
            let down = nodes.iter().any(|node| node["state"] == "down");
            Ok(down.then_some(()))
        },
    )
}
