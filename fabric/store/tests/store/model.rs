//! What the store is allowed to answer.
//!
//! Every block has the list of states that the operations on it made, oldest first, in the order in which
//! they were submitted. A read may answer a state that is not older than the newest one acknowledged (or
//! read) before it. After a process crash the same holds; after power loss any state that is not older than
//! the newest durable one is right. Whatever recovery then shows is pinned: it is the only state from there
//! on. Of an operation that failed each block shows all, or nothing.

use std::collections::BTreeMap;

use fabric_types::block::BLOCK_BYTES;
use fabric_types::ids::LayerId;

use crate::image::SECTOR_BYTES;
use crate::sim_disk::CrashKind;

/// Sectors of a block.
pub const BLOCK_SECTORS: usize = BLOCK_BYTES / SECTOR_BYTES;

/// A disk as a guest sees it: a chain of layers of which the first is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct View(pub u8);

/// Written directly.
pub const PLAIN: View = View(0);
/// Written directly too.
pub const OTHER: View = View(1);
/// Lies over [`BASE`].
pub const CHILD: View = View(2);
/// Frozen before anything is written to [`CHILD`].
pub const BASE: View = View(3);

impl View {
    /// Layer chain, newest first.
    pub fn layers(self) -> &'static [LayerId] {
        match self {
            PLAIN => &[LayerId(1)],
            OTHER => &[LayerId(2)],
            CHILD => &[LayerId(u64::MAX - 3), LayerId(3)],
            _ => &[LayerId(3)],
        }
    }

    /// Content names its view; a child's untouched blocks are its base's.
    fn salt(self) -> u64 {
        u64::from(if self == BASE { CHILD.0 } else { self.0 })
    }
}

/// States of a block from which on those older than the durable one are forgotten: many more than operations
/// are under way, since a read that was submitted before a write and its flush may still answer what was
/// before them.
const STATES_MAX: usize = 256;

/// Names a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Spot {
    pub view: View,
    pub chunk: u32,
    pub block: u32,
}

/// Sectors of one chunk of a view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    pub view: View,
    pub chunk: u32,
    pub sector: u32,
    pub sectors: u32,
}

impl Range {
    pub fn blocks(view: View, chunk: u32, block: u32, blocks: u32) -> Self {
        let per = BLOCK_SECTORS as u32;
        Self {
            view,
            chunk,
            sector: block * per,
            sectors: blocks * per,
        }
    }

    pub fn offset(&self) -> u32 {
        self.sector * SECTOR_BYTES as u32
    }

    pub fn len(&self) -> u32 {
        self.sectors * SECTOR_BYTES as u32
    }

    /// Blocks touched, even partly.
    pub fn spots(&self) -> impl Iterator<Item = Spot> + use<> {
        let per = BLOCK_SECTORS as u32;
        let (view, chunk) = (self.view, self.chunk);
        let blocks = self.sector / per..(self.sector + self.sectors).div_ceil(per);
        blocks.map(move |block| Spot { view, chunk, block })
    }
}

/// Content of a block: per sector the write that made it; 0 is a sector of zeroes.
pub type Tags = [u32; BLOCK_SECTORS];

fn word(salt: u64, chunk: u32, sector: u32, tag: u32, index: usize) -> u64 {
    let place = salt << 56 ^ u64::from(chunk) << 32 ^ u64::from(sector) << 8 ^ index as u64;
    let mixed = (place ^ u64::from(tag) << 40).wrapping_mul(0xd6e8_feb8_6659_fd93);
    (mixed ^ mixed >> 29) & !0xffff_ffff | u64::from(tag)
}

/// Fills one sector with the content that `tag` means there.
pub fn fill_sector(buf: &mut [u8], view: View, chunk: u32, sector: u32, tag: u32) {
    for (index, bytes) in buf.chunks_exact_mut(8).enumerate() {
        let value = if tag == 0 {
            0
        } else {
            word(view.salt(), chunk, sector, tag, index)
        };
        bytes.copy_from_slice(&value.to_le_bytes());
    }
}

/// The tag of a sector's content; `None` for bytes that nobody ever wrote there.
fn sector_tag(buf: &[u8], view: View, chunk: u32, sector: u32) -> Option<u32> {
    let tag = u32::from_le_bytes(buf[..4].try_into().expect("a sector has 4 bytes"));
    let mut expected = [0; SECTOR_BYTES];
    fill_sector(&mut expected, view, chunk, sector, tag);
    (expected == buf).then_some(tag)
}

/// The tags of some sectors of a block, from sector `first` on.
fn tags_of(bytes: &[u8], spot: Spot, first: usize) -> Option<Vec<u32>> {
    let base = spot.block * BLOCK_SECTORS as u32 + first as u32;
    let numbered = bytes.chunks_exact(SECTOR_BYTES).zip(base..);
    numbered
        .map(|(sector, number)| sector_tag(sector, spot.view, spot.chunk, number))
        .collect()
}

#[derive(Debug, Clone, Copy)]
struct State {
    seq: u64,
    tags: Tags,
}

#[derive(Debug, Clone)]
struct Block {
    states: Vec<State>,
    /// Newest state that was acknowledged.
    acked: u64,
    /// Newest state that was read.
    seen: u64,
    durable: u64,
}

impl Block {
    fn new(tags: Tags) -> Self {
        Self {
            states: vec![State { seq: 0, tags }],
            acked: 0,
            seen: 0,
            durable: 0,
        }
    }

    fn live(&self) -> u64 {
        self.acked.max(self.seen)
    }
}

/// The least state that each block of a read may answer.
pub type Floors = Vec<u64>;

/// What a flush covers.
pub type Covered = Vec<(Spot, u64)>;

/// See the module.
#[derive(Debug, Clone, Default)]
pub struct Model {
    blocks: BTreeMap<Spot, Block>,
    seq: u64,
}

impl Model {
    /// Every block ever touched, in order.
    pub fn spots(&self) -> Vec<Spot> {
        self.blocks.keys().copied().collect()
    }

    fn initial(&self, spot: Spot) -> Tags {
        let base = Spot { view: BASE, ..spot };
        match self.blocks.get(&base) {
            Some(block) if spot.view == CHILD => block.states[block.states.len() - 1].tags,
            _ => Tags::default(),
        }
    }

    fn block(&mut self, spot: Spot) -> &mut Block {
        let initial = self.initial(spot);
        self.blocks
            .entry(spot)
            .or_insert_with(|| Block::new(initial))
    }

    /// A write (or with tag 0 a zero) was submitted. The number names its state.
    pub fn change(&mut self, range: Range, tag: u32) -> u64 {
        self.seq += 1;
        let seq = self.seq;
        for spot in range.spots() {
            let block = self.block(spot);
            let last = block.states[block.states.len() - 1].seq;
            let mut next: Vec<State> = block
                .states
                .iter()
                .filter(|s| s.seq == last)
                .copied()
                .collect();
            for state in &mut next {
                state.seq = seq;
                for (i, slot) in state.tags.iter_mut().enumerate() {
                    let sector = spot.block * BLOCK_SECTORS as u32 + i as u32;
                    if (range.sector..range.sector + range.sectors).contains(&sector) {
                        *slot = tag;
                    }
                }
            }
            next.dedup_by_key(|s| s.tags);
            let durable = block.durable;
            if block.states.len() > STATES_MAX {
                block.states.retain(|s| s.seq >= durable);
            }
            block.states.extend(next);
        }
        seq
    }

    /// The first layer of `view` was dropped; the spots are the ones that it concerns.
    pub fn drop_layer(&mut self, view: View, concerned: impl Fn(Spot) -> bool) -> (u64, Vec<Spot>) {
        self.seq += 1;
        let seq = self.seq;
        let here = |s: &Spot| s.view == view && concerned(*s);
        let spots: Vec<Spot> = self.spots().into_iter().filter(here).collect();
        for spot in &spots {
            let tags = self.initial(*spot);
            self.block(*spot).states.push(State { seq, tags });
        }
        (seq, spots)
    }

    /// The operation failed: of each block it may have changed all its sectors, or none. States made on top
    /// of it, of parts of the block, get a variant without it. If it left all `untouched`, and was a write,
    /// only those remain.
    pub fn refused(&mut self, spots: impl Iterator<Item = Spot>, seq: u64, untouched: bool) {
        for spot in spots {
            let block = self.block(spot);
            let earlier = block.states.iter().filter(|s| s.seq < seq);
            let newest = earlier.map(|s| s.seq).max();
            let before: Vec<Tags> = block
                .states
                .iter()
                .filter(|s| Some(s.seq) == newest)
                .map(|s| s.tags)
                .collect();
            let own = block.states.iter().find(|s| s.seq == seq).copied();
            let Some(own) = own else {
                continue;
            };
            let tag = own.tags.iter().max();
            let tag = tag.filter(|tag| untouched && !before.iter().any(|old| old.contains(tag)));
            let is_gone =
                |state: &State| state.seq >= seq && tag.is_some_and(|tag| state.tags.contains(tag));
            let mut all: Vec<State> = Vec::new();
            for state in &block.states {
                if !is_gone(state) {
                    all.push(*state);
                }
                for before in before.iter().filter(|_| state.seq >= seq) {
                    let mut tags = state.tags;
                    for ((tag, own), before) in tags.iter_mut().zip(own.tags).zip(before) {
                        if *tag == own {
                            *tag = *before;
                        }
                    }
                    let seq = state.seq;
                    if all.iter().all(|s| (s.seq, s.tags) != (seq, tags)) {
                        all.push(State { seq, tags });
                    }
                }
            }
            block.states = all;
        }
    }

    /// The operation was acknowledged; with `durable` it was flushed too.
    pub fn acknowledge(&mut self, spots: impl Iterator<Item = Spot>, seq: u64, durable: bool) {
        for spot in spots {
            let block = self.block(spot);
            block.acked = block.acked.max(seq);
            if durable {
                block.durable = block.durable.max(seq);
            }
        }
    }

    /// What a flush that is submitted now will have made durable.
    pub fn covered(&self, concerned: impl Fn(Spot) -> bool) -> Covered {
        let open = self
            .blocks
            .iter()
            .filter(|(s, b)| b.acked > b.durable && concerned(**s));
        open.map(|(spot, block)| (*spot, block.acked)).collect()
    }

    /// The flush is done.
    pub fn flushed(&mut self, covered: &Covered) {
        for (spot, seq) in covered {
            let block = self.block(*spot);
            block.durable = block.durable.max(*seq);
        }
    }

    /// Floors of a read that is submitted now.
    pub fn floors(&mut self, range: Range) -> Floors {
        range.spots().map(|spot| self.block(spot).live()).collect()
    }

    /// The oldest allowed state of `spot` that shows `bytes` from sector `first` on.
    fn matching(&self, spot: Spot, first: usize, bytes: &[u8], floor: u64) -> Result<u64, String> {
        let block = &self.blocks[&spot];
        let Some(tags) = tags_of(bytes, spot, first) else {
            let start = &bytes[..16];
            return Err(format!(
                "{spot:?} holds bytes that nobody wrote there: {start:02x?}"
            ));
        };
        let shows = |s: &&State| s.seq >= floor && s.tags[first..first + tags.len()] == tags;
        let found = block.states.iter().find(shows);
        found.map(|s| s.seq).ok_or_else(|| {
            let states = &block.states;
            format!(
                "{spot:?} shows {tags:?} from sector {first}, allowed from {floor} on: {states:?}"
            )
        })
    }

    /// Checks what a read of `range` answered.
    pub fn check_read(
        &mut self,
        range: Range,
        bytes: &[u8],
        floors: &Floors,
    ) -> Result<(), String> {
        let mut rest = bytes;
        for (spot, floor) in range.spots().zip(floors) {
            let start = spot.block * BLOCK_SECTORS as u32;
            let first = range.sector.saturating_sub(start) as usize;
            let len = ((BLOCK_SECTORS - first) * SECTOR_BYTES).min(rest.len());
            let (part, tail) = rest.split_at(len);
            rest = tail;
            let seq = self.matching(spot, first, part, *floor)?;
            let block = self.block(spot);
            block.seen = block.seen.max(seq);
        }
        Ok(())
    }

    /// Checks a block after a crash and pins what it shows.
    pub fn check_after_crash(
        &mut self,
        spot: Spot,
        bytes: &[u8],
        kind: CrashKind,
    ) -> Result<(), String> {
        let block = &self.blocks[&spot];
        let floor = match kind {
            CrashKind::Process => block.live().max(block.durable),
            CrashKind::Power => block.durable,
        };
        let seq = self.matching(spot, 0, bytes, floor)?;
        let block = self.block(spot);
        let shown = tags_of(bytes, spot, 0);
        block
            .states
            .retain(|s| s.seq == seq && shown.as_deref() == Some(&s.tags));
        (block.acked, block.seen, block.durable) = (seq, seq, seq);
        Ok(())
    }

    /// Checks that a block shows its last state.
    pub fn check_last_state(&self, spot: Spot, bytes: &[u8]) -> Result<(), String> {
        let states = &self.blocks[&spot].states;
        let last = states[states.len() - 1].seq;
        self.matching(spot, 0, bytes, last).map(|_| ())
    }
}
