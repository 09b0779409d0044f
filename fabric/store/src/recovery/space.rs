//! The space map: read from its pages, or made anew from what the chunk table reaches.
//!
//! Made anew it is as old as the map pages, while its own pages were taken after them (`format` tells the
//! order). That makes no difference once the log is replayed: replay sets and clears, for every block that it
//! changes, what the leaf says of it.
//!
//! A map page that cannot be read names units that nobody else knows of. They stay in use until that page was
//! replaced. If the space map is damaged, too, and the checksum of the page does not fit, they pass for free:
//! the opening replaces that page by one of which nothing is known (see `format`), so that nothing names them
//! any more. If it is the device that refuses to give the page, that proves nothing, and the store does not
//! open.

use zerocopy::FromBytes;

use super::super::alloc::Allocator;
use super::super::bitmap::Bitmap;
use super::super::error::OpenError;
use super::super::format::{
    DIR_PTRS, Geometry, LEAF_BLOCKS, MapEntry, Ptr, Superblock, UNIT_BYTES, is_place, record_kind,
};
use super::super::table::Table;
use super::Opening;

/// What is in use, and where the pages that say so are.
pub(super) struct FoundSpace {
    pub(super) alloc: Allocator,
    pub(super) ptrs: Vec<Ptr>,
    /// Map pages, by record and number in the chunk, whose units are not in use by this, since they cannot be
    /// read: the opening is to replace them.
    pub(super) lost: Vec<(u32, u8)>,
    /// Units are in use that nothing names.
    pub(super) leaks: bool,
}

impl Opening<'_> {
    /// No page of the space map is needed to open a store: one that is damaged or cannot be read costs
    /// reading the whole map once. The checkpoint that ends the opening writes all its pages anew, and a
    /// crash before that begins again here.
    pub(super) fn space(
        &mut self,
        sb: &Superblock,
        table: &Table,
    ) -> Result<FoundSpace, OpenError> {
        let dirs = &sb.bitmap_dirs[..self.geo.bitmap_dirs() as usize];
        let stored = self.stored(dirs);
        if let (Ok(_), false) = (&stored, sb.leaks == 1) {
            let (committed, ptrs) = stored?;
            return Ok(self.as_stored(committed, ptrs, false));
        }
        let reached = self.reached(sb, table);
        let (committed, lost, ptrs) = match (stored, reached) {
            // What a page that cannot be read names may be what is in use. It may be read one day, or be
            // replaced: then the next opening comes here again.
            (Ok((stored, ptrs)), Ok((_, lost))) if !lost.is_empty() => {
                return Ok(self.as_stored(stored, ptrs, true));
            }
            (Ok((stored, ptrs)), Err(why)) => {
                tracing::warn!(shard = self.geo.shard, %why, "the space map keeps what nothing names");
                return Ok(self.as_stored(stored, ptrs, true));
            }
            (Ok((_, ptrs)), Ok((committed, lost))) => {
                tracing::warn!(
                    shard = self.geo.shard,
                    "the space map was made anew, for it had units in use that nothing named"
                );
                (committed, lost, ptrs)
            }
            (Err(why), reached) => {
                let (committed, lost) = reached?;
                tracing::warn!(shard = self.geo.shard, %why, "the space map was made anew");
                (committed, lost, self.known_ptrs(dirs))
            }
        };
        self.report.rebuilt_shards += 1;
        let mut alloc = Allocator::from_committed(&self.geo, committed);
        alloc.write_all_pages();
        Ok(FoundSpace {
            alloc,
            ptrs,
            lost,
            leaks: false,
        })
    }

    fn as_stored(&self, committed: Bitmap, ptrs: Vec<Ptr>, leaks: bool) -> FoundSpace {
        FoundSpace {
            alloc: Allocator::from_committed(&self.geo, committed),
            ptrs,
            lost: Vec::new(),
            leaks,
        }
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

    /// The units that table, map pages and map refer to, and the map pages that cannot be read. What those
    /// refer to is not among the units.
    fn reached(
        &mut self,
        sb: &Superblock,
        table: &Table,
    ) -> Result<(Bitmap, Vec<(u32, u8)>), OpenError> {
        let mut reached = Reached::new(self.geo);
        let tables = table.page_ptrs.iter().chain(&table.dir_ptrs);
        for ptr in tables.chain([&sb.table_root]) {
            reached.page(*ptr);
        }
        let (mut leaves, mut places) = (Vec::new(), Vec::new());
        for rec in 0..table.slots() {
            let record = table.record(rec);
            if record.kind != record_kind::CHUNK {
                continue;
            }
            for (leaf, ptr) in (0..).zip(&record.leaves).filter(|(_, ptr)| ptr.unit != 0) {
                leaves.push(*ptr);
                places.push((rec, leaf));
            }
        }
        leaves.iter().for_each(|ptr| reached.page(*ptr));
        // A page that the device refuses to give may be well, and what it names in use. Nobody else could
        // say so here.
        let unread = self.leaves(&leaves, 0, |_, page| reached.blocks_of(page))?;
        let lost = unread.iter().map(|leaf| places[leaf.name]).collect();
        match reached.doubtful {
            Some(unit) => Err(self.damaged("map (a unit is referred to twice)", unit)),
            None => Ok((reached.units, lost)),
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
