//! Why the state machine refuses a command. The messages reach people verbatim: each names the culprit and
//! gives a hint.

use serde::{Deserialize, Serialize};

use crate::ids::{AttachmentId, Generation, VolumeId};
use crate::model::{Name, NameError, OFFER_TIME_MAX, SizeError};

/// Longest path of a unix socket: `sun_path` has 108 bytes with its terminating zero.
pub const MAX_SOCKET_PATH_BYTES: usize = 107;
/// Longest path of a device; a longer one is refused.
pub const MAX_DEVICE_PATH_BYTES: usize = 4095;
/// Longest address or version of a node; a longer one is refused.
pub const MAX_ADDRESS_BYTES: usize = 255;
/// Most request queues of one attachment; more are refused. One per vCPU is the use, and QEMU allows 1024 in
/// theory.
pub const MAX_QUEUES: u16 = 256;
/// Most request queues of an attachment of a filesystem; more are refused. A guest uses one for each of its
/// processors at most, and one serves many requests at a time.
pub const MAX_FILESYSTEM_QUEUES: u16 = 64;
/// Longest tag of a filesystem, in bytes: what virtio's configuration space has room for.
pub const MAX_TAG_BYTES: usize = 36;
/// Most copies of a chunk; a pool with more is refused.
pub const MAX_REPLICAS: u8 = 7;
/// Most placement groups of a pool; more are refused. They are all read when the device set changes.
pub const MAX_PLACEMENT_GROUPS: u32 = 16_384;
/// Most free options of one attachment; more are refused.
pub const MAX_EXTRA_OPTIONS: usize = 16;
/// Longest free option, key and value together; a longer one is refused.
pub const MAX_EXTRA_OPTION_BYTES: usize = 1024;

mod access;
mod export;
mod filesystem;
mod group;
mod join;
mod loss;
mod map;
mod named;
mod pool;
mod recovery;

pub use access::AccessRefusal;
pub use export::{ExportRefusal, MAX_EXPORT_CLIENTS, MAX_EXPORT_TEXT_BYTES};
pub use filesystem::FilesystemRefusal;
pub use group::GroupRefusal;
pub use join::{JoinRefusal, MAX_TOKENS};
pub use loss::LossRefusal;
pub use map::MapRefusal;
pub use named::{Named, NamedNode, NamedVolume};
pub use pool::PoolRefusal;
pub use recovery::RecoveryRefusal;

/// What kind of refusal: clients map it to their own codes (HTTP status).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalKind {
    /// The request can never be granted as it is.
    Invalid,
    /// It names something that does not exist.
    NotFound,
    /// It collides with what exists now.
    Conflict,
    /// Whoever asks may not.
    Denied,
}

/// Why a command was refused. Nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Refusal {
    /// About a name.
    #[error(transparent)]
    Name(#[from] NameError),
    /// About the cluster, a node or a device.
    #[error(transparent)]
    Map(#[from] MapRefusal),
    /// About what a node may do.
    #[error(transparent)]
    Access(#[from] AccessRefusal),
    /// About joining.
    #[error(transparent)]
    Join(#[from] JoinRefusal),
    /// About a placement group.
    #[error(transparent)]
    Group(#[from] GroupRefusal),
    /// About data that would be lost.
    #[error(transparent)]
    Loss(#[from] LossRefusal),
    /// About a pool.
    #[error(transparent)]
    Pool(#[from] PoolRefusal),
    /// About a volume.
    #[error(transparent)]
    Volume(#[from] VolumeRefusal),
    /// About a lease.
    #[error(transparent)]
    Lease(#[from] LeaseRefusal),
    /// About an attachment.
    #[error(transparent)]
    Attachment(#[from] AttachmentRefusal),
    /// About an NFS export.
    #[error(transparent)]
    Export(#[from] ExportRefusal),
    /// About a filesystem.
    #[error(transparent)]
    Filesystem(#[from] FilesystemRefusal),
    /// About metadata that went on after a disaster.
    #[error(transparent)]
    Recovery(#[from] RecoveryRefusal),
}

/// Refusals about volumes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VolumeRefusal {
    /// Another volume has the name.
    #[error("volume {name:?} exists already: choose another name, or delete it first")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// No volume has the name.
    #[error("there is no volume {name:?}: see `penstock volume list`")]
    Unknown {
        /// The name.
        name: String,
    },
    /// No volume has the number.
    #[error("there is no volume with number {id}: see `penstock volume list`")]
    UnknownId {
        /// The number.
        id: VolumeId,
    },
    /// Numbers of volumes are part of the numbers of layers, and these have run out.
    #[error(
        "this cluster has had {} volumes, deleted ones too, and can have no more: resize or import into one \
         that exists, \
         or make another cluster",
        VolumeId::MAX
    )]
    TooMany,
    /// A size that no volume has.
    #[error("volume {name:?}: {source}")]
    Size {
        /// The volume.
        name: String,
        /// What is wrong.
        source: SizeError,
    },
    /// An attachment serves it.
    #[error(
        "volume {name:?} is in use at {socket:?} on node {node}: detach it first with `penstock detach \
         {socket}`"
    )]
    InUse {
        /// The volume.
        name: String,
        /// Socket of an attachment.
        socket: String,
        /// The attachment's node.
        node: NamedNode,
    },
    /// An NFS export serves it.
    #[error(
        "volume {name:?} is exported over NFS as {export:?}: delete that first with `penstock nfs export \
         delete {export}`"
    )]
    Exported {
        /// The volume.
        name: String,
        /// The export.
        export: String,
    },
    /// Its deletion has begun.
    #[error("volume {name:?} is being deleted: wait until `penstock volume list` shows it no more")]
    Deleting {
        /// The volume.
        name: String,
    },
    /// Data were said to be dropped although nobody deleted the volume.
    #[error("volume {name:?} is not being deleted: its data must not be dropped")]
    NotDeleting {
        /// The volume.
        name: String,
    },
    /// A smaller size without the word that data may be lost.
    #[error(
        "volume {name:?} has {size_bytes} bytes, and shrinking it to {asked_bytes} loses the data beyond: \
         shrink the file system on it first, then repeat with --yes"
    )]
    WouldShrink {
        /// The volume.
        name: String,
        /// Its size.
        size_bytes: u64,
        /// The size asked for.
        asked_bytes: u64,
    },
    /// The data beyond an earlier shrink are still on the devices.
    #[error(
        "volume {name:?} is still giving back the space of its last shrink: repeat in a moment"
    )]
    StillShrinking {
        /// The volume.
        name: String,
    },
}

/// Refusals about leases.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseRefusal {
    /// Another node has it.
    #[error(
        "volume {volume:?} is leased to node {holder} (generation {generation}): stop its use there, or wait \
         until \
         that lease has run out"
    )]
    Held {
        /// The volume.
        volume: String,
        /// Node that holds it.
        holder: NamedNode,
        /// Its generation.
        generation: Generation,
    },
    /// Another node serves the volume to a guest.
    #[error(
        "volume {volume:?} is attached at {socket:?} on node {node:?}, so no other host may use it: detach \
         it there first"
    )]
    Attached {
        /// The volume.
        volume: String,
        /// Name of the node.
        node: String,
        /// Socket of the attachment.
        socket: String,
    },
    /// The lease moved on since.
    #[error(
        "the lease of volume {volume} is at generation {current}, not {claimed}: this node lost the right to \
         write"
    )]
    Superseded {
        /// The volume.
        volume: NamedVolume,
        /// The generation that counts.
        current: Generation,
        /// The one claimed.
        claimed: Generation,
    },
    /// Nobody, or another node, holds it at this generation.
    #[error(
        "node {node} does not hold the lease of volume {volume} (generation {current}): ask for it first"
    )]
    NotHolder {
        /// The volume.
        volume: NamedVolume,
        /// The node that claims it.
        node: NamedNode,
        /// The generation that counts.
        current: Generation,
    },
}

/// Refusals about attachments.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttachmentRefusal {
    /// Another attachment listens there.
    #[error(
        "socket {socket:?} on node {node} serves {target:?} already: choose another path, or detach that \
         first"
    )]
    SocketTaken {
        /// The path.
        socket: String,
        /// The node.
        node: NamedNode,
        /// What it serves.
        target: String,
    },
    /// A path that no socket can have.
    #[error(
        "socket path {socket:?} cannot be used: give an absolute path without NUL of at most \
         {MAX_SOCKET_PATH_BYTES} \
         bytes"
    )]
    BadSocketPath {
        /// The path.
        socket: String,
    },
    /// None, or more than [`MAX_QUEUES`].
    #[error("an attachment cannot have {queues} queues: give 1 to {MAX_QUEUES}")]
    BadQueues {
        /// The number asked for.
        queues: u16,
    },
    /// The same of a filesystem's attachment.
    #[error(
        "an attachment of a filesystem cannot have {queues} queues: give 1 to {MAX_FILESYSTEM_QUEUES}"
    )]
    BadFilesystemQueues {
        /// The number asked for.
        queues: u16,
    },
    /// What a guest could not mount by.
    #[error(
        "tag {tag:?} cannot be used: give 1 to {MAX_TAG_BYTES} bytes without NUL and newline, by which the \
         guest mounts it"
    )]
    BadTag {
        /// The tag, or its beginning.
        tag: String,
    },
    /// It serves no guests.
    #[error(
        "node {node:?} does not have the role host, so it serves no guests: attach on another node, or \
         start it with that role"
    )]
    NotHost {
        /// The node.
        node: String,
    },
    /// Options beyond their limits.
    #[error(
        "option {key:?} is one too many or too long: give at most {MAX_EXTRA_OPTIONS} of at most \
         {MAX_EXTRA_OPTION_BYTES} bytes"
    )]
    BadOption {
        /// The option.
        key: String,
    },
    /// Two guests would write to one volume.
    #[error(
        "volume {volume:?} is attached at {socket:?} on node {node} already: detach it there first"
    )]
    VolumeInUse {
        /// The volume.
        volume: String,
        /// Socket of the attachment in the way.
        socket: String,
        /// Its node.
        node: NamedNode,
    },
    /// The volume has no attachment whose place could be taken.
    #[error(
        "volume {volume:?} is not attached on another node, so nothing can come in from there: attach it \
         without --incoming"
    )]
    NothingIncoming {
        /// The volume.
        volume: String,
    },
    /// The source's node has not offered the attachment to this node.
    #[error(
        "volume {volume:?} is attached on node {node:?}, which has not offered it to node {to:?}: run \
         `penstock attachment offer {volume} --to {to}` on node {node:?}, then repeat"
    )]
    NotOffered {
        /// The volume.
        volume: String,
        /// Name of the node that serves it.
        node: String,
        /// Name of the node that was to take over.
        to: String,
    },
    /// The offer has expired.
    #[error(
        "the offer of volume {volume:?} to node {to:?} has expired: run `penstock attachment offer {volume} \
         --to {to}` on node {node:?} again, then repeat"
    )]
    OfferExpired {
        /// The volume.
        volume: String,
        /// Name of the node that serves it.
        node: String,
        /// Name of the node that was to take over.
        to: String,
    },
    /// The lifetime of an offer is zero or too long.
    #[error(
        "the lifetime of an offer cannot be {lifetime_s} s: use 1 s to {} h",
        OFFER_TIME_MAX.as_secs() / 3600
    )]
    BadOffer {
        /// The requested lifetime in seconds.
        lifetime_s: u64,
    },
    /// An incoming attachment cannot be offered: it does not serve the volume yet.
    #[error(
        "the attachment of volume {volume:?} at {socket:?} on node {node:?} is itself incoming from another \
         node: offer the attachment that serves the volume"
    )]
    IncomingOffered {
        /// The volume.
        volume: String,
        /// Its socket.
        socket: String,
        /// Name of its node.
        node: String,
    },
    /// There is no offer to withdraw.
    #[error("volume {volume:?} is offered to no node: see `penstock attachment list`")]
    NothingOffered {
        /// The volume.
        volume: String,
    },
    /// An incoming attachment has reached its deadline.
    #[error(
        "the incoming attachment of volume {volume:?} has expired: offer the volume again on its \
         node, then attach it again"
    )]
    IncomingExpired {
        /// The volume.
        volume: String,
    },
    /// Another attachment is to take the same place.
    #[error(
        "volume {volume:?} is coming in at {socket:?} on node {node} already: detach that first"
    )]
    OtherIncoming {
        /// The volume.
        volume: String,
        /// Socket of the other one.
        socket: String,
        /// Its node.
        node: NamedNode,
    },
    /// The attachment whose place is to be taken is on the same node.
    #[error(
        "volume {volume:?} is attached on this node already, at {socket:?}: an attachment comes in from \
         another node"
    )]
    SameNode {
        /// The volume.
        volume: String,
        /// Socket of the attachment.
        socket: String,
    },
    /// Several guests share the volume on the node that it would come from.
    #[error(
        "volume {volume:?} has {attachments} attachments: it moves with its only one; detach the others first"
    )]
    SharedSource {
        /// The volume.
        volume: String,
        /// How many it has.
        attachments: usize,
    },
    /// It does not wait for anything.
    #[error("attachment {id} is not incoming")]
    NotIncoming {
        /// Its number.
        id: AttachmentId,
    },
    /// No attachment has the key.
    #[error("there is no attachment {what}: see `penstock attachment list`")]
    Unknown {
        /// How it was named.
        what: String,
    },
}

impl Refusal {
    /// Which kind of refusal this is.
    #[must_use]
    pub fn kind(&self) -> RefusalKind {
        match self {
            Self::Name(_) => RefusalKind::Invalid,
            Self::Map(refusal) => refusal.kind(),
            Self::Access(_) => RefusalKind::Denied,
            Self::Join(_) => RefusalKind::Conflict,
            Self::Group(refusal) => refusal.kind(),
            Self::Loss(refusal) => refusal.kind(),
            Self::Pool(refusal) => refusal.kind(),
            Self::Volume(refusal) => refusal.kind(),
            Self::Lease(_) => RefusalKind::Conflict,
            Self::Attachment(refusal) => refusal.kind(),
            Self::Export(refusal) => refusal.kind(),
            Self::Filesystem(refusal) => refusal.kind(),
            Self::Recovery(refusal) => refusal.kind(),
        }
    }
}

impl VolumeRefusal {
    fn kind(&self) -> RefusalKind {
        match self {
            Self::Size { .. } => RefusalKind::Invalid,
            Self::Unknown { .. } | Self::UnknownId { .. } => RefusalKind::NotFound,
            Self::NameTaken { .. }
            | Self::TooMany
            | Self::InUse { .. }
            | Self::Exported { .. }
            | Self::Deleting { .. }
            | Self::NotDeleting { .. }
            | Self::WouldShrink { .. }
            | Self::StillShrinking { .. } => RefusalKind::Conflict,
        }
    }
}

impl AttachmentRefusal {
    fn kind(&self) -> RefusalKind {
        match self {
            Self::BadSocketPath { .. }
            | Self::BadQueues { .. }
            | Self::BadFilesystemQueues { .. }
            | Self::BadTag { .. }
            | Self::BadOffer { .. }
            | Self::BadOption { .. } => RefusalKind::Invalid,
            Self::Unknown { .. } => RefusalKind::NotFound,
            Self::NotOffered { .. } | Self::OfferExpired { .. } => RefusalKind::Denied,
            Self::SocketTaken { .. }
            | Self::IncomingOffered { .. }
            | Self::NothingOffered { .. }
            | Self::IncomingExpired { .. }
            | Self::VolumeInUse { .. }
            | Self::NothingIncoming { .. }
            | Self::OtherIncoming { .. }
            | Self::SameNode { .. }
            | Self::SharedSource { .. }
            | Self::NotIncoming { .. }
            | Self::NotHost { .. } => RefusalKind::Conflict,
        }
    }
}

/// Checks a name, or says why not.
pub(crate) fn name(text: &str) -> Result<Name, Refusal> {
    Ok(Name::parse(text)?)
}
