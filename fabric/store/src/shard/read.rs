//! Looking blocks up and reading them: for guests, for partly covered blocks of writes, for the scrubber.

use fabric_types::checksum::crc32c;
use fabric_types::iov::IovCursor;

use super::super::api::{LayerId, StoreError, Version};
use super::super::format::{UNIT_BYTES, UNIT_LOST, UNIT_UNMAPPED, UNIT_ZERO, is_place};
use super::super::table::NONE;
use super::leaves::LeafLookup;
use super::requests::{IoKind, IoOutcome};
use super::{PartKind, PartState, ShardCore};

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
        if self.parts[part].reader.is_none() {
            self.begin_reader(part);
        }
        while let Some((layer, chunk)) = self.next_layer(part) {
            if let Some(rec) = self.res.map.table.find(layer, chunk) {
                let leaf = self.parts[part].place.leaf;
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
            self.parts[part].lookup.next_layer();
        }
        let p = &mut self.parts[part];
        p.lookup.zero_rest();
        p.state = if p.kind.is_read() {
            PartState::Issue
        } else {
            PartState::Fetch
        };
        p.progress.cursor = 0;
        self.advance(part)
    }

    /// The layer in which the part's blocks are to be looked up next, and the chunk; `None` when all are
    /// found or no layer is left.
    fn next_layer(&self, part: u32) -> Option<(LayerId, u32)> {
        let p = &self.parts[part];
        if p.lookup.unresolved() == 0 {
            return None;
        }
        let at = p.lookup.layer();
        let layer = match p.op {
            NONE => (at == 0).then_some(p.place.layer),
            op => self.ops[op].layer(at),
        };
        layer.map(|layer| (layer, p.place.chunk))
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
        self.parts[part].reader = Some(self.res.alloc.begin_reader());
    }

    /// The part reads no units any more that a checkpoint may free.
    pub(super) fn end_reader(&mut self, part: u32) {
        if let Some(tag) = self.parts[part].reader.take() {
            self.res.alloc.end_reader(tag);
        }
    }

    /// Sets buffers aside for the old content that a write needs, see [`Waiting`](super::waiting::Waiting).
    fn promise_old(&mut self, part: u32) -> bool {
        let p = &mut self.parts[part];
        let buffers = p.lookup.unresolved();
        p.kind.is_read() || p.old.promise(buffers, &mut self.waiting)
    }

    fn resolve_from(&mut self, part: u32, slot: u32) {
        let p = &mut self.parts[part];
        let own = (!p.kind.is_read()).then_some(p.version);
        let entries = &self.res.map.leaves.entries(slot)[usize::from(p.place.first)..];
        p.lookup.resolve(entries, own);
    }

    /// Queues the device reads of a resolved part; `false` when resources ran out, to go on later.
    pub(super) fn issue_reads(&mut self, part: u32) -> bool {
        let count = u32::from(self.parts[part].place.count);
        while self.parts[part].progress.cursor < count {
            let at = self.parts[part].progress.cursor;
            let found = self.parts[part].lookup.found(at as u16);
            if found.unit == UNIT_ZERO || found.unit == UNIT_UNMAPPED {
                self.zero_fill(part, at);
                self.parts[part].progress.cursor += 1;
                continue;
            }
            if found.unit == UNIT_LOST {
                self.accuse(part, at as u16, Ok(()));
                self.parts[part].progress.cursor += 1;
                continue;
            }
            let Some(io) = self.res.device.take_for_read() else {
                return false;
            };
            let Some(blocks) = self.issue_read(io, part, at) else {
                self.res.device.give_back(io);
                return false;
            };
            self.parts[part].progress.ios += 1;
            self.parts[part].progress.cursor += blocks;
        }
        self.end_reads(part);
        true
    }

    fn zero_fill(&mut self, part: u32, i: u32) {
        let p = &self.parts[part];
        if p.op != NONE {
            self.ops[p.op].zero(p.place.covered(i));
        }
    }

    /// One device read from block `at` on; returns how many blocks it takes.
    fn issue_read(&mut self, io: u32, part: u32, at: u32) -> Option<u32> {
        let p = &self.parts[part];
        let unit = p.lookup.found(at as u16).unit;
        let run = p.lookup.run_from(at);
        let full = |i: u32| !p.place.is_partly_covered(at + i);
        let direct = p.op != NONE && self.ops[p.op].aligned && full(0);
        let first = at as u16;
        if direct {
            let op = &self.ops[p.op];
            let run = if full(run - 1) { run } else { run - 1 };
            let (from, _) = p.place.covered(at);
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
            let found = self.parts[part].lookup.found(index);
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
                self.parts[part].progress.retry.push(index);
            }
        }
        if let Some(buffer) = buffer {
            self.res.arena.give_back(buffer, u32::from(count));
        }
        self.res.device.give_back(io);
        self.parts[part].progress.ios -= 1;
        self.end_reads(part);
    }

    fn copy_out(&mut self, part: u32, index: u16, buffer: u32) {
        let p = &self.parts[part];
        if p.op == NONE {
            self.res.counters.scrubbed_blocks += 1;
            return;
        }
        let (from, to) = p.place.covered(u32::from(index));
        let block = self.res.arena.buf().blocks(buffer, 1);
        let inside = from as usize % UNIT_BYTES;
        self.ops[p.op].copy_out(from, &block[inside..inside + (to - from) as usize]);
    }

    /// A block was bad twice, or its data are lost.
    fn accuse(&mut self, part: u32, index: u16, result: Result<(), i32>) {
        let p = &self.parts[part];
        let (key, unit) = (p.place.key(index), p.lookup.found(index).unit);
        let error = self.res.note_damage(key, unit, result);
        if self.parts[part].kind != PartKind::Scrub {
            self.parts[part].outcome.fail(error);
            return;
        }
        let version = Version(self.current_version(part, index));
        self.res.report(key, version, unit);
    }

    fn current_version(&self, part: u32, index: u16) -> u64 {
        let p = &self.parts[part];
        let rec = self.res.map.table.find(p.place.layer, p.place.chunk);
        let slot = rec.map_or(NONE, |rec| self.res.map.leaf_slot(rec, p.place.leaf));
        if slot == NONE {
            0
        } else {
            self.res.map.leaves.entries(slot)[usize::from(p.place.first + index)].version
        }
    }

    /// Finishes the part when its last read is in, or queues what must be read again.
    fn end_reads(&mut self, part: u32) {
        let p = &mut self.parts[part];
        if p.progress.ios > 0 || p.progress.cursor < u32::from(p.place.count) {
            return;
        }
        if p.progress.retry.is_empty() {
            let bytes = u64::from(p.place.end - p.place.start);
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
        self.parts[part].progress.cursor = 0;
        while let Some(&index) = self.parts[part].progress.retry.last() {
            let Some(io) = self.res.device.take_for_read() else {
                return false;
            };
            let Some((buffer, _)) = self.res.arena.take_for_read(1) else {
                self.res.device.give_back(io);
                return false;
            };
            self.parts[part].progress.retry.pop();
            self.parts[part].progress.ios += 1;
            self.res.device.aim(io, self.res.arena.iovec(buffer, 1));
            let unit = self.parts[part].lookup.found(index).unit;
            let kind = IoKind::Read {
                part,
                first: index,
                count: 1,
                buffer: Some(buffer),
                second: true,
            };
            self.res.read(io, unit, kind);
        }
        self.parts[part].progress.cursor = u32::from(self.parts[part].place.count);
        self.end_reads(part);
        true
    }

    /// Reads the old content of partly covered blocks that have any.
    pub(super) fn issue_fetches(&mut self, part: u32) -> bool {
        while self.parts[part].progress.cursor < 2 {
            let which = self.parts[part].progress.cursor as usize;
            let place = self.parts[part].place;
            let index = if which == 0 { 0 } else { place.count - 1 };
            let is_other = which == 0 || place.count > 1;
            let partial = is_other && place.is_partly_covered(u32::from(index));
            let found = self.parts[part].lookup.found(index);
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
                self.parts[part].old.buffers[which] = Some((index, buffer));
                self.parts[part].progress.ios += 1;
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
            self.parts[part].progress.cursor += 1;
        }
        if self.parts[part].progress.ios > 0 {
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
            self.parts[part].old.buffers[usize::from(which)].expect("fetched into a buffer");
        let found = self.parts[part].lookup.found(index);
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
        self.parts[part].progress.ios -= 1;
        if self.parts[part].progress.ios == 0 && self.parts[part].progress.cursor == 2 {
            self.end_fetches(part);
        }
    }

    fn end_fetches(&mut self, part: u32) {
        // The old content is in its buffers: a write that has to wait for space now holds no checkpoint up.
        self.end_reader(part);
        if self.parts[part].outcome.has_failed() {
            self.finish_part(part);
            return;
        }
        self.parts[part].progress.cursor = 0;
        self.parts[part].state = PartState::Acquire;
        self.waiting.run(part);
    }

    /// Gives back the buffers with old content.
    pub(super) fn release_old(&mut self, part: u32) {
        let old = &mut self.parts[part].old;
        old.release(&mut self.res.arena, &mut self.waiting);
    }
}
