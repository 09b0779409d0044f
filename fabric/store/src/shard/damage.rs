//! Blocks that cannot be read, or whose checksum is wrong: the error for whoever asked, the finding for
//! whoever repairs, and a list of those met, until they are written again or given up.

use std::collections::{BTreeMap, VecDeque};

use super::super::api::{ChunkKey, LayerId, ScrubFinding, StoreError, Version};
use super::super::format::{Geometry, LEAF_BLOCKS, MapEntry, UNIT_LOST};

/// Findings of the scrubber that wait to be fetched; further ones are only logged.
const FINDINGS_MAX: usize = 1024;
/// Blocks that could not be read, as many as are remembered.
const KNOWN_BAD_MAX: usize = 4096;
/// Map pages that could not be read, as many as are remembered; the blocks of further ones are reported by
/// the scrubber alone.
const UNREAD_LEAVES_MAX: usize = 4096;
/// Blocks that are bad no more and wait to be fetched; beyond it the oldest are forgotten, and whoever lists
/// bad blocks finds out when it looks at them.
const HEALED_MAX: usize = 4096;

/// A block by layer, chunk and number in the chunk.
pub(super) type BlockKey = (LayerId, u32, u32);

#[derive(Debug)]
pub(super) struct Damage {
    geo: Geometry,
    /// Blocks that could not be read, and the unit that it was. What is not there any more is of no meaning.
    known_bad: BTreeMap<BlockKey, u32>,
    /// Map pages that could not be read, by the first block of each, and the unit that it was.
    unread_leaves: BTreeMap<BlockKey, u32>,
    findings: VecDeque<ScrubFinding>,
    /// Bad blocks that are none any more, to be fetched.
    healed: VecDeque<(ChunkKey, u32)>,
}

impl Damage {
    pub(super) fn new(geo: Geometry) -> Self {
        Self {
            geo,
            known_bad: BTreeMap::new(),
            unread_leaves: BTreeMap::new(),
            findings: VecDeque::new(),
            healed: VecDeque::new(),
        }
    }

    /// Remembers a block that is bad in `unit`, and says what is wrong with it.
    pub(super) fn note(&mut self, key: BlockKey, unit: u32, result: Result<(), i32>) -> StoreError {
        self.remember(key, unit);
        let (layer, chunk, block) = key;
        let device_offset = self.place_of(unit);
        match result {
            Err(errno) => tracing::error!(
                layer = layer.0,
                chunk,
                block,
                device_offset,
                errno,
                "device read failed"
            ),
            Ok(()) => {
                let what = match unit {
                    UNIT_LOST => {
                        "the data are lost: neither the device nor a replica has given them"
                    }
                    _ => "checksum mismatch",
                };
                tracing::error!(layer = layer.0, chunk, block, device_offset, "{what}");
            }
        }
        self.error_of(key, unit, result)
    }

    /// A map page cannot be read from `unit`, which maps all blocks of a leaf from this one on. They are told
    /// and reported the first time, and when the scrubber has met it.
    pub(super) fn note_leaf(
        &mut self,
        first: BlockKey,
        unit: u32,
        (result, is_scrub): (Result<(), i32>, bool),
    ) {
        let room = self.unread_leaves.len() < UNREAD_LEAVES_MAX;
        let is_known = self.unread_leaves.get(&first) == Some(&unit);
        let is_new = room && !is_known;
        if is_new {
            self.unread_leaves.insert(first, unit);
        }
        if is_new || is_scrub {
            self.tell_leaf(first, unit, result);
            leaf_blocks(first).for_each(|key| self.report_unknown(key, unit));
        }
    }

    /// A map page cannot be read from `unit`, which maps all blocks of a leaf from this one on.
    pub(super) fn tell_leaf(
        &self,
        (layer, chunk, block): BlockKey,
        unit: u32,
        result: Result<(), i32>,
    ) {
        tracing::error!(
            layer = layer.0,
            chunk,
            block,
            blocks = LEAF_BLOCKS,
            device_offset = self.place_of(unit),
            errno = result.err(),
            "a map page cannot be read: the blocks that it maps are bad until they are written again"
        );
    }

    /// The map page could be read, and says this: if it could not before, its blocks are not bad for that
    /// reason any more. A leaf may have stood for it meanwhile, and none of its blocks was changed.
    pub(super) fn note_leaf_read(&mut self, first: BlockKey, entries: &[MapEntry; LEAF_BLOCKS]) {
        let Some(unit) = self.unread_leaves.remove(&first) else {
            return;
        };
        for (key, entry) in leaf_blocks(first).zip(entries) {
            let is_bad = self.is_known(key, unit) || self.is_known(key, UNIT_LOST);
            // One whose data are lost stays as bad as it was.
            if is_bad && entry.unit != UNIT_LOST {
                self.note_healed(key);
            }
        }
    }

    /// The map page is replaced, or is known to be readable.
    pub(super) fn forget_leaf(&mut self, first: BlockKey) {
        self.unread_leaves.remove(&first);
    }

    /// A leaf of which nothing is known stands for the page from now on: what is bad is not its unit, but
    /// each block. The page is in `unit`, and may be read one day.
    pub(super) fn note_stand_in(&mut self, first: BlockKey, unit: u32) {
        if self.unread_leaves.len() < UNREAD_LEAVES_MAX {
            self.unread_leaves.insert(first, unit);
        }
        leaf_blocks(first).for_each(|key| self.remember(key, UNIT_LOST));
    }

    /// Somebody asked for a block of a map page that cannot be read.
    pub(super) fn note_of_leaf(
        &mut self,
        key: BlockKey,
        unit: u32,
        result: Result<(), i32>,
    ) -> StoreError {
        self.remember(key, unit);
        self.error_of(key, unit, result)
    }

    fn remember(&mut self, key: BlockKey, unit: u32) {
        if self.known_bad.len() >= KNOWN_BAD_MAX && !self.known_bad.contains_key(&key) {
            self.known_bad.pop_first();
        }
        self.known_bad.insert(key, unit);
    }

    fn error_of(
        &self,
        (layer, chunk, block): BlockKey,
        unit: u32,
        result: Result<(), i32>,
    ) -> StoreError {
        let device_offset = self.place_of(unit);
        match result {
            Err(errno) => StoreError::Unreadable {
                layer,
                chunk,
                block,
                device_offset,
                errno,
            },
            Ok(()) => StoreError::Corrupt {
                layer,
                chunk,
                block,
                device_offset,
            },
        }
    }

    /// The block was written, or holds nothing any more, or can be read after all: if it was bad, it is not
    /// any more.
    pub(super) fn note_healed(&mut self, key: BlockKey) {
        if self.known_bad.is_empty() || self.known_bad.remove(&key).is_none() {
            return;
        }
        let (layer, index, block) = key;
        self.findings
            .retain(|found| (found.layer, found.chunk, found.block) != key);
        if self.healed.len() == HEALED_MAX {
            self.healed.pop_front();
        }
        self.healed.push_back((ChunkKey { layer, index }, block));
    }

    /// The next bad block that is none any more.
    pub(super) fn next_healed(&mut self) -> Option<(ChunkKey, u32)> {
        self.healed.pop_front()
    }

    /// Whether the block was found bad in this unit.
    pub(super) fn is_known(&self, key: BlockKey, unit: u32) -> bool {
        self.known_bad.get(&key) == Some(&unit)
    }

    /// Byte of the device where a unit is; 0 for data that are nowhere.
    pub(super) fn place_of(&self, unit: u32) -> u64 {
        match unit {
            UNIT_LOST => 0,
            unit => self.geo.offset(unit),
        }
    }

    /// Somebody who compares replicas has met a block of which nothing is known. It is reported once, as long
    /// as there is room to remember that.
    pub(super) fn note_unknown(&mut self, key: BlockKey) {
        if self.known_bad.len() < KNOWN_BAD_MAX && !self.is_known(key, UNIT_LOST) {
            self.report_unknown(key, UNIT_LOST);
        }
    }

    /// Remembers a block of which nothing is known, because of what is in `unit`, and keeps it for whoever
    /// repairs.
    pub(super) fn report_unknown(&mut self, key: BlockKey, unit: u32) {
        self.remember(key, unit);
        let (layer, chunk, block) = key;
        self.report(ScrubFinding {
            layer,
            chunk,
            block,
            version: Version(0),
            device_offset: self.place_of(unit),
        });
    }

    /// Keeps a finding for whoever repairs.
    pub(super) fn report(&mut self, finding: ScrubFinding) {
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push_back(finding);
        }
    }

    pub(super) fn next_finding(&mut self) -> Option<ScrubFinding> {
        self.findings.pop_front()
    }
}

/// The blocks of a leaf, from its first one on.
fn leaf_blocks((layer, chunk, first): BlockKey) -> impl Iterator<Item = BlockKey> {
    (first..first + LEAF_BLOCKS as u32).map(move |block| (layer, chunk, block))
}
