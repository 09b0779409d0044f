//! A host's side of a filesystem: it turns the FUSE operations of guests into operations and questions of the
//! namespace, and into reads and writes of segments.
//!
//! # Where to begin
//!
//! - [`Client`] is one filesystem on this host, [`Mount`] a guest's mount of it: [`Mount::serve`] takes one
//!   request to its reply. Which operation is served by what stands in `mount.rs`.
//! - [`Backend`] is what both need from outside. Nothing here has a runtime, a clock or I/O of its own, so
//!   that tests poll the same futures in any order they like.
//! - `session.rs` has operations of the namespace done, each exactly once (`slots.rs`).
//! - `segment_writer.rs` says where data go, `data.rs` how they come into files.
//! - `data_cache.rs` keeps file data in memory, for all filesystems of the host.
//! - `cache.rs` says what is answered without the leader, and why that is true; `caller.rs` answers guests.
//! - `buffer.rs` has what was written and is not committed yet.
//! - `open_inodes.rs` keeps files that are removed while guests use them.
//!
//! # Invariants
//!
//! - Coherence: what a guest is told was true at some moment while it was asked. Only what a capability of
//!   the session covers is answered without the leader, and a guest's kernel may go by what it is told only
//!   for as long as nobody can change it. Once a change is answered, everybody sees it.
//! - Each change is in the leader's log before the guest is answered, but for writes to files that the
//!   session holds exclusively: those are once FSYNC is answered, and are seen by all guests at once.
//! - An extent is committed after its data were flushed, with the epoch in which they were.
//! - An address of a segment is written once, whatever became of the write or of its commit.
//! - What a change takes from a file's present content, it commits only to that very content.
//! - Zeros that were read are what a file holds only if it names their address still (`data/read.rs`): space
//!   is discarded as soon as it is freed, whoever is about to read it.
//! - An inode that a guest has open or has looked up stays, whichever host removes its last name, until all
//!   guests have closed and forgotten it or the sessions of their hosts have ended. Exceptions are bounded
//!   memory (`looked_up.rs`) and a pool that is short of space (`background.rs`).
//! - An operation is done once at most. One whose outcome is not known is answered EIO.
//! - Node ids, handles, offsets and sizes may be forged: ESTALE, EBADF, EFBIG, EINVAL.
//! - Everything is bounded: operations and writes under way, bytes that are buffered, handles, tries, what
//!   waits for the background.
//!
//! # Dropped futures
//!
//! The future of a request may be dropped at any time. What it holds goes back; what it had under way is
//! treated as of unknown outcome. What was buffered is written back by [`Client::run`].

#![forbid(unsafe_code)]

mod access_times;
mod attributes;
mod backend;
mod background;
mod buffer;
mod cache;
mod caller;
mod client;
mod counters;
mod data;
mod data_cache;
mod directory;
mod failure;
mod files;
mod handles;
mod looked_up;
mod mount;
mod names;
mod open_inodes;
mod operation;
mod questions;
mod read_data;
mod reply;
mod segment_writer;
mod session;
mod slots;
mod sync;
mod throttle;
mod xattr;

pub use backend::{
    Answered, ApplyError, Backend, Clock, DataError, Leader, LinkBroken, Reader, SegmentStore,
    Space, Unavailable,
};
#[cfg(feature = "testing")]
pub use cache::Mistake;
pub use client::{Client, ClientOptions, DIRTY_BYTES_MAX};
pub use counters::ClientCounters;
pub use data_cache::DataCache;
pub use mount::Mount;
pub use operation::{LookupTarget, OwnedCreate, OwnedOperation};
pub use read_data::ReadData;
pub use reply::OwnedReply;
pub use segment_writer::{CHUNK_BYTES, SEGMENT_BYTES};
