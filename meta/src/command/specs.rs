//! What commands are to make: nodes, devices, pools, volumes, filesystems, and what serves them.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::ids::{Incarnation, NodeId};
use crate::level::Level;
#[cfg(doc)]
use crate::model::Node;
use crate::model::{AttachmentOptions, Durability, FailureDomain, Labels, OnFull, Role};

/// Least number of placement groups of a pool that does not say how many. Without a word it gets as many as
/// give each of its present devices 40 replicas of groups (which spreads them within 2.5 % of their share),
/// rounded up to a power of two. The number stays, so this leaves room to grow: to 76 devices with three
/// replicas.
pub const DEFAULT_PLACEMENT_GROUPS: u32 = 1024;

/// A node to be added.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeSpec {
    /// Its identity.
    pub id: NodeId,
    /// Its name.
    pub name: String,
    /// Its roles.
    pub roles: BTreeSet<Role>,
    /// What its join token grants, said when it is let in: [`Node::granted`].
    pub granted: BTreeSet<Role>,
    /// This start of its process.
    pub incarnation: Incarnation,
    /// Where it stands.
    pub labels: Labels,
    /// Where peers reach its metadata service; empty without peers.
    pub control_address: String,
    /// Where hosts reach its devices; empty if nobody else does.
    pub data_address: String,
    /// Version of the software that it runs.
    pub version: String,
    /// Identity of the boot of its machine; empty if it is not known, which is taken for a new one at each
    /// start.
    pub boot: String,
    /// The highest feature level that it knows.
    pub level: Level,
}

impl NodeSpec {
    /// A node of this program with all roles, no labels, no addresses and no incarnation.
    #[must_use]
    pub fn new(id: NodeId, name: impl Into<String>) -> Self {
        Self {
            id,
            name: name.into(),
            roles: Role::all(),
            granted: BTreeSet::new(),
            incarnation: Incarnation::default(),
            labels: Labels::default(),
            control_address: String::new(),
            data_address: String::new(),
            version: String::new(),
            boot: String::new(),
            level: Level::KNOWN,
        }
    }
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
    /// Number of placement groups, which stays; at least [`DEFAULT_PLACEMENT_GROUPS`] if absent.
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
    /// What writes do for want of space.
    pub on_full: OnFull,
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
            on_full: OnFull::default(),
        }
    }
}

/// A filesystem to be made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesystemSpec {
    /// Its name.
    pub name: String,
    /// The pool that its data are to lie in.
    pub pool: String,
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

/// An attachment of a filesystem to be made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesystemAttachmentSpec {
    /// The filesystem's name.
    pub filesystem: String,
    /// The node that serves it.
    pub node: NodeId,
    /// Absolute path of the socket.
    pub socket: String,
    /// What the guest mounts it by: 1 to 36 bytes without NUL and newline.
    pub tag: String,
    /// Number of request queues.
    pub queues: u16,
    /// Whether the guest may only read.
    pub read_only: bool,
}

/// An NFS export to be made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportSpec {
    /// Its name.
    pub name: String,
    /// The volume's name.
    pub volume: String,
    /// The NFS node that is to serve it.
    pub node: NodeId,
    /// Networks of clients that may mount it.
    pub clients: Vec<String>,
    /// Clients may only read.
    pub read_only: bool,
    /// What a client's root does is done as nobody.
    pub root_squash: bool,
    /// The address that follows it, with the prefix of its network.
    pub address: Option<String>,
}
