//! Adapter between openraft and a [`RaftTransport`].

use std::sync::Arc;

use fabric_types::ids::NodeId;
use openraft::BasicNode;
use openraft::error::{
    InstallSnapshotError, NetworkError, RPCError, RaftError, RemoteError, Unreachable,
};
use openraft::network::{RPCOption, RaftNetwork, RaftNetworkFactory};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, InstallSnapshotRequest, InstallSnapshotResponse,
    VoteRequest, VoteResponse,
};

use crate::BoxFuture;
use crate::config::TypeConfig;
use crate::message::{RaftMessage, RaftReply};
use crate::storage::GroupId;

/// Carries Raft messages to other nodes.
pub trait RaftTransport: Send + Sync + 'static {
    /// Sends a message to a member of a group and returns its reply. `address` is the member's address in
    /// the membership. The caller bounds the time by dropping the future.
    fn call<'a>(
        &'a self,
        group: GroupId,
        target: NodeId,
        address: &'a BasicNode,
        message: RaftMessage,
    ) -> BoxFuture<'a, Result<RaftReply, CallError>>;
}

/// Error of a call without a reply.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The message did not arrive. openraft waits before it sends the next one.
    #[error("{0}")]
    Unreachable(String),
    /// The message may have arrived.
    #[error("{0}")]
    Lost(String),
}

/// A peer answered one kind of message with the reply to another.
#[derive(Debug, thiserror::Error)]
#[error("node {0} gave an answer that does not fit the question")]
struct UnexpectedReply(NodeId);

/// Error of a call, as openraft's traits return it.
type RpcError<E> = RPCError<NodeId, BasicNode, E>;

/// Makes the connections of one group for openraft.
#[derive(Clone)]
pub(crate) struct Connections {
    pub(crate) group: GroupId,
    pub(crate) transport: Arc<dyn RaftTransport>,
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

/// Connection of a group to one of its members.
pub(crate) struct Connection {
    of: Connections,
    target: NodeId,
    address: BasicNode,
}

impl Connection {
    /// Sends a message. `unwrap` takes the reply of the right kind.
    async fn call<T, E: std::error::Error>(
        &self,
        message: RaftMessage,
        unwrap: impl FnOnce(RaftReply) -> Option<Result<T, E>>,
    ) -> Result<T, RpcError<E>> {
        let Connections { group, transport } = &self.of;
        let called = transport.call(*group, self.target, &self.address, message);
        let reply = called.await.map_err(|error| match error {
            CallError::Unreachable(_) => RPCError::from(Unreachable::new(&error)),
            CallError::Lost(_) => NetworkError::new(&error).into(),
        })?;
        match unwrap(reply) {
            Some(Ok(answer)) => Ok(answer),
            Some(Err(error)) => Err(RemoteError::new(self.target, error).into()),
            None => Err(NetworkError::new(&UnexpectedReply(self.target)).into()),
        }
    }
}

impl RaftNetwork<TypeConfig> for Connection {
    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<TypeConfig>,
        _: RPCOption,
    ) -> Result<AppendEntriesResponse<NodeId>, RpcError<RaftError<NodeId>>> {
        self.call(RaftMessage::AppendEntries(rpc), |reply| match reply {
            RaftReply::AppendEntries(answer) => Some(answer),
            _ => None,
        })
        .await
    }

    async fn install_snapshot(
        &mut self,
        rpc: InstallSnapshotRequest<TypeConfig>,
        _: RPCOption,
    ) -> Result<InstallSnapshotResponse<NodeId>, RpcError<RaftError<NodeId, InstallSnapshotError>>>
    {
        self.call(RaftMessage::InstallSnapshot(rpc), |reply| match reply {
            RaftReply::InstallSnapshot(answer) => Some(answer),
            _ => None,
        })
        .await
    }

    async fn vote(
        &mut self,
        rpc: VoteRequest<NodeId>,
        _: RPCOption,
    ) -> Result<VoteResponse<NodeId>, RpcError<RaftError<NodeId>>> {
        self.call(RaftMessage::Vote(rpc), |reply| match reply {
            RaftReply::Vote(answer) => Some(answer),
            _ => None,
        })
        .await
    }
}
