//! Memory for payloads that a replica receives and sends: one piece, bounded, aligned for direct I/O, cut
//! into buffers of powers of two. In one piece it is registered with a device once.

use std::ptr::NonNull;

use fabric_types::block::BLOCK_BYTES;
use fabric_types::registrar::Registered;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::queue_pair::pair::Port;

/// Memory of a data thread's pool. With all of it in use its connections are not read until a request is
/// done.
pub const POOL_BYTES: usize = 64 << 20;

/// Sizes: 4 KiB, doubled up to 4 MiB.
const CLASSES: u8 = 11;
/// Blocks of the largest.
const LARGEST_BLOCKS: u32 = 1 << (CLASSES - 1);

/// Some memory of a pool, to be given back to it.
#[derive(Debug)]
pub struct Buffer {
    at: NonNull<u8>,
    /// Where in the pool, in blocks.
    block: u32,
    class: u8,
}

// SAFETY: the memory has one owner.
unsafe impl Send for Buffer {}

impl Buffer {
    /// Its first byte; the memory is valid until it is given back.
    pub fn as_ptr(&self) -> *mut u8 {
        self.at.as_ptr()
    }

    /// The same.
    pub fn start(&self) -> NonNull<u8> {
        self.at
    }
}

/// The pool.
pub struct Pool {
    // Before the memory.
    registered: Option<Registered>,
    start: NonNull<u8>,
    bytes: usize,
    /// Where buffers of each size begin that are not in use.
    free: [Vec<u32>; CLASSES as usize],
    /// Something was given back since small ones were joined to larger ones.
    joinable: bool,
    in_use: usize,
}

// SAFETY: the memory belongs to the pool, and its parts to whoever has their buffers.
unsafe impl Send for Pool {}

impl Pool {
    /// A pool of so many bytes, a multiple of the largest buffer. They are taken from the system when they
    /// are first used.
    pub fn new(bytes: usize) -> Self {
        let largest = BLOCK_BYTES * LARGEST_BLOCKS as usize;
        assert!(bytes > 0 && bytes % largest == 0);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel picks; it replaces nothing.
        let start =
            unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, access, MapFlags::PRIVATE) };
        let start = start.ok().and_then(|start| NonNull::new(start.cast()));
        let mut free: [Vec<u32>; CLASSES as usize] = Default::default();
        let count = (bytes / largest) as u32;
        free[usize::from(CLASSES) - 1].extend((0..count).rev().map(|nth| nth * LARGEST_BLOCKS));
        Self {
            registered: None,
            start: start.expect("there is address space for a pool"),
            bytes,
            free,
            joinable: false,
            in_use: 0,
        }
    }

    /// Opens it to a device, if it is not yet.
    pub fn register(&mut self, port: &dyn Port) -> Result<(), String> {
        if self.registered.is_none() {
            // SAFETY: it is unmapped after the registration has ended, and reached by pointers only.
            let registered = unsafe { port.register(self.start, self.bytes) }?;
            self.registered = Some(registered);
        }
        Ok(())
    }

    /// Memory for `len` bytes, from 1 to 4 MiB. `None`: wait until some is given back. What is in it is of no
    /// meaning, but it is not another process's.
    pub fn take(&mut self, len: usize) -> Option<Buffer> {
        let class = len.div_ceil(BLOCK_BYTES).next_power_of_two().ilog2() as u8;
        let block = self.cut(class).or_else(|| {
            // What lies unused in smaller sizes makes room.
            self.join();
            self.cut(class)
        })?;
        self.in_use += 1;
        // SAFETY: blocks lie within the pool.
        let at = unsafe { self.start.add(block as usize * BLOCK_BYTES) };
        Some(Buffer { at, block, class })
    }

    /// Takes one of this size, cut out of a larger one if need be.
    fn cut(&mut self, class: u8) -> Option<u32> {
        let from = (class..CLASSES).find(|from| !self.free[usize::from(*from)].is_empty())?;
        let block = self.free[usize::from(from)].pop()?;
        for rest in class..from {
            self.free[usize::from(rest)].push(block + (1 << rest));
        }
        Some(block)
    }

    /// Joins halves to wholes.
    fn join(&mut self) {
        if !std::mem::take(&mut self.joinable) {
            return;
        }
        for class in 0..CLASSES - 1 {
            let (smaller, larger) = self.free.split_at_mut(usize::from(class) + 1);
            let halves = &mut smaller[usize::from(class)];
            halves.sort_unstable();
            let mut kept = 0;
            let mut at = 0;
            while at < halves.len() {
                let first = halves[at];
                let is_left = first & (1 << class) == 0;
                if is_left && halves.get(at + 1) == Some(&(first + (1 << class))) {
                    larger[0].push(first);
                    at += 2;
                } else {
                    halves[kept] = first;
                    kept += 1;
                    at += 1;
                }
            }
            halves.truncate(kept);
        }
    }

    /// Takes a buffer back.
    pub fn give_back(&mut self, buffer: Buffer) {
        self.in_use -= 1;
        self.joinable = true;
        self.free[usize::from(buffer.class)].push(buffer.block);
    }

    /// Buffers that were not given back.
    pub fn in_use(&self) -> usize {
        self.in_use
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.registered = None;
        if self.in_use > 0 {
            // Whoever has a buffer may still be using it.
            return;
        }
        // SAFETY: mapped with this size, and nobody has a part of it.
        if let Err(error) = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) } {
            tracing::error!(%error, "cannot unmap a pool");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_stays_within_its_bound_and_switches_between_sizes() {
        let mut pool = Pool::new(8 << 20);
        for _ in 0..2 {
            let small: Vec<_> = std::iter::from_fn(|| pool.take(4096)).collect();
            assert_eq!(small.len(), 2048);
            assert!(pool.take(1).is_none());
            for buffer in small {
                assert_eq!(buffer.as_ptr().addr() % BLOCK_BYTES, 0);
                pool.give_back(buffer);
            }
            let large: Vec<_> = std::iter::from_fn(|| pool.take(4 << 20)).collect();
            assert_eq!(large.len(), 2);
            for buffer in large {
                pool.give_back(buffer);
            }
        }
        assert_eq!(pool.in_use(), 0);
        assert!(pool.take(4097).is_some());
    }

    #[test]
    fn buffers_do_not_overlap_whatever_is_taken_and_given_back() {
        let mut pool = Pool::new(8 << 20);
        let mut taken: Vec<(Buffer, usize)> = Vec::new();
        let mut random = 1u64;
        for _ in 0..20_000 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let bits = (random >> 33) as usize;
            let len = (bits % 64 + 1) << (bits % 15);
            if bits % 3 > 0
                && let Some(buffer) = pool.take(len)
            {
                let (from, to) = (buffer.as_ptr().addr(), buffer.as_ptr().addr() + len);
                for (other, len) in &taken {
                    let start = other.as_ptr().addr();
                    assert!(to <= start || start + len <= from);
                }
                taken.push((buffer, len));
            } else if !taken.is_empty() {
                let (buffer, _) = taken.swap_remove(bits % taken.len());
                pool.give_back(buffer);
            }
        }
        assert_eq!(pool.in_use(), taken.len());
    }
}
