//! What a client does with a newer map.

use fabric_types::Refusal;
use fabric_types::io::{IoResult, Tag};
use fabric_types::membership::{Members, ReplicaSet};

use super::{Client, Transport};

impl Client {
    /// A newer map: the sets that changed or came to it, each pool's in order. Parked pieces go on by it;
    /// older ones are ignored. False: some could not be taken up yet, and have to be told again.
    pub fn on_map<T: Transport>(
        &mut self,
        sets: Vec<ReplicaSet>,
        transport: &mut T,
        done: &mut dyn FnMut(Tag, IoResult),
    ) -> bool {
        let taken = self.groups.take(sets);
        if !taken.has_changes() {
            return taken.is_whole;
        }
        for group in self.full.groups() {
            if let Some(renewed) = taken.renewed(group) {
                let in_sync = self.groups.set(group).in_sync();
                self.full.on_map(group, renewed, in_sync);
            }
        }
        for piece in 0..self.pieces.capacity() {
            if !self.pieces.is_taken(piece) {
                continue;
            }
            let Some(renewed) = taken.renewed(self.pieces[piece].group) else {
                continue;
            };
            self.pieces[piece].answers.renew(renewed);
            // What waits for space is tried at the next tick.
            if self.pieces[piece].is_idle() && !self.pieces[piece].space.is_held() {
                self.ask_again(piece);
                self.go_on(piece, transport, done);
            }
        }
        taken.is_whole
    }

    /// The guest is told so once the map has none of these.
    #[cold]
    pub(super) fn condemn(&mut self, piece: u32, refusal: Refusal, others: Members) {
        self.pieces[piece].answers.condemn(refusal);
        self.report(piece, others);
    }

    /// Asks for a map without these members, once per map.
    pub(super) fn report(&mut self, piece: u32, failed: Members) {
        let group = self.pieces[piece].group;
        self.groups.report(group, failed, &mut self.actions);
    }
}
