//! A machine that runs systemd.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use guest_rig::image::GuestImage;
use guest_rig::process::run;
use guest_rig::vm::Vm;
use tempfile::TempDir;

use crate::{Equipment, Payload, Release};

/// Memory of a machine. One that is a host has room for a guest.
const MEMORY: &str = "1536M";
const MEMORY_OF_HOST: &str = "2560M";
/// Until systemd has started all that it starts. Under TCG, beside other work.
const BOOT_LIMIT: Duration = Duration::from_secs(300);
/// Until all is stopped and the machine is off.
const STOP_LIMIT: Duration = Duration::from_secs(180);
/// Size of the spare disk.
const SPARE_BYTES: u64 = 1 << 30;

/// A running machine, and its disk. Dropping it kills the machine and deletes the disk.
#[derive(Debug)]
pub struct Machine {
    vm: Vm,
    disk: Disk,
}

/// What outlives a reboot.
#[derive(Debug)]
struct Disk {
    _dir: TempDir,
    image: GuestImage,
    root: PathBuf,
    payload: PathBuf,
    spare: PathBuf,
    memory: &'static str,
    /// Owns the archive.
    _payload: Payload,
}

impl Machine {
    /// A blank disk, beside the root and the payload.
    pub const SPARE: &str = "/dev/vdc";

    /// Installs a machine of `release` with `payload` in it, and boots it.
    pub fn boot(release: Release, equipment: Equipment, payload: Payload) -> Result<Self> {
        let image = GuestImage::of(release.guest(), |line| eprintln!("rig: {line}"))?;
        let base = release.root(equipment)?;
        let dir = tempfile::tempdir().context("make a directory for a machine's disk")?;
        let root = dir.path().join("root.qcow2");
        run(Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"])
            .arg(&base)
            .arg(&root))?;
        let spare = dir.path().join("spare.raw");
        File::create(&spare)
            .and_then(|file| file.set_len(SPARE_BYTES))
            .context("make a machine's spare disk")?;
        let disk = Disk {
            _dir: dir,
            image,
            root,
            spare,
            payload: payload.archive()?,
            memory: match equipment {
                Equipment::Bare => MEMORY,
                Equipment::Libvirt => MEMORY_OF_HOST,
            },
            _payload: payload,
        };
        let vm = disk.boot()?;
        let mut machine = Self { vm, disk };
        let place = Payload::IN_MACHINE;
        machine.sh(&format!("mkdir -p {place} && tar -C {place} -xf /dev/vdb"))?;
        Ok(machine)
    }

    /// Shuts the machine down in order, and boots it again from its disk.
    pub fn reboot(self) -> Result<Self> {
        let Self { vm, disk } = self;
        // Not within the agent's own script: that one has to be answered first.
        vm.end_by("systemctl --no-block poweroff", STOP_LIMIT)?;
        let vm = disk.boot()?;
        Ok(Self { vm, disk })
    }

    /// Runs a script that must succeed and returns its trimmed output.
    pub fn sh(&mut self, script: &str) -> Result<String> {
        self.vm.sh(script)
    }

    /// Runs a script that must fail, and returns its output.
    pub fn refused(&mut self, script: &str) -> Result<String> {
        let output = self.vm.run(script, STOP_LIMIT)?;
        anyhow::ensure!(output.code != 0, "must fail, and did not: {script}");
        Ok(output.text.trim_end().to_owned())
    }

    /// Repeats a script until it succeeds.
    pub fn sh_until(&mut self, script: &str, limit: Duration) -> Result<String> {
        self.vm.sh_until(script, limit)
    }
}

impl Disk {
    fn boot(&self) -> Result<Vm> {
        let mut vm = Vm::boot_by(&self.image, |args| {
            let mut command = Command::new("qemu-system-x86_64");
            command
                .args(["-machine", "q35", "-smp", "2", "-m", self.memory])
                .args(with_root(args))
                .args(drive(&self.root, "qcow2", "off"))
                .args(drive(&self.payload, "raw", "on"))
                .args(drive(&self.spare, "raw", "off"));
            command
        })?;
        // Degraded is as good: a machine without a network has units that fail.
        let up = "systemctl is-system-running --wait | grep -qE 'running|degraded'";
        vm.sh_until(up, BOOT_LIMIT)
            .context("the machine does not come up")?;
        Ok(vm)
    }
}

/// The rig's arguments, with a root filesystem to go on to.
fn with_root(args: &[String]) -> Vec<String> {
    let mut args = args.to_vec();
    if let Some(at) = args.iter().position(|arg| arg == "-append")
        && let Some(line) = args.get_mut(at + 1)
    {
        line.push_str(" rig.root=/dev/vda");
    }
    args
}

fn drive(file: &Path, format: &str, readonly: &str) -> [String; 2] {
    let file = file.display();
    let drive = format!("file={file},format={format},if=virtio,cache=unsafe,readonly={readonly}");
    ["-drive".to_owned(), drive]
}
