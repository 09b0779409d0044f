//! Leases: who may write a volume, and the generation that replicas fence by.
//!
//! Time does not enter here. The leader watches renewals on its monotonic clock, and says in the command
//! which generation it found to have run out; the grant holds only if that is still the current one.

use super::map::{cluster, named, node_name, require_node};
use super::tables::LEASES;
use super::{Read, ReadError, Stop, Txn, volume};
use crate::command::Outcome;
use crate::ids::{Generation, NodeId, UnixMillis, VolumeId};
use crate::model::{Attachment, Lease, Role};
use crate::refusal::{LeaseRefusal, Refusal};

/// Refuses a lease to a node that may not ask for it. The lease of an attached volume goes to a node that
/// serves it, or to an administrator's, which copies the volume of a dead node. An incoming attachment gives
/// no right before it takes over.
pub(super) fn check_asker(view: &dyn Read, volume: &str, node: NodeId) -> Result<(), Stop> {
    let is_administrator = require_node(view, node)?.roles.contains(&Role::Meta);
    let volume = volume::require_leasable(view, volume)?;
    let attachments = volume::attachments(view, volume.id)?;
    let serves = |one: &Attachment| one.node == node && one.options.incoming.is_none();
    if let Some(other) = attachments.first()
        && !is_administrator
        && !attachments.iter().any(serves)
    {
        return Err(LeaseRefusal::Attached {
            volume: volume.name.into(),
            node: node_name(view, other.node)?,
            socket: other.socket.clone(),
        }
        .into());
    }
    Ok(())
}

/// A grant always raises the generation, also for the present holder: it may be a new process of that node,
/// and what the old one sent must not arrive later.
pub(super) fn grant(
    txn: &mut Txn<'_>,
    volume: &str,
    node: NodeId,
    expired: Option<Generation>,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    let cluster = cluster(txn)?;
    require_node(txn, node)?;
    let volume = volume::require_leasable(txn, volume)?;
    let old = LEASES.get(txn, &volume.id)?;
    let generation = old
        .as_ref()
        .map_or(Generation::default(), |lease| lease.generation);
    let other_holder = old
        .and_then(|lease| lease.holder)
        .filter(|holder| *holder != node);
    if let Some(holder) = other_holder.filter(|_| expired != Some(generation)) {
        return Err(LeaseRefusal::Held {
            volume: volume.name.into(),
            holder: named(txn, holder)?,
            generation,
        }
        .into());
    }
    let lease = Lease {
        volume: volume.id,
        holder: Some(node),
        generation: generation.next(),
        epoch: cluster.epoch,
        granted_at: at,
    };
    LEASES.put(txn, &volume.id, &lease);
    Ok(Outcome::Lease(lease))
}

pub(super) fn release(
    txn: &mut Txn<'_>,
    volume: VolumeId,
    node: NodeId,
    generation: Generation,
) -> Result<Outcome, Stop> {
    if let Some(lease) = LEASES.get(txn, &volume)?
        && lease.holder.is_none()
        && lease.generation == generation
    {
        // Said twice, because the first answer was lost.
        return Ok(Outcome::Lease(lease));
    }
    let mut lease = check_holder(txn, volume, node, generation)?;
    lease.holder = None;
    LEASES.put(txn, &volume, &lease);
    Ok(Outcome::Lease(lease))
}

/// Takes the right to write from whoever has it.
pub(super) fn revoke(txn: &mut Txn<'_>, volume: VolumeId) -> Result<(), ReadError> {
    if let Some(mut lease) = LEASES.get(txn, &volume)? {
        lease.holder = None;
        lease.generation = lease.generation.next();
        LEASES.put(txn, &volume, &lease);
    }
    Ok(())
}

/// The lease of a volume, if the node holds it at this generation.
fn check_holder(
    view: &dyn Read,
    volume: VolumeId,
    node: NodeId,
    claimed: Generation,
) -> Result<Lease, Stop> {
    let found = LEASES.get(view, &volume)?;
    let current = found
        .as_ref()
        .map_or(Generation::default(), |lease| lease.generation);
    if claimed < current {
        return Err(LeaseRefusal::Superseded {
            volume: volume::named_volume(view, volume)?,
            current,
            claimed,
        }
        .into());
    }
    match found.filter(|lease| lease.generation == claimed && lease.holder == Some(node)) {
        Some(lease) => Ok(lease),
        None => Err(LeaseRefusal::NotHolder {
            volume: volume::named_volume(view, volume)?,
            node: named(view, node)?,
            current,
        }
        .into()),
    }
}

/// The lease of a volume, or why the node may not renew it.
///
/// # Errors
/// The records cannot be read.
pub(crate) fn renewable(
    view: &dyn Read,
    volume: VolumeId,
    node: NodeId,
    claimed: Generation,
) -> Result<Result<Lease, Refusal>, ReadError> {
    match check_holder(view, volume, node, claimed) {
        Ok(lease) => Ok(Ok(lease)),
        Err(Stop::Refused(refusal)) => Ok(Err(refusal)),
        Err(Stop::Read(error)) => Err(error),
    }
}
