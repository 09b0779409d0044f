//! Tries again what is [held](super) for want of space.

use std::collections::VecDeque;

use fabric_types::Command;
use fabric_types::ids::Version;
use fabric_types::io::{IoError, IoResult, Op, Tag};

use super::super::{Client, Transport};
use super::{Held, RETRY_US};

/// Pieces that others are in the way of, after which no more of a group are tried until the next tick.
const BLOCKED_MAX: usize = 16;

/// What a look at the pieces of a group is for that are held so.
#[derive(Debug, Clone, Copy)]
struct Round {
    /// How many may be tried; 0 if none is due.
    probes: usize,
    /// Those whose time is over are looked for.
    looks: bool,
    /// Some volume lets its pieces wait for less than before.
    is_shorter: bool,
}

/// What becomes of a held piece at such a look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Keep,
    /// It is its turn to be tried.
    Try,
    /// It is tried beside those.
    TryBeside,
    /// It is tried beside those for the last time, or ends if it cannot be.
    TryLast,
    End(IoError),
}

/// Why a piece cannot be tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hindrance {
    /// Others are in the way.
    Others,
    /// What it writes was cut off from the volume while it stood aside.
    CutOff,
}

impl Client {
    /// Time has passed: tries again what is due.
    pub(in super::super) fn retry_held<T: Transport>(
        &mut self,
        transport: &mut T,
        done: &mut dyn FnMut(Tag, IoResult),
    ) {
        if !self.full.has_held() {
            return;
        }
        let is_shorter = self.note_shorter_waits();
        let looks = is_shorter || self.full.look_us <= self.now_us;
        let groups = match looks {
            true => self.full.groups(),
            false => self.full.due_groups(self.now_us),
        };
        for group in groups {
            for held in [Held::Stored, Held::Untouched] {
                let Some(entry) = self.full.groups.get_mut(&group) else {
                    break;
                };
                let round = Round {
                    probes: entry.pieces(held).begin_round(self.now_us),
                    looks,
                    is_shorter,
                };
                if round.probes > 0 || looks {
                    self.go_through(group, held, round, transport, done);
                }
            }
            self.full.forget_empty(group);
        }
        if looks {
            self.full.look_us = self.now_us + RETRY_US;
            self.tell_held();
        }
    }

    /// Whether some volume lets its pieces wait for less than when this was asked last.
    fn note_shorter_waits(&mut self) -> bool {
        let mut is_shorter = false;
        for holding in &mut self.full.volumes {
            let wait_us = self.volumes[holding.slot].state.on_full_us();
            is_shorter |= wait_us < holding.wait_us;
            holding.wait_us = wait_us;
        }
        is_shorter
    }

    /// Looks at the pieces of a group that are held so.
    fn go_through<T: Transport>(
        &mut self,
        group: u16,
        held: Held,
        round: Round,
        transport: &mut T,
        done: &mut dyn FnMut(Tag, IoResult),
    ) {
        let Some(entry) = self.full.groups.get_mut(&group) else {
            return;
        };
        let mut queue = std::mem::take(&mut entry.pieces(held).keys);
        let (mut kept, mut blocked) = (VecDeque::new(), VecDeque::new());
        let mut tried = 0;
        while let Some(key) = queue.pop_front() {
            let may_try = tried < round.probes && blocked.len() < BLOCKED_MAX;
            if !may_try && !round.looks && held == Held::Untouched {
                kept.push_back(key);
                break;
            }
            let piece = self.pieces.find(key);
            let Some(piece) = piece.filter(|&p| self.pieces[p].space.held == held) else {
                continue;
            };
            let fate = self.fate(piece, round, may_try);
            let hindrance = match fate {
                Fate::Keep => {
                    kept.push_back(key);
                    continue;
                }
                Fate::End(error) => {
                    self.end_held(piece, error, transport, done);
                    continue;
                }
                Fate::Try | Fate::TryBeside | Fate::TryLast => self.step_back(piece).err(),
            };
            match hindrance {
                Some(Hindrance::CutOff) => {
                    self.end_held(piece, IoError::OutOfRange, transport, done);
                }
                Some(Hindrance::Others) if fate == Fate::TryLast => {
                    self.end_held(piece, IoError::NoSpace, transport, done);
                }
                Some(Hindrance::Others) => blocked.push_back(key),
                None => {
                    tried += usize::from(fate == Fate::Try);
                    self.try_held(piece, tried.max(1), transport, done);
                }
            }
        }
        kept.append(&mut queue);
        // Whoever is in the way of these may not be in the way of the others.
        kept.append(&mut blocked);
        let pieces = self.full.groups.entry(group).or_default().pieces(held);
        pieces.end_round(kept, round.probes, self.now_us);
    }

    /// What becomes of a piece that is held; `may_try`: it is its turn.
    fn fate(&mut self, piece: u32, round: Round, may_try: bool) -> Fate {
        let slot = &self.pieces[piece];
        let is_untouched = slot.space.held == Held::Untouched;
        let is_discard = matches!(slot.request.command, Command::Zero { .. });
        // Another piece of its request has failed.
        if let Some(error) = self.ios[slot.io].error.filter(|_| is_untouched) {
            return Fate::End(error);
        }
        if round.looks && self.has_waited(piece) {
            let ends_at_once = self.wait_us(piece) == 0;
            if is_untouched {
                return match ends_at_once {
                    true => Fate::End(IoError::NoSpace),
                    false => Fate::TryLast,
                };
            }
            self.report_full(piece);
            if ends_at_once && round.is_shorter {
                return Fate::TryBeside;
            }
        }
        match (may_try, round.probes > 0) {
            // It keeps all others away, and sends no data.
            (_, true) if is_discard && !is_untouched => Fate::TryBeside,
            (true, _) => Fate::Try,
            (false, _) => Fate::Keep,
        }
    }

    /// Asks for a map without those that have no space for a piece whose time is over, if it can be done
    /// without them. None that was tried since they refused has been stored.
    fn report_full(&mut self, piece: u32) {
        let slot = &self.pieces[piece];
        let entry = self.full.groups.get(&slot.group);
        let set = self.groups.set(slot.group);
        let full = slot.answers.full(set);
        let is_full = entry.is_some_and(|entry| entry.stored.refused_us.is_some());
        if is_full && !full.is_empty() && self.can_do_without(piece, full) {
            self.report(piece, full);
        }
    }

    /// Tries a piece, the `nth` of its kind in this round.
    fn try_held<T: Transport>(
        &mut self,
        piece: u32,
        nth: usize,
        transport: &mut T,
        done: &mut dyn FnMut(Tag, IoResult),
    ) {
        let slot = &self.pieces[piece];
        let state = &self.ios[slot.io];
        let keeps_away = state.entered || state.op == Op::Flush;
        assert!(keeps_away, "sent while others may be in the way");
        if let Some(entry) = self.full.groups.get_mut(&slot.group) {
            let tried = &mut entry.pieces(slot.space.held).tried;
            *tried = nth.max(*tried);
        }
        self.release(piece);
        self.ask_again(piece);
        self.go_on(piece, transport, done);
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

    /// Tells volumes how long their writes have been held.
    fn tell_held(&mut self) {
        let volumes = self.volumes.iter_mut();
        volumes.for_each(|local| local.held_for_us = 0);
        let entries = self.full.groups.values();
        for key in entries.flat_map(|entry| entry.stored.keys.iter().chain(&entry.untouched.keys)) {
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

    /// Comes back from having stepped aside, for a piece that is to be tried. What came meanwhile has a newer
    /// number, so the piece gets one that is newer still.
    fn step_back(&mut self, piece: u32) -> Result<(), Hindrance> {
        let io = self.pieces[piece].io;
        if self.ios[io].has_stepped_aside {
            self.enter(io).map_err(|_| Hindrance::Others)?;
            self.ios[io].has_stepped_aside = false;
            // Whoever makes a volume smaller waits for those that have entered.
            let state = &self.ios[io];
            let size_bytes = self.volumes[state.volume].state.size_bytes();
            if state.offset + state.len > size_bytes {
                return Err(Hindrance::CutOff);
            }
        }
        let slot = &mut self.pieces[piece];
        let number = self.ios[io].number;
        let own = Version::of(slot.request.generation, slot.request.sequence);
        if slot.answers.is_untouched() && own < number {
            (slot.request.generation, slot.request.sequence) = number.parts();
            slot.answers.forget();
        }
        Ok(())
    }
}
