//! Keeps requests of a replicated volume apart that touch the same blocks at the same time.
//!
//! A write reaches its replicas one after the other. A read beside it might see it on one replica, and the
//! next read, on another, might not; or the client dies, and the write that was seen is lost. So reads wait
//! for overlapping writes, and writes for overlapping reads (invariant *Stable reads*). Writes to the same
//! block wait for each other, too: one that is done while an older one is still on its way to a replica that
//! has just come back would be missing there, under the older one. Discards leave no version behind where
//! nothing is mapped, so that replicas which execute a discard and a write in different order would differ: a
//! discard waits for everything else on the volume, other discards among it, and everything else for it.
//!
//! Blocks share counters by a hash: two that do not overlap may wait for each other, never the reverse.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use fabric_types::block::BLOCK_BYTES;

use super::watermark::LANES_MAX;

/// Bytes that share a counter whatever the hash: neighbours must not wait for each other.
const GRANULE_BYTES: u64 = BLOCK_BYTES as u64;
/// Counters of a volume: 64 KiB of them.
const COUNTERS: usize = 1 << 14;
/// One writer; below it the readers are counted. A longest read, 64 MiB, may count for one counter several
/// times.
const WRITER: u32 = 1 << 16;
const READERS: u32 = WRITER - 1;
/// A read or write of more blocks waits for everything else, as a discard does: it costs next to nothing to
/// try. Up to here no two blocks of a request share a counter, so that it does not wait for itself. Guests
/// read and write 1 to 4 MiB at most.
pub const GRANULES_MAX: u64 = 4096;

/// What a request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Reads.
    Read,
    /// Writes data.
    Write,
    /// Discards, or writes zeroes.
    Zero,
}

impl Access {
    /// What it counts as for these bytes.
    fn of(self, bytes: &Range<u64>) -> Self {
        let granules = bytes.end.div_ceil(GRANULE_BYTES) - bytes.start / GRANULE_BYTES;
        match self {
            Self::Read | Self::Write if granules > GRANULES_MAX => Self::Zero,
            access => access,
        }
    }

    /// What it adds to a counter, and what it must not meet there.
    fn mark(self) -> (u32, u32) {
        match self {
            Self::Read => (1, !READERS),
            Self::Write | Self::Zero => (WRITER, u32::MAX),
        }
    }
}

/// What keeps a request from beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Conflict {
    /// Requests on blocks that share this counter; others may follow.
    Counter(u16),
    /// A discard, which is alone on the volume.
    Zero,
    /// Anything in flight, for this one would be alone.
    Any,
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct Lane {
    active: AtomicU32,
}

/// The requests in flight of one volume, shared by its data threads.
#[derive(Debug)]
pub struct Overlap {
    /// Lower half: readers; upper half: writers.
    counters: Box<[AtomicU32]>,
    /// Reads and writes in flight.
    lanes: Box<[Lane]>,
    zeroes: AtomicU32,
}

impl Default for Overlap {
    fn default() -> Self {
        Self {
            counters: (0..COUNTERS).map(|_| AtomicU32::new(0)).collect(),
            lanes: (0..LANES_MAX).map(|_| Lane::default()).collect(),
            zeroes: AtomicU32::new(0),
        }
    }
}

fn granules(bytes: &Range<u64>) -> impl Iterator<Item = usize> {
    let (first, end) = (
        bytes.start / GRANULE_BYTES,
        bytes.end.div_ceil(GRANULE_BYTES),
    );
    (first..end).map(|granule| (granule.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 50) as usize)
}

const _: () = assert!(COUNTERS == 1 << (64 - 50));

impl Overlap {
    /// Lets the request of `lane` begin, or tells the first conflict that it met: it has to wait, and to try
    /// again once [`is_over`](Self::is_over) says so.
    ///
    /// Whoever comes says so before it looks whether somebody else did: of two that come at once at least one
    /// sees the other.
    pub fn enter(&self, lane: usize, access: Access, bytes: &Range<u64>) -> Result<(), Conflict> {
        let access = access.of(bytes);
        if access == Access::Zero {
            return self.enter_alone();
        }
        self.lanes[lane].active.fetch_add(1, Ordering::SeqCst);
        if self.zeroes.load(Ordering::SeqCst) > 0 {
            self.lanes[lane].active.fetch_sub(1, Ordering::SeqCst);
            return Err(Conflict::Zero);
        }
        let (mark, conflict) = access.mark();
        for (nth, granule) in granules(bytes).enumerate() {
            let before = self.counters[granule].fetch_add(mark, Ordering::SeqCst);
            if before & conflict != 0 {
                // What lies behind was not counted: a request that waits costs no more than it got ahead.
                for counted in granules(bytes).take(nth + 1) {
                    self.counters[counted].fetch_sub(mark, Ordering::SeqCst);
                }
                self.lanes[lane].active.fetch_sub(1, Ordering::SeqCst);
                return Err(Conflict::Counter(granule as u16));
            }
        }
        Ok(())
    }

    fn enter_alone(&self) -> Result<(), Conflict> {
        if self.zeroes.fetch_add(1, Ordering::SeqCst) > 0 {
            self.zeroes.fetch_sub(1, Ordering::SeqCst);
            return Err(Conflict::Zero);
        }
        if self.is_active() {
            self.zeroes.fetch_sub(1, Ordering::SeqCst);
            return Err(Conflict::Any);
        }
        Ok(())
    }

    fn is_active(&self) -> bool {
        let active = |lane: &Lane| lane.active.load(Ordering::SeqCst) > 0;
        self.lanes.iter().any(active)
    }

    /// Whether the conflict that a request met is over, so that it is worth its while to try again. It may
    /// meet another one.
    pub fn is_over(&self, conflict: Conflict, access: Access, bytes: &Range<u64>) -> bool {
        match conflict {
            Conflict::Counter(counter) => {
                let (_, conflict) = access.of(bytes).mark();
                let counter = &self.counters[usize::from(counter)];
                counter.load(Ordering::SeqCst) & conflict == 0
            }
            Conflict::Zero => self.zeroes.load(Ordering::SeqCst) == 0,
            Conflict::Any => !self.is_active(),
        }
    }

    /// A request that entered is over.
    pub fn leave(&self, lane: usize, access: Access, bytes: &Range<u64>) {
        let access = access.of(bytes);
        if access == Access::Zero {
            self.zeroes.fetch_sub(1, Ordering::SeqCst);
            return;
        }
        let (mark, _) = access.mark();
        for granule in granules(bytes) {
            self.counters[granule].fetch_sub(mark, Ordering::SeqCst);
        }
        self.lanes[lane].active.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Range<u64> = 0..4096;
    const B: Range<u64> = 4096..8192;
    const FAR: Range<u64> = 1 << 30..(1 << 30) + 4096;

    #[test]
    fn readers_share_and_a_writer_waits_for_them_and_they_for_it() {
        let volume = Overlap::default();
        assert!(volume.enter(0, Access::Read, &A).is_ok());
        assert!(volume.enter(1, Access::Read, &B).is_ok());
        assert!(volume.enter(2, Access::Write, &A).is_err());
        assert!(volume.enter(2, Access::Write, &FAR).is_ok());
        volume.leave(0, Access::Read, &A);
        volume.leave(1, Access::Read, &B);
        assert!(volume.enter(2, Access::Write, &A).is_ok());
        assert!(volume.enter(0, Access::Read, &A).is_err());
        volume.leave(2, Access::Write, &A);
        assert!(volume.enter(0, Access::Read, &A).is_ok());
    }

    #[test]
    fn only_writes_that_share_a_block_wait_for_each_other() {
        let volume = Overlap::default();
        assert!(volume.enter(0, Access::Write, &(0..512)).is_ok());
        assert!(volume.enter(1, Access::Write, &(512..8192)).is_err());
        assert!(volume.enter(1, Access::Write, &B).is_ok());
        assert!(volume.enter(0, Access::Read, &A).is_err());
        volume.leave(0, Access::Write, &(0..512));
        assert!(volume.enter(1, Access::Write, &(512..8192)).is_err());
        volume.leave(1, Access::Write, &B);
        assert!(volume.enter(1, Access::Write, &(512..8192)).is_ok());
        volume.leave(1, Access::Write, &(512..8192));
        assert!(volume.enter(0, Access::Read, &A).is_ok());
    }

    #[test]
    fn a_write_does_not_wait_for_itself_wherever_it_lies() {
        let volume = Overlap::default();
        for nth in 0..64u64 {
            let first = nth.wrapping_mul(0x3_5f1b_77d1_2341) % (1 << 50) / 512 * 512;
            let longest = first..first + (GRANULES_MAX - 1) * GRANULE_BYTES;
            let entered = volume.enter(0, Access::Write, &longest);
            assert_eq!(entered, Ok(()), "{longest:?}");
            volume.leave(0, Access::Write, &longest);
            let longer = first..first + (GRANULES_MAX + 1) * GRANULE_BYTES;
            let entered = volume.enter(0, Access::Write, &longer);
            assert_eq!(entered, Ok(()), "{longer:?}");
            let beside = volume.enter(1, Access::Read, &FAR);
            assert_eq!(beside, Err(Conflict::Zero), "it is alone");
            volume.leave(0, Access::Write, &longer);
        }
    }

    #[test]
    fn a_discard_is_alone() {
        let volume = Overlap::default();
        assert!(volume.enter(0, Access::Write, &A).is_ok());
        assert!(volume.enter(1, Access::Zero, &FAR).is_err());
        volume.leave(0, Access::Write, &A);
        assert!(volume.enter(1, Access::Zero, &FAR).is_ok());
        // Of two that overlap, one of them in a part of a block, the older would pass for overwritten where
        // it comes second.
        assert!(volume.enter(0, Access::Zero, &A).is_err());
        assert!(volume.enter(0, Access::Read, &A).is_err());
        volume.leave(1, Access::Zero, &FAR);
        assert!(volume.enter(0, Access::Zero, &A).is_ok());
        volume.leave(0, Access::Zero, &A);
        assert!(volume.enter(0, Access::Read, &A).is_ok());
    }

    #[test]
    fn the_longest_request_enters_and_leaves_without_a_trace() {
        let volume = Overlap::default();
        let all = 0..64 << 20;
        assert!(volume.enter(0, Access::Write, &all).is_ok());
        volume.leave(0, Access::Write, &all);
        assert!(
            volume
                .counters
                .iter()
                .all(|c| c.load(Ordering::SeqCst) == 0)
        );
        assert!(volume.enter(3, Access::Zero, &A).is_ok());
    }

    #[test]
    fn a_request_stops_at_the_first_conflict_and_leaves_no_mark() {
        let volume = Overlap::default();
        let long = 0..16 << 20;
        volume.enter(0, Access::Write, &A).unwrap();
        let met = volume.enter(0, Access::Write, &long).unwrap_err();
        // What lies behind the conflict is untouched all the while, and afterwards what lies before it.
        let marks = |volume: &Overlap| -> u32 {
            let counters = volume.counters.iter();
            counters.map(|c| c.load(Ordering::SeqCst)).sum()
        };
        assert_eq!(marks(&volume), WRITER);
        assert!(!volume.is_over(met, Access::Write, &long));
        volume.leave(0, Access::Write, &A);
        assert!(volume.is_over(met, Access::Write, &long));
        volume.enter(0, Access::Write, &long).unwrap();
        volume.leave(0, Access::Write, &long);
        assert_eq!(marks(&volume), 0);
    }

    #[test]
    fn a_conflict_is_over_when_what_it_met_has_left() {
        let volume = Overlap::default();
        volume.enter(0, Access::Read, &A).unwrap();
        let met = volume.enter(1, Access::Write, &A).unwrap_err();
        let zero = volume.enter(1, Access::Zero, &FAR).unwrap_err();
        assert_eq!(zero, Conflict::Any);
        assert!(!volume.is_over(met, Access::Write, &A));
        assert!(volume.is_over(met, Access::Read, &A), "readers share");
        assert!(!volume.is_over(zero, Access::Zero, &FAR));
        volume.leave(0, Access::Read, &A);
        assert!(volume.is_over(met, Access::Write, &A));
        assert!(volume.is_over(zero, Access::Zero, &FAR));
        volume.enter(0, Access::Zero, &FAR).unwrap();
        let met = volume.enter(1, Access::Read, &A).unwrap_err();
        assert_eq!(met, Conflict::Zero);
        assert!(!volume.is_over(met, Access::Read, &A));
        volume.leave(0, Access::Zero, &FAR);
        assert!(volume.is_over(met, Access::Read, &A));
    }
}
