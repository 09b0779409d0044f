//! Units that are busy, region by region: what new data may go to, and what the cleaner needs to know.

use super::Run;
use crate::bitmap::Bitmap;
use crate::format::{Geometry, REGION_UNITS};

/// Regions looked at for a good one before any is taken.
pub(super) const REGION_SEARCH_MAX: u32 = 1024;
/// Thin regions of which the one with the longest run is taken, where no region is empty.
const REGIONS_COMPARED: u32 = 16;

/// What free space looks like. Regions of live windows do not count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FreeSpace {
    /// Regions that are free from end to end.
    pub empty: u32,
    /// Free units in regions that are partly in use.
    pub scattered_units: u32,
}

/// Regions that were chosen to be emptied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Victims {
    /// How many.
    pub regions: u32,
    /// Units in use in them.
    pub units: u32,
}

/// Which units are busy, counted by region, and which regions are set aside.
#[derive(Debug)]
pub(super) struct Regions {
    busy: Bitmap,
    /// Free units per region; fixed places count as used.
    free: Vec<u16>,
    free_units: u32,
    /// Regions that are free from end to end.
    empty: u32,
    /// Regions of live windows: taken by others only when nothing else is left.
    in_window: Bitmap,
    /// Regions that the cleaner empties: nothing new goes there while there is another place.
    victims: Bitmap,
    /// Units that may hold data at all, up to `end`.
    first: u32,
    end: u32,
}

impl Regions {
    /// Busy is what is `committed`, and the fixed places.
    pub(super) fn new(geo: &Geometry, committed: &Bitmap) -> Self {
        let regions = geo.units / REGION_UNITS;
        let (first, end) = (geo.first_free(), geo.end_free());
        let mut busy = committed.clone();
        for unit in (0..first).chain(end..geo.units) {
            busy.set(unit);
        }
        let free: Vec<u16> = (0..regions)
            .map(|r| busy.count_clear(r * REGION_UNITS, (r + 1) * REGION_UNITS) as u16)
            .collect();
        let empty = free.iter().filter(|&&n| u32::from(n) == REGION_UNITS);
        Self {
            busy,
            free_units: free.iter().map(|&n| u32::from(n)).sum(),
            empty: empty.count() as u32,
            free,
            in_window: Bitmap::new(regions),
            victims: Bitmap::new(regions),
            first,
            end,
        }
    }

    /// Units that may hold data at all.
    pub(super) fn total_units(&self) -> u32 {
        self.end - self.first
    }

    pub(super) fn free_units(&self) -> u32 {
        self.free_units
    }

    /// Whether `unit` can be named by a map at all.
    pub(super) fn is_data_unit(&self, unit: u32) -> bool {
        (self.first..self.end).contains(&unit)
    }

    pub(super) fn take(&mut self, run: Run) {
        for unit in run.start..run.start + run.len {
            assert!(self.busy.set(unit), "unit handed out twice");
            self.one_less(unit);
        }
    }

    pub(super) fn give_back(&mut self, run: Run) {
        for unit in run.start..run.start + run.len {
            assert!(self.busy.clear(unit), "unit freed twice");
            let free = &mut self.free[(unit / REGION_UNITS) as usize];
            *free += 1;
            self.empty += u32::from(u32::from(*free) == REGION_UNITS);
        }
        self.free_units += run.len;
    }

    /// Makes a unit busy if it is not.
    pub(super) fn claim(&mut self, unit: u32) {
        if self.busy.set(unit) {
            self.one_less(unit);
        }
    }

    fn one_less(&mut self, unit: u32) {
        let free = &mut self.free[(unit / REGION_UNITS) as usize];
        self.empty -= u32::from(u32::from(*free) == REGION_UNITS);
        *free -= 1;
        self.free_units -= 1;
    }

    pub(super) fn count(&self) -> u32 {
        self.free.len() as u32
    }

    /// Free units of a region.
    pub(super) fn free_of(&self, region: u32) -> u32 {
        u32::from(self.free[region as usize])
    }

    /// Neither of a window nor being emptied.
    pub(super) fn is_open(&self, region: u32) -> bool {
        !self.in_window.get(region) && !self.victims.get(region)
    }

    /// No fixed place is in it.
    fn is_whole(&self, region: u32) -> bool {
        region * REGION_UNITS >= self.first && (region + 1) * REGION_UNITS <= self.end
    }

    /// Regions that can be emptied at all.
    fn cleanable(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.count()).filter(|&r| self.is_whole(r) && !self.in_window.get(r))
    }

    /// Whether all of the run is free.
    pub(super) fn is_free(&self, run: Run) -> bool {
        self.busy.count_clear(run.start, run.start + run.len) == run.len
    }

    /// The first free run within `from..to`, at most `max` long.
    pub(super) fn first_run(&self, from: u32, to: u32, max: u32) -> Option<Run> {
        let (start, len) = self.busy.clear_run(from, to, max)?;
        Some(Run { start, len })
    }

    pub(super) fn longest_run(&self, region: u32, max: u32) -> Run {
        let (start, len) = self.busy.longest_clear_run(region * REGION_UNITS, max);
        Run { start, len }
    }

    pub(super) fn find_empty(&self, from: u32, search_max: u32) -> Option<u32> {
        if self.empty == 0 {
            return None;
        }
        let regions = self.count();
        (0..regions.min(search_max))
            .map(|i| (from + i) % regions)
            .find(|&r| self.free_of(r) == REGION_UNITS && self.is_open(r))
    }

    /// The longest run (at most `max`) among the next regions from `from` on that are partly free.
    pub(super) fn best_of_some(&self, from: u32, max: u32) -> Option<Run> {
        let regions = self.count();
        let thin = |&r: &u32| (1..REGION_UNITS).contains(&self.free_of(r)) && self.is_open(r);
        let near = (0..regions.min(REGION_SEARCH_MAX)).map(|i| (from + i) % regions);
        let mut best: Option<Run> = None;
        for region in near.filter(thin).take(REGIONS_COMPARED as usize) {
            let run = self.longest_run(region, max);
            if best.is_none_or(|best| run.len > best.len) {
                best = Some(run);
            }
            if run.len == max {
                break;
            }
        }
        best
    }

    /// The first free run of any region, outside windows and victims if possible.
    pub(super) fn any_run(&self, from: u32, max: u32) -> Option<Run> {
        let regions = self.count();
        let at = |i: u32| (from + i) % regions;
        let outside = |r: &u32| self.free_of(*r) > 0 && self.is_open(*r);
        let thinned = |r: &u32| self.free_of(*r) > 0 && !self.in_window.get(*r);
        let region = (0..regions).map(at).find(outside);
        let region = region.or_else(|| (0..regions).map(at).find(thinned));
        let region = region.or_else(|| (0..regions).map(at).find(|&r| self.free_of(r) > 0))?;
        Some(self.longest_run(region, max))
    }

    /// Marks or unmarks regions as belonging to a live window.
    pub(super) fn mark_window(&mut self, regions: &[u32], live: bool) {
        for &region in regions {
            if live {
                self.in_window.set(region);
            } else {
                self.in_window.clear(region);
            }
        }
    }

    /// Free units in these regions.
    pub(super) fn free_in(&self, regions: &[u32]) -> u32 {
        regions.iter().map(|&r| self.free_of(r)).sum()
    }

    /// Up to `count` regions with the most free units for a new window, from region `from` on.
    pub(super) fn pick_window(&self, from: u32, count: usize, out: &mut Vec<u32>) {
        out.clear();
        let regions = self.count();
        let mut by_free = [0u32; REGION_UNITS as usize + 1];
        for region in 0..regions {
            if self.is_open(region) {
                by_free[self.free_of(region) as usize] += 1;
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
            let region = (from + i) % regions;
            let free = self.free_of(region);
            if out.len() == count {
                break;
            }
            if free < floor || !self.is_open(region) || (free == floor && at_floor == 0) {
                continue;
            }
            at_floor -= u32::from(free == floor);
            out.push(region);
        }
        // On a small or full shard windows share regions: a header knows its window.
        for region in 0..regions {
            if out.len() < 2.min(count) && self.free_of(region) > 0 && !out.contains(&region) {
                out.push(region);
            }
        }
    }

    /// What free space looks like now. Looks at every region.
    pub(super) fn free_space(&self) -> FreeSpace {
        let mut space = FreeSpace::default();
        for region in self.cleanable() {
            match self.free_of(region) {
                REGION_UNITS => space.empty += 1,
                free => space.scattered_units += free,
            }
        }
        space
    }

    /// Chooses the regions with the fewest units in use: at most `regions_max`, each with at most `used_max`
    /// units, and no more units in all than `units_max` or half the free ones in regions that stay.
    pub(super) fn choose_victims(
        &mut self,
        regions_max: u32,
        used_max: u32,
        units_max: u32,
    ) -> Victims {
        self.forget_victims();
        let mut by_used = [0u32; REGION_UNITS as usize + 1];
        let mut free_units = 0;
        for region in self.cleanable() {
            let used = REGION_UNITS - self.free_of(region);
            by_used[used as usize] += 1;
            free_units += if used > 0 { REGION_UNITS - used } else { 0 };
        }
        let mut chosen = Victims::default();
        let mut quota = [0u32; REGION_UNITS as usize + 1];
        'all: for used in 1..=used_max.min(REGION_UNITS) {
            for _ in 0..by_used[used as usize] {
                let units = chosen.units + used;
                let left = free_units - (REGION_UNITS - used);
                if chosen.regions == regions_max || units > units_max || units > left / 2 {
                    break 'all;
                }
                free_units = left;
                quota[used as usize] += 1;
                chosen = Victims {
                    regions: chosen.regions + 1,
                    units,
                };
            }
        }
        for region in 0..self.count() {
            let free = self.free_of(region);
            let quota = &mut quota[(REGION_UNITS - free) as usize];
            if *quota > 0 && self.is_whole(region) && !self.in_window.get(region) {
                *quota -= 1;
                self.victims.set(region);
            }
        }
        chosen
    }

    /// Whether `unit` lies in a region that is being emptied.
    pub(super) fn is_victim(&self, unit: u32) -> bool {
        self.victims.get(unit / REGION_UNITS)
    }

    /// The cleaner has done with them; returns how many there were, and how many of them are empty.
    pub(super) fn forget_victims(&mut self) -> (u32, u32) {
        let (mut from, mut count, mut empty) = (0, 0, 0);
        while let Some(region) = self.victims.find(true, from, self.count()) {
            self.victims.clear(region);
            from = region + 1;
            count += 1;
            empty += u32::from(self.free_of(region) == REGION_UNITS);
        }
        (count, empty)
    }

    pub(super) fn ram_bytes(&self) -> u64 {
        self.busy.ram_bytes()
            + self.free.len() as u64 * 2
            + self.in_window.ram_bytes()
            + self.victims.ram_bytes()
    }
}
