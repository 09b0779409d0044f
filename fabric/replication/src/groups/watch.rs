//! Blocks that a replica in sync is about to take over from others, because it does not know what it has.
//!
//! Between the moment in which the others are asked and that of the change a client's write may come, and
//! what it leaves may be lost at once like what was there before: the block looks as if nothing had come. So
//! it is noted here, as [`Touched`](super::Touched) does for a replica that is being compared.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};

use fabric_types::Request;
use fabric_types::block::LEAF_BLOCKS;
use fabric_types::ids::ChunkKey;
use fabric_types::membership::ReplicaState;

use super::{Extent, Group, leaf_of};

/// Whether something was written to each block that is watched.
type Blocks = BTreeMap<(ChunkKey, u32), bool>;

/// See the module. Of one group.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// How many there are, so that a write takes no lock without need.
    count: AtomicU32,
    blocks: Mutex<Blocks>,
}

impl Watch {
    fn lock(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().expect("no panic under this lock")
    }

    fn change(&self, change: impl FnOnce(&mut Blocks)) {
        let mut blocks = self.lock();
        change(&mut blocks);
        self.count.store(blocks.len() as u32, Ordering::Release);
    }

    pub(super) fn begin(&self, chunk: ChunkKey, block: u32) {
        self.change(|blocks| _ = blocks.insert((chunk, block), false));
    }

    pub(super) fn end(&self, chunk: ChunkKey, block: u32) {
        self.change(|blocks| _ = blocks.remove(&(chunk, block)));
    }

    pub(super) fn clear(&self) {
        if self.is_in_use() {
            self.change(BTreeMap::clear);
        }
    }

    /// Whether any block is watched.
    #[inline]
    pub(super) fn is_in_use(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0
    }

    /// A write of these blocks was admitted.
    #[cold]
    pub(super) fn note(&self, chunk: ChunkKey, written: Range<u32>) {
        let mut blocks = self.lock();
        for (_, is_touched) in blocks.range_mut((chunk, written.start)..(chunk, written.end)) {
            *is_touched = true;
        }
    }

    /// Whether the block is watched, and nothing was written to it since that began.
    pub(super) fn is_untouched(&self, chunk: ChunkKey, block: u32) -> bool {
        self.lock().get(&(chunk, block)) == Some(&false)
    }
}

impl Group {
    /// Has writes of a block noted from now on, as long as this replica is in sync and the group does not
    /// change. False if it is not in sync.
    ///
    /// A write that is not noted was admitted before: it is among the unresolved ones by now, if it is not
    /// resolved.
    pub fn watch(&self, chunk: ChunkKey, block: u32) -> bool {
        self.watch.begin(chunk, block);
        let is_in_sync = self.state() == ReplicaState::InSync;
        if !is_in_sync {
            self.watch.end(chunk, block);
        }
        is_in_sync
    }

    /// Writes of the block are not of interest any more.
    pub fn unwatch(&self, chunk: ChunkKey, block: u32) {
        self.watch.end(chunk, block);
    }

    /// Whether a block may be made what another replica has: no write to it has been noted. One that is not
    /// known here and is in sync has to be [watched](Self::watch) for that.
    pub(crate) fn may_restore(&self, chunk: ChunkKey, block: u32, is_unknown: bool) -> bool {
        if is_unknown && self.state() == ReplicaState::InSync {
            return self.watch.is_untouched(chunk, block);
        }
        let touched = self.touched(leaf_of(chunk, block));
        !touched.is_noted((block % LEAF_BLOCKS) as usize)
    }

    /// Notes a write that was admitted, if it is to a block that is watched.
    #[inline]
    pub(super) fn note_watched(&self, request: &Request) {
        if self.watch.is_in_use()
            && let Some(extent) = Extent::of(&request.command)
        {
            self.watch.note(extent.chunk, extent.first..extent.end);
        }
    }
}
