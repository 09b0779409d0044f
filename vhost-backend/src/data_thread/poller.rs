//! How a data thread sleeps: one epoll for all kicks, the mailbox and the engine, and the length of the spin
//! before it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::Timespec;
use rustix::event::epoll::{self, Event, EventData, EventFlags};

use super::handle::QueueId;
use super::{PollMode, SPIN_US_MAX};

/// Events taken from one wait; what is left comes with the next.
const WAIT_EVENTS: usize = 64;
/// Shortest spin that is tried again after spinning was given up.
const SPIN_MIN: Duration = Duration::from_micros(4);

/// Longest spin while a device has requests: about what it costs to sleep and wake up.
const DEVICE_SPIN_MAX: Duration = Duration::from_micros(16);

/// Reserved values of the event data; queues have a generation above 0 in the upper half.
const MAILBOX: u64 = 0;
const ENGINE: u64 = 1;

/// What woke the thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Woken {
    /// Commands in the mailbox, or completions of the engine: both are looked at in every turn anyway.
    Other,
    /// A guest kicked; the generation is cut to 32 bits.
    Queue { slot: usize, generation: u32 },
}

/// One epoll. Everything is edge-triggered, so event counters need not be read: a kick costs us no system
/// call but the wait itself, and one that came while we were polling costs one early return.
pub(super) struct Poller {
    epoll: OwnedFd,
    events: Vec<Event>,
}

impl Poller {
    pub(super) fn new(mailbox: impl AsFd, engine: impl AsFd) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let edge = EventFlags::IN | EventFlags::ET;
        epoll::add(&epoll, mailbox, EventData::new_u64(MAILBOX), edge)?;
        epoll::add(&epoll, engine, EventData::new_u64(ENGINE), edge)?;
        Ok(Self {
            epoll,
            events: Vec::with_capacity(WAIT_EVENTS),
        })
    }

    /// Watches a kick descriptor. One that is readable already gives an event at once.
    pub(super) fn watch(&self, id: QueueId, kick: &OwnedFd) -> io::Result<()> {
        let data = (id.generation & u64::from(u32::MAX)) << 32 | id.slot as u64;
        Ok(epoll::add(
            &self.epoll,
            kick,
            EventData::new_u64(data),
            EventFlags::IN | EventFlags::ET,
        )?)
    }

    /// Forgets a kick descriptor, which must happen before it is closed: the front end has it open as well.
    pub(super) fn forget(&self, kick: &OwnedFd) {
        if let Err(error) = epoll::delete(&self.epoll, kick) {
            tracing::warn!(%error, "cannot forget a kick descriptor");
        }
    }

    /// Waits, without end if `timeout` is absent, and hands out what happened.
    pub(super) fn wait(&mut self, timeout: Option<Duration>, mut woken: impl FnMut(Woken)) {
        let timeout = timeout.map(|t| Timespec {
            tv_sec: t.as_secs() as i64,
            tv_nsec: i64::from(t.subsec_nanos()),
        });
        self.events.clear();
        match epoll::wait(
            &self.epoll,
            rustix::buffer::spare_capacity(&mut self.events),
            timeout.as_ref(),
        ) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            // Nothing but a broken descriptor table leads here; going on would spin without sense or sleep
            // for ever.
            Err(error) => panic!("epoll_wait failed: {error}"),
        }
        for event in &self.events {
            let data = event.data.u64();
            woken(match data {
                MAILBOX | ENGINE => Woken::Other,
                _ => Woken::Queue {
                    slot: (data & u64::from(u32::MAX)) as usize,
                    generation: (data >> 32) as u32,
                },
            });
        }
    }
}

/// How long to spin after work. It doubles while work comes back within the longest spin allowed and halves
/// when it does not, so a thread that waits for a slow device or a slow guest hardly spins at all.
#[derive(Debug)]
pub(super) struct Spin {
    now: Duration,
    max: Duration,
}

impl Spin {
    fn new(max: Duration) -> Self {
        Self { now: max, max }
    }

    /// For waits while no request is in flight: a guest that got an answer often asks again at once.
    pub(super) fn for_guests(mode: PollMode) -> Self {
        let spin_us = match mode {
            PollMode::Adaptive { spin_us } => spin_us.min(SPIN_US_MAX),
            PollMode::Always | PollMode::Never => 0,
        };
        Self::new(Duration::from_micros(u64::from(spin_us)))
    }

    /// For waits while a device has requests. One that takes longer than a sleep and a wake-up cost is slept
    /// for: the kernel's own work for it may need this very core.
    pub(super) fn for_devices(mode: PollMode) -> Self {
        Self::new(Self::for_guests(mode).max.min(DEVICE_SPIN_MAX))
    }

    /// The spin to use now.
    pub(super) fn window(&self) -> Duration {
        self.now
    }

    /// The thread slept, and work came `gap` after the work before it.
    pub(super) fn slept(&mut self, gap: Duration) {
        if gap <= self.max {
            self.now = (self.now * 2).clamp(SPIN_MIN.min(self.max), self.max);
        } else {
            self.now /= 2;
            if self.now < SPIN_MIN {
                self.now = Duration::ZERO;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spin_grows_while_it_pays_and_shrinks_to_zero_otherwise() {
        let us = Duration::from_micros;
        let mut spin = Spin::for_guests(PollMode::Adaptive { spin_us: 50 });
        assert_eq!(spin.window(), us(50));
        for _ in 0..5 {
            spin.slept(us(51));
        }
        assert_eq!(spin.window(), Duration::ZERO);
        spin.slept(us(50));
        assert_eq!(spin.window(), SPIN_MIN);
        for _ in 0..10 {
            spin.slept(us(10));
        }
        assert_eq!(spin.window(), us(50));
    }

    #[test]
    fn never_and_always_have_no_window_and_adaptive_has_a_bound() {
        for mut spin in [Spin::for_guests, Spin::for_devices].map(|make| make(PollMode::Never)) {
            spin.slept(Duration::ZERO);
            assert_eq!(spin.window(), Duration::ZERO);
        }
        let longest = PollMode::Adaptive { spin_us: u32::MAX };
        assert_eq!(
            Spin::for_guests(longest).window(),
            Duration::from_micros(u64::from(SPIN_US_MAX))
        );
        assert_eq!(Spin::for_devices(longest).window(), DEVICE_SPIN_MAX);
        let short = PollMode::Adaptive { spin_us: 5 };
        assert_eq!(Spin::for_devices(short).window(), Duration::from_micros(5));
    }
}
