//! Host of a node's Raft groups: openraft over one RocksDB database.
//!
//! ```text
//!   RaftHandle (handle.rs)     calls to a group's Raft machine on this node
//!        │
//!   openraft ── network.rs: RaftMessage/RaftReply over a RaftTransport ── other nodes
//!        │
//!        ├─ storage/log.rs      the log, votes: synced before they count
//!        └─ storage/machine.rs  feeds committed entries to a StateMachine, keeps its records
//!               │
//!               ▼
//!           StateMachine        the user's: (records, command) → (reply, changed records)
//! ```
//!
//! Begin with [`RaftHandle::start`]. Users differ in their [`StateMachine`]; commands and replies are opaque
//! bytes here.
//!
//! **Architecture Invariant:** openraft is compiled in this crate alone. There is one [`TypeConfig`], and
//! nothing that reaches into openraft is generic. A future is compiled where it is polled, so functions that
//! reach into openraft return boxed futures.
//!
//! **Architecture Invariant:** nothing here knows what a command means.

mod config;
mod handle;
mod message;
mod network;
mod storage;
#[cfg(test)]
mod testing;

use std::future::Future;
use std::pin::Pin;

pub use config::{
    CommandBytes, Entry, LogId, RaftTuning, SnapshotMeta, StorageError, StoredMembership,
    TypeConfig, Vote,
};
pub use handle::{RaftHandle, StartError};
pub use message::{RaftMessage, RaftReply};
pub use network::{CallError, RaftTransport};
pub use storage::{
    Applied, CheckError, Database, DatabaseError, DbError, GroupId, GroupStore, SnapshotFile,
    StateMachine, Sync, View,
};

/// Future on the heap, as a trait object returns it.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;
