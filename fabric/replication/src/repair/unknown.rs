//! Taking a block over from other replicas in sync that this one, in sync as well, knows nothing of: its map
//! page cannot be read.
//!
//! That is no repair but a change, and no lease is held for it. It must undo no write that this replica has
//! said to have, and hide none that is unresolved:
//! - All others in sync are asked what the block is, and those that know have to agree. Where they do not, a
//!   write is under way, or a lease recovery is to come.
//! - Whoever drives this knows the newest write of the block that this replica remembers as unresolved. That
//!   may be here and nowhere else; what the others have must be as new. (A resolved one is everywhere.)
//! - From before they are asked until the change writes that come are noted, see [`Group::watch`]. With one
//!   the block is left alone.
//! - The writes that the source takes for unresolved are remembered here, too, before the block is changed:
//!   one of them may have written it, and this replica may be the only one left that has it.
//!
//! [`Group::watch`]: crate::groups::Group::watch

use fabric_types::block::{BlockStamp, Holds};
use fabric_types::ids::Version;
use fabric_types::membership::{Member, REPLICAS_MAX};
use fabric_types::message::UnresolvedEntry;
use fabric_types::{Command, NodeId, Refusal};

use crate::block_copy::{BlockCopy, Place};
use crate::unresolved::told::ToldWrites;

/// What was asked last; of the source of this index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// What the block is there.
    Inspect(usize),
    /// Its content.
    Fetch(usize),
    /// What it takes for unresolved.
    Remember(usize),
    /// This replica is to take it over.
    Restore(usize),
}

/// What comes next.
#[derive(Debug)]
pub(super) enum UnknownNext {
    /// A question to one of the others.
    Ask(Member, Command),
    /// The block is changed here. Before that this replica remembers these writes of the layer.
    Restore(Vec<UnresolvedEntry>, Command),
    /// It is what it is there.
    Done(NodeId),
    /// The block is left alone for now.
    NotNow,
}

/// See the module. Of one block. While a command is in flight its memory is in use.
#[derive(Debug)]
pub(super) struct UnknownRepair {
    step: Step,
    /// All others in sync.
    sources: Vec<Member>,
    /// What each of them has.
    copy: BlockCopy<REPLICAS_MAX, 1, 1>,
    /// The newest write that this replica remembers.
    newest: Version,
    told: Option<ToldWrites>,
}

impl UnknownRepair {
    /// Of a block that the others have, and of which this write is the newest that may be here alone.
    pub(super) fn new(place: Place, sources: Vec<Member>, newest: Version) -> Self {
        Self {
            step: Step::Inspect(0),
            sources,
            copy: BlockCopy::new(place),
            newest,
            told: None,
        }
    }

    /// The first question.
    pub(super) fn begin(&mut self) -> UnknownNext {
        match self.sources.is_empty() {
            true => UnknownNext::NotNow,
            false => self.ask(Step::Inspect(0)),
        }
    }

    /// The answer to the command that was given out last.
    pub(super) fn on_answer(&mut self, result: Result<(), Refusal>) -> UnknownNext {
        let is_data = |at: usize| self.stamp(at).holds() == Holds::Data;
        match (self.step, result) {
            (Step::Inspect(at), Ok(())) if at + 1 < self.sources.len() => {
                self.ask(Step::Inspect(at + 1))
            }
            (Step::Inspect(_), Ok(())) => match self.known() {
                Some(at) if is_data(at) => self.ask(Step::Fetch(at)),
                Some(at) => self.ask(Step::Remember(at)),
                None => UnknownNext::NotNow,
            },
            (Step::Fetch(at), Ok(())) if self.copy.is_as_inspected(at, 0..1) => {
                self.ask(Step::Remember(at))
            }
            (Step::Fetch(at), Ok(()) | Err(_)) => match self.next_known(at + 1) {
                Some(at) => self.ask(Step::Fetch(at)),
                None => UnknownNext::NotNow,
            },
            (Step::Remember(at), Ok(())) => self.restore(at),
            (Step::Restore(at), Ok(())) => UnknownNext::Done(self.sources[at].node),
            (_, Err(_)) => UnknownNext::NotNow,
        }
    }

    /// What the block is on a source.
    fn stamp(&self, at: usize) -> BlockStamp {
        self.copy.stamps()[at][0]
    }

    fn next_known(&self, from: usize) -> Option<usize> {
        (from..self.sources.len()).find(|&at| !self.stamp(at).is_unknown())
    }

    /// The first source that knows the block, if all that do agree and what they have is new enough.
    fn known(&self) -> Option<usize> {
        let first = self.next_known(0)?;
        let stamp = self.stamp(first);
        let others = (first..self.sources.len()).map(|at| self.stamp(at));
        let mut known = others.filter(|other| !other.is_unknown());
        let do_agree = known.all(|other| other.agrees_with(&stamp));
        (do_agree && stamp.version >= self.newest.0).then_some(first)
    }

    fn ask(&mut self, step: Step) -> UnknownNext {
        self.step = step;
        let (Step::Inspect(at) | Step::Fetch(at) | Step::Remember(at) | Step::Restore(at)) = step;
        let command = match step {
            Step::Inspect(at) => self.copy.inspect(at, 0..1),
            Step::Fetch(_) => self.copy.read(0..1),
            Step::Remember(_) | Step::Restore(_) => {
                let told = self.told.insert(ToldWrites::new());
                told.command(self.copy.chunk().layer)
            }
        };
        UnknownNext::Ask(self.sources[at], command)
    }

    fn restore(&mut self, at: usize) -> UnknownNext {
        let told = self.told.as_ref().expect("the source was asked");
        let unresolved = told.unresolved();
        if unresolved.contains(&UnresolvedEntry::EVERYTHING) {
            // Taken over it would never be forgotten, and every lease recovery compare the whole layer.
            return UnknownNext::NotNow;
        }
        self.step = Step::Restore(at);
        let stamp = self.stamp(at);
        let data = (stamp.holds() == Holds::Data).then_some(0);
        let stamps = [BlockStamp::UNKNOWN, stamp];
        UnknownNext::Restore(unresolved, self.copy.restore(0, stamps, data))
    }
}
