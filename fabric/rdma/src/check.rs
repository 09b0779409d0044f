//! Findings about the RDMA of a machine for its operator, with hints.

use std::net::IpAddr;

use super::choice::{Choice, RdmaUnavailable, all, choose, is_up, is_usable, lacks, name_of};
use super::inventory::{Found, Inventory, InventoryDevice, InventoryPort, Pinning};
use super::trial::try_out;
use super::verbs::context::{LinkLayer, PortState, VENDOR_RXE};

/// Payload of a packet below which the headers cost more than they should.
const MTU_GOOD_BYTES: u32 = 4096;
/// Largest packet of an Ethernet interface that carries such a payload with all headers.
const INTERFACE_MTU_GOOD: u32 = 4200;

/// How something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// It works, and could be better.
    Warn,
    /// RDMA does not work because of it.
    Fail,
}

/// Something that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What.
    pub about: String,
    /// How it is.
    pub verdict: Verdict,
    /// What was seen.
    pub text: String,
    /// What to do, if it is not good.
    pub hint: String,
}

impl Finding {
    /// As it should be.
    pub fn ok(about: impl Into<String>, text: impl Into<String>) -> Self {
        Self {
            about: about.into(),
            verdict: Verdict::Ok,
            text: text.into(),
            hint: String::new(),
        }
    }

    /// It works, and could be better.
    pub fn warn(
        about: impl Into<String>,
        text: impl Into<String>,
        hint: impl Into<String>,
    ) -> Self {
        Self {
            verdict: Verdict::Warn,
            hint: hint.into(),
            ..Self::ok(about, text)
        }
    }

    /// RDMA does not work because of it.
    pub fn fail(
        about: impl Into<String>,
        text: impl Into<String>,
        hint: impl Into<String>,
    ) -> Self {
        Self {
            verdict: Verdict::Fail,
            ..Self::warn(about, text, hint)
        }
    }
}

/// What was found on this machine.
#[derive(Debug, Clone)]
pub struct Checked {
    /// In the order in which things depend on each other.
    pub findings: Vec<Finding>,
    /// Whether a port of it can carry data: that of the address that was asked for, or any.
    pub usable: bool,
}

impl Checked {
    /// The verdict on the machine: it fails if no port can carry data. What fails elsewhere is a warning
    /// then: another port does.
    pub fn verdict(&self) -> Verdict {
        let is_ok = |finding: &Finding| finding.verdict == Verdict::Ok;
        match self.usable {
            false => Verdict::Fail,
            true if self.findings.iter().all(is_ok) => Verdict::Ok,
            true => Verdict::Warn,
        }
    }
}

/// Looks at this machine, and tries the port out that has this address, or every port that could be used.
pub fn run(address: Option<IpAddr>) -> Checked {
    let inventory = match Inventory::take() {
        Ok(inventory) => inventory,
        Err(error) => {
            let finding = Finding::fail("devices", error.to_string(), "see the kernel's log");
            return Checked {
                findings: vec![finding],
                usable: false,
            };
        }
    };
    let mut findings = judge(&inventory, address);
    let mut usable = false;
    for choice in candidates(&inventory, address) {
        let about = format!("trial of {choice}");
        findings.push(match try_out(&choice) {
            Ok(()) => {
                usable = true;
                let text = "a message, a READ through a memory window, and its refusal once that was closed";
                Finding::ok(about, text)
            }
            Err(error) => {
                let hint = "see the kernel's log; a card may need newer firmware, a process more rights";
                Finding::fail(about, error.to_string(), hint)
            }
        });
    }
    Checked { findings, usable }
}

/// What is to be tried out.
fn candidates(inventory: &Inventory, address: Option<IpAddr>) -> Vec<Choice> {
    match address {
        Some(address) => choose(inventory, address).into_iter().collect(),
        None => all(inventory),
    }
}

/// All that can be said without trying anything, for a node with this data address.
pub fn judge(inventory: &Inventory, address: Option<IpAddr>) -> Vec<Finding> {
    let mut findings = Vec::new();
    if inventory.devices.is_empty() {
        findings.push(Finding::fail(
            "devices",
            "the kernel shows none",
            "look for the card (`lspci`) and its driver (`rdma link`); to try without a card: `modprobe \
             rdma_rxe` and `rdma link add rxe0 \
             type rxe netdev INTERFACE`",
        ));
    }
    for device in &inventory.devices {
        judge_device(device, &mut findings);
    }
    if let Some(address) = address.filter(|_| !inventory.devices.is_empty()) {
        findings.push(judge_address(inventory, address));
    }
    findings.push(judge_pinning(inventory.pinning));
    findings
}

fn judge_device(device: &InventoryDevice, findings: &mut Vec<Finding>) {
    let found = match &device.found {
        Ok(found) => found,
        Err(error) => {
            let hint = "load ib_uverbs (`modprobe ib_uverbs`), install the package ibverbs-providers, and \
                        see who may open \
                        /dev/infiniband/uverbs*";
            findings.push(Finding::fail(&device.name, error, hint));
            return;
        }
    };
    findings.push(match lacks(found) {
        Some(lack) => Finding::fail(
            &device.name,
            lack.to_string(),
            "TCP is used; another card, or newer firmware, may have it",
        ),
        None if found.limits.vendor == VENDOR_RXE => Finding::warn(
            &device.name,
            "is software RDMA (rdma_rxe): slower than TCP, and peers can access memory that is not offered",
            "use a card where data matter",
        ),
        None => Finding::ok(&device.name, describe(found)),
    });
    for port in &found.ports {
        judge_port(&device.name, port, findings);
    }
}

fn describe(found: &Found) -> String {
    let limits = &found.limits;
    let firmware = match limits.firmware.as_str() {
        "" => String::new(),
        firmware => format!("firmware {firmware}, "),
    };
    format!(
        "{firmware}{} queue pairs of {} work requests, {} memory windows, {} READs at once",
        limits.queue_pairs, limits.queue_entries, limits.windows, limits.reads_served
    )
}

fn judge_port(device: &str, port: &InventoryPort, findings: &mut Vec<Finding>) {
    let about = format!("{device} port {}", port.number);
    let interface = port.gids.iter().find_map(|gid| gid.interface.as_deref());
    let interface = interface.unwrap_or("INTERFACE");
    if port.port.state == PortState::Starting {
        let hint = "see whether a subnet manager runs (`sminfo`)";
        findings.push(Finding::fail(
            about,
            "has a link, and waits for its subnet's manager",
            hint,
        ));
        return;
    }
    if !is_up(port) {
        let hint = format!("plug the cable in, and `ip link set {interface} up`");
        findings.push(Finding::fail(about, "has no link", hint));
        return;
    }
    findings.push(judge_mtu(&about, interface, port));
    let usable: Vec<String> = port
        .gids
        .iter()
        .filter(|gid| is_usable(port, gid))
        .map(|gid| format!("{} ({})", name_of(gid.gid), gid.index))
        .collect();
    findings.push(match (usable.is_empty(), port.port.link_layer) {
        (false, _) => Finding::ok(about, format!("addresses: {}", usable.join(", "))),
        (true, LinkLayer::Infiniband) => {
            let hint = "see whether a subnet manager runs (`sminfo`)";
            Finding::fail(about, "has no address", hint)
        }
        (true, _) => {
            let hint = format!(
                "give the interface an address (`ip address add A.B.C.D/N dev {interface}`), and see that \
                 the driver has RoCE version 2 on"
            );
            Finding::fail(about, "has no address of RoCE version 2", hint)
        }
    });
}

fn judge_mtu(about: &str, interface: &str, port: &InventoryPort) -> Finding {
    let Some(mtu) = port.port.mtu else {
        let hint = "update the driver";
        return Finding::fail(about, "reports no MTU", hint);
    };
    let mtu = mtu.bytes();
    let text = format!("has a link; packets carry {mtu} bytes");
    let possible = port.port.mtu_max.map_or(mtu, |mtu| mtu.bytes());
    if mtu >= MTU_GOOD_BYTES.min(possible) {
        return Finding::ok(about, text);
    }
    let set = port
        .interface_mtu
        .map_or_else(String::new, |mtu| format!(", it has {mtu} now"));
    let hint = format!(
        "set the interface, and the switches, to packets of {INTERFACE_MTU_GOOD} bytes or more (`ip link \
         set {interface} mtu 9000`){set}"
    );
    Finding::warn(about, text, hint)
}

fn judge_address(inventory: &Inventory, address: IpAddr) -> Finding {
    let about = format!("address {address}");
    match choose(inventory, address) {
        Ok(choice) => Finding::ok(about, format!("is {choice}")),
        Err(unfit) => {
            let hint = match unfit {
                RdmaUnavailable::NoAddress { .. } => {
                    "give the node a data address that an RDMA port has, or give the port's interface that \
                     address"
                }
                _ => "see above",
            };
            Finding::fail(about, unfit.to_string(), hint)
        }
    }
}

fn judge_pinning(pinning: Pinning) -> Finding {
    let about = "pinned memory";
    match pinning.bytes() {
        None => Finding::ok(about, "no limit for this user"),
        Some(bytes) => {
            let text = format!("this user may pin {} MiB", bytes >> 20);
            let hint = "guests' memory is pinned whole: LimitMEMLOCK=infinity in the service's unit, or \
                        `ulimit -l unlimited`";
            Finding::warn(about, text, hint)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{device, gid, inventory};
    use super::super::verbs::address::Mtu;
    use super::super::verbs::gid::GidKind;
    use super::*;

    const ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));

    fn card() -> InventoryDevice {
        let mut card = device("mlx5_0");
        card.gids(vec![gid(3, "::ffff:10.0.0.1", GidKind::RoceV2)]);
        card
    }

    /// Of a machine with one card, changed like this: what is not good.
    fn wrong(change: fn(&mut Found)) -> Vec<Finding> {
        let mut card = card();
        change(card.found.as_mut().unwrap());
        let all = judge(&inventory(vec![card]), Some(ADDRESS)).into_iter();
        all.filter(|finding| finding.verdict != Verdict::Ok)
            .collect()
    }

    #[test]
    fn a_machine_that_has_everything_is_good() {
        assert_eq!(wrong(|_| ()), []);
        let findings = judge(&inventory(vec![card()]), Some(ADDRESS));
        assert_eq!(
            findings.len(),
            5,
            "device, link, addresses, address, pinning"
        );
        assert!(findings.iter().all(|finding| finding.hint.is_empty()));
    }

    #[test]
    fn the_machine_fails_only_if_no_port_can_be_used() {
        let verdict = |usable, findings: &[Finding]| {
            let findings = findings.to_vec();
            Checked { findings, usable }.verdict()
        };
        let (ok, warn) = (Finding::ok("a", "b"), Finding::warn("a", "b", "c"));
        let fail = Finding::fail("a", "b", "c");
        assert_eq!(verdict(true, std::slice::from_ref(&ok)), Verdict::Ok);
        assert_eq!(verdict(true, &[ok.clone(), warn]), Verdict::Warn);
        assert_eq!(verdict(true, &[ok.clone(), fail]), Verdict::Warn);
        assert_eq!(verdict(false, &[ok]), Verdict::Fail);
    }

    #[test]
    fn whatever_is_wrong_names_the_culprit_and_the_hint() {
        let expect = |change, about: &str, verdict, hint: &str| {
            let wrong = wrong(change);
            let finding = wrong.iter().find(|finding| finding.about == about);
            let finding = finding.unwrap_or_else(|| panic!("{about}: {wrong:?}"));
            assert_eq!(finding.verdict, verdict, "{finding:?}");
            assert!(finding.hint.contains(hint), "{finding:?}");
        };
        let port = "mlx5_0 port 1";
        expect(
            |found| found.ports[0].port.state = PortState::Down,
            port,
            Verdict::Fail,
            "ip link set eth0 up",
        );
        expect(
            |found| found.ports[0].port.state = PortState::Starting,
            port,
            Verdict::Fail,
            "subnet manager",
        );
        expect(
            |found| {
                found.ports[0].port.mtu = Some(Mtu::B1024);
                found.ports[0].interface_mtu = Some(1500);
            },
            port,
            Verdict::Warn,
            "mtu 9000`), it has 1500 now",
        );
        expect(
            |found| found.ports[0].gids.clear(),
            port,
            Verdict::Fail,
            "ip address add",
        );
        expect(
            |found| found.limits.window_kinds.any = false,
            "mlx5_0",
            Verdict::Fail,
            "TCP is used",
        );
        expect(
            |found| found.limits.vendor = VENDOR_RXE,
            "mlx5_0",
            Verdict::Warn,
            "use a card",
        );
        expect(
            |found| found.ports[0].gids[0].gid = "fe80::1".parse().unwrap(),
            "address 10.0.0.1",
            Verdict::Fail,
            "give the node a data address",
        );
    }

    #[test]
    fn no_device_a_broken_one_and_too_little_memory_are_told() {
        let [none, _] = &judge(&inventory(vec![]), Some(ADDRESS))[..] else {
            panic!("no device and no more than that");
        };
        assert_eq!(none.verdict, Verdict::Fail);
        assert!(none.hint.contains("rdma_rxe"));
        let mut broken = card();
        broken.found = Err("open mlx5_0: no".to_owned());
        let findings = judge(&inventory(vec![broken]), None);
        assert_eq!(
            (findings[0].verdict, &*findings[0].text),
            (Verdict::Fail, "open mlx5_0: no")
        );
        let mut limited = inventory(vec![card()]);
        limited.pinning.limit_bytes = Some(8 << 20);
        let findings = judge(&limited, None);
        let last = findings.last().unwrap();
        assert_eq!(last.verdict, Verdict::Warn);
        assert!(last.text.contains("8 MiB") && last.hint.contains("LimitMEMLOCK"));
    }
}
