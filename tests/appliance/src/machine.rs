//! A machine that runs the appliance.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use guest_rig::image::{DISKS, GuestImage};
use guest_rig::process::{Guarded, run, wait_until};
use guest_rig::{Accel, Booting, Nic, Switch, Vm};
use tempfile::TempDir;

use crate::seed::{Seed, credential};
use crate::{Images, payload};

/// The rig's agent, and the unit that runs it out of a credential.
const AGENT: &str = include_str!("../../package/machine/agent.sh");
const AGENT_UNIT: &str = "[Unit]\nDescription=The rig's channel into this machine\n\
    DefaultDependencies=no\nConditionPathExists=!/etc/initrd-release\n\
    After=systemd-tmpfiles-setup.service local-fs.target\n\
    [Service]\nImportCredential=rig.agent\nExecStart=/bin/sh ${CREDENTIALS_DIRECTORY}/rig.agent\n\
    KillMode=process\nTimeoutStopSec=2\nOOMScoreAdjust=-1000\n";
const WANTS_AGENT: &str = "[Unit]\nWants=rig-agent.service\n";
/// Where Debian's package `ovmf` has the firmware for UEFI, and the variables that it begins with.
const OVMF: &str = "/usr/share/OVMF/OVMF_CODE_4M.fd";
const OVMF_VARIABLES: &str = "/usr/share/OVMF/OVMF_VARS_4M.fd";
/// A machine that falls back starts a few times.
const STARTS_MAX: u32 = 4;
/// Until it is up, or gave up waiting for its root: two minutes of a boot are that.
const UP_LIMIT: Duration = Duration::from_secs(600);
/// Until the machine has switched itself off.
const END_LIMIT: Duration = Duration::from_secs(400);

/// What starts the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Firmware {
    /// OVMF.
    Uefi,
    /// SeaBIOS.
    Bios,
}

/// What the disks hang on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bus {
    /// virtio-blk.
    Virtio,
    /// AHCI.
    Sata,
}

/// A machine to boot.
#[derive(Debug, Clone)]
pub struct Config {
    /// What starts it.
    pub firmware: Firmware,
    /// What its disks hang on.
    pub bus: Bus,
    /// Its memory.
    pub memory_mib: u32,
    /// What it is told; none: the console's wizard asks.
    pub seed: Option<Seed>,
    /// Its network cards.
    pub nics: Vec<Nic>,
    /// Sizes of its other disks, in MiB; all empty.
    pub disks_mib: Vec<u32>,
    /// Files that it finds on a disk of their own ([`crate::payload`]).
    pub files: Vec<PathBuf>,
    /// Size of its boot disk, in GiB, if not the image's.
    pub boot_gib: Option<u32>,
}

impl Config {
    /// A machine with UEFI, 1 GiB and virtio disks.
    pub fn new(seed: Option<Seed>) -> Self {
        Self {
            firmware: Firmware::Uefi,
            bus: Bus::Virtio,
            memory_mib: 1024,
            seed,
            nics: Vec::new(),
            disks_mib: Vec::new(),
            files: Vec::new(),
            boot_gib: None,
        }
    }
}

/// A machine, and its disks, which outlive a restart.
#[derive(Debug)]
pub struct Machine {
    config: Config,
    image: GuestImage,
    directory: TempDir,
    /// Where cards lead that are on no network: one without a cable would complain all the time.
    _switch: Switch,
    booting: Option<Booting>,
    vm: Option<Vm>,
    starts: u32,
}

impl Machine {
    /// A machine with the image on its disk, switched off.
    pub fn new(images: &Images, mut config: Config) -> Result<Self> {
        let switch = Switch::new()?;
        for nic in &mut config.nics {
            if nic.switch.is_none() {
                *nic = nic.clone().on(&switch);
            }
        }
        let image = GuestImage::of(&DISKS, |line| eprintln!("rig: {line}"))?;
        let directory = tempfile::Builder::new()
            .prefix("appliance-")
            .tempdir()
            .context("make a directory for a machine's disks")?;
        let machine = Self {
            config,
            image,
            directory,
            _switch: switch,
            booting: None,
            vm: None,
            starts: 0,
        };
        let boot = machine.boot_disk();
        let mut create = Command::new("qemu-img");
        create
            .args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"])
            .arg(images.qcow2())
            .arg(&boot);
        if let Some(gib) = machine.config.boot_gib {
            create.arg(format!("{gib}G"));
        }
        run(&mut create)?;
        for (index, mib) in machine.config.disks_mib.iter().enumerate() {
            let file = std::fs::File::create(machine.data_disk(index))?;
            file.set_len(u64::from(*mib) << 20)?;
        }
        if !machine.config.files.is_empty() {
            payload::make(
                &machine.config.files,
                &machine.at("payload.raw"),
                machine.directory.path(),
            )?;
        }
        std::fs::copy(OVMF_VARIABLES, machine.at("variables")).context("copy OVMF's variables")?;
        Ok(machine)
    }

    /// A machine that has just been switched on for the first time.
    pub fn boot(images: &Images, config: Config) -> Result<Self> {
        let mut machine = Self::new(images, config)?;
        machine.start()?;
        Ok(machine)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The file of its boot disk, qcow2.
    pub fn boot_disk(&self) -> PathBuf {
        self.at("boot.qcow2")
    }

    /// The file of its other disk with this index, raw.
    pub fn data_disk(&self, index: usize) -> PathBuf {
        self.at(&format!("data{index}.raw"))
    }

    /// How it is from the next start on.
    pub fn config(&mut self) -> &mut Config {
        &mut self.config
    }

    /// How often it was started.
    pub fn starts(&self) -> u32 {
        self.starts
    }

    /// Switches it on, and waits until it is up.
    pub fn start(&mut self) -> Result<()> {
        self.switch_on()?;
        self.comes_up()
    }

    /// Switches it on, and does not wait.
    pub fn switch_on(&mut self) -> Result<()> {
        ensure!(
            self.vm.is_none() && self.booting.is_none(),
            "the machine runs already"
        );
        self.starts += 1;
        let args = self.args()?;
        let booting = Vm::boot_by_firmware(&self.image, |rig| {
            let mut command = Command::new("qemu-system-x86_64");
            command.args(rig).args(&args);
            command
        })?;
        self.booting = Some(booting);
        Ok(())
    }

    /// Waits until it takes scripts. It is switched on again if it switches itself off before: a slot that
    /// does not start makes the machine restart.
    pub fn comes_up(&mut self) -> Result<()> {
        for _ in 0..STARTS_MAX {
            let booting = self.booting.take().context("the machine is switched off")?;
            match booting.wait(UP_LIMIT) {
                Ok(vm) => {
                    self.vm = Some(vm);
                    return Ok(());
                }
                Err(error) if format!("{error:#}").contains("the guest is gone") => {
                    // Whoever did not expect it finds here why.
                    eprintln!("rig: a machine restarts before it was up: {error:#}");
                    self.switch_on()?;
                }
                Err(error) => return Err(error),
            }
        }
        bail!("the machine restarted {STARTS_MAX} times and never came up")
    }

    fn args(&self) -> Result<Vec<String>> {
        let config = &self.config;
        let mut args: Vec<String> = ["-machine", "q35", "-smp", "2", "-vga", "std"]
            .map(str::to_owned)
            .to_vec();
        args.extend(["-m".into(), format!("{}M", config.memory_mib)]);
        args.extend(["-uuid".into(), self.uuid()]);
        if config.firmware == Firmware::Uefi {
            let drives = [
                format!("if=pflash,format=raw,readonly=on,file={OVMF}"),
                format!(
                    "if=pflash,format=raw,file={}",
                    self.at("variables").display()
                ),
            ];
            args.extend(
                drives
                    .into_iter()
                    .flat_map(|drive| ["-drive".into(), drive]),
            );
        }
        args.extend(self.disk("boot", &self.boot_disk(), "qcow2", 0));
        for index in 0..config.disks_mib.len() {
            let name = format!("data{index}");
            args.extend(self.disk(&name, &self.data_disk(index), "raw", index + 1));
        }
        if !config.files.is_empty() {
            let file = self.at("payload.raw").display().to_string();
            let drive = format!("file={file},format=raw,if=virtio,readonly=on");
            args.extend(["-drive".into(), drive]);
        }
        for (index, nic) in config.nics.iter().enumerate() {
            args.extend(nic.args(index));
        }
        if let Some(seed) = &config.seed {
            args.extend(seed.args(self.directory.path())?);
        }
        for (name, value) in [
            ("rig.agent", AGENT),
            ("systemd.extra-unit.rig-agent.service", AGENT_UNIT),
            ("systemd.unit-dropin.sysinit.target", WANTS_AGENT),
        ] {
            let file = self.at(name);
            std::fs::write(&file, credential(name, value))?;
            args.extend(["-smbios".into(), format!("type=11,path={}", file.display())]);
        }
        Ok(args)
    }

    /// What the hypervisor calls it: always the same, as a hypervisor does.
    fn uuid(&self) -> String {
        let mac = self.config.nics.first().map_or([0; 6], |nic| nic.mac);
        let digits: String = mac.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("70656e73-746f-4f63-8b00-{digits}")
    }

    fn disk(&self, name: &str, file: &Path, format: &str, order: usize) -> Vec<String> {
        let device = match self.config.bus {
            Bus::Virtio => format!("virtio-blk-pci,drive={name},serial={name}"),
            Bus::Sata => format!("ide-hd,drive={name},bus=ide.{order},serial={name}"),
        };
        vec![
            "-drive".into(),
            format!(
                "id={name},file={},format={format},if=none,cache=unsafe,discard=unmap",
                file.display()
            ),
            "-device".into(),
            format!("{device},bootindex={}", order + 1),
        ]
    }

    fn vm(&mut self) -> Result<&mut Vm> {
        self.vm.as_mut().context("the machine is switched off")
    }

    /// The machine's QEMU, while it is on.
    pub fn running(&mut self) -> Result<&mut Vm> {
        self.vm()
    }

    /// Runs a script that must succeed and returns its trimmed output.
    pub fn sh(&mut self, script: &str) -> Result<String> {
        self.vm()?.sh(script)
    }

    /// Repeats a script until it succeeds.
    pub fn sh_until(&mut self, script: &str, limit: Duration) -> Result<String> {
        self.vm()?.sh_until(script, limit)
    }

    /// Runs a script that must fail, and returns its output.
    pub fn refused(&mut self, script: &str) -> Result<String> {
        let output = self.vm()?.run(script, END_LIMIT)?;
        ensure!(output.code != 0, "must fail, and did not: {script}");
        Ok(output.text.trim_end().to_owned())
    }

    /// Everything that the machine wrote to its serial line since it was switched on.
    pub fn serial(&self) -> String {
        self.vm.as_ref().map(Vm::console).unwrap_or_default()
    }

    /// Takes its power away.
    pub fn cut_power(&mut self) {
        self.booting = None;
        self.vm = None;
    }

    /// Restarts it in order, and waits until it is up.
    pub fn restart(&mut self) -> Result<()> {
        let vm = self.vm.take().context("the machine is switched off")?;
        vm.end_by("systemctl --no-block reboot", END_LIMIT)?;
        self.start()
    }

    /// Runs a script after which it switches itself off, and waits for that.
    pub fn ends_by(&mut self, script: &str, limit: Duration) -> Result<()> {
        let vm = self.vm.take().context("the machine is switched off")?;
        vm.end_by(script, limit)
    }

    /// Takes its power away as soon as the file is there; nothing is written after that.
    pub fn loses_power_at(&mut self, file: &str, limit: Duration) -> Result<()> {
        let watch = format!(
            "(until [ -e {file} ]; do :; done; echo o > /proc/sysrq-trigger) > /dev/null 2>&1 &"
        );
        self.ends_by(&watch, limit)
    }

    /// Begins to install an update, and returns once its signature was verified and the other slot is about
    /// to be written. `command` installs it.
    pub fn begins_to_install(&mut self, command: &str, limit: Duration) -> Result<()> {
        self.sh(&format!("({command}) > /run/update.log 2>&1 &"))?;
        self.sh_until(
            "grep -q '\"writing\"' /var/lib/appliance/update.json",
            limit,
        )
        .context("the update never began")?;
        Ok(())
    }

    /// Switches it on, and takes its power away `after` so long, however far it is.
    pub fn start_and_cut(&mut self, after: Duration) -> Result<()> {
        ensure!(self.vm.is_none(), "the machine runs already");
        self.starts += 1;
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args(Accel::probe(&self.image)?.args())
            .args(["-nodefaults", "-no-reboot", "-display", "none", "-serial"])
            .arg(format!("file:{}", self.at("serial").display()))
            .args(self.args()?);
        let mut qemu = Guarded::spawn(&mut command, "qemu-system-x86_64")?;
        std::thread::sleep(after);
        ensure!(qemu.ended()?.is_none(), "the machine ended by itself");
        qemu.kill()
    }

    /// Switches it on again and waits until it is up, if it has restarted.
    pub fn restarts_if_it_ended(&mut self) -> Result<()> {
        let ended = match &mut self.vm {
            Some(vm) => vm.ended()?.is_some(),
            None => false,
        };
        if !ended {
            return Ok(());
        }
        self.vm = None;
        self.start()
    }

    /// Waits until it restarts by itself, and is up again.
    pub fn restarts(&mut self, limit: Duration) -> Result<()> {
        let mut vm = self.vm.take().context("the machine is switched off")?;
        wait_until(limit, || vm.ended()).context("the machine does not restart")?;
        drop(vm);
        self.start()
    }
}
