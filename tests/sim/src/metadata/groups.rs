//! The groups of the map: what the data path is told of them, and all that the map says.

use std::collections::BTreeSet;

use fabric_types::membership::{Member, ReplicaState};
use fabric_types::{Epoch, Incarnation, NodeId, PgId};
use meta::{ClusterMap, GroupId, PlacementGroup};
use uuid::Uuid;

use crate::node::DeviceAt;

/// A group in the map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Cluster epoch of its last change.
    pub epoch: Epoch,
    /// Its members as the data path is told of them: one for each node, and those that it is
    /// [coming to](fabric_types::incoming).
    pub members: Vec<Member>,
    /// The device of each of these.
    pub devices: Vec<DeviceAt>,
    /// All devices that the map has as members.
    pub all: Vec<Place>,
    /// See [`ReplicaSet::power_lost`].
    pub power_lost: Epoch,
}

/// A device that the map has as a member of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The device.
    pub at: DeviceAt,
    /// What the map says of it.
    pub member: Member,
    /// It goes once the others are in sync.
    pub leaving: bool,
}

impl Group {
    /// The group as it is in the map.
    pub(super) fn read(map: &ClusterMap, group: &PlacementGroup) -> Self {
        let members = group.members.iter();
        let all: Vec<Place> = members.filter_map(|m| place(map, m)).collect();
        let mut published = published(&all);
        published.extend(coming(&all, &published));
        Self {
            epoch: group.epoch,
            members: published.iter().map(|place| place.member).collect(),
            devices: published.iter().map(|place| place.at).collect(),
            all,
            power_lost: group.power_lost,
        }
    }

    /// The members that the data path is told are in sync, with their devices.
    pub fn in_sync(&self) -> impl Iterator<Item = (&Member, DeviceAt)> {
        let members = self.members.iter().zip(self.devices.iter().copied());
        members.filter(|(member, _)| member.state == ReplicaState::InSync)
    }

    /// A node of which two devices are in sync.
    pub fn is_twice_on(&self) -> Option<usize> {
        let in_sync = |place: &&Place| place.member.state == ReplicaState::InSync;
        let nodes = self.all.iter().filter(in_sync).map(|place| place.at.node);
        let mut seen = BTreeSet::new();
        nodes.into_iter().find(|node| !seen.insert(*node))
    }

    /// The device of the replica with this name.
    pub fn device_of(&self, name: NodeId) -> Option<DeviceAt> {
        let mut members = self.members.iter().zip(&self.devices);
        let found = members.find(|(member, _)| member.node == name);
        found.map(|(_, at)| *at)
    }
}

/// A change of the map, for the invariants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// Group.
    pub pg: PgId,
    /// Who.
    pub at: DeviceAt,
    /// Was.
    pub from: (ReplicaState, Incarnation),
    /// Is.
    pub to: (ReplicaState, Incarnation),
    /// No member was left that could be trusted, and this one was made the authority.
    pub has_new_authority: bool,
    /// It has taken the place of this device of its node, as which process had it.
    pub moved_from: Option<(Incarnation, usize)>,
}

/// The identity of a device.
pub(super) fn uuid_of(at: DeviceAt) -> Uuid {
    Uuid::from_u128((at.device as u128) << 64 | (0xde00 + at.node as u128))
}

/// The device with this identity.
fn device_at(device: &meta::Device) -> DeviceAt {
    let number = device.uuid.as_u128();
    DeviceAt {
        node: (number as u64 - 0xde00) as usize,
        device: (number >> 64) as usize,
    }
}

/// The same the other way round.
pub(super) fn device_with(map: &ClusterMap, at: DeviceAt) -> Option<meta::DeviceId> {
    let uuid = uuid_of(at);
    let device = map.devices().find(|device| device.uuid == uuid);
    device.map(|device| device.id)
}

/// A storage node as the data path knows it.
fn data_node(node: NodeId) -> NodeId {
    NodeId(node.0 - 1)
}

/// A member as the data path knows it.
fn place(map: &ClusterMap, member: &meta::Member) -> Option<Place> {
    let state = match member.state {
        meta::ReplicaState::InSync => ReplicaState::InSync,
        meta::ReplicaState::Syncing => ReplicaState::Syncing,
        meta::ReplicaState::Out => ReplicaState::Out,
    };
    Some(Place {
        at: device_at(map.device(member.device)?),
        member: Member {
            node: data_node(member.node),
            incarnation: member.incarnation,
            state,
            since: member.since,
        },
        leaving: member.leaving,
    })
}

/// Of the members of a group those that the data path is told of: of each node the one that counts most. The
/// daemon puts those in sync first; here they stay in the map's order, so that hosts prefer now one that has
/// always been there, now one that has not.
fn published(all: &[Place]) -> Vec<Place> {
    let rank = |place: &Place| match place.member.state {
        ReplicaState::InSync => 0,
        ReplicaState::Syncing => 1,
        ReplicaState::Out => 2,
    };
    let counts = |(nth, place): &(usize, &Place)| {
        let same = |(_, other): &(usize, &Place)| other.member.node == place.member.node;
        let of_node = all.iter().enumerate().filter(same);
        let best = of_node.min_by_key(|(_, other)| rank(other));
        best.is_some_and(|(best, _)| best == *nth)
    };
    let published = all.iter().enumerate().filter(counts);
    published.map(|(_, place)| *place).collect()
}

/// Those that the group is coming to, beside these: they are syncing on nodes where another device is in
/// sync.
fn coming(all: &[Place], published: &[Place]) -> Vec<Place> {
    let shares_node = |place: &&Place| {
        let first = published
            .iter()
            .find(|t| t.member.node == place.member.node);
        first.is_some_and(|t| t.at != place.at && t.member.state == ReplicaState::InSync)
    };
    let syncing = |place: &&Place| place.member.state == ReplicaState::Syncing;
    let coming = all.iter().filter(syncing).filter(shares_node);
    let named = coming.map(|place| {
        let mut place = *place;
        place.member.node = place.member.node.incoming();
        place
    });
    named.collect()
}

/// The device of a node that a word about a group means: that of the member for which this holds, as the
/// daemon takes it. If the map has none any more it is for meta to refuse the word.
pub(super) fn device_of(
    map: &ClusterMap,
    group: GroupId,
    node: NodeId,
    is_meant: impl Fn(&meta::Member) -> bool,
) -> Option<meta::DeviceId> {
    let members = map.group(group).into_iter().flat_map(|g| &g.members);
    let mut of_node = members.filter(|member| member.node == node);
    let meant = of_node.find(|member| is_meant(member)).map(|m| m.device);
    let any = || map.devices().find(|device| device.node == node);
    meant.or_else(|| any().map(|device| device.id))
}

pub(super) fn note_changes(pg: PgId, old: &Group, new: &Group, into: &mut Vec<Change>) {
    let state = |group: &Group, at: DeviceAt| {
        let place = group.all.iter().find(|place| place.at == at);
        place.map(|place| (place.member.state, place.member.incarnation))
    };
    let both = old.all.iter().chain(&new.all);
    let mut devices: Vec<DeviceAt> = both.map(|place| place.at).collect();
    devices.sort_unstable();
    devices.dedup();
    for at in devices {
        let nobody = (ReplicaState::Out, Incarnation(0));
        let from = state(old, at).unwrap_or(nobody);
        let to = state(new, at).unwrap_or(nobody);
        if from != to {
            let has_new_authority = from.0 == ReplicaState::InSync && to.0 == ReplicaState::InSync;
            let is_old = |place: &&Place| {
                let in_sync = place.member.state == ReplicaState::InSync;
                in_sync && place.at.node == at.node && place.at != at
            };
            let replaced = old.all.iter().find(is_old);
            let replaced = replaced.filter(|_| to.0 == ReplicaState::InSync);
            let moved_from = replaced.map(|place| (place.member.incarnation, place.at.device));
            into.push(Change {
                pg,
                at,
                from,
                to,
                has_new_authority,
                moved_from,
            });
        }
    }
}
