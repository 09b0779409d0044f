//! Data on their way into a file: first in a segment and flushed, then named.

use std::sync::Arc;

use namespace::{Attributes, Commit, Error, Ino, Operation, Outcome};

use crate::backend::Backend;
use crate::caller::Caller;
use crate::client::Client;
use crate::failure::Failure;
use crate::segment_writer::Allocation;
use crate::session::Session;

/// Data that are durable, and that nothing names yet.
pub(super) struct Staged {
    pub(super) allocation: Allocation,
    /// Epoch of the map in which they were flushed.
    pub(super) epoch: u64,
}

/// Writes whole blocks of a file to a segment, and flushes them.
pub(super) async fn stage<B: Backend>(
    client: &Client<B>,
    session: &Arc<Session>,
    ino: Ino,
    data: Vec<u8>,
) -> Result<Staged, Failure> {
    let length = data.len() as u64;
    let segments = &session.segments;
    // What belongs to one file lies close together.
    let allocation = segments.allocate(client, session, length, ino.0).await?;
    match allocation.write(client, data).await {
        Ok(epoch) => Ok(Staged { allocation, epoch }),
        Err(error) => {
            let segment = allocation.segment();
            drop(allocation);
            Err(client.data_failure(session, segment, error).await)
        }
    }
}

/// Names staged data in a file from an offset on, which is a multiple of the block.
pub(super) async fn commit<B: Backend>(
    client: Caller<'_, B>,
    session: &Arc<Session>,
    mut staged: Staged,
    offset: u64,
    commit: Commit,
) -> Result<Attributes, Failure> {
    let commit = Operation::Commit(Commit {
        extents: staged.allocation.extents(offset, staged.epoch),
        ..commit
    });
    staged.allocation.commit_begins();
    match client.apply_in(session, commit).await {
        Ok(Outcome::Inode(attributes)) => {
            staged.allocation.committed();
            Ok(attributes)
        }
        Ok(other) => Err(Failure::unfit(&other)),
        Err(failure) => Err(refused(session, staged, failure)),
    }
}

/// What a commit's failure means for the data.
pub(super) fn refused(session: &Session, mut staged: Staged, failure: Failure) -> Failure {
    if failure == Failure::Refused(Error::TooManyGaps) {
        session.segments.retire(staged.allocation.segment());
    }
    if matches!(failure, Failure::Refused(_) | Failure::SessionOver) {
        staged.allocation.commit_refused();
    }
    failure
}
