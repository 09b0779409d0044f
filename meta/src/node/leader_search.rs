//! Finding the leader when it does not find this node: when it has moved, this node has, or both.
//!
//! A leader says that it leads by its Raft messages. Where those do not arrive, this node asks others whom
//! they follow, and where that one is. It needs no more: on the connection that it then makes it announces
//! its own address, the leader answers there, and registers it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use super::Core;
use crate::ids::NodeId;
use crate::net::{AddressSource, LeaderLocation, PeerReply, PeerRequest};

/// Nodes that are asked at a time; others have their turn when none of these knows a leader.
const ASKED_MAX: usize = 8;
/// A node that gives no answer in this time is asked again later.
const ANSWER_WAIT_MAX: Duration = Duration::from_millis(700);
/// Nodes that one request goes to before it pauses: whoever is named may name another. With one more it
/// begins anew with this node.
const HOPS_MAX: usize = 4;

/// The leader that was found by asking; none once a leader's own messages arrive.
#[derive(Debug, Default)]
pub(super) struct FoundLeader {
    leader: Option<NodeId>,
    /// Where the next nodes to be asked begin.
    next: usize,
}

/// Where a request has been in this round.
#[derive(Debug, Default)]
pub(super) struct Hops(Vec<NodeId>);

impl Hops {
    /// The next node to ask: the one that was found, which is newer than what Raft knows, or else the one
    /// that was named. None twice.
    pub(super) fn next(
        &mut self,
        own: NodeId,
        found: Option<NodeId>,
        named: Option<NodeId>,
    ) -> Option<NodeId> {
        let mut candidates = [found, named].into_iter().flatten();
        let is_new = |node: &NodeId| *node != own && !self.0.contains(node);
        let next = candidates
            .find(is_new)
            .filter(|_| self.0.len() < HOPS_MAX)?;
        self.0.push(next);
        Some(next)
    }
}

impl FoundLeader {
    pub(super) fn get(&self) -> Option<NodeId> {
        self.leader
    }

    /// This node does not lead, or is not reached.
    pub(super) fn forget(&mut self, node: NodeId) {
        if self.leader == Some(node) {
            self.leader = None;
        }
    }

    /// A leader's own messages arrive.
    pub(super) fn clear(&mut self) {
        self.leader = None;
    }

    /// The nodes whose turn it is.
    fn turn(&mut self, others: &BTreeSet<NodeId>) -> Vec<NodeId> {
        let asked = others.len().min(ASKED_MAX);
        let from = self.next % others.len().max(1);
        self.next = from + asked;
        others
            .iter()
            .cycle()
            .skip(from)
            .take(asked)
            .copied()
            .collect()
    }
}

impl Core {
    /// Who leads, as far as this node knows, and where.
    pub(super) fn leader_here(&self) -> Option<LeaderLocation> {
        let node = self.raft.metrics().borrow().current_leader?;
        let map = self.map.borrow();
        let address = map.node(node).map(|node| node.control_address.clone());
        Some(LeaderLocation {
            node,
            address: address.unwrap_or_default(),
        })
    }

    /// Asks other nodes who leads, and remembers the first answer.
    pub(super) async fn find_leader(self: &Arc<Self>) {
        let others = self.others();
        let turn = {
            let mut found = self.found();
            found.clear();
            found.turn(&others)
        };
        let mut questions = JoinSet::new();
        for other in turn {
            let core = Arc::clone(self);
            questions.spawn(async move {
                let asked = core.call(other, PeerRequest::FindLeader, ANSWER_WAIT_MAX);
                match asked.await {
                    Ok(PeerReply::Leader(leader)) => leader,
                    _ => None,
                }
            });
        }
        while let Some(answer) = questions.join_next().await {
            let Ok(Some(leader)) = answer else { continue };
            if leader.node != self.id {
                let transport = &self.transport;
                transport.learn(leader.node, &leader.address, AddressSource::Other);
                self.found().leader = Some(leader.node);
                return;
            }
        }
    }

    /// All other nodes that are known: those of the Raft group, and those of the map.
    fn others(&self) -> BTreeSet<NodeId> {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow();
        let members = metrics.membership_config.membership().nodes();
        let mut others: BTreeSet<NodeId> = members.map(|(id, _)| *id).collect();
        others.extend(self.map.borrow().nodes().map(|node| node.id));
        others.remove(&self.id);
        others
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_follows_what_it_is_told_and_asks_nobody_twice() {
        let (own, a, b) = (NodeId(1), NodeId(2), NodeId(3));
        let mut hops = Hops::default();
        assert_eq!(hops.next(own, None, None), None);
        assert_eq!(hops.next(own, Some(a), Some(own)), Some(a));
        assert_eq!(hops.next(own, Some(a), Some(b)), Some(b));
        assert_eq!(hops.next(own, Some(b), Some(a)), None);
        for node in 4..=5 {
            assert_eq!(hops.next(own, None, Some(NodeId(node))), Some(NodeId(node)));
        }
        assert_eq!(hops.next(own, None, Some(NodeId(6))), None, "bounded");
    }

    #[test]
    fn all_nodes_have_their_turn_to_be_asked() {
        let others: BTreeSet<NodeId> = (2..=12).map(NodeId).collect();
        let mut found = FoundLeader::default();
        let mut asked = BTreeSet::new();
        for _ in 0..2 {
            let turn = found.turn(&others);
            assert_eq!(turn.len(), ASKED_MAX);
            asked.extend(turn);
        }
        assert_eq!(asked, others);
        assert!(found.turn(&BTreeSet::new()).is_empty());
    }
}
