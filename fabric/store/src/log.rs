//! The log: its windows, and the encoding of batch headers.

use zerocopy::{FromBytes, IntoBytes};

use super::alloc::{Allocator, Run};
use super::format::{
    BatchEntry, BatchHeader, ENTRIES_BYTES_MAX, ENTRIES_OFFSET, LEAF_BLOCKS, REGION_UNITS,
    WINDOW_REGIONS_MAX, WindowRecord, entry_kind, seal,
};

/// The regions in which headers are written between two checkpoints.
#[derive(Debug, Default, Clone)]
pub struct Window {
    /// Number, never reused.
    pub id: u64,
    /// Its regions.
    pub regions: Vec<u32>,
    /// Region and unit up to which it is used.
    at: (usize, u32),
    /// Batches written to it.
    pub batches: u64,
    /// Free units when it was opened, and those taken since.
    opened_free: u32,
    taken: u32,
}

impl Window {
    /// A window of these regions.
    #[must_use]
    pub fn new(id: u64, regions: Vec<u32>) -> Self {
        Self {
            id,
            regions,
            at: (0, 0),
            batches: 0,
            opened_free: 0,
            taken: 0,
        }
    }

    /// Writing begins.
    pub fn open(&mut self, alloc: &Allocator) {
        self.opened_free = alloc.free_in(&self.regions);
    }

    /// The next free units behind the last ones, at most `max`.
    pub fn take(&mut self, alloc: &mut Allocator, max: u32) -> Option<Run> {
        while let Some(&region) = self.regions.get(self.at.0) {
            let start = region * REGION_UNITS;
            if let Some(run) = alloc.take_between(start + self.at.1, start + REGION_UNITS, max) {
                self.at.1 = run.start + run.len - start;
                self.taken += run.len;
                return Some(run);
            }
            self.at = (self.at.0 + 1, 0);
        }
        None
    }

    /// Steps back over units that were given back.
    pub fn untake(&mut self, run: Run) {
        let region = run.start / REGION_UNITS;
        if self.regions.get(self.at.0) == Some(&region) {
            self.at.1 = self.at.1.min(run.start % REGION_UNITS);
            self.taken -= run.len.min(self.taken);
        }
    }

    /// Whether seven eighths are used: time for a checkpoint, while the next window takes the writes.
    #[must_use]
    pub fn is_nearly_full(&self) -> bool {
        self.batches > 0 && self.taken >= self.opened_free - self.opened_free / 8
    }

    /// As the superblock names it.
    #[must_use]
    pub fn record(&self) -> WindowRecord {
        let mut record = WindowRecord {
            id: self.id,
            count: self.regions.len() as u64,
            regions: [0; WINDOW_REGIONS_MAX],
        };
        record.regions[..self.regions.len()].copy_from_slice(&self.regions);
        record
    }
}

/// Builds the header unit of one batch in place.
#[derive(Debug)]
pub struct HeaderWriter {
    used: usize,
    /// Offset of the data entry that the next block may extend.
    open: Option<usize>,
}

/// One block of data in a batch.
#[derive(Debug, Clone, Copy)]
pub struct DataBlock {
    /// Layer.
    pub layer: u64,
    /// Chunk index.
    pub chunk: u32,
    /// Block in the chunk.
    pub block: u16,
    /// Where it is written.
    pub unit: u32,
    /// Its checksum.
    pub crc: u32,
    /// Its version.
    pub version: u64,
}

const ENTRY_BYTES: usize = size_of::<BatchEntry>();

impl HeaderWriter {
    /// Starts with no entries.
    #[must_use]
    pub fn new() -> Self {
        Self {
            used: 0,
            open: None,
        }
    }

    /// Whether any further entry fits.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.has_room_for(1)
    }

    /// Whether so many further entries of one block each fit.
    #[must_use]
    pub fn has_room_for(&self, entries: u32) -> bool {
        // An open entry may still need its CRC array padded.
        let needed = entries as usize * (ENTRY_BYTES + 8);
        self.used.next_multiple_of(8) + needed <= ENTRIES_BYTES_MAX
    }

    /// Adds a block, to the entry before it where it continues it within one leaf: replay takes entries leaf
    /// by leaf.
    pub fn push_data(&mut self, page: &mut [u8], data: &DataBlock) {
        if let Some(at) = self.open {
            let at = ENTRIES_OFFSET + at;
            let entry = BatchEntry::mut_from_bytes(&mut page[at..at + ENTRY_BYTES])
                .expect("entries are aligned");
            let same = entry.layer == data.layer
                && entry.chunk == data.chunk
                && entry.version == data.version
                && usize::from(data.block) % LEAF_BLOCKS != 0;
            if same
                && entry.block + entry.count == data.block
                && entry.unit + u32::from(entry.count) == data.unit
            {
                entry.count += 1;
                self.push_u32(page, data.crc);
                return;
            }
        }
        let DataBlock {
            layer,
            chunk,
            block,
            unit,
            crc,
            version,
        } = *data;
        self.push_entry(
            page,
            BatchEntry {
                layer,
                version,
                chunk,
                unit,
                block,
                count: 1,
                kind: entry_kind::DATA,
            },
        );
        self.open = Some(self.used - ENTRY_BYTES);
        self.push_u32(page, crc);
    }

    /// Adds an entry that no data follow.
    pub fn push_entry(&mut self, page: &mut [u8], entry: BatchEntry) {
        if self.used % 8 != 0 {
            self.push_u32(page, 0);
        }
        let at = ENTRIES_OFFSET + self.used;
        page[at..at + ENTRY_BYTES].copy_from_slice(entry.as_bytes());
        self.used += ENTRY_BYTES;
        self.open = None;
    }

    /// Adds the epoch behind a fence entry.
    pub fn push_u64(&mut self, page: &mut [u8], value: u64) {
        self.push_u32(page, value as u32);
        self.push_u32(page, (value >> 32) as u32);
    }

    fn push_u32(&mut self, page: &mut [u8], value: u32) {
        let at = ENTRIES_OFFSET + self.used;
        page[at..at + 4].copy_from_slice(&value.to_le_bytes());
        self.used += 4;
    }

    /// Completes the unit.
    pub fn finish(mut self, page: &mut [u8], mut header: BatchHeader) {
        if self.used % 8 != 0 {
            self.push_u32(page, 0);
        }
        header.entry_bytes = self.used as u32;
        page[..ENTRIES_OFFSET].copy_from_slice(header.as_bytes());
        page[ENTRIES_OFFSET + self.used..].fill(0);
        seal(page);
    }
}

impl Default for HeaderWriter {
    fn default() -> Self {
        Self::new()
    }
}

/// What a header's entry says, with what follows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadEntry {
    /// The entry.
    pub entry: BatchEntry,
    /// CRCs of data blocks.
    pub crcs: Vec<u32>,
    /// Epoch of a fence.
    pub epoch: u64,
}

/// Decodes the entries of a valid header; `None` when they do not parse.
#[must_use]
pub fn read_entries(page: &[u8], header: &BatchHeader) -> Option<Vec<ReadEntry>> {
    let mut rest = page.get(ENTRIES_OFFSET..ENTRIES_OFFSET + header.entry_bytes as usize)?;
    let mut entries = Vec::new();
    while !rest.is_empty() {
        let (entry, tail) = BatchEntry::read_from_prefix(rest).ok()?;
        let (words, epoch) = match entry.kind {
            entry_kind::DATA => (usize::from(entry.count), false),
            entry_kind::FENCE => (2, true),
            entry_kind::UNMAP
            | entry_kind::ZERO
            | entry_kind::DROP
            | entry_kind::FENCE_DROP
            | entry_kind::LOST => (0, false),
            _ => return None,
        };
        let words_bytes = tail.get(..words * 4)?;
        let values: Vec<u32> = words_bytes
            .chunks_exact(4)
            .map(|b| u32::from_le_bytes(b.try_into().expect("chunks of 4")))
            .collect();
        rest = tail.get((words * 4).next_multiple_of(8)..)?;
        let (crcs, epoch) = if epoch {
            (
                Vec::new(),
                u64::from(values[0]) | u64::from(values[1]) << 32,
            )
        } else {
            (values, 0)
        };
        entries.push(ReadEntry { entry, crcs, epoch });
    }
    Some(entries)
}

#[cfg(test)]
mod tests {
    use super::super::format::Page;
    use super::*;

    #[test]
    fn a_header_reads_back_and_any_flipped_bit_is_seen() {
        let mut page = Page::zeroed();
        let mut writer = HeaderWriter::new();
        let mut expected = Vec::new();
        for i in 0..3u32 {
            let data = DataBlock {
                layer: 7,
                chunk: 1,
                block: 10 + i as u16,
                unit: 100 + i,
                crc: i,
                version: 5,
            };
            writer.push_data(&mut page.0, &data);
        }
        let entry = BatchEntry {
            layer: 7,
            version: 5,
            chunk: 1,
            unit: 100,
            block: 10,
            count: 3,
            kind: entry_kind::DATA,
        };
        expected.push(ReadEntry {
            entry,
            crcs: vec![0, 1, 2],
            epoch: 0,
        });
        let fence = BatchEntry {
            layer: 7,
            version: 9,
            chunk: 0,
            unit: 0,
            block: 0,
            count: 0,
            kind: entry_kind::FENCE,
        };
        writer.push_entry(&mut page.0, fence);
        writer.push_u64(&mut page.0, 1 << 40 | 3);
        expected.push(ReadEntry {
            entry: fence,
            crcs: vec![],
            epoch: 1 << 40 | 3,
        });
        let header = BatchHeader::new([3; 16], 2, 8, 4, 1, 55);
        writer.finish(&mut page.0, header);

        let read = BatchHeader::read(&page.0, &[3; 16], 55).expect("valid");
        assert_eq!(read_entries(&page.0, &read), Some(expected));
        assert!(
            BatchHeader::read(&page.0, &[3; 16], 56).is_none(),
            "another place"
        );
        assert!(
            BatchHeader::read(&page.0, &[4; 16], 55).is_none(),
            "another nonce"
        );
        for bit in 0..page.0.len() * 8 {
            page.0[bit / 8] ^= 1 << (bit % 8);
            assert!(BatchHeader::read(&page.0, &[3; 16], 55).is_none());
            page.0[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn a_header_holds_no_more_than_its_unit() {
        let mut page = Page::zeroed();
        let mut writer = HeaderWriter::new();
        let mut blocks = 0;
        while writer.has_room() {
            let data = DataBlock {
                layer: 1,
                chunk: 0,
                block: blocks * 2,
                unit: 9,
                crc: 1,
                version: 1,
            };
            writer.push_data(&mut page.0, &data);
            blocks += 1;
        }
        assert!(blocks >= 100, "{blocks} single blocks per batch");
        writer.finish(&mut page.0, BatchHeader::new([0; 16], 1, 1, 0, 0, 1));
        let header = BatchHeader::read(&page.0, &[0; 16], 1).expect("valid");
        assert_eq!(
            read_entries(&page.0, &header).expect("parses").len(),
            usize::from(blocks)
        );
    }
}
