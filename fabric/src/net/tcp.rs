//! Requests to replicas on other nodes over TCP, for pinned data threads without an async runtime.
//!
//! The protocol is a set of machines without sockets: [`handshake`] makes of a fresh connection one that carries [`frame`]s,
//! [`caller`] and [`responder`] are its two ends. A connection has a direction: who connected asks, who was connected to answers.

pub mod backoff;
pub mod caller;
pub mod frame;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod handshake;
pub mod hello;
pub mod identity;
pub mod pool;
pub mod queue;
pub mod reader;
pub mod responder;
pub mod session;
pub mod shape;

#[cfg(test)]
mod tests;
