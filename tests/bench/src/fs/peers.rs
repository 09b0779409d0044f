//! The guest and what serves its filesystems.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_rig::paths::penstock_binary;
use guest_rig::{Daemon, DaemonOptions, Disk, GuestImage, StorageDaemon, Tree, Vm, VmConfig};
use serde::Serialize;

use super::host::HostTree;
use super::virtiofsd::Virtiofsd;
use super::work::{FILE_BYTES, HostWork, Part};
use super::{Options, nfs, say};
use crate::usage::process_cpu_time;

/// Guest memory: three trees and what comes of a large file find room in its caches.
const MEMORY_MIB: u32 = 4096;
/// Of one script, for each file of a tree, each MiB, and the rest: an emulated NFS server on a busy machine
/// makes hardly a hundred files in a second.
const FILE_LIMIT: Duration = Duration::from_millis(50);
const MIB_LIMIT: Duration = Duration::from_secs(1);
const LIMIT: Duration = Duration::from_secs(600);
/// Least cache of the host's: the default. A tree that takes more gets a third more than it has, as virtiofsd
/// caches in all the memory that the host has left.
const CACHE_MIB_MIN: u64 = 256;
/// The filesystem's name, and the tag of its first attachment.
const FILESYSTEM: &str = "penstock";

/// A filesystem that the guest has mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Peer {
    /// Penstock.
    Penstock,
    /// The same filesystem by a second, read-only attachment.
    PenstockReadOnly,
    /// virtiofsd.
    Virtiofsd,
    /// The kernel's NFS, server and client.
    Nfs,
}

impl Peer {
    pub fn name(self) -> &'static str {
        match self {
            Self::Penstock => "penstock",
            Self::PenstockReadOnly => "penstock read-only",
            Self::Virtiofsd => "virtiofsd",
            Self::Nfs => "NFS 4.2",
        }
    }

    /// Where the guest has mounted it.
    pub fn mount(self) -> &'static str {
        match self {
            Self::Penstock => "/mnt/penstock",
            Self::PenstockReadOnly => "/mnt/penstock-ro",
            Self::Virtiofsd => "/mnt/virtiofsd",
            Self::Nfs => "/mnt/nfs",
        }
    }

    /// Where the guest has it if it is the guest that serves it.
    pub fn served_in_guest(self) -> Option<&'static str> {
        (self == Self::Nfs).then_some(nfs::SERVED)
    }
}

/// What the host counts of a peer.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Counters {
    /// Processor time of the daemon.
    pub cpu_seconds: f64,
    /// Of Penstock alone.
    pub namespace: Option<Namespace>,
}

/// What Penstock's daemon counts.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Namespace {
    /// Requests of the guest that were answered.
    pub requests: f64,
    /// Questions to the namespace's leader.
    pub questions: f64,
    /// Changes that the leader was asked for.
    pub operations: f64,
}

impl Namespace {
    /// What a daemon has counted so far.
    pub fn of(daemon: &Daemon) -> Result<Self> {
        let counter = |name| daemon.metric(&format!("penstock_filesystem_{name}_total"));
        Ok(Self {
            requests: counter("requests")?,
            questions: counter("questions")?,
            operations: counter("operations")?,
        })
    }
}

impl Counters {
    /// What came on top of `before`.
    pub fn since(&self, before: &Self) -> Self {
        let namespace = self.namespace.zip(before.namespace);
        Self {
            cpu_seconds: self.cpu_seconds - before.cpu_seconds,
            namespace: namespace.map(|(now, before)| Namespace {
                requests: now.requests - before.requests,
                questions: now.questions - before.questions,
                operations: now.operations - before.operations,
            }),
        }
    }
}

/// What a call of the guest's helper came to.
#[derive(Debug)]
pub struct Timed {
    pub elapsed: Duration,
    pub count: u64,
}

/// The guest with all that it has mounted.
#[derive(Debug)]
pub struct Peers {
    // Before what serves it.
    vm: Vm,
    host_trees: BTreeMap<Peer, HostTree>,
    daemon: Daemon,
    /// One for the guest, another one where it is driven without a guest.
    virtiofsd: Vec<Virtiofsd>,
    _disk: Option<StorageDaemon>,
    limit: Duration,
    measured: Vec<Peer>,
    not_measured: Vec<String>,
}

impl Peers {
    /// Starts everything, its files below `directory`.
    pub fn start(options: &Options, directory: &Path) -> Result<Self> {
        let virtiofsd = start_virtiofsd(options, directory)?;
        let daemon = start_penstock(options, directory)?;
        let host_trees = host_trees(options, &daemon, &virtiofsd)?;
        let mut trees = Vec::new();
        for peer in [Peer::Penstock, Peer::PenstockReadOnly] {
            trees.push(tree(&attach(&daemon, peer, tag(peer))?, peer));
        }
        let mut measured = vec![Peer::Penstock, Peer::PenstockReadOnly];
        let mut not_measured = Vec::new();
        match virtiofsd.first() {
            Some(virtiofsd) => {
                trees.push(tree(virtiofsd.socket(), Peer::Virtiofsd));
                measured.push(Peer::Virtiofsd);
            }
            None => not_measured.push("virtiofsd: not among --peers".to_owned()),
        }
        let wants_nfs = options.compares(Peer::Nfs);
        let disk = wants_nfs.then(|| nfs::disk(options, directory));
        let disk = disk.transpose()?;

        let image = GuestImage::of(&nfs::RECIPE, |line| eprintln!("{line}"))?;
        say("booting the guest");
        let disks = disk.iter().map(|disk| Disk::new(disk.socket())).collect();
        let config = VmConfig {
            trees,
            memory_mib: MEMORY_MIB,
            ..VmConfig::new(disks)
        };
        let mut vm = Vm::boot(&image, &config)?;
        for peer in &measured {
            let (tag, at) = (tag(*peer), peer.mount());
            vm.sh(&format!("mkdir -p {at} && mount -t virtiofs {tag} {at}"))?;
        }
        match disk.is_some().then(|| nfs::mount(&mut vm)) {
            Some(Ok(())) => measured.push(Peer::Nfs),
            Some(Err(error)) => not_measured.push(format!("NFS 4.2: {error:#}")),
            None => not_measured.push("NFS 4.2: not among --peers".to_owned()),
        }
        for line in &not_measured {
            say(&format!("not measured: {line}"));
        }
        Ok(Self {
            vm,
            host_trees,
            daemon,
            virtiofsd,
            _disk: disk,
            limit: limit(options),
            measured,
            not_measured,
        })
    }

    /// What is measured, in the order of turns.
    pub fn measured(&self) -> Vec<Peer> {
        self.measured.clone()
    }

    /// How QEMU runs the guest.
    pub fn accelerator(&self) -> &'static str {
        self.vm.accel().name()
    }

    /// Runs a script of the guest that must succeed; returns what it printed.
    pub fn sh(&mut self, script: &str) -> Result<String> {
        let output = self.vm.run(script, self.limit)?;
        ensure!(
            output.code == 0,
            "in the guest, exit status {}: {script}\n{}",
            output.code,
            output.text
        );
        Ok(output.text.trim_end().to_owned())
    }

    /// Has the guest's helper do work on a tree.
    pub fn time(&mut self, work: &str) -> Result<Timed> {
        let told = self.sh(&format!("rigio tree {work}"))?;
        let numbers = told.split_once(' ').and_then(|(ns, count)| {
            let (ns, count) = (ns.parse().ok()?, count.parse().ok()?);
            Some(Timed {
                elapsed: Duration::from_nanos(ns),
                count,
            })
        });
        numbers.with_context(|| format!("the guest's helper told {told:?}"))
    }

    /// Does work on a tree without a guest.
    pub fn time_host(&mut self, peer: Peer, work: HostWork, files: u64) -> Result<Timed> {
        let tree = self.host_trees.get_mut(&peer);
        let tree = tree.context("it is not served without a guest")?;
        match work {
            HostWork::Stat => tree.stat(files),
            HostWork::Walk => tree.walk(),
            HostWork::Open { seed } => tree.open(files, seed),
        }
    }

    /// What the host has counted of a peer so far.
    pub fn counters(&self, peer: Peer) -> Result<Option<Counters>> {
        let (pids, namespace) = match peer {
            Peer::Penstock | Peer::PenstockReadOnly => {
                (vec![self.daemon.pid()?], Some(Namespace::of(&self.daemon)?))
            }
            Peer::Virtiofsd => (self.virtiofsd.iter().map(Virtiofsd::pid).collect(), None),
            Peer::Nfs => return Ok(None),
        };
        let mut cpu_seconds = 0.0;
        for pid in pids {
            cpu_seconds += process_cpu_time(pid)?.as_secs_f64();
        }
        Ok(Some(Counters {
            cpu_seconds,
            namespace,
        }))
    }

    /// Ends the guest and what served it; returns what was not measured, and why.
    pub fn end(self) -> Result<Vec<String>> {
        let Self { vm, mut daemon, .. } = self;
        vm.power_off()?;
        daemon.stop()?;
        Ok(self.not_measured)
    }
}

fn limit(options: &Options) -> Duration {
    let times = |limit: Duration, count: u64| {
        limit.saturating_mul(u32::try_from(count).unwrap_or(u32::MAX))
    };
    LIMIT + times(FILE_LIMIT, options.files) + times(MIB_LIMIT, options.megabytes)
}

fn start_penstock(options: &Options, directory: &Path) -> Result<Daemon> {
    // Twice what is alive at a time, as files that are gone give their space back in the background.
    let alive_mib = options.files / 128 + options.megabytes;
    let size = format!("{}M", 2048 + 4 * alive_mib);
    let config = directory.join("penstock.toml");
    let cache_mib = CACHE_MIB_MIN.max(options.files / 192);
    std::fs::write(&config, format!("[filesystem]\ncache = \"{cache_mib}M\"\n"))?;
    let config = config.to_str().context("the directory is not UTF-8")?;
    let args = ["--device-size", &size, "--config", config];
    let daemon_options = DaemonOptions::new(penstock_binary()?, &args);
    let daemon = Daemon::start_with(&directory.join("penstock"), daemon_options)?;
    daemon.cli(&["fs", "create", FILESYSTEM])?;
    Ok(daemon)
}

fn start_virtiofsd(options: &Options, directory: &Path) -> Result<Vec<Virtiofsd>> {
    let mut running = Vec::new();
    if options.compares(Peer::Virtiofsd) {
        running.push(Virtiofsd::start(directory, "virtiofsd")?);
        if options.wants(Part::Host) {
            running.push(Virtiofsd::start(directory, "virtiofsd-host")?);
        }
    }
    Ok(running)
}

/// Mounts without a guest what is served to the guest, by sockets of their own.
fn host_trees(
    options: &Options,
    daemon: &Daemon,
    virtiofsd: &[Virtiofsd],
) -> Result<BTreeMap<Peer, HostTree>> {
    let mut trees = BTreeMap::new();
    if options.wants(Part::Host) {
        for peer in [Peer::Penstock, Peer::PenstockReadOnly] {
            let socket = attach(daemon, peer, &format!("host-{}", tag(peer)))?;
            trees.insert(peer, HostTree::mount(&socket, FILE_BYTES)?);
        }
        if let [_, virtiofsd] = virtiofsd {
            trees.insert(
                Peer::Virtiofsd,
                HostTree::mount(virtiofsd.socket(), FILE_BYTES)?,
            );
        }
    }
    Ok(trees)
}

/// Attaches the filesystem; returns the socket.
fn attach(daemon: &Daemon, peer: Peer, name: &str) -> Result<PathBuf> {
    // `penstock.sock` is the daemon's own.
    let socket = daemon.data().join(format!("fs-{name}.sock"));
    let path = socket.to_str().context("the data directory is not UTF-8")?;
    let mut args = vec!["attach", "fs", FILESYSTEM, "--socket", path];
    args.extend(["--tag", tag(peer)]);
    if peer == Peer::PenstockReadOnly {
        args.push("--read-only");
    }
    daemon.cli(&args)?;
    Ok(socket)
}

fn tree(socket: &Path, peer: Peer) -> Tree {
    Tree::new(socket, tag(peer)).queue_size(filesystem_rig::QUEUE_SIZE)
}

/// By this the guest mounts it: the last word of where.
fn tag(peer: Peer) -> &'static str {
    peer.mount().trim_start_matches("/mnt/")
}
