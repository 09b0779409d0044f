//! Which units are in use.
//!
//! Two bitmaps: `committed` is what the map refers to and what checkpoints write; `busy` is what must not be
//! handed out, that is committed units, units of batches in flight, log headers, and units that were freed
//! but that the last durable checkpoint or the log may still name (*quarantined*).

use super::bitmap::Bitmap;
use super::format::{BITMAP_PAGE_BITS, Geometry, REGION_UNITS};

mod quarantine;
mod regions;

use quarantine::Quarantine;
pub use regions::FreeSpace;

/// Regions looked at for a good one before any is taken.
const REGION_SEARCH_MAX: u32 = 1024;

/// Consecutive units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// First unit.
    pub start: u32,
    /// How many.
    pub len: u32,
}

/// See the module.
#[derive(Debug)]
pub struct Allocator {
    committed: Bitmap,
    busy: Bitmap,
    /// Free units per region; fixed places count as used.
    region_free: Vec<u16>,
    /// Regions of live windows: taken by others only when nothing else is left.
    in_window: Bitmap,
    /// Regions that the cleaner empties: nothing new goes there while there is another place.
    victims: Bitmap,
    /// Regions that are free from end to end.
    empty_regions: u32,
    free_units: u32,
    /// Bitmap pages that changed since they were written.
    dirty_pages: Bitmap,
    quarantine: Quarantine,
    cursor: u32,
    page_cursor: u32,
    /// Where the cleaner's next data go: what is left of a region that was empty.
    stream: Run,
    hole_cursor: u32,
    window_cursor: u32,
    first: u32,
    end: u32,
}

impl Allocator {
    /// An empty shard.
    #[must_use]
    pub fn new(geo: &Geometry) -> Self {
        Self::from_committed(geo, Bitmap::new(geo.units))
    }

    /// A shard with these units in use.
    #[must_use]
    pub fn from_committed(geo: &Geometry, committed: Bitmap) -> Self {
        let regions = geo.units / REGION_UNITS;
        let (first, end) = (geo.first_free(), geo.end_free());
        let mut busy = committed.clone();
        for unit in (0..first).chain(end..geo.units) {
            busy.set(unit);
        }
        let region_free: Vec<u16> = (0..regions)
            .map(|r| busy.count_clear(r * REGION_UNITS, (r + 1) * REGION_UNITS) as u16)
            .collect();
        let free_units = region_free.iter().map(|&n| u32::from(n)).sum();
        let empty = region_free
            .iter()
            .filter(|&&n| u32::from(n) == REGION_UNITS);
        let empty_regions = empty.count() as u32;
        Self {
            committed,
            busy,
            region_free,
            in_window: Bitmap::new(regions),
            victims: Bitmap::new(regions),
            empty_regions,
            free_units,
            dirty_pages: Bitmap::new(geo.bitmap_pages()),
            quarantine: Quarantine::default(),
            cursor: 0,
            page_cursor: 0,
            stream: Run { start: 0, len: 0 },
            hole_cursor: 0,
            window_cursor: 0,
            first,
            end,
        }
    }

    /// The next checkpoint writes every bitmap page: those on the device are damaged.
    pub fn write_all_pages(&mut self) {
        for page in 0..self.dirty_pages.len() {
            self.dirty_pages.set(page);
        }
    }

    /// Units that may hold data at all.
    #[must_use]
    pub fn total_units(&self) -> u32 {
        self.end - self.first
    }

    /// Units that can be handed out now.
    #[must_use]
    pub fn free_units(&self) -> u32 {
        self.free_units
    }

    /// Units that will be free after the next checkpoints.
    #[must_use]
    pub fn quarantined_units(&self) -> u64 {
        self.quarantine.units()
    }

    /// Runs in quarantine, the measure of its RAM.
    #[must_use]
    pub fn quarantine_runs(&self) -> usize {
        self.quarantine.runs()
    }

    /// What the map refers to.
    #[must_use]
    pub fn committed(&self) -> &Bitmap {
        &self.committed
    }

    /// Whether `unit` can be named by a map at all.
    #[must_use]
    pub fn is_data_unit(&self, unit: u32) -> bool {
        (self.first..self.end).contains(&unit)
    }

    fn take(&mut self, run: Run) {
        for unit in run.start..run.start + run.len {
            assert!(self.busy.set(unit), "unit handed out twice");
            self.one_less(unit);
        }
    }

    /// Makes units free again that were handed out and never written.
    pub fn give_back(&mut self, run: Run) {
        for unit in run.start..run.start + run.len {
            assert!(self.busy.clear(unit), "unit freed twice");
            let free = &mut self.region_free[(unit / REGION_UNITS) as usize];
            *free += 1;
            self.empty_regions += u32::from(u32::from(*free) == REGION_UNITS);
        }
        self.free_units += run.len;
    }

    fn one_less(&mut self, unit: u32) {
        let free = &mut self.region_free[(unit / REGION_UNITS) as usize];
        self.empty_regions -= u32::from(u32::from(*free) == REGION_UNITS);
        *free -= 1;
        self.free_units -= 1;
    }

    /// Hands out the first free run within `from..to`, at most `max` long.
    pub fn take_between(&mut self, from: u32, to: u32, max: u32) -> Option<Run> {
        let (start, len) = self.busy.clear_run(from, to, max)?;
        let run = Run { start, len };
        self.take(run);
        Some(run)
    }

    /// The map now refers to `unit`.
    pub fn commit(&mut self, unit: u32) {
        self.committed.set(unit);
        self.dirty_pages.set(unit / BITMAP_PAGE_BITS);
    }

    /// The map no longer refers to `unit`; it comes back with the checkpoint that begins after this.
    pub fn free(&mut self, unit: u32) {
        self.committed.clear(unit);
        self.dirty_pages.set(unit / BITMAP_PAGE_BITS);
        self.quarantine(Run {
            start: unit,
            len: 1,
        });
    }

    /// A map page replaced by the running checkpoint: comes back when that is durable.
    pub fn free_replaced(&mut self, unit: u32) {
        self.committed.clear(unit);
        self.dirty_pages.set(unit / BITMAP_PAGE_BITS);
        self.quarantine.push_frozen(Run {
            start: unit,
            len: 1,
        });
    }

    /// Keeps units that the map does not refer to (log headers, refused blocks) busy until a checkpoint.
    pub fn quarantine(&mut self, run: Run) {
        self.quarantine.push(run);
    }

    /// As [`quarantine`](Self::quarantine), for one unit.
    pub fn quarantine_unit(&mut self, unit: u32) {
        self.quarantine(Run {
            start: unit,
            len: 1,
        });
    }

    /// A checkpoint begins.
    pub fn freeze(&mut self) {
        self.quarantine.freeze();
    }

    /// The checkpoint is durable: frees what it waited for, unless somebody still reads it. Whether it did.
    pub fn release(&mut self) -> bool {
        if self.quarantine.is_frozen_read() {
            return false;
        }
        let frozen = self.quarantine.take_frozen();
        frozen.iter().for_each(|&run| self.give_back(run));
        self.quarantine.reuse(frozen);
        true
    }

    /// Somebody begins to read units that the map names, which stay as they are until
    /// [`end_reader`](Self::end_reader) is called with what this returns.
    pub fn begin_reader(&mut self) -> u8 {
        self.quarantine.begin_reader()
    }

    /// See [`begin_reader`](Self::begin_reader).
    pub fn end_reader(&mut self, generation: u8) {
        self.quarantine.end_reader(generation);
    }

    /// Recovery found `unit` in use (by a log header or a block it maps).
    pub fn claim(&mut self, unit: u32) {
        if self.busy.set(unit) {
            self.one_less(unit);
        }
    }

    /// Recovery: the map no longer refers to `unit`; its fate is decided at the end of the log.
    pub fn uncommit(&mut self, unit: u32) {
        self.committed.clear(unit);
        self.dirty_pages.set(unit / BITMAP_PAGE_BITS);
    }

    /// Recovery: `unit` was claimed and is not referred to.
    pub fn quarantine_claimed(&mut self, unit: u32) {
        self.quarantine(Run {
            start: unit,
            len: 1,
        });
    }

    /// First dirty bitmap page at or after `from`, marked clean and written to `out`.
    pub fn next_dirty_page(&mut self, from: u32) -> Option<u32> {
        let page = self.dirty_pages.find(true, from, self.dirty_pages.len())?;
        self.dirty_pages.clear(page);
        Some(page)
    }

    /// Up to `count` regions with the most free units for a new window.
    pub fn pick_window(&mut self, count: usize, out: &mut Vec<u32>) {
        out.clear();
        let regions = self.region_free.len() as u32;
        let mut by_free = [0u32; REGION_UNITS as usize + 1];
        for region in 0..regions {
            if !self.in_window.get(region) && !self.victims.get(region) {
                by_free[self.region_free[region as usize] as usize] += 1;
            }
        }
        let mut need = count as u32;
        let mut floor = REGION_UNITS;
        while floor > 1 && by_free[floor as usize] < need {
            need -= by_free[floor as usize];
            floor -= 1;
        }
        let mut at_floor = need;
        for i in 0..regions {
            let region = (self.window_cursor + i) % regions;
            let free = u32::from(self.region_free[region as usize]);
            if out.len() == count {
                break;
            }
            let taken = self.in_window.get(region) || self.victims.get(region);
            if free < floor || taken || (free == floor && at_floor == 0) {
                continue;
            }
            at_floor -= u32::from(free == floor);
            out.push(region);
        }
        // On a small or full shard windows share regions: a header knows its window.
        for region in 0..regions {
            if out.len() < 2.min(count)
                && self.region_free[region as usize] > 0
                && !out.contains(&region)
            {
                out.push(region);
            }
        }
        self.window_cursor = out.last().map_or(0, |last| (last + 1) % regions);
    }

    /// Marks or unmarks regions as belonging to a live window.
    pub fn mark_window(&mut self, regions: &[u32], live: bool) {
        for &region in regions {
            if live {
                self.in_window.set(region);
            } else {
                self.in_window.clear(region);
            }
        }
    }

    /// Free units in these regions.
    #[must_use]
    pub fn free_in(&self, regions: &[u32]) -> u32 {
        regions
            .iter()
            .map(|&r| u32::from(self.region_free[r as usize]))
            .sum()
    }

    /// RAM held by the bitmaps.
    #[must_use]
    pub fn ram_bytes(&self) -> u64 {
        self.committed.ram_bytes()
            + self.busy.ram_bytes()
            + self.region_free.len() as u64 * 2
            + self.in_window.ram_bytes()
            + self.victims.ram_bytes()
    }

    /// RAM held by the quarantine.
    #[must_use]
    pub fn quarantine_ram_bytes(&self) -> u64 {
        self.quarantine.ram_bytes()
    }
}
