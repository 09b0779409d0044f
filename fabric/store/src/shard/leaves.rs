//! Getting map pages into the cache, and saying what is damaged.

use fabric_types::checksum::crc32c;

use super::super::api::{LayerId, ScrubFinding, StoreError};
use super::super::format::{CHUNK_LEAVES, LEAF_BLOCKS, UNIT_BYTES, UNIT_LOST};
use super::super::leaf::LeafState;
use super::super::table::NONE;
use super::{FINDINGS_MAX, IoKind, IoOutcome, KNOWN_BAD_MAX, PartKind, ShardCore};

/// Outcome of a leaf lookup.
pub(super) enum LeafLookup {
    /// In this cache slot.
    Ready(u32),
    /// There is none: nothing of it is mapped.
    Absent,
    /// The part waits in the leaf's list.
    Loading,
    /// No cache or request slot is free.
    Stalled,
}

impl ShardCore {
    /// Finds the leaf of a record, or begins to read it and lets `part` wait for it.
    pub(super) fn look_up_leaf(&mut self, part: u32, rec: u32, leaf: u8) -> LeafLookup {
        let slot = self.table.runtime(rec).leaf_slots[usize::from(leaf)];
        if slot != NONE {
            let meta = self.leaves.meta_mut(slot);
            meta.used = true;
            if meta.state == LeafState::Ready {
                self.counters.leaf_hits += 1;
                return LeafLookup::Ready(slot);
            }
            self.parts[part].wait_next = meta.waiters;
            meta.waiters = part;
            return LeafLookup::Loading;
        }
        let ptr = self.table.record(rec).leaves[usize::from(leaf)];
        if ptr.unit == 0 {
            return LeafLookup::Absent;
        }
        let Some(io) = self.take_io(true) else {
            return LeafLookup::Stalled;
        };
        let Some(slot) = self.take_leaf_slot(rec, leaf, LeafState::Loading) else {
            self.ios.give_back(io);
            return LeafLookup::Stalled;
        };
        self.counters.leaf_misses += 1;
        self.leaves.meta_mut(slot).waiters = part;
        self.parts[part].wait_next = NONE;
        self.read_leaf(io, slot);
        LeafLookup::Loading
    }

    pub(super) fn take_leaf_slot(&mut self, rec: u32, leaf: u8, state: LeafState) -> Option<u32> {
        let Some((slot, evicted)) = self.leaves.take(rec, leaf, state) else {
            // Cleaning is what makes room when everything is dirty.
            if self.leaves.dirty() > 0 {
                self.ckpt.want();
            }
            return None;
        };
        if let Some((rec, leaf)) = evicted {
            self.table.runtime_mut(rec).leaf_slots[usize::from(leaf)] = NONE;
            self.note_if_bare(rec);
        }
        self.table.runtime_mut(rec).leaf_slots[usize::from(leaf)] = slot;
        Some(slot)
    }

    /// A record that has nothing any more may go at the next checkpoint.
    pub(super) fn note_if_bare(&mut self, rec: u32) {
        let runtime = self.table.runtime(rec);
        let bare = (0..CHUNK_LEAVES).all(|i| runtime.leaf_slots[i] == NONE);
        if bare && self.table.record(rec).leaves.iter().all(|p| p.unit == 0) {
            self.table.note_empty(rec);
        }
    }

    pub(super) fn read_leaf(&mut self, io: u32, slot: u32) {
        let meta = self.leaves.meta(slot);
        let unit = self.table.record(meta.rec).leaves[usize::from(meta.leaf)].unit;
        let base = self.leaves.page_ptr(slot).cast();
        self.ios[io].iovs.clear();
        self.ios[io].iovs.push(libc::iovec {
            iov_base: base,
            iov_len: UNIT_BYTES,
        });
        self.emit_read(io, unit, IoKind::Leaf { slot });
    }

    pub(super) fn on_leaf(&mut self, io: u32, slot: u32, told: IoOutcome<'_>) {
        let meta = *self.leaves.meta(slot);
        let ptr = self.table.record(meta.rec).leaves[usize::from(meta.leaf)];
        let good = told.proves(0, ptr.crc, || crc32c(self.leaves.bytes(slot)));
        if !good && !meta.retried {
            self.counters.checksum_retries += 1;
            self.leaves.meta_mut(slot).retried = true;
            self.read_leaf(io, slot);
            return;
        }
        self.ios.give_back(io);
        let mut waiter = meta.waiters;
        self.leaves.meta_mut(slot).waiters = NONE;
        let mut error = None;
        if good {
            self.leaves.meta_mut(slot).state = LeafState::Ready;
        } else {
            let block = u32::from(meta.leaf) * LEAF_BLOCKS as u32;
            error = Some(self.corrupt_error(meta.rec, block, ptr.unit, told.result));
            self.table.runtime_mut(meta.rec).leaf_slots[usize::from(meta.leaf)] = NONE;
            self.leaves.drop_slot(slot);
        }
        while waiter != NONE {
            let next = std::mem::replace(&mut self.parts[waiter].wait_next, NONE);
            match error {
                // Before anybody else takes the page's place in the cache, see `pump`.
                None => self.runnable.push_front(waiter),
                Some(error) => self.fail_part(waiter, error),
            }
            waiter = next;
        }
    }

    pub(super) fn corrupt_error(
        &mut self,
        rec: u32,
        block: u32,
        unit: u32,
        result: Result<(), i32>,
    ) -> StoreError {
        let record = self.table.record(rec);
        let (layer, chunk) = (LayerId(record.layer), record.index);
        self.block_error(layer, chunk, block, unit, result)
    }

    pub(super) fn block_error(
        &mut self,
        layer: LayerId,
        chunk: u32,
        block: u32,
        unit: u32,
        result: Result<(), i32>,
    ) -> StoreError {
        self.counters.checksum_errors += 1;
        self.note_bad((layer, chunk, block), unit);
        let device_offset = self.place_of(unit);
        match result {
            Err(errno) => {
                tracing::error!(
                    layer = layer.0,
                    chunk,
                    block,
                    device_offset,
                    errno,
                    "device read failed"
                );
                StoreError::Unreadable {
                    layer,
                    chunk,
                    block,
                    device_offset,
                    errno,
                }
            }
            Ok(()) => {
                let what = match unit {
                    UNIT_LOST => "the data are lost: no replica could read them",
                    _ => "checksum mismatch",
                };
                tracing::error!(layer = layer.0, chunk, block, device_offset, "{what}");
                StoreError::Corrupt {
                    layer,
                    chunk,
                    block,
                    device_offset,
                }
            }
        }
    }

    fn note_bad(&mut self, block: (LayerId, u32, u32), unit: u32) {
        if self.known_bad.len() >= KNOWN_BAD_MAX {
            self.known_bad.clear();
        }
        self.known_bad.insert(block, unit);
    }

    /// Byte of the device where a unit is; 0 for data that are nowhere.
    pub(super) fn place_of(&self, unit: u32) -> u64 {
        match unit {
            UNIT_LOST => 0,
            unit => self.geo.offset(unit),
        }
    }

    /// Ends a part that nothing of it is in flight of.
    pub(super) fn fail_part(&mut self, part: u32, error: StoreError) {
        self.parts[part].error.get_or_insert(error);
        if let PartKind::Scrub | PartKind::LocateVictims | PartKind::Move = self.parts[part].kind
            && let Some(finding) = error.finding()
        {
            self.report(finding);
        }
        self.finish_part(part);
    }

    pub(super) fn report(&mut self, finding: ScrubFinding) {
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push_back(finding);
        }
    }
}
