//! Two machines: one with the nodes that store, one with a host and its guest. Each does what the test writes
//! into a file, a line at a time, and prints the line and its number when that is done.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use cluster_rig::cluster::Cluster;
use cluster_rig::guest::ledger;
use cluster_rig::ledger::Promise;
use cluster_rig::load::{self, Load};
use guest_rig::process::wait_until;
use guest_rig::{Daemon, DaemonOptions};
use serde_json::Value;

use crate::kit::{
    self, COPIED, MESSAGES, NODES, PAIRED_LIMIT, PENSTOCK, READS, SERVE_ARGS, SOON, WIRE, metrics,
};

/// What the test wants done.
const COMMANDS: &str = "/run/commands";
/// Address of the host.
const HOST: &str = "10.77.0.2";
/// How the nodes' begin: beside the host's.
const STORAGE: &str = "10.77.0.1";
/// The test says something within this.
const COMMAND_LIMIT: Duration = Duration::from_secs(900);
/// The volume of long writes.
const LONG_DISK: &str = "long";
/// Answers by RDMA after which a node is taken to be asked by it.
const ANSWERS: u64 = 50;

/// Does one line after the other, until one is `end`.
fn obey(mut act: impl FnMut(&[&str]) -> Result<()>) -> Result<()> {
    for number in 1.. {
        let command = wait_until(COMMAND_LIMIT, || {
            let all = std::fs::read_to_string(COMMANDS).unwrap_or_default();
            // A line that is being written has no end yet.
            let lines = all
                .split_inclusive('\n')
                .filter(|line| line.ends_with('\n'));
            Ok(lines.map(str::trim_end).nth(number - 1).map(str::to_owned))
        });
        let command = command.context("no command arrived")?;
        let words: Vec<&str> = command.split(' ').collect();
        if words != ["end"] {
            act(&words).with_context(|| command.clone())?;
        }
        println!("{command}, command {number}: ok");
        if words == ["end"] {
            return Ok(());
        }
    }
    Ok(())
}

fn cpu_seconds(daemon: &Daemon) -> Result<f64> {
    daemon.metric("process_cpu_seconds_total")
}

/// Three nodes, which are killed and come back as the test says.
pub fn storage() -> Result<()> {
    let mut cluster = Cluster::start(kit::nodes(STORAGE)?)?;
    println!("token {}", cluster.token()?);
    println!("storage: up");
    obey(|words| match *words {
        ["joined"] => {
            cluster.expect_elsewhere(1);
            Ok(())
        }
        ["kill", node] => cluster.node_mut(node.parse()?)?.kill(),
        ["start", node] => {
            cluster.node_mut(node.parse()?)?.start()?;
            cluster.wait_ready().map(drop)
        }
        ["asked", node] => {
            let daemon = cluster.node(node.parse()?)?.daemon();
            let before = metrics(daemon)?[MESSAGES];
            let answered = || Ok((metrics(daemon)?[MESSAGES] > before + ANSWERS).then_some(()));
            wait_until(SOON, answered).with_context(|| daemon.log())
        }
        ["cpu"] => {
            let nodes = cluster.nodes().iter();
            let each = nodes.map(|node| cpu_seconds(node.daemon()));
            let all: Vec<f64> = each.collect::<Result<_>>()?;
            println!("cpu {}", all.iter().sum::<f64>());
            Ok(())
        }
        ["reads"] => {
            let nodes = cluster.nodes().iter();
            let each = nodes.map(|node| Ok(metrics(node.daemon())?[READS]));
            let all: Vec<u64> = each.collect::<Result<_>>()?;
            println!("reads {}", all.iter().sum::<u64>());
            Ok(())
        }
        ["same", count] => kit::is_same_everywhere(&cluster, LONG_DISK, count.parse()?),
        ["logs"] => {
            for node in cluster.nodes() {
                println!("{}", node.daemon().log());
            }
            Ok(())
        }
        _ => bail!("not known"),
    })
}

/// Waits until all data go by one way.
fn wait_way(daemon: &Daemon, rdma: bool) -> Result<()> {
    let all = usize::from(NODES);
    let mut seen = (0, 0);
    let waited = wait_until(PAIRED_LIMIT, || {
        seen = kit::ways(daemon)?;
        let wanted = if rdma { (all, 0) } else { (0, all) };
        Ok((seen == wanted).then_some(()))
    });
    if waited.is_ok() && !rdma {
        let ways = kit::transports(daemon)?;
        let told = |way: &Value| {
            way["why_not_rdma"]
                .as_str()
                .is_some_and(|why| !why.is_empty())
        };
        ensure!(ways.iter().all(told), "no reason is told: {ways:?}");
    }
    waited.with_context(|| {
        let (rdma, tcp) = seen;
        format!(
            "RDMA alone to {rdma} of {all} nodes, TCP to {tcp}\n{}",
            daemon.log()
        )
    })
}

/// A host whose guest's disk is on the other machine.
pub fn host(token: &str) -> Result<()> {
    let options = DaemonOptions::new(PENSTOCK.into(), &SERVE_ARGS);
    let mut daemon = Daemon::stopped(Path::new("/run/host"), options);
    let join = [
        "join", token, "--listen", HOST, "--name", "host", "--roles", "host",
    ];
    daemon.cli(&[&join[..], &["--wire", WIRE]].concat())?;
    daemon.start_again()?;
    let socket = daemon.disk("disk", "256M", 1)?;
    let long = daemon.disk(LONG_DISK, "64M", 1)?;
    let mut load = Some(Load::start(&socket, ledger()));
    println!("host: up");
    obey(|words| {
        let running = load.as_ref().context("the load has ended");
        match *words {
            ["requests", count] => {
                let running = running?;
                let requests = running.progress(count.parse()?, SOON);
                requests.with_context(|| daemon.log())?;
                let gap = running.take_gap();
                println!("{} ms without an answer", gap.as_millis());
                Ok(())
            }
            ["rdma"] => wait_way(&daemon, true),
            ["tcp"] => wait_way(&daemon, false),
            ["no-copy", count] => {
                let (count, running) = (count.parse()?, running?);
                let attempt = || {
                    wait_way(&daemon, true)?;
                    let before = metrics(&daemon)?;
                    running.progress(count, SOON)?;
                    kit::is_without_copies(&daemon, &before, count)
                };
                kit::steadily(attempt).with_context(|| daemon.log())
            }
            ["long", count] => kit::write_long(&long, count.parse()?, false),
            ["restless", count] => {
                let before = metrics(&daemon)?[COPIED];
                kit::write_long(&long, count.parse()?, true)?;
                // What is sent once more by RDMA comes from a copy.
                ensure!(
                    metrics(&daemon)?[COPIED] > before,
                    "no buffer changed too early"
                );
                Ok(())
            }
            ["detach"] => daemon.cli(&["detach", LONG_DISK]).map(drop),
            ["kill"] => {
                daemon.kill()?;
                let ledger = load.take().context("the load has ended")?.abandon()?;
                daemon.start_again()?;
                load = Some(Load::start(&socket, ledger));
                Ok(())
            }
            ["cpu"] => {
                println!("cpu {}", cpu_seconds(&daemon)?);
                println!("completed {}", running?.completed());
                Ok(())
            }
            ["check"] => {
                let mut ledger = load.take().context("the load has ended")?.stop()?;
                load::check(&socket, &mut ledger, Promise::Acknowledged)
            }
            _ => bail!("not known"),
        }
    })
}
