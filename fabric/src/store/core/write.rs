//! Writes: from a part that has its leaf, through a log batch, into the map.

use super::super::alloc::Run;
use super::super::api::StoreError;
use super::super::format::{
    BatchEntry, BatchHeader, LEAF_BLOCKS, MapEntry, UNIT_BYTES, UNIT_UNMAPPED, UNIT_ZERO,
    entry_kind,
};
use super::super::leaf::LeafState;
use super::super::log::{DataBlock, HeaderWriter};
use super::super::table::NONE;
use super::applied::{is_drop, zero_target};
use super::leaves::LeafWish;
use super::room::Room;
use super::{BATCHES_MAX, IoKind, OpKind, PartKind, PartState, ShardCore};
use crate::checksum::crc32c;

/// Data blocks of one batch.
const BATCH_BLOCKS_MAX: u32 = 256;
/// Device requests of one batch when its units are scattered.
const BATCH_IOS_MAX: usize = 64;
/// Device requests that batches leave to checkpoints and flushes.
const CHECKPOINT_IOS_RESERVED: usize = 32;
/// Writes from this many blocks on do not use up the window: their data go elsewhere, beside the header.
const LARGE_BLOCKS: u32 = 16;
/// Runs in quarantine (12 bytes each) that bring a checkpoint on, and those at which writes wait for it.
pub(super) const QUARANTINE_RUNS: usize = 1 << 16;
const QUARANTINE_RUNS_MAX: usize = 1 << 18;

/// One change of the map that a batch makes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Item {
    pub(super) part: u32,
    pub(super) first: u16,
    pub(super) count: u16,
    pub(super) unit: u32,
    pub(super) crc: u32,
    pub(super) kind: u32,
}

/// A log batch in flight.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) lsn: u64,
    pub(super) window: u64,
    pub(super) header: u32,
    pub(super) buffer: u32,
    pub(super) blocks: u32,
    pub(super) ios: u32,
    pub(super) errno: Option<i32>,
    pub(super) watermark: u64,
    pub(super) items: Vec<Item>,
    pub(super) parts: Vec<u32>,
    /// Map pages that it will make dirty at most.
    pub(super) leaves: u32,
    /// It could not be written, and an empty one takes its place.
    pub(super) cancelled: bool,
    /// Device requests to be made: unit, buffer block, blocks.
    pub(super) spans: Vec<(u32, u32, u32)>,
}

/// What a batch is being filled from.
struct Filling {
    batch: u32,
    writer: HeaderWriter,
    /// Buffer blocks used, the header included.
    used: u32,
    /// Data units handed out and not yet used.
    units: Run,
    /// Data may follow the header in the window.
    inline: bool,
    /// Data blocks that may still be placed.
    budget: u32,
    /// Parts that may still join.
    parts: u32,
}

impl ShardCore {
    /// Gets the leaf that the part changes, and queues the part for the log.
    pub(super) fn step_acquire(&mut self, part: u32) -> bool {
        let (rec, leaf, kind) = (
            self.parts[part].rec,
            self.parts[part].leaf,
            self.parts[part].kind,
        );
        if rec == NONE {
            self.finish_part(part);
            return true;
        }
        if let Some(errno) = self.failed {
            // Not later, in the log's queue: a page that it would wait for may never come.
            self.fail_part(part, StoreError::ReadOnly(errno));
            return true;
        }
        let slot = match self.wish_leaf(part, rec, leaf) {
            LeafWish::Ready(slot) => slot,
            LeafWish::Loading => return true,
            LeafWish::Stalled => return false,
            LeafWish::Absent => {
                let single =
                    self.parts[part].op == NONE || self.ops[self.parts[part].op].layer_count <= 1;
                if kind == PartKind::Drop || (kind == PartKind::Zero && single) {
                    self.finish_part(part);
                    return true;
                }
                let Some(slot) = self.take_leaf_slot(rec, leaf, LeafState::Ready) else {
                    return false;
                };
                let floor = self.table.record(rec).floor;
                self.leaves.fill_empty(slot, floor);
                slot
            }
        };
        if kind == PartKind::Zero {
            self.note_newer(part, slot);
        }
        if kind != PartKind::Write && !self.zero_changes(part, slot) {
            self.finish_part(part);
            return true;
        }
        self.leaves.meta_mut(slot).pins += 1;
        let p = &mut self.parts[part];
        p.pinned = true;
        p.cursor = 0;
        p.state = PartState::Logging;
        self.ready.push_back(part);
        true
    }

    /// Remembers the newest version among the blocks that a discard leaves alone because they are newer.
    fn note_newer(&mut self, part: u32, slot: u32) {
        let (first, last, kind) = self.zero_range(part);
        let entries = &self.leaves.entries(slot)[usize::from(first)..usize::from(last)];
        let newest = entries.iter().map(|e| e.version).max().unwrap_or(0);
        let p = &mut self.parts[part];
        // What is not mapped reads as zeroes already, unless it has to hide older layers.
        let floored = |e: &MapEntry| e.unit == UNIT_UNMAPPED && e.version > p.version;
        p.renumber |= kind == entry_kind::ZERO && entries.iter().any(floored);
        // `finish_part` compares it with the part's own.
        p.stale = p.stale.max(newest);
    }

    /// A block was left alone because what is there is newer.
    fn note_stale(&mut self, part: u32, entry: MapEntry) {
        let p = &mut self.parts[part];
        p.stale = p.stale.max(entry.version);
        p.renumber |= entry.unit == UNIT_UNMAPPED;
    }

    /// Whether a discard has anything to do.
    fn zero_changes(&mut self, part: u32, slot: u32) -> bool {
        if self.parts[part].old.iter().any(Option::is_some) {
            return true;
        }
        let (first, last, kind) = self.zero_range(part);
        let target = zero_target(kind);
        let entries = &self.leaves.entries(slot)[usize::from(first)..usize::from(last)];
        entries.iter().any(|e| {
            e.unit != target && !(target == UNIT_UNMAPPED && e.unit == UNIT_ZERO && !is_drop(kind))
        })
    }

    /// The fully covered blocks of a discard, in the leaf, and what it makes of them.
    fn zero_range(&self, part: u32) -> (u16, u16, u32) {
        let p = &self.parts[part];
        let block = UNIT_BYTES as u32;
        let first = p.first + u16::from(p.start % block != 0);
        let last = (p.first + p.count - u16::from(p.end % block != 0)).max(first);
        let kind = match p.kind {
            PartKind::Drop => entry_kind::DROP,
            _ if self.ops[p.op].layer_count > 1 => entry_kind::ZERO,
            _ => entry_kind::UNMAP,
        };
        (first, last, kind)
    }

    /// Turns what is ready into log batches until something runs out.
    pub(super) fn build_batches(&mut self) {
        if let Some(errno) = self.failed {
            for _ in 0..self.ready.len() {
                self.refuse_head(StoreError::ReadOnly(errno));
            }
            return;
        }
        if self.is_squeezed() {
            self.ride_out();
            return;
        }
        while !self.ready.is_empty() && self.build_batch() {}
    }

    /// Data blocks that the part still has to place.
    pub(super) fn blocks_left(&self, part: u32) -> u32 {
        let p = &self.parts[part];
        match p.kind {
            PartKind::Write => u32::from(p.count) - p.cursor,
            PartKind::Zero => p.old.iter().flatten().count() as u32,
            _ => 0,
        }
    }

    /// Builds one batch; `false` when nothing more can be built now.
    fn build_batch(&mut self) -> bool {
        if self.log.hold
            || self.batches.free_count() == 0
            || self.ios.free_count() < BATCH_IOS_MAX + CHECKPOINT_IOS_RESERVED
        {
            return false;
        }
        if self.alloc.quarantine_runs() > QUARANTINE_RUNS_MAX {
            self.ckpt.want();
            return false;
        }
        let inline = self.blocks_left(self.ready[0]) < LARGE_BLOCKS;
        let mut want = Room {
            blocks: 0,
            parts: 0,
        };
        let writes = self.parts[self.ready[0]].kind == PartKind::Write;
        for &part in &self.ready {
            let blocks = self.blocks_left(part);
            // Discards may use the reserve, writes behind them may not.
            if (self.parts[part].kind == PartKind::Write) != writes {
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
        let before = self.ready.len();
        let Some(room) = self.room_for(want) else {
            return self.ready.len() < before;
        };
        let Some((buffer, blocks)) = self.arena.take_up_to(1 + room.blocks) else {
            return false;
        };
        let least = 1 + u32::from(self.blocks_left(self.ready[0]) > 0);
        let header = if blocks < least {
            None
        } else {
            self.log.current.take(&mut self.alloc, 1)
        };
        let Some(header) = header else {
            self.arena.give_back(buffer, blocks);
            if blocks >= least {
                self.ckpt.want();
            }
            return false;
        };
        let batch = self.open_batch(header.start, buffer);
        let mut filling = Filling {
            batch,
            writer: HeaderWriter::new(),
            used: 1,
            units: Run { start: 0, len: 0 },
            inline,
            budget: blocks - 1,
            parts: room.parts,
        };
        while let Some(&part) = self.ready.front() {
            if !self.fill_from(&mut filling, part) {
                break;
            }
            self.ready.pop_front();
        }
        self.close_batch(filling, blocks);
        true
    }

    fn open_batch(&mut self, header: u32, buffer: u32) -> u32 {
        let slot = self.batches.take().expect("checked by the caller");
        let batch = &mut self.batches[slot];
        batch.lsn = self.log.next_lsn;
        batch.window = self.log.current.id;
        (batch.header, batch.buffer, batch.ios, batch.errno) = (header, buffer, 0, None);
        (batch.leaves, batch.cancelled) = (0, false);
        batch.watermark = self.log.durable_lsn;
        batch.items.clear();
        batch.parts.clear();
        batch.spans.clear();
        batch.spans.push((header, buffer, 1));
        self.log.next_lsn += 1;
        self.log.current.batches += 1;
        self.log.in_flight[(self.log.current.id & 1) as usize] += 1;
        slot
    }

    /// Puts as much of the part as possible into the batch; `false` when the batch is full before the part is done.
    fn fill_from(&mut self, filling: &mut Filling, part: u32) -> bool {
        let too_large = filling.inline && self.blocks_left(part) >= LARGE_BLOCKS;
        if too_large || filling.parts == 0 {
            return false;
        }
        let items = self.batches[filling.batch].items.len();
        let done = match self.parts[part].kind {
            PartKind::Write => self.fill_blocks(filling, part),
            PartKind::Zero | PartKind::Drop => self.fill_zeroes(filling, part),
            PartKind::Fence | PartKind::FenceDrop => self.fill_fence(filling, part),
            PartKind::Read | PartKind::Scrub => unreachable!("reads are not logged"),
        };
        if self.batches[filling.batch].items.len() > items {
            let leaves = u32::from(self.dirties_leaf(part));
            self.batches[filling.batch].leaves += leaves;
            self.pending_leaves += leaves;
            self.batches[filling.batch].parts.push(part);
            self.parts[part].batches += 1;
            filling.parts -= 1;
        }
        if done {
            self.parts[part].logged = true;
            self.release_old(part);
            if self.parts[part].batches == 0 {
                // Every block was stale.
                self.finish_part(part);
            }
        }
        done
    }

    fn fill_blocks(&mut self, filling: &mut Filling, part: u32) -> bool {
        let slot = self.leaf_slot(part);
        while self.parts[part].cursor < u32::from(self.parts[part].count) {
            let i = self.parts[part].cursor;
            let (version, first) = (self.parts[part].version, self.parts[part].first);
            let entry = self.leaves.entries(slot)[usize::from(first) + i as usize];
            if entry.version > version {
                self.note_stale(part, entry);
            } else if !self.fill_block(filling, part, i, true) {
                return false;
            }
            self.parts[part].cursor += 1;
        }
        true
    }

    fn fill_zeroes(&mut self, filling: &mut Filling, part: u32) -> bool {
        let (first, last, kind) = self.zero_range(part);
        if self.parts[part].cursor == 0 {
            if !filling.writer.has_room() {
                return false;
            }
            if last > first {
                let p = &self.parts[part];
                let block = u16::from(p.leaf) * LEAF_BLOCKS as u16 + first;
                let (layer, version, chunk, count) = (p.layer, p.version, p.chunk, last - first);
                let entry = BatchEntry {
                    layer,
                    version,
                    chunk,
                    unit: 0,
                    block,
                    count,
                    kind,
                };
                self.push_entry(filling, entry);
                let item = Item {
                    part,
                    first,
                    count,
                    unit: 0,
                    crc: 0,
                    kind,
                };
                self.batches[filling.batch].items.push(item);
            }
            self.parts[part].cursor = 1;
        }
        let slot = self.leaf_slot(part);
        for which in 0..2 {
            let Some((index, buffer)) = self.parts[part].old[which] else {
                continue;
            };
            let entry = self.leaves.entries(slot)[usize::from(self.parts[part].first + index)];
            if entry.version > self.parts[part].version {
                self.note_stale(part, entry);
            } else if !self.fill_block(filling, part, u32::from(index), false) {
                return false;
            }
            self.parts[part].old[which] = None;
            self.arena.give_back(buffer, 1);
        }
        true
    }

    fn fill_fence(&mut self, filling: &mut Filling, part: u32) -> bool {
        if !filling.writer.has_room() {
            return false;
        }
        let p = &self.parts[part];
        let fence = if let OpKind::Fence(fence) = self.ops[p.op].kind {
            Some(fence)
        } else {
            None
        };
        let kind = if fence.is_some() {
            entry_kind::FENCE
        } else {
            entry_kind::FENCE_DROP
        };
        let (layer, version) = (p.layer, p.version);
        self.push_entry(
            filling,
            BatchEntry {
                layer,
                version,
                chunk: 0,
                unit: 0,
                block: 0,
                count: 0,
                kind,
            },
        );
        if let Some(fence) = fence {
            let header = self.batches[filling.batch].buffer;
            filling
                .writer
                .push_u64(self.arena.buf_mut().blocks_mut(header, 1), fence.epoch);
        }
        self.batches[filling.batch].items.push(Item {
            part,
            first: 0,
            count: 0,
            unit: 0,
            crc: 0,
            kind,
        });
        true
    }

    fn push_entry(&mut self, filling: &mut Filling, entry: BatchEntry) {
        let header = self.batches[filling.batch].buffer;
        filling
            .writer
            .push_entry(self.arena.buf_mut().blocks_mut(header, 1), entry);
    }

    pub(super) fn leaf_slot(&self, part: u32) -> u32 {
        let p = &self.parts[part];
        self.table.runtime(p.rec).leaf_slots[usize::from(p.leaf)]
    }

    /// Adds block `i` of the part: its content to the buffer, its entry to the header.
    fn fill_block(&mut self, filling: &mut Filling, part: u32, i: u32, from_op: bool) -> bool {
        if filling.budget == 0 || !filling.writer.has_room() {
            return false;
        }
        let Some(unit) = self.next_unit(filling) else {
            return false;
        };
        let header = self.batches[filling.batch].buffer;
        let buffer = header + filling.used;
        let (from, to) = self.covered_range(part, i);
        if to - from < UNIT_BYTES as u32 {
            let old = self.parts[part]
                .old
                .iter()
                .flatten()
                .find(|(index, _)| u32::from(*index) == i)
                .copied();
            let (inside, len) = (from as usize % UNIT_BYTES, (to - from) as usize);
            let start = buffer as usize * UNIT_BYTES;
            let bytes = self.arena.buf().len();
            let all = self
                .arena
                .buf_mut()
                .blocks_mut(0, (bytes / UNIT_BYTES) as u32);
            match old {
                Some((_, old)) => {
                    let old = old as usize * UNIT_BYTES;
                    all.copy_within(old..old + UNIT_BYTES, start);
                }
                None => all[start..start + UNIT_BYTES].fill(0),
            }
            all[start + inside..start + inside + len].fill(0);
        }
        if from_op {
            self.copy_in(part, from, to, buffer);
        }
        let crc = crc32c(self.arena.buf().blocks(buffer, 1));
        let p = &self.parts[part];
        let first = p.first + i as u16;
        let block = u16::from(p.leaf) * LEAF_BLOCKS as u16 + first;
        let data = DataBlock {
            layer: p.layer,
            chunk: p.chunk,
            block,
            unit,
            crc,
            version: p.version,
        };
        filling
            .writer
            .push_data(self.arena.buf_mut().blocks_mut(header, 1), &data);
        let batch = &mut self.batches[filling.batch];
        batch.items.push(Item {
            part,
            first,
            count: 1,
            unit,
            crc,
            kind: entry_kind::DATA,
        });
        match batch.spans.last_mut() {
            Some((start, from, len)) if *start + *len == unit && *from + *len == buffer => {
                *len += 1
            }
            _ => batch.spans.push((unit, buffer, 1)),
        }
        filling.used += 1;
        filling.budget -= 1;
        true
    }

    fn next_unit(&mut self, filling: &mut Filling) -> Option<u32> {
        if filling.units.len == 0 {
            if self.batches[filling.batch].spans.len() >= BATCH_IOS_MAX {
                return None;
            }
            let inline = if filling.inline {
                self.log.current.take(&mut self.alloc, filling.budget)
            } else {
                None
            };
            filling.units = inline.or_else(|| self.alloc.take_run(filling.budget))?;
        }
        let unit = filling.units.start;
        filling.units.start += 1;
        filling.units.len -= 1;
        Some(unit)
    }

    /// Seals the header and hands the batch to the device.
    fn close_batch(&mut self, filling: Filling, blocks: u32) {
        let Filling {
            batch: slot,
            writer,
            used,
            units,
            ..
        } = filling;
        if units.len > 0 {
            self.alloc.give_back(units);
            self.log.current.untake(units);
        }
        let buffer = self.batches[slot].buffer;
        if blocks > used {
            self.arena.give_back(buffer + used, blocks - used);
        }
        let batch = &mut self.batches[slot];
        batch.blocks = used;
        let checkpoint = self.ckpt.number();
        let header = BatchHeader::new(
            self.log.nonce,
            batch.window,
            batch.lsn,
            batch.watermark,
            checkpoint,
            batch.header,
        );
        writer.finish(self.arena.buf_mut().blocks_mut(buffer, 1), header);
        self.counters.log_batches += 1;
        self.counters.log_blocks += u64::from(used - 1);
        self.counters.write_op_bytes += u64::from(used - 1) * UNIT_BYTES as u64;
        let spans = std::mem::take(&mut self.batches[slot].spans);
        self.batches[slot].ios = spans.len() as u32;
        for &(unit, from, len) in &spans {
            let io = self
                .take_io(false)
                .expect("checked before the batch was opened");
            self.emit_write(io, unit, from, len, IoKind::Log { batch: slot });
        }
        self.batches[slot].spans = spans;
    }

    /// An empty batch that only says how far the log is known to be durable.
    pub(super) fn write_watermark(&mut self) {
        let news = self.log.durable_lsn > self.log.watermark_written;
        let idle = self.batches.in_use() == 0 && self.ready.is_empty() && !self.ckpt.is_running();
        if !news
            || !idle
            || self.log.hold
            || self.is_squeezed()
            || self.failed.is_some()
            || self.ios.free_count() == 0
        {
            return;
        }
        if self.alloc.free_units() < self.checkpoint_need() + self.reserve_units() / 4 {
            return;
        }
        let Some((buffer, _)) = self.arena.take_up_to(1) else {
            return;
        };
        let Some(header) = self.log.current.take(&mut self.alloc, 1) else {
            self.arena.give_back(buffer, 1);
            return;
        };
        let batch = self.open_batch(header.start, buffer);
        let units = Run { start: 0, len: 0 };
        let filling = Filling {
            batch,
            writer: HeaderWriter::new(),
            used: 1,
            units,
            inline: true,
            budget: 0,
            parts: 0,
        };
        self.close_batch(filling, 1);
    }
}

/// Whether the number of batches in flight and their requests fit the request table.
const _: () =
    assert!(BATCHES_MAX >= 2 && BATCH_IOS_MAX + CHECKPOINT_IOS_RESERVED < super::LOG_IOS_RESERVED);
