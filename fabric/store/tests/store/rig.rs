//! Drives a store on a simulated disk as a data thread would, and tells the model everything that is
//! observable.

#[path = "rig/flush.rs"]
mod flush;

use std::collections::BTreeMap;

use fabric_store::api::{
    CleanStep, CoreParams, Fence, OpId, RecoveryReport, StoreCore, StoreError, StoreOp,
    StoreResult, Submitted, shard_of,
};
use fabric_store::metrics::StoreMetrics;
use fabric_types::ids::{LayerId, Version};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use crate::buffer::Buffer;
use crate::factory::{self, Core};
use crate::image::SECTOR_BYTES;
use crate::model::{self, Covered, Floors, Model, Range, Spot, View};
use crate::seeds;
use crate::shard::{SMALL_DISK, small_params};
use crate::sim_disk::{CrashKind, IoKey, IoKind, SimDisk};

/// Turns within which whatever was submitted must be done.
pub const TURNS_MAX: usize = 2_000_000;
/// The pseudo shard of flushes that the rig makes for all shards.
const RIG_SHARD: usize = usize::MAX;
/// How often the cleaner takes a step between others.
const CLEANING: f64 = 0.3;

/// Placement of all views: they share chunks' shards like the layers of one volume.
const PLACEMENT: LayerId = LayerId(1);

enum Expect {
    Read {
        range: Range,
        floors: Floors,
    },
    Change {
        spots: Vec<Spot>,
        seq: u64,
        fua: bool,
    },
    Flush {
        covered: Covered,
    },
    Fence {
        layer: LayerId,
        fence: Fence,
    },
    /// A step of a flush that the rig makes for all shards.
    FlushStep,
}

struct Live {
    expect: Expect,
    buffer: Option<Buffer>,
}

/// A finished operation.
#[derive(Debug)]
pub struct Done {
    pub id: OpId,
    pub result: StoreResult,
}

/// A disk and what the store on it may answer if it crashed now.
#[derive(Clone)]
pub struct Moment {
    pub disk: SimDisk,
    pub model: Model,
    /// Now and then the cleaner takes a step.
    pub cleaning: bool,
    /// Per layer the fence that was acknowledged, and the one asked for.
    pub fences: BTreeMap<LayerId, [Fence; 2]>,
    tag: u32,
    sequence: u64,
    shards: u32,
    params: CoreParams,
}

/// See the module.
pub struct Rig {
    pub now: Moment,
    pub cores: Vec<Core>,
    live: BTreeMap<OpId, Live>,
    rig_flushes: Vec<flush::RigFlush>,
    pub next_op: u64,
    pub rng: ChaCha8Rng,
    pub report: RecoveryReport,
    /// Outcomes other than `Ok` that the test is prepared for; an unexpected one is a panic.
    pub tolerate: fn(&StoreError) -> bool,
    /// Operations finished since the last `take_done`.
    done: Vec<Done>,
    keep_done: bool,
    /// Outcome of the newest flush by marks that ended.
    pub last_flush: Option<StoreResult>,
    /// One moment for each device write handed out, once switched on.
    moments: Option<Vec<Moment>>,
}

fn none_tolerated(_: &StoreError) -> bool {
    false
}

impl Moment {
    pub fn fresh(capacity: u64, shards: u32, params: CoreParams, seed: u64) -> Self {
        let mut disk = SimDisk::new(capacity, seed);
        factory::format(&mut disk).expect("a blank disk can be formatted");
        Self {
            disk,
            model: Model::default(),
            cleaning: false,
            fences: BTreeMap::new(),
            tag: 0,
            sequence: 0,
            shards,
            params,
        }
    }

    /// What the next process finds if this one dies now.
    pub fn crashed(&self, kind: CrashKind, seed: u64) -> Self {
        let mut next = self.clone();
        next.disk = self.disk.crash(kind, seed);
        next
    }

    /// Opens without checking anything.
    pub fn open(self, seed: u64) -> Result<Rig, String> {
        self.try_open(seed).map_err(|(_, error)| error)
    }

    /// Opens; the disk comes back when that fails.
    pub fn try_open(mut self, seed: u64) -> Result<Rig, (Box<Self>, String)> {
        match factory::open(&mut self.disk, &self.params, seed) {
            Ok((cores, report)) => Ok(Rig::new(self, cores, report, seed)),
            Err(error) => Err((Box::new(self), error)),
        }
    }

    /// Opens after a crash of this kind, and checks and pins every block.
    pub fn recover(self, kind: CrashKind, seed: u64) -> Rig {
        let mut rig = self.open(seed).expect("a store opens after a crash");
        rig.check_after_crash(kind);
        rig
    }
}

impl Rig {
    /// A new store of one shard.
    pub fn new_small(seed: u64) -> Self {
        Self::create(SMALL_DISK, 1, small_params(), seed)
    }

    pub fn create(capacity: u64, shards: u32, params: CoreParams, seed: u64) -> Self {
        let fresh = Moment::fresh(capacity, shards, params, seed);
        fresh.open(seed).expect("a formatted disk opens")
    }

    fn new(now: Moment, cores: Vec<Core>, report: RecoveryReport, seed: u64) -> Self {
        assert_eq!(cores.len(), now.shards as usize);
        Self {
            now,
            cores,
            live: BTreeMap::new(),
            rig_flushes: Vec::new(),
            next_op: 0,
            rng: seeds::rng(seed, 0x2199),
            report,
            tolerate: none_tolerated,
            done: Vec::new(),
            keep_done: false,
            last_flush: None,
            moments: None,
        }
    }

    /// From now on remembers every moment at which a device write was handed out.
    pub fn record_moments(&mut self) {
        self.moments = Some(Vec::new());
    }

    pub fn take_moments(&mut self) -> Vec<Moment> {
        self.moments.take().unwrap_or_default()
    }

    pub fn keep_done(&mut self) {
        self.keep_done = true;
    }

    pub fn take_done(&mut self) -> Vec<Done> {
        std::mem::take(&mut self.done)
    }

    pub fn cores(&mut self) -> &mut [Core] {
        &mut self.cores
    }

    pub fn metrics(&self, shard: usize) -> StoreMetrics {
        self.cores[shard].metrics()
    }

    pub fn in_flight(&self) -> usize {
        self.live.len()
    }

    pub fn shard(&self, chunk: u32) -> usize {
        shard_of(PLACEMENT, chunk, self.cores.len())
    }

    fn concerns(&self, shard: usize) -> impl Fn(Spot) -> bool + use<> {
        let shards = self.cores.len();
        move |spot| shard_of(PLACEMENT, spot.chunk, shards) == shard
    }

    /// Version of the next operation.
    pub fn next_version(&mut self) -> Version {
        self.now.sequence += 1;
        let generation = self.generation();
        Version::new(generation, self.now.sequence)
    }

    fn generation(&self) -> u32 {
        let fences = self.now.fences.values();
        fences.map(|[_, asked]| asked.generation).max().unwrap_or(0)
    }

    /// Submits, and makes room when the operation table is full.
    fn submit(
        &mut self,
        shard: usize,
        op: StoreOp<'_>,
        expect: Expect,
        buffer: Option<Buffer>,
    ) -> OpId {
        let id = OpId(self.next_op);
        self.next_op += 1;
        self.live.insert(id, Live { expect, buffer });
        for _ in 0..TURNS_MAX {
            // SAFETY: the buffer lives in `live` until the completion.
            match unsafe { self.cores[shard].submit(id, op) } {
                Submitted::Accepted => return id,
                Submitted::Busy => assert!(self.step(), "busy with nothing under way"),
            }
        }
        panic!("busy for ever");
    }

    pub fn read(&mut self, range: Range) -> OpId {
        let buffer = Buffer::new(range.len() as usize, &mut self.rng);
        let iovecs = buffer.iovecs().to_vec();
        let op = StoreOp::Read {
            layers: range.view.layers(),
            chunk: range.chunk,
            offset: range.offset(),
            iovecs: &iovecs,
        };
        let floors = self.now.model.floors(range);
        self.submit(
            self.shard(range.chunk),
            op,
            Expect::Read { range, floors },
            Some(buffer),
        )
    }

    pub fn write(&mut self, range: Range, fua: bool) -> OpId {
        let version = self.next_version();
        self.write_version(range, fua, version)
    }

    /// A write that may use a part of the reserve.
    pub fn write_urgently(&mut self, range: Range) -> OpId {
        let version = self.next_version();
        self.write_with(range, (false, true), version)
    }

    pub fn write_version(&mut self, range: Range, fua: bool, version: Version) -> OpId {
        self.write_with(range, (fua, false), version)
    }

    fn write_with(&mut self, range: Range, (fua, urgent): (bool, bool), version: Version) -> OpId {
        self.now.tag += 1;
        let tag = self.now.tag;
        let mut buffer = Buffer::new(range.len() as usize, &mut self.rng);
        let sectors = buffer.bytes_mut().chunks_exact_mut(SECTOR_BYTES);
        for (sector, number) in sectors.zip(range.sector..) {
            model::fill_sector(sector, range.view, range.chunk, number, tag);
        }
        let iovecs = buffer.iovecs().to_vec();
        let op = StoreOp::Write {
            layers: range.view.layers(),
            chunk: range.chunk,
            offset: range.offset(),
            iovecs: &iovecs,
            version,
            fua,
            urgent,
        };
        let seq = self.now.model.change(range, tag);
        let expect = Expect::Change {
            spots: range.spots().collect(),
            seq,
            fua,
        };
        self.submit(self.shard(range.chunk), op, expect, Some(buffer))
    }

    pub fn zero(&mut self, range: Range, fua: bool) -> OpId {
        let version = self.next_version();
        let op = StoreOp::Zero {
            layers: range.view.layers(),
            chunk: range.chunk,
            offset: range.offset(),
            len: range.len(),
            version,
            fua,
        };
        let seq = self.now.model.change(range, 0);
        let expect = Expect::Change {
            spots: range.spots().collect(),
            seq,
            fua,
        };
        self.submit(self.shard(range.chunk), op, expect, None)
    }

    /// Flushes every shard with an operation of its own.
    pub fn flush(&mut self) {
        for shard in 0..self.cores.len() {
            let covered = self.now.model.covered(self.concerns(shard));
            self.submit(shard, StoreOp::Flush, Expect::Flush { covered }, None);
        }
    }

    pub fn checkpoint(&mut self) {
        self.checkpoint_as(false);
    }

    fn checkpoint_as(&mut self, clean: bool) {
        for shard in 0..self.cores.len() {
            let covered = self.now.model.covered(self.concerns(shard));
            self.submit(
                shard,
                StoreOp::Checkpoint { clean },
                Expect::Flush { covered },
                None,
            );
        }
    }

    pub fn set_fence(&mut self, layer: LayerId, fence: Fence) {
        self.now.fences.entry(layer).or_default()[1] = fence;
        for shard in 0..self.cores.len() {
            self.submit(
                shard,
                StoreOp::SetFence { layer, fence },
                Expect::Fence { layer, fence },
                None,
            );
        }
    }

    /// Raises the fence of the first layer of a view by one generation.
    pub fn raise_fence(&mut self, view: View) {
        let generation = self.generation() + 1;
        let fence = Fence {
            generation,
            epoch: u64::from(generation) * 7,
        };
        self.set_fence(view.layers()[0], fence);
        self.now.sequence = 0;
    }

    /// Drops the first layer of a view when nothing else uses it.
    pub fn drop_layer(&mut self, view: View) {
        self.drain();
        let layer = view.layers()[0];
        self.now.fences.entry(layer).or_default()[0] = Fence::default();
        for shard in 0..self.cores.len() {
            let (seq, spots) = self.now.model.drop_layer(view, self.concerns(shard));
            let expect = Expect::Change {
                spots,
                seq,
                fua: false,
            };
            self.submit(shard, StoreOp::DropLayer { layer }, expect, None);
        }
        self.drain();
    }

    /// Drops a chunk of the first layer of a view, beside whatever is under way.
    pub fn drop_chunk(&mut self, view: View, chunk: u32) {
        let layer = view.layers()[0];
        let (seq, spots) = self.now.model.drop_layer(view, |spot| spot.chunk == chunk);
        let expect = Expect::Change {
            spots,
            seq,
            fua: false,
        };
        let op = StoreOp::DropChunk { layer, chunk };
        self.submit(self.shard(chunk), op, expect, None);
    }

    /// Hands the cores' requests to the disk.
    pub fn pump(&mut self) -> bool {
        let mut any = false;
        for shard in 0..self.cores.len() {
            while let Some(action) = self.cores[shard].poll_action() {
                any = true;
                let kind = self.now.disk.submit(shard, action);
                if kind == IoKind::Write
                    && let Some(moments) = &mut self.moments
                {
                    moments.push(self.now.clone());
                }
            }
        }
        any
    }

    /// Tells a core the outcome of a device request.
    pub fn deliver(&mut self, (key, result): (IoKey, Result<(), i32>)) {
        if key.shard != RIG_SHARD {
            let core = &mut self.cores[key.shard];
            // Some threads take the sums of what was read before they tell the core.
            match self.now.disk.filled().filter(|_| self.rng.random_bool(0.5)) {
                Some(filled) => {
                    let mut crcs = Vec::new();
                    // SAFETY: the core keeps the memory until it is told of the end.
                    unsafe { filled.digest(&mut crcs) };
                    core.on_read(key.id, &crcs);
                }
                None => core.on_device(key.id, result),
            }
            return;
        }
        self.device_flushed(key.id, result);
    }

    /// Takes finished operations, checks them and tells the model.
    pub fn reap(&mut self) -> bool {
        let mut any = false;
        for shard in 0..self.cores.len() {
            while let Some((id, result)) = self.cores[shard].poll_completion() {
                any = true;
                self.finish(id, result);
            }
        }
        if any {
            self.step_flushes();
        }
        any
    }

    fn finish(&mut self, id: OpId, result: StoreResult) {
        let Live { expect, buffer } = self.live.remove(&id).expect("an operation finishes once");
        if let Some(buffer) = &buffer {
            assert!(
                buffer.surroundings_intact(),
                "bytes beside a buffer changed"
            );
        }
        match &result {
            Ok(()) => self.learn(expect, buffer.as_ref()),
            Err(error) => {
                assert!((self.tolerate)(error), "unexpected: {error}");
                if let Expect::Change { spots, seq, .. } = expect {
                    let untouched = *error == StoreError::NoSpace { untouched: true };
                    self.now.model.refused(spots.into_iter(), seq, untouched);
                }
            }
        }
        if self.keep_done {
            self.done.push(Done { id, result });
        }
    }

    fn learn(&mut self, expect: Expect, buffer: Option<&Buffer>) {
        let model = &mut self.now.model;
        match expect {
            Expect::Read { range, floors } => {
                let bytes = buffer.expect("a read has a buffer").bytes();
                model
                    .check_read(range, bytes, &floors)
                    .unwrap_or_else(|e| panic!("{e}"));
            }
            Expect::Change { spots, seq, fua } => model.acknowledge(spots.into_iter(), seq, fua),
            Expect::Flush { covered } => model.flushed(&covered),
            Expect::Fence { layer, fence } => {
                self.now.fences.entry(layer).or_default()[0] = fence;
            }
            Expect::FlushStep => {}
        }
    }

    /// Lets the cleaners take a step; true once all have nothing to do.
    pub fn clean_step(&mut self) -> bool {
        let mut idle = true;
        for core in &mut self.cores {
            idle &= core.clean_step() == CleanStep::Idle;
        }
        idle
    }

    /// One turn: requests out, one of them done, operations finished. False when nothing moved.
    pub fn step(&mut self) -> bool {
        if self.now.cleaning && self.rng.random_bool(CLEANING) {
            self.clean_step();
        }
        let mut moved = self.pump();
        if let Some(outcome) = self.now.disk.complete_any() {
            self.deliver(outcome);
            moved = true;
        }
        if self.rng.random_bool(0.8) || self.now.disk.in_flight() == 0 {
            moved |= self.reap();
        }
        moved | self.pump()
    }

    /// Turns until nothing is under way.
    pub fn drain(&mut self) {
        for _ in 0..TURNS_MAX {
            let moved = self.step();
            let quiet = self.live.is_empty() && self.now.disk.in_flight() == 0;
            if quiet && !moved {
                return;
            }
            assert!(moved, "stuck with {} operations", self.live.len());
        }
        panic!("no end after {TURNS_MAX} turns");
    }

    /// What a data thread does before it sleeps.
    pub fn idle(&mut self) {
        self.drain();
        for core in &mut self.cores {
            core.on_idle();
        }
        self.drain();
        for core in &self.cores {
            assert_eq!((core.in_flight(), core.device_in_flight()), (0, 0));
        }
    }

    /// Leaves the process without a word.
    pub fn crash(self, kind: CrashKind, seed: u64) -> Moment {
        self.now.crashed(kind, seed)
    }

    /// Does all that closing does.
    pub fn promise_quiet(&mut self) {
        self.idle();
        self.checkpoint_as(true);
        self.drain();
    }

    /// Closes like a daemon that stops.
    pub fn close(mut self) -> Moment {
        self.promise_quiet();
        self.now
    }

    /// Closes, and returns the moments of all device writes since `record_moments`.
    pub fn close_recording(mut self) -> Vec<Moment> {
        self.promise_quiet();
        self.take_moments()
    }

    /// Closes and opens again; nothing may be replayed.
    pub fn reopen(self, seed: u64) -> Self {
        let rig = self.close().open(seed).expect("a closed store opens");
        assert_eq!(rig.report.clean_shards, rig.report.shards, "{}", rig.report);
        rig
    }
}
