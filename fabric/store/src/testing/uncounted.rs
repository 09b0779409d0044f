//! The chunk table as a program leaves it that does not know of counts.

use fabric_types::block::BLOCK_BYTES;
use fabric_types::checksum::crc32c;
use zerocopy::{FromBytes, IntoBytes};

use super::sim_disk::SimDisk;
use crate::format::{
    ChunkRecord, DIR_PTRS, Geometry, Label, PAGE_RECORDS, Ptr, SHARDS_START_UNIT, Superblock,
    record_kind, seal,
};

/// Rewrites the tables of all shards' newest checkpoints: `count` makes of each chunk's counts others, and
/// the superblocks say that their writer does not know of counts.
///
/// # Panics
/// If there is no store on the disk.
pub fn uncount(disk: &mut SimDisk, count: &mut dyn FnMut(u64) -> u64) {
    let mut page = [0; BLOCK_BYTES];
    disk.peek(0, &mut page);
    let label = Label::read(&page).expect("the device has a label");
    for shard in 0..label.shards {
        let base = SHARDS_START_UNIT + u64::from(shard) * u64::from(label.shard_units);
        let units = label.shard_units;
        uncount_shard(disk, &Geometry { shard, units, base }, count);
    }
}

fn uncount_shard(disk: &mut SimDisk, geo: &Geometry, count: &mut dyn FnMut(u64) -> u64) {
    let slots = [geo.superblock_units(0), geo.superblock_units(1)].concat();
    let mut page = [0; BLOCK_BYTES];
    let mut found = Vec::new();
    for unit in slots {
        disk.peek(geo.offset(unit), &mut page);
        let read = Superblock::read(&page, geo.shard, geo.units);
        found.extend(read.map(|sb| (unit, sb)));
    }
    let newest = found.iter().map(|(_, sb)| sb.checkpoint).max();
    found.retain(|(_, sb)| Some(sb.checkpoint) == newest);
    let mut root = found
        .first()
        .expect("the shard has a superblock")
        .1
        .table_root;
    pointers(disk, geo, &mut root, &mut |disk, dir| {
        pointers(disk, geo, dir, &mut |disk, table| {
            let mut records = read::<[ChunkRecord; PAGE_RECORDS]>(disk, geo, table);
            let chunks = records.iter_mut().filter(|r| r.kind == record_kind::CHUNK);
            chunks.for_each(|record| record.epoch = count(record.epoch));
            write(disk, geo, table, &records);
        });
    });
    for (unit, mut sb) in found {
        (sb.table_root, sb.counted) = (root, 0);
        page.fill(0);
        page[..size_of::<Superblock>()].copy_from_slice(sb.as_bytes());
        seal(&mut page);
        disk.replace(geo.offset(unit), &page);
    }
}

/// Changes what the pointers of a page name, and the page after it.
fn pointers(
    disk: &mut SimDisk,
    geo: &Geometry,
    page: &mut Ptr,
    change: &mut dyn FnMut(&mut SimDisk, &mut Ptr),
) {
    if page.unit == 0 {
        return;
    }
    let mut ptrs = read::<[Ptr; DIR_PTRS]>(disk, geo, page);
    let named = ptrs.iter_mut().filter(|ptr| ptr.unit != 0);
    named.for_each(|ptr| change(disk, ptr));
    write(disk, geo, page, &ptrs);
}

fn read<T: FromBytes>(disk: &SimDisk, geo: &Geometry, ptr: &Ptr) -> T {
    let mut page = [0; BLOCK_BYTES];
    disk.peek(geo.offset(ptr.unit), &mut page);
    T::read_from_bytes(&page).expect("it fills a page")
}

fn write<T: IntoBytes + zerocopy::Immutable>(
    disk: &mut SimDisk,
    geo: &Geometry,
    ptr: &mut Ptr,
    content: &T,
) {
    let mut page = [0; BLOCK_BYTES];
    page.copy_from_slice(content.as_bytes());
    ptr.crc = crc32c(&page);
    disk.replace(geo.offset(ptr.unit), &page);
}
