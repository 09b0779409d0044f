//! Filling a log batch: contents into its buffer, entries into its header.

use fabric_types::checksum::crc32c;

use super::super::alloc::Run;
use super::super::format::{BatchEntry, MapEntry, UNIT_BYTES, UNIT_LOST, entry_kind};
use super::super::log::{DataBlock, HeaderWriter};
use super::super::table::NONE;
use super::log_state::Item;
use super::reserve::SpaceDemand;
use super::resources::Resources;
use super::write::{BATCH_IOS_MAX, LARGE_BLOCKS};
use super::{OpKind, PartKind, ShardCore};

/// A batch that is being filled.
pub(super) struct Filling {
    pub(super) batch: u32,
    pub(super) writer: HeaderWriter,
    /// Buffer blocks used, the header included.
    pub(super) used: u32,
    /// Data units handed out and not yet used.
    pub(super) units: Run,
    /// Data may follow the header in the window.
    inline: bool,
    /// Data blocks that may still be placed.
    budget: u32,
    /// Parts that may still join.
    parts: u32,
}

impl Filling {
    /// An open batch, which so many blocks and parts have room in. The blocks follow the header in the window
    /// if they are `inline`.
    pub(super) fn new(batch: u32, inline: bool, room: SpaceDemand) -> Self {
        Self {
            batch,
            writer: HeaderWriter::new(),
            used: 1,
            units: Run::default(),
            inline,
            budget: room.blocks,
            parts: room.parts,
        }
    }

    /// Whether no further block has room.
    pub(super) fn is_full(&self) -> bool {
        self.budget == 0 || !self.writer.has_room()
    }

    /// Whether a block at `unit` needs another device request, and there is none left.
    pub(super) fn is_too_scattered(&self, unit: u32, res: &Resources) -> bool {
        let spans = &res.log.batches[self.batch].spans;
        let is_joined = spans.last().is_some_and(|s| s.0 + s.2 == unit);
        !is_joined && spans.len() >= BATCH_IOS_MAX
    }

    /// Adds a change of the part that no data follow, from block `first` of its leaf on.
    pub(super) fn push_entry(
        &mut self,
        (part, first): (u32, u16),
        entry: BatchEntry,
        res: &mut Resources,
    ) {
        let batch = &mut res.log.batches[self.batch];
        let header = res.arena.buf_mut().blocks_mut(batch.buffer, 1);
        self.writer.push_entry(header, entry);
        batch.items.push(Item {
            part,
            first,
            count: entry.count,
            unit: 0,
            crc: entry.unit,
            kind: entry.kind,
        });
    }

    /// Adds the epoch behind a fence entry.
    fn push_epoch(&mut self, epoch: u64, res: &mut Resources) {
        let header = res.log.batches[self.batch].buffer;
        let header = res.arena.buf_mut().blocks_mut(header, 1);
        self.writer.push_u64(header, epoch);
    }

    /// The buffer block that the next block of data is put in.
    pub(super) fn buffer(&self, res: &Resources) -> u32 {
        res.log.batches[self.batch].buffer + self.used
    }

    /// Adds what is in [`buffer`](Self::buffer), as block `first` of the part's leaf.
    pub(super) fn push_block(
        &mut self,
        (part, first): (u32, u16),
        data: &DataBlock,
        res: &mut Resources,
    ) {
        let buffer = self.buffer(res);
        let batch = &mut res.log.batches[self.batch];
        let header = res.arena.buf_mut().blocks_mut(batch.buffer, 1);
        self.writer.push_data(header, data);
        let unit = data.unit;
        batch.items.push(Item {
            part,
            first,
            count: 1,
            unit,
            crc: data.crc,
            kind: entry_kind::DATA,
        });
        match batch.spans.last_mut() {
            Some((start, from, len)) if *start + *len == unit && *from + *len == buffer => {
                *len += 1
            }
            _ => batch.spans.push((unit, buffer, 1)),
        }
        self.used += 1;
        self.budget -= 1;
    }

    /// A unit for the next block; `None` if there is none, or no device request for it.
    fn next_unit(&mut self, res: &mut Resources) -> Option<u32> {
        if self.units.len == 0 {
            if res.log.batches[self.batch].spans.len() >= BATCH_IOS_MAX {
                return None;
            }
            let inline = if self.inline {
                res.log.current.take(&mut res.alloc, self.budget)
            } else {
                None
            };
            self.units = inline.or_else(|| res.alloc.take_run(self.budget))?;
        }
        let unit = self.units.start;
        self.units.start += 1;
        self.units.len -= 1;
        Some(unit)
    }

    /// Whether a block of data can be added now.
    pub(super) fn has_unit(&mut self, res: &mut Resources) -> bool {
        if self.budget == 0 {
            return false;
        }
        let Some(unit) = self.next_unit(res) else {
            return false;
        };
        // Back to where it was taken from, for the block.
        self.units.start = unit;
        self.units.len += 1;
        true
    }
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
            let op = self.parts[part].op;
            if op != NONE {
                self.ops[op].is_logged = true;
            }
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
        let is_lost = entry.unit == UNIT_LOST && !entry.is_unknown();
        let is_this = is_lost && entry.version == self.parts[part].version;
        is_this && self.parts[part].place.is_partly_covered(i)
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
            } else if entry.is_unknown() && self.may_be_outdated(part) {
                self.ask_to_renumber(part);
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

    /// Adds the whole blocks of a discard that it changes; `false` when the batch is full before that.
    ///
    /// Those that are newer are left out: should their map page be lost, replay could not tell that they are.
    fn fill_zero_runs(&mut self, filling: &mut Filling, part: u32) -> bool {
        let (first, last, kind) = self.zero_range(part);
        let slot = self.leaf_slot(part);
        loop {
            let (version, at) = (self.parts[part].version, self.parts[part].progress.cursor);
            let entries = self.res.map.leaves.entries(slot);
            let is_newer = |at: u16| entries[usize::from(at)].version > version;
            let from = (first + at as u16..last).find(|&at| !is_newer(at));
            let Some(from) = from else {
                return true;
            };
            if !filling.writer.has_room() {
                return false;
            }
            let end = (from..last).find(|&at| is_newer(at)).unwrap_or(last);
            let place = &self.parts[part].place;
            let entry = BatchEntry {
                layer: place.layer.0,
                version,
                chunk: place.chunk,
                unit: 0,
                block: place.in_chunk(from),
                count: end - from,
                kind,
            };
            filling.push_entry((part, from), entry, &mut self.res);
            self.parts[part].progress.cursor = u32::from(end - first);
        }
    }

    fn fill_zeroes(&mut self, filling: &mut Filling, part: u32) -> bool {
        if !self.fill_zero_runs(filling, part) {
            return false;
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
        let epoch = match self.ops[p.op].kind {
            OpKind::Fence(fence) => Some(fence.epoch),
            _ => None,
        };
        let kind = match epoch {
            Some(_) => entry_kind::FENCE,
            None => entry_kind::FENCE_DROP,
        };
        let entry = BatchEntry {
            layer: p.place.layer.0,
            version: p.version,
            chunk: 0,
            unit: 0,
            block: 0,
            count: 0,
            kind,
        };
        filling.push_entry((part, 0), entry, &mut self.res);
        if let Some(epoch) = epoch {
            filling.push_epoch(epoch, &mut self.res);
        }
        true
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
        if filling.is_full() {
            return false;
        }
        let Some(unit) = filling.next_unit(&mut self.res) else {
            return false;
        };
        let buffer = filling.buffer(&self.res);
        let p = &self.parts[part];
        let (from, to) = p.place.covered(i);
        let inside = from as usize % UNIT_BYTES..from as usize % UNIT_BYTES + (to - from) as usize;
        let arena = &mut self.res.arena;
        if inside.len() < UNIT_BYTES {
            match p.old.buffer_of(i) {
                Some(old) => arena.copy_block(old, buffer),
                None => arena.buf_mut().blocks_mut(buffer, 1).fill(0),
            }
        }
        let block = arena.buf_mut().blocks_mut(buffer, 1);
        if from_op {
            self.ops[p.op].copy_in(from, &mut block[inside]);
        } else {
            block[inside].fill(0);
        }
        let first = p.place.first + i as u16;
        let data = DataBlock {
            layer: p.place.layer.0,
            chunk: p.place.chunk,
            block: p.place.in_chunk(first),
            unit,
            crc: crc32c(block),
            version: p.version,
        };
        filling.push_block((part, first), &data, &mut self.res);
        true
    }
}
