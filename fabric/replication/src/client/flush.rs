//! A guest's flush goes to nodes, not to each of perhaps hundreds of groups: of groups that lie on the same
//! nodes the first one's flush does for all. Should a replica fail, or a map change meanwhile, it goes to
//! each group after all: only so it is known that every group's map has left the failed one out.

use std::collections::HashMap;

use fabric_types::ids::LayerId;
use fabric_types::{Command, Epoch};

use super::places::Places;
use super::unsent::{Rest, Unsent};
use super::{Client, Group};
use crate::unflushed::FlushMark;
use crate::volume::VolumeState;

/// Which groups a flush goes to.
#[derive(Clone, Copy)]
enum Scope {
    /// To the first of those on the same nodes.
    Nodes {
        /// Maps that the client had taken up when it began.
        maps: u64,
        /// Some replica did not do it.
        failed_somewhere: bool,
    },
    /// To each.
    EachGroup,
}

/// A flush under way.
#[derive(Clone, Copy)]
pub(super) struct Flush {
    /// Groups that it has not been sent to.
    pub(super) rest: Rest,
    scope: Scope,
    mark: FlushMark,
}

impl Flush {
    /// What it has to know at its end.
    pub(super) fn mark(&self) -> FlushMark {
        self.mark
    }

    /// Some replica did not do it.
    pub(super) fn note_failed(&mut self) {
        if let Scope::Nodes {
            failed_somewhere, ..
        } = &mut self.scope
        {
            *failed_somewhere = true;
        }
    }

    /// Whether it has to go to each group after all; so many maps have been taken up by now.
    fn is_uncertain(&self, maps: u64) -> bool {
        match self.scope {
            Scope::Nodes {
                maps: before,
                failed_somewhere,
            } => before != maps || failed_somewhere,
            Scope::EachGroup => false,
        }
    }

    /// The group that it goes to after the one that it is at.
    fn next(&self, flushes: &[Option<Epoch>]) -> u64 {
        let next = self.rest.at + 1;
        if let Scope::EachGroup = self.scope {
            return next;
        }
        let groups = &flushes[next as usize..self.rest.end as usize];
        let skipped = groups.iter().take_while(|flushes| flushes.is_none());
        next + skipped.count() as u64
    }
}

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

    /// A flush begins.
    pub(super) fn begin_flush(&self, volume: &VolumeState) -> Flush {
        let (at, end) = self.groups_of(volume.layer());
        Flush {
            rest: Rest { at, end },
            scope: Scope::Nodes {
                maps: self.maps,
                failed_somewhere: false,
            },
            mark: match self.replicated {
                true => volume
                    .unflushed
                    .begin(self.places.power_lost(volume.layer())),
                false => FlushMark::NONE,
            },
        }
    }

    /// The group that a flush goes to after the one that it is at.
    pub(super) fn next_to_flush(&self, flush: &Flush) -> u64 {
        flush.next(&self.flushes)
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
        let state = &self.ios[io];
        let Unsent::Groups(mut flush) = state.unsent else {
            return false;
        };
        let is_through =
            state.open == 0 && state.unsent.next_cut().is_none() && state.error.is_none();
        if !is_through || !flush.is_uncertain(self.maps) {
            return false;
        }
        let layer = self.local(state.volume).state.layer();
        flush.scope = Scope::EachGroup;
        flush.rest.at = self.groups_of(layer).0;
        self.ios[io].unsent = Unsent::Groups(flush);
        true
    }
}
