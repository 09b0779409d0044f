//! How the metadata nodes talk: one request, one reply, over whatever [`Transport`] carries them.

pub mod enrol;
mod frame;
mod gate;
mod mem;
mod raft;
mod tls;

use std::path::PathBuf;

use openraft::BasicNode;
use raft_host::{LogId, RaftMessage, RaftReply};
use serde::{Deserialize, Serialize};

use crate::command::{Command, Reply};
use crate::groups::{GroupCall, GroupReply};
use crate::ids::{Generation, Incarnation, NodeId, VolumeId};
use crate::level::Level;
use crate::report::{LeaderReport, NodeReport};
use crate::stored::{NodeStored, StoredReport};

pub(crate) use gate::Gate;
pub use mem::MemNetwork;
pub(crate) use raft::RaftPeers;
pub use raft_host::BoxFuture;
pub use tls::{TlsError, TlsIdentity, TlsListener, TlsServer, TlsTransport};

/// What one metadata node asks of another.
#[derive(Debug, Serialize, Deserialize)]
pub enum PeerRequest {
    /// Message of another member of the cluster map's group. It has an encoding of its own (`net/frame.rs`).
    #[serde(skip)]
    Raft(RaftMessage),
    /// A command from a client of a node that does not lead.
    Propose(Command),
    /// From the holder of a lease: it still wants it.
    RenewLease {
        /// The volume.
        volume: VolumeId,
        /// The holder.
        node: NodeId,
        /// The generation it holds.
        generation: Generation,
    },
    /// A node lives.
    Heartbeat {
        /// The node.
        node: NodeId,
        /// The start of its process.
        incarnation: Incarnation,
        /// The highest feature level that it knows.
        level: Level,
    },
    /// How far must a node have applied to read what is committed now?
    ReadIndex,
    /// How a node is, by its own word.
    Tell {
        /// The node.
        node: NodeId,
        /// Its word.
        word: NodeReport,
    },
    /// What has the leader heard?
    Report,
    /// What a node has counted of what volumes store.
    TellStored {
        /// The node.
        node: NodeId,
        /// What it has counted.
        told: NodeStored,
    },
    /// How much do volumes store?
    Stored,
    /// Was this node removed from the cluster? Any node may know, whoever leads; those that keep metadata are
    /// asked.
    WasRemoved {
        /// The node.
        node: NodeId,
    },
    /// Asks who leads. Sent by a node that no leader reaches, to nodes that keep metadata.
    FindLeader,
}

/// What it answers.
#[derive(Debug, Serialize, Deserialize)]
pub enum PeerReply {
    /// To `Raft`; encoded like that.
    #[serde(skip)]
    Raft(RaftReply),
    /// To `Propose` and `RenewLease`.
    Propose(Result<Reply, ProposeError>),
    /// To `Heartbeat`.
    Heartbeat(Result<HeartbeatReply, ProposeError>),
    /// To `ReadIndex`; `None` while nothing is committed.
    ReadIndex(Result<Option<LogId>, ProposeError>),
    /// To `Tell` and `TellStored`.
    Tell(Result<(), ProposeError>),
    /// To `Report`.
    Report(Result<LeaderReport, ProposeError>),
    /// To `Stored`.
    Stored(Result<StoredReport, ProposeError>),
    /// To `WasRemoved`: true is for ever, false only what this node has applied.
    WasRemoved(bool),
    /// Reply to `FindLeader`: the leader that this node follows, if any.
    Leader(Option<LeaderLocation>),
}

/// Leader and its address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaderLocation {
    /// The leader.
    pub node: NodeId,
    /// Address of its metadata service in the cluster map; empty if the map does not have it yet.
    pub address: String,
}

/// Source of a node's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressSource {
    /// The node itself, on a connection that it opened or accepted.
    Itself,
    /// Another node.
    Other,
}

/// What the leader says to a heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeartbeatReply {
    /// Whether this start of the node's process is the one in the map.
    pub is_known: bool,
    /// How long ago the leader asked the majority that last confirmed it, in milliseconds: its word is so
    /// old.
    pub confirmed_ago_ms: u64,
}

/// Why a node could not do what only the leader can.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum ProposeError {
    /// It does not lead; nothing was done.
    #[error("not the leader")]
    NotLeader {
        /// Who leads, as far as it knows.
        leader: Option<NodeId>,
    },
    /// It led, and cannot say whether the command will be done.
    #[error("outcome unknown")]
    Unknown,
    /// Its metadata cannot be read or written; nothing was done.
    #[error("{detail}")]
    Failed {
        /// What went wrong.
        detail: String,
    },
    /// It does not take this from whoever asks, or not so much of it; nothing was done. Said about namespace
    /// groups alone.
    #[error("{detail}")]
    Refused {
        /// Why.
        detail: String,
    },
    /// The file system under its metadata is full.
    #[error("no space in {}", .dir.display())]
    NoSpace {
        /// Where the metadata lie.
        dir: PathBuf,
        /// Whether it may be done once there is space; else nothing was done.
        begun: bool,
    },
    /// It is shutting down; nothing was done.
    #[error("shutting down")]
    Stopped,
}

/// Why there is no answer from a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TransportError {
    /// The request did not get there: nothing was done.
    Unreachable {
        /// The peer.
        target: NodeId,
        /// Why not.
        detail: String,
    },
    /// Nobody listens at its address: its process is gone, or has yet to begin. Nothing was done.
    Gone {
        /// The peer.
        target: NodeId,
    },
    /// It hears this node no more: the cluster has removed it. Nothing was done.
    Removed {
        /// The peer.
        target: NodeId,
    },
    /// The request may have got there.
    Lost {
        /// The peer.
        target: NodeId,
        /// How.
        detail: String,
    },
}

impl TransportError {
    /// The peer.
    fn target(&self) -> NodeId {
        match self {
            Self::Unreachable { target, .. }
            | Self::Gone { target }
            | Self::Removed { target }
            | Self::Lost { target, .. } => *target,
        }
    }

    /// Text for operators, with the name of the peer.
    pub(crate) fn text(&self, name: &str) -> String {
        match self {
            Self::Unreachable { detail, .. } => format!("node {name} cannot be reached: {detail}"),
            Self::Gone { .. } => {
                format!("node {name} cannot be reached: connection refused at its address")
            }
            Self::Removed { .. } => format!(
                "node {name} cannot be reached: it says that this node was removed from the cluster"
            ),
            Self::Lost { detail, .. } => {
                format!("the connection to node {name} was lost: {detail}")
            }
        }
    }
}

impl std::fmt::Display for TransportError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text(&self.target().to_string()))
    }
}

impl std::error::Error for TransportError {}

/// Carries requests to peers.
pub trait Transport: Send + Sync + 'static {
    /// Sends a request to a peer at its address and waits for the reply. The caller bounds the time by
    /// dropping the future.
    fn call<'a>(
        &'a self,
        target: NodeId,
        address: &'a BasicNode,
        request: PeerRequest,
    ) -> BoxFuture<'a, Result<PeerReply, TransportError>>;

    /// The same about a namespace group. What is asked about groups and about the cluster map does not wait
    /// for each other.
    fn call_group<'a>(
        &'a self,
        target: NodeId,
        address: &'a BasicNode,
        call: GroupCall,
    ) -> BoxFuture<'a, Result<GroupReply, TransportError>>;

    /// Closes the connection to a node that was removed from the cluster.
    fn forget(&self, _node: NodeId) {}

    /// Stores an address of a node, in addition to the one that a call names.
    fn learn(&self, _node: NodeId, _address: &str, _source: AddressSource) {}
}

/// The transport of a cluster of one.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoPeers;

impl Transport for NoPeers {
    fn call<'a>(
        &'a self,
        target: NodeId,
        _: &'a BasicNode,
        _: PeerRequest,
    ) -> BoxFuture<'a, Result<PeerReply, TransportError>> {
        Box::pin(async move { Err(no_network(target)) })
    }

    fn call_group<'a>(
        &'a self,
        target: NodeId,
        _: &'a BasicNode,
        _: GroupCall,
    ) -> BoxFuture<'a, Result<GroupReply, TransportError>> {
        Box::pin(async move { Err(no_network(target)) })
    }
}

fn no_network(target: NodeId) -> TransportError {
    let detail = "this node was started without a network to its peers".to_owned();
    TransportError::Unreachable { target, detail }
}
