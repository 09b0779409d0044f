//! Finds the leader when its messages do not arrive: the leader has moved, this node has moved, or both.
//!
//! A leader says that it leads by its Raft messages. Where those do not arrive, this node asks others who
//! leads and where, and connects to each leader that is named. On that connection it announces its own
//! address. The leader's messages then arrive there. Nothing else is asked of a leader that was found this
//! way: a node that it cannot reach at any address must not count as up.
//!
//! Only nodes that keep metadata are asked ([`Core::metadata_keepers`]). Any other node may be hostile, and
//! name leaders that do not exist. An honest node that is cut off may name a former leader. So every leader
//! that is named is visited, however the visits before it went.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use super::Core;
use crate::ids::NodeId;
use crate::net::{AddressSource, LeaderLocation, PeerReply, PeerRequest};

/// Nodes that are asked at once. Others are asked when none of these knows a leader.
const ASKED_MAX: usize = 8;
/// Locations visited in one search. Further ones are ignored; the next search asks again.
const VISITED_MAX: usize = 8;
/// A node that gives no answer in this time is asked again later.
const ANSWER_WAIT_MAX: Duration = Duration::from_millis(700);
/// State that one search leaves to the next.
#[derive(Debug, Default)]
struct LeaderSearch {
    /// Where the next nodes to be asked begin.
    next: usize,
    /// Leaders visited in the last search that neither the map nor the Raft group had. What is kept of them
    /// is forgotten before the next search.
    strangers: BTreeSet<NodeId>,
}

/// Locations visited in one search.
#[derive(Debug, Default)]
struct Visits {
    begun: Vec<LeaderLocation>,
    /// Nodes that answered.
    reached: BTreeSet<NodeId>,
}

impl Visits {
    /// Begins a visit; false if it is not needed, or there were too many.
    fn begin(&mut self, own: NodeId, location: &LeaderLocation) -> bool {
        let is_done = location.node == own
            || self.reached.contains(&location.node)
            || self.begun.contains(location);
        let begins = !is_done && self.begun.len() < VISITED_MAX;
        if begins {
            self.begun.push(location.clone());
        }
        begins
    }
}

impl LeaderSearch {
    /// Returns the nodes whose turn it is.
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

    /// Asks other nodes who leads, and announces this node's address to each leader that is named.
    async fn search(&mut self, core: &Arc<Core>) {
        self.forget_strangers(core);
        let mut questions = JoinSet::new();
        for other in self.turn(&core.metadata_keepers()) {
            let core = Arc::clone(core);
            questions.spawn(async move { core.ask_who_leads(other).await });
        }
        let mut visits = Visits::default();
        while let Some(answer) = questions.join_next().await {
            let mut named = answer.ok().flatten().flatten();
            while let Some(location) = named.take()
                && visits.begin(core.id, &location)
            {
                let answer = self.visit(core, &location).await;
                if answer.is_some() {
                    visits.reached.insert(location.node);
                }
                named = answer.flatten();
            }
        }
    }

    /// Connects to a leader, which announces this node's address to it. Returns its answer.
    async fn visit(
        &mut self,
        core: &Core,
        LeaderLocation { node, address }: &LeaderLocation,
    ) -> Option<Option<LeaderLocation>> {
        if !core.is_member(*node) {
            self.strangers.insert(*node);
        }
        core.transport.learn(*node, address, AddressSource::Other);
        core.ask_who_leads(*node).await
    }

    /// Frees what is kept of strangers: an answer decides about nobody's memory.
    fn forget_strangers(&mut self, core: &Core) {
        for node in std::mem::take(&mut self.strangers) {
            if !core.is_member(node) {
                core.transport.forget(node);
            }
        }
    }
}

impl Core {
    /// Returns who leads, as far as this node knows, and where.
    pub(super) fn leader_here(&self) -> Option<LeaderLocation> {
        let node = self.raft.metrics().borrow().current_leader?;
        let map = self.map.borrow();
        let address = map.node(node).map(|node| node.control_address.clone());
        Some(LeaderLocation {
            node,
            address: address.unwrap_or_default(),
        })
    }

    /// Asks a node who leads; `None` if it does not answer.
    async fn ask_who_leads(&self, node: NodeId) -> Option<Option<LeaderLocation>> {
        let asked = self.call(node, PeerRequest::FindLeader, ANSWER_WAIT_MAX);
        match asked.await {
            Ok(PeerReply::Leader(leader)) => Some(leader),
            _ => None,
        }
    }
}

/// Searches whenever a leader is wanted ([`Core::leader_wanted`]), one search at a time, as long as the node
/// lives. Heartbeats do not wait for it.
pub(super) async fn run(core: Arc<Core>) {
    let mut search = LeaderSearch::default();
    loop {
        core.leader_wanted.notified().await;
        search.search(&core).await;
    }
}

#[cfg(test)]
mod tests;
