//! Which map pages a round has yet to compare: those of all chunks that either side has, and those that have
//! to be looked at once more.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use fabric_types::Command;
use fabric_types::block::LEAF_BLOCKS;
use fabric_types::ids::{ChunkKey, LayerId};

use super::listing::Listing;
use super::worker::Side;
use crate::groups::LeafKey;

/// Map pages of a chunk.
const LEAVES: u32 = 4;
/// How often a page is looked at once more, a tick later, because it is not known what becomes of a write to
/// it; then the round fails. A client that lives stores it or gives this replica up within that time.
const LOOKS_MAX: u32 = 1000;
/// Pages that may wait for another look; with more the round fails. Each is waited for because of another
/// write.
const POSTPONED_MAX: usize = 16_384;

/// See the module.
#[derive(Debug)]
pub(super) struct Pages {
    source: Listing,
    here: Listing,
    chunks: VecDeque<ChunkKey>,
    /// Those that the source has listed: they need not be compared once more when this side lists them.
    seen: BTreeSet<ChunkKey>,
    /// The next page of the first chunk.
    leaf: u32,
    /// Pages to be looked at once more after a tick, and how often that was so.
    postponed: BTreeMap<LeafKey, u32>,
    /// Those of them that are to be looked at now.
    again: VecDeque<LeafKey>,
}

impl Pages {
    /// All; nothing is listed yet.
    pub(super) fn new() -> Self {
        Self {
            source: Listing::new(),
            here: Listing::new(),
            chunks: VecDeque::new(),
            seen: BTreeSet::new(),
            leaf: 0,
            postponed: BTreeMap::new(),
            again: VecDeque::new(),
        }
    }

    /// The next page to compare. `None`: [more chunks](Self::list_more) have to be listed first.
    pub(super) fn next(&mut self) -> Option<LeafKey> {
        if let Some(leaf) = self.again.pop_front() {
            return Some(leaf);
        }
        let chunk = *self.chunks.front()?;
        let leaf = LeafKey {
            layer: chunk.layer,
            chunk: chunk.index,
            leaf: self.leaf,
        };
        self.leaf += 1;
        if self.leaf == LEAVES {
            self.leaf = 0;
            self.chunks.pop_front();
        }
        Some(leaf)
    }

    /// What is to be asked of whom for more chunks: first all that the source has. `None`: the answer is due,
    /// or there are no more.
    pub(super) fn list_more(&mut self) -> Option<(Side, Command)> {
        let (side, listing) = match self.source.ended {
            false => (Side::Source, &mut self.source),
            true => (Side::Here, &mut self.here),
        };
        let is_due = !listing.ended && !listing.asked;
        is_due.then(|| (side, listing.command()))
    }

    /// A side has listed more.
    pub(super) fn take_listed(&mut self, side: Side) {
        let listing = match side {
            Side::Source => &mut self.source,
            Side::Here => &mut self.here,
        };
        listing.take(&mut self.chunks, &mut self.seen);
    }

    /// Whether every page was given out, and none is to be looked at once more.
    pub(super) fn is_empty(&self) -> bool {
        let is_listed = self.source.ended && self.here.ended;
        is_listed && self.chunks.is_empty() && self.postponed.is_empty()
    }

    /// The layers of all chunks, in order.
    pub(super) fn layers(&self) -> Vec<LayerId> {
        // In the order of their layers, as the set is.
        let mut layers: Vec<LayerId> = self.seen.iter().map(|chunk| chunk.layer).collect();
        layers.dedup();
        layers
    }

    /// A page has been compared.
    pub(super) fn note_compared(&mut self, leaf: LeafKey) {
        self.postponed.remove(&leaf);
    }

    /// A page is to be looked at once more after a tick; false if that was so too often.
    pub(super) fn postpone(&mut self, leaf: LeafKey) -> bool {
        let looks = self.postponed.entry(leaf).or_default();
        *looks += 1;
        *looks <= LOOKS_MAX && self.postponed.len() <= POSTPONED_MAX
    }

    /// A tick has passed: looks once more at the pages that a client was writing.
    pub(super) fn on_tick(&mut self) {
        if self.again.is_empty() {
            self.again.extend(self.postponed.keys());
        }
    }

    /// Whether some wait for the next tick.
    pub(super) fn needs_tick(&self) -> bool {
        !self.postponed.is_empty()
    }
}

const _: () = assert!(LEAF_BLOCKS as u64 * LEAVES as u64 * 4096 == fabric_types::ids::CHUNK_BYTES);
