//! How much data each chunk stores, and counting what programs of earlier versions have not counted.
//!
//! What a map page maps is counted whenever it is written. The pages of a store that is older than that are
//! counted as they are read for whatever reason; and each time the shard has a rest, some more are read for
//! this alone, once through the whole map.

use fabric_types::checksum::crc32c;
use zerocopy::FromBytes;

use super::super::device::SyncDevice;
use super::super::format::{LEAF_BLOCKS, MapEntry, Page, UNIT_BYTES, record_kind, stored_blocks};
use super::super::leaf::{LeafState, StandIn};
use super::super::table::NONE;
use super::ShardCore;
use super::map::{LeafCursor, Map};
use super::resources::Resources;
use super::verify::VerifiedPage;

/// Map pages read in one rest. There are at most five rests a second, so this is a third of a MiB a second.
const READS_MAX: u32 = 16;
/// Map pages looked for in one rest, which takes a fraction of a millisecond.
const LEAVES_MAX: u32 = 1 << 16;

/// How far counting is.
#[derive(Debug, Default)]
pub(super) struct Counter {
    /// Pages before this one are counted, or cannot be read.
    cursor: LeafCursor,
}

impl Counter {
    /// The next leaf whose page nobody has counted, if it is among the next few; `None` otherwise.
    fn next(&mut self, map: &Map, looks: &mut u32) -> Option<(u32, u8)> {
        while *looks > 0 && !self.cursor.is_at_end(map) {
            *looks -= 1;
            let Some(place) = self.cursor.take(map) else {
                continue;
            };
            if map.stored_blocks(place.rec, place.leaf).is_none() {
                return Some((place.rec, place.leaf));
            }
        }
        None
    }
}

impl Resources {
    /// Takes the count of a leaf's page, as the page is on the device.
    ///
    /// A full shard has no room for another copy of the table page: then the count is written with the next
    /// change of that page, or taken again after the next opening.
    pub(super) fn note_counted(&mut self, (rec, leaf): (u32, u8), stored: u32) {
        let leaf = usize::from(leaf);
        let record = self.map.table.record(rec);
        if record.leaves[leaf].unit != 0 && record.stored(leaf) != Some(stored) {
            let is_kept = self.spares(1);
            self.map.table.set_stored(rec, leaf, stored, is_kept);
        }
    }

    /// The program that wrote the newest checkpoint does not know of counts: those in the chunk table may be
    /// of map pages that it has replaced. See [`Superblock::counted`].
    ///
    /// [`Superblock::counted`]: super::super::format::Superblock::counted
    pub(super) fn forget_counts(&mut self) {
        let pages = self.map.table.forget_counts();
        // With too little room for them they stay on the device, and no checkpoint says that they are right.
        self.counted = self.spares(pages.len() as u32);
        if self.counted {
            self.map.table.touch_pages(&pages);
        }
    }
}

impl ShardCore {
    /// See [`StoreCore::next_stored`](super::super::api::StoreCore::next_stored): of the chunk in a record.
    pub(super) fn stored_bytes(&self, rec: u32) -> Option<u64> {
        let map = &self.res.map;
        let leaves = 0..map.table.record(rec).leaves.len() as u8;
        let blocks: Option<u32> = leaves.map(|leaf| map.stored_blocks(rec, leaf)).sum();
        blocks.map(|blocks| u64::from(blocks) * UNIT_BYTES as u64)
    }

    /// The next record of a chunk at or after `cursor`.
    pub(super) fn next_chunk_record(&self, cursor: u32) -> Option<u32> {
        let table = &self.res.map.table;
        (cursor..table.slots()).find(|&slot| table.record(slot).kind == record_kind::CHUNK)
    }

    /// Counts some pages that nobody has counted. The shard is idle.
    pub(super) fn count_some(&mut self) {
        // What a checkpoint is writing need not be there yet. Reads of the last rest may still be under way.
        if self.ckpt.is_running() || self.res.device.executing() > 0 {
            return;
        }
        // A device that fails is not asked for what only people want to know.
        if self.res.faults.has_failed() {
            return;
        }
        let mut looks = LEAVES_MAX;
        for _ in 0..READS_MAX {
            let Some((rec, leaf)) = self.counter.next(&self.res.map, &mut looks) else {
                return;
            };
            let slot = self.res.map.leaf_slot(rec, leaf);
            if slot == NONE {
                self.verify(VerifiedPage::Leaf { rec, leaf });
            } else {
                self.count_cached(slot);
            }
        }
    }

    /// Counts a page that is in the cache and has not been changed there.
    pub(super) fn count_cached(&mut self, slot: u32) {
        let meta = self.res.map.leaves.meta(slot);
        let is_page = meta.state == LeafState::Ready && meta.stand_in == StandIn::No && !meta.dirty;
        if is_page {
            let stored = stored_blocks(self.res.map.leaves.entries(slot));
            let place = self.res.map.leaf_in(slot);
            self.res.note_counted(place, stored);
        }
    }

    /// Whether the count of a leaf is that of these entries, as it has them now, and the one in the chunk
    /// table that of the page it names. A description of the difference.
    pub(super) fn check_count(
        &self,
        (rec, leaf): (u32, u8),
        entries: Option<&[MapEntry; LEAF_BLOCKS]>,
        dev: &mut dyn SyncDevice,
    ) -> Result<(), String> {
        let map = &self.res.map;
        let (told, found) = (map.stored_blocks(rec, leaf), entries.map(stored_blocks));
        if told.is_some() && found.is_some() && told != found {
            return Err(format!(
                "{told:?} blocks are counted in {rec}.{leaf}, which has {found:?}"
            ));
        }
        let (record, ptr) = (map.table.record(rec), map.leaf_ptr(rec, leaf));
        let Some(told) = record.stored(usize::from(leaf)).filter(|_| ptr.unit != 0) else {
            return Ok(());
        };
        let mut page = Page::zeroed();
        let read = dev.read_at(self.res.geo.offset(ptr.unit), &mut page.0);
        if read.is_err() || crc32c(&page.0) != ptr.crc {
            return Ok(());
        }
        let entries = <[MapEntry; LEAF_BLOCKS]>::ref_from_bytes(&page.0);
        let found = stored_blocks(entries.expect("a page holds 256 entries and is aligned"));
        match told == found {
            true => Ok(()),
            false => Err(format!(
                "{told} blocks are counted in the page of {rec}.{leaf}, it has {found}"
            )),
        }
    }

    /// Counts a page that was read into a buffer and has the checksum in the record.
    pub(super) fn count_read(&mut self, page: VerifiedPage, buffer: u32) {
        let VerifiedPage::Leaf { rec, leaf } = page else {
            return;
        };
        let bytes = self.res.arena.buf().blocks(buffer, 1);
        let entries = <[MapEntry; LEAF_BLOCKS]>::ref_from_bytes(bytes);
        let stored = stored_blocks(entries.expect("a page holds 256 entries and is aligned"));
        self.res.note_counted((rec, leaf), stored);
    }
}
