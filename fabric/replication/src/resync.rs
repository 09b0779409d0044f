//! The machine that brings a returning replica up to date: it compares this node's replica of a placement
//! group with that of an in-sync source, map page by map page, and takes over what differs. See
//! `docs/REPLICATION.md`.
//!
//! Events in: [`Resync::on_reply`] (the source's answers) and [`Resync::on_local`] (this node's store).
//! Actions out: [`Resync::poll`]. Pages are compared by a fixed number of workers, each with memory of its
//! own; what the shell allows at a time is its throttle. The same chunks are listed on both sides, for what
//! this side has in excess has to go, too.

mod listing;
mod memories;
mod outbox;
mod pages;
pub mod rounds;
mod unread;
mod worker;

use std::collections::BTreeSet;
use std::time::Duration;

use super::groups::{Groups, LeafKey, Touched};
use super::replica::StoreFailure;
use fabric_types::block::BlockStamp;
use fabric_types::ids::LayerId;
use fabric_types::message::UnresolvedEntry;
use fabric_types::{Command, Epoch, Generation, NodeId, PgId, Refusal};
use memories::Memories;
use outbox::{Outbox, Purpose};
use pages::Pages;
use unread::UNREAD_MAX;
pub use unread::{BlockKey, Lost, Unreadable};
use worker::{PageOutcome, Side, Step, Worker};

pub use crate::calls::Call;

/// Pages compared at a time.
pub const WORKERS: usize = 4;
/// One more for pages that clients' writes wait for: it takes no others, and is not held back.
const WANTED_WORKER: u32 = WORKERS as u32;
/// How often a page is compared anew at once because it changed meanwhile; then the round fails.
const TRIES_MAX: u32 = 1000;
/// How often [`Resync::on_tick`] is called while something waits for it.
pub const TICK: Duration = Duration::from_millis(10);

/// What the shell is to do.
#[derive(Debug)]
pub enum Action {
    /// Send the command to the source, for the group and under the newest map that this node knows.
    Ask(Call, Command),
    /// Execute the command on this node's own store, past its fences, if [`still_untouched`] allows it in the
    /// moment in which the store takes it.
    ///
    /// [`still_untouched`]: super::replica::store_op::still_untouched
    Local(Call, Command),
    /// Refuse the layer's writes of older leases, and requests of older maps, from now on, durably.
    Fence(Call, LayerId, Generation, Epoch),
    /// Everything agrees and is durable here: ask meta to promote.
    Promote,
    /// The round is over in vain.
    Failed(RoundFailure),
}

impl Action {
    fn call(&self) -> Option<Call> {
        match self {
            Self::Ask(call, _) | Self::Local(call, _) | Self::Fence(call, ..) => Some(*call),
            Self::Promote | Self::Failed(_) => None,
        }
    }
}

/// Why a round failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoundFailure {
    /// The source refused, or is lost: another one may do.
    Source(Refusal),
    /// This node's store failed.
    Store(StoreFailure),
    /// The source cannot read blocks that this replica lacks ([`Resync::take_unread`]); all else has been
    /// taken over.
    Unread,
    /// A page would not hold still, or a write to it has no end: its client may be gone. A round that begins
    /// in the same stay would find it so again: this replica is to be reported to meta, by itself, so that it
    /// begins a new one.
    Busy,
}

/// How far a round is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Map pages compared.
    pub leaves: u64,
    /// Blocks taken over from the source.
    pub blocks: u64,
    /// Blocks that only this side had, which are gone.
    pub dropped: u64,
    /// Blocks whose data no replica in sync could read, which are known to be lost on this side, too.
    pub lost: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Join,
    Compare,
    /// All is compared; the source is asked what it remembers.
    Remember,
    Flush,
    /// Meta was asked. Writes go on to ask who may write their layers until it has answered.
    Promoted,
    Over,
}

/// See the module.
#[derive(Debug)]
pub struct Resync {
    pg: PgId,
    since: Epoch,
    source: NodeId,
    phase: Phase,
    pages: Pages,
    workers: Vec<Worker>,
    memories: Memories,
    known: Unreadable,
    /// Blocks that this source could not read.
    unread: Lost,
    /// Blocks that neither side knows: on that they agree.
    unknown: BTreeSet<BlockKey>,
    outbox: Outbox,
    progress: Progress,
}

// SAFETY: the iovecs point into memory that the machine owns.
unsafe impl Send for Resync {}

impl Resync {
    /// A round for this node's replica of `pg`, which is syncing since `since`; `source` is in sync.
    #[must_use]
    pub fn new(pg: PgId, since: Epoch, source: NodeId) -> Self {
        let mut round = Self {
            pg,
            since,
            source,
            phase: Phase::Join,
            pages: Pages::new(),
            workers: (0..=WORKERS).map(|_| Worker::new()).collect(),
            memories: Memories::default(),
            known: Unreadable::default(),
            unread: Lost::new(),
            unknown: BTreeSet::new(),
            outbox: Outbox::new(),
            progress: Progress::default(),
        };
        // From now on every write reaches this replica, or is refused by the source.
        round.outbox.ask(Purpose::Join, Command::Join);
        round
    }

    /// The same, with what is known already.
    #[must_use]
    pub fn knowing(mut self, known: Unreadable) -> Self {
        self.known = known;
        self
    }

    /// Blocks that the source could not read so far, and what they are by its map; also those that neither
    /// side knows. Another source may, and that nobody does is found out only once.
    pub fn take_unread(&mut self) -> Lost {
        let unknown = std::mem::take(&mut self.unknown).into_iter();
        let unknown = unknown.map(|key| (key, BlockStamp::UNKNOWN));
        let mut unread = std::mem::take(&mut self.unread);
        unread.extend(unknown);
        unread
    }

    /// The group.
    pub fn pg(&self) -> PgId {
        self.pg
    }

    /// The epoch at which this replica became syncing: the promotion is for this round only.
    pub fn since(&self) -> Epoch {
        self.since
    }

    /// Who is compared with.
    pub fn source(&self) -> NodeId {
        self.source
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        self.progress
    }

    /// Whether it has ended, well or not.
    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over | Phase::Promoted)
    }

    /// Next thing to do.
    pub fn poll(&mut self, groups: &Groups) -> Option<Action> {
        if let Some(action) = self.poll_urgent(groups) {
            return Some(action);
        }
        if self.outbox.lacks_comparisons() {
            self.go_on(groups);
        }
        self.outbox.next()
    }

    /// Next thing to do that is not to be held back: what clients' writes wait for, what ends the round, and
    /// what has been paid for when its reads were begun.
    pub fn poll_urgent(&mut self, groups: &Groups) -> Option<Action> {
        if !matches!(self.phase, Phase::Join | Phase::Over) {
            self.ask_fences(groups);
        }
        if self.phase == Phase::Compare
            && self.workers[WANTED_WORKER as usize].is_idle()
            && let Some(leaf) = groups.get(self.pg).and_then(|group| group.take_wanted())
        {
            self.workers[WANTED_WORKER as usize].begin(leaf);
            self.step(WANTED_WORKER, Ok(()), groups);
        }
        self.outbox.next_urgent()
    }

    /// The source answered. Answers to calls of an earlier life are ignored.
    pub fn on_reply(&mut self, call: Call, result: Result<(), Refusal>, groups: &Groups) {
        let Some(purpose) = self.outbox.end_call(call) else {
            return;
        };
        if self.phase == Phase::Over {
            return;
        }
        match (purpose, result) {
            (Purpose::Worker(worker), result) => self.step(worker, result, groups),
            (_, Err(Refusal::Behind(_))) => {
                // The source does not know this replica's map yet; it will within moments.
                self.fail(RoundFailure::Source(Refusal::Behind(self.since)));
            }
            (_, Err(refusal)) => self.fail(RoundFailure::Source(refusal)),
            (Purpose::Join, Ok(())) => self.phase = Phase::Compare,
            (Purpose::ListSource, Ok(())) => self.pages.take_listed(Side::Source),
            (Purpose::TellFence(layer), Ok(())) => self.fence(layer, groups),
            (Purpose::Remember(layer), Ok(())) => self.remembered(layer),
            (
                Purpose::ListLocal | Purpose::Flush | Purpose::Fence(_) | Purpose::FenceRemembered,
                Ok(()),
            ) => {}
        }
    }

    /// The source has told its fence of a layer.
    fn fence(&mut self, layer: LayerId, groups: &Groups) {
        if let Some(told) = self.memories.take_fence(layer) {
            self.outbox.raise(Purpose::Fence(layer), layer, told);
        } else if let Some(group) = groups.get(self.pg) {
            group.fenced(layer);
        }
    }

    /// Asks the source who may write layers whose writes wait for that.
    fn ask_fences(&mut self, groups: &Groups) {
        while let Some(layer) = groups.get(self.pg).and_then(|g| g.take_to_fence()) {
            if let Some(command) = self.memories.ask_fence(layer) {
                self.outbox.ask(Purpose::TellFence(layer), command);
            }
        }
    }

    /// This node's store is done with a call.
    pub fn on_local(&mut self, call: Call, result: Result<(), StoreFailure>, groups: &Groups) {
        let Some(purpose) = self.outbox.end_call(call) else {
            return;
        };
        if self.phase == Phase::Over {
            return;
        }
        match (purpose, result) {
            (Purpose::Worker(worker), Ok(())) => self.step(worker, Ok(()), groups),
            (Purpose::Worker(worker), Err(StoreFailure::Changed)) => {
                self.step(worker, Err(Refusal::Changed), groups);
            }
            (Purpose::Worker(worker), Err(StoreFailure::Mismatch)) => {
                self.step(worker, Err(Refusal::Mismatch), groups);
            }
            (_, Err(failure)) => self.fail(RoundFailure::Store(failure)),
            (Purpose::ListLocal, Ok(())) => self.pages.take_listed(Side::Here),
            (Purpose::Flush, Ok(())) => {
                self.phase = Phase::Promoted;
                self.outbox.tell(Action::Promote);
            }
            (Purpose::FenceRemembered, Ok(())) => self.remember(),
            (Purpose::Fence(layer), Ok(())) => {
                if let Some(group) = groups.get(self.pg) {
                    group.fenced(layer);
                }
            }
            (
                Purpose::Join | Purpose::ListSource | Purpose::TellFence(_) | Purpose::Remember(_),
                Ok(()),
            ) => {}
        }
    }

    /// A [`TICK`] has passed: looks once more at the pages that a client was writing.
    pub fn on_tick(&mut self) {
        self.pages.on_tick();
    }

    /// Whether something waits for the next tick.
    pub fn needs_tick(&self) -> bool {
        !self.is_over() && self.pages.needs_tick()
    }

    fn go_on(&mut self, groups: &Groups) {
        if self.phase != Phase::Compare {
            return;
        }
        for worker in 0..WORKERS as u32 {
            if !self.workers[worker as usize].is_idle() {
                continue;
            }
            let wanted = groups.get(self.pg).and_then(|group| group.take_wanted());
            let Some(leaf) = wanted.or_else(|| self.next_leaf()) else {
                break;
            };
            self.workers[worker as usize].begin(leaf);
            self.step(worker, Ok(()), groups);
        }
        let is_idle = self.workers.iter().all(Worker::is_idle);
        if is_idle && self.pages.is_empty() && self.phase == Phase::Compare {
            if !self.unread.is_empty() {
                return self.fail(RoundFailure::Unread);
            }
            if let Some(group) = groups.get(self.pg) {
                group.all_compared();
            }
            self.phase = Phase::Remember;
            self.memories.begin(self.pages.layers());
            self.remember();
        }
    }

    /// Asks about the next layer; behind the last one comes the flush.
    fn remember(&mut self) {
        if let Some((layer, command)) = self.memories.next() {
            self.outbox.ask(Purpose::Remember(layer), command);
            return;
        }
        self.phase = Phase::Flush;
        let layer = LayerId(0);
        self.outbox.local(Purpose::Flush, Command::Flush { layer });
    }

    /// The source has told what it remembers of a layer.
    fn remembered(&mut self, layer: LayerId) {
        match self.memories.take_answer(layer) {
            Some(fence) => self.outbox.raise(Purpose::FenceRemembered, layer, fence),
            None => self.remember(),
        }
    }

    /// Unresolved writes that the source has told of since the last call: this replica has them, too, and is
    /// to remember them before it is promoted.
    pub fn take_unresolved(&mut self) -> Vec<(LayerId, Vec<UnresolvedEntry>)> {
        self.memories.take_unresolved()
    }

    /// The next page to compare; asks for more chunks when there are few.
    fn next_leaf(&mut self) -> Option<LeafKey> {
        let next = self.pages.next();
        if next.is_none() {
            match self.pages.list_more() {
                Some((Side::Source, command)) => self.outbox.ask(Purpose::ListSource, command),
                Some((Side::Here, command)) => self.outbox.local(Purpose::ListLocal, command),
                None => {}
            }
        }
        next
    }

    /// A worker has what it waited for.
    fn step(&mut self, worker: u32, result: Result<(), Refusal>, groups: &Groups) {
        let state = &mut self.workers[worker as usize];
        let group = groups.get(self.pg);
        let touched = match (&group, state.leaf()) {
            (Some(group), Some(leaf)) => group.touched(leaf),
            _ => Touched::NOTHING,
        };
        match state.step(result, &touched, &self.known, &mut self.progress) {
            Step::Do(commands) => {
                for (side, command) in commands {
                    match side {
                        Side::Source => self.outbox.ask(Purpose::Worker(worker), command),
                        Side::Here => self.outbox.local(Purpose::Worker(worker), command),
                    }
                }
            }
            Step::Wait => {}
            Step::Compared(page) => self.note_compared(page, groups),
            Step::Later(leaf) => {
                if !self.pages.postpone(leaf) {
                    self.fail(RoundFailure::Busy);
                }
            }
            Step::Failed(why) => self.fail(why),
        }
    }

    fn note_compared(&mut self, page: PageOutcome, groups: &Groups) {
        let leaf = page.leaf;
        self.pages.note_compared(leaf);
        self.unread.retain(|(of, _), _| *of != leaf);
        self.unknown.retain(|(of, _)| *of != leaf);
        let unknown = page.unknown.into_iter().map(|block| (leaf, block));
        self.unknown.extend(unknown);
        if page.unread.is_empty() {
            if let Some(group) = groups.get(self.pg) {
                group.compared(leaf);
            }
            return;
        }
        let unread = page.unread.into_iter();
        let unread = unread.map(|(block, stamp)| ((leaf, block), stamp));
        self.unread.extend(unread);
        if self.unread.len() > UNREAD_MAX {
            self.fail(RoundFailure::Source(Refusal::Corrupt));
        }
    }

    fn fail(&mut self, why: RoundFailure) {
        self.give_up();
        self.outbox.tell(Action::Failed(why));
    }

    /// The round is over: nothing more is asked, and answers that are due only free the memory they are
    /// written to.
    pub fn give_up(&mut self) {
        self.phase = Phase::Over;
        self.outbox.clear();
    }

    /// Calls whose answers are due: until they are, the machine's memory is in use.
    pub fn calls_due(&self) -> usize {
        self.outbox.calls_due()
    }
}
