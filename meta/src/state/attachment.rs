//! Attachments: which socket serves which volume.

use std::path::Path;

use super::map::{cluster, named, node_name, require_node, take_number};
use super::tables::{
    ATTACHMENTS, ATTACHMENTS_BY_SOCKET, ATTACHMENTS_BY_VOLUME, FILESYSTEM_ATTACHMENTS,
};
use super::{Read, Stop, Txn, export, migration, volume};
use crate::command::{AttachmentKey, AttachmentSpec, Outcome};
use crate::ids::{AttachmentId, NodeId, UnixMillis};
use crate::model::{Attachment, AttachmentTarget, Volume};
use crate::refusal::{
    AttachmentRefusal, MAX_EXTRA_OPTION_BYTES, MAX_EXTRA_OPTIONS, MAX_QUEUES,
    MAX_SOCKET_PATH_BYTES, VolumeRefusal,
};

/// Makes an attachment for a node that asks for it. An incoming one needs an offer.
pub(super) fn create(
    txn: &mut Txn<'_>,
    spec: &AttachmentSpec,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    if spec.options.incoming.is_some() {
        let volume = volume::require_ready(txn, &spec.volume)?;
        let source = migration::source(txn, spec, &volume)?;
        migration::require_offer(txn, &source, spec.node, at)?;
    }
    insert(txn, spec, at)
}

/// Creates an attachment. An incoming one needs the consent of the source.
pub(super) fn insert(
    txn: &mut Txn<'_>,
    spec: &AttachmentSpec,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    cluster(txn)?;
    require_node(txn, spec.node)?;
    check(spec)?;
    let volume = volume::require_ready(txn, &spec.volume)?;
    // Elsewhere it would keep the export's NFS node from its lease.
    if let Some(export) = export::of_volume(txn, volume.id)?
        && export.node != spec.node
    {
        return Err(VolumeRefusal::Exported {
            name: volume.name.into(),
            export: export.name.into(),
        }
        .into());
    }
    let by_socket = (spec.node, spec.socket.clone());
    require_free(txn, &by_socket)?;
    // A read-only volume is served read-only, whatever is asked for.
    let mut read_only = spec.read_only || volume.read_only;
    let mut expires_at = None;
    match spec.options.incoming {
        Some(_) => {
            let source = migration::source(txn, spec, &volume)?;
            // Nobody offers more than it has.
            read_only |= source.read_only;
            expires_at = Some(migration::end_of_incoming(at));
        }
        None => check_sharing(txn, spec, read_only, &volume)?,
    }
    let attachment = Attachment {
        id: take_number(txn, |counters| &mut counters.attachment)?,
        node: spec.node,
        socket: spec.socket.clone(),
        target: AttachmentTarget::Volume {
            name: volume.name,
            id: volume.id,
        },
        queues: spec.queues,
        read_only,
        options: spec.options.clone(),
        offer: None,
        expires_at,
        created_at: at,
    };
    ATTACHMENTS.put(txn, &attachment.id, &attachment);
    ATTACHMENTS_BY_SOCKET.put(txn, &by_socket, &attachment.id);
    ATTACHMENTS_BY_VOLUME.put(txn, &(volume.id, attachment.id), &attachment.id);
    Ok(Outcome::Attachment(attachment))
}

/// Refuses the socket of another attachment, of a volume or of a filesystem.
pub(super) fn require_free(view: &dyn Read, by_socket: &(NodeId, String)) -> Result<(), Stop> {
    let Some(id) = ATTACHMENTS_BY_SOCKET.get(view, by_socket)? else {
        return Ok(());
    };
    let volume = ATTACHMENTS.get(view, &id)?;
    let target = match volume {
        Some(other) => Some(other.target.name().to_string()),
        None => FILESYSTEM_ATTACHMENTS
            .get(view, &id)?
            .map(|other| other.name.into()),
    };
    let (node, socket) = by_socket;
    Err(AttachmentRefusal::SocketTaken {
        socket: socket.clone(),
        node: named(view, *node)?,
        target: target.unwrap_or_default(),
    }
    .into())
}

/// Refuses a path that no socket can have.
pub(super) fn check_socket(path: &str) -> Result<(), AttachmentRefusal> {
    let names_a_file = Path::new(path).file_name().is_some() && !path.ends_with('/');
    let is_good = Path::new(path).is_absolute()
        && names_a_file
        && path.len() <= MAX_SOCKET_PATH_BYTES
        && !path.contains('\0');
    match is_good {
        true => Ok(()),
        false => Err(AttachmentRefusal::BadSocketPath {
            socket: path.to_owned(),
        }),
    }
}

fn check(spec: &AttachmentSpec) -> Result<(), AttachmentRefusal> {
    check_socket(&spec.socket)?;
    if spec.queues == 0 || spec.queues > MAX_QUEUES {
        return Err(AttachmentRefusal::BadQueues {
            queues: spec.queues,
        });
    }
    for (number, (key, value)) in spec.options.extra.iter().enumerate() {
        if number >= MAX_EXTRA_OPTIONS || key.len() + value.len() > MAX_EXTRA_OPTION_BYTES {
            let key = key.chars().take(MAX_EXTRA_OPTIONS).collect();
            return Err(AttachmentRefusal::BadOption { key });
        }
    }
    Ok(())
}

/// Many may read a volume; whoever writes is alone, unless all say that they coordinate. While an attachment
/// moves nobody comes to it.
fn check_sharing(
    view: &dyn Read,
    spec: &AttachmentSpec,
    read_only: bool,
    volume: &Volume,
) -> Result<(), Stop> {
    let others = volume::attachments(view, volume.id)?;
    let in_the_way = others.into_iter().find(|other| {
        let all_read = read_only && other.read_only;
        let all_shared = spec.options.shared && other.options.shared;
        let is_coming_in = other.options.incoming.is_some();
        is_coming_in || !all_read && !all_shared
    });
    match in_the_way {
        Some(other) => {
            let volume = volume.name.clone().into();
            Err(AttachmentRefusal::VolumeInUse {
                volume,
                socket: other.socket,
                node: named(view, other.node)?,
            }
            .into())
        }
        None => Ok(()),
    }
}

pub(super) fn set_write_through(
    txn: &mut Txn<'_>,
    id: AttachmentId,
    on: bool,
) -> Result<Outcome, Stop> {
    let mut attachment = find(txn, id)?;
    if attachment.options.write_through != on {
        attachment.options.write_through = on;
        ATTACHMENTS.put(txn, &id, &attachment);
    }
    Ok(Outcome::Attachment(attachment))
}

/// Its record as it was, if there is one.
pub(super) fn find(view: &dyn Read, id: AttachmentId) -> Result<Attachment, Stop> {
    let found = ATTACHMENTS.get(view, &id)?;
    Ok(found.ok_or_else(|| AttachmentRefusal::Unknown {
        what: format!("number {id}"),
    })?)
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
        Some(id) => ATTACHMENTS.get(txn, &id)?,
        None => None,
    };
    let attachment = found.ok_or(AttachmentRefusal::Unknown { what })?;
    if matches!(key, AttachmentKey::Incoming(_)) && attachment.options.incoming.is_none() {
        let id = attachment.id;
        return Err(AttachmentRefusal::NotIncoming { id }.into());
    }
    ATTACHMENTS.delete(txn, &attachment.id);
    ATTACHMENTS_BY_SOCKET.delete(txn, &(attachment.node, attachment.socket.clone()));
    match attachment.target {
        AttachmentTarget::Volume { id, .. } => {
            ATTACHMENTS_BY_VOLUME.delete(txn, &(id, attachment.id));
            // A guest on its way made its choice here, and does not make it again.
            for mut next in volume::attachments(txn, id)? {
                if next.options.incoming.is_some() {
                    next.options.write_through = attachment.options.write_through;
                    ATTACHMENTS.put(txn, &next.id.clone(), &next);
                }
            }
        }
    }
    Ok(Outcome::Attachment(attachment))
}
