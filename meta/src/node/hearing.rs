//! A node that reaches the others and that none of them reaches leads nothing.
//!
//! It happens where packets are dropped towards one node only: its own connections work both ways, so it
//! would be elected, or stay the leader, and all others could neither renew their leases nor be told apart
//! from dead ones. Raft alone does not notice: what it counts are answers to the leader's messages.
//!
//! Such a node withdraws: it sends no messages of a leader or candidate, until it hears from others again.
//! Only where the others have a majority without it: else nobody could lead, and this node had better.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use openraft::ServerState;

use super::Core;
use crate::net::{Gate, ProposeError};
use crate::report::RaftStatus;
use crate::watch::NODE_DOWN_AFTER;

/// A node that has heard nothing for this long asks whether it reaches the others. Shorter than the time
/// after which a leader takes them for dead.
const SILENCE_MAX: Duration = Duration::from_secs(2);
const _: () = assert!(SILENCE_MAX.as_millis() < NODE_DOWN_AFTER.as_millis());
/// A longer gap between two looks means that this process was stopped, or starved.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// A node stays withdrawn at least for as long as others need to notice and to elect another leader.
const WITHDRAWN_MIN: Duration = Duration::from_secs(3);
/// Whether the others still have a majority without it is looked for this often.
const LOOK_INTERVAL: Duration = Duration::from_secs(10);

/// What a node has heard from others, and whether it has withdrawn.
#[derive(Debug)]
pub(crate) struct Hearing {
    /// When anything came from another node last.
    heard: Mutex<Instant>,
    /// When this node looked last, and since when it has done so without a pause of its own.
    looked: Mutex<(Instant, Instant)>,
    /// When it withdrew, and when it looked last whether the others do without it.
    withdrawn: Mutex<Option<Withdrawn>>,
    /// What stands between Raft and the network. Shut while the node has withdrawn.
    gate: Gate,
}

#[derive(Debug, Clone, Copy)]
struct Withdrawn {
    at: Instant,
    looked: Instant,
}

impl Hearing {
    pub(super) fn new(gate: Gate) -> Self {
        Self {
            heard: Mutex::new(Instant::now()),
            looked: Mutex::new((Instant::now(), Instant::now())),
            withdrawn: Mutex::default(),
            gate,
        }
    }

    /// What Raft's messages pass through on their way out.
    pub(super) fn gate(&self) -> &Gate {
        &self.gate
    }

    /// Another node has sent something.
    pub(super) fn note(&self) {
        *lock(&self.heard) = Instant::now();
    }

    /// Whether this node leads nothing because nobody reaches it.
    pub(crate) fn has_withdrawn(&self) -> bool {
        self.gate.is_shut()
    }

    /// This node looks at what it has heard. For how long it has done so without a pause, in which it would
    /// have heard nothing whatever was sent.
    fn look(&self) -> Duration {
        let now = Instant::now();
        let mut looked = lock(&self.looked);
        if now.saturating_duration_since(looked.0) >= PAUSE_MAX {
            looked.1 = now;
        }
        looked.0 = now;
        now.saturating_duration_since(looked.1)
    }

    fn heard(&self) -> Instant {
        *lock(&self.heard)
    }

    fn set(&self, withdrawn: Option<Withdrawn>) {
        *lock(&self.withdrawn) = withdrawn;
        self.gate.set_shut(withdrawn.is_some());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Whole after every statement.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Core {
    /// Withdraws, or ends that, by what was heard. Whether this node has withdrawn.
    pub(super) async fn follow_hearing(self: &Arc<Self>) -> bool {
        let watching = self.hearing.look();
        let withdrawn = *lock(&self.hearing.withdrawn);
        let next = match withdrawn {
            Some(since) => self.stay_withdrawn(since).await,
            None if watching >= SILENCE_MAX && self.must_withdraw().await => {
                tracing::warn!(
                    "nothing that other nodes send arrives here, though this node reaches them: it leads no \
                     metadata until that ends"
                );
                let now = Instant::now();
                Some(Withdrawn {
                    at: now,
                    looked: now,
                })
            }
            None => None,
        };
        if withdrawn.is_some() && next.is_none() {
            tracing::info!("this node may lead metadata again");
        }
        if withdrawn.is_some() || next.is_some() {
            self.hearing.set(next);
            // Again and again: groups are opened meanwhile.
            self.raft.set_elections(next.is_none());
            self.groups.set_elections(next.is_none());
        }
        next.is_some()
    }

    async fn must_withdraw(self: &Arc<Self>) -> bool {
        // Something may come while the others are asked.
        self.is_unheard() && self.others_suffice().await && self.is_unheard()
    }

    /// Refuses what only a leader does while this node has withdrawn.
    pub(crate) fn check_hearing(&self) -> Result<(), ProposeError> {
        if !self.hearing.has_withdrawn() {
            return Ok(());
        }
        let leader = self.raft.metrics().borrow().current_leader;
        let leader = leader.filter(|leader| *leader != self.id);
        Err(ProposeError::NotLeader { leader })
    }

    async fn stay_withdrawn(self: &Arc<Self>, since: Withdrawn) -> Option<Withdrawn> {
        if since.at.elapsed() >= WITHDRAWN_MIN && self.hearing.heard() > since.at {
            return None;
        }
        if since.looked.elapsed() < LOOK_INTERVAL {
            return Some(since);
        }
        let looked = Instant::now();
        let suffice = self.others_suffice().await;
        suffice.then_some(Withdrawn { looked, ..since })
    }

    /// Whether nothing has come for a while of what others send all the time: heartbeats to a leader, a
    /// leader's messages to all others.
    fn is_unheard(&self) -> bool {
        let RaftStatus {
            voters,
            is_changing,
            ..
        } = self.raft_status();
        // A namespace group may be led by a node that has no vote on the cluster map.
        let may_lead = voters.contains(&self.id) || self.groups.leads_any();
        if !may_lead || is_changing {
            return false;
        }
        let leads = self.raft.metrics().borrow().state == ServerState::Leader;
        let as_leader = self.failure_detector.heard_as_leader(SILENCE_MAX);
        let Some((led_for, heard)) = as_leader.filter(|_| leads) else {
            return self.hearing.heard().elapsed() >= SILENCE_MAX;
        };
        let heard = heard.iter();
        let heard = heard.filter(|node| voters.contains(node) && **node != self.id);
        led_for >= SILENCE_MAX && heard.count() + 1 < majority(voters.len())
    }

    /// Whether this node reaches a majority of the voters without itself: they need it for nothing.
    async fn others_suffice(self: &Arc<Self>) -> bool {
        let voters = self.raft_status().voters;
        let others = voters.iter().filter(|voter| **voter != self.id).count();
        let needed = majority(voters.len());
        if others < needed {
            return false;
        }
        others.saturating_sub(self.unreached_voters().await.len()) >= needed
    }
}

fn majority(voters: usize) -> usize {
    voters / 2 + 1
}
