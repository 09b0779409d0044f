//! The record of requests in flight of a split ring, in the order that a crash asks for. A packed ring keeps
//! its own.

use crate::inflight::InflightQueue;

/// The record, and the answers that it must hear of once the guest sees them.
#[derive(Debug)]
pub(super) struct Record {
    inflight: InflightQueue,
    /// Answers not yet published.
    answered: Vec<u16>,
}

impl Record {
    /// For a ring of `size` entries.
    pub(super) fn new(inflight: InflightQueue, size: u16) -> Self {
        Self {
            inflight,
            answered: Vec::with_capacity(usize::from(size)),
        }
    }

    /// A request was taken off the ring.
    #[inline(always)]
    pub(super) fn taken(&mut self, id: u16) {
        self.inflight.taken(id);
    }

    /// The one that was taken last is on the ring again.
    pub(super) fn untaken(&mut self, id: u16) {
        self.inflight.untaken(id);
    }

    /// A request has its answer in the used ring, whose index has not moved yet.
    #[inline(always)]
    pub(super) fn answered(&mut self, id: u16) {
        self.inflight.answered(id);
        self.answered.push(id);
    }

    /// The used ring's index has moved to `next_used`.
    #[inline(always)]
    pub(super) fn published(&mut self, next_used: u16) {
        self.inflight.completed(&self.answered, next_used);
        self.answered.clear();
    }
}
