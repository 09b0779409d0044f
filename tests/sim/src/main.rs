//! `penstock-sim`: runs clusters from seeds until one goes wrong.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use clap::{Parser, ValueEnum};
use sim::pace::Pace;
use sim::{Mutation, Plan, Sim};

#[derive(Debug, Parser)]
#[command(
    name = "penstock-sim",
    about = "Runs the whole cluster in one process from a seed, and checks what its guests see"
)]
struct Cli {
    /// How many seeds
    #[arg(long, default_value_t = 1)]
    seeds: u64,
    /// The first of them
    #[arg(long, default_value_t = 1)]
    from: u64,
    /// Seeds at a time; by default as many as there are processors
    #[arg(long)]
    jobs: Option<usize>,
    /// Nothing goes wrong
    #[arg(long)]
    healthy: bool,
    /// More goes wrong, and leases move more often
    #[arg(long)]
    rough: bool,
    /// All nodes lose power at once, several times
    #[arg(long, conflicts_with = "rough")]
    outages: bool,
    /// Disks neither rot nor refuse blocks nor run full
    #[arg(long)]
    sound_disks: bool,
    /// Devices of each storage node
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=4))]
    devices: u8,
    /// What recurs is done as often as in what ships, and nothing is cleaned
    #[arg(long)]
    usual_pace: bool,
    /// Guests write whole blocks only
    #[arg(long)]
    blocks: bool,
    /// Guests' writes may overlap while in flight
    #[arg(long)]
    overlaps: bool,
    /// Make this mistake in what is tested, to see that it is noticed (with `--rough` or `--outages`, and
    /// `--blocks`)
    #[arg(long, value_enum)]
    mutation: Option<Mutation>,
    /// Print every event (with one seed)
    #[arg(long)]
    trace: bool,
    /// Print the number of each seed's trace, to compare it with another process's
    #[arg(long)]
    hashes: bool,
    /// Go on after a failure and count them
    #[arg(long)]
    keep_going: bool,
}

impl Cli {
    /// The options that decide what a seed runs.
    fn options(&self) -> String {
        let all = [
            (self.healthy, " --healthy"),
            (self.rough, " --rough"),
            (self.outages, " --outages"),
            (self.sound_disks, " --sound-disks"),
            (self.usual_pace, " --usual-pace"),
            (self.blocks, " --blocks"),
            (self.overlaps, " --overlaps"),
        ];
        let on = all.iter().filter(|(on, _)| *on);
        let mut options: String = on.map(|(_, name)| *name).collect();
        if self.devices > 1 {
            options += &format!(" --devices {}", self.devices);
        }
        if let Some(name) = self.mutation.and_then(|m| m.to_possible_value()) {
            options += &format!(" --mutation {}", name.get_name());
        }
        options
    }
}

fn run(seed: u64, cli: &Cli) -> Result<sim::Outcome, String> {
    let draw = |rng: &mut _| {
        let mut plan = match cli {
            Cli { healthy: true, .. } => Plan::draw_healthy(rng),
            Cli { rough: true, .. } => Plan::draw_rough(rng),
            Cli { outages: true, .. } => Plan::draw_outages(rng),
            _ => Plan::draw(rng),
        };
        plan.pace = cli.usual_pace.then_some(Pace::USUAL);
        plan.guests_do.sectors &= !cli.blocks;
        plan.guests_do.overlaps |= cli.overlaps;
        plan.devices = usize::from(cli.devices);
        if let Some(mutation) = cli.mutation {
            plan.make_mistake(mutation);
        }
        plan
    };
    let ran = catch_unwind(AssertUnwindSafe(|| {
        let sim = match cli.sound_disks {
            true => Sim::drawn_on_sound_disks(seed, cli.trace, draw),
            false => Sim::drawn(seed, cli.trace, draw),
        };
        sim.run()
    }));
    match ran {
        Ok(Ok(outcome)) => Ok(outcome),
        Ok(Err(failure)) => Err(failure.to_string()),
        Err(_) => Err("panic, see above".to_owned()),
    }
}

/// What the runs that passed have done.
#[derive(Default)]
struct Totals {
    runs: u64,
    requests: u64,
    sectors: u64,
    recovered: u64,
    moved: u64,
    cleaned_bytes: u64,
    forged: u64,
    refused: u64,
    outages: u64,
    durable: u64,
    /// Runs with blocks that nobody could read.
    lost: u64,
}

impl Totals {
    fn add(&mut self, outcome: &sim::Outcome) {
        self.runs += 1;
        self.requests += outcome.ops.0;
        self.sectors += outcome.sectors_read;
        self.recovered += outcome.recovered_blocks;
        self.moved += outcome.moved;
        self.cleaned_bytes += outcome.cleaned_bytes;
        self.forged += u64::from(outcome.forged);
        self.refused += u64::from(outcome.refused);
        self.outages += u64::from(outcome.outages);
        self.durable += outcome.durable_sectors;
        self.lost += u64::from(outcome.lost_blocks);
    }
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} guest requests, {} sectors compared, {} found durable, {} losses of all power, {} blocks \
             recovered, {} moved by cleaners, {} forged, {} groups moved between devices of a node, {} \
             requests of hostile hosts refused, {} with blocks that nobody could read",
            self.requests,
            self.sectors,
            self.durable,
            self.outages,
            self.recovered,
            self.cleaned_bytes / 4096,
            self.forged,
            self.moved,
            self.refused,
            self.lost
        )
    }
}

fn main() -> std::process::ExitCode {
    let mut cli = Cli::parse();
    // What a mistake needs to be noticed soon, and what is right without it.
    let needs_outages = cli.mutation.is_some_and(Mutation::needs_outages);
    cli.outages |= needs_outages;
    cli.rough |= cli.mutation.is_some() && !needs_outages;
    cli.sound_disks |= cli.mutation.is_some();
    let jobs = cli
        .jobs
        .or_else(|| std::thread::available_parallelism().ok().map(usize::from))
        .unwrap_or(1);
    let next = AtomicU64::new(cli.from);
    let stop = AtomicBool::new(false);
    let failures = Mutex::new(Vec::new());
    let totals = Mutex::new(Totals::default());
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= cli.from + cli.seeds {
                        return;
                    }
                    match run(seed, &cli) {
                        Ok(outcome) => {
                            if cli.hashes {
                                println!("seed {seed} trace {:016x}", outcome.trace);
                            }
                            let mut totals = totals.lock().expect("no panic under this lock");
                            totals.add(&outcome);
                        }
                        Err(what) => {
                            eprintln!("seed {seed} failed: {what}");
                            let options = cli.options();
                            eprintln!("  again: cargo xtask sim --from {seed} --trace{options}");
                            let mut failures = failures.lock().expect("no panic under this lock");
                            failures.push(seed);
                            stop.fetch_or(!cli.keep_going, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    let seconds = start.elapsed().as_secs_f64();
    let totals = totals.into_inner().expect("no panic under this lock");
    let failures = failures.into_inner().expect("no panic under this lock");
    let runs = totals.runs;
    println!(
        "{runs} seeds passed, {} failed; {totals}, {:.0} seeds/s",
        failures.len(),
        (runs + failures.len() as u64) as f64 / seconds
    );
    if failures.is_empty() {
        std::process::ExitCode::SUCCESS
    } else {
        println!("failed: {failures:?}");
        std::process::ExitCode::FAILURE
    }
}
