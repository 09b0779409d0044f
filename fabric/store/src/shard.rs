//! One shard of the store as a pure state machine: operations in, device requests out.
//!
//! The life of an operation: `submit` cuts it into *parts*, each within one map page (leaf, 1 MiB). A part
//! that overlaps an earlier write in flight waits for it (`ops`). A read resolves its blocks to units and
//! reads them (`read`); a write gets its leaf, and old content for blocks it covers partly, and joins the
//! next log batch (`write`). Checkpoints (`checkpoint`) and scrubbing (`scrub`) run beside.
//!
//! A shard is made of machines, each of which owns what it remembers and borrows what all of them share
//! ([`resources`]: units, buffers, device requests, the map and the log) for a step: [`operations`] and their
//! [`parts`], [`waiting`] for those that lack a resource, [`flush`], [`checkpoint`], [`cleaner`], [`scrub`]
//! and [`dropper`]. What a part goes through concerns most of them, so that those steps are methods of the
//! shard.

mod applied;
mod checkpoint;
mod cleaner;
mod damage;
mod dropper;
mod enospc;
mod faults;
mod fill;
mod flush;
mod leaves;
mod log_state;
mod map;
mod operations;
mod ops;
mod part;
mod parts;
mod read;
mod relocate;
mod replay;
mod replicate;
mod requests;
mod reserve;
mod resources;
mod roots;
mod scrub;
mod stored;
mod synchronous;
mod verify;
mod waiting;
mod write;

use super::alloc::Allocator;
use super::api::{
    BufferRange, ChunkKey, CleanStep, CoreParams, Fence, FlushMark, LayerId, OpId, ScrubFinding,
    ScrubStep, Space, StoreCore, StoreError, StoreOp, StoreResult, Submitted,
};
use super::device::{DeviceAction, IoId};
use super::format::{BITMAP_DIRS_MAX, Geometry, Ptr, UNIT_BYTES, record_kind};
use super::leaf::LEAVES_MIN;
use super::metrics::{RamBytes, StoreMetrics};
use super::table::Table;
use checkpoint::Checkpointer;
use cleaner::Cleaner;
use dropper::Dropper;
use flush::Flushes;
use operations::{OpKind, Operations};
use part::{PartKind, PartState};
use parts::Parts;
pub(super) use replay::Replay;
use requests::{IoKind, IoOutcome};
pub(super) use resources::REFUSED_LEAVES_MAX;
use resources::Resources;
use scrub::Scrubber;
use stored::Counter;
use waiting::Waiting;

/// Parts beyond those of the operations: scrubbing, cleaning and dropping layers.
const INTERNAL_PARTS: u32 = 32;
/// Parts of one operation at most: the leaves of a chunk.
const OP_PARTS_MAX: usize = 4;
/// A chunk needs 64 bytes of RAM however little it holds, so sparse chunks are bounded: sixteen times as many
/// as would fill the shard. When reached, writes to new chunks get `NoSpace`.
const SPARSE_FACTOR: u32 = 16;

/// One shard. See the module, and [`StoreCore`] for the calls.
#[derive(Debug)]
pub struct ShardCore {
    res: Resources,
    ops: Operations,
    parts: Parts,
    waiting: Waiting,
    flushes: Flushes,
    ckpt: Checkpointer,
    dropper: Dropper,
    scrubber: Scrubber,
    cleaner: Cleaner,
    counter: Counter,
}

/// What a shard starts from, read from the device or empty.
pub(super) struct Loaded {
    pub geo: Geometry,
    pub alloc: Allocator,
    pub table: Table,
    pub bitmap_ptrs: Vec<Ptr>,
    pub bitmap_dir_ptrs: [Ptr; BITMAP_DIRS_MAX],
    pub table_root: Ptr,
    pub checkpoint: u64,
    pub window_id: u64,
    pub next_lsn: u64,
    pub nonce: [u8; 16],
    pub shards: u32,
    /// Leaves that recovery will change at most: the cache holds them until its checkpoint.
    pub leaves_needed: u32,
    /// The space map has units in use that no page names.
    pub leaks: bool,
    /// The counts of the chunk table are right.
    pub counted: bool,
}

/// Most records of a shard.
pub(super) fn records_max(units: u32) -> u32 {
    (units / 1024)
        .max(256)
        .saturating_mul(SPARSE_FACTOR)
        .min(1 << 24)
}

/// Map pages that a shard of `shards` may cache.
fn leaf_slots(params: &CoreParams, shards: u32) -> u32 {
    let share = params.leaf_cache_bytes / u64::from(shards) / UNIT_BYTES as u64;
    share.clamp(u64::from(LEAVES_MIN), 1 << 20) as u32
}

impl ShardCore {
    /// A shard that has no log window yet: its first checkpoint gives it two.
    pub(super) fn new(loaded: Loaded, params: &CoreParams) -> Self {
        let ops_max = params.ops_max.max(1);
        let parts = ops_max * 2 + OP_PARTS_MAX as u32 + INTERNAL_PARTS;
        let (number, shards) = (loaded.checkpoint, loaded.shards);
        let mut res = Resources::new(loaded, params);
        Self {
            ops: Operations::new(ops_max),
            parts: Parts::new(parts),
            waiting: Waiting::new(parts, res.arena.blocks()),
            flushes: Flushes::default(),
            ckpt: Checkpointer::new(&mut res.arena, number, shards),
            dropper: Dropper::default(),
            scrubber: Scrubber::default(),
            cleaner: Cleaner::new(&res),
            counter: Counter::default(),
            res,
        }
    }

    /// Does whatever can be done now. Every loop in it ends when its queue is empty or a resource is used up.
    fn pump(&mut self) {
        loop {
            // First those whose map page has just been read: what was tried again before them might evict it,
            // for ever.
            self.run_runnable();
            self.step_dropping();
            self.retry_waiting();
            self.run_runnable();
            self.build_batches();
            self.run_runnable();
            self.step_flushes();
            self.step_checkpoint();
            // Again only after a checkpoint has ended, which takes device requests.
            if !self.ckpt.take_ended() {
                return;
            }
        }
    }

    fn run_runnable(&mut self) {
        while let Some(part) = self.waiting.next_runnable() {
            if !self.advance(part) {
                self.waiting.wait(part, self.parts[part].is_reader());
            }
        }
    }

    fn retry_waiting(&mut self) {
        while let Some(part) = self.waiting.next_starved() {
            if !self.advance(part) {
                self.waiting.starve_on(part);
                break;
            }
        }
        while let Some(part) = self.waiting.next_stalled() {
            if self.advance(part) {
                continue;
            }
            let is_reader = self.parts[part].is_reader();
            if !is_reader {
                self.waiting.stall_on(part);
                break;
            }
            self.waiting.wait(part, is_reader);
        }
    }

    fn step_flushes(&mut self) {
        let (res, ops) = (&mut self.res, &mut self.ops);
        self.flushes.end_ordering(res, ops);
        self.flushes.start(res);
        if self.flushes.end_recording(res, ops) {
            self.write_watermark();
        }
    }

    /// Takes a step of the part; `false` when it has to wait for a resource.
    fn advance(&mut self, part: u32) -> bool {
        match self.parts[part].state {
            PartState::WaitHazard | PartState::Logging => true,
            PartState::Resolve => self.step_resolve(part),
            PartState::Issue => self.issue_reads(part),
            PartState::Retry => self.issue_retries(part),
            PartState::Fetch => self.issue_fetches(part),
            PartState::Acquire => self.step_acquire(part),
            PartState::LocateVictims => self.step_locate_victims(part),
            PartState::Relocate => self.issue_relocations(part),
        }
    }

    fn ram(&self) -> RamBytes {
        let Resources {
            alloc,
            arena,
            device,
            map,
            ..
        } = &self.res;
        let tables = self.ops.ram_bytes() + self.parts.ram_bytes() + device.ram_bytes();
        RamBytes {
            chunks: map.table.ram_bytes(),
            bitmaps: alloc.ram_bytes() + map.roots.ram_bytes(),
            leaf_cache: map.leaves.ram_bytes(),
            leaves: map.leaves.filled_bytes(),
            buffers: arena.buf().len() as u64,
            tables: tables as u64 + alloc.quarantine_ram_bytes() + self.cleaner.ram_bytes(),
        }
    }

    /// A device request has ended.
    fn complete_io(&mut self, id: IoId, outcome: IoOutcome<'_>) {
        let result = outcome.result;
        let (io, kind) = self.res.device.end(id);
        if self.put_off(io, kind, result) {
            return;
        }
        match kind {
            IoKind::Free => unreachable!("such a request has not ended"),
            IoKind::Read {
                part,
                first,
                count,
                buffer,
                second,
            } => {
                self.end_read(io, part, (first, count), buffer, second, outcome);
            }
            IoKind::Fetch {
                part,
                which,
                second,
            } => self.on_fetch(io, part, which, second, outcome),
            IoKind::Leaf { slot } => self.on_leaf(io, slot, outcome),
            IoKind::Relocate {
                part,
                first,
                count,
                second,
            } => self.on_relocation(io, part, (first, count), second, outcome),
            IoKind::Verify {
                page,
                ptr,
                buffer,
                second,
            } => self.on_verified(io, (page, ptr), (buffer, second), outcome),
            IoKind::Reread { slot, buffer } => {
                self.ckpt
                    .on_reread(io, (slot, buffer), outcome, &mut self.res);
            }
            IoKind::Log { batch } => self.on_log_write(io, batch, result),
            IoKind::Pages { buffer } => self.ckpt.on_pages(io, buffer, result, &mut self.res),
            IoKind::Superblock { buffer } => {
                self.ckpt.on_superblock(io, buffer, result, &mut self.res);
            }
            IoKind::Flush => {
                self.res.device.give_back(io);
                self.flushes.on_flush(result, &mut self.res, &mut self.ops);
            }
            IoKind::CheckpointFlush => {
                self.res.device.give_back(io);
                self.on_checkpoint_flush(result);
            }
        }
    }
}

impl StoreCore for ShardCore {
    unsafe fn submit(&mut self, id: OpId, op: StoreOp<'_>) -> Submitted {
        self.accept(id, op)
    }

    fn poll_action(&mut self) -> Option<DeviceAction> {
        if !self.res.device.has_action() {
            self.pump();
        }
        self.res.device.next_action()
    }

    fn on_device(&mut self, id: IoId, result: Result<(), i32>) {
        let crcs = None;
        self.complete_io(id, IoOutcome { result, crcs });
    }

    fn on_read(&mut self, id: IoId, crcs: &[u32]) {
        let (result, crcs) = (Ok(()), Some(crcs));
        self.complete_io(id, IoOutcome { result, crcs });
    }

    fn poll_completion(&mut self) -> Option<(OpId, StoreResult)> {
        self.ops.next_done()
    }

    fn in_flight(&self) -> usize {
        self.ops.in_flight()
    }

    fn device_in_flight(&self) -> usize {
        self.res.device.executing()
    }

    fn on_idle(&mut self) {
        self.res.retry_put_off();
        self.write_idle_watermark();
        self.note_idle();
        self.count_some();
    }

    fn flush_mark(&self) -> Result<Option<FlushMark>, StoreError> {
        self.res.faults.refuse_if_flush_lost()?;
        // Not the LSN: with an older batch in flight it stays while later ones are done and acknowledged.
        let log = &self.res.log;
        Ok(log.has_unflushed().then(|| log.mark()))
    }

    fn is_log_in_order(&self) -> bool {
        let log = &self.res.log;
        log.completed_lsn() >= log.newest_done()
    }

    fn is_flush_recorded(&self) -> bool {
        let log = &self.res.log;
        log.is_recorded(log.to_record())
    }

    fn flushed(&mut self, mark: FlushMark) -> StoreResult {
        self.res.note_flushed(mark)
    }

    fn flush_failed(&mut self, errno: i32) {
        self.res.faults.fail_flush(errno);
    }

    fn next_chunk(&self, cursor: u32) -> Option<(LayerId, u32, u32)> {
        let slot = self.next_chunk_record(cursor)?;
        let record = self.res.map.table.record(slot);
        Some((LayerId(record.layer), record.index, slot + 1))
    }

    fn next_stored(&self, cursor: u32) -> Option<(ChunkKey, Option<u64>, u32)> {
        let slot = self.next_chunk_record(cursor)?;
        let record = self.res.map.table.record(slot);
        let (layer, index) = (LayerId(record.layer), record.index);
        Some((ChunkKey { layer, index }, self.stored_bytes(slot), slot + 1))
    }

    fn fence(&self, layer: LayerId) -> Fence {
        self.res.map.table.fence(layer)
    }

    fn next_fence(&self, cursor: u32) -> Option<(LayerId, Fence, u32)> {
        (cursor..self.res.map.table.slots()).find_map(|slot| {
            let record = self.res.map.table.record(slot);
            let is_fence = record.kind == record_kind::FENCE;
            let layer = LayerId(record.layer);
            is_fence.then(|| (layer, self.res.map.table.fence(layer), slot + 1))
        })
    }

    fn space(&self) -> Space {
        let unit = UNIT_BYTES as u64;
        let total = u64::from(self.res.alloc.total_units());
        let free = self.res.free_soon();
        Space {
            total_bytes: total * unit,
            used_bytes: (total - free) * unit,
            is_full: self.is_full(),
        }
    }

    fn buffers(&self) -> BufferRange {
        BufferRange {
            ptr: self.res.arena.buf().as_ptr(),
            len: self.res.arena.buf().len(),
        }
    }

    fn scrub_step(&mut self) -> ScrubStep {
        self.step_scrub()
    }

    fn leave_host_space(&mut self, leave: bool) {
        self.res.leaves_host_space = leave;
    }

    fn scrub_restart(&mut self) {
        self.scrubber.restart();
    }

    fn clean_step(&mut self) -> CleanStep {
        self.step_clean()
    }

    fn poll_finding(&mut self) -> Option<ScrubFinding> {
        self.res.damage.next_finding()
    }

    fn poll_healed(&mut self) -> Option<(ChunkKey, u32)> {
        self.res.damage.next_healed()
    }

    fn metrics(&self) -> StoreMetrics {
        StoreMetrics {
            ram: self.ram(),
            chunks: u64::from(self.res.map.table.len()),
            dirty_leaves: u64::from(self.res.map.leaves.dirty()),
            quarantined_units: self.res.alloc.quarantined_units(),
            leaves_to_clean: self.cleaner.leaves_left(),
            ..self.res.counters
        }
    }
}
