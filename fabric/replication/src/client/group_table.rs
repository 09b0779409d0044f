//! The placement groups that a client knows by the newest maps, and what their replicas owe it.

use std::collections::{HashMap, VecDeque};

use fabric_types::ids::{ChunkKey, LayerId};
use fabric_types::membership::{Member, Members, REPLICAS_MAX, ReplicaSet};
use fabric_types::{Epoch, NodeId, PgId};

use super::ClientAction;
use super::places::Places;
use super::unsent::Flush;
use super::unsent::Rest;

/// A placement group and how its replicas fare.
pub(super) struct Group {
    pub(super) set: ReplicaSet,
    reported: Members,
    in_flight: [u32; REPLICAS_MAX],
}

/// See the module. A group is named by its position.
#[derive(Default)]
pub(super) struct GroupTable {
    groups: Vec<Group>,
    /// Where in `groups` each pool's are.
    places: Places,
    /// Maps taken up.
    maps: u64,
    /// See [`groups_to_flush`].
    flushes: Vec<Option<Epoch>>,
}

/// What a newer map has changed.
pub(super) struct Taken {
    /// Of each group that was known and has changed: its members that began anew.
    renewed: Vec<Option<Members>>,
    /// Every set could be taken up.
    pub(super) is_whole: bool,
}

impl Taken {
    /// A group that was known has changed.
    pub(super) fn has_changes(&self) -> bool {
        self.renewed.iter().any(Option::is_some)
    }

    /// The group's members that began anew; `None` if it has not changed.
    pub(super) fn renewed(&self, group: u16) -> Option<Members> {
        self.renewed[usize::from(group)]
    }
}

impl GroupTable {
    /// A newer map: the sets that changed or came to it, each pool's in order. Older ones are ignored.
    pub(super) fn take(&mut self, sets: Vec<ReplicaSet>) -> Taken {
        let mut renewed = vec![None; self.groups.len()];
        let mut is_whole = true;
        let mut added = Vec::new();
        for set in sets {
            match self.places.position(set.pg()) {
                None => added.push(set),
                Some(at) if set.epoch() <= self.groups[at].set.epoch() => {}
                Some(at) => {
                    renewed[at] = self.groups[at].take(&set);
                    is_whole &= renewed[at].is_some();
                }
            }
        }
        self.add(added);
        let taken = Taken { renewed, is_whole };
        self.maps += u64::from(taken.has_changes());
        taken
    }

    /// Takes groups up that are not known yet, or at least looks anew which of them flushes go to.
    pub(super) fn add(&mut self, sets: Vec<ReplicaSet>) {
        for set in sets {
            self.groups.push(Group {
                set,
                reported: Members::NONE,
                in_flight: [0; REPLICAS_MAX],
            });
        }
        self.places = Places::of(&self.groups);
        self.flushes = groups_to_flush(&self.groups, &self.places);
    }

    /// A group's replicas.
    #[inline]
    pub(super) fn set(&self, group: u16) -> &ReplicaSet {
        &self.groups[usize::from(group)].set
    }

    /// How many maps have been taken up.
    #[inline]
    pub(super) fn maps(&self) -> u64 {
        self.maps
    }

    /// Whether the groups of a layer's pool are known.
    #[inline]
    pub(super) fn knows(&self, layer: LayerId) -> bool {
        self.places.knows(layer)
    }

    /// Which group holds a chunk of a volume whose pool is known.
    #[inline]
    pub(super) fn group_of(&self, chunk: ChunkKey) -> u16 {
        self.places.group_of(chunk)
    }

    /// See [`Places::power_lost`].
    #[inline]
    pub(super) fn power_lost(&self, layer: LayerId) -> Epoch {
        self.places.power_lost(layer)
    }

    /// Whether a write to one of these chunks of the layer would find enough replicas in sync. Of as many
    /// chunks as the pool has groups it is asked of all groups: no more than those are looked at.
    pub(super) fn can_commit(
        &self,
        layer: LayerId,
        chunks: std::ops::Range<u64>,
        chunk_at: impl Fn(u64) -> Option<ChunkKey>,
    ) -> bool {
        let commits = |group: usize| {
            let set = &self.groups[group].set;
            set.in_sync().len() >= set.min_in_sync()
        };
        let mut groups = self.places.groups_of(layer);
        if chunks.end - chunks.start >= groups.len() as u64 {
            return groups.all(commits);
        }
        let mut chunks = chunks.filter_map(chunk_at);
        chunks.all(|chunk| commits(usize::from(self.group_of(chunk))))
    }

    /// Where a flush of the layer begins and ends.
    pub(super) fn to_flush(&self, layer: LayerId) -> Rest {
        let groups = self.places.groups_of(layer);
        let skipped = self.flushes[groups.clone()]
            .iter()
            .take_while(|flushes| flushes.is_none());
        let first = groups.start + skipped.count();
        Rest {
            at: first as u64,
            end: groups.end as u64,
        }
    }

    /// The group that a flush goes to after the one that it is at.
    pub(super) fn next_to_flush(&self, flush: &Flush) -> u64 {
        flush.next(&self.flushes)
    }

    /// The map that a flush of a group goes under: the newest of the groups for which it flushes.
    pub(super) fn flushed_under(&self, group: u16) -> Epoch {
        let flushes = self.flushes[usize::from(group)].unwrap_or_default();
        self.set(group).epoch().max(flushes)
    }

    /// A request is sent to a member; its node.
    #[inline]
    pub(super) fn note_sent(&mut self, group: u16, member: usize) -> NodeId {
        let group = &mut self.groups[usize::from(group)];
        group.in_flight[member] += 1;
        group.set.members()[member].node
    }

    /// A request that was sent is answered, or will not be.
    #[inline]
    pub(super) fn note_answered(&mut self, group: u16, member: usize) {
        self.groups[usize::from(group)].in_flight[member] -= 1;
    }

    /// Requests that are not answered.
    pub(super) fn unanswered(&self) -> u64 {
        let all = self.groups.iter().flat_map(|group| &group.in_flight);
        all.map(|&count| u64::from(count)).sum()
    }

    /// Requests that a replica of a group has not answered.
    pub(super) fn in_flight_at(&self, pg: PgId, node: NodeId) -> u32 {
        self.groups
            .iter()
            .filter(|g| g.set.pg() == pg)
            .filter_map(|g| Some(g.in_flight[g.set.index_of(node)?]))
            .sum()
    }

    /// Asks for a map without these members, once per map.
    pub(super) fn report(
        &mut self,
        group: u16,
        failed: Members,
        actions: &mut VecDeque<ClientAction>,
    ) {
        let group = &mut self.groups[usize::from(group)];
        for member in failed.without(group.reported).iter() {
            group.reported.insert(member);
            actions.push_back(ClientAction::ReportFailed {
                pg: group.set.pg(),
                node: group.set.members()[member].node,
                epoch: group.set.epoch(),
            });
        }
    }

    /// Members that a map without them was asked for, since there is this one.
    pub(super) fn reported(&self, group: u16) -> Members {
        self.groups[usize::from(group)].reported
    }

    /// Asks for maps without a node that holds every write up.
    pub(super) fn report_slow(&self, node: NodeId, actions: &mut VecDeque<ClientAction>) {
        for Group { set, .. } in &self.groups {
            let member = set.index_of(node).filter(|&m| set.receiving().contains(m));
            // Slow is better than too few.
            if member.is_some() && set.in_sync().len() > set.min_in_sync() {
                actions.push_back(ClientAction::ReportSlow {
                    pg: set.pg(),
                    node,
                    epoch: set.epoch(),
                });
            }
        }
    }
}

impl Group {
    /// Goes on with a newer set; returns the members that began anew. `None`: there is no place for its
    /// members before those that are gone have answered or are lost.
    fn take(&mut self, set: &ReplicaSet) -> Option<Members> {
        let mut busy = Members::NONE;
        let owing = self.in_flight.iter().enumerate().filter(|(_, n)| **n > 0);
        owing.for_each(|(member, _)| busy.insert(member));
        let new = set.aligned_with(&self.set, busy)?;
        let mut renewed = Members::NONE;
        for (index, new) in new.members().iter().enumerate() {
            let old = self.set.members().get(index);
            let same = |old: &Member| {
                (old.node, old.incarnation) == (new.node, new.incarnation) && old.since >= new.since
            };
            if !old.is_some_and(same) {
                renewed.insert(index);
            }
        }
        self.set = new;
        self.reported = Members::NONE;
        Some(renewed)
    }
}

/// For each group whether a flush has to go to it, the first of its pool's on the same nodes, and under which
/// map: the newest of all those groups. Under an older one a node may not know yet on which of its devices
/// they are written.
fn groups_to_flush(groups: &[Group], places: &Places) -> Vec<Option<Epoch>> {
    let mut flushes = vec![None; groups.len()];
    for pool in places.pools() {
        let mut seen = HashMap::new();
        for at in pool {
            let set = &groups[at].set;
            // Nobody may do it now: the group waits for a map, and the flush with it.
            let waits = set.receiving().is_empty() || set.in_sync().len() < set.min_in_sync();
            let member = |i: usize| (set.members()[i].node, set.members()[i].incarnation);
            let mut nodes: Vec<_> = set.receiving().iter().map(member).collect();
            nodes.sort_unstable_by_key(|(node, _)| *node);
            let first = match waits {
                true => at,
                false => *seen.entry(nodes).or_insert(at),
            };
            flushes[first] = flushes[first].max(Some(set.epoch()));
        }
    }
    flushes
}
