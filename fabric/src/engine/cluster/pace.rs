//! How fast blocks are brought to this node: slower while guests are at work.

use std::time::{Duration, Instant};

use crate::engine::config::ResyncConfig;
use crate::engine::stores::Stores;

/// How often it is looked whether guests are at work.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Operations of others between two looks that count as work.
const ACTIVE_OPS: u64 = 20;
/// What may be brought at once after a rest.
const BURST: Duration = Duration::from_millis(20);

/// A bucket of bytes that fills as time passes.
pub struct Pace {
    config: ResyncConfig,
    active: bool,
    looked: Instant,
    /// Operations of the stores at that time, and how many of them since were the rounds' own.
    ops: u64,
    own: u64,
    filled: Instant,
    bytes: i64,
}

impl Pace {
    /// A full bucket.
    pub fn new(config: ResyncConfig, now: Instant) -> Self {
        Self {
            config,
            active: false,
            looked: now,
            ops: 0,
            own: 0,
            filled: now,
            bytes: 0,
        }
    }

    fn rate(&self) -> u64 {
        match self.active {
            true => self.config.bytes_per_second,
            false => self.config.idle_bytes_per_second,
        }
    }

    /// Time passes.
    pub fn turn(&mut self, stores: &Stores, now: Instant) {
        if now - self.looked >= LOOK_EVERY {
            let shards = 0..stores.shards.len() as u32;
            let ops: u64 = shards.map(|s| stores.lock(s).core.metrics().ops).sum();
            self.active = ops.saturating_sub(self.ops).saturating_sub(self.own) > ACTIVE_OPS;
            (self.ops, self.own, self.looked) = (ops, 0, now);
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

    /// A command of a round was begun, which moves so many bytes; `local` if this node's store executes it.
    pub fn spend(&mut self, bytes: u32, local: bool) {
        self.bytes -= i64::from(bytes);
        self.own += u64::from(local);
    }
}
