//! The driver's side of a packed ring: what [`FakeQueue`](super::FakeQueue) does with it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::Buffer;
use crate::memory::GuestAddr;
use crate::ring::packed::Position;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const EVENT_DISABLE: u32 = 1 << 16;
const EVENT_DESC: u32 = 2 << 16;

/// A driver that hands out buffer ids anew in the order in which they come back, and knows nothing of the
/// device but the ring.
#[derive(Debug)]
pub(super) struct PackedDriver {
    ring: *mut u8,
    driver_event: *mut u8,
    device_event: *mut u8,
    size: u16,
    next: Position,
    used: Position,
    free_ids: VecDeque<u16>,
    /// Descriptors that are the driver's.
    free: u16,
    /// Descriptors of each buffer.
    counts: Vec<u16>,
    /// The second half of the first descriptor that is not visible yet, and its place.
    withheld: Option<(u16, u64)>,
    /// Descriptors added since the last decision about a kick.
    added: u16,
    answers: u16,
}

impl PackedDriver {
    pub(super) fn new(parts: [*mut u8; 3], size: u16) -> Self {
        Self {
            ring: parts[0],
            driver_event: parts[1],
            device_event: parts[2],
            size,
            next: Position::START,
            used: Position::START,
            free_ids: (0..size).collect(),
            free: size,
            counts: vec![0; usize::from(size)],
            withheld: None,
            added: 0,
            answers: 0,
        }
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset < 16 * usize::from(self.size));
        // SAFETY: the offset was checked; the ring is aligned to a page.
        unsafe { AtomicU64::from_ptr(self.ring.add(offset).cast()) }
    }

    pub(super) fn has_room(&self, descs: usize) -> bool {
        usize::from(self.free) >= descs
    }

    /// Writes one descriptor at the next place, with flags beside those of availability.
    fn write(&mut self, addr: GuestAddr, len: u32, id: u16, flags: u16) {
        let at = 16 * usize::from(self.next.index);
        let flags = flags | self.next.available_flags();
        let rest = u64::from(len) | u64::from(id) << 32 | u64::from(flags) << 48;
        self.word(at).store(addr.0.to_le(), Ordering::Relaxed);
        match self.withheld {
            Some(_) => self.word(at + 8).store(rest.to_le(), Ordering::Relaxed),
            None => self.withheld = Some((self.next.index, rest)),
        }
        self.next = self.next.plus(1, self.size);
        self.free -= 1;
        // A driver that never kicks never asks.
        self.added = self.added.saturating_add(1);
    }

    /// Adds a chain, not yet visible; returns its buffer id.
    #[inline(never)]
    pub(super) fn add(&mut self, buffers: &[Buffer]) -> u16 {
        let id = self.free_ids.pop_front().expect("a free buffer id");
        for (i, (addr, len, writable)) in buffers.iter().enumerate() {
            let more = if i + 1 < buffers.len() { NEXT } else { 0 };
            self.write(*addr, *len, id, (u16::from(*writable) * WRITE) | more);
        }
        self.counts[usize::from(id)] = buffers.len() as u16;
        id
    }

    /// Adds an indirect table; returns its buffer id.
    pub(super) fn add_table(&mut self, at: GuestAddr, bytes: u32) -> u16 {
        let id = self.free_ids.pop_front().expect("a free buffer id");
        self.write(at, bytes, id, INDIRECT);
        self.counts[usize::from(id)] = 1;
        id
    }

    /// The descriptors of an indirect table.
    pub(super) fn table(buffers: &[Buffer]) -> Vec<u8> {
        let mut table = Vec::with_capacity(16 * buffers.len());
        for (addr, len, writable) in buffers {
            table.extend(addr.0.to_le_bytes());
            table.extend(len.to_le_bytes());
            table.extend([0; 2]);
            table.extend((u16::from(*writable) * WRITE).to_le_bytes());
        }
        table
    }

    /// Makes what was added visible.
    #[inline(never)]
    pub(super) fn publish(&mut self) {
        if let Some((index, rest)) = self.withheld.take() {
            self.word(16 * usize::from(index) + 8)
                .store(rest.to_le(), Ordering::Release);
        }
    }

    fn event(&self, of: *mut u8) -> &AtomicU32 {
        // SAFETY: either structure lies at the beginning of a page.
        unsafe { AtomicU32::from_ptr(of.cast()) }
    }

    #[inline(never)]
    pub(super) fn kick_wanted(&mut self) -> bool {
        let added = std::mem::take(&mut self.added);
        let event = u32::from_le(self.event(self.device_event).load(Ordering::Relaxed));
        match event & !0xffff {
            EVENT_DISABLE => false,
            EVENT_DESC => {
                let last = self.next.minus(1, self.size);
                Position::decode(event as u16).distance_to(last, self.size) < u32::from(added)
            }
            _ => added > 0,
        }
    }

    /// An interrupt once the descriptor `ahead` of the next answer is used, or for each answer, or none.
    pub(super) fn want_interrupt(&mut self, ahead: Option<u16>, all: bool) {
        let event = match ahead {
            Some(ahead) => EVENT_DESC | u32::from(self.used.plus(ahead, self.size).encode()),
            None if all => 0,
            None => EVENT_DISABLE,
        };
        self.event(self.driver_event)
            .store(event.to_le(), Ordering::Relaxed);
    }

    /// Answers seen, and those that are there to see.
    #[inline(never)]
    pub(super) fn answers(&self) -> u16 {
        let (mut at, mut count) = (self.used, self.answers);
        while let Some((id, _)) = self.answer_at(at) {
            at = at.plus(self.counts[usize::from(id)], self.size);
            count = count.wrapping_add(1);
            if count.wrapping_sub(self.answers) == self.size {
                break;
            }
        }
        count
    }

    fn answer_at(&self, at: Position) -> Option<(u16, u32)> {
        let rest = self.word(16 * usize::from(at.index) + 8);
        let rest = u64::from_le(rest.load(Ordering::Acquire));
        let flags = (rest >> 48) as u16;
        // Both bits: a descriptor of the driver's own has one of them.
        let is_used = flags & 0x8080 == at.used_flags();
        is_used.then_some(((rest >> 32) as u16, rest as u32))
    }

    #[inline(never)]
    pub(super) fn next_used(&mut self) -> Option<(u16, u32)> {
        let (id, len) = self.answer_at(self.used)?;
        let count = self.counts[usize::from(id)];
        assert!(
            count > 0,
            "an answer to buffer {id}, which the device does not have"
        );
        self.used = self.used.plus(count, self.size);
        self.answers = self.answers.wrapping_add(1);
        Some((id, len))
    }

    #[inline(never)]
    pub(super) fn recycle(&mut self, id: u16) {
        let count = std::mem::take(&mut self.counts[usize::from(id)]);
        assert!(count > 0, "buffer {id} is answered twice");
        self.free += count;
        self.free_ids.push_back(id);
    }
}
