//! Filling a log batch: contents into its buffer, entries into its header.

use fabric_types::checksum::crc32c;

use super::super::alloc::Run;
use super::super::format::{BatchEntry, MapEntry, UNIT_BYTES, UNIT_LOST, entry_kind};
use super::super::log::{DataBlock, HeaderWriter};
use super::log_state::Item;
use super::write::{BATCH_IOS_MAX, LARGE_BLOCKS};
use super::{OpKind, PartKind, ShardCore};

/// What a batch is being filled from.
pub(super) struct Filling {
    pub(super) batch: u32,
    pub(super) writer: HeaderWriter,
    /// Buffer blocks used, the header included.
    pub(super) used: u32,
    /// Data units handed out and not yet used.
    pub(super) units: Run,
    /// Data may follow the header in the window.
    pub(super) inline: bool,
    /// Data blocks that may still be placed.
    pub(super) budget: u32,
    /// Parts that may still join.
    pub(super) parts: u32,
}

impl ShardCore {
    /// Puts as much of the part as possible into the batch; `false` when the batch is full before the part is
    /// done.
    pub(super) fn fill_from(&mut self, filling: &mut Filling, part: u32) -> bool {
        // What is moved has a batch of its own.
        let moves = self.parts[part].kind == PartKind::Move;
        let too_large = filling.inline && (moves || self.blocks_left(part) >= LARGE_BLOCKS);
        if too_large || filling.parts == 0 {
            return false;
        }
        let items = self.res.log.batches[filling.batch].items.len();
        let done = match self.parts[part].kind {
            PartKind::Write => self.fill_blocks(filling, part),
            PartKind::Restore => self.fill_restored(filling, part),
            PartKind::Zero | PartKind::Drop => self.fill_zeroes(filling, part),
            PartKind::Fence | PartKind::FenceDrop => self.fill_fence(filling, part),
            PartKind::Move => self.fill_moves(filling, part),
            PartKind::Read | PartKind::Scrub | PartKind::Inspect | PartKind::LocateVictims => {
                unreachable!("reads are not logged")
            }
        };
        if self.res.log.batches[filling.batch].items.len() > items {
            let leaves = u32::from(self.dirties_leaf(part));
            self.res.log.expect_leaves(filling.batch, leaves);
            self.res.log.batches[filling.batch].parts.push(part);
            self.parts[part].in_log.join();
            filling.parts -= 1;
        }
        if done {
            self.parts[part].in_log.complete();
            self.release_old(part);
            if self.parts[part].in_log.is_done() {
                // Every block was stale.
                self.finish_part(part);
            }
        }
        done
    }

    /// Whether this very write of a part of the block is what was lost: another replica had it, and could not
    /// be read when this one was compared with it.
    fn is_lost_itself(&self, part: u32, i: u32, entry: MapEntry) -> bool {
        let is_lost = entry.unit == UNIT_LOST && entry.version == self.parts[part].version;
        is_lost && self.parts[part].place.is_partly_covered(i)
    }

    fn fill_blocks(&mut self, filling: &mut Filling, part: u32) -> bool {
        let slot = self.leaf_slot(part);
        while self.parts[part].progress.cursor < u32::from(self.parts[part].place.count) {
            let i = self.parts[part].progress.cursor;
            let (version, first) = (self.parts[part].version, self.parts[part].place.first);
            let entry = self.res.map.leaves.entries(slot)[usize::from(first) + i as usize];
            if entry.version > version {
                let partly = self.parts[part].place.is_partly_covered(i);
                self.note_stale(part, entry, partly);
            } else if self.is_lost_itself(part, i, entry) {
                // Done here as it is on the replica that lost it. To refuse it would have this one compared
                // again, to the same end.
            } else if !self.fill_block(filling, part, i, true) {
                return false;
            }
            self.parts[part].progress.cursor += 1;
        }
        true
    }

    fn fill_zeroes(&mut self, filling: &mut Filling, part: u32) -> bool {
        let (first, last, kind) = self.zero_range(part);
        if self.parts[part].progress.cursor == 0 {
            if !filling.writer.has_room() {
                return false;
            }
            if last > first {
                let p = &self.parts[part];
                let count = last - first;
                let entry = BatchEntry {
                    layer: p.place.layer.0,
                    version: p.version,
                    chunk: p.place.chunk,
                    unit: 0,
                    block: p.place.in_chunk(first),
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
                self.res.log.batches[filling.batch].items.push(item);
            }
            self.parts[part].progress.cursor = 1;
        }
        let slot = self.leaf_slot(part);
        for which in 0..2 {
            let Some((index, buffer)) = self.parts[part].old.buffers[which] else {
                continue;
            };
            let entry = self.res.map.leaves.entries(slot)
                [usize::from(self.parts[part].place.first + index)];
            if entry.version > self.parts[part].version {
                self.note_stale(part, entry, true);
            } else if !self.fill_block(filling, part, u32::from(index), false) {
                return false;
            }
            self.parts[part].old.buffers[which] = None;
            self.res.arena.give_back(buffer, 1);
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
        let (layer, version) = (p.place.layer.0, p.version);
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
            let header = self.res.log.batches[filling.batch].buffer;
            filling
                .writer
                .push_u64(self.res.arena.buf_mut().blocks_mut(header, 1), fence.epoch);
        }
        self.res.log.batches[filling.batch].items.push(Item {
            part,
            first: 0,
            count: 0,
            unit: 0,
            crc: 0,
            kind,
        });
        true
    }

    pub(super) fn push_entry(&mut self, filling: &mut Filling, entry: BatchEntry) {
        let header = self.res.log.batches[filling.batch].buffer;
        filling
            .writer
            .push_entry(self.res.arena.buf_mut().blocks_mut(header, 1), entry);
    }

    pub(super) fn leaf_slot(&self, part: u32) -> u32 {
        let p = &self.parts[part];
        self.res.map.leaf_slot(p.place.rec, p.place.leaf)
    }

    /// Adds block `i` of the part: its content to the buffer, its entry to the header.
    pub(super) fn fill_block(
        &mut self,
        filling: &mut Filling,
        part: u32,
        i: u32,
        from_op: bool,
    ) -> bool {
        if filling.budget == 0 || !filling.writer.has_room() {
            return false;
        }
        let Some(unit) = self.next_unit(filling) else {
            return false;
        };
        let header = self.res.log.batches[filling.batch].buffer;
        let buffer = header + filling.used;
        let (from, to) = self.parts[part].place.covered(i);
        if to - from < UNIT_BYTES as u32 {
            let old = self.parts[part].old.buffer_of(i);
            let (inside, len) = (from as usize % UNIT_BYTES, (to - from) as usize);
            let start = buffer as usize * UNIT_BYTES;
            let bytes = self.res.arena.buf().len();
            let all = self
                .res
                .arena
                .buf_mut()
                .blocks_mut(0, (bytes / UNIT_BYTES) as u32);
            match old {
                Some(old) => {
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
        let crc = crc32c(self.res.arena.buf().blocks(buffer, 1));
        let p = &self.parts[part];
        let first = p.place.first + i as u16;
        let data = DataBlock {
            layer: p.place.layer.0,
            chunk: p.place.chunk,
            block: p.place.in_chunk(first),
            unit,
            crc,
            version: p.version,
        };
        filling
            .writer
            .push_data(self.res.arena.buf_mut().blocks_mut(header, 1), &data);
        self.push_block(filling, (part, first), (unit, crc));
        true
    }

    /// The batch's next buffer block goes to `unit`, as block `first` of the part's leaf.
    pub(super) fn push_block(
        &mut self,
        filling: &mut Filling,
        (part, first): (u32, u16),
        (unit, crc): (u32, u32),
    ) {
        let batch = &mut self.res.log.batches[filling.batch];
        let buffer = batch.buffer + filling.used;
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
    }

    pub(super) fn next_unit(&mut self, filling: &mut Filling) -> Option<u32> {
        if filling.units.len == 0 {
            if self.res.log.batches[filling.batch].spans.len() >= BATCH_IOS_MAX {
                return None;
            }
            let inline = if filling.inline {
                self.res
                    .log
                    .current
                    .take(&mut self.res.alloc, filling.budget)
            } else {
                None
            };
            filling.units = inline.or_else(|| self.res.alloc.take_run(filling.budget))?;
        }
        let unit = filling.units.start;
        filling.units.start += 1;
        filling.units.len -= 1;
        Some(unit)
    }
}
