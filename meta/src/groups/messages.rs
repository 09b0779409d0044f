//! Messages between nodes about a namespace group.

use fs_capabilities::{Counts, Link, ToHolder, ToManager};
use namespace::{Answer, FilesystemId, Query, Reply, Request, SessionId};
use raft_host::{RaftMessage, RaftReply};
use serde::{Deserialize, Serialize};

use super::coordination::SessionLink;
use super::reads::Answers;
use crate::ids::NamespaceGroupId;
use crate::net::ProposeError;

/// A request about a namespace group.
#[derive(Debug, Serialize, Deserialize)]
pub struct GroupCall {
    /// The group.
    pub group: NamespaceGroupId,
    /// The request.
    pub request: GroupRequest,
}

/// Request to a node about a namespace group.
#[derive(Debug, Serialize, Deserialize)]
pub enum GroupRequest {
    /// By another member of the group.
    Raft(RaftMessage),
    /// Operations to be done in this order, by the leader.
    Apply(Vec<(FilesystemId, Request)>),
    /// Queries of committed state, for the leader.
    Read(Vec<(FilesystemId, Query)>),
    /// Queries by a session that may cache the answers.
    ReadAs(SessionLink, Vec<(FilesystemId, Query)>),
    /// About what sessions of a filesystem may cache, for the leader.
    Link(FilesystemId, LinkCall),
}

/// Message about capabilities of a filesystem (crate `fs-capabilities`).
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

/// Reply of a node.
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
