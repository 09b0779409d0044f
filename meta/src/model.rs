//! What the cluster knows: the records that the state machine keeps and the clients read.

mod event;
mod export;
mod filesystem;
mod group;
mod migration;
mod name;
mod recovery;
mod size;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::level::Level;
use crate::pki::TokenHash;

use crate::ids::{
    AttachmentId, DeviceId, Epoch, Generation, Incarnation, LayerId, NodeId, PoolId, UnixMillis,
    VolumeId,
};

pub use event::{Author, EVENTS_MAX, Event, EventKind};
pub use export::{Export, ExportState};
pub use filesystem::{
    Filesystem, FilesystemAttachment, FilesystemState, NamespaceGroup, SegmentOf,
};
pub use group::{GroupId, Member, PlacementGroup, PoolHealth, ReplicaState};
pub use migration::{INCOMING_TIME_MAX, Incoming, OFFER_TIME_DEFAULT, OFFER_TIME_MAX, Offer};
pub use name::{MAX_NAME_BYTES, Name, NameError};
pub use recovery::{DeviceEvidence, Recovery};
pub use size::{MAX_VOLUME_BYTES, SizeError, VOLUME_SIZE_STEP_BYTES, VolumeSize};

/// Name of the pool that every cluster starts with.
pub const DEFAULT_POOL: &str = "default";

/// The cluster as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cluster {
    /// Made at the first start of the first node; written on every device the cluster owns.
    pub uuid: Uuid,
    /// Version of the cluster map.
    pub epoch: Epoch,
    /// What all its nodes understand.
    pub level: Level,
    /// When the cluster was made.
    pub created_at: UnixMillis,
    /// The last disaster that it went on after.
    pub recovery: Option<Recovery>,
}

/// Lets one node join, once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Token {
    /// What is kept of the secret.
    pub hash: TokenHash,
    /// The roles that the node may have.
    pub roles: BTreeSet<Role>,
    /// When it was made.
    pub created_at: UnixMillis,
    /// When it ends, by the wall clock of whoever lets the node in.
    pub expires_at: UnixMillis,
}

/// What a node does in the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Votes on and stores the cluster's metadata.
    Meta,
    /// Owns devices.
    Storage,
    /// Serves guests.
    Host,
    /// Serves the data to clients outside of VMs.
    Nfs,
}

impl Role {
    /// All roles: what the only node of an embedded cluster has.
    #[must_use]
    pub fn all() -> BTreeSet<Self> {
        BTreeSet::from([Self::Meta, Self::Storage, Self::Host, Self::Nfs])
    }

    pub(crate) fn are_all(roles: &BTreeSet<Self>) -> bool {
        *roles == Self::all()
    }

    /// Several roles in one text, as an option takes them.
    #[must_use]
    pub fn list(roles: &BTreeSet<Self>) -> String {
        let words: Vec<String> = roles.iter().map(Self::to_string).collect();
        words.join(",")
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Meta => "meta",
            Self::Storage => "storage",
            Self::Host => "host",
            Self::Nfs => "nfs",
        })
    }
}

/// Where a node stands, for pools whose replicas must be apart.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Labels {
    /// The machine that it runs on, if that carries several nodes.
    pub host: Option<String>,
    /// The rack or room that it stands in.
    pub rack: Option<String>,
}

/// Starts of a node's process that are remembered. One that is forgotten counts as one before the last boot.
pub const STARTS_MAX: usize = 32;

/// Whether a node is heard of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NodeState {
    /// It sends heartbeats.
    #[default]
    Up,
    /// The metadata leader heard nothing of it for [`crate::NODE_DOWN_AFTER`].
    Down,
}

/// Whether a node may hold data.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AdminState {
    /// It holds its share.
    #[default]
    Active,
    /// It was away for [`crate::NODE_REPLACE_AFTER`]: its share was given to others. It is active again when
    /// it returns.
    Absent,
    /// The operator wants it empty.
    Draining,
}

/// One machine of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Its identity.
    pub id: NodeId,
    /// What people call it; the host name unless configured.
    pub name: Name,
    /// What it does.
    pub roles: BTreeSet<Role>,
    /// The roles that its join token granted. Empty at the first start of the first node, which none let in:
    /// then those that it has.
    pub granted: BTreeSet<Role>,
    /// The start of its process that registered last.
    pub incarnation: Incarnation,
    /// Whether it is heard of.
    pub state: NodeState,
    /// Whether it may hold data.
    pub admin_state: AdminState,
    /// Where it stands.
    pub labels: Labels,
    /// Where peers reach its metadata service; empty if it has no peers.
    pub control_address: String,
    /// Where hosts reach its devices; empty if nobody else does.
    pub data_address: String,
    /// Version of the software that it runs.
    pub version: String,
    /// The boot of its machine, see [`crate::NodeSpec::boot`].
    pub boot: String,
    /// Starts of its process since that boot, the newest last, at most [`STARTS_MAX`].
    pub starts: Vec<Incarnation>,
    /// When it joined.
    pub joined_at: UnixMillis,
}

impl Node {
    /// Whether its machine has, for all that is known, kept power since this start: what that start took is
    /// then on the devices still, flushed or not.
    #[must_use]
    pub fn kept_power_since(&self, incarnation: Incarnation) -> bool {
        self.starts.contains(&incarnation)
    }

    /// Whether a newer start of its process has registered than this one. Known of starts since its machine's
    /// last boot.
    #[must_use]
    pub fn is_former_start(&self, incarnation: Incarnation) -> bool {
        incarnation.has_begun()
            && incarnation != self.incarnation
            && self.starts.contains(&incarnation)
    }

    /// Whether it may have a role, now or at a later start.
    #[must_use]
    pub fn may_have(&self, role: Role) -> bool {
        self.roles.contains(&role) || self.granted.contains(&role)
    }

    /// Whether its devices keep the data that they hold.
    #[must_use]
    pub fn keeps_data(&self) -> bool {
        self.admin_state == AdminState::Active && self.roles.contains(&Role::Storage)
    }
}

/// Whether a device can hold data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceState {
    /// In use.
    Online,
    /// Its node does not serve it.
    Offline,
    /// It returned errors and is not used any more.
    Failed,
}

/// A raw block device or a file that a storage node owns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Its number in the cluster.
    pub id: DeviceId,
    /// The identity in its superblock.
    pub uuid: Uuid,
    /// The node that owns it.
    pub node: NodeId,
    /// Where that node finds it.
    pub path: String,
    /// Capacity in bytes.
    pub size_bytes: u64,
    /// Free word for the kind of device (`ssd`, `hdd`, `file`, ...), matched with a pool's.
    pub class: Name,
    /// Whether it can hold data.
    pub state: DeviceState,
    /// The start of its node that serves it.
    pub incarnation: Incarnation,
    /// Whether the operator wants it empty.
    pub draining: bool,
    /// When it was registered first.
    pub added_at: UnixMillis,
}

/// What two replicas of a chunk must not share.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FailureDomain {
    /// Replicas lie on different devices.
    Device,
    /// Replicas lie on different nodes.
    #[default]
    Node,
    /// Replicas lie on different hosts, see [`Labels::host`].
    Host,
    /// Replicas lie in different racks, see [`Labels::rack`].
    Rack,
}

impl fmt::Display for FailureDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Device => "device",
            Self::Node => "node",
            Self::Host => "host",
            Self::Rack => "rack",
        })
    }
}

/// Policy for where the data of its volumes lie.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pool {
    /// Its number.
    pub id: PoolId,
    /// Its name.
    pub name: Name,
    /// Copies of every chunk.
    pub replicas: u8,
    /// Copies that must be in sync for a write to be acknowledged.
    pub min_in_sync: u8,
    /// What replicas must not share.
    pub failure_domain: FailureDomain,
    /// Class of the devices used; every class if absent.
    pub device_class: Option<Name>,
    /// Number of placement groups; fixed when the pool is made.
    pub placement_groups: u32,
    /// When the pool was made.
    pub created_at: UnixMillis,
}

/// When a write is acknowledged to the guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// Durable once the guest flushes, as a local disk does it.
    #[default]
    Flush,
    /// Every write is flushed before it is acknowledged.
    Write,
}

/// Life of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VolumeState {
    /// Can be attached.
    Ready,
    /// Being deleted: its name is still taken until its data are dropped.
    Deleting,
}

/// What a write does that finds no space: it waits for some, and then fails with ENOSPC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct OnFull {
    /// How long it waits, in seconds.
    pub wait_s: u32,
}

impl OnFull {
    /// It fails at once.
    pub const ERROR: Self = Self { wait_s: 0 };
}

impl Default for OnFull {
    /// A minute: long enough for an operator's alarm, short enough for the time-outs of guests.
    fn default() -> Self {
        Self { wait_s: 60 }
    }
}

/// A disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Volume {
    /// Its number.
    pub id: VolumeId,
    /// Its identity towards the outside; the disk serial is made of it.
    pub uuid: Uuid,
    /// Its name.
    pub name: Name,
    /// The pool that its data lie in.
    pub pool: Name,
    /// Size in bytes, a multiple of [`VOLUME_SIZE_STEP_BYTES`].
    pub size_bytes: u64,
    /// Layers of its data, newest first: writes go to the first, reads take the first that has the block.
    pub layers: Vec<LayerId>,
    /// Whether every attachment of it is read-only.
    pub read_only: bool,
    /// When writes are acknowledged.
    pub durability: Durability,
    /// What writes do for want of space.
    pub on_full: OnFull,
    /// Life of the volume.
    pub state: VolumeState,
    /// Set by a shrink: bytes from `size_bytes` up to here still lie on the devices and must be discarded
    /// before the volume may grow again.
    pub stale_tail_end_bytes: Option<u64>,
    /// Of a hidden volume that holds data of a filesystem: which segment it is.
    pub segment: Option<SegmentOf>,
    /// When it was made.
    pub created_at: UnixMillis,
}

impl Volume {
    /// The layer that writes go to.
    ///
    /// # Panics
    /// On a volume without layers, which the state machine never makes.
    #[must_use]
    pub fn top_layer(&self) -> LayerId {
        *self
            .layers
            .first()
            .expect("a volume has at least one layer")
    }
}

/// The right to write a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The volume.
    pub volume: VolumeId,
    /// Who may write; nobody after a release.
    pub holder: Option<NodeId>,
    /// Count of grants: a replica refuses writes of an older one. Survives release.
    pub generation: Generation,
    /// Epoch at the grant: the holder's map is at least this new.
    pub epoch: Epoch,
    /// When it was granted.
    pub granted_at: UnixMillis,
}

/// What an attachment serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum AttachmentTarget {
    /// A volume, over vhost-user-blk.
    Volume {
        /// The volume's name.
        name: Name,
        /// The volume's number.
        id: VolumeId,
    },
}

impl AttachmentTarget {
    /// Name of what is served.
    #[must_use]
    pub fn name(&self) -> &Name {
        match self {
            Self::Volume { name, .. } => name,
        }
    }
}

/// Names of volumes that imports fill begin so; the import's volume takes its own name at the end.
pub const IMPORT_PREFIX: &str = "penstock-import-";

/// Details of an attachment that most leave at their default.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachmentOptions {
    /// Allows other attachments of the same volume beside this one, if they say so too: the guests coordinate
    /// their writes (a cluster filesystem), or one is the target of a migration.
    pub shared: bool,
    /// The guest's driver switched the disk's write cache off: no write is acknowledged before it is durable.
    /// Kept here because a front end that comes back to another process does not say it again.
    pub write_through: bool,
    /// Permission bits of the socket.
    pub socket_mode: Option<u32>,
    /// Owner of the socket.
    pub socket_uid: Option<u32>,
    /// Group of the socket.
    pub socket_gid: Option<u32>,
    /// Further options, for the daemon to interpret.
    pub extra: BTreeMap<String, String>,
    /// It waits to take the place of the attachment on another node.
    pub incoming: Option<Incoming>,
}

/// A vhost-user socket that serves one volume or filesystem to one guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// Its number.
    pub id: AttachmentId,
    /// The node that serves it.
    pub node: NodeId,
    /// Absolute path of the socket on that node.
    pub socket: String,
    /// What it serves.
    pub target: AttachmentTarget,
    /// Number of request queues offered.
    pub queues: u16,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// Details.
    pub options: AttachmentOptions,
    /// Consent that another node takes over. Never set on an incoming attachment.
    pub offer: Option<Offer>,
    /// End of an incoming attachment that has not taken over. Set on every incoming attachment and on no
    /// other.
    pub expires_at: Option<UnixMillis>,
    /// When it was made.
    pub created_at: UnixMillis,
}
