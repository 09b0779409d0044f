//! Replication as pure state machines: events in, actions out; no clock, socket, disk or random source.
//!
//! [`client::Client`] turns guest requests into requests to replicas and counts their answers;
//! [`replica::Replica`] checks fences and forwards to its store. What they act upon is behind two small
//! traits, [`client::Transport`] and [`replica::StorePort`], whose implementations may answer in place (the
//! embedded default) or later. [`resync`] brings a replica up to date, [`lease_recovery`] makes replicas
//! agree before a new lease is used, [`repair`] gives a bad block its content back.
//!
//! Begin with `docs/REPLICATION.md`, whose rules and invariants these machines follow.

mod block_copy;
mod calls;
pub mod client;
pub mod fence;
pub mod groups;
pub mod lease_recovery;
pub mod overlap;
pub mod repair;
pub mod replica;
pub mod resync;
pub mod segments;
pub mod share;
mod thread_cache;
pub mod unflushed;
pub mod unresolved;
pub mod volume;
pub mod watermark;
