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

use super::super::alloc::Run;
use super::super::api::{FlushMark, StoreCore, StoreError, StoreResult};
use super::super::log::HeaderWriter;
use super::fill::Filling;
use super::{IoKind, ShardCore};

impl ShardCore {
    /// The operation is done once whatever was reported until now is durable.
    pub(super) fn wait_for_flush(&mut self, op: u32) {
        self.flushes.waiting.push(op);
        self.flushes.after = self.log.newest_done;
    }

    pub(super) fn start_flush(&mut self) {
        if self.flushes.waiting.is_empty()
            || self.flushes.busy
            || !self.is_in_order(self.flushes.after)
        {
            return;
        }
        let Some(io) = self.take_io(false) else {
            return;
        };
        self.flushes.busy = true;
        self.flushes.mark = self.mark();
        std::mem::swap(&mut self.flushes.waiting, &mut self.flushes.running);
        self.emit_flush(io, IoKind::Flush);
    }

    pub(super) fn on_flush(&mut self, result: Result<(), i32>) {
        self.flushes.busy = false;
        let mut outcome = result.map_err(StoreError::ReadOnly);
        match result {
            Ok(()) => outcome = self.note_flushed(self.flushes.mark),
            Err(errno) => self.flush_failed(errno),
        }
        let upto = self.log.to_record();
        let mut running = std::mem::take(&mut self.flushes.running);
        for op in running.drain(..) {
            match outcome {
                Ok(()) => self.flushes.recording.push((op, upto)),
                Err(_) => self.finish_op(op, outcome),
            }
        }
        self.flushes.running = running;
    }

    pub(super) fn note_flushed(&mut self, mark: FlushMark) -> StoreResult {
        self.refuse_if_flush_lost()?;
        // Invariant *Durable*: only what was done before the flush began counts as flushed.
        assert!(mark.lsn < self.log.next_lsn && mark.finished <= self.log.finished);
        self.log.durable_lsn = self.log.durable_lsn.max(mark.lsn);
        self.log.flushed = self.log.flushed.max(mark.finished);
        Ok(())
    }

    /// Newest batch with all before it complete.
    pub(super) fn completed_lsn(&self) -> u64 {
        let under_way = self.batches.iter().map(|b| b.lsn).min();
        under_way.unwrap_or(self.log.next_lsn) - 1
    }

    /// Whether all batches up to `lsn` are done. One that is put off because the device file's file system is
    /// full may stay for ever, and nobody waits for it.
    pub(super) fn is_in_order(&self, lsn: u64) -> bool {
        self.completed_lsn() >= lsn || self.is_under_space_pressure()
    }

    pub(super) fn mark(&self) -> FlushMark {
        FlushMark {
            lsn: self.completed_lsn(),
            finished: self.log.finished,
        }
    }

    pub(super) fn refuse_if_flush_lost(&self) -> StoreResult {
        match self.failed {
            Some(errno) if self.flush_lost => Err(StoreError::ReadOnly(errno)),
            _ => Ok(()),
        }
    }

    /// Ends the operations that waited for older batches.
    pub(super) fn end_ordering(&mut self) {
        let mut at = 0;
        while let Some(&(op, lsn)) = self.flushes.ordering.get(at) {
            if self.is_in_order(lsn) {
                self.flushes.ordering.swap_remove(at);
                self.finish_op(op, Ok(()));
            } else {
                at += 1;
            }
        }
    }

    /// Writes the record of a flush that somebody waits for, unless a batch under way carries it, and ends
    /// the operations whose record is there.
    pub(super) fn record_flush(&mut self) {
        // What is durable stays so, though a shard that writes no more cannot say it.
        let cannot = self.failed.is_some() || self.is_under_space_pressure();
        let mut wanted = 0;
        let mut at = 0;
        while let Some(&(op, upto)) = self.flushes.recording.get(at) {
            if cannot || self.log.watermark_written >= upto {
                self.flushes.recording.swap_remove(at);
                self.finish_op(op, Ok(()));
            } else {
                wanted = wanted.max(upto);
                at += 1;
            }
        }
        let under_way = |core: &Self| core.batches.iter().map(|b| b.watermark).max();
        if wanted > 0 && under_way(self) < Some(wanted) {
            self.write_watermark();
        }
    }

    /// Says how far the log is durable when nobody asked, so that recovery need not prove it.
    pub(super) fn write_idle_watermark(&mut self) {
        let quiet = self.batches.taken() == 0 && self.ready.is_empty() && !self.ckpt.is_running();
        if quiet
            && !self.is_flush_recorded()
            && !self.is_under_space_pressure()
            && self.failed.is_none()
        {
            self.write_watermark();
        }
    }

    /// An empty batch that only says how far the log is known to be durable. If it lacks buffers, they come
    /// back; if it lacks room in the log, the checkpoint that makes some says the same.
    fn write_watermark(&mut self) {
        if self.log.hold || self.batches.free() == 0 || self.ios.free() == 0 {
            return;
        }
        if self.alloc.free_units() < self.checkpoint_need() + self.reserve_units() / 4 {
            self.ckpt.want();
            return;
        }
        let Some((buffer, _)) = self.arena.take_up_to(1) else {
            return;
        };
        let Some(header) = self.log.current.take(&mut self.alloc, 1) else {
            self.arena.give_back(buffer, 1);
            self.ckpt.want();
            return;
        };
        let batch = self.open_batch(header.start, buffer);
        let filling = Filling {
            batch,
            writer: HeaderWriter::new(),
            used: 1,
            units: Run { start: 0, len: 0 },
            inline: true,
            budget: 0,
            parts: 0,
        };
        self.close_batch(filling, 1);
    }
}
