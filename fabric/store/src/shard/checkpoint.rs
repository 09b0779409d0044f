//! Checkpoints: bringing the map to the device while writes go on. `format` says why in this order.

use zerocopy::IntoBytes;

use super::super::api::{FlushMark, StoreError};
use super::super::arena::Arena;
use super::super::format::{Superblock, UNIT_BYTES, WINDOW_REGIONS_MAX, seal};
use super::super::log::Window;
use super::requests::IoKind;
use super::stage::Pages;
use super::write::QUARANTINE_RUNS;
use super::{CHECKPOINT_IO_BLOCKS, CHECKPOINT_IOS_MAX, ShardCore};

/// A window is this share of the shard, within bounds.
const WINDOW_SHARE: u32 = 64;
/// Calls of `on_idle` with no write in between after which freed space is made free: two seconds at the
/// engine's pace. Sooner, and a guest that writes a little now and then would pay for a checkpoint each time.
const IDLE_CALLS: u32 = 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Idle,
    /// The old window's batches are still in flight.
    Drain,
    Leaves,
    Tables,
    Dirs,
    Root,
    Bitmap,
    BitmapDirs,
    /// All pages are queued.
    LeaseRecovery,
    FlushPages,
    Superblock,
    FlushSuperblock,
    /// Durable; reads of freed units are still in flight.
    Release,
}

/// State of the running checkpoint, and what asks for the next.
#[derive(Debug)]
pub(super) struct Checkpoint {
    number: u64,
    phase: Phase,
    pub(super) cursor: u32,
    pub(super) ios: u32,
    /// Something needs space or clean leaves.
    wanted: bool,
    /// One has just ended: what waited for it is to be tried again.
    pub(super) ended: bool,
    requested: Vec<u32>,
    requested_clean: bool,
    running: Vec<u32>,
    running_clean: bool,
    /// Free buffers of `CHECKPOINT_IO_BLOCKS` each.
    pub(super) buffers: Vec<u32>,
    /// The window that is being left, and its regions.
    old_window: u64,
    old_regions: Vec<u32>,
    window_regions: usize,
    next_window_id: u64,
    next: Option<Window>,
    log_start: u64,
    mark: FlushMark,
    superblock_mark: u64,
    closed: bool,
    /// Calls of `on_idle` since so many batches were done.
    idle_calls: u32,
    idle_since: u64,
}

impl Checkpoint {
    pub(super) fn new(arena: &mut Arena, number: u64, shards: u32) -> Self {
        let buffers = (0..CHECKPOINT_IOS_MAX)
            .map(|_| {
                let (start, len) = arena
                    .take_up_to(CHECKPOINT_IO_BLOCKS)
                    .expect("the arena has a least size");
                assert_eq!(len, CHECKPOINT_IO_BLOCKS);
                start
            })
            .collect();
        Self {
            number,
            phase: Phase::Idle,
            cursor: 0,
            ios: 0,
            wanted: false,
            ended: false,
            requested: Vec::new(),
            requested_clean: false,
            running: Vec::new(),
            running_clean: false,
            buffers,
            old_window: 0,
            old_regions: Vec::new(),
            window_regions: (WINDOW_REGIONS_MAX / shards as usize).max(2),
            next_window_id: 0,
            next: None,
            log_start: 0,
            mark: FlushMark::default(),
            superblock_mark: 0,
            closed: false,
            idle_calls: 0,
            idle_since: 0,
        }
    }

    pub(super) fn request(&mut self, op: u32, clean: bool) {
        self.requested.push(op);
        self.requested_clean |= clean;
    }

    /// Asks for a checkpoint. While one runs this does nothing: whether another is needed shows when it has
    /// ended.
    pub(super) fn want(&mut self) {
        self.wanted |= self.phase == Phase::Idle;
    }

    /// Whether somebody waits for one.
    pub(super) fn is_asked_for(&self) -> bool {
        !self.running.is_empty() || !self.requested.is_empty()
    }

    /// Whether somebody promised to write no more.
    pub(super) fn is_closing(&self) -> bool {
        self.requested_clean || (self.running_clean && self.is_running())
    }

    pub(super) fn is_running(&self) -> bool {
        self.phase != Phase::Idle
    }

    /// Newest durable checkpoint.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn next_phase(&mut self, phase: Phase) {
        self.phase = phase;
        self.cursor = 0;
    }
}

impl ShardCore {
    /// Takes the checkpoint as far as it goes now.
    pub(super) fn step_checkpoint(&mut self) {
        if self.res.faults.has_failed() {
            self.abandon_checkpoint();
            return;
        }
        loop {
            let before = self.ckpt.phase;
            match before {
                Phase::Idle => self.start_checkpoint(),
                Phase::Drain => {
                    if self.res.log.in_flight_of(self.ckpt.old_window) == 0 {
                        self.ckpt.next_phase(Phase::Leaves);
                    }
                }
                Phase::Leaves => self.stage_all(Pages::Leaves, Phase::Tables),
                Phase::Tables => self.stage_all(Pages::Tables, Phase::Dirs),
                Phase::Dirs => self.stage_all(Pages::Dirs, Phase::Root),
                Phase::Root => self.stage_all(Pages::Root, Phase::Bitmap),
                Phase::Bitmap => self.stage_bitmap(),
                Phase::BitmapDirs => self.stage_bitmap_dirs(),
                Phase::LeaseRecovery => self.flush_pages(),
                Phase::FlushPages | Phase::Superblock | Phase::FlushSuperblock => {}
                Phase::Release => self.release_units(),
            }
            if self.ckpt.phase == before || self.ckpt.ended || self.res.faults.has_failed() {
                return;
            }
        }
    }

    fn start_checkpoint(&mut self) {
        let reopen = self.res.log.hold && !self.waiting.ready().is_empty();
        let cache_dirty = self.res.map.leaves.dirty() * 2 > self.res.map.leaves.slots();
        let many_freed = self.res.alloc.quarantine_runs() > QUARANTINE_RUNS;
        let asked = self.ckpt.wanted || !self.ckpt.requested.is_empty();
        if !(asked || reopen || cache_dirty || many_freed || self.res.log.current.is_nearly_full())
        {
            return;
        }
        self.ckpt.wanted = false;
        std::mem::swap(&mut self.ckpt.requested, &mut self.ckpt.running);
        self.ckpt.running_clean = std::mem::take(&mut self.ckpt.requested_clean);
        self.res.alloc.freeze();
        self.ckpt.old_window = self.res.log.current.id;
        self.ckpt.old_regions.clear();
        if let Some(mut next) = self.res.log.next.take() {
            next.open(&self.res.alloc);
            let old = std::mem::replace(&mut self.res.log.current, next);
            self.ckpt.old_regions.extend(&old.regions);
        }
        self.ckpt.log_start = self.res.log.next_lsn();
        self.res.map.table.reap();
        self.ckpt.next_phase(Phase::Drain);
    }

    pub(super) fn on_pages(&mut self, io: u32, buffer: u32, result: Result<(), i32>) {
        for slot in self.res.device.leaves_mut(io).drain(..) {
            self.res.map.leaves.meta_mut(slot).pins -= 1;
            if result.is_err() {
                // What was not written can only be read from here: dirty, it is never evicted.
                self.res.map.leaves.entries_mut(slot);
            }
        }
        self.end_checkpoint_io(io, Some(buffer), result);
    }

    fn end_checkpoint_io(&mut self, io: u32, buffer: Option<u32>, result: Result<(), i32>) {
        self.res.device.give_back(io);
        self.ckpt.buffers.extend(buffer);
        self.ckpt.ios -= 1;
        if let Err(errno) = result {
            self.res.faults.fail(errno);
        }
    }

    fn flush_pages(&mut self) {
        if self.ckpt.ios > 0 {
            return;
        }
        let Some(io) = self.res.device.take() else {
            return;
        };
        self.ckpt.mark = self.res.mark();
        self.ckpt.ios += 1;
        self.res.flush(io, IoKind::CheckpointFlush);
        self.ckpt.next_phase(Phase::FlushPages);
    }

    pub(super) fn on_checkpoint_flush(&mut self, result: Result<(), i32>) {
        self.ckpt.ios -= 1;
        if let Err(errno) = result {
            self.res.faults.fail_flush(errno);
        }
        if self.res.faults.has_failed() {
            return;
        }
        if self.res.note_flushed(self.ckpt.mark).is_err() {
            return;
        }
        match self.ckpt.phase {
            Phase::FlushPages => self.write_superblock(),
            Phase::FlushSuperblock => self.end_checkpoint(),
            _ => unreachable!("a checkpoint flush belongs to one of two phases"),
        }
    }

    /// Chooses the window after the current one (and the current one anew if it is unused and has little
    /// room), and writes both copies of the superblock.
    fn write_superblock(&mut self) {
        let marked = std::mem::take(&mut self.ckpt.old_regions);
        self.res.alloc.mark_window(&marked, false);
        self.ckpt.old_regions = marked;
        let regions = self.res.geo.units / super::super::format::REGION_UNITS;
        let count = (regions / WINDOW_SHARE).clamp(2, self.ckpt.window_regions as u32) as usize;
        let unused = self.res.log.current.batches == 0;
        let room = self.res.alloc.free_in(&self.res.log.current.regions);
        if unused && (self.res.log.hold || room < self.res.reserve_units()) {
            // No batch may go to it before this superblock is durable.
            self.res.log.hold = true;
            let current = std::mem::take(&mut self.res.log.current.regions);
            self.res.alloc.mark_window(&current, false);
            self.res.log.current = self.pick_window(self.res.log.current.id, count, current);
        }
        self.res
            .alloc
            .mark_window(&self.res.log.current.regions.clone(), true);
        self.ckpt.next_window_id = self.res.log.current.id + 1;
        let next = self.pick_window(self.ckpt.next_window_id, count, Vec::new());
        let quiet = self.res.map.leaves.dirty() == 0
            && self.waiting.ready().is_empty()
            && self.res.log.is_quiet();
        self.ckpt.closed = self.ckpt.running_clean && unused && quiet;

        let mut sb = Superblock::new(self.res.geo.shard, self.res.geo.units, self.res.log.nonce);
        sb.checkpoint = self.ckpt.number + 1;
        sb.clean = u32::from(self.ckpt.closed);
        sb.log_start = self.ckpt.log_start;
        sb.watermark = self.res.log.durable_lsn();
        self.ckpt.superblock_mark = sb.watermark;
        sb.table_pages = self.res.map.table.page_ptrs.len() as u64;
        sb.windows = [self.res.log.current.record(), next.record()];
        self.res.map.roots.name_in(&mut sb);
        self.ckpt.next = Some(next);
        self.ckpt.next_phase(Phase::Superblock);
        for unit in self.res.geo.superblock_units(sb.checkpoint) {
            let io = self
                .res
                .device
                .take()
                .expect("requests are reserved for checkpoints");
            let buffer = self.ckpt.buffers.pop().expect("all pages are written");
            let page = self.res.arena.buf_mut().blocks_mut(buffer, 1);
            page.fill(0);
            page[..size_of::<Superblock>()].copy_from_slice(sb.as_bytes());
            seal(page);
            self.ckpt.ios += 1;
            self.res.counters.checkpoint_bytes += UNIT_BYTES as u64;
            self.res
                .write(io, unit, (buffer, 1), IoKind::Superblock { buffer });
        }
    }

    fn pick_window(&mut self, id: u64, count: usize, mut regions: Vec<u32>) -> Window {
        self.res.alloc.pick_window(count, &mut regions);
        self.res.alloc.mark_window(&regions, true);
        let mut window = Window::new(id, regions);
        window.open(&self.res.alloc);
        window
    }

    pub(super) fn on_superblock(&mut self, io: u32, buffer: u32, result: Result<(), i32>) {
        self.end_checkpoint_io(io, Some(buffer), result);
        if self.ckpt.ios > 0 || self.res.faults.has_failed() {
            return;
        }
        let io = self
            .res
            .device
            .take()
            .expect("requests are reserved for checkpoints");
        self.ckpt.mark = self.res.mark();
        self.ckpt.ios += 1;
        self.res.flush(io, IoKind::CheckpointFlush);
        self.ckpt.next_phase(Phase::FlushSuperblock);
    }

    fn end_checkpoint(&mut self) {
        self.ckpt.number += 1;
        // The superblock carries the watermark, so no batch needs to.
        self.res.log.note_recorded(self.ckpt.superblock_mark);
        self.res.counters.checkpoints += 1;
        self.res.log.next = self.ckpt.next.take();
        // After a clean close the superblock promises an empty log: a write needs another checkpoint first.
        self.res.log.hold = self.ckpt.closed;
        let mut running = std::mem::take(&mut self.ckpt.running);
        for op in running.drain(..) {
            self.finish_op(op, Ok(()));
        }
        self.ckpt.running = running;
        self.ckpt.next_phase(Phase::Release);
    }

    fn release_units(&mut self) {
        if self.res.alloc.release() {
            self.ckpt.ended = true;
            self.ckpt.next_phase(Phase::Idle);
        }
    }

    /// Whoever waits for a checkpoint hears that it cannot be written now.
    pub(super) fn refuse_checkpoints(&mut self, error: StoreError) {
        for list in [
            std::mem::take(&mut self.ckpt.running),
            std::mem::take(&mut self.ckpt.requested),
        ] {
            for op in list {
                self.finish_op(op, Err(error));
            }
        }
        // Whoever comes later has not promised to write no more.
        (self.ckpt.running_clean, self.ckpt.requested_clean) = (false, false);
    }

    /// A write failed: whoever waits for a checkpoint hears it.
    fn abandon_checkpoint(&mut self) {
        let Some(errno) = self.res.faults.errno() else {
            return;
        };
        self.refuse_checkpoints(StoreError::ReadOnly(errno));
        let error = StoreError::ReadOnly(errno);
        self.flushes.refuse(error, &mut self.res, &mut self.ops);
    }

    /// The shard had nothing to do for one more call: space that was given back should not wait for the next
    /// write.
    pub(super) fn note_idle(&mut self) {
        let untouched = self.ckpt.idle_since == self.res.log.finished();
        if !untouched || self.res.alloc.quarantined_units() == 0 || self.ckpt.is_running() {
            self.ckpt.idle_since = self.res.log.finished();
            self.ckpt.idle_calls = 0;
            return;
        }
        self.ckpt.idle_calls += 1;
        if self.ckpt.idle_calls >= IDLE_CALLS {
            // It frees all that is in quarantine, so that it is the last one until something is written.
            self.ckpt.idle_calls = 0;
            self.ckpt.want();
        }
    }

    /// Asks for a checkpoint whatever the state (opening, formatting).
    pub(crate) fn force_checkpoint(&mut self, closed: bool) {
        self.ckpt.wanted = true;
        self.ckpt.requested_clean = closed;
    }

    /// Whether a checkpoint is wanted or running.
    pub(crate) fn checkpoint_pending(&self) -> bool {
        self.ckpt.wanted || self.ckpt.is_running()
    }
}
