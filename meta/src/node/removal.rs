//! A node that was removed from the cluster learns of it, and ends: nobody waits for it, and nothing of it counts any more.
//!
//! One that runs meanwhile is refused when it registers anew, as the leader does not know it any more. One that was away, and so may
//! know no leader, asks whomever it knew.

use std::time::{Duration, Instant};

use super::Core;
use crate::error::MetaError;
use crate::ids::NodeId;
use crate::net::{PeerReply, PeerRequest};
use crate::refusal::{MapRefusal, Refusal};
use crate::state::tables::REMOVED_NODES;
use crate::watch::{HEARTBEAT_LEASE, NODE_DOWN_AFTER};

/// A node that the leader does not hear asks this often whether it was removed.
const ASK_INTERVAL: Duration = Duration::from_secs(2);
/// A node that gives no answer in this time is asked again later.
const ANSWER_WAIT_MAX: Duration = Duration::from_secs(2);

impl Core {
    /// Whether a node was removed, as far as this one has applied.
    pub(super) fn was_removed_here(&self, node: NodeId) -> bool {
        let removed = self.view(|view| REMOVED_NODES.get(view, &node));
        matches!(removed, Ok(Some(_)))
    }

    /// Whether a node that was to be registered is told that it was removed; that is noted.
    pub(super) fn note_removal(&self, error: &MetaError) -> bool {
        let is_removed = matches!(
            error,
            MetaError::Refused(Refusal::Map(MapRefusal::WasRemoved { node })) if *node == self.id
        );
        if is_removed {
            self.removed.send_replace(true);
        }
        is_removed
    }

    /// Returns when this node is known to be removed.
    pub(super) async fn removed(&self) -> MetaError {
        // The sender lives in `self`.
        let _ = self.removed.subscribe().wait_for(|removed| *removed).await;
        Refusal::from(MapRefusal::WasRemoved { node: self.id }).into()
    }

    async fn ask_whether_removed(&self) -> bool {
        let others: Vec<NodeId> = {
            let metrics = self.raft.metrics();
            let metrics = metrics.borrow();
            let nodes = metrics.membership_config.membership().nodes();
            nodes
                .map(|(id, _)| *id)
                .filter(|id| *id != self.id)
                .collect()
        };
        for other in others {
            let request = PeerRequest::WasRemoved { node: self.id };
            let answer = self.call(other, request, ANSWER_WAIT_MAX).await;
            if matches!(answer, Ok(PeerReply::WasRemoved(true))) {
                return true;
            }
        }
        false
    }
}

/// Asks while no leader hears of this node, for as long as it lives.
pub(super) async fn watch(core: std::sync::Arc<Core>) {
    loop {
        tokio::time::sleep(ASK_INTERVAL).await;
        let valid = *core.valid_until().borrow();
        // What was heard makes valid for the whole lease.
        let is_heard =
            valid.is_some_and(|until| Instant::now() + HEARTBEAT_LEASE < until + NODE_DOWN_AFTER);
        if !is_heard && core.ask_whether_removed().await {
            core.removed.send_replace(true);
            return;
        }
    }
}
