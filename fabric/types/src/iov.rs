//! Scatter lists, and walking them over memory that belongs to a guest: it may change at any time, and
//! nothing here relies on reading a byte twice.

use crate::block::BLOCK_BYTES;
use crate::checksum::{Crc32c, crc32c};

/// A scatter list that somebody else owns: a core until the completion of its action is delivered, whoever
/// made a request until it is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IoVecs {
    /// First element of an array of `len` iovecs.
    pub ptr: *const libc::iovec,
    /// Number of elements; 0 only where nothing is read or filled.
    pub len: u32,
}

// SAFETY: `IoVecs` is a description; whoever executes the action upholds the lifetime promise above, on any
// thread.
unsafe impl Send for IoVecs {}

impl IoVecs {
    /// No memory.
    pub const NONE: Self = Self {
        ptr: std::ptr::null(),
        len: 0,
    };

    /// The first piece of memory; nothing if the list is empty.
    ///
    /// # Safety
    /// The list is valid, as is the memory, which nobody else uses meanwhile.
    pub unsafe fn first_mut<'a>(&self) -> &'a mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: the caller's promise; the list has an element.
        let iov = unsafe { &*self.ptr };
        if iov.iov_len == 0 {
            return &mut [];
        }
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(iov.iov_base.cast(), iov.iov_len) }
    }

    /// Appends the CRC32C of each block of what the list names.
    ///
    /// # Safety
    /// The list and the memory are valid. The memory may change meanwhile (it may be a guest's): that only
    /// spoils a sum.
    pub unsafe fn digest(&self, out: &mut Vec<u32>) {
        // SAFETY: the caller's promise.
        let list = unsafe { std::slice::from_raw_parts(self.ptr, self.len as usize) };
        let bytes: usize = list.iter().map(|iov| iov.iov_len).sum();
        let mut cursor = IovCursor::default();
        for _ in 0..bytes / BLOCK_BYTES {
            // SAFETY: the caller's promise; the list holds so many blocks.
            out.push(unsafe { cursor.crc(list, BLOCK_BYTES) });
        }
    }
}

/// A position in a scatter list.
#[derive(Debug, Default, Clone, Copy)]
pub struct IovCursor {
    element: usize,
    inside: usize,
}

impl IovCursor {
    /// Moves to byte `position` of the list.
    pub fn seek(&mut self, iovs: &[libc::iovec], position: usize) {
        (self.element, self.inside) = (0, position);
        while self.element < iovs.len() && self.inside >= iovs[self.element].iov_len {
            self.inside -= iovs[self.element].iov_len;
            self.element += 1;
        }
    }

    /// Calls `f` with each contiguous piece of the next `len` bytes and moves behind them.
    fn walk(&mut self, iovs: &[libc::iovec], len: usize, mut f: impl FnMut(*mut u8, usize)) {
        let mut left = len;
        while left > 0 {
            let iov = &iovs[self.element];
            let span = left.min(iov.iov_len - self.inside);
            if span > 0 {
                f(iov.iov_base.cast::<u8>().wrapping_add(self.inside), span);
            }
            left -= span;
            self.inside += span;
            if self.inside == iov.iov_len {
                self.element += 1;
                self.inside = 0;
            }
        }
    }

    /// Moves behind the next `len` bytes.
    pub fn skip(&mut self, iovs: &[libc::iovec], len: usize) {
        self.walk(iovs, len, |_, _| ());
    }

    /// Appends the next `len` bytes to another list, joined with its last element where they follow it in
    /// memory.
    pub fn slice(&mut self, iovs: &[libc::iovec], len: usize, out: &mut Vec<libc::iovec>) {
        self.walk(iovs, len, |ptr, span| {
            if let Some(last) = out.last_mut() {
                if last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == ptr {
                    last.iov_len += span;
                    return;
                }
            }
            out.push(libc::iovec {
                iov_base: ptr.cast(),
                iov_len: span,
            });
        });
    }

    /// CRC32C of the next `len` bytes.
    ///
    /// # Safety
    /// The memory is readable.
    pub unsafe fn crc(&mut self, iovs: &[libc::iovec], len: usize) -> u32 {
        // SAFETY: readable by the caller's promise; a concurrent change only spoils the checksum.
        let bytes = |ptr: *mut u8, span| unsafe { std::slice::from_raw_parts(ptr, span) };
        if let Some(iov) = iovs.get(self.element) {
            // As good as always: a block in one piece.
            if iov.iov_len - self.inside >= len {
                let mut crc = 0;
                self.walk(iovs, len, |ptr, span| crc = crc32c(bytes(ptr, span)));
                return crc;
            }
        }
        let mut crc = Crc32c::new();
        self.walk(iovs, len, |ptr, span| crc.update(bytes(ptr, span)));
        crc.finish()
    }

    /// Zeroes the next `len` bytes.
    ///
    /// # Safety
    /// The memory is writable.
    pub unsafe fn fill_zero(&mut self, iovs: &[libc::iovec], len: usize) {
        self.walk(iovs, len, |ptr, span| {
            // SAFETY: writable by the caller's promise.
            unsafe { ptr.write_bytes(0, span) };
        });
    }

    /// Copies `bytes` to the next bytes of the list.
    ///
    /// # Safety
    /// The memory is writable and does not overlap `bytes`.
    pub unsafe fn copy_to(&mut self, iovs: &[libc::iovec], bytes: &[u8]) {
        let mut rest = bytes;
        self.walk(iovs, bytes.len(), |ptr, span| {
            let (now, later) = rest.split_at(span);
            // SAFETY: writable by the caller's promise.
            unsafe { ptr.copy_from_nonoverlapping(now.as_ptr(), span) };
            rest = later;
        });
    }
}

/// Fills `bytes` from byte `position` of the list.
///
/// # Safety
/// The memory is readable and does not overlap `bytes`.
pub unsafe fn copy_from(iovs: &[libc::iovec], position: usize, bytes: &mut [u8]) {
    let mut cursor = IovCursor::default();
    cursor.seek(iovs, position);
    let mut at = 0;
    let to = bytes.as_mut_ptr();
    cursor.walk(iovs, bytes.len(), |ptr, span| {
        // SAFETY: readable by the caller's promise, and `at + span` stays within `bytes`.
        unsafe { to.add(at).copy_from_nonoverlapping(ptr, span) };
        at += span;
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_piece_of_an_empty_list_is_empty() {
        let blank = libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        let one = IoVecs {
            ptr: &raw const blank,
            len: 1,
        };
        for list in [IoVecs::NONE, one] {
            // SAFETY: there is no memory.
            assert!(unsafe { list.first_mut() }.is_empty());
        }
    }

    #[test]
    fn a_list_is_read_written_and_cut_at_any_byte() {
        let mut memory: Vec<u8> = (0..200).collect();
        let base = memory.as_mut_ptr();
        let iov = |at: usize, len: usize| libc::iovec {
            iov_base: base.wrapping_add(at).cast(),
            iov_len: len,
        };
        let list = [iov(10, 5), iov(100, 1), iov(20, 30), iov(50, 10)];
        let flat: Vec<u8> = (10..15).chain(100..101).chain(20..60).collect();
        for from in 0..flat.len() {
            for to in from + 1..=flat.len() {
                let mut out = vec![0; to - from];
                // SAFETY: the list lies in `memory`.
                unsafe { copy_from(&list, from, &mut out) };
                assert_eq!(out, flat[from..to]);
                let mut cursor = IovCursor::default();
                cursor.seek(&list, from);
                // SAFETY: as above.
                let crc = unsafe { cursor.crc(&list, to - from) };
                assert_eq!(crc, crc32c(&flat[from..to]));
            }
        }
        let mut cursor = IovCursor::default();
        cursor.seek(&list, 6);
        let mut cut = Vec::new();
        cursor.slice(&list, 40, &mut cut);
        assert_eq!(cut.len(), 1, "neighbours in memory are joined");
        assert_eq!(cut[0].iov_len, 40);
    }
}
