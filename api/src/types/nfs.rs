//! NFS exports in the admin API.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::moment::Moment;

/// File system of an export.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum ExportFs {
    /// XFS with project quotas.
    #[default]
    Xfs,
}

/// Exports a volume over NFS.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportCreate {
    /// Name of the export: clients mount `ADDRESS:/NAME`.
    pub name: String,
    /// Name of the volume. It is empty, or has the file system already.
    pub volume: String,
    /// Size of a volume that is to be created. Absent: it exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// Pool of a volume that is to be created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// File system that an empty volume gets.
    #[serde(default)]
    pub fs: ExportFs,
    /// Networks of clients that may mount it, such as `10.0.0.0/24`. That of the address if there are none.
    #[serde(default)]
    pub clients: Vec<String>,
    /// Let clients only read.
    #[serde(default)]
    pub read_only: bool,
    /// Do as nobody what root of a client does.
    #[serde(default = "root_squash_default")]
    pub root_squash: bool,
    /// Address that moves with the export, with the prefix of its network, such as `10.0.0.9/24`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
}

fn root_squash_default() -> bool {
    true
}

/// Moves an export to another NFS node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportMove {
    /// Name or number of the NFS node that is to serve it.
    pub to: String,
}

/// How an export is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ExportShownState {
    /// Clients are served.
    Served,
    /// Its NFS node is about to serve it.
    Starting,
    /// Another NFS node has it still.
    Moving,
    /// Clients wait; `problem` says why.
    Down,
    /// Its NFS node takes it down.
    Deleting,
}

/// An NFS export.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Export {
    /// Its name.
    pub name: String,
    /// Name of its volume.
    pub volume: String,
    /// Name of the NFS node that serves it, or is to.
    pub node: String,
    /// How it is.
    pub state: ExportShownState,
    /// Why clients wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Networks of clients that may mount it.
    pub clients: Vec<String>,
    /// Address that moves with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Clients only read.
    pub read_only: bool,
    /// What root of a client does is done as nobody.
    pub root_squash: bool,
    /// Identity of its file system towards clients.
    pub fsid: String,
    /// Bytes of its file system; reported by its NFS node alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// Bytes that are free in it, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<u64>,
    /// When it was made.
    pub created_at: Moment,
}

/// A node as an NFS node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NfsStatus {
    /// Name of the node.
    pub node: String,
    /// Whether it has the role.
    pub is_nfs_node: bool,
    /// Why it cannot serve exports; nothing if it can.
    pub missing: Vec<String>,
    /// Its RDMA devices: without one it serves over TCP alone.
    pub rdma_devices: Vec<String>,
    /// Its NFS server, if that runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<NfsServer>,
    /// Exports that it serves, or is to.
    pub exports: Vec<Export>,
    /// All NFS nodes of the cluster.
    pub nodes: Vec<NfsNode>,
}

/// The NFS server of an NFS node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NfsServer {
    /// Its threads.
    pub threads: u32,
    /// Where it listens: protocol and port.
    pub ports: Vec<String>,
    /// Clients that have something open or mounted.
    pub clients: u32,
    /// Clients may reclaim what they had open before it started; nothing new is opened.
    pub in_grace: bool,
}

/// An NFS node of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NfsNode {
    /// Name of the node.
    pub node: String,
    /// Whether it is heard of.
    pub is_up: bool,
    /// Exports that it serves, or is to.
    pub exports: usize,
}
