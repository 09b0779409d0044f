//! Who vouches for a group: a replica in sync is taken out only if another, valid one is known to live.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::command::Heard;
use crate::ids::{DeviceId, Incarnation};
use crate::map::ClusterMap;
use crate::model::{GroupId, Member, PlacementGroup};

/// Whether the start of a member's node that it takes writes in is among those that were heard of.
pub(super) fn is_heard(heard: &[Heard], member: &Member) -> bool {
    let is_member = |one: &Heard| one.node == member.node && one.incarnation == member.incarnation;
    heard.iter().any(is_member)
}

/// Whether a report about a member can be judged with those that were heard of since it came in: it needs no
/// witness, or they are one.
#[must_use]
pub fn has_witness(map: &ClusterMap, group: GroupId, device: DeviceId, heard: &[Heard]) -> bool {
    let found = map.group(group);
    let needs = found.is_some_and(|group| group.member(device).is_some_and(Member::is_in_sync));
    let is_witness = |member: &Member| {
        member.device != device && is_heard(heard, member) && map.is_valid(member)
    };
    !needs || found.is_some_and(|group| group.in_sync().any(is_witness))
}

/// Since when members that should be sent writes are known not to be valid.
///
/// Their witness has to be heard of after that. One that was heard of a moment before may have died first:
/// then it would be left as the only one in sync, and if it is gone for good, the others wait for it for
/// ever. (The simulator found that: seed 400719.)
#[derive(Debug, Default)]
pub(super) struct Absent {
    since: BTreeMap<(DeviceId, Incarnation), Duration>,
}

impl Absent {
    /// The map has changed; these groups have something the matter.
    pub(super) fn look<'a>(
        &mut self,
        map: &ClusterMap,
        unwell: impl Iterator<Item = &'a PlacementGroup>,
        now: Duration,
    ) {
        let mut since = BTreeMap::new();
        for member in unwell.flat_map(|group| &group.members) {
            if member.is_receiving() && !map.is_valid(member) {
                let key = (member.device, member.incarnation);
                since.insert(key, *self.since.get(&key).unwrap_or(&now));
            }
        }
        self.since = since;
    }

    /// Since when it is known that the member is not valid.
    pub(super) fn since(&self, member: &Member) -> Option<Duration> {
        self.since
            .get(&(member.device, member.incarnation))
            .copied()
    }
}
