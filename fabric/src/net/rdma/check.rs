//! What an operator is told of a machine's RDMA: what is good, what is not, and how to mend it.

use std::net::IpAddr;

use super::choice::{Choice, Unfit, all, choose, is_up, is_usable, lacks, name_of};
use super::survey::{Found, Pinning, Survey, SurveyedDevice, SurveyedPort};
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
    Good,
    /// It works, and could be better.
    Poor,
    /// RDMA does not work because of it.
    Bad,
}

/// Something that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What.
    pub about: String,
    /// How it is.
    pub verdict: Verdict,
    /// What was seen.
    pub told: String,
    /// What to do, if it is not good.
    pub mend: String,
}

impl Finding {
    /// As it should be.
    pub fn good(about: impl Into<String>, told: impl Into<String>) -> Self {
        Self {
            about: about.into(),
            verdict: Verdict::Good,
            told: told.into(),
            mend: String::new(),
        }
    }

    /// It works, and could be better.
    pub fn poor(
        about: impl Into<String>,
        told: impl Into<String>,
        mend: impl Into<String>,
    ) -> Self {
        Self {
            verdict: Verdict::Poor,
            mend: mend.into(),
            ..Self::good(about, told)
        }
    }

    /// RDMA does not work because of it.
    pub fn bad(about: impl Into<String>, told: impl Into<String>, mend: impl Into<String>) -> Self {
        Self {
            verdict: Verdict::Bad,
            ..Self::poor(about, told, mend)
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

/// Looks at this machine, and tries the port out that has this address, or every port that could be used.
pub fn run(address: Option<IpAddr>) -> Checked {
    let survey = match Survey::take() {
        Ok(survey) => survey,
        Err(error) => {
            let finding = Finding::bad("devices", error.to_string(), "see the kernel's log");
            return Checked {
                findings: vec![finding],
                usable: false,
            };
        }
    };
    let mut findings = judge(&survey, address);
    let mut usable = false;
    for choice in candidates(&survey, address) {
        let about = format!("trial of {choice}");
        findings.push(match try_out(&choice) {
            Ok(()) => {
                usable = true;
                let told = "a message, a READ through a memory window, and its refusal once that was closed";
                Finding::good(about, told)
            }
            Err(error) => {
                let mend = "see the kernel's log; a card may need newer firmware, a process more rights";
                Finding::bad(about, error.to_string(), mend)
            }
        });
    }
    Checked { findings, usable }
}

/// What is to be tried out.
fn candidates(survey: &Survey, address: Option<IpAddr>) -> Vec<Choice> {
    match address {
        Some(address) => choose(survey, address).into_iter().collect(),
        None => all(survey),
    }
}

/// All that can be said without trying anything, for a node with this data address.
pub fn judge(survey: &Survey, address: Option<IpAddr>) -> Vec<Finding> {
    let mut findings = Vec::new();
    if survey.devices.is_empty() {
        findings.push(Finding::bad(
            "devices",
            "the kernel shows none",
            "look for the card (`lspci`) and its driver (`rdma link`); to try without a card: `modprobe rdma_rxe` and `rdma link add rxe0 \
             type rxe netdev INTERFACE`",
        ));
    }
    for device in &survey.devices {
        judge_device(device, &mut findings);
    }
    if let Some(address) = address.filter(|_| !survey.devices.is_empty()) {
        findings.push(judge_address(survey, address));
    }
    findings.push(judge_pinning(survey.pinning));
    findings
}

fn judge_device(device: &SurveyedDevice, findings: &mut Vec<Finding>) {
    let found = match &device.found {
        Ok(found) => found,
        Err(error) => {
            let mend = "load ib_uverbs (`modprobe ib_uverbs`), install the package ibverbs-providers, and see who may open \
                        /dev/infiniband/uverbs*";
            findings.push(Finding::bad(&device.name, error, mend));
            return;
        }
    };
    findings.push(match lacks(found) {
        Some(lack) => Finding::bad(
            &device.name,
            lack.to_string(),
            "TCP is used; another card, or newer firmware, may have it",
        ),
        None if found.limits.vendor == VENDOR_RXE => Finding::poor(
            &device.name,
            "is software (rdma_rxe): slower than TCP, and a peer can reach what it was not offered",
            "use a card where data matter",
        ),
        None => Finding::good(&device.name, told_of(found)),
    });
    for port in &found.ports {
        judge_port(&device.name, port, findings);
    }
}

fn told_of(found: &Found) -> String {
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

fn judge_port(device: &str, port: &SurveyedPort, findings: &mut Vec<Finding>) {
    let about = format!("{device} port {}", port.number);
    let interface = port.gids.iter().find_map(|gid| gid.interface.as_deref());
    let interface = interface.unwrap_or("INTERFACE");
    if port.port.state == PortState::Starting {
        let mend = "see whether a subnet manager runs (`sminfo`)";
        findings.push(Finding::bad(
            about,
            "has a link, and waits for its subnet's manager",
            mend,
        ));
        return;
    }
    if !is_up(port) {
        let mend = format!("plug the cable in, and `ip link set {interface} up`");
        findings.push(Finding::bad(about, "has no link", mend));
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
        (false, _) => Finding::good(about, format!("addresses: {}", usable.join(", "))),
        (true, LinkLayer::Infiniband) => {
            let mend = "see whether a subnet manager runs (`sminfo`)";
            Finding::bad(about, "has no address", mend)
        }
        (true, _) => {
            let mend = format!(
                "give the interface an address (`ip address add A.B.C.D/N dev {interface}`), and see that the driver has RoCE version 2 on"
            );
            Finding::bad(about, "has no address of RoCE version 2", mend)
        }
    });
}

fn judge_mtu(about: &str, interface: &str, port: &SurveyedPort) -> Finding {
    let Some(mtu) = port.port.mtu else {
        let mend = "update the driver";
        return Finding::bad(about, "tells no size of packets", mend);
    };
    let mtu = mtu.bytes();
    let told = format!("has a link; packets carry {mtu} bytes");
    let possible = port.port.mtu_max.map_or(mtu, |mtu| mtu.bytes());
    if mtu >= MTU_GOOD_BYTES.min(possible) {
        return Finding::good(about, told);
    }
    let set = port
        .interface_mtu
        .map_or_else(String::new, |mtu| format!(", it has {mtu} now"));
    let mend = format!(
        "set the interface, and the switches, to packets of {INTERFACE_MTU_GOOD} bytes or more (`ip link set {interface} mtu 9000`){set}"
    );
    Finding::poor(about, told, mend)
}

fn judge_address(survey: &Survey, address: IpAddr) -> Finding {
    let about = format!("address {address}");
    match choose(survey, address) {
        Ok(choice) => Finding::good(about, format!("is {choice}")),
        Err(unfit) => {
            let mend = match unfit {
                Unfit::NoAddress { .. } => {
                    "give the node a data address that an RDMA port has, or give the port's interface that address"
                }
                _ => "see above",
            };
            Finding::bad(about, unfit.to_string(), mend)
        }
    }
}

fn judge_pinning(pinning: Pinning) -> Finding {
    let about = "pinned memory";
    match pinning.bytes() {
        None => Finding::good(about, "as much as there is, for whoever runs this"),
        Some(bytes) => {
            let told = format!("whoever runs this may pin {} MiB", bytes >> 20);
            let mend = "guests' memory is pinned whole: LimitMEMLOCK=infinity in the service's unit, or `ulimit -l unlimited`";
            Finding::poor(about, told, mend)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{device, gid, survey};
    use super::super::verbs::address::Mtu;
    use super::super::verbs::gid::GidKind;
    use super::*;

    const ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));

    fn card() -> SurveyedDevice {
        let mut card = device("mlx5_0");
        card.gids(vec![gid(3, "::ffff:10.0.0.1", GidKind::RoceV2)]);
        card
    }

    /// Of a machine with one card, changed like this: what is not good.
    fn wrong(change: fn(&mut Found)) -> Vec<Finding> {
        let mut card = card();
        change(card.found.as_mut().unwrap());
        let all = judge(&survey(vec![card]), Some(ADDRESS)).into_iter();
        all.filter(|finding| finding.verdict != Verdict::Good)
            .collect()
    }

    #[test]
    fn a_machine_that_has_everything_is_good() {
        assert_eq!(wrong(|_| ()), []);
        let findings = judge(&survey(vec![card()]), Some(ADDRESS));
        assert_eq!(
            findings.len(),
            5,
            "device, link, addresses, address, pinning"
        );
        assert!(findings.iter().all(|finding| finding.mend.is_empty()));
    }

    #[test]
    fn whatever_is_wrong_names_the_culprit_and_the_mend() {
        let expect = |change, about: &str, verdict, mend: &str| {
            let wrong = wrong(change);
            let finding = wrong.iter().find(|finding| finding.about == about);
            let finding = finding.unwrap_or_else(|| panic!("{about}: {wrong:?}"));
            assert_eq!(finding.verdict, verdict, "{finding:?}");
            assert!(finding.mend.contains(mend), "{finding:?}");
        };
        let port = "mlx5_0 port 1";
        expect(
            |found| found.ports[0].port.state = PortState::Down,
            port,
            Verdict::Bad,
            "ip link set eth0 up",
        );
        expect(
            |found| found.ports[0].port.state = PortState::Starting,
            port,
            Verdict::Bad,
            "subnet manager",
        );
        expect(
            |found| {
                found.ports[0].port.mtu = Some(Mtu::B1024);
                found.ports[0].interface_mtu = Some(1500);
            },
            port,
            Verdict::Poor,
            "mtu 9000`), it has 1500 now",
        );
        expect(
            |found| found.ports[0].gids.clear(),
            port,
            Verdict::Bad,
            "ip address add",
        );
        expect(
            |found| found.limits.window_kinds.any = false,
            "mlx5_0",
            Verdict::Bad,
            "TCP is used",
        );
        expect(
            |found| found.limits.vendor = VENDOR_RXE,
            "mlx5_0",
            Verdict::Poor,
            "use a card",
        );
        expect(
            |found| found.ports[0].gids[0].gid = "fe80::1".parse().unwrap(),
            "address 10.0.0.1",
            Verdict::Bad,
            "give the node a data address",
        );
    }

    #[test]
    fn no_device_a_broken_one_and_too_little_memory_are_told() {
        let [none, _] = &judge(&survey(vec![]), Some(ADDRESS))[..] else {
            panic!("no device and no more than that");
        };
        assert_eq!(none.verdict, Verdict::Bad);
        assert!(none.mend.contains("rdma_rxe"));
        let mut broken = card();
        broken.found = Err("open mlx5_0: no".to_owned());
        let told = judge(&survey(vec![broken]), None);
        assert_eq!(
            (told[0].verdict, &*told[0].told),
            (Verdict::Bad, "open mlx5_0: no")
        );
        let mut limited = survey(vec![card()]);
        limited.pinning.limit_bytes = Some(8 << 20);
        let told = judge(&limited, None);
        let last = told.last().unwrap();
        assert_eq!(last.verdict, Verdict::Poor);
        assert!(last.told.contains("8 MiB") && last.mend.contains("LimitMEMLOCK"));
    }
}
