//! What the machines of a shard use together, and borrow from it for each step.

use super::super::alloc::Allocator;
use super::super::api::{CoreParams, FlushMark, ScrubFinding, StoreError, StoreResult, Version};
use super::super::arena::Arena;
use super::super::format::{Geometry, LEAF_BLOCKS, MapEntry, UNIT_BYTES, is_place};
use super::super::leaf::{LEAVES_MIN, LeafCache, LeafState, StandIn};
use super::super::metrics::StoreMetrics;
use super::damage::{BlockKey, Damage};
use super::faults::Faults;
use super::log_state::Log;
use super::map::Map;
use super::requests::{DeviceRequests, IoKind};
use super::roots::MapRoots;
use super::{Loaded, leaf_slots};

/// Buffers of a shard at least: checkpoint buffers, a few log batches and reads.
const ARENA_BLOCKS_MIN: u64 = 1024;
/// Map pages of a shard that the device refuses to give, and that are replaced all the same, at most from one
/// opening to the next. With more it is the device that is bad: what needs such a page fails, and so does an
/// opening that does.
pub(crate) const REFUSED_LEAVES_MAX: u32 = 16;

/// Units, buffers, device requests, the map and the log of one shard, and what is known to be wrong with
/// them.
#[derive(Debug)]
pub(super) struct Resources {
    pub(super) geo: Geometry,
    pub(super) alloc: Allocator,
    pub(super) arena: Arena,
    pub(super) device: DeviceRequests,
    pub(super) map: Map,
    pub(super) log: Log,
    pub(super) faults: Faults,
    pub(super) damage: Damage,
    pub(super) counters: StoreMetrics,
    /// Units are in use by the space map that no page names.
    pub(super) leaks: bool,
    /// The counts of the chunk table are right, on the device too.
    pub(super) counted: bool,
    /// What the file system under the device has left is for others.
    pub(super) leaves_host_space: bool,
    /// Pages replaced that the device refused to give, see [`REFUSED_LEAVES_MAX`].
    refused_leaves: u32,
}

impl Resources {
    pub(super) fn new(loaded: Loaded, params: &CoreParams) -> Self {
        let log = Log::new(&loaded);
        let geo = loaded.geo;
        let leaves = leaf_slots(params, loaded.shards);
        let leaves = leaves.max(loaded.leaves_needed.saturating_add(LEAVES_MIN));
        let blocks = params.buffer_bytes / u64::from(loaded.shards) / UNIT_BYTES as u64;
        let blocks = blocks.clamp(ARENA_BLOCKS_MIN, 1 << 20) as u32;
        Self {
            geo,
            alloc: loaded.alloc,
            arena: Arena::new(blocks),
            device: DeviceRequests::new(geo),
            map: Map {
                table: loaded.table,
                leaves: LeafCache::new(leaves),
                roots: MapRoots::new(
                    loaded.table_root,
                    loaded.bitmap_ptrs,
                    loaded.bitmap_dir_ptrs,
                ),
            },
            log,
            faults: Faults::new(geo.shard),
            damage: Damage::new(geo),
            counters: StoreMetrics::default(),
            leaks: loaded.leaks,
            counted: loaded.counted,
            leaves_host_space: false,
            refused_leaves: 0,
        }
    }

    /// Queues the device read of `unit`.. into the memory that the request aims at.
    pub(super) fn read(&mut self, io: u32, unit: u32, kind: IoKind) {
        self.device.read(io, unit, kind, &mut self.counters);
    }

    /// Queues the device write of buffer blocks `first..first + count` to `unit`...
    pub(super) fn write(&mut self, io: u32, unit: u32, (first, count): (u32, u32), kind: IoKind) {
        self.device.aim(io, self.arena.iovec(first, count));
        self.device.write(io, unit, kind, &mut self.counters);
    }

    /// Queues a device flush.
    pub(super) fn flush(&mut self, io: u32, kind: IoKind) {
        self.device.flush(io, kind, &mut self.counters);
    }

    /// Makes the writes again that were put off.
    pub(super) fn retry_put_off(&mut self) {
        self.device.retry_put_off(&mut self.counters);
    }

    /// A block was bad twice, or its data are lost.
    pub(super) fn note_damage(
        &mut self,
        key: BlockKey,
        unit: u32,
        result: Result<(), i32>,
    ) -> StoreError {
        self.counters.checksum_errors += 1;
        self.damage.note(key, unit, result)
    }

    /// Keeps a finding for whoever repairs: a block of this version is bad in `unit`.
    pub(super) fn report(&mut self, (layer, chunk, block): BlockKey, version: Version, unit: u32) {
        self.damage.report(ScrubFinding {
            layer,
            chunk,
            block,
            version,
            device_offset: self.damage.place_of(unit),
        });
    }

    /// What a flush that begins now will cover.
    pub(super) fn mark(&self) -> FlushMark {
        self.log.mark()
    }

    /// A flush that began at `mark` is done.
    pub(super) fn note_flushed(&mut self, mark: FlushMark) -> StoreResult {
        self.faults.refuse_if_flush_lost()?;
        self.log.note_flushed(mark);
        Ok(())
    }

    /// Whether all batches up to `lsn` are done. One that is put off because the device file's file system is
    /// full may stay for ever, and nobody waits for it.
    pub(super) fn is_in_order(&self, lsn: u64) -> bool {
        self.log.completed_lsn() >= lsn || self.device.is_under_space_pressure()
    }

    /// Whether a leaf may stand for a page that cannot be read, for this reason.
    ///
    /// An error of the device is no proof that the page is lost, and one that is broken answers so to
    /// everything.
    pub(super) fn may_stand_in(&self, result: Result<(), i32>) -> bool {
        result.is_ok() || self.refused_leaves + self.map.leaves.refused() < REFUSED_LEAVES_MAX
    }

    /// The leaf in the slot stands for a page that cannot be read, for this reason.
    pub(super) fn stand_in(&mut self, slot: u32, result: Result<(), i32>) {
        self.map.leaves.fill_unknown(slot, result.is_err());
        self.map.leaves.meta_mut(slot).state = LeafState::Ready;
        let (rec, leaf) = self.map.leaf_in(slot);
        let unit = self.map.leaf_ptr(rec, leaf).unit;
        let first = self.map.first_block(rec, leaf);
        self.damage.note_stand_in(first, unit);
    }

    /// The page of a leaf that stands for it can be read after all. What was changed meanwhile is newer.
    ///
    /// The log that an opening has replayed over such a leaf begins before the page was written. So the page
    /// may name the place that the log names, too, or one that the log has replaced: that is in quarantine,
    /// or the space map, which is younger than the page, has it free.
    pub(super) fn take_reread(&mut self, slot: u32, page: &[MapEntry; LEAF_BLOCKS]) {
        self.map.leaves.meta_mut(slot).stand_in = StandIn::No;
        let (rec, leaf) = self.map.leaf_in(slot);
        let (layer, chunk, first) = self.map.first_block(rec, leaf);
        self.damage.forget_leaf((layer, chunk, first));
        for (block, entry) in (0_u16..).zip(page) {
            let now = self.map.leaves.entries(slot)[usize::from(block)];
            if now == MapEntry::UNKNOWN {
                self.map.leaves.entries_mut(slot)[usize::from(block)] = *entry;
                if !entry.is_unknown() {
                    let key = (layer, chunk, first + u32::from(block));
                    self.damage.note_healed(key);
                }
            } else if is_place(entry.unit)
                && entry.unit != now.unit
                && self.alloc.committed().get(entry.unit)
            {
                self.alloc.free(entry.unit);
            }
        }
    }

    /// A checkpoint replaces the page of the leaf in the slot, or drops it. If the leaf stood for a page that
    /// could not be read, nothing names any more what that named.
    pub(super) fn note_replaced(&mut self, slot: u32) {
        let meta = self.map.leaves.meta_mut(slot);
        let stand_in = std::mem::replace(&mut meta.stand_in, StandIn::No);
        if stand_in == StandIn::No {
            return;
        }
        self.refused_leaves += u32::from(stand_in.is_by_device());
        let (rec, leaf) = self.map.leaf_in(slot);
        self.damage.forget_leaf(self.map.first_block(rec, leaf));
        self.counters.lost_leaves += 1;
        self.leaks = true;
    }

    /// Replaces an entry of the map; the unit it named comes back later.
    pub(super) fn set_entry(&mut self, slot: u32, block: u16, entry: MapEntry) {
        let entries = self.map.leaves.entries_mut(slot);
        let old = std::mem::replace(&mut entries[usize::from(block)], entry);
        if is_place(entry.unit) {
            self.alloc.commit(entry.unit);
        }
        if is_place(old.unit) && old.unit != entry.unit {
            self.alloc.free(old.unit);
        }
    }
}
