//! What a lane waits for: its inbox, its connections, its queue pairs, and a timer.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

/// Events taken from one wait.
const WAIT_EVENTS: usize = 64;

/// Event data of what is no connection: the inbox's eventfd, the timer, and queue pairs.
const INBOX: u64 = u64::MAX;
const TIMER: u64 = u64::MAX - 1;
const PAIRS: u64 = u64::MAX - 2;

/// What is ready.
#[derive(Debug, Clone, Copy)]
pub(super) enum Ready {
    /// Messages are in the inbox.
    Inbox,
    /// Time has passed.
    Timer,
    /// Some queue pair has something.
    Pairs,
    /// The connection of this key, and what for.
    Connection(u64, EventFlags),
}

/// See the module.
pub(super) struct Readiness {
    epoll: OwnedFd,
    timer: OwnedFd,
    /// Taken by the last [`look`](Self::look).
    events: Vec<epoll::Event>,
}

impl Readiness {
    /// Nothing but the inbox yet.
    ///
    /// # Errors
    /// The kernel has no descriptor left.
    pub fn new(inbox: BorrowedFd<'_>) -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        epoll::add(&epoll, inbox, EventData::new_u64(INBOX), EventFlags::IN)?;
        epoll::add(&epoll, &timer, EventData::new_u64(TIMER), EventFlags::IN)?;
        Ok(Self {
            epoll,
            timer,
            events: Vec::with_capacity(WAIT_EVENTS),
        })
    }

    /// Readable when something is ready.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Watches a connection for what comes.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn add_connection(&self, fd: BorrowedFd<'_>, key: u64) -> std::io::Result<()> {
        let data = EventData::new_u64(key);
        Ok(epoll::add(&self.epoll, fd, data, EventFlags::IN)?)
    }

    /// Watches a connection for something else.
    pub fn change_connection(&self, fd: BorrowedFd<'_>, key: u64, flags: EventFlags) {
        if let Err(error) = epoll::modify(&self.epoll, fd, EventData::new_u64(key), flags) {
            tracing::error!(%error, "cannot watch a connection");
        }
    }

    /// Watches a queue pair.
    pub fn add_pair(&self, fd: BorrowedFd<'_>) {
        let data = EventData::new_u64(PAIRS);
        if let Err(error) = epoll::add(&self.epoll, fd, data, EventFlags::IN) {
            tracing::error!(%error, "cannot watch a queue pair");
        }
    }

    /// Has the timer tell of itself so often; zero: never.
    pub fn set_timer(&self, every_ms: i64) {
        let every = Timespec {
            tv_sec: 0,
            tv_nsec: every_ms * 1_000_000,
        };
        let spec = Itimerspec {
            it_interval: every,
            it_value: every,
        };
        if let Err(error) = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec) {
            tracing::error!(%error, "cannot set a timer; lost peers will not be noticed");
        }
    }

    /// The timer has been heard.
    pub fn clear_timer(&self) {
        let mut count = [0u8; 8];
        let _ = rustix::io::read(&self.timer, &mut count);
    }

    /// Looks what is ready now, without waiting; how many there are.
    pub fn look(&mut self) -> usize {
        self.events.clear();
        let zero = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let spare = rustix::buffer::spare_capacity(&mut self.events);
        if epoll::wait(&self.epoll, spare, Some(&zero)).is_err() {
            self.events.clear();
        }
        self.events.len()
    }

    /// One of those that the last look found.
    pub fn ready(&self, at: usize) -> Ready {
        let event = &self.events[at];
        match event.data.u64() {
            INBOX => Ready::Inbox,
            TIMER => Ready::Timer,
            PAIRS => Ready::Pairs,
            key => Ready::Connection(key, event.flags),
        }
    }
}
