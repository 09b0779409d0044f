//! Reading everything that is mapped, leaf by leaf, before damage spreads or is needed.

use super::super::api::ScrubStep;
use super::super::format::{CHUNK_LEAVES, LEAF_BLOCKS, UNIT_BYTES, record_kind};
use super::super::table::NONE;
use super::{PartKind, ShardCore};

/// Where the scrubber is.
#[derive(Debug, Default)]
pub(super) struct Scrub {
    rec: u32,
    leaf: usize,
    pub(super) busy: bool,
}

impl ShardCore {
    pub(super) fn step_scrub(&mut self) -> ScrubStep {
        if self.scrub.busy || self.parts.free() == 0 {
            return ScrubStep::Busy;
        }
        while self.scrub.rec < self.table.slots() {
            let (rec, leaf) = (self.scrub.rec, self.scrub.leaf);
            self.scrub.leaf = (leaf + 1) % CHUNK_LEAVES;
            self.scrub.rec += u32::from(self.scrub.leaf == 0);
            let record = self.table.record(rec);
            if record.kind != record_kind::CHUNK {
                continue;
            }
            let cached = self.table.runtime(rec).leaf_slots[leaf] != NONE;
            if !cached && record.leaves[leaf].unit == 0 {
                continue;
            }
            let bytes = (LEAF_BLOCKS * UNIT_BYTES) as u32;
            let range = (leaf as u32 * bytes, (leaf as u32 + 1) * bytes);
            let (layer, chunk) = (record.layer, record.index);
            self.scrub.busy = true;
            // Without a record the part waits for no write in flight: it reads what is mapped now.
            self.start_part(NONE, PartKind::Scrub, (layer, chunk, NONE), range, 0);
            return ScrubStep::Reading;
        }
        self.scrub.rec = 0;
        ScrubStep::PassDone
    }
}
