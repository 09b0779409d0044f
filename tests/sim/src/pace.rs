//! How often what recurs is done.
//!
//! What ships does most of it so seldom that a run of a second would never meet it between two writes. So the
//! seed draws other intervals, from one event to the next up to those that ship.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use crate::queue::Span;
use crate::sim::CLOCK_PARTS;

/// Speeds of clocks: they drift apart from the leader's as far as they may.
const CLOCKS: [u64; 3] = [
    CLOCK_PARTS - CLOCK_PARTS / 100,
    CLOCK_PARTS,
    CLOCK_PARTS + CLOCK_PARTS / 100,
];

/// Intervals. A span of zero: never.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// Versions that a volume draws between two looks at what is in flight, which raise its watermark: a
    /// power of two.
    pub watermark_every: u64,
    /// Between two looks of an idle node at its stores.
    pub idle: Span,
    /// Between two checkpoints that a node asks its stores for, besides those that they begin themselves.
    pub checkpoint: Span,
    /// Between two flushes of a node's stores that no client asked for.
    pub flush: Span,
    /// Between two steps of the cleaner.
    pub clean: Span,
    /// How long a lease lasts. Zero: until another host wants it.
    pub lease: Span,
    /// How fast hosts' clocks run, in parts of [`CLOCK_PARTS`] of the speed of meta's leader.
    pub clocks: [u64; 2],
}

impl Pace {
    /// What ships, without what its maintenance does.
    pub const USUAL: Self = Self {
        watermark_every: fabric_replication::watermark::REFRESH_EVERY,
        idle: Span::millis(50),
        checkpoint: Span(0),
        flush: Span(0),
        clean: Span(0),
        lease: Span(0),
        clocks: [CLOCK_PARTS; 2],
    };

    /// The same with leases that end by time, and hosts' clocks as slow as they may be.
    pub const WITH_LEASES: Self = Self {
        lease: Span::millis(200),
        clocks: [CLOCKS[0]; 2],
        ..Self::USUAL
    };

    /// Whatever a seed runs.
    pub fn draw(rng: &mut ChaCha8Rng) -> Self {
        let mut pick = |from: &[u64]| from[rng.random_range(0..from.len())];
        Self {
            watermark_every: pick(&[1, 2, 8, 64]),
            idle: Span(pick(&[2_000, 10_000, 50_000])),
            checkpoint: Span(pick(&[0, 0, 3_000, 20_000, 100_000])),
            flush: Span(pick(&[0, 0, 1_000, 10_000, 100_000])),
            clean: Span(pick(&[0, 500, 2_000, 10_000])),
            lease: Span(pick(&[0, 60_000, 200_000, 1_000_000])),
            clocks: [pick(&CLOCKS), pick(&CLOCKS)],
        }
    }
}

/// What a node's maintenance does of its own accord.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Upkeep {
    /// A checkpoint.
    Checkpoint,
    /// A flush.
    Flush,
    /// A step of the cleaner.
    Clean,
}

impl Upkeep {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Checkpoint, Self::Flush, Self::Clean];

    /// How often it is done.
    pub fn every(self, pace: &Pace) -> Span {
        match self {
            Self::Checkpoint => pace.checkpoint,
            Self::Flush => pace.flush,
            Self::Clean => pace.clean,
        }
    }
}
