//! Dropping layers: unmaps their leaves, a few at a time, and then forgets their fences.

use std::collections::VecDeque;

use super::super::api::{LayerId, StoreError, StoreResult};
use super::map::{LeafCursor, LeafPlace, Map};
use super::operations::OpKind;
use super::part::Place;
use super::{PartKind, ShardCore};

/// Parts of a dropped layer in flight: its space comes back in parallel, guests still get through.
const DROP_PARTS_MAX: u32 = 16;

/// A layer being dropped.
#[derive(Debug)]
struct Dropping {
    op: u32,
    layer: LayerId,
    cursor: LeafCursor,
    parts: u32,
    fence_sent: bool,
}

/// Layers to be dropped, one after the other.
#[derive(Debug, Default)]
pub(super) struct Dropper {
    layers: VecDeque<Dropping>,
}

impl Dropper {
    fn begin(&mut self, op: u32, layer: LayerId) {
        self.layers.push_back(Dropping {
            op,
            layer,
            cursor: LeafCursor::default(),
            parts: 0,
            fence_sent: false,
        });
    }

    /// Gives the first layer up, unless parts of it are in flight; returns its operation.
    fn give_up(&mut self) -> Option<u32> {
        let op = self.layers.front().filter(|drop| drop.parts == 0)?.op;
        self.layers.pop_front();
        Some(op)
    }

    /// The operation, and the next leaf of its layer to be unmapped now.
    fn next_leaf(&mut self, map: &Map) -> Option<(u32, LeafPlace)> {
        let drop = self.layers.front_mut()?;
        if drop.parts == DROP_PARTS_MAX {
            return None;
        }
        let layer = drop.layer;
        let place = drop.cursor.next_stored(map, |found| found == layer)?;
        drop.parts += 1;
        Some((drop.op, place))
    }

    /// The operation and the layer whose fence is to be dropped: nothing is mapped any more.
    fn next_fence(&mut self, map: &Map) -> Option<(u32, LayerId)> {
        let drop = self.layers.front_mut()?;
        if !drop.cursor.is_at_end(map) || drop.parts > 0 || drop.fence_sent {
            return None;
        }
        drop.fence_sent = true;
        drop.parts = 1;
        Some((drop.op, drop.layer))
    }

    /// A part of the first layer has ended; whether it was the last one.
    fn end_part(&mut self) -> bool {
        let first = self.layers.front_mut().expect("the layer is being dropped");
        first.parts -= 1;
        let is_last = first.fence_sent && first.parts == 0;
        if is_last {
            self.layers.pop_front();
        }
        is_last
    }
}

impl ShardCore {
    pub(super) fn start_drop(&mut self, op: u32, layer: LayerId) -> StoreResult {
        self.res.faults.refuse_if_failed()?;
        self.ops[op].kind = OpKind::Drop;
        self.dropper.begin(op, layer);
        Ok(())
    }

    /// Goes on with the layer that is being dropped.
    pub(super) fn step_dropping(&mut self) {
        if self.res.faults.has_failed()
            && let Some(op) = self.dropper.give_up()
        {
            let result = self.res.faults.refuse_if_failed();
            self.finish_op(op, result);
            return;
        }
        while self.parts.free() > 0
            && let Some((op, leaf)) = self.dropper.next_leaf(&self.res.map)
        {
            let chunk = (leaf.layer, leaf.chunk, leaf.rec);
            let place = Place::new(chunk, leaf.range());
            self.start_part(op, PartKind::Drop, place, u64::MAX);
        }
        if let Some((op, layer)) = self.dropper.next_fence(&self.res.map) {
            self.start_fence_part(op, PartKind::FenceDrop, layer, 0);
        }
    }

    pub(super) fn on_drop_part(&mut self, op: u32, error: Option<StoreError>) {
        let state = &mut self.ops[op];
        state.error = state.error.or(error);
        if self.dropper.end_part() {
            let result = self.ops[op].error.map_or(Ok(()), Err);
            self.finish_op(op, result);
        }
    }
}
