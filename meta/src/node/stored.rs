//! What volumes store, as nodes tell the leader, and what it answers. In memory only; see [`crate::stored`].

use std::time::Instant;

use super::Core;
use super::leader_request::{LeaderRequest, Wait, unfit};
use crate::error::MetaError;
use crate::ids::NodeId;
use crate::level::Level;
use crate::model::NodeState;
use crate::net::{PeerReply, ProposeError};
use crate::stored::{NodeStored, StoredReport};

impl Core {
    /// Whether the leader, whoever that is, can read requests about this.
    fn knows_stored(&self) -> bool {
        self.map.borrow().level() >= Level::STORED_BYTES
    }

    /// Tells the leader what this node has counted; false if the cluster does not know of this yet.
    pub(crate) async fn tell_stored(&self, told: NodeStored) -> Result<bool, MetaError> {
        if !self.knows_stored() {
            return Ok(false);
        }
        let (node, told) = (self.id, told.bounded());
        let ask = LeaderRequest::TellStored { node, told };
        match self.ask_leader(&ask, Wait::PATIENT).await? {
            PeerReply::Tell(Ok(())) => Ok(true),
            other => Err(unfit(&other)),
        }
    }

    /// Asks the leader what volumes store; nothing is known if the cluster does not know of this yet.
    pub(crate) async fn stored(&self) -> Result<StoredReport, MetaError> {
        if !self.knows_stored() {
            return Ok(StoredReport::default());
        }
        let asked = self.ask_leader(&LeaderRequest::Stored, Wait::PATIENT).await;
        match asked? {
            PeerReply::Stored(Ok(report)) => Ok(report),
            other => Err(unfit(&other)),
        }
    }

    pub(super) fn take_stored_here(
        &self,
        node: NodeId,
        told: NodeStored,
    ) -> Result<(), ProposeError> {
        // Who is not in the map takes no memory here.
        let is_known = self.map.borrow().node(node).is_some();
        let mut leading = self.failure_detector.lock();
        if !leading.watch.leads() {
            drop(leading);
            return Err(self.not_leader());
        }
        if is_known {
            leading.stored.take(node, told, Instant::now());
        }
        drop(leading);
        self.stored_here().map(drop)
    }

    pub(super) fn stored_here(&self) -> Result<StoredReport, ProposeError> {
        let map = std::sync::Arc::clone(&self.map.borrow());
        let mut leading = self.failure_detector.lock();
        if !leading.watch.leads() {
            drop(leading);
            return Err(self.not_leader());
        }
        let is_up = |id| map.node(id).is_some_and(|node| node.state == NodeState::Up);
        let groups = map.groups().map(|group| group.id());
        leading.stored.add_up(groups, is_up, Instant::now());
        Ok(leading.stored.report())
    }
}
