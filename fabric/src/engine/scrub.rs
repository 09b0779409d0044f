//! Paces the shards' scrubbers and keeps what they find.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::config::ScrubConfig;
use super::stores::{Hands, Stores};
use crate::store::api::{ScrubFinding, ScrubStep};
use crate::store::device::BLOCK_BYTES;

/// Bad blocks remembered per device. Further ones are counted and logged: a device with so many is to be replaced.
pub const FINDINGS_MAX: usize = 1024;

/// Pause before a step that found the shard's scrubber still reading.
const BUSY_PAUSE: Duration = Duration::from_millis(10);

/// How a device's scrubbing stands.
#[derive(Debug, Clone, Default)]
pub struct ScrubStatus {
    /// A pass is under way.
    pub running: bool,
    /// Passes completed since start.
    pub passes: u64,
    /// Blocks verified since start.
    pub blocks: u64,
    /// Bad blocks found since start.
    pub bad_blocks: u64,
    /// The first [`FINDINGS_MAX`] of them.
    pub findings: Vec<ScrubFinding>,
}

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
    status: Arc<Mutex<Vec<ScrubStatus>>>,
}

impl Scrubber {
    /// Starts a pass on every device, if scrubbing is on.
    pub fn new(
        stores: &Stores,
        config: ScrubConfig,
        status: Arc<Mutex<Vec<ScrubStatus>>>,
        now: Instant,
    ) -> Self {
        let paces = stores.devices.iter().map(|device| Pace {
            shard: device.first_shard,
            due: now + Duration::from_secs(config.start_after_seconds),
            blocks: 0,
        });
        Self {
            config,
            paces: paces.collect(),
            status,
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
    pub fn turn(&mut self, stores: &Stores, hands: &mut Hands, now: Instant) {
        if !self.config.enabled {
            return;
        }
        for device in 0..self.paces.len() {
            if self.paces[device].due <= now {
                self.step(stores, hands, device, now);
            }
        }
    }

    fn step(&mut self, stores: &Stores, hands: &mut Hands, device: usize, now: Instant) {
        let pace = &mut self.paces[device];
        let mut state = stores.lock(pace.shard);
        let step = state.core.scrub_step();
        hands.work(pace.shard, device as u32, &mut state);
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
        self.note(stores, device, blocks, pass_done, found);
    }

    fn note(
        &self,
        stores: &Stores,
        device: usize,
        blocks: u64,
        pass_done: bool,
        found: Vec<ScrubFinding>,
    ) {
        let mut all = self.status.lock().expect("no panic under this lock");
        let status = &mut all[device];
        status.running = !pass_done;
        status.passes += u64::from(pass_done);
        status.blocks = blocks;
        drop(all);
        self.report(stores, device, found);
    }

    /// Takes bad blocks in, whoever found them.
    pub fn report(&self, stores: &Stores, device: usize, found: Vec<ScrubFinding>) {
        let mut all = self.status.lock().expect("no panic under this lock");
        let status = &mut all[device];
        for finding in found {
            tracing::error!(
                device = %stores.devices[device].file.path().display(),
                layer = finding.layer.0,
                chunk = finding.chunk,
                block = finding.block,
                device_offset = finding.device_offset,
                "found a bad block; restore it from a backup, and replace the device if more follow"
            );
            status.bad_blocks += 1;
            if status.findings.len() < FINDINGS_MAX && !status.findings.contains(&finding) {
                status.findings.push(finding);
            }
        }
    }
}
