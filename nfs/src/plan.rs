//! What an export is, and how the kernel's NFS server is told of it.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Most networks of clients of one export; more are refused.
pub const CLIENTS_MAX: usize = 64;

/// Why a network or an address is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Not an address, or not a length of a prefix.
    #[error("'{0}' is no network: write it like 10.0.0.0/24, or 10.0.0.7 for one client")]
    Network(String),
    /// Bits beyond the prefix.
    #[error("'{given}' has bits set beyond its prefix: did you mean {meant}?")]
    HostBits {
        /// What was given.
        given: String,
        /// The network that it lies in.
        meant: String,
    },
    /// Not an IPv4 address with a prefix.
    #[error("'{0}' is no floating address: write it like 10.0.0.9/24 (IPv4)")]
    Address(String),
    /// An address that no machine of a network has.
    #[error("'{0}' cannot be the address of a machine: choose a free one in its network")]
    NoHost(String),
}

/// A network that clients are in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Network {
    address: IpAddr,
    prefix: u8,
}

impl Network {
    fn bits(address: IpAddr) -> (u128, u8) {
        match address {
            IpAddr::V4(v4) => (u128::from(u32::from(v4)), 32),
            IpAddr::V6(v6) => (u128::from(v6), 128),
        }
    }

    /// The same address without the bits beyond the prefix.
    fn masked(self) -> Self {
        let (bits, width) = Self::bits(self.address);
        let beyond = u32::from(width - self.prefix);
        let kept = bits
            .checked_shr(beyond)
            .unwrap_or(0)
            .checked_shl(beyond)
            .unwrap_or(0);
        let address = match self.address {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::from(u32::try_from(kept).unwrap_or(0))),
            IpAddr::V6(_) => IpAddr::V6(kept.into()),
        };
        Self { address, ..self }
    }
}

impl FromStr for Network {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<Self, PlanError> {
        let bad = || PlanError::Network(text.to_owned());
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| bad())?;
        let (_, width) = Self::bits(address);
        let prefix = match prefix {
            // "+8" and "08" are numbers to the standard library.
            Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
                digits.parse().map_err(|_| bad())?
            }
            Some(_) => return Err(bad()),
            None => width,
        };
        if prefix > width {
            return Err(bad());
        }
        let network = Self { address, prefix };
        match network.masked() == network {
            true => Ok(network),
            false => Err(PlanError::HostBits {
                given: text.to_owned(),
                meant: network.masked().to_string(),
            }),
        }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

/// An address that follows its export from NFS node to NFS node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct FloatingAddress {
    /// The address.
    pub ip: Ipv4Addr,
    /// Length of the prefix of its network.
    pub prefix: u8,
}

impl FloatingAddress {
    /// The network that it lies in.
    #[must_use]
    pub fn network(&self) -> Network {
        Network {
            address: IpAddr::V4(self.ip),
            prefix: self.prefix,
        }
        .masked()
    }

    /// Whether another address lies in the same network.
    #[must_use]
    pub fn is_beside(&self, other: Ipv4Addr) -> bool {
        let other = Network {
            address: IpAddr::V4(other),
            prefix: self.prefix,
        };
        other.masked() == self.network()
    }
}

impl FromStr for FloatingAddress {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<Self, PlanError> {
        let bad = || PlanError::Address(text.to_owned());
        let (ip, prefix) = text.split_once('/').ok_or_else(bad)?;
        let ip: Ipv4Addr = ip.parse().map_err(|_| bad())?;
        if prefix.is_empty() || !prefix.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(bad());
        }
        let prefix: u8 = prefix.parse().map_err(|_| bad())?;
        if prefix == 0 || prefix > 32 {
            return Err(bad());
        }
        let address = Self { ip, prefix };
        let host_bits = u32::MAX.checked_shr(u32::from(prefix)).unwrap_or(0);
        let host = u32::from(ip) & host_bits;
        // In networks of one or two machines every address is a machine's (RFC 3021).
        let is_host = prefix >= 31 || (host != 0 && host != host_bits);
        match is_host && !ip.is_multicast() && !ip.is_loopback() && !ip.is_unspecified() {
            true => Ok(address),
            false => Err(PlanError::NoHost(text.to_owned())),
        }
    }
}

impl fmt::Display for FloatingAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.ip, self.prefix)
    }
}

macro_rules! as_text {
    ($($name:ident),*) => {$(
        impl TryFrom<String> for $name {
            type Error = PlanError;

            fn try_from(text: String) -> Result<Self, PlanError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(value: $name) -> Self {
                value.to_string()
            }
        }
    )*};
}
as_text!(Network, FloatingAddress);

/// An export, as the helper is told of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportPlan {
    /// Its name: clients mount `ADDRESS:/NAME`.
    pub name: String,
    /// Name of its volume, which is a block device of this machine.
    pub volume: String,
    /// Identity of its file system towards clients: the same on every NFS node, so that what they have open
    /// stays valid.
    pub fsid: String,
    /// Who may mount it.
    pub clients: Vec<Network>,
    /// Clients may only read.
    pub read_only: bool,
    /// What a client's root does is done as nobody.
    pub root_squash: bool,
    /// The address that clients use.
    pub address: Option<FloatingAddress>,
}

impl ExportPlan {
    /// Options of the kernel's NFS server, as exportfs(8) takes them.
    #[must_use]
    pub fn options(&self) -> String {
        let access = if self.read_only { "ro" } else { "rw" };
        let root = match self.root_squash {
            true => "root_squash",
            false => "no_root_squash",
        };
        // The root of the file system is exported, so there is no subtree to check.
        format!(
            "{access},sync,no_subtree_check,sec=sys,{root},fsid={}",
            self.fsid
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_are_taken_and_written_alike() {
        for (given, meant) in [
            ("10.0.0.0/24", "10.0.0.0/24"),
            ("10.0.0.7", "10.0.0.7/32"),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("fd00::/8", "fd00::/8"),
            ("::1", "::1/128"),
        ] {
            assert_eq!(given.parse::<Network>().unwrap().to_string(), meant);
        }
    }

    #[test]
    fn what_is_no_network_is_refused_with_a_hint() {
        for bad in [
            "",
            "10.0.0",
            "10.0.0.0/33",
            "10.0.0.0/",
            "host",
            "10.0.0.0/+8",
            "a/8",
            "*",
        ] {
            let told = bad.parse::<Network>().unwrap_err();
            assert_eq!(told, PlanError::Network(bad.to_owned()));
        }
        let told = "10.0.0.7/24".parse::<Network>().unwrap_err().to_string();
        assert!(told.contains("10.0.0.0/24"), "{told}");
    }

    #[test]
    fn a_floating_address_is_that_of_a_machine() {
        let address: FloatingAddress = "10.9.0.50/24".parse().unwrap();
        assert_eq!(address.network().to_string(), "10.9.0.0/24");
        assert!(address.is_beside("10.9.0.1".parse().unwrap()));
        assert!(!address.is_beside("10.9.1.1".parse().unwrap()));
        for bad in [
            "10.0.0.9",
            "10.0.0.9/0",
            "10.0.0.9/33",
            "fd00::1/64",
            "x/24",
            "10.0.0.9/",
        ] {
            assert!(
                matches!(bad.parse::<FloatingAddress>(), Err(PlanError::Address(_))),
                "{bad}"
            );
        }
        for bad in [
            "10.0.0.0/24",
            "10.0.0.255/24",
            "127.0.0.1/8",
            "224.0.0.1/24",
        ] {
            assert!(
                matches!(bad.parse::<FloatingAddress>(), Err(PlanError::NoHost(_))),
                "{bad}"
            );
        }
        assert!("10.0.0.9/32".parse::<FloatingAddress>().is_ok());
    }

    #[test]
    fn options_say_who_may_do_what() {
        let mut plan = ExportPlan {
            name: "data".into(),
            volume: "data".into(),
            fsid: "00000000-0000-0000-0000-000000000001".into(),
            clients: Vec::new(),
            read_only: false,
            root_squash: true,
            address: None,
        };
        assert_eq!(
            plan.options(),
            "rw,sync,no_subtree_check,sec=sys,root_squash,fsid=00000000-0000-0000-0000-000000000001"
        );
        (plan.read_only, plan.root_squash) = (true, false);
        assert!(
            plan.options()
                .starts_with("ro,sync,no_subtree_check,sec=sys,no_root_squash,")
        );
    }
}
