//! Hosts and their guests.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use fabric_replication::client::ClientAction;
use fabric_replication::volume::{Durability, OnFull, VolumeParams, VolumeState};
use fabric_types::ids::{CHUNK_BYTES, ChunkKey};
use fabric_types::io::{self, IoError, IoResult, Op, SECTOR_BYTES, Submit, Tag};
use fabric_types::membership::ReplicaSet;
use fabric_types::{Epoch, Generation, NodeId};

use super::leases::Lease;
use super::{Event, Outage, Sim, layer_of};
use crate::checker::{self, tags_of};
use crate::host::{Host, Lane};
use crate::queue::Span;
use crate::workload::{self, GuestOp};

/// A host tells meta again what it has not answered.
const REPORT_EVERY: Span = Span::millis(50);
/// How often a data thread looks at what waits for a moment.
const TICK: Span = Span(fabric_replication::client::TICK.as_micros() as u64);
/// A guest that was told "busy" tries again.
const BUSY_PAUSE: Span = Span(200);

impl Sim {
    pub(super) fn add_host(&mut self) {
        let host = self.hosts.len();
        self.hosts.push(Host {
            lanes: Vec::new(),
            volumes: BTreeMap::new(),
            suspended: BTreeMap::new(),
            reports: BTreeMap::new(),
            life: 1,
            up: false,
            sets: Vec::new(),
            map: Epoch(0),
            past: Vec::new(),
        });
        self.start_host(host);
        self.after(REPORT_EVERY, Event::Report(host));
    }

    /// The machine starts, with the map as it is now.
    pub fn start_host(&mut self, host: usize) {
        if self.hosts[host].up {
            return;
        }
        let sets = self.meta.sets();
        let nodes = self.plan.nodes;
        let state = &mut self.hosts[host];
        state.up = true;
        let plan = &self.plan;
        state.lanes = (0..plan.lanes)
            .map(|lane| Lane::new(lane, sets.clone(), plan))
            .collect();
        (state.sets, state.map) = (sets, self.meta.epoch());
        for lane in 0..self.plan.lanes {
            for node in 0..nodes {
                self.connect(host, lane, node);
            }
        }
    }

    /// Opens a volume on a host that has its lease.
    pub(super) fn open_volume(
        &mut self,
        host: usize,
        volume: usize,
        generation: Generation,
        epoch: Epoch,
    ) {
        let params = VolumeParams {
            layer: layer_of(volume),
            size_bytes: self.plan.chunks * CHUNK_BYTES,
            generation,
            epoch,
            read_only: false,
            durability: match volume < self.plan.write_through {
                true => Durability::Write,
                false => Durability::Flush,
            },
            on_full: OnFull {
                wait: Duration::from_millis(self.plan.full_waits_ms[volume % 3]),
            },
        };
        self.next_name += 1;
        self.next_slot += 1;
        let kept = self.hosts[host].suspended.remove(&volume);
        // Taken over is what it is called for here, and lease recovery is over.
        let kept = kept.filter(|state| state.renew_lease(generation));
        let state = match kept {
            Some(state) => {
                state.set_epoch(epoch);
                state.unsuspend();
                state
            }
            None => {
                let state = VolumeState::new(self.next_name, self.next_slot, &params);
                Arc::new(state.with_watermark_every(self.pace.watermark_every))
            }
        };
        self.hosts[host].volumes.insert(volume, state);
        self.checker.open(volume);
    }

    pub(super) fn on_guest(&mut self, guest: usize) {
        let state = &mut self.guests[guest];
        state.awake = false;
        let full = state.in_flight.len() >= self.plan.depth;
        if state.left == 0 || full || state.suspended {
            return;
        }
        let tag = checker::Tag(self.next_tag);
        self.next_tag += 1;
        if let Some(op) = workload::draw(&self.guests[guest], &self.plan, tag, &mut self.rng) {
            self.guests[guest].left -= 1;
            self.submit(guest, op);
        }
        let think = self.some(self.plan.think);
        self.wake(guest, Span(think.0 + 1));
    }

    pub(super) fn wake(&mut self, guest: usize, after: Span) {
        let state = &mut self.guests[guest];
        let idle = !state.awake && !state.suspended;
        if idle && state.left > 0 && state.in_flight.len() < self.plan.depth {
            state.awake = true;
            self.after(after, Event::Guest(guest));
        }
    }

    /// Hands a request of a guest to its host's client; its name, unless the client has no room.
    pub fn submit(&mut self, guest: usize, mut op: GuestOp) -> Option<u64> {
        let (volume, host) = (self.guests[guest].volume, self.guests[guest].host);
        let state = Arc::clone(&self.hosts[host].volumes[&volume]);
        if matches!(op.op, Op::Write { .. }) {
            checker::fill(&mut op.memory, volume, op.first, op.tag);
        }
        let list = op.list(&mut self.rng);
        self.next_name += 1;
        let name = self.next_name;
        let request = io::Request {
            tag: Tag(name),
            op: op.op,
            offset: op.first * SECTOR_BYTES,
            len: op.sectors * SECTOR_BYTES,
            buffers: if op.memory.is_empty() { &[] } else { &list },
        };
        op.since = self.now;
        op.begun = Some(match op.op {
            Op::Read => self.checker.begin_read(volume),
            Op::Flush => self.checker.begin_flush(),
            _ => self
                .checker
                .begin_write(volume, op.range(), op.tag, op.zeroes()),
        });
        let numbers = [1, volume as u64, op.first, op.sectors, u64::from(op.tag.0)];
        self.trace.note(self.now, &numbers, || {
            let (first, end) = (op.first, op.first + op.sectors);
            format!(
                "guest {guest} asks #{name} {:?} {first}..{end} tag {} lane {}",
                op.op, op.tag.0, op.lane
            )
        });
        let lane = op.lane;
        let now_us = self.clock_of(host);
        let thread = &mut self.hosts[host].lanes[lane];
        thread.client.set_now_us(now_us);
        let outcome = thread.client.submit(&state, &request, &mut thread.wire);
        self.guests[guest].in_flight.insert(name, op);
        let mut taken = Some(name);
        match outcome {
            Submit::Pending => {}
            Submit::Done(result) => self.finish(host, Tag(name), result),
            Submit::Busy => {
                let op = self.guests[guest].in_flight.remove(&name);
                let op = op.expect("put there just now");
                self.abandon(volume, &op);
                self.guests[guest].left += 1;
                self.wake(guest, BUSY_PAUSE);
                taken = None;
            }
        }
        self.after_lane(host, lane);
        taken
    }

    /// Nobody will hear the outcome of a request.
    pub(super) fn abandon(&mut self, volume: usize, op: &GuestOp) {
        if op.writes() {
            self.checker.abandon_write(volume, op.range(), op.tag);
        } else if op.op == Op::Read {
            self.checker
                .abandon_read(volume, op.begun.expect("it was submitted"));
        }
    }

    /// Takes what a data thread's client has to say after anything happened to it.
    pub(super) fn after_lane(&mut self, host: usize, lane: usize) {
        loop {
            let thread = &mut self.hosts[host].lanes[lane];
            let sent = std::mem::take(&mut thread.wire.sent);
            let done = std::mem::take(&mut thread.done);
            let actions: Vec<ClientAction> =
                std::iter::from_fn(|| thread.client.poll_action()).collect();
            if sent.is_empty() && done.is_empty() && actions.is_empty() {
                if thread.client.needs_tick() && !thread.ticking {
                    thread.ticking = true;
                    let life = self.hosts[host].life;
                    self.after(TICK, Event::Tick { host, life, lane });
                }
                return;
            }
            for action in actions {
                let (pg, node, epoch) = match action {
                    ClientAction::ReportFailed { pg, node, epoch }
                    | ClientAction::ReportSlow { pg, node, epoch } => (pg, node, epoch),
                    ClientAction::Repaired {
                        node, chunk, block, ..
                    } => {
                        self.note_repaired(host, node, chunk, block);
                        continue;
                    }
                    ClientAction::UnflushedLost { layer } => {
                        self.trace.note(self.now, &[37, host as u64, layer.0], || {
                            format!(
                                "host {host} tells a guest of {layer:?} that its writes were lost"
                            )
                        });
                        continue;
                    }
                };
                self.note_report(host, pg, node, epoch);
            }
            for (node, request) in sent {
                self.send_request(host, lane, node, request);
            }
            for (tag, result) in done {
                self.finish(host, tag, result);
            }
        }
    }

    pub(super) fn on_tick(&mut self, host: usize, life: u64, lane: usize) {
        if self.hosts[host].life == life {
            let now_us = self.clock_of(host);
            let thread = &mut self.hosts[host].lanes[lane];
            thread.ticking = false;
            thread.client.set_now_us(now_us);
            thread.on_tick();
            self.after_lane(host, lane);
        }
    }

    /// A request of a guest is done.
    fn finish(&mut self, host: usize, name: Tag, result: IoResult) {
        if let Some(op) = self.end_orphan(name.0) {
            let numbers = [35, name.0, u64::from(result.is_ok())];
            self.trace.note(self.now, &numbers, || {
                format!(
                    "host {host}: #{} of a guest that left ends {result:?}",
                    name.0
                )
            });
            self.ledger.forget(op.tag.0);
            return;
        }
        let mut of_host = self.guests.iter().enumerate();
        let found = of_host.find(|(_, g)| g.host == host && g.in_flight.contains_key(&name.0));
        let Some((guest, _)) = found else {
            self.fail(format!(
                "request #{} ended twice, or was never made",
                name.0
            ));
            return;
        };
        let volume = self.guests[guest].volume;
        let op = self.guests[guest].in_flight.remove(&name.0);
        let op = op.expect("found above");
        let numbers = [2, name.0, u64::from(result.is_ok())];
        self.trace.note(self.now, &numbers, || {
            format!("guest {guest} hears #{} {result:?}", name.0)
        });
        match result {
            Ok(()) => {
                self.ops.0 += 1;
                self.learn(volume, &op);
            }
            Err(error) => {
                self.ops.1 += 1;
                self.abandon(volume, &op);
                let is_told = op.op == Op::Flush
                    && op
                        .begun
                        .is_some_and(|begun| self.checker.fail_flush(volume, begun));
                if !is_told {
                    self.check_error(guest, &op, error);
                }
            }
        }
        self.ledger.forget(op.tag.0);
        let think = self.some(self.plan.think);
        self.wake(guest, think);
        self.migrate_if_drained(guest);
    }

    fn learn(&mut self, volume: usize, op: &GuestOp) {
        let begun = op.begun.expect("it was submitted");
        let verdict = match op.op {
            Op::Flush => {
                if let Err(what) = self.checker.end_flush(volume, begun) {
                    self.fail(what);
                }
                self.check_flushed(volume);
                self.outage_at(Outage::Flush);
                Ok(())
            }
            Op::Read => {
                let mut tags = Vec::with_capacity(op.sectors as usize);
                match tags_of(&op.memory, volume, op.first, &mut tags) {
                    Ok(()) => self.checker.end_read(volume, begun, op.first, &tags),
                    Err(sector) => {
                        self.fail(format!(
                            "invariant Verified: volume {volume}, sector {sector} shows bytes that nobody \
                             wrote there"
                        ));
                        return;
                    }
                }
            }
            _ => {
                self.check_acknowledged(volume, op);
                let is_durable =
                    op.is_fua() || volume < self.plan.write_through && op.op != Op::Discard;
                self.checker
                    .end_write(volume, op.range(), op.tag, is_durable)
            }
        };
        if let Err(violation) = verdict {
            self.fail(violation.to_string());
        }
    }

    /// A host passes an error on to its guest only for a reason.
    fn check_error(&mut self, guest: usize, op: &GuestOp, error: IoError) {
        let (host, volume) = (self.guests[guest].host, self.guests[guest].volume);
        let excused = self.plan.faults.disk_errors > 0
            || self.is_excused(host, volume, op, error)
            || error == IoError::Fenced && self.has_newer_lease(host, volume);
        if !excused {
            self.fail(format!(
                "guest {guest} got {error:?}, and nothing that was done to the cluster explains it"
            ));
        }
    }

    /// Returns whether a host was granted a newer lease by a delayed request of its own: it cannot renew the
    /// one that it has, and has closed the volume if it knows. Replicas that apply leases from the metadata
    /// refuse the older lease even if the delayed request came from another host, which does not use its
    /// grant.
    fn has_newer_lease(&self, host: usize, volume: usize) -> bool {
        let newest = self.leases[volume];
        let open = self.hosts[host].volumes.get(&volume);
        (newest.host == host || self.plan.has_strangers)
            && open.is_none_or(|open| open.generation() < newest.generation)
    }

    /// A host has repaired a block of a replica.
    fn note_repaired(&mut self, host: usize, node: NodeId, chunk: ChunkKey, block: u32) {
        let numbers = [36, host as u64, node.0, chunk.layer.0, u64::from(block)];
        self.trace.note(self.now, &numbers, || {
            format!("host {host} has repaired {chunk:?} block {block} of {node}")
        });
        self.repaired.push((node.base().0 as usize, chunk, block));
    }

    /// A map arrives at a host.
    pub(super) fn on_map(
        &mut self,
        (host, life): (usize, u64),
        epoch: Epoch,
        sets: Vec<ReplicaSet>,
        leases: &[Lease],
    ) {
        if self.hosts[host].life != life || !self.hosts[host].up {
            return;
        }
        self.learn_leases(host, leases);
        if epoch < self.hosts[host].map {
            return;
        }
        self.hosts[host].map = epoch;
        let now = self.now;
        let past = std::mem::replace(&mut self.hosts[host].sets, sets.clone());
        self.hosts[host].past.push((now, past));
        for set in &sets {
            let (pg, epoch) = (set.pg(), set.epoch());
            self.hosts[host]
                .reports
                .retain(|(of, _), by| *of != pg || by.0 >= epoch);
        }
        for lane in 0..self.hosts[host].lanes.len() {
            self.hosts[host].lanes[lane].on_map(sets.clone());
            self.after_lane(host, lane);
        }
        self.map_for_takeovers(host);
    }

    /// Tells meta again what it has not acted upon.
    pub(super) fn on_report(&mut self, host: usize) {
        let reports = self.hosts[host].reports.clone();
        for ((pg, _), (epoch, member)) in reports {
            self.report(host, pg, &member, epoch);
        }
        self.after(REPORT_EVERY, Event::Report(host));
    }

    /// Runs until every guest is done, or nothing moves any more.
    pub(super) fn run_guests(&mut self) {
        self.run_until(Span::seconds(120), |sim| {
            sim.guests
                .iter()
                .all(|g| g.left == 0 && g.in_flight.is_empty())
        });
    }
}
