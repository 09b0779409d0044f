//! Records of the chunk table, and the counts in them.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{CHUNK_LEAVES, LEAF_BLOCKS, MapEntry, Ptr, is_place};

/// What a [`ChunkRecord`] is.
pub mod record_kind {
    /// Free slot.
    pub const FREE: u32 = 0;
    /// A chunk.
    pub const CHUNK: u32 = 1;
    /// A layer's fence: `floor` is the generation, `epoch` the epoch.
    pub const FENCE: u32 = 2;
}

/// A chunk: offset 0 layer, 8 index, 12 kind, 16 leaves, 48 floor, 56 epoch or counts.
#[repr(C)]
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
pub struct ChunkRecord {
    /// Layer.
    pub layer: u64,
    /// Chunk index in the layer; `u32::MAX` for a fence.
    pub index: u32,
    /// See [`record_kind`].
    pub kind: u32,
    /// Map pages of the four MiB.
    pub leaves: [Ptr; CHUNK_LEAVES],
    /// Newest version among leaves that were dropped because nothing was mapped any more. It is that of one
    /// block and stands for all of them, so a write below it is not proved to be superseded: it must come
    /// again under a newer version.
    pub floor: u64,
    /// Epoch of a fence. Of a chunk four counts of 16 bits, that of the first leaf lowest: 0 if it was not
    /// taken, else one more than the blocks that the leaf maps to data. See [`stored`](Self::stored).
    pub epoch: u64,
}

impl ChunkRecord {
    /// How many blocks the page of a leaf maps to data; `None` if nobody has counted them.
    ///
    /// Blocks of zeroes and blocks whose data are lost have no data.
    #[must_use]
    pub const fn stored(&self, leaf: usize) -> Option<u32> {
        if self.leaves[leaf].unit == 0 {
            return Some(0);
        }
        let count = self.epoch >> (leaf * COUNT_BITS) & COUNT_MASK;
        (count as u32).checked_sub(1)
    }

    /// Names another page, or none, for a leaf, and how many blocks it maps to data; returns where the old
    /// one was. The only way to set either, so that they fit each other.
    pub fn set_leaf(&mut self, leaf: usize, ptr: Ptr, stored: u32) -> Ptr {
        let old = std::mem::replace(&mut self.leaves[leaf], ptr);
        self.set_stored(leaf, (ptr.unit != 0).then_some(stored));
        old
    }

    /// Of the page that is named: how many blocks it maps to data, `None` to forget it.
    pub fn set_stored(&mut self, leaf: usize, stored: Option<u32>) {
        let count = stored.map_or(0, |stored| u64::from(stored) + 1);
        assert!(count <= LEAF_BLOCKS as u64 + 1);
        let shift = leaf * COUNT_BITS;
        self.epoch = self.epoch & !(COUNT_MASK << shift) | count << shift;
    }
}

/// Bits of a count in [`ChunkRecord::epoch`].
const COUNT_BITS: usize = 16;
const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;

/// How many blocks a map page maps to data.
#[must_use]
pub fn stored_blocks(entries: &[MapEntry; LEAF_BLOCKS]) -> u32 {
    entries.iter().map(|e| u32::from(is_place(e.unit))).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_count_stands_for_itself_and_goes_with_its_pointer() {
        let mut record = ChunkRecord::default();
        let ptr = |unit| Ptr { unit, crc: 7 };
        for (leaf, stored) in [0, 256, 1, 255].into_iter().enumerate() {
            assert_eq!(record.stored(leaf), Some(0), "there is no page");
            assert_eq!(record.set_leaf(leaf, ptr(9), stored), Ptr::default());
        }
        let counts = |record: &ChunkRecord| [0, 1, 2, 3].map(|leaf| record.stored(leaf));
        assert_eq!(counts(&record), [Some(0), Some(256), Some(1), Some(255)]);
        assert_eq!(record.epoch, 256 << 48 | 2 << 32 | 257 << 16 | 1);
        record.set_stored(1, None);
        assert_eq!(record.set_leaf(3, Ptr::default(), 0), ptr(9));
        assert_eq!(counts(&record), [Some(0), None, Some(1), Some(0)]);
        assert_eq!(record.epoch, 2 << 32 | 1);
    }
}
