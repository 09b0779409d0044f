//! The space map: read from its pages, or made anew from what the chunk table reaches.
//!
//! Made anew it is as old as the map pages, while its own pages were taken after them (`format` tells the
//! order). That makes no difference once the log is replayed: replay sets and clears, for every block that it
//! changes, what the leaf says of it.

use zerocopy::FromBytes;

use super::super::alloc::Allocator;
use super::super::bitmap::Bitmap;
use super::super::error::OpenError;
use super::super::format::{
    CHUNK_LEAVES, DIR_PTRS, Geometry, LEAF_BLOCKS, MapEntry, Ptr, Superblock, UNIT_BYTES, is_place,
    record_kind,
};
use super::super::table::Table;
use super::Opening;

impl Opening<'_> {
    /// What is in use, and where the pages that say so are.
    ///
    /// No page of the space map is needed to open a store: one that is damaged or cannot be read costs
    /// reading the whole map once. The checkpoint that ends the opening writes all its pages anew, and a
    /// crash before that begins again here.
    pub(super) fn space(
        &mut self,
        sb: &Superblock,
        table: &Table,
    ) -> Result<(Allocator, Vec<Ptr>), OpenError> {
        let dirs = &sb.bitmap_dirs[..self.geo.bitmap_dirs() as usize];
        let why = match self.stored(dirs) {
            Ok((committed, ptrs)) => {
                return Ok((Allocator::from_committed(&self.geo, committed), ptrs));
            }
            Err(why) => why,
        };
        let committed = self.reached(sb, table)?;
        tracing::warn!(shard = self.geo.shard, %why, "the space map was made anew");
        self.report.rebuilt_shards += 1;
        let mut alloc = Allocator::from_committed(&self.geo, committed);
        alloc.write_all_pages();
        let ptrs = self.known_ptrs(dirs);
        Ok((alloc, ptrs))
    }

    /// The space map as its pages have it.
    fn stored(&mut self, dirs: &[Ptr]) -> Result<(Bitmap, Vec<Ptr>), OpenError> {
        let mut ptrs = self.pointers(dirs, "bitmap directory")?;
        ptrs.truncate(self.geo.bitmap_pages() as usize);
        let mut bitmap = Bitmap::new(self.geo.units);
        self.pages(&ptrs, "bitmap page", |at, page| {
            bitmap.read_bytes(at * UNIT_BYTES / 8, page);
        })?;
        Ok((bitmap, ptrs))
    }

    /// Where the pages are, as far as their directories can be read: the next checkpoint goes to the other
    /// slots. Of the rest it may take either, for nothing names them any more.
    fn known_ptrs(&mut self, dirs: &[Ptr]) -> Vec<Ptr> {
        let unknown = || vec![Ptr::default(); DIR_PTRS];
        let mut ptrs: Vec<Ptr> = Vec::with_capacity(dirs.len() * DIR_PTRS);
        for dir in dirs.chunks(1) {
            let found = self.pointers(dir, "bitmap directory");
            ptrs.extend(found.unwrap_or_else(|_| unknown()));
        }
        ptrs.truncate(self.geo.bitmap_pages() as usize);
        ptrs
    }

    /// The units that table, map pages and map refer to. Damage on the way is an error: what a lost page
    /// refers to would pass for free and be overwritten.
    fn reached(&mut self, sb: &Superblock, table: &Table) -> Result<Bitmap, OpenError> {
        let mut reached = Reached::new(self.geo);
        let tables = table.page_ptrs.iter().chain(&table.dir_ptrs);
        for ptr in tables.chain([&sb.table_root]) {
            reached.page(*ptr);
        }
        let mut leaves = Vec::with_capacity(table.slots() as usize * CHUNK_LEAVES);
        for rec in 0..table.slots() {
            let record = table.record(rec);
            if record.kind == record_kind::CHUNK {
                leaves.extend(record.leaves.iter().filter(|ptr| ptr.unit != 0));
            }
        }
        leaves.iter().for_each(|ptr| reached.page(*ptr));
        self.pages(&leaves, "map page", |_, page| reached.blocks_of(page))?;
        match reached.doubtful {
            Some(unit) => Err(self.damaged("map (a unit is referred to twice)", unit)),
            None => Ok(reached.units),
        }
    }
}

/// Units found so far.
struct Reached {
    geo: Geometry,
    units: Bitmap,
    /// One that was found twice, or that cannot hold data: the map contradicts itself.
    doubtful: Option<u32>,
}

impl Reached {
    fn new(geo: Geometry) -> Self {
        let units = Bitmap::new(geo.units);
        let doubtful = None;
        Self {
            geo,
            units,
            doubtful,
        }
    }

    fn add(&mut self, unit: u32) {
        let possible = (self.geo.first_free()..self.geo.end_free()).contains(&unit);
        if !possible || !self.units.set(unit) {
            self.doubtful.get_or_insert(unit);
        }
    }

    fn page(&mut self, ptr: Ptr) {
        if ptr.unit != 0 {
            self.add(ptr.unit);
        }
    }

    /// The data blocks that a map page names.
    fn blocks_of(&mut self, page: &[u8]) {
        let entries = <[MapEntry; LEAF_BLOCKS]>::read_from_bytes(page);
        let entries = entries.expect("a page holds 256 entries");
        for entry in entries.iter().filter(|entry| is_place(entry.unit)) {
            self.add(entry.unit);
        }
    }
}
