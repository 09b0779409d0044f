//! A guest's flush goes to nodes, not to each of perhaps hundreds of groups: of groups that lie on the same
//! nodes the first one's flush does for all. Should a replica fail, or a map change meanwhile, it goes to
//! each group after all: only so it is known that every group's map has left the failed one out.

use std::collections::HashMap;

use fabric_types::ids::LayerId;
use fabric_types::io::Op;
use fabric_types::{Command, Epoch};

use super::ios::GuestIo;
use super::places::Places;
use super::{Client, Group};

/// [`GuestIo::maps`] of a flush that goes to each group.
const EACH_GROUP: u64 = u64::MAX;

/// For each group whether a flush has to go to it, the first of its pool's on the same nodes, and under which
/// map: the newest of all those groups. Under an older one a node may not know yet on which of its devices
/// they are written.
pub(super) fn groups_to_flush(groups: &[Group], places: &Places) -> Vec<Option<Epoch>> {
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

impl Client {
    /// Where a flush of the layer begins and ends.
    pub(super) fn groups_of(&self, layer: LayerId) -> (u64, u64) {
        let groups = self.places.groups_of(layer);
        let skipped = self.flushes[groups.clone()]
            .iter()
            .take_while(|flushes| flushes.is_none());
        let first = groups.start + skipped.count();
        (first as u64, groups.end as u64)
    }

    /// The group that a flush goes to after the one at its cursor.
    pub(super) fn next_to_flush(&self, io: &GuestIo) -> u64 {
        let next = io.cursor + 1;
        if io.maps == EACH_GROUP {
            return next;
        }
        let groups = &self.flushes[next as usize..io.end as usize];
        let skipped = groups
            .iter()
            .take_while(|flushes| flushes.is_none())
            .count();
        next + skipped as u64
    }

    /// The map that a piece goes under: its group's, or the newest of the groups for which it flushes.
    #[inline]
    pub(super) fn map_of(&self, piece: u32) -> Epoch {
        let slot = &self.pieces[piece];
        let group = usize::from(slot.group);
        let epoch = self.groups[group].set.epoch();
        match slot.request.command {
            Command::Flush { .. } => epoch.max(self.flushes[group].unwrap_or_default()),
            _ => epoch,
        }
    }

    /// Whether a flush that seems done has to go to each group all the same.
    pub(super) fn flush_each_group(&mut self, io: u32) -> bool {
        let maps = self.maps;
        let state = &mut self.ios[io];
        let through = state.open == 0 && state.cursor >= state.end && state.error.is_none();
        let untouched = state.maps == maps && !state.failed_somewhere;
        if state.op != Op::Flush || !through || untouched || state.maps == EACH_GROUP {
            return false;
        }
        state.maps = EACH_GROUP;
        let slot = state.volume;
        let (first, _) = self.groups_of(self.local(slot).state.layer());
        self.ios[io].cursor = first;
        true
    }
}
