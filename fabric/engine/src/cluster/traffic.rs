//! Requests between nodes, counted.

use std::sync::atomic::{AtomicU64, Ordering};

use fabric_replication::watermark::LANES_MAX;

/// Requests between this node and others since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Sent to other nodes, each of which is one round trip.
    pub asked: u64,
    /// Of other nodes, executed here.
    pub served: u64,
}

/// One thread's counters, alone on their cache line: only that thread writes them.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Lane {
    asked: AtomicU64,
    served: AtomicU64,
}

/// Those of all threads.
#[derive(Debug)]
pub struct Counters(Box<[Lane]>);

impl Default for Counters {
    fn default() -> Self {
        Self((0..LANES_MAX).map(|_| Lane::default()).collect())
    }
}

/// A load and a store instead of an atomic add: there is one writer.
#[inline]
fn count(counter: &AtomicU64) {
    let before = counter.load(Ordering::Relaxed);
    counter.store(before.wrapping_add(1), Ordering::Relaxed);
}

impl Counters {
    /// The thread asks another node.
    #[inline]
    pub fn asked(&self, lane: usize) {
        count(&self.0[lane].asked);
    }

    /// The thread does what another node asks.
    #[inline]
    pub fn served(&self, lane: usize) {
        count(&self.0[lane].served);
    }

    /// The sums.
    pub fn sum(&self) -> Traffic {
        let sum = |pick: fn(&Lane) -> &AtomicU64| {
            let all = self.0.iter().map(|lane| pick(lane).load(Ordering::Relaxed));
            all.sum()
        };
        Traffic {
            asked: sum(|lane| &lane.asked),
            served: sum(|lane| &lane.served),
        }
    }
}
