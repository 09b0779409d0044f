//! Where new data go: in long runs while there are any.

use super::regions::REGION_SEARCH_MAX;
use super::{Allocator, Run};
use crate::format::REGION_UNITS;

/// Runs from this length on are worth an empty region.
const LONG_RUN: u32 = 16;
/// A whole leaf is not cut in two from this size on: it begins a region of its own.
const UNCUT: u32 = REGION_UNITS / 2;

/// Where the last run of each kind went.
#[derive(Debug, Default)]
pub(super) struct Cursors {
    data: u32,
    pages: u32,
    holes: u32,
    pub(super) window: u32,
    /// Where the cleaner's next data go: what is left of a region that was empty.
    stream: Run,
}

impl Allocator {
    /// Hands out a run of at most `max` units for data, preferably that long and outside the windows: where
    /// the last one ended, in an empty region, in the best of some others.
    pub fn take_run(&mut self, max: u32) -> Option<Run> {
        if self.regions.free_units() == 0 {
            return None;
        }
        let max = max.min(REGION_UNITS);
        let here = Some(self.cursors.data).filter(|&r| self.regions.is_open(r));
        let here = here.map(|r| self.regions.longest_run(r, max));
        let mut run = here.filter(|run| run.len == max);
        if run.is_none() && max >= LONG_RUN {
            let region = self
                .regions
                .find_empty(self.cursors.data, REGION_SEARCH_MAX);
            run = region.map(|r| self.regions.longest_run(r, max));
        }
        let run = run
            .or_else(|| self.regions.best_of_some(self.cursors.data, max))
            .or_else(|| self.regions.any_run(self.cursors.data, max))?;
        self.cursors.data = run.start / REGION_UNITS;
        self.regions.take(run);
        Some(run)
    }

    /// Hands out a run of at most `max` units for map pages, which leave empty regions to data while there
    /// are others.
    pub fn take_pages(&mut self, max: u32) -> Option<Run> {
        if self.regions.free_units() == 0 {
            return None;
        }
        let here = Some(self.cursors.pages)
            .filter(|&r| self.regions.is_open(r) && self.regions.free_of(r) > 0);
        let here = here.map(|r| self.regions.longest_run(r, max));
        let run = here
            .filter(|run| run.len == max)
            .or_else(|| {
                let best = self.regions.best_of_some(self.cursors.pages, max);
                best.filter(|run| run.len >= max.min(LONG_RUN / 2))
            })
            .or_else(|| {
                let region = self
                    .regions
                    .find_empty(self.cursors.pages, REGION_SEARCH_MAX);
                region.map(|r| self.regions.longest_run(r, max))
            })
            .or_else(|| self.regions.any_run(self.cursors.pages, max))?;
        self.cursors.pages = run.start / REGION_UNITS;
        self.regions.take(run);
        Some(run)
    }

    /// Hands out room for `count` units that the cleaner moves, in at most two runs: what is left of the
    /// region where the last ones went, and an empty region if it may begin one. Returns how many it began,
    /// `None` if there is no room.
    pub fn take_stream(&mut self, count: u32, may_begin: bool, out: &mut Vec<Run>) -> Option<u32> {
        let stream = self.cursors.stream;
        let region = stream.start / REGION_UNITS;
        let usable = stream.len > 0 && self.regions.is_open(region) && self.regions.is_free(stream);
        let left = if usable { stream.len } else { 0 };
        if left >= count {
            out.push(self.take_from_stream(count));
            return Some(0);
        }
        let empty = may_begin.then(|| self.regions.find_empty(region, u32::MAX))??;
        if left >= LONG_RUN && count < UNCUT {
            out.push(self.take_from_stream(left));
        }
        let rest = count - out.iter().map(|run| run.len).sum::<u32>();
        let fresh = Run {
            start: empty * REGION_UNITS,
            len: REGION_UNITS,
        };
        let run = Run { len: rest, ..fresh };
        self.regions.take(run);
        out.push(run);
        // The longer rest is the better place to go on.
        if REGION_UNITS - rest >= self.cursors.stream.len || !usable {
            self.cursors.stream = Run {
                start: fresh.start + rest,
                len: REGION_UNITS - rest,
            };
        }
        Some(1)
    }

    fn take_from_stream(&mut self, count: u32) -> Run {
        let run = Run {
            start: self.cursors.stream.start,
            len: count,
        };
        self.regions.take(run);
        self.cursors.stream.start += count;
        self.cursors.stream.len -= count;
        run
    }

    /// Hands out room for `count` units that the cleaner moves out of its victims, in partly used regions, in
    /// at most `runs_max` runs; `false`, and nothing, if that is not enough.
    pub fn take_holes(&mut self, count: u32, runs_max: usize, out: &mut Vec<Run>) -> bool {
        let mut left = count;
        while left > 0 && out.len() < runs_max {
            let Some(run) = self.regions.best_of_some(self.cursors.holes, left) else {
                break;
            };
            self.cursors.holes = run.start / REGION_UNITS;
            self.regions.take(run);
            out.push(run);
            left -= run.len;
        }
        if left > 0 {
            out.drain(..).for_each(|run| self.regions.give_back(run));
        }
        left == 0
    }
}
