//! What a node of several is told about its network and its place.

use std::net::{IpAddr, SocketAddr};

use api::failure::{Failure, Result};
use meta::{Name, Role};
use serde::{Deserialize, Serialize};

use super::{Labels, Mistakes};

/// What the configuration and the options say; what is absent is as `init` or `join` found it.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Peers {
    /// Address at which other nodes reach this one.
    pub listen: Option<IpAddr>,
    /// Port for metadata.
    pub control_port: Option<u16>,
    /// Port for data.
    pub data_port: Option<u16>,
    /// Port at which nodes join.
    pub enrol_port: Option<u16>,
    /// How data travel.
    pub wire: Option<Wire>,
    /// By which way they go.
    pub transport: Option<Transport>,
    /// What the node is called.
    pub name: Option<String>,
    /// The machine and the rack that it stands in.
    pub labels: Labels,
    /// What it does.
    pub roles: Option<Vec<RoleName>>,
    /// Further addresses at which peers are tried.
    pub hints: Vec<PeerHint>,
}

/// Largest number of hints; a configuration with more is refused. Each is tried for every node that is not
/// found elsewhere.
pub const HINTS_MAX: usize = 16;

/// An address at which another node may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerHint {
    address: IpAddr,
    port: Option<u16>,
}

impl PeerHint {
    /// Parses `ADDRESS` or `ADDRESS:PORT`.
    fn parse(text: &str) -> Result<Self> {
        let with_port = |at: SocketAddr| (at.ip(), Some(at.port()));
        let parsed = text.parse().map(|address| (address, None));
        let parsed = parsed.or_else(|_| text.parse().map(with_port));
        match parsed {
            Ok((address, port)) if !address.is_unspecified() && port != Some(0) => {
                Ok(Self { address, port })
            }
            _ => Err(Failure::invalid(
                format!("peers: '{text}' is not the address of a node"),
                "give the IP address of another node, like 10.0.0.2, 10.0.0.2:7470 or [fd00::2]:7470",
            )),
        }
    }

    /// Parses the list of the configuration.
    pub fn parse_all(texts: &[String]) -> Result<Vec<Self>> {
        if texts.len() > HINTS_MAX {
            return Err(Failure::invalid(
                format!("peers has {} addresses", texts.len()),
                format!("give at most {HINTS_MAX}: one that leads to another node is enough"),
            ));
        }
        texts.iter().map(|text| Self::parse(text)).collect()
    }

    /// Returns the address with the metadata port, unless it has its own port.
    pub fn control(self, port: u16) -> SocketAddr {
        SocketAddr::new(self.address, self.port.unwrap_or(port))
    }
}

impl std::fmt::Display for PeerHint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.port {
            Some(port) => SocketAddr::new(self.address, port).fmt(f),
            None => self.address.fmt(f),
        }
    }
}

/// How data travel between nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Wire {
    /// Encrypted.
    Tls,
    /// Authenticated at the beginning, then plain with checksums: for a network on which nobody else is.
    Crc,
}

/// By which way data go to nodes that have it, too.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// RDMA, where this node and the peer can; else TCP.
    Auto,
    /// The same, but this node does not start if it cannot.
    Rdma,
    /// TCP.
    #[default]
    Tcp,
}

/// What a node does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum RoleName {
    /// Keeps the cluster's metadata.
    Meta,
    /// Owns devices.
    Storage,
    /// Serves guests.
    Host,
    /// Serves clients outside of guests.
    Nfs,
}

impl From<RoleName> for Role {
    fn from(word: RoleName) -> Self {
        match word {
            RoleName::Meta => Role::Meta,
            RoleName::Storage => Role::Storage,
            RoleName::Host => Role::Host,
            RoleName::Nfs => Role::Nfs,
        }
    }
}

impl From<Role> for RoleName {
    fn from(role: Role) -> Self {
        match role {
            Role::Meta => RoleName::Meta,
            Role::Storage => RoleName::Storage,
            Role::Host => RoleName::Host,
            Role::Nfs => RoleName::Nfs,
        }
    }
}

impl Peers {
    /// Whether anything is said that only a node of several needs.
    pub fn is_told(&self) -> bool {
        *self != Self::default()
    }

    /// Adds the mistakes of values that no node can have.
    pub(super) fn check(&self, wrong: &mut Mistakes) {
        if let Some(listen) = self.listen
            && (listen.is_unspecified() || listen.is_multicast())
        {
            wrong.add(Failure::invalid(
                format!("listen: other nodes cannot reach {listen}"),
                "give the address of this node in the storage network",
            ));
        }
        let names = [&self.name, &self.labels.host, &self.labels.rack];
        for name in names.into_iter().flatten() {
            let parsed = Name::parse(name);
            wrong.keep(parsed.map_err(|e| Failure::invalid(e, "choose another name or label")));
        }
        if self.roles.as_ref().is_some_and(Vec::is_empty) {
            wrong.add(Failure::invalid(
                "roles names no role",
                "give at least one of meta, storage, host, nfs, or leave roles out",
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_node_can_have_is_refused() {
        let ok = Peers {
            listen: Some("10.0.0.1".parse().unwrap()),
            name: Some("one".to_owned()),
            ..Peers::default()
        };
        let found = |peers: &Peers| {
            let mut wrong = Mistakes::default();
            peers.check(&mut wrong);
            wrong.none().err().unwrap_or_default()
        };
        assert!(found(&ok).is_empty() && ok.is_told() && !Peers::default().is_told());
        for listen in ["0.0.0.0", "::", "224.0.0.1"] {
            let listen = Some(listen.parse().unwrap());
            let message = found(&Peers {
                listen,
                ..ok.clone()
            });
            assert!(
                message[0].to_string().contains("cannot reach"),
                "{message:?}"
            );
        }
        let name = Some("not a name".to_owned());
        let unnamed = Peers { name, ..ok };
        assert_eq!(found(&unnamed).len(), 1);
        let roles = Some(Vec::new());
        assert_eq!(found(&Peers { roles, ..unnamed }).len(), 2);
    }

    #[test]
    fn peers_are_addresses_with_a_port_or_without() {
        let parse = |text: &str| PeerHint::parse_all(&[text.to_owned()]);
        for (text, at) in [
            ("10.0.0.2", "10.0.0.2:7470"),
            ("10.0.0.2:1", "10.0.0.2:1"),
            ("fd00::2", "[fd00::2]:7470"),
            ("[fd00::2]:1", "[fd00::2]:1"),
        ] {
            let hint = parse(text).unwrap()[0];
            assert_eq!(hint.control(7470).to_string(), at);
            assert_eq!(hint.to_string(), text);
        }
        for text in [
            "",
            "two",
            "two:7470",
            "0.0.0.0",
            "10.0.0.2:0",
            "10.0.0.2:99999",
        ] {
            let e = parse(text).unwrap_err().to_string();
            assert!(e.contains("10.0.0.2:7470"), "{e}");
        }
        let many = vec!["10.0.0.2".to_owned(); HINTS_MAX + 1];
        assert!(PeerHint::parse_all(&many).is_err());
        assert!(PeerHint::parse_all(&many[1..]).is_ok());
    }
}
