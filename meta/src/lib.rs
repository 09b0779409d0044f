//! The cluster's metadata: nodes, devices, pools, placement, volumes, leases and attachments, kept by Raft.
//!
//! ```text
//!   Meta (client.rs)        typed calls for the daemon      MetaNode (node.rs)  opens, bootstraps, stops
//!        │ Command                                                    │
//!        ▼                                                            ▼
//!   raft-host ── net.rs: PeerRequest/PeerReply over a Transport ── other nodes
//!        │                      log, votes, snapshots; openraft and RocksDB are in that crate
//!        ▼
//!   storage/machine.rs          decodes committed commands, and follows what they change
//!        │
//!        ▼
//!   state.rs                    pure: (records, Command) → (Reply, changed records)
//! ```
//!
//! **Architecture Invariant:** a cluster of one runs the same code as a cluster of three: one voter, no
//! special path.
//!
//! **Architecture Invariant:** nothing here is on the path of guest I/O.

pub mod command;
pub mod first;
pub mod ids;
pub mod layers;
pub mod level;
pub mod map;
pub mod model;
pub mod net;
pub mod pki;
pub mod recovery;
pub mod refusal;
pub mod report;

mod authority;
mod client;
mod error;
mod groups;
mod leases;
mod node;
mod openings;
mod reach;
mod state;
mod storage;
mod stored;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod watch;

pub use client::{Applied, Confirmed, Meta, as_user, caller_uid};
pub use command::{
    AttachmentKey, AttachmentSpec, Change, Command, DeviceSpec, ExportSpec,
    FilesystemAttachmentSpec, FilesystemSpec, Heard, Lost, NodeSpec, Notice, Outcome, PoolSpec,
    Reply, VolumeSpec,
};
pub use error::{MetaError, OpenError};
pub use groups::{
    Answers, Filesystems, GroupCall, GroupReply, GroupRequest, LinkCall, LinkReply, Operations,
    Replies, SessionLink,
};
pub use ids::{
    AttachmentId, DeviceId, Epoch, Generation, Incarnation, LayerId, NamespaceGroupId, NodeId,
    PgIndex, PoolId, UnixMillis, VolumeId, draw_incarnation,
};
pub use layers::{LayerChanges, LayerLease, Layers, LayersRevision};
pub use leases::{LEASE_DURATION, lease_for_holder};
pub use level::Level;
pub use map::ClusterMap;
pub use model::{
    AdminState, Attachment, AttachmentOptions, AttachmentTarget, Author, Cluster, DEFAULT_POOL,
    Device, DeviceEvidence, DeviceState, Durability, EVENTS_MAX, Event, EventKind, Export,
    ExportState, FailureDomain, Filesystem, FilesystemAttachment, FilesystemState, GroupId,
    IMPORT_PREFIX, INCOMING_TIME_MAX, Incoming, Labels, Lease, Member, Name, NamespaceGroup, Node,
    NodeState, OFFER_TIME_DEFAULT, OFFER_TIME_MAX, Offer, OnFull, PlacementGroup, Pool, PoolHealth,
    Recovery, ReplicaState, Role, SegmentOf, Token, VOLUME_SIZE_STEP_BYTES, Volume, VolumeState,
};
pub use node::{MetaConfig, MetaNode, Peer, Start, voters_wanted};
pub use openings::OpenLayers;
pub use raft_host::{RaftMessage, RaftReply, RaftTuning};
pub use reach::Reach;
pub use refusal::{
    AccessRefusal, ExportRefusal, FilesystemRefusal, GroupRefusal, JoinRefusal, LossRefusal,
    NamedNode, RecoveryRefusal, Refusal, RefusalKind,
};
pub use report::{
    DeviceReport, FailingSync, LastHeard, LastReport, LeaderReport, NodeLevel, NodeReport,
    ProblemReport, RaftStatus,
};
pub use stored::{NodeStored, STORED_GROUPS_MAX, STORED_VOLUMES_MAX, StoredReport, VolumeStored};
pub use watch::{
    AUTHORITY_GRACE, HEARTBEAT_INTERVAL, HEARTBEAT_LEASE, NODE_DOWN_AFTER, NODE_REPLACE_AFTER,
    SYNCING_PER_NODE_MAX, WITNESS_WAIT_MAX, Watch, count_devices, has_witness,
};
