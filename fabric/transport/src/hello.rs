//! What both ends say of themselves before the first frame, under TLS in either wire mode.
//!
//! The side that connects says hello, the other answers with the same structure: what both can do, or why it
//! refuses. The first 96 bytes stay as they are in all versions of the protocol, so that two releases can at
//! least tell each other their numbers.

use std::ops::RangeInclusive;

use fabric_types::{Incarnation, NodeId};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::frame::{Key, PAYLOAD_BYTES_MAX};

/// First bytes of a hello.
pub const MAGIC: [u8; 4] = *b"PSTH";

/// Versions of the protocol that this release speaks. Version 1 is that of the first release; a later release
/// speaks the version before, too.
pub const VERSIONS: RangeInclusive<u16> = 1..=1;

/// Requests that a connection may have unanswered; further ones wait with the client.
pub const CREDIT_REQUESTS: u32 = 512;

/// Bytes of payload, of requests and replies together, that a connection may have unanswered; what does not
/// fit waits with the client.
pub const CREDIT_BYTES: u32 = 16 << 20;

/// How data travels once both ends know each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wire {
    /// All bytes under TLS.
    #[default]
    Tls,
    /// Plain, with checksums. For a storage network that is trusted: who can change bytes on it can change
    /// data, who can read, reads them. Used only if both ends are set to it.
    Crc,
}

/// What one end says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// Oldest and newest version spoken; the same in an answer.
    pub versions: (u16, u16),
    /// The cluster.
    pub cluster: [u8; 16],
    /// Who speaks.
    pub node: NodeId,
    /// Whom it means to speak to.
    pub to: NodeId,
    /// Which start of it.
    pub incarnation: Incarnation,
    /// What it is set to; in an answer, what holds.
    pub wire: Wire,
    /// Requests it takes unanswered.
    pub credit_requests: u32,
    /// Bytes it takes unanswered.
    pub credit_bytes: u32,
    /// The key of the frames that it sends.
    pub key: Key,
    /// In an answer: why not.
    pub refusal: Option<Refused>,
}

/// Why a connection is refused by the side that was connected to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Another cluster.
    #[error("the peer belongs to another cluster")]
    Cluster,
    /// No version in common.
    #[error(
        "the peer speaks no protocol version that this release speaks; upgrade the older node first"
    )]
    Version,
    /// The node meant lives elsewhere.
    #[error("another node answers at this address; check the addresses of the nodes")]
    Node,
    /// The certificate is another node's.
    #[error("the certificate does not name the node that presents it")]
    Certificate,
    /// Too many connections, or it is stopping.
    #[error("the peer takes no more connections")]
    Busy,
    /// The node that connects is not in the peer's cluster map.
    #[error(
        "the peer's cluster map does not have this node, or not this start of it: it was removed from the \
         cluster, or the peer is behind"
    )]
    NotMember,
    /// A newer start of it is registered.
    #[error("a newer start of this node is registered with the cluster")]
    FormerStart,
}

const REFUSALS: [Refused; 7] = [
    Refused::Cluster,
    Refused::Version,
    Refused::Node,
    Refused::Certificate,
    Refused::Busy,
    Refused::NotMember,
    Refused::FormerStart,
];

/// | offset | size | field |
/// |---|---|---|
/// | 0 | 4 | magic |
/// | 4 | 2 | oldest version |
/// | 6 | 2 | newest version |
/// | 8 | 16 | cluster |
/// | 24 | 8 | node that speaks |
/// | 32 | 8 | node meant |
/// | 40 | 8 | incarnation |
/// | 48 | 1 | wire: 1 tls, 2 crc |
/// | 49 | 1 | 0, or refused: 1 cluster, 2 version, 3 node, 4 certificate, 5 busy, 6 no member, 7 old start |
/// | 50 | 2 | zero |
/// | 52 | 4 | requests it takes unanswered |
/// | 56 | 4 | bytes it takes unanswered |
/// | 60 | 4 | zero |
/// | 64 | 16 | key of its frames |
/// | 80 | 16 | zero; a reader does not look |
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct HelloBytes {
    magic: [u8; 4],
    oldest: U16,
    newest: U16,
    cluster: [u8; 16],
    node: U64,
    to: U64,
    incarnation: U64,
    wire: u8,
    refusal: u8,
    zero: [u8; 2],
    credit_requests: U32,
    credit_bytes: U32,
    zero_too: [u8; 4],
    key: [u8; 16],
    reserved: [u8; 16],
}

/// Bytes of a hello.
pub const HELLO_BYTES: usize = size_of::<HelloBytes>();

const _: () = assert!(HELLO_BYTES == 96);

/// What is wrong with a hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    /// The bytes do not begin as one.
    #[error("not a Penstock node")]
    NotOurs,
    /// A field has a value that no peer sends.
    #[error("hello field `{0}` has an impossible value")]
    Field(&'static str),
}

impl Hello {
    /// The wire form.
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let refusal = REFUSALS.iter().position(|r| Some(*r) == self.refusal);
        let bytes = HelloBytes {
            magic: MAGIC,
            oldest: self.versions.0.into(),
            newest: self.versions.1.into(),
            cluster: self.cluster,
            node: self.node.0.into(),
            to: self.to.0.into(),
            incarnation: self.incarnation.0.into(),
            wire: match self.wire {
                Wire::Tls => 1,
                Wire::Crc => 2,
            },
            refusal: refusal.map_or(0, |at| at as u8 + 1),
            zero: [0; 2],
            credit_requests: self.credit_requests.into(),
            credit_bytes: self.credit_bytes.into(),
            zero_too: [0; 4],
            key: self.key,
            reserved: [0; 16],
        };
        zerocopy::transmute!(bytes)
    }

    /// Reads a hello.
    pub fn parse(bytes: &[u8; HELLO_BYTES]) -> Result<Self, HelloError> {
        let bytes: &HelloBytes = zerocopy::transmute_ref!(bytes);
        if bytes.magic != MAGIC {
            return Err(HelloError::NotOurs);
        }
        let versions = (bytes.oldest.get(), bytes.newest.get());
        if versions.0 > versions.1 {
            return Err(HelloError::Field("versions"));
        }
        let wire = match bytes.wire {
            1 => Wire::Tls,
            2 => Wire::Crc,
            _ => return Err(HelloError::Field("wire")),
        };
        let refusal = match bytes.refusal {
            0 => None,
            code => match REFUSALS.get(usize::from(code) - 1) {
                Some(refusal) => Some(*refusal),
                None => return Err(HelloError::Field("refusal")),
            },
        };
        let (credit_requests, credit_bytes) =
            (bytes.credit_requests.get(), bytes.credit_bytes.get());
        // Less would leave the largest request waiting for ever.
        if credit_requests == 0 || credit_bytes < PAYLOAD_BYTES_MAX {
            return Err(HelloError::Field("credits"));
        }
        Ok(Self {
            versions,
            cluster: bytes.cluster,
            node: NodeId(bytes.node.get()),
            to: NodeId(bytes.to.get()),
            incarnation: Incarnation(bytes.incarnation.get()),
            wire,
            credit_requests,
            credit_bytes,
            key: bytes.key,
            refusal,
        })
    }

    /// The answer of `self`, who was connected to, to what `peer` says. `certified` tells whether the peer's
    /// certificate names a node.
    pub fn answer(&self, peer: &Self, certified: impl FnOnce(NodeId) -> bool) -> Self {
        let refusal = if peer.cluster != self.cluster {
            Some(Refused::Cluster)
        } else if self.common_version(peer).is_none() {
            Some(Refused::Version)
        } else if peer.to != self.node {
            Some(Refused::Node)
        } else if !certified(peer.node) {
            Some(Refused::Certificate)
        } else {
            None
        };
        let version = self.common_version(peer);
        // The stricter of the two, so that a cluster changes over node by node.
        let wire = match (self.wire, peer.wire) {
            (Wire::Crc, Wire::Crc) => Wire::Crc,
            _ => Wire::Tls,
        };
        Self {
            versions: version.map_or(self.versions, |v| (v, v)),
            to: peer.node,
            wire,
            refusal,
            ..*self
        }
    }

    /// Checks the answer that `self`, who connected, was given.
    pub fn accept(&self, answer: &Self) -> Result<(), Refused> {
        if let Some(refusal) = answer.refusal {
            return Err(refusal);
        }
        let (version, same) = answer.versions;
        let known = version == same && (self.versions.0..=self.versions.1).contains(&version);
        // A peer that calls plain what we want encrypted does not follow the rules above.
        let too_lax = answer.wire == Wire::Crc && self.wire == Wire::Tls;
        if answer.cluster != self.cluster {
            Err(Refused::Cluster)
        } else if !known || too_lax {
            Err(Refused::Version)
        } else if answer.node != self.to {
            Err(Refused::Node)
        } else {
            Ok(())
        }
    }

    /// The newest version that both speak.
    fn common_version(&self, peer: &Self) -> Option<u16> {
        let version = self.versions.1.min(peer.versions.1);
        (version >= self.versions.0.max(peer.versions.0)).then_some(version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(node: u64, to: u64) -> Hello {
        Hello {
            versions: (1, 3),
            cluster: [7; 16],
            node: NodeId(node),
            to: NodeId(to),
            incarnation: Incarnation(node * 10),
            wire: Wire::Crc,
            credit_requests: 5,
            credit_bytes: PAYLOAD_BYTES_MAX,
            key: [3; 16],
            refusal: None,
        }
    }

    #[test]
    fn a_hello_comes_back_as_it_was_sent() {
        for refusal in [None].into_iter().chain(REFUSALS.map(Some)) {
            let hello = Hello {
                refusal,
                ..hello(1, 2)
            };
            assert_eq!(Hello::parse(&hello.encode()), Ok(hello));
        }
    }

    #[test]
    fn the_newest_common_version_is_taken() {
        let (client, server) = (hello(1, 2), hello(2, 0));
        let older = Hello {
            versions: (1, 2),
            ..server
        };
        let answer = older.answer(&client, |_| true);
        assert_eq!(answer.versions, (2, 2));
        assert_eq!(client.accept(&answer), Ok(()));
        let newer = Hello {
            versions: (4, 5),
            ..server
        };
        let answer = newer.answer(&client, |_| true);
        assert_eq!(client.accept(&answer), Err(Refused::Version));
    }

    #[test]
    fn tls_holds_if_one_end_wants_it() {
        let (client, server) = (hello(1, 2), hello(2, 0));
        let strict = Hello {
            wire: Wire::Tls,
            ..server
        };
        assert_eq!(server.answer(&client, |_| true).wire, Wire::Crc);
        assert_eq!(strict.answer(&client, |_| true).wire, Wire::Tls);
        let strict = Hello {
            wire: Wire::Tls,
            ..client
        };
        let lax = Hello {
            wire: Wire::Crc,
            ..server.answer(&strict, |_| true)
        };
        assert_eq!(strict.accept(&lax), Err(Refused::Version));
    }

    #[test]
    fn strangers_are_refused() {
        let (client, server) = (hello(1, 2), hello(2, 0));
        let refusal = |server: &Hello, client: &Hello, certified: bool| {
            let answer = server.answer(client, |node| certified && node == client.node);
            client.accept(&answer)
        };
        assert_eq!(refusal(&server, &client, true), Ok(()));
        let other = Hello {
            cluster: [8; 16],
            ..client
        };
        assert_eq!(refusal(&server, &other, true), Err(Refused::Cluster));
        let elsewhere = Hello {
            to: NodeId(9),
            ..client
        };
        assert_eq!(refusal(&server, &elsewhere, true), Err(Refused::Node));
        assert_eq!(refusal(&server, &client, false), Err(Refused::Certificate));
        let impostor = Hello {
            node: NodeId(9),
            ..server.answer(&client, |_| true)
        };
        assert_eq!(client.accept(&impostor), Err(Refused::Node));
    }
}
