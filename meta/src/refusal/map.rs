//! Why the cluster, its nodes and devices do not change.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{MAX_ADDRESS_BYTES, MAX_DEVICE_PATH_BYTES, NamedNode, RefusalKind};
use crate::ids::{DeviceId, Incarnation, NamespaceGroupId, NodeId};
use crate::level::Level;
use crate::model::Role;
use crate::watch::NODE_DOWN_AFTER;

/// Refusals about the cluster, its nodes and devices.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MapRefusal {
    /// Nothing can be done before the cluster is made.
    #[error("the cluster is not set up yet: start its first node")]
    NoCluster,
    /// A second cluster over the first.
    #[error("this is cluster {ours}, not {theirs}: use another data directory for another cluster")]
    OtherCluster {
        /// The cluster that exists.
        ours: Uuid,
        /// The one asked for.
        theirs: Uuid,
    },
    /// A node without any role.
    #[error("node {node} has no role: give it at least one of meta, storage, host, nfs")]
    NoRole {
        /// The node.
        node: NamedNode,
    },
    /// A name that another node bears.
    #[error(
        "node name {name:?} is taken: give this node another name; if the name belongs to an earlier attempt \
         of this machine to join, which `penstock node list` shows as not started, run `penstock node \
         remove {name}` and join again"
    )]
    NodeNameTaken {
        /// The name.
        name: String,
        /// Node that has the name.
        holder: NodeId,
    },
    /// An address or version beyond [`MAX_ADDRESS_BYTES`].
    #[error("node {node}: {text:?}... is too long: give at most {MAX_ADDRESS_BYTES} bytes")]
    LongAddress {
        /// The node.
        node: NamedNode,
        /// Its beginning.
        text: String,
    },
    /// A node that is not in the cluster.
    #[error("node {} is not in the cluster: see `penstock node list`", shown(*node, name))]
    UnknownNode {
        /// The node.
        node: NodeId,
        /// Its name on that node, and its number elsewhere.
        name: String,
    },
    /// Another start of the node's process has registered.
    #[error("node {node} runs as start {known:x}, not {claimed:x}: an older process sent this, or a \
         newer one has not registered yet", known = .known.0, claimed = .claimed.0)]
    OtherStart {
        /// The node.
        node: NamedNode,
        /// The start that is known.
        known: Incarnation,
        /// The one that was named.
        claimed: Incarnation,
    },
    /// The node was removed for good.
    #[error(
        "node {} was removed from the cluster: join again with a new token and another data directory",
        shown(*node, name)
    )]
    WasRemoved {
        /// The node.
        node: NodeId,
        /// Its name on that node, and its number elsewhere.
        name: String,
    },
    /// The node starts with roles that its join token did not grant.
    #[error(
        "node {} was granted the roles {}, and starts as {}: start it with `--roles {}`, or remove it \
         and join anew with a token \
         that grants them",
        shown(*node, name),
        Role::list(granted),
        Role::list(asked),
        Role::list(granted)
    )]
    RolesNotGranted {
        /// The node.
        node: NodeId,
        /// Its name.
        name: String,
        /// What it says.
        asked: BTreeSet<Role>,
        /// What it may have.
        granted: BTreeSet<Role>,
    },
    /// The program that the node runs does not know what all others do.
    #[error(
        "node {} runs a version of penstock that knows feature level {knows}, and this cluster has level \
         {level}: install a newer \
         version there",
        shown(*node, name)
    )]
    TooOld {
        /// The node.
        node: NodeId,
        /// Its name.
        name: String,
        /// What it knows.
        knows: Level,
        /// That of the cluster.
        level: Level,
    },
    /// The only node.
    #[error("node {node} is the only one: it stays")]
    LastNode {
        /// The node.
        node: NamedNode,
    },
    /// A node that is up and serves guests.
    #[error(
        "node {node} serves {socket:?}: detach that first, or stop the node; to take its attachments from a \
         node that does not detach them, repeat this with --evict"
    )]
    NodeServes {
        /// The node.
        node: NamedNode,
        /// Socket of one of its attachments.
        socket: String,
    },
    /// A node that is up, as far as is known, and holds data of volumes.
    #[error(
        "node {node} is up and holds data of volumes in pool {pool:?}: empty it first with `penstock node \
         drain`; if it has \
         died, repeat this in a moment, for it counts as down {} s after it was heard of last",
        NODE_DOWN_AFTER.as_secs()
    )]
    NodeInUse {
        /// The node.
        node: NamedNode,
        /// A pool with volumes and placement groups on it.
        pool: String,
    },
    /// A namespace group could not agree on anything without it.
    #[error(
        "node {node} is needed to keep the names of filesystems: without it most of those that vote in \
         namespace group {group} are not up; start the others, or empty it first with `penstock node drain` \
         and repeat this in a moment"
    )]
    GroupNeedsNode {
        /// The node.
        node: NamedNode,
        /// The group.
        group: NamespaceGroupId,
    },
    /// The others could not hold all replicas.
    #[error(
        "without node {node} pool {pool:?} could place {possible} of {replicas} replicas on different \
         {apart}s: add one \
         first"
    )]
    TooFewLeft {
        /// The node.
        node: NamedNode,
        /// The pool.
        pool: String,
        /// How many replicas the others could hold.
        possible: usize,
        /// Replicas of the pool.
        replicas: u8,
        /// The pool's failure domain.
        apart: String,
    },
    /// The other devices could not hold all replicas.
    #[error(
        "without device {device} pool {pool:?} could place {possible} of {replicas} replicas on different \
         {apart}s: add one \
         first"
    )]
    TooFewDevicesLeft {
        /// The device.
        device: DeviceId,
        /// The pool.
        pool: String,
        /// How many replicas the others could hold.
        possible: usize,
        /// Replicas of the pool.
        replicas: u8,
        /// The pool's failure domain.
        apart: String,
    },
    /// A device that is not in the cluster.
    #[error("device {device} is not in the cluster: see `penstock device list`")]
    UnknownDevice {
        /// The device.
        device: DeviceId,
    },
    /// A path that is not absolute, empty, too long or with a NUL.
    #[error(
        "device path {path:?} cannot be used: give an absolute path of at most {MAX_DEVICE_PATH_BYTES} bytes"
    )]
    BadDevicePath {
        /// The path.
        path: String,
    },
    /// Another device of the cluster is known to be there.
    #[error(
        "{path:?} on node {node} was device {device} and now holds another one: bring the old one back, or \
         give it up \
         with `penstock device remove {device}`"
    )]
    DevicePathTaken {
        /// The path.
        path: String,
        /// The node.
        node: NamedNode,
        /// The device that was there.
        device: DeviceId,
    },
    /// A device without space.
    #[error("device {path:?} has a size of 0 bytes: give a device or file with space")]
    EmptyDevice {
        /// The path.
        path: String,
    },
    /// A device that holds data of volumes.
    #[error(
        "device {device} holds data of volumes in pool {pool:?}: empty it first with `penstock device \
         remove` or `penstock \
         node drain`, and wait until that is done"
    )]
    DeviceInUse {
        /// The device.
        device: DeviceId,
        /// A pool with volumes and placement groups on it.
        pool: String,
    },
}

/// Name of a node, or its number if the name is not known.
fn shown(node: NodeId, name: &str) -> String {
    match name {
        "" => node.to_string(),
        name => name.to_owned(),
    }
}

impl MapRefusal {
    /// A refusal about a node that no record names.
    pub(crate) fn unknown_node(node: NodeId) -> Self {
        let name = node.to_string();
        Self::UnknownNode { node, name }
    }

    /// A refusal of a node that no record names any more.
    pub(crate) fn was_removed(node: NodeId) -> Self {
        let name = node.to_string();
        Self::WasRemoved { node, name }
    }

    /// The refusal with the name that a node has for itself: records do not name a node that is not in the
    /// cluster.
    pub(crate) fn naming(mut self, this: NodeId, this_name: &str) -> Self {
        if let Self::UnknownNode { node, name } | Self::WasRemoved { node, name } = &mut self
            && *node == this
        {
            this_name.clone_into(name);
        }
        self
    }

    pub(super) fn kind(&self) -> RefusalKind {
        match self {
            Self::NoRole { .. }
            | Self::LongAddress { .. }
            | Self::BadDevicePath { .. }
            | Self::EmptyDevice { .. } => RefusalKind::Invalid,
            Self::UnknownNode { .. } | Self::UnknownDevice { .. } => RefusalKind::NotFound,
            Self::NoCluster
            | Self::OtherCluster { .. }
            | Self::NodeNameTaken { .. }
            | Self::OtherStart { .. }
            | Self::WasRemoved { .. }
            | Self::TooOld { .. }
            | Self::RolesNotGranted { .. }
            | Self::LastNode { .. }
            | Self::NodeServes { .. }
            | Self::NodeInUse { .. }
            | Self::GroupNeedsNode { .. }
            | Self::TooFewLeft { .. }
            | Self::TooFewDevicesLeft { .. }
            | Self::DevicePathTaken { .. }
            | Self::DeviceInUse { .. } => RefusalKind::Conflict,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_has_its_own_name_in_refusals_and_others_keep_their_numbers() {
        let (this, other) = (NodeId(2), NodeId(3));
        for refusal in [MapRefusal::unknown_node, MapRefusal::was_removed] {
            let text = |node| refusal(node).naming(this, "two").to_string();
            assert!(text(this).starts_with("node two "), "{}", text(this));
            assert!(text(other).starts_with("node 3 "), "{}", text(other));
        }
    }
}
