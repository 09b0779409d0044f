//! Paces the shards' scrubbers and reports what they find.

use std::time::{Duration, Instant};

use fabric_store::api::{ScrubFinding, ScrubStep, StoreCore};
use fabric_types::block::BLOCK_BYTES;

use super::config::ScrubConfig;
use super::stores::{IoDriver, Stores};

/// Pause before a step that found the shard's scrubber still reading.
const BUSY_PAUSE: Duration = Duration::from_millis(10);

struct Pace {
    /// Shard that is read now.
    shard: u32,
    due: Instant,
    /// Blocks verified before this step, over all shards.
    blocks: u64,
}

/// All devices' scrubbing.
pub struct Scrubber {
    config: ScrubConfig,
    paces: Vec<Pace>,
}

impl Scrubber {
    /// Starts a pass on every device, if scrubbing is on.
    pub fn new(stores: &Stores, config: ScrubConfig, now: Instant) -> Self {
        let paces = stores.devices.iter().map(|device| Pace {
            shard: device.first_shard,
            due: now + Duration::from_secs(config.start_after_seconds),
            blocks: 0,
        });
        Self {
            config,
            paces: paces.collect(),
        }
    }

    /// When something is to be done next.
    pub fn due(&self) -> Option<Instant> {
        if !self.config.enabled {
            return None;
        }
        self.paces.iter().map(|p| p.due).min()
    }

    /// Does the steps that are due.
    pub fn turn(&mut self, stores: &Stores, driver: &mut IoDriver, now: Instant) {
        if !self.config.enabled {
            return;
        }
        for device in 0..self.paces.len() {
            if self.paces[device].due <= now {
                self.step(stores, driver, device, now);
            }
        }
    }

    fn step(&mut self, stores: &Stores, driver: &mut IoDriver, device: usize, now: Instant) {
        let pace = &mut self.paces[device];
        let mut state = stores.lock(pace.shard);
        let step = state.core.scrub_step();
        driver.work(pace.shard, device as u32, &mut state);
        let mut found = Vec::new();
        while let Some(finding) = state.core.poll_finding() {
            found.push(finding);
        }
        drop(state);
        let blocks: u64 = stores.devices[device]
            .shard_indexes()
            .map(|shard| stores.lock(shard).core.metrics().scrubbed_blocks)
            .sum();
        let bytes = (blocks - pace.blocks) * BLOCK_BYTES as u64;
        pace.blocks = blocks;
        let pause = Duration::from_millis(bytes * 1000 / self.config.bytes_per_second.max(1));
        let mut pass_done = false;
        pace.due = now
            + match step {
                ScrubStep::Reading => pause.max(BUSY_PAUSE),
                ScrubStep::Busy => BUSY_PAUSE,
                ScrubStep::PassDone => {
                    let shards = stores.devices[device].shard_indexes();
                    pace.shard += 1;
                    pass_done = pace.shard == shards.end;
                    if pass_done {
                        pace.shard = shards.start;
                        Duration::from_secs(self.config.pause_seconds).max(BUSY_PAUSE)
                    } else {
                        BUSY_PAUSE
                    }
                }
            };
        report(stores, device, found);
        stores.damage.on_step(device, blocks, pass_done);
    }
}

/// Takes bad blocks in, whoever found them.
pub fn report(stores: &Stores, device: usize, found: Vec<ScrubFinding>) {
    for finding in found {
        let path = stores.devices[device].file.path().display();
        let (layer, chunk, block) = (finding.layer.0, finding.chunk, finding.block);
        let device_offset = finding.device_offset;
        if stores.damage.has_peers() {
            tracing::warn!(
                device = %path, layer, chunk, block, device_offset,
                "found a bad block; other replicas are asked for it"
            );
        } else {
            tracing::error!(
                device = %path, layer, chunk, block, device_offset,
                "found a bad block; restore it from a backup, and replace the device if more follow"
            );
        }
        stores.damage.on_found(device, finding);
    }
}
