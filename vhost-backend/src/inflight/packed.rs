//! The record of a packed ring. A packed ring keeps no descriptor of a request once another one's answer is
//! written over it, so the record holds the descriptors themselves: per queue a header of 32 bytes and 32
//! bytes per entry, entries linked into a list of free ones.
//!
//! The ring takes entries for a request from the front of the free list and keeps a list of its own in the
//! same order. Order of the writes for a batch of answers, and the crash that each step survives:
//! 1. the entries of each request go to the front of the free list, `old_free_head` stays: the batch is known
//!    as the list between the two;
//! 2. `used_idx` moves, `old_used_idx` stays. A crash before this replays the whole batch;
//! 3. the ring's descriptors are written, the first one last: the guest has its answers. A crash before that
//!    finds the first descriptor as the driver made it available, and replays the batch after the others were
//!    put back. A crash after it drops the batch;
//! 4. the marks are cleared, then the old values follow the new ones.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use super::{InflightRegion, VERSION};
use crate::ring::RingError;
use crate::ring::packed::{Desc, NO_ENTRY, Position, Requests};

/// Bytes before the first entry.
pub(super) const HEADER_BYTES: u64 = 32;
/// Bytes of one entry.
pub(super) const STATE_BYTES: u64 = 32;

/// Header of one queue's part: `features` is unused so far, as the specification has it.
#[repr(C)]
struct Header {
    features: AtomicU64,
    version: AtomicU16,
    desc_num: AtomicU16,
    free_head: AtomicU16,
    old_free_head: AtomicU16,
    used_idx: AtomicU16,
    old_used_idx: AtomicU16,
    used_wrap: AtomicU8,
    old_used_wrap: AtomicU8,
    padding: [u8; 10],
}

/// One descriptor; `last`, `num`, `counter` and `inflight` count in the first one of a request only.
#[repr(C)]
struct State {
    inflight: AtomicU8,
    padding: u8,
    next: AtomicU16,
    last: AtomicU16,
    num: AtomicU16,
    counter: AtomicU64,
    id: AtomicU16,
    flags: AtomicU16,
    len: AtomicU32,
    addr: AtomicU64,
}

const _: () =
    assert!(size_of::<Header>() as u64 == HEADER_BYTES && size_of::<State>() as u64 == STATE_BYTES);

/// A batch of answers that a daemon died over: where it begins in the ring, and its requests in order.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Batch {
    pub(crate) from: Position,
    pub(crate) heads: Vec<u16>,
}

/// The record of one packed ring.
#[derive(Debug)]
pub struct PackedInflight {
    /// Keeps the mapping.
    region: Arc<InflightRegion>,
    base: *mut u8,
    /// Counter of the next submission.
    counter: u64,
}

// SAFETY: `base` leads into the mapping that `region` keeps; all access is atomic.
unsafe impl Send for PackedInflight {}

impl PackedInflight {
    pub(super) fn new(region: &Arc<InflightRegion>, base: *mut u8) -> Self {
        Self {
            region: Arc::clone(region),
            base,
            counter: 0,
        }
    }

    fn header(&self) -> &Header {
        // SAFETY: the part begins with a header, is 64-byte aligned, and atomics may be shared with other
        // processes.
        unsafe { &*self.base.cast::<Header>() }
    }

    #[inline]
    fn state(&self, entry: u16) -> &State {
        assert!(entry < self.size(), "entry outside the in-flight region");
        // SAFETY: `entry` was checked just above; the entries follow the header.
        unsafe {
            &*self
                .base
                .add(HEADER_BYTES as usize)
                .cast::<State>()
                .add(usize::from(entry))
        }
    }

    /// Entries this record has room for.
    pub fn size(&self) -> u16 {
        self.region.queue_size
    }

    /// Whether nothing was recorded yet.
    pub(crate) fn is_fresh(&self) -> bool {
        self.header().version.load(Ordering::Acquire) != VERSION
    }

    /// The ring begins anew, with nothing in flight.
    pub(super) fn forget(&mut self) {
        self.header().version.store(0, Ordering::Release);
    }

    /// Begins a record with nothing in flight.
    pub(crate) fn begin(&mut self, used: Position, requests: &Requests) {
        for entry in 0..self.size() {
            self.state(entry).inflight.store(0, Ordering::Relaxed);
        }
        let header = self.header();
        header.features.store(0, Ordering::Relaxed);
        header.desc_num.store(self.size(), Ordering::Relaxed);
        self.set_used(used);
        self.set_old_used(used);
        self.relink(requests);
        self.header().version.store(VERSION, Ordering::Release);
    }

    fn used(&self) -> Position {
        let header = self.header();
        Position {
            index: header.used_idx.load(Ordering::Acquire),
            wrap: header.used_wrap.load(Ordering::Acquire) & 1 != 0,
        }
    }

    fn old_used(&self) -> Position {
        let header = self.header();
        Position {
            index: header.old_used_idx.load(Ordering::Acquire),
            wrap: header.old_used_wrap.load(Ordering::Acquire) & 1 != 0,
        }
    }

    fn set_used(&self, used: Position) {
        let header = self.header();
        header.used_idx.store(used.index, Ordering::Release);
        header
            .used_wrap
            .store(u8::from(used.wrap), Ordering::Release);
    }

    fn set_old_used(&self, used: Position) {
        let header = self.header();
        header.old_used_idx.store(used.index, Ordering::Release);
        header
            .old_used_wrap
            .store(u8::from(used.wrap), Ordering::Release);
    }

    fn set_free_head(&self, head: u16) {
        self.header().free_head.store(head, Ordering::Release);
    }

    fn keep_free_head(&self) {
        let header = self.header();
        header
            .old_free_head
            .store(header.free_head.load(Ordering::Relaxed), Ordering::Release);
    }

    /// Where the next answer goes, once [`Self::interrupted`] is dealt with.
    pub(crate) fn position(&self, size: u16) -> Result<Position, RingError> {
        let used = self.old_used();
        match used.index < size {
            true => Ok(used),
            false => Err(RingError::Record),
        }
    }

    /// The batch whose end is not recorded, for a ring of `size`.
    pub(crate) fn interrupted(&self, size: u16) -> Result<Option<Batch>, RingError> {
        let (used, from) = (self.used(), self.old_used());
        if used == from {
            return Ok(None);
        }
        let header = self.header();
        let end = header.old_free_head.load(Ordering::Acquire);
        let mut head = header.free_head.load(Ordering::Acquire);
        let mut heads = Vec::new();
        while head != end {
            if head >= size || heads.len() == usize::from(size) {
                return Err(RingError::Record);
            }
            heads.push(head);
            let last = self.state(head).last.load(Ordering::Relaxed);
            if last >= size {
                return Err(RingError::Record);
            }
            head = self.state(last).next.load(Ordering::Relaxed);
        }
        heads.reverse();
        Ok(Some(Batch { from, heads }))
    }

    /// Descriptors of a request.
    pub(crate) fn num(&self, head: u16) -> u16 {
        self.state(head).num.load(Ordering::Relaxed)
    }

    /// The batch is as if it had never begun.
    pub(crate) fn roll_back(&mut self) {
        self.set_used(self.old_used());
    }

    /// Fills `requests` with what is in flight, and returns the heads in the order in which they were taken.
    pub(crate) fn load(&mut self, requests: &mut Requests) -> Result<Vec<u16>, RingError> {
        let mut found: Vec<(u64, u16)> = (0..requests.size())
            .filter(|&head| self.state(head).inflight.load(Ordering::Acquire) == 1)
            .map(|head| (self.state(head).counter.load(Ordering::Relaxed), head))
            .collect();
        found.sort_unstable();
        self.counter = found.last().map_or(0, |last| last.0.wrapping_add(1));
        for &(_, head) in &found {
            let mut entry = head;
            let descs = (0..self.num(head).min(requests.size())).map_while(|_| {
                let at = entry;
                if at >= requests.size() {
                    return None;
                }
                let state = self.state(at);
                entry = state.next.load(Ordering::Relaxed);
                Some((at, state.desc()))
            });
            let descs: Vec<(u16, Desc)> = descs.collect();
            if descs.len() != usize::from(self.num(head)) || !requests.insert(&descs) {
                return Err(RingError::Record);
            }
        }
        requests.link_free();
        self.relink(requests);
        Ok(found.into_iter().map(|entry| entry.1).collect())
    }

    /// Makes the free list the one of `requests`.
    fn relink(&mut self, requests: &Requests) {
        for (entry, next) in requests.free_list() {
            self.state(entry).next.store(next, Ordering::Relaxed);
        }
        self.set_free_head(requests.free_head());
        self.keep_free_head();
    }

    /// Records that the request at `head` was taken off the ring.
    #[inline]
    pub(crate) fn taken(&mut self, head: u16, requests: &Requests) {
        let counter = self.counter;
        self.counter = counter.wrapping_add(1);
        let mut num = 0;
        for (entry, desc) in requests.descs(head) {
            self.state(entry).set_desc(desc);
            num += 1;
        }
        let state = self.state(head);
        state.counter.store(counter, Ordering::Relaxed);
        state.num.store(num, Ordering::Relaxed);
        state.last.store(requests.last(head), Ordering::Relaxed);
        self.set_free_head(requests.free_head());
        self.keep_free_head();
        self.state(head).inflight.store(1, Ordering::Release);
    }

    /// Records that the request at `head`, which was taken last, is on the ring again, and its entries at the
    /// front of the free list.
    pub(crate) fn untaken(&mut self, head: u16, requests: &Requests) {
        self.state(head).inflight.store(0, Ordering::Release);
        self.free(head, requests);
        self.keep_free_head();
    }

    fn free(&self, head: u16, requests: &Requests) {
        let front = self.header().free_head.load(Ordering::Relaxed);
        self.state(requests.last(head))
            .next
            .store(front, Ordering::Relaxed);
        self.set_free_head(head);
    }

    /// Steps 1 and 2 of a batch: these requests have their answers, after which the ring stands at `used`.
    #[inline]
    pub(crate) fn answered(
        &mut self,
        heads: impl Iterator<Item = u16>,
        used: Position,
        requests: &Requests,
    ) {
        for head in heads {
            self.free(head, requests);
        }
        self.set_used(used);
    }

    #[inline]
    pub(crate) fn clear_marks(&mut self, heads: impl Iterator<Item = u16>) {
        for head in heads {
            self.state(head).inflight.store(0, Ordering::Release);
        }
    }

    /// Step 4 of a batch: the guest has the answers.
    #[inline]
    pub(crate) fn published(&mut self, heads: impl Iterator<Item = u16>) {
        self.clear_marks(heads);
        self.keep_free_head();
        self.set_old_used(self.used());
    }
}

impl State {
    fn desc(&self) -> Desc {
        Desc {
            addr: self.addr.load(Ordering::Relaxed),
            len: self.len.load(Ordering::Relaxed),
            id: self.id.load(Ordering::Relaxed),
            flags: self.flags.load(Ordering::Relaxed),
        }
    }

    #[inline]
    fn set_desc(&self, desc: Desc) {
        self.addr.store(desc.addr, Ordering::Relaxed);
        self.len.store(desc.len, Ordering::Relaxed);
        self.id.store(desc.id, Ordering::Relaxed);
        self.flags.store(desc.flags, Ordering::Relaxed);
    }
}

const _: () = assert!(NO_ENTRY > crate::ring::MAX_QUEUE_SIZE);
