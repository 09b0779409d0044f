//! What keeps the messages of leaders and candidates from leaving a node.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use openraft::BasicNode;

use super::{BoxFuture, PeerReply, PeerRequest, Transport, TransportError};
use crate::groups::{GroupCall, GroupReply, GroupRequest};
use crate::ids::NodeId;

/// Open, or shut. Clones are the same gate.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gate(Arc<AtomicBool>);

impl Gate {
    pub(crate) fn is_shut(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn set_shut(&self, shut: bool) {
        self.0.store(shut, Ordering::Relaxed);
    }
}

/// The way out of a node, without what leaders and candidates send while the gate is shut.
pub(crate) struct GatedTransport {
    pub(crate) inner: Arc<dyn Transport>,
    pub(crate) gate: Gate,
}

impl GatedTransport {
    fn check(&self, target: NodeId, is_raft: bool) -> Result<(), TransportError> {
        match is_raft && self.gate.is_shut() {
            true => Err(TransportError::Unreachable {
                target,
                detail: "this node has withdrawn, for it does not hear others".to_owned(),
            }),
            false => Ok(()),
        }
    }
}

impl Transport for GatedTransport {
    fn call<'a>(
        &'a self,
        target: NodeId,
        address: &'a BasicNode,
        request: PeerRequest,
    ) -> BoxFuture<'a, Result<PeerReply, TransportError>> {
        let is_raft = matches!(
            request,
            PeerRequest::AppendEntries(_) | PeerRequest::Vote(_) | PeerRequest::InstallSnapshot(_)
        );
        match self.check(target, is_raft) {
            Ok(()) => self.inner.call(target, address, request),
            Err(error) => Box::pin(async move { Err(error) }),
        }
    }

    fn call_group<'a>(
        &'a self,
        target: NodeId,
        address: &'a BasicNode,
        call: GroupCall,
    ) -> BoxFuture<'a, Result<GroupReply, TransportError>> {
        let is_raft = matches!(call.request, GroupRequest::Raft(_));
        match self.check(target, is_raft) {
            Ok(()) => self.inner.call_group(target, address, call),
            Err(error) => Box::pin(async move { Err(error) }),
        }
    }

    fn forget(&self, node: NodeId) {
        self.inner.forget(node);
    }
}
