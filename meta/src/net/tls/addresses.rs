//! Addresses of peers in addition to those that the Raft group records.
//!
//! The Raft group records the old address of a node that moved until the leader has registered the new one.
//! Until then peers use what the node announces: it sends its address on each connection that it opens,
//! authenticated by its certificate. An address is only a place to try: the peer there must present the
//! certificate of the expected node.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::ids::NodeId;
use crate::net::AddressSource;

/// Addresses of peers, shared by the connections of all purposes. Holds at most two addresses for each node,
/// and only for nodes that presented a certificate or were named by such a node.
#[derive(Debug, Default)]
pub(super) struct AddressBook(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// Announced by the nodes themselves.
    announced: BTreeMap<NodeId, String>,
    /// Reported by other nodes, or found by trying the hints.
    reported: BTreeMap<NodeId, String>,
    /// Given by the operator without a node number.
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
        // The maps are complete after each statement, so a poisoned lock is safe to use.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores an address. Returns false if it is known already or cannot be used.
    pub(super) fn learn(&self, node: NodeId, address: &str, source: AddressSource) -> bool {
        let usable = |address: SocketAddr| address.port() != 0 && !address.ip().is_unspecified();
        if !address.parse().is_ok_and(usable) {
            return false;
        }
        let mut known = self.known();
        let of = match source {
            AddressSource::Itself => &mut known.announced,
            AddressSource::Other => &mut known.reported,
        };
        of.insert(node, address.to_owned()).as_deref() != Some(address)
    }

    pub(super) fn forget(&self, node: NodeId) {
        let mut known = self.known();
        known.announced.remove(&node);
        known.reported.remove(&node);
    }

    /// Returns the addresses at which a node is tried, in order. A hint that belongs to another node is left
    /// out.
    pub(super) fn candidates(&self, node: NodeId, recorded: &str) -> Vec<String> {
        let known = self.known();
        let is_anothers = |hint: &str| {
            let mut all = known.announced.iter().chain(&known.reported);
            all.any(|(other, address)| *other != node && address == hint)
        };
        let announced = known.announced.get(&node).map(String::as_str);
        let reported = known.reported.get(&node).map(String::as_str);
        let hints = known.hints.iter().map(String::as_str);
        let all = announced
            .into_iter()
            .chain([recorded])
            .chain(reported)
            .chain(hints.filter(|hint| !is_anothers(hint)));
        let mut candidates: Vec<String> = Vec::new();
        for address in all.filter(|address| !address.is_empty()) {
            if !candidates.iter().any(|known| known == address) {
                candidates.push(address.to_owned());
            }
        }
        candidates
    }

    /// Returns the address that a node announces.
    pub(super) fn announced(&self, node: NodeId) -> Option<String> {
        self.known().announced.get(&node).cloned()
    }

    /// Returns whether a connection to `address`, opened when the node announced `announced`, may still lead
    /// to the node.
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
    fn the_address_that_a_node_announces_is_tried_first() {
        let book = AddressBook::default();
        assert_eq!(book.candidates(NODE, OLD), [OLD]);
        assert!(book.learn(NODE, "10.0.9.2:7470", AddressSource::Other));
        assert!(book.learn(NODE, "[fd00::2]:7470", AddressSource::Itself));
        assert!(!book.learn(NODE, "[fd00::2]:7470", AddressSource::Itself));
        let all = ["[fd00::2]:7470", OLD, "10.0.9.2:7470"];
        assert_eq!(book.candidates(NODE, OLD), all);
        // Once the group records that address, it is the only candidate.
        book.learn(NODE, "[fd00::2]:7470", AddressSource::Other);
        assert_eq!(book.candidates(NODE, "[fd00::2]:7470"), ["[fd00::2]:7470"]);
        book.forget(NODE);
        assert_eq!(book.candidates(NODE, OLD), [OLD]);
        assert!(book.candidates(NODE, "").is_empty());
    }

    #[test]
    fn a_connection_is_dropped_when_its_node_announces_another_address() {
        let (book, new) = (AddressBook::default(), "10.0.9.2:7470");
        assert!(book.is_current(NODE, OLD, (OLD, None)));
        assert!(
            !book.is_current(NODE, new, (OLD, None)),
            "the group records another address"
        );
        book.learn(NODE, OLD, AddressSource::Itself);
        assert!(
            book.is_current(NODE, OLD, (OLD, None)),
            "the recorded address"
        );
        book.learn(NODE, new, AddressSource::Itself);
        assert!(!book.is_current(NODE, OLD, (OLD, Some(OLD))));
        assert!(book.is_current(NODE, OLD, (new, Some(new))));
        // Behind a forwarder a node is reached at another address than it announces.
        assert!(book.is_current(NODE, OLD, (OLD, Some(new))));
    }

    #[test]
    fn an_unusable_address_is_not_stored() {
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
    fn a_hint_is_tried_for_every_node_until_its_node_is_known() {
        let hints = ["10.0.9.2:7470", "10.0.9.3:7470"];
        let book = AddressBook::with_hints(hints.map(str::to_owned).to_vec());
        assert_eq!(book.candidates(NODE, OLD), [OLD, hints[0], hints[1]]);
        book.learn(OTHER, hints[1], AddressSource::Other);
        assert_eq!(book.candidates(NODE, OLD), [OLD, hints[0]]);
        assert_eq!(book.candidates(OTHER, ""), [hints[1], hints[0]]);
    }
}
