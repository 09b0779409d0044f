//! What a client does with a newer map, and when it asks for one.

use fabric_types::io::{IoResult, Tag};
use fabric_types::membership::{Member, Members, REPLICAS_MAX, ReplicaSet};

use super::flush::groups_to_flush;
use super::places::Places;
use super::{Client, ClientAction, Group, Transport};

impl Client {
    /// A newer map: the sets that changed or came to it, each pool's in order. Parked pieces go on by it;
    /// older ones are ignored. False: some could not be taken up yet, and have to be told again.
    pub fn on_map<T: Transport>(
        &mut self,
        sets: Vec<ReplicaSet>,
        transport: &mut T,
        done: &mut dyn FnMut(Tag, IoResult),
    ) -> bool {
        let mut renewed = vec![None; self.groups.len()];
        let mut all_taken = true;
        let mut added = Vec::new();
        for set in sets {
            match self.places.position(set.pg()) {
                None => added.push(set),
                Some(at) if set.epoch() <= self.groups[at].set.epoch() => {}
                Some(at) => {
                    renewed[at] = self.groups[at].take(&set);
                    all_taken &= renewed[at].is_some();
                }
            }
        }
        self.replicated |= self.groups.iter().any(|group| !group.set.is_alone());
        self.add_groups(added);
        if renewed.iter().all(Option::is_none) {
            return all_taken;
        }
        self.maps += 1;
        for piece in 0..self.pieces.capacity() {
            if !self.pieces.is_taken(piece) {
                continue;
            }
            let Some(renewed) = renewed[usize::from(self.pieces[piece].group)] else {
                continue;
            };
            self.pieces[piece].answers.renew(renewed);
            if self.pieces[piece].is_idle() {
                self.ask_again(piece);
                self.go_on(piece, transport, done);
            }
        }
        all_taken
    }

    /// Takes groups up that are not known yet, or at least looks anew which of them flushes go to.
    pub(super) fn add_groups(&mut self, sets: Vec<ReplicaSet>) {
        for set in sets {
            self.replicated |= !set.is_alone();
            self.groups.push(Group {
                set,
                reported: Members::NONE,
                in_flight: [0; REPLICAS_MAX],
            });
        }
        self.places = Places::of(&self.groups);
        self.flushes = groups_to_flush(&self.groups, &self.places);
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
