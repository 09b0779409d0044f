//! Flushes: the log is brought in order, the device is flushed, and the log says so before anybody hears it.
//!
//! Opening takes what the log says to be durable as it is, so that damage to it is found by whoever reads it;
//! a block beyond that whose checksum does not fit is taken for a write that the crash cut short, and what
//! was there before shows. So a flush is answered only when the log says how far it reaches (its
//! *watermark*). That is one number: a flush waits until no older batch is under way beside those that it
//! covers.
//!
//! The record reaches a volatile cache only, as it is not flushed itself: it survives the process, and the
//! machine where the device keeps what it accepted. If power is lost before the next flush and a bit flips in
//! what the last one wrote, nothing tells that from a write that was cut short.

use super::super::api::{FlushMark, StoreError};
use super::ShardCore;
use super::fill::Filling;
use super::operations::Operations;
use super::requests::IoKind;
use super::reserve::SpaceDemand;
use super::resources::Resources;

/// Operations that wait for the log or a flush: at most one device flush at a time serves all that wait.
#[derive(Debug, Default)]
pub(super) struct Flushes {
    waiting: Vec<u32>,
    /// Newest batch that was done when somebody began to wait: older ones must be done before the flush
    /// begins.
    after: u64,
    running: Vec<u32>,
    mark: FlushMark,
    busy: bool,
    /// Operations that wait for all batches up to one to be done.
    ordering: Vec<(u32, u64)>,
    /// Operations that wait for the log to say that it is durable up to a batch.
    recording: Vec<(u32, u64)>,
}

impl Flushes {
    /// The operation is done once whatever was reported until now, `newest_done` included, is durable.
    fn wait(&mut self, op: u32, newest_done: u64) {
        self.waiting.push(op);
        self.after = newest_done;
    }

    /// The operation is done once all batches up to `lsn` are.
    pub(super) fn order(&mut self, op: u32, lsn: u64) {
        self.ordering.push((op, lsn));
    }

    /// The operation is done once the log says that it is durable up to `lsn`.
    pub(super) fn record(&mut self, op: u32, lsn: u64) {
        self.recording.push((op, lsn));
    }

    /// Flushes the device if somebody waits for it.
    pub(super) fn start(&mut self, res: &mut Resources) {
        if self.waiting.is_empty() || self.busy || !res.is_in_order(self.after) {
            return;
        }
        let Some(io) = res.device.take() else {
            return;
        };
        self.busy = true;
        self.mark = res.mark();
        std::mem::swap(&mut self.waiting, &mut self.running);
        res.flush(io, IoKind::Flush);
    }

    /// The device flush has ended.
    pub(super) fn on_flush(
        &mut self,
        result: Result<(), i32>,
        res: &mut Resources,
        ops: &mut Operations,
    ) {
        self.busy = false;
        let mut outcome = result.map_err(StoreError::ReadOnly);
        match result {
            Ok(()) => outcome = res.note_flushed(self.mark),
            Err(errno) => res.faults.fail_flush(errno),
        }
        let upto = res.log.to_record();
        for op in self.running.drain(..) {
            match outcome {
                Ok(()) => self.recording.push((op, upto)),
                Err(_) => ops.finish(op, outcome, res),
            }
        }
    }

    /// Ends the operations that waited for older batches.
    pub(super) fn end_ordering(&mut self, res: &mut Resources, ops: &mut Operations) {
        let mut at = 0;
        while let Some(&(op, lsn)) = self.ordering.get(at) {
            if res.is_in_order(lsn) {
                self.ordering.swap_remove(at);
                ops.finish(op, Ok(()), res);
            } else {
                at += 1;
            }
        }
    }

    /// Ends the operations whose record is there; whether somebody waits for one that no batch under way
    /// carries.
    pub(super) fn end_recording(&mut self, res: &mut Resources, ops: &mut Operations) -> bool {
        // What is durable stays so, though a shard that writes no more cannot say it.
        let cannot = res.faults.has_failed() || res.device.is_under_space_pressure();
        let mut wanted = 0;
        let mut at = 0;
        while let Some(&(op, upto)) = self.recording.get(at) {
            if cannot || res.log.is_recorded(upto) {
                self.recording.swap_remove(at);
                ops.finish(op, Ok(()), res);
            } else {
                wanted = wanted.max(upto);
                at += 1;
            }
        }
        wanted > 0 && res.log.watermark_under_way() < Some(wanted)
    }

    /// Writing has stopped: whoever waits for a flush that has not begun hears it.
    pub(super) fn refuse(&mut self, error: StoreError, res: &mut Resources, ops: &mut Operations) {
        for op in std::mem::take(&mut self.waiting) {
            ops.finish(op, Err(error), res);
        }
    }
}

impl ShardCore {
    /// The operation is done once whatever was reported until now is durable.
    pub(super) fn wait_for_flush(&mut self, op: u32) {
        self.flushes.wait(op, self.res.log.newest_done());
    }

    /// Says how far the log is durable when nobody asked, so that recovery need not prove it.
    pub(super) fn write_idle_watermark(&mut self) {
        let log = &self.res.log;
        let is_quiet =
            log.batches.taken() == 0 && self.waiting.ready().is_empty() && !self.ckpt.is_running();
        if is_quiet
            && !log.is_recorded(log.to_record())
            && !self.res.device.is_under_space_pressure()
            && !self.res.faults.has_failed()
        {
            self.write_watermark();
        }
    }

    /// An empty batch that only says how far the log is known to be durable. If it lacks buffers, they come
    /// back; if it lacks room in the log, the checkpoint that makes some says the same.
    pub(super) fn write_watermark(&mut self) {
        let res = &mut self.res;
        if !res.log.is_open() || res.device.free() == 0 {
            return;
        }
        if res.alloc.free_units() < res.checkpoint_need() + res.reserve_units() / 4 {
            self.ckpt.want();
            return;
        }
        let Some((buffer, _)) = res.arena.take_up_to(1) else {
            return;
        };
        let Some(header) = res.log.current.take(&mut res.alloc, 1) else {
            res.arena.give_back(buffer, 1);
            self.ckpt.want();
            return;
        };
        let batch = res.log.open_batch(header.start, buffer);
        let nothing = SpaceDemand {
            blocks: 0,
            parts: 0,
        };
        let filling = Filling::new(batch, true, nothing);
        self.close_batch(filling, 1);
    }
}
