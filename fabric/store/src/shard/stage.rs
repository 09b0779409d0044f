//! The pages of a checkpoint: leaves, the tables above them, and the bitmap, on their way to the device.

use fabric_types::checksum::crc32c;
use zerocopy::IntoBytes;

use super::super::alloc::Run;
use super::super::format::{DIR_PTRS, Ptr, UNIT_BYTES, UNIT_UNMAPPED};
use super::super::leaf::LeafState;
use super::checkpoint::Phase;
use super::requests::IoKind;
use super::{CHECKPOINT_IO_BLOCKS, ShardCore};

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
                Pages::Leaves => self.res.map.leaves.dirty(),
                Pages::Tables => self.res.map.table.dirty_count(),
                Pages::Dirs => self.res.map.table.page_ptrs.len().div_ceil(DIR_PTRS) as u32,
                Pages::Root => u32::from(self.res.map.roots.is_root_dirty()),
            };
            if left == 0 {
                self.ckpt.next_phase(then);
                return;
            }
            let Some(&buffer) = self.ckpt.buffers.last() else {
                return;
            };
            let Some(io) = self.res.device.take() else {
                return;
            };
            let Some(units) = self.res.alloc.take_pages(left.min(CHECKPOINT_IO_BLOCKS)) else {
                self.res.device.give_back(io);
                self.res.faults.fail(libc::ENOSPC);
                return;
            };
            self.res.device.leaves_mut(io).clear();
            let mut used = 0;
            while used < units.len && self.stage_page(pages, io, units.start + used, buffer + used)
            {
                used += 1;
            }
            if used < units.len {
                self.res.alloc.give_back(Run {
                    start: units.start + used,
                    len: units.len - used,
                });
            }
            if used == 0 {
                self.res.device.give_back(io);
                self.ckpt.next_phase(then);
                return;
            }
            self.emit_pages(io, units.start, buffer, used);
        }
    }

    fn emit_pages(&mut self, io: u32, unit: u32, buffer: u32, count: u32) {
        self.ckpt.buffers.pop();
        self.ckpt.ios += 1;
        self.res.counters.checkpoint_bytes += u64::from(count) * UNIT_BYTES as u64;
        self.res
            .write(io, unit, (buffer, count), IoKind::Pages { buffer });
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
                    crc: self.fill_page(buffer, |core| core.res.map.leaves.bytes(slot)),
                };
                self.res.map.leaves.mark_clean(slot);
                // Until it is written nobody may evict it and read it back.
                self.res.map.leaves.meta_mut(slot).pins += 1;
                self.res.device.leaves_mut(io).push(slot);
                let meta = *self.res.map.leaves.meta(slot);
                std::mem::replace(
                    &mut self.res.map.table.record_mut(meta.rec).leaves[usize::from(meta.leaf)],
                    ptr,
                )
            }
            Pages::Tables => {
                let Some(page) = self.res.map.table.next_dirty_page(self.ckpt.cursor) else {
                    return false;
                };
                self.ckpt.cursor = page + 1;
                let crc = self.fill_page(buffer, |core| core.res.map.table.page_bytes(page));
                self.res.map.table.set_page_ptr(page, Ptr { unit, crc })
            }
            Pages::Dirs => {
                let Some(dir) = self.res.map.table.next_dirty_dir(self.ckpt.cursor) else {
                    return false;
                };
                self.ckpt.cursor = dir + 1;
                let crc = self.fill_page(buffer, |core| core.res.map.table.dir_bytes(dir));
                self.res.map.roots.touch_root();
                self.res.map.table.set_dir_ptr(dir, Ptr { unit, crc })
            }
            Pages::Root => {
                if !self.res.map.roots.is_root_dirty() {
                    return false;
                }
                let crc = self.fill_page(buffer, |core| core.res.map.table.dir_ptrs.as_bytes());
                self.res.map.roots.move_root(Ptr { unit, crc })
            }
        };
        self.res.alloc.commit(unit);
        if old.unit != 0 {
            self.res.alloc.free_replaced(old.unit);
        }
        true
    }

    /// Copies a page into a buffer block, the rest zero; returns the checksum.
    fn fill_page(&mut self, buffer: u32, bytes: impl Fn(&Self) -> &[u8]) -> u32 {
        let (ptr, len) = {
            let bytes = bytes(self);
            (bytes.as_ptr(), bytes.len())
        };
        let page = self.res.arena.buf_mut().blocks_mut(buffer, 1);
        page[len..].fill(0);
        // SAFETY: the source is a table or cache page of this shard, which the arena's blocks never overlap.
        unsafe { page.as_mut_ptr().copy_from_nonoverlapping(ptr, len) };
        crc32c(page)
    }

    /// Next leaf to be written; those in which nothing is mapped any more are dropped on the way.
    fn next_dirty_leaf(&mut self) -> Option<u32> {
        while self.ckpt.cursor < self.res.map.leaves.slots() {
            let slot = self.ckpt.cursor;
            self.ckpt.cursor += 1;
            let meta = *self.res.map.leaves.meta(slot);
            if meta.state != LeafState::Ready || !meta.dirty {
                continue;
            }
            let entries = self.res.map.leaves.entries(slot);
            if entries.iter().any(|e| e.unit != UNIT_UNMAPPED) {
                return Some(slot);
            }
            let old = self.res.map.drop_empty_leaf(slot);
            if old.unit != 0 {
                self.res.alloc.free_replaced(old.unit);
            }
        }
        None
    }

    pub(super) fn stage_bitmap(&mut self) {
        loop {
            let Some(&buffer) = self.ckpt.buffers.last() else {
                return;
            };
            let Some(io) = self.res.device.take() else {
                return;
            };
            let Some(page) = self.res.alloc.next_dirty_page(self.ckpt.cursor) else {
                self.res.device.give_back(io);
                self.ckpt.next_phase(Phase::BitmapDirs);
                return;
            };
            self.ckpt.cursor = page + 1;
            let block = self.res.arena.buf_mut().blocks_mut(buffer, 1);
            self.res
                .alloc
                .committed()
                .write_bytes(page as usize * PAGE_WORDS, block);
            let crc = crc32c(block);
            let roots = &mut self.res.map.roots;
            let unit = roots.move_bitmap_page(&self.res.geo, page, crc);
            self.emit_pages(io, unit, buffer, 1);
        }
    }

    pub(super) fn stage_bitmap_dirs(&mut self) {
        while let Some(dir) = self.res.map.roots.next_bitmap_dir() {
            let Some(&buffer) = self.ckpt.buffers.last() else {
                return;
            };
            let Some(io) = self.res.device.take() else {
                return;
            };
            let crc = self.fill_page(buffer, |core| core.res.map.roots.bitmap_dir_bytes(dir));
            let roots = &mut self.res.map.roots;
            let unit = roots.move_bitmap_dir(&self.res.geo, dir, crc);
            self.emit_pages(io, unit, buffer, 1);
        }
        self.ckpt.next_phase(Phase::LeaseRecovery);
    }
}
