//! Bringing a returning replica up to date: the shell around [`Resync`] on a storage node.

use std::collections::BTreeMap;

use fabric::core::groups::Groups;
use fabric::core::membership::{Member, ReplicaSet, Standing};
use fabric::core::resync::{Action, Call, Resync, Why};
use fabric::proto::ids::{ChunkKey, LayerId};
use fabric::proto::{Command, Epoch, Generation, Incarnation, NodeId, PgId};

use super::memory;
use crate::mutation::{self, Newest};

/// A round of comparison under way.
pub struct Round {
    /// Tells it from those before it.
    pub number: u64,
    /// The machine.
    pub machine: Resync,
    /// It has ended well; meta is asked until the map says so.
    pub promoted: bool,
    /// Commands that are being executed, here or at the source; they name the machine's memory.
    pub open: BTreeMap<Call, Command>,
    /// What this side said of its blocks, by chunk and first block.
    here: BTreeMap<(ChunkKey, u32), Vec<u8>>,
}

impl Round {
    /// This side has said what some blocks of it are.
    pub fn note_here(&mut self, call: Call, data: &[u8]) {
        if let Some(Command::Inspect { chunk, block, .. }) = self.open.get(&call) {
            self.here.insert((*chunk, *block), data.to_vec());
        }
    }

    /// See [`mutation::only_newer`].
    pub fn only_newer(&self, call: Call, data: &[u8], newest: &Newest) -> Option<Vec<u8>> {
        let Command::Inspect { chunk, block, .. } = *self.open.get(&call)? else {
            return None;
        };
        let (here, newest) = (self.here.get(&(chunk, block))?, newest.get(&chunk.layer)?);
        Some(mutation::only_newer(data, here, *newest))
    }

    /// A command has ended: fills the memory that it names.
    pub fn end(&mut self, call: Call, data: Option<&[u8]>) {
        if let (Some(command), Some(data)) = (self.open.remove(&call), data) {
            memory::put_down(command, data);
        }
    }
}

/// What rounds want done.
#[derive(Debug, Clone, Copy)]
pub enum Wish {
    /// A command for the source.
    Ask(NodeId, Epoch, Command),
    /// A command for this node's own store.
    Local(Command),
    /// Raise the layer's fence here.
    Fence(LayerId, Generation, Epoch),
}

/// The rounds of a process, by group.
#[derive(Default)]
pub struct Rounds {
    /// They.
    pub all: BTreeMap<PgId, Round>,
    next: u64,
    /// What returns is believed to lack nothing.
    trusting: bool,
    /// How many ended in vain.
    pub failed: u64,
    /// Groups in which this replica gives itself up, so that it begins anew.
    hopeless: Vec<PgId>,
    sets: BTreeMap<PgId, ReplicaSet>,
}

impl Rounds {
    /// None; with `trusting` each is over as soon as it has begun.
    pub fn new(trusting: bool) -> Self {
        Self {
            trusting,
            ..Self::default()
        }
    }

    /// A map arrived: begins what is to be begun, and ends what is over.
    pub fn on_map(
        &mut self,
        me: (NodeId, Incarnation),
        epoch: Epoch,
        sets: &[ReplicaSet],
        groups: &Groups,
    ) {
        if epoch < groups.known() {
            return;
        }
        for set in sets {
            self.sets.insert(set.pg(), set.clone());
            let Some(index) = set.index_of(me.0) else {
                groups.forget(set.pg());
                self.all.remove(&set.pg());
                continue;
            };
            let member = set.members()[index];
            // Invariant *No trust on return*: what the map says of an earlier process does not hold for this one.
            let standing = match member.incarnation == me.1 {
                true => member.standing,
                false => Standing::Out,
            };
            groups.set(set.pg(), standing, member.since);
            let syncing = standing == Standing::Syncing;
            let same = |r: &Round| syncing && r.machine.since() == member.since;
            if !self.all.get(&set.pg()).is_some_and(same) {
                self.all.remove(&set.pg());
            }
        }
        groups.applied(epoch);
        self.begin(me, groups);
    }

    /// Begins a round for each group in which this node is syncing and none is under way.
    pub fn begin(&mut self, me: (NodeId, Incarnation), groups: &Groups) {
        for (pg, set) in &self.sets {
            let Some(index) = set.index_of(me.0) else {
                continue;
            };
            let member = set.members()[index];
            let mine = member.incarnation == me.1 && groups.get(*pg).is_some();
            if !mine || member.standing != Standing::Syncing || self.all.contains_key(pg) {
                continue;
            }
            let sources: Vec<NodeId> = set
                .in_sync()
                .iter()
                .map(|i| set.members()[i].node)
                .collect();
            if sources.is_empty() {
                continue;
            }
            // Another one after each failure.
            let source = sources[self.failed as usize % sources.len()];
            self.next += 1;
            let round = Round {
                number: self.next,
                machine: Resync::new(*pg, member.since, source),
                promoted: self.trusting,
                open: BTreeMap::new(),
                here: BTreeMap::new(),
            };
            self.all.insert(*pg, round);
        }
    }

    /// What the rounds want now.
    pub fn poll(&mut self, groups: &Groups) -> Vec<(PgId, u64, Call, Wish)> {
        let mut wishes = Vec::new();
        let mut over = Vec::new();
        for (pg, round) in &mut self.all {
            while let Some(action) = round.machine.poll(groups) {
                let source = round.machine.source();
                match action {
                    Action::Ask(call, command) => {
                        round.open.insert(call, command);
                        // As in the engine that ships: clients go by the group's last change.
                        let epoch = match (command, self.sets.get(pg)) {
                            (Command::Join, Some(set)) => set.epoch(),
                            _ => groups.known(),
                        };
                        let wish = Wish::Ask(source, epoch, command);
                        wishes.push((*pg, round.number, call, wish));
                    }
                    Action::Local(call, command) => {
                        round.open.insert(call, command);
                        wishes.push((*pg, round.number, call, Wish::Local(command)));
                    }
                    Action::Fence(call, layer, generation, epoch) => {
                        let wish = Wish::Fence(layer, generation, epoch);
                        wishes.push((*pg, round.number, call, wish));
                    }
                    Action::Promote => round.promoted = true,
                    Action::Failed(why) => {
                        if why == Why::Busy {
                            self.hopeless.push(*pg);
                        }
                        over.push(*pg);
                    }
                }
            }
        }
        for pg in over {
            self.failed += 1;
            self.all.remove(&pg);
        }
        wishes
    }

    /// This node's memberships that it gives up, and by which maps.
    pub fn take_hopeless(&mut self, node: NodeId) -> Vec<(PgId, Member, Epoch)> {
        let sets = &self.sets;
        let mine = |pg: PgId| {
            let set = sets.get(&pg)?;
            Some((pg, set.members()[set.index_of(node)?], set.epoch()))
        };
        self.hopeless.drain(..).filter_map(mine).collect()
    }

    /// A moment has passed.
    pub fn on_tick(&mut self) {
        for round in self.all.values_mut() {
            round.machine.on_tick();
        }
    }

    /// Whether something waits for that.
    pub fn needs_tick(&self) -> bool {
        self.all.values().any(|round| round.machine.needs_tick())
    }

    /// The round, if it is still the one of this number.
    pub fn get(&mut self, pg: PgId, number: u64) -> Option<&mut Round> {
        self.all.get_mut(&pg).filter(|r| r.number == number)
    }
}
