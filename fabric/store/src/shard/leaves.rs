//! Getting map pages into the cache.

use fabric_types::block::is_media_error;
use fabric_types::checksum::crc32c;

use super::super::api::StoreError;
use super::super::format::UNIT_BYTES;
use super::super::leaf::LeafState;
use super::super::table::NONE;
use super::part::Part;
use super::requests::{IoKind, IoOutcome};
use super::{PartKind, ShardCore};

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
        let res = &mut self.res;
        let slot = res.map.leaf_slot(rec, leaf);
        if slot != NONE {
            let meta = res.map.leaves.meta_mut(slot);
            meta.used = true;
            if meta.state == LeafState::Ready {
                res.counters.leaf_hits += 1;
                return LeafLookup::Ready(slot);
            }
            self.parts[part].wait_next = meta.waiters;
            meta.waiters = part;
            return LeafLookup::Loading;
        }
        if res.map.leaf_ptr(rec, leaf).unit == 0 {
            return LeafLookup::Absent;
        }
        let Some(io) = res.device.take_for_read() else {
            return LeafLookup::Stalled;
        };
        let Some(slot) = self.take_leaf_slot(rec, leaf, LeafState::Loading) else {
            self.res.device.give_back(io);
            return LeafLookup::Stalled;
        };
        self.res.counters.leaf_misses += 1;
        self.res.map.leaves.meta_mut(slot).waiters = part;
        self.parts[part].wait_next = NONE;
        self.read_leaf(io, slot);
        LeafLookup::Loading
    }

    pub(super) fn take_leaf_slot(&mut self, rec: u32, leaf: u8, state: LeafState) -> Option<u32> {
        let slot = self.res.map.take_leaf_slot(rec, leaf, state);
        // A checkpoint is what makes room when everything is dirty.
        if slot.is_none() && self.res.map.leaves.dirty() > 0 {
            self.ckpt.want();
        }
        slot
    }

    fn read_leaf(&mut self, io: u32, slot: u32) {
        let map = &self.res.map;
        let (rec, leaf) = map.leaf_in(slot);
        let unit = map.leaf_ptr(rec, leaf).unit;
        let page = libc::iovec {
            iov_base: map.leaves.page_ptr(slot).cast(),
            iov_len: UNIT_BYTES,
        };
        self.res.device.aim(io, page);
        self.res.read(io, unit, IoKind::Leaf { slot });
    }

    pub(super) fn on_leaf(&mut self, io: u32, slot: u32, told: IoOutcome<'_>) {
        let map = &mut self.res.map;
        let meta = *map.leaves.meta(slot);
        let ptr = map.leaf_ptr(meta.rec, meta.leaf);
        let good = told.proves(0, ptr.crc, || crc32c(map.leaves.bytes(slot)));
        if !good && !meta.retried {
            map.leaves.meta_mut(slot).retried = true;
            self.res.counters.checksum_retries += 1;
            self.read_leaf(io, slot);
            return;
        }
        self.res.device.give_back(io);
        map.leaves.meta_mut(slot).waiters = NONE;
        if good {
            map.leaves.meta_mut(slot).state = LeafState::Ready;
            let first = map.first_block(meta.rec, meta.leaf);
            let entries = map.leaves.entries(slot);
            self.res.damage.note_leaf_read(first, entries);
            self.count_cached(slot);
            self.each_waiter(meta.waiters, |shard, waiter| {
                // Before anybody else takes the page's place in the cache, see `pump`.
                shard.waiting.run_first(waiter);
            });
            return;
        }
        self.on_unread_leaf(slot, meta.waiters, told.result);
    }

    fn each_waiter(&mut self, first: u32, mut step: impl FnMut(&mut Self, u32)) {
        let mut waiter = first;
        while waiter != NONE {
            let next = std::mem::replace(&mut self.parts[waiter].wait_next, NONE);
            step(self, waiter);
            waiter = next;
        }
    }

    /// A page could not be read, twice. Whoever reads its blocks hears so. Whoever changes some goes on with
    /// a leaf of which nothing is known: that the page may yet be read does not help a guest that writes.
    ///
    /// Invariant *Verified*: what such a leaf says of a block is never that it reads as zeroes.
    fn on_unread_leaf(&mut self, slot: u32, waiters: u32, result: Result<(), i32>) {
        self.res.counters.checksum_errors += 1;
        let (rec, leaf) = self.res.map.leaf_in(slot);
        let unit = self.res.map.leaf_ptr(rec, leaf).unit;
        let first = self.res.map.first_block(rec, leaf);
        // A device that is gone, or busy, says nothing of the page.
        let is_damaged = result.err().is_none_or(is_media_error);
        let (mut is_changed, mut is_scrub) = (false, false);
        self.each_waiter_of(waiters, |part| {
            is_changed |= part.changes_leaf();
            is_scrub |= part.kind == PartKind::Scrub;
        });
        if is_damaged {
            let damage = &mut self.res.damage;
            damage.note_leaf(first, unit, (result, is_scrub));
        }
        let is_replaced = is_damaged && is_changed && self.res.may_stand_in(result);
        if is_replaced {
            self.res.stand_in(slot, result);
        } else {
            self.res.map.drop_unread_leaf(slot);
        }
        self.each_waiter(waiters, |shard, waiter| {
            let part = &shard.parts[waiter];
            if is_replaced && part.changes_leaf() {
                shard.waiting.run_first(waiter);
            } else if is_damaged && part.kind == PartKind::Inspect {
                shard.tell_unknown(waiter);
            } else if is_damaged && part.kind == PartKind::Scrub {
                // All its blocks are reported.
                shard.finish_part(waiter);
            } else {
                let key = part.place.key(0);
                let error = shard.res.damage.note_of_leaf(key, unit, result);
                shard.fail_part(waiter, error);
            }
        });
    }

    fn each_waiter_of(&self, first: u32, mut look: impl FnMut(&Part)) {
        let mut waiter = first;
        while waiter != NONE {
            look(&self.parts[waiter]);
            waiter = self.parts[waiter].wait_next;
        }
    }

    /// Ends a part that nothing of it is in flight of.
    pub(super) fn fail_part(&mut self, part: u32, error: StoreError) {
        self.parts[part].outcome.fail(error);
        if let PartKind::Scrub | PartKind::LocateVictims | PartKind::Move = self.parts[part].kind
            && let Some(finding) = error.finding()
        {
            self.res.damage.report(finding);
        }
        self.finish_part(part);
    }
}
