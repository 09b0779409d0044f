//! Medians of the runs, and a table of them.

use std::collections::BTreeMap;

use serde::Serialize;

use super::peers::{Counters, Namespace, Peer};
use super::work::Measurement;
use super::{BesidePeers, Measured, Run};
use crate::median::median;

/// Medians of one filesystem in one measurement.
#[derive(Debug, Serialize)]
pub struct Row {
    measurement: Measurement,
    peer: Peer,
    runs: usize,
    /// Files or MiB.
    per_second: f64,
    /// The rate divided by virtiofsd's, where that ran.
    ratio_to_virtiofsd: Option<f64>,
    /// Likewise by that of NFS.
    ratio_to_nfs: Option<f64>,
    /// Processor time of the host's daemon in seconds, for 1,000 files or MiB.
    cpu_seconds_per_thousand: Option<f64>,
    /// Requests of the guest that Penstock answered, in the whole run.
    requests: Option<f64>,
    /// Its questions to the namespace's leader.
    questions: Option<f64>,
    /// Changes that it asked the leader for.
    operations: Option<f64>,
}

/// Puts the runs together.
pub fn summarize(runs: &[Run]) -> Vec<Row> {
    let mut cases: BTreeMap<Measurement, BTreeMap<Peer, Vec<&Run>>> = BTreeMap::new();
    for run in runs {
        let peers = cases.entry(run.measurement).or_default();
        peers.entry(run.peer).or_default().push(run);
    }
    let of_case = |peers: &BTreeMap<Peer, Vec<&Run>>| -> Vec<Row> {
        let mut rows: Vec<Row> = peers.values().map(|runs| row(runs)).collect();
        for compared in [Peer::Virtiofsd, Peer::Nfs] {
            let found = rows.iter().find(|row| row.peer == compared);
            let Some(rate) = found.map(|row| row.per_second) else {
                continue;
            };
            for row in rows.iter_mut().filter(|row| row.peer != compared) {
                let ratio = Some(row.per_second / rate);
                match compared {
                    Peer::Nfs => row.ratio_to_nfs = ratio,
                    _ => row.ratio_to_virtiofsd = ratio,
                }
            }
        }
        rows
    };
    cases.values().flat_map(of_case).collect()
}

fn row(runs: &[&Run]) -> Row {
    let host = |figure: fn(&Run, &Counters) -> Option<f64>| {
        let figures = runs.iter().map(|run| figure(run, run.host.as_ref()?));
        let figures: Option<Vec<f64>> = figures.collect();
        figures.map(|figures| median(figures.into_iter()))
    };
    let (measurement, peer) = (runs[0].measurement, runs[0].peer);
    Row {
        measurement,
        peer,
        runs: runs.len(),
        per_second: median(runs.iter().map(|run| run.count as f64 / run.seconds)),
        ratio_to_virtiofsd: None,
        ratio_to_nfs: None,
        cpu_seconds_per_thousand: host(|run, host| Some(host.cpu_seconds * 1e3 / run.count as f64)),
        requests: host(|_, host| namespace(host, |told| told.requests)),
        questions: host(|_, host| namespace(host, |told| told.questions)),
        operations: host(|_, host| namespace(host, |told| told.operations)),
    }
}

fn namespace(host: &Counters, figure: fn(&Namespace) -> f64) -> Option<f64> {
    host.namespace.as_ref().map(figure)
}

/// Prints everything.
pub(super) fn print(measured: &Measured) {
    if let Some(beside_peers) = &measured.beside_peers {
        println!(
            "\n{} files of 4 KiB, a file of {} MiB; medians, rounds: {}",
            measured.files, measured.megabytes, measured.rounds
        );
        print_rows(beside_peers);
    }
    if let Some(footprint) = &measured.footprint {
        footprint.print();
    }
}

fn print_rows(measured: &BesidePeers) {
    println!(
        "guest under {}, Linux {}; virtiofsd {}, cache=auto",
        measured.accelerator, measured.guest_kernel, measured.virtiofsd
    );
    if measured.accelerator == "TCG" {
        println!(
            "the guest is emulated, and with it the whole NFS server, but no daemon of the host: read the \
             ratios to virtiofsd"
        );
    }
    println!(
        "\n{:<30} {:<18} {:>4} {:>9} {:<5} {:>12} {:>8} {:>10} {:>9} {:>9} {:>10}",
        "measurement",
        "filesystem",
        "runs",
        "per s",
        "",
        "to virtiofsd",
        "to NFS",
        "CPU s/1000",
        "requests",
        "questions",
        "operations"
    );
    for row in &measured.summary {
        let times = |value: Option<f64>| value.map(|v| format!("{v:.2}x")).unwrap_or_default();
        let whole = |value: Option<f64>| value.map(|v| format!("{v:.0}")).unwrap_or_default();
        let cpu = row.cpu_seconds_per_thousand;
        println!(
            "{:<30} {:<18} {:>4} {:>9.0} {:<5} {:>12} {:>8} {:>10} {:>9} {:>9} {:>10}",
            row.measurement.name(),
            row.peer.name(),
            row.runs,
            row.per_second,
            row.measurement.unit(),
            times(row.ratio_to_virtiofsd),
            times(row.ratio_to_nfs),
            cpu.map(|v| format!("{v:.4}")).unwrap_or_default(),
            whole(row.requests),
            whole(row.questions),
            whole(row.operations),
        );
    }
    println!();
    for line in &measured.not_measured {
        println!("not measured: {line}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(measurement: Measurement, peer: Peer, seconds: f64, host: Option<Counters>) -> Run {
        Run {
            measurement,
            peer,
            round: 1,
            seconds,
            count: 1000,
            host,
        }
    }

    fn counters(cpu_seconds: f64, questions: Option<f64>) -> Option<Counters> {
        let namespace = questions.map(|questions| Namespace {
            requests: 4.0 * questions,
            questions,
            operations: 0.0,
        });
        Some(Counters {
            cpu_seconds,
            namespace,
        })
    }

    #[test]
    fn rows_have_medians_and_ratios_to_the_peers_of_their_measurement() {
        let (stat, open) = (Measurement::Stat, Measurement::Open);
        let mut runs = Vec::new();
        for (seconds, cpu, questions) in [(1.0, 0.3, 10.0), (4.0, 0.1, 50.0), (2.0, 0.2, 20.0)] {
            let host = counters(cpu, Some(questions));
            runs.push(run(stat, Peer::Penstock, seconds, host));
        }
        runs.push(run(stat, Peer::Virtiofsd, 4.0, counters(0.5, None)));
        runs.push(run(stat, Peer::Nfs, 1.0, None));
        runs.push(run(
            open,
            Peer::PenstockReadOnly,
            1.0,
            counters(0.1, Some(0.0)),
        ));
        let rows = summarize(&runs);
        let peers: Vec<Peer> = rows.iter().map(|row| row.peer).collect();
        let expected = [
            Peer::Penstock,
            Peer::Virtiofsd,
            Peer::Nfs,
            Peer::PenstockReadOnly,
        ];
        assert_eq!(peers, expected);

        let [penstock, virtiofsd, nfs, alone] = rows.as_slice() else {
            panic!("{rows:?}");
        };
        assert_eq!((penstock.runs, penstock.per_second), (3, 500.0));
        assert_eq!(penstock.ratio_to_virtiofsd, Some(2.0));
        assert_eq!(penstock.ratio_to_nfs, Some(0.5));
        assert_eq!(penstock.cpu_seconds_per_thousand, Some(0.2));
        assert_eq!(
            (penstock.requests, penstock.questions),
            (Some(80.0), Some(20.0))
        );
        assert_eq!(
            (virtiofsd.ratio_to_virtiofsd, virtiofsd.questions),
            (None, None)
        );
        assert_eq!(
            (nfs.ratio_to_nfs, nfs.cpu_seconds_per_thousand),
            (None, None)
        );
        // Nothing of another measurement.
        assert_eq!((alone.ratio_to_virtiofsd, alone.ratio_to_nfs), (None, None));
    }
}
