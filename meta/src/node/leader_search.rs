//! Finding the leader when it does not find this node: when it has moved, this node has, or both.
//!
//! A leader says that it leads by its Raft messages. Where those do not arrive, this node asks others whom
//! they follow, and where that one is, and makes a connection to it. On that it announces its own address.
//! The leader's messages then arrive there, and this node goes on as always. Nothing else is asked of a
//! leader that was found this way: a node that it cannot reach at any address must not count as up.

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

/// Whose turn it is to be asked who leads.
#[derive(Debug, Default)]
pub(super) struct LeaderSearch {
    /// Where the next nodes to be asked begin.
    next: usize,
}

/// Where a request has been in this round.
#[derive(Debug, Default)]
pub(super) struct Hops(Vec<NodeId>);

impl Hops {
    /// Returns the node that was named, unless the request has been there.
    pub(super) fn next(&mut self, own: NodeId, named: Option<NodeId>) -> Option<NodeId> {
        let is_new = |node: &NodeId| *node != own && !self.0.contains(node);
        let next = named.filter(is_new).filter(|_| self.0.len() < HOPS_MAX)?;
        self.0.push(next);
        Some(next)
    }
}

impl LeaderSearch {
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

    /// Asks other nodes who leads, and announces this node's address to the first leader that is named.
    pub(super) async fn find_leader(self: &Arc<Self>) {
        let others = self.others();
        let turn = self.leader_search().turn(&others);
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
                // The connection announces the address, whatever the answer is.
                let _ = self
                    .call(leader.node, PeerRequest::FindLeader, ANSWER_WAIT_MAX)
                    .await;
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
        assert_eq!(hops.next(own, None), None);
        assert_eq!(hops.next(own, Some(own)), None);
        assert_eq!(hops.next(own, Some(a)), Some(a));
        assert_eq!(hops.next(own, Some(b)), Some(b));
        assert_eq!(hops.next(own, Some(a)), None);
        for node in 4..=5 {
            assert_eq!(hops.next(own, Some(NodeId(node))), Some(NodeId(node)));
        }
        assert_eq!(hops.next(own, Some(NodeId(6))), None, "bounded");
    }

    #[test]
    fn all_nodes_have_their_turn_to_be_asked() {
        let others: BTreeSet<NodeId> = (2..=12).map(NodeId).collect();
        let mut search = LeaderSearch::default();
        let mut asked = BTreeSet::new();
        for _ in 0..2 {
            let turn = search.turn(&others);
            assert_eq!(turn.len(), ASKED_MAX);
            asked.extend(turn);
        }
        assert_eq!(asked, others);
        assert!(search.turn(&BTreeSet::new()).is_empty());
    }
}
