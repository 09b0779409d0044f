//! Taking operations in, cutting them into parts, and reporting outcomes.

use super::super::api::{
    CHUNK_BYTES, Fence, LAYER_CHAIN_MAX, LayerId, OpId, StoreError, StoreOp, StoreResult,
    Submitted, Version,
};
use super::super::table::NONE;
use super::map::{LEAF_BYTES, LeafPlace};
use super::operations::NO_SPACE;
use super::part::Place;
use super::{INTERNAL_PARTS, OP_PARTS_MAX, OpKind, PartKind, ShardCore};

/// Granularity of offsets and lengths.
const SECTOR: u32 = 512;
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
        assert!(self.waiting.is_bounded(self.parts.taken()));
        assert!(self.res.device.is_bounded());
        if self.parts.free() < OP_PARTS_MAX + INTERNAL_PARTS as usize {
            return Submitted::Busy;
        }
        let Some(slot) = self.ops.begin(id) else {
            return Submitted::Busy;
        };
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
                urgent,
            } => {
                self.ops[slot].urgent = urgent;
                self.start_restore(slot, (layer, chunk, block), [expect, stamp], iovecs)
            }
            StoreOp::Flush => self.res.faults.refuse_if_failed().map(|()| {
                self.ops[slot].kind = OpKind::Flush;
                self.wait_for_flush(slot);
            }),
            StoreOp::OrderLog => {
                self.ops[slot].kind = OpKind::Flush;
                self.flushes.order(slot, self.res.log.newest_done());
                Ok(())
            }
            StoreOp::RecordFlush => {
                self.ops[slot].kind = OpKind::Flush;
                self.flushes.record(slot, self.res.log.to_record());
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
            StoreOp::Checkpoint { clean } => self.res.faults.refuse_if_failed().map(|()| {
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
            StoreOp::Write {
                version,
                fua,
                urgent,
                ..
            } => {
                self.ops[slot].urgent = urgent;
                (PartKind::Write, version, fua)
            }
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
        let (table, faults) = (&mut self.res.map.table, &self.res.faults);
        let mut rec = table.find(layers[0], chunk);
        if kind != PartKind::Read {
            faults.refuse_if_failed()?;
            let Fence { generation, .. } = table.fence(layers[0]);
            if version.generation() < generation {
                return Err(StoreError::Fenced { generation });
            }
            if kind == PartKind::Write || layers.len() > 1 {
                let made = table.find_or_create(layers[0], chunk);
                rec = Some(made.ok_or(NO_SPACE)?);
            }
        } else if faults.is_poisoned(layers[0], chunk, (offset, end as u32)) {
            return faults.refuse_if_failed();
        }
        let op = &mut self.ops[slot];
        (op.chunk, op.offset, op.fua, op.layer_count) = (chunk, offset, fua, layers.len());
        for (to, from) in op.layers.iter_mut().zip(layers) {
            *to = from.0;
        }
        let rec = rec.unwrap_or(NONE);
        let mut start = offset;
        while start < end as u32 {
            let stop = (start / LEAF_BYTES + 1)
                .saturating_mul(LEAF_BYTES)
                .min(end as u32);
            self.ops[slot].parts_left += 1;
            let place = Place::new((layers[0], chunk, rec), (start, stop));
            let demand = &mut self.ops[slot].demand;
            demand.blocks += u32::from(place.count);
            demand.parts += 1;
            self.start_part(slot, kind, place, version.0);
            start = stop;
        }
        Ok(())
    }

    /// See [`Parts::start`](super::parts::Parts::start).
    pub(super) fn start_part(
        &mut self,
        op: u32,
        kind: PartKind,
        place: Place,
        version: u64,
    ) -> u32 {
        let lists = (&mut self.res.map.table, &mut self.waiting);
        self.parts.start(op, kind, place, version, lists)
    }

    /// Starts a part that looks at what is mapped now, for no operation. Without a record it waits for no
    /// write in flight.
    pub(super) fn start_unordered(&mut self, kind: PartKind, leaf: &LeafPlace) {
        let place = Place::new((leaf.layer, leaf.chunk, NONE), leaf.range());
        self.start_part(NONE, kind, place, 0);
    }

    /// Starts the part that changes a layer's fence.
    pub(super) fn start_fence_part(
        &mut self,
        op: u32,
        kind: PartKind,
        layer: LayerId,
        version: u64,
    ) {
        let place = Place::new((layer, 0, NONE), (0, 0));
        self.start_part(op, kind, place, version);
    }

    /// The part is through, with the error recorded in it if any.
    pub(super) fn finish_part(&mut self, slot: u32) {
        self.parts
            .unlink(slot, &mut self.res.map.table, &mut self.waiting);
        self.release_old(slot);
        self.end_reader(slot);
        let part = &mut self.parts[slot];
        let (op, kind) = (part.op, part.kind);
        let error = part.outcome.error(part.version);
        if std::mem::take(&mut part.pinned) {
            let leaf_slot = self.res.map.leaf_slot(part.place.rec, part.place.leaf);
            self.res.map.leaves.meta_mut(leaf_slot).pins -= 1;
        }
        self.parts.give_back(slot);
        match kind {
            PartKind::Scrub => self.scrubber.end_leaf(),
            PartKind::LocateVictims | PartKind::Move => self.cleaner.end_leaf(&mut self.res.alloc),
            PartKind::Drop | PartKind::FenceDrop if self.ops[op].kind == OpKind::Drop => {
                self.on_drop_part(op, error);
            }
            _ => self.on_op_part(op, error),
        }
    }

    fn on_op_part(&mut self, op: u32, error: Option<StoreError>) {
        let state = &mut self.ops[op];
        let Some(result) = state.end_part(error) else {
            return;
        };
        let is_durable = state.fua || matches!(state.kind, OpKind::Fence(_));
        if result.is_ok() && is_durable {
            self.wait_for_flush(op);
        } else {
            self.finish_op(op, result);
        }
    }

    /// Reports an operation.
    pub(super) fn finish_op(&mut self, op: u32, result: StoreResult) {
        self.ops.finish(op, result, &mut self.res);
    }

    fn start_fence(&mut self, slot: u32, layer: LayerId, fence: Fence) -> StoreResult {
        self.res.faults.refuse_if_failed()?;
        if fence.generation > Version::GENERATION_MAX {
            return Err(StoreError::OutOfRange);
        }
        // The record is made now, so that there is room for it when the log has it.
        if !self.res.map.table.raise_fence(layer, Fence::default()) {
            return Err(NO_SPACE);
        }
        self.ops[slot].kind = OpKind::Fence(fence);
        self.ops[slot].parts_left = 1;
        let version = u64::from(fence.generation);
        self.start_fence_part(slot, PartKind::Fence, layer, version);
        Ok(())
    }
}
