//! Where the pages are that everything else is found by: the chunk table's root, and the space map.

use zerocopy::IntoBytes;

use super::super::format::{BITMAP_DIRS_MAX, DIR_PTRS, Geometry, Ptr, Superblock};

/// Pointers to the pages above the map, and which of those pages the next superblock needs written anew.
#[derive(Debug)]
pub(super) struct MapRoots {
    table_root: Ptr,
    root_dirty: bool,
    bitmap_pages: Vec<Ptr>,
    bitmap_dirs: [Ptr; BITMAP_DIRS_MAX],
    /// Bitmap directories that changed, a bit each.
    bitmap_dirs_dirty: u64,
}

impl MapRoots {
    pub(super) fn new(
        table_root: Ptr,
        bitmap_pages: Vec<Ptr>,
        bitmap_dirs: [Ptr; BITMAP_DIRS_MAX],
    ) -> Self {
        Self {
            table_root,
            root_dirty: false,
            bitmap_pages,
            bitmap_dirs,
            bitmap_dirs_dirty: 0,
        }
    }

    /// The table's root page.
    pub(super) fn table_root(&self) -> &Ptr {
        &self.table_root
    }

    /// A table directory moved, which the root names.
    pub(super) fn touch_root(&mut self) {
        self.root_dirty = true;
    }

    pub(super) fn is_root_dirty(&self) -> bool {
        self.root_dirty
    }

    /// The root page is written to another place; returns where it was.
    pub(super) fn move_root(&mut self, to: Ptr) -> Ptr {
        self.root_dirty = false;
        std::mem::replace(&mut self.table_root, to)
    }

    /// A page of the space map, with this checksum, goes to the slot where it was not; returns the unit.
    pub(super) fn move_bitmap_page(&mut self, geo: &Geometry, page: u32, crc: u32) -> u32 {
        let ptr = &mut self.bitmap_pages[page as usize];
        let slot = u32::from(ptr.unit == geo.bitmap_slot(page, 0));
        let unit = geo.bitmap_slot(page, slot);
        *ptr = Ptr { unit, crc };
        self.bitmap_dirs_dirty |= 1 << (page as usize / DIR_PTRS);
        unit
    }

    /// The next directory of the space map that is to be written.
    pub(super) fn next_bitmap_dir(&self) -> Option<u32> {
        let is_any = self.bitmap_dirs_dirty != 0;
        is_any.then(|| self.bitmap_dirs_dirty.trailing_zeros())
    }

    /// The pointers in a directory of the space map.
    pub(super) fn bitmap_dir_bytes(&self, dir: u32) -> &[u8] {
        let start = dir as usize * DIR_PTRS;
        let end = (start + DIR_PTRS).min(self.bitmap_pages.len());
        self.bitmap_pages[start..end].as_bytes()
    }

    /// As [`move_bitmap_page`](Self::move_bitmap_page), for a directory.
    pub(super) fn move_bitmap_dir(&mut self, geo: &Geometry, dir: u32, crc: u32) -> u32 {
        self.bitmap_dirs_dirty &= !(1 << dir);
        let ptr = &mut self.bitmap_dirs[dir as usize];
        let slot = u32::from(ptr.unit == geo.bitmap_dir_slot(dir, 0));
        let unit = geo.bitmap_dir_slot(dir, slot);
        *ptr = Ptr { unit, crc };
        unit
    }

    /// Names the pages in a superblock.
    pub(super) fn name_in(&self, superblock: &mut Superblock) {
        superblock.table_root = self.table_root;
        superblock.bitmap_dirs = self.bitmap_dirs;
    }

    pub(super) fn ram_bytes(&self) -> u64 {
        (self.bitmap_pages.len() * size_of::<Ptr>()) as u64
    }
}
