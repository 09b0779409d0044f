//! Questions to the leader. It asks a majority whether it still leads once for all questions that wait, and
//! answers from its own records once those are as new.

use std::sync::Arc;

use namespace::{FilesystemId, Query};
use openraft::error::{CheckIsLeaderError, RaftError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use super::config::Raft;
use super::group::COMMIT_WAIT_MAX;
use super::store::NamespaceStore;
use crate::net::ProposeError;
use crate::node::ended;
use crate::storage::DbError;

/// Callers that are answered together at most.
const CALLERS_MAX: usize = 256;
/// Rounds of questions that are under way at a time.
const IN_FLIGHT_MAX: usize = 4;

type Answers = Result<Vec<Result<namespace::Answer, namespace::Error>>, ProposeError>;

/// Questions of one caller, which waits for the answers.
pub(super) struct Reading {
    pub(super) queries: Vec<(FilesystemId, Query)>,
    pub(super) answer: oneshot::Sender<Answers>,
}

/// Answers questions until nobody can ask any more.
pub(super) async fn answer(
    raft: Raft,
    store: Arc<NamespaceStore>,
    mut queue: mpsc::Receiver<Reading>,
) {
    let turns = Arc::new(Semaphore::new(IN_FLIGHT_MAX));
    while let Some(first) = queue.recv().await {
        let Ok(turn) = Arc::clone(&turns).acquire_owned().await else {
            return;
        };
        let mut round = vec![first];
        while round.len() < CALLERS_MAX {
            let Ok(reading) = queue.try_recv() else { break };
            round.push(reading);
        }
        let (raft, store) = (raft.clone(), Arc::clone(&store));
        tokio::spawn(async move { answer_round(&raft, store, round, turn).await });
    }
}

async fn answer_round(
    raft: &Raft,
    store: Arc<NamespaceStore>,
    round: Vec<Reading>,
    turn: OwnedSemaphorePermit,
) {
    if let Err(error) = catch_up(raft).await {
        for reading in round {
            // Whoever asked may have given up; so below.
            let _ = reading.answer.send(Err(error.clone()));
        }
        return;
    }
    let read = move || {
        for reading in round {
            let _ = reading.answer.send(look_up(&store, &reading.queries));
        }
        drop(turn);
    };
    if let Err(error) = tokio::task::spawn_blocking(read).await {
        tracing::error!(%error, "questions about filesystems are not answered");
    }
}

fn look_up(store: &NamespaceStore, queries: &[(FilesystemId, Query)]) -> Answers {
    let found = store.0.read(|view| {
        let answers = queries
            .iter()
            .map(|(filesystem, query)| namespace::answer(view, *filesystem, query));
        Ok::<_, DbError>(answers.collect::<Result<Vec<_>, _>>()?)
    });
    found.map_err(|error| ProposeError::Failed {
        detail: error.to_string(),
    })
}

/// Returns once this node, which leads, has applied all that was acknowledged before this call.
async fn catch_up(raft: &Raft) -> Result<(), ProposeError> {
    let index = match raft.get_read_log_id().await {
        Ok((index, _)) => index,
        Err(RaftError::APIError(CheckIsLeaderError::ForwardToLeader(forward))) => {
            return Err(ProposeError::NotLeader {
                leader: forward.leader_id,
            });
        }
        // It may have been deposed: somebody else may lead by now.
        Err(RaftError::APIError(CheckIsLeaderError::QuorumNotEnough(_))) => {
            return Err(ProposeError::NotLeader { leader: None });
        }
        Err(RaftError::Fatal(error)) => return Err(ended(&error)),
    };
    let Some(index) = index else { return Ok(()) };
    let wait = raft.wait(Some(COMMIT_WAIT_MAX));
    match wait
        .applied_index_at_least(Some(index.index), "a read")
        .await
    {
        Ok(_) => Ok(()),
        Err(openraft::metrics::WaitError::ShuttingDown) => Err(ProposeError::Stopped),
        Err(openraft::metrics::WaitError::Timeout(..)) => Err(ProposeError::Unknown),
    }
}
