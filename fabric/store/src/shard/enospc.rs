//! A sparse device file on a file system that is full: writes to places that were never written fail with
//! `ENOSPC`. That is no broken device. Requests are refused as on a full store, and succeed again when there
//! is room.
//!
//! A log batch that could not be written is *cancelled* before its requests are refused: its header unit is
//! written once more, with no entries, so that recovery finds the place in the log taken and nothing to
//! replay, and no block that was read after the refusal turns into what was refused. If this write finds no
//! room either, the unit was never written and holds no header (file systems that write in place keep a
//! unit's room once it is written; on those that do not, a crash before there is room may bring the refused
//! write back). The batch then stays in flight, so that no watermark passes it and no checkpoint leaves its
//! window.
//!
//! Writes that must succeed before anything goes on (those of cancelled batches and of checkpoints) are put
//! off, and tried again with the next request, which waits for the outcome, or when the shard is idle.

use super::super::format::{BatchHeader, entry_kind};
use super::super::log::HeaderWriter;
use super::ShardCore;
use super::operations::NO_SPACE;
use super::requests::IoKind;

/// Writes that wait for room below the device file.
#[derive(Debug, Default)]
pub(super) struct EnospcQueue {
    /// Device requests that are to be made again; bounded by the request table.
    put_off: Vec<u32>,
    /// Those that were made again and have not come back.
    retrying: u32,
    /// One of them has come back in vain: whoever waits is refused.
    refuse: bool,
}

/// Whether a write failed only because there is no room now.
pub(super) fn is_no_space(errno: i32) -> bool {
    matches!(errno, libc::ENOSPC | libc::EDQUOT)
}

impl EnospcQueue {
    /// Device requests that nobody executes now.
    pub(super) fn len(&self) -> usize {
        self.put_off.len()
    }

    pub(super) fn is_retrying(&self) -> bool {
        self.retrying > 0
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.is_retrying() || !self.put_off.is_empty()
    }

    pub(super) fn push(&mut self, io: u32, is_retried: bool) {
        self.put_off.push(io);
        self.refuse |= is_retried;
    }

    /// All of them, to be made again; none while some are under way.
    pub(super) fn take_all(&mut self) -> Vec<u32> {
        if self.is_retrying() {
            return Vec::new();
        }
        self.retrying = self.put_off.len() as u32;
        std::mem::take(&mut self.put_off)
    }

    /// One that was made again has come back.
    pub(super) fn end_retry(&mut self) {
        self.retrying -= 1;
    }

    /// Whether one that was made again has come back in vain since this was last asked.
    fn take_refusal(&mut self) -> bool {
        std::mem::take(&mut self.refuse)
    }
}

impl ShardCore {
    /// Takes a failed device request back to be made again, if it is one of those.
    pub(super) fn put_off(&mut self, io: u32, kind: IoKind, result: Result<(), i32>) -> bool {
        let retried = self.res.device.end_retry(io);
        let no_space = result.is_err_and(is_no_space);
        let must_succeed = match kind {
            IoKind::Pages { .. } | IoKind::Superblock { .. } => true,
            IoKind::Log { batch } => self.res.log.batches[batch].cancelled,
            _ => false,
        };
        if !no_space || !must_succeed {
            return false;
        }
        if let IoKind::Log { batch } = kind {
            self.end_parts(batch, Some(NO_SPACE));
        }
        if !self.res.device.is_under_space_pressure() {
            tracing::warn!(
                shard = self.res.geo.shard,
                "file system of the device file is full: writes are refused until it has space"
            );
        }
        self.res.device.put_off(io, kind, retried);
        true
    }

    /// Under space pressure: tries again for whoever waits for the log or a checkpoint, and refuses them if
    /// that was in vain.
    pub(super) fn ride_out(&mut self) {
        let put_off = &mut self.res.device.put_off;
        if put_off.is_retrying() {
            return;
        }
        let refuse = put_off.take_refusal();
        let asked = !self.waiting.ready().is_empty() || self.ckpt.is_asked_for();
        match (asked, refuse) {
            (true, false) => self.res.retry_put_off(),
            (true, true) => {
                for _ in 0..self.waiting.ready().len() {
                    self.refuse_head(NO_SPACE);
                }
                self.refuse_checkpoints(NO_SPACE);
            }
            (false, _) => {}
        }
    }

    /// Writes an empty header in the place of a batch for which there was no room.
    pub(super) fn cancel_batch(&mut self, slot: u32) {
        let res = &mut self.res;
        let batch = &mut res.log.batches[slot];
        for item in batch.items.drain(..) {
            if item.kind == entry_kind::DATA {
                res.alloc.quarantine_unit(item.unit);
            }
        }
        (batch.cancelled, batch.errno, batch.ios) = (true, None, 1);
        let (unit, buffer, blocks) = (batch.header, batch.buffer, batch.blocks);
        batch.blocks = 1;
        let header = BatchHeader::new(
            res.log.nonce,
            batch.window,
            batch.lsn,
            batch.watermark,
            self.ckpt.number(),
            unit,
        );
        if blocks > 1 {
            res.arena.give_back(buffer + 1, blocks - 1);
        }
        HeaderWriter::new().finish(res.arena.buf_mut().blocks_mut(buffer, 1), header);
        let io = res
            .device
            .take()
            .expect("the batch's requests were just given back");
        res.write(io, unit, (buffer, 1), IoKind::Log { batch: slot });
    }
}
