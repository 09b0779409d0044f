//! The way to meta and back: late, lost, and now and then nobody there.

use fabric_types::membership::{Member, ReplicaState};
use fabric_types::{Epoch, Generation, Incarnation, NodeId, PgId};
use meta::Outcome;
use rand::Rng;

use super::lease_time::Renewal;
use super::{BEAT_EVERY, End, Event, Outage, PLAN_EVERY, Sim};
use crate::metadata::WITNESS_WAIT;
use crate::mutation::Mutation;
use crate::queue::Span;

/// Longest that Raft takes to commit.
const COMMIT: Span = Span::millis(5);

/// What reaches meta's leader.
#[derive(Debug, Clone)]
pub enum MetaMessage {
    /// A process lives.
    HeartbeatReply(usize, Incarnation),
    /// A client gave a replica up, by this map of the group.
    Report(PgId, Member, Epoch),
    /// A syncing replica has been compared.
    Promote(usize, crate::node::Promotion),
    /// A host needs the lease of a volume.
    Lease(LeaseSeeker),
    /// A host goes on with a lease.
    Renew(Renewal),
    /// A host gives a lease back.
    Release(usize, Generation),
    /// To be committed as it is.
    Propose(Box<meta::Command>),
}

/// A host that asks for a lease, in one of its lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseSeeker {
    /// The volume.
    pub volume: usize,
    /// The host.
    pub host: usize,
    /// Which start of it.
    pub life: u64,
    /// When it asked, by its clock.
    pub asked_us: u64,
}

impl Sim {
    /// A host gives a replica up; meta is told until it has acted.
    pub(super) fn note_report(&mut self, host: usize, pg: PgId, node: NodeId, epoch: Epoch) {
        let sets = &self.hosts[host].sets;
        let set = sets.iter().find(|set| set.pg() == pg);
        let member = set.and_then(|set| Some(set.members()[set.index_of(node)?]));
        let Some(member) = member else {
            // The map has left it out meanwhile.
            return;
        };
        let reports = &mut self.hosts[host].reports;
        let known = reports.entry((pg, node)).or_insert((epoch, member));
        if known.0 <= epoch {
            *known = (epoch, member);
        }
        self.report(host, pg, &member, epoch);
    }

    pub(super) fn report(&mut self, host: usize, pg: PgId, member: &Member, epoch: Epoch) {
        let node = member.node;
        self.trace
            .note(self.now, &[10, host as u64, pg.0, node.0, epoch.0], || {
                format!("host {host} gives {node} of {pg} up, by {epoch}")
            });
        let word = MetaMessage::Report(pg, *member, epoch);
        self.send_control(End::Host(host), End::Meta, Event::MetaMessage(word));
    }

    pub(super) fn on_beat(&mut self, node: usize) {
        let state = &self.nodes[node];
        let awake = state.paused_until <= self.now && state.member;
        if let Some(process) = state.process.as_ref().filter(|_| awake) {
            let word = MetaMessage::HeartbeatReply(node, process.incarnation);
            self.send_control(End::Node(node), End::Meta, Event::MetaMessage(word));
        }
        self.after(BEAT_EVERY, Event::HeartbeatReply(node));
    }

    /// Somebody's word arrives at meta's leader, if there is one.
    pub(super) fn on_word(&mut self, word: MetaMessage) {
        if self.leaderless_until > self.now {
            return;
        }
        match word {
            MetaMessage::HeartbeatReply(node, incarnation) => {
                let boots = match self.plan.mutation {
                    Some(Mutation::ForgetBoot) => 0,
                    _ => self.nodes[node].boots(),
                };
                let start = (incarnation, boots);
                let news = self.meta.heard(node, start, self.now);
                let known = news.is_empty();
                self.propose(news);
                if known {
                    self.judge_reports();
                }
            }
            MetaMessage::Report(pg, member, epoch) => {
                self.meta.report(pg, &member, epoch, self.now);
                self.judge_reports();
                self.after(WITNESS_WAIT, Event::JudgeReports);
            }
            MetaMessage::Promote(node, promotion) => {
                let command = self.meta.promotion(node, &promotion, self.now);
                self.propose(command);
            }
            MetaMessage::Lease(seeker) => {
                if !self.may_grant(&seeker) {
                    return;
                }
                let current = self.leases[seeker.volume].generation;
                let command = self
                    .meta
                    .grant(seeker.volume, seeker.host, current, self.now);
                let commit = self.some(COMMIT);
                let command = Box::new(command);
                self.after(commit, Event::Commit(command, Some((seeker, self.terms))));
            }
            MetaMessage::Renew(renewal) => self.on_renew(renewal),
            MetaMessage::Release(volume, generation) => {
                let released = self.lease_time.released.entry(volume).or_default();
                *released = generation.max(*released);
            }
            MetaMessage::Propose(command) => self.propose([*command]),
        }
    }

    pub(super) fn judge_reports(&mut self) {
        let due = self.meta.due_reports(self.now);
        self.propose(due);
    }

    /// Hands commands to Raft, in this order.
    fn propose(&mut self, commands: impl IntoIterator<Item = meta::Command>) {
        let mut commit = Span(0);
        for command in commands {
            commit.0 += self.some(COMMIT).0;
            self.after(commit, Event::Commit(Box::new(command), None));
        }
    }

    pub(super) fn on_commit(
        &mut self,
        command: &meta::Command,
        seeker: Option<(LeaseSeeker, u32)>,
    ) {
        // A proposal of a leader that was lost meanwhile may have made it, or not.
        if self.leaderless_until > self.now && self.rng.random() {
            return;
        }
        // What the leaders before this one proposed is committed before it answers anybody, or never.
        let is_older = seeker.is_some_and(|(_, term)| term != self.terms);
        if is_older && self.has_lease_time() {
            return;
        }
        let before = self.meta.epoch();
        let outcome = self.meta.apply(command);
        let is_applied = outcome.is_some();
        self.note_changes();
        if let (Some(Outcome::Lease(lease)), Some((seeker, _))) = (outcome, seeker) {
            self.granted(seeker, lease.generation, lease.epoch);
        }
        if self.meta.epoch() != before {
            self.publish();
        }
        if is_applied {
            self.publish_records();
        }
    }

    /// The planner's turn.
    pub(super) fn on_plan(&mut self) {
        let led = self.leaderless_until <= self.now;
        if led && !self.led {
            self.meta.elect(self.now);
        }
        self.led = led;
        if led {
            let commands = self.meta.plan(self.now);
            self.propose(commands);
            // For whoever missed the last map.
            self.publish();
            self.publish_records();
        }
        self.after(PLAN_EVERY, Event::Plan);
    }

    pub(super) fn note_members(&mut self) {
        for (pg, group) in (0..).zip(self.meta.groups()) {
            let members = group.all.iter().map(|place| (PgId(pg), place.at));
            self.been_members.extend(members);
        }
    }

    fn note_changes(&mut self) {
        self.note_members();
        for change in std::mem::take(&mut self.meta.changes) {
            let state = change.to.0 as u64;
            let member = change.at.node as u64 | (change.at.device as u64) << 32;
            let numbers = [11, change.pg.0, member, state, change.to.1.0];
            let epoch = self.meta.epoch();
            self.trace.note(self.now, &numbers, || {
                let ((from, _), (to, incarnation)) = (change.from, change.to);
                let (pg, at) = (change.pg, change.at);
                format!("meta: {epoch} {pg} {at} {from:?} -> {to:?} as {incarnation}")
            });
            self.check_change(&change);
            let in_sync = |state| state == ReplicaState::InSync;
            match (in_sync(change.from.0), in_sync(change.to.0)) {
                (false, true) => {
                    self.check_promoted(change.pg);
                    self.outage_at(Outage::Promotion);
                }
                (true, false) => self.outage_at(Outage::Demotion),
                _ => {}
            }
        }
    }

    /// Tells everybody the map.
    pub(super) fn publish(&mut self) {
        self.note_room();
        let sets = self.meta.sets();
        let leases = self.leases.clone();
        let epoch = self.meta.epoch();
        for host in 0..self.hosts.len() {
            let event = Event::Map {
                host,
                life: self.hosts[host].life,
                epoch,
                sets: sets.clone(),
                leases: leases.clone(),
            };
            self.send_control(End::Meta, End::Host(host), event);
        }
        for node in 0..self.nodes.len() {
            let map = self.meta.node_map(node);
            let event = Event::NodeMap { node, map };
            self.send_control(End::Meta, End::Node(node), event);
        }
    }
}
