//! Numbers a volume's writes and knows below which number none is unresolved.
//!
//! Several data threads (lanes) write one volume. A version is drawn with one atomic add *per write*: were
//! threads to draw ranges in advance, a write issued after another one's completion could carry the smaller
//! version and be ignored as stale. Generation and sequence share one word, so that a renewed lease switches
//! both at once.
//!
//! Each lane publishes the oldest version it has in flight. It does so *before* it draws: whoever reads the
//! counter and then the lanes may see a bound that is too low, never one too high.

use std::sync::atomic::{AtomicU64, Ordering};

use fabric_types::ids::Version;
use fabric_types::{Generation, Sequence};

/// Most data threads of a process; one more engine is refused.
pub const LANES_MAX: usize = 64;

/// Sequences kept back at the end of a generation, so that lanes drawing at the same moment cannot run over
/// into the next one: each overshoots by at most one.
const SEQUENCE_SLACK: u64 = 1024;

/// How many draws of the counter pass between two looks at all lanes, a power of two. A watermark that lags
/// costs a new lease holder a few more comparisons, nothing else.
pub const REFRESH_EVERY: u64 = 64;

/// A lane with nothing in flight.
const IDLE: u64 = u64::MAX;

/// One thread's share, alone on its cache line.
#[derive(Debug)]
#[repr(align(64))]
struct Lane {
    oldest: AtomicU64,
}

/// The counter and the lanes. Every write takes the counter's line over, so it must not be the line (nor its
/// neighbour, which processors fetch along) of what the volume's other threads read with each request.
#[derive(Debug)]
#[repr(align(128))]
pub struct Watermark {
    next: AtomicU64,
    resolved: AtomicU64,
    /// A version with none of these bits looks at all lanes.
    refresh_mask: u64,
    lanes: Box<[Lane]>,
}

impl Watermark {
    /// Starts a generation at its first sequence.
    pub fn new(generation: Generation, lanes: usize) -> Self {
        let first = Version::of(generation, Sequence(1)).0;
        Self {
            next: AtomicU64::new(first),
            resolved: AtomicU64::new(first),
            refresh_mask: REFRESH_EVERY - 1,
            lanes: (0..lanes)
                .map(|_| Lane {
                    oldest: AtomicU64::new(IDLE),
                })
                .collect(),
        }
    }

    /// Looks at all lanes at another pace than [`REFRESH_EVERY`].
    ///
    /// # Panics
    /// `every` is no power of two.
    pub fn set_refresh_every(&mut self, every: u64) {
        assert!(every.is_power_of_two(), "{every} is no power of two");
        self.refresh_mask = every - 1;
    }

    /// The generation in use.
    #[inline]
    pub fn generation(&self) -> Generation {
        Version(self.next.load(Ordering::Acquire)).parts().0
    }

    /// Sequences left in this generation.
    pub fn sequences_left(&self) -> u64 {
        let used = Version(self.next.load(Ordering::Acquire)).sequence();
        (Sequence::MAX.0 - SEQUENCE_SLACK).saturating_sub(used)
    }

    /// Goes on with a newer generation from its first sequence; false (and no change) if it is not newer.
    pub fn renew(&self, generation: Generation) -> bool {
        let first = Version::of(generation, Sequence(1)).0;
        self.next.fetch_max(first, Ordering::AcqRel) < first
    }

    /// Draws the version of a write; `idle` says that the lane has no other in flight. `None`: the generation
    /// is used up.
    #[inline]
    pub fn draw(&self, lane: usize, idle: bool) -> Option<Version> {
        let bound = self.next.load(Ordering::Acquire);
        if Version(bound).sequence() >= Sequence::MAX.0 - SEQUENCE_SLACK {
            return None;
        }
        if idle {
            self.lanes[lane].oldest.store(bound, Ordering::Release);
        }
        let version = Version(self.next.fetch_add(1, Ordering::AcqRel));
        if version.0 & self.refresh_mask == 0 {
            self.refresh();
        }
        Some(version)
    }

    /// Whether another version was drawn after this one.
    #[inline]
    pub fn is_newest(&self, version: Version) -> bool {
        self.next.load(Ordering::Acquire) == version.0 + 1
    }

    /// Says which write of the lane is the oldest in flight now.
    #[inline]
    pub fn set_oldest(&self, lane: usize, oldest: Option<Version>) {
        let oldest = oldest.map_or(IDLE, |v| v.0);
        self.lanes[lane].oldest.store(oldest, Ordering::Release);
    }

    /// Every write with a version below this one is resolved. Never goes back; lags by some writes.
    #[inline]
    pub fn resolved(&self) -> Version {
        Version(self.resolved.load(Ordering::Acquire))
    }

    /// Looks at all lanes. Called now and then by [`draw`](Self::draw).
    pub fn refresh(&self) {
        let mut bound = self.next.load(Ordering::Acquire);
        for lane in &self.lanes {
            bound = bound.min(lane.oldest.load(Ordering::Acquire));
        }
        self.resolved.fetch_max(bound, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests;
