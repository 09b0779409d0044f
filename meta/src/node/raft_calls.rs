//! What is asked of a group's Raft machine, and what its refusals mean to whoever asked this node.

use std::time::Duration;

use openraft::BasicNode;
use openraft::error::{CheckIsLeaderError, ClientWriteError, Fatal, RaftError};
use raft_host::{LogId, RaftHandle};

use crate::ids::NodeId;
use crate::net::ProposeError;

/// What the leader has taken must be committed in this time; then its outcome is unknown. Covers an election
/// and a slow disk.
pub(crate) const COMMIT_WAIT_MAX: Duration = Duration::from_secs(20);

/// How far a node must have applied to read what is committed now, if this one leads. `full` returns when the
/// file system under the database has no space: Raft stands still then.
pub(crate) async fn read_index(
    raft: &RaftHandle,
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
        Ok(index) => Ok(index),
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

/// Whether this node is the only one that votes, as far as it knows.
fn is_alone(raft: &RaftHandle) -> bool {
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
