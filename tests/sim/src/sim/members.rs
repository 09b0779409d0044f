//! Nodes that join, are emptied, or are gone for good.

use fabric_store::testing::sim_disk::CrashKind;
use fabric_types::membership::ReplicaState;
use meta::AdminState;

use super::control::MetaMessage;
use super::{Event, Sim};
use crate::node::DeviceAt;
use crate::queue::Span;

/// How often it is said that a node is gone for good. The planner would say it after
/// [`NODE_REPLACE_AFTER`](meta::NODE_REPLACE_AFTER); nobody waits for that here.
const REPLACE_EVERY: Span = Span::seconds(2);

impl Sim {
    /// The operator's word about a node; it may be refused.
    pub fn set_admin_state(&mut self, node: usize, state: AdminState) {
        let command = self.meta.set_admin_state(node, state, self.now);
        self.on_word(MetaMessage::Propose(Box::new(command)));
    }

    /// The operator's word about a device.
    pub fn drain_device(&mut self, at: DeviceAt, on: bool) {
        if let Some(command) = self.meta.drain_device(at, on, self.now) {
            self.on_word(MetaMessage::Propose(Box::new(command)));
        }
    }

    /// A node dies and does not come back.
    pub fn lose_node(&mut self, node: usize) {
        if !self.nodes[node].member || self.nodes[node].lost {
            return;
        }
        self.crash_node(node, CrashKind::Power);
        self.nodes[node].lost = true;
        self.after(REPLACE_EVERY, Event::Replace(node));
    }

    /// A node's share is given to others.
    pub(super) fn on_replace(&mut self, node: usize) {
        if self.nodes[node].lost {
            self.set_admin_state(node, AdminState::Absent);
            self.after(REPLACE_EVERY, Event::Replace(node));
        }
    }

    /// Before everything is to be well again: what nobody could do without has to be there.
    pub(super) fn make_room(&mut self) {
        // Of a group of which only a lost node has everything nothing can be had without it: it is found
        // again after all.
        for group in self.meta.groups().to_vec() {
            let in_sync = group
                .members
                .iter()
                .filter(|m| m.state == ReplicaState::InSync);
            let nodes: Vec<usize> = in_sync.map(|m| m.node.0 as usize).collect();
            if nodes.iter().all(|&node| self.nodes[node].lost) {
                for node in nodes {
                    self.nodes[node].lost = false;
                }
            }
        }
        let takes_data = |sim: &Self, node: usize| {
            let state = &sim.nodes[node];
            state.member && !state.lost && !sim.meta.is_draining(node)
        };
        let enough = |sim: &Self| {
            let nodes = (0..sim.nodes.len()).filter(|&node| takes_data(sim, node));
            nodes.count() >= sim.plan.replicas
        };
        for node in 0..self.nodes.len() {
            if !enough(self) {
                self.nodes[node].member = true;
                self.nodes[node].lost = false;
            }
        }
        if !enough(self) {
            for node in 0..self.nodes.len() {
                self.set_admin_state(node, AdminState::Active);
            }
        }
    }
}
