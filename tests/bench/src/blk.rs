//! `blk`: plans the runs, alternates the back ends, keeps what is comparable.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::allocations::{self, Counted};
use crate::backend::{Backend, Kind, Store};
use crate::clock::Clock;
use crate::driver::{BLOCK_MAX, DEPTH_MAX, Direction, Driver, Load, Order};
use crate::idle::{self, Idle, Opened};
use crate::ping_pong::{self, State};
use crate::usage::cpu_time;
use steady::Compaction;

mod report;
mod steady;

/// Depths of the 4 KiB loads, for each queue.
const DEPTHS: [usize; 3] = [1, 32, DEPTH_MAX];
/// Depth of the 1 MiB loads.
const SEQUENTIAL_DEPTH: usize = 8;
/// How long a disk is overwritten at random before a load that wants it scattered.
const SCATTER: Duration = Duration::from_secs(3);
/// How long a back end is watched after a load, to see when it gives the core back.
const AFTER_LOAD: Duration = Duration::from_millis(50);

/// A part of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Null back ends: what the guest side costs by itself.
    Null,
    /// Files with O_DIRECT.
    File,
    /// Allocations per request.
    Allocations,
    /// A daemon with 64 idle attachments.
    Idle,
    /// Opening a 1 TiB store after a crash.
    Open,
}

/// Options of `blk`.
#[derive(Debug, Args)]
pub struct Options {
    /// Print JSON instead of tables
    #[arg(long)]
    json: bool,
    /// Few short runs of one queue: shows that everything works, measures little
    #[arg(long)]
    quick: bool,
    /// Parts to run [default: all]
    #[arg(long, value_delimiter = ',')]
    parts: Vec<Part>,
    /// Back ends to compare [default: all]
    #[arg(long, value_delimiter = ',')]
    backends: Vec<Kind>,
    /// Loads to run, by words of their names, as in "random read x1" [default: all]
    #[arg(long, value_delimiter = ',')]
    loads: Vec<String>,
    /// Alternations between the back ends [default: 5, quick: 1]
    #[arg(long)]
    rounds: Option<usize>,
    /// Length of each run in seconds [default: 1.5, quick: 0.3]
    #[arg(long)]
    seconds: Option<f64>,
    /// Where the files live: a directory on a disk, not in memory [default: the system's temporary directory]
    #[arg(long)]
    directory: Option<PathBuf>,
    /// The driver's CPU and the back end's
    #[arg(long, value_delimiter = ',', default_values_t = [0, 1])]
    cpus: Vec<usize>,
}

impl Options {
    fn wants(&self, part: Part) -> bool {
        self.parts.is_empty() || self.parts.contains(&part)
    }

    fn kinds(&self, all: &[Kind]) -> Vec<Kind> {
        all.iter()
            .copied()
            .filter(|kind| self.backends.is_empty() || self.backends.contains(kind))
            .collect()
    }

    fn rounds(&self) -> usize {
        self.rounds.unwrap_or(if self.quick { 1 } else { 5 }).max(1)
    }

    fn run_time(&self) -> Duration {
        Duration::from_secs_f64(self.seconds.unwrap_or(if self.quick { 0.3 } else { 1.5 }))
    }

    fn loads(&self) -> Vec<Load> {
        let wanted = |load: &Load| {
            self.loads.is_empty() || self.loads.iter().any(|words| load.name().ends_with(words))
        };
        loads().into_iter().filter(wanted).collect()
    }

    fn queues(&self) -> &'static [u16] {
        if self.quick { &[1] } else { &[1, 2] }
    }
}

/// One run that counts.
#[derive(Debug, Serialize)]
struct Run {
    store: Store,
    kind: Kind,
    queues: u16,
    load: Load,
    state: State,
    ping_pong_ns: [f64; 2],
    iops: f64,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    cpu_us_per_io: f64,
    /// Processor time that the back end used in [`AFTER_LOAD`] after the last answer.
    cpu_us_after_load: f64,
    written_bytes_per_byte: Option<f64>,
}

/// Everything that was measured.
#[derive(Debug, Default, Serialize)]
struct Measured {
    summary: Vec<report::Row>,
    runs: Vec<Run>,
    discarded_runs: usize,
    compactions: Vec<Compaction>,
    allocations: Vec<Counted>,
    idle: Option<Idle>,
    open_after_crash: Option<Opened>,
}

/// Runs the benchmark and prints its result.
pub fn run(options: &Options) -> Result<()> {
    let cpus: [usize; 2] = options
        .cpus
        .as_slice()
        .try_into()
        .ok()
        .context("--cpus takes two numbers")?;
    if cpus[0] == cpus[1] {
        bail!(
            "the driver and the back end need a CPU each: --cpus names {} twice",
            cpus[0]
        );
    }
    let base = options.directory.clone().unwrap_or_else(std::env::temp_dir);
    let scratch = tempfile::Builder::new()
        .prefix("penstock-bench-")
        .tempdir_in(&base)
        .context("make a directory")?;
    let clock = Clock::calibrate();
    let mut measured = Measured::default();
    let null = options.kinds(&[Kind::Qemu, Kind::PenstockAdaptive, Kind::PenstockAlways]);
    let file = options.kinds(&[Kind::Qemu, Kind::PenstockAdaptive]);
    if options.wants(Part::Null) {
        compare(
            options,
            Store::Null,
            &null,
            scratch.path(),
            clock,
            cpus,
            &mut measured,
        )?;
    }
    if options.wants(Part::File) {
        compare(
            options,
            Store::File,
            &file,
            scratch.path(),
            clock,
            cpus,
            &mut measured,
        )?;
    }
    if options.wants(Part::Allocations) {
        say("counting allocations");
        ping_pong::pin(cpus[0])?;
        measured.allocations =
            allocations::count(scratch.path(), &[Store::Null, Store::File], clock, cpus)?;
    }
    if options.wants(Part::Idle) {
        say("watching an idle daemon");
        let time = Duration::from_secs(if options.quick { 3 } else { 20 });
        measured.idle = Some(idle::idle(scratch.path(), time, clock)?);
    }
    if options.wants(Part::Open) {
        say("opening a large store after a crash");
        measured.open_after_crash = Some(idle::open_after_crash(scratch.path(), clock, cpus)?);
    }
    measured.summary = report::summarise(&measured.runs);
    if options.json {
        println!("{}", serde_json::to_string_pretty(&measured)?);
    } else {
        report::print(&measured);
    }
    Ok(())
}

fn say(line: &str) {
    eprintln!("bench: {line}");
}

fn loads() -> Vec<Load> {
    let both = [Direction::Read, Direction::Write];
    let large = |direction, order| Load {
        direction,
        order,
        block: BLOCK_MAX,
        depth: SEQUENTIAL_DEPTH,
    };
    let random = both.iter().flat_map(|direction| {
        DEPTHS.map(|depth| Load {
            direction: *direction,
            order: Order::Random,
            block: 4096,
            depth,
        })
    });
    // Writing in order first makes every round begin on the same disk.
    let sequential = [Direction::Write, Direction::Read];
    let sequential = sequential.map(|direction| large(direction, Order::Sequential));
    // Each of them on a disk that was scattered just before; the compacted ones after one another on one that
    // was compacted.
    let scattered = [Order::Scattered, Order::Compacted]
        .iter()
        .flat_map(|order| [Direction::Read, Direction::Write].map(|d| large(d, *order)));
    sequential
        .into_iter()
        .chain(random)
        .chain(scattered)
        .collect()
}

/// Runs all loads on each back end in turn, several rounds. One back end runs at a time: one that polls would
/// take the core from the others.
fn compare(
    options: &Options,
    store: Store,
    kinds: &[Kind],
    directory: &Path,
    clock: Clock,
    cpus: [usize; 2],
    measured: &mut Measured,
) -> Result<()> {
    ping_pong::pin(cpus[0])?;
    for round in 1..=options.rounds() {
        for &queues in options.queues() {
            for &kind in kinds {
                say(&format!(
                    "round {round} of {}: {}, {queues} queues",
                    options.rounds(),
                    kind.name()
                ));
                let backend = Backend::start(kind, store, queues, directory, cpus[1])?;
                if store == Store::File {
                    // Reads must find data, and every round the same layout.
                    Driver::connect(backend.socket(), queues, clock)?.fill()?;
                }
                let mut before = None;
                for load in options.loads() {
                    let fresh = before.replace(load.order) != Some(load.order);
                    if load.order == Order::Scattered || (load.order == Order::Compacted && fresh) {
                        scatter(&backend, queues, clock)?;
                    }
                    if load.order == Order::Compacted && fresh && kind != Kind::Qemu {
                        let compaction = steady::wait(backend.pid()?, kind)?;
                        say(&compaction.to_string());
                        measured.compactions.push(compaction);
                    }
                    match one_run(&backend, queues, &load, options.run_time(), clock, cpus[1])? {
                        Some(figures) => measured
                            .runs
                            .push(figures.into_run(store, kind, queues, load)),
                        None => measured.discarded_runs += 1,
                    }
                }
                backend.stop()?;
            }
        }
    }
    Ok(())
}

/// Overwrites the disk at random.
fn scatter(backend: &Backend, queues: u16, clock: Clock) -> Result<()> {
    let load = Load {
        direction: Direction::Write,
        order: Order::Random,
        block: 4096,
        depth: DEPTH_MAX,
    };
    Driver::connect(backend.socket(), queues, clock)?.run(&load, SCATTER)?;
    Ok(())
}

/// What one run measured, before it is known what for.
struct Figures {
    state: State,
    ping_pong_ns: [f64; 2],
    sample: crate::driver::Sample,
    cpu: Duration,
    cpu_after_load: Duration,
    device_bytes_written: u64,
}

/// One run, or none if the distance of the cores flipped meanwhile.
fn one_run(
    backend: &Backend,
    queues: u16,
    load: &Load,
    time: Duration,
    clock: Clock,
    backend_cpu: usize,
) -> Result<Option<Figures>> {
    let mut driver = Driver::connect(backend.socket(), queues, clock)?;
    let pid = backend.pid()?;
    driver.run(load, time / 10)?;
    let before = ping_pong::measure(clock, backend_cpu)?;
    let (cpu_before, written_before) = (cpu_time(pid)?, crate::usage::written_bytes(pid)?);
    let sample = driver.run(load, time)?;
    let (cpu, written) = (
        cpu_time(pid)?.saturating_sub(cpu_before),
        crate::usage::written_bytes(pid)? - written_before,
    );
    std::thread::sleep(AFTER_LOAD);
    // A thread that ended meanwhile took its count with it.
    let cpu_after_load = cpu_time(pid)?.saturating_sub(cpu_before + cpu);
    let after = ping_pong::measure(clock, backend_cpu)?;
    if before.state != after.state {
        return Ok(None);
    }
    let ping_pong_ns = [before.ns, after.ns];
    Ok(Some(Figures {
        state: before.state,
        ping_pong_ns,
        sample,
        cpu,
        cpu_after_load,
        device_bytes_written: written,
    }))
}

impl Figures {
    fn into_run(self, store: Store, kind: Kind, queues: u16, load: Load) -> Run {
        let quantile = |q| self.sample.latency.value_at_quantile(q) as f64 / 1e3;
        let requests = self.sample.requests as f64;
        let stored = store == Store::File && load.direction == Direction::Write;
        Run {
            store,
            kind,
            queues,
            load,
            state: self.state,
            ping_pong_ns: self.ping_pong_ns,
            iops: requests / self.sample.elapsed.as_secs_f64(),
            p50_us: quantile(0.5),
            p99_us: quantile(0.99),
            p999_us: quantile(0.999),
            cpu_us_per_io: self.cpu.as_secs_f64() * 1e6 / requests,
            cpu_us_after_load: self.cpu_after_load.as_secs_f64() * 1e6,
            written_bytes_per_byte: stored
                .then(|| self.device_bytes_written as f64 / (requests * load.block as f64)),
        }
    }
}
