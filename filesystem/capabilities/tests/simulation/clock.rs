//! Clocks that differ in what they show and in how fast they are.

use fs_capabilities::Instant;
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use crate::plan::{DRIFT_BOUND, SECOND};

/// Parts by which a rate is given.
const PARTS: u64 = 10_000;

#[derive(Debug, Clone, Copy)]
pub struct Clock {
    offset: u64,
    /// So many parts faster than the slowest one.
    faster: u64,
}

impl Clock {
    pub fn draw(rng: &mut ChaCha8Rng) -> Self {
        let fastest = PARTS / u64::from(DRIFT_BOUND);
        let faster = match rng.random_range(0..3) {
            0 => 0,
            1 => fastest,
            _ => rng.random_range(0..=fastest),
        };
        Self {
            offset: rng.random_range(0..1000 * SECOND),
            faster,
        }
    }

    /// What it shows at a true time.
    pub fn at(self, time: u64) -> Instant {
        Instant::from_nanos(self.offset + time + time * self.faster / PARTS)
    }

    /// The first true time at which it shows this.
    pub fn when(self, shown: Instant) -> u64 {
        let counted = shown.as_nanos().saturating_sub(self.offset);
        let time = u128::from(counted) * u128::from(PARTS) / u128::from(PARTS + self.faster);
        let mut time = u64::try_from(time).unwrap_or(u64::MAX).saturating_sub(2);
        // Far beyond any run: nothing waits for that.
        while time < 1000 * SECOND && self.at(time) < shown {
            time += 1;
        }
        time
    }
}
