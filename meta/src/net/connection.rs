//! openraft's view of a [`Transport`].

use std::sync::Arc;

use openraft::BasicNode;
use openraft::error::{
    InstallSnapshotError, NetworkError, RPCError, RaftError, RemoteError, Unreachable,
};
use openraft::network::{RPCOption, RaftNetwork, RaftNetworkFactory};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, InstallSnapshotRequest, InstallSnapshotResponse,
    VoteRequest, VoteResponse,
};

use super::{Gate, PeerReply, PeerRequest, Transport, TransportError};
use crate::ids::NodeId;
use crate::raft::TypeConfig;

/// Makes connections for openraft.
#[derive(Clone)]
pub(crate) struct Connections {
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) gate: Gate,
}

impl RaftNetworkFactory<TypeConfig> for Connections {
    type Network = Connection;

    async fn new_client(&mut self, target: NodeId, node: &BasicNode) -> Connection {
        Connection {
            of: self.clone(),
            target,
            address: node.clone(),
        }
    }
}

/// The way to one peer.
pub(crate) struct Connection {
    of: Connections,
    target: NodeId,
    address: BasicNode,
}

/// A peer answered one kind of request with the reply to another.
#[derive(Debug, thiserror::Error)]
#[error("node {0} gave an answer that does not fit the question")]
struct UnexpectedReply(NodeId);

/// Why a call of openraft has no answer.
pub(crate) type CallError<E> = RPCError<NodeId, BasicNode, E>;

/// A call that did not get an answer, as openraft tells it apart: whether to wait before the next.
pub(crate) fn unreached<E: std::error::Error>(error: &TransportError) -> CallError<E> {
    match error {
        TransportError::Unreachable { .. }
        | TransportError::Gone { .. }
        | TransportError::Removed { .. } => Unreachable::new(error).into(),
        TransportError::Lost { .. } => NetworkError::new(error).into(),
    }
}

/// The answer that a reply holds; nothing if it is one to another kind of request.
#[expect(
    clippy::result_large_err,
    reason = "openraft's error, as its traits return it"
)]
pub(crate) fn fitting<T, E: std::error::Error>(
    target: NodeId,
    answer: Option<Result<T, E>>,
) -> Result<T, CallError<E>> {
    match answer {
        Some(Ok(answer)) => Ok(answer),
        Some(Err(error)) => Err(RemoteError::new(target, error).into()),
        None => Err(NetworkError::new(&UnexpectedReply(target)).into()),
    }
}

impl Connection {
    /// Sends a request; `unwrap` takes the reply that fits.
    async fn call<T, E: std::error::Error>(
        &self,
        request: PeerRequest,
        unwrap: impl FnOnce(PeerReply) -> Option<Result<T, E>>,
    ) -> Result<T, CallError<E>> {
        let Connections { transport, gate } = &self.of;
        gate.check(self.target).map_err(|error| unreached(&error))?;
        let reply = transport.call(self.target, &self.address, request).await;
        let reply = reply.map_err(|error| unreached(&error))?;
        fitting(self.target, unwrap(reply))
    }
}

impl RaftNetwork<TypeConfig> for Connection {
    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<TypeConfig>,
        _: RPCOption,
    ) -> Result<AppendEntriesResponse<NodeId>, CallError<RaftError<NodeId>>> {
        self.call(PeerRequest::AppendEntries(rpc), |reply| match reply {
            PeerReply::AppendEntries(answer) => Some(answer),
            _ => None,
        })
        .await
    }

    async fn install_snapshot(
        &mut self,
        rpc: InstallSnapshotRequest<TypeConfig>,
        _: RPCOption,
    ) -> Result<InstallSnapshotResponse<NodeId>, CallError<RaftError<NodeId, InstallSnapshotError>>>
    {
        self.call(PeerRequest::InstallSnapshot(rpc), |reply| match reply {
            PeerReply::InstallSnapshot(answer) => Some(answer),
            _ => None,
        })
        .await
    }

    async fn vote(
        &mut self,
        rpc: VoteRequest<NodeId>,
        _: RPCOption,
    ) -> Result<VoteResponse<NodeId>, CallError<RaftError<NodeId>>> {
        self.call(PeerRequest::Vote(rpc), |reply| match reply {
            PeerReply::Vote(answer) => Some(answer),
            _ => None,
        })
        .await
    }
}
