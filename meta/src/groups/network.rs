//! What nodes ask each other about a namespace group, and openraft's view of it.

use std::sync::Arc;

use fs_capabilities::{Counts, Link, ToHolder, ToManager};
use namespace::{Answer, FilesystemId, Query, Reply, Request, SessionId};
use openraft::BasicNode;
use openraft::error::{InstallSnapshotError, RaftError};
use openraft::network::{RPCOption, RaftNetwork, RaftNetworkFactory};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, InstallSnapshotRequest, InstallSnapshotResponse,
    VoteRequest, VoteResponse,
};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::config::NamespaceConfig;
use super::coordination::SessionLink;
use super::reads::Answers;
use crate::ids::{NamespaceGroupId, NodeId};
use crate::map::ClusterMap;
use crate::net::{CallError, Gate, ProposeError, Transport, fitting, unreached};

/// A request about a namespace group.
#[derive(Debug, Serialize, Deserialize)]
pub struct GroupCall {
    /// The group.
    pub group: NamespaceGroupId,
    /// What is asked.
    pub request: GroupRequest,
}

/// What is asked of a node about a namespace group.
#[derive(Debug, Serialize, Deserialize)]
pub enum GroupRequest {
    /// By another member of the group.
    Raft(RaftMessage),
    /// Operations to be done in this order, by the leader.
    Apply(Vec<(FilesystemId, Request)>),
    /// Questions about what is committed now, for the leader.
    Read(Vec<(FilesystemId, Query)>),
    /// The same, of a session that may cache the answers.
    ReadAs(SessionLink, Vec<(FilesystemId, Query)>),
    /// About what sessions of a filesystem may cache, for the leader.
    Link(FilesystemId, LinkCall),
}

/// What is said about capabilities of a filesystem (crate `fs-capabilities`).
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum LinkCall {
    /// In which term it is led.
    Term,
    /// Takes a session's messages, numbered from `first`.
    Send {
        /// The session.
        session: SessionId,
        /// Its link.
        link: Link,
        /// The number of the first message.
        first: u64,
        /// The messages.
        messages: Vec<ToManager>,
    },
    /// Asks for the leader's messages, and waits a few seconds for the first.
    Receive {
        /// The session.
        session: SessionId,
        /// Its link.
        link: Link,
        /// The last message that has come.
        behind: u64,
    },
    /// Figures.
    Counts,
}

/// The answer to a [`LinkCall`].
#[derive(Debug, Serialize, Deserialize)]
pub enum LinkReply {
    /// To `Term`.
    Term(u64),
    /// To `Send`.
    Taken,
    /// To `Receive`.
    Messages(Vec<ToHolder>),
    /// To `Send` and `Receive`: the link is not the session's, or messages of it are lost.
    Gone,
    /// To `Counts`.
    Counts(Counts),
}

/// A Raft message.
#[derive(Debug, Serialize, Deserialize)]
pub enum RaftMessage {
    /// Take these entries.
    AppendEntries(AppendEntriesRequest<NamespaceConfig>),
    /// Vote for me.
    Vote(VoteRequest<NodeId>),
    /// Take this piece of a snapshot.
    InstallSnapshot(InstallSnapshotRequest<NamespaceConfig>),
}

/// What a node answers.
#[derive(Debug, Serialize, Deserialize)]
pub enum GroupReply {
    /// To a Raft message.
    Raft(RaftReply),
    /// To `Apply`: a reply to each operation.
    Apply(Result<Vec<Reply>, ProposeError>),
    /// To `Read`: an answer to each question, or why the filesystem refuses it.
    Read(Result<Vec<Result<Answer, namespace::Error>>, ProposeError>),
    /// To a Raft message: this node does not have the group, or not yet.
    Absent,
    /// To `ReadAs`.
    ReadAs(Result<Answers, ProposeError>),
    /// To `Link`.
    Link(Result<LinkReply, ProposeError>),
}

/// The answer to a Raft message.
#[derive(Debug, Serialize, Deserialize)]
pub enum RaftReply {
    /// To `AppendEntries`.
    AppendEntries(Result<AppendEntriesResponse<NodeId>, RaftError<NodeId>>),
    /// To `Vote`.
    Vote(Result<VoteResponse<NodeId>, RaftError<NodeId>>),
    /// To `InstallSnapshot`.
    InstallSnapshot(
        Result<InstallSnapshotResponse<NodeId>, RaftError<NodeId, InstallSnapshotError>>,
    ),
}

/// Makes connections of one group for openraft.
#[derive(Clone)]
pub(crate) struct GroupNetwork {
    pub(crate) group: NamespaceGroupId,
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) gate: Gate,
    pub(crate) map: watch::Receiver<Arc<ClusterMap>>,
}

impl RaftNetworkFactory<NamespaceConfig> for GroupNetwork {
    type Network = GroupConnection;

    async fn new_client(&mut self, target: NodeId, node: &BasicNode) -> GroupConnection {
        GroupConnection {
            of: self.clone(),
            target,
            address: node.clone(),
        }
    }
}

/// The way of a group to one of its members.
pub(crate) struct GroupConnection {
    of: GroupNetwork,
    target: NodeId,
    address: BasicNode,
}

impl GroupConnection {
    /// Where the target is by the cluster map: groups follow that one after the other, and share a
    /// connection.
    fn address(&self) -> BasicNode {
        let map = self.of.map.borrow();
        match map
            .node(self.target)
            .map(|node| node.control_address.as_str())
        {
            Some("") | None => self.address.clone(),
            Some(address) => BasicNode::new(address),
        }
    }

    /// Sends a message; `unwrap` takes the reply that fits.
    async fn call<T, E: std::error::Error>(
        &self,
        message: RaftMessage,
        unwrap: impl FnOnce(RaftReply) -> Option<Result<T, E>>,
    ) -> Result<T, CallError<E>> {
        let call = GroupCall {
            group: self.of.group,
            request: GroupRequest::Raft(message),
        };
        let refused = self.of.gate.check(self.target);
        refused.map_err(|error| unreached(&error))?;
        let address = self.address();
        let transport = &self.of.transport;
        let reply = transport.call_group(self.target, &address, call).await;
        match reply.map_err(|error| unreached(&error))? {
            GroupReply::Raft(reply) => fitting(self.target, unwrap(reply)),
            _ => fitting(self.target, None),
        }
    }
}

impl RaftNetwork<NamespaceConfig> for GroupConnection {
    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<NamespaceConfig>,
        _: RPCOption,
    ) -> Result<AppendEntriesResponse<NodeId>, CallError<RaftError<NodeId>>> {
        self.call(RaftMessage::AppendEntries(rpc), |reply| match reply {
            RaftReply::AppendEntries(answer) => Some(answer),
            _ => None,
        })
        .await
    }

    async fn install_snapshot(
        &mut self,
        rpc: InstallSnapshotRequest<NamespaceConfig>,
        _: RPCOption,
    ) -> Result<InstallSnapshotResponse<NodeId>, CallError<RaftError<NodeId, InstallSnapshotError>>>
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
    ) -> Result<VoteResponse<NodeId>, CallError<RaftError<NodeId>>> {
        self.call(RaftMessage::Vote(rpc), |reply| match reply {
            RaftReply::Vote(answer) => Some(answer),
            _ => None,
        })
        .await
    }
}
