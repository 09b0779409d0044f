//! How much of the shard may be used now: every batch leaves what the next checkpoint needs.

use super::super::api::StoreError;
use super::super::table::NONE;
use super::{PartKind, ShardCore};

/// The cleaner leaves one in so many units free.
const SPARE_SHARE: u32 = 64;

/// Who refuses with more than one in so many units free lacks something else than those.
const PLENTY_SHARE: u32 = 8;

/// What a batch needs, or may use.
#[derive(Debug, Clone, Copy)]
pub(super) struct SpaceDemand {
    /// Data blocks.
    pub(super) blocks: u32,
    /// Parts, each of which may make a map page dirty.
    pub(super) parts: u32,
}

impl ShardCore {
    /// Units that a checkpoint takes for new copies of so many leaves, before it frees the old ones. Each
    /// leaf may make a table page dirty.
    fn checkpoint_units(&self, leaves: u32) -> u32 {
        let pages = self.table.page_ptrs.len() as u32;
        let tables = (self.table.dirty_count() + leaves).min(pages.max(1));
        leaves + tables + self.table.dir_ptrs.len() as u32 + 2
    }

    /// Units that the next checkpoint takes once every batch in flight is done.
    pub(super) fn checkpoint_need(&self) -> u32 {
        self.checkpoint_units(self.leaves.dirty() + self.pending_leaves)
    }

    /// Whether the part will make its map page dirty.
    pub(super) fn dirties_leaf(&self, part: u32) -> bool {
        let p = &self.parts[part];
        p.rec != NONE && !self.leaves.meta(self.leaf_slot(part)).dirty
    }

    /// How much of what is wanted fits, the part at the head before the others; `None` when it has to wait
    /// for a checkpoint, or was refused.
    pub(super) fn space_for(&mut self, want: SpaceDemand) -> Option<SpaceDemand> {
        let head = self.ready[0];
        if self.parts[head].kind == PartKind::Move {
            return self.space_for_move(want);
        }
        // Discards may use most of the reserve: they are the way out of a full store.
        let spare = match self.parts[head].kind {
            PartKind::Write | PartKind::Restore => self.reserve_units(),
            _ => self.reserve_units() / 4,
        };
        let dirty = self.leaves.dirty() + self.pending_leaves;
        // A header beside it, and one for the watermark.
        let free = self.alloc.free_units().saturating_sub(spare + 2);
        let left = |parts: u32| free.checked_sub(self.checkpoint_units(dirty + parts));
        if left(want.parts).is_some_and(|left| left >= want.blocks) {
            return Some(want);
        }
        let blocks = self.blocks_left(head);
        match left(1) {
            Some(left) if left > 0 || blocks == 0 => {
                return Some(SpaceDemand {
                    blocks: blocks.min(left).min(want.blocks),
                    parts: 1,
                });
            }
            _ => {}
        }
        if self.yield_room() {
            return self.space_for(want);
        }
        if self.alloc.quarantined_units() > 0 || self.ckpt.is_running() {
            self.ckpt.want();
        } else if self.batches.taken() == 0 {
            self.refuse_head(StoreError::NoSpace);
        }
        None
    }

    /// As [`space_for`](Self::space_for) for what the cleaner moves, which has its place already: only a
    /// header is wanted. It never waits.
    fn space_for_move(&mut self, want: SpaceDemand) -> Option<SpaceDemand> {
        let dirty = self.leaves.dirty() + self.pending_leaves + 1;
        let least = self.reserve_units() + 2 + self.checkpoint_units(dirty);
        if self.alloc.free_units() >= least {
            return Some(want);
        }
        self.refuse_head(StoreError::NoSpace);
        None
    }

    /// Units that the cleaner may take: it leaves twice what writes leave, and a share of the shard.
    pub(super) fn spare_units(&self) -> u32 {
        let dirty = self.leaves.dirty() + self.pending_leaves + 1;
        let least = 2 * self.reserve_units() + self.checkpoint_units(dirty);
        let share = self.geo.units / SPARE_SHARE;
        self.alloc.free_units().saturating_sub(least + share)
    }

    /// Whether the cleaner may take so many.
    pub(super) fn spares(&self, units: u32) -> bool {
        self.spare_units() >= units
    }

    /// Units that are free, and those in quarantine: they become free as soon as somebody wants them, or the
    /// shard is idle.
    pub(super) fn free_soon(&self) -> u64 {
        u64::from(self.alloc.free_units()) + self.alloc.quarantined_units()
    }

    /// See [`Space::is_full`](super::super::api::Space::is_full).
    pub(super) fn is_full(&self) -> bool {
        // A few blocks more would be filled again at once.
        let enough = 2 * u64::from(self.reserve_units());
        let has_filled = |free| self.free_soon() <= free + enough;
        self.is_under_space_pressure() || self.no_room_at.is_some_and(has_filled)
    }

    /// A write has found room. Where it was not the shard's own that had run out, that says more than what is
    /// free; on a full shard small ones find room now and then.
    pub(super) fn note_room(&mut self) {
        let plenty = u64::from(self.geo.units / PLENTY_SHARE);
        self.no_room_at.take_if(|free| *free > plenty);
    }

    /// Ends the part at the head of the log's queue with an error, once what it has in batches is done.
    pub(super) fn refuse_head(&mut self, error: StoreError) {
        let Some(part) = self.ready.pop_front() else {
            return;
        };
        self.parts[part].logged = true;
        self.parts[part].error.get_or_insert(error);
        if self.parts[part].batches == 0 {
            self.finish_part(part);
        }
    }
}
