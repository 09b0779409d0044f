//! What clients and replicas say to each other: identities, requests and replies, and their form on the wire.
//!
//! The cores speak [`Request`] and [`Reply`]; a transport that leaves the process turns them into the fixed
//! little-endian headers of [`wire`], one that does not ([`crate::net::mem`]) passes them as they are.

pub mod ids;
pub mod incoming;
pub mod message;
pub mod placement;
pub mod wire;

pub use ids::{Epoch, Generation, Incarnation, NodeId, PgId, Sequence};
pub use message::{Command, Refusal, Reply, Request, RequestId};
