//! A guest's flush goes to nodes, not to each of perhaps hundreds of groups: of groups that lie on the same
//! nodes the first one's flush does for all. Should a replica fail, or a map change meanwhile, it goes to
//! each group after all: only so it is known that every group's map has left the failed one out.

use fabric_types::{Command, Epoch};

use super::Client;
use super::unsent::{Rest, Unsent};
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

    /// Whether it has to go to each group after all. `maps` counts the maps that this thread has applied.
    fn is_uncertain(&self, maps: u64) -> bool {
        match self.scope {
            Scope::Nodes {
                maps: before,
                failed_somewhere,
            } => before != maps || failed_somewhere,
            Scope::EachGroup => false,
        }
    }

    /// The group that it goes to after the one that it is at; of each group it is told whether flushes go to
    /// it.
    pub(super) fn next(&self, flushes: &[Option<Epoch>]) -> u64 {
        let next = self.rest.at + 1;
        if let Scope::EachGroup = self.scope {
            return next;
        }
        let groups = &flushes[next as usize..self.rest.end as usize];
        let skipped = groups.iter().take_while(|flushes| flushes.is_none());
        next + skipped.count() as u64
    }
}

impl Client {
    /// A flush begins.
    pub(super) fn begin_flush(&self, volume: &VolumeState) -> Flush {
        Flush {
            rest: self.groups.to_flush(volume.layer()),
            scope: Scope::Nodes {
                maps: self.groups.maps(),
                failed_somewhere: false,
            },
            mark: match self.is_replicated() {
                true => volume
                    .unflushed
                    .begin(self.groups.power_lost(volume.layer())),
                false => FlushMark::NONE,
            },
        }
    }

    /// The map that a piece goes under: its group's, or the newest of the groups for which it flushes.
    #[inline]
    pub(super) fn map_of(&self, piece: u32) -> Epoch {
        let slot = &self.pieces[piece];
        match slot.request.command {
            Command::Flush { .. } => self.groups.flushed_under(slot.group),
            _ => self.groups.set(slot.group).epoch(),
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
        if !is_through || !flush.is_uncertain(self.groups.maps()) {
            return false;
        }
        let layer = self.volumes[state.volume].state.layer();
        flush.scope = Scope::EachGroup;
        flush.rest.at = self.groups.to_flush(layer).at;
        self.ios[io].unsent = Unsent::Groups(flush);
        true
    }
}
