//! The pages of a checkpoint: leaves, the tables above them, and the bitmap, on their way to the device.

use fabric_types::checksum::crc32c;
use zerocopy::IntoBytes;

use super::super::super::alloc::Run;
use super::super::super::arena::Arena;
use super::super::super::format::{DIR_PTRS, Ptr, UNIT_BYTES, UNIT_UNMAPPED, stored_blocks};
use super::super::super::leaf::{LeafState, StandIn};
use super::super::requests::IoKind;
use super::super::resources::Resources;

/// Map pages and tables written by one request.
const IO_BLOCKS: u32 = 32;
/// Requests in flight; more would crowd out guests.
const IOS_MAX: u32 = 8;
/// Words of the bitmap in one page.
const PAGE_WORDS: usize = UNIT_BYTES / 8;

/// Kinds of pages, in the order in which they are queued: each names those before it.
#[derive(Debug, Clone, Copy)]
pub(super) enum Pages {
    Moved(MovedPages),
    Bitmap,
    BitmapDirs,
}

/// Kinds that go to fresh units, many in one request.
#[derive(Debug, Clone, Copy)]
pub(super) enum MovedPages {
    Leaves,
    Tables,
    Dirs,
    Root,
}

impl Pages {
    pub(super) const FIRST: Self = Self::Moved(MovedPages::Leaves);

    /// What is queued when all of these are.
    pub(super) fn next(self) -> Option<Self> {
        match self {
            Self::Moved(MovedPages::Leaves) => Some(Self::Moved(MovedPages::Tables)),
            Self::Moved(MovedPages::Tables) => Some(Self::Moved(MovedPages::Dirs)),
            Self::Moved(MovedPages::Dirs) => Some(Self::Moved(MovedPages::Root)),
            Self::Moved(MovedPages::Root) => Some(Self::Bitmap),
            Self::Bitmap => Some(Self::BitmapDirs),
            Self::BitmapDirs => None,
        }
    }
}

impl MovedPages {
    /// How many are dirty, at most.
    fn left(self, res: &Resources) -> u32 {
        let map = &res.map;
        match self {
            Self::Leaves => map.leaves.dirty(),
            Self::Tables => map.table.dirty_count(),
            Self::Dirs => map.table.page_ptrs.len().div_ceil(DIR_PTRS) as u32,
            Self::Root => u32::from(map.roots.is_root_dirty()),
        }
    }
}

/// Copies dirty pages into its buffers and writes them.
#[derive(Debug)]
pub(super) struct PageWriter {
    /// Free buffers of `IO_BLOCKS` each.
    buffers: Vec<u32>,
    /// Requests in flight.
    ios: u32,
    /// Pages of the kind that is being queued before which none is dirty.
    cursor: u32,
}

impl PageWriter {
    pub(super) fn new(arena: &mut Arena) -> Self {
        let buffer = |_| {
            let (start, len) = arena
                .take_up_to(IO_BLOCKS)
                .expect("the arena has a least size");
            assert_eq!(len, IO_BLOCKS);
            start
        };
        Self {
            buffers: (0..IOS_MAX).map(buffer).collect(),
            ios: 0,
            cursor: 0,
        }
    }

    /// Whether requests are in flight.
    pub(super) fn is_busy(&self) -> bool {
        self.ios > 0
    }

    /// The buffer that the next `write` takes.
    pub(super) fn buffer(&self) -> Option<u32> {
        self.buffers.last().copied()
    }

    /// Writes the first blocks of [`buffer`](Self::buffer).
    pub(super) fn write(
        &mut self,
        io: u32,
        unit: u32,
        (buffer, count): (u32, u32),
        kind: IoKind,
        res: &mut Resources,
    ) {
        let taken = self.buffers.pop();
        assert_eq!(taken, Some(buffer), "the buffer that was filled is written");
        self.ios += 1;
        res.counters.checkpoint_bytes += u64::from(count) * UNIT_BYTES as u64;
        res.write(io, unit, (buffer, count), kind);
    }

    /// Reads a page into the first block of [`buffer`](Self::buffer).
    pub(super) fn read(
        &mut self,
        io: u32,
        unit: u32,
        buffer: u32,
        kind: IoKind,
        res: &mut Resources,
    ) {
        let taken = self.buffers.pop();
        assert_eq!(taken, Some(buffer), "the buffer that is free is read into");
        self.ios += 1;
        res.device.aim(io, res.arena.iovec(buffer, 1));
        res.read(io, unit, kind);
    }

    /// A request has ended.
    pub(super) fn end(
        &mut self,
        io: u32,
        buffer: u32,
        result: Result<(), i32>,
        res: &mut Resources,
    ) {
        res.device.give_back(io);
        self.buffers.push(buffer);
        self.ios -= 1;
        if let Err(errno) = result {
            res.faults.fail(errno);
        }
    }

    /// Queues pages of a kind until none is left; `false` when requests or buffers ran out before.
    pub(super) fn stage(&mut self, pages: Pages, res: &mut Resources) -> bool {
        let is_done = match pages {
            Pages::Moved(pages) => self.stage_moved(pages, res),
            Pages::Bitmap => self.stage_bitmap(res),
            Pages::BitmapDirs => self.stage_bitmap_dirs(res),
        };
        if is_done {
            self.cursor = 0;
        }
        is_done
    }

    fn stage_moved(&mut self, pages: MovedPages, res: &mut Resources) -> bool {
        loop {
            let left = pages.left(res);
            if left == 0 {
                return true;
            }
            let Some(buffer) = self.buffer() else {
                return false;
            };
            let Some(io) = res.device.take() else {
                return false;
            };
            let Some(units) = res.alloc.take_pages(left.min(IO_BLOCKS)) else {
                res.device.give_back(io);
                res.faults.fail(libc::ENOSPC);
                return false;
            };
            res.device.leaves_mut(io).clear();
            let used = self.fill(pages, io, units, buffer, res);
            if used < units.len {
                res.alloc.give_back(Run {
                    start: units.start + used,
                    len: units.len - used,
                });
            }
            if used == 0 {
                res.device.give_back(io);
                return true;
            }
            let kind = IoKind::Pages { buffer };
            self.write(io, units.start, (buffer, used), kind, res);
        }
    }

    /// Puts the next dirty pages into the buffer, destined for `units`; returns how many.
    fn fill(
        &mut self,
        pages: MovedPages,
        io: u32,
        units: Run,
        buffer: u32,
        res: &mut Resources,
    ) -> u32 {
        for used in 0..units.len {
            let unit = units.start + used;
            let Some(old) = self.fill_page(pages, io, unit, buffer + used, res) else {
                return used;
            };
            res.alloc.commit(unit);
            if old.unit != 0 {
                res.alloc.free_replaced(old.unit);
            }
        }
        units.len
    }

    /// Puts the next dirty page into the buffer block, destined for `unit`; returns where it was, `None` when
    /// none is dirty.
    fn fill_page(
        &mut self,
        pages: MovedPages,
        io: u32,
        unit: u32,
        buffer: u32,
        res: &mut Resources,
    ) -> Option<Ptr> {
        let (arena, map) = (&mut res.arena, &mut res.map);
        let old = match pages {
            MovedPages::Leaves => return self.fill_leaf(io, unit, buffer, res),
            MovedPages::Tables => {
                let page = map.table.next_dirty_page(self.cursor)?;
                self.cursor = page + 1;
                let crc = copy_page(arena, buffer, map.table.page_bytes(page));
                map.table.set_page_ptr(page, Ptr { unit, crc })
            }
            MovedPages::Dirs => {
                let dir = map.table.next_dirty_dir(self.cursor)?;
                self.cursor = dir + 1;
                let crc = copy_page(arena, buffer, map.table.dir_bytes(dir));
                map.roots.touch_root();
                map.table.set_dir_ptr(dir, Ptr { unit, crc })
            }
            MovedPages::Root => {
                if !map.roots.is_root_dirty() {
                    return None;
                }
                let crc = copy_page(arena, buffer, map.table.dir_ptrs.as_bytes());
                map.roots.move_root(Ptr { unit, crc })
            }
        };
        Some(old)
    }

    fn fill_leaf(&mut self, io: u32, unit: u32, buffer: u32, res: &mut Resources) -> Option<Ptr> {
        let slot = self.next_dirty_leaf(res)?;
        res.note_replaced(slot);
        let map = &mut res.map;
        let crc = copy_page(&mut res.arena, buffer, map.leaves.bytes(slot));
        map.leaves.mark_clean(slot);
        // Until it is written nobody may evict it and read it back.
        map.leaves.meta_mut(slot).pins += 1;
        res.device.leaves_mut(io).push(slot);
        let stored = stored_blocks(map.leaves.entries(slot));
        let (rec, leaf) = map.leaf_in(slot);
        let record = map.table.record_mut(rec);
        Some(record.set_leaf(usize::from(leaf), Ptr { unit, crc }, stored))
    }

    /// Next leaf to be written; those in which nothing is mapped any more are dropped on the way.
    fn next_dirty_leaf(&mut self, res: &mut Resources) -> Option<u32> {
        while self.cursor < res.map.leaves.slots() {
            let slot = self.cursor;
            self.cursor += 1;
            let leaves = &res.map.leaves;
            let meta = leaves.meta(slot);
            if meta.state != LeafState::Ready || !meta.dirty {
                continue;
            }
            if matches!(meta.stand_in, StandIn::Unread { .. }) {
                // Changed since pages were read once more: it belongs to the next checkpoint.
                continue;
            }
            let mut entries = leaves.entries(slot).iter();
            if entries.any(|e| e.unit != UNIT_UNMAPPED) {
                return Some(slot);
            }
            res.note_replaced(slot);
            let old = res.map.drop_empty_leaf(slot);
            if old.unit != 0 {
                res.alloc.free_replaced(old.unit);
            }
        }
        None
    }

    fn stage_bitmap(&mut self, res: &mut Resources) -> bool {
        loop {
            let Some(buffer) = self.buffer() else {
                return false;
            };
            let Some(io) = res.device.take() else {
                return false;
            };
            let Some(page) = res.alloc.next_dirty_page(self.cursor) else {
                res.device.give_back(io);
                return true;
            };
            self.cursor = page + 1;
            let block = res.arena.buf_mut().blocks_mut(buffer, 1);
            let bitmap = res.alloc.committed();
            bitmap.write_bytes(page as usize * PAGE_WORDS, block);
            let crc = crc32c(block);
            let unit = res.map.roots.move_bitmap_page(&res.geo, page, crc);
            self.write(io, unit, (buffer, 1), IoKind::Pages { buffer }, res);
        }
    }

    fn stage_bitmap_dirs(&mut self, res: &mut Resources) -> bool {
        while let Some(dir) = res.map.roots.next_bitmap_dir() {
            let Some(buffer) = self.buffer() else {
                return false;
            };
            let Some(io) = res.device.take() else {
                return false;
            };
            let roots = &mut res.map.roots;
            let crc = copy_page(&mut res.arena, buffer, roots.bitmap_dir_bytes(dir));
            let unit = roots.move_bitmap_dir(&res.geo, dir, crc);
            self.write(io, unit, (buffer, 1), IoKind::Pages { buffer }, res);
        }
        true
    }
}

/// Copies a page into a buffer block, the rest zero; returns the checksum.
fn copy_page(arena: &mut Arena, buffer: u32, bytes: &[u8]) -> u32 {
    let page = arena.buf_mut().blocks_mut(buffer, 1);
    let (head, tail) = page.split_at_mut(bytes.len());
    head.copy_from_slice(bytes);
    tail.fill(0);
    crc32c(page)
}
