//! Where new data go: in long runs while there are any, and what the cleaner needs to know of free space.

use super::{Allocator, REGION_SEARCH_MAX, Run};
use crate::format::REGION_UNITS;

/// Runs from this length on are worth an empty region.
const LONG_RUN: u32 = 16;
/// Thin regions of which the one with the longest run is taken, where no region is empty.
const REGIONS_COMPARED: u32 = 16;
/// A whole leaf is not cut in two from this size on: it begins a region of its own.
const UNCUT: u32 = REGION_UNITS / 2;

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

impl Allocator {
    fn regions(&self) -> u32 {
        self.region_free.len() as u32
    }

    fn free_of(&self, region: u32) -> u32 {
        u32::from(self.region_free[region as usize])
    }

    /// Neither of a window nor being emptied.
    fn is_open(&self, region: u32) -> bool {
        !self.in_window.get(region) && !self.victims.get(region)
    }

    /// No fixed place is in it.
    fn is_whole(&self, region: u32) -> bool {
        region * REGION_UNITS >= self.first && (region + 1) * REGION_UNITS <= self.end
    }

    /// Regions that can be emptied at all.
    fn cleanable(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.regions()).filter(|&r| self.is_whole(r) && !self.in_window.get(r))
    }

    fn longest_run(&self, region: u32, max: u32) -> Run {
        let (start, len) = self.busy.longest_clear_run(region * REGION_UNITS, max);
        Run { start, len }
    }

    fn find_empty(&self, from: u32, search_max: u32) -> Option<u32> {
        if self.empty_regions == 0 {
            return None;
        }
        let regions = self.regions();
        (0..regions.min(search_max))
            .map(|i| (from + i) % regions)
            .find(|&r| self.free_of(r) == REGION_UNITS && self.is_open(r))
    }

    /// The longest run (at most `max`) among the next regions from `from` on that are partly free.
    fn best_of_some(&self, from: u32, max: u32) -> Option<Run> {
        let regions = self.regions();
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
    fn any_run(&self, from: u32, max: u32) -> Option<Run> {
        let regions = self.regions();
        let at = |i: u32| (from + i) % regions;
        let outside = |r: &u32| self.free_of(*r) > 0 && self.is_open(*r);
        let thinned = |r: &u32| self.free_of(*r) > 0 && !self.in_window.get(*r);
        let region = (0..regions).map(at).find(outside);
        let region = region.or_else(|| (0..regions).map(at).find(thinned));
        let region = region.or_else(|| (0..regions).map(at).find(|&r| self.free_of(r) > 0))?;
        Some(self.longest_run(region, max))
    }

    /// Hands out a run of at most `max` units for data, preferably that long and outside the windows: where
    /// the last one ended, in an empty region, in the best of some others.
    pub fn take_run(&mut self, max: u32) -> Option<Run> {
        if self.free_units == 0 {
            return None;
        }
        let max = max.min(REGION_UNITS);
        let here = Some(self.cursor).filter(|&r| self.is_open(r));
        let here = here.map(|r| self.longest_run(r, max));
        let mut run = here.filter(|run| run.len == max);
        if run.is_none() && max >= LONG_RUN {
            let region = self.find_empty(self.cursor, REGION_SEARCH_MAX);
            run = region.map(|r| self.longest_run(r, max));
        }
        let run = run
            .or_else(|| self.best_of_some(self.cursor, max))
            .or_else(|| self.any_run(self.cursor, max))?;
        self.cursor = run.start / REGION_UNITS;
        self.take(run);
        Some(run)
    }

    /// Hands out a run of at most `max` units for map pages, which leave empty regions to data while there
    /// are others.
    pub fn take_pages(&mut self, max: u32) -> Option<Run> {
        if self.free_units == 0 {
            return None;
        }
        let here = Some(self.page_cursor).filter(|&r| self.is_open(r) && self.free_of(r) > 0);
        let here = here.map(|r| self.longest_run(r, max));
        let run = here
            .filter(|run| run.len == max)
            .or_else(|| {
                let best = self.best_of_some(self.page_cursor, max);
                best.filter(|run| run.len >= max.min(LONG_RUN / 2))
            })
            .or_else(|| {
                let region = self.find_empty(self.page_cursor, REGION_SEARCH_MAX);
                region.map(|r| self.longest_run(r, max))
            })
            .or_else(|| self.any_run(self.page_cursor, max))?;
        self.page_cursor = run.start / REGION_UNITS;
        self.take(run);
        Some(run)
    }

    /// Hands out room for `count` units that the cleaner moves, in at most two runs: what is left of the
    /// region where the last ones went, and an empty region if it may begin one. Returns how many it began,
    /// `None` if there is no room.
    pub fn take_stream(&mut self, count: u32, may_begin: bool, out: &mut Vec<Run>) -> Option<u32> {
        let stream = self.stream;
        let region = stream.start / REGION_UNITS;
        let usable = stream.len > 0
            && self.is_open(region)
            && self
                .busy
                .count_clear(stream.start, stream.start + stream.len)
                == stream.len;
        let left = if usable { stream.len } else { 0 };
        if left >= count {
            out.push(self.take_from_stream(count));
            return Some(0);
        }
        let empty = may_begin.then(|| self.find_empty(region, u32::MAX))??;
        if left >= LONG_RUN && count < UNCUT {
            out.push(self.take_from_stream(left));
        }
        let rest = count - out.iter().map(|run| run.len).sum::<u32>();
        let fresh = Run {
            start: empty * REGION_UNITS,
            len: REGION_UNITS,
        };
        let run = Run { len: rest, ..fresh };
        self.take(run);
        out.push(run);
        // The longer rest is the better place to go on.
        if REGION_UNITS - rest >= self.stream.len || !usable {
            self.stream = Run {
                start: fresh.start + rest,
                len: REGION_UNITS - rest,
            };
        }
        Some(1)
    }

    fn take_from_stream(&mut self, count: u32) -> Run {
        let run = Run {
            start: self.stream.start,
            len: count,
        };
        self.take(run);
        self.stream.start += count;
        self.stream.len -= count;
        run
    }

    /// Hands out room for `count` units that the cleaner moves out of its victims, in partly used regions, in
    /// at most `runs_max` runs; `false`, and nothing, if that is not enough.
    pub fn take_holes(&mut self, count: u32, runs_max: usize, out: &mut Vec<Run>) -> bool {
        let mut left = count;
        while left > 0 && out.len() < runs_max {
            let Some(run) = self.best_of_some(self.hole_cursor, left) else {
                break;
            };
            self.hole_cursor = run.start / REGION_UNITS;
            self.take(run);
            out.push(run);
            left -= run.len;
        }
        if left > 0 {
            out.drain(..).for_each(|run| self.give_back(run));
        }
        left == 0
    }

    /// What free space looks like now. Looks at every region.
    #[must_use]
    pub fn free_space(&self) -> FreeSpace {
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
    pub fn choose_victims(&mut self, regions_max: u32, used_max: u32, units_max: u32) -> Victims {
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
        for region in 0..self.regions() {
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
    #[must_use]
    pub fn is_victim(&self, unit: u32) -> bool {
        self.victims.get(unit / REGION_UNITS)
    }

    /// The cleaner has done with them; returns how many there were, and how many of them are empty.
    pub fn forget_victims(&mut self) -> (u32, u32) {
        let (mut from, mut count, mut empty) = (0, 0, 0);
        while let Some(region) = self.victims.find(true, from, self.regions()) {
            self.victims.clear(region);
            from = region + 1;
            count += 1;
            empty += u32::from(self.free_of(region) == REGION_UNITS);
        }
        (count, empty)
    }
}
