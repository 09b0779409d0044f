//! The end of a batch: the map changes, and whoever waited hears it.

use super::super::api::StoreError;
use super::super::format::{MapEntry, UNIT_LOST, UNIT_UNMAPPED, UNIT_ZERO, entry_kind};
use super::enospc::is_no_space;
use super::log_state::Item;
use super::operations::NO_SPACE;
use super::{OpKind, PartKind, ShardCore};

impl ShardCore {
    pub(super) fn on_log_write(&mut self, io: u32, batch: u32, result: Result<(), i32>) {
        self.res.device.give_back(io);
        let state = &mut self.res.log.batches[batch];
        state.ios -= 1;
        if let Err(errno) = result {
            // A broken device is worse news than a full one.
            let known = state.errno.filter(|&errno| !is_no_space(errno));
            state.errno = known.or(Some(errno));
        }
        if state.ios > 0 {
            return;
        }
        if state.errno.is_some_and(is_no_space) {
            self.cancel_batch(batch);
        } else {
            self.finish_batch(batch);
        }
    }

    pub(super) fn finish_batch(&mut self, slot: u32) {
        let batch = &self.res.log.batches[slot];
        // Invariant *Stable reads*: nothing can be read before all of it is on the device.
        assert_eq!(batch.ios, 0, "a batch ends with its last device write");
        let (buffer, blocks, header, errno) =
            (batch.buffer, batch.blocks, batch.header, batch.errno);
        let (watermark, cancelled) = (batch.watermark, batch.cancelled);
        self.res.log.note_done(slot);
        let mut items = std::mem::take(&mut self.res.log.batches[slot].items);
        self.res.arena.give_back(buffer, blocks);
        self.res.alloc.quarantine_unit(header);
        let error = match errno {
            None => {
                self.res.log.note_recorded(watermark);
                items.iter().for_each(|item| self.apply(item));
                if !items.is_empty() {
                    self.note_room();
                }
                cancelled.then_some(NO_SPACE)
            }
            Some(errno) => {
                self.res.faults.fail(errno);
                for &part in &self.res.log.batches[slot].parts {
                    let p = &self.parts[part];
                    if p.kind == PartKind::Move {
                        // What was to be moved is still where it was.
                        continue;
                    }
                    let place = &p.place;
                    let faults = &mut self.res.faults;
                    faults.poison(place.layer, place.chunk, place.range());
                }
                Some(StoreError::ReadOnly(errno))
            }
        };
        items.clear();
        self.res.log.batches[slot].items = items;
        self.end_parts(slot, error);
        self.res.log.batches.give_back(slot);
    }

    /// The batch is as far as it goes for the requests in it.
    pub(super) fn end_parts(&mut self, slot: u32, error: Option<StoreError>) {
        let mut parts = std::mem::take(&mut self.res.log.batches[slot].parts);
        for part in parts.drain(..) {
            let p = &mut self.parts[part];
            p.in_log.leave();
            if let Some(error) = error {
                p.outcome.fail(error);
            }
            if p.in_log.is_done() {
                self.finish_part(part);
            }
        }
        self.res.log.batches[slot].parts = parts;
    }

    /// The batch is on the device: the map changes.
    pub(super) fn apply(&mut self, item: &Item) {
        let p = &self.parts[item.part];
        let (version, layer, op) = (p.version, p.place.layer, p.op);
        match item.kind {
            entry_kind::FENCE => {
                if let OpKind::Fence(fence) = self.ops[op].kind {
                    self.res.map.table.raise_fence(layer, fence);
                }
            }
            entry_kind::FENCE_DROP => self.res.map.table.drop_fence(layer),
            entry_kind::DATA if self.parts[item.part].kind == PartKind::Move => {
                self.apply_move(item);
            }
            entry_kind::DATA => {
                let slot = self.leaf_slot(item.part);
                self.note_change(item.part, 1, true);
                self.note_healed(item.part, item.first);
                let entry = MapEntry {
                    unit: item.unit,
                    crc: item.crc,
                    version,
                };
                self.res.set_entry(slot, item.first, entry);
            }
            entry_kind::LOST => {
                let slot = self.leaf_slot(item.part);
                self.note_change(item.part, 1, false);
                let entry = MapEntry {
                    unit: UNIT_LOST,
                    crc: item.crc,
                    version,
                };
                self.res.set_entry(slot, item.first, entry);
            }
            _ => {
                let slot = self.leaf_slot(item.part);
                self.note_change(item.part, item.count, false);
                // What a restoration drops it replaces at once, maybe by something that is bad as well.
                let is_restored = self.parts[item.part].kind == PartKind::Restore;
                let is_replaced = is_restored && is_drop(item.kind);
                for block in item.first..item.first + item.count {
                    let is_changed = self.zero_entry(slot, block, item.kind, version);
                    if is_changed && !is_replaced {
                        self.note_healed(item.part, block);
                    }
                }
            }
        }
    }

    /// A block of the part's leaf is not bad any more, if it was.
    fn note_healed(&mut self, part: u32, block: u16) {
        let place = &self.parts[part].place;
        let key = (place.layer, place.chunk, u32::from(place.in_chunk(block)));
        self.res.damage.note_healed(key);
    }

    /// A guest changed blocks of the part's leaf.
    fn note_change(&mut self, part: u32, blocks: u16, written: bool) {
        let p = &self.parts[part];
        if p.kind != PartKind::Drop {
            let newest = &mut self.res.map.table.runtime_mut(p.place.rec).newest;
            *newest = p.version.max(*newest);
        }
        self.cleaner
            .note_change((p.place.rec, p.place.leaf), blocks, written);
    }

    /// Unmaps a block unless it is newer; whether it did.
    fn zero_entry(&mut self, slot: u32, block: u16, kind: u32, version: u64) -> bool {
        let old = self.res.map.leaves.entries(slot)[usize::from(block)];
        let entry = match is_drop(kind) {
            true => MapEntry::default(),
            false => MapEntry {
                unit: zero_target(kind),
                crc: 0,
                version,
            },
        };
        let is_changed = is_drop(kind) || old.version <= version;
        if is_changed {
            self.res.set_entry(slot, block, entry);
        }
        is_changed
    }
}

pub(super) fn is_drop(kind: u32) -> bool {
    kind == entry_kind::DROP
}

pub(super) fn zero_target(kind: u32) -> u32 {
    if kind == entry_kind::ZERO {
        UNIT_ZERO
    } else {
        UNIT_UNMAPPED
    }
}
