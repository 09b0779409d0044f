//! The maintenance thread: fences, dropped layers, checkpoints, scrubbing and cleaning, away from the data
//! threads.
//!
//! It has a ring of its own. What it asks of a shard is planned under the shard's lock as everything else;
//! device requests that a shard wants meanwhile are executed by whichever thread asks next.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError};
use std::time::{Duration, Instant};

use fabric_store::api::{Fence, StoreCore, StoreError, StoreOp, StoreResult, Submitted};
use fabric_types::Epoch;
use fabric_types::ids::LayerId;
use rustix::event::{PollFd, PollFlags, poll};

use super::clean::Cleaner;
use super::config::{CleanConfig, ScrubConfig};
use super::host_space::HostSpace;
use super::io_driver::{Event, IoDriver};
use super::scrub::{self, Scrubber};
use super::stores::{MAINTENANCE_LANE, Stores, name_of, op_id};
use super::strays::Stray;

/// Commands that may wait; the control plane blocks at more.
pub const COMMANDS_MAX: usize = 64;

/// How often an idle shard is told so, and commands are looked for at the latest.
const TICK: Duration = Duration::from_millis(200);

/// What the control plane asks. Each goes to all shards of a device (or of all) and is answered once.
pub enum Command {
    /// Persist at which epoch the device is in sync in a group, in one of its shards.
    Mark {
        /// Where.
        device: u32,
        /// The group's mark.
        mark: LayerId,
        /// Of the map that says so.
        epoch: Epoch,
        /// Outcome.
        reply: SyncSender<StoreResult>,
    },
    /// Forget a layer and free its space.
    DropLayer {
        /// Where.
        device: u32,
        /// Which.
        layer: LayerId,
        /// Outcome.
        reply: SyncSender<StoreResult>,
    },
    /// Free a chunk whose group is not here.
    DropStray {
        /// Which.
        stray: Stray,
        /// Outcome.
        reply: SyncSender<StoreResult>,
    },
    /// Write a checkpoint on all devices.
    Checkpoint {
        /// No write follows.
        clean: bool,
        /// Outcome.
        reply: SyncSender<StoreResult>,
    },
    /// End the thread; the checkpoint was asked for before.
    Stop,
}

/// An operation that every shard of a job gets.
#[derive(Clone)]
enum JobOp {
    SetFence(LayerId, Fence),
    DropLayer(LayerId),
    DropStray(Stray),
    Checkpoint { clean: bool },
}

struct Job {
    left: u32,
    result: StoreResult,
    reply: SyncSender<StoreResult>,
}

/// The thread's state.
pub struct Maintenance {
    /// Before `stores`: fields are dropped in this order, and the ring has the cores' memory registered.
    driver: IoDriver,
    stores: Arc<Stores>,
    commands: Receiver<Command>,
    /// Operations that no shard has taken yet.
    pending: VecDeque<(u32, JobOp, u64)>,
    host_space: HostSpace,
    /// By name; a job's name is never used twice.
    jobs: Vec<(u64, Job)>,
    next_job: u64,
    scrubber: Scrubber,
    cleaner: Cleaner,
    /// Shards of the devices that this thread knows.
    known_shards: u32,
    next_tick: Instant,
}

impl Maintenance {
    /// The state of a thread that is about to start.
    pub fn new(
        stores: Arc<Stores>,
        commands: Receiver<Command>,
        (scrub, clean): (ScrubConfig, CleanConfig),
    ) -> Result<Self, super::FabricError> {
        let now = Instant::now();
        let mut maintenance = Self {
            driver: IoDriver::new(&stores, MAINTENANCE_LANE)?,
            host_space: HostSpace::default(),
            scrubber: Scrubber::new(scrub),
            cleaner: Cleaner::new(clean),
            stores,
            commands,
            pending: VecDeque::new(),
            jobs: Vec::new(),
            next_job: 1,
            known_shards: 0,
            next_tick: now + TICK,
        };
        maintenance.look_after_devices(now);
        Ok(maintenance)
    }

    /// Runs until told to stop, or until nobody can tell any more.
    pub fn run(mut self) {
        loop {
            match self.commands.try_recv() {
                Ok(Command::Stop) | Err(TryRecvError::Disconnected) => break,
                Ok(command) => {
                    // It may be for a device that was added since the last turn.
                    self.update_devices(Instant::now());
                    self.accept(command);
                }
                Err(TryRecvError::Empty) => {
                    self.turn();
                    self.sleep();
                }
            }
        }
        self.driver.close(&self.stores);
    }

    fn accept(&mut self, command: Command) {
        let (shards, op, reply): (Vec<u32>, _, _) = match command {
            Command::Mark {
                device,
                mark,
                epoch,
                reply,
            } => {
                let shards = self.stores.device(device).shard_indexes();
                let fence = Fence {
                    epoch: epoch.0,
                    ..Fence::default()
                };
                let first = shards.take(1).collect();
                (first, JobOp::SetFence(mark, fence), reply)
            }
            Command::DropLayer {
                device,
                layer,
                reply,
            } => {
                let shards = self.stores.device(device).shard_indexes();
                (shards.collect(), JobOp::DropLayer(layer), reply)
            }
            Command::DropStray { stray, reply } => {
                let chunk = stray.chunk;
                let shard = self
                    .stores
                    .shard_for(stray.device, chunk.layer, chunk.index);
                (vec![shard], JobOp::DropStray(stray), reply)
            }
            Command::Checkpoint { clean, reply } => {
                if clean {
                    self.cleaner.stop();
                }
                let shards = self.stores.shard_indexes().collect();
                (shards, JobOp::Checkpoint { clean }, reply)
            }
            Command::Stop => return,
        };
        if shards.is_empty() {
            // Nobody would ever finish it. Whoever asked may have gone.
            let _ = reply.send(Ok(()));
            return;
        }
        let name = self.next_job;
        self.next_job += 1;
        let job = Job {
            left: shards.len() as u32,
            result: Ok(()),
            reply,
        };
        self.jobs.push((name, job));
        let ops = shards.into_iter().map(|shard| (shard, op.clone(), name));
        self.pending.extend(ops);
    }

    /// Begins with the background work on devices that were added, and ends that on removed ones.
    fn look_after_devices(&mut self, now: Instant) {
        self.scrubber.update_devices(&self.stores, now);
        self.cleaner.update_devices(&self.stores, now);
        self.known_shards = self.stores.shard_count();
    }

    /// Takes up which devices were added or closed, and closes those that were removed.
    fn update_devices(&mut self, now: Instant) {
        if self.driver.devices_changed(&self.stores) {
            if let Err(error) = self.driver.update_devices(&self.stores) {
                tracing::error!(%error, "register a device");
            }
            self.look_after_devices(now);
        }
        for index in 0..self.stores.device_count() {
            let device = self.stores.device(index);
            if device.is_removed() && device.is_open() && self.stores.close_removed(index) {
                tracing::info!(device = %device.path.display(), "device closed");
            }
        }
    }

    /// One round: device outcomes, new operations, scrubbing and cleaning.
    fn turn(&mut self) {
        let now = Instant::now();
        self.update_devices(now);
        self.driver.collect(&self.stores);
        let mut at = 0;
        while let Some(event) = self.driver.next_event(&mut at) {
            if let Event::Shard(shard, range) = event {
                let mut state = self.stores.lock(shard);
                self.driver.tell(&mut state, range);
                let device = self.stores.device_of(shard);
                self.driver.work(shard, device, &mut state);
            }
        }
        // A thread that went away, or a full table, may have left a shard with work to do.
        let woken = self.driver.read_inbox(&self.stores);
        self.submit_pending();
        let tick = now >= self.next_tick;
        if tick {
            self.next_tick = now + TICK;
            self.host_space.look(&self.stores);
        }
        for shard in 0..self.known_shards {
            self.look_after(shard, tick, woken);
        }
        self.scrubber.turn(&self.stores, &mut self.driver, now);
        for (device, found) in self.cleaner.turn(&self.stores, &mut self.driver, now) {
            scrub::report(&self.stores, device, found);
        }
        self.driver.send(&self.stores);
        self.finish_jobs();
    }

    fn look_after(&mut self, shard: u32, tick: bool, woken: bool) {
        if !(tick || woken || self.driver.is_starved(shard)) {
            return;
        }
        let mut state = self.stores.lock(shard);
        if tick && state.core.in_flight() == 0 {
            state.core.on_idle();
        }
        let device = self.stores.device_of(shard);
        self.driver.work(shard, device, &mut state);
    }

    fn submit_pending(&mut self) {
        for _ in 0..self.pending.len() {
            let Some((shard, op, name)) = self.pending.pop_front() else {
                return;
            };
            let mut state = self.stores.lock(shard);
            if state.is_closed {
                // What it had to keep, or to give back, is nobody's any more.
                let id = op_id(MAINTENANCE_LANE, name);
                self.driver.mine.push_back((id, Ok(())));
                continue;
            }
            let store_op = match &op {
                JobOp::SetFence(layer, fence) => StoreOp::SetFence {
                    layer: *layer,
                    fence: *fence,
                },
                JobOp::DropLayer(layer) => StoreOp::DropLayer { layer: *layer },
                JobOp::DropStray(stray) if stray.is_at_home() => {
                    let id = op_id(MAINTENANCE_LANE, name);
                    self.driver.mine.push_back((id, Ok(())));
                    continue;
                }
                JobOp::DropStray(stray) => StoreOp::DropChunk {
                    layer: stray.chunk.layer,
                    chunk: stray.chunk.index,
                },
                JobOp::Checkpoint { clean } => StoreOp::Checkpoint { clean: *clean },
            };
            // SAFETY: none of these has buffers.
            let submitted = unsafe { state.core.submit(op_id(MAINTENANCE_LANE, name), store_op) };
            if submitted == Submitted::Busy {
                state.waiting |= 1 << MAINTENANCE_LANE;
                self.pending.push_back((shard, op, name));
            }
            let device = self.stores.device_of(shard);
            self.driver.work(shard, device, &mut state);
        }
    }

    fn finish_jobs(&mut self) {
        while let Some((op, result)) = self.driver.mine.pop_front() {
            let Some(at) = self.jobs.iter().position(|(name, _)| *name == name_of(op)) else {
                continue;
            };
            let job = &mut self.jobs[at].1;
            job.left -= 1;
            // A shard that knows a newer fence already is as good as one that has this one.
            job.result = match (job.result, result) {
                (Ok(()), Err(error)) if !matches!(error, StoreError::Stale { .. }) => Err(error),
                (earlier, _) => earlier,
            };
            if job.left == 0 {
                let (_, job) = self.jobs.swap_remove(at);
                // The work is done also if the caller gave up.
                let _ = job.reply.try_send(job.result);
            }
        }
    }

    fn sleep(&mut self) {
        let mut until = self.next_tick;
        for due in [self.scrubber.due(), self.cleaner.due()] {
            until = due.map_or(until, |due| until.min(due));
        }
        let left = until.saturating_duration_since(Instant::now());
        let timeout = rustix::time::Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        let fd = self.driver.wait_fd();
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        // Interrupted or not, the next turn looks at everything.
        let _ = poll(&mut fds, Some(&timeout));
    }
}
