//! Types that openraft is put together from, and timing of the groups.

use std::sync::Arc;
use std::time::Duration;

use fabric_types::ids::NodeId;
use openraft::{BasicNode, SnapshotPolicy};
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::storage::SnapshotFile;

openraft::declare_raft_types!(
    /// Types of all Raft groups of a node.
    pub TypeConfig:
        D = CommandBytes,
        R = Vec<u8>,
        NodeId = NodeId,
        Node = BasicNode,
        SnapshotData = SnapshotFile,
);

/// Log entry.
pub type Entry = openraft::Entry<TypeConfig>;
/// Position of a log entry.
pub type LogId = openraft::LogId<NodeId>;
/// Vote of a node.
pub type Vote = openraft::Vote<NodeId>;
/// Membership, and the log entry that set it.
pub type StoredMembership = openraft::StoredMembership<NodeId, BasicNode>;
/// Description of a snapshot.
pub type SnapshotMeta = openraft::SnapshotMeta<NodeId, BasicNode>;
/// Failed access to a group's storage, as openraft reports it.
pub type StorageError = openraft::StorageError<NodeId>;

/// Encoded command of a group. The group's state machine knows the encoding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandBytes(pub Vec<u8>);

impl Serialize for CommandBytes {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        // A vector would be written byte by byte.
        to.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for CommandBytes {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = Vec<u8>;

            fn expecting(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                to.write_str("bytes")
            }

            fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Vec<u8>, E> {
                Ok(bytes.to_vec())
            }

            fn visit_byte_buf<E: Error>(self, bytes: Vec<u8>) -> Result<Vec<u8>, E> {
                Ok(bytes)
            }
        }
        from.deserialize_byte_buf(Bytes).map(Self)
    }
}

/// Version of an entry in the log.
const ENTRY_VERSION: u8 = 1;

/// Encodes a log entry: a version byte, then postcard.
pub(crate) fn encode_entry(entry: &Entry) -> Vec<u8> {
    postcard::to_extend(entry, vec![ENTRY_VERSION]).expect("a vector takes any entry")
}

/// Decodes a log entry.
///
/// # Errors
/// The bytes are damaged, or of another version.
pub(crate) fn decode_entry(bytes: &[u8]) -> Result<Entry, String> {
    let (version, rest) = bytes.split_first().ok_or("it is empty")?;
    if *version != ENTRY_VERSION {
        return Err(format!(
            "it has version {version}, and this program knows {ENTRY_VERSION}: it is damaged, or a newer \
             program wrote it"
        ));
    }
    match postcard::take_from_bytes(rest) {
        Ok((entry, [])) => Ok(entry),
        Ok(_) => Err("bytes are left over".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Largest piece of a snapshot in one message.
const SNAPSHOT_CHUNK_BYTES: u64 = 1 << 20;
/// A follower this many entries behind gets a snapshot, unless the log that it lacks is still there.
const LAG_ENTRIES_MAX: u64 = 20_000;

/// Timing and bounds of a Raft group, the same on every node of a cluster.
#[derive(Debug, Clone)]
pub struct RaftTuning {
    /// Interval of the leader's heartbeats.
    pub heartbeat: Duration,
    /// A follower that hears from no leader for three to four times this long seeks election. For twice this
    /// long after it heard from a leader it votes for no other node.
    pub election_timeout: Duration,
    /// Longest time to send and store one piece of a snapshot.
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
    /// Time for which a node that heard from a leader votes for no other node.
    #[must_use]
    pub fn vote_hold(&self) -> Duration {
        self.election_timeout * 2
    }

    /// Settings of a group with at most `message_entries` entries in one message.
    ///
    /// # Errors
    /// The times do not fit each other.
    pub fn to_config(&self, message_entries: u64) -> Result<Arc<openraft::Config>, String> {
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

#[cfg(test)]
mod tests {
    use openraft::{CommittedLeaderId, EntryPayload};

    use super::*;

    fn entry(bytes: usize) -> Entry {
        Entry {
            log_id: LogId::new(CommittedLeaderId::new(1, NodeId(1)), 3),
            payload: EntryPayload::Normal(CommandBytes(vec![0xff; bytes])),
        }
    }

    #[test]
    fn an_entry_of_another_version_is_refused() {
        let mut bytes = encode_entry(&entry(9));
        assert_eq!(decode_entry(&bytes), Ok(entry(9)));
        bytes.push(0);
        assert!(decode_entry(&bytes).is_err());
        bytes.pop();
        bytes[0] += 1;
        let refused = decode_entry(&bytes).unwrap_err();
        assert!(refused.contains("version 2"), "{refused}");
        assert!(decode_entry(&[]).is_err());
    }

    #[test]
    fn a_command_takes_no_more_bytes_in_an_entry_than_it_has() {
        let (empty, full) = (encode_entry(&entry(0)), encode_entry(&entry(100)));
        assert_eq!(full.len(), empty.len() + 100);
    }
}
