//! One queue on its data thread: takes requests off the ring, runs them on the engine, answers.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fabric::io::{Engine, IoResult, Op, Request, Submit, Tag, Volume};
use virtio_bindings::virtio_blk::VIRTIO_BLK_F_FLUSH;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::handle::{Change, QueueId, Reply, notify};
use super::{QueueConfig, QueueError};
use crate::blk::BlkDevice;
use crate::blk::request::{Action, Limits, Range, Ranges, Status, parse};
use crate::dirty::DirtyLog;
use crate::inflight::InflightQueue;
use crate::memory::{GuestAddr, GuestMemory, MemoryView};
use crate::ring::{Chain, Ring, RingError, SplitRing, SplitRingConfig, write_bytes};

/// Most requests taken off one ring before the other queues of the thread have their turn.
const TURN_REQUESTS: u16 = 32;
/// Answers after which the guest is let know while the rest of a batch is still worked on, so that it can refill.
const PUBLISH_ANSWERS: u16 = 8;
/// Answers after which a guest that waits for an interrupt is not left waiting though the ring is never empty.
const SIGNAL_ANSWERS: u16 = 64;

/// What the queues of a thread share: working memory of one request at a time.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    pub(super) chain: Chain,
    ranges: Ranges,
    /// Something was submitted and the engine must be kicked.
    pub(super) submitted: bool,
}

/// A request between submission and answer, at the index of its first descriptor.
#[derive(Debug, Clone, Copy)]
struct Slot {
    status: *mut u8,
    op: Op,
    bytes: u64,
    /// Engine requests under way.
    outstanding: u16,
    /// Ranges submitted so far.
    next_range: u16,
    busy: bool,
    /// Not all ranges are submitted yet.
    submitting: bool,
    failed: bool,
}

const FREE: Slot = Slot {
    status: std::ptr::null_mut(),
    op: Op::Flush,
    bytes: 0,
    outstanding: 0,
    next_range: 0,
    busy: false,
    submitting: false,
    failed: false,
};

/// What happens once nothing is in flight.
pub(super) enum Drain {
    /// The queue goes away; the index to go on at is the answer.
    Stop(Option<Reply<u16>>),
    /// The queue goes on in another memory table.
    Memory(Arc<GuestMemory>, Reply<()>),
}

/// A queue of one device.
pub(super) struct Queue<V, R = SplitRing> {
    device: Arc<BlkDevice<V>>,
    index: u16,
    features: u64,
    ring: R,
    view: MemoryView,
    slots: Box<[Slot]>,
    busy_slots: usize,
    /// Requests of an earlier daemon to be done again, last first.
    replay: Vec<u16>,
    /// A request that the engine had no room for.
    stalled: Option<u16>,
    inflight: Option<InflightQueue>,
    /// Answers not yet published, kept for the in-flight record.
    answered: Vec<u16>,
    log: Option<Arc<DirtyLog>>,
    used_log: Option<GuestAddr>,
    pub(super) kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    err: Option<OwnedFd>,
    enabled: bool,
    failed: Arc<AtomicBool>,
    broken: bool,
    pub(super) drain: Option<Drain>,
    /// Upper half of the tags of this queue.
    tag: u64,
    /// Tells this queue from others that had its place.
    pub(super) generation: u64,
    /// Turns in a row without work.
    pub(super) idle_turns: u32,
    /// Whether the thread polls the ring; else it waits for a kick.
    pub(super) hot: bool,
}

// SAFETY: the raw pointers (slots, view, ring) lead into guest memory kept by `view`; one thread uses the queue.
unsafe impl<V: Send + Sync, R: Send> Send for Queue<V, R> {}

impl<V: Volume> Queue<V, SplitRing> {
    /// A queue that serves a split ring; `id` is its name on the thread.
    pub(super) fn new(
        device: Arc<BlkDevice<V>>,
        config: QueueConfig,
        failed: Arc<AtomicBool>,
        id: QueueId,
    ) -> Result<Self, QueueError> {
        let mut view = MemoryView::new(config.memory);
        let has = |bit: u32| config.features & 1 << bit != 0;
        let ring_config = SplitRingConfig {
            size: config.size,
            desc: config.desc,
            avail: config.avail,
            used: config.used,
            event_idx: has(VIRTIO_RING_F_EVENT_IDX),
            indirect: has(VIRTIO_RING_F_INDIRECT_DESC),
        };
        let mut ring = SplitRing::new(ring_config, config.base, &mut view)?;
        let mut inflight = config.inflight;
        let mut replay = Vec::new();
        if let Some(record) = &mut inflight {
            if record.size() < config.size {
                return Err(QueueError::InflightSize {
                    record: record.size(),
                    size: config.size,
                });
            }
            let recovery = record.recover(ring.next_used(), config.size);
            ring.set_next_available(recovery.next_avail);
            replay = recovery.heads;
            if !replay.is_empty() {
                tracing::info!(
                    queue = config.index,
                    requests = replay.len(),
                    "doing requests in flight again"
                );
            }
            replay.reverse();
        }
        let mut queue = Self {
            device,
            index: config.index,
            features: config.features,
            ring,
            view,
            slots: vec![FREE; usize::from(config.size)].into_boxed_slice(),
            busy_slots: 0,
            replay,
            stalled: None,
            inflight,
            answered: Vec::with_capacity(usize::from(config.size)),
            log: None,
            used_log: None,
            kick: config.kick,
            call: config.call,
            err: config.err,
            enabled: config.enabled,
            failed,
            broken: false,
            drain: None,
            tag: (id.slot as u64) << 32,
            generation: id.generation,
            idle_turns: 0,
            hot: true,
        };
        [&queue.call, &queue.err].into_iter().for_each(never_block);
        queue.set_log(config.log, config.used_log);
        queue.ring.disarm();
        // A daemon before us may have answered and died before it could interrupt.
        queue.interrupt();
        Ok(queue)
    }
}

/// Writing an event must never hold up a data thread, whatever kind of descriptor the front end sent.
fn never_block(fd: &Option<OwnedFd>) {
    if let Some(fd) = fd {
        let outcome = rustix::fs::fcntl_getfl(fd)
            .and_then(|f| rustix::fs::fcntl_setfl(fd, f | rustix::fs::OFlags::NONBLOCK));
        if let Err(error) = outcome {
            tracing::warn!(%error, "cannot make an event descriptor non-blocking");
        }
    }
}

impl<V: Volume, R: Ring> Queue<V, R> {
    /// Whether requests are served at all.
    pub(super) fn running(&self) -> bool {
        self.enabled && !self.broken
    }

    /// Whether no request is anywhere between the ring and its answer.
    pub(super) fn drained(&self) -> bool {
        self.busy_slots == 0 && self.stalled.is_none() && self.replay.is_empty()
    }

    /// Whether the engine had no room for a request.
    pub(super) fn stalled(&self) -> bool {
        self.stalled.is_some()
    }

    /// Answers not yet visible to the guest.
    pub(super) fn unpublished(&self) -> u16 {
        self.ring.unpublished()
    }

    /// Takes and submits what the guest added; returns how many requests moved.
    #[inline]
    pub(super) fn poll<E: Engine<Volume = V>>(
        &mut self,
        engine: &mut E,
        scratch: &mut Scratch,
    ) -> usize {
        match self.try_poll(engine, scratch) {
            Ok(moved) => moved,
            Err(error) => {
                self.fail(error);
                0
            }
        }
    }

    #[inline]
    fn try_poll<E: Engine<Volume = V>>(
        &mut self,
        engine: &mut E,
        scratch: &mut Scratch,
    ) -> Result<usize, RingError> {
        if !self.enabled
            || self.drain.is_some()
            || self.stalled.is_some()
            || !self.replay.is_empty()
        {
            let moved = self.poll_leftovers(engine, scratch)?;
            if !self.enabled || self.drain.is_some() || self.stalled.is_some() || moved > 0 {
                return Ok(moved);
            }
        }
        if self.broken {
            return Ok(0);
        }
        let ready = self.ring.available()?;
        if ready == 0 {
            if self.ring.unsignalled() > 0 {
                self.signal();
            }
            return Ok(0);
        }
        let count = ready.min(TURN_REQUESTS);
        self.ring.prefetch(count, &mut self.view);
        let outcome = self.take(count, engine, scratch);
        if self.ring.unpublished() > 0 {
            self.publish();
            if self.ring.unsignalled() >= SIGNAL_ANSWERS {
                self.signal();
            }
        }
        outcome.map(|()| usize::from(count))
    }

    #[inline(always)]
    fn take<E: Engine<Volume = V>>(
        &mut self,
        count: u16,
        engine: &mut E,
        scratch: &mut Scratch,
    ) -> Result<(), RingError> {
        for _ in 0..count {
            let id = self.ring.take()?;
            if self.slots[usize::from(id)].busy {
                return Err(RingError::InFlight(id));
            }
            if let Some(record) = &mut self.inflight {
                record.taken(id);
            }
            if !self.run(id, engine, scratch)? {
                self.stalled = Some(id);
                break;
            }
            if self.ring.unpublished() >= PUBLISH_ANSWERS {
                self.publish();
            }
        }
        Ok(())
    }

    /// Requests that were taken before: one that found no room, and those of an earlier daemon.
    #[cold]
    fn poll_leftovers<E: Engine<Volume = V>>(
        &mut self,
        engine: &mut E,
        scratch: &mut Scratch,
    ) -> Result<usize, RingError> {
        let mut moved = 0;
        if self.broken || !(self.enabled || self.drain.is_some()) {
            return Ok(0);
        }
        while let Some(id) = self.stalled.take().or_else(|| self.replay.pop()) {
            if self.slots[usize::from(id)].busy && !self.slots[usize::from(id)].submitting {
                return Err(RingError::InFlight(id));
            }
            if !self.run(id, engine, scratch)? {
                self.stalled = Some(id);
                break;
            }
            moved += 1;
        }
        if self.ring.unpublished() > 0 {
            self.publish();
            self.signal();
        }
        Ok(moved)
    }

    /// Reads one request and does it or hands it to the engine. False if the engine has no room.
    #[inline(always)]
    fn run<E: Engine<Volume = V>>(
        &mut self,
        id: u16,
        engine: &mut E,
        scratch: &mut Scratch,
    ) -> Result<bool, RingError> {
        self.ring.walk(id, &mut self.view, &mut scratch.chain)?;
        let limits = Limits {
            size_bytes: self.device.volume().size_bytes(),
            read_only: self.device.options().read_only,
            fua: self.features & 1 << VIRTIO_BLK_F_FLUSH == 0 || !self.device.writeback(),
        };
        let (action, status) = parse(&mut scratch.chain, &limits, &mut scratch.ranges)?;
        match action {
            Action::Submit(range) => Ok(self.submit(id, range, status, engine, scratch)),
            Action::SubmitRanges => Ok(self.submit_ranges(id, status, engine, scratch)),
            Action::GetId => {
                self.get_id(id, status, scratch);
                Ok(true)
            }
            Action::Answer(outcome) => {
                if outcome != Status::Ok {
                    self.counters_failed();
                }
                self.answer(id, status, outcome, 1, &mut scratch.chain);
                Ok(true)
            }
        }
    }

    #[inline(always)]
    fn submit<E: Engine<Volume = V>>(
        &mut self,
        id: u16,
        range: Range,
        status: *mut u8,
        engine: &mut E,
        scratch: &mut Scratch,
    ) -> bool {
        let Range { op, offset, len } = range;
        let buffers = match op {
            Op::Read => scratch.chain.writable.as_slice(),
            Op::Write { .. } => scratch.chain.readable.as_slice(),
            Op::Flush | Op::Discard | Op::WriteZeroes { .. } => &[],
        };
        let request = Request {
            tag: Tag(self.tag | u64::from(id)),
            op,
            offset,
            len,
            buffers,
        };
        // SAFETY: the buffers were translated in the memory that `view` holds, and the queue keeps it until no request
        // is in flight.
        match unsafe { engine.submit(self.device.volume(), &request) } {
            Submit::Done(result) => self.finish(id, op, len, status, result, &mut scratch.chain),
            Submit::Pending => {
                self.slots[usize::from(id)] = Slot {
                    status,
                    op,
                    bytes: len,
                    outstanding: 1,
                    busy: true,
                    ..FREE
                };
                self.busy_slots += 1;
                scratch.submitted = true;
            }
            Submit::Busy => return false,
        }
        true
    }

    /// Discard and write-zeroes: several requests to the engine, one answer.
    #[cold]
    fn submit_ranges<E: Engine<Volume = V>>(
        &mut self,
        id: u16,
        status: *mut u8,
        engine: &mut E,
        scratch: &mut Scratch,
    ) -> bool {
        let at = usize::from(id);
        let ranges = scratch.ranges.as_slice();
        if !self.slots[at].busy {
            self.slots[at] = Slot {
                op: ranges[0].op,
                busy: true,
                submitting: true,
                ..FREE
            };
            self.busy_slots += 1;
        }
        self.slots[at].status = status;
        while let Some(range) = ranges.get(usize::from(self.slots[at].next_range)) {
            let tag = Tag(self.tag | u64::from(self.slots[at].next_range) << 16 | u64::from(id));
            let request = Request {
                tag,
                op: range.op,
                offset: range.offset,
                len: range.len,
                buffers: &[],
            };
            // SAFETY: there are no buffers.
            match unsafe { engine.submit(self.device.volume(), &request) } {
                Submit::Done(Ok(())) => {}
                Submit::Done(Err(_)) => {
                    self.slots[at].failed = true;
                    break;
                }
                Submit::Pending => {
                    self.slots[at].outstanding += 1;
                    scratch.submitted = true;
                }
                Submit::Busy => return false,
            }
            self.slots[at].next_range += 1;
            self.slots[at].bytes += range.len;
        }
        self.slots[at].submitting = false;
        self.finish_slot(id, &mut scratch.chain);
        true
    }

    #[cold]
    fn get_id(&mut self, id: u16, status: *mut u8, scratch: &mut Scratch) {
        let serial = self.device.serial();
        let mut at = 0;
        for piece in &scratch.chain.writable {
            let len = piece.iov_len.min(serial.len() - at);
            // SAFETY: the piece was translated and has at least `len` bytes.
            unsafe { write_bytes(piece.iov_base.cast(), &serial[at..at + len]) };
            at += len;
        }
        self.answer(id, status, Status::Ok, at as u32 + 1, &mut scratch.chain);
    }

    /// The engine finished a request.
    pub(super) fn complete(&mut self, tag: Tag, result: IoResult, scratch: &mut Scratch) {
        let id = tag.0 as u16;
        let slot = &mut self.slots[usize::from(id)];
        debug_assert!(slot.busy && slot.outstanding > 0);
        slot.outstanding -= 1;
        slot.failed |= result.is_err();
        if let Err(error) = result {
            tracing::debug!(queue = self.index, ?tag, %error, "request failed");
        }
        self.finish_slot(id, &mut scratch.chain);
    }

    fn finish_slot(&mut self, id: u16, chain: &mut Chain) {
        let slot = self.slots[usize::from(id)];
        if slot.outstanding > 0 || slot.submitting {
            return;
        }
        self.slots[usize::from(id)].busy = false;
        self.busy_slots -= 1;
        let result = if slot.failed {
            Err(fabric::io::IoError::Device(libc::EIO))
        } else {
            Ok(())
        };
        self.finish(id, slot.op, slot.bytes, slot.status, result, chain);
    }

    #[inline(always)]
    fn finish(
        &mut self,
        id: u16,
        op: Op,
        bytes: u64,
        status: *mut u8,
        result: IoResult,
        chain: &mut Chain,
    ) {
        let outcome = match result {
            Ok(()) => {
                if let Some(counters) = self.device.queue_counters(self.index) {
                    counters.completed(op, bytes);
                }
                Status::Ok
            }
            Err(_) => {
                self.counters_failed();
                Status::IoErr
            }
        };
        let written = if op == Op::Read && outcome == Status::Ok {
            bytes as u32 + 1
        } else {
            1
        };
        self.answer(id, status, outcome, written, chain);
    }

    #[cold]
    fn counters_failed(&self) {
        if let Some(counters) = self.device.queue_counters(self.index) {
            counters.failed();
        }
    }

    #[inline(always)]
    fn answer(
        &mut self,
        id: u16,
        status: *mut u8,
        outcome: Status,
        written: u32,
        chain: &mut Chain,
    ) {
        // SAFETY: the byte was translated in the memory that `view` holds.
        unsafe { status.write_volatile(outcome as u8) };
        if self.log.is_some() {
            self.log_written(id, status, chain);
        }
        self.ring.answer(id, written);
        if let Some(record) = &mut self.inflight {
            record.answered(id);
            self.answered.push(id);
        }
    }

    /// Marks what a request wrote. The chain is walked once more, as only a migration pays for this: a guest that has
    /// changed it meanwhile spoils its own copy and nothing else.
    #[cold]
    fn log_written(&mut self, id: u16, status: *mut u8, chain: &mut Chain) {
        let Some(log) = &self.log else { return };
        let mark = |host: *const u8, len: usize| {
            if let Some(guest) = self.view.memory().host_to_guest(host) {
                log.mark(guest, len as u64);
            }
        };
        mark(status, 1);
        let mut view = MemoryView::new(Arc::clone(self.view.memory()));
        if self.ring.walk(id, &mut view, chain).is_ok() {
            chain
                .writable
                .iter()
                .for_each(|piece| mark(piece.iov_base.cast(), piece.iov_len));
        }
    }

    /// Makes the answers visible to the guest.
    #[inline(always)]
    pub(super) fn publish(&mut self) {
        self.ring.publish();
        if let Some(record) = &mut self.inflight {
            record.settled(&self.answered, self.ring.next_used());
            self.answered.clear();
        }
    }

    /// Interrupts the guest if it wants to hear of what was published.
    pub(super) fn signal(&mut self) {
        if self.call.is_some() && self.ring.interrupt_due() {
            self.interrupt();
        }
    }

    fn interrupt(&self) {
        if let Some(call) = &self.call {
            notify(call);
            if let Some(counters) = self.device.queue_counters(self.index) {
                counters.interrupted();
            }
        }
    }

    /// Asks for kicks before the thread sleeps. True if there is work already.
    pub(super) fn arm(&mut self) -> bool {
        if self.broken || self.drain.is_some() || !self.enabled {
            return false;
        }
        if self.ring.unsignalled() > 0 {
            self.signal();
        }
        match self.ring.arm() {
            Ok(work) => work,
            Err(error) => {
                self.fail(error);
                false
            }
        }
    }

    /// The thread polls the ring again.
    pub(super) fn disarm(&mut self) {
        if !self.broken {
            self.ring.disarm();
        }
    }

    /// The guest broke the ring: this queue takes no more requests. What is in flight is still answered.
    #[cold]
    fn fail(&mut self, error: RingError) {
        tracing::warn!(queue = self.index, %error, "guest broke its ring; the queue is served no more");
        self.broken = true;
        self.failed.store(true, Ordering::Relaxed);
        self.replay.clear();
        for at in 0..self.slots.len() {
            let slot = &mut self.slots[at];
            if std::mem::take(&mut slot.submitting) && slot.outstanding == 0 {
                slot.busy = false;
                self.busy_slots -= 1;
            }
        }
        self.stalled = None;
        if let Some(err) = &self.err {
            notify(err);
        }
    }

    fn set_log(&mut self, log: Option<Arc<DirtyLog>>, used_log: Option<GuestAddr>) {
        self.ring.set_log(log.clone().zip(used_log));
        (self.log, self.used_log) = (log, used_log);
    }

    /// Changes everything but the kick descriptor, which the thread watches.
    pub(super) fn change(&mut self, change: Change) {
        match change {
            Change::Enabled(enabled) => self.enabled = enabled,
            Change::Kick(kick) => self.kick = kick,
            Change::Call(call) => {
                never_block(&call);
                self.call = call;
                self.interrupt();
            }
            Change::Err(err) => {
                never_block(&err);
                self.err = err;
            }
            Change::Log(log, used_log) => self.set_log(log, used_log),
        }
    }

    /// Goes on in another memory table.
    pub(super) fn relocate(&mut self, memory: Arc<GuestMemory>) -> Result<(), QueueError> {
        self.view = MemoryView::new(memory);
        self.ring.relocate(&mut self.view).map_err(|error| {
            self.fail(error);
            QueueError::Ring(error)
        })
    }

    /// Index to go on at after a stop.
    pub(super) fn next_available(&self) -> u16 {
        self.ring.next_available()
    }
}
