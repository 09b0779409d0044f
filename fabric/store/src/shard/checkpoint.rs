//! Checkpoints: bringing the map to the device while writes go on. `format` says why in this order.

mod demand;
mod pages;
mod reread;

use zerocopy::IntoBytes;

use super::super::alloc::Allocator;
use super::super::api::{FlushMark, StoreError};
use super::super::arena::Arena;
use super::super::format::{REGION_UNITS, Superblock, WINDOW_REGIONS_MAX, seal};
use super::super::log::Window;
use super::ShardCore;
use super::operations::Operations;
use super::requests::{IoKind, IoOutcome};
use super::resources::Resources;
use super::write::QUARANTINE_RUNS;
use demand::Demand;
use pages::{PageWriter, Pages};
use reread::Rereader;

/// A window is this share of the shard, within bounds.
const WINDOW_SHARE: u32 = 64;
/// Calls of `on_idle` with no write in between after which freed space is made free: two seconds at the
/// engine's pace. Sooner, and a guest that writes a little now and then would pay for a checkpoint each time.
const IDLE_CALLS: u32 = 10;

/// How far the running checkpoint is, and what only this phase knows.
#[derive(Debug)]
enum Phase {
    Idle,
    /// The old window's batches are still in flight.
    Drain,
    /// Pages that could not be read, and would be replaced, are read once more.
    Reread(Rereader),
    /// Pages of a kind are being queued.
    Stage(Pages),
    /// All pages are queued.
    Queued,
    FlushPages {
        mark: FlushMark,
    },
    Superblock(Promise),
    FlushSuperblock {
        mark: FlushMark,
        promise: Promise,
    },
    /// Durable; reads of freed units are still in flight.
    Release,
}

/// What holds once the superblock on its way is durable.
#[derive(Debug)]
struct Promise {
    /// The window after the current one.
    next: Window,
    watermark: u64,
    /// The log stays empty.
    closed: bool,
}

/// The window in use when the checkpoint began. What it holds is in the map that the checkpoint writes.
#[derive(Debug, Default)]
struct OldWindow {
    id: u64,
    regions: Vec<u32>,
    /// First batch after it.
    log_start: u64,
}

/// Calls of `on_idle` since so many batches were done.
#[derive(Debug, Default)]
struct IdleWatch {
    calls: u32,
    since: u64,
}

impl IdleWatch {
    /// One more call, with so many batches done; whether it is time for a checkpoint, which would be of use.
    fn note(&mut self, finished: u64, is_of_use: bool) -> bool {
        if self.since != finished || !is_of_use {
            (self.calls, self.since) = (0, finished);
            return false;
        }
        self.calls += 1;
        let is_due = self.calls >= IDLE_CALLS;
        if is_due {
            self.calls = 0;
        }
        is_due
    }
}

/// Writes checkpoints, one at a time, when somebody asks or the log, the cache or the quarantine fills up.
#[derive(Debug)]
pub(super) struct Checkpointer {
    /// Newest durable one.
    number: u64,
    phase: Phase,
    demand: Demand,
    writer: PageWriter,
    old: OldWindow,
    /// Regions of a window at most.
    window_regions: usize,
    idle: IdleWatch,
    /// One has just ended: what waited for it is to be tried again.
    ended: bool,
}

impl Checkpointer {
    pub(super) fn new(arena: &mut Arena, number: u64, shards: u32) -> Self {
        Self {
            number,
            phase: Phase::Idle,
            demand: Demand::default(),
            writer: PageWriter::new(arena),
            old: OldWindow::default(),
            window_regions: (WINDOW_REGIONS_MAX / shards as usize).max(2),
            idle: IdleWatch::default(),
            ended: false,
        }
    }

    /// The operation is done once a checkpoint that begins after this is durable; `clean` if whoever asks
    /// promises to write no more.
    pub(super) fn request(&mut self, op: u32, clean: bool) {
        self.demand.add(op, clean);
    }

    /// Asks for a checkpoint. While one runs this does nothing: whether another is needed shows when it has
    /// ended.
    pub(super) fn want(&mut self) {
        if !self.is_running() {
            self.demand.want();
        }
    }

    /// Asks for one that begins after this, also while one is running: what is to be written is dirty only
    /// now.
    pub(super) fn want_another(&mut self) {
        self.demand.want();
    }

    /// Whether somebody waits for one.
    pub(super) fn is_asked_for(&self) -> bool {
        self.demand.has_operations()
    }

    /// Whether somebody promised to write no more.
    pub(super) fn is_closing(&self) -> bool {
        self.demand.is_closing()
    }

    pub(super) fn is_running(&self) -> bool {
        !matches!(self.phase, Phase::Idle)
    }

    /// Newest durable checkpoint.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Whether one has ended since this was last asked.
    pub(super) fn take_ended(&mut self) -> bool {
        std::mem::take(&mut self.ended)
    }

    /// Whoever waits for a checkpoint hears that it cannot be written now.
    pub(super) fn refuse(&mut self, error: StoreError, res: &mut Resources, ops: &mut Operations) {
        self.demand.refuse(|op| ops.finish(op, Err(error), res));
    }

    /// Takes the checkpoint as far as it goes now.
    fn step(&mut self, res: &mut Resources, writes_wait: bool) {
        while self.advance(res, writes_wait) && !self.ended && !res.faults.has_failed() {}
    }

    /// Takes one step; `false` when it has to wait for something.
    fn advance(&mut self, res: &mut Resources, writes_wait: bool) -> bool {
        match self.phase {
            Phase::Idle => self.start(res, writes_wait),
            Phase::Drain => {
                let is_drained = res.log.in_flight_of(self.old.id) == 0;
                if is_drained {
                    self.phase = Phase::Reread(Rereader::default());
                }
                is_drained
            }
            Phase::Reread(ref mut reread) => {
                let is_done = reread.step(&mut self.writer, res);
                if is_done {
                    self.phase = Phase::Stage(Pages::FIRST);
                }
                is_done
            }
            Phase::Stage(pages) => {
                let is_done = self.writer.stage(pages, res);
                if is_done {
                    self.phase = pages.next().map_or(Phase::Queued, Phase::Stage);
                }
                is_done
            }
            Phase::Queued => self.flush_pages(res),
            Phase::FlushPages { .. } | Phase::Superblock(_) | Phase::FlushSuperblock { .. } => {
                false
            }
            Phase::Release => self.release_units(res),
        }
    }

    fn start(&mut self, res: &mut Resources, writes_wait: bool) -> bool {
        let leaves = &res.map.leaves;
        let reopen = res.log.hold && writes_wait;
        let cache_dirty = leaves.dirty() * 2 > leaves.slots();
        let many_freed = res.alloc.quarantine_runs() > QUARANTINE_RUNS;
        let full = res.log.current.is_nearly_full();
        if !(self.demand.is_any() || reopen || cache_dirty || many_freed || full) {
            return false;
        }
        self.demand.begin();
        res.alloc.freeze();
        self.old = OldWindow {
            id: res.log.current.id,
            regions: Vec::new(),
            log_start: res.log.next_lsn(),
        };
        if let Some(mut next) = res.log.next.take() {
            next.open(&res.alloc);
            let old = std::mem::replace(&mut res.log.current, next);
            self.old.regions = old.regions;
        }
        res.map.table.reap();
        self.phase = Phase::Drain;
        true
    }

    pub(super) fn on_reread(
        &mut self,
        io: u32,
        (slot, buffer): (u32, u32),
        outcome: IoOutcome<'_>,
        res: &mut Resources,
    ) {
        reread::on_reread((slot, buffer), outcome, res);
        // That it could not be read stops no checkpoint.
        self.writer.end(io, buffer, Ok(()), res);
    }

    pub(super) fn on_pages(
        &mut self,
        io: u32,
        buffer: u32,
        result: Result<(), i32>,
        res: &mut Resources,
    ) {
        for slot in res.device.leaves_mut(io).drain(..) {
            res.map.leaves.meta_mut(slot).pins -= 1;
            if result.is_err() {
                // What was not written can only be read from here: dirty, it is never evicted.
                res.map.leaves.entries_mut(slot);
            }
        }
        self.writer.end(io, buffer, result, res);
    }

    fn flush_pages(&mut self, res: &mut Resources) -> bool {
        if self.writer.is_busy() {
            return false;
        }
        let Some(io) = res.device.take() else {
            return false;
        };
        let mark = res.mark();
        res.flush(io, IoKind::CheckpointFlush);
        self.phase = Phase::FlushPages { mark };
        true
    }

    pub(super) fn on_flush(
        &mut self,
        result: Result<(), i32>,
        res: &mut Resources,
        ops: &mut Operations,
        writes_wait: bool,
    ) {
        if let Err(errno) = result {
            res.faults.fail_flush(errno);
        }
        if res.faults.has_failed() {
            return;
        }
        match std::mem::replace(&mut self.phase, Phase::Idle) {
            Phase::FlushPages { mark } => {
                res.log.note_flushed(mark);
                self.write_superblock(res, writes_wait);
            }
            Phase::FlushSuperblock { mark, promise } => {
                res.log.note_flushed(mark);
                self.end(promise, res, ops);
            }
            _ => unreachable!("a checkpoint flush belongs to one of two phases"),
        }
    }

    /// Chooses the window after the current one (and the current one anew if it is unused and has little
    /// room).
    fn choose_window(&mut self, res: &mut Resources) -> Window {
        res.alloc.mark_window(&self.old.regions, false);
        let regions = res.geo.units / REGION_UNITS;
        let count = (regions / WINDOW_SHARE).clamp(2, self.window_regions as u32) as usize;
        let unused = res.log.current.batches == 0;
        let room = res.alloc.free_in(&res.log.current.regions);
        if unused && (res.log.hold || room < res.reserve_units()) {
            // No batch may go to it before this superblock is durable.
            res.log.hold = true;
            let current = std::mem::take(&mut res.log.current.regions);
            res.alloc.mark_window(&current, false);
            let id = res.log.current.id;
            res.log.current = pick_window(&mut res.alloc, id, count, current);
        }
        res.alloc.mark_window(&res.log.current.regions, true);
        let id = res.log.current.id + 1;
        pick_window(&mut res.alloc, id, count, Vec::new())
    }

    /// Writes both copies of the superblock.
    fn write_superblock(&mut self, res: &mut Resources, writes_wait: bool) {
        let next = self.choose_window(res);
        let unused = res.log.current.batches == 0;
        let quiet = res.map.leaves.dirty() == 0 && !writes_wait && res.log.is_quiet();
        let closed = self.demand.is_begun_clean() && unused && quiet;

        let mut sb = Superblock::new(res.geo.shard, res.geo.units, res.log.nonce);
        sb.checkpoint = self.number + 1;
        sb.clean = u32::from(closed);
        sb.log_start = self.old.log_start;
        sb.watermark = res.log.durable_lsn();
        sb.table_pages = res.map.table.page_ptrs.len() as u64;
        sb.windows = [res.log.current.record(), next.record()];
        res.map.roots.name_in(&mut sb);
        sb.leaks = u64::from(res.leaks);
        sb.counted = u64::from(res.counted);
        for unit in res.geo.superblock_units(sb.checkpoint) {
            let io = res.device.take();
            let io = io.expect("requests are reserved for checkpoints");
            let buffer = self.writer.buffer().expect("all pages are written");
            let page = res.arena.buf_mut().blocks_mut(buffer, 1);
            page.fill(0);
            page[..size_of::<Superblock>()].copy_from_slice(sb.as_bytes());
            seal(page);
            let kind = IoKind::Superblock { buffer };
            self.writer.write(io, unit, (buffer, 1), kind, res);
        }
        self.phase = Phase::Superblock(Promise {
            next,
            watermark: sb.watermark,
            closed,
        });
    }

    pub(super) fn on_superblock(
        &mut self,
        io: u32,
        buffer: u32,
        result: Result<(), i32>,
        res: &mut Resources,
    ) {
        self.writer.end(io, buffer, result, res);
        if self.writer.is_busy() || res.faults.has_failed() {
            return;
        }
        let Phase::Superblock(promise) = std::mem::replace(&mut self.phase, Phase::Idle) else {
            unreachable!("a superblock is written in one phase");
        };
        let io = res.device.take();
        let io = io.expect("requests are reserved for checkpoints");
        let mark = res.mark();
        res.flush(io, IoKind::CheckpointFlush);
        self.phase = Phase::FlushSuperblock { mark, promise };
    }

    /// The superblock is durable.
    fn end(&mut self, promise: Promise, res: &mut Resources, ops: &mut Operations) {
        self.number += 1;
        // The superblock carries the watermark, so no batch needs to.
        res.log.note_recorded(promise.watermark);
        res.counters.checkpoints += 1;
        res.log.next = Some(promise.next);
        // After a clean close the superblock promises an empty log: a write needs another checkpoint first.
        res.log.hold = promise.closed;
        self.demand.finish(|op| ops.finish(op, Ok(()), res));
        self.phase = Phase::Release;
    }

    fn release_units(&mut self, res: &mut Resources) -> bool {
        if !res.alloc.release() {
            return false;
        }
        self.ended = true;
        self.demand.end();
        self.phase = Phase::Idle;
        true
    }
}

/// The regions with the most room, as a window; `regions` is taken for its memory.
fn pick_window(alloc: &mut Allocator, id: u64, count: usize, mut regions: Vec<u32>) -> Window {
    alloc.pick_window(count, &mut regions);
    alloc.mark_window(&regions, true);
    let mut window = Window::new(id, regions);
    window.open(alloc);
    window
}

impl ShardCore {
    /// Takes the checkpoint as far as it goes now. With writing stopped whoever waits for one hears it.
    pub(super) fn step_checkpoint(&mut self) {
        if let Some(errno) = self.res.faults.errno() {
            let error = StoreError::ReadOnly(errno);
            self.refuse_checkpoints(error);
            self.flushes.refuse(error, &mut self.res, &mut self.ops);
            return;
        }
        let writes_wait = !self.waiting.ready().is_empty();
        self.ckpt.step(&mut self.res, writes_wait);
    }

    pub(super) fn on_checkpoint_flush(&mut self, result: Result<(), i32>) {
        let writes_wait = !self.waiting.ready().is_empty();
        self.ckpt
            .on_flush(result, &mut self.res, &mut self.ops, writes_wait);
    }

    /// See [`Checkpointer::refuse`].
    pub(super) fn refuse_checkpoints(&mut self, error: StoreError) {
        self.ckpt.refuse(error, &mut self.res, &mut self.ops);
    }

    /// The shard had nothing to do for one more call: space that was given back should not wait for the next
    /// write.
    pub(super) fn note_idle(&mut self) {
        let is_of_use = self.res.alloc.quarantined_units() > 0 && !self.ckpt.is_running();
        if self.ckpt.idle.note(self.res.log.finished(), is_of_use) {
            // It frees all that is in quarantine, so that it is the last one until something is written.
            self.ckpt.want();
        }
    }

    /// Asks for a checkpoint whatever the state (opening, formatting).
    pub(crate) fn force_checkpoint(&mut self, closed: bool) {
        self.ckpt.demand.force(closed);
    }

    /// Whether a checkpoint is wanted or running.
    pub(crate) fn checkpoint_pending(&self) -> bool {
        self.ckpt.demand.is_wanted() || self.ckpt.is_running()
    }
}
