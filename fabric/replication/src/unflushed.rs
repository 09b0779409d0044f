//! Whether writes that a guest was told are done, and did not flush, may have been lost with the power of all
//! replicas.
//!
//! The map tells of such a loss
//! ([`ReplicaSet::power_lost`](fabric_types::membership::ReplicaSet::power_lost)). A guest that lived through
//! it learns of it by the failure of its next flush, as from a local disk whose write cache failed; else that
//! flush would seem to have made durable what is gone (invariant *Durable*). Who has flushed everything is
//! told nothing.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use fabric_types::Epoch;

/// Nothing is acknowledged and not flushed.
const CLEAN: u64 = 0;
/// Something is. Any other number is that of the flush which is to cover all that was when it began.
const DIRTY: u64 = u64::MAX;

/// What a flush has to know at its end.
#[derive(Debug, Clone, Copy)]
pub struct FlushMark {
    number: u64,
    reported: u64,
}

impl FlushMark {
    /// Of what is no flush.
    pub const NONE: Self = Self {
        number: 0,
        reported: 0,
    };
}

#[derive(Debug, Default)]
struct Losses {
    /// Newest one that concerned writes of this volume.
    hurt: u64,
    /// Newest one that the guest was told of.
    reported: u64,
    /// Of the newest flush.
    number: u64,
}

/// For one open volume, shared by all data threads.
#[derive(Debug)]
pub struct Unflushed {
    /// What was lost before is not the holder's.
    granted: u64,
    /// `CLEAN`, `DIRTY` or the number of a flush.
    state: AtomicU64,
    /// Newest loss that was looked at.
    seen: AtomicU64,
    losses: Mutex<Losses>,
}

impl Unflushed {
    /// Of a lease granted under this map.
    pub fn new(granted: Epoch) -> Self {
        Self {
            granted: granted.0,
            state: AtomicU64::new(CLEAN),
            seen: AtomicU64::new(granted.0),
            losses: Mutex::default(),
        }
    }

    /// A change is acknowledged that no flush covers, by a thread that knows of losses up to `known`, and
    /// knew of those up to `begun` when replicas had done the first part of it.
    #[inline]
    pub fn acknowledge(&self, begun: Epoch, known: Epoch) {
        if known.0 > self.seen.load(Ordering::SeqCst) {
            self.catch_up(known);
        }
        // In one order with `look`: either that sees the change, or this sees the loss.
        if self.state.load(Ordering::SeqCst) != DIRTY {
            self.state.store(DIRTY, Ordering::SeqCst);
        }
        let seen = self.seen.load(Ordering::SeqCst);
        if seen > known.0.max(self.granted) {
            // Those who did it are gone by now.
            self.hurt(seen);
        }
        if known > begun {
            // They have done the rest, and are to be asked for the first part no more.
            self.hurt(known.0);
        }
    }

    /// Looks at a new loss before anything is acknowledged that comes after it.
    #[cold]
    fn catch_up(&self, known: Epoch) {
        let mut losses = self.losses.lock().expect("no panic under this lock");
        self.look(&mut losses, known);
    }

    #[cold]
    fn hurt(&self, loss: u64) {
        let mut losses = self.losses.lock().expect("no panic under this lock");
        losses.hurt = losses.hurt.max(loss);
    }

    /// A flush begins, in a thread that knows of losses up to `known`.
    pub fn begin(&self, known: Epoch) -> FlushMark {
        let mut losses = self.losses.lock().expect("no panic under this lock");
        self.look(&mut losses, known);
        losses.number += 1;
        let number = losses.number;
        // One that comes meanwhile makes it `DIRTY` again, or has.
        let _ = self
            .state
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |state| {
                (state != CLEAN).then_some(number)
            });
        let reported = losses.reported;
        FlushMark { number, reported }
    }

    /// Every replica did it: whether the guest may be told so. If not, it is told of a loss by this, and by
    /// the other flushes that are under way.
    #[must_use]
    pub fn end(&self, mark: FlushMark, known: Epoch) -> bool {
        let mut losses = self.losses.lock().expect("no panic under this lock");
        self.look(&mut losses, known);
        // Unless something came after it began, or another one began since and is to cover it.
        let _ = self
            .state
            .compare_exchange(mark.number, CLEAN, Ordering::SeqCst, Ordering::SeqCst);
        let is_lost = losses.hurt > mark.reported;
        losses.reported = losses.reported.max(losses.hurt);
        !is_lost
    }

    /// Looks whether a loss that is new concerns anything.
    fn look(&self, losses: &mut Losses, known: Epoch) {
        if known.0 <= self.seen.load(Ordering::SeqCst) {
            return;
        }
        self.seen.store(known.0, Ordering::SeqCst);
        if self.state.load(Ordering::SeqCst) != CLEAN {
            losses.hurt = losses.hurt.max(known.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: Epoch = Epoch(5);
    const LOSS: Epoch = Epoch(9);

    fn flush(of: &Unflushed, known: Epoch) -> bool {
        let mark = of.begin(known);
        of.end(mark, known)
    }

    #[test]
    fn a_loss_is_told_once_by_the_next_flush() {
        let of = Unflushed::new(OLD);
        of.acknowledge(OLD, OLD);
        assert!(!flush(&of, LOSS));
        assert!(flush(&of, LOSS));
        of.acknowledge(LOSS, LOSS);
        assert!(flush(&of, LOSS));
    }

    /// Seed 5000343 of the simulator: one part of a write was on all replicas, the other waited for room on
    /// one of them.
    #[test]
    fn a_loss_between_two_parts_of_a_write_is_told() {
        let of = Unflushed::new(OLD);
        of.acknowledge(OLD, LOSS);
        assert!(!flush(&of, LOSS));
        assert!(flush(&of, LOSS));
    }

    #[test]
    fn without_a_loss_nothing_is_told() {
        let of = Unflushed::new(OLD);
        for known in [Epoch(0), Epoch(OLD.0 - 1)] {
            of.acknowledge(known, known);
            assert!(flush(&of, known));
        }
    }

    #[test]
    fn a_loss_of_nothing_is_not_told() {
        let of = Unflushed::new(OLD);
        assert!(flush(&of, LOSS), "nothing was written");
        let of = Unflushed::new(OLD);
        of.acknowledge(OLD, OLD);
        assert!(flush(&of, OLD));
        assert!(flush(&of, LOSS), "it was flushed before");
        let of = Unflushed::new(LOSS);
        of.acknowledge(LOSS, LOSS);
        assert!(flush(&of, LOSS), "it was before the lease");
        let of = Unflushed::new(OLD);
        of.acknowledge(LOSS, LOSS);
        assert!(flush(&of, LOSS), "it was before the write");
    }

    #[test]
    fn a_flush_during_which_the_power_fails_is_no_success() {
        let of = Unflushed::new(OLD);
        of.acknowledge(OLD, OLD);
        let (first, second) = (of.begin(OLD), of.begin(OLD));
        assert!(!of.end(first, LOSS));
        let third = of.begin(LOSS);
        assert!(
            !of.end(second, LOSS),
            "it began before the loss was reported"
        );
        assert!(of.end(third, LOSS));
    }

    #[test]
    fn an_older_flush_does_not_cover_what_came_after_it_began() {
        let of = Unflushed::new(OLD);
        of.acknowledge(OLD, OLD);
        let first = of.begin(OLD);
        of.acknowledge(OLD, OLD);
        assert!(of.end(first, OLD));
        assert!(!flush(&of, LOSS));
        // Nor does the end of a flush that another one has taken over from.
        of.acknowledge(LOSS, LOSS);
        let first = of.begin(LOSS);
        of.acknowledge(LOSS, LOSS);
        let second = of.begin(LOSS);
        assert!(of.end(first, LOSS));
        let later = Epoch(12);
        assert!(!of.end(second, later));
    }

    #[test]
    fn late_acknowledgement_by_an_unaware_thread_fails_the_flush() {
        let of = Unflushed::new(OLD);
        assert!(flush(&of, LOSS), "another thread's");
        of.acknowledge(OLD, OLD);
        assert!(!flush(&of, LOSS));
        assert!(flush(&of, LOSS));
    }
}
