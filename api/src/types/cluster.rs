//! Nodes, devices, pools and events in the admin API.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::moment::Moment;

/// A node of the cluster.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ClusterNode {
    /// Its number.
    pub id: u64,
    /// Its name.
    pub name: String,
    /// Whether it is heard of.
    pub state: NodeState,
    /// Since when; absent if that was too long ago to be kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Moment>,
    /// Whether it may hold data.
    pub admin_state: NodeAdminState,
    /// Milliseconds since it was heard of last; absent while nobody leads, or if it was not heard of under
    /// this leader.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heard_ms_ago: Option<u64>,
    /// Its roles.
    pub roles: Vec<String>,
    /// The machine that it runs on, if that carries several nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The rack that it stands in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rack: Option<String>,
    /// Where peers reach its metadata service; empty without peers.
    pub control_address: String,
    /// Where hosts reach its devices; empty if nobody else does.
    pub data_address: String,
    /// Version of the software that it runs.
    pub version: String,
    /// When it joined.
    pub joined_at: Moment,
    /// Its part in the metadata service.
    pub meta: MetaPart,
    /// Placement groups that have a replica on it, those that are leaving it included.
    pub groups: usize,
    /// Placement groups in all.
    pub groups_total: usize,
    /// Of a node that is being emptied: groups with data that are still to leave it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups_left: Option<usize>,
    /// Seconds that emptying it will take at the present rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_s: Option<u64>,
    /// Attachments that it serves.
    pub attachments: usize,
    /// Its devices.
    pub devices: Vec<Device>,
}

/// Whether a [`ClusterNode`] is heard of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum NodeState {
    /// It sends heartbeats.
    Up,
    /// It does not.
    Down,
    /// The node joined, and was never started.
    NotStarted,
}

/// Whether a [`ClusterNode`] may hold data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum NodeAdminState {
    /// It holds its share.
    Active,
    /// It was away too long: others take its share until it returns.
    Absent,
    /// It is being emptied.
    Draining,
}

/// What a [`ClusterNode`] does in the metadata service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum MetaPart {
    /// It leads, and votes.
    Leader,
    /// It votes.
    Voter,
    /// It has the metadata and does not vote.
    Learner,
    /// Nothing.
    None,
}

/// Empties a node, or calls that off.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Drain {
    /// Whether it is to be emptied; else it may hold data again.
    pub on: bool,
}

/// Lets I/O go on after a restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Resume {
    /// Though not all devices are back that the backup knew.
    pub without_missing: bool,
}

/// A device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Device {
    /// Its number in the cluster; absent before its node has opened it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<u64>,
    /// Name of its node.
    pub node: String,
    /// Path of the block device or file on that node.
    pub path: String,
    /// Kind of device, matched with a pool's class.
    pub class: String,
    /// State word.
    pub state: DeviceState,
    /// Why its node runs without it, with a hint; only of this node's devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Placement groups that have a replica on it, those that are leaving it included.
    pub groups: usize,
    /// Of a device that is being emptied: groups with data that are still to leave it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups_left: Option<usize>,
    /// Bytes it can hold.
    pub capacity_bytes: u64,
    /// Bytes in use; absent while its node does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<u64>,
    /// Bytes free; absent while its node does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<u64>,
    /// Memory that its map takes in the daemon; only of this node's devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// The scrub's progress; only of this node's devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub: Option<Scrub>,
}

/// State word of a [`Device`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum DeviceState {
    /// In service.
    Ok,
    /// In service, with errors seen; `health` tells which.
    Degraded,
    /// In service and being emptied.
    Draining,
    /// Not served: its node is down, or does not have it.
    Offline,
    /// Not used any more because it returned errors.
    Failed,
    /// Added, and not in service yet: it is being made, the cluster does not know it yet, it could not be
    /// opened, or the next start of its daemon opens it.
    Pending,
    /// Removed: nothing is stored there any more.
    Removed,
    /// Benchmarks only: stores nothing.
    Null,
}

impl DeviceState {
    /// The word.
    pub fn word(self) -> &'static str {
        match self {
            DeviceState::Ok => "ok",
            DeviceState::Degraded => "degraded",
            DeviceState::Draining => "draining",
            DeviceState::Offline => "offline",
            DeviceState::Failed => "failed",
            DeviceState::Pending => "pending",
            DeviceState::Removed => "removed",
            DeviceState::Null => "null",
        }
    }
}

/// Where a scrub is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ScrubState {
    /// A pass over the device is under way.
    Running,
    /// The next pass begins by itself.
    #[default]
    Resting,
    /// No pass begins by itself.
    Off,
}

/// Begins a pass of the scrub over a device, or ends the one that is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ScrubSet {
    /// Whether a pass begins, from the beginning of the device; else the one that is under way ends.
    pub run: bool,
}

/// What the scrub has seen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Scrub {
    /// Where it is.
    pub state: ScrubState,
    /// Blocks that the pass which is under way has compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass_blocks: Option<u64>,
    /// Seconds until the next pass begins by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_s: Option<u64>,
    /// Complete passes since the daemon started.
    pub passes: u64,
    /// Blocks compared with their checksum since the daemon started.
    pub blocks: u64,
    /// Blocks that failed.
    pub errors: u64,
    /// Bad blocks that were written again from another replica since the daemon started.
    pub repaired: u64,
    /// Blocks that are bad still, 1,024 at most; where other nodes have replicas those that reads have met
    /// are among them.
    pub bad: u64,
}

/// Adds a device to the node that is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceAdd {
    /// Absolute path of a block device or file.
    pub path: String,
    /// Size of the file that is made if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
}

/// A pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Pool {
    /// Name.
    pub name: String,
    /// Copies of each chunk.
    pub replicas: u8,
    /// Copies that must be in sync for a write to be acknowledged.
    pub min_in_sync: u8,
    /// What copies must not share.
    pub failure_domain: FailureDomain,
    /// Class of the devices used; every class if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    /// When it was made.
    pub created_at: Moment,
    /// Volumes in it.
    pub volumes: usize,
    /// Its placement groups, counted.
    pub groups: Groups,
    /// Devices that it may use.
    pub devices: usize,
    /// Of these, the sum of what they can hold, all copies counted.
    pub capacity_bytes: u64,
    /// What is in use on them, by whatever pool.
    pub used_bytes: u64,
    /// What is free on them.
    pub free_bytes: u64,
    /// What volumes can hold altogether: the sum of the devices, by the number of copies.
    pub usable_bytes: u64,
    /// Of that, what is free.
    pub usable_free_bytes: u64,
    /// Sizes of its volumes, each counted once: what they may come to hold.
    pub provisioned_bytes: u64,
    /// Devices among them whose use is not known, because their nodes do not report it.
    pub devices_unreported: usize,
}

/// What copies in a [`Pool`] must not share.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum FailureDomain {
    /// Copies may lie on one node. Only for pools of one copy: several copies on one node are not supported.
    Device,
    /// Copies lie on different nodes.
    #[default]
    Node,
    /// Copies lie on different hosts, as nodes are labelled.
    Host,
    /// Copies lie in different racks, as nodes are labelled.
    Rack,
}

/// Placement groups of a [`Pool`], counted. One may be counted in several of the latter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Groups {
    /// All.
    pub total: usize,
    /// With as many copies in sync as the pool wants.
    pub in_sync: usize,
    /// With fewer.
    pub degraded: usize,
    /// With fewer than a write needs: writes to them wait.
    pub waiting: usize,
    /// With a copy being brought up to date.
    pub syncing: usize,
    /// With a copy that leaves its device for another.
    pub moving: usize,
}

/// Makes a pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolCreate {
    /// Its name.
    pub name: String,
    /// Copies of each chunk.
    #[serde(default = "replicas_default")]
    pub replicas: u8,
    /// Copies that must be in sync for a write to be acknowledged; a majority if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_in_sync: Option<u8>,
    /// What copies must not share.
    #[serde(default)]
    pub failure_domain: FailureDomain,
    /// Class of the devices used; every class if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
}

/// Changes a pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolSet {
    /// Copies of each chunk; as before if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u8>,
    /// Copies that must be in sync for a write to be acknowledged; as before if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_in_sync: Option<u8>,
}

/// Copies when nothing is said: what survives the loss of any two nodes, and goes on without any one.
pub fn replicas_default() -> u8 {
    3
}

/// Who asked for what happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventAuthor {
    /// Number of the node that was asked, or that did it by itself.
    pub node: u64,
    /// What people call that node.
    pub node_name: String,
    /// The user of that node who asked; absent if the node did it by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// They forced it: an attachment of a node that was down was forgotten. Absent if not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub forced: bool,
}

/// Query of the events.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct EventsQuery {
    /// Those after the event of this number, oldest first; absent: the newest.
    pub after: Option<u64>,
    /// Only those from this moment on, in milliseconds since 1970.
    pub since_ms: Option<u64>,
    /// The most events to list. Default: 100, or with `since_ms` all that are kept.
    pub limit: Option<usize>,
}

/// Events told when nothing is said: a screenful or two.
pub const EVENTS_TOLD: usize = 100;

/// Something that happened in the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Its number: one more than that of the event before.
    pub number: u64,
    /// When, by the clock of whoever noticed.
    pub at: Moment,
    /// What it happened to, by its present name.
    pub subject: String,
    /// What sort of event it is.
    pub kind: String,
    /// What happened.
    pub text: String,
    /// Number of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<u64>,
    /// Number of the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<u64>,
    /// Name of the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Placement groups that it concerns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups: Option<u32>,
    /// Name of the volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// Name of the filesystem.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filesystem: Option<String>,
    /// Who asked for it, if somebody did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<EventAuthor>,
}

/// Query of a device's removal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct DeviceRemoveQuery {
    /// Call it off: the device may hold data again.
    #[serde(default)]
    pub off: bool,
    /// Of a device that is not served: give up what only that has, and forget it.
    #[serde(default)]
    pub accept_data_loss: bool,
}

/// Query of a node's removal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct NodeRemoveQuery {
    /// Of a node that is down: give up what only that has.
    #[serde(default)]
    pub accept_data_loss: bool,
    /// For a node that is up: delete its attachments.
    #[serde(default)]
    pub evict: bool,
}
