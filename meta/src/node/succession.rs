//! A leader whose process is gone is replaced sooner than one that is silent.
//!
//! After it heard of a leader, a node votes for nobody else for a while, and seeks election itself only after
//! twice to three times that: a silent leader may be slow, or the network. But where nobody listens at the
//! leader's address any more, as the kernel there says at once when a process dies, there is nothing to wait
//! for. Then a node that needs the leader seeks election as soon as the others may vote for it.
//!
//! To be wrong is harmless: whoever has heard of the leader meanwhile does not vote.

use std::time::{Duration, Instant};

use super::Core;
use crate::ids::NodeId;

/// Others have heard of the leader a little later than this node.
const MARGIN: Duration = Duration::from_millis(50);

/// What tells of the leader's life and death.
#[derive(Debug)]
pub(super) struct LeaderLiveness {
    /// Nobody votes for another one until this time is over.
    hold: Duration,
    /// When a leader was heard of last.
    heard: Instant,
    /// At whose address nobody listened since.
    gone: Option<NodeId>,
}

impl LeaderLiveness {
    pub(super) fn new(hold: Duration, now: Instant) -> Self {
        Self {
            hold,
            heard: now,
            gone: None,
        }
    }

    /// A leader spoke.
    pub(super) fn heard(&mut self, now: Instant) {
        (self.heard, self.gone) = (now, None);
    }

    /// For how long no leader was heard of.
    pub(super) fn silence(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.heard)
    }

    /// Nobody listens at a node's address.
    pub(super) fn gone(&mut self, node: NodeId) {
        self.gone = Some(node);
    }

    /// Whether it is time to seek election; then it is not for as long as nothing more is found out.
    pub(super) fn is_due(&mut self, leader: Option<NodeId>, now: Instant) -> bool {
        let is_gone = leader.is_some() && self.gone == leader;
        let is_due = is_gone && now.saturating_duration_since(self.heard) > self.hold + MARGIN;
        if is_due {
            self.gone = None;
        }
        is_due
    }
}

impl Core {
    /// Seeks election, if the leader is known to be gone.
    pub(super) async fn succeed(&self) {
        if self.hearing.has_withdrawn() {
            return;
        }
        let leader = self.raft.metrics().borrow().current_leader;
        let is_due = {
            let mut signs = self.signs();
            signs.is_due(leader.filter(|leader| *leader != self.id), Instant::now())
        };
        if is_due {
            tracing::info!(?leader, "the metadata leader's process is gone");
            // That Raft has ended shows everywhere else.
            let _ = self.raft.trigger_election().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOLD: Duration = Duration::from_millis(500);
    const LEADER: Option<NodeId> = Some(NodeId(2));

    #[test]
    fn a_leader_that_is_gone_is_replaced_once_others_may_vote() {
        let start = Instant::now();
        let mut signs = LeaderLiveness::new(HOLD, start);
        signs.gone(NodeId(2));
        assert!(
            !signs.is_due(LEADER, start + HOLD),
            "others do not vote yet"
        );
        assert!(signs.is_due(LEADER, start + HOLD * 2));
        assert!(!signs.is_due(LEADER, start + HOLD * 2), "once");
    }

    #[test]
    fn silent_or_recently_heard_leader_is_left_to_raft() {
        let start = Instant::now();
        let mut signs = LeaderLiveness::new(HOLD, start);
        assert!(!signs.is_due(LEADER, start + HOLD * 9));
        signs.gone(NodeId(2));
        signs.heard(start + HOLD * 9);
        assert!(!signs.is_due(LEADER, start + HOLD * 20));
    }

    #[test]
    fn another_node_that_is_gone_does_not_matter() {
        let start = Instant::now();
        let mut signs = LeaderLiveness::new(HOLD, start);
        signs.gone(NodeId(3));
        assert!(!signs.is_due(LEADER, start + HOLD * 9));
        assert!(!signs.is_due(None, start + HOLD * 9));
    }
}
