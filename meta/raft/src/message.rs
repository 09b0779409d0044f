//! Messages between the members of a Raft group.

use fabric_types::ids::NodeId;
use openraft::EntryPayload;
use openraft::error::{InstallSnapshotError, RaftError};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, InstallSnapshotRequest, InstallSnapshotResponse,
    VoteRequest, VoteResponse,
};
use serde::{Deserialize, Serialize};

use crate::config::TypeConfig;

/// Message to a member of a group.
#[derive(Debug, Serialize, Deserialize)]
pub enum RaftMessage {
    /// Log entries, or a heartbeat.
    AppendEntries(AppendEntriesRequest<TypeConfig>),
    /// Request for a vote.
    Vote(VoteRequest<NodeId>),
    /// Piece of a snapshot.
    InstallSnapshot(InstallSnapshotRequest<TypeConfig>),
}

impl RaftMessage {
    /// Checks every command in the message.
    ///
    /// # Errors
    /// The first error of `check`.
    pub fn check_commands(&self, check: fn(&[u8]) -> Result<(), String>) -> Result<(), String> {
        let Self::AppendEntries(request) = self else {
            return Ok(());
        };
        request
            .entries
            .iter()
            .try_for_each(|entry| match &entry.payload {
                EntryPayload::Normal(command) => check(&command.0),
                EntryPayload::Blank | EntryPayload::Membership(_) => Ok(()),
            })
    }
}

/// Reply to a [`RaftMessage`].
#[derive(Debug, Serialize, Deserialize)]
pub enum RaftReply {
    /// Reply to `AppendEntries`.
    AppendEntries(Result<AppendEntriesResponse<NodeId>, RaftError<NodeId>>),
    /// Reply to `Vote`.
    Vote(Result<VoteResponse<NodeId>, RaftError<NodeId>>),
    /// Reply to `InstallSnapshot`.
    InstallSnapshot(
        Result<InstallSnapshotResponse<NodeId>, RaftError<NodeId, InstallSnapshotError>>,
    ),
}
