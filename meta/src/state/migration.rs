//! Attachments that move between nodes: with their guest, which is migrated live, or without one.
//!
//! The destination has an *incoming* attachment beside the one of the source, and serves its socket without
//! the lease of the volume: requests wait there. The source gives its lease back when its guest does not run
//! any more. Then the destination takes over ([`take_over`]): one command grants it the lease and forgets the
//! source's attachment. So no start of the source's daemon can bring that back, and whatever goes wrong
//! before leaves the source as it was.

use super::map::{cluster, node_name};
use super::tables::ATTACHMENTS;
use super::{Read, Stop, Txn, attachment, lease, volume};
use crate::command::{AttachmentKey, AttachmentSpec, Outcome};
use crate::ids::{AttachmentId, Generation, NodeId, UnixMillis};
use crate::level::Level;
use crate::model::{AttachmentOptions, AttachmentTarget, Incoming, Volume};
use crate::refusal::AttachmentRefusal;

/// Whether an incoming attachment may be made: there is one on another node to take the place of, and no
/// other that is to.
pub(super) fn check(view: &dyn Read, spec: &AttachmentSpec, volume: &Volume) -> Result<(), Stop> {
    if cluster(view)?.level < Level::MIGRATION {
        return Err(AttachmentRefusal::LevelTooLow.into());
    }
    let name = || volume.name.clone().into();
    let others = volume::attachments(view, volume.id)?;
    if let Some(other) = others.iter().find(|one| one.options.incoming.is_some()) {
        return Err(AttachmentRefusal::OtherIncoming {
            volume: name(),
            socket: other.socket.clone(),
            node: node_name(view, other.node)?,
        }
        .into());
    }
    if let Some(other) = others.iter().find(|one| one.node == spec.node) {
        return Err(AttachmentRefusal::SameNode {
            volume: name(),
            socket: other.socket.clone(),
        }
        .into());
    }
    match others.len() {
        0 => Err(AttachmentRefusal::NothingIncoming { volume: name() }.into()),
        1 => Ok(()),
        attachments => Err(AttachmentRefusal::SharedSource {
            volume: name(),
            attachments,
        }
        .into()),
    }
}

/// Makes an incoming attachment on `to` for the guest-less attachment `id`.
pub(super) fn offer(
    txn: &mut Txn<'_>,
    id: AttachmentId,
    to: NodeId,
    socket: &str,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    let source = attachment::find(txn, id)?;
    let spec = AttachmentSpec {
        volume: source.target.name().to_string(),
        node: to,
        socket: socket.to_owned(),
        queues: source.queues,
        read_only: source.read_only,
        options: AttachmentOptions {
            incoming: Some(Incoming::Move),
            ..source.options
        },
    };
    attachment::create(txn, &spec, at)
}

/// The lease as it is now.
pub(super) fn take_over(
    txn: &mut Txn<'_>,
    id: AttachmentId,
    expired: Option<Generation>,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    let mut incoming = attachment::find(txn, id)?;
    if incoming.options.incoming.is_none() {
        return Err(AttachmentRefusal::NotIncoming { id }.into());
    }
    let AttachmentTarget::Volume {
        name,
        id: volume_id,
    } = incoming.target.clone();
    let granted = lease::grant(txn, &name, incoming.node, expired, at)?;
    incoming.options.incoming = None;
    // There is one at most. It may have been detached since.
    let others = volume::attachments(txn, volume_id)?;
    if let Some(source) = others.into_iter().find(|one| one.id != id) {
        // The guest made its choice there, and does not make it again.
        incoming.options.write_through = source.options.write_through;
        attachment::delete(txn, &AttachmentKey::Id(source.id))?;
    }
    ATTACHMENTS.put(txn, &id, &incoming);
    Ok(granted)
}
