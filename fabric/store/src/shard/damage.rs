//! Blocks that cannot be read, or whose checksum is wrong: the error for whoever asked, the finding for
//! whoever repairs, and a list of those met, until they are written again or given up.

use std::collections::{BTreeMap, VecDeque};

use super::super::api::{ChunkKey, LayerId, ScrubFinding, StoreError, Version};
use super::super::format::{Geometry, LEAF_BLOCKS, MapEntry, UNIT_LOST};

/// Findings of the scrubber that wait to be fetched; further ones are only logged.
const FINDINGS_MAX: usize = 1024;
/// Blocks that could not be read, as many as are remembered before it begins anew.
const KNOWN_BAD_MAX: usize = 4096;
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
    findings: VecDeque<ScrubFinding>,
    /// Bad blocks that are none any more, to be fetched.
    healed: VecDeque<(ChunkKey, u32)>,
}

impl Damage {
    pub(super) fn new(geo: Geometry) -> Self {
        Self {
            geo,
            known_bad: BTreeMap::new(),
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

    /// A map page cannot be read from `unit`, which maps all blocks of a leaf from this one on.
    pub(super) fn note_leaf(&self, first: BlockKey, unit: u32, result: Result<(), i32>) {
        let (layer, chunk, block) = first;
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
        if self.known_bad.len() >= KNOWN_BAD_MAX {
            self.known_bad.clear();
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

    /// Blocks from this one on were written, or hold nothing any more: those that were bad are not.
    pub(super) fn note_changed(&mut self, (layer, chunk, block): BlockKey, count: u16) {
        if self.known_bad.is_empty() {
            return;
        }
        let changed = (layer, chunk, block)..(layer, chunk, block + u32::from(count));
        let healed: Vec<BlockKey> = self.known_bad.range(changed).map(|(key, _)| *key).collect();
        for key in healed {
            self.known_bad.remove(&key);
            self.findings
                .retain(|found| (found.layer, found.chunk, found.block) != key);
            if self.healed.len() == HEALED_MAX {
                self.healed.pop_front();
            }
            let index = chunk;
            self.healed.push_back((ChunkKey { layer, index }, key.2));
        }
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

    /// Keeps the blocks of a leaf, from this one on, of which nothing is known, for whoever repairs.
    pub(super) fn report_unknown(
        &mut self,
        (layer, chunk, first): BlockKey,
        entries: &[MapEntry; LEAF_BLOCKS],
    ) {
        let blocks = (first..).zip(entries);
        for (block, _) in blocks.filter(|(_, entry)| **entry == MapEntry::UNKNOWN) {
            self.remember((layer, chunk, block), UNIT_LOST);
            self.report(ScrubFinding {
                layer,
                chunk,
                block,
                version: Version(0),
                device_offset: self.place_of(UNIT_LOST),
            });
        }
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
