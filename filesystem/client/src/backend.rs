//! Environment of a client: the [`Leader`] of the filesystem's namespace group, a [`SegmentStore`] and a
//! [`Clock`]; all three are a [`Backend`].
//!
//! A future of these traits may be dropped before it is done, when its guest's request is; what it began may
//! continue then.

use std::future::Future;
use std::time::Duration;

use fs_capabilities::{Instant, Link, ToHolder, ToManager};
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

/// A link is no more: this is not the leader any more, or the link is not the session's, or messages were
/// lost. The client begins another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the session's link to the leader is gone")]
pub struct LinkBroken;

/// A session's link to the leader, on which capabilities are granted and recalled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reader {
    /// The session.
    pub session: SessionId,
    /// Its present link.
    pub link: Link,
}

/// What the leader answers to a question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answered {
    /// The answer.
    pub answer: Result<Answer, namespace::Error>,
    /// How many messages the leader had sent on the reader's link before it looked at its records. None
    /// without a reader, or if that link is not the session's present one with this leader: the answer is not
    /// cached then.
    pub sent: Option<u64>,
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
    pub fn is_short(&self) -> bool {
        self.free_bytes < self.total_bytes / 20
    }
}

/// The leader of one filesystem's namespace group. Numbers of sessions are within the filesystem.
pub trait Leader: Send + Sync + 'static {
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
        reader: Option<Reader>,
    ) -> impl Future<Output = Result<Answered, Unavailable>> + Send;

    /// The term of the present leader.
    fn leader_term(&self) -> impl Future<Output = Result<u64, Unavailable>> + Send;

    /// Has the leader take messages, in order, numbered from `first`; the first one on each link has number
    /// 1. Those that it has taken already are skipped.
    fn send(
        &self,
        reader: Reader,
        first: u64,
        messages: Vec<ToManager>,
    ) -> impl Future<Output = Result<(), LinkBroken>> + Send;

    /// Messages of the leader behind number `behind` on this link, which are counted from 1. Those up to it
    /// are acknowledged by that. Waits a few seconds for one; there is none then.
    fn receive(
        &self,
        reader: Reader,
        behind: u64,
    ) -> impl Future<Output = Result<Vec<ToHolder>, LinkBroken>> + Send;

    /// Until when this host's sessions may be used: the end of the node's heartbeat lease, on the monotonic
    /// clock. None if it is not known: nothing is cached then.
    fn lease_until(&self) -> Option<Instant>;

    /// Opens a session of this node, or finds it. No request must have been made in it but by this client:
    /// its slots count from 1. Where a client takes over from a former one of the same start of the node, it
    /// needs an incarnation of its own.
    fn open_session(&self) -> impl Future<Output = Result<SessionId, Unavailable>> + Send;
}

/// Segments of one filesystem: file data. Numbers of segments are within the filesystem.
pub trait SegmentStore: Send + Sync + 'static {
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
    /// not be older. A block that was freed meanwhile is as it was written, or zero, or the read fails.
    fn read_data(
        &self,
        segment: SegmentId,
        address: u64,
        length: u64,
        epoch: u64,
    ) -> impl Future<Output = Result<Vec<u8>, DataError>> + Send;

    /// Space of the pool, for STATFS and to slow writers down before it is full. None if it is not known, or
    /// the node ends: nobody waits for space then.
    fn space(&self) -> Option<Space> {
        None
    }
}

/// Clocks of the host.
pub trait Clock: Send + Sync + 'static {
    /// The monotonic clock.
    fn monotonic(&self) -> Instant;

    /// The wall clock.
    fn now(&self) -> Time;

    /// Waits.
    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> + Send;
}

/// Environment of a [`Client`](crate::Client).
pub trait Backend: Leader + SegmentStore + Clock {}

impl<T: Leader + SegmentStore + Clock> Backend for T {}
