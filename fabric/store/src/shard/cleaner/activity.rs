//! Which leaves are worth a look: three bits for each.

use super::super::super::format::CHUNK_LEAVES;

/// Bits of a record's activity, one for each leaf.
const CHANGED: u32 = 0;
const HOT: u32 = 4;
const WAITS: u32 = 8;
const NEWS: u16 = 0x0f;
const ANY: u16 = 0xf0f;

/// The bits of every record, and how many leaves have one that is worth a look.
#[derive(Debug)]
pub(super) struct Activity {
    bits: Vec<u16>,
    /// Leaves that changed or wait, each counted once for each.
    changed: u32,
    waiting: u32,
}

/// What is known of a leaf that a sweep comes to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Look {
    /// The sweep is to look at it.
    pub(super) is_wanted: bool,
    /// Guests are at it.
    pub(super) is_hot: bool,
}

impl Activity {
    /// For so many records, of which nothing is known.
    pub(super) fn new(records: u32) -> Self {
        Self {
            bits: vec![NEWS; records as usize],
            changed: records * CHUNK_LEAVES as u32,
            waiting: 0,
        }
    }

    /// Leaves whose data changed since they were looked at.
    pub(super) fn changed(&self) -> u32 {
        self.changed
    }

    /// Leaves that wait for room.
    pub(super) fn waiting(&self) -> u32 {
        self.waiting
    }

    pub(super) fn ram_bytes(&self) -> u64 {
        self.bits.capacity() as u64 * 2
    }

    /// Whether a leaf of the record changed or waits.
    pub(super) fn has_news(&self, rec: u32) -> bool {
        self.bits.get(rec as usize).unwrap_or(&0) & ANY != 0
    }

    /// A guest changed the leaf.
    pub(super) fn note_change(&mut self, rec: u32, leaf: u8) {
        self.set(rec, leaf, CHANGED);
        self.set(rec, leaf, HOT);
    }

    /// The leaf is to be looked at once more.
    pub(super) fn look_again(&mut self, rec: u32, leaf: u8) {
        self.set(rec, leaf, CHANGED);
    }

    /// There is no room for the leaf now.
    pub(super) fn wait_for_room(&mut self, rec: u32, leaf: u8) {
        self.set(rec, leaf, WAITS);
    }

    /// A sweep comes to the leaf. One that changed since the last sweep is left alone until the next, unless
    /// regions are to be emptied.
    pub(super) fn look(&mut self, rec: u32, leaf: u8, evacuate: bool) -> Look {
        let is_hot = self.clear(rec, leaf, HOT);
        if is_hot && !evacuate {
            return Look {
                is_wanted: false,
                is_hot,
            };
        }
        let changed = self.clear(rec, leaf, CHANGED);
        let waits = self.clear(rec, leaf, WAITS);
        if is_hot && changed {
            self.set(rec, leaf, CHANGED);
        }
        if is_hot && waits {
            self.set(rec, leaf, WAITS);
        }
        Look {
            is_wanted: changed || waits || evacuate,
            is_hot,
        }
    }

    /// The record is no chunk's any more.
    pub(super) fn forget(&mut self, rec: u32) {
        for leaf in 0..CHUNK_LEAVES as u8 {
            for bits in [CHANGED, HOT, WAITS] {
                self.clear(rec, leaf, bits);
            }
        }
    }

    fn set(&mut self, rec: u32, leaf: u8, bits: u32) {
        if self.bits.len() <= rec as usize {
            self.bits.resize(rec as usize + 1, 0);
        }
        let mask = 1u16 << (bits + u32::from(leaf));
        let word = &mut self.bits[rec as usize];
        let fresh = u32::from(*word & mask == 0);
        *word |= mask;
        self.changed += if bits == CHANGED { fresh } else { 0 };
        self.waiting += if bits == WAITS { fresh } else { 0 };
    }

    /// Clears a bit; whether it was set.
    fn clear(&mut self, rec: u32, leaf: u8, bits: u32) -> bool {
        let mask = 1u16 << (bits + u32::from(leaf));
        let Some(word) = self.bits.get_mut(rec as usize) else {
            return false;
        };
        let was = *word & mask != 0;
        *word &= !mask;
        self.changed -= u32::from(was && bits == CHANGED);
        self.waiting -= u32::from(was && bits == WAITS);
        was
    }
}
