//! Blocks that replicas in sync could not read when this replica wanted them.
//!
//! Another source may be able to: a round takes over what it can get, fails, and the next one has another
//! source. Once every replica in sync has failed on a block, its data are lost, and a round takes that over,
//! too: this replica then has the block's version and checksum, and cannot read it either. Otherwise it would
//! never be in sync again, unless a guest happens to write that block, and with too few replicas in sync none
//! can. Whoever gets the data back repairs it, see [`Repairs`].
//!
//! [`Repairs`]: crate::repair::queue::Repairs

use std::collections::{BTreeMap, BTreeSet};

use fabric_types::block::BlockStamp;
use fabric_types::membership::Member;
use fabric_types::{Incarnation, NodeId};

use crate::groups::LeafKey;

/// Blocks of a group that are taken note of. A device that reads nothing any more has not lost its data block
/// by block: where more are bad, rounds fail, and the replica waits for an operator to look at the device.
pub(super) const UNREAD_MAX: usize = 4096;

/// A block of a map page.
pub type BlockKey = (LeafKey, u32);

/// Blocks that no replica in sync can read, and what they are by the map.
pub type Lost = BTreeMap<BlockKey, BlockStamp>;

/// The blocks that are known to be unreadable when a round begins.
#[derive(Debug, Default)]
pub struct Unreadable {
    /// By all replicas in sync: their loss is taken over, if they are still the same.
    pub lost: Lost,
    /// On this side: they are taken over even if they agree. A write of a part of such a block that comes
    /// again would be refused for ever otherwise: its version is here, and the rest of the block is not.
    pub here: BTreeSet<BlockKey>,
}

/// Who could not read a block, in rounds that followed each other.
#[derive(Debug)]
struct Tried {
    /// What it was then, by those who know.
    stamp: BlockStamp,
    by: BTreeSet<(NodeId, Incarnation)>,
}

/// See the module. Of one group.
#[derive(Debug, Default)]
pub(super) struct Unread {
    blocks: BTreeMap<BlockKey, Tried>,
}

impl Unread {
    /// A round has ended that a source was compared with to the end: what it could not read is this, and
    /// nothing else.
    pub(super) fn renew(&mut self, source: (NodeId, Incarnation), unread: Lost) {
        for tried in self.blocks.values_mut() {
            tried.by.remove(&source);
        }
        self.note_all(source, unread);
        self.blocks.retain(|_, tried| !tried.by.is_empty());
    }

    /// A round was given up before its end: this is what the source could not read so far.
    pub(super) fn note_all(&mut self, source: (NodeId, Incarnation), unread: Lost) {
        for (key, stamp) in unread {
            self.note(source, key, stamp);
        }
    }

    /// Whether the source has failed on a block.
    pub(super) fn has_failed(&self, source: &Member) -> bool {
        let source = (source.node, source.incarnation);
        self.blocks.values().any(|tried| tried.by.contains(&source))
    }

    /// A source could not read a block that was this.
    fn note(&mut self, source: (NodeId, Incarnation), key: BlockKey, stamp: BlockStamp) {
        let is_known = self.blocks.contains_key(&key);
        if !is_known && self.blocks.len() >= UNREAD_MAX {
            return;
        }
        let tried = self.blocks.entry(key).or_insert_with(|| Tried {
            stamp,
            by: BTreeSet::new(),
        });
        if tried.stamp.is_unknown() {
            tried.stamp = stamp;
        } else if tried.stamp != stamp && !stamp.is_unknown() {
            tried.stamp = stamp;
            tried.by.clear();
        }
        tried.by.insert(source);
    }

    /// Blocks that none of these could read.
    pub(super) fn lost(&self, sources: &[Member]) -> Lost {
        let none = |tried: &Tried| {
            let mut sources = sources.iter();
            sources.all(|one| tried.by.contains(&(one.node, one.incarnation)))
        };
        let lost = self.blocks.iter().filter(|(_, tried)| none(tried));
        lost.map(|(key, tried)| (*key, tried.stamp)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fabric_types::Epoch;
    use fabric_types::ids::LayerId;
    use fabric_types::membership::ReplicaState;

    fn key(block: u32) -> BlockKey {
        let leaf = LeafKey {
            layer: LayerId(1),
            chunk: 2,
            leaf: 3,
        };
        (leaf, block)
    }

    fn stamp(version: u64) -> BlockStamp {
        BlockStamp {
            version,
            crc: 9,
            holds: 2,
        }
    }

    fn sources(starts: &[(u64, u64)]) -> Vec<Member> {
        let member = |(node, incarnation): &(u64, u64)| Member {
            node: NodeId(*node),
            incarnation: Incarnation(*incarnation),
            state: ReplicaState::InSync,
            since: Epoch(1),
        };
        starts.iter().map(member).collect()
    }

    #[test]
    fn block_is_lost_once_all_sources_fail_on_the_same_version() {
        let mut unread = Unread::default();
        let (one, two) = ((NodeId(1), Incarnation(1)), (NodeId(2), Incarnation(1)));
        let both = sources(&[(1, 1), (2, 1)]);
        unread.note(one, key(5), stamp(7));
        assert!(unread.lost(&both).is_empty());
        unread.note(two, key(5), stamp(8));
        assert!(unread.lost(&both).is_empty(), "it was written meanwhile");
        unread.note(one, key(5), stamp(8));
        assert_eq!(unread.lost(&both), Lost::from([(key(5), stamp(8))]));
        // Another start of a process, or another member, may read it.
        assert!(unread.lost(&sources(&[(1, 1), (2, 2)])).is_empty());
        assert!(unread.lost(&sources(&[(1, 1), (2, 1), (3, 1)])).is_empty());
        assert_eq!(unread.lost(&sources(&[(2, 1)])).len(), 1);
    }

    #[test]
    fn what_a_source_can_read_by_now_is_not_held_against_it() {
        let mut unread = Unread::default();
        let one = (NodeId(1), Incarnation(1));
        let only = sources(&[(1, 1)]);
        unread.renew(one, Lost::from([(key(5), stamp(7)), (key(6), stamp(7))]));
        assert!(unread.has_failed(&only[0]));
        unread.renew(one, Lost::from([(key(6), stamp(7))]));
        assert_eq!(unread.lost(&only), Lost::from([(key(6), stamp(7))]));
        // What a round that was given up has seen is added.
        unread.note_all(one, Lost::from([(key(8), stamp(7))]));
        assert_eq!(unread.lost(&only).len(), 2);
        unread.renew(one, Lost::new());
        assert!(!unread.has_failed(&only[0]) && unread.lost(&only).is_empty());
    }

    #[test]
    fn who_does_not_know_a_block_does_not_contradict_who_cannot_read_it() {
        for order in [[1, 2], [2, 1]] {
            let mut unread = Unread::default();
            for node in order {
                let stamp = match node {
                    1 => BlockStamp::UNKNOWN,
                    _ => stamp(7),
                };
                unread.note((NodeId(node), Incarnation(1)), key(3), stamp);
            }
            let lost = unread.lost(&sources(&[(1, 1), (2, 1)]));
            assert_eq!(lost, Lost::from([(key(3), stamp(7))]));
        }
    }

    #[test]
    fn what_is_noted_is_bounded() {
        let mut unread = Unread::default();
        let one = (NodeId(1), Incarnation(1));
        for block in 0..UNREAD_MAX as u32 + 10 {
            unread.note(one, key(block), stamp(1));
        }
        assert_eq!(unread.lost(&sources(&[(1, 1)])).len(), UNREAD_MAX);
    }
}
