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
use fabric_types::ids::{CHUNK_BYTES, Version};
use fabric_types::io::{self, IoError, IoResult, Op, Tag};
use fabric_types::membership::{Members, ReplicaSet};
use fabric_types::slab::Key;

use super::{Client, Transport};
use crate::volume::VolumeState;

/// How long a group's writes are held before one of them is tried again. As long as those that are tried
/// succeed, twice as many are at the next tick.
pub(super) const RETRY_US: u64 = 1_000_000;
/// A replica that has refused a long write may take short ones: it is asked first until it takes one as long,
/// or any after this time.
const SUSPECT_US: u64 = 10_000_000;

/// A member that had no space when it was asked last.
#[derive(Debug, Clone, Copy)]
struct Suspect {
    member: usize,
    /// The shortest write that it refused.
    bytes: u32,
    at_us: u64,
}

/// Writes to a group that are held, and for whom.
#[derive(Debug, Default)]
struct FullGroup {
    suspects: Vec<Suspect>,
    /// Those of which somebody has something first, then oldest first. Some may be over.
    held: VecDeque<Key>,
    /// When some of them are tried again.
    due_us: u64,
    /// How many are tried then, beside those whose time is over.
    probes: usize,
    /// The same of the last time.
    tried_us: u64,
    tried: usize,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct FullReplicas {
    groups: BTreeMap<u16, FullGroup>,
    /// Pieces that are held.
    held: usize,
    /// When volumes were told how long they have been.
    told_us: u64,
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
    /// Since it was held for the first time.
    since_us: Option<u64>,
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
    /// The same, and ask for a map without the full ones.
    TakeOut,
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

    /// Whether pieces are held.
    #[inline]
    pub(super) fn has_held(&self) -> bool {
        self.held > 0
    }

    /// Whether pieces of the group are held.
    fn holds(&self, group: u16) -> bool {
        let entry = self.groups.get(&group);
        entry.is_some_and(|entry| !entry.held.is_empty())
    }

    /// A member had no space for a write of so many bytes.
    #[cold]
    pub(super) fn note_full(&mut self, group: u16, member: usize, bytes: u32, now_us: u64) {
        let entry = self.groups.entry(group).or_default();
        let known = entry.suspects.iter().position(|s| s.member == member);
        let known = known.map(|at| entry.suspects.remove(at));
        // The last one to refuse is asked first.
        entry.suspects.push(Suspect {
            member,
            bytes: known.map_or(bytes, |known| known.bytes.min(bytes)),
            at_us: now_us,
        });
        entry.probes = 1;
        entry.due_us = entry.due_us.max(entry.tried_us + RETRY_US);
    }

    /// A member has stored a write of so many bytes. An urgent one says nothing of the space for others.
    #[cold]
    pub(super) fn note_stored(
        &mut self,
        group: u16,
        member: usize,
        (bytes, urgent): (u32, bool),
        now_us: u64,
    ) {
        let Some(entry) = self.groups.get_mut(&group) else {
            return;
        };
        if let Some(at) = entry.suspects.iter().position(|s| s.member == member) {
            let suspect = entry.suspects[at];
            let is_long_ago = now_us.saturating_sub(suspect.at_us) >= SUSPECT_US;
            if !urgent && (bytes >= suspect.bytes || is_long_ago) {
                entry.suspects.remove(at);
            }
        } else if !entry.suspects.is_empty() {
            return;
        }
        (entry.probes, entry.due_us) = (2 * entry.tried.max(1), now_us);
        self.forget_empty(group);
    }

    fn forget_empty(&mut self, group: u16) {
        let entry = self.groups.get(&group);
        if entry.is_some_and(|entry| entry.suspects.is_empty() && entry.held.is_empty()) {
            self.groups.remove(&group);
        }
    }

    /// A newer map: nothing that these members said before counts, and all that is held for the group is
    /// tried.
    pub(super) fn on_map(&mut self, group: u16, renewed: Members) {
        if let Some(entry) = self.groups.get_mut(&group) {
            entry.suspects.retain(|s| !renewed.contains(s.member));
            (entry.probes, entry.due_us) = (usize::MAX, 0);
            self.forget_empty(group);
        }
    }

    /// Who of `to` is to be asked first, and alone.
    fn first_of(&self, group: u16, to: Members, set: &ReplicaSet) -> Members {
        let suspects = self.groups.get(&group).map(|entry| entry.suspects.iter());
        let to_ask = to.and(set.in_sync());
        let first = suspects
            .into_iter()
            .flatten()
            .rev()
            .find(|s| to_ask.contains(s.member));
        first.map_or(to, |suspect| Members::only(suspect.member))
    }

    fn push(&mut self, group: u16, key: Key, first: bool, now_us: u64) {
        let entry = self.groups.entry(group).or_default();
        if entry.held.is_empty() && entry.due_us <= now_us {
            entry.due_us = now_us + RETRY_US;
        }
        entry.probes = entry.probes.max(1);
        match first {
            true => entry.held.push_front(key),
            false => entry.held.push_back(key),
        }
    }
}

impl Client {
    /// A member has answered a write.
    #[inline]
    pub(super) fn note_space(&mut self, piece: u32, member: usize, is_full: bool) {
        let slot = &self.pieces[piece];
        let (Command::Write { len, urgent, .. }, false) =
            (slot.request.command, self.groups.set(slot.group).is_alone())
        else {
            return;
        };
        match is_full {
            true => self.full.note_full(slot.group, member, len, self.now_us),
            false => {
                let stored = (len, urgent);
                self.full
                    .note_stored(slot.group, member, stored, self.now_us);
            }
        }
    }

    /// Who of those that a piece is to be sent to is asked now: with full members in the group one of them,
    /// so that nobody has anything of the write if that refuses. `None`: the data are to be copied first, for
    /// the guest may change them before the others are sent theirs.
    #[inline]
    pub(super) fn first_of(&self, piece: u32, to: Members) -> Option<Members> {
        let slot = &self.pieces[piece];
        let plain = matches!(slot.request.command, Command::Write { urgent: false, .. });
        if self.full.is_empty() || !plain {
            return Some(to);
        }
        let set = self.groups.set(slot.group);
        let first = self.full.first_of(slot.group, to, set);
        match first != to && slot.writes_guests_memory() {
            true => None,
            false => Some(first),
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
        let others = set.in_sync().without(full);
        let suffice = others.len() >= set.min_in_sync().max(1);
        match is_over && suffice && slot.answers.are_done_by(others) {
            true => NoSpaceStep::TakeOut,
            false => NoSpaceStep::Hold,
        }
    }

    /// Whether a piece has been held for as long as its volume wants, at the most.
    fn has_waited(&self, piece: u32) -> bool {
        let slot = &self.pieces[piece];
        let wait_us = self.volumes[self.ios[slot.io].volume].state.on_full_us();
        let since_us = slot.space.since_us;
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
        let since_us = *slot.space.since_us.get_or_insert(self.now_us);
        let (io, group) = (slot.io, slot.group);
        let key = self.pieces.key(piece);
        self.full.push(group, key, !untouched, self.now_us);
        self.full.held += 1;
        self.ios[io].untouched += u32::from(untouched);
        let local = &mut self.volumes[self.ios[io].volume];
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
        self.ios[io].untouched -= u32::from(held == Held::Untouched);
        let local = &mut self.volumes[self.ios[io].volume];
        local.held_pieces -= 1;
        if local.held_pieces == 0 {
            local.held_for_us = 0;
        }
        local
            .state
            .note_held(self.lane, local.held_pieces, local.held_for_us);
    }

    /// A request that nobody has begun, as far as replicas go, keeps nobody away: a discard that would make
    /// space waits for everything else. What of it was done before is on all replicas, and is what a request
    /// of its own would be.
    pub(super) fn step_aside(&mut self, io: u32) {
        let state = &self.ios[io];
        let is_cut = state.unsent.first_piece().is_none() && state.unsent.next_cut().is_none();
        if state.entered && is_cut && state.untouched > 0 && state.untouched == state.open {
            self.leave(io);
            (self.ios[io].entered, self.ios[io].has_stepped_aside) = (false, true);
        }
    }

    /// Comes back from having stepped aside, for a piece that is to be tried; false if others are in the way.
    /// What came meanwhile has a newer number, so it gets one that is newer still.
    fn step_back(&mut self, piece: u32) -> bool {
        let io = self.pieces[piece].io;
        if self.ios[io].has_stepped_aside {
            if self.enter(io).is_err() {
                return false;
            }
            self.ios[io].has_stepped_aside = false;
        }
        let slot = &mut self.pieces[piece];
        let number = self.ios[io].number;
        let own = Version::of(slot.request.generation, slot.request.sequence);
        if slot.answers.is_untouched() && own < number {
            (slot.request.generation, slot.request.sequence) = number.parts();
            slot.answers.forget();
        }
        true
    }

    /// Time has passed: tries again what is due.
    pub(super) fn retry_held<T: Transport>(
        &mut self,
        transport: &mut T,
        done: &mut dyn FnMut(Tag, IoResult),
    ) {
        if !self.full.has_held() {
            return;
        }
        for group in self.full.groups() {
            for key in self.begin_round(group) {
                let piece = self.pieces.find(key);
                let Some(piece) = piece.filter(|&p| self.pieces[p].space.is_held()) else {
                    continue;
                };
                let failed = self.ios[self.pieces[piece].io].error;
                match failed.filter(|_| self.pieces[piece].space.held == Held::Untouched) {
                    Some(error) => self.end_held(piece, error, transport, done),
                    None => {
                        self.release(piece);
                        self.ask_again(piece);
                        self.go_on(piece, transport, done);
                    }
                }
            }
            self.full.forget_empty(group);
        }
        self.tell_held();
    }

    /// Ends a piece that is held and of which nobody has anything.
    fn end_held<T: Transport>(
        &mut self,
        piece: u32,
        error: IoError,
        transport: &mut T,
        done: &mut dyn FnMut(Tag, IoResult),
    ) {
        self.idle_pieces -= usize::from(self.pieces[piece].resume());
        self.finish(piece, Err(error), transport, done);
    }

    /// Whether there is no point in trying a piece any more: another one of its request has failed, or what
    /// it writes was cut off from the volume, and freed, while it stood aside.
    fn has_failed(&mut self, piece: u32) -> bool {
        let slot = &self.pieces[piece];
        let io = &mut self.ios[slot.io];
        let size_bytes = self.volumes[io.volume].state.size_bytes();
        if io.has_stepped_aside && io.offset + io.len > size_bytes {
            io.error.get_or_insert(IoError::OutOfRange);
        }
        slot.space.held == Held::Untouched && io.error.is_some()
    }

    /// Those of a group that are to be tried now, ready for it, and those that have failed.
    fn begin_round(&mut self, group: u16) -> Vec<Key> {
        let now_us = self.now_us;
        let Some(entry) = self.full.groups.get_mut(&group) else {
            return Vec::new();
        };
        if entry.held.is_empty() || entry.due_us > now_us {
            return Vec::new();
        }
        let held = std::mem::take(&mut entry.held);
        let mut probes = std::mem::replace(&mut entry.probes, 1);
        (entry.tried_us, entry.due_us) = (now_us, now_us + RETRY_US);
        let (mut tried, mut rest) = (Vec::new(), VecDeque::with_capacity(held.len()));
        for key in held {
            let piece = self.pieces.find(key);
            let Some(piece) = piece.filter(|&p| self.pieces[p].space.is_held()) else {
                continue;
            };
            if self.has_failed(piece) {
                tried.push(key);
            } else if probes == 0 && !self.has_waited(piece) {
                rest.push_back(key);
            } else if self.step_back(piece) {
                probes = probes.saturating_sub(1);
                tried.push(key);
            } else {
                rest.push_back(key);
            }
        }
        if let Some(entry) = self.full.groups.get_mut(&group) {
            (entry.held, entry.tried) = (rest, tried.len());
            // Others are in the way of all that could have been tried.
            if tried.is_empty() {
                (entry.due_us, entry.probes) = (now_us, probes);
            }
        }
        tried
    }

    /// Tells volumes how long their writes have been held.
    fn tell_held(&mut self) {
        if self.now_us < self.full.told_us + RETRY_US {
            return;
        }
        self.full.told_us = self.now_us;
        let volumes = self.volumes.iter_mut();
        volumes.for_each(|local| local.held_for_us = 0);
        for key in self.full.groups.values().flat_map(|entry| &entry.held) {
            let Some(piece) = self.pieces.find(*key) else {
                continue;
            };
            let slot = &self.pieces[piece];
            if let Some(since) = slot.space.since_us.filter(|_| slot.space.is_held()) {
                let local = &mut self.volumes[self.ios[slot.io].volume];
                let us = self.now_us.saturating_sub(since);
                local.held_for_us = local.held_for_us.max(us);
            }
        }
        for local in self.volumes.iter_mut() {
            local
                .state
                .note_held(self.lane, local.held_pieces, local.held_for_us);
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
