//! Whom this node hears, and what it does for whom: the rules of [`authority`](crate::authority) on what it
//! has applied.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Core;
use crate::authority::{self, RaftSender, Sender};
use crate::command::Command;
use crate::ids::{Incarnation, NodeId};
use crate::map::ClusterMap;
use crate::model::{Node, Role};
use crate::net::ProposeError;
use crate::node::raft_calls::COMMIT_WAIT_MAX;
use crate::refusal::{MapRefusal, RecoveryRefusal, Refusal};

/// Raft messages of a node that is not known here are taken only if no leader was heard of for this long.
/// Several times what an election takes: a leader that is known would have told of that node.
const UNKNOWN_AFTER: Duration = Duration::from_secs(5);
/// A removed node that still votes is looked at this often, until the others do without its vote.
pub(super) const STILL_VOTES_PAUSE: Duration = Duration::from_millis(200);

fn has_meta_role(node: &Node) -> bool {
    node.roles.contains(&Role::Meta)
}

impl Core {
    /// Voters and learners, as far as this node knows.
    fn raft_group(&self) -> (BTreeSet<NodeId>, BTreeSet<NodeId>) {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow();
        let membership = metrics.membership_config.membership();
        let voters = membership.voter_ids().collect();
        (voters, membership.learner_ids().collect())
    }

    /// Returns whether a node keeps metadata, as far as this one knows: it votes, or has the role `meta`.
    /// Such a node is trusted with everything ("Not promised" in the threat model). Others are not believed.
    pub(crate) fn keeps_metadata(&self, node: NodeId) -> bool {
        let map = self.map.borrow().clone();
        let has_role = map.node(node).is_some_and(has_meta_role);
        has_role || self.raft_group().0.contains(&node)
    }

    /// Returns the other nodes that keep metadata, as [`Self::keeps_metadata`].
    pub(super) fn metadata_keepers(&self) -> BTreeSet<NodeId> {
        let (mut keepers, _) = self.raft_group();
        let map = self.map.borrow().clone();
        keepers.extend(
            map.nodes()
                .filter(|node| has_meta_role(node))
                .map(|node| node.id),
        );
        keepers.remove(&self.id);
        keepers
    }

    /// Returns whether a node may lead, as far as this one knows. One that Raft follows does, also if it is
    /// not in the map yet.
    pub(super) fn may_lead(&self, node: NodeId) -> bool {
        self.raft.metrics().borrow().current_leader == Some(node) || self.keeps_metadata(node)
    }

    /// Returns whether the map or the Raft group has a node.
    pub(super) fn is_member(&self, node: NodeId) -> bool {
        let (voters, learners) = self.raft_group();
        let is_in_map = self.map.borrow().node(node).is_some();
        is_in_map || voters.contains(&node) || learners.contains(&node)
    }

    /// Whether a node was removed and the group does without its vote.
    pub(super) fn is_removed(&self, node: NodeId) -> bool {
        let is_in_map = self.map.borrow().node(node).is_some();
        !is_in_map && self.was_removed_here(node) && !self.raft_group().0.contains(&node)
    }

    /// Returns when a node was removed and the group does without its vote.
    pub(super) async fn until_removed(&self, node: NodeId) {
        let mut map = self.map.clone();
        loop {
            let is_in_map = map.borrow_and_update().node(node).is_some();
            let changed = if is_in_map || !self.was_removed_here(node) {
                map.changed().await
            } else if self.is_removed(node) {
                return;
            } else {
                tokio::time::sleep(STILL_VOTES_PAUSE).await;
                Ok(())
            };
            if changed.is_err() {
                // The node is being closed, and its connections with it.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Whether a newer start of a node has registered than this one. A start that the map does not have may
    /// be the next to register.
    pub(super) fn is_former_start(&self, node: NodeId, incarnation: Incarnation) -> bool {
        let map = self.map.borrow();
        let known = map.node(node);
        known.is_some_and(|known| known.is_former_start(incarnation))
    }

    /// Returns when a newer start of a node has registered than this one.
    pub(super) async fn until_replaced(&self, node: NodeId, incarnation: Incarnation) {
        let mut map = self.map.clone();
        let is_former = |map: &Arc<ClusterMap>| {
            let known = map.node(node);
            known.is_some_and(|known| known.is_former_start(incarnation))
        };
        if map.wait_for(is_former).await.is_err() {
            // The node is being closed, and its connections with it.
            std::future::pending::<()>().await;
        }
    }

    /// Whether a node's Raft messages are taken; if not, why.
    pub(super) fn check_raft(&self, from: NodeId) -> Result<(), String> {
        let (voters, learners) = self.raft_group();
        let map = self.map.borrow().clone();
        let was_removed = map.node(from).is_none() && self.was_removed_here(from);
        let silence = self.signs().silence(Instant::now());
        match authority::raft_sender(from, &map, was_removed, &voters, &learners) {
            RaftSender::Trusted => Ok(()),
            RaftSender::Unknown if silence >= UNKNOWN_AFTER => Ok(()),
            RaftSender::Unknown => Err(format!("node {from} is not known here to vote")),
            RaftSender::Refused => Err(format!(
                "node {from} has no part in the metadata, and sent a Raft message"
            )),
        }
    }

    /// Whether a node may have a command done. Asked of the leader: another node has nothing done.
    pub(super) async fn authorize(
        &self,
        from: NodeId,
        command: &Command,
    ) -> Result<Result<(), Refusal>, ProposeError> {
        let leader = self.raft.metrics().borrow().current_leader;
        if leader != Some(self.id) {
            let leader = leader.filter(|leader| *leader != self.id);
            return Err(ProposeError::NotLeader { leader });
        }
        if self.judge(from, command)?.is_ok() {
            return Ok(Ok(()));
        }
        // A leader that was elected just now may be behind with its records.
        let index = self.read_index_here().await?;
        let applied = self.wait_applied(index, COMMIT_WAIT_MAX).await;
        applied.map_err(|error| ProposeError::Failed {
            detail: error.to_string(),
        })?;
        let judged = self.judge(from, command)?;
        if let Err(refusal) = &judged {
            tracing::warn!(node = %from, %refusal, "a command was refused");
        }
        Ok(judged)
    }

    fn judge(&self, from: NodeId, command: &Command) -> Result<Result<(), Refusal>, ProposeError> {
        let map = self.map.borrow().clone();
        let is_offline = matches!(command.change(), Command::BeginHistory { .. });
        if is_offline {
            return Ok(Err(RecoveryRefusal::NotWhileRunning.into()));
        }
        let node = map.node(from);
        if node.is_none() && self.was_removed_here(from) {
            let removed = MapRefusal::was_removed(from);
            return Ok(Err(removed.into()));
        }
        let (voters, learners) = self.raft_group();
        let sender = Sender {
            id: from,
            node,
            is_in_group: voters.contains(&from) || learners.contains(&from),
        };
        let judged = self.view(|view| authority::check(sender, command, &map, view));
        judged.map_err(|error| ProposeError::Failed {
            detail: error.to_string(),
        })
    }
}
