//! What a client needs from outside: the namespace's leader, segments, a clock.

use std::future::Future;
use std::time::Duration;

use namespace::{Answer, Query, Reply, Request, SegmentId, SessionId, Time};

/// There was no leader for long, or the node ends. The guest gets EIO.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the filesystem's metadata group does not answer")]
pub struct Unavailable;

/// Why an operation has no reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    /// Whether it was done, or will be, is not known. EIO.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// The leader is short of space and has not taken it: it certainly was not done. ENOSPC.
    #[error("the metadata group takes only what gives space back")]
    NoSpace,
}

/// Why data could not be written or read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DataError {
    /// The pool is full. ENOSPC.
    #[error("no space for file data")]
    NoSpace,
    /// The segment's lease is gone, which a session's end may be the reason of.
    #[error("the segment's lease is gone")]
    Fenced,
    /// A read took too long, as replicas, metadata or a newer map were waited for: the file is to be looked
    /// up anew, as often as it takes.
    #[error("file data were not read in time")]
    Late,
    /// Any other failure. EIO.
    #[error("file data could not be written or read")]
    Io,
}

/// Space of the pool that file data go to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// Bytes of file data that fit the pool, used or not.
    pub total_bytes: u64,
    /// Bytes that can still be written.
    pub free_bytes: u64,
}

impl Space {
    /// Whether less than a twentieth is free.
    pub(crate) fn is_short(&self) -> bool {
        self.free_bytes < self.total_bytes / 20
    }
}

/// What a [`Client`](crate::Client) needs from outside. One that is ready for a filesystem: numbers of
/// sessions and segments are within it.
///
/// A future may be dropped before it is done, when its guest's request is; what it began may go on then.
pub trait Backend: Send + Sync + 'static {
    /// Has an operation done by the namespace's leader; retries until the outcome is known.
    ///
    /// A reply of `Stale` says that nothing was done only if no earlier try may have been done: the session
    /// may have ended in between, and the kept reply gone with it. After a try whose outcome is not known,
    /// `Stale` is therefore to be given as [`Unavailable`].
    fn apply(&self, request: Request) -> impl Future<Output = Result<Reply, ApplyError>> + Send;

    /// Answers a question by all that was done before.
    fn read(
        &self,
        query: Query,
    ) -> impl Future<Output = Result<Result<Answer, namespace::Error>, Unavailable>> + Send;

    /// Opens a session of this node, or finds it. No request must have been made in it but by this client:
    /// its slots count from 1. Where a client takes over from a former one of the same start of the node, it
    /// needs an incarnation of its own.
    fn open_session(&self) -> impl Future<Output = Result<SessionId, Unavailable>> + Send;

    /// Makes a segment's volume, of [`ClientOptions::segment_bytes`](crate::ClientOptions), and opens it for
    /// writing under a lease.
    fn create_segment(
        &self,
        segment: SegmentId,
    ) -> impl Future<Output = Result<(), DataError>> + Send;

    /// Waits for writes of the segment whose futures were dropped, and gives the lease back. Nothing more is
    /// written. Also called for a segment that was not made, and perhaps more than once.
    fn close_segment(&self, segment: SegmentId) -> impl Future<Output = ()> + Send;

    /// Writes whole blocks of a segment, at an address in bytes that was never written. Not beyond the end of
    /// a chunk.
    fn write(
        &self,
        segment: SegmentId,
        address: u64,
        data: Vec<u8>,
    ) -> impl Future<Output = Result<(), DataError>> + Send;

    /// Makes all writes of the segment durable on all replicas in sync that were finished before the call;
    /// the epoch of the map in which that was so.
    fn flush(&self, segment: SegmentId) -> impl Future<Output = Result<u64, DataError>> + Send;

    /// Reads whole blocks of a segment, which may span chunks. Needs no lease. `epoch`: the reader's map must
    /// not be older. A range that was freed and given back must fail or be as it was, but never be zero.
    fn read_data(
        &self,
        segment: SegmentId,
        address: u64,
        length: u64,
        epoch: u64,
    ) -> impl Future<Output = Result<Vec<u8>, DataError>> + Send;

    /// The wall clock.
    fn now(&self) -> Time;

    /// Waits.
    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> + Send;

    /// Space of the pool as far as it is known, for STATFS.
    fn space(&self) -> Option<Space> {
        None
    }
}
