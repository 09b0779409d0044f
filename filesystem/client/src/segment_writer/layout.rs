//! Which addresses of a segment are given out, and how many gaps the namespace may see.
//!
//! Each address is given out once. The namespace counts the ranges of a segment that it knows of and that no
//! extent names yet, and refuses too many of them ([`namespace::GAPS_MAX`]). Commits come in any order, so
//! what is under way may be named or not: the count here is the most that any order makes, and is never above
//! the limit. A segment whose next range would take it there is given up for another one.

use std::collections::BTreeMap;

use namespace::{BLOCK, GAPS_MAX};

/// Bytes of a chunk, the unit of placement: an append point lies within one.
pub const CHUNK_BYTES: u64 = 4 << 20;

/// Data from this size on may be cut into runs; smaller ones are one run, to be read by one request.
const LARGE_BYTES: u64 = 1 << 20;

/// Places where a segment grows, each in a chunk of its own: chunks lie in different placement groups, and so
/// on different devices.
const POINTS: usize = 8;

/// Addresses in bytes, one behind the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) address: u64,
    pub(crate) length: u64,
}

/// The segment has no room for a range, or would have too many gaps.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Full;

/// What became of addresses that were given out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// They are being written, or named.
    Pending,
    /// They may be named: the commit's outcome is not known.
    Unsettled,
    /// An extent names them, or named them once.
    Named,
    /// No extent will ever name them.
    Lost,
}

#[derive(Debug, Clone, Copy)]
struct Range {
    end: u64,
    fate: Fate,
}

#[derive(Debug, Clone, Copy, Default)]
struct Point {
    at: u64,
    end: u64,
}

#[derive(Debug)]
pub(crate) struct Layout {
    /// Bytes of the segment.
    bytes: u64,
    /// Where the first chunk begins that is not given to a point.
    next_chunk: u64,
    points: [Point; POINTS],
    /// What was given out, by address. Neighbours that are named or lost are one range.
    ranges: BTreeMap<u64, Range>,
    /// Ranges that are pending.
    pending: usize,
}

impl Layout {
    pub(crate) fn new(bytes: u64) -> Self {
        Self {
            bytes,
            next_chunk: 0,
            points: [Point::default(); POINTS],
            ranges: BTreeMap::new(),
            pending: 0,
        }
    }

    /// Allocates `length` bytes, a multiple of the block. What has the same `affinity` lies close together.
    pub(crate) fn allocate(&mut self, length: u64, affinity: u64) -> Result<Vec<Run>, Full> {
        assert!(
            length > 0 && length % BLOCK == 0,
            "segments hold whole blocks"
        );
        let before = (self.points, self.next_chunk);
        let point = (affinity % POINTS as u64) as usize;
        let taken = match length < LARGE_BYTES {
            true => self.take_run(length, point).map(|run| vec![run]),
            false => self.take_runs(length, point),
        };
        let is_taken = taken.is_ok();
        for run in taken.iter().flatten() {
            self.insert(*run, Fate::Pending);
        }
        if is_taken && self.gaps_max() <= GAPS_MAX {
            return taken;
        }
        for run in taken.iter().flatten() {
            self.remove(*run);
        }
        (self.points, self.next_chunk) = before;
        Err(Full)
    }

    /// One run at the point. If what is left of its chunk is too short, another point may have room: each
    /// rest that is left behind is a gap.
    fn take_run(&mut self, length: u64, point: usize) -> Result<Run, Full> {
        let room = |at: usize| self.points[at].end - self.points[at].at;
        let mut order = (0..POINTS).map(|step| (point + step) % POINTS);
        let found = match room(point) {
            0 => None,
            _ => order.find(|at| room(*at) >= length),
        };
        if found.is_none() {
            self.begin_chunk(point)?;
        }
        Ok(self.points[found.unwrap_or(point)].take(length))
    }

    /// Runs at the point, up to the ends of its chunks.
    fn take_runs(&mut self, length: u64, point: usize) -> Result<Vec<Run>, Full> {
        let (mut runs, mut left) = (Vec::<Run>::new(), length);
        while left > 0 {
            let room = self.points[point].end - self.points[point].at;
            if room == 0 {
                self.begin_chunk(point)?;
                continue;
            }
            runs.push(self.points[point].take(left.min(room)));
            left -= left.min(room);
        }
        Ok(runs)
    }

    fn begin_chunk(&mut self, point: usize) -> Result<(), Full> {
        let end = self.next_chunk + CHUNK_BYTES;
        if end > self.bytes {
            return Err(Full);
        }
        self.points[point] = Point {
            at: self.next_chunk,
            end,
        };
        self.next_chunk = end;
        Ok(())
    }

    /// Says what became of a run that is pending.
    pub(crate) fn decide(&mut self, run: Run, fate: Fate) {
        assert!(fate != Fate::Pending, "it is that already");
        self.remove(run);
        self.insert(run, fate);
    }

    fn remove(&mut self, run: Run) {
        let removed = self.ranges.remove(&run.address);
        let is_whole = removed.is_some_and(|range| {
            range.fate == Fate::Pending && range.end == run.address + run.length
        });
        assert!(is_whole, "a run is decided once");
        self.pending -= 1;
    }

    fn insert(&mut self, run: Run, fate: Fate) {
        let (mut from, mut end) = (run.address, run.address + run.length);
        if fate == Fate::Pending {
            self.pending += 1;
        }
        // Of what is named or lost only the borders matter.
        if matches!(fate, Fate::Named | Fate::Lost) {
            let before = self.ranges.range(..from).next_back();
            if let Some((address, range)) = before.filter(|(_, range)| range.joins(from, fate)) {
                from = *address;
                end = end.max(range.end);
            }
            if let Some(behind) = self.ranges.get(&end).filter(|range| range.fate == fate) {
                let behind_end = behind.end;
                self.ranges.remove(&end);
                end = behind_end;
            }
        }
        self.ranges.insert(from, Range { end, fate });
    }

    /// Whether something was given out and is not decided.
    pub(crate) fn is_pending(&self) -> bool {
        self.pending > 0
    }

    /// The end of what was given out.
    pub(crate) fn end(&self) -> u64 {
        self.ranges
            .values()
            .next_back()
            .map_or(0, |range| range.end)
    }

    /// The most gaps that the namespace may count, whatever of the open ranges it names; what is unnamed at
    /// the end counts as one.
    fn gaps_max(&self) -> usize {
        // The most so far, if the last address is named, and if it is not.
        let (mut named, mut unnamed) = (Some(0), None);
        let opened = |named: Option<usize>, unnamed| named.map(|count| count + 1).max(unnamed);
        let mut at = 0;
        for (address, range) in &self.ranges {
            if *address > at {
                (named, unnamed) = (None, opened(named, unnamed));
            }
            let (as_named, as_unnamed) = (named.max(unnamed), opened(named, unnamed));
            (named, unnamed) = match range.fate {
                Fate::Named => (as_named, None),
                Fate::Lost => (None, as_unnamed),
                Fate::Pending | Fate::Unsettled => (as_named, as_unnamed),
            };
            at = range.end;
        }
        named.max(unnamed).unwrap_or(0)
    }
}

impl Range {
    fn joins(&self, from: u64, fate: Fate) -> bool {
        self.end == from && self.fate == fate
    }
}

impl Point {
    fn take(&mut self, length: u64) -> Run {
        let address = self.at;
        self.at += length;
        assert!(self.at <= self.end, "a point stays in its chunk");
        Run { address, length }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SEGMENT: u64 = 1 << 30;

    #[test]
    fn small_data_are_one_run_and_large_ones_fill_chunks() {
        let mut layout = Layout::new(SEGMENT);
        let first = layout.allocate(BLOCK, 3).unwrap();
        let second = layout.allocate(BLOCK, 3).unwrap();
        assert_eq!(first[0].address + BLOCK, second[0].address);
        let other = layout.allocate(BLOCK, 4).unwrap();
        assert_eq!(other[0].address / CHUNK_BYTES, 1, "in another chunk");
        let large = layout.allocate(5 << 20, 3).unwrap();
        let lengths: Vec<u64> = large.iter().map(|run| run.length).collect();
        let rest = CHUNK_BYTES - 2 * BLOCK;
        assert_eq!(lengths, [rest, (5 << 20) - rest]);
        for run in large {
            let last = run.address + run.length - 1;
            assert_eq!(run.address / CHUNK_BYTES, last / CHUNK_BYTES);
        }
    }

    #[test]
    fn a_full_segment_gives_out_nothing_and_keeps_its_end() {
        let mut layout = Layout::new(2 * CHUNK_BYTES);
        layout.allocate(2 * CHUNK_BYTES - BLOCK, 0).unwrap();
        assert_eq!(layout.allocate(2 * BLOCK, 0), Err(Full));
        assert_eq!(layout.allocate(4 * CHUNK_BYTES, 0), Err(Full));
        assert_eq!(layout.allocate(BLOCK, 0).unwrap().len(), 1);
        assert_eq!(layout.allocate(BLOCK, 0), Err(Full));
        assert_eq!(layout.end(), 2 * CHUNK_BYTES);
    }

    /// What the namespace counts, by the ranges that it was told of.
    fn gaps(named: &BTreeMap<u64, u64>) -> usize {
        let (mut count, mut at) = (0, 0);
        for (address, end) in named {
            count += usize::from(*address > at);
            at = *end;
        }
        count
    }

    proptest! {
        #[test]
        fn addresses_are_given_out_once_and_gaps_stay_within_the_limit(
            steps in proptest::collection::vec((1_u64..400, 0_u64..20, 0_usize..64, 0_u8..5), 1..700),
        ) {
            let mut layout = Layout::new(SEGMENT);
            let mut given = BTreeMap::<u64, u64>::new();
            let (mut open, mut named) = (Vec::<Run>::new(), BTreeMap::new());
            let mut is_full = false;
            for (blocks, affinity, choice, fate) in steps {
                match layout.allocate(blocks * BLOCK, affinity) {
                    Ok(runs) => for run in runs {
                        let end = run.address + run.length;
                        let before = given.range(..end).next_back();
                        prop_assert!(before.is_none_or(|(_, end)| *end <= run.address));
                        given.insert(run.address, end);
                        open.push(run);
                    },
                    Err(Full) => is_full = true,
                }
                // Whatever of the open ones is named, and in whatever order.
                let is_named = |at: usize| (at * 7 + choice) % 2 == 0;
                let mut perhaps = named.clone();
                for (_, run) in open.iter().enumerate().filter(|(at, _)| is_named(*at)) {
                    perhaps.insert(run.address, run.address + run.length);
                }
                prop_assert!(gaps(&perhaps) <= layout.gaps_max());
                prop_assert!(layout.gaps_max() <= GAPS_MAX);
                if fate > 0 && !open.is_empty() {
                    let run = open.swap_remove(choice % open.len());
                    let fate = match fate {
                        1 => Fate::Lost,
                        2 if choice == 0 => Fate::Unsettled,
                        _ => Fate::Named,
                    };
                    layout.decide(run, fate);
                    if fate == Fate::Named {
                        named.insert(run.address, run.address + run.length);
                    }
                }
            }
            prop_assert!(is_full || given.values().all(|end| *end <= layout.end()));
            prop_assert_eq!(layout.is_pending(), !open.is_empty());
        }
    }
}
