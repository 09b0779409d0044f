//! qemu-storage-daemon as a vhost-user-blk back end: the known-good one that the rig is checked with, and the
//! one that benchmarks run beside.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::process::{Guarded, describe, log_tail, wait_until};

/// It opens its socket at once.
const START_LIMIT: Duration = Duration::from_secs(20);

/// What it exports.
#[derive(Debug, Clone)]
pub enum Backing {
    /// null-co of this many bytes: reads return what is in the buffer, writes go nowhere.
    Null(u64),
    /// A raw file through io_uring with O_DIRECT.
    File(PathBuf),
    /// An image of a Ceph cluster through librbd.
    Rbd {
        /// The cluster's configuration.
        conf: PathBuf,
        /// The image's pool.
        pool: String,
        /// The image.
        image: String,
    },
}

/// A running qemu-storage-daemon with one vhost-user-blk export.
#[derive(Debug)]
pub struct StorageDaemon {
    process: Guarded,
    socket: PathBuf,
}

impl StorageDaemon {
    /// Starts it with its socket and log in `directory`; `cpu` pins it.
    pub fn start(
        directory: &Path,
        backing: &Backing,
        queues: u16,
        cpu: Option<usize>,
    ) -> Result<Self> {
        let socket = directory.join("qsd.sock");
        // One that an earlier start left would look like this one's.
        if socket.exists() {
            std::fs::remove_file(&socket).context("remove an old socket")?;
        }
        let log_path = directory.join("qsd.log");
        let log = std::fs::File::create(&log_path).context("create qemu-storage-daemon's log")?;
        let node = match backing {
            Backing::Null(size) => {
                format!("driver=null-co,node-name=disk,read-zeroes=off,size={size}")
            }
            Backing::File(path) => {
                format!(
                    "driver=file,node-name=disk,filename={},aio=io_uring,cache.direct=on,discard=unmap",
                    path.display()
                )
            }
            Backing::Rbd { conf, pool, image } => format!(
                "driver=rbd,node-name=disk,pool={pool},image={image},conf={},cache.direct=on",
                conf.display()
            ),
        };
        let export = format!(
            "vhost-user-blk,id=export,node-name=disk,iothread=io0,addr.type=unix,addr.path={},\
             num-queues={queues},\
             writable=on",
            socket.display()
        );
        let mut command = pinned("qemu-storage-daemon", cpu);
        command
            .args([
                "--object",
                "iothread,id=io0",
                "--blockdev",
                &node,
                "--export",
                &export,
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let mut process = Guarded::spawn(&mut command, "qemu-storage-daemon")?;
        wait_until(START_LIMIT, || {
            if let Some(status) = process.ended()? {
                bail!(
                    "qemu-storage-daemon {}: {}",
                    describe(status),
                    log_tail(&log_path)
                );
            }
            Ok(socket.exists().then_some(()))
        })?;
        Ok(Self { process, socket })
    }

    /// The export's socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }
}

/// A command that runs `program`, on `cpu` alone when one is given.
pub fn pinned(program: impl AsRef<std::ffi::OsStr>, cpu: Option<usize>) -> Command {
    match cpu {
        Some(cpu) => {
            let mut command = Command::new("taskset");
            command.args(["--cpu-list", &cpu.to_string()]).arg(program);
            command
        }
        None => Command::new(program),
    }
}
