//! Flushes of all shards with one flush of the device, as the engine makes them.

use fabric_store::api::{FlushMark, OpId, StoreCore, StoreError, StoreOp, StoreResult};
use fabric_store::device::IoId;

use super::{Expect, Live, RIG_SHARD, Rig};
use crate::factory::Core;
use crate::model::Covered;
use crate::sim_disk::IoKey;

/// A flush that the rig makes for all shards, see [`StoreCore::flush_mark`].
pub(super) struct RigFlush {
    covered: Covered,
    step: FlushStep,
}

enum FlushStep {
    Order(Vec<OpId>),
    Device(IoId, Vec<Option<FlushMark>>),
    Record(Vec<OpId>),
}

impl Rig {
    /// Flushes the device once for all shards, unless every one says that there is nothing to flush.
    pub fn flush_by_marks(&mut self) {
        let covered = self.now.model.covered(|_| true);
        let step = FlushStep::Order(self.ask_shards(StoreOp::OrderLog, StoreCore::is_log_in_order));
        self.rig_flushes.push(RigFlush { covered, step });
        self.step_flushes();
    }

    /// Submits the operation to the shards that need it.
    fn ask_shards(&mut self, op: StoreOp<'static>, done: fn(&Core) -> bool) -> Vec<OpId> {
        let needy: Vec<usize> = (0..self.cores.len())
            .filter(|&shard| !done(&self.cores[shard]))
            .collect();
        let ask = |shard| self.submit(shard, op, Expect::FlushStep, None);
        needy.into_iter().map(ask).collect()
    }

    /// Takes the flushes as far as they go now.
    pub(super) fn step_flushes(&mut self) {
        let mut again = false;
        for mut flush in std::mem::take(&mut self.rig_flushes) {
            let step = flush.step;
            let (FlushStep::Order(ops) | FlushStep::Record(ops)) = &step else {
                flush.step = step;
                self.rig_flushes.push(flush);
                continue;
            };
            if ops.iter().any(|op| self.live.contains_key(op)) {
                flush.step = step;
                self.rig_flushes.push(flush);
                continue;
            }
            match step {
                FlushStep::Order(_) => match self.flush_device() {
                    Ok(step) => {
                        flush.step = step;
                        self.rig_flushes.push(flush);
                        // It may have nothing to record.
                        again = true;
                    }
                    Err(error) => self.mark_flushed(Err(error)),
                },
                _ => {
                    self.now.model.flushed(&flush.covered);
                    self.mark_flushed(Ok(()));
                }
            }
        }
        if again {
            self.step_flushes();
        }
    }

    fn flush_device(&mut self) -> Result<FlushStep, StoreError> {
        let marks: Result<Vec<_>, _> = self.cores.iter().map(StoreCore::flush_mark).collect();
        let marks = marks?;
        if marks.iter().all(Option::is_none) {
            let ops = self.ask_shards(StoreOp::RecordFlush, StoreCore::is_flush_recorded);
            return Ok(FlushStep::Record(ops));
        }
        let id = IoId(self.next_op);
        self.next_op += 1;
        self.now.disk.submit_flush(IoKey {
            shard: RIG_SHARD,
            id,
        });
        Ok(FlushStep::Device(id, marks))
    }

    /// The device has flushed, or failed to.
    pub(super) fn device_flushed(&mut self, id: IoId, result: Result<(), i32>) {
        let is_it = |f: &RigFlush| matches!(f.step, FlushStep::Device(i, _) if i == id);
        let at = self.rig_flushes.iter().position(is_it);
        let mut flush = self.rig_flushes.remove(at.expect("a flush of the rig"));
        let FlushStep::Device(_, marks) = flush.step else {
            unreachable!("it was found by this")
        };
        let mut outcome = result.map_err(StoreError::Device);
        for (core, mark) in self.cores.iter_mut().zip(marks) {
            match (result, mark) {
                (Ok(()), Some(mark)) => outcome = outcome.and(core.flushed(mark)),
                (Ok(()), None) => {}
                (Err(errno), _) => core.flush_failed(errno),
            }
        }
        if outcome.is_err() {
            return self.mark_flushed(outcome);
        }
        let ops = self.ask_shards(StoreOp::RecordFlush, StoreCore::is_flush_recorded);
        flush.step = FlushStep::Record(ops);
        self.rig_flushes.push(flush);
        self.step_flushes();
    }

    /// Whether a flush is under way.
    pub fn is_flushing(&self) -> bool {
        let flush = |live: &Live| matches!(live.expect, Expect::Flush { .. });
        self.live.values().any(flush) || !self.rig_flushes.is_empty()
    }

    fn mark_flushed(&mut self, outcome: StoreResult) {
        if let Err(error) = &outcome {
            assert!((self.tolerate)(error), "unexpected: {error}");
        }
        self.last_flush = Some(outcome);
    }
}
