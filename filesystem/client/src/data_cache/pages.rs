//! A page: the blocks of it that are there, in the runs that they were put with.

use std::ops::Range;
use std::sync::Arc;

use namespace::BLOCK;

use super::PAGE_BLOCKS;

/// Bytes of a run besides its data: two allocations, and its place in the page.
const RUN_OVERHEAD: u64 = 96;

/// Bytes of a page besides its runs: its places in the table, in a queue and among the ghosts.
pub(super) const PAGE_OVERHEAD: u64 = 320;

/// Some blocks of a page, one behind the other: `first..end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Blocks {
    pub(super) first: u32,
    pub(super) end: u32,
}

impl Blocks {
    pub(super) fn new(first: u32, end: u32) -> Self {
        assert!(first < end && end <= PAGE_BLOCKS, "blocks are of one page");
        Self { first, end }
    }

    pub(super) fn bytes(self) -> usize {
        ((self.end - self.first) as u64 * BLOCK) as usize
    }

    /// One bit for each.
    pub(super) fn mask(self) -> u16 {
        let below = |end: u32| ((1_u32 << end) - 1) as u16;
        below(self.end) & !below(self.first)
    }

    /// Those of them that this mask has, as far as they lie one behind the other.
    pub(super) fn runs_in(self, mask: u16) -> impl Iterator<Item = Self> {
        let mut at = self.first;
        std::iter::from_fn(move || {
            let is_in = |block: &u32| mask >> block & 1 == 1;
            let first = (at..self.end).find(is_in)?;
            let end = (first..self.end).find(|block| !is_in(block));
            at = end.unwrap_or(self.end);
            Some(Self::new(first, at))
        })
    }

    /// Where these blocks are in the data of `outer`, which they are among.
    fn within(self, outer: Self) -> Range<usize> {
        let at = |block: u32| ((block - outer.first) as u64 * BLOCK) as usize;
        at(self.first)..at(self.end)
    }
}

/// Blocks with their data. Cloning copies no data.
#[derive(Debug, Clone)]
pub(super) struct Run {
    pub(super) blocks: Blocks,
    // Boxed, so that the allocation is as large as whole blocks, which allocators have no waste for.
    data: Arc<Box<[u8]>>,
}

impl Run {
    pub(super) fn new(blocks: Blocks, bytes: &[u8]) -> Self {
        assert_eq!(bytes.len(), blocks.bytes(), "data are whole blocks");
        Self {
            blocks,
            data: Arc::new(bytes.into()),
        }
    }

    pub(super) fn weight(&self) -> u64 {
        self.data.len() as u64 + RUN_OVERHEAD
    }

    /// Some of its blocks by themselves.
    fn part(&self, blocks: Blocks) -> Self {
        if blocks == self.blocks {
            return self.clone();
        }
        Self::new(blocks, &self.data[blocks.within(self.blocks)])
    }

    /// The data of those blocks of it that are among these, and which blocks that are.
    fn slice(&self, wanted: Blocks) -> Option<(Blocks, Slice)> {
        let first = self.blocks.first.max(wanted.first);
        let end = self.blocks.end.min(wanted.end);
        let blocks = (first < end).then(|| Blocks::new(first, end))?;
        let slice = Slice {
            data: Arc::clone(&self.data),
            range: blocks.within(self.blocks),
        };
        Some((blocks, slice))
    }
}

/// Bytes of a run.
#[derive(Debug, Clone)]
pub(crate) struct Slice {
    data: Arc<Box<[u8]>>,
    range: Range<usize>,
}

impl Slice {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.data[self.range.clone()]
    }

    /// Some of its bytes.
    pub(crate) fn part(mut self, range: Range<usize>) -> Self {
        assert!(range.end <= self.range.len(), "a part is within");
        let begin = self.range.start;
        self.range = begin + range.start..begin + range.end;
        self
    }
}

/// What of a page is there.
#[derive(Debug, Default)]
pub(super) struct Page {
    /// In order; none overlap.
    runs: Vec<Run>,
    /// Blocks that are there.
    present: u16,
    /// Blocks that were read since one was last read again.
    read: u16,
    /// How often it was read again, up to a maximum.
    pub(super) rereads: u8,
    pub(super) is_main: bool,
}

/// Rereads that count.
const REREADS_MAX: u8 = 3;

impl Page {
    /// One of which nothing is there.
    pub(super) fn new(is_main: bool) -> Self {
        Self {
            is_main,
            ..Self::default()
        }
    }

    pub(super) fn present(&self) -> u16 {
        self.present
    }

    pub(super) fn weight(&self) -> u64 {
        PAGE_OVERHEAD + self.runs.iter().map(Run::weight).sum::<u64>()
    }

    /// What is there of these blocks, in order.
    pub(super) fn slices(&self, wanted: Blocks) -> impl Iterator<Item = (Blocks, Slice)> {
        self.runs.iter().filter_map(move |run| run.slice(wanted))
    }

    /// Blocks were read. A page counts as read again only when the same block is: otherwise whoever reads a
    /// file once in small pieces would have all of its pages stay.
    pub(super) fn note_read(&mut self, mask: u16) {
        if self.read & mask == 0 {
            self.read |= mask;
            return;
        }
        self.read = mask;
        self.rereads = (self.rereads + 1).min(REREADS_MAX);
    }

    /// The runs of a run that are missing here.
    pub(super) fn missing(&self, run: &Run) -> Vec<Run> {
        let missing = run.blocks.runs_in(!self.present);
        missing.map(|blocks| run.part(blocks)).collect()
    }

    /// Adds a run that is missing.
    pub(super) fn add(&mut self, run: Run) {
        debug_assert_eq!(self.present & run.blocks.mask(), 0);
        self.present |= run.blocks.mask();
        let place = self
            .runs
            .partition_point(|before| before.blocks.end <= run.blocks.first);
        self.runs.insert(place, run);
    }
}
