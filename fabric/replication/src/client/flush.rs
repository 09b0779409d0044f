//! A guest's flush goes to nodes, not to each of perhaps hundreds of groups: of groups that lie on the same
//! nodes the first one's flush does for all. Should a replica fail, or a map change meanwhile, it goes to
//! each group after all: only so it is known that every group's map has left the failed one out.

use fabric_types::{Command, Epoch};

use super::Client;
use super::unsent::{Flush, Unsent};
use crate::volume::VolumeState;

impl Client {
    /// A flush begins.
    pub(super) fn begin_flush(&self, volume: &VolumeState) -> Flush {
        let known = self.groups.power_lost(volume.layer());
        let mark = volume.unflushed.begin(known);
        let rest = self.groups.to_flush(volume.layer());
        Flush::to_nodes(rest, self.groups.maps(), mark)
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
        flush.begin_with_each_group(self.groups.to_flush(layer).at);
        self.ios[io].unsent = Unsent::Groups(flush);
        true
    }
}
