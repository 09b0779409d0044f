//! Medians of the runs within one state of the cores, and tables of them.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Measured, Run};
use crate::backend::{Kind, Store};
use crate::driver::Load;
use crate::ping_pong::State;

/// What is compared with each other.
type Case = (Store, u16, State, Load);

/// Medians of the runs of one back end under one load.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    store: Store,
    queues: u16,
    state: State,
    load: Load,
    kind: Kind,
    runs: usize,
    iops: f64,
    /// IOPS divided by those of qemu-storage-daemon in the same state, where that ran.
    iops_ratio: Option<f64>,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    cpu_us_per_io: f64,
    /// Likewise.
    cpu_ratio: Option<f64>,
    written_bytes_per_byte: Option<f64>,
}

/// Puts the runs together.
pub(super) fn summarise(runs: &[Run]) -> Vec<Row> {
    let mut cases: BTreeMap<Case, BTreeMap<Kind, Vec<&Run>>> = BTreeMap::new();
    for run in runs {
        let case = (run.store, run.queues, run.state, run.load);
        let kinds = cases.entry(case).or_default();
        kinds.entry(run.kind).or_default().push(run);
    }
    let mut rows = Vec::new();
    for (case, kinds) in &cases {
        let peer = kinds.get(&Kind::Qemu);
        rows.extend(kinds.iter().map(|(kind, runs)| {
            let peer = peer.filter(|_| *kind != Kind::Qemu);
            row(*case, *kind, runs, peer.map(Vec::as_slice))
        }));
    }
    rows
}

fn row(
    (store, queues, state, load): Case,
    kind: Kind,
    runs: &[&Run],
    peer: Option<&[&Run]>,
) -> Row {
    let ratio =
        |figure: fn(&Run) -> f64| peer.map(|peer| median(runs, figure) / median(peer, figure));
    let amplification = runs[0].written_bytes_per_byte;
    Row {
        store,
        queues,
        state,
        load,
        kind,
        runs: runs.len(),
        iops: median(runs, |run| run.iops),
        iops_ratio: ratio(|run| run.iops),
        p50_us: median(runs, |run| run.p50_us),
        p99_us: median(runs, |run| run.p99_us),
        p999_us: median(runs, |run| run.p999_us),
        cpu_us_per_io: median(runs, |run| run.cpu_us_per_io),
        cpu_ratio: ratio(|run| run.cpu_us_per_io),
        written_bytes_per_byte: amplification
            .map(|_| median(runs, |run| run.written_bytes_per_byte.unwrap_or(0.0))),
    }
}

/// Prints everything.
pub(super) fn print(measured: &Measured) {
    print_rows(&measured.summary);
    print_given_back(&measured.runs);
    println!(
        "runs discarded because the cores' distance flipped: {}",
        measured.discarded_runs
    );
    for compaction in &measured.compactions {
        println!("{compaction}");
    }
    for counted in &measured.allocations {
        println!(
            "allocations, {:?} store, {}: {} in {} requests ({:.5} for each)",
            counted.store,
            counted.load.name(),
            counted.allocations,
            counted.requests,
            counted.allocations as f64 / counted.requests as f64
        );
    }
    if let Some(idle) = &measured.idle {
        let mib = idle.resident_bytes as f64 / f64::from(1 << 20);
        println!(
            "idle, {} attachments: {:.2} % of a core, {mib:.0} MiB",
            idle.attachments, idle.cpu_percent
        );
    }
    if let Some(opened) = &measured.open_after_crash {
        println!(
            "1 TiB store, {} random writes, kill -9: answers after {:.2} s",
            opened.writes, opened.seconds
        );
        for line in &opened.recovery {
            println!("  {line}");
        }
        println!("  device: {}", opened.device);
    }
}

fn print_rows(rows: &[Row]) {
    let mut heading = None;
    for row in rows {
        let group = (row.store, row.queues, row.state);
        if heading != Some(group) {
            heading = Some(group);
            let store = match row.store {
                Store::Null => "null back end",
                Store::File => "file, O_DIRECT",
            };
            println!(
                "\n{store}, {} queue(s), cores {}",
                row.queues,
                row.state.name()
            );
            println!(
                "{:<38} {:<20} {:>4} {:>10} {:>6} {:>9} {:>9} {:>9} {:>10} {:>6} {:>6}",
                "load",
                "back end",
                "runs",
                "IOPS",
                "ratio",
                "p50 us",
                "p99 us",
                "p99.9 us",
                "CPU us/IO",
                "ratio",
                "w.amp"
            );
        }
        let shown = |value: Option<f64>| value.map(|v| format!("{v:.2}")).unwrap_or_default();
        println!(
            "{:<38} {:<20} {:>4} {:>10.0} {:>6} {:>9.1} {:>9.1} {:>9.1} {:>10.2} {:>6} {:>6}",
            row.load.name(),
            row.kind.name(),
            row.runs,
            row.iops,
            shown(row.iops_ratio),
            row.p50_us,
            row.p99_us,
            row.p999_us,
            row.cpu_us_per_io,
            shown(row.cpu_ratio),
            shown(row.written_bytes_per_byte),
        );
    }
    println!();
}

/// How soon an adaptive data thread sleeps again.
fn print_given_back(runs: &[Run]) {
    let adaptive: Vec<&Run> = runs
        .iter()
        .filter(|run| run.kind == Kind::PenstockAdaptive)
        .collect();
    if adaptive.is_empty() {
        return;
    }
    let longest = adaptive
        .iter()
        .map(|run| run.cpu_us_after_load)
        .fold(0.0, f64::max);
    println!(
        "adaptive, CPU in the {} ms after a load: median {:.0} us, most {longest:.0} us",
        super::AFTER_LOAD.as_millis(),
        median(&adaptive, |run| run.cpu_us_after_load),
    );
}

fn median(runs: &[&Run], figure: impl Fn(&Run) -> f64) -> f64 {
    crate::median::median(runs.iter().map(|run| figure(run)))
}
