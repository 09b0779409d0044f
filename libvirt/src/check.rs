//! What keeps a domain from a disk or filesystem, or makes it worse than it could be. Each finding that is
//! not `ok` carries what to paste.

mod filesystem;
mod host;

use serde::Serialize;

use crate::access::Denied;
use crate::apparmor;
use crate::disk::{QUEUE_SIZE_MAX, RECONNECT_S, SHARED_MEMORY};
use crate::domain::{Domain, MemorySource, QEMU_QUEUE_SIZE, VhostUserDisk, VirtioFilesystem};

pub use filesystem::{ServedFilesystem, filesystem};
pub use host::{HUGE_PAGES, HugePages, free_huge_pages, hook, huge_pages};

/// Seconds after which a guest's requests may be given up: half of Linux's limit for a SCSI disk.
const RECONNECT_S_MAX: u32 = 15;
/// What gives a PCIe machine a place for one more disk.
const ROOT_PORT: &str = "<controller type='pci' model='pcie-root-port'/>";

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// It works, and could be better.
    Warn,
    /// It does not work, or not once something happens.
    Fail,
}

impl Level {
    /// The word for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at.
    pub check: &'static str,
    /// The disk that it is of, if it is of one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// Tag of the filesystem that it is of, if it is of one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub filesystem: Option<String>,
    /// How bad it is.
    #[serde(rename = "state")]
    pub level: Level,
    /// What was found.
    #[serde(rename = "told")]
    pub found: String,
    /// What to put into the domain's XML, a file or a shell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

/// An attachment, as far as it matters here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Served {
    /// Its volume.
    pub volume: String,
    /// Virtqueues that it offers.
    pub queues: u16,
    /// Whether the guest may only read.
    pub is_read_only: bool,
}

/// A device of a domain that is served on a socket.
#[derive(Debug, Clone, Copy)]
pub enum Device<'a> {
    /// A disk.
    Disk(&'a VhostUserDisk),
    /// A virtio-fs device.
    Filesystem(&'a VirtioFilesystem),
}

impl<'a> Device<'a> {
    /// Path of its socket.
    pub fn socket(self) -> &'a str {
        match self {
            Self::Disk(disk) => &disk.socket,
            Self::Filesystem(device) => &device.socket,
        }
    }
}

/// What serves a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Service {
    /// An attachment of this node, on the disk's socket.
    Here(Served),
    /// The disk's volume is attached, but on another node of the cluster, at this socket.
    Elsewhere(String),
    /// Nothing.
    Nothing,
}

impl Service {
    fn here(&self) -> Option<&Served> {
        match self {
            Self::Here(served) => Some(served),
            Self::Elsewhere(_) | Self::Nothing => None,
        }
    }
}

impl Finding {
    fn new(check: &'static str, level: Level, found: impl Into<String>) -> Self {
        Self {
            check,
            disk: None,
            filesystem: None,
            level,
            found: found.into(),
            fix: None,
        }
    }

    fn fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(fix.into());
        self
    }

    fn of(mut self, device: Device<'_>) -> Self {
        match device {
            Device::Disk(disk) => self.disk = Some(disk.target.clone()),
            Device::Filesystem(device) => self.filesystem = Some(device.tag.clone()),
        }
        self
    }
}

/// What is to say about the domain as a whole.
pub fn domain(domain: &Domain) -> Vec<Finding> {
    let mut findings = vec![shared_memory(domain)];
    findings.extend(memory_source(domain));
    findings.push(machine(domain));
    if domain.disks.is_empty() && !domain.has_filesystem() {
        let none = Finding::new("disks", Level::Warn, "the domain has no vhostuser disk");
        let command = format!("penstock libvirt attach {} VOLUME", domain.name);
        findings.push(none.fix(command));
    }
    findings
}

/// Whether the daemon can map the domain's memory.
pub fn shared_memory(domain: &Domain) -> Finding {
    match domain.memory.is_shared {
        true => Finding::new("shared memory", Level::Ok, "the daemon can map it"),
        false => Finding::new(
            "shared memory",
            Level::Fail,
            "the domain's memory is private, and the daemon cannot reach its requests",
        )
        .fix(SHARED_MEMORY),
    }
}

fn memory_source(domain: &Domain) -> Option<Finding> {
    let memory = domain.memory;
    if !memory.is_shared {
        return None;
    }
    let check = "memory source";
    Some(match memory.source {
        MemorySource::HugePages => Finding::new(check, Level::Ok, "huge pages"),
        MemorySource::Memfd => Finding::new(check, Level::Ok, "memfd"),
        MemorySource::File | MemorySource::Anonymous => Finding::new(
            check,
            Level::Warn,
            "the guest's memory is in files below memory_backing_dir of qemu.conf, on a disk unless that \
             is a tmpfs",
        )
        .fix(SHARED_MEMORY),
    })
}

fn machine(domain: &Domain) -> Finding {
    let (check, machine) = ("machine", domain.machine.as_str());
    if machine.contains("microvm") {
        let found = format!("{machine} has no PCI bus, which a vhostuser disk needs");
        return Finding::new(check, Level::Fail, found)
            .fix("<type arch='x86_64' machine='q35'>hvm</type>");
    }
    match domain.free_root_ports {
        Some(0) => Finding::new(
            check,
            Level::Warn,
            format!("{machine} has no free PCIe root port: no disk can be added while it runs"),
        )
        .fix(ROOT_PORT),
        Some(ports) => Finding::new(
            check,
            Level::Ok,
            format!(
                "{machine}; {ports} free PCIe root ports for disks that are added while it runs"
            ),
        ),
        None => Finding::new(check, Level::Ok, machine),
    }
}

/// What is to say about a disk's element.
pub fn disk(domain: &Domain, disk: &VhostUserDisk, service: &Service) -> Vec<Finding> {
    let mut findings = vec![
        reconnect(disk),
        attachment(domain, disk, service),
        queues(domain, disk, service.here()),
        queue_size(disk),
        rings(disk),
    ];
    findings.extend(service.here().map(|served| access(domain, disk, served)));
    findings
        .into_iter()
        .map(|finding| finding.of(Device::Disk(disk)))
        .collect()
}

fn reconnect(disk: &VhostUserDisk) -> Finding {
    let check = "reconnect";
    let fix = format!(
        "<source type='unix' path='{}'><reconnect enabled='yes' timeout='{RECONNECT_S}'/></source>",
        disk.socket
    );
    match disk.reconnect_s {
        None => Finding::new(
            check,
            Level::Fail,
            "QEMU does not connect again: once the daemon restarts, the guest has lost the disk",
        )
        .fix(fix),
        Some(0) => Finding::new(check, Level::Fail, "a timeout of 0 means never").fix(fix),
        Some(seconds) if seconds > RECONNECT_S_MAX => Finding::new(
            check,
            Level::Warn,
            format!("after a restart of the daemon the guest waits up to {seconds} s"),
        )
        .fix(fix),
        Some(seconds) => Finding::new(check, Level::Ok, format!("every {seconds} s")),
    }
}

fn attachment(domain: &Domain, disk: &VhostUserDisk, service: &Service) -> Finding {
    let (check, socket) = ("attachment", &disk.socket);
    let volume = domain.volume_of(disk);
    match (service, volume) {
        (Service::Here(served), _) => {
            let found = format!("{socket} serves volume {}", served.volume);
            return Finding::new(check, Level::Ok, found);
        }
        (Service::Elsewhere(place), Some(volume)) => {
            let found = format!("volume {volume} is attached on another node, at {place}");
            let fix =
                format!("shut the domain down there; then, on that node: penstock detach {volume}");
            return Finding::new(check, Level::Fail, found).fix(fix);
        }
        _ => {}
    }
    match volume {
        // The hook, if it is installed, makes the attachment when the domain starts.
        Some(volume) => Finding::new(
            check,
            Level::Warn,
            format!("nothing is attached on {socket}; without the hook the domain's start would wait for it"),
        )
        .fix(format!(
            "penstock attach volume {volume} --socket {socket} --queues {}",
            domain.queues(Some(disk))
        )),
        None => Finding::new(
            check,
            Level::Fail,
            format!("nothing is attached on {socket}: the domain's start would wait for it"),
        )
        .fix(format!("penstock attach volume VOLUME --socket {socket}")),
    }
}

/// Whether the guest may write exactly if the domain's metadata say so. libvirt keeps no `<readonly/>` on
/// such disks.
fn access(domain: &Domain, disk: &VhostUserDisk, served: &Served) -> Finding {
    let check = "access";
    let volume = &served.volume;
    let asked = domain.asked_for(disk);
    let wants_read_only = asked.is_some_and(|asked| asked.is_read_only);
    let (name, target, socket) = (&domain.name, &disk.target, &disk.socket);
    match (wants_read_only, served.is_read_only) {
        (true, true) => Finding::new(check, Level::Ok, "read-only, as the metadata ask for"),
        (false, false) => Finding::new(check, Level::Ok, "the guest may write"),
        (true, false) => Finding::new(
            check,
            Level::Fail,
            format!("the metadata ask for {volume} read-only, and the guest may write"),
        )
        .fix(format!(
            "shut the domain down; penstock detach {socket}; penstock attach volume {volume} --socket \
             {socket} --read-only"
        )),
        (false, true) => Finding::new(
            check,
            Level::Warn,
            format!("{volume} is served read-only, which the metadata do not say: after the next start the \
                     guest may write"),
        )
        .fix(format!(
            "penstock libvirt detach {name} {volume}; penstock libvirt attach {name} {volume} --target \
             {target} --read-only"
        )),
    }
}

fn queues(domain: &Domain, disk: &VhostUserDisk, served: Option<&Served>) -> Finding {
    let check = "queues";
    let used = domain.queues(Some(disk));
    let vcpus = domain.vcpus;
    let driver = |queues: u16| format!("<driver name='qemu' type='raw' queues='{queues}'/>");
    if let Some(offered) = served.map(|served| served.queues)
        && used > offered
    {
        let why = match disk.queues {
            Some(_) => "the disk's element asks for",
            None => "without queues='N' QEMU uses one for each vCPU, which makes",
        };
        let found = format!("{why} {used} queues, the attachment offers {offered}: QEMU refuses");
        return Finding::new(check, Level::Fail, found).fix(driver(offered));
    }
    let possible = served.map_or(used, |served| served.queues);
    let sensible = possible.min(u16::try_from(vcpus).unwrap_or(u16::MAX));
    if used < sensible {
        let found = format!("{used} for {vcpus} vCPUs; the attachment offers {possible}");
        return Finding::new(check, Level::Warn, found).fix(driver(sensible));
    }
    Finding::new(check, Level::Ok, format!("{used} for {vcpus} vCPUs"))
}

fn queue_size(disk: &VhostUserDisk) -> Finding {
    let check = "queue size";
    let size = disk.queue_size.unwrap_or(QEMU_QUEUE_SIZE);
    match size.is_power_of_two() && size <= QUEUE_SIZE_MAX {
        true => Finding::new(check, Level::Ok, format!("{size} entries")),
        false => Finding::new(
            check,
            Level::Fail,
            format!("{size} entries: QEMU takes powers of two up to {QUEUE_SIZE_MAX}"),
        )
        .fix(format!(
            "<driver name='qemu' type='raw' queue_size='{QUEUE_SIZE_MAX}'/>"
        )),
    }
}

/// Both kinds are served; which one a guest has is worth knowing when it is migrated.
fn rings(disk: &VhostUserDisk) -> Finding {
    let found = match disk.is_packed {
        true => "packed, if the guest's driver knows them",
        false => "split",
    };
    Finding::new("rings", Level::Ok, found)
}

/// Whether the domain's QEMU may connect to the device's socket.
pub fn socket(device: Device<'_>, may_connect: &Result<(), Denied>) -> Finding {
    let check = "socket";
    let finding = match may_connect {
        Ok(()) => Finding::new(check, Level::Ok, "QEMU may connect"),
        Err(denied @ Denied::Missing(_)) => Finding::new(check, Level::Warn, denied.to_string()),
        Err(denied) => {
            let finding = Finding::new(check, Level::Fail, denied.to_string());
            match socket_fix(denied) {
                Some(fix) => finding.fix(fix),
                None => finding,
            }
        }
    };
    finding.of(device)
}

/// What gives QEMU the right that it lacks.
pub fn socket_fix(denied: &Denied) -> Option<String> {
    match denied {
        Denied::Directory { path, .. } => Some(format!("chmod o+x {}", path.display())),
        Denied::Socket { group, .. } => Some(format!(
            "in the daemon's configuration: socket_owner = \":{group}\" and socket_mode = \"0660\"; restart \
             it"
        )),
        Denied::Missing(_) | Denied::NotASocket(_) | Denied::Unknown(..) => None,
    }
}

/// Whether AppArmor lets the domain's QEMU connect to the device's socket; `None` if libvirt does not use
/// AppArmor.
pub fn confinement(device: Device<'_>, allowed: Option<bool>) -> Finding {
    let check = "apparmor";
    let finding = match allowed {
        None => Finding::new(check, Level::Ok, "libvirt does not confine with AppArmor"),
        Some(true) => Finding::new(check, Level::Ok, "a rule allows the socket"),
        Some(false) => Finding::new(
            check,
            Level::Fail,
            format!(
                "no rule allows {}, and libvirt's profiles leave the sockets of vhost-user devices out",
                device.socket()
            ),
        )
        .fix(format!(
            "{}; and restart the domain if it runs",
            apparmor::allow_command(device.socket())
        )),
    };
    finding.of(device)
}

#[cfg(test)]
mod tests;
