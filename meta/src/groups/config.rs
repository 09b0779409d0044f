//! The types that openraft is put together from, for a namespace group.

use namespace::{Batch, FilesystemId, Reply};
use openraft::BasicNode;
use serde::{Deserialize, Serialize};

use crate::ids::NodeId;
use crate::raft::{GroupConfig, RaftHandle};
use crate::storage::snapshot::SnapshotFile;

/// What one log entry of a namespace group holds: operations on filesystems, applied in order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operations(pub Vec<(FilesystemId, Batch)>);

openraft::declare_raft_types!(
    /// Types of a Raft group that keeps namespaces. An entry is answered with the replies to all of its
    /// operations, in their order.
    pub NamespaceConfig:
        D = Operations,
        R = Vec<Reply>,
        NodeId = NodeId,
        Node = BasicNode,
        SnapshotData = SnapshotFile,
);

pub(crate) type Raft = RaftHandle<NamespaceConfig>;
pub(crate) type Entry = openraft::Entry<NamespaceConfig>;

/// Version of an entry in the log.
const ENTRY_VERSION: u8 = 1;

/// A version byte, then postcard.
impl GroupConfig for NamespaceConfig {
    fn encode_entry(entry: &Entry) -> Vec<u8> {
        postcard::to_extend(entry, vec![ENTRY_VERSION]).expect("a vector takes any entry")
    }

    fn decode_entry(bytes: &[u8]) -> Result<Entry, String> {
        let (version, rest) = bytes.split_first().ok_or("it is empty")?;
        if *version != ENTRY_VERSION {
            return Err(format!(
                "it has version {version}, and this program knows {ENTRY_VERSION}: it is damaged, or a \
                 newer program wrote it"
            ));
        }
        match postcard::take_from_bytes(rest) {
            Ok((entry, [])) => Ok(entry),
            Ok(_) => Err("bytes are left over".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }
}
