//! Operations in flight and those that are done.

use std::collections::VecDeque;

use fabric_types::iov::{self, IovCursor};
use fabric_types::slab::Slab;

use super::super::api::{Fence, LAYER_CHAIN_MAX, LayerId, OpId, StoreError, StoreResult};
use super::reserve::SpaceDemand;
use super::resources::Resources;

/// What an operation is, once its parts are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum OpKind {
    #[default]
    Io,
    Flush,
    Fence(Fence),
    Drop,
    Checkpoint,
}

/// Refused for want of room; how much of the operation was stored is told when it
/// [finishes](Operations::finish).
pub(super) const NO_SPACE: StoreError = StoreError::NoSpace { untouched: false };

/// An operation in flight.
#[derive(Debug, Default)]
pub(super) struct Op {
    pub(super) id: u64,
    pub(super) kind: OpKind,
    pub(super) iovs: Vec<libc::iovec>,
    /// Every iovec can be handed to an `O_DIRECT` device.
    pub(super) aligned: bool,
    pub(super) layers: [u64; LAYER_CHAIN_MAX],
    pub(super) layer_count: usize,
    pub(super) chunk: u32,
    pub(super) offset: u32,
    pub(super) fua: bool,
    /// It may use a part of the reserve.
    pub(super) urgent: bool,
    /// What a write takes in all.
    pub(super) demand: SpaceDemand,
    /// Something of it is, or was, in a log batch.
    pub(super) is_logged: bool,
    pub(super) parts_left: u32,
    pub(super) error: Option<StoreError>,
}

// SAFETY: the iovecs are descriptions of memory that the submitter keeps valid, see `StoreCore::submit`.
unsafe impl Send for Op {}

impl Op {
    /// Layer of the chain, from the newest on.
    pub(super) fn layer(&self, at: usize) -> Option<LayerId> {
        let chain = &self.layers[..self.layer_count];
        chain.get(at).map(|&layer| LayerId(layer))
    }

    /// Copies the operation's bytes from chunk byte `from` on into `block`.
    pub(super) fn copy_in(&self, from: u32, block: &mut [u8]) {
        // SAFETY: the submitter keeps the memory valid until the completion.
        unsafe { iov::copy_from(&self.iovs, (from - self.offset) as usize, block) };
    }

    /// Copies bytes to where the operation wants those from chunk byte `from` on.
    pub(super) fn copy_out(&self, from: u32, bytes: &[u8]) {
        let mut cursor = IovCursor::default();
        cursor.seek(&self.iovs, (from - self.offset) as usize);
        // SAFETY: the submitter keeps the memory valid until the completion.
        unsafe { cursor.copy_to(&self.iovs, bytes) };
    }

    /// Fills what the operation wants of chunk bytes `from..to` with zeroes.
    pub(super) fn zero(&self, (from, to): (u32, u32)) {
        let mut cursor = IovCursor::default();
        cursor.seek(&self.iovs, (from - self.offset) as usize);
        // SAFETY: the submitter keeps the memory valid until the completion.
        unsafe { cursor.fill_zero(&self.iovs, (to - from) as usize) };
    }

    /// Whether there are older layers that it may have to hide.
    pub(super) fn hides_layers(&self) -> bool {
        self.layer_count > 1
    }

    /// One of the parts has ended; returns the outcome if it was the last.
    pub(super) fn end_part(&mut self, error: Option<StoreError>) -> Option<StoreResult> {
        self.parts_left -= 1;
        if weight(error) > weight(self.error) {
            self.error = error;
        }
        (self.parts_left == 0).then_some(self.error.map_or(Ok(()), Err))
    }
}

/// Which of the errors of an operation's parts is reported: the first of the heaviest.
fn weight(error: Option<StoreError>) -> u8 {
    match error {
        None => 0,
        Some(StoreError::Stale { .. }) => 1,
        Some(StoreError::Renumber { .. }) => 2,
        Some(_) => 3,
    }
}

/// The operations of one shard.
#[derive(Debug)]
pub(super) struct Operations {
    slots: Slab<Op>,
    done: VecDeque<(OpId, StoreResult)>,
    /// Units that were free when one was refused for want of room.
    no_room_at: Option<u64>,
}

impl Operations {
    pub(super) fn new(ops_max: u32) -> Self {
        Self {
            slots: Slab::new(ops_max, Op::default),
            done: VecDeque::with_capacity(ops_max as usize),
            no_room_at: None,
        }
    }

    /// A slot for an operation, if one is free.
    pub(super) fn begin(&mut self, id: OpId) -> Option<u32> {
        let slot = self.slots.take()?;
        let op = &mut self.slots[slot];
        op.id = id.0;
        op.kind = OpKind::Io;
        (op.parts_left, op.error, op.fua, op.aligned) = (0, None, false, true);
        (op.urgent, op.demand, op.is_logged) = (false, SpaceDemand::default(), false);
        op.iovs.clear();
        Some(slot)
    }

    /// Reports an operation.
    pub(super) fn finish(&mut self, op: u32, mut result: StoreResult, res: &mut Resources) {
        res.counters.ops += 1;
        if let Err(StoreError::NoSpace { untouched }) = &mut result {
            *untouched = !self.slots[op].is_logged;
            res.counters.refused_for_room += 1;
            // One that may use the reserve has less in mind than others lack.
            let known = self.no_room_at.filter(|_| self.slots[op].urgent);
            self.no_room_at = Some(res.free_soon().max(known.unwrap_or(0)));
        }
        self.done.push_back((OpId(self.slots[op].id), result));
        self.slots.give_back(op);
    }

    pub(super) fn next_done(&mut self) -> Option<(OpId, StoreResult)> {
        self.done.pop_front()
    }

    /// Operations that were taken in and not fetched again.
    pub(super) fn in_flight(&self) -> usize {
        self.slots.taken() + self.done.len()
    }

    /// Units that were free when an operation was last refused for want of room, if none has found any since.
    pub(super) fn no_room_at(&self) -> Option<u64> {
        self.no_room_at
    }

    /// A write has found room. Where more than `plenty` units were free it was not the shard's own that had
    /// run out, and this says more than what is free; on a full shard small ones find room now and then.
    pub(super) fn note_room(&mut self, plenty: u64) {
        self.no_room_at.take_if(|free| *free > plenty);
    }

    pub(super) fn ram_bytes(&self) -> usize {
        self.slots.capacity() as usize * (size_of::<Op>() + 64)
    }
}

impl std::ops::Index<u32> for Operations {
    type Output = Op;

    #[inline]
    fn index(&self, op: u32) -> &Op {
        &self.slots[op]
    }
}

impl std::ops::IndexMut<u32> for Operations {
    #[inline]
    fn index_mut(&mut self, op: u32) -> &mut Op {
        &mut self.slots[op]
    }
}
