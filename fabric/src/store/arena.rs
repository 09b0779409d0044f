//! The buffers of a shard: one aligned range, handed out in runs of blocks.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};

use super::bitmap::Bitmap;
use super::format::UNIT_BYTES;

/// Blocks that reads into unaligned memory leave for log batches, so that neither waits for the other forever.
const BATCH_RESERVE_BLOCKS: u32 = 128;

/// An aligned allocation that is never moved. Untouched pages cost no RAM.
#[derive(Debug)]
pub struct AlignedBuf {
    ptr: *mut u8,
    layout: Layout,
}

// SAFETY: `AlignedBuf` owns plain memory; nothing in it is tied to a thread.
unsafe impl Send for AlignedBuf {}

impl AlignedBuf {
    /// `blocks` zeroed blocks, at least one.
    #[must_use]
    pub fn new(blocks: usize) -> Self {
        let layout = Layout::from_size_align(blocks.max(1) * UNIT_BYTES, UNIT_BYTES)
            .expect("size fits isize");
        // SAFETY: the layout's size is not zero.
        let ptr = unsafe { alloc_zeroed(layout) };
        if ptr.is_null() {
            handle_alloc_error(layout);
        }
        Self { ptr, layout }
    }

    /// First byte.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.layout.size()
    }

    /// Blocks `first..first + count`.
    #[must_use]
    pub fn blocks(&self, first: u32, count: u32) -> &[u8] {
        let (start, len) = self.range(first, count);
        // SAFETY: the range is inside the allocation and initialised (zeroed at first).
        unsafe { std::slice::from_raw_parts(self.ptr.add(start), len) }
    }

    /// Blocks `first..first + count`, to be changed.
    #[must_use]
    pub fn blocks_mut(&mut self, first: u32, count: u32) -> &mut [u8] {
        let (start, len) = self.range(first, count);
        // SAFETY: as in `blocks`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(start), len) }
    }

    fn range(&self, first: u32, count: u32) -> (usize, usize) {
        let (start, len) = (first as usize * UNIT_BYTES, count as usize * UNIT_BYTES);
        assert!(start + len <= self.layout.size());
        (start, len)
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.ptr, self.layout) }
    }
}

/// Block buffers with an allocation map. The lowest free run is taken, so that a quiet store touches few pages.
#[derive(Debug)]
pub struct Arena {
    buf: AlignedBuf,
    used: Bitmap,
    free_blocks: u32,
}

impl Arena {
    /// `blocks` free blocks.
    #[must_use]
    pub fn new(blocks: u32) -> Self {
        Self {
            buf: AlignedBuf::new(blocks as usize),
            used: Bitmap::new(blocks),
            free_blocks: blocks,
        }
    }

    /// The memory.
    #[must_use]
    pub fn buf(&self) -> &AlignedBuf {
        &self.buf
    }

    /// The memory, to be changed.
    pub fn buf_mut(&mut self) -> &mut AlignedBuf {
        &mut self.buf
    }

    /// Blocks in all.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.used.len()
    }

    /// A run of at most `max` blocks, the longest of the first ones found if none is that long.
    pub fn take_up_to(&mut self, max: u32) -> Option<(u32, u32)> {
        let mut best: Option<(u32, u32)> = None;
        let mut from = 0;
        while let Some((start, len)) = self.used.clear_run(from, self.used.len(), max) {
            if best.is_none_or(|(_, longest)| len > longest) {
                best = Some((start, len));
            }
            if len == max {
                break;
            }
            from = start + len;
        }
        let (start, len) = best?;
        self.mark(start, len);
        Some((start, len))
    }

    /// At most `max` blocks for a read; leaves enough for a log batch.
    pub fn take_for_read(&mut self, max: u32) -> Option<(u32, u32)> {
        let spare = self.free_blocks.checked_sub(BATCH_RESERVE_BLOCKS)?;
        if spare == 0 {
            None
        } else {
            self.take_up_to(max.min(spare))
        }
    }

    fn mark(&mut self, start: u32, len: u32) {
        for block in start..start + len {
            assert!(self.used.set(block));
        }
        self.free_blocks -= len;
    }

    /// Gives blocks back.
    pub fn give_back(&mut self, start: u32, len: u32) {
        for block in start..start + len {
            assert!(self.used.clear(block), "buffer freed twice");
        }
        self.free_blocks += len;
    }
}
