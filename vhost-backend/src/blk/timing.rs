//! How long the requests of one queue take. The clock is read once for the requests that are taken together,
//! and once for the answers that are published together.

use std::sync::Arc;

use super::{QueueLatency, RequestKind};
use crate::clock::{Clock, Stamp};

/// Answers that wait to be published, of requests that began together.
#[derive(Debug)]
struct Answers {
    kind: RequestKind,
    taken: Stamp,
    count: u32,
}

/// Times the requests of one queue.
#[derive(Debug)]
pub(super) struct Timing {
    clock: Clock,
    latency: Arc<QueueLatency>,
    /// When the requests were taken that are looked at now.
    taken: Stamp,
    answers: Vec<Answers>,
}

impl Timing {
    /// For a queue of `size` entries. What it is to do again was taken now.
    pub(super) fn new(latency: Arc<QueueLatency>, size: usize) -> Self {
        let clock = Clock::get();
        Self {
            clock,
            latency,
            taken: clock.stamp(),
            answers: Vec::with_capacity(size),
        }
    }

    /// Requests are taken off the ring.
    #[inline(always)]
    pub(super) fn take(&mut self) {
        self.taken = self.clock.stamp();
    }

    /// When they were.
    #[inline(always)]
    pub(super) fn taken(&self) -> Stamp {
        self.taken
    }

    /// A request succeeded; the guest does not see its answer yet.
    #[inline(always)]
    pub(super) fn answered(&mut self, kind: RequestKind, taken: Stamp) {
        match self.answers.last_mut() {
            Some(last) if last.kind == kind && last.taken == taken => last.count += 1,
            _ => self.answers.push(Answers {
                kind,
                taken,
                count: 1,
            }),
        }
    }

    /// The guest sees all answers, and so many requests are left.
    #[inline(always)]
    pub(super) fn published(&mut self, in_flight: usize) {
        if !self.answers.is_empty() {
            let now = self.clock.stamp();
            for answers in self.answers.drain(..) {
                let ns = self.clock.ns_between(answers.taken, now);
                self.latency.took(answers.kind, ns, answers.count);
            }
        }
        self.set_in_flight(in_flight);
    }

    /// So many requests are between the ring and their answer.
    #[inline(always)]
    pub(super) fn set_in_flight(&self, requests: usize) {
        self.latency.set_in_flight(requests as u64);
    }
}
