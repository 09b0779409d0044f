//! Map pages that memory holds, compared with what the device has of them.
//!
//! A page that is cached is read by nobody, and chunk table pages are read at opening alone. That the device
//! has lost one shows when it is wanted again, and by then the copy in memory may be gone. The scrubber
//! therefore reads them on its way, and the next checkpoint writes a damaged one again, to another place.

use fabric_types::block::is_media_error;
use fabric_types::checksum::crc32c;

use super::super::format::{PAGE_RECORDS, Ptr};
use super::super::leaf::{LeafState, StandIn};
use super::super::table::NONE;
use super::ShardCore;
use super::map::LeafPlace;
use super::requests::{IoKind, IoOutcome};

/// A page that is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum VerifiedPage {
    Leaf { rec: u32, leaf: u8 },
    Table { page: u32 },
}

impl ShardCore {
    /// Compares the page of a leaf, if it is cached, and with the first leaf of a table page that.
    pub(super) fn verify_pages(&mut self, place: &LeafPlace) {
        // What a checkpoint is writing need not be there yet.
        if self.ckpt.is_running() {
            return;
        }
        let page = place.rec / PAGE_RECORDS as u32;
        if self.scrubber.begins_table_page(page) {
            self.verify(VerifiedPage::Table { page });
        }
        let (rec, leaf) = (place.rec, place.leaf);
        let slot = self.res.map.leaf_slot(rec, leaf);
        if slot != NONE {
            let meta = self.res.map.leaves.meta(slot);
            if meta.state != LeafState::Ready || meta.dirty {
                return;
            }
            if meta.stand_in == StandIn::No {
                self.verify(VerifiedPage::Leaf { rec, leaf });
            } else if meta.pins == 0 {
                // Nothing has been changed in it: the page itself is looked at once more.
                self.res.map.drop_unread_leaf(slot);
            }
        }
    }

    fn place_of(&self, page: VerifiedPage) -> Ptr {
        let map = &self.res.map;
        match page {
            VerifiedPage::Leaf { rec, leaf } => map.leaf_ptr(rec, leaf),
            VerifiedPage::Table { page } => map.table.page_ptrs[page as usize],
        }
    }

    pub(super) fn verify(&mut self, page: VerifiedPage) {
        let ptr = self.place_of(page);
        if ptr.unit == 0 {
            return;
        }
        let Some(io) = self.res.device.take_for_read() else {
            return;
        };
        let Some((buffer, _)) = self.res.arena.take_for_read(1) else {
            self.res.device.give_back(io);
            return;
        };
        self.res.device.aim(io, self.res.arena.iovec(buffer, 1));
        let second = false;
        let kind = IoKind::Verify {
            page,
            ptr,
            buffer,
            second,
        };
        self.res.read(io, ptr.unit, kind);
    }

    pub(super) fn on_verified(
        &mut self,
        io: u32,
        (page, ptr): (VerifiedPage, Ptr),
        (buffer, second): (u32, bool),
        outcome: IoOutcome<'_>,
    ) {
        let compute = || crc32c(self.res.arena.buf().blocks(buffer, 1));
        let is_good = outcome.proves(0, ptr.crc, compute);
        // Replaced meanwhile, its place may hold anything.
        let is_named = self.place_of(page) == ptr;
        if !is_good && is_named && !second {
            self.res.counters.checksum_retries += 1;
            let second = true;
            let kind = IoKind::Verify {
                page,
                ptr,
                buffer,
                second,
            };
            self.res.read(io, ptr.unit, kind);
            return;
        }
        if is_good && is_named {
            self.count_read(page, buffer);
        }
        self.res.arena.give_back(buffer, 1);
        self.res.device.give_back(io);
        let is_damaged = outcome.result.err().is_none_or(is_media_error);
        if !is_good && is_named && is_damaged {
            self.rewrite(page, ptr);
        }
    }

    /// Has the next checkpoint write the page again, if memory still holds it.
    fn rewrite(&mut self, page: VerifiedPage, ptr: Ptr) {
        let map = &mut self.res.map;
        match page {
            VerifiedPage::Leaf { rec, leaf } => {
                let slot = map.leaf_slot(rec, leaf);
                let is_held = slot != NONE && {
                    let meta = map.leaves.meta(slot);
                    meta.state == LeafState::Ready && meta.stand_in == StandIn::No
                };
                if !is_held {
                    return;
                }
                map.leaves.entries_mut(slot);
            }
            VerifiedPage::Table { page } => {
                map.table.record_mut(page * PAGE_RECORDS as u32);
            }
        }
        self.res.counters.rewritten_pages += 1;
        let device_offset = self.res.geo.offset(ptr.unit);
        tracing::warn!(
            device_offset,
            "a damaged page of the map is written again from memory; replace the device if more follow"
        );
        self.ckpt.want_another();
    }
}
