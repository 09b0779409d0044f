//! Tables of what was measured: medians of the runs within one state of the cores.

use std::collections::BTreeMap;

use super::{Measured, Run};
use crate::backend::{Kind, Store};
use crate::driver::Load;
use crate::ping_pong::State;

/// What is compared with each other.
type Case = (Store, u16, State, Load);

/// Prints everything.
pub(super) fn print(measured: &Measured) {
    print_runs(measured);
    println!(
        "runs discarded because the cores' distance flipped: {}",
        measured.discarded_runs
    );
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

fn print_runs(measured: &Measured) {
    let mut cases: BTreeMap<Case, BTreeMap<Kind, Vec<&Run>>> = BTreeMap::new();
    for run in &measured.runs {
        let case = (run.store, run.queues, run.state, run.load);
        cases
            .entry(case)
            .or_default()
            .entry(run.kind)
            .or_default()
            .push(run);
    }
    let mut heading = None;
    for ((store, queues, state, load), kinds) in &cases {
        if heading != Some((store, queues, state)) {
            heading = Some((store, queues, state));
            let store = if *store == Store::Null {
                "null back end"
            } else {
                "file, O_DIRECT"
            };
            println!("\n{store}, {queues} queue(s), cores {}", state.name());
            println!(
                "{:<26} {:<20} {:>4} {:>10} {:>6} {:>9} {:>9} {:>9} {:>10} {:>6} {:>6}",
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
        let reference = kinds.get(&Kind::Qemu);
        for (kind, runs) in kinds {
            print_row(load, *kind, runs, reference.map(Vec::as_slice));
        }
    }
    println!();
}

fn print_row(load: &Load, kind: Kind, runs: &[&Run], reference: Option<&[&Run]>) {
    let ratio = |figure: fn(&Run) -> f64| match reference {
        Some(reference) if kind != Kind::Qemu => {
            format!("{:.2}", median(runs, figure) / median(reference, figure))
        }
        _ => String::new(),
    };
    let amplification = runs[0]
        .written_bytes_per_byte
        .map(|_| median(runs, |run| run.written_bytes_per_byte.unwrap_or(0.0)));
    println!(
        "{:<26} {:<20} {:>4} {:>10.0} {:>6} {:>9.1} {:>9.1} {:>9.1} {:>10.2} {:>6} {:>6}",
        load.name(),
        kind.name(),
        runs.len(),
        median(runs, |run| run.iops),
        ratio(|run| run.iops),
        median(runs, |run| run.p50_us),
        median(runs, |run| run.p99_us),
        median(runs, |run| run.p999_us),
        median(runs, |run| run.cpu_us_per_io),
        ratio(|run| run.cpu_us_per_io),
        amplification
            .map(|value| format!("{value:.2}"))
            .unwrap_or_default(),
    );
}

fn median(runs: &[&Run], figure: impl Fn(&Run) -> f64) -> f64 {
    let mut values: Vec<f64> = runs.iter().map(|run| figure(run)).collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 {
        values[middle]
    } else {
        (values[middle - 1] + values[middle]) / 2.0
    }
}
