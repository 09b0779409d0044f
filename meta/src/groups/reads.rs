//! Questions to the leader. It asks a majority whether it still leads once for all questions that wait, and
//! answers from its own records once those are as new.
//!
//! What hosts have buffered is not in the records. Before somebody is told of files that another session
//! holds exclusively, an operation that reads them has that session write back; then the records are read
//! anew.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use fs_capabilities::{Footprint, Told, files_told};
use namespace::{Answer, FilesystemId, Ino, Query, SessionId};
use openraft::metrics::WaitError;
use raft_host::RaftHandle;
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::timeout;

use super::blocking;
use super::coordination::{Admitted, Coordination, SessionLink, TermMoment};
use super::store::NamespaceStore;
use crate::net::ProposeError;
use crate::node::raft_calls::{COMMIT_WAIT_MAX, read_index};
use crate::storage::{Database, DbError};

/// Callers that are answered together at most.
const CALLERS_MAX: usize = 256;
/// Most questions of one caller.
pub(super) const QUERIES_MAX: usize = 64;
/// Bytes of the lists in the answers to one caller, which shares them among its questions.
const LISTS_BYTES_MAX: usize = 4 << 20;
/// How often the records are read anew for one caller, as something was written back meanwhile.
const TELL_TRIES_MAX: usize = 64;
/// Rounds of questions that are under way at a time.
const IN_FLIGHT_MAX: usize = 4;

/// Answers to one caller's questions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answers {
    /// How many messages had been sent on the reader's link before the leader looked; none if it is not the
    /// session's link with this leader, or there is no reader.
    pub sent: Option<u64>,
    /// One to each question.
    pub answers: Found,
}

/// What the records say to each question of a caller.
type Found = Vec<Result<Answer, namespace::Error>>;

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
    raft: RaftHandle,
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
    raft: &RaftHandle,
    store: Arc<NamespaceStore>,
    coordination: &Arc<Coordination>,
    round: Vec<Reading>,
    turn: OwnedSemaphorePermit,
) {
    let asked = Instant::now();
    if let Err(error) = catch_up(raft, store.0.database()).await {
        for reading in round {
            // Whoever asked may have given up; so below.
            let _ = reading.answer.send(Err(error.clone()));
        }
        return;
    }
    coordination.confirmed(asked);
    // Before the records are read: what is granted later was granted without regard to these answers.
    let sent = |reading: &Reading| coordination.sent(reading.reader?);
    let sent: Vec<Option<u64>> = round.iter().map(sent).collect();
    let queries = round.iter().flat_map(|reading| &reading.queries);
    let filesystems: BTreeSet<FilesystemId> = queries.map(|(of, _)| *of).collect();
    let moment = |of| Some((of, coordination.moment_if_led(of)?));
    let moments: Moments = filesystems.into_iter().filter_map(moment).collect();
    let (raft, coordination) = (raft.clone(), Arc::clone(coordination));
    let runtime = Handle::current();
    let read = move || {
        for (reading, sent) in round.into_iter().zip(sent) {
            let looked = look_up(&store, &reading.queries);
            let weighed = looked.and_then(|found| {
                let weighed = weigh(&coordination, &reading, &found, &moments, &Files::new())?;
                Ok((found, weighed))
            });
            let answers = match weighed {
                Ok((answers, Weighed::Told { may_cache })) => Ok(Answers {
                    sent: sent.filter(|_| may_cache),
                    answers,
                }),
                Ok((_, Weighed::Buffered(_))) => {
                    let (raft, store) = (raft.clone(), Arc::clone(&store));
                    let coordination = Arc::clone(&coordination);
                    // Whoever waits for a host to write back keeps no other answer.
                    runtime.spawn(answer_later(raft, store, coordination, reading, sent));
                    continue;
                }
                Err(error) => Err(error),
            };
            let _ = reading.answer.send(answers);
        }
        drop(turn);
    };
    if let Err(error) = blocking::read(read).await {
        tracing::error!(%error, "questions about filesystems are not answered");
    }
}

/// Moments of filesystems' coordinators, from before the records were read.
type Moments = BTreeMap<FilesystemId, TermMoment>;
/// Files by filesystem.
type Files = BTreeMap<FilesystemId, BTreeSet<Ino>>;

/// Whether what was found may be told.
enum Weighed {
    Told {
        may_cache: bool,
    },
    /// The records have to be read once more, after these operations are let go on.
    Buffered(Vec<(FilesystemId, Vec<Ino>, Footprint)>),
}

impl Reading {
    /// The session that asks about a filesystem.
    fn session(&self, filesystem: FilesystemId) -> SessionId {
        let reader = self.reader.filter(|reader| reader.filesystem == filesystem);
        reader.map_or(SessionId::NONE, |reader| reader.session)
    }
}

/// Whether what was found since these moments may be told. Of the files in `written_back` nobody buffers
/// anything.
fn weigh(
    coordination: &Coordination,
    reading: &Reading,
    found: &Found,
    moments: &Moments,
    written_back: &Files,
) -> Result<Weighed, ProposeError> {
    let mut all = Files::new();
    for ((filesystem, query), answer) in reading.queries.iter().zip(found) {
        let told = files_told(query, answer);
        all.entry(*filesystem).or_default().extend(told);
    }
    let (mut may_cache, mut is_old, mut buffered) = (true, false, Vec::new());
    for (filesystem, files) in all.into_iter().filter(|(_, files)| !files.is_empty()) {
        let Some(moment) = moments.get(&filesystem) else {
            // Its coordinator is to be made first.
            is_old = true;
            continue;
        };
        let none = BTreeSet::new();
        let written_back = written_back.get(&filesystem).unwrap_or(&none);
        let of = (filesystem, reading.session(filesystem));
        let (told, may) = coordination.tell(of, &files, written_back, *moment)?;
        may_cache &= may;
        match told {
            Told::Now => {}
            Told::Anew => is_old = true,
            Told::Buffered(parts) => {
                let parts = parts.into_iter();
                buffered.extend(parts.map(|(files, footprint)| (filesystem, files, footprint)));
            }
        }
    }
    Ok(match is_old || !buffered.is_empty() {
        true => Weighed::Buffered(buffered),
        false => Weighed::Told { may_cache },
    })
}

/// Operations that read files, until the caller is told of these.
struct UnderWay {
    coordination: Arc<Coordination>,
    admitted: Vec<Admitted>,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        for admitted in &self.admitted {
            self.coordination.end(admitted);
        }
    }
}

async fn answer_later(
    raft: RaftHandle,
    store: Arc<NamespaceStore>,
    coordination: Arc<Coordination>,
    reading: Reading,
    sent: Option<u64>,
) {
    let mut under_way = UnderWay {
        coordination,
        admitted: Vec::new(),
    };
    let answers = once_written_back(&raft, &store, &reading, &mut under_way).await;
    let answers = answers.map(|(answers, may_cache)| Answers {
        sent: sent.filter(|_| may_cache),
        answers,
    });
    let _ = reading.answer.send(answers);
}

/// What the records say to a caller once all hosts have written back what they have buffered of it, and
/// whether that may be cached.
async fn once_written_back(
    raft: &RaftHandle,
    store: &Arc<NamespaceStore>,
    reading: &Reading,
    under_way: &mut UnderWay,
) -> Result<(Found, bool), ProposeError> {
    let coordination = Arc::clone(&under_way.coordination);
    let mut written_back = Files::new();
    for _ in 0..TELL_TRIES_MAX {
        catch_up(raft, store.0.database()).await?;
        let mut moments = Moments::new();
        for (filesystem, _) in &reading.queries {
            moments.insert(*filesystem, coordination.moment(*filesystem).await?);
        }
        let (store, queries) = (Arc::clone(store), reading.queries.clone());
        let found = blocking::read(move || look_up(&store, &queries)).await;
        let found = found.map_err(|error| ProposeError::Failed {
            detail: error.to_string(),
        })??;
        match weigh(&coordination, reading, &found, &moments, &written_back)? {
            Weighed::Told { may_cache } => return Ok((found, may_cache)),
            Weighed::Buffered(parts) => {
                for (filesystem, files, footprint) in parts {
                    let session = reading.session(filesystem);
                    let admitted = coordination.admit(filesystem, session, footprint).await?;
                    // The session has ended, or waits for too much: it asks again.
                    let admitted = admitted.map_err(|_| ProposeError::Unknown)?;
                    under_way.admitted.push(admitted);
                    written_back.entry(filesystem).or_default().extend(files);
                }
            }
        }
    }
    Err(ProposeError::Unknown)
}

fn look_up(
    store: &NamespaceStore,
    queries: &[(FilesystemId, Query)],
) -> Result<Found, ProposeError> {
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
pub(super) async fn catch_up(raft: &RaftHandle, database: &Database) -> Result<(), ProposeError> {
    let index = timeout(COMMIT_WAIT_MAX, read_index(raft, database.full())).await;
    let index = index.map_err(|_| ProposeError::Unknown)??;
    let Some(index) = index else { return Ok(()) };
    match raft.wait_applied(index.index, COMMIT_WAIT_MAX).await {
        Ok(()) => Ok(()),
        Err(WaitError::ShuttingDown) => Err(ProposeError::Stopped),
        Err(WaitError::Timeout(..)) => Err(ProposeError::Unknown),
    }
}
