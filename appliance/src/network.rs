//! The network: version 2 of cloud-init's network-config (netplan's format) as far as an appliance has a use
//! for it, and the files of systemd-networkd that it becomes.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::IpAddr;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use crate::seed::is_word;

/// Cards by name, and how they are set up.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// Of the format: 2.
    pub version: u8,
    /// By the card's name, or by any name if there is a `match`.
    pub ethernets: BTreeMap<String, Ethernet>,
}

/// One card.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ethernet {
    /// Which card it is, if not the one of the name.
    #[serde(rename = "match")]
    pub matches: Option<Match>,
    /// Whether it asks for an IPv4 address.
    #[serde(default)]
    pub dhcp4: bool,
    /// Likewise, IPv6.
    #[serde(default)]
    pub dhcp6: bool,
    /// Addresses with prefixes, like `10.0.0.1/24`.
    #[serde(default)]
    pub addresses: Vec<String>,
    /// Older word for a default route.
    pub gateway4: Option<IpAddr>,
    /// Routes.
    #[serde(default)]
    pub routes: Vec<Route>,
    /// Servers of names.
    #[serde(default)]
    pub nameservers: Nameservers,
    /// Largest packet, in bytes.
    pub mtu: Option<u32>,
}

/// What a card is known by.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Match {
    /// Its name, with `*` for any text.
    pub name: Option<String>,
    /// Its hardware address.
    pub macaddress: Option<String>,
}

/// A route.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Route {
    /// `default`, or a network like `10.1.0.0/16`.
    pub to: String,
    /// The next machine on the way.
    pub via: IpAddr,
}

/// Servers of names.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nameservers {
    /// Their addresses.
    #[serde(default)]
    pub addresses: Vec<IpAddr>,
    /// Domains that short names are tried in.
    #[serde(default)]
    pub search: Vec<String>,
}

impl Network {
    /// # Errors
    /// A value that makes no sense, which the error names.
    pub(crate) fn check(&self) -> Result<()> {
        ensure!(
            self.version == 2,
            "network: version {} is not understood, only 2",
            self.version
        );
        ensure!(
            !self.ethernets.is_empty(),
            "network: ethernets names no card"
        );
        for (name, card) in &self.ethernets {
            let of_match = card.matches.iter().flat_map(|m| [&m.name, &m.macaddress]);
            let words = of_match
                .flatten()
                .chain([name])
                .chain(&card.nameservers.search);
            for word in words {
                ensure!(
                    is_word(word),
                    "network: '{word}' has characters that it cannot have"
                );
            }
            for address in &card.addresses {
                ensure!(
                    parse_prefix(address).is_some(),
                    "network: '{address}' is no address with a prefix, like 10.0.0.1/24"
                );
            }
            for route in &card.routes {
                ensure!(
                    route.to == "default" || parse_prefix(&route.to).is_some(),
                    "network: '{}' is neither default nor a network like 10.1.0.0/16",
                    route.to
                );
            }
        }
        Ok(())
    }

    /// The first address that is said to be a card's own.
    pub fn first_address(&self) -> Option<IpAddr> {
        let mut addresses = self.ethernets.values().flat_map(|card| &card.addresses);
        addresses
            .find_map(|address| parse_prefix(address))
            .map(|(address, _)| address)
    }

    /// Files for `/run/systemd/network`: name and content (systemd.network(5)).
    pub fn files(&self) -> Vec<(String, String)> {
        let cards = self.ethernets.iter().enumerate();
        cards
            .map(|(at, (name, card))| {
                (format!("{:02}-appliance.network", 10 + at), card.file(name))
            })
            .collect()
    }
}

impl Ethernet {
    fn file(&self, name: &str) -> String {
        let mut text = String::from("[Match]\n");
        match &self.matches {
            None => line(&mut text, "Name", name),
            Some(matches) => {
                if let Some(address) = &matches.macaddress {
                    line(&mut text, "PermanentMACAddress", address);
                }
                if let Some(name) = &matches.name {
                    line(&mut text, "Name", name);
                }
            }
        }
        if let Some(mtu) = self.mtu {
            text.push_str("\n[Link]\n");
            line(&mut text, "MTUBytes", mtu);
        }
        text.push_str("\n[Network]\n");
        let dhcp = match (self.dhcp4, self.dhcp6) {
            (true, true) => "yes",
            (true, false) => "ipv4",
            (false, true) => "ipv6",
            (false, false) => "no",
        };
        line(&mut text, "DHCP", dhcp);
        for address in &self.addresses {
            line(&mut text, "Address", address);
        }
        if let Some(gateway) = self.gateway4 {
            line(&mut text, "Gateway", gateway);
        }
        for server in &self.nameservers.addresses {
            line(&mut text, "DNS", server);
        }
        if !self.nameservers.search.is_empty() {
            line(&mut text, "Domains", self.nameservers.search.join(" "));
        }
        for route in &self.routes {
            text.push_str("\n[Route]\n");
            let to = if route.to == "default" {
                any(route.via)
            } else {
                &route.to
            };
            line(&mut text, "Destination", to);
            line(&mut text, "Gateway", route.via);
        }
        text.push_str(DHCP);
        text
    }
}

/// An address by hardware address: that by the machine's identity changes where the firmware has no UUID.
const DHCP: &str = "\n[DHCPv4]\nClientIdentifier=mac\n";

/// What every card does if nothing is said.
pub fn default_file() -> String {
    format!("[Match]\nType=ether\nKind=!*\n\n[Network]\nDHCP=yes\n{DHCP}")
}

fn line(text: &mut String, key: &str, value: impl std::fmt::Display) {
    // Writing to a string does not fail.
    let _ = writeln!(text, "{key}={value}");
}

fn any(via: IpAddr) -> &'static str {
    if via.is_ipv4() { "0.0.0.0/0" } else { "::/0" }
}

fn parse_prefix(text: &str) -> Option<(IpAddr, u8)> {
    let (address, bits) = text.split_once('/')?;
    let (address, bits): (IpAddr, u8) = (address.parse().ok()?, bits.parse().ok()?);
    let most = if address.is_ipv4() { 32 } else { 128 };
    (bits <= most).then_some((address, bits))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(text: &str) -> Network {
        serde_yaml_ng::from_str(text).expect("a network")
    }

    #[test]
    fn a_static_card_becomes_a_file() {
        let network = network(
            "version: 2\nethernets:\n  lan:\n    match: {macaddress: '52:54:00:00:00:01'}\n    \
             mtu: 9000\n    \
             addresses: [10.0.0.1/24]\n    routes: [{to: default, via: 10.0.0.254}]\n    \
             nameservers: {addresses: [10.0.0.53], search: [farm.example]}\n",
        );
        network.check().expect("it makes sense");
        assert_eq!(network.first_address(), "10.0.0.1".parse().ok());
        let files = network.files();
        assert_eq!(files[0].0, "10-appliance.network");
        assert_eq!(
            files[0].1,
            "[Match]\nPermanentMACAddress=52:54:00:00:00:01\n\n[Link]\nMTUBytes=9000\n\n[Network]\nDHCP=no\n\
             Address=10.0.0.1/24\nDNS=10.0.0.53\nDomains=farm.example\n\n[Route]\nDestination=0.0.0.0/0\n\
             Gateway=10.0.0.254\n\n[DHCPv4]\nClientIdentifier=mac\n"
        );
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        let cases = [
            ("version: 1\nethernets: {e: {}}", "version 1"),
            ("version: 2\nethernets: {}", "no card"),
            (
                "version: 2\nethernets: {e: {addresses: [10.0.0.1]}}",
                "10.0.0.1",
            ),
            (
                "version: 2\nethernets: {e: {addresses: [10.0.0.1/33]}}",
                "10.0.0.1/33",
            ),
            (
                "version: 2\nethernets: {\"e\\n[Network]\": {}}",
                "characters",
            ),
            (
                "version: 2\nethernets: {e: {routes: [{to: all, via: 10.0.0.1}]}}",
                "all",
            ),
        ];
        for (text, word) in cases {
            let refusal = network(text).check().expect_err(text);
            assert!(refusal.to_string().contains(word), "{text}: {refusal}");
        }
    }
}
