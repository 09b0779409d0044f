//! The cluster's metadata: nodes, devices, pools, placement, volumes, leases and attachments, kept by Raft.
//!
//! ```text
//!   Meta (client.rs)        typed calls for the daemon           MetaNode (node.rs)     opens, bootstraps, stops
//!        │ Command                                                    │
//!        ▼                                                            ▼
//!   openraft  ── net.rs: PeerRequest/PeerReply over a Transport ── other nodes
//!        │
//!        ├─ storage/log.rs      the log, votes: synced before they count
//!        └─ storage/machine.rs  feeds committed entries to state.rs and keeps its records one by one in RocksDB
//!               │
//!               ▼
//!           state.rs            pure: (records, Command) → (Reply, changed records)
//! ```
//!
//! **Architecture Invariant:** a cluster of one runs the same code as a cluster of three: one voter, no special path.
//!
//! **Architecture Invariant:** nothing here is on the path of guest I/O.

pub mod command;
pub mod ids;
pub mod model;
pub mod net;
pub mod refusal;

mod client;
mod error;
mod leases;
mod node;
mod raft;
mod state;
mod storage;

pub use client::Meta;
pub use command::{AttachmentKey, AttachmentSpec, DeviceSpec, NodeSpec, PoolSpec, VolumeSpec};
pub use error::{MetaError, OpenError};
pub use ids::{
    AttachmentId, DeviceId, Epoch, Generation, LayerId, NodeId, PgIndex, PoolId, UnixMillis,
    VolumeId,
};
pub use leases::LEASE_DURATION;
pub use model::{
    Attachment, AttachmentOptions, AttachmentTarget, Cluster, DEFAULT_POOL, Device, DeviceState,
    Durability, FailureDomain, Lease, Name, Node, PlacementGroup, Pool, Role,
    VOLUME_SIZE_STEP_BYTES, Volume, VolumeState,
};
pub use node::{MetaConfig, MetaNode, Peer, Start};
pub use raft::RaftTuning;
pub use refusal::{Refusal, RefusalKind};
