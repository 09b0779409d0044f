//! The cache of map pages (leaves). Bounded: a clean page that was not used lately makes room, dirty ones
//! wait for a checkpoint, pinned ones for the writes that will change them.

use zerocopy::{FromBytes, IntoBytes};

use super::arena::AlignedBuf;
use super::format::{LEAF_BLOCKS, MapEntry, UNIT_BYTES};
use super::table::NONE;

/// Fewest cached leaves: enough for a few operations in several chunks to go on.
pub const LEAVES_MIN: u32 = 64;

/// Life of a cache slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeafState {
    /// Holds nothing.
    Free,
    /// Being read.
    Loading,
    /// Usable.
    Ready,
}

/// Whether a leaf stands for a page that cannot be read, and says of no block what that said. `by_device`:
/// because of an error of the device, which may pass, and not because the checksum does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StandIn {
    /// It is what its page says, or newer.
    No,
    /// It does. Before a checkpoint replaces the page, that is read once more.
    Unread {
        /// See the type.
        by_device: bool,
    },
    /// It does, and the page could not be read then either.
    GivenUp {
        /// See the type.
        by_device: bool,
    },
}

impl StandIn {
    /// Whether it stands for a page that the device refused to give.
    #[must_use]
    pub fn is_by_device(self) -> bool {
        match self {
            Self::No => false,
            Self::Unread { by_device } | Self::GivenUp { by_device } => by_device,
        }
    }
}

/// What is known of a cached leaf beside its entries.
#[derive(Debug, Clone, Copy)]
pub struct LeafMeta {
    /// Chunk record it belongs to.
    pub rec: u32,
    /// Which leaf of the chunk.
    pub leaf: u8,
    /// See [`LeafState`].
    pub state: LeafState,
    /// Changed since it was written.
    pub dirty: bool,
    /// Used since the clock hand passed.
    pub used: bool,
    /// Already read once with a bad checksum.
    pub retried: bool,
    /// See [`StandIn`].
    pub stand_in: StandIn,
    /// Writes and checkpoint I/O that need it to stay.
    pub pins: u32,
    /// First of the parts that wait for it to be read.
    pub waiters: u32,
}

const FREE: LeafMeta = LeafMeta {
    rec: NONE,
    leaf: 0,
    state: LeafState::Free,
    dirty: false,
    used: false,
    retried: false,
    stand_in: StandIn::No,
    pins: 0,
    waiters: NONE,
};

/// See the module.
#[derive(Debug)]
pub struct LeafCache {
    pages: AlignedBuf,
    meta: Vec<LeafMeta>,
    free: Vec<u32>,
    hand: u32,
    dirty: u32,
    /// Slots that were ever in use, the first ones: the others' pages cost no RAM.
    filled: u32,
}

impl LeafCache {
    /// A cache of `slots` leaves.
    #[must_use]
    pub fn new(slots: u32) -> Self {
        Self {
            pages: AlignedBuf::new(slots as usize),
            meta: vec![FREE; slots as usize],
            free: (0..slots).rev().collect(),
            hand: 0,
            dirty: 0,
            filled: 0,
        }
    }

    /// Slots in all.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.meta.len() as u32
    }

    /// Dirty leaves.
    #[must_use]
    pub fn dirty(&self) -> u32 {
        self.dirty
    }

    /// RAM held at most.
    #[must_use]
    pub fn ram_bytes(&self) -> u64 {
        (self.meta.len() * (UNIT_BYTES + size_of::<LeafMeta>())) as u64
    }

    /// RAM held now.
    #[must_use]
    pub fn filled_bytes(&self) -> u64 {
        let pages = u64::from(self.filled) * UNIT_BYTES as u64;
        pages + (self.meta.len() * size_of::<LeafMeta>()) as u64
    }

    /// A slot for a leaf that is not cached. Returns it with the leaf it held before, whose record must
    /// forget it; `None` when every leaf is dirty, pinned or being read.
    pub fn take(
        &mut self,
        rec: u32,
        leaf: u8,
        state: LeafState,
    ) -> Option<(u32, Option<(u32, u8)>)> {
        let (slot, evicted) = match self.free.pop() {
            Some(slot) => (slot, None),
            None => self.evict()?,
        };
        self.filled = self.filled.max(slot + 1);
        self.meta[slot as usize] = LeafMeta {
            rec,
            leaf,
            state,
            used: true,
            ..FREE
        };
        Some((slot, evicted))
    }

    fn evict(&mut self) -> Option<(u32, Option<(u32, u8)>)> {
        // Twice around: the first pass may only take the "used" marks away.
        for _ in 0..self.meta.len() * 2 {
            let slot = self.hand;
            self.hand = (self.hand + 1) % self.meta.len() as u32;
            let meta = &mut self.meta[slot as usize];
            if meta.state != LeafState::Ready || meta.dirty || meta.pins > 0 {
                continue;
            }
            if meta.used {
                meta.used = false;
                continue;
            }
            return Some((slot, Some((meta.rec, meta.leaf))));
        }
        None
    }

    /// Frees a slot whose leaf is no longer wanted.
    pub fn drop_slot(&mut self, slot: u32) {
        let meta = &mut self.meta[slot as usize];
        assert!(meta.pins == 0 && !meta.dirty && meta.state != LeafState::Free);
        *meta = FREE;
        self.free.push(slot);
    }

    /// Brings the cache down to `slots`, if it has more, and returns the leaves that it no longer holds.
    /// Nothing in it may be dirty or in use.
    pub fn shrink_to(&mut self, slots: u32) -> Vec<(u32, u8)> {
        if slots >= self.slots() {
            return Vec::new();
        }
        let idle = |m: &LeafMeta| m.pins == 0 && !m.dirty && m.state != LeafState::Loading;
        assert!(self.meta.iter().all(idle), "a cache in use cannot shrink");
        let mut pages = AlignedBuf::new(slots as usize);
        let gone = self.meta.split_off(slots as usize);
        self.meta.shrink_to_fit();
        self.free = Vec::with_capacity(slots as usize);
        for slot in (0..slots).rev() {
            if self.meta[slot as usize].state == LeafState::Free {
                self.free.push(slot);
            } else {
                let page = pages.blocks_mut(slot, 1);
                page.copy_from_slice(self.pages.blocks(slot, 1));
            }
        }
        self.pages = pages;
        self.hand = 0;
        self.filled = self.filled.min(slots);
        let held = gone.iter().filter(|m| m.state == LeafState::Ready);
        held.map(|m| (m.rec, m.leaf)).collect()
    }

    /// What is known of the slot.
    #[must_use]
    pub fn meta(&self, slot: u32) -> &LeafMeta {
        &self.meta[slot as usize]
    }

    /// What is known of the slot, to change (all but `dirty`).
    pub fn meta_mut(&mut self, slot: u32) -> &mut LeafMeta {
        &mut self.meta[slot as usize]
    }

    /// The leaf's entries.
    #[must_use]
    pub fn entries(&self, slot: u32) -> &[MapEntry; LEAF_BLOCKS] {
        FromBytes::ref_from_bytes(self.pages.blocks(slot, 1))
            .expect("a page holds 256 entries and is aligned")
    }

    /// The leaf's entries, to change; the leaf becomes dirty.
    pub fn entries_mut(&mut self, slot: u32) -> &mut [MapEntry; LEAF_BLOCKS] {
        let meta = &mut self.meta[slot as usize];
        self.dirty += u32::from(!meta.dirty);
        meta.dirty = true;
        FromBytes::mut_from_bytes(self.pages.blocks_mut(slot, 1))
            .expect("a page holds 256 entries and is aligned")
    }

    /// Fills a new leaf: nothing mapped, no version older than `floor` accepted. Not dirty: nothing is in it
    /// yet.
    pub fn fill_empty(&mut self, slot: u32, floor: u64) {
        let entries: &mut [MapEntry; LEAF_BLOCKS] =
            FromBytes::mut_from_bytes(self.pages.blocks_mut(slot, 1))
                .expect("a page holds 256 entries and is aligned");
        entries.fill(MapEntry {
            unit: 0,
            crc: 0,
            version: floor,
        });
    }

    /// Fills a leaf whose page cannot be read: of no block is it known what it holds. Not dirty: as long as
    /// nothing changes, the page may still be read one day.
    pub fn fill_unknown(&mut self, slot: u32, by_device: bool) {
        let entries: &mut [MapEntry; LEAF_BLOCKS] =
            FromBytes::mut_from_bytes(self.pages.blocks_mut(slot, 1))
                .expect("a page holds 256 entries and is aligned");
        entries.fill(MapEntry::UNKNOWN);
        self.meta[slot as usize].stand_in = StandIn::Unread { by_device };
    }

    /// Leaves that stand for pages that the device refused to give.
    #[must_use]
    pub fn refused(&self) -> u32 {
        let refused = self.meta.iter().filter(|m| m.stand_in.is_by_device());
        refused.count() as u32
    }

    /// Fills a leaf with what was read from the device.
    pub fn fill_from(&mut self, slot: u32, bytes: &[u8]) {
        self.pages.blocks_mut(slot, 1).copy_from_slice(bytes);
    }

    /// The leaf as bytes.
    #[must_use]
    pub fn bytes(&self, slot: u32) -> &[u8] {
        self.entries(slot).as_bytes()
    }

    /// The page memory of a slot, as the destination of a device read.
    #[must_use]
    pub fn page_ptr(&self, slot: u32) -> *mut u8 {
        self.pages.as_ptr().wrapping_add(slot as usize * UNIT_BYTES)
    }

    /// The leaf is being written by a checkpoint and counts as clean.
    pub fn mark_clean(&mut self, slot: u32) {
        let meta = &mut self.meta[slot as usize];
        self.dirty -= u32::from(meta.dirty);
        meta.dirty = false;
    }
}
