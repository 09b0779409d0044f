//! The map in RAM: chunk records, the leaves of them that are cached, and the walk over all of it.

use super::super::api::LayerId;
use super::super::format::{
    CHUNK_LEAVES, LEAF_BLOCKS, Ptr, UNIT_BYTES, record_kind, stored_blocks,
};
use super::super::leaf::{LeafCache, LeafState};
use super::super::table::{NONE, Table};
use super::damage::BlockKey;
use super::roots::MapRoots;

/// Bytes that a leaf maps.
pub(super) const LEAF_BYTES: u32 = (LEAF_BLOCKS * UNIT_BYTES) as u32;

#[derive(Debug)]
pub(super) struct Map {
    pub(super) table: Table,
    pub(super) leaves: LeafCache,
    pub(super) roots: MapRoots,
}

/// A leaf that holds something.
#[derive(Debug, Clone, Copy)]
pub(super) struct LeafPlace {
    pub(super) layer: LayerId,
    pub(super) chunk: u32,
    pub(super) rec: u32,
    pub(super) leaf: u8,
}

impl LeafPlace {
    /// Byte range of the chunk that it maps.
    pub(super) fn range(&self) -> (u32, u32) {
        let start = u32::from(self.leaf) * LEAF_BYTES;
        (start, start + LEAF_BYTES)
    }
}

impl Map {
    /// Cache slot of a record's leaf, [`NONE`] if it is not cached.
    pub(super) fn leaf_slot(&self, rec: u32, leaf: u8) -> u32 {
        self.table.runtime(rec).leaf_slots[usize::from(leaf)]
    }

    fn set_leaf_slot(&mut self, rec: u32, leaf: u8, slot: u32) {
        self.table.runtime_mut(rec).leaf_slots[usize::from(leaf)] = slot;
    }

    /// Where a record's leaf is on the device.
    pub(super) fn leaf_ptr(&self, rec: u32, leaf: u8) -> Ptr {
        self.table.record(rec).leaves[usize::from(leaf)]
    }

    /// How many blocks a record's leaf maps to data now; `None` if nobody has counted them.
    ///
    /// An unreadable page keeps the count that it had. Once its leaf is replaced and changed, only blocks
    /// that are known to be stored count.
    pub(super) fn stored_blocks(&self, rec: u32, leaf: u8) -> Option<u32> {
        let slot = self.leaf_slot(rec, leaf);
        if slot != NONE && self.leaves.meta(slot).dirty {
            return Some(stored_blocks(self.leaves.entries(slot)));
        }
        self.table.record(rec).stored(usize::from(leaf))
    }

    /// The first block that a record's leaf maps.
    pub(super) fn first_block(&self, rec: u32, leaf: u8) -> BlockKey {
        let record = self.table.record(rec);
        let first = u32::from(leaf) * LEAF_BLOCKS as u32;
        (LayerId(record.layer), record.index, first)
    }

    /// Whether there is such a leaf, cached or on the device.
    pub(super) fn has_leaf(&self, rec: u32, leaf: u8) -> bool {
        self.leaf_slot(rec, leaf) != NONE || self.leaf_ptr(rec, leaf).unit != 0
    }

    /// The record and leaf in a cache slot.
    pub(super) fn leaf_in(&self, slot: u32) -> (u32, u8) {
        let meta = self.leaves.meta(slot);
        (meta.rec, meta.leaf)
    }

    /// A cache slot for a record's leaf; another leaf may have to go for it. `None` when all must stay.
    pub(super) fn take_leaf_slot(&mut self, rec: u32, leaf: u8, state: LeafState) -> Option<u32> {
        let (slot, evicted) = self.leaves.take(rec, leaf, state)?;
        if let Some((rec, leaf)) = evicted {
            self.forget_leaf(rec, leaf);
        }
        self.set_leaf_slot(rec, leaf, slot);
        Some(slot)
    }

    /// The leaf is in the cache no more.
    pub(super) fn forget_leaf(&mut self, rec: u32, leaf: u8) {
        self.set_leaf_slot(rec, leaf, NONE);
        self.note_if_bare(rec);
    }

    /// Gives up a cached leaf that could not be read.
    pub(super) fn drop_unread_leaf(&mut self, slot: u32) {
        let (rec, leaf) = self.leaf_in(slot);
        self.set_leaf_slot(rec, leaf, NONE);
        self.leaves.drop_slot(slot);
    }

    /// A record that has nothing any more may go at the next checkpoint.
    fn note_if_bare(&mut self, rec: u32) {
        if (0..CHUNK_LEAVES as u8).all(|leaf| !self.has_leaf(rec, leaf)) {
            self.table.note_empty(rec);
        }
    }

    /// Removes a cached leaf in which nothing is mapped any more; returns where it was on the device.
    pub(super) fn drop_empty_leaf(&mut self, slot: u32) -> Ptr {
        let meta = *self.leaves.meta(slot);
        let versions = self.leaves.entries(slot).iter().map(|e| e.version);
        let newest = versions.max().unwrap_or(0);
        let record = self.table.record_mut(meta.rec);
        record.floor = record.floor.max(newest);
        let old = record.set_leaf(usize::from(meta.leaf), Ptr::default(), 0);
        self.leaves.mark_clean(slot);
        if meta.pins == 0 {
            self.leaves.drop_slot(slot);
            self.forget_leaf(meta.rec, meta.leaf);
        }
        old
    }
}

/// A place in the walk over all leaves.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LeafCursor {
    rec: u32,
    leaf: u8,
}

impl LeafCursor {
    /// Whether every leaf was passed.
    pub(super) fn is_at_end(&self, map: &Map) -> bool {
        self.rec >= map.table.slots()
    }

    pub(super) fn rec(&self) -> u32 {
        self.rec
    }

    pub(super) fn skip_record(&mut self) {
        (self.rec, self.leaf) = (self.rec + 1, 0);
    }

    /// The leaf at the cursor, which moves on; `None` if the record is no chunk's.
    pub(super) fn take(&mut self, map: &Map) -> Option<LeafPlace> {
        let record = map.table.record(self.rec);
        if record.kind != record_kind::CHUNK {
            self.skip_record();
            return None;
        }
        let place = LeafPlace {
            layer: LayerId(record.layer),
            chunk: record.index,
            rec: self.rec,
            leaf: self.leaf,
        };
        self.leaf = (self.leaf + 1) % CHUNK_LEAVES as u8;
        self.rec += u32::from(self.leaf == 0);
        Some(place)
    }

    /// The next leaf that holds something, of chunks whose layer is `wanted`.
    pub(super) fn next_stored(
        &mut self,
        map: &Map,
        wanted: impl Fn(LayerId) -> bool,
    ) -> Option<LeafPlace> {
        while !self.is_at_end(map) {
            let Some(place) = self.take(map) else {
                continue;
            };
            if !wanted(place.layer) {
                // Another leaf of the same record is no better.
                (self.rec, self.leaf) = (place.rec + 1, 0);
            } else if map.has_leaf(place.rec, place.leaf) {
                return Some(place);
            }
        }
        None
    }
}
