//! Attachments that move between nodes: with their guest in a live migration, or without a guest.
//!
//! The source's node, or an administrator, offers the attachment to one node ([`offer`]). Until the offer
//! expires that node may create an *incoming* attachment beside the source's. It serves the socket without
//! the lease of the volume: requests wait there. The source returns its lease when its guest stops running.
//! Then the destination takes over ([`take_over`]): one command grants it the lease and deletes the source's
//! attachment, so a restart of the source's daemon cannot bring it back. A failure before that command leaves
//! the source unchanged.
//!
//! **Architecture Invariant:** no node gets another node's volume without consent. An incoming attachment
//! needs an offer. It gives no right to the lease but that to take over, and that ends when the offer is
//! withdrawn or the time of the attachment is over.

use std::time::Duration;

use super::map::{named, node_name, require_node};
use super::tables::ATTACHMENTS;
use super::{Read, Stop, Txn, attachment, event, lease, volume};
use crate::command::{AttachmentKey, AttachmentSpec, Outcome};
use crate::ids::{AttachmentId, Generation, NodeId, UnixMillis};
use crate::model::{
    Attachment, AttachmentOptions, AttachmentTarget, EventKind, INCOMING_TIME_MAX, Incoming,
    OFFER_TIME_MAX, Offer, Volume,
};
use crate::refusal::AttachmentRefusal;

/// Returns the deadline of an incoming attachment that is created, or offered again, now.
pub(super) fn end_of_incoming(at: UnixMillis) -> UnixMillis {
    after(at, INCOMING_TIME_MAX)
}

fn after(at: UnixMillis, time: Duration) -> UnixMillis {
    let time_ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    UnixMillis(at.0.saturating_add(time_ms))
}

/// Returns the attachment whose place an incoming one is to take: the only one of the volume, and on another
/// node.
pub(super) fn source(
    view: &dyn Read,
    spec: &AttachmentSpec,
    volume: &Volume,
) -> Result<Attachment, Stop> {
    let name = || volume.name.clone().into();
    let others = volume::attachments(view, volume.id)?;
    if let Some(other) = others.iter().find(|one| one.options.incoming.is_some()) {
        return Err(AttachmentRefusal::OtherIncoming {
            volume: name(),
            socket: other.socket.clone(),
            node: named(view, other.node)?,
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
    sole(&others, volume.name.as_str())
}

fn sole(all: &[Attachment], volume: &str) -> Result<Attachment, Stop> {
    let volume = volume.to_owned();
    match all {
        [] => Err(AttachmentRefusal::NothingIncoming { volume }.into()),
        [source] => Ok(source.clone()),
        all => {
            let attachments = all.len();
            Err(AttachmentRefusal::SharedSource {
                volume,
                attachments,
            }
            .into())
        }
    }
}

/// Refuses an incoming attachment without a valid offer.
pub(super) fn require_offer(
    view: &dyn Read,
    source: &Attachment,
    to: NodeId,
    at: UnixMillis,
) -> Result<(), Stop> {
    let offer = source.offer.filter(|offer| offer.to == to);
    if offer.is_some_and(|offer| at < offer.expires_at) {
        return Ok(());
    }
    let volume = source.target.name().to_string();
    let (node, to) = (node_name(view, source.node)?, node_name(view, to)?);
    Err(match offer {
        Some(_) => AttachmentRefusal::OfferExpired { volume, node, to },
        None => AttachmentRefusal::NotOffered { volume, node, to },
    }
    .into())
}

/// Offers an attachment to a node. The offer replaces an earlier one.
pub(super) fn offer(
    txn: &mut Txn<'_>,
    id: AttachmentId,
    to: NodeId,
    lifetime_s: u64,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    let lifetime = Duration::from_secs(lifetime_s);
    if lifetime.is_zero() || lifetime > OFFER_TIME_MAX {
        return Err(AttachmentRefusal::BadOffer { lifetime_s }.into());
    }
    require_node(txn, to)?;
    let mut source = serving(txn, id)?;
    if source.node == to {
        return Err(AttachmentRefusal::SameNode {
            volume: source.target.name().to_string(),
            socket: source.socket,
        }
        .into());
    }
    let (incoming, serving) = of_volume(txn, &source)?;
    sole(&serving, source.target.name())?;
    for mut one in incoming {
        if one.node == to {
            one.expires_at = Some(end_of_incoming(at));
            ATTACHMENTS.put(txn, &one.id.clone(), &one);
        } else {
            attachment::delete(txn, &AttachmentKey::Id(one.id))?;
        }
    }
    source.offer = Some(Offer {
        to,
        expires_at: after(at, lifetime),
    });
    ATTACHMENTS.put(txn, &id, &source);
    Ok(Outcome::Attachment(source))
}

/// Withdraws the offer of an attachment and ends the incoming attachment that it allowed.
pub(super) fn withdraw(txn: &mut Txn<'_>, id: AttachmentId) -> Result<Outcome, Stop> {
    let mut source = serving(txn, id)?;
    let (incoming, _) = of_volume(txn, &source)?;
    if source.offer.take().is_none() && incoming.is_empty() {
        let volume = source.target.name().to_string();
        return Err(AttachmentRefusal::NothingOffered { volume }.into());
    }
    for one in incoming {
        attachment::delete(txn, &AttachmentKey::Id(one.id))?;
    }
    ATTACHMENTS.put(txn, &id, &source);
    Ok(Outcome::Attachment(source))
}

/// Ends expired offers and expired incoming attachments.
pub(super) fn expire(txn: &mut Txn<'_>, at: UnixMillis) -> Result<Outcome, Stop> {
    for mut one in ATTACHMENTS.all(txn)? {
        if one.expires_at.is_some_and(|end| end <= at) {
            attachment::delete(txn, &AttachmentKey::Id(one.id))?;
            let expired = EventKind::IncomingExpired {
                volume: one.target.name().clone(),
                node: one.node,
                socket: one.socket,
            };
            event::push(txn, at, expired)?;
        } else if one.offer.is_some_and(|offer| offer.expires_at <= at) {
            one.offer = None;
            ATTACHMENTS.put(txn, &one.id.clone(), &one);
        }
    }
    Ok(Outcome::Done)
}

/// Returns the attachment, unless it is incoming.
fn serving(view: &dyn Read, id: AttachmentId) -> Result<Attachment, Stop> {
    let found = attachment::find(view, id)?;
    match found.options.incoming {
        None => Ok(found),
        Some(_) => Err(AttachmentRefusal::IncomingOffered {
            volume: found.target.name().to_string(),
            node: node_name(view, found.node)?,
            socket: found.socket,
        }
        .into()),
    }
}

/// Returns the attachments of the source's volume: incoming ones, and others.
fn of_volume(
    view: &dyn Read,
    source: &Attachment,
) -> Result<(Vec<Attachment>, Vec<Attachment>), Stop> {
    let AttachmentTarget::Volume { id, .. } = source.target;
    let all = volume::attachments(view, id)?;
    Ok(all
        .into_iter()
        .partition(|one| one.options.incoming.is_some()))
}

/// Creates an incoming attachment on `to` for the attachment `id` without a guest. The move is itself the
/// offer.
pub(super) fn move_to(
    txn: &mut Txn<'_>,
    id: AttachmentId,
    to: NodeId,
    socket: &str,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    let source = serving(txn, id)?;
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
    attachment::insert(txn, &spec, at)
}

/// Replaces the source by the incoming attachment. Returns the new lease.
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
    if incoming.expires_at.is_some_and(|end| end <= at) {
        let volume = incoming.target.name().to_string();
        return Err(AttachmentRefusal::IncomingExpired { volume }.into());
    }
    let AttachmentTarget::Volume {
        name,
        id: volume_id,
    } = incoming.target.clone();
    let granted = lease::grant(txn, &name, incoming.node, expired, at)?;
    (incoming.options.incoming, incoming.expires_at) = (None, None);
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
