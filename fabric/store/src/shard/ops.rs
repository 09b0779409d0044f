//! Taking operations in, the order of overlapping ones, and reporting outcomes.

use super::super::api::{
    CHUNK_BYTES, Fence, LAYER_CHAIN_MAX, LayerId, OpId, StoreError, StoreOp, StoreResult,
    Submitted, Version,
};
use super::super::format::{CHUNK_LEAVES, LEAF_BLOCKS, UNIT_BYTES};
use super::super::table::NONE;
use super::{Dropping, INTERNAL_PARTS, OP_PARTS_MAX, OpKind, PartKind, PartState, ShardCore};

/// Granularity of offsets and lengths.
const SECTOR: u32 = 512;
/// Bytes that a leaf maps.
const LEAF_BYTES: u32 = (LEAF_BLOCKS * UNIT_BYTES) as u32;
/// Parts of a dropped layer in flight: its space comes back in parallel, guests still get through.
const DROP_PARTS_MAX: u32 = 16;
/// Scatter list elements of an operation at most.
const IOVECS_MAX: usize = 1 << 14;

/// The chunk range and version of a read, write or zero operation.
struct Span<'a> {
    layers: &'a [LayerId],
    chunk: u32,
    offset: u32,
    len: u64,
    version: Version,
    fua: bool,
}

impl ShardCore {
    pub(super) fn accept(&mut self, id: OpId, op: StoreOp<'_>) -> Submitted {
        // Invariant *Bounded*: every list of parts and device requests is within its table.
        let waiting = self.stalled.len() + self.starved.len() + self.no_old.len();
        assert!(waiting + self.ready.len() <= self.parts.taken());
        assert!(self.actions.len() <= self.ios.taken());
        if self.parts.free() < OP_PARTS_MAX + INTERNAL_PARTS as usize {
            return Submitted::Busy;
        }
        let Some(slot) = self.ops.take() else {
            return Submitted::Busy;
        };
        let state = &mut self.ops[slot];
        state.id = id.0;
        state.kind = OpKind::Io;
        (state.parts_left, state.error, state.fua, state.aligned) = (0, None, false, true);
        state.iovs.clear();
        if let Err(error) = self.start_op(slot, op) {
            self.finish_op(slot, Err(error));
        }
        Submitted::Accepted
    }

    /// Begins what was taken in. On an error nothing of it was.
    fn start_op(&mut self, slot: u32, op: StoreOp<'_>) -> StoreResult {
        match op {
            StoreOp::Read { .. } | StoreOp::Write { .. } | StoreOp::Zero { .. } => {
                self.start_io(slot, op)
            }
            StoreOp::Inspect {
                layer,
                chunk,
                block,
                iovecs,
            } => self.start_inspect(slot, (layer, chunk, block), iovecs),
            StoreOp::Restore {
                layer,
                chunk,
                block,
                expect,
                stamp,
                iovecs,
            } => self.start_restore(slot, (layer, chunk, block), [expect, stamp], iovecs),
            StoreOp::Flush => self.refuse_if_failed().map(|()| {
                self.ops[slot].kind = OpKind::Flush;
                self.wait_for_flush(slot);
            }),
            StoreOp::OrderLog => {
                self.ops[slot].kind = OpKind::Flush;
                self.flushes.ordering.push((slot, self.log.newest_done));
                Ok(())
            }
            StoreOp::RecordFlush => {
                self.ops[slot].kind = OpKind::Flush;
                self.flushes.recording.push((slot, self.log.to_record()));
                Ok(())
            }
            StoreOp::SetFence { layer, fence } => self.start_fence(slot, layer, fence),
            StoreOp::DropLayer { layer } => self.start_drop(slot, layer),
            StoreOp::DropChunk { layer, chunk } => {
                let span = Span {
                    layers: &[layer],
                    chunk,
                    offset: 0,
                    len: CHUNK_BYTES,
                    // As for a whole layer: no fence is above it.
                    version: Version(u64::MAX),
                    fua: false,
                };
                self.start_parts(slot, &span, PartKind::Drop)
            }
            StoreOp::Checkpoint { clean } => self.refuse_if_failed().map(|()| {
                self.ops[slot].kind = OpKind::Checkpoint;
                self.ckpt.request(slot, clean);
            }),
        }
    }

    fn start_io(&mut self, slot: u32, op: StoreOp<'_>) -> StoreResult {
        let (layers, chunk, offset) = match op {
            StoreOp::Read {
                layers,
                chunk,
                offset,
                ..
            }
            | StoreOp::Write {
                layers,
                chunk,
                offset,
                ..
            }
            | StoreOp::Zero {
                layers,
                chunk,
                offset,
                ..
            } => (layers, chunk, offset),
            _ => return Err(StoreError::OutOfRange),
        };
        let (kind, version, fua) = match op {
            StoreOp::Write { version, fua, .. } => (PartKind::Write, version, fua),
            StoreOp::Zero { version, fua, .. } => (PartKind::Zero, version, fua),
            _ => (PartKind::Read, Version(0), false),
        };
        let len = match op {
            StoreOp::Read { iovecs, .. } | StoreOp::Write { iovecs, .. } => {
                self.set_iovecs(slot, iovecs)
            }
            StoreOp::Zero { len, .. } => u64::from(len),
            _ => 0,
        };
        let span = Span {
            layers,
            chunk,
            offset,
            len,
            version,
            fua,
        };
        self.start_parts(slot, &span, kind)
    }

    pub(super) fn set_iovecs(&mut self, slot: u32, iovecs: &[libc::iovec]) -> u64 {
        let op = &mut self.ops[slot];
        if iovecs.len() > IOVECS_MAX {
            return 0;
        }
        op.iovs.extend(iovecs.iter().filter(|v| v.iov_len > 0));
        let mask = SECTOR as usize - 1;
        op.aligned = op
            .iovs
            .iter()
            .all(|v| (v.iov_base as usize | v.iov_len) & mask == 0);
        op.iovs
            .iter()
            .fold(0u64, |sum, v| sum.saturating_add(v.iov_len as u64))
    }

    pub(super) fn refuse_if_failed(&self) -> StoreResult {
        self.failed
            .map_or(Ok(()), |errno| Err(StoreError::ReadOnly(errno)))
    }

    fn start_parts(&mut self, slot: u32, span: &Span<'_>, kind: PartKind) -> StoreResult {
        let &Span {
            layers,
            chunk,
            offset,
            len,
            version,
            fua,
        } = span;
        let end = u64::from(offset).saturating_add(len);
        let aligned = offset % SECTOR == 0 && len % u64::from(SECTOR) == 0;
        if len == 0 || end > CHUNK_BYTES || !aligned || chunk == u32::MAX {
            return Err(StoreError::OutOfRange);
        }
        if layers.is_empty() || layers.len() > LAYER_CHAIN_MAX {
            return Err(StoreError::OutOfRange);
        }
        let mut rec = self.table.find(layers[0], chunk);
        if kind != PartKind::Read {
            self.refuse_if_failed()?;
            let fence = self.table.fence(layers[0]);
            if version.generation() < fence.generation {
                return Err(StoreError::Fenced {
                    generation: fence.generation,
                });
            }
            if kind == PartKind::Write || layers.len() > 1 {
                rec = Some(
                    self.table
                        .find_or_create(layers[0], chunk)
                        .ok_or(StoreError::NoSpace)?,
                );
            }
        } else if self.failed.is_some() && self.is_poisoned(layers[0], chunk, offset, end as u32) {
            return self.refuse_if_failed();
        }
        let op = &mut self.ops[slot];
        (op.chunk, op.offset, op.fua, op.layer_count) = (chunk, offset, fua, layers.len());
        for (to, from) in op.layers.iter_mut().zip(layers) {
            *to = from.0;
        }
        let mut start = offset;
        while start < end as u32 {
            let stop = (start / LEAF_BYTES + 1)
                .saturating_mul(LEAF_BYTES)
                .min(end as u32);
            self.ops[slot].parts_left += 1;
            self.start_part(
                slot,
                kind,
                (layers[0].0, chunk, rec.unwrap_or(NONE)),
                (start, stop),
                version.0,
            );
            start = stop;
        }
        Ok(())
    }

    /// Makes a part of `start..end` (within one leaf) and lets it run unless an earlier write overlaps.
    pub(super) fn start_part(
        &mut self,
        op: u32,
        kind: PartKind,
        (layer, chunk, rec): (u64, u32, u32),
        (start, end): (u32, u32),
        version: u64,
    ) -> u32 {
        let slot = self
            .parts
            .take()
            .expect("parts are reserved before an operation is accepted");
        let block = UNIT_BYTES as u32;
        let (first, last) = (start / block, end.div_ceil(block));
        let part = &mut self.parts[slot];
        let (mut map, mut retry) = (
            std::mem::take(&mut part.map),
            std::mem::take(&mut part.retry),
        );
        map.clear();
        retry.clear();
        *part = super::Part {
            op,
            kind,
            seq: self.next_seq,
            layer,
            chunk,
            rec,
            start,
            end,
            version,
            ..Default::default()
        };
        (part.map, part.retry) = (map, retry);
        part.leaf = (start / LEAF_BYTES) as u8;
        part.first = (first % LEAF_BLOCKS as u32) as u16;
        part.count = (last - first) as u16;
        self.next_seq += 1;
        part.state = match kind {
            PartKind::Read | PartKind::Scrub => PartState::Resolve,
            PartKind::Write | PartKind::Zero if start % block != 0 || end % block != 0 => {
                PartState::Resolve
            }
            PartKind::Write
            | PartKind::Zero
            | PartKind::Drop
            | PartKind::Inspect
            | PartKind::Restore
            | PartKind::Move => PartState::Acquire,
            PartKind::LocateVictims => PartState::LocateVictims,
            PartKind::Fence | PartKind::FenceDrop => PartState::Logging,
        };
        if part.state == PartState::Resolve {
            part.begin_resolve();
        }
        let part = &self.parts[slot];
        if part.state == PartState::Logging {
            self.ready.push_back(slot);
        } else if rec != NONE && self.has_hazard(slot) {
            self.link(slot);
            self.parts[slot].wait_next = state_code(self.parts[slot].state);
            self.parts[slot].state = PartState::WaitHazard;
        } else {
            if rec != NONE && is_writer(kind) {
                self.link(slot);
            }
            self.runnable.push_back(slot);
        }
        slot
    }

    /// Whether an earlier write in flight overlaps the part. Invariant *Stable reads*: who answers true
    /// waits.
    fn has_hazard(&self, slot: u32) -> bool {
        let part = &self.parts[slot];
        let mut at = self.table.runtime(part.rec).hazards;
        while at != NONE {
            let other = &self.parts[at];
            let overlap = other.leaf == part.leaf
                && other.first < part.first + part.count
                && part.first < other.first + other.count;
            // Before and after a move a block reads the same: its readers need not wait.
            let harmless = other.kind == PartKind::Move
                && matches!(part.kind, PartKind::Read | PartKind::Inspect);
            if is_writer(other.kind) && other.seq < part.seq && overlap && !harmless {
                return true;
            }
            at = other.hazard_next;
        }
        false
    }

    fn link(&mut self, slot: u32) {
        let part = &mut self.parts[slot];
        part.linked = true;
        let head = &mut self.table.runtime_mut(part.rec).hazards;
        part.hazard_next = *head;
        *head = slot;
    }

    fn unlink(&mut self, slot: u32) {
        let (rec, next) = (self.parts[slot].rec, self.parts[slot].hazard_next);
        self.parts[slot].linked = false;
        let head = self.table.runtime(rec).hazards;
        if head == slot {
            self.table.runtime_mut(rec).hazards = next;
            return;
        }
        let mut at = head;
        while self.parts[at].hazard_next != slot {
            at = self.parts[at].hazard_next;
        }
        self.parts[at].hazard_next = next;
    }

    /// Lets go whoever waited for a write that has finished.
    fn wake(&mut self, rec: u32) {
        let mut woken = std::mem::take(&mut self.scratch);
        woken.clear();
        let mut at = self.table.runtime(rec).hazards;
        while at != NONE {
            let part = &self.parts[at];
            if part.state == PartState::WaitHazard && !self.has_hazard(at) {
                woken.push(at);
            }
            at = part.hazard_next;
        }
        // The list is newest first.
        for &slot in woken.iter().rev() {
            let part = &mut self.parts[slot];
            part.state = state_from_code(part.wait_next);
            part.wait_next = NONE;
            self.runnable.push_back(slot);
        }
        self.scratch = woken;
    }

    /// The part is through, with the error recorded in it if any.
    pub(super) fn finish_part(&mut self, slot: u32) {
        let (rec, linked) = (self.parts[slot].rec, self.parts[slot].linked);
        if linked {
            self.unlink(slot);
            if is_writer(self.parts[slot].kind) {
                self.wake(rec);
            }
        }
        self.release_old(slot);
        self.drop_tag(slot);
        let part = &mut self.parts[slot];
        let (op, kind, leaf, pinned) = (
            part.op,
            part.kind,
            part.leaf,
            std::mem::take(&mut part.pinned),
        );
        let newest = Version(part.stale);
        let stale = (part.stale > part.version).then_some(match part.renumber {
            true => StoreError::Renumber { newest },
            false => StoreError::Stale { newest },
        });
        let error = part.error.or(stale);
        if pinned {
            let leaf_slot = self.table.runtime(rec).leaf_slots[usize::from(leaf)];
            self.leaves.meta_mut(leaf_slot).pins -= 1;
        }
        self.parts.give_back(slot);
        match kind {
            PartKind::Scrub => self.scrub.busy = false,
            PartKind::LocateVictims | PartKind::Move => self.end_cleaning(),
            PartKind::Drop | PartKind::FenceDrop if self.ops[op].kind == OpKind::Drop => {
                self.on_drop_part(op, error);
            }
            _ => self.on_op_part(op, error),
        }
    }

    fn on_op_part(&mut self, op: u32, error: Option<StoreError>) {
        let state = &mut self.ops[op];
        state.parts_left -= 1;
        if weight(error) > weight(state.error) {
            state.error = error;
        }
        if state.parts_left > 0 {
            return;
        }
        let durable = state.fua || matches!(state.kind, OpKind::Fence(_));
        match state.error {
            Some(error) => self.finish_op(op, Err(error)),
            None if durable => self.wait_for_flush(op),
            None => self.finish_op(op, Ok(())),
        }
    }

    /// Reports an operation.
    pub(super) fn finish_op(&mut self, op: u32, result: StoreResult) {
        self.counters.ops += 1;
        if result == Err(StoreError::NoSpace) {
            self.counters.refused_for_room += 1;
            self.no_room_at = Some(self.free_soon());
        }
        self.done.push_back((OpId(self.ops[op].id), result));
        self.ops.give_back(op);
    }

    fn start_fence(&mut self, slot: u32, layer: LayerId, fence: Fence) -> StoreResult {
        self.refuse_if_failed()?;
        if fence.generation > Version::GENERATION_MAX {
            return Err(StoreError::OutOfRange);
        }
        // The record is made now, so that there is room for it when the log has it.
        if !self.table.raise_fence(layer, Fence::default()) {
            return Err(StoreError::NoSpace);
        }
        self.ops[slot].kind = OpKind::Fence(fence);
        self.ops[slot].parts_left = 1;
        self.start_part(
            slot,
            PartKind::Fence,
            (layer.0, 0, NONE),
            (0, 0),
            u64::from(fence.generation),
        );
        Ok(())
    }

    fn start_drop(&mut self, slot: u32, layer: LayerId) -> StoreResult {
        self.refuse_if_failed()?;
        self.ops[slot].kind = OpKind::Drop;
        self.dropping.push_back(Dropping {
            op: slot,
            layer,
            rec: 0,
            leaf: 0,
            parts: 0,
            fence_sent: false,
        });
        Ok(())
    }

    /// Unmaps the leaves of the layers that are being dropped, a few at a time.
    pub(super) fn step_dropping(&mut self) {
        let Some(mut drop) = self.dropping.pop_front() else {
            return;
        };
        if self.failed.is_some() && drop.parts == 0 {
            let result = self.refuse_if_failed();
            self.finish_op(drop.op, result);
            return;
        }
        while drop.rec < self.table.slots() && drop.parts < DROP_PARTS_MAX && self.parts.free() > 0
        {
            let record = self.table.record(drop.rec);
            let ours = record.kind == super::super::format::record_kind::CHUNK
                && record.layer == drop.layer.0;
            let cached = ours && self.table.runtime(drop.rec).leaf_slots[drop.leaf] != NONE;
            let (rec, leaf, chunk) = (drop.rec, drop.leaf as u32, record.index);
            if ours && (cached || record.leaves[drop.leaf].unit != 0) {
                drop.parts += 1;
                let range = (leaf * LEAF_BYTES, (leaf + 1) * LEAF_BYTES);
                self.start_part(
                    drop.op,
                    PartKind::Drop,
                    (drop.layer.0, chunk, rec),
                    range,
                    u64::MAX,
                );
            }
            drop.leaf = if ours {
                (drop.leaf + 1) % CHUNK_LEAVES
            } else {
                0
            };
            drop.rec += u32::from(drop.leaf == 0);
        }
        if drop.rec >= self.table.slots() && drop.parts == 0 && !drop.fence_sent {
            drop.fence_sent = true;
            drop.parts = 1;
            self.start_part(
                drop.op,
                PartKind::FenceDrop,
                (drop.layer.0, 0, NONE),
                (0, 0),
                0,
            );
        }
        self.dropping.push_front(drop);
    }

    fn on_drop_part(&mut self, op: u32, error: Option<StoreError>) {
        let state = &mut self.ops[op];
        state.error = state.error.or(error);
        let front = self
            .dropping
            .front_mut()
            .expect("the layer is being dropped");
        front.parts -= 1;
        if front.fence_sent && front.parts == 0 {
            let result = state.error.map_or(Ok(()), Err);
            self.dropping.pop_front();
            self.finish_op(op, result);
        }
    }

    fn is_poisoned(&self, layer: LayerId, chunk: u32, start: u32, end: u32) -> bool {
        self.poisoned
            .iter()
            .any(|&(l, c, from, to)| l == layer.0 && c == chunk && from < end && start < to)
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

pub(super) fn is_writer(kind: PartKind) -> bool {
    matches!(
        kind,
        PartKind::Write | PartKind::Zero | PartKind::Drop | PartKind::Restore | PartKind::Move
    )
}

/// A waiting part is in no leaf's list, so `wait_next` keeps the state it goes on with.
fn state_code(state: PartState) -> u32 {
    u32::from(state == PartState::Acquire)
}

fn state_from_code(code: u32) -> PartState {
    if code == 1 {
        PartState::Acquire
    } else {
        PartState::Resolve
    }
}
