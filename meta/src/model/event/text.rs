//! What people read of an event.

use std::collections::BTreeSet;
use std::fmt;

use super::EventKind;
use crate::ids::{DeviceId, NodeId, UnixMillis};
use crate::map::ClusterMap;
use crate::model::{Name, Role};

/// What the nodes and devices of an event are called.
trait Names {
    fn node(&self, id: NodeId) -> String;
    fn device(&self, id: DeviceId) -> String;
}

impl Names for ClusterMap {
    fn node(&self, id: NodeId) -> String {
        self.node_name(id)
    }

    fn device(&self, id: DeviceId) -> String {
        self.device_path(id)
    }
}

/// All by their numbers.
struct Numbers;

impl Names for Numbers {
    fn node(&self, id: NodeId) -> String {
        id.to_string()
    }

    fn device(&self, id: DeviceId) -> String {
        id.to_string()
    }
}

impl EventKind {
    /// What people read of it. Nodes and devices have the names that a map has for them; those that are gone
    /// have their numbers.
    #[must_use]
    pub fn text(&self, map: &ClusterMap) -> String {
        Text(self, map).to_string()
    }
}

/// Without a map: all by their numbers.
impl fmt::Display for EventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Text(self, &Numbers).fmt(f)
    }
}

struct Text<'a, N>(&'a EventKind, &'a N);

impl<N: Names> fmt::Display for Text<'_, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use EventKind as Kind;
        let Self(what, names) = *self;
        match what {
            Kind::NodeAdmitted { node } => {
                write!(f, "node {} was let in by its token", names.node(*node))
            }
            Kind::NodeJoined { node } => write!(f, "node {} joined", names.node(*node)),
            Kind::NodeRestarted { node } => write!(f, "node {} started again", names.node(*node)),
            Kind::NodeUp { node } => write!(f, "node {} is up", names.node(*node)),
            Kind::NodeDown { node } => write!(f, "node {} is down", names.node(*node)),
            Kind::NodeReplaced { node } => {
                write!(
                    f,
                    "node {} was away too long: others take its share",
                    names.node(*node)
                )
            }
            Kind::NodeDraining { node } => write!(f, "node {} is being emptied", names.node(*node)),
            Kind::NodeActive { node } => {
                write!(f, "node {} may hold data again", names.node(*node))
            }
            Kind::NodeRemoved { node } => write!(f, "node {} was removed", names.node(*node)),
            Kind::NodeEvicted { node } => write!(f, "node {} was evicted", names.node(*node)),
            Kind::LevelRaised { to } => {
                write!(f, "all nodes know feature level {to}: the cluster uses it")
            }
            Kind::DataGivenUp {
                pool,
                node,
                device,
                groups,
                lost,
            } => fmt_given_up(f, names, pool, (*node, *device), (*groups, *lost)),
            Kind::DeviceAdded { device, node } => {
                write!(
                    f,
                    "device {} was added on node {}",
                    names.device(*device),
                    names.node(*node)
                )
            }
            Kind::DeviceFailed { device, node } => {
                write!(
                    f,
                    "device {} on node {} failed",
                    names.device(*device),
                    names.node(*node)
                )
            }
            Kind::DeviceOffline { device, node } => {
                write!(
                    f,
                    "device {} is not served by node {}",
                    names.device(*device),
                    names.node(*node)
                )
            }
            Kind::DeviceOnline { device, node } => {
                write!(
                    f,
                    "device {} on node {} is in use again",
                    names.device(*device),
                    names.node(*node)
                )
            }
            Kind::DeviceDraining { device, node } => {
                write!(
                    f,
                    "device {} on node {} is being emptied",
                    names.device(*device),
                    names.node(*node)
                )
            }
            Kind::DeviceActive { device, node } => {
                write!(
                    f,
                    "device {} on node {} may hold data again",
                    names.device(*device),
                    names.node(*node)
                )
            }
            Kind::DeviceRemoved { device, node } => {
                write!(
                    f,
                    "device {} on node {} was removed",
                    names.device(*device),
                    names.node(*node)
                )
            }
            Kind::PoolDegraded { pool, groups } => {
                write!(
                    f,
                    "pool {pool}: placement groups lack replicas, {groups} at first"
                )
            }
            Kind::PoolRecovered { pool } => write!(f, "pool {pool}: all replicas are in sync"),
            Kind::PoolWaiting { pool, groups } => write!(
                f,
                "pool {pool}: writes wait for more replicas in sync, to {groups} placement groups at first"
            ),
            Kind::PoolWritable { pool } => write!(f, "pool {pool}: no write waits for replicas"),
            Kind::UnflushedLost { pool } => write!(
                f,
                "pool {pool}: all replicas of a placement group were restarted with their machines; unless \
                 they were shut down in order, writes that were not flushed may be gone, and guests that ran \
                 on are told by their next flush"
            ),
            Kind::MetadataRecovered { node, backup_at } => {
                fmt_recovered(f, names, *node, *backup_at)
            }
            Kind::ReplicasChosen {
                groups,
                orphans,
                missing,
            } => write!(
                f,
                "replicas of {groups} placement groups were chosen by what their devices say; {orphans} \
                 groups have none that was in sync, and {missing} devices were missing"
            ),
            Kind::UnknownForgotten => {
                f.write_str("an operator gave up the data of volumes that the metadata do not know")
            }
            Kind::RebalanceStarted { pool, groups } => {
                write!(
                    f,
                    "pool {pool}: placement groups began to move, {groups} at first"
                )
            }
            Kind::RebalanceEnded { pool } => write!(f, "pool {pool}: nothing is left to move"),
            Kind::ExportCreated { export, node } => {
                write!(
                    f,
                    "NFS export {export} was made on node {}",
                    names.node(*node)
                )
            }
            Kind::ExportMoved {
                export,
                from,
                to,
                planned: true,
            } => write!(
                f,
                "NFS export {export} moves from node {} to node {}",
                names.node(*from),
                names.node(*to)
            ),
            Kind::ExportMoved {
                export, from, to, ..
            } => write!(
                f,
                "node {} takes NFS export {export} over from node {}, which is down or being emptied",
                names.node(*to),
                names.node(*from)
            ),
            Kind::FilesystemCreated { filesystem } => {
                write!(f, "filesystem {filesystem} was made")
            }
            Kind::FilesystemDeleted { filesystem } => {
                write!(f, "filesystem {filesystem} was deleted with all its files")
            }
            Kind::FilesystemLost { filesystem } => write!(
                f,
                "filesystem {filesystem} is lost: the metadata go on without the nodes that kept its names"
            ),
            Kind::ExportDeleted { export } => {
                write!(f, "NFS export {export} was deleted; its volume stays")
            }
            other => fmt_change(f, names, other),
        }
    }
}

fn fmt_recovered(
    f: &mut fmt::Formatter<'_>,
    names: &impl Names,
    node: NodeId,
    backup_at: Option<UnixMillis>,
) -> fmt::Result {
    match backup_at {
        Some(_) => write!(
            f,
            "the metadata were restored on node {} from a backup: what was changed since that was taken \
             is not known",
            names.node(node)
        ),
        None => write!(
            f,
            "the metadata go on with what node {} had: a majority of the metadata nodes was given up",
            names.node(node)
        ),
    }
}

fn fmt_given_up(
    f: &mut fmt::Formatter<'_>,
    names: &impl Names,
    pool: &Name,
    (node, device): (NodeId, Option<DeviceId>),
    (groups, lost): (u32, u32),
) -> fmt::Result {
    write!(f, "pool {pool}: an operator gave up data that only ")?;
    match device {
        Some(device) => write!(
            f,
            "device {} on node {}",
            names.device(device),
            names.node(node)
        )?,
        None => write!(f, "node {}", names.node(node))?,
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

/// Events of what people change and of what nodes notice.
fn fmt_change(f: &mut fmt::Formatter<'_>, names: &impl Names, what: &EventKind) -> fmt::Result {
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
        // As it is noted of a pool one of whose devices refuses writes.
        Kind::PoolNearFull { pool, percent: 100 } => {
            write!(f, "pool {pool} is full: writes find no space on a device")
        }
        Kind::PoolNearFull { pool, percent } => {
            write!(f, "pool {pool}: {percent} % of its space is in use")
        }
        Kind::PoolHasRoom { pool, percent } => {
            write!(
                f,
                "pool {pool} has room again: {percent} % of its space is in use"
            )
        }
        Kind::PoolOverCommitted { pool } => write!(
            f,
            "pool {pool}: its volumes may grow to more than its devices hold"
        ),
        Kind::PoolCovered { pool } => write!(
            f,
            "pool {pool}: its devices hold all that its volumes may grow to"
        ),
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
            "node {} writes volume {volume} now: the lease of node {} ran out",
            names.node(*node),
            names.node(*from)
        ),
        Kind::TokenCreated { roles, .. } => fmt_token(f, roles.as_ref()),
        Kind::TokenRevoked => f.write_str("a join token was revoked"),
        Kind::DataDamaged { what, node } => write!(f, "node {}: {what}", names.node(*node)),
        Kind::DataRepaired { what, node } => {
            write!(
                f,
                "node {}: {what}: nothing is damaged any more",
                names.node(*node)
            )
        }
        other => fmt_attachment(f, names, other),
    }
}

fn fmt_attachment(f: &mut fmt::Formatter<'_>, names: &impl Names, what: &EventKind) -> fmt::Result {
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
                "volume {volume} was attached{how} on node {} at {socket}",
                names.node(*node)
            )
        }
        Kind::VolumeDetached {
            volume,
            node,
            socket,
        } => write!(
            f,
            "volume {volume} was detached on node {} from {socket}",
            names.node(*node)
        ),
        Kind::VolumeOffered {
            volume, node, to, ..
        } => write!(
            f,
            "volume {volume}, which node {} serves, was offered to node {}",
            names.node(*node),
            names.node(*to)
        ),
        Kind::OfferWithdrawn { volume, node } => write!(
            f,
            "the offer of volume {volume} by node {} was withdrawn",
            names.node(*node)
        ),
        Kind::IncomingExpired {
            volume,
            node,
            socket,
        } => write!(
            f,
            "node {} did not take over volume {volume} in time: its attachment at {socket} was ended",
            names.node(*node)
        ),
        Kind::VolumeMoved {
            volume,
            node,
            socket,
        } => write!(
            f,
            "volume {volume} moved with its guest to node {}, to {socket}",
            names.node(*node)
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
                "filesystem {filesystem} was attached{how} on node {} at {socket}",
                names.node(*node)
            )
        }
        Kind::FilesystemDetached {
            filesystem,
            node,
            socket,
        } => write!(
            f,
            "filesystem {filesystem} was detached on node {} from {socket}",
            names.node(*node)
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
