//! Whom this node reaches, looked for when a person waits and there is no leader, or when nothing is heard.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use super::Core;
use crate::ids::NodeId;
use crate::net::PeerRequest;
use crate::reach::Reach;

/// A voter that gives no answer in this time is told as not reached.
const PROBE_WAIT_MAX: Duration = Duration::from_millis(700);

impl Core {
    /// Asks all voters for a sign of life, all at a time.
    pub(crate) async fn reach(self: &Arc<Self>) -> Reach {
        let voters = self.raft_status().voters;
        let unreached = self.unreached_voters().await;
        let name = |id: NodeId| {
            let map = self.map.borrow();
            let name = map
                .node(id)
                .map_or_else(|| format!("node {id}"), |node| node.name.to_string());
            match id == self.id {
                true => format!("{name} (this node)"),
                false => name,
            }
        };
        Reach {
            voters: voters.into_iter().map(name).collect(),
            unreached: unreached.into_iter().map(name).collect(),
            is_unheard: self.hearing.has_withdrawn(),
        }
    }

    /// The voters that give no answer, in order.
    pub(super) async fn unreached_voters(self: &Arc<Self>) -> Vec<NodeId> {
        let voters = self.raft_status().voters;
        let mut probes = JoinSet::new();
        for voter in voters.into_iter().filter(|id| *id != self.id) {
            let core = Arc::clone(self);
            probes.spawn(async move { (voter, core.answers(voter).await) });
        }
        let mut unreached: Vec<NodeId> = Vec::new();
        while let Some(probed) = probes.join_next().await {
            if let Ok((voter, false)) = probed {
                unreached.push(voter);
            }
        }
        unreached.sort_unstable();
        unreached
    }

    /// Any answer is a sign of life, and this question costs nothing.
    async fn answers(&self, node: NodeId) -> bool {
        let answer = self.call(node, PeerRequest::Report, PROBE_WAIT_MAX).await;
        answer.is_ok()
    }
}
