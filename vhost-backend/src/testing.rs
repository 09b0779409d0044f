//! A guest without a machine: memory, rings and virtio-blk requests made by hand, for tests and
//! benchmarks.
//!
//! It panics where a test would fail anyway, and it lets a test write anything anywhere in its own memory.

mod packed;
mod queue;

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use fabric_types::registrar::{MemoryRegistrar, Registered};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vm_memory::Bytes;

use crate::memory::budget::MemoryPolicy;
use crate::memory::{GuestAddr, GuestMemory, RegionSpec};

pub use queue::{Buffer, FakeQueue, QueueOptions, STATUS_UNSET};

/// Where the memory of a [`FakeGuest`] begins, in guest addresses. What lies below is outside.
pub const GUEST_BASE: u64 = 0x10_0000;
/// Where it begins in the address space of the imagined front end.
pub const USER_BASE: u64 = 0x7f00_0000_0000;

/// What is open to the network.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OpenMemory {
    /// Regions that are open now.
    pub regions: u64,
    /// Bytes in them.
    pub bytes: u64,
    /// Regions that were ever opened.
    pub registrations: u64,
}

/// Opens memory to nobody, and counts. Clones count together.
#[derive(Debug, Clone, Default)]
pub struct CountingRegistrar(Arc<Mutex<OpenMemory>>);

/// Closes a region.
struct Close(CountingRegistrar, u64);

impl Drop for Close {
    fn drop(&mut self) {
        let mut open = self.0.lock();
        open.regions -= 1;
        open.bytes -= self.1;
    }
}

impl CountingRegistrar {
    fn lock(&self) -> MutexGuard<'_, OpenMemory> {
        self.0.lock().expect("no panic under this lock")
    }

    /// What is open, and was.
    pub fn counts(&self) -> OpenMemory {
        *self.lock()
    }
}

impl MemoryRegistrar for CountingRegistrar {
    fn opens_memory(&self) -> bool {
        true
    }

    unsafe fn register(&self, _: NonNull<u8>, bytes: usize) -> Option<Registered> {
        let mut open = self.lock();
        open.regions += 1;
        open.bytes += bytes as u64;
        open.registrations += 1;
        Some(Registered::new(Close(self.clone(), bytes as u64)))
    }
}

/// Guest memory with an allocator that only goes up.
#[derive(Debug)]
pub struct FakeGuest {
    memory: Arc<GuestMemory>,
    file: OwnedFd,
    size: u64,
    next: AtomicU64,
}

impl FakeGuest {
    /// A guest with one region of `size` bytes.
    pub fn new(size: u64) -> Self {
        let region = Self::region(GUEST_BASE, size);
        let file = region.file.try_clone().expect("descriptors can be copied");
        let memory = GuestMemory::map(vec![region], &mut MemoryPolicy::alone().account());
        let memory = memory.expect("a memfd can be mapped");
        Self {
            memory,
            file,
            size,
            next: AtomicU64::new(GUEST_BASE),
        }
    }

    /// A region of fresh memory.
    pub fn region(guest: u64, size: u64) -> RegionSpec {
        let file = memfd_create("fake-guest", MemfdFlags::CLOEXEC).expect("memfd_create works");
        ftruncate(&file, size).expect("a memfd can be sized");
        RegionSpec {
            guest: GuestAddr(guest),
            size,
            user_addr: guest - GUEST_BASE + USER_BASE,
            mmap_offset: 0,
            file,
        }
    }

    /// The memory as a session would hand it over.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// The file behind the memory, as a front end would send it.
    pub fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// Bytes of the memory.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Takes `len` bytes out of the memory.
    pub fn alloc(&self, len: u64, align: u64) -> GuestAddr {
        let mut at = 0;
        let step = |next: u64| {
            at = next.next_multiple_of(align);
            Some(at + len)
        };
        self.next
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, step)
            .expect("the step is never refused");
        assert!(
            at + len <= GUEST_BASE + self.size,
            "fake guest out of memory"
        );
        GuestAddr(at)
    }

    /// Host pointer to guest bytes.
    pub fn host(&self, at: GuestAddr, len: u64) -> *mut u8 {
        self.memory
            .translate(at, len)
            .expect("inside the fake guest")
    }

    /// Writes guest memory.
    pub fn write(&self, at: GuestAddr, bytes: &[u8]) {
        let outcome = self.memory.write_slice(bytes, at);
        outcome.expect("inside the fake guest");
    }

    /// Reads guest memory.
    pub fn read(&self, at: GuestAddr, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        let outcome = self.memory.read_slice(&mut out, at);
        outcome.expect("inside the fake guest");
        out
    }

    /// Takes memory and fills it.
    pub fn place(&self, bytes: &[u8]) -> GuestAddr {
        let at = self.alloc(bytes.len() as u64, 1);
        self.write(at, bytes);
        at
    }
}
