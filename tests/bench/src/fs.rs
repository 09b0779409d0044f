//! `fs`: a filesystem of Penstock in a guest, side by side with virtiofsd on a directory of the host and with
//! the kernel's NFS on a disk of the guest. One guest mounts all of them; they are measured in turn.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Serialize;

use footprint::Footprint;
use peers::{Counters, Peer, Peers};
use report::Row;
use work::{Measurement, Part, Work};

mod footprint;
mod host;
mod nfs;
mod peers;
mod report;
mod virtiofsd;
mod work;

/// Most that the options take: what one machine holds in a test, and somebody waits for.
const FILES_MAX: u64 = 10_000_000;
const MEGABYTES_MAX: u64 = 1 << 20;
const ROUNDS_MAX: u64 = 1000;

/// Options of `fs`.
#[derive(Debug, Args)]
pub struct Options {
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
    /// Files of 4 KiB in each tree, in 100 directories; of 1 KiB for `footprint`
    #[arg(long, default_value_t = 100_000)]
    files: u64,
    /// Size of the large file in MiB
    #[arg(long, default_value_t = 1024)]
    megabytes: u64,
    /// Alternations between the filesystems
    #[arg(long, default_value_t = 5)]
    rounds: u64,
    /// Parts to run [default: all]
    #[arg(long, value_delimiter = ',')]
    parts: Vec<Part>,
    /// What Penstock is compared with [default: all]
    #[arg(long, value_delimiter = ',', value_parser = peer)]
    peers: Vec<Peer>,
    /// Where the files live: a directory on a disk, not in memory [default: the system's temporary directory]
    #[arg(long)]
    directory: Option<PathBuf>,
}

/// Penstock is measured in any case.
fn peer(name: &str) -> Result<Peer, String> {
    match name {
        "virtiofsd" => Ok(Peer::Virtiofsd),
        "nfs" => Ok(Peer::Nfs),
        _ => Err("give `virtiofsd`, `nfs` or both".to_owned()),
    }
}

impl Options {
    fn check(&self) -> Result<()> {
        let numbers = [
            ("--files", self.files, FILES_MAX),
            ("--megabytes", self.megabytes, MEGABYTES_MAX),
            ("--rounds", self.rounds, ROUNDS_MAX),
        ];
        for (option, number, max) in numbers {
            ensure!(
                (1..=max).contains(&number),
                "{option} is {number}: give 1 to {max}"
            );
        }
        Ok(())
    }

    fn wants(&self, part: Part) -> bool {
        self.parts.is_empty() || self.parts.contains(&part)
    }

    fn compares(&self, peer: Peer) -> bool {
        self.peers.is_empty() || self.peers.contains(&peer)
    }
}

/// One run.
#[derive(Debug, Serialize)]
struct Run {
    measurement: Measurement,
    peer: Peer,
    round: u64,
    seconds: f64,
    /// Files or MiB.
    count: u64,
    /// What the host counted meanwhile; none for NFS, whose server is in the guest.
    host: Option<Counters>,
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
struct Measured {
    files: u64,
    megabytes: u64,
    rounds: u64,
    beside_peers: Option<BesidePeers>,
    footprint: Option<Footprint>,
}

/// What was measured in turns.
#[derive(Debug, Serialize)]
struct BesidePeers {
    accelerator: &'static str,
    guest_kernel: String,
    virtiofsd: &'static str,
    /// What is missing, and why.
    not_measured: Vec<String>,
    summary: Vec<Row>,
    runs: Vec<Run>,
}

/// Runs the benchmark and prints its result.
pub fn run(options: &Options) -> Result<()> {
    options.check()?;
    let base = options.directory.clone().unwrap_or_else(std::env::temp_dir);
    let scratch = tempfile::Builder::new()
        .prefix("penstock-bench-")
        .tempdir_in(&base)
        .context("make a directory")?;
    let in_turns = Part::ALL
        .into_iter()
        .filter(|part| *part != Part::Footprint);
    let in_turns: Vec<Part> = in_turns.filter(|part| options.wants(*part)).collect();
    let beside_peers = match in_turns.is_empty() {
        true => None,
        false => Some(beside_peers(options, &in_turns, scratch.path())?),
    };
    let footprint = options.wants(Part::Footprint);
    let footprint = footprint.then(|| footprint::measure(options.files, scratch.path()));
    let measured = Measured {
        files: options.files,
        megabytes: options.megabytes,
        rounds: options.rounds,
        beside_peers,
        footprint: footprint.transpose()?,
    };
    if options.json {
        println!("{}", serde_json::to_string_pretty(&measured)?);
    } else {
        report::print(&measured);
    }
    Ok(())
}

fn beside_peers(options: &Options, parts: &[Part], directory: &Path) -> Result<BesidePeers> {
    let mut peers = Peers::start(options, directory)?;
    let mut runs = Vec::new();
    prepare(&mut peers, options)?;
    for round in 1..=options.rounds {
        for part in parts {
            say(&format!(
                "round {round} of {}: {}",
                options.rounds,
                part.name()
            ));
            for peer in peers.measured() {
                for measurement in part.measurements(peer) {
                    let run = measure(&mut peers, options, *measurement, peer, round);
                    let what = format!("{}: {}", peer.name(), measurement.name());
                    let run = run.with_context(|| format!("measure {what}"))?;
                    // A run of all parts takes an hour and more.
                    say(&format!("{what}: {:.2} s", run.seconds));
                    runs.push(run);
                }
            }
        }
    }
    Ok(BesidePeers {
        accelerator: peers.accelerator(),
        guest_kernel: peers.sh("uname -r")?,
        virtiofsd: virtiofsd::VERSION,
        not_measured: peers.end()?,
        summary: report::summarize(&runs),
        runs,
    })
}

/// Makes the trees and goes over them once, so that what the hosts cache of them is warm from the first round
/// on.
fn prepare(peers: &mut Peers, options: &Options) -> Result<()> {
    if options.wants(Part::Tar) {
        peers.time(&work::archive(options))?;
    }
    let wants_trees = [Part::Stat, Part::Find, Part::Open, Part::Host];
    if !wants_trees.into_iter().any(|part| options.wants(part)) {
        return Ok(());
    }
    for peer in peers.measured() {
        say(&format!("{}: {} files", peer.name(), options.files));
        for script in work::trees(options, peer) {
            peers.time(&script)?;
        }
    }
    Ok(())
}

fn measure(
    peers: &mut Peers,
    options: &Options,
    measurement: Measurement,
    peer: Peer,
    round: u64,
) -> Result<Run> {
    if let Some(script) = measurement.before(options, peer, round) {
        peers.sh(&script)?;
    }
    let before = peers.counters(peer)?;
    let timed = match measurement.work(options, peer, round) {
        Work::Guest(script) => peers.time(&script)?,
        Work::Host(work) => peers.time_host(peer, work, options.files)?,
    };
    let after = peers.counters(peer)?;
    if let Some(script) = measurement.after(peer) {
        peers.sh(&script)?;
    }
    let count = measurement.count(options);
    let counted = measurement.counted(options);
    ensure!(
        timed.count == counted,
        "{} were found, not {counted}",
        timed.count
    );
    Ok(Run {
        measurement,
        peer,
        round,
        seconds: timed.elapsed.as_secs_f64(),
        count,
        host: before
            .zip(after)
            .map(|(before, after)| after.since(&before)),
    })
}

fn say(line: &str) {
    eprintln!("bench: {line}");
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        options: Options,
    }

    fn checked(args: &[&str]) -> Result<()> {
        let words = [&["fs"], args].concat();
        Cli::try_parse_from(words)?.options.check()
    }

    #[test]
    fn what_cannot_be_measured_is_refused_by_the_name_of_its_option() {
        checked(&[]).unwrap();
        checked(&["--files", "1", "--rounds", "1", "--peers", "nfs"]).unwrap();
        for option in ["--files", "--rounds", "--megabytes"] {
            for number in ["0", "99999999999"] {
                let error = checked(&[option, number]).unwrap_err().to_string();
                let start = format!("{option} is {number}: give 1 to ");
                assert!(error.starts_with(&start), "{error}");
            }
        }
        let error = checked(&["--peers", "ceph"]).unwrap_err().to_string();
        assert!(error.contains("give `virtiofsd`, `nfs` or both"), "{error}");
    }
}
