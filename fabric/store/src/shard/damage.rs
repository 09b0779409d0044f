//! Blocks that cannot be read, or whose checksum is wrong: the error for whoever asked, the finding for
//! whoever repairs, and a list of those met.

use std::collections::{BTreeMap, VecDeque};

use super::super::api::{LayerId, ScrubFinding, StoreError};
use super::super::format::{Geometry, UNIT_LOST};

/// Findings of the scrubber that wait to be fetched; further ones are only logged.
const FINDINGS_MAX: usize = 1024;
/// Blocks that could not be read, as many as are remembered before it begins anew.
const KNOWN_BAD_MAX: usize = 4096;

/// A block by layer, chunk and number in the chunk.
pub(super) type BlockKey = (LayerId, u32, u32);

#[derive(Debug)]
pub(super) struct Damage {
    geo: Geometry,
    /// Blocks that could not be read, and the unit that it was. What is not there any more is of no meaning.
    known_bad: BTreeMap<BlockKey, u32>,
    findings: VecDeque<ScrubFinding>,
}

impl Damage {
    pub(super) fn new(geo: Geometry) -> Self {
        Self {
            geo,
            known_bad: BTreeMap::new(),
            findings: VecDeque::new(),
        }
    }

    /// Remembers a block that is bad in `unit`, and says what is wrong with it.
    pub(super) fn note(&mut self, key: BlockKey, unit: u32, result: Result<(), i32>) -> StoreError {
        if self.known_bad.len() >= KNOWN_BAD_MAX {
            self.known_bad.clear();
        }
        self.known_bad.insert(key, unit);
        let (layer, chunk, block) = key;
        let device_offset = self.place_of(unit);
        match result {
            Err(errno) => {
                tracing::error!(
                    layer = layer.0,
                    chunk,
                    block,
                    device_offset,
                    errno,
                    "device read failed"
                );
                StoreError::Unreadable {
                    layer,
                    chunk,
                    block,
                    device_offset,
                    errno,
                }
            }
            Ok(()) => {
                let what = match unit {
                    UNIT_LOST => "the data are lost: no replica could read them",
                    _ => "checksum mismatch",
                };
                tracing::error!(layer = layer.0, chunk, block, device_offset, "{what}");
                StoreError::Corrupt {
                    layer,
                    chunk,
                    block,
                    device_offset,
                }
            }
        }
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
