//! Paces the shards' cleaners.

use std::time::{Duration, Instant};

use fabric_store::api::{CleanStep, ScrubFinding, StoreCore};

use super::config::CleanConfig;
use super::io_driver::IoDriver;
use super::stores::Stores;

/// Pause before a step that found the shard's cleaner still at work, and how long it grows to: a checkpoint
/// that waits for room below the device file may take hours.
const BUSY_PAUSE: Duration = Duration::from_micros(500);
const BUSY_PAUSE_MAX: Duration = Duration::from_millis(200);
/// Rest when the cleaner has nothing to do on all shards of a device. Recent changes wait for the next round.
const IDLE_PAUSE: Duration = Duration::from_secs(1);
/// A look at a map page counts as so many bytes moved.
const LOOK_BYTES: u64 = 32 << 10;
/// Guests are at work when they end more operations than this in an interval.
const ACTIVE_OPS: u64 = 25;
const ACTIVE_INTERVAL: Duration = Duration::from_millis(250);

struct Pace {
    /// Shard that is cleaned now, and how many before it had nothing to clean.
    shard: u32,
    idle_shards: u32,
    due: Instant,
    busy_pause: Duration,
    /// What all shards had moved and looked at before this step.
    bytes: u64,
    /// Operations at the begin of the interval.
    ops: u64,
    interval: Instant,
    active: bool,
    /// There is nothing to clean any more.
    is_removed: bool,
}

/// All devices' cleaning.
pub struct Cleaner {
    config: CleanConfig,
    paces: Vec<Pace>,
}

impl Cleaner {
    /// Without devices yet.
    pub fn new(config: CleanConfig) -> Self {
        Self {
            config,
            paces: Vec::new(),
        }
    }

    /// Begins with devices that were added, and ends with removed ones.
    pub fn update_devices(&mut self, stores: &Stores, now: Instant) {
        for index in self.paces.len() as u32..stores.device_count() {
            self.paces.push(Pace {
                shard: stores.device(index).first_shard,
                idle_shards: 0,
                due: now + Duration::from_secs(self.config.start_after_seconds),
                busy_pause: BUSY_PAUSE,
                bytes: 0,
                ops: 0,
                interval: now,
                active: true,
                is_removed: false,
            });
        }
        for (index, pace) in (0..).zip(&mut self.paces) {
            pace.is_removed = stores.device(index).is_removed();
        }
    }

    /// The stores are being closed.
    pub fn stop(&mut self) {
        self.config.enabled = false;
    }

    /// When something is to be done next.
    pub fn due(&self) -> Option<Instant> {
        let paces = self.paces.iter().filter(|pace| !pace.is_removed);
        let due = paces.map(|pace| pace.due).min();
        due.filter(|_| self.config.enabled)
    }

    /// Does the steps that are due; returns the bad blocks that were met, by device.
    pub fn turn(
        &mut self,
        stores: &Stores,
        driver: &mut IoDriver,
        now: Instant,
    ) -> Vec<(usize, Vec<ScrubFinding>)> {
        let mut found = Vec::new();
        if !self.config.enabled {
            return found;
        }
        for device in 0..self.paces.len() {
            if self.paces[device].due <= now && !self.paces[device].is_removed {
                let bad = self.step(stores, driver, device, now);
                if !bad.is_empty() {
                    found.push((device, bad));
                }
            }
        }
        found
    }

    fn step(
        &mut self,
        stores: &Stores,
        driver: &mut IoDriver,
        device: usize,
        now: Instant,
    ) -> Vec<ScrubFinding> {
        let shards = stores.device(device as u32).shard_indexes();
        let pace = &mut self.paces[device];
        let (mut bytes, mut ops) = (0, 0);
        for shard in shards.clone() {
            let metrics = stores.lock(shard).core.metrics();
            bytes += metrics.moved_bytes + metrics.cleaned_leaves * LOOK_BYTES;
            ops += metrics.ops;
        }
        let interval = now - pace.interval;
        if interval >= ACTIVE_INTERVAL {
            pace.active = ops - pace.ops > ACTIVE_OPS;
            (pace.interval, pace.ops) = (now, ops);
        }
        let rate = if pace.active {
            self.config.bytes_per_second
        } else {
            self.config.idle_bytes_per_second
        };
        // What the step before this one did is paid for now.
        let owed = std::mem::replace(&mut pace.bytes, bytes).abs_diff(bytes);
        let pause = Duration::from_micros(owed.saturating_mul(1_000_000) / rate.max(1));
        if pause > BUSY_PAUSE {
            pace.due = now + pause;
            return Vec::new();
        }
        let mut state = stores.lock(pace.shard);
        let step = state.core.clean_step();
        driver.work(pace.shard, device as u32, &mut state);
        let found = std::iter::from_fn(|| state.core.poll_finding()).collect();
        drop(state);
        pace.due = now + pace.rest_after(step, shards);
        found
    }
}

impl Pace {
    fn rest_after(&mut self, step: CleanStep, shards: std::ops::Range<u32>) -> Duration {
        match step {
            CleanStep::Working => {
                (self.idle_shards, self.busy_pause) = (0, BUSY_PAUSE);
                BUSY_PAUSE
            }
            CleanStep::Busy => {
                let pause = self.busy_pause;
                self.busy_pause = (pause * 2).min(BUSY_PAUSE_MAX);
                pause
            }
            CleanStep::Idle => {
                self.busy_pause = BUSY_PAUSE;
                self.idle_shards += 1;
                self.shard += 1;
                if self.shard == shards.end {
                    self.shard = shards.start;
                }
                if self.idle_shards < shards.len() as u32 {
                    return BUSY_PAUSE;
                }
                self.idle_shards = 0;
                IDLE_PAUSE
            }
        }
    }
}
