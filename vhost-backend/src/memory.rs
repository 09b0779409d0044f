//! Guest memory as a front end hands it over: an immutable snapshot of mapped regions.
//!
//! A change of the memory table makes a new snapshot that shares the mappings it keeps; queues are moved to
//! it once they are drained, so a pointer that was translated stays mapped until its request is done.
//! Everything a guest says about addresses passes through [`GuestMemory::translate`], the one place that
//! turns a guest address into a pointer.
//!
//! Regions and their bounds are `vm-memory`'s: a [`GuestMemory`] is one of its memories
//! (`vm_memory::GuestMemoryBackend`), so whatever is written for those, such as `virtio-queue`, works on it.

pub mod budget;
mod mapping;
mod view;

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use fabric_types::registrar::Registered;
use vm_memory::{
    GuestMemoryBackend, GuestMemoryRegion, GuestMemoryRegionBytes, GuestMemoryResult,
    GuestRegionCollection, MemoryRegionAddress, VolatileSlice,
};

use budget::{MemoryAccount, OverLimit};

pub use mapping::{Mapping, is_vduse};
pub use view::MemoryView;
/// A guest physical address.
pub use vm_memory::GuestAddress as GuestAddr;

/// Most regions in one memory table. A table with more is refused; QEMU itself stops at 509 memory slots.
pub const MAX_REGIONS: usize = 509;

/// Why guest memory, a dirty log or an in-flight region could not be mapped or changed.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// A region has no bytes, or its end does not fit in 64 bits.
    #[error("memory region at guest address {guest:#x} has the impossible size {size:#x}")]
    BadRegion {
        /// First guest address.
        guest: u64,
        /// Size in bytes.
        size: u64,
    },
    /// Two regions share guest or user addresses.
    #[error("memory region at guest address {guest:#x} overlaps another")]
    Overlap {
        /// First guest address of the region that was to be added.
        guest: u64,
    },
    /// More than [`MAX_REGIONS`] regions.
    #[error("more than {MAX_REGIONS} memory regions")]
    TooMany,
    /// `without_region` named a region that is not there.
    #[error("no memory region of size {size:#x} at guest address {guest:#x}")]
    NoSuchRegion {
        /// First guest address.
        guest: u64,
        /// Size in bytes.
        size: u64,
    },
    /// The file is shorter than the range that is to be mapped.
    #[error("file has {file_bytes} bytes, the mapping needs {needed_bytes}")]
    FileTooShort {
        /// Size of the file.
        file_bytes: u64,
        /// End of the range.
        needed_bytes: u64,
    },
    /// More than may be mapped.
    #[error(transparent)]
    OverLimit(#[from] OverLimit),
    /// The layout of an in-flight region does not fit in it.
    #[error("in-flight region of {bytes} bytes does not hold {queues} queues of {size} entries")]
    InflightLayout {
        /// Bytes given.
        bytes: u64,
        /// Queues asked for.
        queues: u16,
        /// Entries of each.
        size: u16,
    },
    /// The operating system refused.
    #[error("cannot {what}")]
    Os {
        /// Verb and object.
        what: &'static str,
        /// Its answer.
        #[source]
        source: io::Error,
    },
}

/// One region of a memory table, as it arrives over the socket.
#[derive(Debug)]
pub struct RegionSpec {
    /// First guest physical address.
    pub guest: GuestAddr,
    /// Size in bytes.
    pub size: u64,
    /// Address of the first byte in the front end's own address space; ring addresses are given in it.
    pub user_addr: u64,
    /// Where in `file` the region begins.
    pub mmap_offset: u64,
    /// The shared memory.
    pub file: OwnedFd,
}

impl RegionSpec {
    /// Bytes that mapping it takes.
    fn mapped_bytes(&self) -> Result<u64, MemoryError> {
        Mapping::bytes_for(&self.file, self.mmap_offset, self.size)
    }
}

/// A mapped region of guest memory.
#[derive(Debug)]
pub struct Region {
    guest: GuestAddr,
    user_addr: u64,
    // Before the mapping.
    registered: Option<Registered>,
    mapping: Mapping,
}

impl Region {
    fn map(spec: RegionSpec) -> Result<Self, MemoryError> {
        let (guest, size) = (spec.guest.0, spec.size);
        let bad = MemoryError::BadRegion { guest, size };
        if size == 0
            || guest.checked_add(size).is_none()
            || spec.user_addr.checked_add(size).is_none()
        {
            return Err(bad);
        }
        Ok(Self {
            guest: spec.guest,
            user_addr: spec.user_addr,
            registered: None,
            mapping: Mapping::shared(&spec.file, spec.mmap_offset, size)?,
        })
    }

    /// Opens it to the network, unless it is too much beside the `pinned_bytes` that the table has already.
    fn open(&mut self, account: &mut MemoryAccount, pinned_bytes: u64) {
        if !account.registrar().opens_memory()
            || !account.may_pin(pinned_bytes.saturating_add(self.len()))
        {
            return;
        }
        if let Some(start) = NonNull::new(self.mapping.start()) {
            let bytes = self.mapping.len();
            // SAFETY: it is dropped before the mapping, which is reached by pointers only.
            self.registered = unsafe { account.registrar().register(start, bytes) };
        }
    }

    fn overlaps(&self, other: &Self) -> bool {
        let meet = |a: u64, b: u64| a < b + other.len() && b < a + self.len();
        meet(self.guest.0, other.guest.0) || meet(self.user_addr, other.user_addr)
    }
}

impl GuestMemoryRegion for Region {
    type B = ();

    fn len(&self) -> u64 {
        self.mapping.len() as u64
    }

    fn start_addr(&self) -> GuestAddr {
        self.guest
    }

    /// What is written is logged by who writes it: nearly all of it is written by the kernel.
    fn bitmap(&self) {}

    fn get_host_address(&self, addr: MemoryRegionAddress) -> GuestMemoryResult<*mut u8> {
        Ok(self.get_slice(addr, 1)?.ptr_guard_mut().as_ptr())
    }

    fn get_slice(
        &self,
        offset: MemoryRegionAddress,
        count: usize,
    ) -> GuestMemoryResult<VolatileSlice<'_>> {
        Ok(self.mapping.slice().subslice(offset.0 as usize, count)?)
    }
}

impl GuestMemoryRegionBytes for Region {}

/// An immutable set of mapped regions, sorted by guest address.
#[derive(Debug, Default)]
pub struct GuestMemory {
    regions: GuestRegionCollection<Region>,
}

impl GuestMemoryBackend for GuestMemory {
    type R = Region;

    fn num_regions(&self) -> usize {
        self.regions.num_regions()
    }

    fn find_region(&self, addr: GuestAddr) -> Option<&Region> {
        self.regions.find_region(addr)
    }

    fn iter(&self) -> impl Iterator<Item = &Region> {
        self.regions.iter()
    }
}

impl GuestMemory {
    /// No memory at all: what a connection starts with.
    pub fn empty() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// Maps a whole memory table and opens it to the network, as far as `account` allows. Until the account
    /// is updated, it counts this table in addition.
    pub fn map(
        specs: Vec<RegionSpec>,
        account: &mut MemoryAccount,
    ) -> Result<Arc<Self>, MemoryError> {
        let mut bytes = 0_u64;
        for spec in &specs {
            bytes = bytes.saturating_add(spec.mapped_bytes()?);
        }
        account.reserve_table(bytes)?;
        let mut memory = Self::default();
        for spec in specs {
            memory.insert(spec, account)?;
        }
        Ok(Arc::new(memory))
    }

    /// This table and one region more.
    pub fn with_region(
        &self,
        spec: RegionSpec,
        account: &mut MemoryAccount,
    ) -> Result<Arc<Self>, MemoryError> {
        account.reserve_table(self.mapped_bytes().saturating_add(spec.mapped_bytes()?))?;
        let mut memory = Self {
            regions: self.regions.clone(),
        };
        memory.insert(spec, account)?;
        Ok(Arc::new(memory))
    }

    /// This table less one region, which must match exactly.
    pub fn without_region(
        &self,
        guest: GuestAddr,
        size: u64,
        user_addr: u64,
    ) -> Result<Arc<Self>, MemoryError> {
        let missing = || MemoryError::NoSuchRegion {
            guest: guest.0,
            size,
        };
        let found = self.regions.find_region(guest);
        if found.is_none_or(|region| region.user_addr != user_addr) {
            return Err(missing());
        }
        let rest = self.regions.remove_region(guest, size);
        let (regions, _) = rest.map_err(|_| missing())?;
        Ok(Arc::new(Self { regions }))
    }

    fn insert(&mut self, spec: RegionSpec, account: &mut MemoryAccount) -> Result<(), MemoryError> {
        if self.regions() >= MAX_REGIONS {
            return Err(MemoryError::TooMany);
        }
        let mut region = Region::map(spec)?;
        let guest = region.guest.0;
        if self.iter().any(|r| r.overlaps(&region)) {
            return Err(MemoryError::Overlap { guest });
        }
        region.open(account, self.pinned_bytes());
        let regions = self.regions.insert_region(Arc::new(region));
        self.regions = regions.map_err(|_| MemoryError::Overlap { guest })?;
        Ok(())
    }

    /// Bytes that are mapped for it.
    pub fn mapped_bytes(&self) -> u64 {
        self.iter().map(|r| r.mapping.mapped_bytes()).sum()
    }

    /// Bytes of it that are open to the network, and so pinned.
    pub fn pinned_bytes(&self) -> u64 {
        let open = self.iter().filter(|r| r.registered.is_some());
        open.map(Region::len).sum()
    }

    /// Number of regions.
    pub fn regions(&self) -> usize {
        self.num_regions()
    }

    /// The guest address of an address in the front end's address space.
    pub fn user_to_guest(&self, user_addr: u64) -> Option<GuestAddr> {
        let at = |r: &Region| user_addr.wrapping_sub(r.user_addr);
        let region = self.iter().find(|r| at(r) < r.len())?;
        Some(GuestAddr(region.guest.0 + at(region)))
    }

    /// The guest address that a pointer from [`Self::translate`] came from.
    pub fn host_to_guest(&self, host: *const u8) -> Option<GuestAddr> {
        let at = |r: &Region| (host as u64).wrapping_sub(r.mapping.start() as u64);
        let region = self.iter().find(|r| at(r) < r.len())?;
        Some(GuestAddr(region.guest.0 + at(region)))
    }

    /// Host pointer to `len` bytes at `guest`, all within one region.
    pub fn translate(&self, guest: GuestAddr, len: u64) -> Option<*mut u8> {
        let (region, at) = self.to_region_addr(guest)?;
        let slice = region.get_slice(at, usize::try_from(len).ok()?).ok()?;
        Some(slice.ptr_guard_mut().as_ptr())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::budget::MemoryPolicy;
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    pub(crate) fn account() -> MemoryAccount {
        MemoryPolicy::alone().account()
    }

    pub(crate) fn spec(guest: u64, size: u64, user_addr: u64) -> RegionSpec {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, size).unwrap();
        RegionSpec {
            guest: GuestAddr(guest),
            size,
            user_addr,
            mmap_offset: 0,
            file,
        }
    }

    #[test]
    fn translates_inside_regions_and_nowhere_else() {
        let memory = GuestMemory::map(
            vec![
                spec(0x10_0000, 0x2000, 0x7000_0000),
                spec(0, 0x1000, 0x6000_0000),
            ],
            &mut account(),
        )
        .unwrap();
        assert!(memory.translate(GuestAddr(0), 0x1000).is_some());
        assert!(memory.translate(GuestAddr(0), 0x1001).is_none());
        assert!(memory.translate(GuestAddr(0x1000), 1).is_none());
        assert!(memory.translate(GuestAddr(0x10_1fff), 1).is_some());
        assert!(memory.translate(GuestAddr(0x10_1fff), 2).is_none());
        assert!(memory.translate(GuestAddr(u64::MAX), 1).is_none());
        assert!(memory.translate(GuestAddr(0x10_0000), u64::MAX).is_none());
    }

    #[test]
    fn user_and_host_addresses_lead_back_to_the_guest() {
        let memory =
            GuestMemory::map(vec![spec(0x10_0000, 0x2000, 0x7000_0000)], &mut account()).unwrap();
        assert_eq!(
            memory.user_to_guest(0x7000_0010),
            Some(GuestAddr(0x10_0010))
        );
        assert_eq!(memory.user_to_guest(0x7000_2000), None);
        let host = memory.translate(GuestAddr(0x10_0123), 1).unwrap();
        assert_eq!(memory.host_to_guest(host), Some(GuestAddr(0x10_0123)));
        assert_eq!(memory.host_to_guest(std::ptr::null()), None);
    }

    #[test]
    fn regions_come_and_go_without_touching_the_rest() {
        let first = GuestMemory::map(vec![spec(0, 0x1000, 0x6000_0000)], &mut account()).unwrap();
        let second = first
            .with_region(spec(0x1000, 0x1000, 0x6000_1000), &mut account())
            .unwrap();
        assert_eq!(
            first.translate(GuestAddr(0), 8),
            second.translate(GuestAddr(0), 8)
        );
        let third = second
            .without_region(GuestAddr(0), 0x1000, 0x6000_0000)
            .unwrap();
        assert!(third.translate(GuestAddr(0), 8).is_none());
        assert!(third.translate(GuestAddr(0x1000), 8).is_some());
        assert!(matches!(
            third.without_region(GuestAddr(0), 0x1000, 0),
            Err(MemoryError::NoSuchRegion { guest: 0, .. })
        ));
    }

    #[test]
    fn overlapping_empty_and_too_short_regions_are_refused() {
        let memory = GuestMemory::map(vec![spec(0, 0x2000, 0x6000_0000)], &mut account()).unwrap();
        let overlap = memory.with_region(spec(0x1000, 0x1000, 0x9000_0000), &mut account());
        assert!(matches!(
            overlap,
            Err(MemoryError::Overlap { guest: 0x1000 })
        ));
        let mut empty = spec(0x8000, 0x1000, 0x9000_0000);
        empty.size = 0;
        assert!(matches!(
            memory.with_region(empty, &mut account()),
            Err(MemoryError::BadRegion { .. })
        ));
        let mut short = spec(0x8000, 0x1000, 0x9000_0000);
        short.size = 0x2000;
        assert!(matches!(
            memory.with_region(short, &mut account()),
            Err(MemoryError::FileTooShort { .. })
        ));
    }
}
