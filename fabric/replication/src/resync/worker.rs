//! One worker of a round: compares a map page and takes over what differs, then the next one.

use std::collections::BTreeSet;

use fabric_types::block::{BlockStamp, Holds, LEAF_BLOCKS};
use fabric_types::{Command, Refusal};

use super::unread::Unreadable;
use super::{Progress, RoundFailure, TRIES_MAX};
use crate::block_copy::{BlockCopy, Place};
use crate::groups::{LeafKey, Touched};

/// Blocks read from the source at a time.
pub const RUN_BLOCKS: usize = 16;

const BLOCKS: usize = LEAF_BLOCKS as usize;
/// The sides of the comparison.
const SOURCE: usize = 0;
const HERE: usize = 1;

/// Who executes a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The source.
    Source,
    /// This node's store.
    Here,
}

/// A page that has been compared.
#[derive(Debug, PartialEq, Eq)]
pub struct PageOutcome {
    pub leaf: LeafKey,
    /// Blocks that this side lacks and the source cannot read, and what they are by its map.
    pub unread: Vec<(u32, BlockStamp)>,
    /// Blocks that neither side knows.
    pub unknown: Vec<u32>,
}

/// What follows a worker's step.
#[derive(Debug)]
pub enum Step {
    /// Have these executed; each is answered by another step.
    Do(Vec<(Side, Command)>),
    /// More answers are due.
    Wait,
    /// The page agrees, but for what the source could not read.
    Compared(PageOutcome),
    /// It agrees but for blocks that clients are writing: look again in a moment.
    Later(LeafKey),
    /// The round is over.
    Failed(RoundFailure),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    Begun,
    Inspecting,
    /// The run `first..end` is read from the source.
    Reading {
        first: usize,
        end: usize,
    },
    /// The blocks of the run are stored here; `is_lost`: without their data; `is_gain`: this side has
    /// something then that it lacked.
    Restoring {
        first: usize,
        end: usize,
        is_lost: bool,
        is_gain: bool,
    },
}

/// See the module.
#[derive(Debug)]
pub struct Worker {
    state: State,
    leaf: Option<LeafKey>,
    copy: BlockCopy<2, BLOCKS, RUN_BLOCKS>,
    /// Answers due.
    waiting: u32,
    /// The page changed while it was being compared.
    again: bool,
    tries: u32,
    refused: Option<Refusal>,
    /// Blocks below this one are read one at a time: a run with one of them could not be read.
    one_by_one: usize,
    /// Blocks that the source could not read.
    unread: Vec<u32>,
    /// Blocks that neither side knows, which this side has recorded.
    unknown: Vec<u32>,
    /// Blocks that cannot be read here, and have not been taken over.
    bad: BTreeSet<usize>,
}

impl Worker {
    pub fn new() -> Self {
        Self {
            state: State::Idle,
            leaf: None,
            copy: BlockCopy::new(Place::NONE),
            waiting: 0,
            again: false,
            tries: 0,
            refused: None,
            one_by_one: 0,
            unread: Vec::new(),
            unknown: Vec::new(),
            bad: BTreeSet::new(),
        }
    }

    pub fn is_idle(&self) -> bool {
        self.state == State::Idle
    }

    /// The page it is at.
    pub fn leaf(&self) -> Option<LeafKey> {
        self.leaf
    }

    /// Takes a page on; the first [`step`](Self::step) follows.
    pub fn begin(&mut self, leaf: LeafKey) {
        self.leaf = Some(leaf);
        self.copy.go_to(Place::of(leaf));
        self.state = State::Begun;
        self.tries = 0;
    }

    /// An answer is there (or the page was just begun). `touched` is what clients have done to the page in
    /// this receiving period.
    pub fn step(
        &mut self,
        result: Result<(), Refusal>,
        touched: &Touched,
        known: &Unreadable,
        progress: &mut Progress,
    ) -> Step {
        match (result, self.state) {
            (Ok(()), State::Restoring { is_gain, .. }) => progress.blocks += u64::from(is_gain),
            (Ok(()), _) => {}
            (Err(Refusal::Changed | Refusal::Mismatch), _) => self.again = true,
            // What is refused for another reason may be read in a moment, or once the node is started again:
            // the round fails.
            (Err(refusal), State::Reading { first, end }) if refusal.is_unreadable() => {
                self.waiting = 0;
                return self.unreadable((first, end), (touched, known), progress);
            }
            (Err(refusal), _) => self.refused = self.refused.or(Some(refusal)),
        }
        self.waiting = self.waiting.saturating_sub(1);
        if self.waiting > 0 {
            return Step::Wait;
        }
        if let Some(refusal) = self.refused {
            return Step::Failed(RoundFailure::Source(refusal));
        }
        match self.state {
            State::Idle => Step::Wait,
            State::Begun => {
                self.note_bad(known);
                self.inspect()
            }
            State::Inspecting => {
                progress.leaves += u64::from(self.tries == 0);
                self.go_on(0, (touched, known), progress)
            }
            State::Reading { first, end } => {
                // A discard leaves no version behind where nothing is mapped: only by the notes is it known
                // that the block was written while it was being read from the source.
                let written = (first..end).any(|i| touched.is_noted(i));
                if self.again || written || !self.copy.is_as_inspected(SOURCE, first..end) {
                    return self.try_again();
                }
                self.restore((first, end), true)
            }
            State::Restoring { .. } if self.again => self.try_again(),
            State::Restoring {
                first,
                end,
                is_lost,
                is_gain,
            } => {
                let is_newer = |&i: &usize| self.here(i).version > self.source(i).version;
                progress.dropped += (first..end).filter(is_newer).count() as u64;
                self.copy.note_copied(SOURCE, HERE, first..end);
                self.bad.retain(|i| !(first..end).contains(i));
                if is_lost && self.source(first).is_unknown() {
                    self.unknown.push(first as u32);
                }
                if is_lost && is_gain {
                    self.tell_lost(first);
                    progress.lost += 1;
                }
                self.go_on(end, (touched, known), progress)
            }
        }
    }

    /// What the source has.
    fn source(&self, i: usize) -> BlockStamp {
        self.copy.stamps()[SOURCE][i]
    }

    /// What this side has.
    fn here(&self, i: usize) -> BlockStamp {
        self.copy.stamps()[HERE][i]
    }

    fn send(&mut self, commands: Vec<(Side, Command)>) -> Step {
        self.waiting = commands.len() as u32;
        Step::Do(commands)
    }

    fn try_again(&mut self) -> Step {
        self.tries += 1;
        if self.tries >= TRIES_MAX {
            return Step::Failed(RoundFailure::Busy);
        }
        self.inspect()
    }

    /// The source has blocks of a run that it cannot read: which, is found by reading them one by one.
    fn unreadable(
        &mut self,
        (first, end): (usize, usize),
        (touched, known): (&Touched, &Unreadable),
        progress: &mut Progress,
    ) -> Step {
        if end - first > 1 {
            self.one_by_one = end;
            return self.go_on(first, (touched, known), progress);
        }
        if touched.is_noted(first) {
            return self.try_again();
        }
        let stamp = self.source(first);
        if self.agrees(first) && !stamp.is_unknown() {
            // Neither side can: this one lacks nothing that the source has, and what is here is not kept for
            // a write of it that comes again. The store refuses unless it has met the damage itself.
            self.bad.remove(&first);
            return self.restore((first, end), false);
        }
        let leaf = self.leaf.expect("a page is being compared");
        let block = first as u32;
        // What is known here is not given up for what the source does not know: it may be the last good copy.
        // A side that has nothing of the block, as a new one, has nothing to give up: or none could be added
        // while the only source has lost a page.
        let here = self.here(first);
        let is_blank = here == BlockStamp::default();
        let would_forget = stamp.is_unknown() && !here.is_unknown() && !is_blank;
        if known.lost.get(&(leaf, block)) == Some(&stamp) && !would_forget {
            // Also if it is not known here either: what the map page says, should it be read one day, may be
            // out of date on this side.
            return self.restore((first, end), false);
        }
        // With several sources another one may have given this block in an earlier round, and cannot give a
        // block that this one gives. That is no reason to be done with it: of writes that only that one takes
        // for unresolved this side would not know. The sources get what they lack from each other.
        self.unread.push(block);
        self.go_on(end, (touched, known), progress)
    }

    /// A block is known to be lost on this side, too.
    fn tell_lost(&self, block: usize) {
        tracing::error!(
            block = self.copy.block(block),
            chunk = ?self.copy.chunk(),
            "no replica in sync can read the block: its data are lost"
        );
    }

    fn inspect(&mut self) -> Step {
        self.again = false;
        self.one_by_one = 0;
        self.unread.clear();
        self.unknown.clear();
        self.state = State::Inspecting;
        let source = self.copy.inspect(SOURCE, 0..BLOCKS);
        let here = self.copy.inspect(HERE, 0..BLOCKS);
        self.send(vec![(Side::Source, source), (Side::Here, here)])
    }

    /// Whether block `i` is to be taken over: it differs, or cannot be read here, and not because a client is
    /// just writing it.
    fn differs(&self, i: usize, touched: &Touched) -> bool {
        !touched.is_noted(i) && (!self.agrees(i) || self.is_bad(i))
    }

    /// Whether block `i` cannot be read here. That neither side knows what it is is no agreement: another
    /// source may know.
    fn is_bad(&self, i: usize) -> bool {
        let is_bad = self.bad.contains(&i) && self.source(i).holds() == Holds::Data;
        is_bad || self.here(i).is_unknown()
    }

    fn note_bad(&mut self, known: &Unreadable) {
        let leaf = self.leaf.expect("a page is being compared");
        let of_page = known.here.range((leaf, 0)..(leaf, LEAF_BLOCKS));
        self.bad = of_page.map(|(_, block)| *block as usize).collect();
    }

    fn agrees(&self, i: usize) -> bool {
        self.source(i).agrees_with(&self.here(i))
    }

    /// Whether block `i` differs, and a client has sent a write to it of which it is not known that it is
    /// stored here: it may be about to be, or have failed. The same if one is stored, and the source has a
    /// newer: that may be about to come.
    fn is_unclear(&self, i: usize, touched: &Touched) -> bool {
        let (source, here) = (self.source(i), self.here(i));
        let lags = source.holds() != Holds::Nothing && source.version >= here.version;
        touched.is_noted(i) && (!touched.is_stored(i) || lags) && !self.agrees(i)
    }

    /// Nothing is left to be taken over.
    fn end(&mut self, touched: &Touched) -> Step {
        let leaf = self.leaf.take().expect("a page is being compared");
        self.state = State::Idle;
        if (0..BLOCKS).any(|i| self.is_unclear(i, touched)) {
            return Step::Later(leaf);
        }
        let unread = self.unread.iter();
        let unread = unread.map(|&block| (block, self.source(block as usize)));
        Step::Compared(PageOutcome {
            leaf,
            unread: unread.collect(),
            unknown: self.unknown.clone(),
        })
    }

    /// Takes over the next run of blocks from `at` on.
    fn go_on(
        &mut self,
        at: usize,
        (touched, known): (&Touched, &Unreadable),
        progress: &mut Progress,
    ) -> Step {
        let Some(first) = (at..BLOCKS).find(|&i| self.differs(i, touched)) else {
            return self.end(touched);
        };
        if self.source(first).is_unknown() {
            // It cannot be read there, which need not be tried.
            return self.unreadable((first, first + 1), (touched, known), progress);
        }
        let is_data = |i: usize| self.source(i).holds() == Holds::Data;
        let most = match first < self.one_by_one {
            true => first + 1,
            false => BLOCKS.min(first + RUN_BLOCKS),
        };
        let is_known = |i: usize| !self.source(i).is_unknown();
        let alike =
            |&i: &usize| self.differs(i, touched) && is_known(i) && is_data(i) == is_data(first);
        let end = first + (first..most).take_while(alike).count();
        if !is_data(first) {
            return self.restore((first, end), true);
        }
        self.state = State::Reading { first, end };
        let read = self.copy.read(first..end);
        self.send(vec![(Side::Source, read)])
    }

    /// Makes the run what the source has; without its data if they are lost.
    fn restore(&mut self, (first, end): (usize, usize), has_data: bool) -> Step {
        let differs = !self.agrees(first);
        self.state = State::Restoring {
            first,
            end,
            is_lost: !has_data,
            is_gain: has_data || differs,
        };
        let mut commands = Vec::with_capacity(end - first);
        for (nth, i) in (first..end).enumerate() {
            let (source, here) = (self.source(i), self.here(i));
            let has_data = has_data && source.holds() == Holds::Data;
            if here.version == source.version && here.crc != source.crc && has_data {
                tracing::error!(
                    block = self.copy.block(i),
                    chunk = ?self.copy.chunk(),
                    "two replicas hold different data under one version; the source's are taken"
                );
            }
            let nth = has_data.then_some(nth);
            let command = self.copy.restore(i, [here, source], nth);
            commands.push((Side::Here, command));
        }
        self.send(commands)
    }
}

#[cfg(test)]
mod tests;
