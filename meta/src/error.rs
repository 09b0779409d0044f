//! Errors of the metadata service. Messages are one line that names the culprit and gives a hint.

use std::path::PathBuf;
use std::time::Duration;

use uuid::Uuid;

use crate::ids::{NamespaceGroupId, NodeId};
use crate::level::Level;
use crate::reach::Reach;
use crate::refusal::Refusal;

/// Why a request had no result.
#[derive(Debug, Clone, thiserror::Error)]
pub enum MetaError {
    /// The request cannot be granted. Nothing was changed.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// No leader was found in time. Nothing was changed.
    #[error("{}", reach.no_leader(*waited, *is_command))]
    NoLeader {
        /// How long this call waited.
        waited: Duration,
        /// Whether something was to be changed.
        is_command: bool,
        /// Who could be reached then.
        reach: Reach,
    },
    /// No leader of a namespace group was found in time. What was to be done may be done yet; the same
    /// requests may be sent again.
    #[error(
        "namespace group {group} has had no leader for {} s{}: see that most of the nodes that vote in it \
         run and reach each other",
        waited.as_secs(),
        last.as_ref().map(|last| format!(" ({last})")).unwrap_or_default()
    )]
    NoGroupLeader {
        /// The group.
        group: NamespaceGroupId,
        /// How long this call waited.
        waited: Duration,
        /// What the node that was asked last said.
        last: Option<String>,
    },
    /// The leader was lost after it got the request.
    #[error(
        "the metadata leader was lost while it worked on the request, which may or may not be done{}: look, \
         then repeat",
        reach.in_brief()
    )]
    Interrupted {
        /// Who could be reached then.
        reach: Reach,
    },
    /// A node was removed, and the others still need its vote.
    #[error(
        "node {node} is removed, but the metadata service still counts on its vote: switch no node off \
         before most of the \
         others run and reach each other"
    )]
    StillVotes {
        /// Name of the node.
        node: String,
    },
    /// The file system under the metadata is full. The service waits, and goes on by itself.
    #[error(
        "the file system under {} is full and metadata cannot be written; {}", .dir.display(),
        if *.begun { "the request may be carried out later: free some space, check, then repeat" }
        else { "nothing was changed: free some space, then repeat" }
    )]
    NoSpace {
        /// Where the metadata lie.
        dir: PathBuf,
        /// Whether it may be done yet.
        begun: bool,
    },
    /// The metadata cannot be read or written; the node's metadata service has stopped.
    #[error(
        "the metadata service of this node stopped: {detail}; fix that, then restart the daemon"
    )]
    Failed {
        /// What went wrong.
        detail: String,
    },
    /// The node is shutting down.
    #[error("the metadata service of this node is shutting down: repeat when it is back")]
    Stopped,
}

/// Why the metadata of a node could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process has it open.
    #[error(
        "the metadata in {} is in use by another process: stop the other penstock daemon, or choose another \
         data \
         directory with --data", .dir.display()
    )]
    Locked {
        /// The directory.
        dir: PathBuf,
    },
    /// The directory or a file in it cannot be made, read or written.
    #[error("cannot open the metadata in {}: {detail}: check the path, its permissions and the free \
        space", .dir.display())]
    Io {
        /// The directory.
        dir: PathBuf,
        /// What failed.
        detail: String,
    },
    /// The content is damaged.
    #[error(
        "the metadata in {} is damaged: {detail}: if this node is one of several, remove it on another one \
         with `penstock \
         node remove` and join anew with another data directory, else bring back a copy of this one; nothing \
         was changed", .dir.display()
    )]
    Corrupt {
        /// The directory.
        dir: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// Made by a newer version.
    #[error(
        "the metadata in {} has format {found} and this version reads up to {known}: start the newer version \
         of \
         penstock again", .dir.display()
    )]
    NewerFormat {
        /// The directory.
        dir: PathBuf,
        /// Its format.
        found: u32,
        /// What is known here.
        known: u32,
    },
    /// All nodes of the cluster knew more than this program when this one ran last.
    #[error(
        "the metadata in {} are of a cluster with feature level {found}, and this version knows levels up to \
         {known}: start the newer \
         version of penstock again", .dir.display()
    )]
    NewerLevel {
        /// The directory.
        dir: PathBuf,
        /// Level of the cluster.
        found: Level,
        /// What is known here.
        known: Level,
    },
    /// Made by another node.
    #[error(
        "the metadata in {} belong to node {found}, not to node {configured}: correct the node id or the \
         data \
         directory", .dir.display()
    )]
    OtherNode {
        /// The directory.
        dir: PathBuf,
        /// Whose it is.
        found: NodeId,
        /// Who asked.
        configured: NodeId,
    },
    /// Made by a node that has peers, and to be opened as a cluster of one.
    #[error("the metadata in {} belong to node {found} of a cluster of several", .dir.display())]
    OneOfSeveral {
        /// The directory.
        dir: PathBuf,
        /// Whose it is.
        found: NodeId,
    },
    /// Made for another cluster.
    #[error(
        "the metadata in {} belong to cluster {found}, not to cluster {configured}: choose another data \
         directory", .dir.display()
    )]
    OtherCluster {
        /// The directory.
        dir: PathBuf,
        /// The cluster it belongs to.
        found: Uuid,
        /// The cluster to join.
        configured: Uuid,
    },
    /// Its log is not one that the others' was made from.
    #[error(
        "the metadata in {} are of history {found}, and this node is to be of {configured}: `penstock \
         cluster rejoin {configured}` puts them aside and gets them anew; after a recovery on this node that \
         was interrupted, repeat that", .dir.display()
    )]
    OtherHistory {
        /// The directory.
        dir: PathBuf,
        /// The history that it belongs to; all zero: the first one.
        found: Uuid,
        /// The node's.
        configured: Uuid,
    },
    /// The configuration makes no sense.
    #[error("the metadata configuration cannot be used: {detail}")]
    BadConfig {
        /// What is wrong.
        detail: String,
    },
    /// The service did not come up.
    #[error("the metadata in {} cannot be served: {source}", .dir.display())]
    Start {
        /// The directory.
        dir: PathBuf,
        /// Why not.
        source: MetaError,
    },
}
