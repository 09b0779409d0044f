//! A guest in QEMU on vhost-user disks.

mod migration;
mod tree;

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use crate::accel::Accel;
use crate::agent::{Agent, Output};
use crate::hotplug;
use crate::image::GuestImage;
use crate::initramfs::{self, GuestFile};
use crate::network::Nic;
use crate::process::{Guarded, log_tail, wait_until};
use crate::qmp::Qmp;

pub use migration::{BANDWIDTH_MAX, Destination, MigrationState};
pub use tree::Tree;

/// From the start of QEMU to the agent's greeting; about 12 s under TCG on an idle machine, and machines are
/// not idle.
const BOOT_LIMIT: Duration = Duration::from_secs(300);
/// A script with no limit of its own.
const SCRIPT_LIMIT: Duration = Duration::from_secs(600);

/// One vhost-user disk of a guest; the first is `/dev/vda`.
#[derive(Debug, Clone)]
pub struct Disk {
    /// The attachment's socket.
    pub socket: PathBuf,
    /// Virtqueues.
    pub queues: u16,
    /// Entries of each virtqueue.
    pub queue_size: u16,
    /// Whether the guest's driver may choose packed virtqueues.
    pub is_packed: bool,
    /// Set if the guest's driver may use indirect descriptors.
    pub is_indirect: bool,
}

impl Disk {
    /// A disk with one queue of 256 entries.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            queues: 1,
            queue_size: 256,
            is_packed: false,
            is_indirect: true,
        }
    }

    /// The same disk with packed virtqueues.
    pub fn packed(mut self) -> Self {
        self.is_packed = true;
        self
    }

    /// Returns the same disk without indirect descriptors.
    pub fn direct(mut self) -> Self {
        self.is_indirect = false;
        self
    }

    /// The same disk with `queues` virtqueues.
    pub fn queues(mut self, queues: u16) -> Self {
        self.queues = queues;
        self
    }

    /// The same disk with virtqueues of `entries` entries each.
    pub fn queue_size(mut self, entries: u16) -> Self {
        self.queue_size = entries;
        self
    }
}

/// What a guest starts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Boot {
    /// QEMU loads the kernel, and the guest stays in its initramfs.
    Kernel,
    /// The firmware boots from the first disk, which holds [`GuestImage::boot_disk`].
    FirstDisk,
}

/// What to boot.
#[derive(Debug, Clone)]
pub struct VmConfig {
    /// Guest memory.
    pub memory_mib: u32,
    /// Virtual processors.
    pub cpus: u16,
    /// vhost-user disks in order.
    pub disks: Vec<Disk>,
    /// Filesystems.
    pub trees: Vec<Tree>,
    /// What the guest starts from.
    pub boot: Boot,
    /// Programs and other files of the host for a guest that stays in its initramfs.
    pub files: Vec<GuestFile>,
    /// Network cards in order.
    pub nics: Vec<Nic>,
    /// PCI Express ports that disks can be plugged into while the guest runs ([`Vm::plug`]).
    pub hotplug_ports: u8,
}

impl VmConfig {
    /// Two processors, 768 MiB, QEMU loads the kernel.
    pub fn new(disks: Vec<Disk>) -> Self {
        Self {
            memory_mib: 768,
            cpus: 2,
            disks,
            trees: Vec::new(),
            boot: Boot::Kernel,
            files: Vec::new(),
            nics: Vec::new(),
            hotplug_ports: 0,
        }
    }

    /// The same guest, with the file `source` of the host at `target`, a path without a slash in front.
    pub fn with_file(mut self, source: impl Into<PathBuf>, target: &str) -> Self {
        self.files.push(GuestFile {
            source: source.into(),
            target: target.to_owned(),
        });
        self
    }

    /// The same guest with another network card.
    pub fn with_nic(mut self, nic: Nic) -> Self {
        self.nics.push(nic);
        self
    }

    /// The same guest with so many ports for disks that come and go.
    pub fn with_hotplug_ports(mut self, ports: u8) -> Self {
        self.hotplug_ports = ports;
        self
    }

    /// The same guest, booted by its firmware from its first disk.
    pub fn from_first_disk(mut self) -> Self {
        self.boot = Boot::FirstDisk;
        self
    }
}

/// A guest that was just switched on. Dropping it kills QEMU.
#[derive(Debug)]
pub struct Booting {
    qemu: Guarded,
    agent: UnixListener,
    qmp: UnixListener,
    accel: Accel,
    scratch: TempDir,
}

impl Booting {
    fn in_directory(
        scratch: TempDir,
        image: &GuestImage,
        command: impl FnOnce(Accel, &Path) -> Command,
    ) -> Result<Self> {
        let accel = Accel::probe(image)?;
        let (agent, qmp) = (
            listen(scratch.path(), "agent")?,
            listen(scratch.path(), "qmp")?,
        );
        let log =
            std::fs::File::create(scratch.path().join("qemu.log")).context("create QEMU's log")?;
        let mut command = command(accel, scratch.path());
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let qemu = Guarded::spawn(&mut command, "qemu-system-x86_64")?;
        Ok(Self {
            qemu,
            agent,
            qmp,
            accel,
            scratch,
        })
    }

    /// Waits until the guest takes scripts, at most for `limit`.
    pub fn wait(mut self, limit: Duration) -> Result<Vm> {
        let connected = (|| {
            let qmp = Qmp::new(accept(&self.qmp, &mut self.qemu)?)?;
            let agent = accept(&self.agent, &mut self.qemu)?;
            Ok((Agent::greet(agent, limit)?, qmp))
        })();
        match connected {
            Ok((agent, qmp)) => Ok(Vm {
                qemu: self.qemu,
                agent,
                qmp,
                accel: self.accel,
                scratch: self.scratch,
            }),
            Err(error) => Err(with_logs(error, self.scratch.path()).context("boot the guest")),
        }
    }
}

/// A running guest. Dropping it kills QEMU.
#[derive(Debug)]
pub struct Vm {
    qemu: Guarded,
    agent: Agent,
    qmp: Qmp,
    accel: Accel,
    scratch: TempDir,
}

impl Vm {
    /// Boots a guest and waits until it takes scripts.
    pub fn boot(image: &GuestImage, config: &VmConfig) -> Result<Self> {
        let scratch = scratch()?;
        let joined = scratch.path().join("initramfs");
        let initramfs = if config.files.is_empty() {
            image.initramfs()
        } else {
            initramfs::join(&image.initramfs(), &config.files, &joined)?;
            joined
        };
        Self::boot_in(scratch, image, |accel, scratch| {
            qemu_command(image, &initramfs, config, accel, scratch)
        })
    }

    /// Boots the guest of a command line that somebody else wrote. `command` gets the arguments that it lacks
    /// to be this rig's guest: what it boots, its console, and the channels to it. Memory, machine and disks
    /// are its own.
    pub fn boot_by(image: &GuestImage, command: impl FnOnce(&[String]) -> Command) -> Result<Self> {
        Self::boot_in(scratch()?, image, |accel, scratch| {
            let mut args = rig_args(accel, scratch);
            args.extend(kernel_args(image, &image.initramfs()));
            command(&args)
        })
    }

    /// Boots a machine by its firmware, from disks that `command` gives it. It has to bring the rig's agent.
    /// Not [`Self::boot_by`]: that one loads the image's kernel.
    /// Several may boot side by side.
    pub fn boot_by_firmware(
        image: &GuestImage,
        command: impl FnOnce(&[String]) -> Command,
    ) -> Result<Booting> {
        Booting::in_directory(scratch()?, image, |accel, scratch| {
            command(&rig_args(accel, scratch))
        })
    }

    fn boot_in(
        scratch: TempDir,
        image: &GuestImage,
        command: impl FnOnce(Accel, &Path) -> Command,
    ) -> Result<Self> {
        Booting::in_directory(scratch, image, command)?.wait(BOOT_LIMIT)
    }

    /// How QEMU runs this guest.
    pub fn accel(&self) -> Accel {
        self.accel
    }

    /// QEMU's process id.
    pub fn pid(&self) -> u32 {
        self.qemu.pid()
    }

    /// Runs a script in the guest and returns its status and output; `limit` bounds the wait.
    pub fn run(&mut self, script: &str, limit: Duration) -> Result<Output> {
        self.agent.run(script, limit).map_err(|error| {
            with_logs(error, self.scratch.path()).context(format!("run in the guest: {script}"))
        })
    }

    /// Runs a script that must succeed and returns its trimmed output.
    pub fn sh(&mut self, script: &str) -> Result<String> {
        let output = self.run(script, SCRIPT_LIMIT)?;
        if output.code != 0 {
            bail!(
                "in the guest, exit status {}: {script}\n{}",
                output.code,
                output.text
            );
        }
        Ok(output.text.trim_end().to_owned())
    }

    /// Repeats a script until it succeeds, at most for `limit`; returns its trimmed output.
    pub fn sh_until(&mut self, script: &str, limit: Duration) -> Result<String> {
        let mut last = String::new();
        wait_until(limit, || {
            let output = self.run(script, SCRIPT_LIMIT)?;
            last.clone_from(&output.text);
            Ok((output.code == 0).then(|| output.text.trim_end().to_owned()))
        })
        .with_context(|| format!("in the guest, never succeeded: {script}\n{last}"))
    }

    /// The QMP session.
    pub fn qmp(&mut self) -> &mut Qmp {
        &mut self.qmp
    }

    /// Everything that the guest wrote to its console.
    pub fn console(&self) -> String {
        std::fs::read(self.scratch.path().join("console"))
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// Lines of the guest's kernel log that speak of a failed block request or filesystem.
    pub fn io_errors(&mut self) -> Result<Vec<String>> {
        let log = self.sh("dmesg")?;
        let bad = [
            "I/O error",
            "Buffer I/O",
            "blk_update_request",
            "EXT4-fs error",
            "XFS (",
            "Remounting filesystem read-only",
        ];
        let harmless = [
            "Mounting V5",
            "Ending clean mount",
            "Unmounting Filesystem",
            "Deprecated",
        ];
        Ok(log
            .lines()
            .filter(|line| bad.iter().any(|word| line.contains(word)))
            .filter(|line| !harmless.iter().any(|word| line.contains(word)))
            .map(str::to_owned)
            .collect())
    }

    /// QEMU's exit status, when it has ended.
    pub fn ended(&mut self) -> Result<Option<std::process::ExitStatus>> {
        self.qemu.ended()
    }

    /// Syncs and powers the guest off, and waits for QEMU's end.
    pub fn power_off(self) -> Result<()> {
        let script = "sync; (sleep 0.2; poweroff -f) > /dev/null 2>&1 &";
        self.end_by(script, SCRIPT_LIMIT)
    }

    /// Runs a script after which the guest ends, and waits at most `limit` for QEMU's end.
    pub fn end_by(mut self, script: &str, limit: Duration) -> Result<()> {
        self.sh(script)?;
        wait_until(limit, || self.qemu.ended()).context("the guest does not power off")?;
        Ok(())
    }
}

fn listen(scratch: &Path, name: &str) -> Result<UnixListener> {
    UnixListener::bind(scratch.join(name)).with_context(|| format!("bind {name}"))
}

fn scratch() -> Result<TempDir> {
    tempfile::Builder::new()
        .prefix("rig-")
        .tempdir()
        .context("make a directory for QEMU's sockets")
}

fn qemu_command(
    image: &GuestImage,
    initramfs: &Path,
    config: &VmConfig,
    accel: Accel,
    scratch: &Path,
) -> Command {
    let mut command = Command::new("qemu-system-x86_64");
    let memory = config.memory_mib;
    command
        .args(["-machine", "q35,memory-backend=mem"])
        .args(rig_args(accel, scratch))
        .args([
            "-m",
            &format!("{memory}M"),
            "-smp",
            &config.cpus.to_string(),
        ])
        .args([
            "-object",
            &format!("memory-backend-memfd,id=mem,size={memory}M,share=on"),
        ]);
    if config.boot == Boot::Kernel {
        command.args(kernel_args(image, initramfs));
    }
    for (index, nic) in config.nics.iter().enumerate() {
        command.args(nic.args(index));
    }
    add_disks(&mut command, &config.disks);
    tree::add(&mut command, &config.trees);
    command.args(hotplug::port_args(config.hotplug_ports));
    command
}

/// What makes a guest this rig's: how it runs, its console, and the channels to it.
fn rig_args(accel: Accel, scratch: &Path) -> Vec<String> {
    let at = |name: &str| scratch.join(name).display().to_string();
    let mut args: Vec<String> = ["-nodefaults", "-no-reboot", "-display", "none"]
        .iter()
        .chain(accel.args())
        .map(|arg| (*arg).to_owned())
        .collect();
    let pairs = [
        ("-serial", format!("file:{}", at("console"))),
        ("-chardev", format!("socket,id=qmp,path={}", at("qmp"))),
        ("-mon", "chardev=qmp,mode=control".to_owned()),
        ("-device", "virtio-serial-pci".to_owned()),
        ("-chardev", format!("socket,id=agent,path={}", at("agent"))),
        (
            "-device",
            "virtserialport,chardev=agent,name=rig.agent".to_owned(),
        ),
    ];
    args.extend(
        pairs
            .into_iter()
            .flat_map(|(name, value)| [name.to_owned(), value]),
    );
    args
}

fn kernel_args(image: &GuestImage, initramfs: &Path) -> [String; 6] {
    [
        "-kernel".to_owned(),
        image.kernel().display().to_string(),
        "-initrd".to_owned(),
        initramfs.display().to_string(),
        "-append".to_owned(),
        // An emulated timer that gets no processor in time is no broken one.
        "console=ttyS0 panic=-1 quiet mitigations=off no_timer_check".to_owned(),
    ]
}

fn add_disks(command: &mut Command, disks: &[Disk]) {
    for (index, disk) in disks.iter().enumerate() {
        let (socket, queues, size) = (disk.socket.display(), disk.queues, disk.queue_size);
        let packed = if disk.is_packed { ",packed=on" } else { "" };
        let direct = match disk.is_indirect {
            true => "",
            false => ",indirect_desc=off",
        };
        // A kernel that QEMU loads has index 0.
        let order = index + 1;
        command
            .args([
                "-chardev",
                &format!("socket,id=disk{index},path={socket},reconnect=1"),
            ])
            .args([
                "-device",
                &format!(
                    "vhost-user-blk-pci,chardev=disk{index},num-queues={queues},queue-size={size},\
                     bootindex={order}{packed}{direct}"
                ),
            ]);
    }
}

/// Accepts QEMU's connection, or fails when QEMU ends first.
fn accept(listener: &UnixListener, qemu: &mut Guarded) -> Result<UnixStream> {
    listener.set_nonblocking(true)?;
    let stream = wait_until(BOOT_LIMIT, || match listener.accept() {
        Ok((stream, _)) => Ok(Some(stream)),
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => match qemu.ended()? {
            Some(status) => bail!("QEMU {}", crate::process::describe(status)),
            None => Ok(None),
        },
        Err(error) => Err(error.into()),
    })?;
    stream.set_nonblocking(false)?;
    Ok(stream)
}

fn with_logs(error: anyhow::Error, scratch: &Path) -> anyhow::Error {
    let (qemu, console) = (
        log_tail(&scratch.join("qemu.log")),
        log_tail(&scratch.join("console")),
    );
    error.context(format!(
        "QEMU said:\n{qemu}\nthe guest's console ended with:\n{console}"
    ))
}
