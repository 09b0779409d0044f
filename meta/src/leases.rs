//! The leader's watch over leases: which have run out, on monotonic time only.
//!
//! A holder counts [`LEASE_DURATION`] from the moment before it asked for the grant or renewal, and stops
//! writing when it is over. The leader counts from the moment after it heard, and longer by the drift bound,
//! so the holder always stops first, as long as their clocks do not drift apart by more than 1 part in
//! [`DRIFT_BOUND`]. A leader that is new has heard nothing: it counts a lease from when somebody first asks
//! for it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::ids::{Generation, VolumeId};

/// How long a grant or renewal lasts.
pub const LEASE_DURATION: Duration = Duration::from_secs(10);

/// Clocks of two nodes may drift apart by one part in this.
pub(crate) const DRIFT_BOUND: u32 = 100;

/// When each lease was last heard of. One entry per volume whose lease somebody held or wanted on this
/// leader.
#[derive(Debug, Default)]
pub(crate) struct LeaseWatch {
    heard: BTreeMap<VolumeId, (Generation, Instant)>,
}

impl LeaseWatch {
    /// The holder of this generation was heard at `now`.
    pub(crate) fn heard(&mut self, volume: VolumeId, generation: Generation, now: Instant) {
        let entry = self.heard.entry(volume).or_insert((generation, now));
        if generation >= entry.0 {
            *entry = (generation, now);
        }
    }

    /// The lease is of no interest any more.
    pub(crate) fn forget(&mut self, volume: VolumeId) {
        self.heard.remove(&volume);
    }

    /// Whether this generation has certainly run out.
    pub(crate) fn has_run_out(
        &mut self,
        volume: VolumeId,
        generation: Generation,
        now: Instant,
    ) -> bool {
        match self.heard.get(&volume) {
            Some((known, since)) if *known == generation => {
                now.saturating_duration_since(*since)
                    >= LEASE_DURATION + LEASE_DURATION / DRIFT_BOUND
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
}
