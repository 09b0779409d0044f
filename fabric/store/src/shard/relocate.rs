//! Moving blocks for the cleaner: reading them into its buffer, proving them, and logging them in their new
//! place.
//!
//! Reading needs no order: the blocks are proved by their checksums, and a guest that writes meanwhile wins,
//! because a block is logged only if the map still says what it said. The log write then is a writer like
//! others, so that a write of the same blocks waits until it is done, and it until earlier ones are: between
//! the look at the map and the change of the map nothing else changes it. A bad block stays where it is and
//! is reported like a finding of the scrubber.

use fabric_types::checksum::crc32c;

use super::super::api::Version;
use super::super::format::{LEAF_BLOCKS, MapEntry};
use super::super::log::DataBlock;
use super::super::table::NONE;
use super::fill::Filling;
use super::leaves::LeafLookup;
use super::log_state::Item;
use super::part::Place;
use super::requests::{IoKind, IoOutcome};
use super::{PartKind, PartState, ShardCore};

/// What a part's cursor says while it reads, beside the block at which it goes on: blocks are to be read
/// again, or everything is queued.
const RETRIES: u32 = LEAF_BLOCKS as u32;
const ALL_QUEUED: u32 = RETRIES + 1;

impl ShardCore {
    /// Looks at a leaf, once it is in the cache, and begins to read what is to be moved.
    pub(super) fn step_locate_victims(&mut self, part: u32) -> bool {
        let p = &self.parts[part];
        let leaf = p.place.leaf;
        let Some(rec) = self.res.map.table.find(p.place.layer, p.place.chunk) else {
            self.finish_part(part);
            return true;
        };
        let lookup = self.look_up_leaf(part, rec, leaf);
        let slot = match lookup {
            LeafLookup::Ready(slot) => slot,
            LeafLookup::Loading => {
                self.cleaner.job.loaded = true;
                return true;
            }
            // The cleaner need not wait: it comes again.
            LeafLookup::Absent | LeafLookup::Stalled => {
                self.finish_part(part);
                return true;
            }
        };
        let loaded = std::mem::take(&mut self.cleaner.job.loaded);
        let place = (rec, leaf);
        if !self.cleaner.choose_moves(place, slot, &mut self.res) {
            // What was only looked at makes room before what guests use.
            self.res.map.leaves.meta_mut(slot).used &= !loaded;
            self.finish_part(part);
            return true;
        }
        self.cleaner.job.begin_reads();
        let p = &mut self.parts[part];
        p.progress.cursor = 0;
        p.state = PartState::Relocate;
        self.begin_reader(part);
        self.advance(part)
    }

    /// Queues the device reads of the chosen blocks; `false` when requests ran out, to go on later.
    pub(super) fn issue_relocations(&mut self, part: u32) -> bool {
        loop {
            let Some((first, count)) = self.cleaner.job.next_run(self.parts[part].progress.cursor)
            else {
                self.parts[part].progress.cursor = RETRIES;
                break;
            };
            if !self.issue_relocation(part, (first, count), false) {
                return false;
            }
            self.parts[part].progress.cursor = u32::from(first + count);
        }
        while let Some(&index) = self.cleaner.job.retry.last() {
            if !self.issue_relocation(part, (index, 1), true) {
                return false;
            }
            self.cleaner.job.retry.pop();
        }
        self.parts[part].progress.cursor = ALL_QUEUED;
        if self.parts[part].progress.ios == 0 {
            self.end_relocation(part);
        }
        true
    }

    fn issue_relocation(&mut self, part: u32, (first, count): (u16, u16), second: bool) -> bool {
        let Some(io) = self.res.device.take_for_read() else {
            return false;
        };
        let job = &self.cleaner.job;
        let unit = job.entry(first).unit;
        self.res.device.aim(io, job.memory(first, count));
        self.parts[part].progress.ios += 1;
        let kind = IoKind::Relocate {
            part,
            first,
            count,
            second,
        };
        self.res.read(io, unit, kind);
        true
    }

    /// Invariant *Verified*: only what its checksum proves is moved.
    pub(super) fn on_relocation(
        &mut self,
        io: u32,
        part: u32,
        (first, count): (u16, u16),
        second: bool,
        outcome: IoOutcome<'_>,
    ) {
        self.res.device.give_back(io);
        self.parts[part].progress.ios -= 1;
        for i in 0..count {
            let index = first + i;
            let job = &self.cleaner.job;
            let entry = job.entry(index);
            if outcome.proves(i, entry.crc, || crc32c(job.block(index))) {
                continue;
            }
            if second {
                self.leave_behind(part, index, outcome.result);
            } else {
                self.res.counters.checksum_retries += 1;
                self.cleaner.job.retry.push(index);
            }
        }
        let p = &mut self.parts[part];
        if p.progress.cursor < ALL_QUEUED {
            // The part is in a list already, and goes on by itself.
            return;
        }
        if !self.cleaner.job.retry.is_empty() {
            p.progress.cursor = RETRIES;
            self.waiting.run(part);
        } else if p.progress.ios == 0 {
            self.end_relocation(part);
        }
    }

    /// A block was bad twice: it stays, and whoever reads it hears so.
    fn leave_behind(&mut self, part: u32, index: u16, result: Result<(), i32>) {
        // The part is about a whole leaf.
        let key = self.parts[part].place.key(index);
        let MapEntry { unit, version, .. } = self.cleaner.leave_behind(index);
        self.res.note_damage(key, unit, result);
        self.res.report(key, Version(version), unit);
    }

    /// All that can be read is in the buffer: from here on it is a write.
    fn end_relocation(&mut self, part: u32) {
        self.end_reader(part);
        let place = self.parts[part].place;
        let rec = self.res.map.table.find(place.layer, place.chunk);
        let job = &self.cleaner.job;
        let nothing = job.chosen_from(0) == 0 || job.next_unit().is_none();
        let (Some(rec), false, None) = (
            rec,
            nothing || self.ckpt.is_closing(),
            self.res.faults.errno(),
        ) else {
            self.finish_part(part);
            return;
        };
        self.parts.give_back(part);
        self.start_part(NONE, PartKind::Move, Place { rec, ..place }, 0);
    }

    /// Puts the chosen blocks that the map still has where they were into the batch; `false` when it is full.
    pub(super) fn fill_moves(&mut self, filling: &mut Filling, part: u32) -> bool {
        let slot = self.leaf_slot(part);
        while self.parts[part].progress.cursor < LEAF_BLOCKS as u32 {
            let at = self.parts[part].progress.cursor as u16;
            let job = &self.cleaner.job;
            let now = self.res.map.leaves.entries(slot)[usize::from(at)];
            if job.is_chosen(at) && now == job.entry(at) {
                let Some(unit) = job.next_unit() else {
                    // Guests needed the room.
                    return true;
                };
                if filling.is_full() || filling.is_too_scattered(unit, &self.res) {
                    return false;
                }
                self.fill_move(filling, part, at);
            }
            self.parts[part].progress.cursor += 1;
        }
        true
    }

    fn fill_move(&mut self, filling: &mut Filling, part: u32, index: u16) {
        let source = self.cleaner.job.entry(index);
        let buffer = filling.buffer(&self.res);
        let block = self.res.arena.buf_mut().blocks_mut(buffer, 1);
        block.copy_from_slice(self.cleaner.job.block(index));
        if crc32c(block) != source.crc {
            // Proved when it was read, so that it went bad in memory. On the device it is as it was.
            self.res.counters.checksum_errors += 1;
            self.cleaner.job.leave(index);
            return;
        }
        let unit = self.cleaner.job.take_unit();
        let p = &self.parts[part];
        let data = DataBlock {
            layer: p.place.layer.0,
            chunk: p.place.chunk,
            block: p.place.in_chunk(index),
            unit,
            crc: source.crc,
            version: source.version,
        };
        filling.push_block((part, index), &data, &mut self.res);
    }

    /// The block is in its new place.
    pub(super) fn apply_move(&mut self, item: &Item) {
        let slot = self.leaf_slot(item.part);
        let source = self.cleaner.job.entry(item.first);
        let now = self.res.map.leaves.entries(slot)[usize::from(item.first)];
        // A move changes neither content nor version, and nothing else changed the block meanwhile.
        assert_eq!(
            (now, item.crc),
            (source, source.crc),
            "a moved block changed"
        );
        let entry = MapEntry {
            unit: item.unit,
            ..source
        };
        self.res.set_entry(slot, item.first, entry);
    }
}
