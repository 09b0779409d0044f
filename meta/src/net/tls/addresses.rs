//! Addresses at which peers are tried, beside the one that the Raft group records.
//!
//! A node that has moved is recorded at its old address until the leader has registered the new one. Until
//! then others find it by what it announces: it says its own address on each connection that it makes, behind
//! the certificate that proves who it is. Every address is only tried: whoever answers there must show the
//! certificate of the node that is meant.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::ids::NodeId;
use crate::net::AddressSource;

/// Addresses of peers, shared by the connections of all purposes. It has two addresses of each node at most,
/// and only of nodes that have shown a certificate or that such a node has named.
#[derive(Debug, Default)]
pub(super) struct AddressBook(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// Said by the nodes themselves.
    announced: BTreeMap<NodeId, String>,
    /// Said by other nodes, or found by trying the hints.
    told: BTreeMap<NodeId, String>,
    /// Given by the operator, without saying whose they are.
    hints: Vec<String>,
}

impl AddressBook {
    pub(super) fn with_hints(hints: Vec<String>) -> Self {
        Self(Mutex::new(Known {
            hints,
            ..Known::default()
        }))
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // Whole after every statement.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes an address; false if that changes nothing, or if nobody can be reached there.
    pub(super) fn learn(&self, node: NodeId, address: &str, source: AddressSource) -> bool {
        let usable = |address: SocketAddr| address.port() != 0 && !address.ip().is_unspecified();
        if !address.parse().is_ok_and(usable) {
            return false;
        }
        let mut known = self.known();
        let of = match source {
            AddressSource::Itself => &mut known.announced,
            AddressSource::Other => &mut known.told,
        };
        of.insert(node, address.to_owned()).as_deref() != Some(address)
    }

    pub(super) fn forget(&self, node: NodeId) {
        let mut known = self.known();
        known.announced.remove(&node);
        known.told.remove(&node);
    }

    /// Where a node is tried, in this order. A hint that has turned out to be another node's is left out.
    pub(super) fn candidates(&self, node: NodeId, recorded: &str) -> Vec<String> {
        let known = self.known();
        let is_anothers = |hint: &str| {
            let mut all = known.announced.iter().chain(&known.told);
            all.any(|(other, address)| *other != node && address == hint)
        };
        let announced = known.announced.get(&node).map(String::as_str);
        let told = known.told.get(&node).map(String::as_str);
        let hints = known.hints.iter().map(String::as_str);
        let all = announced
            .into_iter()
            .chain([recorded])
            .chain(told)
            .chain(hints.filter(|hint| !is_anothers(hint)));
        let mut candidates: Vec<String> = Vec::new();
        for address in all.filter(|address| !address.is_empty()) {
            if !candidates.iter().any(|known| known == address) {
                candidates.push(address.to_owned());
            }
        }
        candidates
    }

    /// Where a node says to be.
    pub(super) fn announced(&self, node: NodeId) -> Option<String> {
        self.known().announced.get(&node).cloned()
    }

    /// Whether a connection may still lead to the node: to `address`, made when the node said to be at
    /// `announced`.
    pub(super) fn is_current(
        &self,
        node: NodeId,
        recorded: &str,
        (address, announced): (&str, Option<&str>),
    ) -> bool {
        if let Some(now) = self.known().announced.get(&node) {
            return now == address || announced == Some(now);
        }
        address == recorded
            || self
                .candidates(node, recorded)
                .iter()
                .any(|one| one == address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: NodeId = NodeId(2);
    const OTHER: NodeId = NodeId(3);
    const OLD: &str = "10.0.0.2:7470";

    #[test]
    fn a_node_is_tried_first_where_it_said_itself() {
        let book = AddressBook::default();
        assert_eq!(book.candidates(NODE, OLD), [OLD]);
        assert!(book.learn(NODE, "10.0.9.2:7470", AddressSource::Other));
        assert!(book.learn(NODE, "[fd00::2]:7470", AddressSource::Itself));
        assert!(!book.learn(NODE, "[fd00::2]:7470", AddressSource::Itself));
        let all = ["[fd00::2]:7470", OLD, "10.0.9.2:7470"];
        assert_eq!(book.candidates(NODE, OLD), all);
        // Once the group records it there, it is tried there alone.
        book.learn(NODE, "[fd00::2]:7470", AddressSource::Other);
        assert_eq!(book.candidates(NODE, "[fd00::2]:7470"), ["[fd00::2]:7470"]);
        book.forget(NODE);
        assert_eq!(book.candidates(NODE, OLD), [OLD]);
        assert!(book.candidates(NODE, "").is_empty());
    }

    #[test]
    fn a_connection_is_left_when_its_node_says_to_be_elsewhere() {
        let (book, new) = (AddressBook::default(), "10.0.9.2:7470");
        assert!(book.is_current(NODE, OLD, (OLD, None)));
        assert!(
            !book.is_current(NODE, new, (OLD, None)),
            "the group moved it"
        );
        book.learn(NODE, OLD, AddressSource::Itself);
        assert!(book.is_current(NODE, OLD, (OLD, None)), "it is there");
        book.learn(NODE, new, AddressSource::Itself);
        assert!(!book.is_current(NODE, OLD, (OLD, Some(OLD))));
        assert!(book.is_current(NODE, OLD, (new, Some(new))));
        // Behind a forwarder it is reached at another address than it says.
        assert!(book.is_current(NODE, OLD, (OLD, Some(new))));
    }

    #[test]
    fn an_address_at_which_nobody_can_be_is_not_noted() {
        let book = AddressBook::default();
        for address in [
            "",
            "here",
            "10.0.0.2",
            "10.0.0.2:0",
            "0.0.0.0:7470",
            "[::]:7470",
        ] {
            assert!(
                !book.learn(NODE, address, AddressSource::Itself),
                "{address}"
            );
        }
        assert_eq!(book.candidates(NODE, OLD), [OLD]);
    }

    #[test]
    fn a_hint_is_tried_for_every_node_until_one_is_found_there() {
        let hints = ["10.0.9.2:7470", "10.0.9.3:7470"];
        let book = AddressBook::with_hints(hints.map(str::to_owned).to_vec());
        assert_eq!(book.candidates(NODE, OLD), [OLD, hints[0], hints[1]]);
        book.learn(OTHER, hints[1], AddressSource::Other);
        assert_eq!(book.candidates(NODE, OLD), [OLD, hints[0]]);
        assert_eq!(book.candidates(OTHER, ""), [hints[1], hints[0]]);
    }
}
