//! What must hold after every step, by the names that the design gives it.

use std::collections::BTreeMap;

use fabric_types::ids::CHUNK_BYTES;
use fabric_types::io::SECTOR_BYTES;
use fabric_types::membership::ReplicaState;
use fabric_types::{Incarnation, NodeId};

use crate::metadata::Change;
use crate::node::Stored;
use crate::sim::{Sim, layer_of};
use crate::workload::{CHUNK_SECTORS, GuestOp};

/// Requests that a host's clients have in flight at most: what the guests of it have.
const IN_FLIGHT_MAX: usize = 4096;

/// A process, and which of its node's devices.
type Holder = (Incarnation, usize);

/// Which process has said that it stored which write on which device, until its guest has heard the outcome.
#[derive(Debug, Default)]
pub struct Ledger {
    /// By write, then by device: byte ranges.
    stored: BTreeMap<u32, BTreeMap<Holder, Vec<(u64, u64)>>>,
}

impl Ledger {
    fn note(&mut self, incarnation: Incarnation, stored: &Stored) {
        let of_write = self.stored.entry(stored.tag).or_default();
        let holder = (incarnation, stored.device);
        let ranges = of_write.entry(holder).or_default();
        ranges.push((stored.offset, stored.offset + stored.len));
    }

    /// A device holds whatever these hold.
    fn inherit(&mut self, heir: Holder, of: &[Holder]) {
        for of_write in self.stored.values_mut() {
            let ranges: Vec<_> = of
                .iter()
                .filter_map(|i| of_write.get(i))
                .flatten()
                .copied()
                .collect();
            if !ranges.is_empty() {
                let known = of_write.entry(heir).or_default();
                known.extend(ranges);
                known.sort_unstable();
                known.dedup();
            }
        }
    }

    /// The write is over.
    pub fn forget(&mut self, tag: u32) {
        self.stored.remove(&tag);
    }

    fn holds(&self, holder: Holder, tag: u32, range: (u64, u64)) -> bool {
        let Some(ranges) = self.stored.get(&tag).and_then(|w| w.get(&holder)) else {
            return false;
        };
        let mut ranges = ranges.clone();
        ranges.sort_unstable();
        let mut at = range.0;
        for (from, to) in ranges {
            if from <= at {
                at = at.max(to);
            }
        }
        at >= range.1
    }
}

impl Sim {
    /// A process has said that it stored a write.
    pub(crate) fn check_stored(&mut self, node: usize, incarnation: Incarnation, stored: &Stored) {
        self.one_writer(node, stored);
        if stored.tag != 0 {
            self.ledger.note(incarnation, stored);
        }
    }

    /// Invariant *One writer*: nothing is stored under a lease older than the one persisted.
    fn one_writer(&mut self, node: usize, stored: &Stored) {
        let (made_under, persisted) = stored.generations;
        if made_under < persisted {
            self.fail(format!(
                "invariant One writer: node {node} stored a write of {made_under} after {persisted}"
            ));
        }
    }

    /// A write is about to be acknowledged to its guest.
    ///
    /// Invariant *Shrink before ack*: every process that the map, as it is committed, calls in sync has
    /// stored it.
    pub(crate) fn check_acknowledged(&mut self, volume: usize, op: &GuestOp) {
        if op.zeroes() {
            // Zeroes carry no name; what is read afterwards tells.
            return;
        }
        let (mut at, end) = (
            op.first * SECTOR_BYTES,
            (op.first + op.sectors) * SECTOR_BYTES,
        );
        while at < end {
            let chunk = (at / CHUNK_BYTES) as u32;
            let next = end.min((at / CHUNK_BYTES + 1) * CHUNK_BYTES);
            let pg = self.group_of(volume, chunk);
            let group = &self.meta.groups()[pg.0 as usize];
            let holds = |holder| self.ledger.holds(holder, op.tag.0, (at, next));
            let lacking: Vec<NodeId> = group
                .in_sync()
                .filter(|(m, at)| !holds((m.incarnation, at.device)))
                .map(|(m, _)| m.node)
                .collect();
            if !lacking.is_empty() {
                let (tag, layer) = (op.tag.0, layer_of(volume));
                self.fail(format!(
                    "invariant Shrink before ack: write {tag} of {layer:?} chunk {chunk} is acknowledged, \
                     {lacking:?} in {pg} are in sync and lack it"
                ));
                return;
            }
            at = next;
        }
    }

    /// The map has changed.
    ///
    /// Invariant *No trust on return*: nobody becomes in sync who was not syncing before, as the same
    /// process.
    pub(crate) fn check_change(&mut self, change: &Change) {
        let ((from, was), (to, is)) = (change.from, change.to);
        self.moved += u64::from(change.moved_from.is_some());
        if let Some(node) = self.meta.groups()[change.pg.0 as usize].is_twice_on() {
            let pg = change.pg;
            self.fail(format!("{pg} is in sync on two devices of node {node}"));
        }
        if change.has_new_authority {
            self.note_authority(change);
            return;
        }
        if to == ReplicaState::InSync {
            // It was compared with one of them, and has been sent whatever they were since.
            let group = &self.meta.groups()[change.pg.0 as usize];
            let others = group.in_sync().map(|(m, at)| (m.incarnation, at.device));
            let others: Vec<Holder> = others.chain(change.moved_from).collect();
            self.ledger.inherit((is, change.at.device), &others);
        }
        if to == ReplicaState::InSync && (from != ReplicaState::Syncing || was != is) {
            self.fail(format!("invariant No trust on return: {change:?}"));
        }
    }

    /// A group has a new authority. If it lost power since it was in sync, then also what was not flushed.
    fn note_authority(&mut self, change: &Change) {
        let node = &self.nodes[change.at.node];
        let [from, to] = [change.from, change.to].map(|(_, of)| (of, change.at.device));
        if !node.lost_power_between(change.from.1, change.to.1) {
            self.ledger.inherit(to, &[from]);
            self.lose_rotten(change, false);
            return;
        }
        self.lose_rotten(change, true);
        // A request that is not over may have parts that replicas were done with before: what is lost of them
        // is told by a flush, unless they were durable.
        self.ledger.inherit(to, &[from]);
        let (pg, groups) = (change.pg, self.plan.groups);
        for volume in 0..self.plan.volumes {
            let concerned = |sector: u64| {
                let chunk = (sector / CHUNK_SECTORS) as u32;
                crate::sim::group_of(volume, chunk, groups) == pg
            };
            self.checker.rollback(volume, concerned);
        }
    }

    /// After every event.
    pub(crate) fn check_step(&mut self) {
        self.bounded();
    }

    /// Invariant *Bounded*: nobody holds more than is in flight.
    fn bounded(&mut self) {
        for host in &self.hosts {
            for lane in &host.lanes {
                if lane.client.in_flight() > IN_FLIGHT_MAX {
                    self.fail("invariant Bounded: a client has more requests than guests have");
                    return;
                }
            }
        }
    }
}
