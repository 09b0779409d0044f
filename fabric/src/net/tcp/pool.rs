//! Memory for payloads that a replica receives and sends: bounded, aligned for direct I/O, kept for the next use.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

use crate::store::device::BLOCK_BYTES;

/// Memory of a data thread's pool. With all of it in use its connections are not read until a request is done.
pub const POOL_BYTES: usize = 64 << 20;

/// Sizes: 4 KiB, doubled up to 4 MiB.
const CLASSES: usize = 11;

/// Some memory of a pool, to be given back to it.
#[derive(Debug)]
pub struct Buffer {
    at: NonNull<u8>,
    class: u8,
}

// SAFETY: the memory has one owner.
unsafe impl Send for Buffer {}

impl Buffer {
    /// Its first byte; the memory is valid until it is given back.
    pub fn as_ptr(&self) -> *mut u8 {
        self.at.as_ptr()
    }
}

/// The pool.
pub struct Pool {
    free: [Vec<Buffer>; CLASSES],
    /// Bytes allocated, in use or not.
    bytes: usize,
    bytes_max: usize,
    in_use: usize,
}

fn layout(class: u8) -> Layout {
    Layout::from_size_align(BLOCK_BYTES << class, BLOCK_BYTES).expect("a small power of two")
}

impl Pool {
    /// An empty pool of at most so many bytes, which hold the largest buffer at least.
    pub fn new(bytes_max: usize) -> Self {
        assert!(bytes_max >= BLOCK_BYTES << (CLASSES - 1));
        Self {
            free: Default::default(),
            bytes: 0,
            bytes_max,
            in_use: 0,
        }
    }

    /// Memory for `len` bytes, from 1 to 4 MiB. `None`: wait until some is given back. What is in it is of no meaning, but it is not another
    /// process's.
    pub fn take(&mut self, len: usize) -> Option<Buffer> {
        let class = len.div_ceil(BLOCK_BYTES).next_power_of_two().ilog2() as u8;
        let buffer = match self.free[usize::from(class)].pop() {
            Some(buffer) => buffer,
            None => self.allocate(class)?,
        };
        self.in_use += 1;
        Some(buffer)
    }

    fn allocate(&mut self, class: u8) -> Option<Buffer> {
        let layout = layout(class);
        // What lies unused in other sizes makes room, the largest first.
        while self.bytes + layout.size() > self.bytes_max {
            let unused = self.free.iter_mut().rev().find_map(Vec::pop)?;
            self.release(unused);
        }
        // SAFETY: the size is not zero.
        let at = unsafe { alloc_zeroed(layout) };
        let at = NonNull::new(at).unwrap_or_else(|| handle_alloc_error(layout));
        self.bytes += layout.size();
        Some(Buffer { at, class })
    }

    fn release(&mut self, buffer: Buffer) {
        let layout = layout(buffer.class);
        self.bytes -= layout.size();
        // SAFETY: allocated with this layout, and `buffer` was its only owner.
        unsafe { dealloc(buffer.at.as_ptr(), layout) };
    }

    /// Takes a buffer back.
    pub fn give_back(&mut self, buffer: Buffer) {
        self.in_use -= 1;
        self.free[usize::from(buffer.class)].push(buffer);
    }

    /// Buffers that were not given back.
    pub fn in_use(&self) -> usize {
        self.in_use
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for class in 0..CLASSES {
            while let Some(buffer) = self.free[class].pop() {
                self.release(buffer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_never_grows_past_its_bound_and_never_stays_stuck_on_another_size() {
        let mut pool = Pool::new(8 << 20);
        let small: Vec<_> = std::iter::from_fn(|| pool.take(4096)).collect();
        assert_eq!(small.len(), 2048);
        assert!(pool.take(1).is_none());
        for buffer in small {
            assert_eq!(buffer.as_ptr().addr() % BLOCK_BYTES, 0);
            pool.give_back(buffer);
        }
        let large: Vec<_> = std::iter::from_fn(|| pool.take(4 << 20)).collect();
        assert_eq!(large.len(), 2);
        assert_eq!(pool.bytes, 8 << 20);
        for buffer in large {
            pool.give_back(buffer);
        }
        assert_eq!(pool.in_use(), 0);
        assert!(pool.take(4097).is_some());
    }
}
