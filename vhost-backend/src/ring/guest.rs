//! Single accesses to memory that a guest may change at the same time.
//!
//! `vm-memory` copies what is longer than a word as if nobody else wrote there, so the compiler may read a
//! byte twice, once for a check and once for use. What is read here is read once.

use vm_memory::VolatileSlice;

/// A word without alignment, so that one load or store reaches it wherever a guest put it.
#[repr(C, packed)]
#[derive(Clone, Copy)]
struct Unaligned<T>(T);

/// Reads a little-endian 64-bit word once.
///
/// # Safety
/// Eight bytes at `from` are mapped.
#[inline(always)]
pub(super) unsafe fn read_u64(from: *const u8) -> u64 {
    // SAFETY: mapped by the caller's promise; the packed type asks for no alignment.
    u64::from_le(unsafe { from.cast::<Unaligned<u64>>().read_volatile() }.0)
}

/// Copies bytes out of guest memory, each once.
///
/// # Safety
/// `to.len()` bytes at `from` are mapped.
#[inline(always)]
pub unsafe fn read_bytes(from: *const u8, to: &mut [u8]) {
    let mut words = to.chunks_exact_mut(8);
    let mut at = 0;
    for word in words.by_ref() {
        // SAFETY: within the range of the caller's promise.
        word.copy_from_slice(&unsafe { read_u64(from.add(at)) }.to_le_bytes());
        at += 8;
    }
    for byte in words.into_remainder() {
        // SAFETY: as above.
        *byte = unsafe { from.add(at).read_volatile() };
        at += 1;
    }
}

/// Copies the first bytes of a scatter list, as many as there are and fit; returns how many.
///
/// # Safety
/// Every piece is mapped.
pub unsafe fn read_scattered(pieces: &[libc::iovec], to: &mut [u8]) -> usize {
    let mut at = 0;
    for piece in pieces {
        let len = piece.iov_len.min(to.len() - at);
        // SAFETY: the piece has at least `len` bytes, and is mapped by the caller's promise.
        unsafe { read_bytes(piece.iov_base.cast(), &mut to[at..at + len]) };
        at += len;
    }
    at
}

/// Copies bytes into a scatter list, as many as there are and fit; returns how many.
///
/// # Safety
/// Every piece is mapped.
pub unsafe fn write_scattered(pieces: &[libc::iovec], from: &[u8]) -> usize {
    let mut at = 0;
    for piece in pieces {
        let len = piece.iov_len.min(from.len() - at);
        // SAFETY: the piece has at least `len` bytes, and is mapped by the caller's promise.
        let to = unsafe { VolatileSlice::new(piece.iov_base.cast(), len) };
        to.copy_from(&from[at..at + len]);
        at += len;
    }
    at
}

/// Asks for the line at `at`, to read it. Any address is allowed: a prefetch never faults.
#[inline(always)]
pub fn prefetch_read(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch has no effect but on the cache.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Asks for the line at `at`, to write it: one transfer instead of two for a line that is read first.
#[inline(always)]
pub fn prefetch_write(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch has no effect but on the cache; processors without it take it for a no-op.
    unsafe {
        std::arch::asm!("prefetchw [{0}]", in(reg) at, options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
