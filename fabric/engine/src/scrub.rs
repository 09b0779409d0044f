//! Paces the shards' scrubbers and reports what they find.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use fabric_store::api::{ScrubFinding, ScrubStep, StoreCore};
use fabric_types::block::BLOCK_BYTES;

use super::config::ScrubConfig;
use super::io_driver::IoDriver;
use super::stores::Stores;

/// Pause before a step that found the shard's scrubber still reading.
const BUSY_PAUSE: Duration = Duration::from_millis(10);

/// What somebody wants of a scrubber.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScrubOrder {
    /// Begin a pass now, from the beginning of the device.
    Start,
    /// End the pass that is under way. The next one begins in its time.
    Stop,
}

/// Where the scrubber of a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScrubPass {
    /// A pass is under way.
    Running {
        /// Blocks of 4 KiB that it has verified.
        blocks: u64,
    },
    /// The next pass begins after this.
    Resting {
        /// How long.
        rest: Duration,
    },
    /// No pass begins by itself.
    Off,
}

#[derive(Debug, Clone, Copy, Default)]
struct DeviceScrub {
    order: Option<ScrubOrder>,
    /// Blocks verified since the pass began that is under way.
    pass_blocks: Option<u64>,
    /// When the next one begins.
    next: Option<Instant>,
}

/// What is asked of all devices' scrubbers, and where they are.
#[derive(Debug, Default)]
pub struct Scrubs(Mutex<Vec<DeviceScrub>>);

impl Scrubs {
    /// Adds a device.
    pub fn add_device(&self) {
        self.devices().push(DeviceScrub::default());
    }

    fn devices(&self) -> MutexGuard<'_, Vec<DeviceScrub>> {
        self.0.lock().expect("no panic under this lock")
    }

    /// Asks the scrubber of a device for something. What was asked before and not yet done is forgotten.
    pub fn order(&self, device: usize, order: ScrubOrder) {
        self.devices()[device].order = Some(order);
    }

    /// Where the scrubber of a device is.
    pub fn pass(&self, device: usize) -> ScrubPass {
        let scrub = self.devices()[device];
        match (scrub.pass_blocks, scrub.next) {
            // What was just asked for is about to be so.
            _ if scrub.order == Some(ScrubOrder::Start) => ScrubPass::Running { blocks: 0 },
            (Some(blocks), _) => ScrubPass::Running { blocks },
            (None, Some(next)) => ScrubPass::Resting {
                rest: next.saturating_duration_since(Instant::now()),
            },
            (None, None) => ScrubPass::Off,
        }
    }

    fn take_order(&self, device: usize) -> Option<ScrubOrder> {
        self.devices()[device].order.take()
    }

    fn note(&self, device: usize, pass_blocks: Option<u64>, next: Option<Instant>) {
        let mut devices = self.devices();
        (devices[device].pass_blocks, devices[device].next) = (pass_blocks, next);
    }
}

struct Pace {
    /// Shard that is read now.
    shard: u32,
    due: Instant,
    /// Blocks verified before this step, over all shards.
    blocks: u64,
    /// The same before the pass that is under way.
    begun: Option<u64>,
    /// Somebody wants this pass, whatever the configuration says.
    is_ordered: bool,
    /// There is nothing to scrub any more.
    is_removed: bool,
}

/// All devices' scrubbing.
pub struct Scrubber {
    config: ScrubConfig,
    paces: Vec<Pace>,
}

impl Scrubber {
    /// Without devices yet.
    pub fn new(config: ScrubConfig) -> Self {
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
                due: now + Duration::from_secs(self.config.start_after_seconds),
                blocks: 0,
                begun: None,
                is_ordered: false,
                is_removed: false,
            });
            self.tell(stores, index as usize);
        }
        for (index, pace) in (0..).zip(&mut self.paces) {
            pace.is_removed = stores.device(index).is_removed();
        }
    }

    fn is_on(&self, pace: &Pace) -> bool {
        (self.config.enabled || pace.is_ordered) && !pace.is_removed
    }

    /// When something is to be done next.
    pub fn due(&self) -> Option<Instant> {
        let on = self.paces.iter().filter(|pace| self.is_on(pace));
        on.map(|pace| pace.due).min()
    }

    /// Does what was asked for, and the steps that are due.
    pub fn turn(&mut self, stores: &Stores, driver: &mut IoDriver, now: Instant) {
        for device in 0..self.paces.len() {
            if let Some(order) = stores.scrubs.take_order(device) {
                self.obey(stores, device, order, now);
            }
            if self.is_on(&self.paces[device]) && self.paces[device].due <= now {
                self.step(stores, driver, device, now);
            }
        }
    }

    fn obey(&mut self, stores: &Stores, device: usize, order: ScrubOrder, now: Instant) {
        let shards = stores.device(device as u32).shard_indexes();
        let pace = &mut self.paces[device];
        pace.shard = shards.start;
        pace.begun = None;
        pace.is_ordered = order == ScrubOrder::Start;
        pace.due = match order {
            ScrubOrder::Start => now,
            ScrubOrder::Stop => now + Duration::from_secs(self.config.pause_seconds),
        };
        for shard in shards {
            stores.lock(shard).core.scrub_restart();
        }
        self.tell(stores, device);
    }

    /// Tells where a scrubber is.
    fn tell(&self, stores: &Stores, device: usize) {
        let pace = &self.paces[device];
        let pass_blocks = pace.begun.map(|begun| pace.blocks - begun);
        let next = self.is_on(pace).then_some(pace.due);
        stores.scrubs.note(device, pass_blocks, next);
    }

    fn step(&mut self, stores: &Stores, driver: &mut IoDriver, device: usize, now: Instant) {
        let pace = &mut self.paces[device];
        pace.begun.get_or_insert(pace.blocks);
        let mut state = stores.lock(pace.shard);
        let step = state.core.scrub_step();
        driver.work(pace.shard, device as u32, &mut state);
        let mut found = Vec::new();
        while let Some(finding) = state.core.poll_finding() {
            found.push(finding);
        }
        drop(state);
        let blocks: u64 = stores
            .device(device as u32)
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
                    let shards = stores.device(device as u32).shard_indexes();
                    pace.shard += 1;
                    pass_done = pace.shard == shards.end;
                    if pass_done {
                        pace.shard = shards.start;
                        (pace.begun, pace.is_ordered) = (None, false);
                        Duration::from_secs(self.config.pause_seconds).max(BUSY_PAUSE)
                    } else {
                        BUSY_PAUSE
                    }
                }
            };
        report(stores, device, found);
        stores.damage.on_step(device, blocks, pass_done);
        self.tell(stores, device);
    }
}

/// Takes bad blocks in, whoever found them.
pub fn report(stores: &Stores, device: usize, found: Vec<ScrubFinding>) {
    for finding in found {
        let path = stores.device(device as u32).path.display();
        let (layer, chunk, block) = (finding.layer.0, finding.chunk, finding.block);
        let device_offset = finding.device_offset;
        tracing::warn!(
            device = %path, layer, chunk, block, device_offset,
            "found a bad block; reading it from other replicas"
        );
        stores.damage.on_found(device, finding);
    }
}
