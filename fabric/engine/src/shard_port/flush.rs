//! Flushes: one flush of the device serves all its shards, see [`StoreCore::flush_mark`].

use std::sync::Arc;

use fabric_store::ShardCore;
use fabric_store::api::{FlushMark, StoreCore, StoreError, StoreOp, StoreResult, Submitted};

use super::{EMPTY, NONE, Queue, ShardPort};
use crate::stores::{HELD_MAX, op_id};

/// Bits of a step's name below its number: they say which device's it is. No request's key has such an index.
const INDEX_BITS: u32 = 32;
/// Numbers of steps are counted modulo this, which fits in a name beside the lane.
const NUMBERS: u64 = 1 << 24;

/// The outcome on a device that is closed: whoever asks goes by an older map than this node.
const NOT_HERE: StoreError = StoreError::Fenced { generation: 0 };

/// A device's flushes: one at a time runs, those that come meanwhile share the next.
pub(super) struct DeviceFlush {
    pub(super) waiting: Queue,
    running: Queue,
    step: Step,
    /// What is durable when the running flush is done, by shard of the device; `None` if all of it was
    /// before.
    marks: Vec<Option<FlushMark>>,
    /// Shards of the device that have not taken the step's operation yet, and answers that are due.
    unasked: u128,
    due: u32,
    /// Of the running step, so that no answer to an earlier one is taken for this one's.
    number: u64,
}

/// Where the running flush is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Idle,
    /// Shards bring their logs in order.
    Order,
    /// The device request could not be made yet.
    Start,
    /// The device flushes.
    Device,
    /// Shards write down that it did.
    Record,
}

impl DeviceFlush {
    pub(super) fn new(shards: u32) -> Self {
        Self {
            waiting: EMPTY,
            running: EMPTY,
            step: Step::Idle,
            marks: vec![None; shards as usize],
            unasked: 0,
            due: 0,
            number: 0,
        }
    }

    /// Of the running step's operations, among those of this thread.
    fn name(&self, device: usize) -> u64 {
        self.number << INDEX_BITS | (u64::from(HELD_MAX) + device as u64)
    }

    fn op(&self) -> StoreOp<'static> {
        match self.step {
            Step::Order => StoreOp::OrderLog,
            _ => StoreOp::RecordFlush,
        }
    }
}

impl ShardPort {
    /// Takes every device's flush as far as it goes now.
    #[inline]
    pub(super) fn step_flushes(&mut self) {
        for device in 0..self.flushes.len() {
            let flush = &mut self.flushes[device];
            if flush.step == Step::Idle && flush.waiting.head != NONE {
                std::mem::swap(&mut flush.running, &mut flush.waiting);
                self.ask_shards(device, Step::Order, |core| core.is_log_in_order());
            }
            if self.flushes[device].step != Step::Idle {
                self.step_flush(device);
            }
        }
    }

    /// Begins a step that concerns the shards that are not `done` with it.
    fn ask_shards(&mut self, device: usize, step: Step, done: fn(&ShardCore) -> bool) {
        let mut unasked = 0;
        for (nth, shard) in self
            .stores
            .device(device as u32)
            .shard_indexes()
            .enumerate()
        {
            let state = self.stores.lock(shard);
            unasked |= u128::from(!done(&state.core)) << nth;
        }
        let flush = &mut self.flushes[device];
        flush.step = step;
        flush.unasked = unasked;
        flush.due = unasked.count_ones();
        flush.number = (flush.number + 1) % NUMBERS;
    }

    fn step_flush(&mut self, device: usize) {
        self.submit_steps(device);
        let flush = &self.flushes[device];
        match flush.step {
            Step::Order if flush.due == 0 => self.start_flush(device),
            Step::Start => self.start_flush(device),
            Step::Record if flush.due == 0 => self.end_flush(device, Ok(())),
            _ => {}
        }
    }

    /// Hands the step's operation to the shards that have room for it.
    fn submit_steps(&mut self, device: usize) {
        let flush = &self.flushes[device];
        let (op, mut left) = (flush.op(), flush.unasked);
        let id = op_id(self.driver.lane, flush.name(device));
        while left != 0 {
            let nth = left.trailing_zeros();
            left &= left - 1;
            let shard = self.stores.device(device as u32).first_shard + nth;
            let stores = Arc::clone(&self.stores);
            let mut state = stores.lock(shard);
            if state.is_closed {
                drop(state);
                return self.end_flush(device, Err(NOT_HERE));
            }
            // SAFETY: the operation has no buffers.
            if unsafe { state.core.submit(id, op) } == Submitted::Busy {
                // Whoever completes an operation of this shard next wakes this thread.
                state.waiting |= 1 << self.driver.lane;
            } else {
                self.flushes[device].unasked &= !(1 << nth);
            }
            self.work(shard, &mut state);
        }
    }

    /// A shard is done with a step of a flush.
    #[cold]
    pub(super) fn on_flush_step(&mut self, name: u64, result: StoreResult) {
        assert!(result.is_ok(), "steps of a flush do not fail");
        let device = (name & u64::from(u32::MAX)) as usize - HELD_MAX as usize;
        let flush = &mut self.flushes[device];
        if flush.due == 0 || flush.name(device) != name {
            return;
        }
        flush.due -= 1;
        if flush.due == 0 {
            self.step_flush(device);
            self.step_flushes();
            self.driver.send(&Arc::clone(&self.stores));
        }
    }

    fn start_flush(&mut self, device: usize) {
        let mut needed = Ok(false);
        for (nth, shard) in self
            .stores
            .device(device as u32)
            .shard_indexes()
            .enumerate()
        {
            let state = self.stores.lock(shard);
            let mark = match state.is_closed {
                true => Err(NOT_HERE),
                false => state.core.flush_mark(),
            };
            drop(state);
            self.flushes[device].marks[nth] = mark.ok().flatten();
            needed = needed.and_then(|needed| mark.map(|mark| needed || mark.is_some()));
        }
        match needed {
            // Done when there is room in the ring.
            Ok(true) if !self.driver.start_flush(device as u32) => {
                self.flushes[device].step = Step::Start;
            }
            Ok(true) => self.flushes[device].step = Step::Device,
            // All that was completed is durable already.
            Ok(false) => self.record_flush(device),
            // A flush failed, and no other can make up for it; or the device is closed.
            Err(error) => self.end_flush(device, Err(error)),
        }
    }

    fn record_flush(&mut self, device: usize) {
        self.ask_shards(device, Step::Record, |core| core.is_flush_recorded());
        self.step_flush(device);
    }

    /// A flush is over: answers those that waited for it.
    fn end_flush(&mut self, device: usize, result: StoreResult) {
        let flush = &mut self.flushes[device];
        flush.step = Step::Idle;
        let mut running = std::mem::replace(&mut flush.running, EMPTY);
        while running.head != NONE {
            let op = self.op_of(running.head);
            running.pop(&mut self.slots);
            self.driver.mine.push_back((op, result));
        }
    }

    /// The device has answered. The shards know of a failure already, see [`IoDriver::collect`].
    ///
    /// [`IoDriver::collect`]: crate::io_driver::IoDriver::collect
    pub(super) fn flushed(&mut self, device: usize, result: Result<(), i32>) {
        let mut outcome = result.map_err(StoreError::Device);
        if result.is_ok() {
            let stores = Arc::clone(&self.stores);
            for (nth, shard) in stores.device(device as u32).shard_indexes().enumerate() {
                let Some(mark) = self.flushes[device].marks[nth] else {
                    continue;
                };
                let mut state = stores.lock(shard);
                outcome = outcome.and(state.core.flushed(mark));
            }
        }
        match outcome {
            Ok(()) => self.record_flush(device),
            Err(_) => self.end_flush(device, outcome),
        }
    }
}
