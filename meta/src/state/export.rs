//! NFS exports: made, assigned to an NFS node, deleted in two steps.
//!
//! The record says which NFS node is to serve an export. Which one may write its volume is the lease's to
//! say: the NFS node that was assigned takes it, and mounts nothing before it has it.

use uuid::Uuid;

use super::map::{cluster, named, require_node};
use super::tables::EXPORTS;
use super::{Read, ReadError, Stop, Txn, event, volume};
use crate::command::{ExportSpec, Outcome};
use crate::ids::{NodeId, UnixMillis, VolumeId};
use crate::model::{AdminState, EventKind, Export, ExportState, Node, NodeState, Role};
use crate::refusal::{ExportRefusal, MAX_EXPORT_CLIENTS, MAX_EXPORT_TEXT_BYTES, name};

pub(super) fn create(
    txn: &mut Txn<'_>,
    fsid: Uuid,
    spec: &ExportSpec,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    cluster(txn)?;
    let name = name(&spec.name)?;
    if let Some(export) = EXPORTS.get(txn, &name)? {
        // Said twice, because the first answer was lost.
        return match export.fsid == fsid {
            true => Ok(Outcome::Export(export)),
            false => Err(ExportRefusal::NameTaken { name: name.into() }.into()),
        };
    }
    check_texts(spec)?;
    require_nfs_node(txn, spec.node)?;
    let volume = volume::require_ready(txn, &spec.volume)?;
    let name_of = || spec.name.clone();
    for other in EXPORTS.all(txn)? {
        if other.volume_id == volume.id {
            return Err(ExportRefusal::VolumeTaken {
                volume: volume.name.into(),
                export: other.name.into(),
            }
            .into());
        }
        let ip = |address: &Option<String>| {
            let text = address.as_deref()?;
            Some(text.split('/').next().unwrap_or(text).to_owned())
        };
        if let Some(address) = ip(&spec.address).filter(|_| ip(&other.address) == ip(&spec.address))
        {
            return Err(ExportRefusal::AddressTaken {
                name: name_of(),
                address,
                export: other.name.into(),
            }
            .into());
        }
    }
    let export = Export {
        name,
        volume: volume.name,
        volume_id: volume.id,
        fsid,
        node: spec.node,
        clients: spec.clients.clone(),
        read_only: spec.read_only,
        root_squash: spec.root_squash,
        address: spec.address.clone(),
        state: ExportState::Active,
        created_at: at,
    };
    EXPORTS.put(txn, &export.name, &export);
    let what = EventKind::ExportCreated {
        export: export.name.clone(),
        node: export.node,
    };
    event::push(txn, at, what)?;
    Ok(Outcome::Export(export))
}

/// Bounded: they lie in every snapshot of the metadata.
fn check_texts(spec: &ExportSpec) -> Result<(), ExportRefusal> {
    let texts = spec.clients.iter().chain(&spec.address);
    let is_long = |text: &String| text.len() > MAX_EXPORT_TEXT_BYTES;
    let name = spec.name.clone();
    if spec.clients.is_empty() {
        return Err(ExportRefusal::NoClients { name });
    }
    match spec.clients.len() > MAX_EXPORT_CLIENTS || texts.into_iter().any(is_long) {
        true => Err(ExportRefusal::TooManyClients { name }),
        false => Ok(()),
    }
}

fn require_nfs_node(view: &dyn Read, id: NodeId) -> Result<Node, Stop> {
    let node = require_node(view, id)?;
    match node.roles.contains(&Role::Nfs) {
        true => Ok(node),
        false => Err(ExportRefusal::NotNfsNode {
            node: node.name.into(),
        }
        .into()),
    }
}

pub(super) fn assign(
    txn: &mut Txn<'_>,
    name: &str,
    (from, to): (NodeId, NodeId),
    planned: bool,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    let mut export = require(txn, name)?;
    if export.node == to {
        return Ok(Outcome::Export(export));
    }
    if export.node != from {
        let (name, node) = (name.to_owned(), named(txn, export.node)?);
        return Err(ExportRefusal::MovedMeanwhile { name, node }.into());
    }
    let target = require_nfs_node(txn, to)?;
    if target.state != NodeState::Up {
        return Err(ExportRefusal::NodeDown {
            node: target.name.into(),
        }
        .into());
    }
    let holder = super::tables::NODES.get(txn, &from)?;
    let can_go_on = holder.is_some_and(|node| {
        node.state == NodeState::Up
            && node.admin_state != AdminState::Draining
            && node.roles.contains(&Role::Nfs)
    });
    if can_go_on && !planned {
        let (name, node) = (name.to_owned(), named(txn, from)?);
        return Err(ExportRefusal::NodeUp { name, node }.into());
    }
    export.node = to;
    EXPORTS.put(txn, name, &export);
    let what = EventKind::ExportMoved {
        export: export.name.clone(),
        from,
        to,
        planned,
    };
    event::push(txn, at, what)?;
    Ok(Outcome::Export(export))
}

pub(super) fn delete(txn: &mut Txn<'_>, name: &str) -> Result<Outcome, Stop> {
    let mut export = require(txn, name)?;
    if export.state != ExportState::Deleting {
        export.state = ExportState::Deleting;
        EXPORTS.put(txn, name, &export);
    }
    Ok(Outcome::Export(export))
}

pub(super) fn withdrawn(
    txn: &mut Txn<'_>,
    name: &str,
    node: NodeId,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    let Some(export) = EXPORTS.get(txn, name)? else {
        // Said twice, because the first answer was lost.
        return Ok(Outcome::Done);
    };
    if export.state != ExportState::Deleting || export.node != node {
        return Err(ExportRefusal::NotWithdrawn {
            name: name.to_owned(),
        }
        .into());
    }
    EXPORTS.delete(txn, name);
    let what = EventKind::ExportDeleted {
        export: export.name.clone(),
    };
    event::push(txn, at, what)?;
    Ok(Outcome::Export(export))
}

fn require(view: &dyn Read, name: &str) -> Result<Export, Stop> {
    Ok(EXPORTS
        .get(view, name)?
        .ok_or_else(|| ExportRefusal::Unknown {
            name: name.to_owned(),
        })?)
}

/// The export of a volume.
pub(crate) fn of_volume(view: &dyn Read, id: VolumeId) -> Result<Option<Export>, ReadError> {
    let mut all = EXPORTS.all(view)?.into_iter();
    Ok(all.find(|export| export.volume_id == id))
}
