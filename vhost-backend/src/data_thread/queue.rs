//! One queue on its data thread: takes requests off the ring, runs them on the engine, answers.

mod any;
mod in_order;
mod request;
mod timing;

use std::os::fd::OwnedFd;
use std::sync::Arc;

pub(crate) use any::AnyQueue;
use fabric_types::io::{Engine, Op, Volume};
use in_order::InOrder;
use timing::Timing;

use super::clock::Stamp;
use super::handle::{Change, QueueId, Reply, notify};
use super::{QueueConfig, QueueError};
use crate::blk::BlkDevice;
use crate::blk::request::Ranges;
use crate::dirty::DirtyLog;
use crate::inflight::InflightQueue;
use crate::memory::MemoryView;
use crate::ring::{Chain, Ring, RingError};

/// Most requests taken off one ring before the other queues of the thread have their turn.
const TURN_REQUESTS: u16 = 32;
/// Answers after which the guest is let know while the rest of a batch is still worked on, so that it can
/// refill.
const PUBLISH_ANSWERS: u16 = 8;
/// Answers after which a guest that waits for an interrupt is not left waiting though the ring is never
/// empty.
const SIGNAL_ANSWERS: u16 = 64;

/// Turns without work before a guest that did not want the interrupt before is asked about the next, which
/// takes a full fence: a guest that polls has its next request there by then. One that sleeps is asked at
/// once.
const SIGNAL_TURNS: u32 = 256;

/// What the queues of a thread share: working memory of one request at a time.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub(crate) chain: Chain,
    /// Something was submitted and the engine must be kicked.
    pub(crate) submitted: bool,
}

/// A request between submission and answer, at the index of its first descriptor.
#[derive(Debug, Clone, Copy)]
struct Slot {
    status: *mut u8,
    taken: Stamp,
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
    taken: Stamp::NONE,
    op: Op::Flush,
    bytes: 0,
    outstanding: 0,
    next_range: 0,
    busy: false,
    submitting: false,
    failed: false,
};

/// The queue goes away once nothing is in flight; where to go on is the answer.
pub(crate) struct Drain(pub(crate) Option<Reply<u32>>);

/// What the thread knows of a queue, whatever its ring.
pub(crate) struct Schedule {
    pub(crate) kick: Option<OwnedFd>,
    pub(crate) drain: Option<Drain>,
    /// Tells this queue from others that had its place.
    pub(crate) generation: u64,
    /// Turns in a row without work.
    pub(crate) idle_turns: u32,
    /// Whether the thread polls the ring; else it waits for a kick.
    pub(crate) hot: bool,
}

/// A queue of one device.
pub(crate) struct Queue<V, R> {
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
    /// It is the one that was taken off the ring last.
    stalled_is_newest: bool,
    /// Only while the guest's memory is logged.
    order: Option<InOrder>,
    /// Ranges of the request that has them, as they were checked. They stay while it is stalled half way:
    /// what is with the engine already and what is still to come must be of one request, whatever the guest
    /// writes over it meanwhile.
    ranges: Box<Ranges>,
    inflight: Option<InflightQueue>,
    /// Answers not yet published, kept for the in-flight record.
    answered: Vec<u16>,
    timing: Timing,
    log: Option<Arc<DirtyLog>>,
    call: Option<OwnedFd>,
    err: Option<OwnedFd>,
    /// The guest broke the ring.
    broken: bool,
    /// Upper half of the tags of this queue.
    tag: u64,
    /// Turns without work after which the guest is asked whether it wants an interrupt.
    signal_turns: u32,
    schedule: Schedule,
}

// SAFETY: the raw pointers (slots, view, ring) lead into guest memory kept by `view`; one thread uses the
// queue.
unsafe impl<V: Send + Sync, R: Send> Send for Queue<V, R> {}

/// What a queue is made of beside its ring.
struct Parts<V> {
    device: Arc<BlkDevice<V>>,
    view: MemoryView,
    id: QueueId,
    /// Only if the ring does not keep one itself.
    inflight: Option<InflightQueue>,
    /// Requests of an earlier daemon, in the order in which it took them.
    replay: Vec<u16>,
}

impl<V: Volume, R: Ring> Queue<V, R> {
    fn with_ring(ring: R, config: QueueConfig, parts: Parts<V>) -> Result<Self, QueueError> {
        let Parts {
            device,
            view,
            id,
            inflight,
            mut replay,
        } = parts;
        let latency = device
            .queue_latency(config.index)
            .ok_or(QueueError::Index {
                index: config.index,
                queues: device.queues(),
            })?;
        if !replay.is_empty() {
            tracing::info!(
                queue = config.index,
                requests = replay.len(),
                "resubmitting requests that were in flight"
            );
        }
        replay.reverse();
        let order = config.log.as_ref();
        let order = order.map(|_| InOrder::new(config.size, &replay));
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
            stalled_is_newest: false,
            order,
            ranges: Box::default(),
            inflight,
            answered: Vec::with_capacity(usize::from(config.size)),
            timing: Timing::new(latency, usize::from(config.size)),
            log: config.log.clone(),
            call: config.call,
            err: config.err,
            broken: false,
            tag: (id.slot as u64) << 32,
            signal_turns: 0,
            schedule: Schedule {
                kick: config.kick,
                drain: None,
                generation: id.generation,
                idle_turns: 0,
                hot: true,
            },
        };
        [&queue.call, &queue.err].into_iter().for_each(never_block);
        queue.ring.set_log(config.log.zip(config.used_log));
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
    pub(crate) fn running(&self) -> bool {
        !self.broken
    }

    /// Whether no request is anywhere between the ring and its answer.
    pub(crate) fn drained(&self) -> bool {
        self.busy_slots == 0 && self.stalled.is_none() && self.replay.is_empty()
    }

    /// Whether the engine had no room for a request.
    pub(crate) fn stalled(&self) -> bool {
        self.stalled.is_some()
    }

    /// Answers not yet visible to the guest.
    pub(crate) fn unpublished(&self) -> u16 {
        self.ring.unpublished()
    }

    /// Takes and submits what the guest added; returns how many requests moved.
    #[inline]
    pub(crate) fn poll<E: Engine<Volume = V>>(
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
        if self.schedule.drain.is_some() || self.stalled.is_some() || !self.replay.is_empty() {
            let moved = self.poll_leftovers(engine, scratch)?;
            if self.schedule.drain.is_some() || self.stalled.is_some() || moved > 0 {
                return Ok(moved);
            }
        }
        if self.broken {
            return Ok(0);
        }
        let ready = self.ring.available()?;
        if ready == 0 {
            if self.ring.unsignalled() > 0 && self.schedule.idle_turns >= self.signal_turns {
                self.signal();
            }
            return Ok(0);
        }
        let count = ready.min(TURN_REQUESTS);
        self.timing.take();
        self.ring.prefetch(count, &mut self.view);
        let outcome = self.take(count, engine, scratch);
        if self.ring.unpublished() > 0 {
            self.publish();
        } else {
            self.timing.set_in_flight(self.in_flight());
        }
        // Who is stalled has no turn that would ask again before the engine has room.
        if self.ring.unsignalled() >= SIGNAL_ANSWERS || self.stalled.is_some() {
            self.signal();
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
            if let Some(order) = &mut self.order {
                order.take(id);
            }
            if !self.run(id, engine, scratch)? {
                self.stalled = Some(id);
                self.stalled_is_newest = true;
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
        let waits = self.stalled.is_some() && !engine.has_room(self.device.volume());
        if self.broken || waits {
            return Ok(0);
        }
        while let Some(id) = self.stalled.take().or_else(|| {
            self.stalled_is_newest = false;
            self.replay.pop()
        }) {
            let slot = &self.slots[usize::from(id)];
            let room = if slot.submitting {
                self.submit_ranges(id, engine, scratch)
            } else if slot.busy {
                return Err(RingError::InFlight(id));
            } else {
                // Nothing of it is with the engine, so it may as well be read anew.
                self.run(id, engine, scratch)?
            };
            if !room {
                self.stalled = Some(id);
                break;
            }
            moved += 1;
        }
        if self.ring.unpublished() > 0 {
            self.publish();
            self.signal();
        }
        self.timing.set_in_flight(self.in_flight());
        Ok(moved)
    }

    /// The queue is to stop. What the engine has seen nothing of is not waited for: a volume may wait for its
    /// lease for ever. The request that was taken last goes back on the ring. If the front end has `gone`,
    /// those of an earlier daemon are left to the next one: they stay in the record.
    pub(crate) fn stop_taking(&mut self, gone: bool) {
        if let Some(id) = self.stalled.filter(|&id| !self.has_begun(id))
            && (self.stalled_is_newest || gone)
        {
            self.stalled = None;
            let slot = &mut self.slots[usize::from(id)];
            if std::mem::take(&mut slot.busy) {
                slot.submitting = false;
                self.busy_slots -= 1;
            }
            if self.stalled_is_newest {
                self.ring.untake();
                if let Some(record) = &mut self.inflight {
                    record.untaken(id);
                }
                if let Some(order) = &mut self.order {
                    order.untake();
                }
            }
        }
        if gone {
            self.replay.clear();
        }
        self.timing.set_in_flight(self.in_flight());
    }

    /// Whether a part of a stalled request was handed to the engine.
    fn has_begun(&self, id: u16) -> bool {
        let slot = &self.slots[usize::from(id)];
        slot.busy && (slot.outstanding > 0 || slot.next_range > 0)
    }

    /// Makes the answers visible to the guest.
    #[inline(always)]
    pub(crate) fn publish(&mut self) {
        self.ring.publish();
        if let Some(record) = &mut self.inflight {
            record.completed(&self.answered, self.ring.next_used());
            self.answered.clear();
        }
        self.timing.published(self.in_flight());
    }

    /// Requests between the ring and their answer.
    #[inline(always)]
    fn in_flight(&self) -> usize {
        let waits = |id: u16| !self.slots[usize::from(id)].busy;
        self.busy_slots + usize::from(self.stalled.is_some_and(waits)) + self.replay.len()
    }

    /// Interrupts the guest if it wants to hear of what was published.
    pub(crate) fn signal(&mut self) {
        if self.call.is_none() {
            return;
        }
        if self.ring.interrupt_due() {
            self.signal_turns = 0;
            self.interrupt();
        } else {
            self.signal_turns = SIGNAL_TURNS;
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
    pub(crate) fn arm(&mut self) -> bool {
        if self.broken || self.schedule.drain.is_some() {
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

    /// The thread polls the ring again, unless it takes nothing more off it: another daemon may do so by now,
    /// and would not be kicked.
    pub(crate) fn disarm(&mut self) {
        if !self.broken && self.schedule.drain.is_none() {
            self.ring.disarm();
        }
    }

    /// The guest broke the ring: this queue takes no more requests. What is in flight is still answered.
    #[cold]
    fn fail(&mut self, error: RingError) {
        tracing::warn!(queue = self.index, %error, "guest broke its ring; the queue is stopped");
        self.broken = true;
        self.replay.clear();
        for at in 0..self.slots.len() {
            let slot = &mut self.slots[at];
            if std::mem::take(&mut slot.submitting) && slot.outstanding == 0 {
                slot.busy = false;
                self.busy_slots -= 1;
            }
        }
        self.stalled = None;
        self.timing.set_in_flight(self.in_flight());
        if self.ring.unsignalled() > 0 {
            self.signal();
        }
        if let Some(err) = &self.err {
            notify(err);
        }
    }

    /// Changes a descriptor.
    pub(crate) fn change(&mut self, change: Change) {
        match change {
            Change::Call(call) => {
                never_block(&call);
                self.call = call;
                self.interrupt();
            }
            Change::Err(err) => {
                never_block(&err);
                self.err = err;
            }
        }
    }

    /// The last thing before the queue goes away; returns where to go on.
    pub(crate) fn close(&mut self) -> u32 {
        // Of a broken ring nothing is known any more.
        if !self.broken {
            if self.ring.unsignalled() > 0 {
                self.signal();
            }
            self.ring.close();
        }
        self.ring.base()
    }
}
