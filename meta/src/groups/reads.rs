//! Questions to the leader. It asks a majority whether it still leads once for all questions that wait, and
//! answers from its own records once those are as new.

use std::sync::Arc;
use std::time::Instant;

use namespace::{FilesystemId, Query};
use serde::{Deserialize, Serialize};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::timeout;

use super::config::Raft;
use super::coordination::{Coordination, SessionLink};
use super::store::NamespaceStore;
use crate::net::ProposeError;
use crate::node::raft_calls::{COMMIT_WAIT_MAX, read_index};
use crate::storage::DbError;
use crate::storage::database::Database;

/// Callers that are answered together at most.
const CALLERS_MAX: usize = 256;
/// Most questions of one caller.
pub(super) const QUERIES_MAX: usize = 64;
/// Bytes of the lists in the answers to one caller, which shares them among its questions.
const LISTS_BYTES_MAX: usize = 4 << 20;
/// Rounds of questions that are under way at a time.
const IN_FLIGHT_MAX: usize = 4;

/// Answers to one caller's questions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answers {
    /// How many messages had been sent on the reader's link before the leader looked; none if it is not the
    /// session's link with this leader, or there is no reader.
    pub sent: Option<u64>,
    /// One to each question.
    pub answers: Vec<Result<namespace::Answer, namespace::Error>>,
}

/// Questions of one caller, which waits for the answers.
pub(super) struct Reading {
    reader: Option<SessionLink>,
    queries: Vec<(FilesystemId, Query)>,
    answer: oneshot::Sender<Result<Answers, ProposeError>>,
}

impl Reading {
    /// # Errors
    /// More questions than are taken at once.
    pub(super) fn new(
        reader: Option<SessionLink>,
        queries: Vec<(FilesystemId, Query)>,
        answer: oneshot::Sender<Result<Answers, ProposeError>>,
    ) -> Result<Self, ProposeError> {
        if queries.len() > QUERIES_MAX {
            let detail = format!(
                "{} questions at once, and at most {QUERIES_MAX} are taken: send fewer",
                queries.len()
            );
            return Err(ProposeError::Refused { detail });
        }
        Ok(Self {
            reader,
            queries,
            answer,
        })
    }
}

/// Answers questions until nobody can ask any more.
pub(super) async fn answer(
    raft: Raft,
    store: Arc<NamespaceStore>,
    coordination: Arc<Coordination>,
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
        let coordination = Arc::clone(&coordination);
        tokio::spawn(async move { answer_round(&raft, store, &coordination, round, turn).await });
    }
}

async fn answer_round(
    raft: &Raft,
    store: Arc<NamespaceStore>,
    coordination: &Coordination,
    round: Vec<Reading>,
    turn: OwnedSemaphorePermit,
) {
    let asked = Instant::now();
    if let Err(error) = catch_up(raft, &store.0.database).await {
        for reading in round {
            // Whoever asked may have given up; so below.
            let _ = reading.answer.send(Err(error.clone()));
        }
        return;
    }
    coordination.confirmed(asked);
    // Before the records are read: what is granted later was granted without regard to these answers.
    let sent: Vec<Option<u64>> = round
        .iter()
        .map(|reading| coordination.sent(reading.reader?))
        .collect();
    let read = move || {
        for (reading, sent) in round.into_iter().zip(sent) {
            let answers = look_up(&store, &reading.queries);
            let answers = answers.map(|answers| Answers { sent, answers });
            let _ = reading.answer.send(answers);
        }
        drop(turn);
    };
    if let Err(error) = tokio::task::spawn_blocking(read).await {
        tracing::error!(%error, "questions about filesystems are not answered");
    }
}

fn look_up(
    store: &NamespaceStore,
    queries: &[(FilesystemId, Query)],
) -> Result<Vec<Result<namespace::Answer, namespace::Error>>, ProposeError> {
    let list_bytes = LISTS_BYTES_MAX / queries.len().max(1);
    let found = store.0.read(|view| {
        let answers = queries
            .iter()
            .map(|(filesystem, query)| namespace::answer(view, *filesystem, query, list_bytes));
        Ok::<_, DbError>(answers.collect::<Result<Vec<_>, _>>()?)
    });
    found.map_err(|error| ProposeError::Failed {
        detail: error.to_string(),
    })
}

/// Returns once this node, which leads, has applied all that was acknowledged before this call.
pub(super) async fn catch_up(raft: &Raft, database: &Database) -> Result<(), ProposeError> {
    let index = timeout(COMMIT_WAIT_MAX, read_index(raft, database.full())).await;
    let index = index.map_err(|_| ProposeError::Unknown)??;
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
