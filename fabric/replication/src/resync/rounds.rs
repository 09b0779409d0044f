//! Which rounds of comparison a node has under way: it decides when one begins, with whom, under which map
//! each of its commands goes, and when one that failed is tried anew. A [`Resync`] does the comparing.
//!
//! Beside them go the repairs of blocks that this node cannot read ([`Repairs`]): what they ask of peers and
//! of this node's store takes the same ways, under the same map.
//!
//! Events in: [`Rounds::on_map`], [`Rounds::on_time`], [`Rounds::on_reply`] and [`Rounds::on_local`]. Actions
//! out: [`Rounds::poll`]. Time is told, in microseconds from whatever beginning; [`Rounds::wake_at`] says
//! when to tell it next.

mod syncing;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::unread::{Lost, Unread, Unreadable};
use super::{Action as ResyncAction, Call, Progress, Resync, RoundFailure, TICK};
use crate::fence::Fences;
use crate::groups::Groups;
use crate::repair::queue::{BadBlock, Outcome, RepairAction, Repairs};
use crate::replica::store_op::ROUND;
use crate::replica::{StoreFailure, outcome};
use crate::unresolved::Unresolved;
use fabric_types::iov::IoVecs;
use fabric_types::membership::{Member, ReplicaSet, ReplicaState};
use fabric_types::{Command, Epoch, Generation, Incarnation, NodeId, PgId, Refusal, Request};

use syncing::{Round, SyncingGroup};

/// Pause before a round that failed begins anew; doubled with each failure up to the maximum.
const PAUSE_MIN_US: u64 = 40_000;
/// See [`PAUSE_MIN_US`].
const PAUSE_MAX_US: u64 = 2_000_000;
/// How often meta is asked to promote a replica that has been compared, until the map says so.
const ASK_AGAIN_US: u64 = 1_000_000;
const TICK_US: u64 = TICK.as_micros() as u64;
/// Rounds that were given up while calls of theirs are under way, in whose memory others still write. With so
/// many no further one begins: a device, or a peer, that answers nothing would otherwise be asked without
/// end.
const RETIRED_MAX: usize = 8;

/// Stands for the repairs in the place of a round's number, which is larger.
const REPAIRS: u64 = 0;

/// A round and one of its calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Token {
    number: u64,
    call: u32,
}

/// What the shell is to do.
#[derive(Debug, Clone, Copy)]
pub enum Action {
    /// Send the request to the source. An answer of another start of that node is none.
    Ask {
        /// Names the answer.
        token: Token,
        /// To whom.
        source: (NodeId, Incarnation),
        /// What.
        request: Request,
    },
    /// Have this node's own store execute the request, past the replica machine, with the last look at its
    /// turn ([`still_admitted`]).
    ///
    /// [`still_admitted`]: super::super::replica::store_op::still_admitted
    Local {
        /// Names the outcome.
        token: Token,
        /// What.
        request: Request,
    },
    /// Ask meta to promote this node's replica, which has been compared in the receiving period that began at
    /// `since`.
    Promote {
        /// Group.
        pg: PgId,
        /// Epoch at which it became syncing.
        since: Epoch,
    },
    /// Ask meta to take this node's replica out, so that it begins anew.
    ReportFailed {
        /// Group.
        pg: PgId,
        /// This node's replica.
        member: Member,
        /// Epoch of the group.
        epoch: Epoch,
    },
    /// Tell what became of a block that this node could not read.
    Tell {
        /// Which.
        bad: BadBlock,
        /// What.
        outcome: Outcome,
    },
}

/// What rounds have done since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Rounds that ended well.
    pub rounds: u64,
    /// Rounds that ended in vain.
    pub failed: u64,
    /// What those that ended did.
    pub progress: Progress,
}

/// Groups whose rounds fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failing {
    /// How many.
    pub groups: u32,
    /// Since when rounds of one of them have taken nothing over and got no further than those before, the
    /// longest.
    pub since_us: u64,
}

/// See the module.
#[derive(Debug)]
pub struct Rounds {
    me: (NodeId, Incarnation),
    groups: Arc<Groups>,
    fences: Arc<Fences>,
    /// What this node's replicas remember of unresolved writes; what others tell goes to the first lane.
    lanes: Arc<[Arc<Unresolved>]>,
    syncing: BTreeMap<PgId, SyncingGroup>,
    /// The map that was told last: what goes out goes under it, though the node may know a newer one by then.
    heard: Epoch,
    /// What sources could not read, of groups in which this node's replica has not been compared since.
    unread: BTreeMap<PgId, Unread>,
    /// Rounds that are over, whose memory is still in use.
    retired: Vec<Round>,
    repairs: Repairs,
    next: u64,
    /// When machines are told that a [`TICK`] has passed, if any waits for that.
    tick_us: Option<u64>,
    actions: VecDeque<Action>,
    totals: Totals,
}

impl Rounds {
    /// Of this start of this node, whose data threads remember unresolved writes in these lanes. None is
    /// under way before the first map.
    ///
    /// # Panics
    /// If there is no lane.
    pub fn new(
        me: (NodeId, Incarnation),
        groups: Arc<Groups>,
        fences: Arc<Fences>,
        lanes: Arc<[Arc<Unresolved>]>,
    ) -> Self {
        assert!(!lanes.is_empty(), "a node has a data thread");
        Self {
            me,
            repairs: Repairs::new(me, Arc::clone(&groups), Arc::clone(&lanes)),
            groups,
            fences,
            lanes,
            syncing: BTreeMap::new(),
            heard: Epoch(0),
            unread: BTreeMap::new(),
            retired: Vec::new(),
            next: 0,
            tick_us: None,
            actions: VecDeque::new(),
            totals: Totals::default(),
        }
    }

    /// The newest map, all of it, which the groups have been told of: begins what is to be begun, and ends
    /// what is over.
    pub fn on_map(&mut self, sets: &[ReplicaSet], now_us: u64) {
        self.heard = self.groups.known();
        let mut syncing = std::mem::take(&mut self.syncing);
        for set in sets {
            for pg in [set.pg(), set.pg().incoming()] {
                let Some(member) = self.syncing(set, pg) else {
                    continue;
                };
                let mut group = syncing.remove(&pg).unwrap_or_else(|| SyncingGroup {
                    set: set.clone(),
                    since: member.since,
                    round: None,
                    failures: 0,
                    begin_us: now_us,
                    progress_us: now_us,
                    counted_blocks: 0,
                    leaves_max: 0,
                });
                group.set = set.clone();
                group.since = member.since;
                match group.round.take() {
                    Some(round) if group.may_go_on(&round) => group.round = Some(round),
                    over => self.retire(over),
                }
                self.syncing.insert(pg, group);
            }
        }
        // Of groups in which this node does not take part any more, or not as one that is to be compared.
        syncing
            .into_values()
            .for_each(|group| self.retire(group.round));
        self.unread.retain(|pg, _| self.groups.get(*pg).is_some());
        self.repairs.on_map(sets, now_us);
        self.begin(now_us);
    }

    /// This node's replica of the group, named as the node knows it, in this set.
    fn own(&self, set: &ReplicaSet, pg: PgId) -> Option<Member> {
        let name = match pg.is_incoming() {
            true => self.me.0.incoming(),
            false => self.me.0,
        };
        set.index_of(name).map(|index| set.members()[index])
    }

    /// The same if it is to be compared.
    fn syncing(&self, set: &ReplicaSet, pg: PgId) -> Option<Member> {
        let is_syncing = |m: &Member| {
            m.incarnation == self.me.1
                && m.state == ReplicaState::Syncing
                && self.groups.get(pg).is_some()
        };
        self.own(set, pg).filter(is_syncing)
    }

    /// This node cannot read these blocks; `sets` are the newest map, all of it.
    pub fn on_bad_blocks(&mut self, found: &[BadBlock], sets: &[ReplicaSet], now_us: u64) {
        self.repairs.on_found(found, sets, now_us);
    }

    /// It is later than it was.
    pub fn on_time(&mut self, now_us: u64) {
        if self.tick_us.take_if(|due| *due <= now_us).is_some() {
            let rounds = self.syncing.values_mut().filter_map(|s| s.round.as_mut());
            rounds.for_each(|round| round.machine.on_tick());
        }
        for (pg, group) in &mut self.syncing {
            let Some(round) = &mut group.round else {
                continue;
            };
            let since = round.machine.since();
            if let Some(asked) = &mut round.asked_us {
                if now_us >= *asked + ASK_AGAIN_US {
                    *asked = now_us;
                    let pg = pg.base();
                    self.actions.push_back(Action::Promote { pg, since });
                }
            }
        }
        self.repairs.on_time(now_us);
        self.begin(now_us);
    }

    /// When [`on_time`](Self::on_time) is to be called, if nothing else happens before.
    pub fn wake_at(&mut self, now_us: u64) -> Option<u64> {
        let rounds = || {
            self.syncing
                .values()
                .filter_map(|group| group.round.as_ref())
        };
        self.tick_us = match rounds().any(|round| round.machine.needs_tick()) {
            true => Some(self.tick_us.unwrap_or(now_us + TICK_US)),
            false => None,
        };
        let again = rounds().filter_map(|round| Some(round.asked_us? + ASK_AGAIN_US));
        let room = self.retired.len() < RETIRED_MAX;
        let due = self.syncing.values().filter(|group| room && group.is_due());
        let begin = due.map(|group| group.begin_us);
        let repair = self.repairs.wake_at();
        again.chain(begin).chain(self.tick_us).chain(repair).min()
    }

    /// Begins what has waited long enough.
    fn begin(&mut self, now_us: u64) {
        for (pg, group) in &mut self.syncing {
            let room = self.retired.len() < RETIRED_MAX;
            if !room || !group.is_due() || group.begin_us > now_us {
                continue;
            }
            // Another one after each failure; at first groups are spread over all.
            let turn = pg.0 as usize + group.failures as usize;
            let sources: Vec<Member> = group.sources().collect();
            let unread = self.unread.get(pg);
            // One that may have what another could not read goes first.
            let in_turn = (0..sources.len()).map(|nth| sources[(turn + nth) % sources.len()]);
            let has_failed =
                |source: &Member| unread.is_some_and(|unread| unread.has_failed(source));
            // From one device to another of a node nothing has to cross the network. But that device may be
            // the one that fails.
            let (me, is_first) = (self.me.0, group.failures == 0);
            let source =
                in_turn.min_by_key(|source| (has_failed(source), is_first && source.node != me));
            let source = source.expect("one is due only if somebody is in sync");
            let known = Unreadable {
                lost: unread.map_or_else(Lost::new, |unread| unread.lost(&sources)),
                here: self.repairs.known(*pg),
            };
            let machine = Resync::new(*pg, group.since, source.node);
            self.next += 1;
            group.counted_blocks = 0;
            group.round = Some(Round {
                number: self.next,
                source,
                machine: machine.knowing(known),
                asked_us: None,
            });
        }
    }

    fn retire(&mut self, round: Option<Round>) {
        let Some(mut round) = round else {
            return;
        };
        let unread = round.machine.take_unread();
        if !unread.is_empty() {
            let source = (round.source.node, round.source.incarnation);
            let of_group = self.unread.entry(round.machine.pg()).or_default();
            of_group.note_all(source, unread);
        }
        round.machine.give_up();
        if round.machine.calls_due() > 0 {
            self.retired.push(round);
        }
    }

    /// What is not to be held back: everything but comparisons and reads of the source.
    pub fn poll_urgent(&mut self, now_us: u64) -> Vec<Action> {
        let mut wanted_actions = Vec::new();
        for (pg, group) in &mut self.syncing {
            let Some(round) = group.round.as_mut() else {
                continue;
            };
            while let Some(wanted) = round.machine.poll_urgent(&self.groups) {
                wanted_actions.push((*pg, wanted));
            }
        }
        let mut actions: Vec<Action> = self.actions.drain(..).collect();
        for (pg, wanted) in wanted_actions {
            actions.extend(self.complete(pg, wanted, now_us));
        }
        actions
    }

    /// Next thing to do.
    pub fn poll(&mut self, now_us: u64) -> Option<Action> {
        loop {
            if let Some(action) = self.actions.pop_front() {
                return Some(action);
            }
            if let Some(wanted) = self.repairs.poll(now_us) {
                return Some(self.complete_repair(wanted));
            }
            let next = self.syncing.iter_mut().find_map(|(pg, group)| {
                let round = group.round.as_mut()?;
                let wanted = round.machine.poll(&self.groups)?;
                Some((*pg, wanted))
            });
            let (pg, wanted) = next?;
            if let Some(action) = self.complete(pg, wanted, now_us) {
                return Some(action);
            }
        }
    }

    /// Completes an action of a round with the data that only this machine has.
    fn complete(&mut self, pg: PgId, wanted: ResyncAction, now_us: u64) -> Option<Action> {
        // The node may know a newer map, by which the source is another one.
        let heard = self.heard;
        let group = self.syncing.get_mut(&pg)?;
        group.note_progress(now_us);
        let round = group.round.as_mut()?;
        let number = round.number;
        let token = |call: Call| Token {
            number,
            call: call.0,
        };
        let request = |epoch, command| Request {
            pg,
            epoch,
            generation: ROUND,
            command,
            ..Request::NOTHING
        };
        match wanted {
            ResyncAction::Ask(call, command) => {
                // The source refuses what is older than a join: clients, who go by the group's last change,
                // are not to be refused for what has happened to other groups since.
                let epoch = match command {
                    Command::Join => group.set.epoch(),
                    _ => heard,
                };
                Some(Action::Ask {
                    token: token(call),
                    source: (round.source.node, round.source.incarnation),
                    request: Request {
                        pg: pg.base(),
                        ..request(epoch, command)
                    },
                })
            }
            ResyncAction::Local(call, command) => Some(Action::Local {
                token: token(call),
                request: request(heard, command),
            }),
            ResyncAction::Fence(call, layer, generation, epoch) => {
                // In memory first: no write slips in between. What is persisted is the newest: the source may
                // be behind.
                let Some((generation, epoch)) = self.fences.raise(layer, generation, epoch) else {
                    let full = Refusal::NoSpace { untouched: true };
                    return self.fail(pg, RoundFailure::Source(full), now_us);
                };
                Some(Action::Local {
                    token: token(call),
                    request: fence(pg, layer, generation, epoch),
                })
            }
            ResyncAction::Promote => {
                round.asked_us = Some(now_us);
                self.unread.remove(&pg);
                self.totals.add(round.machine.progress(), true);
                let (pg, since) = (pg.base(), group.since);
                Some(Action::Promote { pg, since })
            }
            ResyncAction::Failed(why) => self.fail(pg, why, now_us),
        }
    }

    fn complete_repair(&self, wanted: RepairAction) -> Action {
        let token = |call| Token {
            number: REPAIRS,
            call,
        };
        let request = |pg, command| Request {
            pg,
            epoch: self.groups.known(),
            generation: ROUND,
            command,
            ..Request::NOTHING
        };
        match wanted {
            RepairAction::Ask(call, source, pg, command) => Action::Ask {
                token: token(call),
                source,
                request: request(pg, command),
            },
            RepairAction::Local(call, pg, command) => Action::Local {
                token: token(call),
                request: request(pg, command),
            },
            RepairAction::Tell(bad, outcome) => Action::Tell { bad, outcome },
        }
    }

    fn fail(&mut self, pg: PgId, why: RoundFailure, now_us: u64) -> Option<Action> {
        tracing::debug!(%pg, ?why, "a round of comparison failed");
        let group = self.syncing.get_mut(&pg)?;
        group.note_progress(now_us);
        group.pause(now_us);
        let mut round = group.round.take()?;
        let unread = round.machine.take_unread();
        match why {
            RoundFailure::Unread => {
                let source = (round.source.node, round.source.incarnation);
                self.unread.entry(pg).or_default().renew(source, unread);
            }
            // Whatever it is, who could not read what is a thing of the past when it is over.
            _ => drop(self.unread.remove(&pg)),
        }
        if round.asked_us.is_none() {
            self.totals.add(round.machine.progress(), false);
        }
        let (set, epoch) = (group.set.clone(), group.set.epoch());
        self.retire(Some(round));
        let member = self.own(&set, pg)?;
        let pg = pg.base();
        (why == RoundFailure::Busy).then_some(Action::ReportFailed { pg, member, epoch })
    }

    fn named(&mut self, token: Token) -> Option<&mut Round> {
        let rounds = self.syncing.values_mut().filter_map(|s| s.round.as_mut());
        let mut all = rounds.chain(&mut self.retired);
        all.find(|round| round.number == token.number)
    }

    /// The source answered, or is lost ([`Refusal::Unreachable`]).
    pub fn on_reply(&mut self, token: Token, result: Result<(), Refusal>) {
        if token.number == REPAIRS {
            self.repairs.on_answer(token.call, result);
            return;
        }
        let (groups, unresolved) = (Arc::clone(&self.groups), Arc::clone(&self.lanes[0]));
        if let Some(round) = self.named(token) {
            round.machine.on_reply(Call(token.call), result, &groups);
            for (layer, told) in round.machine.take_unresolved() {
                unresolved.adopt(layer, &told);
            }
        }
        self.retired.retain(|round| round.machine.calls_due() > 0);
    }

    /// This node's store is done.
    pub fn on_local(&mut self, token: Token, result: Result<(), StoreFailure>) {
        if token.number == REPAIRS {
            self.repairs.on_answer(token.call, outcome(result));
            return;
        }
        let groups = Arc::clone(&self.groups);
        if let Some(round) = self.named(token) {
            round.machine.on_local(Call(token.call), result, &groups);
        }
        self.retired.retain(|round| round.machine.calls_due() > 0);
    }

    /// Whether nothing is under way, and nothing is to be begun.
    pub fn is_idle(&self) -> bool {
        self.syncing.is_empty() && self.retired.is_empty() && self.repairs.is_idle()
    }

    /// Calls whose answers are due: until they are, memory of this machine is in use.
    pub fn calls_due(&self) -> usize {
        let rounds = self
            .syncing
            .values()
            .filter_map(|group| group.round.as_ref());
        let all = rounds.chain(&self.retired);
        let due: usize = all.map(|round| round.machine.calls_due()).sum();
        due + self.repairs.calls_due()
    }

    /// What has been done since the start.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Groups that are not getting on: their last round has failed. `None` if there are none.
    pub fn failing(&self) -> Option<Failing> {
        let failing = || {
            let groups = self.syncing.values();
            groups.filter(|group| group.failures > 0 && !group.has_ended_well())
        };
        let since_us = failing().map(|group| group.progress_us).min()?;
        let groups = failing().count() as u32;
        Some(Failing { groups, since_us })
    }

    /// Since when this node's replica of the group is syncing, if it is.
    pub fn since(&self, pg: PgId) -> Option<Epoch> {
        Some(self.syncing.get(&pg)?.since)
    }

    /// With whom the group is being compared.
    pub fn source(&self, pg: PgId) -> Option<(NodeId, Incarnation)> {
        let round = self.syncing.get(&pg)?.round.as_ref()?;
        Some((round.source.node, round.source.incarnation))
    }
}

/// A layer's fence, to be persisted here.
fn fence(
    pg: PgId,
    layer: fabric_types::ids::LayerId,
    generation: Generation,
    epoch: Epoch,
) -> Request {
    let command = Command::Fence {
        layer,
        buffers: IoVecs::NONE,
        len: 0,
    };
    Request {
        pg,
        epoch,
        generation,
        command,
        ..Request::NOTHING
    }
}

impl Totals {
    fn add(&mut self, progress: Progress, well: bool) {
        self.rounds += u64::from(well);
        self.failed += u64::from(!well);
        self.progress.leaves += progress.leaves;
        self.progress.blocks += progress.blocks;
        self.progress.dropped += progress.dropped;
        self.progress.lost += progress.lost;
    }
}

#[cfg(test)]
mod tests;
