//! What nodes say of themselves, and what the leader tells of what it has heard. In memory only.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use raft_host::RaftHandle;

use super::Core;
use super::leader_request::{LeaderRequest, Wait, unfit};
use crate::error::MetaError;
use crate::ids::NodeId;
use crate::net::{PeerReply, ProposeError};
use crate::report::{LastHeard, LastReport, LeaderReport, NodeReport, RaftStatus};

/// What nodes said last, and when.
pub(super) type NodeReports = BTreeMap<NodeId, (Instant, NodeReport)>;

impl Core {
    /// Tells the leader how this node is.
    pub(crate) async fn tell(&self, word: NodeReport) -> Result<(), MetaError> {
        let node = self.id;
        match self
            .ask_leader(&LeaderRequest::Tell { node, word }, Wait::PATIENT)
            .await?
        {
            PeerReply::Tell(Ok(())) => Ok(()),
            other => Err(unfit(&other)),
        }
    }

    /// Asks the leader what it has heard.
    pub(crate) async fn report(&self) -> Result<LeaderReport, MetaError> {
        match self
            .ask_leader(&LeaderRequest::Report, Wait::PATIENT)
            .await?
        {
            PeerReply::Report(Ok(report)) => Ok(report),
            other => Err(unfit(&other)),
        }
    }

    pub(super) fn take_word_here(
        &self,
        node: NodeId,
        word: NodeReport,
    ) -> Result<(), ProposeError> {
        // Who is not in the map takes no memory here.
        let is_known = self.map.borrow().node(node).is_some();
        let kept = self
            .failure_detector
            .keep_word(node, word.bounded(), is_known);
        if kept { Ok(()) } else { Err(self.not_leader()) }
    }

    pub(super) fn report_here(&self) -> Result<LeaderReport, ProposeError> {
        let now = Instant::now();
        let at = self.failure_detector.since_origin(now);
        let leading = self.failure_detector.lock();
        if !leading.watch.leads() {
            drop(leading);
            return Err(self.not_leader());
        }
        let heard = leading.watch.last_heard(at);
        let heard = heard.map(|(node, ago)| LastHeard {
            node,
            ago_ms: millis(ago),
        });
        let map = self.map.borrow();
        let words = leading.words.iter();
        let words = words.filter(|(node, _)| map.node(**node).is_some());
        Ok(LeaderReport {
            heard: heard.collect(),
            words: words
                .map(|(node, (told, word))| LastReport {
                    node: *node,
                    ago_ms: millis(now.saturating_duration_since(*told)),
                    word: word.clone(),
                })
                .collect(),
            failing: leading.watch.failing(at),
            levels: leading.watch.levels(&map),
        })
    }

    pub(super) fn not_leader(&self) -> ProposeError {
        let leader = self.raft.metrics().borrow().current_leader;
        let leader = leader.filter(|leader| *leader != self.id);
        ProposeError::NotLeader { leader }
    }

    /// How Raft stands, as far as this node knows. Waits for nobody.
    pub(crate) fn raft_status(&self) -> RaftStatus {
        let status = status_of(&self.raft);
        RaftStatus {
            leader: status.leader.filter(|_| !self.hearing.has_withdrawn()),
            ..status
        }
    }
}

/// How a group stands, as far as this node knows.
pub(crate) fn status_of(raft: &RaftHandle) -> RaftStatus {
    let metrics = raft.metrics();
    let metrics = metrics.borrow();
    let membership = metrics.membership_config.membership();
    // After it was dropped from a group, a leader's own vote still names it.
    let is_deposed =
        |leader: &NodeId| *leader == metrics.id && metrics.state != openraft::ServerState::Leader;
    RaftStatus {
        leader: metrics.current_leader.filter(|leader| !is_deposed(leader)),
        term: metrics.current_term,
        applied_index: metrics.last_applied.map_or(0, |last| last.index),
        last_index: metrics.last_log_index.unwrap_or(0),
        voters: membership.voter_ids().collect(),
        is_changing: membership.get_joint_config().len() > 1,
        learners: membership.learner_ids().collect(),
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
