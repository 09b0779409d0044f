//! What a machine has for RDMA: devices, their ports and addresses, and how much memory a process may pin.

use std::io;
use std::path::Path;

use rustix::process::{Resource, getrlimit};

use super::verbs::address::PortNumber;
use super::verbs::context::{Context, GidEntry, Limits, Port};
use super::verbs::device::{Device, DeviceList};
use super::verbs::error::VerbsError;
use super::verbs::sysfs::Sysfs;

/// Number of the capability that lifts the limit of pinned memory, `CAP_IPC_LOCK`.
const CAP_IPC_LOCK: u32 = 14;

/// What there is.
#[derive(Debug, Clone)]
pub struct Inventory {
    /// Devices, in the library's order.
    pub devices: Vec<InventoryDevice>,
    /// Memory that may be pinned.
    pub pinning: Pinning,
}

/// A device.
#[derive(Debug, Clone)]
pub struct InventoryDevice {
    /// Its name, `mlx5_0` for example.
    pub name: String,
    /// What it says of itself, or why it cannot be asked.
    pub found: Result<Found, String>,
}

/// What a device says of itself.
#[derive(Debug, Clone)]
pub struct Found {
    /// What it allows.
    pub limits: Limits,
    /// Its ports.
    pub ports: Vec<InventoryPort>,
}

/// A port of a device.
#[derive(Debug, Clone)]
pub struct InventoryPort {
    /// Which.
    pub number: PortNumber,
    /// Its state.
    pub port: Port,
    /// Its addresses.
    pub gids: Vec<GidEntry>,
    /// Largest packet of the network interface that the addresses belong to, in bytes.
    pub interface_mtu: Option<u32>,
}

/// How much memory this process may pin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pinning {
    /// `RLIMIT_MEMLOCK` in bytes; `None`: no limit.
    pub limit_bytes: Option<u64>,
    /// Whether the limit does not hold for this process (`CAP_IPC_LOCK`).
    pub is_exempt: bool,
}

impl Inventory {
    /// Asks the kernel and every device. A device that fails is listed with its error.
    pub fn take() -> Result<Self, VerbsError> {
        let list = DeviceList::get()?;
        let asked = list.iter().map(|device| InventoryDevice {
            name: device.name().to_owned(),
            found: ask(&device).map_err(|error| error.to_string()),
        });
        let mut devices: Vec<InventoryDevice> = asked.collect();
        // Where that fails, the list has been asked for in vain, too.
        let shown = Sysfs::default().devices().unwrap_or_default();
        devices.extend(unknown(&list, shown));
        Ok(Self {
            devices,
            pinning: Pinning::of_this_process(),
        })
    }
}

/// Those that the kernel shows and the library does not know.
fn unknown(list: &DeviceList, shown: Vec<String>) -> impl Iterator<Item = InventoryDevice> {
    let unknown = shown.into_iter().filter(|name| list.find(name).is_none());
    unknown.map(|name| InventoryDevice {
        name,
        found: Err(
            "the kernel has it, and offers it to no program, or libibverbs has no driver for it"
                .to_owned(),
        ),
    })
}

fn ask(device: &Device<'_>) -> Result<Found, VerbsError> {
    let context = device.open()?;
    let limits = context.limits()?;
    let ports = (1..=limits.ports).map(|number| ask_port(&context, PortNumber(number)));
    Ok(Found {
        ports: ports.collect::<Result<_, _>>()?,
        limits,
    })
}

fn ask_port(context: &Context, number: PortNumber) -> Result<InventoryPort, VerbsError> {
    let gids = context.gids(number)?;
    let interface = gids.iter().find_map(|entry| entry.interface.as_deref());
    Ok(InventoryPort {
        number,
        port: context.port(number)?,
        interface_mtu: interface.and_then(|name| mtu_of(Path::new("/sys/class/net"), name)),
        gids,
    })
}

/// What the kernel shows below `interfaces`.
fn mtu_of(interfaces: &Path, name: &str) -> Option<u32> {
    let text = std::fs::read_to_string(interfaces.join(name).join("mtu")).ok()?;
    text.trim().parse().ok()
}

impl Pinning {
    fn of_this_process() -> Self {
        let status = std::fs::read_to_string("/proc/self/status");
        Self {
            limit_bytes: getrlimit(Resource::Memlock).current,
            is_exempt: has_capability(status, CAP_IPC_LOCK),
        }
    }

    /// Bytes that may be pinned; `None`: as many as there are.
    pub fn bytes(self) -> Option<u64> {
        self.limit_bytes.filter(|_| !self.is_exempt)
    }
}

/// Whether what `/proc/PID/status` says has this capability in effect.
fn has_capability(status: io::Result<String>, capability: u32) -> bool {
    let status = status.unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = effective.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
    bits.is_some_and(|bits| bits >> capability & 1 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_read_from_what_the_kernel_shows() {
        let status = |bits: &str| Ok(format!("Name:\tx\nCapPrm:\t0\nCapEff:\t{bits}\n"));
        assert!(has_capability(status("0000000000004000"), CAP_IPC_LOCK));
        assert!(!has_capability(status("ffffffffffffbfff"), CAP_IPC_LOCK));
        assert!(!has_capability(status("?"), CAP_IPC_LOCK));
        assert!(!has_capability(
            Err(io::ErrorKind::NotFound.into()),
            CAP_IPC_LOCK
        ));
    }

    #[test]
    fn a_limit_does_not_hold_for_who_is_exempt() {
        let limited = Pinning {
            limit_bytes: Some(4096),
            is_exempt: false,
        };
        assert_eq!(limited.bytes(), Some(4096));
        let exempt = Pinning {
            is_exempt: true,
            ..limited
        };
        assert_eq!(exempt.bytes(), None);
    }

    #[test]
    fn device_unknown_to_the_library_is_still_listed() {
        let list = DeviceList::get().unwrap();
        let shown = vec!["no-such-device".to_owned()];
        let [device] = &unknown(&list, shown).collect::<Vec<_>>()[..] else {
            panic!("one device");
        };
        assert_eq!(device.name, "no-such-device");
        assert!(
            device
                .found
                .as_ref()
                .is_err_and(|why| why.contains("no driver"))
        );
    }

    #[test]
    fn the_packets_of_an_interface_are_as_large_as_the_kernel_shows() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("eth0")).unwrap();
        std::fs::write(root.path().join("eth0/mtu"), "9000\n").unwrap();
        assert_eq!(mtu_of(root.path(), "eth0"), Some(9000));
        assert_eq!(mtu_of(root.path(), "eth1"), None);
    }
}
