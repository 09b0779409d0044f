//! Which device, port and address carry a node's data: the ones that its data address belongs to.

use std::fmt;
use std::net::IpAddr;

use fabric_transport::queue_pair::pair::PARTS_MAX;

use super::inventory::{Found, Inventory, InventoryPort};
use super::verbs::address::{GidIndex, PortNumber};
use super::verbs::context::{GidEntry, LinkLayer, PortState};
use super::verbs::gid::{Gid, GidKind};

/// Work requests that a queue must hold: what a connection may have unanswered, twice.
pub const QUEUE_ENTRIES_MIN: u32 = 1024;
/// Segments of a work request: a message's head, and the pieces of its payload.
pub const SEGMENTS_MIN: u32 = 1 + PARTS_MAX as u32;

/// Where a node's data go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The device's name.
    pub device: String,
    /// Its port.
    pub port: PortNumber,
    /// Which entry of the port's table of addresses.
    pub index: GidIndex,
    /// The address.
    pub gid: Gid,
}

impl fmt::Display for Choice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            device,
            port,
            index,
            ..
        } = self;
        write!(formatter, "GID {index} of {device} port {port}")
    }
}

/// Why data cannot go by RDMA.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RdmaUnavailable {
    /// The machine has no device.
    #[error("this machine has no RDMA device")]
    NoDevice,
    /// No port has the address.
    #[error("no RDMA device has the address {address}: they have {known}")]
    NoAddress {
        /// The node's data address.
        address: IpAddr,
        /// Those that there are.
        known: String,
    },
    /// The port does not work.
    #[error("port {port} of {device} has no link")]
    Down {
        /// The device.
        device: String,
        /// Its port.
        port: PortNumber,
    },
    /// The device lacks something.
    #[error("{device} {lacks}")]
    Lacks {
        /// The device.
        device: String,
        /// What.
        lacks: MissingFeature,
    },
}

/// What a device lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MissingFeature {
    /// Memory windows of type 2.
    Windows,
    /// Work requests in a queue.
    Entries(u32),
    /// Segments of a work request.
    Segments(u32),
}

impl fmt::Display for MissingFeature {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Windows => formatter
                .write_str("has no memory windows of type 2, which open guest memory to peers"),
            Self::Entries(has) => write!(
                formatter,
                "takes {has} work requests in a queue, {QUEUE_ENTRIES_MIN} are needed"
            ),
            Self::Segments(has) => write!(
                formatter,
                "takes {has} segments in a work request, {SEGMENTS_MIN} are needed"
            ),
        }
    }
}

/// What the device lacks of what Penstock needs.
pub fn lacks(found: &Found) -> Option<MissingFeature> {
    let limits = &found.limits;
    if !limits.window_kinds.has_type_2() {
        return Some(MissingFeature::Windows);
    }
    if limits.queue_entries < QUEUE_ENTRIES_MIN {
        return Some(MissingFeature::Entries(limits.queue_entries));
    }
    (limits.segments < SEGMENTS_MIN).then_some(MissingFeature::Segments(limits.segments))
}

/// Whether the port has a link.
pub fn is_up(port: &InventoryPort) -> bool {
    matches!(
        port.port.state,
        PortState::Active | PortState::ActiveDeferred
    )
}

/// Whether packets to the address go where IP packets go: RoCE version 2, and whatever InfiniBand has.
pub fn is_usable(port: &InventoryPort, entry: &GidEntry) -> bool {
    match port.port.link_layer {
        LinkLayer::Infiniband => true,
        LinkLayer::Ethernet | LinkLayer::Unknown => entry.kind == Some(GidKind::RoceV2),
    }
}

/// Who carries the data of a node whose data address is this one.
pub fn choose(inventory: &Inventory, address: IpAddr) -> Result<Choice, RdmaUnavailable> {
    if inventory.devices.is_empty() {
        return Err(RdmaUnavailable::NoDevice);
    }
    let wanted = gid_of(address);
    let mut known = Vec::new();
    let mut refused = None;
    for device in &inventory.devices {
        let Ok(found) = &device.found else { continue };
        for port in &found.ports {
            let mut usable = port.gids.iter().filter(|entry| is_usable(port, entry));
            let Some(entry) = usable.clone().find(|entry| entry.gid == wanted) else {
                known.extend(usable.by_ref().map(|entry| name_of(entry.gid)));
                continue;
            };
            match refuses(&device.name, found, port) {
                None => return Ok(choice(&device.name, port, entry)),
                // Another device may have the same address: rxe on a card's interface, a port of a bond.
                Some(why) => refused = refused.or(Some(why)),
            }
        }
    }
    let known = match known.is_empty() {
        true => "none".to_owned(),
        false => known.join(", "),
    };
    Err(refused.unwrap_or(RdmaUnavailable::NoAddress { address, known }))
}

/// Why this port cannot carry data.
fn refuses(device: &str, found: &Found, port: &InventoryPort) -> Option<RdmaUnavailable> {
    let device = device.to_owned();
    if !is_up(port) {
        let port = port.number;
        return Some(RdmaUnavailable::Down { device, port });
    }
    lacks(found).map(|lacks| RdmaUnavailable::Lacks { device, lacks })
}

fn choice(device: &str, port: &InventoryPort, entry: &GidEntry) -> Choice {
    Choice {
        device: device.to_owned(),
        port: port.number,
        index: entry.index,
        gid: entry.gid,
    }
}

/// One for each port that could be chosen for some address: the first one that it has.
pub fn all(inventory: &Inventory) -> Vec<Choice> {
    let mut all = Vec::new();
    for device in &inventory.devices {
        let Ok(found) = &device.found else { continue };
        if lacks(found).is_some() {
            continue;
        }
        for port in found.ports.iter().filter(|port| is_up(port)) {
            let mut usable = port.gids.iter().filter(|entry| is_usable(port, entry));
            // Those made of the card's own address come first, and are the last to be configured right.
            let routed = usable.clone().find(|entry| !entry.gid.is_link_local());
            let chosen = routed.or_else(|| usable.next());
            all.extend(chosen.map(|entry| choice(&device.name, port, entry)));
        }
    }
    all
}

/// The address by which RoCE knows an IP address.
fn gid_of(address: IpAddr) -> Gid {
    match address {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => address.into(),
    }
}

/// As people write it.
pub fn name_of(gid: Gid) -> String {
    match gid.ipv4() {
        Some(address) => address.to_string(),
        None => std::net::Ipv6Addr::from(gid.bytes()).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::inventory::InventoryDevice;
    use super::super::testing::{device, gid, inventory};
    use super::*;

    const ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));

    #[test]
    fn device_with_the_address_is_chosen_by_its_routable_gid() {
        let mut first = device("mlx5_0");
        first.gids(vec![gid(0, "fe80::1", GidKind::RoceV2)]);
        let mut second = device("mlx5_1");
        second.gids(vec![
            gid(2, "::ffff:10.0.0.1", GidKind::InfinibandOrRoceV1),
            gid(3, "::ffff:10.0.0.1", GidKind::RoceV2),
        ]);
        let inventory = inventory(vec![first, second]);
        let choice = choose(&inventory, ADDRESS).unwrap();
        assert_eq!(choice.to_string(), "GID 3 of mlx5_1 port 1");
        let v6 = choose(&inventory, "fe80::1".parse().unwrap()).unwrap();
        assert_eq!(v6.device, "mlx5_0");
    }

    #[test]
    fn every_port_that_could_be_chosen_is_named_once() {
        let mut first = device("mlx5_0");
        first.gids(vec![
            gid(1, "fe80::1", GidKind::RoceV2),
            gid(3, "::ffff:10.0.0.1", GidKind::RoceV2),
        ]);
        let mut second = device("mlx5_1");
        second.gids(vec![gid(1, "fe80::2", GidKind::RoceV2)]);
        let mut third = device("mlx5_2");
        third.gids(vec![gid(0, "fe80::3", GidKind::InfinibandOrRoceV1)]);
        let all = all(&inventory(vec![first, second, third]));
        let names: Vec<String> = all.iter().map(Choice::to_string).collect();
        assert_eq!(names, ["GID 3 of mlx5_0 port 1", "GID 1 of mlx5_1 port 1"]);
    }

    #[test]
    fn it_is_said_why_there_is_none() {
        assert_eq!(
            choose(&inventory(vec![]), ADDRESS),
            Err(RdmaUnavailable::NoDevice)
        );
        let mut other = device("mlx5_0");
        other.gids(vec![gid(1, "::ffff:10.9.0.1", GidKind::RoceV2)]);
        let told = choose(&inventory(vec![other]), ADDRESS).unwrap_err();
        let told = told.to_string();
        assert!(
            told.contains("10.0.0.1") && told.ends_with("they have 10.9.0.1"),
            "{told}"
        );
        let with = |change: fn(&mut Found)| {
            let mut one = device("mlx5_0");
            one.gids(vec![gid(1, "::ffff:10.0.0.1", GidKind::RoceV2)]);
            change(one.found.as_mut().unwrap());
            choose(&inventory(vec![one]), ADDRESS)
        };
        assert!(with(|_| ()).is_ok());
        let down = with(|found| found.ports[0].port.state = PortState::Down);
        assert!(
            matches!(down, Err(RdmaUnavailable::Down { .. })),
            "{down:?}"
        );
        let lacks = [
            with(|found| found.limits.window_kinds.any = false),
            with(|found| found.limits.queue_entries = 100),
            with(|found| found.limits.segments = 1),
        ];
        let told = lacks.map(|lack| match lack {
            Err(RdmaUnavailable::Lacks { lacks, .. }) => lacks,
            other => panic!("{other:?}"),
        });
        assert_eq!(
            told,
            [
                MissingFeature::Windows,
                MissingFeature::Entries(100),
                MissingFeature::Segments(1)
            ]
        );
        let mut down = device("mlx5_0");
        down.gids(vec![gid(1, "::ffff:10.0.0.1", GidKind::RoceV2)]);
        let other = InventoryDevice {
            name: "rxe0".to_owned(),
            ..down.clone()
        };
        down.found.as_mut().unwrap().ports[0].port.state = PortState::Down;
        let mut broken = device("mlx5_9");
        broken.found = Err("open mlx5_9: no".to_owned());
        let chosen = choose(&inventory(vec![broken, down, other]), ADDRESS).unwrap();
        assert_eq!(chosen.device, "rxe0", "the one that works");
    }
}
