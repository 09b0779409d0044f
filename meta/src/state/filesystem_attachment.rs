//! Attachments of filesystems: which socket serves which filesystem to a guest. Any number of them may serve
//! the same one, on any nodes.

use namespace::FilesystemId;

use super::map::{node_name, require_node, take_number};
use super::tables::{ATTACHMENTS_BY_SOCKET, FILESYSTEM_ATTACHMENTS};
use super::{Read, ReadError, Stop, Txn, attachment, filesystem};
use crate::command::{AttachmentKey, FilesystemAttachmentSpec, Outcome};
use crate::ids::{NodeId, UnixMillis};
use crate::model::{FilesystemAttachment, Role};
use crate::refusal::{AttachmentRefusal, MAX_FILESYSTEM_QUEUES, MAX_TAG_BYTES};

pub(super) fn create(
    txn: &mut Txn<'_>,
    spec: &FilesystemAttachmentSpec,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    let node = require_node(txn, spec.node)?;
    if !node.roles.contains(&Role::Host) {
        let node = node.name.into();
        return Err(AttachmentRefusal::NotHost { node }.into());
    }
    check(spec)?;
    let filesystem = filesystem::ready(filesystem::require(txn, &spec.filesystem)?)?;
    let by_socket = (spec.node, spec.socket.clone());
    if let Some(same) = said_before(txn, spec, filesystem.id)? {
        return Ok(Outcome::FilesystemAttachment(same));
    }
    attachment::require_free(txn, &by_socket)?;
    let attachment = FilesystemAttachment {
        id: take_number(txn, |counters| &mut counters.attachment)?,
        filesystem: filesystem.id,
        name: filesystem.name,
        node: spec.node,
        socket: spec.socket.clone(),
        tag: spec.tag.clone(),
        queues: spec.queues,
        read_only: spec.read_only,
        created_at: at,
    };
    FILESYSTEM_ATTACHMENTS.put(txn, &attachment.id, &attachment);
    ATTACHMENTS_BY_SOCKET.put(txn, &by_socket, &attachment.id);
    Ok(Outcome::FilesystemAttachment(attachment))
}

/// The attachment that was asked for by these very words: said twice, because the first answer was lost.
fn said_before(
    view: &dyn Read,
    spec: &FilesystemAttachmentSpec,
    filesystem: FilesystemId,
) -> Result<Option<FilesystemAttachment>, ReadError> {
    let by_socket = (spec.node, spec.socket.clone());
    let Some(id) = ATTACHMENTS_BY_SOCKET.get(view, &by_socket)? else {
        return Ok(None);
    };
    let there = FILESYSTEM_ATTACHMENTS.get(view, &id)?;
    Ok(there.filter(|there| {
        let of = (there.filesystem, there.tag.as_str());
        of == (filesystem, spec.tag.as_str())
            && (there.queues, there.read_only) == (spec.queues, spec.read_only)
    }))
}

fn check(spec: &FilesystemAttachmentSpec) -> Result<(), AttachmentRefusal> {
    attachment::check_socket(&spec.socket)?;
    if spec.queues == 0 || spec.queues > MAX_FILESYSTEM_QUEUES {
        let queues = spec.queues;
        return Err(AttachmentRefusal::BadFilesystemQueues { queues });
    }
    let is_bad = |text: &str| text.is_empty() || text.contains(['\0', '\n']);
    match spec.tag.len() > MAX_TAG_BYTES || is_bad(&spec.tag) {
        true => Err(AttachmentRefusal::BadTag {
            tag: spec.tag.chars().take(MAX_TAG_BYTES).collect(),
        }),
        false => Ok(()),
    }
}

pub(super) fn delete(txn: &mut Txn<'_>, key: &AttachmentKey) -> Result<Outcome, Stop> {
    let (id, what) = match key {
        AttachmentKey::Id(id) => (Some(*id), format!("number {id}")),
        AttachmentKey::Socket { node, socket } => {
            let id = ATTACHMENTS_BY_SOCKET.get(txn, &(*node, socket.clone()))?;
            let node = node_name(txn, *node)?;
            (id, format!("at {socket:?} on node {node}"))
        }
        AttachmentKey::Incoming(id) => (Some(*id), format!("number {id}")),
    };
    let found = match id {
        Some(id) => FILESYSTEM_ATTACHMENTS.get(txn, &id)?,
        None => None,
    };
    let attachment = found.ok_or(AttachmentRefusal::Unknown { what })?;
    if matches!(key, AttachmentKey::Incoming(_)) {
        // A filesystem is attached wherever it is used: nothing has to move.
        let id = attachment.id;
        return Err(AttachmentRefusal::NotIncoming { id }.into());
    }
    FILESYSTEM_ATTACHMENTS.delete(txn, &attachment.id);
    ATTACHMENTS_BY_SOCKET.delete(txn, &(attachment.node, attachment.socket.clone()));
    Ok(Outcome::FilesystemAttachment(attachment))
}

/// Whether a node serves a filesystem to a guest.
pub(crate) fn serves(
    view: &dyn Read,
    node: NodeId,
    filesystem: FilesystemId,
) -> Result<bool, ReadError> {
    let mut all = FILESYSTEM_ATTACHMENTS.all(view)?.into_iter();
    Ok(all.any(|one| one.node == node && one.filesystem == filesystem))
}
