//! Requests in flight, recorded in memory that outlives the daemon (`INFLIGHT_SHMFD`).
//!
//! The front end keeps the memory while the daemon is away and hands it to the next one, which learns from it
//! what was taken off each ring and not yet answered. The layouts are those of the vhost-user specification,
//! queues 64-byte aligned one after the other. For split rings: per queue a header of 16 bytes and 16 bytes
//! per descriptor. For packed ones see [`PackedInflight`].
//!
//! Order of the writes for a batch of answers of a split ring, and the crash that each step survives:
//! 1. each head is linked to the head before it (`next`, `last_batch_head`): the batch is known as a list;
//! 2. the used ring's index moves: the guest has its answers. A crash before this replays the whole batch, a
//!    crash after it finds `used_idx` behind the ring's index by the length of the batch, and drops that many
//!    list entries;
//! 3. the marks are cleared, then `used_idx` follows the ring.

mod packed;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use crate::memory::{Mapping, MemoryError};
use crate::ring::QEMU_QUEUE_SIZE_MAX;

pub use packed::PackedInflight;

/// Alignment of each queue's part.
const QUEUE_ALIGN_BYTES: u64 = 64;
/// Bytes before the first descriptor state.
const HEADER_BYTES: u64 = 16;
/// Bytes of one descriptor state.
const STATE_BYTES: u64 = 16;
/// The only version of either layout.
const VERSION: u16 = 1;

/// Header of one queue's part: `features` is unused so far, as the specification has it.
#[repr(C)]
struct Header {
    features: AtomicU64,
    version: AtomicU16,
    desc_num: AtomicU16,
    last_batch_head: AtomicU16,
    used_idx: AtomicU16,
}

/// State of one descriptor.
#[repr(C)]
struct State {
    inflight: AtomicU8,
    padding: [u8; 5],
    next: AtomicU16,
    counter: AtomicU64,
}

const _: () =
    assert!(size_of::<Header>() as u64 == HEADER_BYTES && size_of::<State>() as u64 == STATE_BYTES);

/// Which rings a record is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RingLayout {
    /// Split ones.
    Split,
    /// Packed ones.
    Packed,
}

impl RingLayout {
    /// Bytes of one queue's part.
    fn stride(self, queue_size: u16) -> u64 {
        let (header, state) = match self {
            Self::Split => (HEADER_BYTES, STATE_BYTES),
            Self::Packed => (packed::HEADER_BYTES, packed::STATE_BYTES),
        };
        (header + state * u64::from(queue_size)).next_multiple_of(QUEUE_ALIGN_BYTES)
    }

    /// Bytes of a record.
    fn bytes(self, num_queues: u16, queue_size: u16) -> u64 {
        u64::from(num_queues) * self.stride(queue_size)
    }

    /// Entries per queue of a record for rings of `asked` entries.
    ///
    /// QEMU 10.0 requests its own `queue-size`, but lets the guest create larger rings up to QEMU's limit.
    pub fn entries_for(asked: u16) -> u16 {
        asked.max(QEMU_QUEUE_SIZE_MAX)
    }

    /// Entries per queue that fit into a record of `mmap_size` bytes. The front end returns a record with the
    /// number that it requested; the length shows the number that it got.
    pub fn entries(self, mmap_size: u64, num_queues: u16, asked: u16) -> u16 {
        let made = Self::entries_for(asked);
        match mmap_size == self.bytes(num_queues, made) {
            true => made,
            false => asked,
        }
    }
}

/// The memory of all queues of one device.
#[derive(Debug)]
pub struct InflightRegion {
    mapping: Mapping,
    layout: RingLayout,
    num_queues: u16,
    queue_size: u16,
}

impl InflightRegion {
    /// Makes fresh memory for GET_INFLIGHT_FD; returns the file that is sent to the front end as well.
    pub fn create(
        layout: RingLayout,
        num_queues: u16,
        queue_size: u16,
    ) -> Result<(Arc<Self>, OwnedFd), MemoryError> {
        let os = |e| MemoryError::Os {
            what: "make in-flight memory",
            source: std::io::Error::from(e),
        };
        let file = memfd_create(
            "penstock-inflight",
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        )
        .map_err(os)?;
        let bytes = layout.bytes(num_queues, queue_size);
        ftruncate(&file, bytes).map_err(os)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(os)?;
        let keep = file.try_clone().map_err(|source| MemoryError::Os {
            what: "copy a file descriptor",
            source,
        })?;
        let region = Self::map(file, layout, bytes, 0, num_queues, queue_size)?;
        Ok((region, keep))
    }

    /// Maps the memory that a front end kept (SET_INFLIGHT_FD).
    pub fn map(
        file: OwnedFd,
        layout: RingLayout,
        mmap_size: u64,
        mmap_offset: u64,
        num_queues: u16,
        queue_size: u16,
    ) -> Result<Arc<Self>, MemoryError> {
        let needed = layout.bytes(num_queues, queue_size);
        if mmap_size < needed || needed == 0 {
            return Err(MemoryError::InflightLayout {
                bytes: mmap_size,
                queues: num_queues,
                size: queue_size,
            });
        }
        if mmap_offset % QUEUE_ALIGN_BYTES != 0 {
            return Err(MemoryError::BadRegion {
                guest: mmap_offset,
                size: mmap_size,
            });
        }
        let mapping = Mapping::shared(&file, mmap_offset, needed)?;
        Ok(Arc::new(Self {
            mapping,
            layout,
            num_queues,
            queue_size,
        }))
    }

    /// Bytes to map.
    pub fn mmap_size(&self) -> u64 {
        self.layout.bytes(self.num_queues, self.queue_size)
    }

    /// Number of queues.
    pub fn num_queues(&self) -> u16 {
        self.num_queues
    }

    /// Entries per queue.
    pub fn queue_size(&self) -> u16 {
        self.queue_size
    }

    /// The part of one queue.
    pub fn queue(self: &Arc<Self>, index: u16) -> Option<InflightRecord> {
        if index >= self.num_queues {
            return None;
        }
        let offset = u64::from(index) * self.layout.stride(self.queue_size);
        // SAFETY: `index` is below `num_queues`, so its part lies in the mapping.
        let base = unsafe { self.mapping.start().add(offset as usize) };
        Some(match self.layout {
            RingLayout::Split => InflightRecord::Split(InflightQueue {
                region: Arc::clone(self),
                base,
                counter: 0,
            }),
            RingLayout::Packed => InflightRecord::Packed(PackedInflight::new(self, base)),
        })
    }

    /// Nothing is in flight any more, and rings begin anew.
    ///
    /// Only a record of packed rings must know: it tells where its ring stands.
    pub fn forget(self: &Arc<Self>) {
        for index in 0..self.num_queues {
            if let Some(InflightRecord::Packed(mut queue)) = self.queue(index) {
                queue.forget();
            }
        }
    }
}

/// The record of one queue, in either layout.
#[derive(Debug)]
pub enum InflightRecord {
    /// Of a split ring.
    Split(InflightQueue),
    /// Of a packed one.
    Packed(PackedInflight),
}

/// What a restart found: where to go on, and what to do again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recovery {
    /// Index in the available ring of the first entry that was never taken.
    pub next_avail: u16,
    /// Heads to submit again, in the order of their first submission.
    pub heads: Vec<u16>,
}

/// The record of one queue.
#[derive(Debug)]
pub struct InflightQueue {
    region: Arc<InflightRegion>,
    base: *mut u8,
    /// Counter of the next submission.
    counter: u64,
}

// SAFETY: `base` leads into the mapping that `region` keeps; all access is atomic.
unsafe impl Send for InflightQueue {}

impl InflightQueue {
    fn header(&self) -> &Header {
        // SAFETY: the part begins with a header, is 64-byte aligned, and atomics may be shared with other
        // processes.
        unsafe { &*self.base.cast::<Header>() }
    }

    #[inline]
    fn state(&self, head: u16) -> &State {
        assert!(
            head < self.region.queue_size,
            "descriptor outside the in-flight region"
        );
        // SAFETY: `head` was checked just above; the states follow the header.
        unsafe {
            &*self
                .base
                .add(HEADER_BYTES as usize)
                .cast::<State>()
                .add(usize::from(head))
        }
    }

    /// Entries this record has room for.
    pub fn size(&self) -> u16 {
        self.region.queue_size
    }

    /// Completes the last batch and lists the requests to repeat, given the used ring's index.
    pub fn recover(&mut self, used_idx: u16, queue_size: u16) -> Recovery {
        let header = self.header();
        if header.version.load(Ordering::Acquire) != VERSION {
            header.features.store(0, Ordering::Relaxed);
            header
                .desc_num
                .store(self.region.queue_size, Ordering::Relaxed);
            header.last_batch_head.store(0, Ordering::Relaxed);
            header.used_idx.store(used_idx, Ordering::Relaxed);
            header.version.store(VERSION, Ordering::Release);
        }
        self.drop_answered(used_idx);
        let mut found: Vec<(u64, u16)> = (0..queue_size.min(self.region.queue_size))
            .filter(|&head| self.state(head).inflight.load(Ordering::Acquire) == 1)
            .map(|head| (self.state(head).counter.load(Ordering::Relaxed), head))
            .collect();
        found.sort_unstable();
        self.counter = found.last().map_or(0, |last| last.0.wrapping_add(1));
        let next_avail = used_idx.wrapping_add(found.len() as u16);
        Recovery {
            next_avail,
            heads: found.into_iter().map(|entry| entry.1).collect(),
        }
    }

    /// Clears the marks of the batch whose answers the guest has, though the crash came before they were
    /// cleared.
    fn drop_answered(&self, used_idx: u16) {
        let header = self.header();
        let behind = used_idx.wrapping_sub(header.used_idx.load(Ordering::Relaxed));
        let mut head = header.last_batch_head.load(Ordering::Relaxed);
        for _ in 0..behind.min(self.region.queue_size) {
            if head >= self.region.queue_size {
                break;
            }
            let state = self.state(head);
            state.inflight.store(0, Ordering::Relaxed);
            head = state.next.load(Ordering::Relaxed);
        }
        header.used_idx.store(used_idx, Ordering::Release);
    }

    /// Records that `head` was taken off the ring.
    #[inline]
    pub fn taken(&mut self, head: u16) {
        let counter = self.counter;
        self.counter = counter.wrapping_add(1);
        let state = self.state(head);
        state.counter.store(counter, Ordering::Relaxed);
        state.inflight.store(1, Ordering::Release);
    }

    /// Records that `head`, which was taken last, is on the ring again.
    pub fn untaken(&mut self, head: u16) {
        self.state(head).inflight.store(0, Ordering::Release);
    }

    /// Step 1 of a batch: `head` has its answer in the used ring, whose index has not moved yet.
    #[inline]
    pub fn answered(&mut self, head: u16) {
        let header = self.header();
        self.state(head).next.store(
            header.last_batch_head.load(Ordering::Relaxed),
            Ordering::Relaxed,
        );
        header.last_batch_head.store(head, Ordering::Release);
    }

    /// Step 3 of a batch: the used ring's index has moved to `used_idx`.
    #[inline]
    pub fn completed(&mut self, heads: &[u16], used_idx: u16) {
        for &head in heads {
            self.state(head).inflight.store(0, Ordering::Release);
        }
        self.header().used_idx.store(used_idx, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fresh() -> (Arc<InflightRegion>, OwnedFd) {
        InflightRegion::create(RingLayout::Split, 2, 8).unwrap()
    }

    fn split(region: &Arc<InflightRegion>) -> InflightQueue {
        match region.queue(1) {
            Some(InflightRecord::Split(queue)) => queue,
            other => panic!("{other:?}"),
        }
    }

    fn reopened(file: &OwnedFd) -> InflightQueue {
        let file = file.try_clone().unwrap();
        split(&InflightRegion::map(file, RingLayout::Split, 1024, 0, 2, 8).unwrap())
    }

    #[test]
    fn unanswered_requests_return_in_submission_order() {
        let (region, file) = fresh();
        let mut queue = split(&region);
        assert_eq!(
            queue.recover(5, 8),
            Recovery {
                next_avail: 5,
                heads: vec![]
            }
        );
        for head in [6, 2, 4, 0] {
            queue.taken(head);
        }
        queue.answered(2);
        queue.completed(&[2], 6);
        assert_eq!(
            reopened(&file).recover(6, 8),
            Recovery {
                next_avail: 9,
                heads: vec![6, 4, 0]
            }
        );
    }

    #[test]
    fn order_holds_over_several_restarts() {
        let (region, file) = fresh();
        let mut first = split(&region);
        first.recover(0, 8);
        first.taken(7);
        first.taken(3);
        let mut second = reopened(&file);
        assert_eq!(second.recover(0, 8).heads, [7, 3]);
        second.taken(1);
        assert_eq!(
            reopened(&file).recover(0, 8),
            Recovery {
                next_avail: 3,
                heads: vec![7, 3, 1]
            }
        );
    }

    #[test]
    fn a_crash_before_the_used_index_moved_replays_the_batch() {
        let (region, file) = fresh();
        let mut queue = split(&region);
        queue.recover(0, 8);
        queue.taken(1);
        queue.taken(2);
        queue.answered(2);
        queue.answered(1);
        assert_eq!(reopened(&file).recover(0, 8).heads, [1, 2]);
    }

    #[test]
    fn crash_after_the_used_index_moved_drops_only_that_batch() {
        let (region, file) = fresh();
        let mut queue = split(&region);
        queue.recover(0xffff, 8);
        for head in [1, 2, 3] {
            queue.taken(head);
        }
        queue.answered(3);
        queue.answered(1);
        assert_eq!(
            reopened(&file).recover(1, 8),
            Recovery {
                next_avail: 2,
                heads: vec![2]
            }
        );
    }

    #[test]
    fn content_made_up_by_the_other_side_is_bounded() {
        let (region, file) = fresh();
        let mut queue = split(&region);
        queue.recover(0, 8);
        queue.taken(1);
        queue
            .header()
            .last_batch_head
            .store(60000, Ordering::Relaxed);
        queue.header().used_idx.store(9, Ordering::Relaxed);
        assert_eq!(reopened(&file).recover(0, 8).heads, [1]);
        queue.header().last_batch_head.store(5, Ordering::Relaxed);
        queue.header().used_idx.store(9, Ordering::Relaxed);
        queue.state(5).next.store(5, Ordering::Relaxed);
        assert_eq!(reopened(&file).recover(0, 8).heads, [1]);
    }

    #[test]
    fn length_of_a_record_tells_its_layout() {
        for layout in [RingLayout::Split, RingLayout::Packed] {
            for (asked, made) in [(128, 1024), (1024, 1024), (4096, 4096), (32768, 32768)] {
                assert_eq!(RingLayout::entries_for(asked), made);
                let record = InflightRegion::create(layout, 4, made).unwrap().0;
                assert_eq!(layout.entries(record.mmap_size(), 4, asked), made);
            }
            // One of a daemon that made records exactly as they were asked for.
            let older = InflightRegion::create(layout, 4, 128).unwrap().0;
            assert_eq!(layout.entries(older.mmap_size(), 4, 128), 128);
        }
    }

    #[test]
    fn regions_that_do_not_fit_are_refused() {
        let (_, file) = fresh();
        let map = |size, offset, queues, entries| {
            let file = file.try_clone().unwrap();
            InflightRegion::map(file, RingLayout::Split, size, offset, queues, entries)
        };
        assert!(matches!(
            map(16, 0, 2, 8),
            Err(MemoryError::InflightLayout { .. })
        ));
        assert!(matches!(
            map(1 << 40, 0, 65535, 65535),
            Err(MemoryError::FileTooShort { .. })
        ));
        assert!(matches!(
            map(1024, 3, 2, 8),
            Err(MemoryError::BadRegion { .. })
        ));
        assert!(matches!(
            map(1024, 0, 0, 8),
            Err(MemoryError::InflightLayout { .. })
        ));
    }
}
