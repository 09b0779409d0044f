//! Where the pages of the map lie on a device, for tests that damage them.

use fabric_types::block::BLOCK_BYTES;
use fabric_types::ids::LayerId;
use zerocopy::FromBytes;

use super::sim_disk::SimDisk;
use crate::format::{
    ChunkRecord, DIR_PTRS, Geometry, Label, PAGE_RECORDS, Ptr, SHARDS_START_UNIT, Superblock,
    record_kind,
};

/// A map page of the newest checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeafPage {
    /// The layer.
    pub layer: LayerId,
    /// The chunk.
    pub chunk: u32,
    /// Which of the chunk's.
    pub leaf: u32,
    /// Where it is on the device.
    pub offset: u64,
}

/// The pages of a device's maps.
#[derive(Debug, Default)]
pub struct MapPages {
    /// Map pages.
    pub leaves: Vec<LeafPage>,
    /// Where chunk table pages are on the device.
    pub tables: Vec<u64>,
}

/// Reads a block at this byte of a device.
type Read<'a> = &'a dyn Fn(u64) -> [u8; BLOCK_BYTES];

fn pointers(page: Read<'_>, geo: &Geometry, dir: Ptr) -> Vec<Ptr> {
    if dir.unit == 0 {
        return Vec::new();
    }
    let bytes = page(geo.offset(dir.unit));
    let ptrs = <[Ptr; DIR_PTRS]>::read_from_bytes(&bytes).expect("a page of pointers");
    ptrs.into_iter().filter(|ptr| ptr.unit != 0).collect()
}

impl MapPages {
    /// Those that the newest superblock of each shard names.
    ///
    /// # Panics
    /// If there is no store on the disk.
    #[must_use]
    pub fn of(disk: &SimDisk) -> Self {
        Self::read(&|offset| {
            let mut page = [0; BLOCK_BYTES];
            disk.peek(offset, &mut page);
            page
        })
    }

    /// The same of a device whose blocks `page` reads.
    ///
    /// # Panics
    /// If there is no store on the device.
    #[must_use]
    pub fn read(page: Read<'_>) -> Self {
        let label = Label::read(&page(0)).expect("the device has a label");
        let mut found = Self::default();
        for shard in 0..label.shards {
            let base = SHARDS_START_UNIT + u64::from(shard) * u64::from(label.shard_units);
            let units = label.shard_units;
            found.add(page, &Geometry { shard, units, base });
        }
        found
    }

    fn add(&mut self, page: Read<'_>, geo: &Geometry) {
        let slots = [geo.superblock_units(0), geo.superblock_units(1)].concat();
        let slots = slots.into_iter().map(|unit| page(geo.offset(unit)));
        let read = slots.filter_map(|bytes| Superblock::read(&bytes, geo.shard, geo.units));
        let newest = read.max_by_key(|sb| sb.checkpoint);
        let newest = newest.expect("the shard has a superblock");
        for dir in pointers(page, geo, newest.table_root) {
            for table in pointers(page, geo, dir) {
                self.tables.push(geo.offset(table.unit));
                let bytes = page(geo.offset(table.unit));
                let records = <[ChunkRecord; PAGE_RECORDS]>::read_from_bytes(&bytes);
                let records = records.expect("a page of records");
                let chunks = records.iter().filter(|r| r.kind == record_kind::CHUNK);
                chunks.for_each(|record| self.add_leaves(record, geo));
            }
        }
    }

    fn add_leaves(&mut self, record: &ChunkRecord, geo: &Geometry) {
        for (leaf, ptr) in (0..).zip(&record.leaves).filter(|(_, ptr)| ptr.unit != 0) {
            self.leaves.push(LeafPage {
                layer: LayerId(record.layer),
                chunk: record.index,
                leaf,
                offset: geo.offset(ptr.unit),
            });
        }
    }
}
