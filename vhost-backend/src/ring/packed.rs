//! The packed virtqueue (virtio 1.2, section 2.8).
//!
//! Driver and device write into one ring of descriptors. Whose a descriptor is, two bits in it tell by the
//! *wrap counter* of the lap. An answer takes the place of the oldest descriptors, whoever's they were, so a
//! request's descriptors are read once, when it is taken, and kept ([`Requests`]).
//!
//! Where a ring stands (`base` of SET_VRING_BASE and GET_VRING_BASE): the next descriptor to take in the
//! lower half, the next one to write an answer to in the upper half, the wrap counter of each in the highest
//! bit.
//!
//! **Migration.** Nothing in guest memory tells where a packed ring stands. If the daemon is gone when the
//! guest is stopped, the front end does not know it either, and sends the destination a base that is long out
//! of date. So while the guest's memory is logged, the device's event suppression structure says that the
//! ring is being served ([`SERVED`]), in a field that drivers ignore then, until [`Ring::close`] takes it
//! back. A ring that comes so, without a record of requests in flight, is refused: its guest must be reset,
//! and nothing is done twice.

mod layout;
mod requests;

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::guest::{prefetch_read, prefetch_write};
use super::{Chain, DESC_BYTES, MAX_CHAIN, MAX_QUEUE_SIZE, Ring, RingError, indirect_table};
use crate::dirty::DirtyLog;
use crate::inflight::PackedInflight;
use crate::memory::{GuestAddr, MemoryView};

use layout::{
    DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, EVENT_BYTES, EVENT_DESC, EVENT_DISABLE,
    EVENT_ENABLE, Event, Parts, flags_of,
};
pub(crate) use layout::{Desc, Position};
pub(crate) use requests::{NO_ENTRY, Requests};

/// Requests that one look at the ring finds; those behind them are found by the next one.
const LOOK_REQUESTS_MAX: usize = 32;
/// In the place of a device's event that is not for a place: the ring is being served, and its guest's memory
/// logged. Without [`EVENT_DESC`] the last place of the longest ring means nothing else.
const SERVED: u16 = 0x7fff;
/// Where every ring begins.
pub(crate) const BASE_AT_START: u32 =
    (Position::START.encode() as u32) << 16 | Position::START.encode() as u32;

/// Where a packed ring lies and how it is used.
#[derive(Debug, Clone, Copy)]
pub struct PackedRingConfig {
    /// Descriptors.
    pub size: u16,
    /// The ring.
    pub desc: GuestAddr,
    /// The driver's event suppression structure.
    pub driver: GuestAddr,
    /// The device's.
    pub device: GuestAddr,
    /// Whether EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// Whether INDIRECT_DESC was negotiated.
    pub indirect: bool,
}

/// An answer that the guest does not see yet.
#[derive(Debug, Clone, Copy)]
struct Answer {
    head: u16,
    written_bytes: u32,
}

/// The device's side of a packed virtqueue.
#[derive(Debug)]
pub struct PackedRing {
    parts: Parts,
    config: PackedRingConfig,
    /// Next descriptor to take.
    next: Position,
    /// Next descriptor to write an answer to.
    used: Position,
    requests: Requests,
    /// Where the requests begin that the last look found, and how many of them are taken.
    found: Vec<u16>,
    taken: usize,
    /// Taken last.
    newest: u16,
    answers: Vec<Answer>,
    /// Answers, and descriptors they passed, since the last decision about an interrupt.
    unsignalled: u16,
    passed: u32,
    log: Option<Arc<DirtyLog>>,
    record: Option<PackedInflight>,
}

// SAFETY: the pointers lead into guest memory, which the owner of the ring keeps mapped; they are used by one
// thread.
unsafe impl Send for PackedRing {}

impl PackedRing {
    /// A ring that goes on where `record` says, or at `base`. Returns the requests of an earlier daemon, in
    /// the order in which it took them, too.
    pub fn new(
        config: PackedRingConfig,
        base: u32,
        record: Option<PackedInflight>,
        view: &mut MemoryView,
    ) -> Result<(Self, Vec<u16>), RingError> {
        if config.size == 0 || config.size > MAX_QUEUE_SIZE {
            return Err(RingError::QueueSize(config.size));
        }
        let next = Position::decode(base as u16);
        let used = Position::decode((base >> 16) as u16);
        if next.index >= config.size || used.index >= config.size {
            return Err(RingError::Base(base));
        }
        let mut ring = Self {
            parts: Parts::translate(&config, view)?,
            config,
            next,
            used,
            requests: Requests::new(config.size),
            found: Vec::with_capacity(LOOK_REQUESTS_MAX),
            taken: 0,
            newest: NO_ENTRY,
            answers: Vec::with_capacity(usize::from(config.size)),
            unsignalled: 0,
            passed: 0,
            log: None,
            record,
        };
        let replay = ring.recover()?;
        Ok((ring, replay))
    }

    fn recover(&mut self) -> Result<Vec<u16>, RingError> {
        let size = self.config.size;
        let Some(mut record) = self.record.take_if(|record| !record.is_fresh()) else {
            let event = self.parts.device_event();
            if event.place() == SERVED && event.flags() != EVENT_DESC {
                return Err(RingError::NotClosed);
            }
            if let Some(record) = &mut self.record {
                record.begin(self.used, &self.requests);
            }
            return Ok(Vec::new());
        };
        if let Some(batch) = record.interrupted(size)? {
            let seen = batch.heads.is_empty() || self.is_used(batch.from)?;
            if seen {
                record.published(batch.heads.into_iter());
            } else {
                let nums = batch.heads.iter().map(|&head| record.num(head));
                self.take_back(batch.from, nums)?;
                record.roll_back();
            }
        }
        self.used = record.position(size)?;
        let replay = record.load(&mut self.requests)?;
        self.next = self.used;
        for &head in &replay {
            self.next = self.next.plus(self.requests.count(head), size);
        }
        self.record = Some(record);
        Ok(replay)
    }

    /// Whether the guest has the answer at `at`. The driver may have used the place again since.
    fn is_used(&self, at: Position) -> Result<bool, RingError> {
        if at.index >= self.config.size {
            return Err(RingError::Record);
        }
        let flags = self.parts.flags(at.index, Ordering::Acquire);
        Ok(!at.is_available(flags))
    }

    /// Makes the answers behind the first one of a batch look as the driver left their places. The guest has
    /// not seen them: it waits for the first.
    fn take_back(&self, from: Position, nums: impl Iterator<Item = u16>) -> Result<(), RingError> {
        let (size, mut at) = (self.config.size, from);
        for num in nums {
            if num == 0 || num > size {
                return Err(RingError::Record);
            }
            if at != from {
                let rest = self.parts.rest(at.index);
                let kept = u64::from_le(rest.load(Ordering::Relaxed)) & !(0xffff << 48);
                let flags = u64::from(at.available_flags()) << 48;
                rest.store((kept | flags).to_le(), Ordering::Relaxed);
            }
            at = at.plus(num, size);
        }
        Ok(())
    }

    /// Finds requests that can be taken.
    #[inline(always)]
    fn look(&mut self) -> u16 {
        self.found.clear();
        self.taken = 0;
        let size = self.config.size;
        let (mut at, mut left) = (self.next, size);
        while self.found.len() < LOOK_REQUESTS_MAX && left > 0 {
            let mut flags = self.parts.flags(at.index, Ordering::Acquire);
            if !at.is_available(flags) {
                break;
            }
            self.found.push(at.index);
            // The driver makes the first one available last, so the others are there.
            loop {
                at = at.plus(1, size);
                left -= 1;
                if flags & DESC_F_NEXT == 0 || left == 0 {
                    break;
                }
                flags = self.parts.flags(at.index, Ordering::Relaxed);
            }
        }
        self.found.len() as u16
    }

    /// Follows an indirect table, whose descriptors lie one after the other.
    #[inline]
    fn walk_indirect(
        &self,
        table: Desc,
        view: &mut MemoryView,
        chain: &mut Chain,
    ) -> Result<(), RingError> {
        let (base, entries) = indirect_table(table.addr, table.len, self.config.indirect, view)?;
        for index in 0..entries as usize {
            // SAFETY: the whole table was translated and the index is inside it.
            let desc = unsafe { Desc::read(base.add(DESC_BYTES as usize * index)) };
            if desc.flags & DESC_F_INDIRECT != 0 {
                return Err(RingError::IndirectNested);
            }
            chain.push(view, desc.addr, desc.len, desc.flags & DESC_F_WRITE != 0)?;
        }
        Ok(())
    }

    /// Where the ring stands once the answers are published.
    fn used_after(&self) -> Position {
        let size = self.config.size;
        let counts = self.answers.iter();
        counts.fold(self.used, |at, answer| {
            at.plus(self.requests.count(answer.head), size)
        })
    }

    /// Step 1 and 2 of a batch, see [`PackedInflight`].
    #[inline(always)]
    fn record_answers(&mut self) {
        let used = self.used_after();
        if let Some(record) = &mut self.record {
            let heads = self.answers.iter().map(|answer| answer.head);
            record.answered(heads, used, &self.requests);
        }
    }

    fn used_desc(&self, answer: Answer, at: Position) -> u64 {
        let id = self.requests.buffer_id(answer.head);
        let flags = at.used_flags() | DESC_F_WRITE;
        u64::from(answer.written_bytes) | u64::from(id) << 32 | u64::from(flags) << 48
    }

    /// Writes all answers but the first. The guest does not look at them before it has that one.
    #[inline(always)]
    fn write_others(&mut self) {
        let (size, mut at) = (self.config.size, self.used);
        for (i, &answer) in self.answers.iter().enumerate() {
            if i > 0 {
                let desc = self.used_desc(answer, at);
                self.parts
                    .rest(at.index)
                    .store(desc.to_le(), Ordering::Release);
                self.log_desc(at);
            }
            at = at.plus(self.requests.count(answer.head), size);
        }
    }

    /// Writes the first answer: the guest has them all.
    #[inline(always)]
    fn write_first(&mut self) {
        if let Some(&answer) = self.answers.first() {
            let desc = self.used_desc(answer, self.used);
            self.parts
                .rest(self.used.index)
                .store(desc.to_le(), Ordering::Release);
            self.log_desc(self.used);
        }
    }

    /// Step 4 of a batch.
    #[inline(always)]
    fn forget_answers(&mut self) {
        if let Some(record) = &mut self.record {
            record.published(self.answers.iter().map(|answer| answer.head));
        }
        let size = self.config.size;
        self.unsignalled = self.unsignalled.saturating_add(self.answers.len() as u16);
        for answer in self.answers.drain(..) {
            let count = self.requests.count(answer.head);
            self.used = self.used.plus(count, size);
            self.passed = self.passed.saturating_add(u32::from(count));
            self.requests.free(answer.head);
        }
    }

    #[inline(always)]
    fn log_desc(&self, at: Position) {
        if let Some(log) = &self.log {
            let offset = DESC_BYTES * u64::from(at.index);
            log.mark(
                GuestAddr(self.config.desc.0.wrapping_add(offset)),
                DESC_BYTES,
            );
        }
    }

    fn set_device_event(&self, event: Event) {
        self.parts.set_device_event(event);
        if let Some(log) = &self.log {
            log.mark(self.config.device, EVENT_BYTES);
        }
    }

    /// What an event that is not for a place has in its place.
    fn no_place(&self) -> u16 {
        match self.log {
            Some(_) => SERVED,
            None => 0,
        }
    }

    fn event_at_next(&self) -> Event {
        match self.config.event_idx {
            true => Event::new(self.next.encode(), EVENT_DESC),
            false => Event::new(0, EVENT_ENABLE),
        }
    }

    fn is_at_rest(&self) -> bool {
        self.used == self.next && self.answers.is_empty()
    }
}

impl Ring for PackedRing {
    #[inline(always)]
    fn available(&mut self) -> Result<u16, RingError> {
        match self.found.len() - self.taken {
            0 => Ok(self.look()),
            ready => Ok(ready as u16),
        }
    }

    #[inline(always)]
    fn prefetch(&mut self, count: u16, view: &mut MemoryView) {
        let mut indirect = false;
        let heads = self.found[self.taken..].iter().take(usize::from(count));
        for &index in heads.clone() {
            // What is read is only a hint and is read and checked again.
            let flags = self.parts.flags(index, Ordering::Relaxed);
            let first = view.translate_part(GuestAddr(self.parts.addr(index)), DESC_BYTES);
            match first {
                Some((table, _)) if flags & DESC_F_INDIRECT != 0 => {
                    indirect = true;
                    prefetch_read(table);
                }
                // A request begins with its header, and most drivers keep the status beside it.
                Some((header, _)) => prefetch_write(header),
                None => {}
            }
        }
        if !indirect {
            return;
        }
        for &index in heads {
            if self.parts.flags(index, Ordering::Relaxed) & DESC_F_INDIRECT == 0 {
                continue;
            }
            let table = view.translate(GuestAddr(self.parts.addr(index)), DESC_BYTES);
            // SAFETY: sixteen bytes at `table` were just translated.
            let first = table.map(|table| unsafe { Desc::read(table) });
            if let Some(desc) = first
                && let Some((header, _)) = view.translate_part(GuestAddr(desc.addr), DESC_BYTES)
            {
                prefetch_write(header);
            }
        }
    }

    #[inline(always)]
    fn take(&mut self) -> Result<u16, RingError> {
        let size = self.config.size;
        let (mut entry, mut at, mut count) = (self.requests.free_head(), self.next, 0);
        loop {
            let rest = u64::from_le(self.parts.rest(at.index).load(Ordering::Acquire));
            if count == 0 && !at.is_available(flags_of(rest)) {
                return Err(RingError::TakenBack(at.index));
            }
            if count == MAX_CHAIN {
                return Err(RingError::TooLong(u32::from(MAX_CHAIN)));
            }
            let desc = Desc::of(self.parts.addr(at.index), rest);
            // Entries run out with a loop, and with more descriptors than the ring has.
            let free = self.requests.fill(entry, desc);
            let free = free.ok_or(RingError::TooLong(u32::from(size)))?;
            (at, count) = (at.plus(1, size), count + 1);
            if desc.flags & DESC_F_NEXT == 0 {
                break;
            }
            entry = free;
        }
        let head = self.requests.take(entry, count);
        (self.next, self.newest) = (at, head);
        self.taken = (self.taken + 1).min(self.found.len());
        if let Some(record) = &mut self.record {
            record.taken(head, &self.requests);
        }
        Ok(head)
    }

    fn untake(&mut self) {
        let head = self.newest;
        self.next = self.next.minus(self.requests.count(head), self.config.size);
        if let Some(record) = &mut self.record {
            record.untaken(head, &self.requests);
        }
        self.requests.free(head);
        self.found.clear();
        self.taken = 0;
    }

    #[inline(always)]
    fn walk(&self, id: u16, view: &mut MemoryView, chain: &mut Chain) -> Result<(), RingError> {
        chain.clear();
        let mut left = self.requests.count(id);
        for (_, desc) in self.requests.descs(id) {
            left -= 1;
            if desc.flags & DESC_F_INDIRECT == 0 {
                chain.push(view, desc.addr, desc.len, desc.flags & DESC_F_WRITE != 0)?;
            } else if left == 0 && desc.flags & DESC_F_NEXT == 0 {
                return self.walk_indirect(desc, view, chain);
            } else {
                return Err(RingError::IndirectNested);
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn answer(&mut self, id: u16, written_bytes: u32) {
        self.answers.push(Answer {
            head: id,
            written_bytes,
        });
    }

    #[inline(always)]
    fn unpublished(&self) -> u16 {
        self.answers.len() as u16
    }

    #[inline(always)]
    fn publish(&mut self) {
        self.record_answers();
        self.write_others();
        self.write_first();
        self.forget_answers();
    }

    #[inline(always)]
    fn unsignalled(&self) -> u16 {
        self.unsignalled
    }

    #[inline]
    fn interrupt_due(&mut self) -> bool {
        let size = self.config.size;
        let answers = std::mem::take(&mut self.unsignalled);
        let passed = std::mem::take(&mut self.passed);
        // Orders the store of the descriptors before the load of the driver's event. The driver stores that
        // first and then loads the descriptors, so that at least one side sees the other's store.
        fence(Ordering::SeqCst);
        let event = self.parts.driver_event();
        match event.flags() {
            EVENT_DISABLE => false,
            EVENT_DESC if self.config.event_idx => {
                let wanted = Position::decode(event.place());
                let known = wanted.index < size;
                let last = self.used.minus(1, size);
                answers > 0 && (!known || wanted.distance_to(last, size) < passed)
            }
            _ => answers > 0,
        }
    }

    fn arm(&mut self) -> Result<bool, RingError> {
        let event = match self.log {
            Some(_) => Event::new(SERVED, EVENT_ENABLE),
            None => self.event_at_next(),
        };
        self.set_device_event(event);
        // Orders the store of the device's event before the load of the descriptor. The driver stores the
        // descriptor first and then loads the event, so that at least one side sees the other's store.
        fence(Ordering::SeqCst);
        Ok(self.look() != 0)
    }

    fn disarm(&mut self) {
        self.set_device_event(Event::new(self.no_place(), EVENT_DISABLE));
    }

    fn close(&mut self) {
        let event = match self.log {
            Some(_) if !self.is_at_rest() => Event::new(SERVED, EVENT_ENABLE),
            _ => self.event_at_next(),
        };
        self.set_device_event(event);
    }

    fn base(&self) -> u32 {
        u32::from(self.used.encode()) << 16 | u32::from(self.next.encode())
    }

    fn next_used(&self) -> u16 {
        self.used.index
    }

    fn set_log(&mut self, log: Option<(Arc<DirtyLog>, GuestAddr)>) {
        self.log = log.map(|(log, _)| log);
        // A daemon before this one may have died between a change of the ring and its mark.
        if let Some(log) = &self.log {
            log.mark(self.config.desc, DESC_BYTES * u64::from(self.config.size));
            log.mark(self.config.device, EVENT_BYTES);
        }
    }
}

#[cfg(test)]
mod tests;
