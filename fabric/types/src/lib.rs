//! What all parts of the fabric share: names, blocks, requests, and the seam to the guest side.
//!
//! Begin with [`message`]: clients and replicas speak [`Request`] and [`Reply`], about chunks and placement
//! groups that [`ids`] names. A transport that leaves the process turns them into the fixed little-endian
//! headers of [`wire`]; one that does not passes them as they are. [`membership`] is the cluster map as the
//! data path knows it, [`placement`] says which group holds a chunk, and [`incoming`] how a device is named
//! that a group is coming to. [`io`] is what a guest's device asks of a volume, [`registrar`] what opens its
//! memory to the network.
//!
//! Memory is never owned here: [`iov`] describes lists whose owner promises their lifetime.
//!
//! Invariants: an identity is never taken for another (each has its type); a wire header that is not valid is
//! refused before anything of it is used.

pub mod block;
pub mod checksum;
pub mod ids;
pub mod incoming;
pub mod io;
pub mod iov;
pub mod membership;
pub mod message;
pub mod placement;
pub mod registrar;
pub mod slab;
pub mod wire;

pub use ids::{Epoch, Generation, Incarnation, NodeId, PgId, Sequence};
pub use message::{Command, Refusal, Reply, Request, RequestId};
