//! One piece of a guest request: who was asked, who answered what, and what follows from it.

use super::Segments;
use crate::core::membership::{Members, ReplicaSet};
use crate::io::{IoError, IoResult};
use crate::proto::{Command, Epoch, Generation, Refusal, Request};

/// The part of a guest request that lies in one chunk.
pub(super) struct Piece {
    pub(super) io: u32,
    pub(super) group: u16,
    pub(super) request: Request,
    pub(super) segments: Segments,
    /// Asked, not answered.
    pub(super) waiting: Members,
    /// Asked since the piece began.
    asked: Members,
    /// Answered: done.
    done: Members,
    /// Why another one did not do it; the worst so far.
    refusal: Option<Refusal>,
    /// At least one did not answer, so whether it has the write is unknown.
    unreachable: bool,
    /// How often the write was numbered anew.
    pub(super) renumbered: u8,
}

/// What follows from the answers so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Finished.
    Done(IoResult),
    /// Ask these.
    Send(Members),
    /// A replica knows a newer lease or map: take it up if it is ours, else the piece is fenced.
    Renew {
        /// At least this lease.
        generation: Generation,
        /// At least this map.
        epoch: Epoch,
    },
    /// Number the write anew and ask all again.
    Renumber,
    /// Wait for a map without the failed members.
    Park {
        /// In-sync members that failed.
        failed: Members,
    },
}

impl Piece {
    pub(super) fn new() -> Self {
        Self {
            io: 0,
            group: 0,
            request: Request::NOTHING,
            segments: Segments::new(),
            waiting: Members::NONE,
            asked: Members::NONE,
            done: Members::NONE,
            refusal: None,
            unreachable: false,
            renumbered: 0,
        }
    }

    /// Starts a new use; the segments were filled before.
    #[inline]
    pub(super) fn begin(&mut self, io: u32, group: u16, request: Request) {
        self.io = io;
        self.group = group;
        self.request = request;
        self.renumbered = 0;
        self.waiting = Members::NONE;
        self.forget_answers();
    }

    /// Starts over with asking.
    #[inline]
    pub(super) fn forget_answers(&mut self) {
        self.asked = Members::NONE;
        self.done = Members::NONE;
        self.refusal = None;
        self.unreachable = false;
    }

    /// A new map: members that failed under the old one are asked again if they still belong. A write that one of
    /// them did get is then met by its own version and counts as done.
    pub(super) fn ask_failed_again(&mut self) {
        self.asked = self.done;
        self.refusal = None;
        self.unreachable = false;
    }

    #[inline]
    pub(super) fn sending(&mut self, to: Members) {
        self.waiting = to;
        self.asked = self.asked.or(to);
    }

    #[inline]
    pub(super) fn answered(&mut self, member: usize, result: Result<(), Refusal>) {
        match result {
            Ok(()) => self.done.insert(member),
            Err(refusal) => {
                self.unreachable |= refusal == Refusal::Unreachable;
                if self
                    .refusal
                    .is_none_or(|known| weight(refusal) > weight(known))
                {
                    self.refusal = Some(refusal);
                }
            }
        }
    }

    /// What follows; to be asked with no answer outstanding.
    #[inline]
    pub(super) fn next(&self, set: &ReplicaSet) -> Next {
        debug_assert!(self.waiting.is_empty());
        match self.refusal {
            Some(Refusal::StaleGeneration(generation)) => {
                return Next::Renew {
                    generation,
                    epoch: Epoch(0),
                };
            }
            Some(Refusal::StaleEpoch(epoch)) => {
                return Next::Renew {
                    generation: Generation(0),
                    epoch,
                };
            }
            Some(Refusal::Renumber) => return Next::Renumber,
            _ => {}
        }
        if matches!(self.request.command, Command::Read { .. }) {
            self.next_of_read(set)
        } else {
            self.next_of_write(set)
        }
    }

    /// One good answer does; else the next in-sync replica is asked, each once per map.
    #[inline]
    fn next_of_read(&self, set: &ReplicaSet) -> Next {
        if !self.done.is_empty() {
            return Next::Done(Ok(()));
        }
        let untried = set.in_sync().without(self.asked);
        if let Some(member) = untried.iter().next() {
            return Next::Send(Members::only(member));
        }
        match self.refusal {
            Some(refusal) if !self.unreachable => Next::Done(Err(error_of(refusal))),
            // Somebody who may have good data is away: wait for the next map.
            _ => Next::Park {
                failed: set.in_sync(),
            },
        }
    }

    /// Invariant *Shrink before ack*: every replica that the map calls in-sync has it, and they are enough.
    #[inline]
    fn next_of_write(&self, set: &ReplicaSet) -> Next {
        if set.in_sync().len() < set.min_in_sync() {
            return Next::Park {
                failed: Members::NONE,
            };
        }
        let missing = set.receiving().without(self.asked);
        if !missing.is_empty() {
            return Next::Send(missing);
        }
        let failed = set.in_sync().without(self.done);
        if failed.is_empty() {
            return Next::Done(Ok(()));
        }
        match self.refusal {
            // All refused for good: there is no smaller set that has it.
            Some(refusal) if failed == set.in_sync() && !self.unreachable => {
                Next::Done(Err(error_of(refusal)))
            }
            _ => Next::Park { failed },
        }
    }
}

/// Which of several refusals decides: fences first, for they say that all the others are of the past.
fn weight(refusal: Refusal) -> u8 {
    match refusal {
        Refusal::StaleGeneration(_) => 7,
        Refusal::StaleEpoch(_) => 6,
        Refusal::Renumber => 5,
        Refusal::Behind(_) | Refusal::Changed | Refusal::Mismatch => 1,
        Refusal::NoSpace => 4,
        Refusal::Device(_) => 3,
        Refusal::Corrupt => 2,
        Refusal::Invalid => 1,
        Refusal::Unreachable => 0,
    }
}

fn error_of(refusal: Refusal) -> IoError {
    match refusal {
        Refusal::StaleGeneration(_) | Refusal::StaleEpoch(_) => IoError::Fenced,
        Refusal::NoSpace => IoError::NoSpace,
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
