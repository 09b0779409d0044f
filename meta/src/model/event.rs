//! What happened in the cluster, for people to read.

mod text;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::{Name, OnFull, Role};
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
    /// Who asked for it, if somebody did.
    pub by: Option<Author>,
}

/// Who asked for a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Author {
    /// The node that was asked, or that did it by itself.
    pub node: NodeId,
    /// The user of that node who asked; nobody if the node did it by itself.
    pub uid: Option<u32>,
    /// They used `--force`, to forget an attachment of a node that was down.
    pub forced: bool,
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
    /// A node was removed while it was up, with its attachments.
    NodeEvicted {
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
        /// Its NFS node.
        node: NodeId,
    },
    /// Another NFS node is to serve an export.
    ExportMoved {
        /// The export.
        export: Name,
        /// The NFS node before.
        from: NodeId,
        /// The NFS node now.
        to: NodeId,
        /// An operator, or the NFS node itself, wanted it; else that was down or being emptied.
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
    /// A pool was made.
    PoolCreated {
        /// The pool.
        pool: Name,
        /// Its replicas.
        replicas: u8,
    },
    /// A pool has other numbers of replicas.
    PoolChanged {
        /// The pool.
        pool: Name,
        /// Copies of all data.
        replicas: u8,
        /// Copies that must be in sync for a write to be acknowledged.
        min_in_sync: u8,
    },
    /// A pool was deleted.
    PoolDeleted {
        /// The pool.
        pool: Name,
    },
    /// So much of a pool's space is in use that somebody should see to it.
    PoolNearFull {
        /// The pool.
        pool: Name,
        /// How much; 100: writes find no space on one of its devices.
        percent: u8,
    },
    /// A pool has room again.
    PoolHasRoom {
        /// The pool.
        pool: Name,
        /// How much of its space is in use.
        percent: u8,
    },
    /// The volumes of a pool may grow to more than its devices hold.
    PoolOverCommitted {
        /// The pool.
        pool: Name,
    },
    /// The devices of a pool hold all that its volumes may grow to, again.
    PoolCovered {
        /// The pool.
        pool: Name,
    },
    /// A volume was made.
    VolumeCreated {
        /// The volume.
        volume: Name,
        /// Its pool.
        pool: Name,
        /// Its size.
        size_bytes: u64,
    },
    /// A volume has another size.
    VolumeResized {
        /// The volume.
        volume: Name,
        /// The size before.
        from_bytes: u64,
        /// The size now.
        to_bytes: u64,
    },
    /// Writes of a volume do something else for want of space.
    VolumeOnFullSet {
        /// The volume.
        volume: Name,
        /// What they do.
        on_full: OnFull,
    },
    /// A volume has another name.
    VolumeRenamed {
        /// Its name now.
        volume: Name,
        /// Its name before.
        from: Name,
    },
    /// Another volume took the name of one, which was deleted.
    VolumeReplaced {
        /// The name.
        volume: Name,
        /// The name before of the volume that has it now; none if that was imported.
        with: Option<Name>,
    },
    /// An operator deleted an export: its NFS node takes it down.
    ExportDeleting {
        /// The export.
        export: Name,
    },
    /// A volume was deleted: its data go.
    VolumeDeleted {
        /// The volume.
        volume: Name,
    },
    /// A node that had the right to write a volume was not heard of any more, and another one got it.
    LeaseTakenOver {
        /// The volume.
        volume: Name,
        /// The node that had it.
        from: NodeId,
        /// The node that has it.
        node: NodeId,
    },
    /// A volume is served to a guest.
    VolumeAttached {
        /// The volume.
        volume: Name,
        /// The node that serves it.
        node: NodeId,
        /// The socket.
        socket: String,
        /// The guest only reads.
        read_only: bool,
    },
    /// A volume is not served to a guest any more.
    VolumeDetached {
        /// The volume.
        volume: Name,
        /// The node that served it.
        node: NodeId,
        /// The socket.
        socket: String,
    },
    /// An attachment was offered to another node, which may take over.
    VolumeOffered {
        /// The volume.
        volume: Name,
        /// The node that serves it.
        node: NodeId,
        /// The node that it was offered to.
        to: NodeId,
        /// When the offer ends.
        expires_at: UnixMillis,
    },
    /// An offer was withdrawn.
    OfferWithdrawn {
        /// The volume.
        volume: Name,
        /// The node that serves it.
        node: NodeId,
    },
    /// An incoming attachment did not take over before its deadline and was ended.
    IncomingExpired {
        /// The volume.
        volume: Name,
        /// The node that was to serve it.
        node: NodeId,
        /// The socket.
        socket: String,
    },
    /// A guest moved, and its disk with it.
    VolumeMoved {
        /// The volume.
        volume: Name,
        /// The node that serves it now.
        node: NodeId,
        /// The socket.
        socket: String,
    },
    /// A filesystem is served to a guest.
    FilesystemAttached {
        /// The filesystem.
        filesystem: Name,
        /// The node that serves it.
        node: NodeId,
        /// The socket.
        socket: String,
        /// The guest only reads.
        read_only: bool,
    },
    /// A filesystem is not served to a guest any more.
    FilesystemDetached {
        /// The filesystem.
        filesystem: Name,
        /// The node that served it.
        node: NodeId,
        /// The socket.
        socket: String,
    },
    /// A token was made with which a node may join.
    TokenCreated {
        /// The roles that it grants; all if absent.
        roles: Option<BTreeSet<Role>>,
        /// When it ends.
        expires_at: UnixMillis,
    },
    /// A join token was revoked.
    TokenRevoked,
    /// Blocks of a device cannot be read, or have a wrong checksum.
    DataDamaged {
        /// Which, in words.
        what: String,
        /// The node that noticed.
        node: NodeId,
    },
    /// All blocks of a device that were damaged have been written again.
    DataRepaired {
        /// Which device, in words.
        what: String,
        /// The node that noticed.
        node: NodeId,
    },
}
