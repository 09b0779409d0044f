//! Medians of the runs, and a table of them.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Run, System};
use crate::driver::Load;

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

/// Puts the runs together.
pub(super) fn summarise(runs: &[Run]) -> Vec<Row> {
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
            let iops = median(runs, |run| run.iops);
            let cpu = median(runs, |run| run.cpu_us_per_io);
            rows.push(Row {
                load: *load,
                system: *system,
                runs: runs.len(),
                iops,
                iops_ratio: peer.map(|peer| iops / median(peer, |run| run.iops)),
                p50_us: median(runs, |run| run.p50_us),
                p99_us: median(runs, |run| run.p99_us),
                cpu_us_per_io: cpu,
                cpu_ratio: peer.map(|peer| median(peer, |run| run.cpu_us_per_io) / cpu),
            });
        }
    }
    rows
}

/// Prints the table.
pub(super) fn print(rows: &[Row]) {
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

fn median(runs: &[&Run], figure: impl Fn(&Run) -> f64) -> f64 {
    let mut values: Vec<f64> = runs.iter().map(|run| figure(run)).collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}
