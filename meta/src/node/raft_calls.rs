//! What is asked of a group's Raft machine, and what its refusals mean to whoever asked this node.

use std::time::Duration;

use openraft::error::{CheckIsLeaderError, ClientWriteError, Fatal, RaftError};
use openraft::raft::{VoteRequest, VoteResponse};
use openraft::{BasicNode, ServerState};

use crate::ids::NodeId;
use crate::net::ProposeError;
use crate::raft::{GroupConfig, LogId, RaftHandle};

/// What the leader has taken must be committed in this time; then its outcome is unknown. Covers an election
/// and a slow disk.
pub(crate) const COMMIT_WAIT_MAX: Duration = Duration::from_secs(20);

/// How far a node must have applied to read what is committed now, if this one leads. `full` returns when the
/// file system under the database has no space: Raft stands still then.
pub(crate) async fn read_index<C: GroupConfig>(
    raft: &RaftHandle<C>,
    full: impl Future<Output = ()>,
) -> Result<Option<LogId>, ProposeError> {
    let index = tokio::select! {
        index = raft.read_log_id() => index,
        // Of the only voter whatever was acknowledged is applied.
        () = full => return match is_alone(raft) {
            true => Ok(None),
            false => Err(ProposeError::NotLeader { leader: None }),
        },
    };
    match index {
        Ok((index, _)) => Ok(index),
        Err(RaftError::APIError(CheckIsLeaderError::ForwardToLeader(forward))) => {
            Err(ProposeError::NotLeader {
                leader: forward.leader_id,
            })
        }
        // It may have been deposed: somebody else may lead by now.
        Err(RaftError::APIError(CheckIsLeaderError::QuorumNotEnough(_))) => {
            Err(ProposeError::NotLeader { leader: None })
        }
        Err(RaftError::Fatal(error)) => Err(ended(&error)),
    }
}

/// Answers somebody who wants to be elected. A leader that a majority follows stays one: openraft has only
/// followers vote for nobody else for a while, and a leader give way to whoever comes with a newer term, as
/// one does that the leader's messages do not reach.
pub(crate) async fn vote<C: GroupConfig>(
    raft: &RaftHandle<C>,
    request: VoteRequest<NodeId>,
    hold: Duration,
) -> Result<VoteResponse<NodeId>, RaftError<NodeId>> {
    let kept = {
        let metrics = raft.metrics();
        let metrics = metrics.borrow();
        let acked = metrics.millis_since_quorum_ack.map(Duration::from_millis);
        let leads = metrics.state == ServerState::Leader && acked.is_some_and(|ago| ago < hold);
        leads.then_some(metrics.vote)
    };
    match kept {
        Some(vote) => Ok(VoteResponse {
            vote,
            vote_granted: false,
            last_log_id: None,
        }),
        None => raft.vote(request).await,
    }
}

/// Whether this node is the only one that votes, as far as it knows.
fn is_alone<C: GroupConfig>(raft: &RaftHandle<C>) -> bool {
    let metrics = raft.metrics();
    let metrics = metrics.borrow();
    let mut voters = metrics.membership_config.membership().voter_ids();
    voters.next() == Some(metrics.id) && voters.next().is_none()
}

/// Why an entry was not written.
pub(crate) fn not_written(
    error: RaftError<NodeId, ClientWriteError<NodeId, BasicNode>>,
) -> ProposeError {
    match error {
        RaftError::APIError(ClientWriteError::ForwardToLeader(forward)) => {
            ProposeError::NotLeader {
                leader: forward.leader_id,
            }
        }
        RaftError::APIError(error) => ProposeError::Failed {
            detail: error.to_string(),
        },
        RaftError::Fatal(error) => ended(&error),
    }
}

fn ended(error: &Fatal<NodeId>) -> ProposeError {
    match error {
        Fatal::Stopped => ProposeError::Stopped,
        error => ProposeError::Failed {
            detail: error.to_string(),
        },
    }
}
