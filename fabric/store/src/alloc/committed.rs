//! What the map refers to, and the pages that say so.

use crate::bitmap::Bitmap;
use crate::format::{BITMAP_PAGE_BITS, Geometry};

/// The bitmap that checkpoints write.
#[derive(Debug)]
pub(super) struct Committed {
    units: Bitmap,
    /// Pages that changed since they were written.
    dirty_pages: Bitmap,
}

impl Committed {
    pub(super) fn new(geo: &Geometry, units: Bitmap) -> Self {
        Self {
            units,
            dirty_pages: Bitmap::new(geo.bitmap_pages()),
        }
    }

    pub(super) fn units(&self) -> &Bitmap {
        &self.units
    }

    pub(super) fn set(&mut self, unit: u32) {
        self.units.set(unit);
        self.dirty_pages.set(unit / BITMAP_PAGE_BITS);
    }

    pub(super) fn clear(&mut self, unit: u32) {
        self.units.clear(unit);
        self.dirty_pages.set(unit / BITMAP_PAGE_BITS);
    }

    pub(super) fn write_all_pages(&mut self) {
        for page in 0..self.dirty_pages.len() {
            self.dirty_pages.set(page);
        }
    }

    /// First dirty page at or after `from`, marked clean.
    pub(super) fn next_dirty_page(&mut self, from: u32) -> Option<u32> {
        let page = self.dirty_pages.find(true, from, self.dirty_pages.len())?;
        self.dirty_pages.clear(page);
        Some(page)
    }
}
