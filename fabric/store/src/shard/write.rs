//! Writes: from a part that has its leaf, through a log batch, into the map.

use super::super::api::StoreError;
use super::super::format::{
    BatchHeader, MapEntry, UNIT_BYTES, UNIT_UNMAPPED, UNIT_ZERO, entry_kind,
};
use super::super::leaf::LeafState;
use super::super::table::NONE;
use super::applied::{is_drop, zero_target};
use super::fill::Filling;
use super::leaves::LeafLookup;
use super::log_state::BATCHES_MAX;
use super::requests::{IoKind, LOG_IOS_RESERVED};
use super::reserve::SpaceDemand;
use super::{PartKind, PartState, ShardCore};

/// Data blocks of one batch.
const BATCH_BLOCKS_MAX: u32 = 256;
/// Device requests of one batch when its units are scattered.
pub(super) const BATCH_IOS_MAX: usize = 64;
/// Device requests that batches leave to checkpoints and flushes.
const CHECKPOINT_IOS_RESERVED: usize = 32;
/// Writes from this many blocks on do not use up the window: their data go elsewhere, beside the header.
pub(super) const LARGE_BLOCKS: u32 = 16;
/// Runs in quarantine (12 bytes each) that bring a checkpoint on, and those at which writes wait for it.
pub(super) const QUARANTINE_RUNS: usize = 1 << 16;
const QUARANTINE_RUNS_MAX: usize = 1 << 18;

impl ShardCore {
    /// Gets the leaf that the part changes, and queues the part for the log.
    pub(super) fn step_acquire(&mut self, part: u32) -> bool {
        let p = &self.parts[part];
        let (rec, leaf, kind) = (p.place.rec, p.place.leaf, p.kind);
        if kind == PartKind::Inspect {
            return self.step_inspect(part);
        }
        if rec == NONE {
            self.finish_part(part);
            return true;
        }
        if let Some(errno) = self.res.faults.errno() {
            // Not later, in the log's queue: a page that it would wait for may never come.
            self.fail_part(part, StoreError::ReadOnly(errno));
            return true;
        }
        let slot = match self.look_up_leaf(part, rec, leaf) {
            LeafLookup::Ready(slot) => slot,
            LeafLookup::Loading => return true,
            LeafLookup::Stalled => return false,
            LeafLookup::Absent => {
                let op = self.parts[part].op;
                let single = op == NONE || !self.ops[op].hides_layers();
                // What was to be moved is gone with its leaf.
                let nothing = matches!(kind, PartKind::Drop | PartKind::Move);
                if nothing || (kind == PartKind::Zero && single) {
                    self.finish_part(part);
                    return true;
                }
                let Some(slot) = self.take_leaf_slot(rec, leaf, LeafState::Ready) else {
                    return false;
                };
                let floor = self.res.map.table.record(rec).floor;
                self.res.map.leaves.fill_empty(slot, floor);
                slot
            }
        };
        if kind == PartKind::Zero {
            if self.covers_unknown(part, slot) && self.may_be_outdated(part) {
                self.ask_to_renumber(part);
                self.finish_part(part);
                return true;
            }
            self.note_newer(part, slot);
        }
        if matches!(kind, PartKind::Zero | PartKind::Drop) && !self.zero_changes(part, slot) {
            self.finish_part(part);
            return true;
        }
        self.res.map.leaves.meta_mut(slot).pins += 1;
        let p = &mut self.parts[part];
        p.pinned = true;
        p.progress.cursor = 0;
        p.state = PartState::Logging;
        self.waiting.push_ready(part);
        true
    }

    /// Remembers the newest version among the blocks that a discard leaves alone because they are newer.
    fn note_newer(&mut self, part: u32, slot: u32) {
        let (first, last, kind) = self.zero_range(part);
        let entries = &self.res.map.leaves.entries(slot)[usize::from(first)..usize::from(last)];
        let newest = entries.iter().map(|e| e.version).max().unwrap_or(0);
        let p = &mut self.parts[part];
        // What is not mapped reads as zeroes already, unless it has to hide older layers.
        let floored = |e: &MapEntry| e.unit == UNIT_UNMAPPED && e.version > p.version;
        let renumber = kind == entry_kind::ZERO && entries.iter().any(floored);
        p.outcome.note_version(newest, renumber);
    }

    /// A block was left alone because what is there is newer. Of a block covered `partly` the newer write may
    /// have been another part, so that this one was not overwritten.
    pub(super) fn note_stale(&mut self, part: u32, entry: MapEntry, partly: bool) {
        let renumber = entry.unit == UNIT_UNMAPPED || partly;
        let outcome = &mut self.parts[part].outcome;
        outcome.note_version(entry.version, renumber);
    }

    /// Whether a block may hold something newer than the part where nothing is known of it. The client would
    /// have been told that the newer one is stored, and this may be a copy, under way for long, of an older
    /// one.
    pub(super) fn may_be_outdated(&self, part: u32) -> bool {
        let p = &self.parts[part];
        p.version < self.res.map.table.runtime(p.place.rec).newest
    }

    /// Such a part is not executed: under a new number it is certainly the newest.
    pub(super) fn ask_to_renumber(&mut self, part: u32) {
        let p = &mut self.parts[part];
        let newest = self.res.map.table.runtime(p.place.rec).newest;
        p.outcome.note_version(newest, true);
    }

    fn covers_unknown(&self, part: u32, slot: u32) -> bool {
        let place = &self.parts[part].place;
        let (first, end) = (place.first, place.first + place.count);
        let entries = &self.res.map.leaves.entries(slot)[usize::from(first)..usize::from(end)];
        entries.iter().any(MapEntry::is_unknown)
    }

    /// Whether a discard has anything to do.
    fn zero_changes(&mut self, part: u32, slot: u32) -> bool {
        if self.parts[part].old.count() > 0 {
            return true;
        }
        let (first, last, kind) = self.zero_range(part);
        let target = zero_target(kind);
        let entries = &self.res.map.leaves.entries(slot)[usize::from(first)..usize::from(last)];
        entries.iter().any(|e| {
            e.unit != target && !(target == UNIT_UNMAPPED && e.unit == UNIT_ZERO && !is_drop(kind))
        })
    }

    /// The fully covered blocks of a discard, in the leaf, and what it makes of them.
    pub(super) fn zero_range(&self, part: u32) -> (u16, u16, u32) {
        let p = &self.parts[part];
        let (first, last) = p.place.whole_blocks();
        let kind = match p.kind {
            PartKind::Drop => entry_kind::DROP,
            _ if self.ops[p.op].hides_layers() => entry_kind::ZERO,
            _ => entry_kind::UNMAP,
        };
        (first, last, kind)
    }

    /// Turns what is ready into log batches until something runs out.
    pub(super) fn build_batches(&mut self) {
        if let Some(errno) = self.res.faults.errno() {
            for _ in 0..self.waiting.ready().len() {
                self.refuse_head(StoreError::ReadOnly(errno));
            }
            return;
        }
        if self.res.device.is_under_space_pressure() {
            self.ride_out();
            return;
        }
        while !self.waiting.ready().is_empty() && self.build_batch() {}
    }

    /// Data blocks that the part still has to place.
    pub(super) fn blocks_left(&self, part: u32) -> u32 {
        let p = &self.parts[part];
        match p.kind {
            PartKind::Write => u32::from(p.place.count) - p.progress.cursor,
            PartKind::Restore => u32::from(self.brings_data(part)),
            PartKind::Zero => p.old.count(),
            PartKind::Move => self.cleaner.job.chosen_from(p.progress.cursor),
            _ => 0,
        }
    }

    /// What the next batch would hold if there were room for it.
    fn batch_demand(&self, inline: bool) -> SpaceDemand {
        let mut want = SpaceDemand {
            blocks: 0,
            parts: 0,
        };
        let spare = self.units_left_by(self.waiting.ready()[0]);
        for &part in self.waiting.ready() {
            let blocks = self.blocks_left(part);
            // Discards may use the reserve, writes behind them may not.
            if self.units_left_by(part) != spare {
                break;
            }
            if inline && self.parts[part].kind == PartKind::Move {
                break;
            }
            if want.blocks >= BATCH_BLOCKS_MAX || (inline && blocks >= LARGE_BLOCKS) {
                break;
            }
            want.blocks = (want.blocks + blocks).min(BATCH_BLOCKS_MAX);
            want.parts += 1;
            if !inline {
                break;
            }
        }
        want
    }

    /// Builds one batch; `false` when nothing more can be built now.
    fn build_batch(&mut self) -> bool {
        let ios = BATCH_IOS_MAX + CHECKPOINT_IOS_RESERVED;
        if !self.res.log.is_open() || self.res.device.free() < ios {
            return false;
        }
        if self.res.alloc.quarantine_runs() > QUARANTINE_RUNS_MAX {
            self.ckpt.want();
            return false;
        }
        let moves = self.parts[self.waiting.ready()[0]].kind == PartKind::Move;
        let inline = !moves && self.blocks_left(self.waiting.ready()[0]) < LARGE_BLOCKS;
        let want = self.batch_demand(inline);
        let before = self.waiting.ready().len();
        let Some(room) = self.space_for(want) else {
            return self.waiting.ready().len() < before;
        };
        let Some((buffer, blocks)) = self.res.arena.take_up_to(1 + room.blocks) else {
            return false;
        };
        let least = 1 + u32::from(self.blocks_left(self.waiting.ready()[0]) > 0);
        let header = if blocks < least {
            None
        } else {
            self.res.log.current.take(&mut self.res.alloc, 1)
        };
        let Some(header) = header else {
            self.res.arena.give_back(buffer, blocks);
            if blocks >= least {
                self.ckpt.want();
            }
            return false;
        };
        let batch = self.res.log.open_batch(header.start, buffer);
        let room = SpaceDemand {
            blocks: blocks - 1,
            ..room
        };
        let mut filling = Filling::new(batch, inline, room);
        while let Some(&part) = self.waiting.ready().front() {
            if !self.fill_from(&mut filling, part) {
                break;
            }
            self.waiting.pop_ready();
        }
        self.close_batch(filling, blocks);
        true
    }

    /// Seals the header and hands the batch to the device.
    pub(super) fn close_batch(&mut self, filling: Filling, blocks: u32) {
        let Filling {
            batch: slot,
            writer,
            used,
            units,
            ..
        } = filling;
        if units.len > 0 {
            self.res.alloc.give_back(units);
            self.res.log.current.untake(units);
        }
        let buffer = self.res.log.batches[slot].buffer;
        if blocks > used {
            self.res.arena.give_back(buffer + used, blocks - used);
        }
        let batch = &mut self.res.log.batches[slot];
        batch.blocks = used;
        let checkpoint = self.ckpt.number();
        let header = BatchHeader::new(
            self.res.log.nonce,
            batch.window,
            batch.lsn,
            batch.watermark,
            checkpoint,
            batch.header,
        );
        writer.finish(self.res.arena.buf_mut().blocks_mut(buffer, 1), header);
        self.res.counters.log_batches += 1;
        self.res.counters.log_blocks += u64::from(used - 1);
        let first = self.res.log.batches[slot].items.first();
        let moves = first.is_some_and(|item| self.parts[item.part].kind == PartKind::Move);
        let bytes = u64::from(used - 1) * UNIT_BYTES as u64;
        if moves {
            self.res.counters.moved_bytes += bytes;
        } else {
            self.res.counters.write_op_bytes += bytes;
        }
        let spans = std::mem::take(&mut self.res.log.batches[slot].spans);
        self.res.log.batches[slot].ios = spans.len() as u32;
        self.res.log.note_content(slot);
        for &(unit, from, len) in &spans {
            let io = self
                .res
                .device
                .take()
                .expect("checked before the batch was opened");
            self.res
                .write(io, unit, (from, len), IoKind::Log { batch: slot });
        }
        self.res.log.batches[slot].spans = spans;
    }
}

/// Invariant *Bounded*: whether the number of batches in flight and their requests fit the request table.
const _: () =
    assert!(BATCHES_MAX >= 2 && BATCH_IOS_MAX + CHECKPOINT_IOS_RESERVED < LOG_IOS_RESERVED);
