//! A node that was removed from the cluster learns of it, and ends: nobody waits for it, and nothing of it
//! counts any more. So does one whose program is too old for the cluster.
//!
//! One that runs meanwhile is refused when it registers anew, as the leader does not know it any more. One
//! that was away, and so may know no leader, asks whomever it knew.

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

    /// Another node says that this one was removed. That is so for ever.
    pub(crate) fn note_removed(&self) {
        self.unwanted.send_replace(Some(self.own_removal()));
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
            core.note_removed();
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
