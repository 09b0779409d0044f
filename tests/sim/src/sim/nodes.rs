//! Storage nodes: what their disks do, and how they die and come back.

use fabric_replication::repair::queue::{BadBlock, Outcome};
use fabric_store::testing::sim_disk::{CrashKind, IoKey, IoKind};
use fabric_types::Incarnation;
use rand::Rng;

use super::calls::CALLS_FROM;
use super::control::MetaMessage;
use super::strangers::STRANGERS_FROM;
use super::{End, Event, Fault, Outage, Sim};
use crate::node::{Device, DeviceAt, Node, NodeMap, Outputs};
use crate::pace::Upkeep;
use crate::queue::{At, Span};

/// Between two starts of a process that ends at once.
const RESTART_PAUSE: Span = Span::millis(50);

impl Sim {
    /// Lets something happen to a node and does what it then wants.
    pub(super) fn with_node(&mut self, node: usize, act: impl FnOnce(&mut Node, &mut Outputs)) {
        let mut outputs = Outputs {
            now_us: self.now.0,
            ..Outputs::default()
        };
        let before = self.nodes[node].maintained();
        act(&mut self.nodes[node], &mut outputs);
        let now = self.nodes[node].maintained();
        self.cleaned_bytes += now.1.saturating_sub(before.1);
        if now.0 > before.0 {
            self.outage_at(Outage::Checkpoint);
        }
        let Some(process) = &mut self.nodes[node].process else {
            return;
        };
        let (incarnation, stored) = (process.incarnation, process.take_stored());
        for stored in stored {
            let newest = self.nodes[node].newest.entry(stored.layer).or_default();
            *newest = stored.version.max(*newest);
            self.check_stored(node, incarnation, &stored);
        }
        for (device, key, kind) in outputs.disk {
            let at = DeviceAt { node, device };
            let span = self.disk_time(at, kind);
            let event = Event::Disk {
                at,
                incarnation,
                key,
            };
            self.after(span, event);
        }
        for answer in outputs.answers {
            if answer.peer.0 >= STRANGERS_FROM {
                self.on_strange_answer(&answer);
            } else if answer.peer.0 >= CALLS_FROM {
                self.send_call_answer(answer);
            } else {
                self.send_answer(answer);
            }
        }
        for ask in outputs.asks {
            self.ask_source(node, incarnation, ask);
        }
        for (bad, outcome) in outputs.repair_outcomes {
            self.note_repair_outcome(node, bad, outcome);
        }
        for bad in outputs.lost {
            self.note_lost(node, bad);
        }
        for promotion in &outputs.promotions {
            self.forging.promotion_is_asked(promotion);
        }
        let words = outputs.promotions.into_iter();
        let words = words.map(|promotion| MetaMessage::Promote(node, promotion));
        let given_up = outputs.given_up.into_iter();
        let given_up = given_up.map(|(pg, member, epoch)| MetaMessage::Report(pg, member, epoch));
        for word in words.chain(given_up) {
            self.send_control(End::Node(node), End::Meta, Event::MetaMessage(word));
        }
        if let Some(wake) = self.nodes[node].wake_at(self.now.0) {
            self.at(At(wake), Event::RoundTick(node));
        }
    }

    /// A node tells what became of a block that it could not read.
    fn note_repair_outcome(&mut self, node: usize, bad: BadBlock, outcome: Outcome) {
        let BadBlock { chunk, block, .. } = bad;
        let numbers = [38, node as u64, chunk.layer.0, u64::from(block)];
        self.trace.note(self.now, &numbers, || {
            format!("node {node}: {chunk:?} block {block}, which was bad: {outcome:?}")
        });
        self.repair_outcomes.push((node, block, outcome));
    }

    /// A map arrives at a node.
    pub(super) fn on_node_map(&mut self, node: usize, map: NodeMap) {
        if self.nodes[node].paused_until > self.now {
            let event = Event::NodeMap { node, map };
            self.at(self.nodes[node].paused_until, event);
            return;
        }
        self.with_node(node, |node, outputs| node.on_map(&map, outputs));
    }

    /// A device.
    pub(super) fn device(&mut self, at: DeviceAt) -> &mut Device {
        &mut self.nodes[at.node].devices[at.device]
    }

    fn disk_time(&mut self, at: DeviceAt, kind: IoKind) -> Span {
        let plan = self.plan.disk;
        let mut span = plan.base.0 + self.some(plan.jitter).0;
        if kind == IoKind::Flush {
            span += plan.flush.0;
        }
        Span(span * self.device(at).slowness)
    }

    pub(super) fn on_disk(&mut self, at: DeviceAt, incarnation: Incarnation, key: IoKey) {
        let DeviceAt { node, device } = at;
        if !self.nodes[node].runs(incarnation) {
            return;
        }
        if self.nodes[node].paused_until > self.now {
            let event = Event::Disk {
                at,
                incarnation,
                key,
            };
            self.at(self.nodes[node].paused_until, event);
            return;
        }
        let number = key.id.0 | (device as u64) << 48;
        self.trace.note(self.now, &[6, node as u64, number], || {
            format!("{at}: disk request {} ends", key.id.0)
        });
        self.with_node(node, |node, outputs| node.on_disk(device, key, outputs));
    }

    pub(super) fn on_idle(&mut self, node: usize) {
        if self.nodes[node].paused_until <= self.now {
            self.with_node(node, Node::on_idle);
        }
        self.after(self.pace.idle, Event::Idle(node));
    }

    /// A node's maintenance is due to do something, until all is repaired: then everything comes to rest.
    pub(super) fn on_upkeep(&mut self, node: usize, upkeep: Upkeep) {
        if self.peace {
            return;
        }
        if self.nodes[node].paused_until <= self.now {
            self.with_node(node, |node, outputs| node.on_upkeep(upkeep, outputs));
        }
        self.upkeep_again(node, upkeep);
    }

    /// It does so again after a while.
    pub(super) fn upkeep_again(&mut self, node: usize, upkeep: Upkeep) {
        let every = upkeep.every(&self.pace);
        if every > Span(0) {
            let more = self.some(every);
            self.after(Span(every.0 + more.0), Event::Upkeep(node, upkeep));
        }
    }

    pub(super) fn on_round_tick(&mut self, node: usize) {
        if self.nodes[node].paused_until > self.now {
            let until = self.nodes[node].paused_until;
            self.at(until, Event::RoundTick(node));
            return;
        }
        self.with_node(node, Node::on_tick);
    }

    /// The process of a node dies.
    pub fn crash_node(&mut self, node: usize, kind: CrashKind) {
        if !self.nodes[node].is_up() {
            return;
        }
        let what = Self::crash_name(kind);
        self.trace
            .note(self.now, &[7, node as u64, kind as u64], || {
                format!("node {node}: {what}")
            });
        let seed = self.rng.random();
        self.nodes[node].crash(kind, seed);
        if kind == CrashKind::Process {
            // The kernel closes its sockets.
            self.break_conns_to(node);
        }
    }

    /// The process of a node starts again.
    pub fn start_node(&mut self, node: usize) {
        if self.nodes[node].is_up() || self.nodes[node].lost {
            return;
        }
        let nonce = self.rng.random();
        let threads = self.plan.replica_threads;
        if !self.plan.has_strangers {
            self.nodes[node].access.forget_leases();
        }
        let mut started = self.nodes[node].start(threads, nonce);
        if started.is_err() && self.let_spoilt_rot(node) {
            started = self.nodes[node].start(threads, nonce);
        }
        match started {
            Ok(incarnation) => {
                self.trace
                    .note(self.now, &[8, node as u64, incarnation.0], || {
                        format!("node {node}: starts as {incarnation}")
                    });
                // Whoever still sends to the process before this one is told so.
                self.break_conns_to(node);
                self.forge_if_due(node);
            }
            Err(error) => {
                let state = &mut self.nodes[node];
                let is_full = state.devices.iter().any(|device| device.is_full);
                state.failed_starts += u32::from(!is_full);
                if state.failed_starts > self.plan.faults.disk_errors {
                    self.fail(format!("node {node} does not start: {error}"));
                    return;
                }
                // Whoever looks after services starts it again.
                self.after(RESTART_PAUSE, Event::Fault(Fault::Start(node)));
            }
        }
    }

    /// The process of a node does nothing for a while.
    pub fn pause_node(&mut self, node: usize, span: Span) {
        let until = self.now + span;
        self.nodes[node].paused_until = self.nodes[node].paused_until.max(until);
        self.trace.note(self.now, &[9, node as u64, span.0], || {
            format!("node {node}: stops until {until}")
        });
    }
}
