//! Addresses of ports.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// Address of a port: on Ethernet made of an IP address of its interface, on InfiniBand of subnet and port.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Gid([u8; 16]);

impl Gid {
    /// From its bytes on the wire.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// As on the wire.
    pub const fn bytes(self) -> [u8; 16] {
        self.0
    }

    /// Whether it stands for an empty entry of the table.
    pub fn is_empty(self) -> bool {
        self.0 == [0; 16]
    }

    /// The IPv4 address that it was made of, if it was.
    pub fn ipv4(self) -> Option<Ipv4Addr> {
        Ipv6Addr::from(self.0).to_ipv4_mapped()
    }

    /// Whether it was made of an address that is valid on one network only. What was made of the card's own
    /// address looks like that, too.
    pub fn is_link_local(self) -> bool {
        Ipv6Addr::from(self.0).is_unicast_link_local()
    }
}

impl From<Ipv4Addr> for Gid {
    fn from(address: Ipv4Addr) -> Self {
        Self(address.to_ipv6_mapped().octets())
    }
}

impl From<Ipv6Addr> for Gid {
    fn from(address: Ipv6Addr) -> Self {
        Self(address.octets())
    }
}

/// Written as in sysfs: eight groups of four digits, none left out.
impl fmt::Display for Gid {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, group) in Ipv6Addr::from(self.0).segments().iter().enumerate() {
            let colon = if index == 0 { "" } else { ":" };
            write!(formatter, "{colon}{group:04x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Gid({self})")
    }
}

/// Text that is no GID.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a GID: expected eight groups of hexadecimal digits between colons")]
pub struct NotAGid(String);

/// Reads what sysfs and `rdma` show, and every other way to write an IPv6 address.
impl FromStr for Gid {
    type Err = NotAGid;

    fn from_str(text: &str) -> Result<Self, NotAGid> {
        text.trim()
            .parse::<Ipv6Addr>()
            .map(Self::from)
            .map_err(|_| NotAGid(text.to_owned()))
    }
}

/// How packets to a GID are framed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GidKind {
    /// InfiniBand, or directly in Ethernet frames, which do not leave the network: RoCE version 1.
    InfinibandOrRoceV1,
    /// In UDP, which routers forward: RoCE version 2.
    RoceV2,
}

/// Reads what the kernel shows in `gid_attrs/types`.
impl FromStr for GidKind {
    type Err = UnknownGidKind;

    fn from_str(text: &str) -> Result<Self, UnknownGidKind> {
        match text.trim() {
            "IB/RoCE v1" => Ok(Self::InfinibandOrRoceV1),
            "RoCE v2" => Ok(Self::RoceV2),
            other => Err(UnknownGidKind(other.to_owned())),
        }
    }
}

impl fmt::Display for GidKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::InfinibandOrRoceV1 => "IB/RoCE v1",
            Self::RoceV2 => "RoCE v2",
        })
    }
}

/// A kind of GID that this version does not know.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no kind of GID that is known")]
pub struct UnknownGidKind(String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_are_written_in_full_and_read_again() {
        let text = "fe80:0000:0000:0000:5054:00ff:fe00:0001";
        let gid: Gid = text.parse().unwrap();
        assert_eq!(gid.to_string(), text);
        assert!(gid.is_link_local());
        assert_eq!(gid.ipv4(), None);
        assert_eq!("fe80::5054:ff:fe00:1\n".parse::<Gid>().unwrap(), gid);
    }

    #[test]
    fn gid_of_an_ipv4_address_gives_it_back() {
        let address = Ipv4Addr::new(10, 77, 0, 1);
        let gid = Gid::from(address);
        assert_eq!(gid.to_string(), "0000:0000:0000:0000:0000:ffff:0a4d:0001");
        assert_eq!(gid.ipv4(), Some(address));
        assert!(!gid.is_empty());
    }

    #[test]
    fn what_is_no_gid_is_refused_and_quoted() {
        for text in ["", "10.77.0.1", "fe80", "fe80::1::2", "fe80::5054:zz"] {
            let error = text.parse::<Gid>().unwrap_err();
            assert!(error.to_string().contains(&format!("{text:?}")), "{error}");
        }
        assert!(Gid::default().is_empty());
    }

    #[test]
    fn kinds_are_written_as_the_kernel_writes_them() {
        for kind in [GidKind::InfinibandOrRoceV1, GidKind::RoceV2] {
            assert_eq!(format!("{kind}\n").parse(), Ok(kind));
        }
        assert!("RoCE v3".parse::<GidKind>().is_err());
    }
}
