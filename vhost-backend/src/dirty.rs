//! The dirty log of live migration (`LOG_SHMFD`): one bit for every 4 KiB page of guest memory that we wrote.
//!
//! It is one of `vm-memory`'s bitmaps, over all of the guest's addresses. That crate's own owns its memory;
//! this one is shared with the front end.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use vm_memory::VolatileMemory;
use vm_memory::bitmap::{Bitmap, RefSlice, WithBitmapSlice};

use crate::memory::{GuestAddr, Mapping, MemoryError};

/// Bytes of guest memory per bit, fixed by the vhost-user protocol.
pub const LOG_PAGE_BYTES: u64 = 4096;
const PAGE_BYTES: usize = LOG_PAGE_BYTES as usize;

/// A mapped dirty log, shared with the front end, which takes and clears bits while we set them.
#[derive(Debug)]
pub struct DirtyLog {
    mapping: Mapping,
}

impl DirtyLog {
    /// Maps `size` bytes of `file` at `offset`.
    pub fn map(file: OwnedFd, size: u64, offset: u64) -> Result<Arc<Self>, MemoryError> {
        let mapping = Mapping::shared(&file, offset, size)?;
        Ok(Arc::new(Self { mapping }))
    }

    /// Bytes that are mapped for it.
    pub fn mapped_bytes(&self) -> u64 {
        self.mapping.mapped_bytes()
    }

    /// Marks the pages of a range of guest memory as written.
    pub fn mark(&self, guest: GuestAddr, len: u64) {
        self.mark_dirty(guest.0 as usize, len as usize);
    }
}

impl<'a> WithBitmapSlice<'a> for DirtyLog {
    type S = RefSlice<'a, Self>;
}

impl Bitmap for DirtyLog {
    /// Pages beyond the log are left out: the front
    /// end sized the log, and what lies past it is not part of what it migrates.
    fn mark_dirty(&self, guest: usize, len: usize) {
        let Some(last) = len.checked_sub(1).and_then(|n| guest.checked_add(n)) else {
            return;
        };
        let bits = self.mapping.slice();
        let end = (last / PAGE_BYTES + 1).min(bits.len().saturating_mul(8));
        for page in guest / PAGE_BYTES..end {
            // The other side also uses atomic access.
            if let Ok(byte) = bits.get_atomic_ref::<AtomicU8>(page / 8) {
                byte.fetch_or(1 << (page % 8), Ordering::Release);
            }
        }
    }

    fn dirty_at(&self, guest: usize) -> bool {
        let page = guest / PAGE_BYTES;
        let bits = self.mapping.slice();
        let byte = bits.get_atomic_ref::<AtomicU8>(page / 8);
        byte.is_ok_and(|byte| byte.load(Ordering::Acquire) & 1 << (page % 8) != 0)
    }

    fn slice_at(&self, guest: usize) -> RefSlice<'_, Self> {
        RefSlice::new(self, guest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    fn log_of(bytes: u64) -> (Arc<DirtyLog>, OwnedFd) {
        let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, bytes).unwrap();
        let keep = file.try_clone().unwrap();
        (DirtyLog::map(file, bytes, 0).unwrap(), keep)
    }

    fn content(file: &OwnedFd, bytes: usize) -> Vec<u8> {
        let mut out = vec![0; bytes];
        rustix::io::pread(file, &mut out, 0).unwrap();
        out
    }

    #[test]
    fn marks_every_page_of_a_range_and_no_other() {
        let (log, file) = log_of(4);
        log.mark(GuestAddr(0x1fff), 2);
        log.mark(GuestAddr(9 * 4096), 4096);
        log.mark(GuestAddr(0), 0);
        assert_eq!(content(&file, 4), [0b0000_0110, 0b0000_0010, 0, 0]);
        let dirty = [0xfff, 0x1000, 0x2fff, 0x3000, 9 * 4096].map(|at| log.dirty_at(at));
        assert_eq!(dirty, [false, true, true, false, true]);
        assert!(log.slice_at(0x1000).dirty_at(0x1fff));
    }

    #[test]
    fn pages_past_the_log_are_left_out() {
        let (log, file) = log_of(1);
        log.mark(GuestAddr(7 * 4096), 100 * 4096);
        log.mark(GuestAddr(u64::MAX - 1), 100);
        log.mark(GuestAddr(u64::MAX - 1), 1);
        assert_eq!(content(&file, 1), [0b1000_0000]);
    }
}
