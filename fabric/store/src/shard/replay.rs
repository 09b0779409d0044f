//! What only opening does to a shard: applying the log to the map.

use std::collections::BTreeSet;

use fabric_types::checksum::crc32c;
use zerocopy::IntoBytes;

use super::super::api::{CoreParams, Fence, LayerId};
use super::super::device::SyncDevice;
use super::super::error::OpenError;
use super::super::format::{
    BatchEntry, CHUNK_BLOCKS, LEAF_BLOCKS, MapEntry, Page, Ptr, UNIT_LOST, UNIT_UNMAPPED,
    UNIT_ZERO, entry_kind, is_place, record_kind,
};
use super::super::leaf::{LeafState, StandIn};
use super::super::log::ReadEntry;
use super::super::table::NONE;
use super::{ShardCore, leaf_slots};

/// What replay found: units to claim at its end, and counts.
#[derive(Debug, Default)]
pub(crate) struct Replay {
    /// Units that the log used or replaced.
    pub touched: Vec<u32>,
    /// Blocks mapped or unmapped.
    pub blocks: u64,
    /// Blocks that keep what was to make room for data that are not there: by layer, chunk and number. What
    /// the log says of one later came after those data, whatever its version.
    kept: BTreeSet<(u64, u32, u16)>,
}

impl Replay {
    /// The block of this entry keeps what it has.
    pub(crate) fn keep(&mut self, dropped: &BatchEntry) {
        let key = (dropped.layer, dropped.chunk, dropped.block);
        self.kept.insert(key);
    }
}

impl ShardCore {
    /// Applies one entry; `good[i]` says whether data block `i` is intact.
    pub(crate) fn replay(
        &mut self,
        read: &ReadEntry,
        good: &[bool],
        out: &mut Replay,
    ) -> Result<(), OpenError> {
        let entry = read.entry;
        let layer = LayerId(entry.layer);
        match entry.kind {
            entry_kind::FENCE => {
                self.res.map.table.raise_fence(
                    layer,
                    Fence {
                        generation: entry.version as u32,
                        epoch: read.epoch,
                    },
                );
                return Ok(());
            }
            entry_kind::FENCE_DROP => {
                self.res.map.table.drop_fence(layer);
                return Ok(());
            }
            _ => {}
        }
        let first = u32::from(entry.block);
        let (leaf, last) = (first as usize / LEAF_BLOCKS, first + u32::from(entry.count));
        let within = last <= CHUNK_BLOCKS && (last as usize).div_ceil(LEAF_BLOCKS) == leaf + 1;
        let rec = self.res.map.table.find_or_create(layer, entry.chunk);
        let (true, Some(rec)) = (within, rec) else {
            return Err(self.damaged("log entry", entry.unit));
        };
        let slot = self.leaf_now(rec, leaf as u8);
        if entry.kind != entry_kind::DROP {
            let newest = &mut self.res.map.table.runtime_mut(rec).newest;
            *newest = entry.version.max(*newest);
        }
        for i in 0..entry.count {
            let block = (usize::from(entry.block + i)) % LEAF_BLOCKS;
            let old = self.res.map.leaves.entries(slot)[block];
            // What is not mapped may carry the floor of a neighbour that was dropped after this entry was
            // logged. When it was logged it was the newest, and what came after follows in the log.
            let newer = old.version > entry.version
                && old.unit != UNIT_UNMAPPED
                && entry.kind != entry_kind::DROP;
            let new = replayed(read, i);
            if entry.kind == entry_kind::DATA {
                out.touched.push(new.unit);
                // Invariant *Verified*: after power loss a header may be there without its data.
                if !good[usize::from(i)] {
                    continue;
                }
            }
            let key = (entry.layer, entry.chunk, entry.block + i);
            if !out.kept.remove(&key) && newer {
                continue;
            }
            out.blocks += 1;
            self.res.map.leaves.entries_mut(slot)[block] = new;
            if is_place(old.unit) {
                out.touched.push(old.unit);
                self.res.alloc.uncommit(old.unit);
            }
            if is_place(new.unit) {
                self.res.alloc.commit(new.unit);
            }
        }
        Ok(())
    }

    fn damaged(&self, what: &'static str, unit: u32) -> OpenError {
        OpenError::Damaged {
            what,
            shard: self.res.geo.shard,
            offset: self.res.geo.offset(unit),
        }
    }

    /// Where the leaf is on the device, and the record that names it; `None` when it is not there or already
    /// cached.
    pub(crate) fn stored_leaf(&self, layer: u64, chunk: u32, leaf: u8) -> Option<(u32, u8, Ptr)> {
        let rec = self.res.map.table.find(LayerId(layer), chunk)?;
        let ptr = self
            .res
            .map
            .table
            .record(rec)
            .leaves
            .get(usize::from(leaf))?;
        let is_cached = self.res.map.leaf_slot(rec, leaf) != NONE;
        (ptr.unit != 0 && !is_cached).then_some((rec, leaf, *ptr))
    }

    /// Puts a leaf read from the device into the cache.
    pub(crate) fn put_leaf(&mut self, rec: u32, leaf: u8, page: &[u8]) {
        let slot = self.new_leaf(rec, leaf);
        self.res.map.leaves.fill_from(slot, page);
    }

    /// Puts a leaf in the place of one that cannot be read, for this reason: nothing is known of it but what
    /// the log says. False if so many pages cannot be lost.
    pub(crate) fn put_stand_in(&mut self, rec: u32, leaf: u8, result: Result<(), i32>) -> bool {
        if !self.res.may_stand_in(result) {
            return false;
        }
        let slot = self.new_leaf(rec, leaf);
        let (first, ptr) = (
            self.res.map.first_block(rec, leaf),
            self.res.map.leaf_ptr(rec, leaf),
        );
        self.res.damage.tell_leaf(first, ptr.unit, result);
        self.res.stand_in(slot, result);
        true
    }

    /// Puts a leaf of which nothing is known in the place of one whose checksum does not fit, for good:
    /// nothing is in use because of that one.
    pub(crate) fn give_up_leaf(&mut self, rec: u32, leaf: u8) {
        self.put_stand_in(rec, leaf, Ok(()));
        let slot = self.res.map.leaf_slot(rec, leaf);
        self.res.map.leaves.meta_mut(slot).stand_in = StandIn::No;
        self.res.map.leaves.entries_mut(slot);
        let first = self.res.map.first_block(rec, leaf);
        self.res.damage.forget_leaf(first);
        self.res.counters.lost_leaves += 1;
    }

    /// Reports the blocks of which nothing is known now that the log is replayed.
    pub(crate) fn report_unknown(&mut self) {
        for slot in 0..self.res.map.leaves.slots() {
            if self.res.map.leaves.meta(slot).state != LeafState::Ready {
                continue;
            }
            let (rec, leaf) = self.res.map.leaf_in(slot);
            let (layer, chunk, first) = self.res.map.first_block(rec, leaf);
            let entries = self.res.map.leaves.entries(slot);
            for (block, _) in (first..).zip(entries).filter(|(_, e)| e.is_unknown()) {
                let key = (layer, chunk, block);
                self.res.damage.report_unknown(key, UNIT_LOST);
            }
        }
    }

    /// The cached leaf, or an empty one: what the device has of the log's leaves was put into the cache
    /// before.
    fn leaf_now(&mut self, rec: u32, leaf: u8) -> u32 {
        let cached = self.res.map.leaf_slot(rec, leaf);
        if cached != NONE {
            return cached;
        }
        let record = *self.res.map.table.record(rec);
        assert_eq!(record.leaves[usize::from(leaf)].unit, 0);
        let slot = self.new_leaf(rec, leaf);
        self.res.map.leaves.fill_empty(slot, record.floor);
        slot
    }

    fn new_leaf(&mut self, rec: u32, leaf: u8) -> u32 {
        self.res
            .map
            .take_leaf_slot(rec, leaf, LeafState::Ready)
            .expect("the cache has room for the whole log")
    }

    /// Brings the leaf cache, which replay made as large as the log wanted it, down to its bound. The
    /// recovery checkpoint left nothing in it that is not on the device.
    pub(crate) fn shrink_leaf_cache(&mut self, params: &CoreParams, shards: u32) {
        let slots = leaf_slots(params, shards);
        for (rec, leaf) in self.res.map.leaves.shrink_to(slots) {
            self.res.map.forget_leaf(rec, leaf);
        }
    }

    fn read_unit(&self, dev: &mut dyn SyncDevice, unit: u32) -> Result<Box<Page>, OpenError> {
        let (mut page, offset) = (Page::zeroed(), self.res.geo.offset(unit));
        dev.read_at(offset, &mut page.0)
            .map_err(|source| OpenError::Io {
                what: "read a map page",
                offset,
                source,
            })?;
        Ok(page)
    }

    /// See [`Resources::forget_counts`](super::resources::Resources::forget_counts). To be called when the
    /// log is replayed, before the recovery checkpoint.
    pub(crate) fn forget_counts(&mut self) {
        self.res.forget_counts();
    }

    /// Ends replay: whatever the log used and the map does not refer to comes back with the next checkpoint.
    pub(crate) fn finish_replay(&mut self, mut replay: Replay) {
        replay.touched.sort_unstable();
        replay.touched.dedup();
        for unit in replay.touched {
            self.res.alloc.claim(unit);
            if !self.res.alloc.committed().get(unit) {
                self.res.alloc.quarantine_unit(unit);
            }
        }
        self.res.map.table.note_bare();
    }

    /// Compares the space map, and the counts of stored blocks, with what the map refers to; a description of
    /// the first difference. For tests and tools: reads every map page, and expects nothing in flight.
    pub fn check(&self, dev: &mut dyn SyncDevice) -> Result<(), String> {
        let mut seen = super::super::bitmap::Bitmap::new(self.res.geo.units);
        let mut refer = |unit: u32, what: &str| {
            if !self.res.alloc.is_data_unit(unit) || !seen.set(unit) {
                return Err(format!(
                    "unit {unit} ({what}) is referred to twice or outside the data area"
                ));
            }
            if !self.res.alloc.committed().get(unit) {
                return Err(format!("unit {unit} ({what}) is in use and not marked"));
            }
            Ok(())
        };
        // Of what a lost map page named nobody knows.
        let mut is_all_known = !self.res.leaks;
        let map = &self.res.map;
        let pages = map.table.page_ptrs.iter();
        let tables = pages
            .chain(&map.table.dir_ptrs)
            .chain([map.roots.table_root()]);
        for ptr in tables.filter(|p| p.unit != 0) {
            refer(ptr.unit, "table page")?;
        }
        for rec in 0..self.res.map.table.slots() {
            let record = self.res.map.table.record(rec);
            for (leaf, ptr) in record
                .leaves
                .iter()
                .enumerate()
                .filter(|_| record.kind == record_kind::CHUNK)
            {
                if ptr.unit != 0 {
                    refer(ptr.unit, "leaf")?;
                }
                let slot = map.leaf_slot(rec, leaf as u8);
                let mut entries = [MapEntry::default(); LEAF_BLOCKS];
                let mut is_known = ptr.unit == 0;
                if slot != NONE && self.res.map.leaves.meta(slot).state == LeafState::Ready {
                    entries = *self.res.map.leaves.entries(slot);
                    let meta = map.leaves.meta(slot);
                    is_known = meta.dirty || meta.stand_in == StandIn::No;
                } else if ptr.unit != 0 {
                    let page = self.read_unit(dev, ptr.unit).map_err(|e| e.to_string())?;
                    if crc32c(&page.0) == ptr.crc {
                        entries.as_mut_bytes().copy_from_slice(&page.0);
                        is_known = true;
                    } else {
                        is_all_known = false;
                    }
                }
                self.check_count((rec, leaf as u8), is_known.then_some(&entries), dev)?;
                is_all_known &= slot == NONE || map.leaves.meta(slot).stand_in == StandIn::No;
                for entry in entries.iter().filter(|e| is_place(e.unit)) {
                    refer(entry.unit, "data")?;
                }
            }
        }
        if !is_all_known {
            return Ok(());
        }
        match (0..self.res.geo.units).find(|&u| self.res.alloc.committed().get(u) && !seen.get(u)) {
            Some(unit) => Err(format!("unit {unit} is marked and nothing refers to it")),
            None => Ok(()),
        }
    }
}

/// What an entry makes of its block `i`.
fn replayed(read: &ReadEntry, i: u16) -> MapEntry {
    let version = read.entry.version;
    let (unit, crc) = match read.entry.kind {
        entry_kind::DATA => (read.entry.unit + u32::from(i), read.crcs[usize::from(i)]),
        entry_kind::DROP => return MapEntry::default(),
        entry_kind::ZERO => (UNIT_ZERO, 0),
        entry_kind::LOST => (UNIT_LOST, read.entry.unit),
        _ => (UNIT_UNMAPPED, 0),
    };
    MapEntry { unit, crc, version }
}
