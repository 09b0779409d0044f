//! What can be asked of the state machine, and what it answers. These are the entries of the Raft log.
//!
//! A command carries every fact from outside: times, identities, measured sizes. Applying it is then the same on
//! every node.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::ids::{AttachmentId, DeviceId, Generation, NodeId, UnixMillis, VolumeId};
use crate::model::{
    Attachment, AttachmentOptions, Device, DeviceState, Durability, FailureDomain, Lease, Node,
    Pool, Role, Volume,
};
use crate::refusal::Refusal;

/// Placement groups of a pool that does not say how many: enough to spread evenly over a few dozen devices.
pub const DEFAULT_PLACEMENT_GROUPS: u32 = 256;

/// A node to be added.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeSpec {
    /// Its identity.
    pub id: NodeId,
    /// Its name.
    pub name: String,
    /// Its roles.
    pub roles: BTreeSet<Role>,
}

/// A device to be registered. Registering the same `uuid` again updates its node, path, size and state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceSpec {
    /// The identity in its superblock.
    pub uuid: Uuid,
    /// The node that owns it.
    pub node: NodeId,
    /// Where that node finds it.
    pub path: String,
    /// Capacity in bytes.
    pub size_bytes: u64,
    /// Kind of device, such as `ssd`.
    pub class: String,
}

/// A pool to be made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolSpec {
    /// Its name.
    pub name: String,
    /// Copies of every chunk.
    pub replicas: u8,
    /// Copies that must be in sync for a write; by default a majority of `replicas`.
    pub min_in_sync: Option<u8>,
    /// What replicas must not share.
    pub failure_domain: FailureDomain,
    /// Class of the devices used; every class if absent.
    pub device_class: Option<String>,
    /// Number of placement groups, which stays; [`DEFAULT_PLACEMENT_GROUPS`] if absent.
    pub placement_groups: Option<u32>,
}

impl PoolSpec {
    /// A pool of this many replicas on different nodes, on devices of any class.
    #[must_use]
    pub fn new(name: impl Into<String>, replicas: u8) -> Self {
        Self {
            name: name.into(),
            replicas,
            min_in_sync: None,
            failure_domain: FailureDomain::default(),
            device_class: None,
            placement_groups: None,
        }
    }
}

/// A volume to be made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeSpec {
    /// Its name.
    pub name: String,
    /// Its size in bytes; rounded up to a multiple of 4096.
    pub size_bytes: u64,
    /// Its pool; the default pool if absent.
    pub pool: Option<String>,
    /// Whether it may only be read.
    pub read_only: bool,
    /// When writes are acknowledged.
    pub durability: Durability,
}

impl VolumeSpec {
    /// A writable volume in the default pool.
    #[must_use]
    pub fn new(name: impl Into<String>, size_bytes: u64) -> Self {
        Self {
            name: name.into(),
            size_bytes,
            pool: None,
            read_only: false,
            durability: Durability::default(),
        }
    }
}

/// An attachment of a volume to be made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachmentSpec {
    /// The volume's name.
    pub volume: String,
    /// The node that serves it.
    pub node: NodeId,
    /// Absolute path of the socket.
    pub socket: String,
    /// Number of request queues.
    pub queues: u16,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// Details.
    pub options: AttachmentOptions,
}

/// Names an attachment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttachmentKey {
    /// By its number.
    Id(AttachmentId),
    /// By its socket on a node.
    Socket {
        /// The node.
        node: NodeId,
        /// The path.
        socket: String,
    },
}

/// An entry of the Raft log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Command {
    /// Makes the cluster record, the first node and the default pool. Done again it changes nothing.
    Bootstrap {
        /// Identity of the cluster.
        cluster: Uuid,
        /// The first node.
        node: NodeSpec,
        /// Now.
        at: UnixMillis,
    },
    /// Adds a node, or changes its name and roles.
    RegisterNode {
        /// The node.
        node: NodeSpec,
        /// Now.
        at: UnixMillis,
    },
    /// Adds a device, or says that it is back.
    RegisterDevice {
        /// The device.
        device: DeviceSpec,
        /// Now.
        at: UnixMillis,
    },
    /// Says whether a device can hold data.
    SetDeviceState {
        /// The device.
        device: DeviceId,
        /// Its new state.
        state: DeviceState,
    },
    /// Forgets a device that holds no data.
    RemoveDevice {
        /// The device.
        device: DeviceId,
    },
    /// Makes a pool.
    CreatePool {
        /// The pool.
        pool: PoolSpec,
        /// Now.
        at: UnixMillis,
    },
    /// Forgets a pool without volumes.
    DeletePool {
        /// Its name.
        name: String,
    },
    /// Makes a volume. The same `uuid` again answers with the volume it made.
    CreateVolume {
        /// Identity of the volume.
        uuid: Uuid,
        /// The volume.
        volume: VolumeSpec,
        /// Now.
        at: UnixMillis,
    },
    /// Changes a volume's size.
    ResizeVolume {
        /// Its name.
        name: String,
        /// The new size in bytes; rounded up to a multiple of 4096.
        size_bytes: u64,
        /// Whether data beyond the new size may be lost.
        allow_shrink: bool,
    },
    /// Says that what a shrink cut off was discarded on all replicas.
    VolumeTailDropped {
        /// The volume.
        volume: VolumeId,
    },
    /// First step of deletion: nobody can attach or write it from now on.
    DeleteVolume {
        /// Its name.
        name: String,
    },
    /// Second step of deletion: its data are gone from all replicas, so its name is free.
    VolumeDataDropped {
        /// The volume.
        volume: VolumeId,
    },
    /// Gives a volume the name of another, which it replaces: that one takes its name and begins to be deleted.
    PromoteVolume {
        /// The volume that is renamed.
        from: String,
        /// Its new name.
        to: String,
    },
    /// Grants the lease of a volume with a new generation.
    GrantLease {
        /// The volume's name.
        volume: String,
        /// Who asks.
        node: NodeId,
        /// The generation of another holder's lease that the leader found to have run out.
        expired: Option<Generation>,
        /// Now.
        at: UnixMillis,
    },
    /// Gives a lease back.
    ReleaseLease {
        /// The volume.
        volume: VolumeId,
        /// The holder.
        node: NodeId,
        /// The generation it holds.
        generation: Generation,
    },
    /// Makes an attachment.
    CreateAttachment {
        /// The attachment.
        attachment: AttachmentSpec,
        /// Now.
        at: UnixMillis,
    },
    /// Says whether a guest switched the write cache of its disk off.
    SetWriteThrough {
        /// The attachment.
        attachment: AttachmentId,
        /// Whether it is off.
        on: bool,
    },
    /// Forgets an attachment.
    DeleteAttachment {
        /// Which.
        attachment: AttachmentKey,
    },
}

impl Command {
    /// Whether it is refused where room has become short.
    pub(crate) fn makes_something_new(&self) -> bool {
        matches!(
            self,
            Self::CreatePool { .. }
                | Self::CreateVolume { .. }
                | Self::ResizeVolume { .. }
                | Self::CreateAttachment { .. }
        )
    }
}

/// What a command brought about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Nothing to tell.
    Done,
    /// The node as it is now.
    Node(Node),
    /// The device as it is now (or was, when removed).
    Device(Device),
    /// The pool as it is now (or was, when deleted).
    Pool(Pool),
    /// The volume as it is now (or was, when removed).
    Volume(Volume),
    /// The lease as it is now.
    Lease(Lease),
    /// The attachment as it is now (or was, when deleted).
    Attachment(Attachment),
}

/// Answer to a command.
pub type Reply = Result<Outcome, Refusal>;
