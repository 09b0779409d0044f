//! One piece of a guest request: who was asked, who answered what, and what follows from it.

use fabric_types::block::{BLOCK_BYTES, LEAF_BLOCKS};
use fabric_types::io::{IoError, IoResult};
use fabric_types::iov::{IoVecs, copy_from};
use fabric_types::membership::{Members, ReplicaSet};
use fabric_types::{Command, Epoch, Generation, Refusal, Request};

use super::Segments;
use super::ios::NONE;
use super::parts::Parts;
use super::repair::Repair;

/// How often a piece is put off, a tick apart, before whoever does so is reported: it does not learn the map,
/// or is not being compared with anybody, and everybody waits for it.
pub(super) const PUT_OFF_MAX: u32 = 2000;
/// What one map page of a store describes.
const LEAF_BYTES: u32 = LEAF_BLOCKS * BLOCK_BYTES as u32;

/// The part of a guest request that lies in one chunk.
pub(super) struct Piece {
    pub(super) io: u32,
    pub(super) group: u16,
    pub(super) request: Request,
    pub(super) segments: Segments,
    /// The next piece of its request that is not sent either.
    pub(super) next: u32,
    /// Bytes of it that count against the window of its volume, and since when.
    pub(super) in_window: u64,
    pub(super) entered_us: u64,
    /// It has begun, and nobody has anything of it to answer.
    pub(super) idle: bool,
    /// What is sent instead of the guest's buffers, which changed while they were sent.
    pub(super) copy: Option<PrivateCopy>,
    /// Not held back any more.
    pub(super) begun: bool,
    /// When it was sent last.
    pub(super) sent_us: u64,
    /// A read that two replicas were asked for at once.
    pub(super) hedged: bool,
    /// Since all were asked last, two were at once: what they bring comes to one buffer.
    pub(super) shared: bool,
    /// Somebody who was asked may have brought other bytes than are right, or a part of them.
    spoils: bool,
    /// Asked, not answered.
    pub(super) waiting: Members,
    /// Asked since the piece began.
    asked: Members,
    /// Answered: done.
    done: Members,
    /// Asked under a map that has changed for them since: what they answer says nothing, and they are asked
    /// again.
    void: Members,
    /// Somebody is to be asked again in a moment, or by a newer map.
    retry: bool,
    /// Those that asked for that, and how often somebody did.
    behind: Members,
    put_off: u32,
    /// All in-sync replicas refused, some perhaps after having stored a part: the guest is told when one
    /// replica is left, which the others are then made equal to.
    verdict: Option<Refusal>,
    /// Why another one did not do it; the worst so far.
    refusal: Option<Refusal>,
    /// At least one did not answer, so whether it has the write is unknown.
    unreachable: bool,
    /// Since all were asked last, somebody has done it, or may have.
    spread: bool,
    /// Since the piece began, somebody has stored some of it, or may have.
    touched: bool,
    /// Could not read all of it, or all that a write needs.
    pub(super) unreadable: Members,
    /// A read that is asked for block by block.
    pub(super) parts: Option<Box<Parts>>,
    /// It is no part of a guest's request.
    pub(super) repair: Option<Repair>,
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
    /// Send everybody a copy that the guest cannot change.
    Copy,
    /// What was read is not certain: [read again](Piece::read_again).
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
}

/// The data of a write, out of the guest's reach.
pub(super) struct PrivateCopy {
    /// Only named by `iov`.
    _bytes: Box<[u8]>,
    iov: Box<libc::iovec>,
}

// SAFETY: the iovec points into memory that the copy owns.
unsafe impl Send for PrivateCopy {}

impl PrivateCopy {
    /// Bytes that it takes.
    fn len(&self) -> usize {
        self.iov.iov_len
    }

    /// Copies what the list names.
    ///
    /// # Safety
    /// The list and the memory are valid. The memory may change meanwhile.
    unsafe fn of(list: &IoVecs) -> Self {
        // SAFETY: the caller's promise.
        let list = unsafe { std::slice::from_raw_parts(list.ptr, list.len as usize) };
        let len = list.iter().map(|iov| iov.iov_len).sum();
        let mut bytes = vec![0; len].into_boxed_slice();
        // SAFETY: the caller's promise; there is room for all of it.
        unsafe { copy_from(list, 0, &mut bytes) };
        let iov = Box::new(libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: len,
        });
        Self { _bytes: bytes, iov }
    }
}

impl Piece {
    /// From now on sends a copy of the data, to everybody. Without outstanding answers, and while the guest's
    /// buffers are valid, as they are until the request is done.
    pub(super) fn make_private(&mut self) {
        let Command::Write { buffers, .. } = &mut self.request.command else {
            return;
        };
        // SAFETY: the submitter keeps the buffers valid until the request is done; the list is the piece's
        // own.
        let copy = unsafe { PrivateCopy::of(buffers) };
        *buffers = IoVecs {
            ptr: &raw const *copy.iov,
            len: 1,
        };
        self.copy = Some(copy);
        self.forget_answers();
    }

    /// Bytes of data that it holds itself.
    pub(super) fn private_bytes(&self) -> usize {
        self.copy.as_ref().map_or(0, PrivateCopy::len)
    }

    /// Bytes of data that are read or written.
    #[inline]
    pub(super) fn data_bytes(&self) -> u64 {
        match self.request.command {
            Command::Read { len, .. } | Command::Write { len, .. } => u64::from(len),
            _ => 0,
        }
    }

    /// Whether somebody has the data, or may have, or a part of them. Whoever is asked once more must get the
    /// same: two replicas would hold different data under one version, if the guest changed its buffer
    /// meanwhile.
    #[inline]
    pub(super) fn is_spread(&self) -> bool {
        let writes = matches!(self.request.command, Command::Write { .. });
        self.spread && writes && self.copy.is_none()
    }

    /// Whether a member that did not answer is to be asked again.
    pub(super) fn is_parked(&self) -> bool {
        self.unreachable && self.waiting.is_empty() && self.begun
    }

    pub(super) fn new() -> Self {
        Self {
            io: 0,
            group: 0,
            request: Request::NOTHING,
            segments: Segments::new(),
            next: NONE,
            in_window: 0,
            entered_us: 0,
            idle: false,
            copy: None,
            begun: false,
            sent_us: 0,
            hedged: false,
            shared: false,
            spoils: false,
            waiting: Members::NONE,
            asked: Members::NONE,
            done: Members::NONE,
            void: Members::NONE,
            retry: false,
            behind: Members::NONE,
            put_off: 0,
            verdict: None,
            refusal: None,
            unreachable: false,
            spread: false,
            touched: false,
            unreadable: Members::NONE,
            parts: None,
            repair: None,
            renumbered: 0,
        }
    }

    /// Starts a new use; the segments were filled before.
    #[inline]
    pub(super) fn begin(&mut self, io: u32, group: u16, request: Request) {
        self.io = io;
        self.group = group;
        self.request = request;
        self.next = NONE;
        self.renumbered = 0;
        self.copy = None;
        self.begun = false;
        self.hedged = false;
        self.waiting = Members::NONE;
        self.void = Members::NONE;
        self.verdict = None;
        self.touched = false;
        self.unreadable = Members::NONE;
        self.parts = None;
        self.put_off = 0;
        self.forget_answers();
    }

    /// Starts over with asking.
    #[inline]
    pub(super) fn forget_answers(&mut self) {
        self.asked = Members::NONE;
        self.done = Members::NONE;
        self.refusal = None;
        self.unreachable = false;
        self.spread = false;
        self.retry = false;
        (self.shared, self.spoils) = (false, false);
    }

    /// A read of two at once of which one failed: its bytes may lie over the good ones, or have been there
    /// when those were verified. Asks again, one after the other, first who had it.
    pub(super) fn read_again(&mut self) {
        let asked = match self.done.is_empty() {
            true => self.unreadable,
            false => self.asked.without(self.done),
        };
        let refusal = self.refusal.filter(|known| *known != Refusal::Mismatch);
        let unreachable = self.unreachable;
        self.forget_answers();
        (self.asked, self.refusal, self.unreachable) = (asked, refusal, unreachable);
    }

    /// A newer map says that these members began anew: nothing they answered before counts.
    pub(super) fn renew(&mut self, members: Members) {
        self.done = self.done.without(members);
        self.asked = self.asked.without(members);
        self.void = self.void.or(self.waiting.and(members));
    }

    /// Whether it waits for a tick; if so, it goes on.
    pub(super) fn take_retry(&mut self) -> bool {
        // The map that a replica asks for may have come before its answer.
        let stale = matches!(self.refusal, Some(Refusal::StaleEpoch(_)));
        self.behind = Members::NONE;
        std::mem::take(&mut self.retry) || stale
    }

    /// Those that have put the piece off for too long.
    pub(super) fn lagging(&self) -> Members {
        match self.put_off >= PUT_OFF_MAX {
            true => self.behind,
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
        self.asked = self.done;
        self.refusal = None;
        self.unreachable = false;
        self.retry = false;
    }

    /// Asked since it began.
    #[inline]
    pub(super) fn asked(&self) -> Members {
        self.asked
    }

    /// Who did it.
    pub(super) fn answered_by(&self) -> Option<usize> {
        self.done.iter().next()
    }

    /// What the one that was asked said; `None` if that says nothing.
    pub(super) fn outcome(&self) -> Option<Result<(), Refusal>> {
        match self.refusal {
            None => (!self.done.is_empty()).then_some(Ok(())),
            Some(refusal) => Some(Err(refusal)),
        }
    }

    /// Somebody did it.
    #[inline]
    pub(super) fn has_answer(&self) -> bool {
        !self.done.is_empty()
    }

    /// See [`Next::Fail`].
    pub(super) fn condemn(&mut self, refusal: Refusal) {
        self.verdict = Some(refusal);
    }

    #[inline]
    pub(super) fn sending(&mut self, to: Members) {
        self.waiting = to;
        self.asked = self.asked.or(to);
    }

    #[inline]
    pub(super) fn answered(&mut self, member: usize, result: Result<(), Refusal>) {
        self.spread |= matches!(result, Ok(()) | Err(Refusal::Unreachable));
        self.touched |= !leaves_nothing(result, &self.request.command);
        self.spoils |= result.is_err_and(brings_bytes) || self.void.contains(member);
        if self.void.remove(member) {
            self.asked.remove(member);
            return;
        }
        match result {
            Ok(()) => self.done.insert(member),
            Err(Refusal::Behind(_)) => {
                self.asked.remove(member);
                self.retry = true;
                self.behind.insert(member);
                self.put_off += 1;
            }
            Err(refusal) => {
                if refusal.is_unreadable() {
                    self.unreadable.insert(member);
                }
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
        assert!(self.waiting.is_empty());
        let alone = set.is_alone();
        let is_write = matches!(self.request.command, Command::Write { .. });
        match self.refusal {
            Some(Refusal::StaleGeneration(generation)) => {
                return Next::Renew {
                    generation,
                    epoch: Epoch(0),
                };
            }
            // Its map is on the way here.
            Some(Refusal::StaleEpoch(_)) if !alone => return Next::Retry,
            Some(Refusal::StaleEpoch(epoch)) => {
                return Next::Renew {
                    generation: Generation(0),
                    epoch,
                };
            }
            Some(Refusal::Renumber) => return Next::Renumber,
            Some(Refusal::Mismatch) if is_write && self.copy.is_none() => return Next::Copy,
            _ => {}
        }
        let is_mixed = self.shared && self.spoils;
        let had_it = !self.done.is_empty() || self.refusal == Some(Refusal::Mismatch);
        if is_mixed && had_it {
            return Next::Again;
        }
        if self.retry {
            return Next::Retry;
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
        if let Some(member) = set.nearest(untried) {
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
    /// Those that are syncing must have it, too: what one of them lacks it must never be promoted without.
    #[inline]
    fn next_of_write(&self, set: &ReplicaSet) -> Next {
        // Unless the one that is left has it: it was being compared when all others refused, say.
        let is_left_without =
            set.receiving().len() == 1 && set.receiving().and(self.done).is_empty();
        if let Some(refusal) = self.verdict.filter(|_| is_left_without) {
            return Next::Done(Err(error_of(refusal)));
        }
        if set.in_sync().len() < set.min_in_sync() {
            return Next::Park {
                failed: Members::NONE,
            };
        }
        let missing = set.receiving().without(self.asked);
        if !missing.is_empty() {
            return Next::Send(missing);
        }
        let failed = set.receiving().without(self.done);
        if failed.is_empty() {
            return Next::Done(Ok(()));
        }
        let in_sync = set.in_sync();
        match self.refusal {
            // All refused for good: there is no smaller set that has it.
            Some(refusal) if in_sync.and(self.done).is_empty() && !self.unreachable => {
                let first = in_sync.iter().next().map_or(Members::NONE, Members::only);
                let others = set.receiving().without(first);
                // A part of a block that is lost on all of them: they are as they were.
                let is_nowhere = failed.without(self.unreadable).is_empty() && !self.touched;
                if others.is_empty() || refusal == Refusal::Invalid || is_nowhere {
                    return Next::Done(Err(error_of(refusal)));
                }
                Next::Fail { refusal, others }
            }
            _ => Next::Park { failed },
        }
    }
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
        | Refusal::NoSpace
        | Refusal::Invalid => false,
    }
}

/// Whether the answer to a write says that none of it was stored. Where a part of a block cannot be written,
/// because the rest of it cannot be read, the replica has stored nothing of that map page, but it may have
/// stored what lies in others.
#[inline]
fn leaves_nothing(result: Result<(), Refusal>, command: &Command) -> bool {
    let Err(refusal) = result else {
        return false;
    };
    let is_in_one_page = match *command {
        Command::Write { offset, len, .. } | Command::Zero { offset, len, .. } => {
            len > 0 && offset / LEAF_BYTES == (offset + len - 1) / LEAF_BYTES
        }
        _ => false,
    };
    match refusal {
        Refusal::StaleGeneration(_) | Refusal::StaleEpoch(_) | Refusal::Behind(_) => true,
        refusal => is_in_one_page && refusal.is_unreadable(),
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
