//! The namespace of filesystems: a pure state machine over metadata records.
//!
//! Begin with [`apply()`]: it takes a log entry of a metadata group, a [`Batch`] of [`Operation`]s, and a
//! transaction over the group's records, and gives the replies. [`Namespace`] is what reads see. `keys.rs`
//! has the table of all records, `record.rs` what they hold. Each kind of operation has a file: names in
//! `directory.rs` and `rename.rs`, data in `extents.rs`, `copy.rs` and `segments.rs`, what has no name any
//! more in `reap.rs`, and a whole filesystem in `removal.rs`. `search.rs` goes from addresses back to files.
//!
//! **Architecture Invariant:** nothing here reads a clock, a random source, a file or a socket, or iterates
//! anything whose order is not fixed. The same entries give the same bytes on every replica, for ever: a
//! change of behaviour must be told apart by the operation that asks for it, or wait for a feature level.
//!
//! **Architecture Invariant:** permissions are not checked. The guest's kernel does so, since virtio-fs
//! mounts with `default_permissions`.
//!
//! Invariants, which the `testing` feature's `check` tests on all records:
//! - a dentry has its inode and its cookie's record; all inodes are reachable from the root, or orphans;
//! - an inode has as many links as names, a directory 2 and its subdirectories, an orphan none;
//! - a directory counts its entries, says the directory that it lies in, and lies in no subdirectory of its
//!   own;
//! - extents of a file do not overlap, lie within its blocks, and add up to what it has allocated;
//! - each address of a segment below its written length is in a gap, named, freed or given back, and only one
//!   of these; it is named as often as the shared runs say;
//! - statistics and live bytes are what a count finds;
//! - every step is bounded: what would touch more than about [`STEP_MAX`] records is done in steps.

mod apply;
mod attributes;
mod bytes;
#[cfg(any(test, feature = "testing"))]
mod check;
mod copy;
mod directory;
mod error;
mod extents;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod ids;
mod keys;
mod operation;
mod query;
mod read;
mod reap;
mod record;
mod removal;
mod rename;
mod search;
mod segments;
mod session;
#[cfg(test)]
mod tests;
mod update;
mod xattr;

pub use apply::apply;
#[cfg(any(test, feature = "testing"))]
pub use check::{check, given_back_by};
pub use directory::{FIRST_COOKIE, LINKS_MAX, NAME_MAX, TARGET_MAX};
pub use error::{Error, Failure};
pub use extents::{BLOCK, COMMIT_BYTES_MAX, SIZE_MAX};
pub use ids::{FilesystemId, Ino, SegmentId, SessionId, Time};
pub use operation::{
    Attributes, Batch, Commit, CopyRange, DecodeError, Make, MakeTemporary, NewNode, Openers,
    Operation, Outcome, Punch, Removed, Rename, RenameMode, Reply, Request, SetAttributes, SetTime,
    Tail, Whiteout, XattrMode,
};
pub use query::{Answer, ITEMS_MAX, Query, answer};
pub use read::{Entry, Freed, Namespace, filesystems};
pub use record::{
    Body, Content, CookieEntry, Dentry, Directory, Extent, Filesystem, Inode, Kind, Orphan, Run,
    Segment, SegmentState, Session, Shared, Slot, Statistics, Xattr,
};
pub use rename::DEPTH_MAX;
pub use search::{BLOCKS_MAX, Named, NamedBlock, SearchFrom, SearchStep};
pub use segments::{GAPS_MAX, OPEN_SEGMENTS_MAX, SEGMENT_LENGTH_MAX};
pub use session::{SESSIONS_MAX, SLOTS_MAX};
pub use xattr::{XATTR_LIST_MAX, XATTR_NAME_MAX, XATTR_VALUE_MAX, XATTR_VALUES_MAX};

/// About how many records of extents, attributes, orphans or freed space an operation removes. What has more
/// is done in steps: the reply says so, and the caller asks again.
pub const STEP_MAX: usize = 1024;
