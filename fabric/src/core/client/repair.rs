//! Read repair: a block that failed its checksum on one replica, and was read from another one for the guest, is written again on
//! the first under the version that it has. Invariant *Verified*.
//!
//! The guest does not wait for it, nor is its memory used: the guest may change it. The blocks of the read are gone through one
//! by one: those that the bad replica cannot read are fetched from the good one, compared with the checksum in the bad one's
//! map, and restored provided that nobody has written them meanwhile.

use std::sync::Arc;

use super::{Client, ClientAction, Transport};
use crate::checksum::crc32c;
use crate::core::membership::{Members, Standing};
use crate::core::volume::VolumeState;
use crate::proto::ids::ChunkKey;
use crate::proto::message::BlockStamp;
use crate::proto::{Command, NodeId, Refusal, Request, Sequence};
use crate::store::api::Holds;
use crate::store::device::{BLOCK_BYTES, IoVecs};

/// Reads of a data thread that are being repaired at a time. Further ones are not: the scrubber, or the next read, finds the
/// block again.
const REPAIRS_MAX: usize = 4;

#[derive(Debug, Clone, Copy)]
#[repr(C, align(4096))]
struct Block([u8; BLOCK_BYTES]);

/// Memory that a request in flight points into.
struct Memory {
    block: Block,
    stamp: BlockStamp,
    iov: libc::iovec,
}

/// What was asked last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Nothing.
    Begun,
    /// Whether the bad replica can read the block.
    Probe,
    /// What it should be there.
    Inspect,
    /// Its content, of the good replica.
    Fetch,
    /// To write it again.
    Restore,
}

/// A read whose blocks are being repaired.
pub(super) struct Repair {
    volume: Arc<VolumeState>,
    bad: NodeId,
    good: NodeId,
    chunk: ChunkKey,
    block: u32,
    end: u32,
    step: Step,
    memory: Box<Memory>,
}

// SAFETY: the iovec points into memory that the repair owns.
unsafe impl Send for Repair {}

impl Repair {
    /// What comes after an answer to the present step: the replica that is asked next, and what.
    fn next(&mut self, result: Result<(), Refusal>) -> Option<(NodeId, Command)> {
        let healthy = |repair: &mut Self| {
            repair.block += 1;
            Step::Probe
        };
        self.step = match (self.step, result) {
            (Step::Begun, _) => Step::Probe,
            (Step::Probe, Ok(())) => healthy(self),
            (Step::Probe, Err(Refusal::Corrupt)) => Step::Inspect,
            (Step::Inspect, Ok(())) if self.memory.stamp.holds() == Holds::Data => Step::Fetch,
            (Step::Inspect, Ok(())) => healthy(self),
            // The good replica has another version of it: somebody is writing it, and that repairs it.
            (Step::Fetch, Ok(())) if crc32c(&self.memory.block.0) != self.memory.stamp.crc => {
                healthy(self)
            }
            (Step::Fetch, Ok(())) => Step::Restore,
            (Step::Restore, Ok(()) | Err(Refusal::Changed)) => healthy(self),
            _ => return None,
        };
        (self.block < self.end).then(|| self.command())
    }

    fn command(&mut self) -> (NodeId, Command) {
        let memory = &mut *self.memory;
        let (iov_base, iov_len) = match self.step {
            Step::Inspect => ((&raw mut memory.stamp).cast(), size_of::<BlockStamp>()),
            _ => (memory.block.0.as_mut_ptr().cast(), BLOCK_BYTES),
        };
        memory.iov = libc::iovec { iov_base, iov_len };
        let buffers = IoVecs {
            ptr: &raw const memory.iov,
            len: 1,
        };
        let (chunk, block, len) = (self.chunk, self.block, iov_len as u32);
        let command = match self.step {
            Step::Begun | Step::Probe | Step::Fetch => Command::Read {
                chunk,
                offset: block * BLOCK_BYTES as u32,
                buffers,
                len,
            },
            Step::Inspect => Command::Inspect {
                chunk,
                block,
                buffers,
                len,
            },
            Step::Restore => Command::Restore {
                chunk,
                block,
                stamps: [memory.stamp; 2],
                buffers,
                len,
            },
        };
        let node = if self.step == Step::Fetch {
            self.good
        } else {
            self.bad
        };
        (node, command)
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
        let (group, io, good) = (slot.group, slot.io, slot.answered_by());
        let set = &self.groups[usize::from(group)].set;
        let node = |member: usize| set.members()[member].node;
        let (Some(bad), Some(good)) = (slot.corrupt.iter().next(), good) else {
            return;
        };
        let (bad, good) = (node(bad), node(good));
        if self.repairs >= REPAIRS_MAX {
            return;
        }
        let Some(piece) = self.pieces.take() else {
            return;
        };
        self.repairs += 1;
        let volume = Arc::clone(&self.local(self.ios[io].volume).state);
        self.fill_piece(piece, io, group, Command::Join);
        let memory = Box::new(Memory {
            block: Block([0; BLOCK_BYTES]),
            stamp: BlockStamp::default(),
            iov: libc::iovec {
                iov_base: std::ptr::null_mut(),
                iov_len: 0,
            },
        });
        self.pieces[piece].repair = Some(Repair {
            volume,
            bad,
            good,
            chunk,
            block: offset / BLOCK_BYTES as u32,
            end: (offset + len).div_ceil(BLOCK_BYTES as u32),
            step: Step::Begun,
            memory,
        });
        self.go_on_repairing(piece, transport);
    }

    /// The answer to a repair's last question is there, or it has just begun.
    pub(super) fn go_on_repairing<T: Transport>(&mut self, piece: u32, transport: &mut T) {
        while self.pieces[piece].waiting.is_empty() {
            let group = usize::from(self.pieces[piece].group);
            let result = self.pieces[piece].outcome();
            let Some(repair) = &mut self.pieces[piece].repair else {
                return;
            };
            let restored = repair.step == Step::Restore && result == Some(Ok(()));
            let told = ClientAction::Repaired {
                pg: self.groups[group].set.pg(),
                node: repair.bad,
                chunk: repair.chunk,
                block: repair.block,
            };
            let next = match result {
                None if repair.step != Step::Begun => None,
                _ => repair.next(result.unwrap_or(Ok(()))),
            };
            let next = next.filter(|_| !repair.volume.is_revoked());
            if restored {
                self.actions.push_back(told);
            }
            let asked = next.and_then(|(node, command)| {
                let member = self.groups[group].set.index_of(node)?;
                let standing = self.groups[group].set.members()[member].standing;
                (standing == Standing::InSync).then_some((member, command))
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
        let group = usize::from(self.pieces[piece].group);
        let set = &self.groups[group].set;
        let (node, map, pg) = (set.members()[member].node, set.epoch(), set.pg());
        let slot = &mut self.pieces[piece];
        let Some(repair) = &slot.repair else {
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
        slot.forget_answers();
        slot.sending(Members::only(member));
        self.groups[group].in_flight[member] += 1;
        if let Some(reply) = transport.send(node, &self.pieces[piece].request) {
            self.record(piece, member, &reply);
        }
    }

    fn end_repair(&mut self, piece: u32) {
        self.repairs -= 1;
        self.pieces[piece].repair = None;
        self.free_piece(piece);
    }
}
