//! Metadata go on after a disaster: a majority of the metadata nodes is lost for good, or all metadata are
//! and a backup is restored.
//!
//! What was decided after the records that there are, is not known: leases were granted, numbers given, and
//! members of groups taken out. So every number is raised beyond what can have been given, and join tokens
//! end. After the loss of a majority the members in sync stay as they are: the survivor with the newest log
//! knows of every change that a replica of any survivor has acted upon, as a replica acts only under maps
//! that its node knows, and a node knows of no map before its own log has it. A backup may be older. Then
//! nobody is in sync until an operator says that all devices are back; of each group the device that was in
//! sync last, by its own mark, becomes the only one that counts.

use std::collections::{BTreeMap, BTreeSet};

use uuid::Uuid;

use super::map::{cluster, next_epoch, place_all_at, set_epoch};
use super::tables::{
    CLUSTER, COUNTERS, DEVICES, EVIDENCE, FILESYSTEMS, LEASES, NAMESPACE_GROUPS, NODES,
    PLACEMENT_GROUPS, POOLS, TOKENS, VOLUMES,
};
use super::{Read, ReadError, Stop, Txn, event, group, node};
use crate::command::Outcome;
use crate::ids::{DeviceId, Epoch, Generation, NamespaceGroupId, NodeId, UnixMillis, VolumeId};
use crate::model::{
    DeviceEvidence, EventKind, FilesystemState, GroupId, Lease, Member, Node, NodeState,
    PlacementGroup, Pool, Recovery, ReplicaState,
};
use crate::refusal::RecoveryRefusal;

/// Epochs that may have begun unseen.
const EPOCHS: u64 = 1 << 32;
/// Leases of one volume that may have been granted unseen: since the last entry of a log, and since a backup.
/// Versions have 24 bits for them.
const GENERATIONS: u64 = 1 << 10;
/// See [`GENERATIONS`]. Should there have been more, devices tell of them.
const GENERATIONS_SINCE_BACKUP: u64 = 1 << 16;
/// Volumes that may have been made unseen.
const VOLUMES_UNSEEN: u64 = 1 << 16;
/// Nodes, devices and attachments likewise.
const OTHERS_UNSEEN: u64 = 1 << 10;
/// Pools likewise: there are few, and few numbers for them.
const POOLS_UNSEEN: u32 = 4;
/// Filesystems and namespace groups likewise.
const FILESYSTEMS_UNSEEN: u32 = 1 << 10;
/// No device knows a later epoch.
const EPOCH_MAX: Epoch = Epoch(1 << 52);

/// What a recovery begins with.
pub(super) struct Beginning<'a> {
    pub(super) history: Uuid,
    pub(super) by: NodeId,
    pub(super) backup_at: Option<UnixMillis>,
    /// The records may be older than what replicas acted upon.
    pub(super) choose: bool,
    /// Namespace groups that go on with the node's log.
    pub(super) groups: &'a BTreeSet<NamespaceGroupId>,
    pub(super) at: UnixMillis,
}

pub(super) fn begin(txn: &mut Txn<'_>, new: &Beginning<'_>) -> Result<Outcome, Stop> {
    let earlier = cluster(txn)?.recovery;
    if earlier
        .as_ref()
        .is_some_and(|one| one.history == new.history)
    {
        return Ok(Outcome::Done);
    }
    let unseen = raise_counters(txn, new.history)?;
    let mut nodes = NODES.all(txn)?;
    // What an earlier one left open stays open.
    let still_open = earlier.as_ref().is_some_and(|one| one.chooses);
    let backup_at = new
        .backup_at
        .or(earlier.as_ref().and_then(|one| one.backup_at));
    let mut unknown = earlier.map_or_else(Vec::new, |one| one.unknown);
    unknown.push(unseen);
    let chooses = new.choose || still_open;
    let mut cluster = cluster(txn)?;
    cluster.epoch = Epoch(cluster.epoch.0 + EPOCHS);
    cluster.recovery = Some(Recovery {
        history: new.history,
        at: new.at,
        backup_at,
        chooses,
        unknown,
    });
    CLUSTER.put(txn, &(), &cluster);
    for token in TOKENS.all(txn)? {
        TOKENS.delete(txn, &token.hash);
    }
    for node in &mut nodes {
        node.state = NodeState::Down;
        NODES.put(txn, &node.id, node);
    }
    for evidence in EVIDENCE.all(txn)? {
        EVIDENCE.delete(txn, &evidence.device);
    }
    begin_volumes(txn, new.backup_at)?;
    begin_namespaces(txn, new)?;
    if chooses {
        take_all_out(txn, cluster.epoch)?;
    }
    let what = EventKind::MetadataRecovered {
        node: new.by,
        backup_at: new.backup_at,
    };
    event::push(txn, new.at, what)?;
    Ok(Outcome::Done)
}

/// Leases end, and none is granted that may have been granted unseen: also of volumes that had none.
fn begin_volumes(txn: &mut Txn<'_>, backup_at: Option<UnixMillis>) -> Result<(), ReadError> {
    let unseen = match backup_at {
        Some(_) => GENERATIONS_SINCE_BACKUP,
        None => GENERATIONS,
    };
    for mut volume in VOLUMES.all(txn)? {
        let old = LEASES.get(txn, &volume.id)?;
        let known = old.as_ref().map_or(0, |lease| lease.generation.0);
        put_lease(txn, volume.id, old.as_ref(), Generation(known + unseen));
        // It may have grown since, and what is there be its data.
        if backup_at.is_some() && volume.stale_tail_end_bytes.take().is_some() {
            VOLUMES.put(txn, &volume.name, &volume);
        }
    }
    Ok(())
}

/// Namespace groups of which the node has the names go on with it as their only voter. The filesystems of
/// others have lost all names, and can only be deleted: such a group begins anew, with nothing.
fn begin_namespaces(txn: &mut Txn<'_>, new: &Beginning<'_>) -> Result<(), Stop> {
    let mut lost = BTreeSet::new();
    for mut group in NAMESPACE_GROUPS.all(txn)? {
        let goes_on = new.groups.contains(&group.id) && group.voters.contains(&new.by);
        if !goes_on {
            group.is_founded = false;
            lost.insert(group.id);
        }
        group.founders = vec![new.by];
        group.voters = vec![new.by];
        NAMESPACE_GROUPS.put(txn, &group.id, &group);
    }
    for mut filesystem in FILESYSTEMS.all(txn)? {
        if filesystem.state != FilesystemState::Ready || !lost.contains(&filesystem.group) {
            continue;
        }
        filesystem.state = FilesystemState::Lost;
        FILESYSTEMS.put(txn, &filesystem.name, &filesystem);
        let what = EventKind::FilesystemLost {
            filesystem: filesystem.name,
        };
        event::push(txn, new.at, what)?;
    }
    Ok(())
}

/// Nobody's lease.
fn put_lease(txn: &mut Txn<'_>, volume: VolumeId, old: Option<&Lease>, generation: Generation) {
    let lease = Lease {
        volume,
        holder: None,
        generation,
        epoch: old.map_or(Epoch(0), |lease| lease.epoch),
        granted_at: old.map_or(UnixMillis(0), |lease| lease.granted_at),
    };
    LEASES.put(txn, &volume, &lease);
}

/// No number is given twice, also if the same backup is restored again: how far nodes and volumes are raised
/// differs between histories. Returns the numbers of volumes that may have been given unseen.
fn raise_counters(txn: &mut Txn<'_>, history: Uuid) -> Result<(VolumeId, VolumeId), ReadError> {
    let mut counters = COUNTERS.get(txn, &())?.unwrap_or_default();
    let first = VolumeId(counters.volume);
    let spread = (history.as_u128() & 0xffff) as u64;
    counters.device += OTHERS_UNSEEN;
    counters.node += OTHERS_UNSEEN + (spread << 4);
    counters.attachment += OTHERS_UNSEEN;
    counters.pool += POOLS_UNSEEN;
    if !NAMESPACE_GROUPS.all(txn)?.is_empty() {
        counters.filesystem += FILESYSTEMS_UNSEEN;
        counters.namespace_group += FILESYSTEMS_UNSEEN;
    }
    counters.volume += VOLUMES_UNSEEN + (spread << 4);
    COUNTERS.put(txn, &(), &counters);
    Ok((first, VolumeId(counters.volume)))
}

/// Who is in sync is not known: nobody is.
fn take_all_out(txn: &mut Txn<'_>, epoch: Epoch) -> Result<(), Stop> {
    for pool in POOLS.all(txn)? {
        for old in PLACEMENT_GROUPS.all_below(txn, &pool.id)? {
            let mut new = old.clone();
            for member in &mut new.members {
                group::put_out(member, epoch);
                member.in_sync_until = Epoch(0);
            }
            group::save(txn, &pool, Some(&old), new, epoch)?;
        }
    }
    Ok(())
}

/// A node tells what one of its devices says: no number that it knows is given again.
pub(super) fn report(txn: &mut Txn<'_>, evidence: &DeviceEvidence) -> Result<Outcome, Stop> {
    let Some(recovery) = cluster(txn)?.recovery else {
        return Ok(Outcome::Done);
    };
    let id = evidence.device;
    let device = DEVICES.get(txn, &id)?;
    if device.is_none_or(|device| device.incarnation != evidence.incarnation) {
        let claimed = evidence.incarnation;
        return Err(RecoveryRefusal::OtherStart {
            device: id,
            claimed,
        }
        .into());
    }
    raise_epoch(txn, evidence)?;
    let mut counters = COUNTERS.get(txn, &())?.unwrap_or_default();
    let families = evidence
        .layers
        .iter()
        .map(|(layer, _)| crate::ids::family_of(*layer).0);
    let seen = families.max().map_or(0, |family| family + 1);
    let pools = evidence.in_sync.iter().map(|(group, _)| group.pool.0);
    counters.pool = pools.fold(counters.pool, |next, pool| next.max(pool.saturating_add(1)));
    let knows_more = seen > counters.volume;
    counters.volume = counters.volume.max(seen);
    COUNTERS.put(txn, &(), &counters);
    if knows_more {
        know_more_volumes(txn, VolumeId(seen))?;
    }
    match recovery.chooses {
        true => EVIDENCE.put(txn, &id, evidence),
        false => raise_leases(txn, [evidence])?,
    }
    Ok(Outcome::Done)
}

/// A device may know epochs of another history, in which the same epochs were counted.
fn raise_epoch(txn: &mut Txn<'_>, evidence: &DeviceEvidence) -> Result<(), Stop> {
    let marks = evidence.in_sync.iter().map(|(_, epoch)| *epoch);
    let newest = marks.fold(evidence.epoch, Epoch::max);
    if newest > EPOCH_MAX {
        let (device, epoch) = (evidence.device, newest);
        return Err(RecoveryRefusal::NoSuchEpoch { device, epoch }.into());
    }
    if newest <= cluster(txn)?.epoch {
        return Ok(());
    }
    // The device refuses what is asked under older maps.
    let epoch = Epoch(newest.0 + 1);
    set_epoch(txn, epoch)?;
    for mut group in PLACEMENT_GROUPS.all(txn)? {
        group.epoch = epoch;
        PLACEMENT_GROUPS.put(txn, &(group.pool, group.index), &group);
    }
    Ok(())
}

fn know_more_volumes(txn: &mut Txn<'_>, end: VolumeId) -> Result<(), Stop> {
    let mut cluster = cluster(txn)?;
    let recovery = cluster.recovery.as_mut();
    if let Some((_, known)) = recovery.and_then(|one| one.unknown.last_mut()) {
        *known = end.max(*known);
    }
    CLUSTER.put(txn, &(), &cluster);
    Ok(())
}

/// Refuses to make what gets a number that a device may know which is not back.
pub(super) fn refuse_while_choosing(view: &dyn Read) -> Result<(), Stop> {
    match cluster(view)?.recovery.is_some_and(|one| one.chooses) {
        true => Err(RecoveryRefusal::Choosing.into()),
        false => Ok(()),
    }
}

/// Those devices that are served, and what they say.
struct Served {
    evidence: DeviceEvidence,
    process: Node,
}

/// An operator says that no further device will come: of each group the one that was in sync last counts.
pub(super) fn choose(
    txn: &mut Txn<'_>,
    without_missing: bool,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    let mut cluster = cluster(txn)?;
    let Some(recovery) = cluster.recovery.as_mut().filter(|one| one.chooses) else {
        return Err(RecoveryRefusal::NothingToChoose.into());
    };
    recovery.chooses = false;
    let (served, missing) = look(txn)?;
    if !missing.is_empty() && !without_missing {
        return Err(RecoveryRefusal::DevicesMissing { devices: missing }.into());
    }
    CLUSTER.put(txn, &(), &cluster);
    let epoch = next_epoch(txn)?;
    let (mut groups, mut orphans) = (0, 0);
    // Also those without volumes: of some the metadata do not know.
    let with_data = node::pools_with_data(txn)?;
    for pool in POOLS.all(txn)? {
        let counts = with_data.iter().any(|one| one.id == pool.id);
        for old in PLACEMENT_GROUPS.all_below(txn, &pool.id)? {
            let has_mark = choose_for(txn, &pool, &old, &served, epoch)?;
            groups += u32::from(counts);
            orphans += u32::from(counts && !has_mark);
        }
    }
    raise_leases(txn, served.values().map(|one| &one.evidence))?;
    place_all_at(txn, epoch)?;
    for evidence in EVIDENCE.all(txn)? {
        EVIDENCE.delete(txn, &evidence.device);
    }
    let missing = u32::try_from(missing.len()).unwrap_or(u32::MAX);
    let what = EventKind::ReplicasChosen {
        groups,
        orphans,
        missing,
    };
    event::push(txn, at, what)?;
    Ok(Outcome::Done)
}

/// Devices that are served and have told what they hold, and those that are not or have not.
fn look(txn: &Txn<'_>) -> Result<(BTreeMap<DeviceId, Served>, Vec<DeviceId>), ReadError> {
    let (mut served, mut missing) = (BTreeMap::new(), Vec::new());
    for device in DEVICES.all(txn)? {
        let process = NODES.get(txn, &device.node)?;
        let process = process.filter(|node| group::is_served(&device, node));
        let evidence = EVIDENCE.get(txn, &device.id)?;
        let evidence = evidence.filter(|found| found.incarnation == device.incarnation);
        match (process, evidence) {
            (Some(process), Some(evidence)) => {
                served.insert(device.id, Served { evidence, process });
            }
            _ => missing.push(device.id),
        }
    }
    Ok((served, missing))
}

/// Makes the device that was in sync last the only one that counts in a group; whether there was one.
fn choose_for(
    txn: &mut Txn<'_>,
    pool: &Pool,
    old: &PlacementGroup,
    served: &BTreeMap<DeviceId, Served>,
    epoch: Epoch,
) -> Result<bool, Stop> {
    let id = old.id();
    let marks: BTreeMap<DeviceId, Epoch> = served
        .iter()
        .filter_map(|(device, one)| Some((*device, mark(&one.evidence, id)?)))
        .collect();
    let is_member = |device: &DeviceId| old.members.iter().any(|one| one.device == *device);
    // Among equals a member, from which nothing need be moved.
    let newest = marks
        .iter()
        .max_by_key(|(device, mark)| (**mark, is_member(device)));
    let newest = newest.map(|(device, _)| device);
    // Nobody says that it was in sync: a member that holds anything is better than one that is empty.
    let any = || {
        let held = |device: &&DeviceId| served[*device].evidence.layers.len();
        let all = served.keys();
        all.max_by_key(|device| (is_member(device), held(device)))
    };
    let Some(heir) = newest.or_else(any) else {
        return Err(RecoveryRefusal::NobodyLeft { group: id }.into());
    };
    let process = &served[heir].process;
    let mut new = old.clone();
    new.power_lost = epoch;
    if !is_member(heir) {
        new.members.push(Member {
            device: *heir,
            node: process.id,
            incarnation: process.incarnation,
            state: ReplicaState::Out,
            since: epoch,
            leaving: true,
            in_sync_until: Epoch(0),
        });
    }
    for member in &mut new.members {
        member.in_sync_until = marks.get(&member.device).copied().unwrap_or_default();
        if member.device == *heir {
            (member.node, member.incarnation) = (process.id, process.incarnation);
            (member.state, member.since) = (ReplicaState::InSync, epoch);
        } else if member.is_receiving() {
            (member.state, member.since) = (ReplicaState::Out, epoch);
        }
    }
    group::save(txn, pool, Some(old), new, epoch)?;
    Ok(newest.is_some())
}

fn mark(evidence: &DeviceEvidence, group: GroupId) -> Option<Epoch> {
    let mut marks = evidence.in_sync.iter();
    marks.find(|(id, _)| *id == group).map(|(_, epoch)| *epoch)
}

/// No lease is granted that devices know already.
fn raise_leases<'a>(
    txn: &mut Txn<'_>,
    all: impl IntoIterator<Item = &'a DeviceEvidence>,
) -> Result<(), ReadError> {
    let mut newest: BTreeMap<_, Generation> = BTreeMap::new();
    for (layer, generation) in all.into_iter().flat_map(|one| &one.layers) {
        let known = newest.entry(*layer).or_default();
        *known = (*generation).max(*known);
    }
    for volume in VOLUMES.all(txn)? {
        let layers = volume.layers.iter();
        let seen = layers.filter_map(|layer| newest.get(layer)).max();
        let old = LEASES.get(txn, &volume.id)?;
        let known = old
            .as_ref()
            .map_or(Generation::default(), |lease| lease.generation);
        let Some(seen) = seen.filter(|seen| **seen > known) else {
            continue;
        };
        put_lease(txn, volume.id, old.as_ref(), *seen);
    }
    Ok(())
}

/// What devices hold of volumes that the metadata do not know is given up.
pub(super) fn forget_unknown(txn: &mut Txn<'_>, at: UnixMillis) -> Result<Outcome, Stop> {
    let mut cluster = cluster(txn)?;
    let unknown = cluster.recovery.as_mut().map(|one| &mut one.unknown);
    if let Some(unknown) = unknown.filter(|unknown| !unknown.is_empty()) {
        unknown.clear();
        CLUSTER.put(txn, &(), &cluster);
        event::push(txn, at, EventKind::UnknownForgotten)?;
    }
    Ok(Outcome::Done)
}
