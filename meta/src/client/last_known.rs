//! What is told to people while there is no leader: what this node has applied, and how old that is.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::Meta;
use crate::watch::HEARTBEAT_LEASE;

/// Whether what a client has read was confirmed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Confirmed {
    /// It holds everything that was acknowledged before it was asked for.
    Now,
    /// There was no leader. It is what this node had applied; the leader was last heard so long ago.
    Ago(Duration),
    /// The same, and no leader was heard since this process started.
    BeforeStart,
}

/// Set once a read found no leader.
pub(super) type WithoutLeader = Arc<AtomicBool>;

impl Meta {
    /// The same for somebody who would rather see something old than nothing. A read for which there is no
    /// leader in time, and every read after it, tells what this node has applied: see [`Self::confirmed`].
    /// For lists only: what is decided by them may be wrong.
    #[must_use]
    pub fn or_last_known(&self) -> Self {
        Self {
            last_known: Some(WithoutLeader::default()),
            ..self.clone()
        }
    }

    /// Whether everything that this client has read was confirmed by a leader.
    #[must_use]
    pub fn confirmed(&self) -> Confirmed {
        if !self.has_met_no_leader() {
            return Confirmed::Now;
        }
        let lease_end = self.heartbeat_valid_until();
        let heard = lease_end.and_then(|end| end.checked_sub(HEARTBEAT_LEASE));
        heard.map_or(Confirmed::BeforeStart, |heard| {
            Confirmed::Ago(Instant::now().saturating_duration_since(heard))
        })
    }

    pub(super) fn has_met_no_leader(&self) -> bool {
        let flag = self.last_known.as_ref();
        flag.is_some_and(|flag| flag.load(Ordering::Relaxed))
    }

    /// There is no leader. Returns whether the caller is content with what this node knows.
    pub(super) fn note_no_leader(&self) -> bool {
        if let Some(flag) = &self.last_known {
            flag.store(true, Ordering::Relaxed);
        }
        self.last_known.is_some()
    }
}
