//! A cluster of daemons over RDMA, in a virtual machine.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use guest_rig::Form;
use guest_rig::paths::penstock_binary;
use rdma_rig::{Machine, Switch};
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_rdma-cluster");
/// All that the program does, in a machine that is emulated.
const LIMIT: Duration = Duration::from_secs(900);
/// One thing that a part of it is asked to do, likewise.
const PART_LIMIT: Duration = Duration::from_secs(240);
/// UDP port of RoCE version 2.
const ROCE_PORT: u16 = 4791;
/// Requests whose cost is looked at, and how often.
const MEASURED: &str = "requests 500";
/// See [`MEASURED`].
const ROUNDS: usize = 3;
/// Writes whose data are read by those that store them.
const LONG_WRITES: u32 = 40;
/// Pieces of a long write, of 256 KiB, at most.
const PIECES_MAX: f64 = 8.0;
/// Attempts at what a lost queue pair spoils.
const ATTEMPTS: u32 = 5;
/// How long nothing gets from one machine to the other.
const UNPLUGGED: Duration = Duration::from_secs(8);

/// A program without what only debuggers read, which would fill the machine's memory.
fn stripped(program: &Path, directory: &TempDir) -> Result<PathBuf> {
    let name = program.file_name().context("a program has a name")?;
    let to = directory.path().join(name);
    let status = Command::new("strip")
        .arg("--strip-debug")
        .arg("-o")
        .args([&to, program])
        .status()
        .context("run strip, of the package binutils")?;
    ensure!(status.success(), "strip {}", program.display());
    Ok(to)
}

#[test]
fn rdma_cluster_survives_link_and_node_loss_and_copies_nothing() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let program = stripped(Path::new(PROGRAM), &directory)?;
    let penstock = stripped(&penstock_binary()?, &directory)?;
    let mut machine = Machine::boot_for_cluster(&program, &penstock)?;
    let output = machine.run(&["alone", Form::of_this_run().word()], LIMIT)?;
    eprintln!("{}", output.text);
    ensure!(output.code == 0, "exit status {}", output.code);
    for line in [
        "no copy, no registration",
        "link down",
        "link up",
        "kill -9",
        "all read back",
        "front ends",
        "long writes",
        "attachments",
        "restless writes",
    ] {
        ensure!(output.text.contains(&format!("{line}: ok")), "{line}");
    }
    Ok(())
}

/// The program in one of several machines.
struct Part {
    machine: Machine,
    name: &'static str,
    commands: u32,
}

impl Part {
    fn start(mut machine: Machine, name: &'static str, args: &[&str]) -> Result<(Self, String)> {
        machine.start(args, name)?;
        let text = machine.wait_for_line(name, &format!("{name}: up"), PART_LIMIT)?;
        let part = Part {
            machine,
            name,
            commands: 0,
        };
        Ok((part, text))
    }

    /// Has it do something, and returns all that it has printed.
    fn ask(&mut self, command: &str) -> Result<String> {
        self.commands += 1;
        let script = format!("echo '{command}' >> /run/commands");
        self.machine.vm().sh(&script)?;
        let line = format!("{command}, command {}: ok", self.commands);
        let text = self.machine.wait_for_line(self.name, &line, PART_LIMIT);
        text.with_context(|| format!("{}: {command}", self.name))
    }

    /// The last number that it printed after this word, once it was asked for it.
    fn number(&mut self, command: &str, word: &str) -> Result<f64> {
        let text = self.ask(command)?;
        let found = text
            .lines()
            .rev()
            .find_map(|line| line.strip_prefix(word)?.strip_prefix(' '));
        let found = found.with_context(|| format!("no {word:?} in:\n{text}"))?;
        found.parse().with_context(|| found.to_owned())
    }
}

/// A host and the nodes that store for it, each in a machine of its own.
struct Apart {
    storage: Part,
    host: Part,
}

impl Apart {
    fn boot(switch: &Switch, directory: &TempDir) -> Result<Self> {
        let program = stripped(Path::new(PROGRAM), directory)?;
        let penstock = stripped(&penstock_binary()?, directory)?;
        // One after the other, and in this thread: a machine dies with the thread that booted it.
        let boot = |number| Machine::boot_for_cluster_on(switch, &program, &penstock, number);
        let (storage, host) = (boot(1)?, boot(2)?);
        let (mut storage, text) = Part::start(storage, "storage", &["storage"])?;
        let token = text.lines().find_map(|line| line.strip_prefix("token "));
        let token = token.context("storage printed no token")?;
        let (host, _) = Part::start(host, "host", &["host", token])?;
        storage.ask("joined")?;
        Ok(Self { storage, host })
    }

    /// Has the host do something; an error has the logs of those that store.
    fn ask(&mut self, command: &str) -> Result<String> {
        self.host.ask(command).or_else(|error| {
            let logs = self.storage.ask("logs")?;
            Err(error.context(logs))
        })
    }

    /// Each write's data are read by all three that store it, once. Not so if a queue pair or a peer is lost
    /// in the middle, as in emulated machines at any moment.
    fn long_writes(&mut self) -> Result<()> {
        let mut reads = 0.0;
        for _ in 0..ATTEMPTS {
            self.ask("rdma")?;
            let before = self.storage.number("reads", "reads")?;
            self.ask(&format!("long {LONG_WRITES}"))?;
            reads = self.storage.number("reads", "reads")? - before;
            // A write goes in one piece or, beside another disk's small requests, in several.
            let pieces = reads / 3.0 / f64::from(LONG_WRITES);
            if reads % 3.0 == 0.0 && (1.0..=PIECES_MAX).contains(&pieces) {
                return Ok(());
            }
        }
        bail!("{reads} READs of {LONG_WRITES} writes for three nodes")
    }

    /// Seconds of processor time of the host and of those that store, and requests of the guest, so far.
    fn spent(&mut self) -> Result<[f64; 3]> {
        let storage = self.storage.number("cpu", "cpu")?;
        let completed = self.host.number("cpu", "completed")?;
        Ok([self.host.number("cpu", "cpu")?, storage, completed])
    }

    /// Processor time of all daemons for each request of the guest, in microseconds: the host's, and that of
    /// those that store. Medians.
    fn cost(&mut self) -> Result<[f64; 2]> {
        let mut rounds = [[0.0; ROUNDS]; 2];
        for round in 0..ROUNDS {
            let before = self.spent()?;
            self.ask(MEASURED)?;
            let after = self.spent()?;
            let requests = after[2] - before[2];
            for (at, rounds) in rounds.iter_mut().enumerate() {
                rounds[round] = (after[at] - before[at]) * 1e6 / requests;
            }
        }
        Ok(rounds.map(|mut each| {
            each.sort_by(f64::total_cmp);
            each[ROUNDS / 2]
        }))
    }
}

/// What the queue pairs' loss alone does: all goes on over TCP, and by RDMA again.
fn lose_rdma_alone(apart: &mut Apart, switch: &Switch, form: Form) -> Result<()> {
    let by_rdma = (form == Form::Long).then(|| apart.cost()).transpose()?;
    // The queue pairs are torn, and nothing else is.
    switch.drop_udp_to(Some(ROCE_PORT));
    apart.ask("tcp")?;
    apart.ask("requests 300")?;
    let by_tcp = by_rdma.map(|_| apart.cost()).transpose()?;
    switch.drop_udp_to(None);
    apart.ask("rdma")?;
    apart.ask("requests 300")?;
    if let (Some(by_rdma), Some(by_tcp)) = (by_rdma, by_tcp) {
        eprintln!(
            "microseconds of CPU for each request, at the host and at all that store: {by_rdma:.0?} by \
             RDMA, {by_tcp:.0?} by TCP"
        );
    }
    Ok(())
}

fn lose_the_link(apart: &mut Apart, switch: &Switch) -> Result<()> {
    switch.pull_plug();
    std::thread::sleep(UNPLUGGED);
    switch.plug_in();
    apart.ask("requests 300")?;
    apart.ask("rdma").map(drop)
}

fn lose_a_storage_node(apart: &mut Apart) -> Result<()> {
    apart.storage.ask("kill 3")?;
    apart.ask("requests 300")?;
    apart.storage.ask("start 3")?;
    apart.ask("rdma")?;
    apart.storage.ask("asked 3").map(drop)
}

#[test]
fn host_uses_remote_storage_over_rdma_and_goes_on_without_it() -> Result<()> {
    let (switch, directory) = (Switch::new()?, tempfile::tempdir()?);
    let form = Form::of_this_run();
    let mut apart = Apart::boot(&switch, &directory)?;
    apart.ask("rdma")?;
    apart.ask(form.pick("no-copy 200", "no-copy 500"))?;
    apart.long_writes()?;
    lose_rdma_alone(&mut apart, &switch, form)?;
    if form == Form::Long {
        // The other rig has both in its short form: there the link and a node of one machine are lost.
        lose_the_link(&mut apart, &switch)?;
        lose_a_storage_node(&mut apart)?;
    }

    apart.ask("kill")?;
    apart.ask("requests 300")?;
    apart.ask("rdma")?;
    apart.ask("restless 20")?;
    apart.ask("detach")?;
    apart.storage.ask("same 20")?;
    let text = apart.ask("check")?;
    eprintln!("{text}");
    apart.ask("end")?;
    apart.storage.ask("end").map(drop)
}
