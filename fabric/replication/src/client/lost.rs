//! What a client does when a replica is lost.

use fabric_types::io::{IoResult, Tag};
use fabric_types::{NodeId, Refusal, Reply, RequestId};

use super::{Client, Transport};

impl Client {
    /// A node is lost: its replicas will answer nothing more, and use no buffer any more.
    pub fn on_lost<T: Transport>(
        &mut self,
        node: NodeId,
        transport: &mut T,
        done: &mut dyn FnMut(Tag, IoResult),
    ) {
        // All that it owes first: what goes on may have others sent, to this replica among them.
        let mut answered = Vec::new();
        for piece in 0..self.pieces.capacity() {
            if !self.pieces.is_taken(piece) {
                continue;
            }
            let key = self.pieces.key(piece);
            for member in [node, node.incoming()] {
                if self.lose(piece, member) && self.pieces[piece].answers.are_complete() {
                    answered.push(key);
                }
            }
        }
        for key in answered {
            let piece = self.pieces.find(key);
            let is_due = |&piece: &u32| self.pieces[piece].answers.are_complete();
            if let Some(piece) = piece.filter(is_due) {
                self.go_on(piece, transport, done);
            }
        }
    }

    /// Takes down that a replica will not answer; false if nobody waits for it.
    fn lose(&mut self, piece: u32, node: NodeId) -> bool {
        let set = self.groups.set(self.pieces[piece].group);
        let Some(member) = set.index_of(node) else {
            return false;
        };
        let lost = Reply {
            id: RequestId(self.pieces.key(piece).0),
            incarnation: set.members()[member].incarnation,
            result: Err(Refusal::Unreachable),
        };
        self.record(piece, member, &lost)
    }
}
