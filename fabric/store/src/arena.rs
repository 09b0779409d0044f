//! The buffers of a shard: one aligned range, handed out in runs of blocks.

use std::alloc::{Layout, handle_alloc_error};
use std::ptr;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::bitmap::Bitmap;
use super::format::UNIT_BYTES;

/// Size of a huge page.
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Blocks that reads into unaligned memory leave for log batches, so that neither waits for the other
/// forever.
const BATCH_RESERVE_BLOCKS: u32 = 128;

/// Memory that is never moved and begins on a page, on a huge one if it is that large. Untouched pages cost
/// no RAM.
#[derive(Debug)]
pub struct AlignedBuf {
    ptr: *mut u8,
    bytes: usize,
    /// What was mapped to get it.
    mapping: (*mut u8, usize),
}

// SAFETY: `AlignedBuf` owns plain memory; nothing in it is tied to a thread.
unsafe impl Send for AlignedBuf {}

impl AlignedBuf {
    /// `blocks` zeroed blocks, at least one.
    #[must_use]
    pub fn new(blocks: usize) -> Self {
        let bytes = blocks.max(1) * UNIT_BYTES;
        // Pages are aligned by themselves; for huge ones there must be room to move.
        let align = if bytes < HUGE_PAGE_BYTES {
            UNIT_BYTES
        } else {
            HUGE_PAGE_BYTES
        };
        let layout = Layout::from_size_align(bytes, align).expect("size fits isize");
        let mapped = bytes + align - UNIT_BYTES;
        let (access, flags) = (
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        );
        // SAFETY: a new mapping at a place of the kernel's choice.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), mapped, access, flags) };
        let Ok(start) = start else {
            handle_alloc_error(layout);
        };
        let start = start.cast::<u8>();
        Self {
            ptr: start.wrapping_add(start.align_offset(align)),
            bytes,
            mapping: (start, mapped),
        }
    }

    /// Asks the kernel for huge pages: what is one page for it is one segment for the device. Everything
    /// works without.
    fn prefer_huge_pages(&self) {
        // SAFETY: the range is ours, and the advice does not change its content.
        let advised = unsafe { madvise(self.ptr.cast(), self.bytes, Advice::LinuxHugepage) };
        if let Err(error) = advised {
            tracing::debug!(%error, "no huge pages for buffers");
        }
    }

    /// First byte.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes
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

    /// Blocks `first..first + count` as memory for a device request.
    #[must_use]
    pub fn iovec(&self, first: u32, count: u32) -> libc::iovec {
        let (start, iov_len) = self.range(first, count);
        libc::iovec {
            iov_base: self.ptr.wrapping_add(start).cast(),
            iov_len,
        }
    }

    fn range(&self, first: u32, count: u32) -> (usize, usize) {
        let (start, len) = (first as usize * UNIT_BYTES, count as usize * UNIT_BYTES);
        assert!(start + len <= self.bytes);
        (start, len)
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, and nobody has it any more.
        let unmapped = unsafe { munmap(self.mapping.0.cast(), self.mapping.1) };
        assert!(unmapped.is_ok(), "what was mapped can be unmapped");
    }
}

/// Block buffers with an allocation map. The lowest free run is taken, so that a quiet store touches few
/// pages.
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
        let buf = AlignedBuf::new(blocks as usize);
        buf.prefer_huge_pages();
        Self {
            buf,
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

    /// Blocks `first..first + count` as memory for a device request.
    #[must_use]
    pub fn iovec(&self, first: u32, count: u32) -> libc::iovec {
        self.buf.iovec(first, count)
    }

    /// Copies a block to another one.
    pub fn copy_block(&mut self, from: u32, to: u32) {
        let all = self.buf.blocks_mut(0, self.used.len());
        let start = from as usize * UNIT_BYTES;
        all.copy_within(start..start + UNIT_BYTES, to as usize * UNIT_BYTES);
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
