//! The RocksDB database of a node, which all of its Raft groups share.
//!
//! ```text
//! DIR/db/                    one RocksDB database
//!   column family `meta`     format, values of the node; of each group: which state family counts, vote,
//!                            committed, purged
//!   column family `log`      entries of the main group: index (8 bytes, big-endian) → postcard (config.rs)
//!   column family `state.N`  its records; under the byte 0x00 the last applied entry, membership
//!   column families `log.G`, `ns.G.N`  the same of group G; its keys in `meta` begin with `group.G.`
//! DIR/snapshots/N/           the current snapshot of the main group, see snapshot.rs
//! DIR/groups/G/N/            that of group G
//! ```
//!
//! **One synced write per command.** Appending to the log and saving a vote sync the write-ahead log before
//! they count. What follows from the log (the committed position, applied records, the removal of old
//! entries) is written without a sync: all families share one write-ahead log, so after power loss the
//! database is a prefix of what was written, in which the log is never behind the records. Records that are
//! missing then are applied again from the log. A killed process loses none of it, as every write has left
//! the process.
//!
//! **Why a fresh family for an installed snapshot.** It is filled and checked beside the old one; one synced
//! write of the family's name in `meta` makes it count. A crash before that leaves the old records, after
//! that the new ones.

mod ballast;
mod database;
mod error;
mod format;
mod group;
mod history;
mod log;
mod machine;
mod open;
mod options;
mod snapshot;
mod space;
mod state_machine;
#[cfg(test)]
mod tests;

pub use database::{Database, Sync};
pub use error::DbError;
pub use format::Applied;
pub use group::{GroupId, GroupStore, View};
pub(crate) use log::LogStore;
pub(crate) use machine::Machine;
pub use open::{CheckError, DatabaseError};
pub use snapshot::SnapshotFile;
pub use state_machine::StateMachine;
