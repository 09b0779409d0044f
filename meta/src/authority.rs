//! Which node may ask for what: one table from commands to roles, and whose Raft messages are taken.
//!
//! A certificate says only which node speaks. What that node may do follows from its record in the cluster
//! map, which holds the roles that its join token granted. The leader checks each command that another node
//! sends it. It checks none of its own: only nodes with the role `meta` lead.
//!
//! | command | who may send it |
//! |---|---|
//! | tokens, pools, removal and draining of nodes, the leader's own commands | nodes with the role `meta` |
//! | registration of a node | the node itself, with roles that it was granted; `meta` for others |
//! | devices: registered, failed, drained, removed, promoted replicas | their node, with `storage`; `meta` |
//! | leases and attachments | the node that they are of; `meta` |
//! | attachments of an NFS node that is down: forgotten | the NFS node that takes over the volume's export |
//! | attachments: offered to another node, moved there; such offers: withdrawn | their node; `meta` |
//! | incoming attachments: made | the node that the attachment was offered to; `meta` for that node |
//! | incoming attachments: called off | the node that they are of; the one that they take over from; `meta` |
//! | what a shrink cut off is discarded | the node that holds the volume's lease; `meta` |
//! | volumes, reports of failed replicas | every node of the cluster |
//! | NFS exports: made, withdrawn | the NFS node that serves them; `meta` |
//! | NFS exports: moved | the NFS node that gives them away, or takes them from one that is down; `meta` |
//! | what a device says after a restoration | its node, with `storage`; `meta` |
//! | replicas chosen after a restoration, unknown data given up | nodes with the role `meta` |
//! | notices: pools filling up | nodes with the role `meta` |
//! | notices: damaged data | the node that noticed |
//! | a recovery | nobody: it is written to the log of a node that does not run |
//! | NFS exports: deleted | the NFS node that serves them; `meta` |
//! | filesystems: made, deleted | every node of the cluster |
//! | segments of a filesystem: made, leased, deleted | nodes that the filesystem is attached to; `meta` |
//! | namespace groups, filesystems that are gone from them | nodes with the role `meta` |
//!
//! Attachments are those of volumes and of filesystems. A lease is taken for the node itself. The lease of a
//! segment is granted only where guests use the filesystem: no guest's detachment protects a segment from a
//! host that does not use it. The state machine decides who gets the lease of an attached volume
//! (`state/lease.rs`) and who may create an incoming attachment (`state/migration.rs`).
//!
//! Any node may say that the data of a volume are dropped that is being deleted: the volume was any node's to
//! delete. Nothing of it can be read again, as the numbers of layers are never given twice, and each storage
//! node drops by itself layers that no volume has.

use std::collections::BTreeSet;

use namespace::FilesystemId;

use crate::command::{AttachmentKey, Command, Lost, NodeSpec, Notice};
use crate::ids::{AttachmentId, DeviceId, NodeId, VolumeId};
use crate::map::ClusterMap;
use crate::model::{AttachmentTarget, Node, NodeState, Role};
use crate::refusal::{AccessRefusal, MapRefusal, Refusal};
use crate::state::tables::{
    ATTACHMENTS, EXPORTS, FILESYSTEM_ATTACHMENTS, LEASES, VOLUME_NAMES, VOLUMES,
};
use crate::state::{Read, ReadError, export, filesystem_attachment, volume};

/// Nodes that a refusal names as places to run the command; others are left out.
const NAMED_MAX: usize = 5;

/// What a node must be to send a command.
#[derive(Debug, PartialEq, Eq)]
enum Needs<'a> {
    /// A node of the cluster.
    Member,
    /// A node with the role `meta`: the command administers the cluster.
    Meta,
    /// This node.
    Node(NodeId),
    /// This node, with the role `storage`.
    StorageNode(NodeId),
    /// The node with the role `storage` that has this device.
    OwnerOf(DeviceId),
    /// This node, which may write the volume of this name.
    Leases(NodeId, &'a str),
    /// A node that serves this filesystem to a guest.
    Mounts(FilesystemId),
    /// The node that holds the lease of this volume.
    Holds(VolumeId),
    /// The node that serves this attachment.
    Serves(AttachmentId),
    /// The node that serves this attachment, one that may call it off, or the NFS node that takes over.
    Deletes(&'a AttachmentKey),
    /// The NFS node that is to serve this export.
    Exports(&'a str),
    /// The node that is registered, with roles that it may have.
    Registered(&'a NodeSpec),
}

/// What a command needs, and what it does, as said in a refusal. Every new command has to be put into this
/// table.
fn needs(command: &Command) -> (Needs<'_>, &'static str) {
    use Needs::{Deletes, Member, Meta, OwnerOf, Registered, Serves, StorageNode};
    match command {
        Command::Bootstrap { .. } => (Meta, "make a cluster"),
        Command::SetNodeState { .. } => (Meta, "say which nodes are up"),
        Command::SetNodeAdminState { .. } => (Meta, "drain nodes"),
        Command::RemoveNode { .. } => (Meta, "remove nodes"),
        Command::EvictNode { .. } => (Meta, "evict nodes"),
        Command::RemoveLost { lost, .. } => match lost {
            Lost::Node(_) => (Meta, "remove nodes"),
            Lost::Device(device) => (OwnerOf(*device), "remove devices of other nodes"),
        },
        Command::RaiseLevel { .. } => (Meta, "raise the cluster's feature level"),
        Command::CreateToken { .. } => (Meta, "make join tokens"),
        Command::RevokeToken { .. } => (Meta, "revoke join tokens"),
        Command::RedeemToken { .. } => (Meta, "let nodes in"),
        Command::Regroup { .. } => (Meta, "change placement groups"),
        Command::CreatePool { .. } => (Meta, "make pools"),
        Command::SetPool { .. } => (Meta, "change pools"),
        Command::DeletePool { .. } => (Meta, "delete pools"),
        Command::RegisterNode { node, .. } => (Registered(node), "register other nodes"),
        Command::RegisterDevice { device, .. } => {
            (StorageNode(device.node), "register devices of other nodes")
        }
        Command::SetDeviceState { device, .. } => {
            (OwnerOf(*device), "change devices of other nodes")
        }
        Command::LoseDevice { for_long: true, .. } => (Meta, "replace devices"),
        Command::LoseDevice { device, .. } => (OwnerOf(*device), "give up devices of other nodes"),
        Command::DrainDevice { device, .. } => (OwnerOf(*device), "drain devices of other nodes"),
        Command::RemoveDevice { device, .. } => (OwnerOf(*device), "remove devices of other nodes"),
        Command::Promote { device, .. } => (OwnerOf(*device), "promote replicas of other nodes"),
        Command::GrantLease { node, volume, .. } => (
            Needs::Leases(*node, volume),
            "take leases for other nodes, or of filesystems that are not attached to it",
        ),
        Command::ReleaseLease { node, .. } => {
            (Needs::Node(*node), "give back leases of other nodes")
        }
        Command::CreateAttachment { attachment, .. } => (
            Needs::Node(attachment.node),
            "attach volumes on other nodes",
        ),
        Command::DeleteAttachment { attachment } => {
            (Deletes(attachment), "forget attachments of other nodes")
        }
        Command::SetWriteThrough { attachment, .. } => {
            (Serves(*attachment), "set write caches of other nodes")
        }
        Command::TakeOverAttachment { attachment, .. } => {
            (Serves(*attachment), "take over attachments of other nodes")
        }
        Command::MoveAttachment { attachment, .. } => {
            (Serves(*attachment), "move attachments of other nodes")
        }
        Command::OfferAttachment { attachment, .. } => {
            (Serves(*attachment), "offer attachments of other nodes")
        }
        Command::WithdrawOffer { attachment } => {
            (Serves(*attachment), "withdraw offers of other nodes")
        }
        Command::ExpireOffers { .. } => (Meta, "end offers"),
        Command::CreateExport { export, .. } => {
            (Needs::Node(export.node), "make NFS exports on other nodes")
        }
        Command::AssignExport {
            from,
            planned: true,
            ..
        } => (Needs::Node(*from), "move NFS exports of other nodes"),
        Command::AssignExport { to, .. } => {
            (Needs::Node(*to), "take NFS exports over for other nodes")
        }
        Command::DeleteExport { name } => {
            (Needs::Exports(name), "delete NFS exports of other nodes")
        }
        Command::ExportWithdrawn { node, .. } => {
            (Needs::Node(*node), "withdraw NFS exports of other nodes")
        }
        Command::ReportEvidence { evidence, .. } => {
            (OwnerOf(evidence.device), "speak for devices of other nodes")
        }
        Command::ChooseReplicas { .. } => (Meta, "choose replicas after a restoration"),
        Command::ForgetUnknown { .. } => (Meta, "give up data of unknown volumes"),
        Command::BeginHistory { .. } => (Meta, "recover the metadata"),
        Command::ReportFailed { .. } => (Member, "report failed replicas"),
        Command::CreateFilesystem { .. } => (Member, "make filesystems"),
        Command::DeleteFilesystem { .. } => (Member, "delete filesystems"),
        Command::FilesystemDropped { .. } => (Meta, "forget filesystems"),
        Command::CreateSegmentVolume { filesystem, .. }
        | Command::DeleteSegmentVolume { filesystem, .. } => (
            Needs::Mounts(*filesystem),
            "change segments of filesystems that are not attached to it",
        ),
        Command::CreateFilesystemAttachment { attachment, .. } => (
            Needs::Node(attachment.node),
            "attach filesystems on other nodes",
        ),
        Command::DeleteFilesystemAttachment { attachment } => {
            (Deletes(attachment), "forget attachments of other nodes")
        }
        Command::SetNamespaceGroupVoters { .. } => (Meta, "change namespace groups"),
        Command::CreateVolume { .. } => (Member, "make volumes"),
        Command::ResizeVolume { .. } => (Member, "resize volumes"),
        Command::SetVolume { .. } => (Member, "change volumes"),
        Command::VolumeTailDropped { volume } => (
            Needs::Holds(*volume),
            "end the shrinking of volumes whose lease it does not hold",
        ),
        Command::DeleteVolume { .. } => (Member, "delete volumes"),
        Command::VolumeDataDropped { .. } => (Member, "delete volumes"),
        Command::PromoteVolume { .. } | Command::RenameVolume { .. } => (Member, "rename volumes"),
        Command::Authored { command, .. } => needs(command),
        Command::RecordNotice { notice, .. } => match notice {
            Notice::PoolNearFull { .. }
            | Notice::PoolHasRoom { .. }
            | Notice::PoolOverCommitted { .. }
            | Notice::PoolCovered { .. } => (Meta, "say how full pools are"),
            Notice::DataDamaged { node, .. } | Notice::DataRepaired { node, .. } => {
                (Needs::Node(*node), "say what other nodes noticed")
            }
        },
    }
}

/// Who sends a command.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sender<'a> {
    /// By its certificate.
    pub(crate) id: NodeId,
    /// Its record, if it is in the map.
    pub(crate) node: Option<&'a Node>,
    /// It is in the Raft group: a node that the leader has added and that has yet to register itself.
    pub(crate) is_in_group: bool,
}

/// Whether a node may send a command, by the records that the leader has applied.
///
/// # Errors
/// The records cannot be read.
pub(crate) fn check(
    sender: Sender<'_>,
    command: &Command,
    map: &ClusterMap,
    records: &dyn Read,
) -> Result<Result<(), Refusal>, ReadError> {
    if let Command::Authored { by, command, .. } = command
        && (by.node != sender.id || !command.is_administrative())
    {
        return Ok(Err(AccessRefusal::NoSuchAuthor.into()));
    }
    let (needs, action) = needs(command);
    let Some(node) = sender.node else {
        let registers_itself = matches!(&needs, Needs::Registered(spec) if spec.id == sender.id);
        let refused = MapRefusal::unknown_node(sender.id);
        return Ok(match registers_itself && sender.is_in_group {
            true => Ok(()),
            false => Err(refused.into()),
        });
    };
    if node.roles.contains(&Role::Meta) {
        return Ok(Ok(()));
    }
    let stores = node.roles.contains(&Role::Storage);
    let may = match needs {
        Needs::Member => true,
        Needs::Meta => false,
        Needs::Node(id) => id == node.id,
        Needs::Leases(id, volume) => {
            let volume = VOLUMES.get(records, volume)?;
            let segment = volume.and_then(|volume| volume.segment);
            id == node.id
                && match segment {
                    Some(of) => filesystem_attachment::serves(records, id, of.filesystem)?,
                    None => true,
                }
        }
        Needs::Mounts(filesystem) => filesystem_attachment::serves(records, node.id, filesystem)?,
        // Of what is not there the state machine says so.
        Needs::Exports(name) => EXPORTS
            .get(records, name)?
            .is_none_or(|export| export.node == node.id),
        Needs::StorageNode(id) => stores && id == node.id,
        // Of what is not there the state machine says so.
        Needs::OwnerOf(device) => {
            let device = map.device(device);
            device.is_none_or(|device| stores && device.node == node.id)
        }
        // Of what is not there the state machine says so.
        Needs::Serves(id) => {
            let attachment = ATTACHMENTS.get(records, &id)?;
            attachment.is_none_or(|attachment| attachment.node == node.id)
        }
        // Of what is not there the state machine says so.
        Needs::Holds(id) => {
            let holder = LEASES.get(records, &id)?.and_then(|lease| lease.holder);
            holder == Some(node.id) || VOLUME_NAMES.get(records, &id)?.is_none()
        }
        Needs::Deletes(key) => {
            let serves = match key {
                AttachmentKey::Id(id) | AttachmentKey::Incoming(id) => {
                    let of_volume = ATTACHMENTS.get(records, id)?.map(|found| found.node);
                    let mount = FILESYSTEM_ATTACHMENTS.get(records, id)?;
                    of_volume.or(mount.map(|found| found.node))
                }
                AttachmentKey::Socket { node, .. } => Some(*node),
            };
            serves.is_none_or(|serves| serves == node.id)
                || calls_off(node, key, records)?
                || takes_over_export(node, key, map, records)?
        }
        Needs::Registered(spec) if spec.id == node.id => {
            return Ok(check_roles(node, spec).map_err(Into::into));
        }
        Needs::Registered(_) => false,
    };
    Ok(match may {
        true => Ok(()),
        false => Err(refusal(node, action, map).into()),
    })
}

/// Whether an attachment is to take the place of one that the node serves, which may call that off.
fn calls_off(node: &Node, key: &AttachmentKey, records: &dyn Read) -> Result<bool, ReadError> {
    let AttachmentKey::Incoming(id) = key else {
        return Ok(false);
    };
    // Of what is not there the state machine says so.
    let Some(incoming) = ATTACHMENTS.get(records, id)? else {
        return Ok(true);
    };
    let AttachmentTarget::Volume { id: volume, .. } = incoming.target;
    let all = volume::attachments(records, volume)?;
    Ok(all
        .iter()
        .any(|other| other.node == node.id && other.options.incoming.is_none()))
}

/// Returns true if an NFS node has to forget an attachment to serve the export of its volume: another NFS
/// node had the volume attached, and is down. No other node takes a volume of a node that is down: a node
/// counts as down three seconds after its last heartbeat, and a restart takes longer.
fn takes_over_export(
    node: &Node,
    key: &AttachmentKey,
    map: &ClusterMap,
    records: &dyn Read,
) -> Result<bool, ReadError> {
    let AttachmentKey::Id(id) = key else {
        return Ok(false);
    };
    let Some(attachment) = ATTACHMENTS.get(records, id)? else {
        return Ok(false);
    };
    let is_nfs_node = |node: &Node| node.roles.contains(&Role::Nfs);
    let is_down = |other: &Node| is_nfs_node(other) && other.state == NodeState::Down;
    if !is_nfs_node(node) || !map.node(attachment.node).is_some_and(is_down) {
        return Ok(false);
    }
    let AttachmentTarget::Volume { id: volume, .. } = attachment.target;
    let export = export::of_volume(records, volume)?;
    Ok(export.is_some_and(|export| export.node == node.id))
}

/// A node gives itself no roles that its join token did not grant.
fn check_roles(node: &Node, spec: &NodeSpec) -> Result<(), MapRefusal> {
    if spec.roles.iter().all(|role| node.may_have(*role)) {
        return Ok(());
    }
    Err(MapRefusal::RolesNotGranted {
        node: node.id,
        name: node.name.clone().into(),
        asked: spec.roles.clone(),
        granted: node.roles.union(&node.granted).copied().collect(),
    })
}

fn refusal(node: &Node, action: &str, map: &ClusterMap) -> AccessRefusal {
    let keeps = map.nodes().filter(|one| one.roles.contains(&Role::Meta));
    AccessRefusal::NeedsMeta {
        node: node.name.to_string(),
        roles: node.roles.clone(),
        action: action.to_owned(),
        run_on: keeps
            .take(NAMED_MAX)
            .map(|one| one.name.to_string())
            .collect(),
    }
}

/// Whether Raft messages of a node are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RaftSender {
    /// It votes, or may vote by now.
    Trusted,
    /// This node knows nothing that speaks for it or against it, for it may be behind. It is believed only
    /// while no known leader is heard of.
    Unknown,
    /// It was removed, or has no part in the metadata.
    Refused,
}

/// Judges the sender of a Raft message by what this node has applied (`map`, `was_removed`) and by its Raft
/// group.
pub(crate) fn raft_sender(
    id: NodeId,
    map: &ClusterMap,
    was_removed: bool,
    voters: &BTreeSet<NodeId>,
    learners: &BTreeSet<NodeId>,
) -> RaftSender {
    // A node that was let in and has no metadata yet gets them from whoever has them. A removed one votes
    // until the others have agreed to do without it, and they may need its vote for that.
    if map.cluster().is_none() || voters.contains(&id) {
        return RaftSender::Trusted;
    }
    let never_votes = |node: &Node| !node.may_have(Role::Meta);
    if was_removed || map.node(id).is_some_and(never_votes) {
        return RaftSender::Refused;
    }
    match map.node(id).is_some() && learners.contains(&id) {
        true => RaftSender::Trusted,
        false => RaftSender::Unknown,
    }
}

#[cfg(test)]
mod tests;
