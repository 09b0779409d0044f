//! What replicas need beside reading and writing: telling what a block is, and making it what another replica
//! has. See `docs/REPLICATION.md`.

use fabric_types::checksum::crc32c;

use super::super::api::{BlockStamp, Holds, LayerId, StoreError, StoreResult};
use super::super::format::{
    BatchEntry, CHUNK_BLOCKS, LEAF_BLOCKS, MapEntry, UNIT_BYTES, UNIT_UNMAPPED, UNIT_ZERO,
    entry_kind,
};
use super::super::table::NONE;
use super::fill::Filling;
use super::leaves::LeafLookup;
use super::operations::NO_SPACE;
use super::part::Place;
use super::{PartKind, ShardCore};

impl ShardCore {
    pub(super) fn start_inspect(
        &mut self,
        slot: u32,
        (layer, chunk, block): (LayerId, u32, u32),
        iovecs: &[libc::iovec],
    ) -> StoreResult {
        let count = self.set_iovecs(slot, iovecs) / size_of::<BlockStamp>() as u64;
        let [iov] = self.ops[slot].iovs.as_slice() else {
            return Err(StoreError::OutOfRange);
        };
        let whole = iov.iov_len % size_of::<BlockStamp>() == 0
            && iov.iov_base as usize % align_of::<BlockStamp>() == 0;
        let end = u64::from(block) + count;
        let leaf_end = (u64::from(block) / LEAF_BLOCKS as u64 + 1) * LEAF_BLOCKS as u64;
        let is_outside = end > leaf_end || end > u64::from(CHUNK_BLOCKS) || chunk == u32::MAX;
        if !whole || count == 0 || is_outside {
            return Err(StoreError::OutOfRange);
        }
        self.start_blocks(slot, PartKind::Inspect, (layer, chunk), (block, end as u32));
        Ok(())
    }

    pub(super) fn start_restore(
        &mut self,
        slot: u32,
        (layer, chunk, block): (LayerId, u32, u32),
        restore: [BlockStamp; 2],
        iovecs: &[libc::iovec],
    ) -> StoreResult {
        self.res.faults.refuse_if_failed()?;
        let bytes = self.set_iovecs(slot, iovecs);
        let may_bring = match restore[1].holds() {
            // Without data: they are lost.
            Holds::Data => bytes == UNIT_BYTES as u64 || iovecs.is_empty(),
            Holds::Nothing | Holds::Zeroes => bytes == 0,
        };
        if !may_bring || block >= CHUNK_BLOCKS || chunk == u32::MAX {
            return Err(StoreError::OutOfRange);
        }
        // The record is made now, so that there is room for it when the log has it.
        let record = self.res.map.table.find_or_create(layer, chunk);
        record.ok_or(NO_SPACE)?;
        let part = self.start_blocks(slot, PartKind::Restore, (layer, chunk), (block, block + 1));
        self.parts[part].restore = restore;
        Ok(())
    }

    /// Starts the one part of an operation on whole blocks.
    fn start_blocks(
        &mut self,
        slot: u32,
        kind: PartKind,
        (layer, chunk): (LayerId, u32),
        (first, end): (u32, u32),
    ) -> u32 {
        let rec = self.res.map.table.find(layer, chunk).unwrap_or(NONE);
        let block = UNIT_BYTES as u32;
        let op = &mut self.ops[slot];
        (op.chunk, op.offset, op.fua, op.layer_count) = (chunk, first * block, false, 1);
        op.layers[0] = layer.0;
        op.parts_left = 1;
        let place = Place::new((layer, chunk, rec), (first * block, end * block));
        self.start_part(slot, kind, place, 0)
    }

    /// Looks the blocks up and tells what they are.
    pub(super) fn step_inspect(&mut self, part: u32) -> bool {
        let Place {
            rec,
            leaf,
            first,
            count,
            ..
        } = self.parts[part].place;
        let lookup = match rec {
            NONE => LeafLookup::Absent,
            rec => self.look_up_leaf(part, rec, leaf),
        };
        match lookup {
            LeafLookup::Loading => return true,
            LeafLookup::Stalled => return self.fail_if_hopeless(part),
            LeafLookup::Ready(slot) => {
                for i in 0..count {
                    let entry = self.res.map.leaves.entries(slot)[usize::from(first + i)];
                    if entry.is_unknown() {
                        let key = self.parts[part].place.key(i);
                        self.res.damage.note_unknown(key);
                    }
                    self.tell(part, i, stamp_of(&entry));
                }
            }
            LeafLookup::Absent => {
                let version = match rec {
                    NONE => 0,
                    rec => self.res.map.table.record(rec).floor,
                };
                let stamp = BlockStamp {
                    version,
                    ..BlockStamp::default()
                };
                (0..count).for_each(|i| self.tell(part, i, stamp));
            }
        }
        self.finish_part(part);
        true
    }

    /// The map page of the blocks cannot be read.
    pub(super) fn tell_unknown(&mut self, part: u32) {
        let count = self.parts[part].place.count;
        (0..count).for_each(|i| self.tell(part, i, BlockStamp::UNKNOWN));
        self.finish_part(part);
    }

    fn tell(&mut self, part: u32, i: u16, stamp: BlockStamp) {
        let iov = self.ops[self.parts[part].op].iovs[0];
        // SAFETY: the submitter keeps the memory valid until the completion; `start_inspect` saw that it is
        // aligned and has room for a stamp for each block of the part.
        unsafe {
            iov.iov_base
                .cast::<BlockStamp>()
                .add(usize::from(i))
                .write(stamp);
        }
    }

    /// Puts the restored block into the batch, unless it has changed.
    pub(super) fn fill_restored(&mut self, filling: &mut Filling, part: u32) -> bool {
        let slot = self.leaf_slot(part);
        let (first, [expect, stamp]) = (self.parts[part].place.first, self.parts[part].restore);
        let entry = self.res.map.leaves.entries(slot)[usize::from(first)];
        let now = stamp_of(&entry);
        // What is there is not given up for nothing, only if it could not be read.
        let loses_itself = now == stamp
            && !now.is_unknown()
            && stamp.holds() == Holds::Data
            && !self.brings_data(part)
            && !self.is_known_bad(part, &entry);
        if now != expect || loses_itself {
            self.parts[part].outcome.fail(StoreError::Changed);
            return true;
        }
        // An older version replaces a newer one only if that is dropped before, at recovery as well. What is
        // not known here may be newer, and recovery may be able to read it.
        let is_older = now.version > stamp.version || now.is_unknown();
        let drops = is_older || stamp.holds() == Holds::Nothing;
        let entries = u32::from(drops) + 1;
        let needs_data = self.brings_data(part);
        if !filling.writer.has_room_for(entries) || (needs_data && !filling.has_unit(&mut self.res))
        {
            return false;
        }
        if needs_data && !self.is_as_stamped(part, stamp.crc) {
            self.parts[part].outcome.fail(StoreError::Mismatch);
            return true;
        }
        if drops {
            self.fill_without_data(filling, part, entry_kind::DROP);
        }
        self.parts[part].version = stamp.version;
        match stamp.holds() {
            Holds::Data if !needs_data => self.fill_without_data(filling, part, entry_kind::LOST),
            Holds::Data => {
                let filled = self.fill_block(filling, part, 0, true);
                assert!(filled, "there was room for it");
                let items = &self.res.log.batches[filling.batch].items;
                if items.last().is_none_or(|item| item.crc != stamp.crc) {
                    // It changed between two looks: what is stored has its own checksum, and the submitter is
                    // told.
                    self.parts[part].outcome.fail(StoreError::Mismatch);
                }
            }
            Holds::Zeroes => self.fill_without_data(filling, part, entry_kind::ZERO),
            Holds::Nothing => self.fill_without_data(filling, part, entry_kind::UNMAP),
        }
        true
    }

    fn is_known_bad(&self, part: u32, entry: &MapEntry) -> bool {
        let key = self.parts[part].place.key(0);
        self.res.damage.is_known(key, entry.unit)
    }

    /// Whether a restored block comes with its data.
    pub(super) fn brings_data(&self, part: u32) -> bool {
        !self.ops[self.parts[part].op].iovs.is_empty()
    }

    fn is_as_stamped(&self, part: u32, crc: u32) -> bool {
        let mut block = [0; UNIT_BYTES];
        let op = &self.ops[self.parts[part].op];
        op.copy_in(op.offset, &mut block);
        crc32c(&block) == crc
    }

    /// Puts an entry for the restored block into the batch, behind which no data follow.
    fn fill_without_data(&mut self, filling: &mut Filling, part: u32, kind: u32) {
        let p = &self.parts[part];
        let first = p.place.first;
        let crc = match kind {
            entry_kind::LOST if p.restore[1].is_unknown() => MapEntry::UNKNOWN_FOR_GOOD.crc,
            entry_kind::LOST => p.restore[1].crc,
            _ => 0,
        };
        let version = match kind {
            entry_kind::DROP => u64::MAX,
            _ => p.version,
        };
        let entry = BatchEntry {
            layer: p.place.layer.0,
            version,
            chunk: p.place.chunk,
            unit: crc,
            block: p.place.in_chunk(first),
            count: 1,
            kind,
        };
        filling.push_entry((part, first), entry, &mut self.res);
    }
}

fn stamp_of(entry: &MapEntry) -> BlockStamp {
    if entry.is_unknown() {
        return BlockStamp::UNKNOWN;
    }
    let holds = match entry.unit {
        UNIT_UNMAPPED => Holds::Nothing,
        UNIT_ZERO => Holds::Zeroes,
        _ => Holds::Data,
    };
    BlockStamp {
        version: entry.version,
        crc: if holds == Holds::Data { entry.crc } else { 0 },
        holds: holds as u32,
    }
}
