//! Requests and answers of the admin API.

mod cluster;
mod config;
mod filesystem;
mod filesystem_stats;
mod health;
mod join;
mod nfs;
mod offer;
mod stats;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

pub use cluster::*;
pub use config::*;
pub use filesystem::*;
pub use filesystem_stats::*;
pub use health::*;
pub use join::*;
pub use nfs::*;
pub use offer::*;
pub use stats::*;

/// The node at a glance.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// Version of the daemon.
    pub version: String,
    /// The daemon is starting: what is said of volumes, attachments and space is not known yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_starting: bool,
    /// Identity of the cluster.
    pub cluster_id: String,
    /// What all nodes of the cluster understand; rises by itself when the last node was upgraded.
    pub feature_level: u32,
    /// Roles of this node.
    pub roles: Vec<String>,
    /// Data directory.
    #[schema(value_type = String)]
    pub data: PathBuf,
    /// Process id of the daemon.
    pub pid: u32,
    /// Seconds since the daemon became ready.
    pub uptime_s: u64,
    /// `file`, or `null` for a store that drops everything.
    pub store: String,
    /// Data threads.
    pub threads: usize,
    /// Files that the daemon may have open; each queue that a guest runs takes six.
    pub open_files_max: u64,
    /// Number of volumes.
    pub volumes: usize,
    /// Number of attachments.
    pub attachments: usize,
    /// Attachments with a guest connected.
    pub guests: usize,
    /// Sum of the devices' capacities.
    pub capacity_bytes: u64,
    /// Sum of what is stored on them.
    pub used_bytes: u64,
    /// What the daemon may do on its machine.
    pub privileges: Privileges,
    /// How this node's kernel makes block devices of volumes.
    pub block_devices: String,
    /// What opening the store did, one line for each device.
    pub recovery: Vec<String>,
    /// How data go to other nodes, as far as this one has sent any.
    pub transports: Vec<PeerTransport>,
    /// Health in one line.
    pub health: Health,
}

/// Privileges of a daemon on its machine, as the kernel reports them. If its threads differ, those of the
/// most privileged one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Privileges {
    /// User that it runs as.
    pub user: String,
    /// That user's number.
    pub uid: u32,
    /// Capabilities that it has or could put into effect.
    pub capabilities: Vec<String>,
    /// Whether no program that it runs could have more.
    pub no_new_privs: bool,
    /// Whether its system calls are limited (seccomp).
    pub seccomp: bool,
    /// Version of Landlock that limits its paths; absent if none does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub landlock_abi: Option<u32>,
}

/// How a node's data go to another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PeerTransport {
    /// The other node.
    pub node: String,
    /// Connections by which data go over RDMA.
    pub rdma: usize,
    /// Connections by which they go over TCP.
    pub tcp: usize,
    /// Why one of these does not use RDMA.
    pub why_not_rdma: Option<String>,
}

/// A volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Volume {
    /// Name, unique in the cluster.
    pub name: String,
    /// Identity, a UUID.
    pub id: String,
    /// What the guest sees as the disk's serial: the first 20 digits of the identity. With udev the disk is
    /// `/dev/disk/by-id/virtio-SERIAL` there.
    pub serial: String,
    /// Size that guests see.
    pub size_bytes: u64,
    /// Bytes of it that hold data, in blocks of 4 KiB: written and not discarded since. One copy, without the
    /// other replicas. Of a cluster of several nodes it may be half a minute old, and up to ten minutes while
    /// a placement group has no replica in sync that is there. Absent where it is not known: without a
    /// metadata leader, for half a minute after its election, and in answers to changes of a volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<u64>,
    /// Pool it lives in.
    pub pool: String,
    /// How long writes wait for space before they fail, in seconds; 0 if they do not wait.
    pub on_full_wait_s: u32,
    /// Generation of the lease that may write it.
    pub generation: u64,
    /// Sockets of its attachments.
    pub attached: Vec<String>,
    /// Names of the nodes that they are on, in the same order.
    pub attached_on: Vec<String>,
}

/// Creates a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VolumeCreate {
    /// Name of the new volume.
    pub name: String,
    /// Its size, a multiple of 512.
    pub size_bytes: u64,
    /// Pool; the default one if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// How long writes wait for space before they fail, in seconds; a minute if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_full_wait_s: Option<u32>,
}

/// Changes how a volume behaves, within seconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VolumeSet {
    /// How long writes wait for space before they fail, in seconds; 0 if they do not wait.
    pub on_full_wait_s: u32,
}

/// Changes a volume's size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VolumeResize {
    /// New size, a multiple of 512.
    pub size_bytes: u64,
    /// Allow it to be smaller than now: what lies beyond is lost.
    #[serde(default)]
    pub shrink: bool,
}

/// Changes a volume's name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VolumeRename {
    /// Its new name.
    pub name: String,
}

/// Query of an import.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ImportQuery {
    /// Size of the image in bytes, a multiple of 512.
    pub size_bytes: u64,
    /// Pool for a new volume; the default one if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Replace the content of an existing volume.
    #[serde(default)]
    pub replace: bool,
}

/// Query of an export.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ExportQuery {
    /// Go on over blocks that cannot be read: the stream has records of them, and zeroes in their place.
    #[serde(default)]
    pub skip_bad: bool,
    /// Copy although a guest is connected: the copy is not of one point in time.
    #[serde(default)]
    pub live: bool,
}

/// An attachment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Attachment {
    /// Name of the node that serves it.
    pub node: String,
    /// The vhost-user socket, or the link to a block device.
    pub socket: String,
    /// Name of the volume it serves.
    pub volume: String,
    /// Virtqueues offered.
    pub queues: u16,
    /// Entries of each virtqueue that requests are made to fit.
    pub queue_size: u16,
    /// Whether guests may only read.
    pub read_only: bool,
    /// Whether its guest's memory may be pinned for RDMA.
    pub pin_memory: bool,
    /// Whether the guest switched the write cache off: no write is acknowledged before it is durable.
    pub write_through: bool,
    /// Whether it waits to take the place of the attachment on another node.
    pub incoming: bool,
    /// Deadline of an incoming attachment, in milliseconds since 1970. Absent unless it is incoming.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at_ms: Option<u64>,
    /// Offer that lets another node take over, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offer: Option<Offer>,
    /// The block device of the node that it is (`/dev/vdb`), to which `socket` is a link then. Absent for a
    /// vhost-user socket, and while the device is not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_device: Option<String>,
    /// For how long the guest waited for the lease of the volume when it came here, in milliseconds; absent
    /// if it did not come from another node since the daemon started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub takeover_pause_ms: Option<u64>,
    /// State word.
    pub state: AttachmentState,
    /// Virtqueues that a guest has started.
    pub queues_running: u16,
    /// How the last connection ended, if not by the guest's hanging up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// Requests served since the daemon started.
    pub counters: Counters,
}

/// State word of an [`Attachment`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum AttachmentState {
    /// Waiting for a guest.
    Listening,
    /// A guest is connected.
    Connected,
    /// Being ended: requests of its guest are still under way.
    Detaching,
    /// The attachment could not be served; `health` tells why.
    Failed,
    /// It is another node's, which alone knows its state.
    Elsewhere,
}

/// Requests served.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Counters {
    /// Read requests.
    pub reads: u64,
    /// Write requests.
    pub writes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Flush requests.
    pub flushes: u64,
    /// Discard and write-zeroes requests.
    pub discards: u64,
    /// Requests that failed.
    pub errors: u64,
}

/// Attaches a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Attach {
    /// Name of the volume.
    pub volume: String,
    /// Absolute path of the socket to listen on; empty for a block device.
    #[serde(default)]
    pub socket: String,
    /// Make it a block device of the node itself, `/dev/penstock/VOLUME`, instead of a socket.
    #[serde(default)]
    pub block: bool,
    /// Virtqueues to offer.
    #[serde(default = "queues_default")]
    pub queues: u16,
    /// Size of the virtual machine's virtqueues, a power of two; QEMU's default if absent. It limits the
    /// segments of a request: a larger request hangs a guest without indirect descriptors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_size: Option<u16>,
    /// Let guests only read.
    #[serde(default)]
    pub read_only: bool,
    /// Pin the guest's memory where data go over RDMA; without, its data are copied once, and it keeps
    /// ballooning and overcommit.
    #[serde(default = "pin_memory_default")]
    pub pin_memory: bool,
    /// Take over the attachment of another node when its guest runs here: the destination of a live
    /// migration. That node must have offered the attachment to this node. Requests wait until the takeover.
    #[serde(default)]
    pub incoming: bool,
}

/// Moves an attachment that no guest uses to another node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Move {
    /// Socket of the attachment, or the name of its volume.
    pub target: String,
    /// Name or number of the node that is to serve it.
    pub to: String,
    /// Absolute path of the socket there; the same as here if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<String>,
}

/// An attachment that has moved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Moved {
    /// Name of the volume.
    pub volume: String,
    /// The vhost-user socket.
    pub socket: String,
    /// Name of the node that serves it now.
    pub node: String,
}

/// Whether a guest's memory is pinned when nothing is said.
fn pin_memory_default() -> bool {
    true
}

/// Virtqueues offered when nothing is said: one data path for each of a few vCPUs, at no cost while unused.
pub fn queues_default() -> u16 {
    4
}

/// Query of the attachments, those of volumes or those of filesystems.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct AttachmentsQuery {
    /// Those of all nodes; otherwise those of the node that is asked.
    #[serde(default)]
    pub everywhere: bool,
}

/// Query of a detach.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct DetachQuery {
    /// Socket of the attachment, or the name of its volume.
    pub target: String,
    /// Detach although a guest is connected.
    #[serde(default)]
    pub force: bool,
    /// Forget an attachment of another node that is down.
    #[serde(default)]
    pub forget: bool,
    /// Name or number of the attachment's node, if several have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
}

/// An attachment that was ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Detached {
    /// Name of the volume.
    pub volume: String,
    /// The vhost-user socket.
    pub socket: String,
    /// Name of the node.
    pub node: String,
}
