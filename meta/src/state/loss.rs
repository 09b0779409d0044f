//! Devices that never come back: what only they have, and who takes over once an operator has given that up.
//!
//! Where all members in sync of a group are lost, the others hold what was acknowledged until they went out,
//! and maybe more. The one that was in sync last lacks least: whatever was flushed before it went out it has.
//! Among equals one that kept its power is taken, which has what was not flushed, too. A member that was
//! being synced counts by when it was in sync, not by how far it had come: what it has from before and after
//! does not make one state of a disk.

use std::collections::BTreeSet;

use super::group::{self, Presence};
use super::tables::{FILESYSTEMS, NODES, PLACEMENT_GROUPS, VOLUME_NAMES, VOLUMES_BY_POOL};
use super::{Read, ReadError, Stop, Txn, event, node};
use crate::ids::{DeviceId, Epoch, NodeId, PgIndex, UnixMillis};
use crate::model::{EventKind, GroupId, Member, Name, Node, PlacementGroup, Pool, ReplicaState};
use crate::refusal::{GroupRefusal, LossRefusal};

/// Volumes that a refusal names; of more it says how many.
const NAMED_MAX: usize = 5;

/// What only some devices have.
#[derive(Default)]
struct Loss {
    groups: usize,
    /// Of those, the ones of which no other member is known to have been in sync.
    orphans: usize,
    volumes: Vec<String>,
    /// Volumes beyond those that are named.
    others: usize,
    filesystems: Vec<String>,
    /// A group that nobody else holds who is there, though somebody who is not there does.
    waiting: Option<GroupRefusal>,
}

impl Loss {
    fn refusal(self, culprit: &str) -> LossRefusal {
        LossRefusal::WouldLose {
            culprit: culprit.into(),
            groups: self.groups,
            orphans: self.orphans,
            volumes: self.volumes.into(),
            others: self.others,
            filesystems: self.filesystems.into(),
        }
    }
}

/// Whether all members in sync are among these devices.
fn is_only_on(group: &PlacementGroup, lost: &[DeviceId]) -> bool {
    let mut in_sync = group.in_sync().peekable();
    in_sync.peek().is_some() && in_sync.all(|member| lost.contains(&member.device))
}

fn look(view: &dyn Read, lost: &[DeviceId]) -> Result<Loss, Stop> {
    let mut loss = Loss::default();
    for pool in node::pools_with_data(view)? {
        let before = loss.groups;
        for found in PLACEMENT_GROUPS.all_below(view, &pool.id)? {
            let is_lost = |member: &&Member| lost.contains(&member.device);
            let Some(member) = found.members.iter().find(is_lost) else {
                continue;
            };
            if group::survives_without(view, &found, lost)? {
                continue;
            }
            if is_only_on(&found, lost) {
                let mut others = found.members.iter().filter(|member| !is_lost(member));
                loss.groups += 1;
                loss.orphans += usize::from(others.all(|one| one.in_sync_until == Epoch(0)));
            } else {
                let (group, device) = (found.id(), member.device);
                loss.waiting
                    .get_or_insert(GroupRefusal::LastInSync { group, device });
            }
        }
        if loss.groups > before {
            name_volumes(view, &pool, &mut loss)?;
        }
    }
    Ok(loss)
}

/// Chunks of a volume lie in any group of its pool. People know a segment by its filesystem.
fn name_volumes(view: &dyn Read, pool: &Pool, loss: &mut Loss) -> Result<(), ReadError> {
    let mut written = BTreeSet::new();
    for id in VOLUMES_BY_POOL.all_below(view, &pool.id)? {
        let name = VOLUME_NAMES.get(view, &id)?;
        if let Some(of) = name.as_ref().and_then(Name::segment_of) {
            written.insert(of.filesystem);
            continue;
        }
        match name {
            Some(name) if loss.volumes.len() < NAMED_MAX => loss.volumes.push(name.into()),
            _ => loss.others += 1,
        }
    }
    let filesystems = FILESYSTEMS.all(view)?.into_iter();
    let written = filesystems.filter(|one| written.contains(&one.id));
    loss.filesystems.extend(written.map(|one| one.name.into()));
    Ok(())
}

/// Refuses to let go of devices that alone have something; `culprit` is what people call them.
pub(super) fn refuse(view: &dyn Read, lost: &[DeviceId], culprit: &str) -> Result<(), Stop> {
    match look(view, lost)? {
        Loss { groups: 0, .. } => Ok(()),
        loss => Err(loss.refusal(culprit).into()),
    }
}

/// The same, and refuses devices whose data nobody else has who is there.
pub(super) fn refuse_while_others_are_away(
    view: &dyn Read,
    lost: &[DeviceId],
    culprit: &str,
) -> Result<(), Stop> {
    match look(view, lost)? {
        Loss {
            groups: 0,
            waiting: None,
            ..
        } => Ok(()),
        Loss {
            groups: 0,
            waiting: Some(waiting),
            ..
        } => Err(waiting.into()),
        loss => Err(loss.refusal(culprit).into()),
    }
}

/// What was given up in a pool.
pub(super) struct GivenUp {
    pool: Pool,
    groups: u32,
    /// Groups that go on with a replica which was never in sync.
    orphans: u32,
    /// Groups that have no member left, until they are placed anew.
    empty: Vec<PgIndex>,
}

/// Where only `lost` devices are in sync another member takes over. They are forgotten, and groups placed,
/// after this.
pub(super) fn give_up(
    txn: &mut Txn<'_>,
    lost: &[DeviceId],
    epoch: Epoch,
) -> Result<Vec<GivenUp>, Stop> {
    let mut all = Vec::new();
    for pool in node::pools_with_data(txn)? {
        let mut given = GivenUp {
            groups: 0,
            orphans: 0,
            empty: Vec::new(),
            pool,
        };
        for found in PLACEMENT_GROUPS.all_below(txn, &given.pool.id)? {
            if !is_only_on(&found, lost) {
                continue;
            }
            refuse_valid(txn, &found)?;
            given.groups += 1;
            let Some((heir, process)) = heir(txn, &found, lost)? else {
                given.empty.push(found.index);
                continue;
            };
            given.orphans += u32::from(found.members[heir].in_sync_until == Epoch(0));
            let new = inherited(&found, heir, &process, epoch);
            group::save(txn, &given.pool, Some(&found), new, epoch)?;
        }
        if given.groups > 0 {
            all.push(given);
        }
    }
    Ok(all)
}

fn refuse_valid(view: &dyn Read, found: &PlacementGroup) -> Result<(), Stop> {
    for member in found.in_sync() {
        if group::presence(view, member)? == Presence::Valid {
            let (group, device) = (found.id(), member.device);
            return Err(GroupRefusal::StillValid { group, device }.into());
        }
    }
    Ok(())
}

/// The member that lacks least, if any other is left; refused while one that may lack less is away.
fn heir(
    view: &dyn Read,
    found: &PlacementGroup,
    lost: &[DeviceId],
) -> Result<Option<(usize, Node)>, Stop> {
    let mut best: Option<((Epoch, bool, Epoch), usize, Node)> = None;
    let mut away: Option<&Member> = None;
    let members = found.members.iter().enumerate();
    for (index, member) in members.filter(|(_, member)| !lost.contains(&member.device)) {
        let until = member.in_sync_until;
        match group::served_by(view, member)? {
            Some(node) => {
                let rank = (until, group::kept_power(member, &node), member.since);
                if best.as_ref().is_none_or(|(best, ..)| rank > *best) {
                    best = Some((rank, index, node));
                }
            }
            None if away.is_none_or(|away| until > away.in_sync_until) => away = Some(member),
            None => {}
        }
    }
    let lacks_more = |away: &&Member| {
        best.as_ref()
            .is_none_or(|(rank, ..)| away.in_sync_until > rank.0)
    };
    if let Some(away) = away.filter(lacks_more) {
        let node = NODES.get(view, &away.node)?;
        return Err(LossRefusal::NewerAway {
            group: found.id(),
            device: away.device,
            node: node.map_or_else(|| away.node.to_string(), |node| node.name.into()),
        }
        .into());
    }
    Ok(best.map(|(_, index, node)| (index, node)))
}

/// With one member as the only replica that counts. Acknowledged writes may be missing on it: hosts are told
/// by their next flush.
fn inherited(found: &PlacementGroup, heir: usize, process: &Node, epoch: Epoch) -> PlacementGroup {
    let mut new = found.clone();
    new.power_lost = epoch;
    for (index, member) in new.members.iter_mut().enumerate() {
        if index == heir {
            (member.node, member.incarnation) = (process.id, process.incarnation);
            (member.state, member.since) = (ReplicaState::InSync, epoch);
        } else if member.is_receiving() {
            group::put_out(member, epoch);
        }
    }
    new
}

/// Groups have been placed without what is lost: those that had no other member go on with an empty one.
/// Tells what was given up.
pub(super) fn complete(
    txn: &mut Txn<'_>,
    given: Vec<GivenUp>,
    (node, device): (NodeId, Option<DeviceId>),
    (epoch, at): (Epoch, UnixMillis),
) -> Result<(), Stop> {
    for mut one in given {
        for index in &one.empty {
            let (pool, index) = (one.pool.id, *index);
            let found = group::load(txn, GroupId { pool, index })?;
            let Some((heir, process)) = first_served(txn, &found)? else {
                let group = found.id();
                return Err(LossRefusal::NobodyLeft { group }.into());
            };
            one.orphans += 1;
            let new = inherited(&found, heir, &process, epoch);
            group::save(txn, &one.pool, Some(&found), new, epoch)?;
        }
        let what = EventKind::DataGivenUp {
            pool: one.pool.name,
            node,
            device,
            groups: one.groups,
            lost: one.orphans,
        };
        event::push(txn, at, what)?;
    }
    Ok(())
}

fn first_served(
    view: &dyn Read,
    found: &PlacementGroup,
) -> Result<Option<(usize, Node)>, ReadError> {
    for (index, member) in found.members.iter().enumerate() {
        if let Some(node) = group::served_by(view, member)? {
            return Ok(Some((index, node)));
        }
    }
    Ok(None)
}
