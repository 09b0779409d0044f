//! Medians of the runs, and tables of them.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::failover::{Event, Pause};
use super::resync::{Quantiles, Round};
use super::{Run, System};
use crate::driver::Load;
use crate::median::median;

/// Medians of one system under one load.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    load: Load,
    system: System,
    runs: usize,
    iops: f64,
    /// IOPS divided by those of the peer, where one ran.
    iops_ratio: Option<f64>,
    p50_us: f64,
    p99_us: f64,
    /// Processor time of all processes but the driver.
    cpu_us_per_io: f64,
    /// The peer's processor time divided by this.
    cpu_ratio: Option<f64>,
}

/// One load before and during a resync.
#[derive(Debug, Serialize)]
struct DuringResync {
    load: Load,
    p50_before_us: f64,
    p50_during_us: f64,
    p99_before_us: f64,
    p99_during_us: f64,
    /// Of the two, the median of the rounds' ratios.
    p99_ratio: f64,
}

/// What a node's return took.
#[derive(Debug, Serialize)]
struct Returned {
    rounds: usize,
    written_mib: f64,
    copied_mib: f64,
    resync_s: f64,
    loads: Vec<DuringResync>,
}

/// What a guest saw of an event.
#[derive(Debug, Serialize)]
struct Paused {
    event: Event,
    creators: u32,
    /// Files that these made in a second, the median of the runs.
    files_per_s: f64,
    accel: &'static str,
    runs: usize,
    p50_ms: f64,
    /// The longest write: of the runs, the median and the worst.
    longest_ms: f64,
    worst_ms: f64,
}

/// Medians of everything.
#[derive(Debug, Serialize)]
pub(super) struct Summary {
    loads: Vec<Row>,
    resync: Option<Returned>,
    failover: Vec<Paused>,
}

impl Summary {
    /// Puts the runs together.
    pub(super) fn new(runs: &[Run], resyncs: &[Round], pauses: &[Pause]) -> Self {
        Self {
            loads: summarise(runs),
            resync: (!resyncs.is_empty()).then(|| returned(resyncs)),
            failover: cases(pauses)
                .into_iter()
                .filter_map(|case| paused(case, pauses))
                .collect(),
        }
    }

    /// Prints the tables of what was measured.
    pub(super) fn print(&self) {
        if !self.loads.is_empty() {
            print(&self.loads);
        }
        if let Some(returned) = &self.resync {
            print_returned(returned);
        }
        if !self.failover.is_empty() {
            print_paused(&self.failover);
        }
    }
}

fn returned(rounds: &[Round]) -> Returned {
    let of = |figure: &dyn Fn(&Round) -> f64| median(rounds.iter().map(figure));
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let loads = rounds.first().map_or(0, |round| round.loads.len());
    let beside = |index: usize| {
        let before = |figure: fn(&Quantiles) -> f64| of(&|r| figure(&r.loads[index].before));
        let during = |figure: fn(&Quantiles) -> f64| of(&|r| figure(&r.loads[index].during));
        DuringResync {
            load: rounds[0].loads[index].load,
            p50_before_us: before(|q| q.p50_us),
            p50_during_us: during(|q| q.p50_us),
            p99_before_us: before(|q| q.p99_us),
            p99_during_us: during(|q| q.p99_us),
            p99_ratio: of(&|r| r.loads[index].during.p99_us / r.loads[index].before.p99_us),
        }
    };
    Returned {
        rounds: rounds.len(),
        written_mib: of(&|r| mib(r.written_bytes)),
        copied_mib: of(&|r| mib(r.copied_bytes)),
        resync_s: of(&|r| r.resync_s),
        loads: (0..loads).map(beside).collect(),
    }
}

/// Events, without and with creators.
fn cases(pauses: &[Pause]) -> BTreeSet<(Event, u32)> {
    pauses.iter().map(|one| (one.event, one.creators)).collect()
}

fn paused((event, creators): (Event, u32), pauses: &[Pause]) -> Option<Paused> {
    let of = pauses.iter();
    let of: Vec<&Pause> = of
        .filter(|one| (one.event, one.creators) == (event, creators))
        .collect();
    let first = of.first()?;
    Some(Paused {
        event,
        creators,
        files_per_s: median(of.iter().map(|pause| pause.files_per_s)),
        accel: first.accel,
        runs: of.len(),
        p50_ms: median(of.iter().map(|pause| pause.p50_ms)),
        longest_ms: median(of.iter().map(|pause| pause.longest_ms)),
        worst_ms: of.iter().map(|pause| pause.longest_ms).fold(0.0, f64::max),
    })
}

/// Puts the runs together.
fn summarise(runs: &[Run]) -> Vec<Row> {
    let mut cases: BTreeMap<Load, BTreeMap<System, Vec<&Run>>> = BTreeMap::new();
    for run in runs {
        let systems = cases.entry(run.load).or_default();
        systems.entry(run.system).or_default().push(run);
    }
    let mut rows = Vec::new();
    for (load, systems) in &cases {
        let peer = systems.get(&System::Ceph);
        for (system, runs) in systems {
            let peer = peer.filter(|_| *system != System::Ceph);
            let iops = median_of(runs, |run| run.iops);
            let cpu = median_of(runs, |run| run.cpu_us_per_io);
            rows.push(Row {
                load: *load,
                system: *system,
                runs: runs.len(),
                iops,
                iops_ratio: peer.map(|peer| iops / median_of(peer, |run| run.iops)),
                p50_us: median_of(runs, |run| run.p50_us),
                p99_us: median_of(runs, |run| run.p99_us),
                cpu_us_per_io: cpu,
                cpu_ratio: peer.map(|peer| median_of(peer, |run| run.cpu_us_per_io) / cpu),
            });
        }
    }
    rows
}

/// Prints the table.
fn print(rows: &[Row]) {
    println!("3 copies on this machine; all processes but the driver on one CPU");
    println!(
        "{:<26} {:<14} {:>4} {:>9} {:>9} {:>9} {:>9} {:>11} {:>9}",
        "load", "system", "runs", "IOPS", "x peer", "p50 us", "p99 us", "CPU us/IO", "x less"
    );
    for row in rows {
        let shown = |value: Option<f64>| value.map(|v| format!("{v:.1}")).unwrap_or_default();
        println!(
            "{:<26} {:<14} {:>4} {:>9.0} {:>9} {:>9.0} {:>9.0} {:>11.1} {:>9}",
            row.load.name(),
            row.system.name(),
            row.runs,
            row.iops,
            shown(row.iops_ratio),
            row.p50_us,
            row.p99_us,
            row.cpu_us_per_io,
            shown(row.cpu_ratio),
        );
    }
}

fn print_returned(returned: &Returned) {
    println!(
        "a node away: {:.1} MiB written meanwhile, {:.1} MiB copied to it within {:.1} s beside the loads; \
         rounds: {}",
        returned.written_mib, returned.copied_mib, returned.resync_s, returned.rounds
    );
    println!(
        "{:<26} {:>10} {:>10} {:>10} {:>10} {:>10}",
        "load", "p50 before", "during us", "p99 before", "during us", "p99 ratio"
    );
    for load in &returned.loads {
        println!(
            "{:<26} {:>10.0} {:>10.0} {:>10.0} {:>10.0} {:>10.2}",
            load.load.name(),
            load.p50_before_us,
            load.p50_during_us,
            load.p99_before_us,
            load.p99_during_us,
            load.p99_ratio,
        );
    }
}

fn print_paused(paused: &[Paused]) {
    println!("longest write that fio in a guest has seen");
    println!(
        "{:<32} {:>8} {:>8} {:<6} {:>4} {:>12} {:>12} {:>12}",
        "event", "creators", "files/s", "guest", "runs", "p50 ms", "longest ms", "worst run ms"
    );
    for one in paused {
        println!(
            "{:<32} {:>8} {:>8.0} {:<6} {:>4} {:>12.2} {:>12.0} {:>12.0}",
            one.event.name(),
            one.creators,
            one.files_per_s,
            one.accel,
            one.runs,
            one.p50_ms,
            one.longest_ms,
            one.worst_ms,
        );
    }
}

fn median_of(runs: &[&Run], figure: impl Fn(&Run) -> f64) -> f64 {
    median(runs.iter().map(|run| figure(run)))
}
