//! Raft messages of all groups over a [`Transport`].

use std::sync::Arc;

use openraft::BasicNode;
use raft_host::{CallError, GroupId, RaftMessage, RaftReply, RaftTransport};
use tokio::sync::watch;

use super::{BoxFuture, Gate, PeerReply, PeerRequest, Transport, TransportError};
use crate::groups::{GroupCall, GroupReply, GroupRequest};
use crate::ids::{NamespaceGroupId, NodeId};
use crate::map::ClusterMap;

/// Way of a node's Raft groups to other nodes.
pub(crate) struct RaftPeers {
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) gate: Gate,
    pub(crate) map: watch::Receiver<Arc<ClusterMap>>,
}

impl RaftPeers {
    /// Returns a node's address in the cluster map. Namespace groups follow the map one after the other, and
    /// share a connection.
    fn mapped(&self, target: NodeId, address: &BasicNode) -> BasicNode {
        let map = self.map.borrow();
        match map.node(target).map(|node| node.control_address.as_str()) {
            Some("") | None => address.clone(),
            Some(address) => BasicNode::new(address),
        }
    }

    async fn send(
        &self,
        group: GroupId,
        target: NodeId,
        address: &BasicNode,
        message: RaftMessage,
    ) -> Result<Option<RaftReply>, TransportError> {
        self.gate.check(target)?;
        match group {
            GroupId::Main => {
                let request = PeerRequest::Raft(message);
                let reply = self.transport.call(target, address, request).await?;
                Ok(match reply {
                    PeerReply::Raft(reply) => Some(reply),
                    _ => None,
                })
            }
            GroupId::Numbered(number) => {
                let call = GroupCall {
                    group: NamespaceGroupId(number),
                    request: GroupRequest::Raft(message),
                };
                let address = self.mapped(target, address);
                let reply = self.transport.call_group(target, &address, call).await?;
                Ok(match reply {
                    GroupReply::Raft(reply) => Some(reply),
                    _ => None,
                })
            }
        }
    }
}

impl RaftTransport for RaftPeers {
    fn call<'a>(
        &'a self,
        group: GroupId,
        target: NodeId,
        address: &'a BasicNode,
        message: RaftMessage,
    ) -> BoxFuture<'a, Result<RaftReply, CallError>> {
        Box::pin(async move {
            match self.send(group, target, address, message).await {
                Ok(Some(reply)) => Ok(reply),
                Ok(None) => {
                    let detail =
                        format!("node {target} gave an answer that does not fit the question");
                    Err(CallError::Lost(detail))
                }
                Err(error) => Err(match &error {
                    TransportError::Unreachable { .. }
                    | TransportError::Gone { .. }
                    | TransportError::Removed { .. } => CallError::Unreachable(error.to_string()),
                    TransportError::Lost { .. } => CallError::Lost(error.to_string()),
                }),
            }
        })
    }
}
