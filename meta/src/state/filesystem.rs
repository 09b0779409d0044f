//! Filesystems: made, placed on a namespace group, and deleted in two steps.
//!
//! Deletion begins with a word in the filesystem's record. Whoever leads its group then removes what that has
//! of it, and its segments, and says at the end that nothing is left. A crash in between changes nothing: the
//! record stays until then, and each step may be repeated.

use std::collections::{BTreeMap, BTreeSet};

use namespace::FilesystemId;
use uuid::Uuid;

use super::map::{cluster, named, next_epoch, take_number};
use super::tables::{FILESYSTEM_ATTACHMENTS, FILESYSTEMS, NAMESPACE_GROUPS, NODES};
use super::{Read, ReadError, Stop, Txn, event, pool, segment};
use crate::command::{FilesystemSpec, Outcome};
use crate::ids::{NamespaceGroupId, NodeId, UnixMillis};
use crate::model::{
    AdminState, EventKind, Filesystem, FilesystemState, NamespaceGroup, Node, NodeState, Role,
    VolumeState,
};
use crate::refusal::{FilesystemRefusal, MapRefusal, name};

/// Most namespace groups. Each costs heartbeats, and write buffers of the database, on its voters.
const GROUPS_MAX: usize = 8;
/// Most nodes that begin a group.
const FOUNDERS_MAX: usize = 3;

pub(super) fn create(
    txn: &mut Txn<'_>,
    uuid: Uuid,
    spec: &FilesystemSpec,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    cluster(txn)?;
    let name = name(&spec.name)?;
    if let Some(filesystem) = FILESYSTEMS.get(txn, &name)? {
        let filesystem = ready(filesystem)?;
        // Said twice, because the first answer was lost.
        return match filesystem.uuid == uuid {
            true => Ok(Outcome::Filesystem(filesystem)),
            false => Err(FilesystemRefusal::NameTaken { name: name.into() }.into()),
        };
    }
    let pool = pool::require(txn, &spec.pool)?;
    pool::require_devices(txn, &pool)?;
    let group = match emptiest_group(txn)? {
        Some(group) => group,
        None => make_group(txn, &name)?,
    };
    let filesystem = Filesystem {
        id: FilesystemId(take_number(txn, |counters| &mut counters.filesystem)?),
        name,
        uuid,
        pool: pool.id,
        group,
        state: FilesystemState::Ready,
        created_at: at,
    };
    FILESYSTEMS.put(txn, &filesystem.name, &filesystem);
    next_epoch(txn)?;
    let what = EventKind::FilesystemCreated {
        filesystem: filesystem.name.clone(),
    };
    event::push(txn, at, what)?;
    Ok(Outcome::Filesystem(filesystem))
}

pub(super) fn delete(txn: &mut Txn<'_>, name: &str, at: UnixMillis) -> Result<Outcome, Stop> {
    let mut filesystem = require(txn, name)?;
    if filesystem.state == FilesystemState::Deleting {
        return Ok(Outcome::Filesystem(filesystem));
    }
    let mut attachments = FILESYSTEM_ATTACHMENTS.all(txn)?.into_iter();
    if let Some(user) = attachments.find(|user| user.filesystem == filesystem.id) {
        let (name, node) = (name.to_owned(), named(txn, user.node)?);
        let socket = user.socket;
        return Err(FilesystemRefusal::InUse { name, socket, node }.into());
    }
    filesystem.state = FilesystemState::Deleting;
    FILESYSTEMS.put(txn, name, &filesystem);
    next_epoch(txn)?;
    let what = EventKind::FilesystemDeleted {
        filesystem: filesystem.name.clone(),
    };
    event::push(txn, at, what)?;
    Ok(Outcome::Filesystem(filesystem))
}

/// Forgets a filesystem of which nothing is left.
pub(super) fn dropped(txn: &mut Txn<'_>, id: FilesystemId) -> Result<Outcome, Stop> {
    let Some(filesystem) = by_id(txn, id)? else {
        // Said twice, because the first answer was lost.
        return Ok(Outcome::Done);
    };
    let name = filesystem.name.clone();
    if filesystem.state != FilesystemState::Deleting {
        return Err(FilesystemRefusal::NotDeleting { name: name.into() }.into());
    }
    let mut segments = segment::volumes(txn, id)?.into_iter();
    if let Some(volume) = segments.find(|volume| volume.state == VolumeState::Ready) {
        let volume = volume.name.into();
        return Err(FilesystemRefusal::HasSegment {
            name: name.into(),
            volume,
        }
        .into());
    }
    FILESYSTEMS.delete(txn, &name);
    next_epoch(txn)?;
    Ok(Outcome::Filesystem(filesystem))
}

pub(super) fn require(view: &dyn Read, name: &str) -> Result<Filesystem, Stop> {
    let found = FILESYSTEMS.get(view, name)?;
    Ok(found.ok_or_else(|| FilesystemRefusal::Unknown {
        name: name.to_owned(),
    })?)
}

/// The filesystem, unless it is being deleted.
pub(super) fn ready(filesystem: Filesystem) -> Result<Filesystem, FilesystemRefusal> {
    match filesystem.state {
        FilesystemState::Ready => Ok(filesystem),
        FilesystemState::Deleting => Err(FilesystemRefusal::Deleting {
            name: filesystem.name.into(),
        }),
        FilesystemState::Lost => Err(FilesystemRefusal::Lost {
            name: filesystem.name.into(),
        }),
    }
}

pub(super) fn by_id(view: &dyn Read, id: FilesystemId) -> Result<Option<Filesystem>, ReadError> {
    let mut all = FILESYSTEMS.all(view)?.into_iter();
    Ok(all.find(|filesystem| filesystem.id == id))
}

/// The group with the fewest filesystems; nothing if another one may be made and all have some.
fn emptiest_group(view: &dyn Read) -> Result<Option<NamespaceGroupId>, ReadError> {
    let groups = NAMESPACE_GROUPS.all(view)?;
    let mut sizes: BTreeMap<NamespaceGroupId, usize> =
        groups.iter().map(|group| (group.id, 0)).collect();
    for filesystem in FILESYSTEMS.all(view)? {
        *sizes.entry(filesystem.group).or_default() += 1;
    }
    let may_grow = groups.len() < GROUPS_MAX;
    let emptiest = sizes.into_iter().min_by_key(|(id, size)| (*size, *id));
    let chosen = emptiest.filter(|(_, size)| !may_grow || *size == 0);
    Ok(chosen.map(|(id, _)| id))
}

/// Makes a group of the nodes that begin fewest.
fn make_group(txn: &mut Txn<'_>, filesystem: &str) -> Result<NamespaceGroupId, Stop> {
    let mut begins: BTreeMap<NodeId, usize> = BTreeMap::new();
    for group in NAMESPACE_GROUPS.all(txn)? {
        for founder in group.founders {
            *begins.entry(founder).or_default() += 1;
        }
    }
    let nodes = NODES.all(txn)?.into_iter().filter(|node| {
        node.roles.contains(&Role::Meta)
            && node.state == NodeState::Up
            && node.admin_state == AdminState::Active
    });
    let mut ranked: Vec<_> = nodes
        .map(|node| (begins.get(&node.id).copied().unwrap_or(0), node.id))
        .collect();
    ranked.sort_unstable();
    let most = ranked.len().min(FOUNDERS_MAX);
    if most == 0 {
        let name = filesystem.to_owned();
        return Err(FilesystemRefusal::NoVoters { name }.into());
    }
    // Odd: two voters tolerate no failure, as one does.
    let voters = (most - 1) / 2 * 2 + 1;
    let chosen = ranked.into_iter().take(voters);
    let founders: Vec<NodeId> = chosen.map(|(_, id)| id).collect();
    let group = NamespaceGroup {
        id: take_number(txn, |counters| &mut counters.namespace_group)?,
        voters: founders.clone(),
        founders,
        is_founded: false,
    };
    NAMESPACE_GROUPS.put(txn, &group.id, &group);
    Ok(group.id)
}

/// Says who votes in a group. Repeating it changes nothing.
pub(super) fn set_voters(
    txn: &mut Txn<'_>,
    id: NamespaceGroupId,
    voters: &[NodeId],
) -> Result<Outcome, Stop> {
    if let Some(group) = NAMESPACE_GROUPS.get(txn, &id)? {
        let new = NamespaceGroup {
            voters: voters.to_vec(),
            is_founded: true,
            ..group.clone()
        };
        if new != group {
            NAMESPACE_GROUPS.put(txn, &id, &new);
            next_epoch(txn)?;
        }
    }
    Ok(Outcome::Done)
}

/// Refuses to let a node go without which a group could not agree on anything.
pub(super) fn require_no_vote(view: &dyn Read, node: &Node) -> Result<(), Stop> {
    let nodes = NODES.all(view)?.into_iter();
    let others = nodes.filter(|other| other.state == NodeState::Up && other.id != node.id);
    let up: BTreeSet<NodeId> = others.map(|other| other.id).collect();
    for group in NAMESPACE_GROUPS.all(view)? {
        let present = group.voters.iter().filter(|id| up.contains(id)).count();
        if group.voters.contains(&node.id) && present <= group.voters.len() / 2 {
            let (node, group) = (named(view, node.id)?, group.id);
            return Err(MapRefusal::GroupNeedsNode { node, group }.into());
        }
    }
    Ok(())
}
