//! A guest's flush goes to nodes, not to each of perhaps hundreds of groups: of groups that lie on the same nodes the first one's
//! flush does for all. Should a replica fail, or a map change meanwhile, it goes to each group after all: only so it is known
//! that every group's map has left the failed one out.

use super::ios::GuestIo;
use super::{Client, Group};
use crate::core::membership::ReplicaSet;
use crate::io::Op;

/// [`GuestIo::maps`] of a flush that goes to each group.
const EACH_GROUP: u64 = u64::MAX;

/// Whether a flush of one group's replicas is one of the other's.
fn same_nodes(a: &ReplicaSet, b: &ReplicaSet) -> bool {
    let node = |set: &ReplicaSet, i: usize| {
        let member = set.members()[i];
        (member.node, member.incarnation)
    };
    let has = |i: usize| b.receiving().iter().any(|j| node(b, j) == node(a, i));
    a.receiving().len() == b.receiving().len() && a.receiving().iter().all(has)
}

/// For each group whether a flush has to go to it: the first of those on the same nodes.
pub(super) fn groups_to_flush(groups: &[Group]) -> Vec<bool> {
    let is_first = |at: usize| {
        let set = &groups[at].set;
        // Nobody may do it now: the group waits for a map, and the flush with it.
        let waits = set.receiving().is_empty() || set.in_sync().len() < set.min_in_sync();
        waits || !groups[..at].iter().any(|g| same_nodes(&g.set, set))
    };
    (0..groups.len()).map(is_first).collect()
}

impl Client {
    /// The group that a flush goes to after the one at its cursor.
    pub(super) fn next_to_flush(&self, io: &GuestIo) -> u64 {
        let next = io.cursor + 1;
        if io.maps == EACH_GROUP {
            return next;
        }
        let groups = &self.flushes[next as usize..io.end as usize];
        let skipped = groups.iter().take_while(|flushes| !**flushes).count();
        next + skipped as u64
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
        state.cursor = 0;
        true
    }
}
