//! Looking blocks up and reading them: for guests, for partly covered blocks of writes, for the scrubber.

use fabric_types::checksum::crc32c;
use fabric_types::iov::{self, IovCursor};

use super::super::api::{LayerId, ScrubFinding, StoreError, Version};
use super::super::format::{
    LEAF_BLOCKS, UNIT_BYTES, UNIT_LOST, UNIT_UNMAPPED, UNIT_ZERO, is_place,
};
use super::super::table::NONE;
use super::leaves::LeafLookup;
use super::requests::{IoKind, IoOutcome};
use super::{Found, PartKind, PartState, ShardCore};

/// Scatter list elements of one device read (the kernel takes 1024).
const READ_IOVECS_MAX: usize = 1000;
/// Blocks of one read into buffers.
const BUFFER_READ_BLOCKS: u32 = 32;

impl ShardCore {
    /// Looks up every block of the part along the layer chain.
    pub(super) fn step_resolve(&mut self, part: u32) -> bool {
        if !self.promise_old(part) {
            self.waiting.wait_for_old(part);
            return true;
        }
        if self.parts[part].tag.is_none() {
            self.begin_reader(part);
        }
        loop {
            let p = &self.parts[part];
            let (op, leaf, at) = (p.op, p.leaf, p.chain_at);
            let chain = if op == NONE {
                1
            } else {
                self.ops[op].layer_count
            };
            if p.unresolved == 0 || at == chain {
                break;
            }
            let layer = if op == NONE {
                p.layer
            } else {
                self.ops[op].layers[at]
            };
            if let Some(rec) = self.res.map.table.find(LayerId(layer), p.chunk) {
                match self.look_up_leaf(part, rec, leaf) {
                    LeafLookup::Ready(slot) => self.resolve_from(part, slot),
                    LeafLookup::Absent => {}
                    LeafLookup::Loading => return true,
                    LeafLookup::Stalled => {
                        // What was looked up so far may be overwritten, and reused, until the page can be
                        // read.
                        self.end_reader(part);
                        self.parts[part].begin_resolve();
                        return self.fail_if_hopeless(part);
                    }
                }
            }
            self.parts[part].chain_at += 1;
        }
        let p = &mut self.parts[part];
        if p.unresolved > 0 {
            p.map
                .iter_mut()
                .filter(|f| f.unit == UNIT_UNMAPPED)
                .for_each(|f| f.unit = UNIT_ZERO);
        }
        let read = matches!(p.kind, PartKind::Read | PartKind::Scrub);
        p.state = if read {
            PartState::Issue
        } else {
            PartState::Fetch
        };
        p.cursor = 0;
        self.advance(part)
    }

    /// With writing stopped no checkpoint makes room in a cache that is all dirty: a read of another page
    /// fails, rather than wait for ever. True if it did.
    pub(super) fn fail_if_hopeless(&mut self, part: u32) -> bool {
        match self.res.faults.errno() {
            Some(errno) if self.res.map.leaves.dirty() == self.res.map.leaves.slots() => {
                self.fail_part(part, StoreError::ReadOnly(errno));
                true
            }
            _ => false,
        }
    }

    /// The part reads units from now on that a checkpoint may free.
    pub(super) fn begin_reader(&mut self, part: u32) {
        self.parts[part].tag = Some(self.res.alloc.begin_reader());
    }

    /// The part reads no units any more that a checkpoint may free.
    pub(super) fn end_reader(&mut self, part: u32) {
        if let Some(tag) = self.parts[part].tag.take() {
            self.res.alloc.end_reader(tag);
        }
    }

    /// Sets buffers aside for the old content that a write needs, see [`Waiting`](super::waiting::Waiting).
    fn promise_old(&mut self, part: u32) -> bool {
        let p = &mut self.parts[part];
        if p.old_promised > 0 || matches!(p.kind, PartKind::Read | PartKind::Scrub) {
            return true;
        }
        if !self.waiting.promise_old(p.unresolved) {
            return false;
        }
        p.old_promised = p.unresolved;
        true
    }

    fn resolve_from(&mut self, part: u32, slot: u32) {
        let p = &mut self.parts[part];
        let is_read = matches!(p.kind, PartKind::Read | PartKind::Scrub);
        let entries = &self.res.map.leaves.entries(slot)[usize::from(p.first)..];
        for (found, entry) in p.map.iter_mut().zip(entries) {
            if found.unit == UNIT_UNMAPPED && entry.unit != UNIT_UNMAPPED {
                // What is there of a write that was lost itself stays as it is, see `fill_blocks`: nothing
                // has to be fetched. In an older layer such a version is another write's.
                let is_own = p.chain_at == 0 && !is_read;
                let is_this = is_own && entry.unit == UNIT_LOST && entry.version == p.version;
                *found = Found {
                    unit: if is_this { UNIT_ZERO } else { entry.unit },
                    crc: entry.crc,
                };
                p.unresolved -= 1;
            }
        }
    }

    /// Byte range of block `i` of the part that the operation covers, in the chunk.
    fn covered(&self, part: u32, i: u32) -> (u32, u32) {
        let p = &self.parts[part];
        let block = UNIT_BYTES as u32;
        let begin = (p.start / block + i) * block;
        (begin.max(p.start), (begin + block).min(p.end))
    }

    /// Queues the device reads of a resolved part; `false` when resources ran out, to go on later.
    pub(super) fn issue_reads(&mut self, part: u32) -> bool {
        let count = u32::from(self.parts[part].count);
        while self.parts[part].cursor < count {
            let at = self.parts[part].cursor;
            let found = self.parts[part].map[at as usize];
            if found.unit == UNIT_ZERO || found.unit == UNIT_UNMAPPED {
                self.zero_fill(part, at);
                self.parts[part].cursor += 1;
                continue;
            }
            if found.unit == UNIT_LOST {
                self.accuse(part, at as u16, Ok(()));
                self.parts[part].cursor += 1;
                continue;
            }
            let Some(io) = self.res.device.take_for_read() else {
                return false;
            };
            let Some(blocks) = self.issue_read(io, part, at, count) else {
                self.res.device.give_back(io);
                return false;
            };
            self.parts[part].ios += 1;
            self.parts[part].cursor += blocks;
        }
        self.end_reads(part);
        true
    }

    fn zero_fill(&mut self, part: u32, i: u32) {
        let (from, to) = self.covered(part, i);
        let op = self.parts[part].op;
        if op != NONE {
            let op = &self.ops[op];
            let mut cursor = IovCursor::default();
            cursor.seek(&op.iovs, (from - op.offset) as usize);
            // SAFETY: the submitter keeps the memory valid until the completion.
            unsafe { cursor.fill_zero(&op.iovs, (to - from) as usize) };
        }
    }

    /// One device read from block `at` on; returns how many blocks it takes.
    fn issue_read(&mut self, io: u32, part: u32, at: u32, count: u32) -> Option<u32> {
        let p = &self.parts[part];
        let unit = p.map[at as usize].unit;
        let run = (1..count - at)
            .find(|&i| p.map[(at + i) as usize].unit != unit + i)
            .unwrap_or(count - at);
        let full = |i: u32| {
            let (from, to) = self.covered(part, at + i);
            to - from == UNIT_BYTES as u32
        };
        let direct = p.op != NONE && self.ops[p.op].aligned && full(0);
        let first = at as u16;
        if direct {
            let op = &self.ops[p.op];
            let run = if full(run - 1) { run } else { run - 1 };
            let (from, _) = self.covered(part, at);
            let mut cursor = IovCursor::default();
            cursor.seek(&op.iovs, (from - op.offset) as usize);
            let iovs = self.res.device.new_iovs(io);
            let mut blocks = 0;
            while blocks < run && iovs.len() < READ_IOVECS_MAX - UNIT_BYTES / 512 {
                cursor.slice(&op.iovs, UNIT_BYTES, iovs);
                blocks += 1;
            }
            let kind = IoKind::Read {
                part,
                first,
                count: blocks as u16,
                buffer: None,
                second: false,
            };
            self.res.read(io, unit, kind);
            return Some(blocks);
        }
        let (buffer, blocks) = self.res.arena.take_for_read(run.min(BUFFER_READ_BLOCKS))?;
        self.res
            .device
            .aim(io, self.res.arena.iovec(buffer, blocks));
        let kind = IoKind::Read {
            part,
            first,
            count: blocks as u16,
            buffer: Some(buffer),
            second: false,
        };
        self.res.read(io, unit, kind);
        Some(blocks)
    }

    pub(super) fn end_read(
        &mut self,
        io: u32,
        part: u32,
        (first, count): (u16, u16),
        buffer: Option<u32>,
        second: bool,
        outcome: IoOutcome<'_>,
    ) {
        let mut cursor = IovCursor::default();
        for i in 0..count {
            let index = first + i;
            let found = self.parts[part].map[usize::from(index)];
            let compute = || match buffer {
                Some(buffer) => crc32c(self.res.arena.buf().blocks(buffer + u32::from(i), 1)),
                // SAFETY: the submitter keeps the memory valid; that it may change only makes the checksum
                // differ.
                None => unsafe { cursor.crc(self.res.device.iovs(io), UNIT_BYTES) },
            };
            if outcome.proves(i, found.crc, compute) {
                if let Some(buffer) = buffer {
                    self.copy_out(part, index, buffer + u32::from(i));
                }
            } else if second {
                self.accuse(part, index, outcome.result);
            } else {
                // A guest that writes into its own buffer meanwhile is no damage: read once more, in private.
                self.res.counters.checksum_retries += 1;
                self.parts[part].retry.push(index);
            }
        }
        if let Some(buffer) = buffer {
            self.res.arena.give_back(buffer, u32::from(count));
        }
        self.res.device.give_back(io);
        self.parts[part].ios -= 1;
        self.end_reads(part);
    }

    fn copy_out(&mut self, part: u32, index: u16, buffer: u32) {
        let (from, to) = self.covered(part, u32::from(index));
        let op = self.parts[part].op;
        if op == NONE {
            self.res.counters.scrubbed_blocks += 1;
            return;
        }
        let op = &self.ops[op];
        let block = self.res.arena.buf().blocks(buffer, 1);
        let inside = from as usize % UNIT_BYTES;
        let mut cursor = IovCursor::default();
        cursor.seek(&op.iovs, (from - op.offset) as usize);
        // SAFETY: the submitter keeps the memory valid until the completion.
        unsafe { cursor.copy_to(&op.iovs, &block[inside..inside + (to - from) as usize]) };
    }

    /// A block was bad twice, or its data are lost.
    fn accuse(&mut self, part: u32, index: u16, result: Result<(), i32>) {
        let p = &self.parts[part];
        let (layer, chunk, unit) = (LayerId(p.layer), p.chunk, p.map[usize::from(index)].unit);
        let block = u32::from(p.leaf) * LEAF_BLOCKS as u32 + u32::from(p.first + index);
        let error = self.res.note_damage((layer, chunk, block), unit, result);
        if self.parts[part].kind != PartKind::Scrub {
            self.parts[part].error.get_or_insert(error);
        } else {
            let device_offset = self.res.damage.place_of(unit);
            let version = Version(self.current_version(part, index));
            self.res.damage.report(ScrubFinding {
                layer,
                chunk,
                block,
                version,
                device_offset,
            });
        }
    }

    fn current_version(&self, part: u32, index: u16) -> u64 {
        let p = &self.parts[part];
        let rec = self.res.map.table.find(LayerId(p.layer), p.chunk);
        let slot = rec.map_or(NONE, |rec| self.res.map.leaf_slot(rec, p.leaf));
        if slot == NONE {
            0
        } else {
            self.res.map.leaves.entries(slot)[usize::from(p.first + index)].version
        }
    }

    /// Finishes the part when its last read is in, or queues what must be read again.
    fn end_reads(&mut self, part: u32) {
        let p = &mut self.parts[part];
        if p.ios > 0 || p.cursor < u32::from(p.count) {
            return;
        }
        if p.retry.is_empty() {
            let bytes = u64::from(p.end - p.start);
            let scrub = p.kind == PartKind::Scrub;
            self.res.counters.read_op_bytes += if scrub { 0 } else { bytes };
            self.finish_part(part);
        } else if p.state != PartState::Retry {
            p.state = PartState::Retry;
            self.waiting.run(part);
        }
    }

    pub(super) fn issue_retries(&mut self, part: u32) -> bool {
        // A cursor before the end says that something is still to be queued: the part does not end early.
        self.parts[part].cursor = 0;
        while let Some(&index) = self.parts[part].retry.last() {
            let Some(io) = self.res.device.take_for_read() else {
                return false;
            };
            let Some((buffer, _)) = self.res.arena.take_for_read(1) else {
                self.res.device.give_back(io);
                return false;
            };
            self.parts[part].retry.pop();
            self.parts[part].ios += 1;
            self.res.device.aim(io, self.res.arena.iovec(buffer, 1));
            let unit = self.parts[part].map[usize::from(index)].unit;
            let kind = IoKind::Read {
                part,
                first: index,
                count: 1,
                buffer: Some(buffer),
                second: true,
            };
            self.res.read(io, unit, kind);
        }
        self.parts[part].cursor = u32::from(self.parts[part].count);
        self.end_reads(part);
        true
    }

    /// Reads the old content of partly covered blocks that have any.
    pub(super) fn issue_fetches(&mut self, part: u32) -> bool {
        while self.parts[part].cursor < 2 {
            let which = self.parts[part].cursor as usize;
            let count = self.parts[part].count;
            let index = if which == 0 { 0 } else { count - 1 };
            let (from, to) = self.covered(part, u32::from(index));
            let partial = to - from < UNIT_BYTES as u32 && !(which == 1 && count == 1);
            let found = self.parts[part].map[usize::from(index)];
            if partial && found.unit == UNIT_LOST {
                self.accuse(part, index, Ok(()));
            }
            if partial && is_place(found.unit) {
                let Some(io) = self.res.device.take_for_read() else {
                    return false;
                };
                let Some((buffer, _)) = self.res.arena.take_for_read(1) else {
                    self.res.device.give_back(io);
                    return false;
                };
                self.parts[part].old[which] = Some((index, buffer));
                self.parts[part].ios += 1;
                self.res.device.aim(io, self.res.arena.iovec(buffer, 1));
                self.res.read(
                    io,
                    found.unit,
                    IoKind::Fetch {
                        part,
                        which: which as u8,
                        second: false,
                    },
                );
            }
            self.parts[part].cursor += 1;
        }
        if self.parts[part].ios > 0 {
            return true;
        }
        self.end_fetches(part);
        true
    }

    pub(super) fn on_fetch(
        &mut self,
        io: u32,
        part: u32,
        which: u8,
        second: bool,
        outcome: IoOutcome<'_>,
    ) {
        let (index, buffer) =
            self.parts[part].old[usize::from(which)].expect("fetched into a buffer");
        let found = self.parts[part].map[usize::from(index)];
        let compute = || crc32c(self.res.arena.buf().blocks(buffer, 1));
        let good = outcome.proves(0, found.crc, compute);
        if !good && !second {
            self.res.counters.checksum_retries += 1;
            self.res.read(
                io,
                found.unit,
                IoKind::Fetch {
                    part,
                    which,
                    second: true,
                },
            );
            return;
        }
        if !good {
            self.accuse(part, index, outcome.result);
        }
        self.res.device.give_back(io);
        self.parts[part].ios -= 1;
        if self.parts[part].ios == 0 && self.parts[part].cursor == 2 {
            self.end_fetches(part);
        }
    }

    fn end_fetches(&mut self, part: u32) {
        // The old content is in its buffers: a write that has to wait for space now holds no checkpoint up.
        self.end_reader(part);
        if self.parts[part].error.is_some() {
            self.finish_part(part);
            return;
        }
        self.parts[part].cursor = 0;
        self.parts[part].state = PartState::Acquire;
        self.waiting.run(part);
    }

    /// Gives back the buffers with old content.
    pub(super) fn release_old(&mut self, part: u32) {
        for which in 0..2 {
            if let Some((_, buffer)) = self.parts[part].old[which].take() {
                self.res.arena.give_back(buffer, 1);
            }
        }
        let promised = std::mem::take(&mut self.parts[part].old_promised);
        self.waiting.return_old(promised);
    }

    /// Copies the operation's bytes for chunk bytes `from..to` into a buffer block.
    pub(super) fn copy_in(&mut self, part: u32, from: u32, to: u32, buffer: u32) {
        let op = &self.ops[self.parts[part].op];
        let inside = from as usize % UNIT_BYTES;
        let block = &mut self.res.arena.buf_mut().blocks_mut(buffer, 1)
            [inside..inside + (to - from) as usize];
        // SAFETY: the submitter keeps the memory valid until the completion.
        unsafe { iov::copy_from(&op.iovs, (from - op.offset) as usize, block) };
    }

    /// See [`ShardCore::covered`].
    pub(super) fn covered_range(&self, part: u32, i: u32) -> (u32, u32) {
        self.covered(part, i)
    }
}
