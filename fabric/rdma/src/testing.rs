//! Machines that there are not, for tests.

use super::inventory::{Found, Inventory, InventoryDevice, InventoryPort, Pinning};
use super::verbs::address::{GidIndex, Lid, Mtu, PortNumber};
use super::verbs::context::{GidEntry, Limits, LinkLayer, Port, PortState, WindowKinds};
use super::verbs::gid::GidKind;

/// A machine with these devices, on which any amount of memory may be pinned.
pub fn inventory(devices: Vec<InventoryDevice>) -> Inventory {
    Inventory {
        devices,
        pinning: Pinning {
            limit_bytes: None,
            is_exempt: false,
        },
    }
}

/// A card with one port on Ethernet that has all that is needed, but no address.
pub fn device(name: &str) -> InventoryDevice {
    let limits = Limits {
        firmware: "1.0".to_owned(),
        vendor: 1,
        part: 2,
        ports: 1,
        queue_pairs: 1 << 16,
        queue_entries: 1 << 15,
        segments: 30,
        read_segments: 30,
        completion_queues: 1 << 16,
        completion_entries: 1 << 20,
        protection_domains: 1 << 16,
        regions: 1 << 20,
        region_bytes: u64::MAX,
        windows: 1 << 20,
        reads_served: 16,
        reads_wanted: 16,
        has_atomics: true,
        window_kinds: WindowKinds {
            any: true,
            type_2a: false,
            type_2b: true,
        },
        capabilities: 0,
    };
    let port = Port {
        state: PortState::Active,
        mtu: Some(Mtu::B4096),
        mtu_max: Some(Mtu::B4096),
        link_layer: LinkLayer::Ethernet,
        lid: Lid(0),
        gids: 255,
        message_bytes: 1 << 30,
    };
    let port = InventoryPort {
        number: PortNumber(1),
        port,
        gids: Vec::new(),
        interface_mtu: Some(9000),
    };
    InventoryDevice {
        name: name.to_owned(),
        found: Ok(Found {
            limits,
            ports: vec![port],
        }),
    }
}

impl InventoryDevice {
    /// Gives its first port these addresses.
    pub fn gids(&mut self, gids: Vec<GidEntry>) {
        let found = self.found.as_mut().expect("a device that can be asked");
        found.ports[0].gids = gids;
    }
}

/// An entry of a table of addresses.
pub fn gid(index: u8, address: &str, kind: GidKind) -> GidEntry {
    GidEntry {
        index: GidIndex(index),
        gid: address.parse().expect("an address"),
        kind: Some(kind),
        interface: Some("eth0".to_owned()),
    }
}
