//! Which pages a takeover has to recover: those of all writes that replicas call unresolved.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use fabric_types::block::{BLOCK_BYTES, LEAF_BLOCKS};
use fabric_types::ids::{CHUNK_BYTES, LayerId};
use fabric_types::message::UnresolvedEntry;
use fabric_types::{Command, NodeId};

use super::list::List;
use crate::groups::LeafKey;

/// Blocks of a chunk.
const CHUNK_BLOCKS: u32 = (CHUNK_BYTES / BLOCK_BYTES as u64) as u32;

/// See the module.
#[derive(Debug)]
pub(super) struct UnresolvedPages {
    layer: LayerId,
    size_bytes: u64,
    /// Of the replicas that are asked, or have answered.
    lists: BTreeMap<NodeId, List>,
    /// What replicas have told, in earlier attempts, too: one that told and left since may have been the
    /// source of another, which has what it had, and does not know that it is unresolved.
    reported: BTreeMap<LeafKey, Range<usize>>,
    /// Pages to recover, with a range of blocks.
    queue: VecDeque<(LeafKey, Range<usize>)>,
}

impl UnresolvedPages {
    /// Of the layer of a volume of this size.
    pub(super) fn new(layer: LayerId, size_bytes: u64) -> Self {
        Self {
            layer,
            size_bytes,
            lists: BTreeMap::new(),
            reported: BTreeMap::new(),
            queue: VecDeque::new(),
        }
    }

    /// Everything begins anew, with no answer outstanding.
    pub(super) fn restart(&mut self) {
        self.queue.clear();
        self.gather();
    }

    /// Fences the layer on a node, which tells what is unresolved there.
    pub(super) fn ask(&mut self, node: NodeId) -> Command {
        let list = self.lists.entry(node).or_insert_with(List::new);
        list.command(self.layer)
    }

    /// All replicas have answered: what they told is to be recovered.
    pub(super) fn begin(&mut self) {
        self.gather();
        let page = |(leaf, range): (&LeafKey, &Range<usize>)| (*leaf, range.clone());
        self.queue = self.reported.iter().map(page).collect();
    }

    /// The next page.
    pub(super) fn next(&mut self) -> Option<(LeafKey, Range<usize>)> {
        self.queue.pop_front()
    }

    /// Adds the lists to the pages that are known.
    fn gather(&mut self) {
        let pages = &mut self.reported;
        let layer = self.layer;
        let mut add = |chunk: u32, first: u32, end: u32| {
            for leaf in first / LEAF_BLOCKS..end.div_ceil(LEAF_BLOCKS) {
                let base = leaf * LEAF_BLOCKS;
                let from = (first.max(base) - base) as usize;
                let to = (end.min(base + LEAF_BLOCKS) - base) as usize;
                let page = pages.entry(LeafKey { layer, chunk, leaf });
                let range = page.or_insert(from..to);
                *range = range.start.min(from)..range.end.max(to);
            }
        };
        for list in self.lists.values() {
            for entry in list.reported() {
                if entry == UnresolvedEntry::EVERYTHING {
                    let chunks = self.size_bytes.div_ceil(CHUNK_BYTES) as u32;
                    (0..chunks).for_each(|chunk| add(chunk, 0, CHUNK_BLOCKS));
                    break;
                }
                let end = entry.block.saturating_add(entry.count).min(CHUNK_BLOCKS);
                // What a peer told is any bytes, and the last number names no chunk.
                if entry.block < end && entry.chunk != u32::MAX {
                    add(entry.chunk, entry.block, end);
                }
            }
        }
        self.lists.clear();
    }
}
