//! Requests to replicas on other nodes over TCP, for pinned data threads without an async runtime.
//!
//! The protocol is a set of machines without sockets: [`handshake`] makes of a fresh connection one that
//! carries [`frame`]s, [`caller`] and [`responder`] are its two ends. A connection has a direction: who
//! connected asks, who was connected to answers.
//!
//! Beside a connection there may be a queue pair ([`queue_pair`]), by which requests and data then go; what
//! implements one for a device is not here.
//!
//! One thread of the node, the [`connector`], makes connections; each then belongs to one data thread's
//! [`lane`] for good.

pub mod backoff;
pub mod caller;
pub mod connector;
pub mod control;
pub mod counts;
pub mod frame;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod handshake;
pub mod hello;
pub mod identity;
pub mod inbox;
pub mod lane;
pub mod members;
pub mod peer_routes;
pub mod pool;
pub mod queue;
pub mod queue_pair;
pub mod reader;
pub mod responder;
pub mod serving;
pub mod session;
pub mod shape;
pub mod socket;
pub mod stable_buffers;

#[cfg(test)]
mod tests;
