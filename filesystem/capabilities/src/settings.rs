//! Times and limits that leader and holders agree on.

use std::time::Duration;

/// Times and limits. All nodes of a cluster have the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// How long a guest's kernel may use an entry or attributes that are not expected to change.
    pub validity: Duration,
    /// For how long a capability's inode must not have changed before [`Settings::validity`] is given on it.
    /// No matter of safety: it spares changes the wait.
    pub quiet: Duration,
    /// How long a running guest takes at most from when a reply is published to when its kernel begins to
    /// count the validity, and by how much the kernel's coarse clock lets it count too long.
    pub guest_delay: Duration,
    /// How long a holder may take to answer a recall, and a session to claim, before it is reported.
    pub answer_within: Duration,
    /// A holder gives back what it did not use for this long.
    pub idle: Duration,
    /// Clocks drift apart by at most one part in this. Guests' clocks count too.
    pub drift_bound: u32,
    /// Capabilities of a session. The leader recalls the least recently granted ones above this number, and
    /// refuses requests at twice the number. A holder gives up the least recently used ones by itself
    /// shortly before.
    pub capabilities_max: usize,
    /// Claims of one message. A holder splits its claims. The leader processes one such message at a time.
    pub claims_at_once: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            validity: Duration::from_secs(1),
            quiet: Duration::from_secs(10),
            guest_delay: Duration::from_millis(250),
            answer_within: Duration::from_secs(5),
            idle: Duration::from_secs(600),
            drift_bound: 100,
            capabilities_max: 131_072,
            claims_at_once: 256,
        }
    }
}

impl Settings {
    /// How long a clock has to count so that `duration` has passed on any other one.
    pub fn stretch(&self, duration: Duration) -> Duration {
        duration + duration / self.drift_bound + Duration::from_nanos(1)
    }

    /// For how long after its reply was published a guest may use what it was told.
    pub(crate) fn promise(&self) -> Duration {
        self.stretch(self.validity + self.guest_delay)
    }
}
