//! How much of the shard may be used now: every batch leaves what the next checkpoint needs.

use super::super::api::StoreError;
use super::super::table::NONE;
use super::operations::NO_SPACE;
use super::resources::Resources;
use super::{PartKind, ShardCore};

/// Units that only discards and checkpoints may use, as a share of the shard.
const RESERVE_SHARE: u32 = 128;

/// Units that plain writes leave to urgent operations beside the reserve: one in so many, and at most so
/// many. A client has some MiB in flight when a replica becomes full; the others have stored those by then.
const URGENT_SHARE: u32 = 128;
const URGENT_UNITS_MAX: u32 = 4096;

/// The cleaner leaves one in so many units free.
const SPARE_SHARE: u32 = 64;

/// Who refuses with more than one in so many units free lacks something else than those.
const PLENTY_SHARE: u32 = 8;

/// What a batch needs, or may use.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SpaceDemand {
    /// Data blocks.
    pub(super) blocks: u32,
    /// Parts, each of which may make a map page dirty.
    pub(super) parts: u32,
}

impl Resources {
    /// Units that only discards and checkpoints may use.
    pub(super) fn reserve_units(&self) -> u32 {
        (self.geo.units / RESERVE_SHARE).clamp(48, 1024)
    }

    /// Units that plain writes leave.
    fn write_reserve_units(&self) -> u32 {
        self.reserve_units() + (self.geo.units / URGENT_SHARE).min(URGENT_UNITS_MAX)
    }

    /// Units that urgent operations leave.
    fn urgent_reserve_units(&self) -> u32 {
        self.reserve_units() / 2
    }

    /// Units that a checkpoint takes for new copies of so many leaves, before it frees the old ones. Each
    /// leaf may make a table page dirty.
    fn checkpoint_units(&self, leaves: u32) -> u32 {
        let table = &self.map.table;
        let pages = table.page_ptrs.len() as u32;
        let tables = (table.dirty_count() + leaves).min(pages.max(1));
        leaves + tables + table.dir_ptrs.len() as u32 + 2
    }

    /// Leaves that are dirty once every batch in flight is done.
    fn dirty_leaves(&self) -> u32 {
        self.map.leaves.dirty() + self.log.pending_leaves()
    }

    /// Units that the next checkpoint takes once every batch in flight is done.
    pub(super) fn checkpoint_need(&self) -> u32 {
        self.checkpoint_units(self.dirty_leaves())
    }

    /// Units that the cleaner may take: it leaves twice what writes leave, and a share of the shard.
    pub(super) fn spare_units(&self) -> u32 {
        let least = 2 * self.write_reserve_units() + self.checkpoint_units(self.dirty_leaves() + 1);
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
}

impl ShardCore {
    /// Whether the part will make its map page dirty.
    pub(super) fn dirties_leaf(&self, part: u32) -> bool {
        self.parts[part].place.rec != NONE && !self.res.map.leaves.meta(self.leaf_slot(part)).dirty
    }

    /// Units that the part leaves to others.
    pub(super) fn units_left_by(&self, part: u32) -> u32 {
        let (res, p) = (&self.res, &self.parts[part]);
        match p.kind {
            PartKind::Write | PartKind::Restore if self.ops[p.op].urgent => {
                res.urgent_reserve_units()
            }
            PartKind::Write | PartKind::Restore => res.write_reserve_units(),
            // Discards may use most of the reserve: they are the way out of a full store.
            _ => res.reserve_units() / 4,
        }
    }

    /// Whether something of the write that the part belongs to is stored, or on its way.
    fn is_begun_write(&self, part: u32) -> bool {
        let p = &self.parts[part];
        p.kind == PartKind::Write && self.ops[p.op].is_logged
    }

    /// Whether the write that the part belongs to is refused already, and nothing of it is stored: what was
    /// freed since would let the rest in.
    fn is_refused_whole(&self, part: u32) -> bool {
        let p = &self.parts[part];
        let is_refused = matches!(self.ops[p.op].error, Some(StoreError::NoSpace { .. }));
        is_refused && p.kind == PartKind::Write && !self.is_begun_write(part)
    }

    /// Whether nothing is lost if the write that the part belongs to is refused: nobody has any of it.
    fn is_plain_write(&self, part: u32) -> bool {
        let p = &self.parts[part];
        p.kind == PartKind::Write && !self.ops[p.op].urgent && !self.is_begun_write(part)
    }

    /// What must fit for the part to get anything. A write that does not fit as a whole is refused before its
    /// first block: replicas would differ by what was stored of it.
    fn least_demand(&self, part: u32) -> SpaceDemand {
        let p = &self.parts[part];
        if p.kind == PartKind::Write && !self.is_begun_write(part) {
            return self.ops[p.op].demand;
        }
        SpaceDemand {
            blocks: self.blocks_left(part).min(1),
            parts: 1,
        }
    }

    /// How much of what is wanted fits, the part at the head before the others; `None` when it has to wait
    /// for a checkpoint, or was refused.
    pub(super) fn space_for(&mut self, want: SpaceDemand) -> Option<SpaceDemand> {
        let head = self.waiting.ready()[0];
        if self.parts[head].kind == PartKind::Move {
            return self.space_for_move(want);
        }
        let leaves_host_space = self.res.leaves_host_space && self.is_plain_write(head);
        if leaves_host_space || self.is_refused_whole(head) {
            self.refuse_head(NO_SPACE);
            return None;
        }
        let res = &self.res;
        let dirty = res.dirty_leaves();
        let left = |spare: u32, parts: u32| {
            // A header beside it, and one for the watermark.
            let free = res.alloc.free_units().saturating_sub(spare + 2);
            free.checked_sub(res.checkpoint_units(dirty + parts))
        };
        let (spare, least) = (self.units_left_by(head), self.least_demand(head));
        let all_fit = left(spare, want.parts.max(least.parts));
        if all_fit.is_some_and(|left| left >= want.blocks.max(least.blocks)) {
            return Some(want);
        }
        // What has begun is brought to its end.
        let spare = match self.is_begun_write(head) {
            true => spare.min(res.urgent_reserve_units()),
            false => spare,
        };
        let blocks = self.blocks_left(head);
        if let Some(left) = left(spare, least.parts).filter(|left| *left >= least.blocks) {
            return Some(SpaceDemand {
                blocks: blocks.min(left).min(want.blocks),
                parts: 1,
            });
        }
        if self.cleaner.yield_room(&mut self.res.alloc) {
            return self.space_for(want);
        }
        if self.res.alloc.quarantined_units() > 0 || self.ckpt.is_running() {
            self.ckpt.want();
        } else if self.res.log.batches.taken() == 0 {
            self.refuse_head(NO_SPACE);
        }
        None
    }

    /// As [`space_for`](Self::space_for) for what the cleaner moves, which has its place already: only a
    /// header is wanted. It never waits.
    fn space_for_move(&mut self, want: SpaceDemand) -> Option<SpaceDemand> {
        let res = &self.res;
        let least = res.reserve_units() + 2 + res.checkpoint_units(res.dirty_leaves() + 1);
        if res.alloc.free_units() >= least {
            return Some(want);
        }
        self.refuse_head(NO_SPACE);
        None
    }

    /// See [`Space::is_full`](super::super::api::Space::is_full).
    pub(super) fn is_full(&self) -> bool {
        let res = &self.res;
        // A few blocks more would be filled again at once.
        let enough = 2 * u64::from(res.reserve_units());
        let has_filled = |free| res.free_soon() <= free + enough;
        let is_short = res.leaves_host_space || res.device.is_under_space_pressure();
        is_short || self.ops.no_room_at().is_some_and(has_filled)
    }

    /// A write has found room.
    pub(super) fn note_room(&mut self) {
        self.ops
            .note_room(u64::from(self.res.geo.units / PLENTY_SHARE));
    }

    /// Ends the part at the head of the log's queue with an error, once what it has in batches is done.
    pub(super) fn refuse_head(&mut self, error: StoreError) {
        let Some(part) = self.waiting.pop_ready() else {
            return;
        };
        let p = &mut self.parts[part];
        p.in_log.complete();
        p.outcome.fail(error);
        if p.in_log.is_done() {
            self.finish_part(part);
        }
    }
}
