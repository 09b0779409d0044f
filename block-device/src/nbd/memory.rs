//! Memory shared with the daemon: one split virtqueue (virtio 1.2, section 2.7), and a data buffer for each
//! request. This side is the driver.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU16, Ordering, fence};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::vduse::{Region, Ring};

/// Most requests in flight.
pub const SLOTS: u16 = 64;
/// Bytes of a request's buffer.
pub const SLOT_BYTES: usize = 1 << 20;
/// Descriptors of a request: header, data, status.
const CHAIN: u16 = 3;
const RING_SIZE: u16 = 256;
/// Guest address of the memory in the vhost-user session.
const START: u64 = 1 << 32;

// Places in the memory.
const DESC: usize = 0;
const AVAIL: usize = 4096;
const USED: usize = 8192;
const HEADERS: usize = 12288;
const STATUS: usize = 16384;
const DATA: usize = SLOT_BYTES;
const BYTES: usize = DATA + SLOTS as usize * SLOT_BYTES;

const DESC_BYTES: usize = 16;
const USED_ENTRY_BYTES: usize = 8;
const HEADER_BYTES: usize = 16;
const DESC_NEXT: u16 = 1;
const DESC_WRITE: u16 = 2;
/// No status that the daemon writes.
const STATUS_UNSET: u8 = 0xff;

const _: () = assert!(CHAIN * SLOTS <= RING_SIZE && STATUS + SLOTS as usize <= DATA);

/// Data of a request, in its buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Data {
    /// Nothing.
    None,
    /// Device-readable, length in bytes.
    Out(u32),
    /// Device-writable, length in bytes.
    In(u32),
}

/// The mapped memory.
#[derive(Debug)]
pub struct Memory {
    file: File,
    base: *mut u8,
}

// SAFETY: the mapping lasts as long as the value. Slots are given to one thread at a time by `Requests`, and
// the ring's indices are atomic; the other side of it is another process, which `Ring`'s rules keep apart.
unsafe impl Send for Memory {}
// SAFETY: as above: methods that change the ring take what only one thread has (see `Places`).
unsafe impl Sync for Memory {}

/// The driver's available and used indices.
#[derive(Debug, Default)]
pub struct Places {
    available: u16,
    used: u16,
}

impl Memory {
    /// New memory, all zeroes: a ring without requests.
    pub fn new() -> io::Result<Self> {
        let file = File::from(memfd_create("penstock-nbd", MemfdFlags::CLOEXEC)?);
        ftruncate(&file, BYTES as u64)?;
        // SAFETY: a new mapping of a file that only grows here.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )?
        };
        Ok(Self {
            file,
            base: base.cast(),
        })
    }

    /// The memory region of the vhost-user session.
    pub fn regions(&self) -> io::Result<Vec<Region>> {
        Ok(vec![Region {
            start: START,
            size: BYTES as u64,
            offset: 0,
            file: OwnedFd::from(self.file.try_clone()?),
        }])
    }

    /// Addresses of the virtqueue; `base` is the first request that is not completed.
    pub fn ring(&self, places: &Places) -> Ring {
        Ring {
            size: RING_SIZE,
            desc: START + DESC as u64,
            avail: START + AVAIL as u64,
            used: START + USED as u64,
            base: places.used,
        }
    }

    fn at(&self, offset: usize, length: usize) -> *mut u8 {
        assert!(offset + length <= BYTES);
        // SAFETY: within the mapping.
        unsafe { self.base.add(offset) }
    }

    fn index(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: within the mapping, aligned, and only ever used as an atomic.
        unsafe { AtomicU16::from_ptr(self.at(offset, 2).cast()) }
    }

    /// Reads a request's buffer, which nobody else uses now, from a stream.
    pub fn fill(&self, slot: u16, length: usize, from: &mut impl io::Read) -> io::Result<()> {
        // SAFETY: the slot is this thread's until it is put on the ring. The daemon reads from it only then.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.buffer(slot, length), length) };
        from.read_exact(bytes)
    }

    /// Writes a request's buffer, which nobody else uses now, to a stream.
    pub fn drain(&self, slot: u16, length: usize, to: &mut impl io::Write) -> io::Result<()> {
        // SAFETY: as in `fill`, after its answer.
        let bytes = unsafe { std::slice::from_raw_parts(self.buffer(slot, length), length) };
        to.write_all(bytes)
    }

    fn buffer(&self, slot: u16, length: usize) -> *mut u8 {
        assert!(slot < SLOTS && length <= SLOT_BYTES);
        self.at(DATA + usize::from(slot) * SLOT_BYTES, length)
    }

    /// Makes a request available to the device.
    pub fn submit(&self, places: &mut Places, slot: u16, header: [u8; HEADER_BYTES], data: Data) {
        let place = HEADERS + usize::from(slot) * HEADER_BYTES;
        let status = STATUS + usize::from(slot);
        // SAFETY: within the mapping; the slot is this thread's.
        unsafe {
            let target = self.at(place, HEADER_BYTES).cast::<[u8; HEADER_BYTES]>();
            target.write_volatile(header);
            self.at(status, 1).write_volatile(STATUS_UNSET);
        }
        let head = slot * CHAIN;
        let buffer = (DATA + usize::from(slot) * SLOT_BYTES) as u64;
        let after = match data {
            Data::None => head + 2,
            Data::Out(_) | Data::In(_) => head + 1,
        };
        self.describe(head, place as u64, HEADER_BYTES as u32, DESC_NEXT, after);
        match data {
            Data::None => {}
            Data::Out(length) => self.describe(head + 1, buffer, length, DESC_NEXT, head + 2),
            Data::In(length) => {
                self.describe(head + 1, buffer, length, DESC_NEXT | DESC_WRITE, head + 2);
            }
        }
        self.describe(head + 2, status as u64, 1, DESC_WRITE, 0);
        let entry = AVAIL + 4 + 2 * usize::from(places.available % RING_SIZE);
        self.index(entry).store(head, Ordering::Relaxed);
        places.available = places.available.wrapping_add(1);
        self.index(AVAIL + 2)
            .store(places.available, Ordering::Release);
        // The daemon may look whether it is to be woken only after it has seen the request.
        fence(Ordering::SeqCst);
    }

    fn describe(&self, index: u16, place: u64, length: u32, flags: u16, next: u16) {
        let mut bytes = [0; DESC_BYTES];
        bytes[..8].copy_from_slice(&(START + place).to_le_bytes());
        bytes[8..12].copy_from_slice(&length.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        let target = self.at(DESC + usize::from(index) * DESC_BYTES, DESC_BYTES);
        // SAFETY: within the mapping; the descriptor's request is not on the ring yet.
        unsafe { target.cast::<[u8; DESC_BYTES]>().write_volatile(bytes) }
    }

    /// The next completed request: its slot, and whether it succeeded.
    pub fn answered(&self, places: &mut Places) -> Option<(u16, bool)> {
        if self.index(USED + 2).load(Ordering::Acquire) == places.used {
            return None;
        }
        let entry = USED + 4 + USED_ENTRY_BYTES * usize::from(places.used % RING_SIZE);
        // The entry's 32-bit number is below 2^16: little-endian, its first half.
        let head = self.index(entry).load(Ordering::Relaxed);
        places.used = places.used.wrapping_add(1);
        // The daemon may write here what it likes: a slot that there is not belongs to no request.
        let slot = head / CHAIN;
        if slot >= SLOTS {
            return Some((slot, false));
        }
        // SAFETY: within the mapping; written before the used index that was read above.
        let status = unsafe { self.at(STATUS + usize::from(slot), 1).read_volatile() };
        Some((slot, status == 0))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, and nothing refers to it any more.
        if let Err(error) = unsafe { munmap(self.base.cast(), BYTES) } {
            tracing::error!(%error, "unmap a ring");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the daemon does, without its rules.
    fn answer(memory: &Memory, index: u16, head: u16, status: u8) {
        let slot = usize::from(head / CHAIN);
        // SAFETY: within the mapping.
        unsafe { memory.at(STATUS + slot, 1).write_volatile(status) };
        let entry = USED + 4 + USED_ENTRY_BYTES * usize::from(index % RING_SIZE);
        memory.index(entry).store(head, Ordering::Relaxed);
        memory
            .index(USED + 2)
            .store(index.wrapping_add(1), Ordering::Release);
    }

    #[test]
    fn answers_come_back_in_any_order_and_over_the_rings_end() {
        let memory = Memory::new().unwrap();
        let mut places = Places::default();
        for round in 0..300_u16 {
            let (first, second) = (round % SLOTS, (round + 7) % SLOTS);
            memory.submit(&mut places, first, [1; 16], Data::Out(512));
            memory.submit(&mut places, second, [2; 16], Data::None);
            assert_eq!(memory.answered(&mut places), None);
            answer(&memory, round * 2, second * CHAIN, 0);
            answer(&memory, round * 2 + 1, first * CHAIN, 1);
            assert_eq!(memory.answered(&mut places), Some((second, true)));
            assert_eq!(memory.answered(&mut places), Some((first, false)));
        }
        assert_eq!(memory.ring(&places).base, 600);
    }

    #[test]
    fn buffers_are_apart() {
        let memory = Memory::new().unwrap();
        memory.fill(0, 4, &mut &b"abcd"[..]).unwrap();
        memory.fill(SLOTS - 1, 4, &mut &b"wxyz"[..]).unwrap();
        let mut read = Vec::new();
        memory.drain(0, 4, &mut read).unwrap();
        memory.drain(SLOTS - 1, 4, &mut read).unwrap();
        assert_eq!(read, b"abcdwxyz");
    }
}
