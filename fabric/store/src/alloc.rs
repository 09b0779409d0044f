//! Which units are in use.
//!
//! Two bitmaps: `committed` is what the map refers to and what checkpoints write; `busy` (in `regions`) is
//! what must not be handed out, that is committed units, units of batches in flight, log headers, and units
//! that were freed but that the last durable checkpoint or the log may still name (*quarantined*).

use super::bitmap::Bitmap;
use super::format::Geometry;

mod committed;
mod placement;
mod quarantine;
mod regions;

use committed::Committed;
use placement::Cursors;
use quarantine::Quarantine;
pub use regions::FreeSpace;
use regions::{Regions, Victims};

/// Consecutive units.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Run {
    /// First unit.
    pub start: u32,
    /// How many.
    pub len: u32,
}

impl Run {
    fn one(unit: u32) -> Self {
        Self {
            start: unit,
            len: 1,
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Allocator {
    committed: Committed,
    regions: Regions,
    quarantine: Quarantine,
    cursors: Cursors,
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
        Self {
            regions: Regions::new(geo, &committed),
            committed: Committed::new(geo, committed),
            quarantine: Quarantine::default(),
            cursors: Cursors::default(),
        }
    }

    /// The next checkpoint writes every bitmap page: those on the device are damaged.
    pub fn write_all_pages(&mut self) {
        self.committed.write_all_pages();
    }

    /// Units that may hold data at all.
    #[must_use]
    pub fn total_units(&self) -> u32 {
        self.regions.total_units()
    }

    /// Units that can be handed out now.
    #[must_use]
    pub fn free_units(&self) -> u32 {
        self.regions.free_units()
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
        self.committed.units()
    }

    /// Whether `unit` can be named by a map at all.
    #[must_use]
    pub fn is_data_unit(&self, unit: u32) -> bool {
        self.regions.is_data_unit(unit)
    }

    /// Makes units free again that were handed out and never written.
    pub fn give_back(&mut self, run: Run) {
        self.regions.give_back(run);
    }

    /// Hands out the first free run within `from..to`, at most `max` long.
    pub fn take_between(&mut self, from: u32, to: u32, max: u32) -> Option<Run> {
        let run = self.regions.first_run(from, to, max)?;
        self.regions.take(run);
        Some(run)
    }

    /// The map now refers to `unit`.
    pub fn commit(&mut self, unit: u32) {
        self.committed.set(unit);
    }

    /// The map no longer refers to `unit`; it comes back with the checkpoint that begins after this.
    pub fn free(&mut self, unit: u32) {
        self.committed.clear(unit);
        self.quarantine_unit(unit);
    }

    /// A map page replaced by the running checkpoint: comes back when that is durable.
    pub fn free_replaced(&mut self, unit: u32) {
        self.committed.clear(unit);
        self.quarantine.push_frozen(Run::one(unit));
    }

    /// Keeps a unit that the map does not refer to (log header, refused block) busy until a checkpoint.
    pub fn quarantine_unit(&mut self, unit: u32) {
        self.quarantine.push(Run::one(unit));
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
        frozen.iter().for_each(|&run| self.regions.give_back(run));
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
        self.regions.claim(unit);
    }

    /// Recovery: the map no longer refers to `unit`; its fate is decided at the end of the log.
    pub fn uncommit(&mut self, unit: u32) {
        self.committed.clear(unit);
    }

    /// First dirty bitmap page at or after `from`, marked clean.
    pub fn next_dirty_page(&mut self, from: u32) -> Option<u32> {
        self.committed.next_dirty_page(from)
    }

    /// Up to `count` regions with the most free units for a new window.
    pub fn pick_window(&mut self, count: usize, out: &mut Vec<u32>) {
        self.regions.pick_window(self.cursors.window, count, out);
        let next = |last: &u32| (last + 1) % self.regions.count();
        self.cursors.window = out.last().map_or(0, next);
    }

    /// Marks or unmarks regions as belonging to a live window.
    pub fn mark_window(&mut self, regions: &[u32], live: bool) {
        self.regions.mark_window(regions, live);
    }

    /// Free units in these regions.
    #[must_use]
    pub fn free_in(&self, regions: &[u32]) -> u32 {
        self.regions.free_in(regions)
    }

    /// What free space looks like now. Looks at every region.
    #[must_use]
    pub fn free_space(&self) -> FreeSpace {
        self.regions.free_space()
    }

    /// Chooses the regions with the fewest units in use: at most `regions_max`, each with at most `used_max`
    /// units, and no more units in all than `units_max` or half the free ones in regions that stay.
    pub fn choose_victims(&mut self, regions_max: u32, used_max: u32, units_max: u32) -> Victims {
        self.regions
            .choose_victims(regions_max, used_max, units_max)
    }

    /// Whether `unit` lies in a region that is being emptied.
    #[must_use]
    pub fn is_victim(&self, unit: u32) -> bool {
        self.regions.is_victim(unit)
    }

    /// The cleaner has done with them; returns how many there were, and how many of them are empty.
    pub fn forget_victims(&mut self) -> (u32, u32) {
        self.regions.forget_victims()
    }

    /// RAM held by the bitmaps.
    #[must_use]
    pub fn ram_bytes(&self) -> u64 {
        self.committed.units().ram_bytes() + self.regions.ram_bytes()
    }

    /// RAM held by the quarantine.
    #[must_use]
    pub fn quarantine_ram_bytes(&self) -> u64 {
        self.quarantine.ram_bytes()
    }
}
