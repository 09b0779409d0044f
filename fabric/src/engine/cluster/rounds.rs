//! Rounds of comparison on this node: which replicas of it are syncing, from whom they are brought up to date, and how fast.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::{Ask, Cluster, Map};
use crate::core::membership::Standing;
use crate::core::replica::StoreFailure;
use crate::core::resync::{Action, Call, Progress, Resync, TICK, Why};
use crate::proto::ids::LayerId;
use crate::proto::{Command, Epoch, Generation, Incarnation, NodeId, PgId, Refusal};

/// Pause before a round that failed begins anew; doubled with each failure up to the maximum.
const PAUSE_MIN: Duration = Duration::from_millis(20);
/// See [`PAUSE_MIN`].
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// How often meta is asked to promote a replica that has been compared, until the map says so.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// A round and one of its calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Token {
    number: u64,
    call: u32,
}

/// A round under way.
struct Round {
    number: u64,
    source: (NodeId, Incarnation),
    /// Of the group, in the newest map.
    epoch: Epoch,
    machine: Resync,
    /// It has ended well: when meta was asked.
    asked: Option<Instant>,
}

/// What a round wants done.
#[derive(Debug, Clone, Copy)]
pub enum Wish {
    /// A command for the source, under this map.
    Ask((NodeId, Incarnation), Epoch, Command),
    /// A command for this node's own store.
    Local(Command),
    /// Raise the layer's fence here.
    Fence(LayerId, Generation, Epoch),
}

/// Why a replica is not being compared now.
#[derive(Debug, Clone, Copy)]
struct Pause {
    until: Instant,
    failures: u32,
}

/// What rounds have done since the start.
#[derive(Debug, Clone, Copy, Default)]
pub struct Totals {
    /// Rounds that ended well.
    pub rounds: u64,
    /// Rounds that ended in vain.
    pub failed: u64,
    /// What those that ended did.
    pub progress: Progress,
}

/// See the module.
#[derive(Default)]
pub struct Rounds {
    all: BTreeMap<PgId, Round>,
    /// Rounds that are over, whose memory is still in use.
    retired: Vec<Round>,
    pauses: BTreeMap<PgId, Pause>,
    ticked: Option<Instant>,
    next: u64,
    /// What has been done, for others to look at.
    totals: Arc<Mutex<Totals>>,
}

const UNBROKEN: &str = "no panic under this lock";

impl Rounds {
    /// None yet; what they do is added up in `totals`.
    pub fn new(totals: Arc<Mutex<Totals>>) -> Self {
        Self {
            totals,
            ..Self::default()
        }
    }

    /// Begins what is to be begun by the map, and ends what is over.
    pub fn look_at(&mut self, map: &Map, cluster: &Cluster, now: Instant) {
        for set in map.sets.iter() {
            let member = set.index_of(cluster.node).map(|index| set.members()[index]);
            let syncing = member.filter(|m| {
                let mine = m.incarnation == cluster.incarnation;
                mine && m.standing == Standing::Syncing && cluster.groups.get(set.pg()).is_some()
            });
            let Some(member) = syncing else {
                self.end(set.pg());
                self.pauses.remove(&set.pg());
                continue;
            };
            match self.all.get_mut(&set.pg()) {
                Some(round) if round.machine.since() == member.since => {
                    round.epoch = set.epoch();
                    continue;
                }
                Some(_) => self.end(set.pg()),
                None => {}
            }
            let pause = self.pauses.get(&set.pg()).copied();
            if pause.is_some_and(|pause| pause.until > now) {
                continue;
            }
            let sources: Vec<_> = set.in_sync().iter().map(|i| set.members()[i]).collect();
            if sources.is_empty() {
                continue;
            }
            // Another one after each failure.
            let turn = pause.map_or(set.pg().0 as usize, |pause| pause.failures as usize);
            let source = sources[turn % sources.len()];
            self.next += 1;
            let round = Round {
                number: self.next,
                source: (source.node, source.incarnation),
                epoch: set.epoch(),
                machine: Resync::new(set.pg(), member.since, source.node),
                asked: None,
            };
            self.all.insert(set.pg(), round);
        }
    }

    fn end(&mut self, pg: PgId) {
        if let Some(round) = self.all.remove(&pg) {
            if round.machine.calls_due() > 0 {
                self.retired.push(round);
            }
        }
    }

    /// Whether any is under way.
    pub fn any(&self) -> bool {
        !self.all.is_empty() || !self.pauses.is_empty()
    }

    /// Next thing that a round wants done, with its group.
    pub fn poll(&mut self, cluster: &Cluster, now: Instant) -> Option<(PgId, Token, Wish)> {
        loop {
            let next = self.all.iter_mut().find_map(|(pg, round)| {
                let action = round.machine.poll(&cluster.groups)?;
                Some((*pg, round, action))
            });
            let (pg, round, action) = next?;
            let token = |call: Call| Token {
                number: round.number,
                call: call.0,
            };
            match action {
                Action::Ask(call, command) => {
                    // The source refuses what is older than a join: clients, who go by the group's last change, are not to be
                    // refused for what has happened to other groups since.
                    let epoch = match command {
                        Command::Join => round.epoch,
                        _ => cluster.groups.known(),
                    };
                    let wish = Wish::Ask(round.source, epoch, command);
                    return Some((pg, token(call), wish));
                }
                Action::Local(call, command) => {
                    return Some((pg, token(call), Wish::Local(command)));
                }
                Action::Fence(call, layer, generation, epoch) => {
                    return Some((pg, token(call), Wish::Fence(layer, generation, epoch)));
                }
                Action::Promote => {
                    // Before anybody hears of it.
                    self.totals
                        .lock()
                        .expect(UNBROKEN)
                        .add(round.machine.progress(), true);
                    self.promote(pg, cluster, now);
                }
                Action::Failed(why) => {
                    tracing::debug!(%pg, ?why, "a round of comparison failed");
                    if why == Why::Busy {
                        report_self(pg, cluster);
                    }
                    self.totals
                        .lock()
                        .expect(UNBROKEN)
                        .add(round.machine.progress(), false);
                    self.pause(pg, now);
                }
            }
        }
    }

    fn pause(&mut self, pg: PgId, now: Instant) {
        self.end(pg);
        let failures = self.pauses.get(&pg).map_or(0, |pause| pause.failures) + 1;
        let pause = PAUSE_MIN * (1 << failures.min(8));
        let until = now + pause.min(PAUSE_MAX);
        self.pauses.insert(pg, Pause { until, failures });
    }

    fn promote(&mut self, pg: PgId, cluster: &Cluster, now: Instant) {
        if let Some(round) = self.all.get_mut(&pg) {
            round.asked = Some(now);
            let since = round.machine.since();
            cluster.ask(Ask::Promote { pg, since });
        }
    }

    /// Some time has passed: asks again what was not heard, and looks once more at what would not hold still.
    pub fn on_tick(&mut self, cluster: &Cluster, now: Instant) {
        if now - *self.ticked.get_or_insert(now) >= TICK {
            self.ticked = Some(now);
            self.all
                .values_mut()
                .for_each(|round| round.machine.on_tick());
        }
        let unheard = |round: &Round| round.asked.is_some_and(|asked| now - asked > ASK_AGAIN);
        let again: Vec<PgId> = self
            .all
            .iter()
            .filter(|(_, round)| unheard(round))
            .map(|(pg, _)| *pg)
            .collect();
        for pg in again {
            self.promote(pg, cluster, now);
        }
    }

    fn named(&mut self, token: Token) -> Option<&mut Round> {
        let all = self.all.values_mut().chain(&mut self.retired);
        all.into_iter().find(|round| round.number == token.number)
    }

    /// The source answered.
    pub fn on_reply(&mut self, token: Token, result: Result<(), Refusal>, cluster: &Cluster) {
        if let Some(round) = self.named(token) {
            round
                .machine
                .on_reply(Call(token.call), result, &cluster.groups);
        }
        self.retired.retain(|round| round.machine.calls_due() > 0);
    }

    /// This node's store is done.
    pub fn on_local(&mut self, token: Token, result: Result<(), StoreFailure>, cluster: &Cluster) {
        if let Some(round) = self.named(token) {
            round
                .machine
                .on_local(Call(token.call), result, &cluster.groups);
        }
        self.retired.retain(|round| round.machine.calls_due() > 0);
    }
}

/// Has this node's replica taken out, so that it begins anew.
fn report_self(pg: PgId, cluster: &Cluster) {
    let map = cluster.map();
    if let Some(set) = map.sets.iter().find(|set| set.pg() == pg) {
        let (node, epoch) = (cluster.node, set.epoch());
        cluster.ask(Ask::ReportFailed { pg, node, epoch });
    }
}

impl Totals {
    fn add(&mut self, progress: Progress, well: bool) {
        self.rounds += u64::from(well);
        self.failed += u64::from(!well);
        self.progress.leaves += progress.leaves;
        self.progress.blocks += progress.blocks;
        self.progress.dropped += progress.dropped;
    }
}
