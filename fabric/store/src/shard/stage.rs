//! The pages of a checkpoint: leaves, the tables above them, and the bitmap, on their way to the device.

use fabric_types::checksum::crc32c;
use zerocopy::IntoBytes;

use super::super::alloc::Run;
use super::super::format::{DIR_PTRS, Ptr, UNIT_BYTES, UNIT_UNMAPPED};
use super::super::leaf::LeafState;
use super::super::table::NONE;
use super::checkpoint::Phase;
use super::{CHECKPOINT_IO_BLOCKS, IoKind, ShardCore};

/// Words of the bitmap in one page.
const PAGE_WORDS: usize = UNIT_BYTES / 8;
/// Kinds of pages that go to fresh units, many in one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pages {
    Leaves,
    Tables,
    Dirs,
    Root,
}

impl ShardCore {
    /// Queues pages of a kind until none is left or requests or buffers run out.
    pub(super) fn stage_all(&mut self, pages: Pages, then: Phase) {
        loop {
            let left = match pages {
                Pages::Leaves => self.leaves.dirty(),
                Pages::Tables => self.table.dirty_count(),
                Pages::Dirs => self.table.page_ptrs.len().div_ceil(DIR_PTRS) as u32,
                Pages::Root => u32::from(self.ckpt.root_dirty),
            };
            if left == 0 {
                self.ckpt.next_phase(then);
                return;
            }
            let Some(&buffer) = self.ckpt.buffers.last() else {
                return;
            };
            let Some(io) = self.take_io(false) else {
                return;
            };
            let Some(units) = self.alloc.take_pages(left.min(CHECKPOINT_IO_BLOCKS)) else {
                self.ios.give_back(io);
                self.fail(libc::ENOSPC);
                return;
            };
            self.ios[io].leaves.clear();
            let mut used = 0;
            while used < units.len && self.stage_page(pages, io, units.start + used, buffer + used)
            {
                used += 1;
            }
            if used < units.len {
                self.alloc.give_back(Run {
                    start: units.start + used,
                    len: units.len - used,
                });
            }
            if used == 0 {
                self.ios.give_back(io);
                self.ckpt.next_phase(then);
                return;
            }
            self.emit_pages(io, units.start, buffer, used);
        }
    }

    fn emit_pages(&mut self, io: u32, unit: u32, buffer: u32, count: u32) {
        self.ckpt.buffers.pop();
        self.ckpt.ios += 1;
        self.counters.checkpoint_bytes += u64::from(count) * UNIT_BYTES as u64;
        self.emit_write(io, unit, buffer, count, IoKind::Pages { buffer });
    }

    /// Puts the next dirty page into the buffer, destined for `unit`; `false` when there is none.
    fn stage_page(&mut self, pages: Pages, io: u32, unit: u32, buffer: u32) -> bool {
        let old = match pages {
            Pages::Leaves => {
                let Some(slot) = self.next_dirty_leaf() else {
                    return false;
                };
                let ptr = Ptr {
                    unit,
                    crc: self.fill_page(buffer, |core| core.leaves.bytes(slot)),
                };
                self.leaves.mark_clean(slot);
                // Until it is written nobody may evict it and read it back.
                self.leaves.meta_mut(slot).pins += 1;
                self.ios[io].leaves.push(slot);
                let meta = *self.leaves.meta(slot);
                std::mem::replace(
                    &mut self.table.record_mut(meta.rec).leaves[usize::from(meta.leaf)],
                    ptr,
                )
            }
            Pages::Tables => {
                let Some(page) = self.table.next_dirty_page(self.ckpt.cursor) else {
                    return false;
                };
                self.ckpt.cursor = page + 1;
                let crc = self.fill_page(buffer, |core| core.table.page_bytes(page));
                self.table.set_page_ptr(page, Ptr { unit, crc })
            }
            Pages::Dirs => {
                let Some(dir) = self.table.next_dirty_dir(self.ckpt.cursor) else {
                    return false;
                };
                self.ckpt.cursor = dir + 1;
                let crc = self.fill_page(buffer, |core| core.table.dir_bytes(dir));
                self.ckpt.root_dirty = true;
                self.table.set_dir_ptr(dir, Ptr { unit, crc })
            }
            Pages::Root => {
                if !std::mem::take(&mut self.ckpt.root_dirty) {
                    return false;
                }
                let crc = self.fill_page(buffer, |core| core.table.dir_ptrs.as_bytes());
                std::mem::replace(&mut self.ckpt.table_root, Ptr { unit, crc })
            }
        };
        self.alloc.commit(unit);
        if old.unit != 0 {
            self.alloc.free_replaced(old.unit);
        }
        true
    }

    /// Copies a page into a buffer block, the rest zero; returns the checksum.
    fn fill_page(&mut self, buffer: u32, bytes: impl Fn(&Self) -> &[u8]) -> u32 {
        let (ptr, len) = {
            let bytes = bytes(self);
            (bytes.as_ptr(), bytes.len())
        };
        let page = self.arena.buf_mut().blocks_mut(buffer, 1);
        page[len..].fill(0);
        // SAFETY: the source is a table or cache page of this shard, which the arena's blocks never overlap.
        unsafe { page.as_mut_ptr().copy_from_nonoverlapping(ptr, len) };
        crc32c(page)
    }

    /// Next leaf to be written; those in which nothing is mapped any more are dropped on the way.
    fn next_dirty_leaf(&mut self) -> Option<u32> {
        while self.ckpt.cursor < self.leaves.slots() {
            let slot = self.ckpt.cursor;
            self.ckpt.cursor += 1;
            let meta = *self.leaves.meta(slot);
            if meta.state != LeafState::Ready || !meta.dirty {
                continue;
            }
            if self
                .leaves
                .entries(slot)
                .iter()
                .any(|e| e.unit != UNIT_UNMAPPED)
            {
                return Some(slot);
            }
            self.drop_empty_leaf(slot);
        }
        None
    }

    fn drop_empty_leaf(&mut self, slot: u32) {
        let meta = *self.leaves.meta(slot);
        let newest = self
            .leaves
            .entries(slot)
            .iter()
            .map(|e| e.version)
            .max()
            .unwrap_or(0);
        let record = self.table.record_mut(meta.rec);
        record.floor = record.floor.max(newest);
        let old = std::mem::take(&mut record.leaves[usize::from(meta.leaf)]);
        if old.unit != 0 {
            self.alloc.free_replaced(old.unit);
        }
        self.leaves.mark_clean(slot);
        if meta.pins == 0 {
            self.leaves.drop_slot(slot);
            self.table.runtime_mut(meta.rec).leaf_slots[usize::from(meta.leaf)] = NONE;
            self.note_if_bare(meta.rec);
        }
    }

    pub(super) fn stage_bitmap(&mut self) {
        loop {
            let Some(&buffer) = self.ckpt.buffers.last() else {
                return;
            };
            let Some(io) = self.take_io(false) else {
                return;
            };
            let Some(page) = self.alloc.next_dirty_page(self.ckpt.cursor) else {
                self.ios.give_back(io);
                self.ckpt.next_phase(Phase::BitmapDirs);
                return;
            };
            self.ckpt.cursor = page + 1;
            let block = self.arena.buf_mut().blocks_mut(buffer, 1);
            self.alloc
                .committed()
                .write_bytes(page as usize * PAGE_WORDS, block);
            let crc = crc32c(block);
            let was = self.bitmap_ptrs[page as usize].unit;
            let slot = u32::from(was == self.geo.bitmap_slot(page, 0));
            let unit = self.geo.bitmap_slot(page, slot);
            self.bitmap_ptrs[page as usize] = Ptr { unit, crc };
            self.ckpt.bitmap_dirs_dirty |= 1 << (page as usize / DIR_PTRS);
            self.emit_pages(io, unit, buffer, 1);
        }
    }

    pub(super) fn stage_bitmap_dirs(&mut self) {
        while self.ckpt.bitmap_dirs_dirty != 0 {
            let Some(&buffer) = self.ckpt.buffers.last() else {
                return;
            };
            let Some(io) = self.take_io(false) else {
                return;
            };
            let dir = self.ckpt.bitmap_dirs_dirty.trailing_zeros();
            self.ckpt.bitmap_dirs_dirty &= self.ckpt.bitmap_dirs_dirty - 1;
            let start = dir as usize * DIR_PTRS;
            let end = (start + DIR_PTRS).min(self.bitmap_ptrs.len());
            let crc = self.fill_page(buffer, |core| core.bitmap_ptrs[start..end].as_bytes());
            let was = self.bitmap_dir_ptrs[dir as usize].unit;
            let slot = u32::from(was == self.geo.bitmap_dir_slot(dir, 0));
            let unit = self.geo.bitmap_dir_slot(dir, slot);
            self.bitmap_dir_ptrs[dir as usize] = Ptr { unit, crc };
            self.emit_pages(io, unit, buffer, 1);
        }
        self.ckpt.next_phase(Phase::LeaseRecovery);
    }
}
