//! Times the requests of one queue. The clock is read once for the requests that are taken together,
//! and once for the answers that are published together.

use std::sync::Arc;

use super::QueueLatency;
use crate::clock::{Clock, Stamp};

/// Answers that wait to be published, of requests that began together.
#[derive(Debug)]
struct Answers {
    kind: usize,
    taken: Stamp,
    count: u32,
}

/// Times the requests of one queue.
#[derive(Debug)]
pub struct Timing<const KINDS: usize> {
    clock: Clock,
    latency: Arc<QueueLatency<KINDS>>,
    /// When the requests were taken that are looked at now.
    taken: Stamp,
    answers: Vec<Answers>,
}

impl<const KINDS: usize> Timing<KINDS> {
    /// For a queue of `size` entries. What it is to do again was taken now.
    pub(super) fn new(latency: Arc<QueueLatency<KINDS>>, size: usize) -> Self {
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
    pub fn take(&mut self) {
        self.taken = self.clock.stamp();
    }

    /// When they were.
    #[inline(always)]
    pub fn taken(&self) -> Stamp {
        self.taken
    }

    /// A request of a kind is answered; the guest does not see the answer yet.
    #[inline(always)]
    pub fn answered(&mut self, kind: usize, taken: Stamp) {
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
    pub fn published(&mut self, in_flight: usize) {
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
    pub fn set_in_flight(&self, requests: usize) {
        self.latency.set_in_flight(requests as u64);
    }
}
