//! The peer: a Ceph cluster of one monitor and three OSDs, each on a file, in a directory of its own, on the
//! loopback device; and qemu-storage-daemon with librbd, which serves its image over vhost-user-blk as
//! Penstock serves a volume.
//!
//! It is set up in its own favour where that is possible: no authentication, no manager, logs to files,
//! BlueStore told that its files are on a solid-state disk.

use std::fmt::Write;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use guest_rig::StorageDaemon;
use guest_rig::process::{Guarded, describe, log_tail, run, wait_until};
use guest_rig::storage_daemon::{Backing, pinned};

/// Copies, each on an OSD of its own.
const OSDS: usize = 3;
/// Size of each OSD's file; sparse.
const OSD_BYTES: u64 = 4 << 30;
/// What BlueStore may cache, in bytes: near the least that it takes.
const OSD_MEMORY: u64 = 1 << 30;
const POOL: &str = "bench";
const IMAGE: &str = "disk";
/// Between the monitor's first answer and OSDs that are up.
const UP_LIMIT: Duration = Duration::from_secs(120);
/// Bounds every command of `ceph`, which waits for ever otherwise, in seconds.
const COMMAND_S: &str = "60";

/// A running Ceph. Dropping it kills its processes; its directory is the caller's.
#[derive(Debug)]
pub(super) struct Ceph {
    // In the order in which they go.
    disk: Option<StorageDaemon>,
    osds: Vec<Guarded>,
    monitor: Guarded,
    conf: PathBuf,
}

impl Ceph {
    /// Starts one in `directory`, all its processes on `cpu`, and makes an image of `image_mib` MiB.
    pub(super) fn start(directory: &Path, cpu: usize, image_mib: u64) -> Result<Self> {
        let port = free_port()?;
        let fsid = run(Command::new("cat").arg("/proc/sys/kernel/random/uuid"))?;
        let conf = directory.join("ceph.conf");
        std::fs::write(&conf, configuration(directory, fsid.trim(), port)?)
            .context("write Ceph's configuration")?;
        let monitor = start_monitor(directory, &conf, fsid.trim(), port, cpu)?;
        let mut ceph = Self {
            disk: None,
            osds: Vec::new(),
            monitor,
            conf,
        };
        for number in 0..OSDS {
            ceph.start_osd(directory, number, cpu)?;
        }
        ceph.wait_up(directory)?;
        ceph.command("ceph", &["osd", "pool", "create", POOL, "32", "32"])?;
        let size = format!("{image_mib}M");
        let image = format!("{POOL}/{IMAGE}");
        ceph.command("rbd", &["create", "--size", &size, &image])?;
        let backing = Backing::Rbd {
            conf: ceph.conf.clone(),
            pool: POOL.to_owned(),
            image: IMAGE.to_owned(),
        };
        ceph.disk = Some(StorageDaemon::start(directory, &backing, 1, Some(cpu))?);
        Ok(ceph)
    }

    /// The disk's vhost-user socket.
    pub(super) fn socket(&self) -> Result<&Path> {
        let disk = self.disk.as_ref().context("the disk is not served")?;
        Ok(disk.socket())
    }

    /// All processes.
    pub(super) fn pids(&self) -> Vec<u32> {
        let disk = self.disk.iter().map(StorageDaemon::pid);
        let osds = self.osds.iter().map(Guarded::pid);
        disk.chain(osds).chain([self.monitor.pid()]).collect()
    }

    fn start_osd(&mut self, directory: &Path, number: usize, cpu: usize) -> Result<()> {
        let id = number.to_string();
        let uuid = run(Command::new("cat").arg("/proc/sys/kernel/random/uuid"))?;
        let home = directory.join(format!("osd{number}"));
        std::fs::create_dir(&home).context("make an OSD's directory")?;
        write_zeroes(&home.join("block"), OSD_BYTES)?;
        self.command("ceph", &["osd", "new", uuid.trim(), &id])?;
        self.command(
            "ceph-osd",
            &["-i", &id, "--mkfs", "--osd-uuid", uuid.trim()],
        )?;
        let mut command = pinned("ceph-osd", Some(cpu));
        command.args(["-f", "-i", &id]);
        let name = format!("ceph-osd {number}");
        self.osds
            .push(spawn(&mut command, &self.conf, directory, &name)?);
        Ok(())
    }

    fn wait_up(&mut self, directory: &Path) -> Result<()> {
        wait_until(UP_LIMIT, || {
            for (number, osd) in self.osds.iter_mut().enumerate() {
                if let Some(status) = osd.ended()? {
                    let log = directory.join(format!("ceph-osd {number}.out"));
                    bail!("ceph-osd {number} {}: {}", describe(status), log_tail(&log));
                }
            }
            let stat = command(&self.conf, "ceph", &["osd", "stat", "-f", "json"])?;
            let stat: serde_json::Value = serde_json::from_str(&stat)?;
            Ok((stat["num_up_osds"] == OSDS).then_some(()))
        })
        .context("wait until Ceph's OSDs are up")
    }

    fn command(&self, program: &str, args: &[&str]) -> Result<String> {
        command(&self.conf, program, args)
    }
}

/// A file that has all its blocks, as those of Penstock's nodes; an OSD takes one that is there.
fn write_zeroes(path: &Path, bytes: u64) -> Result<()> {
    let file = std::fs::File::create(path).context("make an OSD's file")?;
    let copied = std::io::copy(&mut std::io::repeat(0).take(bytes), &mut &file);
    copied
        .and_then(|_| file.sync_all())
        .context("write an OSD's file")
}

fn command(conf: &Path, program: &str, args: &[&str]) -> Result<String> {
    run(Command::new("timeout")
        .args([COMMAND_S, program])
        .args(args)
        .env("CEPH_CONF", conf))
}

fn spawn(command: &mut Command, conf: &Path, directory: &Path, name: &str) -> Result<Guarded> {
    let log = std::fs::File::create(directory.join(format!("{name}.out")))?;
    command
        .env("CEPH_CONF", conf)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    Guarded::spawn(command, name)
}

fn start_monitor(
    directory: &Path,
    conf: &Path,
    fsid: &str,
    port: u16,
    cpu: usize,
) -> Result<Guarded> {
    let map = directory.join("monmap");
    let map = map.to_str().context("the directory is not UTF-8")?;
    let address = format!("[v2:127.0.0.1:{port}]");
    command(
        conf,
        "monmaptool",
        &["--create", "--fsid", fsid, "--addv", "a", &address, map],
    )?;
    std::fs::create_dir(directory.join("mon")).context("make the monitor's directory")?;
    command(conf, "ceph-mon", &["--mkfs", "-i", "a", "--monmap", map])?;
    let mut mon = pinned("ceph-mon", Some(cpu));
    mon.args(["-f", "-i", "a", "--public-addr"])
        .arg(format!("v2:127.0.0.1:{port}"));
    spawn(&mut mon, conf, directory, "ceph-mon")
}

fn configuration(directory: &Path, fsid: &str, port: u16) -> Result<String> {
    let at = directory.display();
    let mut text = String::new();
    write!(
        text,
        "[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{port}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = {OSDS}
osd pool default min size = 2
# All OSDs are on one machine.
osd crush chooseleaf type = 0
osd objectstore = bluestore
bluestore block size = {OSD_BYTES}
bluestore debug enforce settings = ssd
osd memory target = {OSD_MEMORY}
mon data = {at}/mon
osd data = {at}/osd$id
keyring = {at}/keyring
run dir = {at}
admin socket = {at}/$name.asok
pid file = {at}/$name.pid
log file = {at}/$name.log
log to syslog = false
"
    )?;
    Ok(text)
}

/// A port that nobody listens on. Somebody may take it before the monitor does; then that one ends and says
/// so.
fn free_port() -> Result<u16> {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").context("find a free port")?;
    Ok(socket.local_addr()?.port())
}
