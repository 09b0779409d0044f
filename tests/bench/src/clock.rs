//! Time stamps that cost a few nanoseconds: the processor's counter, calibrated once.

use std::time::{Duration, Instant};

/// How long calibration watches the counter; long enough for an error far below a percent.
const CALIBRATION: Duration = Duration::from_millis(50);

/// Converts counter values to nanoseconds.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    ticks_per_ns: f64,
}

impl Clock {
    /// Compares the counter with the system's clock.
    pub fn calibrate() -> Self {
        let (start, first) = (Instant::now(), ticks());
        std::thread::sleep(CALIBRATION);
        let (elapsed, last) = (start.elapsed(), ticks());
        Self {
            ticks_per_ns: last.wrapping_sub(first) as f64 / elapsed.as_nanos() as f64,
        }
    }

    /// Nanoseconds between two readings.
    pub fn ns(self, from: u64, to: u64) -> u64 {
        (to.wrapping_sub(from) as f64 / self.ticks_per_ns) as u64
    }

    /// Counter ticks in a duration.
    pub fn ticks_in(self, duration: Duration) -> u64 {
        (duration.as_nanos() as f64 * self.ticks_per_ns) as u64
    }
}

/// The counter now.
#[cfg(target_arch = "x86_64")]
pub fn ticks() -> u64 {
    // SAFETY: RDTSC is available on every x86-64 processor and touches no memory.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// The counter now.
#[cfg(target_arch = "aarch64")]
pub fn ticks() -> u64 {
    let value: u64;
    // SAFETY: CNTVCT_EL0 is readable from user space under Linux and touches no memory.
    unsafe { core::arch::asm!("mrs {}, cntvct_el0", out(reg) value, options(nomem, nostack)) };
    value
}
