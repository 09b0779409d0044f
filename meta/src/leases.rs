//! The leader's watch over leases: which have run out, on monotonic time only.
//!
//! A holder counts [`LEASE_DURATION`] from the moment before it asked for the grant or renewal, shorter by
//! the drift bound ([`lease_for_holder`]), and begins nothing more when it is over. The leader counts from
//! the moment after it heard, and longer by the drift bound, so the holder always stops first, as long as
//! their clocks do not drift apart by more than 1 part in [`DRIFT_BOUND`]. A leader that is new has heard
//! nothing: it counts a lease from when somebody first asks for it.
//!
//! Between the moment at which a lease was found to have run out, and the one at which the next grant is
//! committed, the holder may ask to renew it. It is refused ([`LeaseWatch::renew`]): replicas keep its writes
//! out once there is a new one, but not its reads.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::ids::{Generation, VolumeId};

/// How long a grant or renewal lasts.
pub const LEASE_DURATION: Duration = Duration::from_secs(10);

/// Clocks of two nodes may drift apart by one part in this.
pub(crate) const DRIFT_BOUND: u32 = 100;

/// For how long after it was found to have run out a lease is not renewed, in its durations: whether somebody
/// else has been granted the next one is decided by then, or nobody leads.
const GRANT_WAIT: u32 = 2;

/// How long a holder counts a lease that lasts for `duration`, by its own clock.
pub fn lease_for_holder(duration: Duration) -> Duration {
    duration - duration / DRIFT_BOUND
}

/// How long to wait, by this node's own clock, until a lease that lasts for `duration` has run out for its
/// holder, too: counted from when something was last heard of that one.
pub(crate) fn wait_for_end(duration: Duration) -> Duration {
    duration + duration / DRIFT_BOUND
}

/// When each lease was last heard of. One entry per volume whose lease somebody held or wanted on this
/// leader.
#[derive(Debug)]
pub struct LeaseWatch {
    duration: Duration,
    /// The term of the leader that has heard all this.
    term: u64,
    heard: BTreeMap<VolumeId, Heard>,
}

#[derive(Debug)]
struct Heard {
    generation: Generation,
    at: Instant,
    /// When it was found to have run out, for somebody who wants the next one.
    run_out: Option<Instant>,
}

impl Default for LeaseWatch {
    fn default() -> Self {
        Self::of(LEASE_DURATION)
    }
}

impl LeaseWatch {
    /// Of leases that last for `duration`; a simulator's may be shorter than [`LEASE_DURATION`].
    pub fn of(duration: Duration) -> Self {
        Self {
            duration,
            term: 0,
            heard: BTreeMap::new(),
        }
    }

    /// This node leads in `term`. What it heard in an earlier one counts no more: holders may have renewed
    /// with the leaders between.
    pub(crate) fn enter(&mut self, term: u64) {
        if self.term != term {
            self.term = term;
            self.heard.clear();
        }
    }

    /// The lease of this generation was granted at `now`.
    pub fn heard(&mut self, volume: VolumeId, generation: Generation, now: Instant) {
        let fresh = Heard {
            generation,
            at: now,
            run_out: None,
        };
        match self.heard.get_mut(&volume) {
            Some(known) if known.generation > generation => {}
            Some(known) => *known = fresh,
            None => drop(self.heard.insert(volume, fresh)),
        }
    }

    /// The holder of this generation renews it at `now`; false: it may not, for somebody else may be granted
    /// the next one at this moment.
    pub fn renew(&mut self, volume: VolumeId, generation: Generation, now: Instant) -> bool {
        let known = self.heard.get(&volume);
        let run_out = known.filter(|known| known.generation == generation);
        let run_out = run_out.and_then(|known| known.run_out);
        let wait = self.duration * GRANT_WAIT;
        if run_out.is_some_and(|since| now.saturating_duration_since(since) < wait) {
            return false;
        }
        self.heard(volume, generation, now);
        true
    }

    /// Nobody was granted what this generation was found to have run out for.
    pub(crate) fn stays(&mut self, volume: VolumeId, generation: Generation) {
        if let Some(known) = self.heard.get_mut(&volume)
            && known.generation == generation
        {
            known.run_out = None;
        }
    }

    /// The lease is of no interest any more.
    pub(crate) fn forget(&mut self, volume: VolumeId) {
        self.heard.remove(&volume);
    }

    /// Whether this generation has certainly run out. If so it is not renewed for a while: somebody is about
    /// to be granted the next one.
    pub fn has_run_out(&mut self, volume: VolumeId, generation: Generation, now: Instant) -> bool {
        let longest = wait_for_end(self.duration);
        match self.heard.get_mut(&volume) {
            Some(known) if known.generation == generation => {
                let over = now.saturating_duration_since(known.at) >= longest;
                if over {
                    known.run_out = Some(now);
                }
                over
            }
            _ => {
                self.heard(volume, generation, now);
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOLUME: VolumeId = VolumeId(1);
    const FIRST: Generation = Generation(1);

    #[test]
    fn a_lease_runs_out_only_after_its_time_and_the_drift_bound() {
        let (mut watch, start) = (LeaseWatch::default(), Instant::now());
        watch.heard(VOLUME, FIRST, start);
        assert!(!watch.has_run_out(VOLUME, FIRST, start + LEASE_DURATION));
        assert!(watch.has_run_out(
            VOLUME,
            FIRST,
            start + LEASE_DURATION + LEASE_DURATION / DRIFT_BOUND
        ));
    }

    #[test]
    fn a_renewal_starts_its_time_anew() {
        let (mut watch, start) = (LeaseWatch::default(), Instant::now());
        watch.heard(VOLUME, FIRST, start);
        watch.heard(VOLUME, FIRST, start + LEASE_DURATION);
        assert!(!watch.has_run_out(VOLUME, FIRST, start + LEASE_DURATION + LEASE_DURATION / 2));
    }

    #[test]
    fn a_new_leader_gives_an_unknown_lease_its_full_time() {
        let (mut watch, start) = (LeaseWatch::default(), Instant::now());
        assert!(!watch.has_run_out(VOLUME, FIRST, start + LEASE_DURATION * 100));
        assert!(!watch.has_run_out(VOLUME, FIRST, start + LEASE_DURATION * 101));
        assert!(watch.has_run_out(VOLUME, FIRST, start + LEASE_DURATION * 102));
    }

    #[test]
    fn a_leader_that_is_elected_again_has_heard_nothing() {
        let (mut watch, start) = (LeaseWatch::default(), Instant::now());
        watch.enter(1);
        watch.heard(VOLUME, FIRST, start);
        let later = start + LEASE_DURATION * 2;
        assert!(watch.has_run_out(VOLUME, FIRST, later));
        watch.enter(1);
        assert!(!watch.renew(VOLUME, FIRST, later));
        // The holder has renewed with another leader meanwhile.
        watch.enter(3);
        assert!(!watch.has_run_out(VOLUME, FIRST, later));
        assert!(watch.renew(VOLUME, FIRST, later));
    }

    #[test]
    fn a_late_word_of_an_older_generation_changes_nothing() {
        let (mut watch, start) = (LeaseWatch::default(), Instant::now());
        watch.heard(VOLUME, Generation(2), start);
        watch.heard(VOLUME, FIRST, start + LEASE_DURATION);
        assert!(watch.has_run_out(VOLUME, Generation(2), start + LEASE_DURATION * 2));
    }

    #[test]
    fn a_forgotten_lease_begins_anew() {
        let (mut watch, start) = (LeaseWatch::default(), Instant::now());
        watch.heard(VOLUME, FIRST, start);
        watch.forget(VOLUME);
        assert!(!watch.has_run_out(VOLUME, FIRST, start + LEASE_DURATION * 2));
    }

    #[test]
    fn a_lease_that_is_being_granted_to_another_is_not_renewed_meanwhile() {
        let start = Instant::now();
        let mut watch = LeaseWatch::default();
        assert!(watch.renew(VOLUME, FIRST, start));
        let later = start + LEASE_DURATION * 2;
        assert!(watch.has_run_out(VOLUME, FIRST, later));
        assert!(!watch.renew(VOLUME, FIRST, later));
        assert!(!watch.renew(VOLUME, FIRST, later + LEASE_DURATION));
        // Granted: the next one is renewed.
        watch.heard(VOLUME, Generation(2), later);
        assert!(watch.renew(VOLUME, Generation(2), later));
    }

    #[test]
    fn a_lease_that_nobody_else_was_granted_is_renewed_again() {
        let start = Instant::now();
        let mut watch = LeaseWatch::default();
        watch.heard(VOLUME, FIRST, start);
        let later = start + LEASE_DURATION * 2;
        assert!(watch.has_run_out(VOLUME, FIRST, later));
        watch.stays(VOLUME, FIRST);
        assert!(watch.renew(VOLUME, FIRST, later));
        // If that is never known, after a while.
        let later = later + LEASE_DURATION * 2;
        assert!(watch.has_run_out(VOLUME, FIRST, later));
        assert!(watch.renew(VOLUME, FIRST, later + LEASE_DURATION * GRANT_WAIT));
    }
}
