//! The dirty log of live migration (`LOG_SHMFD`): one bit for every 4 KiB page of guest memory that we wrote.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::memory::{GuestAddr, Mapping, MemoryError};

/// Bytes of guest memory per bit, fixed by the vhost-user protocol.
pub const LOG_PAGE_BYTES: u64 = 4096;

/// A mapped dirty log, shared with the front end, which takes and clears bits while we set them.
#[derive(Debug)]
pub struct DirtyLog {
    mapping: Mapping,
    bytes: u64,
}

impl DirtyLog {
    /// Maps `size` bytes of `file` at `offset`.
    pub fn map(file: OwnedFd, size: u64, offset: u64) -> Result<Arc<Self>, MemoryError> {
        let mapping = Mapping::shared(&file, offset, size)?;
        Ok(Arc::new(Self {
            mapping,
            bytes: size,
        }))
    }

    /// Bytes that are mapped for it.
    pub fn mapped_bytes(&self) -> u64 {
        self.mapping.mapped_bytes()
    }

    /// Marks the pages of a range as written. Pages beyond the log are left out: the front end sized the log,
    /// and what lies past it is not part of what it migrates.
    pub fn mark(&self, guest: GuestAddr, len: u64) {
        let Some(last) = len.checked_sub(1).and_then(|n| guest.0.checked_add(n)) else {
            return;
        };
        let end = (last / LOG_PAGE_BYTES + 1).min(self.bytes.saturating_mul(8));
        for page in guest.0 / LOG_PAGE_BYTES..end {
            // SAFETY: `page / 8` is below `bytes`, the length of the mapping; the other side also uses atomic
            // access.
            let byte = unsafe { AtomicU8::from_ptr(self.mapping.start().add((page / 8) as usize)) };
            byte.fetch_or(1 << (page % 8), Ordering::Release);
        }
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
