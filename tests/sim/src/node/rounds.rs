//! Bringing a returning replica up to date: the shell around the [`Rounds`] that ship, on a storage node. It
//! carries their commands and fills their memory; mistakes that are made on purpose are made here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fabric_replication::repair::queue::{BadBlock, Outcome};
use fabric_replication::replica::StoreFailure;
use fabric_replication::resync::rounds::{Action, Rounds, Token};
use fabric_types::ids::ChunkKey;
use fabric_types::membership::{Member, ReplicaSet};
use fabric_types::{Command, Epoch, Incarnation, NodeId, PgId, Refusal, Request};

use super::port::Purpose;
use super::{Node, Outputs, Parcel, Process, Promotion, memory};
use crate::mutation::{self, Mutation};

/// A command of a round of comparison for its source.
#[derive(Debug, Clone, Copy)]
pub struct Ask {
    /// Names the answer.
    pub token: Token,
    /// The source: another start of it does not count.
    pub source: (NodeId, Incarnation),
    /// What.
    pub request: Request,
}

/// A membership that a node gives up, and by which map.
pub type GivenUp = (PgId, Member, Epoch);

/// The map as a node takes it.
#[derive(Debug, Clone)]
pub struct NodeMap {
    /// Its version.
    pub epoch: Epoch,
    /// The groups.
    pub sets: Vec<ReplicaSet>,
    /// For each of them, the node's device that holds it, and that which it is coming to.
    pub homes: Vec<[Option<usize>; 2]>,
}

/// See the module.
pub struct Shell {
    /// What ships.
    pub machine: Rounds,
    /// Commands that are being executed, here or at the source; they name the machine's memory.
    open: BTreeMap<Token, Command>,
    /// What this side said of its blocks, by chunk and first block; for mistakes in
    /// comparing.
    here: BTreeMap<(ChunkKey, u32), Vec<u8>>,
    /// Blocks that are known to be bad, as `engine::damage` lists them.
    bad: BTreeSet<BadBlock>,
    /// The newest map.
    sets: Vec<ReplicaSet>,
    /// When the machine is told the time next.
    wake_us: Option<u64>,
}

impl Shell {
    pub fn new(machine: Rounds) -> Self {
        Self {
            machine,
            open: BTreeMap::new(),
            here: BTreeMap::new(),
            bad: BTreeSet::new(),
            sets: Vec::new(),
            wake_us: None,
        }
    }

    /// A command has ended: fills the memory that it names.
    fn end(&mut self, token: Token, data: Option<&[u8]>) {
        if let (Some(command), Some(data)) = (self.open.remove(&token), data) {
            memory::put_down(command, data);
        }
    }
}

impl Node {
    /// A map arrived.
    pub fn on_map(&mut self, map: &NodeMap, outputs: &mut Outputs) {
        let Some(process) = &mut self.process else {
            return;
        };
        if map.epoch <= process.groups.known() {
            return;
        }
        for (set, home) in map.sets.iter().zip(&map.homes) {
            let (pg, groups) = (set.pg(), &process.groups);
            let names = [(pg, self.id), (pg.incoming(), self.id.incoming())];
            for ((pg, name), home) in names.into_iter().zip(home) {
                match (set.index_of(name), home) {
                    (Some(index), Some(device)) => {
                        groups.place(pg, *device as u32, self.groups as u32, set.epoch());
                        groups.set_member(pg, &set.members()[index], process.incarnation);
                    }
                    _ => groups.forget(pg),
                }
            }
        }
        process.groups.applied(map.epoch);
        // Layers exist from the beginning. Some starts of a process hear of them later than of the map.
        if process.incarnation.0 % 2 == 0 {
            process.knows_layers = true;
            process.fences.set_layers(self.access.layers());
        }
        process.rounds.sets = map.sets.clone();
        let Shell { machine, sets, .. } = &mut process.rounds;
        machine.on_map(sets, outputs.now_us);
        self.pump(outputs);
    }

    /// Time has passed for rounds of comparison.
    pub fn on_tick(&mut self, outputs: &mut Outputs) {
        if let Some(process) = &mut self.process {
            process.rounds.wake_us = None;
            process.rounds.machine.on_time(outputs.now_us);
        }
        self.pump(outputs);
    }

    /// When [`on_tick`](Self::on_tick) is to be called, if that has not been said yet.
    pub fn wake_at(&mut self, now_us: u64) -> Option<u64> {
        let rounds = &mut self.process.as_mut()?.rounds;
        let wake = rounds.machine.wake_at(now_us)?.max(now_us);
        if rounds.wake_us.is_some_and(|said| said <= wake) {
            return None;
        }
        rounds.wake_us = Some(wake);
        Some(wake)
    }

    /// The source of a round answered, or is lost.
    pub fn on_round(
        &mut self,
        token: Token,
        result: Result<(), Refusal>,
        data: Option<&[u8]>,
        outputs: &mut Outputs,
    ) {
        if let Some(process) = &mut self.process {
            process.end_ask(token, result, data.filter(|_| result.is_ok()));
        }
        self.pump(outputs);
    }
}

impl Process {
    fn end_ask(&mut self, token: Token, result: Result<(), Refusal>, data: Option<&[u8]>) {
        let shown = data.and_then(|data| self.mistaken_stamps(token, data));
        self.rounds.end(token, shown.as_deref().or(data));
        self.rounds.machine.on_reply(token, result);
    }

    /// The source's stamps as a mistake has them, see [`mutation::only_newer`] and [`mutation::by_version`].
    fn mistaken_stamps(&self, token: Token, data: &[u8]) -> Option<Vec<u8>> {
        let Command::Inspect { chunk, block, .. } = *self.rounds.open.get(&token)? else {
            return None;
        };
        let here = self.rounds.here.get(&(chunk, block))?;
        match self.mutation? {
            Mutation::DeltaLogFromDeparture => {
                let newest = self.newest.get(&chunk.layer)?;
                Some(mutation::only_newer(data, here, *newest))
            }
            Mutation::CompareVersionsOnly => Some(mutation::by_version(data, here)),
            _ => None,
        }
    }

    /// The store is done with a command of a round.
    pub(super) fn end_local(
        &mut self,
        token: Token,
        result: Result<(), StoreFailure>,
        data: Option<Arc<[u8]>>,
    ) {
        let data = data.filter(|_| result.is_ok());
        let compares = matches!(
            self.mutation,
            Some(Mutation::DeltaLogFromDeparture | Mutation::CompareVersionsOnly)
        );
        if let (true, Some(data), Some(Command::Inspect { chunk, block, .. })) =
            (compares, &data, self.rounds.open.get(&token))
        {
            self.rounds.here.insert((*chunk, *block), data.to_vec());
        }
        self.rounds.end(token, data.as_deref());
        self.rounds.machine.on_local(token, result);
    }

    /// The scrubber has found these bad: they are to be repaired.
    pub(super) fn on_bad_blocks(&mut self, bad: &[BadBlock], now_us: u64) {
        let Shell { machine, sets, .. } = &mut self.rounds;
        machine.on_bad_blocks(bad, sets, now_us);
    }

    /// Blocks that requests have met and could not read are to be repaired.
    fn note_damage(&mut self, now_us: u64) {
        let found = std::mem::take(&mut self.port.damaged).into_iter();
        let found = found.chain(self.port.lost.iter().copied());
        let Shell {
            machine, sets, bad, ..
        } = &mut self.rounds;
        let new: Vec<BadBlock> = found.filter(|one| bad.insert(*one)).collect();
        if !new.is_empty() {
            machine.on_bad_blocks(&new, sets, now_us);
        }
    }

    /// Takes the rounds of comparison as far as they go now.
    pub(super) fn work_rounds(&mut self, outputs: &mut Outputs) -> bool {
        self.note_damage(outputs.now_us);
        outputs.lost.append(&mut self.port.lost);
        let mut any = false;
        while let Some(action) = self.rounds.machine.poll(outputs.now_us) {
            any = true;
            let action = match self.mutation {
                Some(Mutation::ResyncFromReturning) => self.turned_round(action),
                _ => action,
            };
            match action {
                Action::Ask {
                    token,
                    source,
                    request,
                } => self.ask(token, source, request, outputs),
                Action::Local { token, request } => self.begin_local(token, request),
                Action::Promote { pg, since } => outputs.promotions.push(self.promotion(pg, since)),
                Action::ReportFailed { pg, member, epoch } => {
                    outputs.given_up.push((pg, member, epoch));
                }
                Action::Tell { bad, outcome } => {
                    if outcome != Outcome::Stuck {
                        self.rounds.bad.remove(&bad);
                    }
                    outputs.repair_outcomes.push((bad, outcome));
                }
            }
        }
        any
    }

    fn promotion(&self, pg: PgId, since: Epoch) -> Promotion {
        Promotion {
            pg,
            incarnation: self.incarnation,
            since,
        }
    }

    fn ask(
        &mut self,
        token: Token,
        source: (NodeId, Incarnation),
        request: Request,
        outputs: &mut Outputs,
    ) {
        if self.mutation == Some(Mutation::TrustCleanFlag) {
            // Nothing is compared, and this replica is as good as the others at once.
            if let Some(since) = self.rounds.machine.since(request.pg) {
                outputs.promotions.push(self.promotion(request.pg, since));
            }
            let nobody = Err(Refusal::Unreachable);
            return self.rounds.machine.on_reply(token, nobody);
        }
        self.rounds.open.insert(token, request.command);
        outputs.asks.push(Ask {
            token,
            source,
            request,
        });
    }

    fn begin_local(&mut self, token: Token, request: Request) {
        self.rounds.open.insert(token, request.command);
        let data = memory::pick_up(request.command);
        let parcel = Parcel {
            request,
            data,
            crc: 0,
        };
        match self.port.submit_local(Purpose::Round(token), parcel) {
            Some(Ok(data)) => self.end_local(token, Ok(()), Some(data)),
            Some(Err(failure)) => self.end_local(token, Err(failure), None),
            None => {}
        }
    }

    /// The same comparison with the two sides confused.
    fn turned_round(&mut self, action: Action) -> Action {
        let compares = |command: &Command| {
            matches!(
                command,
                Command::Inspect { .. } | Command::Read { .. } | Command::Restore { .. }
            )
        };
        match action {
            Action::Ask { token, request, .. } if compares(&request.command) => {
                Action::Local { token, request }
            }
            Action::Local { token, request } if compares(&request.command) => {
                let source = self.rounds.machine.source(request.pg);
                let source = source.expect("it has just said what it wants");
                Action::Ask {
                    token,
                    source,
                    request,
                }
            }
            other => other,
        }
    }
}
