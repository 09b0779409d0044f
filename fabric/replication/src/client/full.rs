//! Writes for which a replica has no space. That is no failure of the replica: nobody is reported. The write
//! is held and tried again, until there is space or the volume's limit ([`OnFull`](crate::volume::OnFull)) is
//! over. See "Full devices" in docs/REPLICATION.md.
//!
//! Whoever refused is asked first and alone for what is written to its group next. So nobody has anything of
//! most writes that are held, and these can end with an error that leaves all replicas alike. Such a write
//! keeps no other request away either: it is as if it had not begun. A write that others have, or a part of
//! it, is brought to its end instead: it is sent as urgent.

use std::collections::{BTreeMap, VecDeque};

use fabric_types::Command;
use fabric_types::ids::CHUNK_BYTES;
use fabric_types::io::{self, IoError, IoResult, Op};
use fabric_types::membership::Members;
use fabric_types::slab::Key;

use super::Client;
use crate::volume::VolumeState;

mod retry;

/// How long a group's writes are held before one of either kind is tried again. As long as those that are
/// tried succeed, twice as many are at the next tick.
pub(super) const RETRY_US: u64 = 1_000_000;
/// A replica that has refused a long write may take short ones: it is asked first until it takes one as long,
/// or any after this time.
const SUSPECT_US: u64 = 10_000_000;

/// A discard keeps everything else on its volume away: whoever has no space for what others have of it leaves
/// after this time.
const DISCARD_WAIT_US: u64 = 2 * RETRY_US;

/// A write that a member had no space for.
#[derive(Debug, Clone, Copy)]
struct Refused {
    bytes: u32,
    urgent: bool,
}

/// A member that had no space when it was asked last.
#[derive(Debug, Clone, Copy)]
struct Suspect {
    member: usize,
    /// The shortest write that it refused.
    bytes: u32,
    at_us: u64,
}

/// Pieces of a group that are held, of one kind.
#[derive(Debug, Default)]
struct HeldPieces {
    /// In the order in which they are tried. Some may be over.
    keys: VecDeque<Key>,
    /// When some of them are tried again.
    due_us: u64,
    /// How many are tried then.
    probes: usize,
    /// When some were tried last, and how many.
    tried_us: u64,
    tried: usize,
    /// When a write of their kind was refused last, if none that was tried has succeeded since.
    refused_us: Option<u64>,
}

impl HeldPieces {
    fn is_due(&self, now_us: u64) -> bool {
        !self.keys.is_empty() && self.due_us <= now_us
    }

    fn push(&mut self, key: Key, now_us: u64) {
        if self.keys.is_empty() && self.due_us <= now_us {
            self.due_us = now_us + RETRY_US;
        }
        self.probes = self.probes.max(1);
        self.keys.push_back(key);
    }

    fn note_refused(&mut self, now_us: u64) {
        self.probes = 1;
        self.due_us = self.due_us.max(self.tried_us + RETRY_US);
        self.refused_us = Some(now_us);
    }

    /// One that was held is done. If none was refused that was tried with it, more are tried.
    fn note_done(&mut self, now_us: u64) {
        if self.refused_us.is_none_or(|at_us| at_us < self.tried_us) {
            self.refused_us = None;
            (self.probes, self.due_us) = (2 * self.tried.max(1), now_us);
        }
    }

    /// Begins to try some if that is due; how many.
    fn begin_round(&mut self, now_us: u64) -> usize {
        if !self.is_due(now_us) {
            return 0;
        }
        (self.tried_us, self.due_us, self.tried) = (now_us, now_us + RETRY_US, 0);
        std::mem::replace(&mut self.probes, 1)
    }

    /// Ends it: these are held on, and are tried before those that came meanwhile. Others may have been in
    /// the way of all that could have been tried.
    fn end_round(&mut self, mut kept: VecDeque<Key>, probes: usize, now_us: u64) {
        kept.append(&mut self.keys);
        self.keys = kept;
        if probes > 0 && self.tried == 0 {
            (self.due_us, self.probes) = (now_us, probes);
        }
    }
}

/// The held writes of a group, and its full members.
#[derive(Debug, Default)]
struct FullGroup {
    suspects: Vec<Suspect>,
    /// Pieces of which somebody has something.
    stored: HeldPieces,
    /// Pieces of which nobody has anything.
    untouched: HeldPieces,
}

impl FullGroup {
    fn pieces(&mut self, held: Held) -> &mut HeldPieces {
        match held {
            Held::Stored => &mut self.stored,
            Held::Untouched | Held::No => &mut self.untouched,
        }
    }

    fn has_held(&self) -> bool {
        !self.stored.keys.is_empty() || !self.untouched.keys.is_empty()
    }
}

/// A volume with pieces that are held, and how long it lets them wait.
#[derive(Debug, Clone, Copy)]
struct HoldingVolume {
    slot: u32,
    wait_us: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct FullReplicas {
    groups: BTreeMap<u16, FullGroup>,
    /// Pieces that are held.
    held: usize,
    volumes: Vec<HoldingVolume>,
    /// When those whose time is over are looked for next.
    look_us: u64,
}

/// Whether a piece is held for want of space.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Held {
    #[default]
    No,
    /// Nobody has any of it.
    Untouched,
    /// Somebody has it, or a part of it, or may have.
    Stored,
}

/// What a piece knows of being held.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SpaceWait {
    held: Held,
    /// How it was held last.
    kind: Held,
    /// Since it was held for the first time.
    since_us: Option<u64>,
    /// Since it was, with something of it stored.
    stored_since_us: Option<u64>,
}

impl SpaceWait {
    /// Whether the piece is held now.
    #[inline]
    pub(super) fn is_held(&self) -> bool {
        self.held != Held::No
    }
}

/// What follows when replicas have no space for a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoSpaceStep {
    /// The guest is told.
    End,
    /// Ask again, with a claim on the reserve.
    Urge,
    /// Try again later.
    Hold,
    /// Try again later, and ask for a map without the full ones.
    TakeOut,
    /// Nobody has all of it: ask for a map with one member only, and then tell the guest.
    GiveUp,
}

/// Who is asked for a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Asks {
    /// All of these.
    These(Members),
    /// Only a part of those that need it. The guest may change the data before the others are sent theirs, so
    /// they are copied first.
    CopyFirst,
}

impl FullReplicas {
    /// No member is known to be full.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Groups with full members, or with writes that are held.
    pub(super) fn groups(&self) -> Vec<u16> {
        self.groups.keys().copied().collect()
    }

    /// Groups of which some pieces are to be tried now.
    fn due_groups(&self, now_us: u64) -> Vec<u16> {
        let is_due =
            |entry: &FullGroup| entry.stored.is_due(now_us) || entry.untouched.is_due(now_us);
        let due = self.groups.iter().filter(|(_, entry)| is_due(entry));
        due.map(|(group, _)| *group).collect()
    }

    /// Whether pieces are held.
    #[inline]
    pub(super) fn has_held(&self) -> bool {
        self.held > 0
    }

    /// Whether pieces of the group are held.
    fn holds(&self, group: u16) -> bool {
        self.groups.get(&group).is_some_and(FullGroup::has_held)
    }

    /// A member in sync had no space for a write of so many bytes.
    #[cold]
    fn note_full(&mut self, group: u16, member: usize, write: Refused, now_us: u64) {
        let Refused { bytes, urgent } = write;
        let entry = self.groups.entry(group).or_default();
        let known = entry.suspects.iter().position(|s| s.member == member);
        let known = known.map(|at| entry.suspects.remove(at));
        // The last one to refuse is asked first.
        entry.suspects.push(Suspect {
            member,
            bytes: known.map_or(bytes, |known| known.bytes.min(bytes)),
            at_us: now_us,
        });
        entry.untouched.note_refused(now_us);
        if urgent {
            entry.stored.note_refused(now_us);
        }
    }

    /// A member has stored a write of so many bytes that was not urgent: urgent ones say nothing of the space
    /// for others. Longer ones that are held are not tried because of it.
    #[cold]
    fn note_stored(&mut self, group: u16, member: usize, bytes: u32, now_us: u64) {
        let Some(entry) = self.groups.get_mut(&group) else {
            return;
        };
        let is_over =
            |s: &Suspect| bytes >= s.bytes || now_us.saturating_sub(s.at_us) >= SUSPECT_US;
        entry.suspects.retain(|s| s.member != member || !is_over(s));
        self.forget_empty(group);
    }

    fn forget_empty(&mut self, group: u16) {
        let entry = self.groups.get(&group);
        if entry.is_some_and(|entry| entry.suspects.is_empty() && !entry.has_held()) {
            self.groups.remove(&group);
        }
    }

    /// A newer map: nothing that these members said before counts, nor what those said that are not in sync
    /// now. All that is held for the group is tried.
    pub(super) fn on_map(&mut self, group: u16, renewed: Members, in_sync: Members) {
        if let Some(entry) = self.groups.get_mut(&group) {
            let asked = in_sync.without(renewed);
            entry.suspects.retain(|s| asked.contains(s.member));
            for pieces in [&mut entry.stored, &mut entry.untouched] {
                (pieces.probes, pieces.due_us) = (usize::MAX, 0);
                pieces.refused_us = None;
            }
            self.forget_empty(group);
        }
    }

    /// Who of these is to be asked first, and alone.
    fn suspect_among(&self, group: u16, to: Members) -> Option<usize> {
        let suspects = self.groups.get(&group)?.suspects.iter().rev();
        let mut members = suspects.map(|suspect| suspect.member);
        members.find(|member| to.contains(*member))
    }

    /// No piece is held any more, whatever the lists name.
    #[cold]
    fn forget_pieces(&mut self) {
        for entry in self.groups.values_mut() {
            entry.stored.keys.clear();
            entry.untouched.keys.clear();
        }
        self.groups.retain(|_, entry| !entry.suspects.is_empty());
    }
}

impl Client {
    /// A member had no space for a piece.
    #[cold]
    pub(super) fn note_full(&mut self, piece: u32, member: usize) {
        let slot = &self.pieces[piece];
        let set = self.groups.set(slot.group);
        let Command::Write { len, urgent, .. } = slot.request.command else {
            return;
        };
        if set.in_sync().contains(member) {
            let write = Refused { bytes: len, urgent };
            self.full.note_full(slot.group, member, write, self.now_us);
        }
    }

    /// A member has done what a piece asks, while some are full.
    #[cold]
    pub(super) fn note_stored(&mut self, piece: u32, member: usize) {
        let slot = &self.pieces[piece];
        if let Command::Write {
            len, urgent: false, ..
        } = slot.request.command
        {
            self.full.note_stored(slot.group, member, len, self.now_us);
        }
    }

    /// A piece is done, while some are full.
    #[cold]
    pub(super) fn note_done(&mut self, piece: u32) {
        let slot = &self.pieces[piece];
        let was_held = slot.space.since_us.is_some();
        let kind = slot.space.kind;
        if let Some(entry) = self.full.groups.get_mut(&slot.group).filter(|_| was_held) {
            entry.pieces(kind).note_done(self.now_us);
        }
    }

    /// Who of those that a piece is to be sent to is asked now: with full members in the group one of them,
    /// so that nobody has anything of the write if that refuses.
    #[inline]
    pub(super) fn whom_to_ask(&self, piece: u32, to: Members) -> Asks {
        let slot = &self.pieces[piece];
        let plain = matches!(slot.request.command, Command::Write { urgent: false, .. });
        if self.full.is_empty() || !plain {
            return Asks::These(to);
        }
        let to_ask = to.and(self.groups.set(slot.group).in_sync());
        let Some(suspect) = self.full.suspect_among(slot.group, to_ask) else {
            return Asks::These(to);
        };
        let first = Members::only(suspect);
        match first != to && slot.writes_guests_memory() {
            true => Asks::CopyFirst,
            false => Asks::These(first),
        }
    }

    /// What follows when these members have no space for a piece.
    #[cold]
    pub(super) fn on_no_space(&self, piece: u32, full: Members) -> NoSpaceStep {
        let slot = &self.pieces[piece];
        let set = self.groups.set(slot.group);
        let is_over = self.has_waited(piece);
        let is_last = set.receiving().len() == 1;
        if slot.answers.is_untouched() || is_last {
            return match is_over {
                true => NoSpaceStep::End,
                false => NoSpaceStep::Hold,
            };
        }
        if matches!(slot.request.command, Command::Write { urgent: false, .. }) {
            return NoSpaceStep::Urge;
        }
        if is_over && !slot.answers.is_done_by_some(set.in_sync()) {
            return NoSpaceStep::GiveUp;
        }
        let can_leave = self.has_waited_enough(piece) && self.can_do_without(piece, full);
        match can_leave {
            true => NoSpaceStep::TakeOut,
            false => NoSpaceStep::Hold,
        }
    }

    /// Whether enough others are in sync and have all of a piece. Who was reported under this map leaves,
    /// too.
    fn can_do_without(&self, piece: u32, full: Members) -> bool {
        let slot = &self.pieces[piece];
        let set = self.groups.set(slot.group);
        let leaving = full.or(self.groups.reported(slot.group));
        let others = set.in_sync().without(leaving);
        others.len() >= set.min_in_sync().max(1) && slot.answers.are_done_by(others)
    }

    /// Whether a replica without space for a piece, which others have, has had its time.
    fn has_waited_enough(&self, piece: u32) -> bool {
        let slot = &self.pieces[piece];
        let is_discard = matches!(slot.request.command, Command::Zero { .. });
        let since_us = slot.space.stored_since_us.filter(|_| is_discard);
        let waited_us = since_us.map(|since| self.now_us.saturating_sub(since));
        self.has_waited(piece) || waited_us.is_some_and(|us| us >= DISCARD_WAIT_US)
    }

    /// For how long the volume of a piece lets it wait.
    fn wait_us(&self, piece: u32) -> u64 {
        let io = self.pieces[piece].io;
        self.volumes[self.ios[io].volume].state.on_full_us()
    }

    /// A write that nobody has any of finds no memory for the copy that it is to be sent from.
    #[cold]
    pub(super) fn wait_for_copies(&mut self, piece: u32) -> Option<IoResult> {
        // What somebody has is looked at again at the next tick.
        if !self.pieces[piece].answers.is_untouched() {
            return None;
        }
        if self.has_waited(piece) {
            return Some(Err(IoError::NoSpace));
        }
        // Copies are kept by those that are held, and it must not be in the way of discards.
        self.hold(piece);
        None
    }

    /// Whether a piece has been held for as long as its volume wants, at the most.
    fn has_waited(&self, piece: u32) -> bool {
        let wait_us = self.wait_us(piece);
        let since_us = self.pieces[piece].space.since_us;
        wait_us == 0 || since_us.is_some_and(|since| self.now_us.saturating_sub(since) >= wait_us)
    }

    /// Keeps a piece until it is tried again.
    #[cold]
    pub(super) fn hold(&mut self, piece: u32) {
        let untouched = self.pieces[piece].answers.is_untouched();
        if untouched {
            // Nobody has it: copies are for those that somebody has.
            self.private_bytes -= self.pieces[piece].send_guests_memory();
        }
        let slot = &mut self.pieces[piece];
        slot.space.held = match untouched {
            true => Held::Untouched,
            false => Held::Stored,
        };
        slot.space.kind = slot.space.held;
        if !untouched {
            slot.space.stored_since_us.get_or_insert(self.now_us);
        }
        let since_us = *slot.space.since_us.get_or_insert(self.now_us);
        let (io, group) = (slot.io, slot.group);
        let key = self.pieces.key(piece);
        let held = self.pieces[piece].space.held;
        let entry = self.full.groups.entry(group).or_default();
        entry.pieces(held).push(key, self.now_us);
        self.full.held += 1;
        self.ios[io].untouched += u32::from(untouched);
        let volume = self.ios[io].volume;
        let local = &mut self.volumes[volume];
        if local.held_pieces == 0 {
            let wait_us = local.state.on_full_us();
            self.full.volumes.push(HoldingVolume {
                slot: volume,
                wait_us,
            });
        }
        local.held_pieces += 1;
        local.held_for_us = local.held_for_us.max(self.now_us.saturating_sub(since_us));
        local
            .state
            .note_held(self.lane, local.held_pieces, local.held_for_us);
        self.step_aside(io);
    }

    /// A piece is held no more.
    #[inline]
    pub(super) fn release(&mut self, piece: u32) {
        let slot = &mut self.pieces[piece];
        let held = std::mem::take(&mut slot.space.held);
        if held == Held::No {
            return;
        }
        let io = slot.io;
        self.full.held -= 1;
        if self.full.held == 0 {
            self.full.forget_pieces();
        }
        self.ios[io].untouched -= u32::from(held == Held::Untouched);
        let volume = self.ios[io].volume;
        let local = &mut self.volumes[volume];
        local.held_pieces -= 1;
        if local.held_pieces == 0 {
            local.held_for_us = 0;
            self.full.volumes.retain(|holding| holding.slot != volume);
        }
        local
            .state
            .note_held(self.lane, local.held_pieces, local.held_for_us);
    }

    /// A request that nobody has begun, as far as replicas go, keeps nobody away: a discard that would make
    /// space waits for everything else. What of it was done before is on all replicas, and is what a request
    /// of its own would be. So would be what is left of a discard that is not cut into pieces yet.
    #[inline]
    pub(super) fn step_aside(&mut self, io: u32) {
        if !self.full.has_held() {
            return;
        }
        let state = &self.ios[io];
        let is_cut = state.unsent.first_piece().is_none();
        if state.entered && is_cut && state.untouched > 0 && state.untouched == state.open {
            self.leave(io);
            (self.ios[io].entered, self.ios[io].has_stepped_aside) = (false, true);
        }
    }

    /// Whether a write would be held behind others, as far as is known.
    pub(super) fn lacks_space(&self, volume: &VolumeState, request: &io::Request<'_>) -> bool {
        if !self.full.has_held() || !matches!(request.op, Op::Write { .. }) {
            return false;
        }
        let end = request.offset + request.len;
        let chunks = request.offset / CHUNK_BYTES..end.div_ceil(CHUNK_BYTES);
        let mut chunks = chunks.filter_map(|index| volume.chunk_at(index * CHUNK_BYTES));
        chunks.any(|chunk| self.full.holds(self.groups.group_of(chunk)))
    }
}
