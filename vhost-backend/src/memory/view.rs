//! One queue's view of guest memory: remembers the region that was hit last.

use std::sync::Arc;

use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

use super::{GuestAddr, GuestMemory};

/// A memory snapshot with a one-region cache. Guests have one or two regions that hold all their buffers, so
/// nearly every translation is a subtraction and a comparison.
#[derive(Debug)]
pub struct MemoryView {
    memory: Arc<GuestMemory>,
    guest: u64,
    size: u64,
    host: *mut u8,
}

// SAFETY: `host` leads into a mapping that `memory` keeps; see `GuestMemory`.
unsafe impl Send for MemoryView {}

impl MemoryView {
    /// A view of `memory` with an empty cache.
    pub fn new(memory: Arc<GuestMemory>) -> Self {
        Self {
            memory,
            guest: 0,
            size: 0,
            host: std::ptr::null_mut(),
        }
    }

    /// The snapshot behind the view.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Host pointer at `guest` and how many of `len` bytes follow it in its region: `len`, or less where the
    /// range goes on in the next region. `len` must not be 0.
    #[inline(always)]
    pub fn translate_part(&mut self, guest: GuestAddr, len: u64) -> Option<(*mut u8, u64)> {
        let at = guest.0.wrapping_sub(self.guest);
        if at >= self.size {
            return self.translate_slow(guest, len);
        }
        // SAFETY: `at` is inside the cached region.
        Some((
            unsafe { self.host.add(at as usize) },
            len.min(self.size - at),
        ))
    }

    /// Host pointer to all of `len` bytes at `guest`, if one region holds them.
    #[inline(always)]
    pub fn translate(&mut self, guest: GuestAddr, len: u64) -> Option<*mut u8> {
        self.translate_part(guest, len)
            .filter(|part| part.1 == len)
            .map(|part| part.0)
    }

    #[cold]
    fn translate_slow(&mut self, guest: GuestAddr, len: u64) -> Option<(*mut u8, u64)> {
        let region = self.memory.find_region(guest)?;
        let host = region.get_host_address(MemoryRegionAddress(0)).ok()?;
        (self.guest, self.size, self.host) = (region.start_addr().0, region.len(), host);
        self.translate_part(guest, len)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{account, spec};
    use super::*;

    #[test]
    fn a_range_over_two_regions_comes_in_parts() {
        let regions = vec![
            spec(0, 0x1000, 0x6000_0000),
            spec(0x1000, 0x1000, 0x7000_0000),
        ];
        let memory = GuestMemory::map(regions, &mut account()).unwrap();
        let mut view = MemoryView::new(Arc::clone(&memory));
        let (_, first) = view.translate_part(GuestAddr(0xf00), 0x200).unwrap();
        assert_eq!(first, 0x100);
        let (host, rest) = view.translate_part(GuestAddr(0x1000), 0x100).unwrap();
        assert_eq!(
            (host, rest),
            (memory.translate(GuestAddr(0x1000), 1).unwrap(), 0x100)
        );
        assert!(view.translate(GuestAddr(0xf00), 0x200).is_none());
        assert!(view.translate_part(GuestAddr(0x2000), 1).is_none());
        assert!(view.translate(GuestAddr(0xfff), 1).is_some());
    }
}
