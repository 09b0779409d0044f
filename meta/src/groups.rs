//! Namespace groups: the Raft groups beside the cluster map's that keep what filesystems are made of
//! (`docs/decisions/0019`).
//!
//! ```text
//!   Filesystems (client.rs)     operations and queries of a host, to whoever leads the group
//!        │ GroupRequest, over connections of its own
//!        ▼
//!   NamespaceGroup (group.rs)   one group on this node
//!        ├─ proposals.rs   the leader puts operations that wait into one log entry
//!        ├─ reads.rs       and asks a majority once for all queries that wait
//!        ├─ coordination.rs  and says who may cache what, so that each operation (coordinated.rs) waits
//!        │                 until nobody uses anything cached that it changes
//!        ├─ taking.rs      processes what sessions send about capabilities
//!        ├─ leader.rs      and makes voters and filesystems follow the cluster map
//!        ├─ upkeep.rs      and clears away sessions, orphans and deleted filesystems
//!        └─ store.rs       feeds committed entries to the crate `namespace`
//! ```
//!
//! Begin with [`Groups`]: it opens a group once the cluster map has it, on nodes with the role `meta`. The
//! cluster map says which groups there are and on which one a filesystem lies. A group's own Raft membership
//! says who votes in it; the map has that, too, so that no node is removed that a group needs.
//!
//! **Architecture Invariant:** the cluster map's group waits for no leader, majority or message of a
//! namespace group.
//!
//! They share the database and its write-ahead log. An entry of one waits for the flush of the other that is
//! under way. RocksDB stops both when it cannot merge tables as fast as operations come; the crate
//! `raft-host` gives numbered groups room before that.

mod blocking;
mod client;
mod coordinated;
mod coordination;
mod group;
mod keeper;
mod leader;
mod messages;
mod operations;
mod places;
mod proposals;
mod reads;
mod sessions;
mod store;
mod taking;
#[cfg(test)]
mod tests;
mod upkeep;

pub use client::{Filesystems, Replies};
pub use coordination::SessionLink;
pub(crate) use group::GroupContext;
pub(crate) use keeper::{Groups, open_groups};
pub(crate) use leader::of_leader;
pub use messages::{GroupCall, GroupReply, GroupRequest, LinkCall, LinkReply};
pub use operations::Operations;
pub(crate) use operations::{check_operations, encode_operations};
pub use reads::Answers;
pub(crate) use store::open_namespace_group;
