//! Writers wait while space that was freed comes back to the pool.
//!
//! Overwriting takes new addresses. The old ones are space again once their segment is sealed and the
//! namespace's leader has discarded them. Whoever overwrites faster than that fills the pool with what nobody
//! names, and then all that shares the pool gets ENOSPC: other filesystems and disks, too. So while freed
//! space is to come back, all hosts together let a filesystem grow by a share of the free space in a while,
//! and no more. What it holds, named or freed, is the leader's own record, so that it counts what all hosts
//! write. Discards make it smaller: writers go as fast as space comes back.
//!
//! Nobody waits
//! - where nothing is to come back: a pool that is full of what files name says so at once;
//! - where nothing has come back for [`STALLED_AFTER`]: some host may not give up a segment;
//! - longer than [`WAIT_MAX`], or [`RETURN_WAIT_MAX`] if the alternative is ENOSPC.
//!
//! Whoever waits holds no lock and no room: a write waits before it takes any, and again after it gave them
//! back.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fs_capabilities::Instant;
use namespace::Statistics;

use crate::backend::Backend;
use crate::client::Client;
use crate::failure::Failure;
use crate::sync::{Semaphore, Signal, lock};

/// Freed bytes that are worth a segment's end, and waiting. Less may stay in segments that are written.
pub(crate) const FREED_MIN: u64 = 1 << 20;

/// A filesystem grows by one part in so many of the pool's free space before its writers wait. Some
/// filesystems may do so at once, and reports of the free space are some seconds old.
const GROWTH_SHARE: u64 = 4;

/// Growth is counted since the least that the filesystem held in this time, or up to twice as long.
const WINDOW: Duration = Duration::from_secs(10);

/// A host writes one part in so many of what the filesystem may still grow by. Then it asks again: other
/// hosts write, too.
const CREDIT_SHARE: u64 = 4;

/// Bytes that may be written before it is asked again where nothing is to come back.
const CREDIT_MIN: u64 = 8 << 20;

/// It is asked again after this.
const CREDIT_AGE_MAX: Duration = Duration::from_secs(2);

/// Freed space of which nothing comes back for this long is not waited for.
const STALLED_AFTER: Duration = Duration::from_secs(15);

/// Longest wait of a write before it is tried.
const WAIT_MAX: Duration = Duration::from_secs(15);

/// Longest wait of a write that found the pool full.
const RETURN_WAIT_MAX: Duration = Duration::from_secs(60);

/// Pause between two looks of those that wait.
const PAUSE: Duration = Duration::from_millis(100);

/// Space of a filesystem, as far as its client knows it.
pub(crate) struct Throttle {
    usage: Mutex<Usage>,
    /// One task at a time asks.
    asking: Semaphore,
    /// The segment that is written may hold much that is freed.
    wants_seal: AtomicBool,
    /// It is to be looked at.
    pub(crate) wake: Signal,
}

/// Last answer of the leader.
#[derive(Debug, Default)]
struct Usage {
    asked: Option<Asked>,
    /// Counts answers.
    answers: u64,
    /// Bytes that may be written before it is asked again.
    credit: u64,
}

#[derive(Debug)]
struct Asked {
    at: Instant,
    freed: u64,
    /// When the freed bytes last became fewer, or began to be worth waiting for.
    fell: Instant,
    /// Begin of the present window, and the least bytes that were held in it and in the one before.
    window: Instant,
    least: u64,
    least_before: u64,
}

impl Usage {
    /// Counts these bytes as written now and returns true. Returns false if the leader has to be asked first.
    fn admit(&mut self, now: Instant, bytes: u64) -> bool {
        let asked = self.asked.as_ref();
        let is_new = asked.is_some_and(|asked| now.since(asked.at) < CREDIT_AGE_MAX);
        let is_admitted = is_new && self.credit > 0;
        if is_admitted {
            self.credit = self.credit.saturating_sub(bytes);
        }
        is_admitted
    }

    /// The leader answered, and so much of the pool is free by the last report.
    fn note(&mut self, now: Instant, statistics: &Statistics, free_bytes: u64) {
        let freed = statistics.freed_bytes;
        let held = statistics.named_bytes.saturating_add(freed);
        // Nothing follows from a state that long ago.
        let before = self
            .asked
            .take()
            .filter(|asked| now.since(asked.at) < WINDOW);
        let mut asked = before.unwrap_or(Asked {
            at: now,
            freed,
            fell: now,
            window: now,
            least: held,
            least_before: held,
        });
        if freed < asked.freed || asked.freed < FREED_MIN {
            asked.fell = now;
        }
        if now.since(asked.window) >= WINDOW {
            asked.window = now;
            asked.least_before = std::mem::replace(&mut asked.least, held);
        }
        asked.at = now;
        asked.freed = freed;
        asked.least = asked.least.min(held);
        let growth = held - asked.least.min(asked.least_before);
        let growth_max = free_bytes / GROWTH_SHARE;
        self.credit = match asked.is_returning(now) {
            true => growth_max.saturating_sub(growth).div_ceil(CREDIT_SHARE),
            false => (growth_max / CREDIT_SHARE).max(CREDIT_MIN),
        };
        self.answers += 1;
        self.asked = Some(asked);
    }

    fn freed(&self) -> u64 {
        self.asked.as_ref().map_or(0, |asked| asked.freed)
    }

    /// Returns true if enough freed space is on its way to wait for it.
    fn is_returning(&self, now: Instant) -> bool {
        let asked = self.asked.as_ref();
        asked.is_some_and(|asked| asked.is_returning(now))
    }
}

impl Asked {
    fn is_returning(&self, now: Instant) -> bool {
        self.freed >= FREED_MIN && now.since(self.fell) < STALLED_AFTER
    }
}

impl Throttle {
    pub(crate) fn new() -> Self {
        Self {
            usage: Mutex::default(),
            asking: Semaphore::new(1),
            wants_seal: AtomicBool::new(false),
            wake: Signal::default(),
        }
    }

    /// Returns true, once, if the segment that is being written has to be checked.
    pub(crate) fn take_wish_to_seal(&self) -> bool {
        self.wants_seal.swap(false, Ordering::AcqRel)
    }
}

impl<B: Backend> Client<B> {
    /// Returns once these bytes may be written without taking space from others while space is coming back.
    pub(crate) async fn await_admission(&self, bytes: u64) {
        #[cfg(feature = "testing")]
        if self.options.mistake == Some(crate::cache::Mistake::WaitForNoSpace) {
            return;
        }
        let begun = self.backend.monotonic();
        // Else nobody knows whether there is space.
        while self.backend.space().is_some() {
            let now = self.backend.monotonic();
            let is_over = now.since(begun) >= WAIT_MAX;
            if is_over || lock(&self.throttle.usage).admit(now, bytes) {
                return;
            }
            // If it is not answered, the write itself will say why.
            if self.ask_usage().await.is_err() {
                return;
            }
            let now = self.backend.monotonic();
            if lock(&self.throttle.usage).admit(now, bytes) {
                return;
            }
            self.counters.throttled.add(1);
            self.backend.sleep(PAUSE).await;
        }
    }

    /// Makes a change that needs space; again as long as the pool is full and freed space comes back.
    pub(crate) async fn as_space_returns<T, F>(&self, change: impl Fn() -> F) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let until = self.backend.monotonic() + RETURN_WAIT_MAX;
        loop {
            let freed = lock(&self.throttle.usage).freed();
            match change().await {
                Err(Failure::PoolFull) if self.has_space_returned(freed, until).await => {}
                done => return done,
            }
        }
    }

    /// Waits until some space has come back of as much as was freed before. False if none does.
    async fn has_space_returned(&self, mut freed: u64, until: Instant) -> bool {
        #[cfg(feature = "testing")]
        if self.options.mistake == Some(crate::cache::Mistake::WaitForNoSpace) {
            return false;
        }
        while self.backend.space().is_some() && self.ask_usage().await.is_ok() {
            let now = self.backend.monotonic();
            {
                let usage = lock(&self.throttle.usage);
                if usage.freed() < freed {
                    return true;
                }
                if now >= until || !usage.is_returning(now) {
                    return false;
                }
                freed = usage.freed();
            }
            self.counters.throttled.add(1);
            self.backend.sleep(PAUSE).await;
        }
        false
    }

    /// Asks the leader what the filesystem holds. Those that ask at the same time ask once.
    async fn ask_usage(&self) -> Result<(), Failure> {
        let throttle = &self.throttle;
        let answers = lock(&throttle.usage).answers;
        let _turn = throttle.asking.acquire().await;
        if lock(&throttle.usage).answers > answers {
            return Ok(());
        }
        let statistics = self.statistics().await?;
        let free_bytes = self.backend.space().map_or(0, |space| space.free_bytes);
        let now = self.backend.monotonic();
        lock(&throttle.usage).note(now, &statistics, free_bytes);
        if statistics.freed_bytes >= FREED_MIN {
            throttle.wants_seal.store(true, Ordering::Release);
            throttle.wake.notify();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FREE: u64 = 800 << 20;
    const GROWTH_MAX: u64 = FREE / GROWTH_SHARE;
    const MIB: u64 = 1 << 20;

    fn at(ms: u64) -> Instant {
        Instant::START + Duration::from_millis(ms)
    }

    fn holds(named_bytes: u64, freed_bytes: u64) -> Statistics {
        Statistics {
            inodes: 2,
            named_bytes,
            freed_bytes,
        }
    }

    #[test]
    fn a_filesystem_grows_by_a_share_of_what_is_free_while_space_is_to_come_back() {
        let mut usage = Usage::default();
        assert!(!usage.admit(at(0), MIB), "it is not known yet");
        let (mut ms, mut freed, mut written) = (0, MIB, 0);
        usage.note(at(ms), &holds(MIB, freed), FREE);
        while usage.credit > 0 {
            while usage.admit(at(ms), MIB) {
                (written, freed) = (written + MIB, freed + MIB);
            }
            ms += 1;
            usage.note(at(ms), &holds(MIB, freed), FREE);
        }
        assert!(
            (GROWTH_MAX..=GROWTH_MAX + MIB).contains(&written),
            "{written}"
        );
        assert!(!usage.admit(at(ms), 1));
        // What comes back may be written again.
        usage.note(at(ms + 1), &holds(MIB, freed - 40 * MIB), FREE);
        assert!(usage.admit(at(ms + 1), MIB));
    }

    #[test]
    fn nobody_waits_where_nothing_is_to_come_back() {
        let mut usage = Usage::default();
        let mut named = 0;
        for ms in 0..1000 {
            usage.note(
                at(ms),
                &holds(named, FREED_MIN - 1),
                FREE.saturating_sub(named),
            );
            assert!(usage.admit(at(ms), MIB));
            named += MIB;
        }
    }

    #[test]
    fn removing_much_holds_up_nobody() {
        let mut usage = Usage::default();
        usage.note(at(0), &holds(100 * FREE, 0), FREE);
        usage.note(at(1), &holds(0, 100 * FREE), FREE);
        assert!(usage.admit(at(1), MIB));
    }

    #[test]
    fn what_does_not_come_back_is_not_waited_for() {
        let mut usage = Usage::default();
        usage.note(at(0), &holds(MIB, MIB), FREE);
        usage.note(at(1), &holds(MIB, MIB + GROWTH_MAX), FREE);
        assert!(!usage.admit(at(1), 1) && usage.is_returning(at(1)));
        let mut ms = 0;
        while !usage.admit(at(ms), 1) {
            ms += 100;
            usage.note(at(ms), &holds(MIB, MIB + GROWTH_MAX), FREE);
        }
        assert!(at(ms) <= Instant::START + STALLED_AFTER.max(2 * WINDOW));
        let stalled = at(0) + STALLED_AFTER + PAUSE;
        usage.note(stalled, &holds(MIB, MIB + GROWTH_MAX), FREE);
        assert!(!usage.is_returning(stalled));
        usage.note(stalled + PAUSE, &holds(MIB, MIB), FREE);
        assert!(usage.is_returning(stalled + PAUSE), "it comes back again");
    }

    #[test]
    fn an_old_answer_admits_nobody() {
        let mut usage = Usage::default();
        usage.note(at(0), &holds(0, 0), FREE);
        assert!(usage.admit(at(1), MIB));
        let late = at(0) + CREDIT_AGE_MAX;
        assert!(!usage.admit(late, MIB));
    }
}
