//! What happened in the cluster, for people to read.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Name;
use crate::ids::{DeviceId, NodeId, UnixMillis};
use crate::level::Level;

/// The log keeps this many events; an older one is dropped when a newer comes.
pub const EVENTS_MAX: u64 = 4096;

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Its number: one more than that of the event before. The cursor to read on from.
    pub number: u64,
    /// When, by the clock of whoever noticed.
    pub at: UnixMillis,
    /// What.
    pub what: EventKind,
}

/// What can happen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum EventKind {
    /// A join token was used: the node that bore it got this number.
    NodeAdmitted {
        /// The node.
        node: NodeId,
    },
    /// A node joined.
    NodeJoined {
        /// The node.
        node: NodeId,
    },
    /// A node's process started again.
    NodeRestarted {
        /// The node.
        node: NodeId,
    },
    /// A node is heard of again.
    NodeUp {
        /// The node.
        node: NodeId,
    },
    /// A node is not heard of any more.
    NodeDown {
        /// The node.
        node: NodeId,
    },
    /// A node was away so long that its share is given to others.
    NodeReplaced {
        /// The node.
        node: NodeId,
    },
    /// A node is to be emptied.
    NodeDraining {
        /// The node.
        node: NodeId,
    },
    /// A node may hold data again.
    NodeActive {
        /// The node.
        node: NodeId,
    },
    /// All nodes know a higher feature level than before: the cluster uses it.
    LevelRaised {
        /// The level.
        to: Level,
    },
    /// A node was removed.
    NodeRemoved {
        /// The node.
        node: NodeId,
    },
    /// A device was added.
    DeviceAdded {
        /// The device.
        device: DeviceId,
        /// Its node.
        node: NodeId,
    },
    /// A device is not used any more because it returned errors.
    DeviceFailed {
        /// The device.
        device: DeviceId,
        /// Its node.
        node: NodeId,
    },
    /// A device is not served by its node.
    DeviceOffline {
        /// The device.
        device: DeviceId,
        /// Its node.
        node: NodeId,
    },
    /// A device is in use again.
    DeviceOnline {
        /// The device.
        device: DeviceId,
        /// Its node.
        node: NodeId,
    },
    /// A device is to be emptied.
    DeviceDraining {
        /// The device.
        device: DeviceId,
        /// Its node.
        node: NodeId,
    },
    /// A device may hold data again.
    DeviceActive {
        /// The device.
        device: DeviceId,
        /// Its node.
        node: NodeId,
    },
    /// A device was removed.
    DeviceRemoved {
        /// The device.
        device: DeviceId,
        /// Its node.
        node: NodeId,
    },
    /// Groups of a pool began to lack replicas.
    PoolDegraded {
        /// The pool.
        pool: Name,
        /// How many groups.
        groups: u32,
    },
    /// No group of a pool lacks replicas any more.
    PoolRecovered {
        /// The pool.
        pool: Name,
    },
    /// Groups of a pool began to have too few replicas in sync: writes to them wait.
    PoolWaiting {
        /// The pool.
        pool: Name,
        /// How many groups.
        groups: u32,
    },
    /// No group's writes wait any more for lack of replicas.
    PoolWritable {
        /// The pool.
        pool: Name,
    },
    /// All replicas in sync of some groups had lost power: what was not flushed may be gone.
    UnflushedLost {
        /// The pool.
        pool: Name,
    },
    /// An operator gave up what only a node, or one of its devices, had.
    DataGivenUp {
        /// The pool.
        pool: Name,
        /// The node.
        node: NodeId,
        /// The device, if it was not the whole node.
        device: Option<DeviceId>,
        /// Groups that go on with what other devices have.
        groups: u32,
        /// Of those, the ones that go on with a replica which is not known to have been in sync ever.
        lost: u32,
    },
    /// Metadata went on after a disaster.
    MetadataRecovered {
        /// The node on which they went on.
        node: NodeId,
        /// When the backup was taken that they come from, if they come from one.
        backup_at: Option<UnixMillis>,
    },
    /// After a restoration from a backup it was found out which replicas lack nothing.
    ReplicasChosen {
        /// Groups that have data.
        groups: u32,
        /// Groups among them for which no device has a mark.
        orphans: u32,
        /// Devices that were not back.
        missing: u32,
    },
    /// An operator gave up the data of volumes that a backup did not know.
    UnknownForgotten,
    /// Replicas began to move to other devices.
    RebalanceStarted {
        /// The pool.
        pool: Name,
        /// How many groups.
        groups: u32,
    },
    /// All replicas are where they should be.
    RebalanceEnded {
        /// The pool.
        pool: Name,
    },
    /// A volume is exported over NFS.
    ExportCreated {
        /// The export.
        export: Name,
        /// Its gateway.
        node: NodeId,
    },
    /// Another gateway is to serve an export.
    ExportMoved {
        /// The export.
        export: Name,
        /// The gateway before.
        from: NodeId,
        /// The gateway now.
        to: NodeId,
        /// An operator, or the gateway itself, wanted it; else that was down or being emptied.
        planned: bool,
    },
    /// A filesystem was made.
    FilesystemCreated {
        /// The filesystem.
        filesystem: Name,
    },
    /// An operator deleted a filesystem: its names and segments go.
    FilesystemDeleted {
        /// The filesystem.
        filesystem: Name,
    },
    /// The metadata went on without the nodes that kept a filesystem's names.
    FilesystemLost {
        /// The filesystem.
        filesystem: Name,
    },
    /// An export was taken down and forgotten. Its volume stays.
    ExportDeleted {
        /// The export.
        export: Name,
    },
}

impl fmt::Display for EventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NodeAdmitted { node } => write!(f, "node {node} was let in by its token"),
            Self::NodeJoined { node } => write!(f, "node {node} joined"),
            Self::NodeRestarted { node } => write!(f, "node {node} started again"),
            Self::NodeUp { node } => write!(f, "node {node} is up"),
            Self::NodeDown { node } => write!(f, "node {node} is down"),
            Self::NodeReplaced { node } => {
                write!(f, "node {node} was away too long: others take its share")
            }
            Self::NodeDraining { node } => write!(f, "node {node} is being emptied"),
            Self::NodeActive { node } => write!(f, "node {node} may hold data again"),
            Self::NodeRemoved { node } => write!(f, "node {node} was removed"),
            Self::LevelRaised { to } => {
                write!(f, "all nodes know feature level {to}: the cluster uses it")
            }
            Self::DataGivenUp {
                pool,
                node,
                device,
                groups,
                lost,
            } => fmt_given_up(f, pool, (*node, *device), *groups, *lost),
            Self::DeviceAdded { device, node } => {
                write!(f, "device {device} was added on node {node}")
            }
            Self::DeviceFailed { device, node } => {
                write!(f, "device {device} on node {node} failed")
            }
            Self::DeviceOffline { device, node } => {
                write!(f, "device {device} is not served by node {node}")
            }
            Self::DeviceOnline { device, node } => {
                write!(f, "device {device} on node {node} is in use again")
            }
            Self::DeviceDraining { device, node } => {
                write!(f, "device {device} on node {node} is being emptied")
            }
            Self::DeviceActive { device, node } => {
                write!(f, "device {device} on node {node} may hold data again")
            }
            Self::DeviceRemoved { device, node } => {
                write!(f, "device {device} on node {node} was removed")
            }
            Self::PoolDegraded { pool, groups } => {
                write!(f, "pool {pool}: {groups} placement groups lack replicas")
            }
            Self::PoolRecovered { pool } => write!(f, "pool {pool}: all replicas are in sync"),
            Self::PoolWaiting { pool, groups } => write!(
                f,
                "pool {pool}: writes to {groups} placement groups wait for more replicas in sync"
            ),
            Self::PoolWritable { pool } => write!(f, "pool {pool}: no write waits for replicas"),
            Self::UnflushedLost { pool } => write!(
                f,
                "pool {pool}: all replicas lost power, writes that were not flushed may be gone; guests that \
                 ran on are told by their next flush"
            ),
            Self::MetadataRecovered { node, backup_at } => fmt_recovered(f, *node, *backup_at),
            Self::ReplicasChosen {
                groups,
                orphans,
                missing,
            } => write!(
                f,
                "replicas of {groups} placement groups were chosen by what their devices say; {orphans} \
                 groups have none that was in sync, and {missing} devices were missing"
            ),
            Self::UnknownForgotten => {
                f.write_str("an operator gave up the data of volumes that the metadata do not know")
            }
            Self::RebalanceStarted { pool, groups } => {
                write!(f, "pool {pool}: {groups} placement groups began to move")
            }
            Self::RebalanceEnded { pool } => write!(f, "pool {pool}: nothing is left to move"),
            Self::ExportCreated { export, node } => {
                write!(f, "NFS export {export} was made on node {node}")
            }
            Self::ExportMoved {
                export,
                from,
                to,
                planned: true,
            } => write!(f, "NFS export {export} moves from node {from} to node {to}"),
            Self::ExportMoved {
                export, from, to, ..
            } => write!(
                f,
                "node {to} takes NFS export {export} over from node {from}, which is down or being emptied"
            ),
            Self::FilesystemCreated { filesystem } => {
                write!(f, "filesystem {filesystem} was made")
            }
            Self::FilesystemDeleted { filesystem } => {
                write!(f, "filesystem {filesystem} was deleted with all its files")
            }
            Self::FilesystemLost { filesystem } => write!(
                f,
                "filesystem {filesystem} is lost: the metadata go on without the nodes that kept its names"
            ),
            Self::ExportDeleted { export } => {
                write!(f, "NFS export {export} was deleted; its volume stays")
            }
        }
    }
}

fn fmt_recovered(
    f: &mut fmt::Formatter<'_>,
    node: NodeId,
    backup_at: Option<UnixMillis>,
) -> fmt::Result {
    match backup_at {
        Some(_) => write!(
            f,
            "the metadata were restored on node {node} from a backup: what was changed since that was taken \
             is not known"
        ),
        None => write!(
            f,
            "the metadata go on with what node {node} had: a majority of the metadata nodes was given up"
        ),
    }
}

fn fmt_given_up(
    f: &mut fmt::Formatter<'_>,
    pool: &Name,
    (node, device): (NodeId, Option<DeviceId>),
    groups: u32,
    lost: u32,
) -> fmt::Result {
    write!(f, "pool {pool}: an operator gave up data that only ")?;
    match device {
        Some(device) => write!(f, "device {device} on node {node}")?,
        None => write!(f, "node {node}")?,
    }
    write!(
        f,
        " had, in {groups} placement groups; they continue from other replicas, and acknowledged writes may \
         be lost"
    )?;
    match lost {
        0 => Ok(()),
        lost => write!(f, "; {lost} of the groups have no complete replica"),
    }
}
