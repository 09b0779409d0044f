//! The machine that a new lease runs before its first I/O: it fences the old holder out, and makes all
//! replicas agree on the writes that the old holder may have left on some of them only. See
//! `docs/REPLICATION.md`.
//!
//! Events in: [`LeaseRecovery::on_reply`], [`LeaseRecovery::on_map`], [`LeaseRecovery::on_tick`]. Actions
//! out: [`LeaseRecovery::poll`].
//!
//! Blocks become what the in-sync replica with the newest version has. A syncing replica never decides: it
//! may hold what nobody acknowledged, from before it left. Whatever goes wrong with a replica, it is
//! reported, and with the next map everything begins anew; that is safe, since each step may be done any
//! number of times. One in sync that has no space is not reported, but asked again after a second. Without a
//! newer map it does so after a while: a replica that stays in the map, as the last in-sync one does, may
//! answer by then. [`takeover`] is the machine around this one that shells drive.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use fabric_types::block::LEAF_BLOCKS;
use fabric_types::ids::{ChunkKey, LayerId};
use fabric_types::membership::ReplicaSet;
use fabric_types::{Command, Epoch, Incarnation, NodeId, PgId, Refusal};

use crate::calls::Calls;

mod list;
mod page;
mod pages;
pub mod takeover;
mod winner;

use page::{Next, PageRecovery};
use pages::UnresolvedPages;

pub use crate::calls::Call;

/// How often [`LeaseRecovery::on_tick`] is called while something waits for it.
pub const TICK: Duration = Duration::from_millis(5);
/// Ticks after which it is tried again without a newer map: 100 ms, as clients do with a replica that stays
/// in the map.
const AGAIN_TICKS: u32 = 20;
/// Ticks after which one is asked again that had no space: 1 s, as clients do.
const NO_SPACE_TICKS: u32 = 200;
/// How often that is done where others are enough.
const SPACE_WAITS_MAX: u32 = 60;
/// Blocks whose loss a takeover passes on though a device refused them with an error: one map page. With more
/// the device has not lost its data block by block, and may give them yet: the takeover asks again until it
/// does, or an operator gives the device up.
const LOST_MAX: u32 = LEAF_BLOCKS;
const BLOCKS: usize = LEAF_BLOCKS as usize;

/// What the shell is to do.
#[derive(Debug)]
pub enum Action {
    /// Send the command under the new lease. `pg` and `epoch` are those of the request; a fence concerns no
    /// group.
    Ask {
        /// Names the answer.
        call: Call,
        /// To whom. An answer of another start of that node is none.
        to: (NodeId, Incarnation),
        /// For which group.
        pg: PgId,
        /// Under which map.
        epoch: Epoch,
        /// What.
        command: Command,
    },
    /// Ask meta for a map without this replica; once per map and replica.
    ReportFailed {
        /// Group.
        pg: PgId,
        /// Replica.
        node: NodeId,
        /// Map under which it failed.
        epoch: Epoch,
    },
    /// The volume can be used.
    Done,
    /// A newer lease exists: this one is worth nothing.
    Fenced,
}

/// Which of the layer's chunks lie in which group.
pub trait PlaceOf {
    /// Index of the chunk's set among those the machine was given.
    fn set_of(&self, chunk: ChunkKey) -> usize;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Fence(NodeId),
    Inspect(usize),
    Read(usize),
    Restore(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Fence,
    Blocks,
    /// For a newer map, or for so many ticks.
    AwaitMap(u32),
    /// For a moment: a replica does not know the map yet.
    AwaitTick,
    Over,
}

/// See the module.
#[derive(Debug)]
pub struct LeaseRecovery {
    sets: Vec<ReplicaSet>,
    /// The newest of the sets': that of the fence, so no request may be under an older one.
    epoch: Epoch,
    phase: Phase,
    pages: UnresolvedPages,
    page: PageRecovery,
    calls: Calls<Purpose>,
    reported: BTreeSet<(PgId, NodeId, Epoch)>,
    /// How often a full replica was waited for.
    space_waits: u32,
    actions: VecDeque<Action>,
}

impl LeaseRecovery {
    /// For the layer of a volume of this size, whose chunks lie in these sets.
    #[must_use]
    pub fn new(layer: LayerId, size_bytes: u64, sets: Vec<ReplicaSet>) -> Self {
        let mut machine = Self {
            sets,
            epoch: Epoch(0),
            phase: Phase::Fence,
            pages: UnresolvedPages::new(layer, size_bytes),
            page: PageRecovery::new(),
            calls: Calls::new(),
            reported: BTreeSet::new(),
            space_waits: 0,
            actions: VecDeque::new(),
        };
        machine.start();
        machine
    }

    /// Next thing to do.
    pub fn poll(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Whether it has ended, well or not.
    pub fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    /// Calls whose answers are due: until they are, the machine's memory is in use.
    pub fn calls_due(&self) -> usize {
        self.calls.len()
    }

    /// The map that replicas were fenced under: requests of the new lease are to claim none that is older.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Blocks that were made to agree.
    pub fn recovered_blocks(&self) -> u64 {
        self.page.recovered()
    }

    /// A replica answered, or is lost ([`Refusal::Unreachable`]).
    pub fn on_reply(&mut self, call: Call, result: Result<(), Refusal>, places: &dyn PlaceOf) {
        let Some(purpose) = self.calls.end(call) else {
            return;
        };
        match self.phase {
            Phase::Over => return,
            // Answers to what was asked before: with the last of them everything begins anew.
            Phase::AwaitMap(_) | Phase::AwaitTick => return,
            Phase::Fence | Phase::Blocks => {}
        }
        match result {
            Ok(()) => {}
            Err(Refusal::Changed | Refusal::Mismatch) => self.page.note_changed(),
            Err(Refusal::StaleGeneration(_)) => {
                self.phase = Phase::Over;
                self.actions.push_back(Action::Fenced);
                return;
            }
            Err(Refusal::Behind(_)) => {
                self.phase = Phase::AwaitTick;
                return;
            }
            Err(Refusal::StaleEpoch(_)) => {
                self.phase = Phase::AwaitMap(AGAIN_TICKS);
                return;
            }
            Err(Refusal::NoSpace { .. }) if self.waits_for_space_of(purpose) => {
                self.space_waits += 1;
                self.phase = Phase::AwaitMap(NO_SPACE_TICKS);
                return;
            }
            Err(refusal) => {
                if let Purpose::Read(member) = purpose
                    && refusal.is_unreadable()
                    && self.page.do_without(member, refusal, &self.sets)
                {
                    return self.recover_next(places);
                }
                self.report(purpose);
                self.phase = Phase::AwaitMap(AGAIN_TICKS);
                return;
            }
        }
        if self.calls.is_empty() {
            self.go_on(purpose, places);
        }
    }

    /// Newer sets, in the same order. Everything begins anew if one of them changed.
    pub fn on_map(&mut self, sets: &[ReplicaSet]) {
        if self.is_over() {
            return;
        }
        let newer = |(new, old): (&ReplicaSet, &ReplicaSet)| new.epoch() > old.epoch();
        if sets.iter().zip(&self.sets).any(newer) {
            self.sets = sets.to_vec();
            self.phase = Phase::AwaitTick;
        }
    }

    /// Some milliseconds have passed: tries again what could not be done.
    pub fn on_tick(&mut self) {
        if !self.calls.is_empty() {
            return;
        }
        match self.phase {
            Phase::AwaitTick | Phase::AwaitMap(0) => self.start(),
            Phase::AwaitMap(ticks) => self.phase = Phase::AwaitMap(ticks - 1),
            Phase::Fence | Phase::Blocks | Phase::Over => {}
        }
    }

    /// Whether something waits for the next tick.
    pub fn needs_tick(&self) -> bool {
        let waits = matches!(self.phase, Phase::AwaitTick | Phase::AwaitMap(_));
        waits && self.calls.is_empty()
    }

    /// Fences everybody who takes writes.
    fn start(&mut self) {
        self.phase = Phase::Fence;
        self.page.give_up();
        self.pages.restart();
        let newest = self.sets.iter().map(ReplicaSet::epoch).max();
        self.epoch = newest.unwrap_or_default();
        let nodes = self.receiving_nodes();
        if self.sets.iter().any(|set| set.in_sync().is_empty()) {
            self.phase = Phase::AwaitMap(AGAIN_TICKS);
            return;
        }
        for (node, (_, incarnation)) in nodes {
            let command = self.pages.ask(node);
            let to = (node, incarnation);
            self.ask(Purpose::Fence(node), to, PgId(0), command);
        }
    }

    /// Nodes that take writes, and the start of each that the map knows last: in other groups it may stand
    /// with one before.
    fn receiving_nodes(&self) -> BTreeMap<NodeId, (Epoch, Incarnation)> {
        let mut nodes = BTreeMap::new();
        for set in &self.sets {
            for member in set.receiving().iter().map(|i| set.members()[i]) {
                let known = (member.since, member.incarnation);
                let newest = nodes.entry(member.node).or_insert(known);
                *newest = (*newest).max(known);
            }
        }
        nodes
    }

    /// Every answer to the last questions is there.
    fn go_on(&mut self, last: Purpose, places: &dyn PlaceOf) {
        match last {
            Purpose::Fence(_) => {
                self.pages.begin();
                self.phase = Phase::Blocks;
                self.next_page(places);
            }
            Purpose::Inspect(_) => self.recover_next(places),
            Purpose::Read(_) => {
                let commands = self.page.restore(&self.sets);
                self.ask_all(Purpose::Restore, commands);
            }
            Purpose::Restore(_) if self.page.has_changed() => self.inspect(),
            Purpose::Restore(_) => {
                self.page.end_block(&self.sets);
                self.recover_next(places);
            }
        }
    }

    fn next_page(&mut self, places: &dyn PlaceOf) {
        let Some((leaf, blocks)) = self.pages.next() else {
            self.phase = Phase::Over;
            self.actions.push_back(Action::Done);
            return;
        };
        let set = places.set_of(leaf.chunk_key());
        self.page.begin(set, leaf, blocks);
        self.inspect();
    }

    fn inspect(&mut self) {
        let commands = self.page.inspect(&self.sets);
        self.ask_all(Purpose::Inspect, commands);
    }

    /// Goes to the next block on which they do not agree.
    fn recover_next(&mut self, places: &dyn PlaceOf) {
        match self.page.next(&self.sets) {
            Next::Read(winner, command) => self.ask_all(Purpose::Read, vec![(winner, command)]),
            Next::Restore(commands) => self.ask_all(Purpose::Restore, commands),
            Next::Undecided(knowing) => {
                // They begin a new receiving period, in which what they have is compared with what is in sync
                // then. Without them those in sync agree.
                for member in knowing {
                    self.report(Purpose::Inspect(member));
                }
                self.phase = Phase::AwaitMap(AGAIN_TICKS);
            }
            Next::Over => self.next_page(places),
        }
    }

    /// Asks members of the page's set.
    fn ask_all(&mut self, purpose: fn(usize) -> Purpose, commands: Vec<(usize, Command)>) {
        for (index, command) in commands {
            let set = self.page.set_in(&self.sets);
            let (member, pg) = (set.members()[index], set.pg());
            let to = (member.node, member.incarnation);
            self.ask(purpose(index), to, pg, command);
        }
    }

    fn ask(&mut self, purpose: Purpose, to: (NodeId, Incarnation), pg: PgId, command: Command) {
        let call = self.calls.begin(purpose);
        self.actions.push_back(Action::Ask {
            call,
            to,
            pg,
            epoch: self.epoch,
            command,
        });
    }

    /// A replica in sync that is full has not failed. But a volume is not kept closed for it if others are
    /// enough. What refuses a fence is no lack of space for data, and does not pass.
    fn waits_for_space_of(&self, purpose: Purpose) -> bool {
        let Purpose::Restore(member) = purpose else {
            return false;
        };
        let set = self.page.set_in(&self.sets);
        let others_suffice = set.in_sync().len() > set.min_in_sync();
        set.in_sync().contains(member) && !(others_suffice && self.space_waits >= SPACE_WAITS_MAX)
    }

    /// Says of whom an answer is missing.
    fn report(&mut self, purpose: Purpose) {
        let failed: Vec<(PgId, NodeId, Epoch)> = match purpose {
            Purpose::Fence(node) => self
                .sets
                .iter()
                .filter(|set| {
                    set.receiving()
                        .iter()
                        .any(|m| set.members()[m].node == node)
                })
                .map(|set| (set.pg(), node, set.epoch()))
                .collect(),
            Purpose::Inspect(member) | Purpose::Read(member) | Purpose::Restore(member) => {
                let set = self.page.set_in(&self.sets);
                vec![(set.pg(), set.members()[member].node, set.epoch())]
            }
        };
        for (pg, node, epoch) in failed {
            if self.reported.insert((pg, node, epoch)) {
                self.actions
                    .push_back(Action::ReportFailed { pg, node, epoch });
            }
        }
    }
}
