//! Time stamps of requests: the processor's counter where the kernel itself keeps time by it, as a stamp then
//! costs half of what asking the kernel's clock costs, and a request takes two.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How long calibration compares the counter with the system's clock: enough for an error far below what a
/// histogram tells apart.
const CALIBRATION: Duration = Duration::from_millis(2);
/// Fraction bits of the counter's scale.
const SCALE_BITS: u32 = 32;

/// A moment, in the unit of the clock that it is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp(u64);

impl Stamp {
    /// Of no request.
    pub const NONE: Self = Self(0);
}

/// Where stamps come from. All threads of a process have the same.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Clock {
    /// The processor's counter, and the nanoseconds of one tick as a fixed-point number.
    Counter {
        /// Nanoseconds × 2^[`SCALE_BITS`].
        scale: u64,
    },
    /// The system's clock, in nanoseconds since then.
    System(Instant),
}

impl Clock {
    /// The clock of this process; the first call calibrates it.
    pub(crate) fn get() -> Self {
        static CLOCK: OnceLock<Clock> = OnceLock::new();
        *CLOCK.get_or_init(|| match kernel_uses_counter() {
            true => Self::calibrate(),
            false => Self::System(Instant::now()),
        })
    }

    fn calibrate() -> Self {
        let (first, began) = (counter(), Instant::now());
        let elapsed = loop {
            let elapsed = began.elapsed();
            if elapsed >= CALIBRATION {
                break elapsed;
            }
            std::hint::spin_loop();
        };
        let ticks = counter().saturating_sub(first);
        let scale = (elapsed.as_nanos() << SCALE_BITS).checked_div(u128::from(ticks));
        match scale.and_then(|scale| u64::try_from(scale).ok()) {
            Some(scale) => Self::Counter { scale },
            None => Self::System(began),
        }
    }

    /// Now.
    #[inline(always)]
    pub(crate) fn stamp(&self) -> Stamp {
        match self {
            Self::Counter { .. } => Stamp(counter()),
            Self::System(began) => Stamp(began.elapsed().as_nanos() as u64),
        }
    }

    /// Nanoseconds from one stamp to a later one; 0 if it is not later, as counters of two processors may
    /// differ by a little.
    #[inline(always)]
    pub(crate) fn ns_between(&self, from: Stamp, to: Stamp) -> u64 {
        let ticks = to.0.saturating_sub(from.0);
        match self {
            Self::Counter { scale } => {
                ((u128::from(ticks) * u128::from(*scale)) >> SCALE_BITS) as u64
            }
            Self::System(_) => ticks,
        }
    }
}

/// Whether the kernel keeps time by the processor's counter. It does so only after it found that the counters
/// of all processors agree and never stop.
fn kernel_uses_counter() -> bool {
    const CHOSEN: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    cfg!(target_arch = "x86_64")
        && std::fs::read_to_string(CHOSEN).is_ok_and(|name| name.trim() == "tsc")
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn counter() -> u64 {
    // SAFETY: every x86-64 processor has RDTSC, and it touches no memory.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn counter() -> u64 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn follows_the_system(clock: Clock) {
        let (from, began) = (clock.stamp(), Instant::now());
        std::thread::sleep(Duration::from_millis(20));
        let least = began.elapsed();
        let told = clock.ns_between(from, clock.stamp());
        let most = began.elapsed() + Duration::from_millis(1);
        // A hundredth is far more than calibration may be wrong by.
        let told = Duration::from_nanos(told);
        assert!(told >= least - least / 100, "{told:?} of {least:?}");
        assert!(told <= most + most / 100, "{told:?} of {most:?}");
        assert_eq!(clock.ns_between(clock.stamp(), from), 0);
    }

    #[test]
    fn either_clock_follows_the_system_clock() {
        follows_the_system(Clock::get());
        follows_the_system(Clock::System(Instant::now()));
    }
}
