//! What a domain's XML says, as far as its disks and filesystems depend on it.

mod filesystem;

use std::ops::Range;
use std::path::Path;

use crate::xml::{Element, XmlError};

pub use filesystem::{AskedFilesystem, NeededFilesystem, VirtioFilesystem};

/// Namespace of Penstock's elements in a domain's `<metadata>`.
///
/// ```xml
/// <metadata>
///   <penstock:disks xmlns:penstock='urn:penstock:libvirt:1'>
///     <penstock:disk volume='web'/>
///     <penstock:disk volume='logs' target='vdc'/>
///     <penstock:filesystem name='home' target='TAG' readonly='yes'/>
///   </penstock:disks>
/// </metadata>
/// ```
///
/// A single `<penstock:disk>` or `<penstock:filesystem>` may stand alone. Several need the element around
/// them: libvirt keeps one element of each namespace, and drops the others without a word.
pub const NAMESPACE: &str = "urn:penstock:libvirt:1";
/// Where attachments' sockets are unless told otherwise. One called `NAME.sock` serves the volume NAME to a
/// disk, and the filesystem NAME to a virtio-fs device.
pub const SOCKET_DIRECTORY: &str = "/run/penstock";
const SOCKET_SUFFIX: &str = ".sock";
/// Size of a virtqueue if the element of the device does not name one.
pub const QEMU_QUEUE_SIZE: u16 = 128;

/// The socket that serves a volume or filesystem unless told otherwise.
pub fn socket_of(name: &str) -> String {
    format!("{SOCKET_DIRECTORY}/{name}{SOCKET_SUFFIX}")
}

/// The volume or filesystem that a socket's path names, if it is one of [`SOCKET_DIRECTORY`].
pub fn name_of(socket: &str) -> Option<&str> {
    let socket = socket.strip_prefix("/var").unwrap_or(socket);
    let file = socket.strip_prefix(SOCKET_DIRECTORY)?.strip_prefix('/')?;
    let name = file.strip_suffix(SOCKET_SUFFIX)?;
    (!name.is_empty() && !name.contains('/')).then_some(name)
}

/// A domain.
#[derive(Debug, Clone)]
pub struct Domain {
    /// Its name.
    pub name: String,
    /// Its identity, the same on every host.
    pub uuid: String,
    /// Virtual processors, those that can still be plugged in included.
    pub vcpus: u32,
    /// Type of machine, like `pc-q35-7.2`.
    pub machine: String,
    /// Where its memory is.
    pub memory: Memory,
    /// Its vhost-user disks.
    pub disks: Vec<VhostUserDisk>,
    /// Names of all its disks.
    pub targets: Vec<String>,
    /// Its virtio-fs devices with sockets, those of other back ends included.
    pub filesystems: Vec<VirtioFilesystem>,
    /// Volumes that its metadata asks for.
    pub asked: Vec<AskedVolume>,
    /// Filesystems that its metadata asks for.
    pub asked_filesystems: Vec<AskedFilesystem>,
    /// PCIe root ports that nothing is plugged into; none on a machine without PCIe.
    pub free_root_ports: Option<usize>,
    /// User and group that its QEMU runs as, if the XML says.
    pub dac_label: Option<String>,
}

/// A domain's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Whether another process can map it.
    pub is_shared: bool,
    /// What it consists of.
    pub source: MemorySource,
    /// How much there is.
    pub kib: u64,
    /// Size of its huge pages, if said.
    pub page_kib: Option<u64>,
}

/// What a domain's memory consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemorySource {
    /// Anonymous files in memory.
    Memfd,
    /// Huge pages.
    HugePages,
    /// Files in libvirt's `memory_backing_dir`, on a disk by default.
    File,
    /// Anonymous memory. Shared all the same, it becomes files.
    Anonymous,
}

/// A disk of type `vhostuser`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VhostUserDisk {
    /// Its name, like `vdb`.
    pub target: String,
    /// Path of the socket.
    pub socket: String,
    /// Virtqueues, if said; else QEMU makes one for each virtual processor.
    pub queues: Option<u16>,
    /// Entries of each, if said.
    pub queue_size: Option<u16>,
    /// Seconds between attempts to reach a back end that went away; none if QEMU makes no attempt.
    pub reconnect_s: Option<u32>,
    /// Whether the ring is a packed one.
    pub is_packed: bool,
    /// Where its element is in the domain's XML.
    pub range: Range<usize>,
}

/// A volume that metadata asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AskedVolume {
    /// Its name; empty if the element names none.
    pub volume: String,
    /// Name of the disk that it is to serve, if said.
    pub target: Option<String>,
    /// Whether it is served read-only.
    pub is_read_only: bool,
}

/// A volume that a domain needs attached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NeededVolume {
    /// Its name.
    pub volume: String,
    /// The socket that the domain's disk connects to.
    pub socket: String,
    /// Virtqueues that the disk uses.
    pub queues: u16,
    /// Size of each queue, rounded down to a power of two.
    pub queue_size: u16,
    /// Whether it is served read-only.
    pub is_read_only: bool,
}

/// Why a domain is not understood.
#[derive(Debug, thiserror::Error)]
pub enum DomainError {
    /// Not XML.
    #[error("the domain's XML is not read: {0}")]
    Xml(#[from] XmlError),
    /// XML of something else.
    #[error("this is not the XML of a domain but a <{0}>")]
    NotADomain(String),
    /// Lacks what every domain has.
    #[error("the domain's XML has no <{0}>")]
    Lacks(&'static str),
    /// Metadata that say nothing.
    #[error("a <disk> in the metadata {NAMESPACE} names no volume")]
    NoVolume,
    /// Metadata that name a disk which is not there.
    #[error("the metadata ask for volume '{volume}' as {target}, which is no vhostuser disk")]
    NoSuchDisk {
        /// The volume.
        volume: String,
        /// What was taken for a disk.
        target: String,
    },
    /// Metadata that say nothing.
    #[error("a <filesystem> in the metadata {NAMESPACE} has no name")]
    NoFilesystem,
    /// Metadata that name a virtio-fs device which is not there.
    #[error(
        "the metadata ask for filesystem '{filesystem}' with the tag '{target}', which no virtiofs device \
         with a socket has"
    )]
    NoSuchFilesystem {
        /// The filesystem.
        filesystem: String,
        /// What was taken for a tag.
        target: String,
    },
}

/// The element of [`NAMESPACE`] that asks for these volumes and filesystems, as `virsh metadata --set` takes
/// it.
pub fn metadata_xml(volumes: &[AskedVolume], filesystems: &[AskedFilesystem]) -> String {
    let volumes = volumes.iter().map(AskedVolume::to_xml);
    let filesystems = filesystems.iter().map(AskedFilesystem::to_xml);
    format!(
        "<disks>{}</disks>",
        volumes.chain(filesystems).collect::<String>()
    )
}

impl AskedVolume {
    fn to_xml(&self) -> String {
        let mut disk = quick_xml::events::BytesStart::new("disk");
        disk.push_attribute(("volume", self.volume.as_str()));
        if let Some(target) = &self.target {
            disk.push_attribute(("target", target.as_str()));
        }
        if self.is_read_only {
            disk.push_attribute(("readonly", "yes"));
        }
        format!("<{}/>", String::from_utf8_lossy(&disk))
    }
}

impl Domain {
    /// Reads a domain's XML.
    pub fn parse(text: &str) -> Result<Self, DomainError> {
        let root = Element::parse(text)?;
        if root.name != "domain" {
            return Err(DomainError::NotADomain(root.name));
        }
        let text_of = |name: &'static str| {
            let element = root
                .find(&[name])
                .filter(|element| !element.text.is_empty());
            element
                .map(|element| element.text.clone())
                .ok_or(DomainError::Lacks(name))
        };
        let mut disks = Vec::new();
        let mut targets = Vec::new();
        for disk in devices(&root, "disk") {
            let target = disk.find_attribute(&["target"], "dev").unwrap_or_default();
            targets.push(target.to_owned());
            if disk.attribute("type") == Some("vhostuser") {
                disks.push(vhost_user_disk(disk, target));
            }
        }
        let machine = root.find_attribute(&["os", "type"], "machine");
        Ok(Self {
            name: text_of("name")?,
            uuid: text_of("uuid")?,
            vcpus: root
                .find(&["vcpu"])
                .and_then(|vcpu| vcpu.text.parse().ok())
                .unwrap_or(1),
            machine: machine.unwrap_or_default().to_owned(),
            memory: memory(&root),
            disks,
            targets,
            filesystems: filesystem::filesystems(&root),
            asked: asked(&root),
            asked_filesystems: filesystem::asked(&root),
            free_root_ports: free_root_ports(&root),
            dac_label: dac_label(&root),
        })
    }

    /// The vhost-user disk on a socket.
    pub fn disk_on(&self, socket: &str) -> Option<&VhostUserDisk> {
        self.disks
            .iter()
            .find(|disk| is_same_path(&disk.socket, socket))
    }

    /// What the metadata ask for as this disk, by its name or by the volume that its socket names.
    pub fn asked_for(&self, disk: &VhostUserDisk) -> Option<&AskedVolume> {
        self.asked.iter().find(|asked| match &asked.target {
            Some(target) => *target == disk.target,
            None => is_same_path(&socket_of(&asked.volume), &disk.socket),
        })
    }

    /// The volume that is to serve a disk, by its socket or the metadata.
    pub fn volume_of<'a>(&'a self, disk: &'a VhostUserDisk) -> Option<&'a str> {
        let asked = || self.asked_for(disk).map(|asked| asked.volume.as_str());
        name_of(&disk.socket).or_else(asked)
    }

    /// The volumes that it needs attached before it starts: those its metadata ask for, and those that its
    /// disks' sockets name.
    pub fn needed(&self) -> Result<Vec<NeededVolume>, DomainError> {
        let mut needed: Vec<NeededVolume> = Vec::new();
        for asked in &self.asked {
            if asked.volume.is_empty() {
                return Err(DomainError::NoVolume);
            }
            let disk = match &asked.target {
                Some(target) => {
                    let disk = self.disks.iter().find(|disk| disk.target == *target);
                    Some(disk.ok_or_else(|| DomainError::NoSuchDisk {
                        volume: asked.volume.clone(),
                        target: target.clone(),
                    })?)
                }
                None => self.disk_on(&socket_of(&asked.volume)),
            };
            let socket = disk.map(|disk| disk.socket.clone());
            needed.push(NeededVolume {
                volume: asked.volume.clone(),
                socket: socket.unwrap_or_else(|| socket_of(&asked.volume)),
                queues: self.queues(disk),
                queue_size: queue_size(disk),
                is_read_only: asked.is_read_only,
            });
        }
        for disk in &self.disks {
            let is_known = |one: &NeededVolume| is_same_path(&one.socket, &disk.socket);
            if let Some(volume) = name_of(&disk.socket).filter(|_| !needed.iter().any(is_known)) {
                needed.push(NeededVolume {
                    volume: volume.to_owned(),
                    socket: disk.socket.clone(),
                    queues: self.queues(Some(disk)),
                    queue_size: queue_size(Some(disk)),
                    is_read_only: false,
                });
            }
        }
        Ok(needed)
    }

    /// The metadata with one more volume, or with other words about the same disk.
    pub fn metadata_with(&self, volume: AskedVolume) -> Vec<AskedVolume> {
        let mut all = self.metadata_without(&volume.volume, volume.target.as_deref());
        all.push(volume);
        all
    }

    /// The metadata without a volume that is the disk `target`, or is not said to be a certain one.
    pub fn metadata_without(&self, volume: &str, target: Option<&str>) -> Vec<AskedVolume> {
        let is_it = |one: &AskedVolume| match one.target.as_deref() {
            Some(said) => Some(said) == target,
            None => one.volume == volume,
        };
        let others = self.asked.iter().filter(|one| !is_it(one));
        others.cloned().collect()
    }

    /// Virtqueues that QEMU gives a disk.
    pub fn queues(&self, disk: Option<&VhostUserDisk>) -> u16 {
        disk.and_then(|disk| disk.queues)
            .unwrap_or(u16::try_from(self.vcpus).unwrap_or(u16::MAX))
    }
}

/// `/var/run` is `/run`.
fn is_same_path(one: &str, other: &str) -> bool {
    let plain = |path: &str| match path.strip_prefix("/var/run/") {
        Some(rest) => Path::new("/run").join(rest),
        None => Path::new(path).to_owned(),
    };
    plain(one) == plain(other)
}

fn devices<'a>(root: &'a Element, name: &'a str) -> impl Iterator<Item = &'a Element> {
    root.children("devices")
        .flat_map(move |devices| devices.children(name))
}

fn vhost_user_disk(disk: &Element, target: &str) -> VhostUserDisk {
    let driver = |name| disk.find_attribute(&["driver"], name);
    let reconnect = disk.find(&["source", "reconnect"]);
    let reconnect = reconnect.filter(|one| one.attribute("enabled") == Some("yes"));
    let seconds = |one: &Element| one.attribute("timeout").and_then(|text| text.parse().ok());
    VhostUserDisk {
        target: target.to_owned(),
        socket: disk
            .find_attribute(&["source"], "path")
            .unwrap_or_default()
            .to_owned(),
        queues: driver("queues").and_then(|text| text.parse().ok()),
        queue_size: driver("queue_size").and_then(|text| text.parse().ok()),
        reconnect_s: reconnect.and_then(seconds),
        is_packed: driver("packed") == Some("on"),
        range: disk.range.clone(),
    }
}

fn memory(root: &Element) -> Memory {
    let backing = |path: &[&str], name| {
        root.find(&["memoryBacking"])
            .and_then(|backing| backing.find_attribute(path, name))
    };
    let overall = backing(&["access"], "mode") == Some("shared");
    // A cell that says nothing is as the whole.
    let cells = root.find(&["cpu", "numa"]);
    let mut cells = cells.iter().flat_map(|numa| numa.children("cell"));
    let first = cells.next();
    let is_shared_cell = |cell: &Element| match cell.attribute("memAccess") {
        Some(mode) => mode == "shared",
        None => overall,
    };
    let is_shared = match first {
        Some(first) => is_shared_cell(first) && cells.all(is_shared_cell),
        None => overall,
    };
    let source = match backing(&["source"], "type") {
        _ if root.find(&["memoryBacking", "hugepages"]).is_some() => MemorySource::HugePages,
        Some("memfd") => MemorySource::Memfd,
        Some("file") => MemorySource::File,
        _ => MemorySource::Anonymous,
    };
    let page = root.find(&["memoryBacking", "hugepages", "page"]);
    Memory {
        is_shared,
        source,
        kib: root
            .find(&["memory"])
            .map_or(0, |memory| kib(&memory.text, memory.attribute("unit"))),
        page_kib: page.map(|page| {
            kib(
                page.attribute("size").unwrap_or_default(),
                page.attribute("unit"),
            )
        }),
    }
}

/// A size as libvirt writes it, of which a unit that is not there means KiB.
fn kib(number: &str, unit: Option<&str>) -> u64 {
    let number: u64 = number.trim().parse().unwrap_or(0);
    let bytes: u64 = match unit.unwrap_or("KiB") {
        "b" | "bytes" => 1,
        "KB" => 1000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "M" | "MiB" => 1 << 20,
        "G" | "GiB" => 1 << 30,
        "T" | "TiB" => 1 << 40,
        _ => 1 << 10,
    };
    number.saturating_mul(bytes).div_ceil(1 << 10)
}

fn asked(root: &Element) -> Vec<AskedVolume> {
    let said = |disk: &Element| AskedVolume {
        volume: disk.attribute("volume").unwrap_or_default().to_owned(),
        target: disk.attribute("target").map(str::to_owned),
        is_read_only: disk.attribute("readonly") == Some("yes"),
    };
    let elements = asked_elements(root, "disk");
    elements.into_iter().map(said).collect()
}

/// The elements of this name that the metadata have of ours.
fn asked_elements<'a>(root: &'a Element, name: &str) -> Vec<&'a Element> {
    let ours = |element: &&Element| element.namespace.as_deref() == Some(NAMESPACE);
    let metadata = root.find(&["metadata"]);
    let ours = metadata
        .iter()
        .flat_map(|metadata| metadata.children.iter().filter(ours));
    let mut found = Vec::new();
    for element in ours {
        // What `virsh metadata --set` is given has the namespace at its top alone.
        element.each(&mut |one| {
            let is_ours = one.namespace.as_deref().is_none_or(|uri| uri == NAMESPACE);
            if is_ours && one.name == name {
                found.push(one);
            }
        });
    }
    found
}

fn free_root_ports(root: &Element) -> Option<usize> {
    let is_pci = |one: &&Element| one.attribute("type") == Some("pci");
    let controllers: Vec<&Element> = devices(root, "controller").filter(is_pci).collect();
    let model = |one: &Element, name| one.attribute("model") == Some(name);
    if !controllers.iter().any(|one| model(one, "pcie-root")) {
        return None;
    }
    let mut buses = Vec::new();
    root.each(&mut |element| {
        if element.name == "address" && element.attribute("type") == Some("pci") {
            buses.extend(element.attribute("bus").and_then(number));
        }
    });
    let ports = controllers.iter().filter(|one| {
        let index = one.attribute("index").and_then(number);
        model(one, "pcie-root-port") && index.is_some_and(|index| !buses.contains(&index))
    });
    Some(ports.count())
}

fn number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

fn dac_label(root: &Element) -> Option<String> {
    let mut labels = root.children("seclabel");
    let label = labels.find(|label| label.attribute("model") == Some("dac"))?;
    let label = label.find(&["label"])?;
    (!label.text.is_empty()).then(|| label.text.clone())
}

/// Size of the virtqueues of a disk. QEMU refuses an invalid size itself.
fn queue_size(disk: Option<&VhostUserDisk>) -> u16 {
    let size = disk.and_then(|disk| disk.queue_size);
    match size.and_then(u16::checked_ilog2) {
        Some(power) => 1 << power,
        None => QEMU_QUEUE_SIZE,
    }
}

#[cfg(test)]
mod tests;
