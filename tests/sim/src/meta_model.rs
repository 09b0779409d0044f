//! A **model** of the rules by which the cluster map changes (decision 0004), in place of the Raft group and its planner.
//!
//! Commands are linearizable: the world hands them over one at a time, late, twice, or not at all, and tells everybody the
//! outcome in its own time. The model keeps no clock; what the planner measures (silence, grace) it is told.

use std::collections::BTreeMap;

use fabric::core::membership::{Member, ReplicaSet, Standing};
use fabric::proto::{Epoch, Incarnation, NodeId, PgId};

use crate::queue::{At, Span};

/// A node that was silent for so long is taken for gone.
const SILENCE: Span = Span::millis(400);
/// How long a group without a valid in-sync member waits for all of them to come back.
const GRACE: Span = Span::seconds(5);
/// Pause before a member that was taken out is tried again; it doubles each time.
const BACK_OFF: Span = Span::millis(100);
const BACK_OFF_MAX: Span = Span::seconds(2);

/// What reaches meta.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// A process lives.
    Beat {
        /// Its node.
        node: NodeId,
        /// Which start.
        incarnation: Incarnation,
    },
    /// A client gave a replica up.
    Report {
        /// Group.
        pg: PgId,
        /// Replica.
        node: NodeId,
        /// The map by which it asked.
        epoch: Epoch,
    },
    /// A syncing replica has been compared.
    Promote {
        /// Group.
        pg: PgId,
        /// Replica.
        node: NodeId,
        /// As this process.
        incarnation: Incarnation,
        /// In this round.
        since: Epoch,
    },
}

/// A group in the map.
#[derive(Debug, Clone)]
pub struct Group {
    /// Cluster epoch of its last change.
    pub epoch: Epoch,
    /// Its members.
    pub members: Vec<Member>,
}

/// A change of the map, for the invariants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// Group.
    pub pg: PgId,
    /// Who.
    pub node: NodeId,
    /// Was.
    pub from: (Standing, Incarnation),
    /// Is.
    pub to: (Standing, Incarnation),
    /// No member was left that could be trusted, and this one was made the authority.
    pub resettled: bool,
}

#[derive(Debug, Clone, Copy)]
struct Known {
    incarnation: Incarnation,
    heard: At,
}

/// See the module.
#[derive(Debug)]
pub struct MetaModel {
    epoch: Epoch,
    min_in_sync: usize,
    groups: Vec<Group>,
    nodes: BTreeMap<NodeId, Known>,
    /// Replicas that clients gave up by the present map, and since when.
    reports: BTreeMap<(PgId, NodeId), At>,
    /// The map after the last turn.
    planned: Epoch,
    /// Since when a group has no valid in-sync member.
    lost_since: BTreeMap<PgId, At>,
    /// When a member may be tried again, and the pause after the next failure.
    back_off: BTreeMap<(PgId, NodeId), (At, Span)>,
    /// When the leader took over: what nodes said to the one before it does not know.
    leader_since: At,
    /// Changes since the last look.
    pub changes: Vec<Change>,
}

impl MetaModel {
    /// A map where everybody listed is in sync.
    pub fn new(min_in_sync: usize, groups: Vec<Vec<(NodeId, Incarnation)>>) -> Self {
        let epoch = Epoch(1);
        let heard = At(0);
        let known = |&(node, incarnation): &(NodeId, Incarnation)| {
            let known = Known { incarnation, heard };
            (node, known)
        };
        let nodes = groups.iter().flatten().map(known).collect();
        let member = |(node, incarnation)| Member {
            node,
            incarnation,
            standing: Standing::InSync,
            since: epoch,
        };
        Self {
            epoch,
            min_in_sync,
            groups: groups
                .into_iter()
                .map(|members| Group {
                    epoch,
                    members: members.into_iter().map(member).collect(),
                })
                .collect(),
            nodes,
            reports: BTreeMap::new(),
            planned: epoch,
            lost_since: BTreeMap::new(),
            back_off: BTreeMap::new(),
            leader_since: At(0),
            changes: Vec::new(),
        }
    }

    /// The map as clients take it.
    pub fn sets(&self) -> Vec<ReplicaSet> {
        (0..)
            .zip(&self.groups)
            .map(|(pg, g)| ReplicaSet::new(PgId(pg), g.epoch, self.min_in_sync, g.members.clone()))
            .collect()
    }

    /// The groups.
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// The map's version.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Applies a command that Raft committed.
    pub fn apply(&mut self, now: At, command: Command) {
        match command {
            Command::Beat { node, incarnation } => {
                let known = self.nodes.entry(node).or_insert(Known {
                    incarnation,
                    heard: now,
                });
                // An older process may be heard late.
                if incarnation >= known.incarnation {
                    *known = Known {
                        incarnation,
                        heard: now,
                    };
                }
            }
            Command::Report { pg, node, epoch } => {
                let group = &self.groups[pg.0 as usize];
                if group.epoch == epoch {
                    self.reports.entry((pg, node)).or_insert(now);
                }
            }
            Command::Promote {
                pg,
                node,
                incarnation,
                since,
            } => {
                let members = &self.groups[pg.0 as usize].members;
                let is_it = |m: &Member| {
                    (m.node, m.incarnation, m.since) == (node, incarnation, since)
                        && m.standing == Standing::Syncing
                };
                if let Some(at) = members.iter().position(is_it) {
                    self.set(pg, at, Standing::InSync, incarnation);
                }
            }
        }
    }

    /// There is a leader again.
    pub fn elect(&mut self, now: At) {
        self.leader_since = now;
    }

    /// The planner's turn; true if the map changed.
    pub fn plan(&mut self, now: At) -> bool {
        let before = self.planned;
        for pg in 0..self.groups.len() {
            let pg = PgId(pg as u64);
            self.demote(now, pg);
            self.resettle(now, pg);
            self.start_syncing(now, pg);
        }
        self.planned = self.epoch;
        self.epoch != before
    }

    /// Whether the member's process is the one that the map knows, as far as anybody can tell: a new leader counts the
    /// silence from its own beginning.
    fn is_valid(&self, now: At, member: &Member) -> bool {
        self.nodes.get(&member.node).is_some_and(|known| {
            let heard = known.heard.max(self.leader_since);
            known.incarnation == member.incarnation && now.since(heard) < SILENCE
        })
    }

    /// *Demote*: takes out one member that is not valid or was reported, if another in-sync one is known to be valid since.
    fn demote(&mut self, now: At, pg: PgId) {
        let group = &self.groups[pg.0 as usize];
        let in_sync = |m: &&Member| m.standing == Standing::InSync;
        for at in 0..group.members.len() {
            let member = group.members[at];
            let reported = self.reports.get(&(pg, member.node)).copied();
            let valid = self.is_valid(now, &member);
            if member.standing == Standing::Out || (valid && reported.is_none()) {
                continue;
            }
            let since = reported.unwrap_or(At(now.0.saturating_sub(SILENCE.0)));
            let others = group.members.iter().filter(in_sync);
            let safe = others
                .filter(|m| m.node != member.node)
                .any(|m| self.is_valid(now, m) && self.nodes[&m.node].heard >= since);
            if safe {
                self.set(pg, at, Standing::Out, member.incarnation);
                let (_, pause) = self
                    .back_off
                    .get(&(pg, member.node))
                    .copied()
                    .unwrap_or_default();
                let pause = Span((pause.0 * 2).clamp(BACK_OFF.0, BACK_OFF_MAX.0));
                self.back_off
                    .insert((pg, member.node), (now + pause, pause));
                return;
            }
        }
    }

    /// *Resettle*: with no in-sync member valid, one that is up again decides what the group holds.
    fn resettle(&mut self, now: At, pg: PgId) {
        let group = &self.groups[pg.0 as usize];
        let in_sync = |m: &&Member| m.standing == Standing::InSync;
        if group
            .members
            .iter()
            .filter(in_sync)
            .any(|m| self.is_valid(now, m))
        {
            self.lost_since.remove(&pg);
            return;
        }
        let since = *self.lost_since.entry(pg).or_insert(now);
        let registered = |m: &Member| {
            let heard = self
                .nodes
                .get(&m.node)
                .filter(|k| now.since(k.heard) < SILENCE);
            heard.map(|k| k.incarnation).filter(|i| *i > m.incarnation)
        };
        let all = group
            .members
            .iter()
            .filter(in_sync)
            .all(|m| registered(m).is_some());
        if !all && now.since(since) < GRACE {
            return;
        }
        let members = group.members.clone();
        let up = members.iter().enumerate().filter(|(_, m)| in_sync(m));
        let Some((authority, incarnation)) = up
            .into_iter()
            .find_map(|(at, m)| Some((at, registered(m)?)))
        else {
            return;
        };
        for (at, member) in members.iter().enumerate() {
            if at == authority {
                self.set(pg, at, Standing::InSync, incarnation);
            } else if member.standing != Standing::Out {
                self.set(pg, at, Standing::Out, member.incarnation);
            }
        }
        self.lost_since.remove(&pg);
    }

    /// *Start syncing*: an Out member whose node is up is compared, if there is somebody to compare it with.
    fn start_syncing(&mut self, now: At, pg: PgId) {
        let group = &self.groups[pg.0 as usize];
        let in_sync = |m: &&Member| m.standing == Standing::InSync;
        if !group
            .members
            .iter()
            .filter(in_sync)
            .any(|m| self.is_valid(now, m))
        {
            return;
        }
        for at in 0..group.members.len() {
            let member = group.members[at];
            let known = self
                .nodes
                .get(&member.node)
                .filter(|k| now.since(k.heard) < SILENCE);
            let back_off = self.back_off.get(&(pg, member.node));
            let may = back_off.is_none_or(|(after, _)| *after <= now);
            if let Some(known) = known.filter(|_| member.standing == Standing::Out && may) {
                let incarnation = known.incarnation;
                self.set(pg, at, Standing::Syncing, incarnation);
                return;
            }
        }
    }

    fn set(&mut self, pg: PgId, at: usize, standing: Standing, incarnation: Incarnation) {
        self.epoch = Epoch(self.epoch.0 + 1);
        let group = &mut self.groups[pg.0 as usize];
        let member = &mut group.members[at];
        self.changes.push(Change {
            pg,
            node: member.node,
            from: (member.standing, member.incarnation),
            to: (standing, incarnation),
            resettled: standing == Standing::InSync && member.standing != Standing::Syncing,
        });
        // A promotion changes nothing about what the replica is sent.
        if (member.standing, standing) != (Standing::Syncing, Standing::InSync) {
            member.since = self.epoch;
        }
        (member.standing, member.incarnation) = (standing, incarnation);
        group.epoch = self.epoch;
        self.reports.retain(|(of, _), _| *of != pg);
    }
}
