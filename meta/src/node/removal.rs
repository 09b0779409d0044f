//! A node that was removed from the cluster learns of it, and ends: nobody waits for it, and nothing of it
//! counts any more. So does one whose program is too old for the cluster.
//!
//! A node that runs meanwhile is refused when it registers again, because the leader does not know it any
//! more. A node that was away, and so may know no leader, asks the nodes that keep metadata. Only those are
//! believed: a hostile host that is believed could end all other nodes.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::Core;
use super::admission::STILL_VOTES_PAUSE;
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

    /// Whether this node, which was to be registered, is told that the cluster does not want it; that is
    /// noted.
    pub(super) fn note_unwanted(&self, error: &MetaError) -> bool {
        use MapRefusal::{RolesNotGranted, TooOld, WasRemoved};
        let MetaError::Refused(Refusal::Map(refusal)) = error else {
            return false;
        };
        let is_unwanted = matches!(
            refusal,
            WasRemoved { node, .. } | TooOld { node, .. } | RolesNotGranted { node, .. } if *node == self.id
        );
        if is_unwanted {
            self.unwanted.send_replace(Some(refusal.clone()));
        }
        is_unwanted
    }

    /// A node says that this one was removed, which is never undone. Ignored unless that node keeps metadata.
    pub(crate) fn note_removed_by(&self, by: NodeId) {
        if self.keeps_metadata(by) {
            self.unwanted.send_replace(Some(self.own_removal()));
        }
    }

    fn own_removal(&self) -> MapRefusal {
        let (node, name) = (self.id, self.name.clone());
        MapRefusal::WasRemoved { node, name }
    }

    /// Returns when it is known that the cluster does not want this node any more, with the reason.
    pub(super) async fn unwanted(&self) -> MetaError {
        let mut unwanted = self.unwanted.subscribe();
        let why = unwanted.wait_for(Option::is_some).await;
        // The sender lives in `self`.
        let why = why.ok().and_then(|why| why.clone());
        let why = why.unwrap_or_else(|| self.own_removal());
        Refusal::from(why).into()
    }

    /// Asks the nodes that keep metadata one after the other. Notes a removal, and returns whether one says
    /// so.
    async fn ask_whether_removed(&self) -> bool {
        for other in self.metadata_keepers() {
            let request = PeerRequest::WasRemoved { node: self.id };
            let answer = self.call(other, request, ANSWER_WAIT_MAX).await;
            if matches!(answer, Ok(PeerReply::WasRemoved(true))) {
                self.note_removed_by(other);
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
            return;
        }
    }
}

/// Closes the connections to nodes that were removed, for as long as this one lives.
pub(super) async fn forget(core: std::sync::Arc<Core>) {
    let mut map = core.map.clone();
    let mut known = BTreeSet::new();
    // They may be needed until the others do without their votes.
    let mut gone = BTreeSet::new();
    loop {
        let now: BTreeSet<NodeId> = map
            .borrow_and_update()
            .nodes()
            .map(|node| node.id)
            .collect();
        gone.extend(known.difference(&now).copied());
        known = now;
        gone.retain(|node| {
            let is_removed = core.is_removed(*node);
            if is_removed {
                core.transport.forget(*node);
            }
            !is_removed
        });
        let changed = tokio::select! {
            changed = map.changed() => changed,
            () = tokio::time::sleep(STILL_VOTES_PAUSE), if !gone.is_empty() => Ok(()),
        };
        if changed.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::TransportError;
    use crate::node::testing::{HOST, META, ScriptedNode};

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn removal_is_believed_from_nodes_that_keep_metadata_alone() {
        let node = ScriptedNode::open().await;
        let core = &node.core;
        node.script.lock().turns_away.extend([HOST, META]);
        let ask = async |target| {
            core.call(target, PeerRequest::FindLeader, ANSWER_WAIT_MAX)
                .await
        };
        let answer = ask(HOST).await;
        assert!(
            matches!(answer, Err(TransportError::Removed { .. })),
            "{answer:?}"
        );
        assert_eq!(*core.unwanted.borrow(), None);
        assert!(ask(META).await.is_err());
        let removed = core.own_removal();
        assert_eq!(*core.unwanted.borrow(), Some(removed));
        node.end().await;
    }
}
