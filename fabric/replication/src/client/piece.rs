//! One piece of a guest request: what it is, how far it is, and the [`Answers`] of replicas to it.

use fabric_types::io::{IoError, IoResult};
use fabric_types::membership::ReplicaSet;
use fabric_types::{Command, Refusal, Request};

use super::Segments;
use super::answers::{Answers, Next};
use super::full::SpaceWait;
use super::link::NONE;
use super::parts::Parts;
use super::private::PrivateCopy;
use super::repair::Repair;

/// The part of a guest request that lies in one chunk.
pub(super) struct Piece {
    pub(super) io: u32,
    pub(super) group: u16,
    pub(super) request: Request,
    pub(super) segments: Segments,
    pub(super) buffers: Buffers,
    pub(super) stage: Stage,
    pub(super) answers: Answers,
    pub(super) space: SpaceWait,
    /// How often the write was numbered anew.
    pub(super) renumbered: u8,
}

/// How far a piece is.
pub(super) enum Stage {
    /// It is cut, and held back. It names the next piece of its request that is not sent either.
    Unsent {
        /// A piece, or `NONE`.
        next: u32,
    },
    /// Replicas are asked.
    Asked(Asked),
    /// It has begun, and nobody has anything of it to answer: it waits for a map, or for a moment.
    Idle,
    /// It is no part of a guest's request.
    Repair(Repair),
}

/// What is known of a piece while replicas are asked.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Asked {
    /// When it was sent last.
    pub(super) sent_us: u64,
    /// What of it counts against the window of its volume.
    pub(super) in_window: Option<InWindow>,
}

/// Data that replicas have to answer.
#[derive(Debug, Clone, Copy)]
pub(super) struct InWindow {
    pub(super) bytes: u64,
    pub(super) since_us: u64,
}

/// What the buffers of a piece's request are.
pub(super) enum Buffers {
    /// The guest's, by the piece's own list.
    Guest,
    /// What is sent instead of the guest's, which changed while they were sent.
    Copy(PrivateCopy),
    /// The guest's for one block of a read, which is asked for block by block.
    Part(Box<Parts>),
}

impl Piece {
    pub(super) fn new() -> Self {
        Self {
            io: 0,
            group: 0,
            request: Request::NOTHING,
            segments: Segments::new(),
            buffers: Buffers::Guest,
            stage: Stage::Unsent { next: NONE },
            answers: Answers::default(),
            space: SpaceWait::default(),
            renumbered: 0,
        }
    }

    /// Starts a new use; the segments were filled before.
    #[inline]
    pub(super) fn begin(&mut self, io: u32, group: u16, request: Request) {
        self.io = io;
        self.group = group;
        self.request = request;
        self.buffers = Buffers::Guest;
        self.stage = Stage::Unsent { next: NONE };
        self.answers = Answers::default();
        self.space = SpaceWait::default();
        self.renumbered = 0;
    }

    /// The next piece of its request that is not sent either.
    #[inline]
    pub(super) fn next_unsent(&self) -> u32 {
        match self.stage {
            Stage::Unsent { next } => next,
            Stage::Asked(_) | Stage::Idle | Stage::Repair(_) => NONE,
        }
    }

    /// It is sent, or looked at again; whether it was idle.
    #[inline]
    pub(super) fn resume(&mut self) -> bool {
        let was_idle = self.is_idle();
        if let Stage::Unsent { .. } | Stage::Idle = self.stage {
            self.stage = Stage::Asked(Asked::default());
        }
        was_idle
    }

    /// Whether it waits for a map, or for a moment.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        matches!(self.stage, Stage::Idle)
    }

    /// Whether it is no part of a guest's request.
    #[inline]
    pub(super) fn is_repair(&self) -> bool {
        matches!(self.stage, Stage::Repair(_))
    }

    /// While replicas are asked.
    #[inline]
    pub(super) fn asked_mut(&mut self) -> Option<&mut Asked> {
        match &mut self.stage {
            Stage::Asked(asked) => Some(asked),
            Stage::Unsent { .. } | Stage::Idle | Stage::Repair(_) => None,
        }
    }

    /// When it was sent last.
    #[inline]
    pub(super) fn sent_us(&self) -> Option<u64> {
        match &self.stage {
            Stage::Asked(asked) => Some(asked.sent_us),
            Stage::Unsent { .. } | Stage::Idle | Stage::Repair(_) => None,
        }
    }

    /// From now on sends a copy of the data, to everybody. Without outstanding answers, and while the guest's
    /// buffers are valid, as they are until the request is done. Returns the bytes of the copy.
    pub(super) fn make_private(&mut self) -> usize {
        let Command::Write { buffers, .. } = &mut self.request.command else {
            return 0;
        };
        // SAFETY: the submitter keeps the buffers valid until the request is done; the list is the piece's
        // own.
        let copy = unsafe { PrivateCopy::of(buffers) };
        *buffers = copy.as_iovecs();
        let bytes = copy.len();
        self.buffers = Buffers::Copy(copy);
        self.answers.forget();
        bytes
    }

    /// Drops the copy, if there is one; returns its bytes.
    #[inline]
    pub(super) fn drop_copy(&mut self) -> usize {
        let Buffers::Copy(copy) = &self.buffers else {
            return 0;
        };
        let bytes = copy.len();
        self.buffers = Buffers::Guest;
        bytes
    }

    /// Sends the guest's own memory again, which is as it is then; returns the bytes of the copy that was
    /// sent before. For what nobody has any of.
    pub(super) fn send_guests_memory(&mut self) -> usize {
        if let (Command::Write { buffers, .. }, Buffers::Copy(_)) =
            (&mut self.request.command, &self.buffers)
        {
            *buffers = self.segments.as_iovecs();
        }
        self.drop_copy()
    }

    /// Asks those that had no space once more, with a claim on their reserve.
    pub(super) fn urge(&mut self) {
        if let Command::Write { urgent, .. } = &mut self.request.command {
            *urgent = true;
        }
        self.answers.ask_failed_again();
    }

    /// Bytes of data that are read or written.
    #[inline]
    pub(super) fn data_bytes(&self) -> u64 {
        match self.request.command {
            Command::Read { len, .. } | Command::Write { len, .. } => u64::from(len),
            _ => 0,
        }
    }

    /// Whether it writes what the guest may change meanwhile.
    #[inline]
    pub(super) fn writes_guests_memory(&self) -> bool {
        let writes = matches!(self.request.command, Command::Write { .. });
        writes && !matches!(self.buffers, Buffers::Copy(_))
    }

    /// Whether somebody has the data, or may have, or a part of them. Whoever is asked once more must get the
    /// same: two replicas would hold different data under one version, if the guest changed its buffer
    /// meanwhile.
    #[inline]
    pub(super) fn is_spread(&self) -> bool {
        self.answers.is_stored() && self.writes_guests_memory()
    }

    /// Takes an answer in that was [awaited](Answers::receive).
    #[inline]
    pub(super) fn answered(&mut self, member: usize, result: Result<(), Refusal>) {
        self.answers.add(member, result, &self.request.command);
    }

    /// What follows; to be asked with no answer outstanding.
    #[inline]
    pub(super) fn next(&self, set: &ReplicaSet) -> Next {
        let is_read = matches!(self.request.command, Command::Read { .. });
        self.answers.next(set, is_read, self.writes_guests_memory())
    }

    /// What the end of a read means: `None` if it goes on with the next block, which nobody has been asked
    /// for yet. To be asked with no answer outstanding.
    #[inline]
    pub(super) fn or_next_part(&mut self, result: IoResult, others: bool) -> Option<IoResult> {
        let is_bad = others && matches!(result, Err(IoError::Corrupt | IoError::Device(_)));
        let is_part = matches!(self.buffers, Buffers::Part(_));
        if !is_part && !is_bad {
            return Some(result);
        }
        match self.next_part(result) {
            true => None,
            false => Some(result),
        }
    }

    /// Goes on with the next block of a read, or with its first one; false if there is none.
    #[cold]
    fn next_part(&mut self, result: IoResult) -> bool {
        if !matches!(self.buffers, Buffers::Part(_)) {
            let Some(parts) = Parts::of(self.request.command) else {
                return false;
            };
            self.buffers = Buffers::Part(parts);
        } else if result.is_err() {
            return self.end_parts();
        }
        let Buffers::Part(parts) = &mut self.buffers else {
            return false;
        };
        let Some(command) = parts.next() else {
            return self.end_parts();
        };
        self.request.command = command;
        self.answers.begin_part();
        true
    }

    /// The read is the whole again; false, for there is no further part.
    fn end_parts(&mut self) -> bool {
        if let Buffers::Part(parts) = &self.buffers {
            self.request.command = parts.whole();
            self.buffers = Buffers::Guest;
        }
        false
    }
}
