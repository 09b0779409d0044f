//! What can be asked of the state machine, and what it answers. These are the entries of the Raft log.
//!
//! A command carries every fact from outside: times, identities, measured sizes. Applying it is then the same
//! on every node.

mod audit;
mod change;
mod codec;
mod facts;
mod outcome;
mod specs;

pub use audit::Notice;
pub use change::{Change, Heard};
pub(crate) use codec::{check_command, decode_command, decode_reply, encode_command, encode_reply};
pub use outcome::{Outcome, Reply};
pub use specs::{
    AttachmentSpec, DEFAULT_PLACEMENT_GROUPS, DeviceSpec, ExportSpec, FilesystemAttachmentSpec,
    FilesystemSpec, NodeSpec, PoolSpec, VolumeSpec,
};

use std::collections::BTreeSet;

use namespace::{FilesystemId, SegmentId};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::ids::{
    AttachmentId, DeviceId, Epoch, Generation, Incarnation, NamespaceGroupId, NodeId, UnixMillis,
    VolumeId,
};
use crate::level::Level;
use crate::model::{
    AdminState, Author, DeviceEvidence, DeviceState, GroupId, NodeState, OnFull, Role,
};
use crate::pki::TokenHash;

/// Names an attachment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttachmentKey {
    /// By its number.
    Id(AttachmentId),
    /// By its socket on a node.
    Socket {
        /// The node.
        node: NodeId,
        /// The path.
        socket: String,
    },
    /// By its number, if it is incoming.
    Incoming(AttachmentId),
}

/// An entry of the Raft log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Command {
    /// Makes the cluster record, the first node and the default pool. Done again it changes nothing.
    Bootstrap {
        /// Identity of the cluster.
        cluster: Uuid,
        /// The first node.
        node: NodeSpec,
        /// The default pool, if it is to have more than one replica.
        pool: Option<Box<PoolSpec>>,
        /// Now.
        at: UnixMillis,
    },
    /// Adds a node, says that its process started, or changes its name, roles, labels and addresses.
    RegisterNode {
        /// The node.
        node: NodeSpec,
        /// The start of its process that this one comes after. If another has registered since, this is an
        /// old process's word that was held up, and is refused.
        replaces: Incarnation,
        /// Now.
        at: UnixMillis,
    },
    /// Says whether a node is heard of. Proposed by the leader.
    SetNodeState {
        /// The node.
        node: NodeId,
        /// The start of it that was, or was not, heard of.
        incarnation: Incarnation,
        /// What it is now.
        state: NodeState,
        /// Now.
        at: UnixMillis,
    },
    /// Says whether a node is to be emptied, was away too long, or may hold data.
    SetNodeAdminState {
        /// The node.
        node: NodeId,
        /// What it is to be.
        admin_state: AdminState,
        /// Now.
        at: UnixMillis,
    },
    /// Forgets a node that holds no data that others do not hold, with its devices and attachments.
    RemoveNode {
        /// The node.
        node: NodeId,
        /// Now.
        at: UnixMillis,
    },
    /// Removes a node that is up, together with its attachments. Refused if the node holds data.
    EvictNode {
        /// The node.
        node: NodeId,
        /// Now.
        at: UnixMillis,
    },
    /// Forgets a node that is down, or a device that is not served, and gives up what only that has: where it
    /// holds all replicas in sync, the next best one takes over.
    RemoveLost {
        /// What an operator says is gone for good.
        lost: Lost,
        /// Now.
        at: UnixMillis,
    },
    /// Says that all nodes know this feature level. Proposed by the leader.
    RaiseLevel {
        /// The level.
        to: Level,
        /// Now.
        at: UnixMillis,
    },
    /// Makes a token with which a node may join.
    CreateToken {
        /// What is kept of it.
        token: TokenHash,
        /// The roles that it grants; all if absent.
        roles: Option<BTreeSet<Role>>,
        /// When it ends.
        expires_at: UnixMillis,
        /// Now.
        at: UnixMillis,
    },
    /// A node joins with a token, which is used up by that.
    RedeemToken {
        /// What is kept of it.
        token: TokenHash,
        /// The roles that the node asks for.
        roles: BTreeSet<Role>,
        /// Now.
        at: UnixMillis,
    },
    /// Forgets a join token that nobody has used.
    RevokeToken {
        /// What is kept of it.
        token: TokenHash,
    },
    /// Adds a device, or says that it is back.
    RegisterDevice {
        /// The device.
        device: DeviceSpec,
        /// The start of its node that serves it; the present one if none is given.
        incarnation: Incarnation,
        /// Now.
        at: UnixMillis,
    },
    /// Says whether a device can hold data.
    SetDeviceState {
        /// The device.
        device: DeviceId,
        /// Its new state.
        state: DeviceState,
        /// Now.
        at: UnixMillis,
    },
    /// A node could not open a device that it should have.
    LoseDevice {
        /// The device.
        device: DeviceId,
        /// The start of its node that goes on without it.
        incarnation: Incarnation,
        /// Proposed by the leader: that was so for long, and others take its share.
        for_long: bool,
        /// Now.
        at: UnixMillis,
    },
    /// Says whether a device is to be emptied.
    DrainDevice {
        /// The device.
        device: DeviceId,
        /// Whether it is.
        on: bool,
        /// Now.
        at: UnixMillis,
    },
    /// Forgets a device that holds no data.
    RemoveDevice {
        /// The device.
        device: DeviceId,
        /// Now.
        at: UnixMillis,
    },
    /// A client says that a member of a group failed it, and wants it taken out before it acknowledges a
    /// write.
    ReportFailed {
        /// The group.
        group: GroupId,
        /// The member.
        device: DeviceId,
        /// The start of its process that failed.
        incarnation: Incarnation,
        /// Epoch of the group in the map that the client has.
        epoch: Epoch,
        /// What the leader has heard of since it got the report.
        heard: Vec<Heard>,
        /// Now.
        at: UnixMillis,
    },
    /// Changes of groups that the leader decided on from what it heard. Each is granted or refused by itself.
    Regroup {
        /// The changes.
        changes: Vec<Change>,
        /// What the leader has heard of lately.
        heard: Vec<Heard>,
        /// Now.
        at: UnixMillis,
    },
    /// A syncing replica says that it has compared everything.
    Promote {
        /// The group.
        group: GroupId,
        /// The member.
        device: DeviceId,
        /// The start of its process.
        incarnation: Incarnation,
        /// The round that is completed: [`Member::since`](crate::Member::since).
        since: Epoch,
        /// Now.
        at: UnixMillis,
    },
    /// Makes a pool.
    CreatePool {
        /// The pool.
        pool: PoolSpec,
        /// Now.
        at: UnixMillis,
    },
    /// Gives a pool other numbers of replicas.
    SetPool {
        /// Its name.
        name: String,
        /// Copies of all data; as before if absent.
        replicas: Option<u8>,
        /// Copies that must be in sync for a write to be acknowledged; as before if absent.
        min_in_sync: Option<u8>,
    },
    /// Forgets a pool without volumes.
    DeletePool {
        /// Its name.
        name: String,
    },
    /// Makes a volume. The same `uuid` again answers with the volume it made.
    CreateVolume {
        /// Identity of the volume.
        uuid: Uuid,
        /// The volume.
        volume: VolumeSpec,
        /// Now.
        at: UnixMillis,
    },
    /// Changes a volume's size.
    ResizeVolume {
        /// Its name.
        name: String,
        /// The new size in bytes; rounded up to a multiple of 4096.
        size_bytes: u64,
        /// Whether data beyond the new size may be lost.
        allow_shrink: bool,
    },
    /// Says that what a shrink cut off was discarded on all replicas.
    VolumeTailDropped {
        /// The volume.
        volume: VolumeId,
    },
    /// First step of deletion: nobody can attach or write it from now on.
    DeleteVolume {
        /// Its name.
        name: String,
    },
    /// Second step of deletion: its data are gone from all replicas, so its name is free.
    VolumeDataDropped {
        /// The volume.
        volume: VolumeId,
    },
    /// Gives a volume the name of another, which it replaces: that one takes its name and begins to be
    /// deleted.
    PromoteVolume {
        /// The volume that is renamed.
        from: String,
        /// Its new name.
        to: String,
    },
    /// Gives a volume that nobody uses a name that no other has.
    RenameVolume {
        /// Its name.
        from: String,
        /// Its new name.
        to: String,
    },
    /// Changes how a volume behaves, within seconds.
    SetVolume {
        /// Its name.
        name: String,
        /// What its writes do for want of space.
        on_full: OnFull,
    },
    /// Grants the lease of a volume with a new generation.
    GrantLease {
        /// The volume's name.
        volume: String,
        /// Who asks.
        node: NodeId,
        /// The generation of another holder's lease that the leader found to have run out.
        expired: Option<Generation>,
        /// Now.
        at: UnixMillis,
    },
    /// Gives a lease back.
    ReleaseLease {
        /// The volume.
        volume: VolumeId,
        /// The holder.
        node: NodeId,
        /// The generation it holds.
        generation: Generation,
    },
    /// Makes an attachment.
    CreateAttachment {
        /// The attachment.
        attachment: AttachmentSpec,
        /// Now.
        at: UnixMillis,
    },
    /// Says whether a guest switched the write cache of its disk off.
    SetWriteThrough {
        /// The attachment.
        attachment: AttachmentId,
        /// Whether it is off.
        on: bool,
    },
    /// An incoming attachment takes the place of the one on another node: its node is granted the lease, if
    /// nobody else has it, and the other attachment is forgotten.
    TakeOverAttachment {
        /// The incoming attachment.
        attachment: AttachmentId,
        /// The generation of another holder's lease that the leader found to have run out.
        expired: Option<Generation>,
        /// Now.
        at: UnixMillis,
    },
    /// Makes an attachment on another node that is to take the place of this one, without a guest.
    MoveAttachment {
        /// The attachment that is to go.
        attachment: AttachmentId,
        /// The node that is to serve it.
        to: NodeId,
        /// Absolute path of the socket there.
        socket: String,
        /// Now.
        at: UnixMillis,
    },
    /// Offers an attachment to another node and replaces an earlier offer. That node may create an incoming
    /// attachment, which may take over.
    OfferAttachment {
        /// The attachment.
        attachment: AttachmentId,
        /// The only node that may accept.
        to: NodeId,
        /// Lifetime of the offer in seconds.
        lifetime_s: u64,
        /// Now.
        at: UnixMillis,
    },
    /// Withdraws an offer and ends the incoming attachment that it allowed.
    WithdrawOffer {
        /// The attachment that was offered.
        attachment: AttachmentId,
    },
    /// Ends expired offers and incoming attachments. Proposed by the leader.
    ExpireOffers {
        /// Now.
        at: UnixMillis,
    },
    /// Forgets an attachment.
    DeleteAttachment {
        /// Which.
        attachment: AttachmentKey,
    },
    /// Makes an NFS export.
    CreateExport {
        /// Identity of its file system towards clients.
        fsid: Uuid,
        /// The export.
        export: ExportSpec,
        /// Now.
        at: UnixMillis,
    },
    /// Another NFS node is to serve an export, if `from` was to until now.
    AssignExport {
        /// Its name.
        name: String,
        /// The NFS node until now.
        from: NodeId,
        /// The NFS node from now on.
        to: NodeId,
        /// Though `from` could go on.
        planned: bool,
        /// Now.
        at: UnixMillis,
    },
    /// First step of deletion: its NFS node takes the export down.
    DeleteExport {
        /// Its name.
        name: String,
    },
    /// Metadata go on after a disaster. Put into the log by [`crate::recovery`] alone, and never proposed.
    BeginHistory {
        /// Names what follows.
        history: Uuid,
        /// The node that it begins on.
        node: NodeId,
        /// When the backup was taken, if they come from one.
        backup_at: Option<UnixMillis>,
        /// Replicas may have acted upon newer metadata: which of them count is found out.
        choose: bool,
        /// Namespace groups whose log the node has as one of their voters, and goes on with.
        groups: BTreeSet<NamespaceGroupId>,
        /// Now.
        at: UnixMillis,
    },
    /// What a device says itself of its groups and layers, after metadata were restored from a backup.
    ReportEvidence {
        /// What.
        evidence: DeviceEvidence,
        /// Now.
        at: UnixMillis,
    },
    /// An operator says that all devices are back that will come: the replicas that lack nothing are chosen
    /// by what devices said.
    ChooseReplicas {
        /// Though not all devices are back that the cluster knows.
        without_missing: bool,
        /// Now.
        at: UnixMillis,
    },
    /// An operator gives up the data of volumes that a backup did not know.
    ForgetUnknown {
        /// Now.
        at: UnixMillis,
    },
    /// Makes a filesystem, on a namespace group.
    CreateFilesystem {
        /// Identity of the filesystem.
        uuid: Uuid,
        /// The filesystem.
        filesystem: FilesystemSpec,
        /// Now.
        at: UnixMillis,
    },
    /// First step of a filesystem's deletion: nobody attaches it, or writes new segments, from now on.
    DeleteFilesystem {
        /// Its name.
        name: String,
        /// Now.
        at: UnixMillis,
    },
    /// Second step: its group has no record of it any more, and its segments are being deleted. So its name
    /// is free. Proposed by the leader of its group.
    FilesystemDropped {
        /// The filesystem.
        id: FilesystemId,
    },
    /// Makes the hidden volume of a segment, in the filesystem's pool. The same segment again answers with
    /// the volume that it has.
    CreateSegmentVolume {
        /// The filesystem.
        filesystem: FilesystemId,
        /// The segment.
        segment: SegmentId,
        /// Identity of the volume.
        uuid: Uuid,
        /// Its size in bytes; rounded up to a multiple of 4096.
        size_bytes: u64,
        /// Now.
        at: UnixMillis,
    },
    /// First step of the deletion of a segment's volume, as for other volumes. Done if there is none.
    DeleteSegmentVolume {
        /// The filesystem.
        filesystem: FilesystemId,
        /// The segment.
        segment: SegmentId,
    },
    /// Makes an attachment of a filesystem.
    CreateFilesystemAttachment {
        /// The attachment.
        attachment: FilesystemAttachmentSpec,
        /// Now.
        at: UnixMillis,
    },
    /// Forgets an attachment of a filesystem.
    DeleteFilesystemAttachment {
        /// Which. None of them is ever incoming.
        attachment: AttachmentKey,
    },
    /// Says who votes in a namespace group, which has a leader. Proposed by that one, before a node gets a
    /// vote and after one has lost it.
    SetNamespaceGroupVoters {
        /// The group.
        group: NamespaceGroupId,
        /// Its voters, and those that are about to be.
        voters: Vec<NodeId>,
    },
    /// Second step of deletion: it is down.
    ExportWithdrawn {
        /// Its name.
        name: String,
        /// The NFS node that took it down.
        node: NodeId,
        /// Now.
        at: UnixMillis,
    },
    /// A change, with who wants it: its events say so.
    Authored {
        /// Who.
        by: Author,
        /// Now.
        at: UnixMillis,
        /// The change.
        command: Box<Command>,
    },
    /// Keeps an event of what a node noticed.
    RecordNotice {
        /// What.
        notice: Notice,
        /// Now.
        at: UnixMillis,
    },
}

/// What an operator says is gone for good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lost {
    /// A node with all its devices.
    Node(NodeId),
    /// One device.
    Device(DeviceId),
}
