//! How much may be moved, and whether a sweep is worth while: so that cleaning ends.

use super::super::super::format::LEAF_BLOCKS;

/// Blocks that may be moved for each block that a guest wrote.
const CREDIT_PER_WRITE: u64 = 4;
/// Blocks that may be moved for each block that was discarded.
const CREDIT_PER_DISCARD: u64 = 1;
/// Blocks that may be moved for each block stored when the shard was opened: how scattered those are is not
/// known.
const CREDIT_AT_START: u64 = 2;
/// Credit does not grow beyond so many times the shard.
const CREDIT_SHARDS_MAX: u64 = 4;
/// After a sweep in vain, guests have to change one in so many units before the next.
const WAKE_SHARE: u32 = 512;

/// See the module.
#[derive(Debug)]
pub(super) struct Pace {
    /// Units of the shard.
    units: u32,
    credit: u64,
    /// Blocks that guests changed, and how many of them there must be before victims are chosen again.
    changes: u64,
    wake_at: u64,
    /// `changes`, waiting leaves and empty regions when victims were last chosen for want of room.
    evacuated_at: Option<(u64, u32, u32)>,
    /// `changes`, free units and waiting leaves when a sweep was last considered.
    looked_at: Option<(u64, u32, u32)>,
}

impl Pace {
    /// For a shard of so many units, of which so many are in use.
    pub(super) fn new(units: u32, used_units: u32) -> Self {
        Self {
            units,
            credit: u64::from(used_units) * CREDIT_AT_START,
            changes: 0,
            wake_at: 0,
            evacuated_at: None,
            looked_at: None,
        }
    }

    /// Guests changed blocks.
    pub(super) fn note_change(&mut self, blocks: u16, written: bool) {
        let each = if written {
            CREDIT_PER_WRITE
        } else {
            CREDIT_PER_DISCARD
        };
        let most = u64::from(self.units) * CREDIT_SHARDS_MAX;
        let earned = self.credit + u64::from(blocks) * each;
        self.credit = earned.min(most.max(self.credit));
        self.changes += u64::from(blocks);
    }

    /// Blocks that may be moved.
    pub(super) fn credit(&self) -> u64 {
        self.credit
    }

    pub(super) fn spend(&mut self, blocks: u32) {
        self.credit -= u64::from(blocks);
    }

    /// A sweep is considered; whether everything is as it was the last time.
    pub(super) fn look(&mut self, free_units: u32, waiting: u32) -> bool {
        let now = Some((self.changes, free_units, waiting));
        std::mem::replace(&mut self.looked_at, now) == now
    }

    /// What comes next is worth a look whatever there is.
    pub(super) fn look_again(&mut self) {
        self.looked_at = None;
    }

    /// No victims are chosen again before guests have changed something to speak of.
    pub(super) fn rest(&mut self) {
        let share = u64::from(self.units / WAKE_SHARE).max(LEAF_BLOCKS as u64);
        self.wake_at = self.changes + share;
    }

    /// Whether victims may be chosen.
    pub(super) fn is_rested(&self) -> bool {
        self.changes >= self.wake_at
    }

    /// Whether victims were chosen for want of room before, and there is no more of it since.
    pub(super) fn was_in_vain(&self, waiting: u32, empty: u32) -> bool {
        let in_vain =
            |was: (u64, u32, u32)| self.changes == was.0 && waiting >= was.1 && empty <= was.2;
        self.evacuated_at.is_some_and(in_vain)
    }

    /// Victims were chosen, for want of room or because free space is scattered.
    pub(super) fn note_evacuation(&mut self, wants_room: bool, waiting: u32, empty: u32) {
        self.evacuated_at = wants_room.then_some((self.changes, waiting, empty));
    }
}
