//! When to try again to reach a peer.

use std::time::Duration;

/// Pause before the first repetition, on average.
const FIRST: Duration = Duration::from_millis(50);

/// Longest pause, on average. A peer that comes back waits no longer than this and half of it for its
/// clients.
const LONGEST: Duration = Duration::from_secs(1);

/// Doubles the pause with each failure, and spreads it so that a cluster does not knock all at once.
#[derive(Debug, Clone, Copy, Default)]
pub struct Backoff {
    failures: u32,
}

impl Backoff {
    /// It failed: how long to wait, given a random number.
    pub fn failed(&mut self, random: u64) -> Duration {
        let doubled = FIRST.saturating_mul(1 << self.failures.min(16));
        self.failures = self.failures.saturating_add(1);
        let mean = doubled.min(LONGEST);
        // From half to one and a half of it.
        mean / 2 + mean.mul_f64((random >> 11) as f64 / (1u64 << 53) as f64)
    }

    /// Attempts that failed in a row.
    pub fn failures(&self) -> u32 {
        self.failures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_bound_and_are_spread() {
        let mut low = Backoff::default();
        let mut high = Backoff::default();
        for _ in 0..40 {
            let (least, most) = (low.failed(0), high.failed(u64::MAX));
            assert!(least < most);
            assert!(least >= FIRST / 2 && most <= LONGEST + LONGEST / 2);
        }
        assert_eq!(low.failed(0), LONGEST / 2);
    }
}
