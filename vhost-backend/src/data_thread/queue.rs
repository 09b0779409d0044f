//! One queue on its data thread: takes requests off the ring, has its device run them, answers.

mod any;
mod in_flight;
mod in_order;
mod leftovers;
mod record;
mod request;
mod signals;

use std::os::fd::OwnedFd;
use std::sync::Arc;

pub(crate) use any::AnyQueue;
use in_flight::InFlight;
use in_order::InOrder;
use leftovers::{Leftovers, Stalled};
use record::Record;
use signals::Signals;

use super::QueueConfig;
use super::handle::{Change, QueueId, Reply};
use crate::device::{DeviceQueue, Submitted};
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

/// What the queues of a thread share: working memory of one request at a time.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub(crate) chain: Chain,
    /// Something was submitted and the engine must be kicked.
    pub(crate) submitted: bool,
}

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

/// A queue of one device. A request goes from the ring to the device, which may leave it in `leftovers` or
/// `in_flight`, and back to the ring, past `order` and `record`.
pub(crate) struct Queue<Q: DeviceQueue, R> {
    device: Q,
    index: u16,
    ring: R,
    view: MemoryView,
    in_flight: InFlight<Q::Request>,
    leftovers: Leftovers,
    /// Only while the guest's memory is logged.
    order: Option<InOrder>,
    /// Only if the front end keeps one, and the ring does not.
    record: Option<Record>,
    log: Option<Arc<DirtyLog>>,
    signals: Signals,
    /// The guest broke the ring.
    broken: bool,
    schedule: Schedule,
}

/// What a queue is made of beside its ring.
struct Parts<Q> {
    device: Q,
    view: MemoryView,
    id: QueueId,
    /// Only if the ring does not keep one itself.
    inflight: Option<InflightQueue>,
    /// Requests of an earlier daemon, in the order in which it took them.
    replay: Vec<u16>,
}

impl<Q: DeviceQueue, R: Ring> Queue<Q, R> {
    fn with_ring(ring: R, config: QueueConfig, parts: Parts<Q>) -> Self {
        let Parts {
            device,
            view,
            id,
            inflight,
            replay,
        } = parts;
        if !replay.is_empty() {
            tracing::info!(
                queue = config.index,
                requests = replay.len(),
                "resubmitting requests that were in flight"
            );
        }
        let leftovers = Leftovers::new(replay);
        let is_logged = config.log.is_some();
        let mut queue = Self {
            device,
            index: config.index,
            ring,
            view,
            in_flight: InFlight::new(config.size, id.slot),
            order: is_logged.then(|| InOrder::new(config.size, leftovers.replay())),
            leftovers,
            record: inflight.map(|inflight| Record::new(inflight, config.size)),
            log: config.log.clone(),
            signals: Signals::new(config.call, config.err),
            broken: false,
            schedule: Schedule {
                kick: config.kick,
                drain: None,
                generation: id.generation,
                idle_turns: 0,
                hot: true,
            },
        };
        queue.ring.set_log(config.log.zip(config.used_log));
        queue.ring.disarm();
        // A daemon before us may have answered and died before it could interrupt.
        queue.interrupt();
        queue
    }

    /// Whether requests are served at all.
    pub(crate) fn running(&self) -> bool {
        !self.broken
    }

    /// Whether no request is anywhere between the ring and its answer.
    pub(crate) fn drained(&self) -> bool {
        self.in_flight.count() == 0 && self.leftovers.is_empty()
    }

    /// Whether the engine had no room for a request.
    pub(crate) fn stalled(&self) -> bool {
        self.leftovers.is_stalled()
    }

    /// Answers not yet visible to the guest.
    pub(crate) fn unpublished(&self) -> u16 {
        self.ring.unpublished()
    }

    /// Takes and submits what the guest added; returns how many requests moved.
    #[inline]
    pub(crate) fn poll(&mut self, engine: &mut Q::Engine, scratch: &mut Scratch) -> usize {
        match self.try_poll(engine, scratch) {
            Ok(moved) => moved,
            Err(error) => {
                self.fail(error);
                0
            }
        }
    }

    #[inline]
    fn try_poll(
        &mut self,
        engine: &mut Q::Engine,
        scratch: &mut Scratch,
    ) -> Result<usize, RingError> {
        if self.schedule.drain.is_some() || !self.leftovers.is_empty() {
            let moved = self.poll_leftovers(engine, scratch)?;
            if self.schedule.drain.is_some() || self.leftovers.is_stalled() || moved > 0 {
                return Ok(moved);
            }
        }
        if self.broken {
            return Ok(0);
        }
        let ready = self.ring.available()?;
        if ready == 0 {
            if self.ring.unsignalled() > 0 && self.signals.is_time(self.schedule.idle_turns) {
                self.signal();
            }
            return Ok(0);
        }
        let count = ready.min(TURN_REQUESTS);
        self.device.taking();
        self.ring.prefetch(count, &mut self.view);
        let outcome = self.take(count, engine, scratch);
        if self.ring.unpublished() > 0 {
            self.publish();
        } else {
            self.tell_in_flight();
        }
        // Who is stalled has no turn that would ask again before the engine has room.
        if self.ring.unsignalled() >= SIGNAL_ANSWERS || self.leftovers.is_stalled() {
            self.signal();
        }
        outcome.map(|()| usize::from(count))
    }

    #[inline(always)]
    fn take(
        &mut self,
        count: u16,
        engine: &mut Q::Engine,
        scratch: &mut Scratch,
    ) -> Result<(), RingError> {
        for _ in 0..count {
            let id = self.ring.take()?;
            if self.in_flight.is_busy(id) {
                return Err(RingError::InFlight(id));
            }
            if let Some(record) = &mut self.record {
                record.taken(id);
            }
            if let Some(order) = &mut self.order {
                order.take(id);
            }
            let submitted = self.run(id, engine, scratch)?;
            if matches!(submitted, Submitted::Busy | Submitted::Partial) {
                self.leftovers.stall(Stalled {
                    id,
                    is_newest: true,
                    has_begun: submitted == Submitted::Partial,
                });
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
    fn poll_leftovers(
        &mut self,
        engine: &mut Q::Engine,
        scratch: &mut Scratch,
    ) -> Result<usize, RingError> {
        let mut moved = 0;
        let waits = self.leftovers.is_stalled() && !self.device.has_room(engine);
        if self.broken || waits {
            return Ok(0);
        }
        while let Some(next) = self.leftovers.next() {
            let submitted = if next.has_begun {
                self.resume(next.id, engine, scratch)
            } else if self.in_flight.is_busy(next.id) {
                return Err(RingError::InFlight(next.id));
            } else {
                // Nothing of it is with the engine, so it may as well be read anew.
                self.run(next.id, engine, scratch)?
            };
            if matches!(submitted, Submitted::Busy | Submitted::Partial) {
                self.leftovers.stall(Stalled {
                    has_begun: next.has_begun || submitted == Submitted::Partial,
                    ..next
                });
                break;
            }
            moved += 1;
        }
        if self.ring.unpublished() > 0 {
            self.publish();
            self.signal();
        }
        self.tell_in_flight();
        Ok(moved)
    }

    /// The queue is to stop. What the engine has seen nothing of is not waited for: a volume may wait for its
    /// lease for ever. The request that was taken last goes back on the ring. If the front end has `gone`,
    /// those of an earlier daemon are left to the next one: they stay in the record.
    pub(crate) fn stop_taking(&mut self, gone: bool) {
        if let Some(id) = self.leftovers.give_up(gone) {
            self.ring.untake();
            if let Some(record) = &mut self.record {
                record.untaken(id);
            }
            if let Some(order) = &mut self.order {
                order.untake();
            }
        }
        self.tell_in_flight();
    }

    /// Makes the answers visible to the guest.
    #[inline(always)]
    pub(crate) fn publish(&mut self) {
        self.ring.publish();
        if let Some(record) = &mut self.record {
            record.published(self.ring.next_used());
        }
        self.device.published(self.unanswered());
    }

    /// Requests between the ring and their answer.
    #[inline(always)]
    fn unanswered(&self) -> usize {
        self.in_flight.count() + self.leftovers.count_not_begun()
    }

    #[inline(always)]
    fn tell_in_flight(&mut self) {
        self.device.set_in_flight(self.unanswered());
    }

    /// Interrupts the guest if it wants to hear of what was published.
    pub(crate) fn signal(&mut self) {
        if self.signals.is_due(&mut self.ring) {
            self.interrupt();
        }
    }

    fn interrupt(&mut self) {
        if self.signals.interrupt() {
            self.device.interrupted();
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
        if let Some(id) = self.leftovers.clear()
            && !self.device.abandon(self.in_flight.request(id))
        {
            self.in_flight.end(id);
        }
        self.tell_in_flight();
        if self.ring.unsignalled() > 0 {
            self.signal();
        }
        self.signals.tell_broken();
    }

    /// Changes a descriptor.
    pub(crate) fn change(&mut self, change: Change) {
        if self.signals.change(change) {
            self.interrupt();
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
