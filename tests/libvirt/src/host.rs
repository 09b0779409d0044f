//! A host as an operator has it: libvirtd, virsh, and Penstock as its package sets it up.

use std::fmt::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use cluster_rig::Machine;
use guest_rig::GuestImage;
use guest_rig::paths::{cache_root, find_program, penstock_binary};
use guest_rig::process::{fetch, run};
use serde_json::Value;
use tempfile::TempDir;

use crate::guest::{self, Channel, Guest};

/// What the package configures: QEMU's user may connect to attachments' sockets, and nobody else.
const CONFIG: &str = "data = \"/srv/penstock\"\ndevice_size = \"1G\"\nsocket_mode = \"0660\"\n\
                      socket_owner = \":libvirt-qemu\"\n";
/// Packages of the root that is built of Debian 13.
const PACKAGES: &str = "libvirt-daemon-system,libvirt-clients,libvirt-daemon-driver-qemu,qemu-system-x86,\
                        libxml2-utils,libibverbs1,librdmacm1,procps,iproute2,mount";
/// Where Debian's packages come from.
const MIRROR: &str = "http://deb.debian.org/debian";

/// Whose libvirt and QEMU the host has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// Those that are installed on this machine.
    Installed,
    /// Debian 13's, in a root of its own that is built once.
    Debian13,
}

/// A domain with the rig's guest.
#[derive(Debug, Clone)]
pub struct DomainXml {
    /// Its name.
    pub name: String,
    /// Whether the daemon can map its memory.
    pub is_shared: bool,
    /// Its `<metadata>` element, or nothing.
    pub metadata: String,
    /// Further devices.
    pub devices: String,
    /// Virtual processors.
    pub vcpus: u32,
}

impl DomainXml {
    /// A domain with shared memory and without a disk.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            is_shared: true,
            metadata: String::new(),
            devices: String::new(),
            vcpus: 2,
        }
    }

    fn text(&self, files: &Path) -> String {
        let at = |name: &str| files.join(name).display().to_string();
        let memory = match self.is_shared {
            true => "<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>",
            false => "",
        };
        // Places for disks that come while the guest runs.
        let root = "<controller type='pci' index='0' model='pcie-root'/>".to_owned();
        let ports = root + &"<controller type='pci' model='pcie-root-port'/>".repeat(8);
        let mut text = String::new();
        let _ = write!(
            text,
            "<domain type='qemu'>\n<name>{}</name>\n{}\n<memory unit='MiB'>640</memory>\n{memory}\n\
             <vcpu>{}</vcpu>\n\
             <os><type arch='x86_64' machine='q35'>hvm</type><kernel>{}</kernel><initrd>{}</initrd>\
             <cmdline>console=ttyS0 panic=-1 quiet mitigations=off</cmdline></os>\n\
             <features><acpi/></features>\n<cpu mode='maximum'/>\n\
             <on_poweroff>destroy</on_poweroff><on_reboot>destroy</on_reboot>\n<devices>\n\
             <emulator>/usr/bin/qemu-system-x86_64</emulator>\n{ports}\n\
             {}\n{}\n</devices>\n</domain>\n",
            self.name,
            self.metadata,
            self.vcpus,
            at("vmlinuz"),
            at("initramfs"),
            channel_xml(files, &self.name),
            self.devices,
        );
        text
    }
}

/// The devices through which the rig reaches a domain's guest.
fn channel_xml(files: &Path, name: &str) -> String {
    let (agent, console) = guest::paths(files, name);
    format!(
        "<serial type='file'><source path='{}'/></serial><channel type='unix'><source mode='connect' \
         path='{}'/><target type='virtio' name='rig.agent'/></channel>",
        console.display(),
        agent.display()
    )
}

/// The host. Dropping it ends everything that runs on it.
#[derive(Debug)]
pub struct Host {
    machine: Machine,
    scratch: TempDir,
}

impl Host {
    /// A host on which libvirt and Penstock run, both as their packages start them.
    pub fn start(release: Release) -> Result<Self> {
        let mut host = Self::bare(release)?;
        host.start_penstock()?;
        host.start_libvirt()?;
        Ok(host)
    }

    /// A host on which neither runs.
    pub fn bare(release: Release) -> Result<Self> {
        Self::assemble("host", release, None)
    }

    /// Same, with a name, in a network namespace. Its libvirt takes guests from others of the network, whose
    /// files are in the same directory `shared`.
    pub fn on_network(name: &str, release: Release, network: &str, shared: &Path) -> Result<Self> {
        let mut host = Self::assemble(name, release, Some((network, shared)))?;
        host.listen()?;
        Ok(host)
    }

    fn assemble(name: &str, release: Release, place: Option<(&str, &Path)>) -> Result<Self> {
        for program in ["libvirtd", "virsh", "xmllint"] {
            ensure!(
                find_program(program).is_some(),
                "{program} is missing: `cargo xtask packages` installs it"
            );
        }
        let scratch = match place {
            Some((_, shared)) => tempfile::tempdir_in(shared),
            None => tempfile::Builder::new()
                .prefix("penstock-libvirt-")
                .tempdir(),
        }
        .context("make a directory for the host")?;
        // QEMU runs as another user, and reaches the guest's files.
        std::fs::set_permissions(scratch.path(), std::fs::Permissions::from_mode(0o755))?;
        let programs = scratch.path().join("bin");
        std::fs::create_dir(&programs)?;
        let binary = std::path::absolute(penstock_binary()?)?;
        std::fs::copy(&binary, programs.join("penstock")).context("copy the program")?;
        // libvirt gives QEMU's user what it boots, so these are copies.
        let image = GuestImage::get(|line| eprintln!("{line}"))?;
        for (source, name) in [
            (image.kernel(), "vmlinuz"),
            (image.initramfs(), "initramfs"),
        ] {
            std::fs::copy(&source, scratch.path().join(name))
                .with_context(|| format!("copy {}", source.display()))?;
        }
        let network = place.map(|(network, _)| network);
        let machine = Machine::start(name, scratch.path(), &programs, network)?;
        let files = place
            .map_or(scratch.path(), |(_, shared)| shared)
            .to_owned();
        let mut host = Self { machine, scratch };
        host.separate(release, &files)?;
        Ok(host)
    }

    /// Gives the machine directories of its own wherever libvirt keeps something. Guests find their `files`
    /// at the same path.
    fn separate(&mut self, release: Release, files: &Path) -> Result<()> {
        if release == Release::Debian13 {
            self.change_root(&debian13()?, files)?;
        }
        // With the control groups of the whole machine libvirt would end more than its own processes.
        self.machine.ok("umount -R /sys/fs/cgroup || true")?;
        self.machine.ok(
            "mkdir /run/etc-libvirt && cp -a /etc/libvirt/. /run/etc-libvirt && mount --bind \
             /run/etc-libvirt /etc/libvirt",
        )?;
        for directory in ["lib", "cache", "log"] {
            let command = format!("mount -t tmpfs tmpfs /var/{directory}/libvirt");
            self.machine.ok(&command)?;
        }
        // There is no virtlogd.
        self.machine
            .ok("echo 'stdio_handler = \"file\"' >> /etc/libvirt/qemu.conf")?;
        self.machine.ok("mkdir -m 755 /run/penstock /run/conf")?;
        std::fs::write(self.scratch.path().join("penstock.toml"), CONFIG)?;
        Ok(())
    }

    /// libvirt is reached by whoever is on the network. It takes no guest from a host with its own identity,
    /// which it would read from the machine's firmware.
    fn listen(&mut self) -> Result<()> {
        self.machine.ok(
            "printf '%s\\n' 'listen_tls = 0' 'listen_tcp = 1' 'auth_tcp = \"none\"' \
             \"host_uuid = \\\"$(cat /proc/sys/kernel/random/uuid)\\\"\" >> /etc/libvirt/libvirtd.conf",
        )?;
        // Both hosts see the guest's files, and each would take the other's ownership for a mistake.
        self.machine
            .ok("echo 'remember_owner = 0' >> /etc/libvirt/qemu.conf")?;
        self.machine.ok("LISTEN=--listen").map(drop)
    }

    /// The shell goes on in another root, with what is mounted here.
    fn change_root(&mut self, root: &Path, files: &Path) -> Result<()> {
        let (root, files) = (root.display(), files.display());
        for command in [
            format!("mount --rbind {root} {root}"),
            format!("for d in proc sys dev run srv; do mount --rbind /$d {root}/$d; done"),
            // What is made in it is gone with the host.
            format!("mount -t tmpfs -o mode=1777 tmpfs {root}/tmp"),
            format!("mkdir -p {root}{files}"),
            format!("mount --rbind {files} {root}{files}"),
            format!("mount -t tmpfs tmpfs {root}/root"),
            format!("exec chroot {root} bash --noprofile --norc"),
        ] {
            self.machine.ok(&command)?;
        }
        Ok(())
    }

    /// Starts the daemon; the shell's `$P` is its process.
    pub fn start_penstock(&mut self) -> Result<()> {
        let config = self.scratch.path().join("penstock.toml");
        let command = format!("penstock serve --config {} & P=$!", config.display());
        self.machine.ok(&command).map(drop)
    }

    /// `kill -9`.
    pub fn kill_penstock(&mut self) -> Result<()> {
        self.machine
            .ok("kill -9 $P; wait $P 2> /dev/null; true")
            .map(drop)
    }

    /// Starts libvirtd; the shell's `$L` is its process.
    pub fn start_libvirt(&mut self) -> Result<()> {
        self.machine
            .ok("libvirtd $LISTEN > /run/libvirtd.log 2>&1 & L=$!")?;
        self.machine.until_ok("virsh version > /dev/null")?;
        Ok(())
    }

    /// Stops libvirtd. Guests go on.
    pub fn stop_libvirt(&mut self) -> Result<()> {
        self.machine
            .ok("kill $L; wait $L 2> /dev/null; true")
            .map(drop)
    }

    /// Puts a program called `systemctl` before any other, and the configuration where the package has it.
    pub fn install_systemctl(&mut self, script: &str) -> Result<()> {
        let path = self.scratch.path().join("bin/systemctl");
        std::fs::write(&path, script)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
        let config = self.scratch.path().join("penstock.toml");
        self.ok(&format!("cp {} /run/penstock.toml", config.display()))
            .map(drop)
    }

    /// Where the files of its guests are.
    pub fn directory(&self) -> &Path {
        self.scratch.path()
    }

    /// The devices through which the rig reaches the guest of a domain.
    pub fn channel_xml(&self, name: &str) -> String {
        channel_xml(self.scratch.path(), name)
    }

    /// Types a command that must succeed; returns its standard output.
    pub fn ok(&mut self, command: &str) -> Result<String> {
        self.machine.ok(command)
    }

    /// The machine, for what is typed as it stands.
    pub fn machine(&mut self) -> &mut Machine {
        &mut self.machine
    }

    /// Types a command that must fail, and returns what it printed.
    pub fn fails(&mut self, command: &str) -> Result<String> {
        let typed = self.machine.type_in(&format!("{command} 2>&1"))?;
        ensure!(typed.status != 0, "{command} succeeded:\n{}", typed.stdout);
        Ok(typed.stdout)
    }

    /// Types a command of Penstock's that must fail with one line, and returns that.
    pub fn refused(&mut self, command: &str) -> Result<String> {
        let text = self.fails(command)?;
        let mut lines = text.lines();
        match (lines.next(), lines.next()) {
            (Some(line), None) if line.starts_with("penstock: error: ") => Ok(line.to_owned()),
            _ => bail!("{command} did not fail with one line:\n{text}"),
        }
    }

    /// What a command prints as JSON.
    pub fn json(&mut self, command: &str) -> Result<Value> {
        let text = self.machine.ok(command)?;
        serde_json::from_str(&text).with_context(|| format!("{command} printed {text:?}"))
    }

    /// The sockets of attachments, in order.
    pub fn attached(&mut self) -> Result<Vec<String>> {
        let list = self.json("penstock attachments list --json")?;
        let list = list.as_array().context("attachments are no list")?;
        let sockets = list.iter().map(|one| one["socket"].as_str());
        let sockets: Option<Vec<&str>> = sockets.collect();
        let mut sockets: Vec<String> = sockets
            .context("an attachment has no socket")?
            .into_iter()
            .map(str::to_owned)
            .collect();
        sockets.sort();
        Ok(sockets)
    }

    /// A file for the guest or for virsh, by its path on the host.
    pub fn write(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.scratch.path().join(name);
        std::fs::write(&path, text)?;
        Ok(path)
    }

    /// Defines a domain, whose XML must be valid.
    pub fn define(&mut self, domain: &DomainXml) -> Result<()> {
        let text = domain.text(self.scratch.path());
        let path = self.write(&format!("{}.xml", domain.name), &text)?;
        self.ok(&format!("virsh define --validate {}", path.display()))
            .map(drop)
    }

    /// Starts a domain and waits for its guest.
    pub fn boot(&mut self, name: &str) -> Result<Guest> {
        let channel = self.channel(name)?;
        self.ok(&format!("virsh start {name}"))?;
        self.greet(name, channel)
    }

    /// What has to be there before a domain starts.
    pub fn channel(&self, name: &str) -> Result<Channel> {
        Channel::open(self.scratch.path(), name)
    }

    /// Waits for the guest of a domain that was started.
    pub fn greet(&mut self, name: &str, channel: Channel) -> Result<Guest> {
        channel.greet().map_err(|error| {
            let log = self
                .machine
                .type_in(&format!("tail -n 5 /var/log/libvirt/qemu/{name}.log"));
            let log = log.map(|typed| typed.stdout).unwrap_or_default();
            error.context(format!("QEMU of domain {name}:\n{log}"))
        })
    }

    /// Whether a text is valid XML of libvirt's, by its schema (`domain`, say).
    pub fn validate(&mut self, name: &str, schema: &str, text: &str) -> Result<()> {
        let path = self.write(name, text)?;
        let command = format!("virt-xml-validate {} {schema}", path.display());
        self.ok(&command).map(drop)
    }
}

/// A root of Debian 13's packages, built once.
fn debian13() -> Result<PathBuf> {
    let cache = cache_root()?;
    let root = cache.join("libvirt-trixie-1");
    if root.is_dir() {
        return Ok(root);
    }
    std::fs::create_dir_all(&cache)?;
    let partial = tempfile::tempdir_in(&cache).context("make a directory for the root")?;
    let built = partial.path().join("root");
    eprintln!(
        "building a root of Debian 13 once into {} (some minutes)",
        root.display()
    );
    fetch(|| {
        if built.exists() {
            std::fs::remove_dir_all(&built).context("remove what a failed try left")?;
        }
        run(Command::new("mmdebstrap")
            .args(["--variant=minbase", &format!("--include={PACKAGES}")])
            .args([
                "--aptopt=APT::Install-Recommends \"false\"",
                "--dpkgopt=path-exclude=/usr/share/doc/*",
                "trixie",
            ])
            .arg(&built)
            .arg(MIRROR))
    })?;
    std::fs::rename(&built, &root).context("move the root into place")?;
    Ok(root)
}
