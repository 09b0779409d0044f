//! When a thread without work sleeps, and how often a busy one looks after its parked queues.

use std::time::{Duration, Instant};

use crate::data_thread::PollMode;
use crate::data_thread::poller::Spin;

/// Turns without work between two looks at the clock.
const CLOCK_TURNS: u32 = 16;
/// Requests and turns after which a busy thread looks at the clock for its parked queues.
const PARKED_CREDITS: usize = 64;
/// How often a busy thread looks for kicks of its parked queues.
const PARKED_INTERVAL: Duration = Duration::from_micros(50);

/// What an idle thread waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitsFor {
    /// Guests: no request is in flight.
    Guests,
    /// A device has requests.
    Devices,
}

/// Spins for a while after work, then lets the thread sleep.
#[derive(Debug)]
pub(super) struct Idle {
    mode: PollMode,
    guest_spin: Spin,
    device_spin: Spin,
    /// When a turn without work was first seen after the last work.
    since: Option<Instant>,
    turns: u32,
    /// What it slept for, from a sleep until the work after it.
    slept: Option<WaitsFor>,
}

impl Idle {
    pub(super) fn new(mode: PollMode) -> Self {
        Self {
            mode,
            guest_spin: Spin::for_guests(mode),
            device_spin: Spin::for_devices(mode),
            since: None,
            turns: 0,
            slept: None,
        }
    }

    /// Whether the thread never sleeps while a queue is running.
    pub(super) fn polls_always(&self) -> bool {
        self.mode == PollMode::Always
    }

    /// A turn had work. If the thread slept before it, the next spin is shorter or longer.
    #[inline(always)]
    pub(super) fn worked(&mut self) {
        self.turns = 0;
        if let (Some(waited_for), Some(since)) = (self.slept.take(), self.since) {
            self.spin_mut(waited_for).slept(since.elapsed());
        }
        self.since = None;
    }

    /// A turn had no work. True if it is time to think of sleep.
    #[inline(always)]
    pub(super) fn is_time(&mut self) -> bool {
        self.turns += 1;
        if self.mode == PollMode::Never || self.turns % CLOCK_TURNS == 0 {
            self.turns = 0;
            return true;
        }
        false
    }

    /// Whether the thread has spun for long enough. One that has slept spins no more before the next work.
    pub(super) fn has_spun(&mut self, waits_for: WaitsFor) -> bool {
        let since = *self.since.get_or_insert_with(Instant::now);
        self.slept.is_some() || since.elapsed() >= self.spin_mut(waits_for).window()
    }

    /// The thread is about to sleep.
    pub(super) fn sleeps(&mut self, waits_for: WaitsFor) {
        self.slept = Some(waits_for);
    }

    /// The thread must look at its queues once more before it sleeps.
    pub(super) fn look_again(&mut self) {
        self.since = None;
        self.slept = None;
    }

    fn spin_mut(&mut self, waits_for: WaitsFor) -> &mut Spin {
        match waits_for {
            WaitsFor::Guests => &mut self.guest_spin,
            WaitsFor::Devices => &mut self.device_spin,
        }
    }
}

/// Says when a busy thread looks after its parked queues, which takes a look at the clock and a system call.
#[derive(Debug)]
pub(super) struct ParkedCheck {
    credits: usize,
    looked: Instant,
}

impl ParkedCheck {
    pub(super) fn new() -> Self {
        Self {
            credits: 0,
            looked: Instant::now(),
        }
    }

    /// A turn had so much work. True if it is time to look at the clock.
    #[inline(always)]
    pub(super) fn worked(&mut self, work: usize) -> bool {
        self.credits += work + 1;
        if self.credits < PARKED_CREDITS {
            return false;
        }
        self.credits = 0;
        true
    }

    /// Whether the last look was long enough ago; this is the next one then.
    pub(super) fn is_due(&mut self) -> bool {
        let now = Instant::now();
        if now - self.looked < PARKED_INTERVAL {
            return false;
        }
        self.looked = now;
        true
    }
}
