//! The types that openraft is put together from, and its timing.

mod handle;

use std::sync::Arc;
use std::time::Duration;

use openraft::impls::OneshotResponder;
use openraft::{BasicNode, RaftTypeConfig, SnapshotPolicy, TokioRuntime};

use crate::command::{Command, Reply};
use crate::ids::NodeId;
use crate::storage::snapshot::SnapshotFile;

pub(crate) use handle::RaftHandle;

openraft::declare_raft_types!(
    /// Types of the metadata's Raft group.
    pub TypeConfig:
        D = Command,
        R = Reply,
        NodeId = NodeId,
        Node = BasicNode,
        SnapshotData = SnapshotFile,
);

/// What all Raft groups of a node have in common, and how a log entry is written.
pub(crate) trait GroupConfig:
    RaftTypeConfig<
        NodeId = NodeId,
        Node = BasicNode,
        Entry = openraft::Entry<Self>,
        SnapshotData = SnapshotFile,
        AsyncRuntime = TokioRuntime,
        Responder = OneshotResponder<Self>,
    >
{
    /// The bytes of a log entry.
    fn encode_entry(entry: &openraft::Entry<Self>) -> Vec<u8>;

    /// A log entry from its bytes.
    ///
    /// # Errors
    /// What is wrong with them.
    fn decode_entry(bytes: &[u8]) -> Result<openraft::Entry<Self>, String>;
}

impl GroupConfig for TypeConfig {
    fn encode_entry(entry: &Entry) -> Vec<u8> {
        serde_json::to_vec(entry).expect("commands have text keys and finite numbers only")
    }

    fn decode_entry(bytes: &[u8]) -> Result<Entry, String> {
        serde_json::from_slice(bytes).map_err(|error| error.to_string())
    }
}

/// The Raft machine of this node.
pub(crate) type Raft = RaftHandle<TypeConfig>;
pub(crate) type Entry = openraft::Entry<TypeConfig>;
pub(crate) type LogId = openraft::LogId<NodeId>;
pub(crate) type Vote = openraft::Vote<NodeId>;
pub(crate) type StoredMembership = openraft::StoredMembership<NodeId, BasicNode>;
pub(crate) type SnapshotMeta = openraft::SnapshotMeta<NodeId, BasicNode>;
pub(crate) type StorageError = openraft::StorageError<NodeId>;

/// Largest piece of a snapshot in one message.
const SNAPSHOT_CHUNK_BYTES: u64 = 1 << 20;
/// A follower this many entries behind gets a snapshot, unless the log that it lacks is still there.
const LAG_ENTRIES_MAX: u64 = 20_000;
/// Most entries in one message of the cluster map's group.
pub(crate) const MESSAGE_ENTRIES_MAX: u64 = 256;
/// The same of a namespace group, whose entries have up to 512 KiB: a message has up to 8 MiB.
pub(crate) const NAMESPACE_MESSAGE_ENTRIES_MAX: u64 = 16;

/// See [`RaftTuning::snapshot_every_entries`] and [`RaftTuning::keep_entries`].
const NAMESPACE_SNAPSHOT_ENTRIES: u64 = 2_000;
const NAMESPACE_KEEP_ENTRIES: u64 = 500;

/// Timing and bounds of the Raft group, the same on every node of a cluster.
#[derive(Debug, Clone)]
pub struct RaftTuning {
    /// The leader says this often that it lives.
    pub heartbeat: Duration,
    /// A follower that heard nothing for three to four times this long seeks election: for twice as long it
    /// votes for nobody else.
    pub election_timeout: Duration,
    /// Longest time for one piece of a snapshot to be sent and taken.
    pub snapshot_timeout: Duration,
    /// A snapshot is made after this many entries.
    pub snapshot_every_entries: u64,
    /// This many entries stay in the log after they are in a snapshot, for followers that were away shortly.
    pub keep_entries: u64,
}

impl Default for RaftTuning {
    /// A leader that is silent for 0.75 to 1 s is replaced, one whose process is known to be gone after half
    /// a second. A disk that takes longer than that for one write of the log loses its node the lead, which
    /// stops changes of metadata that long, and no I/O.
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_millis(100),
            election_timeout: Duration::from_millis(250),
            snapshot_timeout: Duration::from_secs(10),
            snapshot_every_entries: 10_000,
            keep_entries: 2_000,
        }
    }
}

impl RaftTuning {
    /// Who has heard of a leader votes for nobody else for so long.
    pub(crate) fn vote_hold(&self) -> Duration {
        self.election_timeout * 2
    }

    /// The same for a namespace group. Its entries are much longer, so that fewer of them are kept.
    pub(crate) fn of_namespaces(&self) -> Self {
        Self {
            snapshot_every_entries: self.snapshot_every_entries.min(NAMESPACE_SNAPSHOT_ENTRIES),
            keep_entries: self.keep_entries.min(NAMESPACE_KEEP_ENTRIES),
            ..self.clone()
        }
    }

    /// The settings of a group whose messages have at most so many entries.
    pub(crate) fn to_config(&self, message_entries: u64) -> Result<Arc<openraft::Config>, String> {
        let config = openraft::Config {
            cluster_name: "penstock-meta".to_owned(),
            heartbeat_interval: millis(self.heartbeat),
            election_timeout_min: millis(self.election_timeout),
            election_timeout_max: millis(self.vote_hold()),
            install_snapshot_timeout: millis(self.snapshot_timeout),
            max_payload_entries: message_entries,
            replication_lag_threshold: LAG_ENTRIES_MAX.max(self.snapshot_every_entries * 2),
            snapshot_policy: SnapshotPolicy::LogsSinceLast(self.snapshot_every_entries),
            snapshot_max_chunk_size: SNAPSHOT_CHUNK_BYTES,
            max_in_snapshot_log_to_keep: self.keep_entries,
            ..Default::default()
        };
        let config = config.validate().map_err(|error| error.to_string())?;
        Ok(Arc::new(config))
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
