//! `block`: volumes as block devices of a node beside the vhost-user path, in one virtual machine.
//!
//! The machine has Debian 13's kernel. fio drives the block devices through the kernel; the vhost-user socket
//! is driven by this program, which is copied into the machine ([`drive`]) and polls.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use block_rig::Machine;
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::clock::Clock;
use crate::driver::{Direction, Driver, Load, Order};
use crate::median::median;

/// The daemon's stores hold nothing: what is measured is the way to them.
const SERVE: &str = "--store null --threads 1";
/// Requests are sent to the vhost-user path through this socket.
const SOCKET: &str = "/run/penstock/polled.sock";
/// Where this program is in the machine.
const DRIVER: &str = "/usr/bin/penstock-bench";
/// Buffers of the driver: the deepest load here.
const BUFFER_BYTES: usize = 8 << 20;
/// Processor time of daemon and helper, in nanoseconds.
const CPU: &str = "for one in /proc/[0-9]*; do
        case $(tr '\\0' ' ' < $one/cmdline 2> /dev/null) in
            penstock*) cat $one/task/*/schedstat ;;
        esac
    done 2> /dev/null | awk '{ sum += $1 } END { printf \"%.0f\\n\", sum }'";

/// Options of `block`.
#[derive(Debug, Args)]
pub struct Options {
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
    /// Alternations between a block device and the vhost-user path
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Length of each run in seconds
    #[arg(long, default_value_t = 2)]
    seconds: u64,
}

/// Options of `drive`, which is called in the machine.
#[derive(Debug, Args)]
pub struct DriveOptions {
    socket: PathBuf,
    #[arg(long)]
    block: usize,
    #[arg(long)]
    depth: usize,
    #[arg(long)]
    write: bool,
    #[arg(long)]
    seconds: u64,
}

/// What `drive` prints.
#[derive(Debug, Serialize, Deserialize)]
struct Driven {
    iops: f64,
    p50_us: f64,
}

/// Drives one load through a vhost-user socket, polling, and prints what came of it as JSON.
pub fn drive(options: &DriveOptions) -> Result<()> {
    let load = Load {
        direction: match options.write {
            true => Direction::Write,
            false => Direction::Read,
        },
        order: Order::Random,
        block: options.block,
        depth: options.depth,
    };
    let mut driver = Driver::connect_with(&options.socket, 1, BUFFER_BYTES, Clock::calibrate())?;
    let sample = driver.run(&load, Duration::from_secs(options.seconds))?;
    let driven = Driven {
        iops: sample.requests as f64 / sample.elapsed.as_secs_f64(),
        p50_us: sample.latency.value_at_quantile(0.5) as f64 / 1e3,
    };
    println!("{}", serde_json::to_string(&driven)?);
    Ok(())
}

/// Parameters of a load, for fio and for the polling driver.
#[derive(Debug, Clone, Copy)]
struct Case {
    block: usize,
    depth: usize,
    write: bool,
}

const CASES: [Case; 3] = [
    Case {
        block: 4096,
        depth: 1,
        write: false,
    },
    Case {
        block: 4096,
        depth: 32,
        write: false,
    },
    Case {
        block: 1 << 20,
        depth: 8,
        write: true,
    },
];

impl Case {
    fn name(self) -> String {
        let direction = if self.write { "write" } else { "read" };
        format!(
            "{} KiB random {direction} x{}",
            self.block >> 10,
            self.depth
        )
    }

    fn fio(self, seconds: u64) -> String {
        let direction = if self.write { "randwrite" } else { "randread" };
        format!(
            "fio --name=load --filename=$(readlink /dev/penstock/disk) --direct=1 --ioengine=io_uring \
             --rw={direction} --bs={} --iodepth={} --runtime={seconds} --time_based --output-format=json",
            self.block, self.depth
        )
    }

    fn drive(self, seconds: u64) -> String {
        let write = if self.write { " --write" } else { "" };
        format!(
            "{DRIVER} drive {SOCKET} --block {} --depth {} --seconds {seconds}{write}",
            self.block, self.depth
        )
    }
}

/// The way that requests take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
enum Path {
    #[serde(rename = "VDUSE, fio")]
    Vduse,
    #[serde(rename = "nbd, fio")]
    Nbd,
    #[serde(rename = "vhost-user, polled")]
    VhostUser,
}

/// Medians of one way under one load.
#[derive(Debug, Serialize)]
struct Row {
    load: String,
    path: Path,
    runs: usize,
    iops: f64,
    p50_us: f64,
    /// Processor time of daemon and helper.
    cpu_us_per_io: f64,
}

/// Runs it.
pub fn run(options: &Options) -> Result<()> {
    ensure!(
        options.rounds > 0 && options.seconds > 0,
        "--rounds and --seconds are at least 1"
    );
    let own = std::env::current_exe().context("find this executable")?;
    let mut machine = Machine::start_with(SERVE, &[(&own, DRIVER)])?;
    machine.ok("volume create polled 1G")?;
    machine.ok("volume create disk 1G")?;
    machine.ok(&format!(
        "attach volume polled --socket {SOCKET} --queues 1"
    ))?;
    let mut rows = beside_each_other(&mut machine, Path::Vduse, options)?;
    machine.restart_without_vduse()?;
    rows.extend(beside_each_other(&mut machine, Path::Nbd, options)?);
    if options.json {
        println!("{}", serde_json::to_string_pretty(&rows)?);
        return Ok(());
    }
    println!("| load | path | IOPS | p50 us | CPU us/IO of daemon and helper |");
    println!("|---|---|---:|---:|---:|");
    for row in rows {
        let path = serde_json::to_value(row.path)?;
        println!(
            "| {} | {} | {:.0} | {:.0} | {:.1} |",
            row.load,
            path.as_str().unwrap_or_default(),
            row.iops,
            row.p50_us,
            row.cpu_us_per_io
        );
    }
    Ok(())
}

/// The volume as a block device, in turn with the vhost-user path.
fn beside_each_other(machine: &mut Machine, device: Path, options: &Options) -> Result<Vec<Row>> {
    machine.ok("attach volume disk --block --queues 1 2> /dev/null")?;
    let mut rows = Vec::new();
    for case in CASES {
        let mut runs = [(device, Vec::new()), (Path::VhostUser, Vec::new())];
        for _ in 0..options.rounds {
            for (path, figures) in &mut runs {
                figures.push(measure(machine, *path, case, options.seconds)?);
            }
        }
        rows.extend(runs.map(|(path, figures)| Row {
            load: case.name(),
            path,
            runs: figures.len(),
            iops: median(figures.iter().map(|(driven, _)| driven.iops)),
            p50_us: median(figures.iter().map(|(driven, _)| driven.p50_us)),
            cpu_us_per_io: median(figures.iter().map(|(_, cpu_us)| *cpu_us)),
        }));
    }
    machine.ok("detach disk")?;
    Ok(rows)
}

/// One run: what came of it, and the processor time of daemon and helper for each request, in microseconds.
fn measure(machine: &mut Machine, path: Path, case: Case, seconds: u64) -> Result<(Driven, f64)> {
    let before: f64 = machine.sh(CPU)?.trim().parse().context("processor time")?;
    let driven = match path {
        Path::VhostUser => serde_json::from_str(&machine.sh(&case.drive(seconds))?)?,
        Path::Vduse | Path::Nbd => {
            let told: serde_json::Value = serde_json::from_str(&machine.sh(&case.fio(seconds))?)?;
            let side = &told["jobs"][0][if case.write { "write" } else { "read" }];
            let figure = |value: &serde_json::Value| value.as_f64().context("fio's output");
            Driven {
                iops: figure(&side["iops"])?,
                p50_us: figure(&side["clat_ns"]["percentile"]["50.000000"])? / 1e3,
            }
        }
    };
    let after: f64 = machine.sh(CPU)?.trim().parse().context("processor time")?;
    let requests = driven.iops * seconds as f64;
    ensure!(requests > 0.0, "no request was answered");
    let cpu_us = (after - before) / 1e3 / requests;
    Ok((driven, cpu_us))
}
