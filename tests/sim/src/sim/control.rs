//! The way to meta and back: late, lost, and now and then nobody there.

use fabric::proto::{Epoch, NodeId, PgId};
use rand::Rng;

use super::{BEAT_EVERY, End, Event, PLAN_EVERY, Sim};
use crate::meta_model::Command;
use crate::queue::Span;

/// Longest that Raft takes to commit.
const COMMIT: Span = Span::millis(5);
/// Whoever missed a map has the next one after so many turns of the planner.
const REPUBLISH: u64 = 10;

impl Sim {
    /// A host gives a replica up; meta is told until it has acted.
    pub(super) fn note_report(&mut self, host: usize, pg: PgId, node: NodeId, epoch: Epoch) {
        let known = self.hosts[host].reports.entry((pg, node)).or_insert(epoch);
        *known = epoch.max(*known);
        self.report(host, pg, node, epoch);
    }

    pub(super) fn report(&mut self, host: usize, pg: PgId, node: NodeId, epoch: Epoch) {
        let command = Command::Report { pg, node, epoch };
        self.trace
            .note(self.now, &[10, host as u64, pg.0, node.0, epoch.0], || {
                format!("host {host} gives {node} of {pg} up, by {epoch}")
            });
        self.send_control(End::Host(host), End::Meta, Event::Command(command));
    }

    pub(super) fn on_beat(&mut self, node: usize) {
        let state = &self.nodes[node];
        if let Some(process) = state
            .process
            .as_ref()
            .filter(|_| state.paused_until <= self.now)
        {
            let command = Command::Beat {
                node: state.id,
                incarnation: process.incarnation,
            };
            self.send_control(End::Node(node), End::Meta, Event::Command(command));
        }
        self.after(BEAT_EVERY, Event::Beat(node));
    }

    /// A node asks for the promotion of what it has compared.
    pub(super) fn ask_promotions(&mut self, node: usize) {
        for promotion in self.nodes[node].promotions() {
            let command = Command::Promote {
                pg: promotion.pg,
                node: self.nodes[node].id,
                incarnation: promotion.incarnation,
                since: promotion.since,
            };
            self.send_control(End::Node(node), End::Meta, Event::Command(command));
        }
    }

    /// A command arrives at meta's leader, if there is one.
    pub(super) fn on_command(&mut self, command: Command) {
        if self.leaderless_until > self.now {
            return;
        }
        let commit = self.some(COMMIT);
        self.after(commit, Event::Commit(command));
    }

    pub(super) fn on_commit(&mut self, command: Command) {
        // A proposal of a leader that was lost meanwhile may have made it, or not.
        if self.leaderless_until > self.now && self.rng.random() {
            return;
        }
        self.meta.apply(self.now, command);
    }

    /// The planner's turn.
    pub(super) fn on_plan(&mut self) {
        let led = self.leaderless_until <= self.now;
        if led && !self.led {
            self.meta.elect(self.now);
        }
        self.led = led;
        self.plans += 1;
        let changed = led && self.meta.plan(self.now);
        self.note_changes();
        if changed || (led && self.plans % REPUBLISH == 0) {
            self.publish();
        }
        self.after(PLAN_EVERY, Event::Plan);
    }

    fn note_changes(&mut self) {
        for change in std::mem::take(&mut self.meta.changes) {
            let standing = change.to.0 as u64;
            let numbers = [11, change.pg.0, change.node.0, standing, change.to.1.0];
            let epoch = self.meta.epoch();
            self.trace.note(self.now, &numbers, || {
                let ((from, _), (to, incarnation)) = (change.from, change.to);
                let (pg, node) = (change.pg, change.node);
                format!("meta: {epoch} {pg} {node} {from:?} -> {to:?} as {incarnation}")
            });
            self.check_change(&change);
        }
    }

    /// Tells everybody the map.
    pub(super) fn publish(&mut self) {
        let sets = self.meta.sets();
        let leases = self.leases.clone();
        for host in 0..self.hosts.len() {
            let event = Event::Map {
                host,
                life: self.hosts[host].life,
                epoch: self.meta.epoch(),
                sets: sets.clone(),
                leases: leases.clone(),
            };
            self.send_control(End::Meta, End::Host(host), event);
        }
        for node in 0..self.nodes.len() {
            let sets = sets.clone();
            let event = Event::NodeMap { node, sets };
            self.send_control(End::Meta, End::Node(node), event);
        }
    }
}
