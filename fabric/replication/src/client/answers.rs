//! Who was asked for a piece, who answered what, and what follows from it.

use fabric_types::block::{BLOCK_BYTES, LEAF_BLOCKS};
use fabric_types::io::{IoError, IoResult};
use fabric_types::membership::{Members, ReplicaSet};
use fabric_types::{Command, Generation, Refusal};

use super::tally::Tally;

/// How often a piece is put off, a tick apart, before whoever does so is reported: it does not learn the map,
/// or is not being compared with anybody, and everybody waits for it.
pub(super) const PUT_OFF_MAX: u32 = 2000;
/// What one map page of a store describes.
const LEAF_BYTES: u32 = LEAF_BLOCKS * BLOCK_BYTES as u32;

/// What follows from the answers so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Finished.
    Done(IoResult),
    /// Ask these.
    Send(Members),
    /// A replica knows this newer lease: take it up if it is ours, else the piece is fenced.
    Renew(Generation),
    /// Number the write anew and ask all again.
    Renumber,
    /// Send everybody a copy that the guest cannot change.
    Copy,
    /// What was read is not certain: [read again](Answers::read_again).
    Again,
    /// Ask again at the next tick.
    Retry,
    /// The guest is told so once the map has none of these, which may hold a part of the write.
    Fail {
        /// Why.
        refusal: Refusal,
        /// All but one of those that were sent it.
        others: Members,
    },
    /// Wait for a map without the failed members.
    Park {
        /// In-sync members that failed.
        failed: Members,
    },
    /// In-sync members have no space for the write, and nobody has failed otherwise, or nobody has any of it.
    NoSpace {
        /// Those that are full.
        full: Members,
    },
}

/// Why those that did not do it did not.
#[derive(Debug, Clone, Copy, Default)]
struct Refusals {
    /// The [weightiest](weight).
    worst: Option<Refusal>,
    /// At least one did not answer, so whether it has the write is unknown.
    unreachable: bool,
}

impl Refusals {
    fn add(&mut self, refusal: Refusal) {
        self.unreachable |= refusal == Refusal::Unreachable;
        if self
            .worst
            .is_none_or(|known| weight(refusal) > weight(known))
        {
            self.worst = Some(refusal);
        }
    }
}

/// Those that want to be asked again in a moment.
#[derive(Debug, Clone, Copy, Default)]
struct PutOff {
    /// Since the last tick.
    by: Members,
    /// How often somebody did.
    times: u32,
}

/// How much of a write is stored somewhere, or may be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Stored {
    #[default]
    Nothing,
    /// A part of it, or what was sent before all were asked anew.
    Part,
    /// What was sent since all were asked last.
    Whole,
}

/// Whether two replicas were asked for a read at once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Hedge {
    #[default]
    Never,
    /// Before all were asked anew.
    Before,
    /// Since then: what they bring comes to one buffer.
    Now,
}

/// The answers to a piece.
#[derive(Debug, Default)]
pub(super) struct Answers {
    tally: Tally,
    refusals: Refusals,
    /// Somebody is to be asked again in a moment, or by a newer map.
    retry: bool,
    put_off: PutOff,
    stored: Stored,
    hedge: Hedge,
    /// Somebody who was asked may have brought other bytes than are right, or a part of them.
    spoils: bool,
    /// Could not read all of it, or all that a write needs.
    unreadable: Members,
    /// Had no space for the write when they were asked last.
    full: Members,
    /// All in-sync replicas refused, some perhaps after having stored a part: the guest is told when one
    /// replica is left, which the others are then made equal to.
    verdict: Option<Refusal>,
}

impl Answers {
    /// Starts over with asking.
    #[inline]
    pub(super) fn forget(&mut self) {
        self.tally.forget();
        self.refusals = Refusals::default();
        self.full = Members::NONE;
        self.retry = false;
        self.stored = self.stored.min(Stored::Part);
        self.spoils = false;
        if self.hedge == Hedge::Now {
            self.hedge = Hedge::Before;
        }
    }

    /// The next block of a read begins, which nobody has been asked for.
    pub(super) fn begin_part(&mut self) {
        self.unreadable = Members::NONE;
        self.hedge = Hedge::Never;
        self.forget();
    }

    /// One of two parallel reads failed: its bytes may lie over the good ones, or have been there
    /// when those were verified. Asks again, one after the other, first who had it.
    pub(super) fn read_again(&mut self) {
        let asked = match self.tally.done().is_empty() {
            true => self.unreadable,
            false => self.tally.failed(),
        };
        let refusals = Refusals {
            worst: self
                .refusals
                .worst
                .filter(|known| *known != Refusal::Mismatch),
            ..self.refusals
        };
        self.forget();
        self.tally.skip(asked);
        self.refusals = refusals;
    }

    /// A newer map says that these members began anew: nothing they answered before counts.
    pub(super) fn renew(&mut self, members: Members) {
        self.tally.renew(members);
        self.full = self.full.without(members);
    }

    /// Whether it waits for a tick; if so, it goes on.
    pub(super) fn take_retry(&mut self) -> bool {
        // The map that a replica asks for may have come before its answer.
        let stale = matches!(self.refusals.worst, Some(Refusal::StaleEpoch(_)));
        self.put_off.by = Members::NONE;
        std::mem::take(&mut self.retry) || stale
    }

    /// Those that have put the piece off for too long.
    pub(super) fn lagging(&self) -> Members {
        match self.put_off.times >= PUT_OFF_MAX {
            true => self.put_off.by,
            false => Members::NONE,
        }
    }

    /// Is to be looked at again at the next tick.
    pub(super) fn put_off(&mut self) {
        self.retry = true;
    }

    /// A new map: members that failed under the old one are asked again if they still belong. A write that
    /// one of them did get is then met by its own version and counts as done.
    pub(super) fn ask_failed_again(&mut self) {
        self.tally.forget_failed();
        self.refusals = Refusals::default();
        self.full = Members::NONE;
        self.retry = false;
    }

    /// A second replica is asked for a read.
    pub(super) fn note_hedged(&mut self) {
        self.hedge = Hedge::Now;
    }

    /// Whether a second one was asked for it, in this use of the piece.
    #[inline]
    pub(super) fn is_hedged(&self) -> bool {
        self.hedge != Hedge::Never
    }

    /// Asked, not answered.
    #[inline]
    pub(super) fn waiting(&self) -> Members {
        self.tally.waiting()
    }

    /// Whether nobody has anything to answer.
    #[inline]
    pub(super) fn are_complete(&self) -> bool {
        self.tally.waiting().is_empty()
    }

    /// Those that are not to be asked now: they were since all were asked last, or have to answer as what
    /// they were before.
    #[inline]
    pub(super) fn busy(&self) -> Members {
        self.tally.asked().or(self.tally.waiting())
    }

    /// Who did it.
    pub(super) fn answered_by(&self) -> Option<usize> {
        self.tally.done().iter().next()
    }

    /// What the one that was asked said; `None` if that says nothing.
    pub(super) fn outcome(&self) -> Option<Result<(), Refusal>> {
        match self.refusals.worst {
            None => self.has_answer().then_some(Ok(())),
            Some(refusal) => Some(Err(refusal)),
        }
    }

    /// Somebody did it.
    #[inline]
    pub(super) fn has_answer(&self) -> bool {
        !self.tally.done().is_empty()
    }

    /// Whether somebody could not be reached.
    #[inline]
    pub(super) fn has_unreachable(&self) -> bool {
        self.refusals.unreachable
    }

    /// Those that could not read all of it.
    #[inline]
    pub(super) fn unreadable(&self) -> Members {
        self.unreadable
    }

    /// Whether somebody has what was sent, or may have, or a part of it.
    #[inline]
    pub(super) fn is_stored(&self) -> bool {
        self.stored == Stored::Whole
    }

    /// Whether nobody has anything of what was sent, for certain.
    #[inline]
    pub(super) fn is_untouched(&self) -> bool {
        self.stored == Stored::Nothing
    }

    /// Whether all of these have it.
    pub(super) fn are_done_by(&self, members: Members) -> bool {
        members.without(self.tally.done()).is_empty()
    }

    /// Whether one of these has it at least.
    pub(super) fn is_done_by_some(&self, members: Members) -> bool {
        !members.and(self.tally.done()).is_empty()
    }

    /// In-sync members that have no space for it, as far as anybody waits for them.
    pub(super) fn full(&self, set: &ReplicaSet) -> Members {
        // One that is being compared has to begin anew.
        self.full.and(set.in_sync()).without(self.tally.done())
    }

    /// See [`Next::Fail`].
    pub(super) fn condemn(&mut self, refusal: Refusal) {
        self.verdict = Some(refusal);
    }

    #[inline]
    pub(super) fn sending(&mut self, to: Members) {
        self.tally.ask(to);
    }

    /// An answer is there, and will be [added](Self::add); false if none was awaited.
    #[inline]
    pub(super) fn receive(&mut self, member: usize) -> bool {
        self.tally.receive(member)
    }

    /// Takes in what a member has answered to this command.
    #[inline]
    pub(super) fn add(&mut self, member: usize, result: Result<(), Refusal>, command: &Command) {
        self.stored = self.stored.max(stored_by(result, command));
        let counts = self.tally.counts(member);
        self.spoils |= result.is_err_and(brings_bytes) || !counts;
        if !counts {
            return;
        }
        match result {
            Ok(()) => self.tally.note_done(member),
            Err(Refusal::Behind(_)) => {
                self.tally.ask_again(member);
                self.retry = true;
                self.put_off.by.insert(member);
                self.put_off.times += 1;
            }
            Err(refusal) => {
                if refusal.is_unreadable() {
                    self.unreadable.insert(member);
                }
                if matches!(refusal, Refusal::NoSpace { .. }) {
                    self.full.insert(member);
                }
                self.refusals.add(refusal);
            }
        }
    }

    /// What follows, with no answer outstanding, for a read or for something else. `may_copy`: it writes what
    /// the guest may change meanwhile.
    #[inline]
    pub(super) fn next(&self, set: &ReplicaSet, is_read: bool, may_copy: bool) -> Next {
        assert!(self.are_complete());
        match self.refusals.worst {
            Some(Refusal::StaleGeneration(generation)) => {
                return Next::Renew(generation);
            }
            // Its map is on the way here.
            Some(Refusal::StaleEpoch(_)) => return Next::Retry,
            Some(Refusal::Renumber) => return Next::Renumber,
            Some(Refusal::Mismatch) if may_copy => return Next::Copy,
            _ => {}
        }
        let is_mixed = self.hedge == Hedge::Now && self.spoils;
        let had_it = self.has_answer() || self.refusals.worst == Some(Refusal::Mismatch);
        if is_mixed && had_it {
            return Next::Again;
        }
        if self.retry {
            return Next::Retry;
        }
        match is_read {
            true => self.next_of_read(set),
            false => self.next_of_write(set),
        }
    }

    /// One good answer does; else the next in-sync replica is asked, each once per map.
    #[inline]
    fn next_of_read(&self, set: &ReplicaSet) -> Next {
        if self.has_answer() {
            return Next::Done(Ok(()));
        }
        let untried = set.in_sync().without(self.tally.asked());
        if let Some(member) = set.nearest(untried) {
            return Next::Send(Members::only(member));
        }
        match self.refusals.worst {
            Some(refusal) if !self.refusals.unreachable => Next::Done(Err(error_of(refusal))),
            // Somebody who may have good data is away: wait for the next map.
            _ => Next::Park {
                failed: set.in_sync(),
            },
        }
    }

    /// Invariant *Shrink before ack*: every replica that the map calls in-sync has it, and they are enough.
    /// Those that are syncing must have it, too: what one of them lacks it must never be promoted without.
    #[inline]
    fn next_of_write(&self, set: &ReplicaSet) -> Next {
        let done = self.tally.done();
        // Unless the one that is left has it: it was being compared when all others refused, say.
        let is_left_without = set.receiving().len() == 1 && set.receiving().and(done).is_empty();
        if let Some(refusal) = self.verdict.filter(|_| is_left_without) {
            return Next::Done(Err(error_of(refusal)));
        }
        if set.in_sync().len() < set.min_in_sync() {
            return Next::Park {
                failed: Members::NONE,
            };
        }
        let in_sync = set.in_sync();
        let full = self.full(set);
        if !full.is_empty() && self.is_untouched() {
            return Next::NoSpace { full };
        }
        let missing = set.receiving().without(self.tally.asked());
        if !missing.is_empty() {
            return Next::Send(missing);
        }
        let failed = set.receiving().without(done);
        if failed.is_empty() {
            return Next::Done(Ok(()));
        }
        let at_fault = failed.without(full);
        if !full.is_empty() && at_fault.is_empty() {
            return Next::NoSpace { full };
        }
        if !full.is_empty() {
            return Next::Park { failed: at_fault };
        }
        match self.refusals.worst {
            // All refused for good: there is no smaller set that has it.
            Some(refusal) if in_sync.and(done).is_empty() && !self.refusals.unreachable => {
                let others = all_but_one(set);
                // A part of a block that is lost on all of them: they are as they were.
                let is_untouched = self.stored == Stored::Nothing;
                let is_nowhere = failed.without(self.unreadable).is_empty() && is_untouched;
                if others.is_empty() || refusal == Refusal::Invalid || is_nowhere {
                    return Next::Done(Err(error_of(refusal)));
                }
                Next::Fail { refusal, others }
            }
            _ => Next::Park { failed },
        }
    }
}

/// All that receive writes but one in sync, which they are then made equal to.
pub(super) fn all_but_one(set: &ReplicaSet) -> Members {
    let first = set.in_sync().iter().next();
    let first = first.map_or(Members::NONE, Members::only);
    set.receiving().without(first)
}

/// Whether a replica that refuses a read so may have put bytes where it was to put the data.
fn brings_bytes(refusal: Refusal) -> bool {
    match refusal {
        Refusal::Corrupt | Refusal::Device(_) | Refusal::Mismatch | Refusal::Unreachable => true,
        Refusal::StaleGeneration(_)
        | Refusal::StaleEpoch(_)
        | Refusal::Renumber
        | Refusal::Behind(_)
        | Refusal::Changed
        | Refusal::NoSpace { .. }
        | Refusal::Invalid => false,
    }
}

/// What may be stored of a write that was answered so. Where a part of a block cannot be written, because the
/// rest of it cannot be read, the replica has stored nothing of that map page, but it may have stored what
/// lies in others.
#[inline]
fn stored_by(result: Result<(), Refusal>, command: &Command) -> Stored {
    let refusal = match result {
        Ok(()) | Err(Refusal::Unreachable) => return Stored::Whole,
        Err(refusal) => refusal,
    };
    let is_in_one_page = match *command {
        Command::Write { offset, len, .. } | Command::Zero { offset, len, .. } => {
            len > 0 && offset / LEAF_BYTES == (offset + len - 1) / LEAF_BYTES
        }
        _ => false,
    };
    match refusal {
        Refusal::StaleGeneration(_) | Refusal::StaleEpoch(_) | Refusal::Behind(_) => {
            Stored::Nothing
        }
        Refusal::NoSpace { untouched: true } => Stored::Nothing,
        refusal if is_in_one_page && refusal.is_unreadable() => Stored::Nothing,
        _ => Stored::Part,
    }
}

/// Which of several refusals decides: fences first, for they say that all the others are of the past.
fn weight(refusal: Refusal) -> u8 {
    match refusal {
        Refusal::StaleGeneration(_) => 7,
        Refusal::StaleEpoch(_) => 6,
        Refusal::Renumber => 5,
        // Once everybody has been sent the same bytes, the others' answers decide.
        Refusal::Mismatch => 5,
        Refusal::Behind(_) | Refusal::Changed => 1,
        Refusal::NoSpace { .. } => 4,
        Refusal::Device(_) => 3,
        Refusal::Corrupt => 2,
        Refusal::Invalid => 1,
        Refusal::Unreachable => 0,
    }
}

fn error_of(refusal: Refusal) -> IoError {
    match refusal {
        Refusal::StaleGeneration(_) | Refusal::StaleEpoch(_) => IoError::Fenced,
        Refusal::NoSpace { .. } => IoError::NoSpace,
        Refusal::Corrupt => IoError::Corrupt,
        Refusal::Device(errno) => IoError::Device(errno),
        // The client numbers anew instead of passing it on.
        Refusal::Renumber => IoError::Device(libc::EIO),
        // Answers to what a client does not ask; and data that no replica got whole.
        Refusal::Behind(_) | Refusal::Changed | Refusal::Mismatch => IoError::Device(libc::EIO),
        Refusal::Invalid => IoError::OutOfRange,
        Refusal::Unreachable => IoError::Device(libc::EHOSTUNREACH),
    }
}
