//! NFS exports of volumes.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::Name;
use crate::ids::{NodeId, UnixMillis, VolumeId};

/// Life of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExportState {
    /// To be served.
    Active,
    /// Its NFS node takes it down; then it is forgotten.
    Deleting,
}

/// A volume with a file system that clients mount over NFS. Its volume is neither deleted nor shrunk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Export {
    /// Its name.
    pub name: Name,
    /// The volume's name.
    pub volume: Name,
    /// The volume's number.
    pub volume_id: VolumeId,
    /// Identity of its file system towards clients.
    pub fsid: Uuid,
    /// The NFS node that is to serve it. It does once it has the volume's lease.
    pub node: NodeId,
    /// Networks of clients that may mount it.
    pub clients: Vec<String>,
    /// Clients may only read.
    pub read_only: bool,
    /// What a client's root does is done as nobody.
    pub root_squash: bool,
    /// The address that follows it, with the prefix of its network.
    pub address: Option<String>,
    /// Life of the export.
    pub state: ExportState,
    /// When it was made.
    pub created_at: UnixMillis,
}
