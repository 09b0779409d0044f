//! What is done to one leaf.

use std::collections::VecDeque;

use super::super::super::alloc::Run;
use super::super::super::arena::AlignedBuf;
use super::super::super::format::{LEAF_BLOCKS, MapEntry, is_place};

/// Bad blocks that are remembered; with more the oldest are met again.
const BAD_MAX: usize = 64;

/// What is done to one leaf.
#[derive(Debug, Default)]
pub(in super::super) struct Job {
    /// What the leaf said when it was looked at, and which of its blocks are moved.
    entries: Vec<MapEntry>,
    chosen: Vec<bool>,
    /// Where to.
    pub(super) room: Vec<Run>,
    /// Content, by block of the leaf. Only while there is work.
    buffer: Option<AlignedBuf>,
    /// Blocks to be read again.
    pub(in super::super) retry: Vec<u16>,
    /// Its page was not in the cache.
    pub(in super::super) loaded: bool,
    /// Guests are at it: only what lies in victims is moved.
    pub(super) hot: bool,
}

/// How a leaf's blocks lie.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct LeafShape {
    /// Mapped blocks that are not known to be bad, and of those the ones in victims.
    pub(super) movable: u32,
    pub(super) in_victims: u32,
    /// Where a block does not lie behind the one before it.
    pub(super) breaks: u32,
}

/// Bad blocks that were met: they stay where they are. Reported once, while they are remembered.
#[derive(Debug, Default)]
pub(super) struct BadBlocks {
    met: VecDeque<MapEntry>,
}

impl BadBlocks {
    pub(super) fn note(&mut self, entry: MapEntry) {
        if self.met.len() == BAD_MAX {
            self.met.pop_front();
        }
        self.met.push_back(entry);
    }

    fn is_good(&self, entry: &MapEntry) -> bool {
        self.met.is_empty() || !self.met.contains(entry)
    }
}

impl LeafShape {
    pub(super) fn of(
        entries: &[MapEntry],
        bad: &BadBlocks,
        is_victim: impl Fn(u32) -> bool,
    ) -> Self {
        let mut shape = Self::default();
        let mut last = 0;
        for entry in entries {
            if is_place(entry.unit) {
                let good = u32::from(bad.is_good(entry));
                shape.movable += good;
                shape.breaks += u32::from(is_place(last) && entry.unit != last + 1);
                shape.in_victims += good * u32::from(is_victim(entry.unit));
            }
            last = entry.unit;
        }
        shape
    }
}

impl Job {
    /// A leaf that says this is looked at; nothing is chosen yet.
    pub(super) fn look_at(&mut self, entries: &[MapEntry]) {
        self.entries.clear();
        self.entries.extend_from_slice(entries);
        self.room.clear();
    }

    /// Marks the good blocks in units that are wanted.
    pub(super) fn choose(&mut self, bad: &BadBlocks, wanted: impl Fn(u32) -> bool) {
        let is_chosen = |e: &MapEntry| is_place(e.unit) && bad.is_good(e) && wanted(e.unit);
        self.chosen.clear();
        self.chosen.extend(self.entries.iter().map(is_chosen));
    }

    /// Blocks will be read.
    pub(in super::super) fn begin_reads(&mut self) {
        self.buffer
            .get_or_insert_with(|| AlignedBuf::new(LEAF_BLOCKS));
        self.retry.clear();
    }

    fn buffer(&self) -> &AlignedBuf {
        let buffer = self.buffer.as_ref();
        buffer.expect("made when victims were located")
    }

    /// Memory for `count` blocks from `first` on.
    pub(in super::super) fn memory(&self, first: u16, count: u16) -> libc::iovec {
        self.buffer().iovec(u32::from(first), u32::from(count))
    }

    /// Content of a block of the leaf.
    pub(in super::super) fn block(&self, index: u16) -> &[u8] {
        self.buffer().blocks(u32::from(index), 1)
    }

    /// What the leaf said of a block.
    pub(in super::super) fn entry(&self, index: u16) -> MapEntry {
        self.entries[usize::from(index)]
    }

    pub(in super::super) fn is_chosen(&self, index: u16) -> bool {
        self.chosen[usize::from(index)]
    }

    /// The block stays where it is.
    pub(in super::super) fn leave(&mut self, index: u16) {
        self.chosen[usize::from(index)] = false;
    }

    /// Chosen blocks from `from` on.
    pub(in super::super) fn chosen_from(&self, from: u32) -> u32 {
        let rest = self.chosen.get(from as usize..).unwrap_or_default();
        rest.iter().filter(|&&chosen| chosen).count() as u32
    }

    /// The next chosen blocks from `from` on that lie side by side.
    pub(in super::super) fn next_run(&self, from: u32) -> Option<(u16, u16)> {
        let chosen = |i: usize| self.chosen.get(i) == Some(&true);
        let first = (from as usize..self.chosen.len()).find(|&i| chosen(i))?;
        let unit = self.entries[first].unit;
        let follows =
            |i: &usize| chosen(first + i) && self.entries[first + i].unit == unit + *i as u32;
        let count = 1 + (1..).take_while(follows).count();
        Some((first as u16, count as u16))
    }

    /// The unit that the next block goes to, if there is still room.
    pub(in super::super) fn next_unit(&self) -> Option<u32> {
        self.room.first().map(|run| run.start)
    }

    pub(in super::super) fn take_unit(&mut self) -> u32 {
        let run = &mut self.room[0];
        let unit = run.start;
        (run.start, run.len) = (run.start + 1, run.len - 1);
        if run.len == 0 {
            self.room.remove(0);
        }
        unit
    }

    pub(super) fn ram_bytes(&self) -> u64 {
        let buffer = self.buffer.as_ref().map_or(0, AlignedBuf::len);
        let entries = self.entries.capacity() * (size_of::<MapEntry>() + 1);
        (buffer + entries) as u64
    }
}
