//! What a client does with a newer map, and when it asks for one.

use super::flush::groups_to_flush;
use super::{Client, ClientAction, Transport};
use crate::core::membership::{Members, ReplicaSet};
use crate::io::{IoResult, Tag};

impl Client {
    /// A newer map. Parked pieces go on by it; an older one is ignored.
    pub fn on_map<T: Transport>(
        &mut self,
        set: ReplicaSet,
        transport: &mut T,
        done: &mut dyn FnMut(Tag, IoResult),
    ) {
        let Some(at) = self.groups.iter().position(|g| g.set.pg() == set.pg()) else {
            return;
        };
        if set.epoch() <= self.groups[at].set.epoch() {
            return;
        }
        let renewed = renewed(&self.groups[at].set, &set);
        self.replicated |= set.members().len() > 1;
        self.groups[at].set = set;
        self.groups[at].reported = Members::NONE;
        self.maps += 1;
        self.flushes = groups_to_flush(&self.groups);
        for piece in 0..self.pieces.capacity() {
            if self.pieces.is_taken(piece) && usize::from(self.pieces[piece].group) == at {
                self.pieces[piece].renew(renewed);
            }
            let slot = &self.pieces[piece];
            let parked = self.pieces.is_taken(piece) && slot.begun && slot.waiting.is_empty();
            if parked && usize::from(slot.group) == at {
                self.ask_again(piece);
                self.go_on(piece, transport, done);
            }
        }
    }

    /// Asks for a map without these members, once per map.
    pub(super) fn report(&mut self, piece: u32, failed: Members) {
        let group = &mut self.groups[usize::from(self.pieces[piece].group)];
        for member in failed.without(group.reported).iter() {
            group.reported.insert(member);
            self.actions.push_back(ClientAction::ReportFailed {
                pg: group.set.pg(),
                node: group.set.members()[member].node,
                epoch: group.set.epoch(),
            });
        }
    }
}

/// Members that began anew between two maps.
fn renewed(old: &ReplicaSet, new: &ReplicaSet) -> Members {
    let mut renewed = Members::NONE;
    for (index, (old, new)) in old.members().iter().zip(new.members()).enumerate() {
        if new.incarnation != old.incarnation || new.since > old.since {
            renewed.insert(index);
        }
    }
    renewed
}
