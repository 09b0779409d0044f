//! What people read of an event.

use std::collections::BTreeSet;
use std::fmt;

use super::EventKind;
use crate::ids::{DeviceId, NodeId, UnixMillis};
use crate::model::{Name, Role};

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
                write!(
                    f,
                    "pool {pool}: placement groups lack replicas, {groups} at first"
                )
            }
            Self::PoolRecovered { pool } => write!(f, "pool {pool}: all replicas are in sync"),
            Self::PoolWaiting { pool, groups } => write!(
                f,
                "pool {pool}: writes wait for more replicas in sync, to {groups} placement groups at first"
            ),
            Self::PoolWritable { pool } => write!(f, "pool {pool}: no write waits for replicas"),
            Self::UnflushedLost { pool } => write!(
                f,
                "pool {pool}: all replicas of a placement group were restarted with their machines; unless \
                 they were shut down in order, writes that were not flushed may be gone, and guests that ran \
                 on are told by their next flush"
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
                write!(
                    f,
                    "pool {pool}: placement groups began to move, {groups} at first"
                )
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
            other => fmt_change(f, other),
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

/// What people change, and what is told since [`crate::Level::AUDIT`].
fn fmt_change(f: &mut fmt::Formatter<'_>, what: &EventKind) -> fmt::Result {
    use EventKind as Kind;
    match what {
        Kind::PoolChanged {
            pool,
            replicas,
            min_in_sync,
        } => write!(
            f,
            "pool {pool} keeps {replicas} copies now, {min_in_sync} of them in sync for a write"
        ),
        Kind::PoolCreated { pool, replicas } => {
            write!(f, "pool {pool} was made, with {replicas} replicas")
        }
        Kind::PoolDeleted { pool } => write!(f, "pool {pool} was deleted"),
        Kind::PoolNearFull { pool, percent } => {
            write!(f, "pool {pool}: {percent} % of its space is in use")
        }
        Kind::PoolHasRoom { pool, percent } => {
            write!(
                f,
                "pool {pool} has room again: {percent} % of its space is in use"
            )
        }
        Kind::VolumeCreated {
            volume,
            pool,
            size_bytes,
        } => write!(
            f,
            "volume {volume} was made in pool {pool}, {} MiB",
            size_bytes >> 20
        ),
        Kind::VolumeResized {
            volume,
            from_bytes,
            to_bytes,
        } => write!(
            f,
            "volume {volume} was resized from {} to {} MiB",
            from_bytes >> 20,
            to_bytes >> 20
        ),
        Kind::VolumeOnFullSet { volume, on_full } => match on_full.wait_s {
            0 => write!(
                f,
                "writes of volume {volume} fail at once for want of space"
            ),
            wait_s => write!(
                f,
                "writes of volume {volume} wait {wait_s} s for space before they fail"
            ),
        },
        Kind::VolumeRenamed { volume, from } => {
            write!(f, "volume {from} was renamed to {volume}")
        }
        Kind::VolumeReplaced { volume, with } => match with {
            Some(with) => write!(
                f,
                "volume {with} took the name {volume}; the volume that had it was deleted"
            ),
            None => write!(
                f,
                "volume {volume} was replaced by an import; its data before were deleted"
            ),
        },
        Kind::ExportDeleting { export } => write!(f, "NFS export {export} is being deleted"),
        Kind::VolumeDeleted { volume } => {
            write!(f, "volume {volume} was deleted with all its data")
        }
        Kind::LeaseTakenOver { volume, from, node } => write!(
            f,
            "node {node} writes volume {volume} now: the lease of node {from} ran out"
        ),
        Kind::TokenCreated { roles, .. } => fmt_token(f, roles.as_ref()),
        Kind::TokenRevoked => f.write_str("a join token was revoked"),
        Kind::DataDamaged { what, node } => write!(f, "node {node}: {what}"),
        Kind::DataRepaired { what, node } => {
            write!(f, "node {node}: {what}: nothing is damaged any more")
        }
        other => fmt_attachment(f, other),
    }
}

fn fmt_attachment(f: &mut fmt::Formatter<'_>, what: &EventKind) -> fmt::Result {
    use EventKind as Kind;
    match what {
        Kind::VolumeAttached {
            volume,
            node,
            socket,
            read_only,
        } => {
            let how = reads_only(*read_only);
            write!(
                f,
                "volume {volume} was attached{how} on node {node} at {socket}"
            )
        }
        Kind::VolumeDetached {
            volume,
            node,
            socket,
        } => write!(
            f,
            "volume {volume} was detached on node {node} from {socket}"
        ),
        Kind::VolumeMoved {
            volume,
            node,
            socket,
        } => write!(
            f,
            "volume {volume} moved with its guest to node {node}, to {socket}"
        ),
        Kind::FilesystemAttached {
            filesystem,
            node,
            socket,
            read_only,
        } => {
            let how = reads_only(*read_only);
            write!(
                f,
                "filesystem {filesystem} was attached{how} on node {node} at {socket}"
            )
        }
        Kind::FilesystemDetached {
            filesystem,
            node,
            socket,
        } => write!(
            f,
            "filesystem {filesystem} was detached on node {node} from {socket}"
        ),
        // Every other kind has a text above.
        other => write!(f, "{other:?}"),
    }
}

fn reads_only(read_only: bool) -> &'static str {
    match read_only {
        true => " read-only",
        false => "",
    }
}

fn fmt_token(f: &mut fmt::Formatter<'_>, roles: Option<&BTreeSet<Role>>) -> fmt::Result {
    match roles {
        None => f.write_str("a join token was made"),
        Some(roles) => {
            let roles: Vec<String> = roles.iter().map(ToString::to_string).collect();
            write!(
                f,
                "a join token was made for the roles {}",
                roles.join(", ")
            )
        }
    }
}
