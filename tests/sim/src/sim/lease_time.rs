//! Leases that end by time, where the pace has such: the watch of meta's leader, hosts that renew what they
//! hold, and their clocks, which run at another speed than the leader's.
//!
//! Replicas keep the writes of an older lease out, not its reads. So the rule is that a holder begins nothing
//! any more, by its own clock, when another host is granted the next lease.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use fabric_replication::volume::VolumeState;
use fabric_types::Generation;

use super::control::{LeaseSeeker, MetaMessage};
use super::{End, Event, Sim};
use crate::mutation::Mutation;
use crate::queue::{At, Span};

/// Renewals in one lease's duration.
const RENEWALS: u64 = 3;
/// A clock's speed is given in so many parts.
pub const CLOCK_PARTS: u64 = 10_000;

/// A host that renews a lease, in one of its lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Renewal {
    /// What it holds, and since when it asks, by its clock.
    pub seeker: LeaseSeeker,
    /// The lease.
    pub generation: Generation,
}

/// What there is to know of leases that end by time.
#[derive(Debug, Default)]
pub(super) struct LeaseTime {
    /// Leases that were given back, by volume.
    pub released: BTreeMap<usize, Generation>,
    /// When a host that does not reach meta renews the lease of a volume: by host and volume.
    pub renews_again: BTreeMap<(usize, usize), Range<At>>,
}

impl Sim {
    /// Whether leases end by time.
    pub(super) fn has_lease_time(&self) -> bool {
        self.pace.lease > Span(0)
    }

    /// What a host's clock shows, in µs.
    pub(super) fn clock_of(&self, host: usize) -> u64 {
        self.now.0 * self.pace.clocks[host % self.pace.clocks.len()] / CLOCK_PARTS
    }

    /// Until when a host counts a lease that it asked for at `asked_us`, by its clock.
    pub(super) fn counts_until(&self, asked_us: u64) -> u64 {
        let ignores_end = self.plan.mutation == Some(Mutation::IgnoreEnd);
        if !self.has_lease_time() || ignores_end {
            return u64::MAX;
        }
        let duration = Duration::from_micros(self.pace.lease.0);
        let counted = match self.plan.mutation {
            Some(Mutation::IgnoreDrift) => duration,
            _ => meta::lease_for_holder(duration),
        };
        asked_us + counted.as_micros() as u64
    }

    /// Hosts renew what they hold from now on.
    pub(super) fn begin_renewals(&mut self) {
        if self.has_lease_time() {
            for host in 0..self.plan.hosts {
                self.on_renew_leases(host);
            }
        }
    }

    /// A host renews what it holds.
    pub(super) fn on_renew_leases(&mut self, host: usize) {
        for renewal in self.held_by(host) {
            let word = MetaMessage::Renew(renewal);
            self.send_control(End::Host(host), End::Meta, Event::MetaMessage(word));
        }
        let every = Span(self.pace.lease.0 / RENEWALS);
        self.after(every, Event::RenewLeases(host));
    }

    fn held_by(&self, host: usize) -> Vec<Renewal> {
        let state = &self.hosts[host];
        if !state.up {
            return Vec::new();
        }
        let open = state.volumes.iter();
        let open = open.map(|(volume, state)| (*volume, state.generation()));
        let taken = self.takeovers.iter().filter(|((_, by), _)| *by == host);
        let taken = taken.map(|((volume, _), one)| (*volume, one.generation()));
        let renewal = |(volume, generation)| Renewal {
            seeker: LeaseSeeker {
                volume,
                host,
                life: state.life,
                asked_us: self.clock_of(host),
            },
            generation,
        };
        let all = open.chain(taken);
        let is_cut = |volume| {
            let renews = self.lease_time.renews_again.get(&(host, volume));
            renews.is_some_and(|renews| !renews.contains(&self.now))
        };
        let kept = all.filter(|(volume, _)| !is_cut(*volume));
        kept.map(renewal).collect()
    }

    /// A host does not reach meta about a volume for a while: its lease may run out, or not. Some time after
    /// that it stops for good, or nobody else would ever be granted the lease.
    pub(super) fn cut_from_lease(&mut self, host: usize, volume: usize) {
        if self.has_lease_time() {
            let again = self.now + self.some(Span(3 * self.pace.lease.0));
            let end = again + self.some(Span(2 * self.pace.lease.0));
            self.lease_time
                .renews_again
                .insert((host, volume), again..end);
        }
    }

    /// A renewal arrives at meta's leader.
    pub(super) fn on_renew(&mut self, renewal: Renewal) {
        let LeaseSeeker { volume, host, .. } = renewal.seeker;
        let lease = self.leases[volume];
        if (lease.generation, lease.host) != (renewal.generation, host) {
            self.send_control(End::Meta, End::Host(host), Event::RenewalRefused(renewal));
            return;
        }
        let may = self.meta.renew_lease(volume, renewal.generation, self.now);
        if may || self.plan.mutation == Some(Mutation::RenewWhileGranting) {
            self.send_control(End::Meta, End::Host(host), Event::Renewed(renewal));
        }
    }

    /// The host hears that it has renewed in vain: there is a newer lease, be it its own.
    pub(super) fn on_renewal_refused(&mut self, renewal: Renewal) {
        let LeaseSeeker { host, life, .. } = renewal.seeker;
        if self.hosts[host].life == life {
            let leases = self.leases.clone();
            self.learn_leases(host, &leases);
        }
    }

    /// The host hears that it has renewed a lease.
    pub(super) fn on_renewed(&mut self, renewal: Renewal) {
        let LeaseSeeker {
            volume,
            host,
            life,
            asked_us,
        } = renewal.seeker;
        if self.hosts[host].life != life {
            return;
        }
        let asked_us = match self.plan.mutation {
            Some(Mutation::CountFromAnswer) => self.clock_of(host),
            _ => asked_us,
        };
        let until = self.counts_until(asked_us);
        if let Some(state) = self.hosts[host].volumes.get(&volume)
            && state.generation() == renewal.generation
        {
            state.set_lease_until_us(until);
        } else if let Some(takeover) = self.takeovers.get_mut(&(volume, host))
            && takeover.generation() == renewal.generation
        {
            takeover.lease_until_us = until;
        }
        self.check_older_leases(volume);
    }

    /// Whether meta's leader may grant a lease to who asks for it.
    pub(super) fn may_grant(&mut self, seeker: &LeaseSeeker) -> bool {
        let lease = self.leases[seeker.volume];
        let is_free = lease.host == seeker.host
            || self.lease_time.released.get(&seeker.volume) == Some(&lease.generation);
        !self.has_lease_time()
            || is_free
            || self.plan.mutation == Some(Mutation::GrantBeforeEnd)
            || self
                .meta
                .lease_has_run_out(seeker.volume, lease.generation, self.now)
    }

    /// Invariant *One holder*: what hosts hold of older leases than the newest granted is over by their own
    /// clocks.
    pub(super) fn check_older_leases(&mut self, volume: usize) {
        let newest = self.leases[volume];
        let holds = |state: &VolumeState, now_us| {
            state.generation() < newest.generation && now_us < state.lease_until_us()
        };
        let holder = (0..self.hosts.len()).find(|&host| {
            let open = self.hosts[host].volumes.get(&volume);
            host != newest.host && open.is_some_and(|state| holds(state, self.clock_of(host)))
        });
        if let Some(host) = holder.filter(|_| self.has_lease_time()) {
            self.fail(format!(
                "invariant One holder: host {host} counts its lease of volume {volume} as valid, and host {} \
                 was granted {}",
                newest.host, newest.generation
            ));
        }
    }
}
