//! The back ends under comparison, each alone on one core.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use guest_rig::storage_daemon::Backing;
use guest_rig::{Daemon, DaemonOptions, StorageDaemon};
use serde::Serialize;

/// Size of the disk on a null back end; nothing is stored.
pub const NULL_SIZE: u64 = 64 << 30;
/// Size of the disk on a file.
pub const FILE_SIZE: u64 = 2 << 30;
/// Penstock's device file: room for the disk and for writing out of place.
const DEVICE_SIZE: &str = "4G";

/// Whom to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// qemu-storage-daemon.
    Qemu,
    /// Penstock, spinning a bounded time after work.
    PenstockAdaptive,
    /// Penstock, always spinning.
    PenstockAlways,
}

impl Kind {
    /// The word for tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Qemu => "qemu-storage-daemon",
            Self::PenstockAdaptive => "penstock adaptive",
            Self::PenstockAlways => "penstock always",
        }
    }

    fn poll(self) -> &'static str {
        if self == Self::PenstockAlways {
            "always"
        } else {
            "adaptive"
        }
    }
}

/// Where data go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Store {
    /// Nowhere.
    Null,
    /// A file through O_DIRECT, written once before it is measured.
    File,
}

/// A running back end.
#[derive(Debug)]
pub enum Backend {
    /// qemu-storage-daemon.
    Qemu(StorageDaemon),
    /// Penstock.
    Penstock {
        /// The daemon.
        daemon: Box<Daemon>,
        /// Its attachment's socket.
        socket: PathBuf,
    },
}

impl Backend {
    /// Starts a back end on `cpu`, its files below `directory`, where a file store of the same kind is used
    /// again.
    pub fn start(
        kind: Kind,
        store: Store,
        queues: u16,
        directory: &Path,
        cpu: usize,
    ) -> Result<Self> {
        match kind {
            Kind::Qemu => start_qemu(store, queues, directory, cpu),
            _ => start_penstock(kind, store, queues, directory, cpu),
        }
    }

    /// The vhost-user socket.
    pub fn socket(&self) -> &Path {
        match self {
            Self::Qemu(daemon) => daemon.socket(),
            Self::Penstock { socket, .. } => socket,
        }
    }

    /// Its process.
    pub fn pid(&self) -> Result<u32> {
        match self {
            Self::Qemu(daemon) => Ok(daemon.pid()),
            Self::Penstock { daemon, .. } => daemon.pid(),
        }
    }

    /// Ends it in its orderly way.
    pub fn stop(self) -> Result<()> {
        if let Self::Penstock { mut daemon, .. } = self {
            daemon.stop()?;
        }
        Ok(())
    }
}

fn start_qemu(store: Store, queues: u16, directory: &Path, cpu: usize) -> Result<Backend> {
    let backing = match store {
        Store::Null => Backing::Null(NULL_SIZE),
        Store::File => {
            let path = directory.join("qemu.raw");
            if !path.exists() {
                let file =
                    std::fs::File::create(&path).context("create qemu-storage-daemon's file")?;
                rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, FILE_SIZE)
                    .context("allocate qemu-storage-daemon's file")?;
            }
            Backing::File(path)
        }
    };
    Ok(Backend::Qemu(StorageDaemon::start(
        directory,
        &backing,
        queues,
        Some(cpu),
    )?))
}

fn start_penstock(
    kind: Kind,
    store: Store,
    queues: u16,
    directory: &Path,
    cpu: usize,
) -> Result<Backend> {
    let (name, size) = match store {
        Store::Null => ("null", NULL_SIZE),
        Store::File => ("file", FILE_SIZE),
    };
    let options = penstock_options(kind, store)?.cpu(cpu);
    let daemon = Box::new(Daemon::start_with(&directory.join(name), options)?);
    let socket = attach_afresh(&daemon, size, queues)?;
    Ok(Backend::Penstock { daemon, socket })
}

/// How Penstock is started for a benchmark.
pub fn penstock_options(kind: Kind, store: Store) -> Result<DaemonOptions> {
    let mut args = match store {
        Store::Null => vec!["--store", "null"],
        Store::File => vec!["--device-size", DEVICE_SIZE, "--preallocation", "full"],
    };
    args.extend(["--threads", "1", "--poll", kind.poll()]);
    Ok(DaemonOptions::new(
        guest_rig::paths::penstock_binary()?,
        &args,
    ))
}

/// Attaches the benchmark's volume with `queues` queues, after creating it where it does not exist and ending
/// the attachment that an earlier start left.
pub fn attach_afresh(daemon: &Daemon, size: u64, queues: u16) -> Result<PathBuf> {
    let empty = |listed: &serde_json::Value| listed.as_array().is_none_or(Vec::is_empty);
    if empty(&daemon.json(&["volume", "list"])?) {
        daemon.cli(&["volume", "create", "bench", &format!("{}M", size >> 20)])?;
    }
    if !empty(&daemon.json(&["attachments", "list"])?) {
        daemon.cli(&["detach", "bench", "--yes"])?;
    }
    daemon.attach("bench", queues)
}
