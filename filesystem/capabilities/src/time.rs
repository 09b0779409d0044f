//! Monotonic time, passed in by whoever has a clock.

use std::ops::Add;
use std::time::Duration;

/// A point in the monotonic time of one machine: nanoseconds since a start that only this machine knows.
/// Points of different machines are never compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Instant(u64);

impl Instant {
    /// The start that this machine counts from.
    pub const START: Self = Self(0);

    /// So many nanoseconds after the start.
    pub const fn from_nanos(nanoseconds: u64) -> Self {
        Self(nanoseconds)
    }

    /// Nanoseconds since the start.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// How long after `earlier` this is; zero if it is not after it.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// So long before this; the start of time is not passed.
    pub(crate) fn before(self, duration: Duration) -> Self {
        let nanoseconds = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_sub(nanoseconds))
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    /// The end of time is not passed.
    fn add(self, duration: Duration) -> Self {
        let nanoseconds = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanoseconds))
    }
}
