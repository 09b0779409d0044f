//! Group commit: the leader puts all operations that wait into one log entry. The flush of the log is the
//! dear part, and costs an entry of many operations as much as one of a single operation.

use std::sync::Arc;

use namespace::{Batch, FilesystemId, Reply, Request};
use raft_host::RaftHandle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::timeout;

use super::operations::{Operations, decode_replies, encode_operations};
use crate::net::ProposeError;
use crate::node::raft_calls::{COMMIT_WAIT_MAX, not_written};
use crate::storage::Database;

/// Most operations of one entry.
const OPERATIONS_MAX: usize = 1024;
/// Most bytes of one entry, encoded. A single operation has at most an extended attribute's value of 64 KiB,
/// or the extents of one flush.
pub(super) const ENTRY_BYTES_MAX: usize = 512 << 10;
/// Entries that are proposed and not committed yet. While one is flushed, the next one fills.
const IN_FLIGHT_MAX: usize = 2;

/// With less free space than this under the database, only operations are taken that give something back.
/// Far above where the cluster map's group takes no new volumes: names must not use up what that needs.
const FREE_BYTES_MIN: u64 = 64 << 20;

type Answer = Result<Vec<Reply>, ProposeError>;

/// Operations of one caller, which waits for the replies.
pub(super) struct Proposal {
    operations: Vec<(FilesystemId, Request)>,
    bytes: usize,
    answer: oneshot::Sender<Answer>,
}

impl Proposal {
    /// # Errors
    /// More than fits one entry.
    pub(super) fn new(
        operations: Vec<(FilesystemId, Request)>,
        answer: oneshot::Sender<Answer>,
    ) -> Result<Self, ProposeError> {
        let size = postcard::experimental::serialized_size(&operations);
        let bytes = size.map_err(|error| ProposeError::Failed {
            detail: error.to_string(),
        })?;
        if operations.len() > OPERATIONS_MAX || bytes > ENTRY_BYTES_MAX {
            let detail = format!(
                "{} operations of {bytes} bytes at once, and at most {OPERATIONS_MAX} of \
                 {ENTRY_BYTES_MAX} bytes are taken: send fewer",
                operations.len()
            );
            return Err(ProposeError::Refused { detail });
        }
        Ok(Self {
            operations,
            bytes,
            answer,
        })
    }
}

/// Proposes what waits, entry by entry, until nobody can wait any more.
pub(super) async fn batch(
    raft: RaftHandle,
    database: Arc<Database>,
    mut queue: mpsc::Receiver<Proposal>,
) {
    let turns = Arc::new(Semaphore::new(IN_FLIGHT_MAX));
    let mut next = None;
    loop {
        let first = match next.take() {
            Some(proposal) => proposal,
            None => match queue.recv().await {
                Some(proposal) => proposal,
                None => return,
            },
        };
        let Ok(turn) = Arc::clone(&turns).acquire_owned().await else {
            return;
        };
        let (entry, left) = fill(first, &mut queue);
        next = left;
        let (raft, database) = (raft.clone(), Arc::clone(&database));
        tokio::spawn(async move { write(&raft, &database, entry, turn).await });
    }
}

/// One entry of what waits, and what did not fit any more.
fn fill(
    first: Proposal,
    queue: &mut mpsc::Receiver<Proposal>,
) -> (Vec<Proposal>, Option<Proposal>) {
    let (mut operations, mut bytes) = (first.operations.len(), first.bytes);
    let mut entry = vec![first];
    while let Ok(proposal) = queue.try_recv() {
        operations += proposal.operations.len();
        bytes += proposal.bytes;
        if operations > OPERATIONS_MAX || bytes > ENTRY_BYTES_MAX {
            return (entry, Some(proposal));
        }
        entry.push(proposal);
    }
    (entry, None)
}

/// Writes one entry and hands out its replies.
async fn write(
    raft: &RaftHandle,
    database: &Database,
    entry: Vec<Proposal>,
    turn: OwnedSemaphorePermit,
) {
    let (mut batches, mut waiting) = (Vec::<(FilesystemId, Batch)>::new(), Vec::new());
    for proposal in entry {
        waiting.push((proposal.operations.len(), proposal.answer));
        for (filesystem, request) in proposal.operations {
            match batches.last_mut().filter(|(last, _)| *last == filesystem) {
                Some((_, batch)) => batch.operations.push(request),
                None => batches.push((
                    filesystem,
                    Batch {
                        operations: vec![request],
                    },
                )),
            }
        }
    }
    let replied = commit(raft, database, Operations(batches)).await;
    drop(turn);
    let mut replies = replied.map(Vec::into_iter);
    for (count, answer) in waiting {
        let part = match &mut replies {
            Ok(replies) => Ok(replies.by_ref().take(count).collect()),
            Err(error) => Err(error.clone()),
        };
        // Whoever asked may have given up; with the same numbers it gets the same reply later.
        let _ = answer.send(part);
    }
}

async fn commit(raft: &RaftHandle, database: &Database, operations: Operations) -> Answer {
    let no_space = |begun| ProposeError::NoSpace {
        dir: database.dir().to_owned(),
        begun,
    };
    let mut requests = operations.0.iter().flat_map(|(_, batch)| &batch.operations);
    let grows = requests.any(|request| !request.operation.frees_space());
    if database.is_full() || grows && database.free_is_below(FREE_BYTES_MIN) {
        return Err(no_space(false));
    }
    let write = timeout(COMMIT_WAIT_MAX, raft.write(encode_operations(&operations)));
    let written = tokio::select! {
        written = write => written.map_err(|_| ProposeError::Unknown)?,
        () = database.full() => return Err(no_space(true)),
    };
    let replies = decode_replies(&written.map_err(not_written)?);
    replies.map_err(|detail| ProposeError::Failed { detail })
}

#[cfg(test)]
mod tests {
    use namespace::{Ino, Operation, SessionId, Time};

    use super::*;

    /// A proposal of `count` symlinks with targets of `target_bytes` bytes.
    fn proposal(count: usize, target_bytes: usize) -> Result<Proposal, ProposeError> {
        let request = Request {
            session: SessionId(1),
            slot: 0,
            sequence: 1,
            at: Time::default(),
            operation: Operation::Symlink {
                parent: Ino::ROOT,
                name: b"name".to_vec(),
                target: vec![b'x'; target_bytes],
                uid: 0,
                gid: 0,
            },
        };
        let (answer, _) = oneshot::channel();
        Proposal::new(vec![(FilesystemId(1), request); count], answer)
    }

    /// Operations of each entry, in the order in which five proposals go.
    fn entries(count: usize, target_bytes: usize) -> Vec<usize> {
        let (sender, mut queue) = mpsc::channel(5);
        for _ in 0..5 {
            let proposed = sender.try_send(proposal(count, target_bytes).unwrap());
            assert!(proposed.is_ok());
        }
        let mut entries = Vec::new();
        let mut next = queue.try_recv().ok();
        while let Some(first) = next.take() {
            let (entry, left) = fill(first, &mut queue);
            entries.push(entry.iter().map(|one| one.operations.len()).sum());
            next = left;
        }
        entries
    }

    #[test]
    fn an_entry_has_so_many_operations_and_bytes_at_most() {
        assert_eq!(entries(1, 10), [5]);
        assert_eq!(entries(OPERATIONS_MAX / 2, 10), [1024, 1024, 512]);
        assert_eq!(entries(OPERATIONS_MAX / 2 + 1, 10), [513; 5]);
        // Two fit with what they have besides the targets.
        assert_eq!(entries(1, ENTRY_BYTES_MAX * 2 / 5), [2, 2, 1]);
        assert_eq!(entries(1, ENTRY_BYTES_MAX / 2), [1; 5]);
    }

    #[test]
    fn what_no_entry_holds_is_refused() {
        assert!(proposal(OPERATIONS_MAX, 10).is_ok());
        for (count, target_bytes) in [(OPERATIONS_MAX + 1, 10), (1, ENTRY_BYTES_MAX)] {
            let refused = proposal(count, target_bytes).err();
            let refused = refused.expect("it is too large").to_string();
            assert!(refused.contains("send fewer"), "{refused}");
        }
    }
}
