//! The queues of one thread: which of them are polled, and which are left until they are kicked.

use std::time::Duration;

use fabric_types::io::Tag;

use crate::data_thread::handle::QueueId;
use crate::data_thread::poller::{Poller, Woken};
use crate::data_thread::queue::{AnyQueue, Drain, Scratch};
use crate::data_thread::{MAX_THREAD_QUEUES, QueueError};
use crate::device::{DeviceEngine, DeviceQueue};

/// All queues of a thread. A queue keeps its place for as long as it lives; a place is used again.
pub(super) struct Queues<Q: DeviceQueue> {
    places: Vec<Option<Box<AnyQueue<Q>>>>,
    /// Places of the queues that are polled.
    hot: Vec<usize>,
    /// Which of them is polled first in the next turn.
    first: usize,
    /// Places of queues that were kicked, or whose requests the engine finished, in this turn.
    touched: Vec<usize>,
    /// Queues that are being drained.
    draining: usize,
    /// Of the queue that was added last.
    generation: u64,
}

impl<Q: DeviceQueue> Queues<Q> {
    pub(super) fn new() -> Self {
        Self {
            places: Vec::new(),
            hot: Vec::new(),
            first: 0,
            touched: Vec::new(),
            draining: 0,
            generation: 0,
        }
    }

    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.places.iter().all(Option::is_none)
    }

    /// Whether there is more than one place.
    pub(super) fn are_several(&self) -> bool {
        self.places.len() > 1
    }

    /// Whether some are not polled.
    pub(super) fn are_some_parked(&self) -> bool {
        self.hot.len() < self.places.len()
    }

    /// Whether some are being drained.
    #[inline(always)]
    pub(super) fn are_draining(&self) -> bool {
        self.draining > 0
    }

    /// Those that are polled.
    pub(super) fn hot(&self) -> impl Iterator<Item = &AnyQueue<Q>> {
        self.hot
            .iter()
            .filter_map(|&slot| self.places[slot].as_deref())
    }

    #[inline(always)]
    fn at(&mut self, slot: usize) -> Option<&mut AnyQueue<Q>> {
        self.places.get_mut(slot)?.as_deref_mut()
    }

    /// The queue of that name, unless it is gone.
    pub(super) fn find(&mut self, id: QueueId) -> Result<&mut AnyQueue<Q>, QueueError> {
        self.at(id.slot)
            .filter(|queue| queue.generation == id.generation)
            .ok_or(QueueError::Stopped)
    }

    /// A name for the next queue.
    pub(super) fn next_id(&mut self) -> Result<QueueId, QueueError> {
        let free = self.places.iter().position(Option::is_none);
        let slot = free.unwrap_or(self.places.len());
        if slot >= MAX_THREAD_QUEUES {
            return Err(QueueError::Full);
        }
        self.generation += 1;
        Ok(QueueId {
            slot,
            generation: self.generation,
        })
    }

    /// Adds a queue under a name from [`Self::next_id`]. It is polled from now on.
    pub(super) fn insert(&mut self, id: QueueId, queue: Box<AnyQueue<Q>>) {
        if id.slot == self.places.len() {
            self.places.push(None);
            self.touched.reserve(self.places.len() + 1);
            self.hot.reserve(self.places.len() + 1);
        }
        self.places[id.slot] = Some(queue);
        self.hot.push(id.slot);
    }

    /// Polls every hot queue once. Each turn begins with another queue: whatever room the engine has is not
    /// the same queue's every time.
    #[inline(always)]
    pub(super) fn poll(&mut self, engine: &mut Q::Engine, scratch: &mut Scratch) -> usize {
        let mut work = 0;
        let count = self.hot.len();
        self.first = if self.first + 1 < count {
            self.first + 1
        } else {
            0
        };
        for at in (self.first..count).chain(0..self.first) {
            work += self.poll_one(at, engine, scratch);
        }
        work
    }

    #[inline(always)]
    fn poll_one(&mut self, at: usize, engine: &mut Q::Engine, scratch: &mut Scratch) -> usize {
        let Some(queue) = self.places[self.hot[at]].as_deref_mut() else {
            return 0;
        };
        let moved = queue.poll(engine, scratch);
        queue.idle_turns = if moved > 0 {
            0
        } else {
            queue.idle_turns.saturating_add(1)
        };
        moved
    }

    /// Answers what the engine has finished; returns how many requests that were.
    pub(super) fn reap(&mut self, engine: &mut Q::Engine, scratch: &mut Scratch) -> usize {
        let (places, touched) = (&mut self.places, &mut self.touched);
        let mut done = |tag: Tag, outcome: <Q::Engine as DeviceEngine>::Outcome<'_>| {
            let slot = (tag.0 >> 32) as usize;
            let Some(queue) = places.get_mut(slot).and_then(|queue| queue.as_deref_mut()) else {
                return;
            };
            if queue.unpublished() == 0 {
                touched.push(slot);
            }
            queue.complete(tag, outcome, scratch);
        };
        let count = engine.reap(&mut done);
        while let Some(slot) = self.touched.pop() {
            // A guest that has an answer is likely to ask again, and need not kick for it: said before it has
            // the answer.
            self.heat(slot);
            let Some(queue) = self.places[slot].as_deref_mut() else {
                continue;
            };
            if queue.unpublished() > 0 {
                queue.publish();
                queue.signal();
            }
        }
        count
    }

    /// Polls a queue from now on.
    pub(super) fn heat(&mut self, slot: usize) {
        let Some(queue) = self.at(slot) else {
            return;
        };
        queue.idle_turns = 0;
        if !queue.hot {
            queue.hot = true;
            queue.disarm();
            self.hot.push(slot);
        }
    }

    /// Leaves quiet queues until they are kicked. Returns false if one of them turned out to have work.
    pub(super) fn park(&mut self, quiet_turns: u32) -> bool {
        let places = &mut self.places;
        let mut quiet = true;
        self.hot.retain(|&slot| {
            let Some(queue) = places[slot].as_deref_mut() else {
                return false;
            };
            let parkable = queue.kick.is_some() || !queue.running();
            if !parkable || queue.stalled() || queue.idle_turns < quiet_turns {
                return true;
            }
            if queue.arm() {
                queue.disarm();
                quiet = false;
                return true;
            }
            queue.hot = false;
            false
        });
        quiet
    }

    /// Waits for kicks, and polls the queues that were kicked from now on.
    pub(super) fn wait(&mut self, poller: &mut Poller, timeout: Option<Duration>) {
        // At most as many places as there are queues, so the list does not grow here.
        let (places, touched) = (&self.places, &mut self.touched);
        poller.wait(timeout, |woken| {
            if let Woken::Queue { slot, generation } = woken {
                let known = places.get(slot).and_then(Option::as_deref);
                if known.is_some_and(|queue| queue.generation as u32 == generation) {
                    touched.push(slot);
                }
            }
        });
        while let Some(slot) = self.touched.pop() {
            self.heat(slot);
        }
    }

    /// Has a queue take no more requests, and go away once none is in flight.
    pub(super) fn drain(&mut self, id: QueueId, gone: bool, drain: Drain) {
        match self.find(id) {
            Ok(queue) if queue.drain.is_none() => {
                queue.stop_taking(gone);
                queue.drain = Some(drain);
                self.draining += 1;
                self.heat(id.slot);
            }
            _ => answer(drain, Err(QueueError::Stopped)),
        }
    }

    /// Has all queues go away.
    #[cold]
    pub(super) fn drain_all(&mut self) {
        for queue in self.places.iter_mut().flatten() {
            if queue.drain.is_none() {
                queue.stop_taking(true);
                queue.drain = Some(Drain(None));
                self.draining += 1;
            }
        }
    }

    /// Does what waited for queues to have nothing in flight.
    #[cold]
    pub(super) fn finish_drained(&mut self, poller: &Poller) {
        for slot in 0..self.places.len() {
            let Some(queue) = self.places[slot].as_deref_mut() else {
                continue;
            };
            if !queue.drained() {
                continue;
            }
            let Some(drain) = queue.drain.take() else {
                continue;
            };
            self.draining -= 1;
            if let Some(kick) = &queue.kick {
                poller.forget(kick);
            }
            let base = queue.close();
            self.places[slot] = None;
            self.hot.retain(|&hot| hot != slot);
            answer(drain, Ok(base));
        }
    }
}

/// Answers who asked for a stop, if anybody waits.
fn answer(drain: Drain, outcome: Result<u32, QueueError>) {
    if let Some(reply) = drain.0 {
        reply.try_send(outcome).unwrap_or(());
    }
}
