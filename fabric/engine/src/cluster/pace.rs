//! How fast blocks are brought to this node: slower while guests are at work.

use std::time::{Duration, Instant};

use crate::config::ResyncConfig;

/// How often it is looked whether guests are at work.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Operations of the stores between two looks that count as work, beyond those that other nodes have asked
/// for and those of the rounds themselves: flushes and the like are among them.
const ACTIVE_OPS: u64 = 20;
/// Guests that were at work are expected back for so long. Without that a guest that reads for a moment, from
/// a replica on another node, or one that a hasty resync has slowed down, would look idle.
const EXPECTED_FOR: Duration = Duration::from_secs(3);
/// What may be brought at once after a rest. Short, because guests' requests wait behind it.
const BURST: Duration = Duration::from_millis(2);
/// Comparing a map page counts as so many bytes: both sides may have to read it from their devices.
pub const PAGE_BYTES: u32 = 16 << 10;
/// How long to wait at least until more may be begun.
const REST_MIN: Duration = Duration::from_millis(1);

/// What the node has done so far.
#[derive(Debug, Clone, Copy, Default)]
pub struct Work {
    /// Requests of other nodes executed here.
    pub served: u64,
    /// Operations of this node's stores, whoever asked for them.
    pub ops: u64,
}

/// A bucket of bytes that fills as time passes.
pub struct Pace {
    config: ResyncConfig,
    /// When guests were seen at work last.
    worked: Instant,
    looked: Instant,
    /// At that time.
    seen: Work,
    /// Operations of the stores since that were the rounds' own.
    own: u64,
    now: Instant,
    filled: Instant,
    bytes: i64,
}

impl Pace {
    /// A full bucket. Whether guests are at work is not known yet, so they are taken to be.
    pub fn new(config: ResyncConfig, seen: Work, now: Instant) -> Self {
        Self {
            config,
            worked: now,
            looked: now,
            seen,
            own: 0,
            now,
            filled: now,
            bytes: 0,
        }
    }

    fn rate(&self) -> u64 {
        match self.now - self.worked < EXPECTED_FOR {
            true => self.config.bytes_per_second,
            false => self.config.idle_bytes_per_second,
        }
    }

    /// Rounds begin after a rest in which nobody looked.
    pub fn wake(&mut self, work: Work, now: Instant) {
        *self = Self::new(self.config, work, now);
    }

    /// Time passes. `work` is asked for now and then.
    pub fn turn(&mut self, work: impl FnOnce() -> Work, now: Instant) {
        self.now = now;
        if now - self.looked >= LOOK_EVERY {
            let work = work();
            let served = work.served.saturating_sub(self.seen.served);
            let ops = work.ops.saturating_sub(self.seen.ops);
            let others = ops.saturating_sub(self.own).saturating_sub(served);
            if served > 0 || others > ACTIVE_OPS {
                self.worked = now;
            }
            (self.seen, self.own, self.looked) = (work, 0, now);
        }
        let micros = (now - self.filled).as_micros() as u64;
        let filled = self.rate().saturating_mul(micros) / 1_000_000;
        if filled > 0 {
            let most = self.rate().saturating_mul(BURST.as_micros() as u64) / 1_000_000;
            self.bytes = self.bytes.saturating_add_unsigned(filled).min(most as i64);
            self.filled = now;
        }
    }

    /// Whether more may be begun now.
    pub fn allows(&self) -> bool {
        self.bytes >= 0
    }

    /// How long until more may be begun, if not now.
    pub fn rest(&self) -> Option<Duration> {
        let missing = u64::try_from(self.bytes.saturating_neg()).ok()?;
        if self.allows() {
            return None;
        }
        let micros = missing.saturating_mul(1_000_000) / self.rate().max(1);
        Some(Duration::from_micros(micros).max(REST_MIN))
    }

    /// A command of a round was begun, which moves so many bytes; `local` if this node's store executes it.
    pub fn spend(&mut self, bytes: u32, local: bool) {
        self.bytes -= i64::from(bytes);
        self.own += u64::from(local);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const STEP: Duration = Duration::from_millis(1);

    struct World {
        pace: Pace,
        work: Work,
        now: Instant,
    }

    impl World {
        fn new() -> Self {
            let config = ResyncConfig {
                bytes_per_second: 32 * MIB,
                idle_bytes_per_second: 1024 * MIB,
            };
            let now = Instant::now();
            Self {
                pace: Pace::new(config, Work::default(), now),
                work: Work::default(),
                now,
            }
        }

        /// MiB brought in each second, by rounds that always want more, as 4 KiB blocks that are stored one
        /// by one.
        fn run(&mut self, time: Duration, mut act: impl FnMut(&mut Work, u32)) -> u64 {
            let (mut bytes, steps) = (0, (time.as_millis() / STEP.as_millis()) as u32);
            for step in 0..steps {
                self.now += STEP;
                act(&mut self.work, step);
                self.pace.turn(|| self.work, self.now);
                while self.pace.allows() {
                    self.pace.spend(4096, false);
                    self.pace.spend(0, true);
                    self.work.ops += 1;
                    bytes += 4096;
                }
            }
            bytes * 1000 / u64::from(steps) / MIB
        }
    }

    fn idle(_: &mut Work, _: u32) {}

    #[test]
    fn a_guest_that_writes_now_and_then_is_at_work() {
        let mut world = World::new();
        let rate = world.run(Duration::from_secs(20), |work, step| {
            // Every half second, as when it waits that long for each answer.
            if step % 500 == 0 {
                (work.served, work.ops) = (work.served + 1, work.ops + 1);
            }
        });
        assert!((30..=34).contains(&rate), "{rate} MiB/s");
    }

    #[test]
    fn a_guest_of_this_node_is_at_work_too() {
        let mut world = World::new();
        let rate = world.run(Duration::from_secs(20), |work, _| work.ops += 1);
        assert!((30..=34).contains(&rate), "{rate} MiB/s");
    }

    #[test]
    fn pace_rises_once_guests_are_idle_and_drops_at_once() {
        let mut world = World::new();
        assert!(world.run(EXPECTED_FOR, idle) < 40);
        let rate = world.run(Duration::from_secs(5), idle);
        assert!((800..=1100).contains(&rate), "{rate} MiB/s");
        world.run(LOOK_EVERY, |work, _| work.served += 1);
        let rate = world.run(Duration::from_secs(2), idle);
        assert!((30..=34).contains(&rate), "{rate} MiB/s");
    }

    #[test]
    fn what_is_begun_at_once_is_little() {
        let mut world = World::new();
        world.now += Duration::from_secs(1);
        let burst = world.run(STEP, idle) * MIB / 1000;
        assert!(burst <= 32 * MIB / 500 + 4096, "{burst} bytes");
    }

    #[test]
    fn it_tells_how_long_to_wait() {
        let mut world = World::new();
        world.run(Duration::from_millis(10), idle);
        assert!(!world.pace.allows());
        world.pace.spend(1 << 20, false);
        let rest = world.pace.rest().unwrap();
        let second = Duration::from_secs(1) / 32;
        assert!(rest >= second && rest < second * 2, "{rest:?}");
        world.pace.turn(Work::default, world.now + rest + STEP);
        assert!(world.pace.allows());
        assert_eq!(world.pace.rest(), None);
    }
}
