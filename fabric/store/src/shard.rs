//! One shard of the store as a pure state machine: operations in, device requests out.
//!
//! The life of an operation: `submit` cuts it into *parts*, each within one map page (leaf, 1 MiB). A part
//! that overlaps an earlier write in flight waits for it (`ops`). A read resolves its blocks to units and
//! reads them (`read`); a write gets its leaf, and old content for blocks it covers partly, and joins the
//! next log batch (`write`). Checkpoints (`checkpoint`) and scrubbing (`scrub`) run beside.
//!
//! Whatever lacks a resource is put in a list and tried again in order. Nothing that waits holds what another
//! one waits for: a part that may be waiting for a checkpoint (for a leaf slot in `stalled`, for space in
//! `ready`, for a place among the buffers of old content in `no_old`) holds no units back, because the
//! checkpoint ends only when nobody reads freed units any more. A part that does read them (it has a `tag`)
//! waits only for what comes back by itself: request slots and buffers, in `starved`.

mod applied;
mod checkpoint;
mod clean;
mod enospc;
mod fill;
mod flush;
mod leaves;
mod ops;
mod read;
mod relocate;
mod replay;
mod replicate;
mod reserve;
mod scrub;
mod stage;
mod state;
mod write;

use std::collections::{BTreeMap, VecDeque};

use fabric_types::slab::Slab;

use super::alloc::Allocator;
use super::api::{
    BufferRange, CleanStep, CoreParams, Fence, FlushMark, LayerId, OpId, ScrubFinding, ScrubStep,
    Space, StoreCore, StoreError, StoreOp, StoreResult, Submitted,
};
use super::arena::Arena;
use super::device::{DeviceAction, IoId, IoVecs};
use super::format::{BITMAP_DIRS_MAX, Geometry, Ptr, UNIT_BYTES};
use super::leaf::{LEAVES_MIN, LeafCache};
use super::metrics::{RamBytes, StoreMetrics};
use super::table::Table;
use checkpoint::Checkpoint;
pub(super) use replay::Replay;
use state::{
    Dropping, Flushes, Found, Io, IoKind, IoOutcome, Log, Op, OpKind, Part, PartKind, PartState,
};

/// Map pages and tables written by one checkpoint request.
const CHECKPOINT_IO_BLOCKS: u32 = 32;
/// Checkpoint requests in flight; more would crowd out guests.
const CHECKPOINT_IOS_MAX: u32 = 8;
/// Log batches in flight; further writes gather in the next batch meanwhile.
const BATCHES_MAX: usize = 32;
/// Device requests in flight; reads leave [`LOG_IOS_RESERVED`] of them to the log and checkpoints.
const IOS_MAX: usize = 1536;
/// See [`IOS_MAX`].
const LOG_IOS_RESERVED: usize = 512;
/// Buffers of a shard at least: checkpoint buffers, a few log batches and reads.
const ARENA_BLOCKS_MIN: u64 = 1024;
/// Parts beyond those of the operations: scrubbing, cleaning and dropping layers.
const INTERNAL_PARTS: u32 = 32;
/// Parts of one operation at most: the leaves of a chunk.
const OP_PARTS_MAX: usize = 4;
/// Findings of the scrubber that wait to be fetched; further ones are only logged.
const FINDINGS_MAX: usize = 1024;
/// Blocks that could not be read, as many as are remembered before it begins anew.
const KNOWN_BAD_MAX: usize = 4096;
/// A chunk needs 64 bytes of RAM however little it holds, so sparse chunks are bounded: sixteen times as many
/// as would fill the shard. When reached, writes to new chunks get `NoSpace`.
const SPARSE_FACTOR: u32 = 16;
/// Units that only discards and checkpoints may use, as a share of the shard.
const RESERVE_SHARE: u32 = 128;

/// One shard. See the module, and [`StoreCore`] for the calls.
#[derive(Debug)]
pub struct ShardCore {
    geo: Geometry,
    /// Shards of the device, which share its bounds.
    shards: u32,
    alloc: Allocator,
    arena: Arena,
    table: Table,
    leaves: LeafCache,
    log: Log,
    ops: Slab<Op>,
    parts: Slab<Part>,
    ios: Slab<Io>,
    batches: Slab<write::Batch>,
    next_seq: u64,
    runnable: VecDeque<u32>,
    stalled: VecDeque<u32>,
    starved: VecDeque<u32>,
    no_old: VecDeque<u32>,
    /// Buffers promised to old content, which a write may hold until the next checkpoint.
    old_held: u32,
    ready: VecDeque<u32>,
    actions: VecDeque<DeviceAction>,
    done: VecDeque<(OpId, StoreResult)>,
    flushes: Flushes,
    ckpt: Checkpoint,
    enospc: enospc::EnospcQueue,
    /// Map pages that batches in flight will make dirty at most.
    pending_leaves: u32,
    bitmap_ptrs: Vec<Ptr>,
    bitmap_dir_ptrs: [Ptr; BITMAP_DIRS_MAX],
    dropping: VecDeque<Dropping>,
    scrub: scrub::Scrub,
    clean: clean::Clean,
    findings: VecDeque<ScrubFinding>,
    /// Reads in flight by the parity of the quarantine generation they began in.
    readers: [u32; 2],
    generation: u8,
    /// Errno of the device write or flush that failed.
    failed: Option<i32>,
    /// It was a flush: no later one proves anything.
    flush_lost: bool,
    /// Blocks that could not be read, and the unit that it was. What is not there any more is of no meaning.
    known_bad: BTreeMap<(LayerId, u32, u32), u32>,
    /// Blocks whose last write failed: it may or may not be on the device (layer, chunk, byte range).
    poisoned: Vec<(u64, u32, u32, u32)>,
    counters: StoreMetrics,
    /// Units that were free when an operation was refused for want of room.
    no_room_at: Option<u64>,
    scratch: Vec<u32>,
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
        let log = Log::new(&loaded);
        let Loaded {
            geo,
            alloc,
            table,
            bitmap_ptrs,
            bitmap_dir_ptrs,
            ..
        } = loaded;
        let used = alloc.total_units() - alloc.free_units();
        let clean = clean::Clean::new(table.slots(), used);
        let leaves = leaf_slots(params, loaded.shards);
        let leaves = leaves.max(loaded.leaves_needed.saturating_add(LEAVES_MIN));
        let blocks = params.buffer_bytes / u64::from(loaded.shards) / UNIT_BYTES as u64;
        let blocks = blocks.clamp(ARENA_BLOCKS_MIN, 1 << 20) as u32;
        let ops_max = params.ops_max.max(1);
        let parts = ops_max * 2 + OP_PARTS_MAX as u32 + INTERNAL_PARTS;
        let mut arena = Arena::new(blocks);
        let ckpt = Checkpoint::new(
            &mut arena,
            loaded.checkpoint,
            loaded.table_root,
            loaded.shards,
        );
        Self {
            geo,
            shards: loaded.shards,
            alloc,
            arena,
            table,
            leaves: LeafCache::new(leaves),
            log,
            ops: Slab::new(ops_max, Op::default),
            parts: Slab::new(parts, Part::default),
            ios: Slab::new(IOS_MAX as u32, Io::default),
            batches: Slab::new(BATCHES_MAX as u32, write::Batch::default),
            next_seq: 1,
            runnable: VecDeque::with_capacity(parts as usize),
            stalled: VecDeque::with_capacity(parts as usize),
            starved: VecDeque::with_capacity(parts as usize),
            no_old: VecDeque::with_capacity(parts as usize),
            old_held: 0,
            ready: VecDeque::with_capacity(parts as usize),
            actions: VecDeque::with_capacity(IOS_MAX),
            done: VecDeque::with_capacity(ops_max as usize),
            flushes: Flushes::default(),
            ckpt,
            enospc: enospc::EnospcQueue::default(),
            pending_leaves: 0,
            bitmap_ptrs,
            bitmap_dir_ptrs,
            dropping: VecDeque::new(),
            scrub: scrub::Scrub::default(),
            clean,
            findings: VecDeque::new(),
            readers: [0; 2],
            generation: 0,
            failed: None,
            flush_lost: false,
            known_bad: BTreeMap::new(),
            poisoned: Vec::new(),
            counters: StoreMetrics::default(),
            no_room_at: None,
            scratch: Vec::new(),
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
            self.end_ordering();
            self.start_flush();
            self.record_flush();
            self.step_checkpoint();
            // Again only after a checkpoint has ended, which takes device requests.
            if !std::mem::take(&mut self.ckpt.ended) {
                return;
            }
        }
    }

    fn run_runnable(&mut self) {
        while let Some(part) = self.runnable.pop_front() {
            if !self.advance(part) {
                self.wait_list(part).push_back(part);
            }
        }
    }

    /// Where a part that lacks something waits, see the module.
    fn wait_list(&mut self, part: u32) -> &mut VecDeque<u32> {
        match self.parts[part].tag {
            None => &mut self.stalled,
            Some(_) => &mut self.starved,
        }
    }

    fn retry_waiting(&mut self) {
        while let Some(part) = self.starved.pop_front() {
            if !self.advance(part) {
                self.starved.push_front(part);
                break;
            }
        }
        while let Some(part) = self.stalled.pop_front() {
            if self.advance(part) {
                continue;
            }
            if self.parts[part].tag.is_none() {
                self.stalled.push_front(part);
                break;
            }
            self.starved.push_back(part);
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

    /// A free device request slot; reads leave some to the log.
    fn take_io(&mut self, for_read: bool) -> Option<u32> {
        if for_read && self.ios.free() <= LOG_IOS_RESERVED {
            return None;
        }
        self.ios.take()
    }

    /// Queues the device read of `unit`.. into the request's iovecs.
    fn emit_read(&mut self, io: u32, unit: u32, kind: IoKind) {
        let slot = &mut self.ios[io];
        slot.kind = kind;
        let bytes: u64 = slot.iovs.iter().map(|v| v.iov_len as u64).sum();
        let iovecs = IoVecs {
            ptr: slot.iovs.as_ptr(),
            len: slot.iovs.len() as u32,
        };
        self.counters.device_reads += 1;
        self.counters.device_read_bytes += bytes;
        self.actions.push_back(DeviceAction::Read {
            id: IoId(u64::from(io)),
            offset: self.geo.offset(unit),
            iovecs,
        });
    }

    /// Queues the device write of buffer blocks to `unit`...
    fn emit_write(&mut self, io: u32, unit: u32, block: u32, count: u32, kind: IoKind) {
        let base = self
            .arena
            .buf()
            .as_ptr()
            .wrapping_add(block as usize * UNIT_BYTES);
        let len = count as usize * UNIT_BYTES;
        let slot = &mut self.ios[io];
        (slot.kind, slot.unit) = (kind, unit);
        slot.iovs.clear();
        slot.iovs.push(libc::iovec {
            iov_base: base.cast(),
            iov_len: len,
        });
        let iovecs = IoVecs {
            ptr: slot.iovs.as_ptr(),
            len: 1,
        };
        self.counters.device_writes += 1;
        self.counters.device_write_bytes += len as u64;
        self.actions.push_back(DeviceAction::Write {
            id: IoId(u64::from(io)),
            offset: self.geo.offset(unit),
            iovecs,
        });
    }

    fn emit_flush(&mut self, io: u32, kind: IoKind) {
        self.ios[io].kind = kind;
        self.counters.device_flushes += 1;
        self.actions.push_back(DeviceAction::Flush {
            id: IoId(u64::from(io)),
        });
    }

    /// A device write or flush failed: nobody knows what is there now. Writing stops, reading goes on.
    fn fail(&mut self, errno: i32) {
        if self.failed.is_none() {
            tracing::error!(
                shard = self.geo.shard,
                errno,
                "device write or flush failed, shard is read-only until restart"
            );
            self.failed = Some(errno);
        }
    }

    fn reserve_units(&self) -> u32 {
        (self.geo.units / RESERVE_SHARE).clamp(48, 1024)
    }

    fn ram(&self) -> RamBytes {
        let tables = self.ops.capacity() as usize * (size_of::<Op>() + 64)
            + self.parts.capacity() as usize * size_of::<Part>()
            + self.ios.capacity() as usize * (size_of::<Io>() + 64);
        RamBytes {
            chunks: self.table.ram_bytes(),
            bitmaps: self.alloc.ram_bytes() + (self.bitmap_ptrs.len() * size_of::<Ptr>()) as u64,
            leaf_cache: self.leaves.ram_bytes(),
            leaves: self.leaves.filled_bytes(),
            buffers: self.arena.buf().len() as u64,
            tables: tables as u64 + self.alloc.quarantine_ram_bytes() + self.clean.ram_bytes(),
        }
    }

    /// A device request has ended.
    fn complete_io(&mut self, id: IoId, outcome: IoOutcome<'_>) {
        let result = outcome.result;
        let io = id.0 as u32;
        let kind = std::mem::take(&mut self.ios[io].kind);
        if self.put_off(io, kind, result) {
            return;
        }
        match kind {
            IoKind::Free => panic!("completion of a device request that is not in flight: {id:?}"),
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
            IoKind::Log { batch } => self.on_log_write(io, batch, result),
            IoKind::Pages { buffer } => self.on_pages(io, buffer, result),
            IoKind::Superblock { buffer } => self.on_superblock(io, buffer, result),
            IoKind::Flush => {
                self.ios.give_back(io);
                self.on_flush(result);
            }
            IoKind::CheckpointFlush => {
                self.ios.give_back(io);
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
        if self.actions.is_empty() {
            self.pump();
        }
        self.actions.pop_front()
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
        self.done.pop_front()
    }

    fn in_flight(&self) -> usize {
        self.ops.taken() + self.done.len()
    }

    fn device_in_flight(&self) -> usize {
        self.ios.taken() - self.actions.len() - self.put_off_count()
    }

    fn on_idle(&mut self) {
        self.retry_put_off();
        self.write_idle_watermark();
        self.note_idle();
    }

    fn flush_mark(&self) -> Result<Option<FlushMark>, StoreError> {
        self.refuse_if_flush_lost()?;
        // Not the LSN: with an older batch in flight it stays while later ones are done and acknowledged.
        Ok((self.log.finished > self.log.flushed).then(|| self.mark()))
    }

    fn is_log_in_order(&self) -> bool {
        self.completed_lsn() >= self.log.newest_done
    }

    fn is_flush_recorded(&self) -> bool {
        self.log.watermark_written >= self.log.to_record()
    }

    fn flushed(&mut self, mark: FlushMark) -> StoreResult {
        self.note_flushed(mark)
    }

    fn flush_failed(&mut self, errno: i32) {
        self.flush_lost = true;
        self.fail(errno);
    }

    fn next_chunk(&self, cursor: u32) -> Option<(LayerId, u32, u32)> {
        (cursor..self.table.slots()).find_map(|slot| {
            let record = self.table.record(slot);
            let chunk = record.kind == super::format::record_kind::CHUNK;
            chunk.then(|| (LayerId(record.layer), record.index, slot + 1))
        })
    }

    fn fence(&self, layer: LayerId) -> Fence {
        self.table.fence(layer)
    }

    fn next_fence(&self, cursor: u32) -> Option<(LayerId, Fence, u32)> {
        (cursor..self.table.slots()).find_map(|slot| {
            let record = self.table.record(slot);
            let is_fence = record.kind == super::format::record_kind::FENCE;
            let layer = LayerId(record.layer);
            is_fence.then(|| (layer, self.table.fence(layer), slot + 1))
        })
    }

    fn space(&self) -> Space {
        let unit = UNIT_BYTES as u64;
        let total = u64::from(self.alloc.total_units());
        let free = self.free_soon();
        Space {
            total_bytes: total * unit,
            used_bytes: (total - free) * unit,
            is_full: self.is_full(),
        }
    }

    fn buffers(&self) -> BufferRange {
        BufferRange {
            ptr: self.arena.buf().as_ptr(),
            len: self.arena.buf().len(),
        }
    }

    fn scrub_step(&mut self) -> ScrubStep {
        self.step_scrub()
    }

    fn clean_step(&mut self) -> CleanStep {
        self.step_clean()
    }

    fn poll_finding(&mut self) -> Option<ScrubFinding> {
        self.findings.pop_front()
    }

    fn metrics(&self) -> StoreMetrics {
        StoreMetrics {
            ram: self.ram(),
            chunks: u64::from(self.table.len()),
            dirty_leaves: u64::from(self.leaves.dirty()),
            quarantined_units: self.alloc.quarantined_units(),
            leaves_to_clean: self.clean.leaves_left(),
            ..self.counters
        }
    }
}
