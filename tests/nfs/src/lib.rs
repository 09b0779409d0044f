//! NFS nodes and their clients in virtual machines with Debian 13's kernel.
//!
//! A [`Fleet`] is three machines on one switch. The first stores the data and is the client; it is never
//! killed. The other two are NFS nodes.

pub mod load;
pub mod recipe;

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use guest_rig::paths::penstock_binary;
use guest_rig::{GuestImage, Nic, Switch, Vm, VmConfig};
use tempfile::TempDir;

use recipe::RECIPE;

/// Memory of a machine: half of it is the file system in memory that its node stores in.
const MEMORY_MIB: u32 = 2048;
/// Until a daemon serves and is well, in a machine that is emulated beside others.
const START_LIMIT: Duration = Duration::from_secs(180);
/// Until an export is served by another NFS node.
pub const TAKE_OVER_LIMIT: Duration = Duration::from_secs(240);
/// The machine that stores, and mounts.
pub const STORE: u8 = 1;
/// The NFS nodes.
pub const NFS_NODES: [u8; 2] = [2, 3];
/// How clients reach the export.
pub const ADDRESS: &str = "10.9.0.50";

/// A user for the daemon, and a card with RDMA in software.
const SET_UP: &str = "
    echo root:x:0:0::/:/bin/sh > /etc/passwd; echo store:x:1000:1000::/:/bin/sh >> /etc/passwd
    echo root:x:0: > /etc/group; echo store:x:1000: >> /etc/group
    mkdir -p /run/penstock && chown 1000:1000 /run/penstock && chmod 700 /run/penstock
    ip link set lo up; ip addr add 10.9.0.@NUMBER@/24 dev eth0; ip link set eth0 up; hostname vm@NUMBER@
    rdma link add rxe0 type rxe netdev eth0";
/// The daemon: as the package runs it, it gives root's rights up.
const SERVE: &str = "penstock serve --data /run/penstock --threads 1 --user 1000 --group 1000 \
    --sandbox best-effort --device-size 600M --preallocation off >> /run/penstock.log 2>&1 & \
    echo $! > /run/penstock.pid";
/// An NFS node's helper.
const HELP: &str =
    "penstock nfs-helper --uid 1000 >> /run/helper.log 2>&1 & echo $! > /run/helper.pid";

/// The machines.
#[derive(Debug)]
pub struct Fleet {
    machines: Vec<Option<Vm>>,
    _switch: Switch,
    _directory: TempDir,
}

impl Fleet {
    /// Boots them, and makes them a cluster.
    pub fn start() -> Result<Self> {
        let (switch, directory) = (Switch::new()?, tempfile::tempdir()?);
        let penstock = stripped(&directory)?;
        let image = GuestImage::of(&RECIPE, |line| eprintln!("rig: {line}"))?;
        let mut fleet = Self {
            machines: vec![None],
            _switch: switch,
            _directory: directory,
        };
        // In this thread: a machine dies with the thread that booted it.
        for number in [STORE].into_iter().chain(NFS_NODES) {
            let nic = Nic::new(number).on(&fleet._switch);
            let mut config = VmConfig::new(Vec::new()).with_nic(nic);
            config.memory_mib = MEMORY_MIB;
            // Three machines share what processors there are.
            config.cpus = 1;
            let mut vm = Vm::boot(&image, &config.with_file(&penstock, "usr/bin/penstock"))?;
            vm.sh(&SET_UP.replace("@NUMBER@", &number.to_string()))?;
            fleet.machines.push(Some(vm));
        }
        fleet.form_cluster()?;
        Ok(fleet)
    }

    fn form_cluster(&mut self) -> Result<()> {
        self.sh(
            STORE,
            "penstock --data /run/penstock init --replicas 1 --wire crc --listen 10.9.0.1 --name store \
             --roles meta,storage > /dev/null && chown -R 1000:1000 /run/penstock",
        )?;
        self.serve(STORE)?;
        for number in NFS_NODES {
            let token = self.ok(STORE, "token create --roles nfs 2> /dev/null")?;
            // In a machine that gets no processor for long, the first try may be too slow.
            self.until(
                number,
                &format!(
                    "penstock --data /run/penstock join {token} --wire crc --listen 10.9.0.{number} \
                     --name gw{number} --roles nfs > /dev/null && chown -R 1000:1000 /run/penstock"
                ),
            )?;
            self.sh(number, HELP)?;
            self.serve(number)?;
        }
        Ok(())
    }

    /// A machine that has not been cut off.
    pub fn vm(&mut self, number: u8) -> Result<&mut Vm> {
        let machine = self
            .machines
            .get_mut(usize::from(number))
            .and_then(Option::as_mut);
        machine.with_context(|| format!("machine {number} has lost power"))
    }

    /// Starts a daemon, and waits until it answers.
    pub fn serve(&mut self, number: u8) -> Result<()> {
        self.sh(number, SERVE)?;
        let answers = "penstock --data /run/penstock status > /dev/null";
        let waited = self.vm(number)?.sh_until(answers, START_LIMIT);
        waited
            .map(drop)
            .or_else(|error| Err(error.context(self.log(number)?)))
    }

    /// Kills a daemon, and all that it has started.
    pub fn kill_daemon(&mut self, number: u8) -> Result<()> {
        self.sh(
            number,
            "kill -9 $(cat /run/penstock.pid); while kill -0 $(cat /run/penstock.pid) 2>/dev/null; do \
             sleep 0.05; done",
        )
        .map(drop)
    }

    /// Takes a machine's power away.
    pub fn cut_power(&mut self, number: u8) -> Result<()> {
        self.vm(number)?;
        self.machines[usize::from(number)] = None;
        Ok(())
    }

    /// The last lines of a machine's logs.
    pub fn log(&mut self, number: u8) -> Result<String> {
        self.vm(number)?.sh(
            "echo; tail -n 25 /run/penstock.log; echo; tail -n 15 /run/helper.log 2> /dev/null; echo; \
             dmesg | tail -n 8",
        )
    }

    /// Runs a script that must succeed, and returns its output.
    pub fn sh(&mut self, number: u8, script: &str) -> Result<String> {
        self.vm(number)?.sh(script)
    }

    /// Repeats a script until it succeeds; what all machines say if it never does.
    pub fn until(&mut self, number: u8, script: &str) -> Result<String> {
        let waited = self.vm(number)?.sh_until(script, TAKE_OVER_LIMIT);
        waited.map_err(|error| error.context(self.logs()))
    }

    /// The last lines of all machines that have power.
    pub fn logs(&mut self) -> String {
        let all = [STORE].into_iter().chain(NFS_NODES);
        let logs =
            all.filter_map(|number| Some(format!("machine {number}:{}", self.log(number).ok()?)));
        logs.collect::<Vec<_>>().join("\n\n")
    }

    /// Runs `penstock` with these words, which must succeed. While the machines are too slow to have a
    /// metadata leader it is repeated, as a person would.
    pub fn ok(&mut self, number: u8, words: &str) -> Result<String> {
        let begin = Instant::now();
        loop {
            let done = self.sh(number, &format!("penstock --data /run/penstock {words}"));
            match done {
                Err(error)
                    if lacks_leader(&format!("{error:#}")) && begin.elapsed() < START_LIMIT => {}
                done => return done.map_err(|error| error.context(self.logs())),
            }
        }
    }

    /// Runs `penstock`, which must fail with one line, and returns that.
    pub fn refused(&mut self, number: u8, words: &str) -> Result<String> {
        let script = format!("penstock --data /run/penstock {words} 2>&1 > /dev/null");
        let begin = Instant::now();
        let output = loop {
            let output = self.vm(number)?.run(&script, START_LIMIT)?;
            if !lacks_leader(&output.text) || begin.elapsed() > START_LIMIT {
                break output;
            }
        };
        let text = output.text.trim_end();
        ensure!(
            output.code != 0 && text.lines().count() == 1,
            "penstock {words} did not fail with one line, but with status {}:\n{text}",
            output.code
        );
        Ok(text.to_owned())
    }

    /// The NFS node that serves the export, by its number.
    pub fn active(&mut self) -> Result<u8> {
        let told = self.ok(STORE, "nfs export show data --json")?;
        let shown: serde_json::Value = serde_json::from_str(&told)?;
        let name = shown["node"].as_str().unwrap_or_default();
        match NFS_NODES
            .into_iter()
            .find(|number| name == format!("gw{number}"))
        {
            Some(number) => Ok(number),
            None => bail!("no NFS node serves it: {told}"),
        }
    }
}

/// The other NFS node.
#[must_use]
pub fn other(number: u8) -> u8 {
    NFS_NODES[0] + NFS_NODES[1] - number
}

/// `penstock` without what only debuggers read, which would fill the machines' memory.
fn stripped(directory: &TempDir) -> Result<PathBuf> {
    let to = directory.path().join("penstock");
    let status = Command::new("strip")
        .arg("--strip-debug")
        .arg("-o")
        .args([&to, &penstock_binary()?])
        .status()
        .context("run strip, of the package binutils")?;
    ensure!(status.success(), "strip penstock");
    Ok(to)
}

/// Whether `penstock` says that it found no leader of the metadata.
fn lacks_leader(told: &str) -> bool {
    ["no leader", "no metadata leader"]
        .iter()
        .any(|words| told.contains(words))
}
