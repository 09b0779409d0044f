//! Leases that move: hosts that die, or are given up while their writes are still under way, and guests that
//! go elsewhere.
//!
//! A host that has lost its lease hears so with the next map, and not before: until then its clients go on,
//! and it is the replicas that have to refuse what they send. Whoever takes over runs the machine that ships
//! ([`takeover`](fabric_replication::lease_recovery::takeover)) before its guest's first request.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use fabric_replication::lease_recovery::takeover::{Action, Takeover as Machine};
use fabric_replication::lease_recovery::{self, Call};
use fabric_types::ids::CHUNK_BYTES;
use fabric_types::{Command, Epoch, Generation, Refusal};
use rand::Rng;

use super::calls::Caller;
use super::control::{LeaseSeeker, MetaMessage};
use super::{End, Event, Sim, layer_of};
use crate::mutation::Mutation;
use crate::node::memory;
use crate::queue::Span;
use crate::workload::GuestOp;

/// A host without the lease that it needs asks for it this often: longer than an answer takes, for each is
/// another grant.
const ASK_EVERY: Span = Span::millis(500);
/// How often a takeover looks at what waits for a moment.
const TICK: Span = Span(lease_recovery::TICK.as_micros() as u64);

/// Who may write a volume, as meta knows it.
#[derive(Debug, Clone, Copy)]
pub struct Lease {
    /// Counts the grants.
    pub generation: Generation,
    /// The holder.
    pub host: usize,
}

/// A new lease on its way to its first I/O.
pub(crate) struct Takeover {
    life: u64,
    /// Tells it from those before it.
    number: u64,
    machine: Machine,
    /// Until when the host counts the lease.
    pub lease_until_us: u64,
    /// Commands under way; they name the machine's memory.
    open: BTreeMap<Call, Command>,
    /// A tick is due.
    ticking: bool,
    /// The guest has gone elsewhere, and the host does not know.
    is_abandoned: bool,
}

impl Takeover {
    /// The new lease.
    pub fn generation(&self) -> Generation {
        self.machine.generation()
    }
}

impl Sim {
    /// The guest moves in good order: once its requests are answered another host takes over.
    pub(super) fn migrate(&mut self, guest: usize) {
        if self.guests[guest].suspended {
            return;
        }
        self.guests[guest].suspended = true;
        self.guests[guest].draining = true;
        self.migrate_if_drained(guest);
    }

    /// The last of a guest's requests may have been answered.
    pub(super) fn migrate_if_drained(&mut self, guest: usize) {
        let state = &self.guests[guest];
        if !state.draining || !state.in_flight.is_empty() {
            return;
        }
        let (host, volume) = (state.host, state.volume);
        // It knows: nothing of it is under way any more.
        if let Some(state) = self.hosts[host].volumes.remove(&volume) {
            state.suspend();
            let word = MetaMessage::Release(volume, state.generation());
            self.hosts[host].suspended.insert(volume, state);
            if self.has_lease_time() {
                self.send_control(End::Host(host), End::Meta, Event::MetaMessage(word));
            }
        }
        let to = self.any_host();
        self.move_guest(guest, to);
    }

    /// The guest is started elsewhere while the host that it ran on goes on with its requests.
    pub fn wrest(&mut self, guest: usize, to: usize) {
        if self.guests[guest].suspended {
            return;
        }
        self.guests[guest].suspended = true;
        let host = self.guests[guest].host;
        let in_flight = std::mem::take(&mut self.guests[guest].in_flight);
        let volume = self.guests[guest].volume;
        for (name, op) in in_flight {
            self.abandon(volume, &op);
            // The old host's clients still use its memory.
            self.orphans.insert(name, (host, op));
        }
        self.cut_from_lease(host, volume);
        self.move_guest(guest, to);
    }

    /// The machine that guests run on dies, and with it whatever it did not send.
    pub fn crash_host(&mut self, host: usize) {
        if !self.hosts[host].up {
            return;
        }
        self.trace
            .note(self.now, &[30, host as u64], || format!("host {host} dies"));
        self.hosts[host].up = false;
        self.hosts[host].life += 1;
        self.hosts[host].lanes.clear();
        self.hosts[host].volumes.clear();
        self.hosts[host].suspended.clear();
        self.hosts[host].reports.clear();
        self.close_conns_of(host);
        self.orphans.retain(|_, (of, _)| *of != host);
        self.takeovers.retain(|(_, by), _| *by != host);
        for guest in 0..self.guests.len() {
            if self.guests[guest].host != host {
                continue;
            }
            let volume = self.guests[guest].volume;
            let in_flight = std::mem::take(&mut self.guests[guest].in_flight);
            for op in in_flight.values() {
                self.abandon(volume, op);
            }
            self.guests[guest].suspended = true;
            let to = self.any_host();
            self.move_guest(guest, to);
        }
    }

    pub(super) fn any_host(&mut self) -> usize {
        self.rng.random_range(0..self.hosts.len())
    }

    /// Somebody starts the guest on a host, perhaps the same one.
    fn move_guest(&mut self, guest: usize, host: usize) {
        let state = &mut self.guests[guest];
        state.draining = false;
        state.host = host;
        let volume = state.volume;
        self.abandon_takeovers(volume);
        self.trace
            .note(self.now, &[31, guest as u64, host as u64], || {
                format!("guest {guest} moves to host {host}")
            });
        if !std::mem::replace(&mut self.guests[guest].asking, true) {
            self.after(Span(0), Event::AskLease(guest));
        }
    }

    /// A guest that waits for its host to have the lease.
    pub(super) fn on_ask_lease(&mut self, guest: usize) {
        let state = &mut self.guests[guest];
        if !state.suspended {
            state.asking = false;
            return;
        }
        let (host, volume) = (state.host, state.volume);
        let life = self.hosts[host].life;
        let is_taking_over = self.takeovers.get(&(volume, host));
        let is_taking_over = is_taking_over.is_some_and(|takeover| !takeover.is_abandoned);
        if self.hosts[host].up && !state.draining && !is_taking_over {
            let word = MetaMessage::Lease(LeaseSeeker {
                volume,
                host,
                life,
                asked_us: self.clock_of(host),
            });
            self.send_control(End::Host(host), End::Meta, Event::MetaMessage(word));
        }
        // Asked for often, it is granted soon after it has run out.
        let again = match self.has_lease_time() {
            true => self.some(Span(self.pace.lease.0 / 20)),
            false => ASK_EVERY,
        };
        self.after(again, Event::AskLease(guest));
    }

    /// Meta has granted a lease.
    pub(super) fn granted(&mut self, seeker: LeaseSeeker, generation: Generation, epoch: Epoch) {
        let LeaseSeeker { volume, host, .. } = seeker;
        self.leases[volume] = Lease { generation, host };
        self.meta.lease_granted(volume, generation, self.now);
        self.check_older_leases(volume);
        let numbers = [32, volume as u64, host as u64, generation.0, epoch.0];
        self.trace.note(self.now, &numbers, || {
            format!("meta: host {host} has the lease of volume {volume}, {generation} by {epoch}")
        });
        let granted = Event::Granted {
            seeker,
            generation,
            epoch,
        };
        self.send_control(End::Meta, End::Host(host), granted);
    }

    /// The host hears that it has the lease.
    pub(super) fn on_granted(&mut self, seeker: LeaseSeeker, generation: Generation, epoch: Epoch) {
        let LeaseSeeker {
            volume,
            host,
            life,
            asked_us,
        } = seeker;
        let current = self.hosts[host].life == life && self.guests[volume].host == host;
        let newer = self
            .takeovers
            .get(&(volume, host))
            .is_none_or(|takeover| takeover.machine.generation() < generation);
        let open = self.hosts[host].volumes.get(&volume);
        let newer = newer && open.is_none_or(|state| state.generation() < generation);
        if !current || !newer || !self.guests[volume].suspended {
            return;
        }
        // What this host still does under an older lease is over.
        self.revoke(host, volume);
        self.next_name += 1;
        let takeover = Takeover {
            life,
            number: self.next_name,
            machine: Machine::new(layer_of(volume), generation, epoch),
            lease_until_us: self.counts_until(asked_us),
            open: BTreeMap::new(),
            ticking: false,
            is_abandoned: false,
        };
        self.takeovers.insert((volume, host), takeover);
        self.lease_time.renews_again.remove(&(host, volume));
        self.map_for_takeovers(host);
    }

    /// The guest goes elsewhere while hosts take its volume over for it: they go on until they are done, hear
    /// of a newer lease, or replicas keep them out.
    fn abandon_takeovers(&mut self, volume: usize) {
        let of_volume = (volume, 0)..(volume + 1, 0);
        let all = self.takeovers.range_mut(of_volume);
        let hosts: Vec<usize> = all
            .map(|((_, host), takeover)| {
                takeover.is_abandoned = true;
                *host
            })
            .collect();
        for host in hosts {
            self.cut_from_lease(host, volume);
        }
    }

    /// The host closes a volume.
    pub(super) fn revoke(&mut self, host: usize, volume: usize) {
        let Some(state) = self.hosts[host].volumes.remove(&volume) else {
            return;
        };
        state.revoke();
        for lane in 0..self.hosts[host].lanes.len() {
            self.hosts[host].lanes[lane].end_revoked();
            self.after_lane(host, lane);
        }
    }

    /// A host heard of newer leases.
    pub(super) fn learn_leases(&mut self, host: usize, leases: &[Lease]) {
        for (volume, lease) in leases.iter().enumerate() {
            let is_older = |takeover: &mut Takeover| takeover.generation() < lease.generation;
            let taking = self.takeovers.entry((volume, host));
            if let Entry::Occupied(mut entry) = taking
                && is_older(entry.get_mut())
            {
                entry.remove();
            }
            let open = self.hosts[host].volumes.get(&volume);
            if open.is_some_and(|state| state.generation() < lease.generation) {
                if self.guests[volume].host == host {
                    // Its own word, which was held up, has brought it a newer lease.
                    self.wrest(volume, host);
                }
                self.revoke(host, volume);
            }
        }
    }

    /// The map that a host has, for whoever is taking over there.
    pub(super) fn map_for_takeovers(&mut self, host: usize) {
        let by_host = |&(volume, by): &(usize, usize)| (by == host).then_some(volume);
        let volumes: Vec<usize> = self.takeovers.keys().filter_map(by_host).collect();
        let size_bytes = self.plan.chunks * CHUNK_BYTES;
        for volume in volumes {
            if let Some(takeover) = self.takeovers.get_mut(&(volume, host)) {
                let state = &self.hosts[host];
                takeover.machine.on_map(state.map, &state.sets, size_bytes);
            }
            self.drive_takeover(volume, host);
        }
    }

    pub(super) fn on_lease_recovery_tick(&mut self, (volume, host): (usize, usize), number: u64) {
        if let Some(takeover) = self.takeovers.get_mut(&(volume, host))
            && takeover.number == number
        {
            takeover.ticking = false;
            takeover.machine.on_tick();
            self.drive_takeover(volume, host);
        }
    }

    /// A replica answered a takeover, or is lost.
    pub(super) fn on_lease_recovery_reply(
        &mut self,
        ((volume, host), number): ((usize, usize), u64),
        call: Call,
        result: Result<(), Refusal>,
        data: Option<&[u8]>,
    ) {
        let Some(takeover) = self.takeovers.get_mut(&(volume, host)) else {
            return;
        };
        if takeover.number != number {
            return;
        }
        let command = takeover.open.remove(&call);
        let forgets = self.plan.mutation == Some(Mutation::NoLeaseRecovery);
        let command = command.filter(|c| !(forgets && matches!(c, Command::Fence { .. })));
        if let (Some(command), Some(data), Ok(())) = (command, data, result) {
            memory::put_down(command, data);
        }
        takeover.machine.on_reply(call, result);
        self.drive_takeover(volume, host);
    }

    /// Takes a takeover as far as it goes now.
    fn drive_takeover(&mut self, volume: usize, host: usize) {
        while let Some(takeover) = self.takeovers.get_mut(&(volume, host)) {
            let (life, number) = (takeover.life, takeover.number);
            let Some(action) = takeover.machine.poll() else {
                if takeover.machine.needs_tick() && !std::mem::replace(&mut takeover.ticking, true)
                {
                    let by = (volume, host);
                    self.after(TICK, Event::LeaseRecoveryTick { by, number });
                }
                return;
            };
            match action {
                Action::Ask { call, to, request } => {
                    takeover.open.insert(call, request.command);
                    let caller = Caller::Lease {
                        host,
                        life,
                        volume,
                        number,
                        call,
                    };
                    self.call(caller, to, request);
                }
                Action::ReportFailed { pg, node, epoch } => {
                    self.note_report(host, pg, node, epoch);
                }
                Action::Done(epoch) => self.taken_over(volume, host, epoch),
                // Somebody has a newer lease; the guest, if it is still here, asks for another.
                Action::Fenced => {
                    self.takeovers.remove(&(volume, host));
                }
            }
        }
    }

    /// All replicas agree, and whoever held the lease before is kept out: the guest goes on, under no map
    /// older than `epoch`.
    fn taken_over(&mut self, volume: usize, host: usize, epoch: Epoch) {
        let Some(takeover) = self.takeovers.remove(&(volume, host)) else {
            return;
        };
        if takeover.is_abandoned {
            // The host gives the lease back: it has no use for it.
            let word = MetaMessage::Release(volume, takeover.generation());
            if self.has_lease_time() {
                self.send_control(End::Host(host), End::Meta, Event::MetaMessage(word));
            }
            return;
        }
        let generation = takeover.generation();
        let until = takeover.lease_until_us;
        let blocks = takeover.machine.recovered_blocks();
        self.recovered_blocks += blocks;
        let numbers = [33, volume as u64, host as u64, generation.0, blocks];
        self.trace.note(self.now, &numbers, || {
            format!("host {host} has taken volume {volume} over as {generation}, {blocks} blocks recovered")
        });
        self.checker.seal(volume);
        self.open_volume(host, volume, generation, epoch);
        self.hosts[host].volumes[&volume].set_lease_until_us(until);
        self.guests[volume].suspended = false;
        self.wake(volume, Span(0));
    }

    /// A request of a guest that is not there any more is over.
    pub(super) fn end_orphan(&mut self, name: u64) -> Option<GuestOp> {
        self.orphans.remove(&name).map(|(_, op)| op)
    }
}
