//! Read repair: a block that one replica cannot read, and that was read from another one for the guest, is
//! written again on the first under the version that it has. Invariant *Verified*.
//!
//! The guest does not wait for it, nor is its memory used: the guest may change it. The blocks of the read
//! are gone through one by one, each as [`BlockRepair`] does it.

use std::sync::Arc;

use fabric_types::block::BLOCK_BYTES;
use fabric_types::membership::{Members, ReplicaState};
use fabric_types::{Command, NodeId, Refusal, Request, Sequence};

use super::link::NONE;
use super::piece::Stage;
use super::{Client, ClientAction, Transport};
use crate::repair::{BlockRepair, End, Next, RepairPeer};
use crate::volume::VolumeState;

/// Reads of a data thread that are being repaired at a time. Further ones are not: the scrubber, or the next
/// read, finds the block again.
const REPAIRS_MAX: usize = 4;

/// A read whose blocks are being repaired.
pub(super) struct Repair {
    volume: Arc<VolumeState>,
    bad: NodeId,
    good: NodeId,
    /// The block that is looked at, and the first one behind the read.
    block: u32,
    end: u32,
    has_begun: bool,
    machine: BlockRepair,
}

impl Repair {
    /// What comes after an answer, or at first: the replica that is asked next, and what. True if a block was
    /// written again.
    fn next(&mut self, result: Result<(), Refusal>) -> (Option<(NodeId, Command)>, bool) {
        let mut restored = false;
        if std::mem::replace(&mut self.has_begun, true) {
            match self.machine.on_answer(result) {
                Next::Ask(peer, command) => return (Some((self.node(peer), command)), false),
                Next::Over(End::Unfetched(_) | End::Failed(_)) => return (None, false),
                // A replica that does not know what it should have sees to it itself, once it was asked.
                Next::Over(end) => restored = end == End::Restored,
            }
            self.block += 1;
        }
        let next = (self.block < self.end).then(|| {
            let (peer, command) = self.machine.begin(self.block);
            (self.node(peer), command)
        });
        (next, restored)
    }

    fn node(&self, peer: RepairPeer) -> NodeId {
        match peer {
            RepairPeer::Bad => self.bad,
            RepairPeer::Good => self.good,
        }
    }
}

impl Client {
    /// A read is answered, and some replica could not read all of it: that one is repaired.
    #[cold]
    pub(super) fn repair<T: Transport>(&mut self, read: u32, transport: &mut T) {
        let slot = &self.pieces[read];
        let Command::Read {
            chunk, offset, len, ..
        } = slot.request.command
        else {
            return;
        };
        let (group, io, good) = (slot.group, slot.io, slot.answers.answered_by());
        let set = self.groups.set(group);
        let node = |member: usize| set.members()[member].node;
        let (Some(bad), Some(good)) = (slot.answers.unreadable().iter().next(), good) else {
            return;
        };
        let (bad, good) = (node(bad), node(good));
        let volume = &self.volumes[self.ios[io].volume].state;
        if self.repairs >= REPAIRS_MAX || !volume.had_lease() {
            return;
        }
        let volume = Arc::clone(volume);
        let Some(piece) = self.pieces.take() else {
            return;
        };
        self.repairs += 1;
        self.fill_piece(piece, io, group, Command::Join);
        self.pieces[piece].stage = Stage::Repair(Repair {
            volume,
            bad,
            good,
            block: offset / BLOCK_BYTES as u32,
            end: (offset + len).div_ceil(BLOCK_BYTES as u32),
            has_begun: false,
            machine: BlockRepair::new(chunk),
        });
        self.go_on_repairing(piece, transport);
    }

    /// The answer to a repair's last question is there, or it has just begun.
    pub(super) fn go_on_repairing<T: Transport>(&mut self, piece: u32, transport: &mut T) {
        while self.pieces[piece].answers.are_complete() {
            let set = self.groups.set(self.pieces[piece].group);
            let result = self.pieces[piece].answers.outcome();
            let Stage::Repair(repair) = &mut self.pieces[piece].stage else {
                return;
            };
            let told = ClientAction::Repaired {
                pg: set.pg(),
                node: repair.bad,
                chunk: repair.machine.chunk(),
                block: repair.block,
            };
            let (next, restored) = match result {
                None if repair.has_begun => (None, false),
                _ => repair.next(result.unwrap_or(Ok(()))),
            };
            let next = next.filter(|_| !repair.volume.is_revoked());
            if restored {
                self.actions.push_back(told);
            }
            let asked = next.and_then(|(node, command)| {
                let member = set.index_of(node)?;
                let state = set.members()[member].state;
                (state == ReplicaState::InSync).then_some((member, command))
            });
            let Some((member, command)) = asked else {
                self.end_repair(piece);
                return;
            };
            self.ask_for_repair(piece, member, command, transport);
        }
    }

    fn ask_for_repair<T: Transport>(
        &mut self,
        piece: u32,
        member: usize,
        command: Command,
        transport: &mut T,
    ) {
        let group = self.pieces[piece].group;
        let (map, pg) = (self.groups.set(group).epoch(), self.groups.set(group).pg());
        let slot = &mut self.pieces[piece];
        let Stage::Repair(repair) = &slot.stage else {
            return;
        };
        slot.request = Request {
            id: slot.request.id,
            pg,
            epoch: repair.volume.epoch().max(map),
            generation: repair.volume.generation(),
            sequence: Sequence(0),
            watermark: Sequence(0),
            command,
        };
        slot.answers.forget();
        slot.answers.sending(Members::only(member));
        let node = self.groups.note_sent(group, member);
        if let Some(reply) = transport.send(node, &self.pieces[piece].request) {
            self.record(piece, member, &reply);
        }
    }

    fn end_repair(&mut self, piece: u32) {
        self.repairs -= 1;
        self.pieces[piece].stage = Stage::Unsent { next: NONE };
        // It is on no volume's account: the read that it repairs may be over, and its slot another's.
        self.pieces.give_back(piece);
    }
}
