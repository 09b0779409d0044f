//! The cleaner: puts the blocks of a map page (leaf, 1 MiB) side by side where overwriting has scattered
//! them, and makes room for that by emptying thinly used regions.
//!
//! A *move* is an ordinary log write of a block with the version and the checksum it has. It changes neither,
//! so that replay, replicas and readers see nothing of it; `relocate.rs` says how. This file decides what is
//! moved.
//!
//! The cleaner goes over the leaves in *sweeps*, a leaf a step. Each leaf has three bits: its data *changed*
//! since it was looked at; they changed since the last sweep, so that it is still *hot* and left alone; it
//! *waits* for room. With empty regions at hand a sweep looks at the leaves that changed or wait, and moves
//! the data of those that are in pieces there as a whole. With too few, thin regions are chosen as *victims*,
//! and a sweep over all leaves moves what lies in them to where there are holes; the checkpoint after it
//! makes them empty.
//!
//! It ends: a sweep that made no room is not repeated until guests have changed a share of the shard, nor is
//! anything moved without *credit*, which bounds the bytes moved to a few for each that guests wrote or
//! discarded, or that was stored when the shard was opened (`pace`).

mod activity;
mod job;
mod pace;

use super::super::alloc::{Allocator, FreeSpace};
use super::super::api::CleanStep;
use super::super::format::{LEAF_BLOCKS, MapEntry, REGION_UNITS, record_kind};
use super::checkpoint::Checkpointer;
use super::map::{LeafCursor, LeafPlace};
use super::resources::Resources;
use super::{PartKind, ShardCore};
use activity::Activity;
use job::{BadBlocks, Job, LeafShape};
use pace::Pace;

/// A leaf is in pieces when its data have so many breaks more than its mapped blocks have gaps. Fewer cost a
/// reader little, and moving 1 MiB for less than half as many writes would be dear.
const BREAKS_MIN: u32 = 16;
/// Regions with more units in use are not worth emptying.
const VICTIM_UNITS_MAX: u32 = REGION_UNITS / 16 * 15;
/// A sweep empties at most one in so many regions, and at least a few.
const VICTIMS_SHARE: u32 = 8;
const VICTIMS_MIN: u32 = 8;
/// One in so many regions is left empty for log windows and guests.
const KEEP_SHARE: u32 = 64;
const KEEP_MIN: u32 = 2;
/// A sweep that made less than one in so many of its victims empty was in vain.
const GAIN_SHARE: u32 = 4;
/// With more than one in so many free units waiting for a checkpoint, that comes first.
const QUARANTINE_SHARE: u64 = 4;
/// With less than one in so many units free, cleaning would take from guests what it hopes to give them.
const FREE_SHARE_MIN: u32 = 32;
/// Records without anything to do that a step passes at most.
const RECORDS_PER_STEP: u32 = 1 << 16;
/// Runs that the blocks of one leaf are moved to at most.
const RUNS_MAX: usize = LEAF_BLOCKS;

/// What is being done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    /// Going over the leaves; all of them if there are victims.
    Sweep {
        evacuate: bool,
    },
    /// Waiting for a checkpoint with this number, which frees what was moved away.
    Release {
        checkpoint: u64,
        evacuated: bool,
    },
}

/// How far the sweep is, and what it has done.
#[derive(Debug, Default)]
struct Sweep {
    cursor: LeafCursor,
    /// Empty regions that it may still fill, and units that it moved out of victims to such.
    place: u32,
    evicted: u32,
    /// Leaves of which it moved something.
    moves: u32,
}

/// What a step comes to.
enum Next {
    /// This leaf is to be looked at.
    Leaf(LeafPlace),
    Step(CleanStep),
}

/// See the module.
#[derive(Debug)]
pub(super) struct Cleaner {
    activity: Activity,
    pace: Pace,
    state: State,
    sweep: Sweep,
    /// A part is under way.
    is_busy: bool,
    /// What was moved, or freed by guests, before the last sweep is free.
    released: bool,
    bad: BadBlocks,
    pub(super) job: Job,
}

impl Cleaner {
    /// What was stored before may lie anywhere.
    pub(super) fn new(res: &Resources) -> Self {
        let used = res.alloc.total_units() - res.alloc.free_units();
        Self {
            activity: Activity::new(res.map.table.slots()),
            pace: Pace::new(res.geo.units, used),
            state: State::Idle,
            sweep: Sweep::default(),
            is_busy: false,
            released: false,
            bad: BadBlocks::default(),
            job: Job::default(),
        }
    }

    /// Map pages to look at.
    pub(super) fn leaves_left(&self) -> u64 {
        u64::from(self.activity.changed()) + u64::from(self.activity.waiting())
    }

    pub(super) fn ram_bytes(&self) -> u64 {
        self.activity.ram_bytes() + self.job.ram_bytes()
    }

    /// A guest changed blocks of a leaf.
    pub(super) fn note_change(&mut self, (rec, leaf): (u32, u8), blocks: u16, written: bool) {
        self.activity.note_change(rec, leaf);
        self.pace.note_change(blocks, written);
    }

    /// A block of the job is bad and stays where it is.
    pub(super) fn leave_behind(&mut self, index: u16) -> MapEntry {
        self.job.leave(index);
        let entry = self.job.entry(index);
        self.bad.note(entry);
        entry
    }

    /// Gives room back that the job holds and has not used; whether there was any.
    pub(super) fn yield_room(&mut self, alloc: &mut Allocator) -> bool {
        let is_any = !self.job.room.is_empty();
        for run in self.job.room.drain(..) {
            alloc.give_back(run);
        }
        is_any
    }

    /// A leaf is done with.
    pub(super) fn end_leaf(&mut self, alloc: &mut Allocator) {
        self.is_busy = false;
        self.job.loaded = false;
        self.yield_room(alloc);
    }

    fn step(&mut self, res: &mut Resources, ckpt: &mut Checkpointer, may_start: bool) -> Next {
        let step = match self.state {
            State::Idle => self.begin_sweep(res, ckpt),
            State::Sweep { .. } if !may_start => CleanStep::Busy,
            State::Sweep { evacuate } => return self.next_leaf(evacuate, res, ckpt),
            State::Release {
                checkpoint,
                evacuated,
            } => self.await_release(checkpoint, evacuated, res, ckpt),
        };
        Next::Step(step)
    }

    /// Whether enough is free, or will be, for cleaning to be of use.
    fn is_roomy(&self, res: &Resources) -> bool {
        let least = u64::from(res.alloc.total_units() / FREE_SHARE_MIN);
        self.pace.credit() >= LEAF_BLOCKS as u64 && res.free_soon() >= least
    }

    fn stop(&mut self, alloc: &mut Allocator) -> CleanStep {
        if self.state != State::Idle {
            self.state = State::Idle;
            alloc.forget_victims();
        }
        self.job = Job::default();
        CleanStep::Idle
    }

    /// Decides what the next sweep is for, if one is worth while.
    fn begin_sweep(&mut self, res: &mut Resources, ckpt: &Checkpointer) -> CleanStep {
        let (changed, waiting) = (self.activity.changed(), self.activity.waiting());
        let is_known = self.pace.look(res.alloc.free_units(), waiting);
        if changed == 0 && is_known {
            return self.stop(&mut res.alloc);
        }
        let space = res.alloc.free_space();
        self.sweep = Sweep {
            place: space.empty.saturating_sub(keep_empty(res)),
            ..Sweep::default()
        };
        let place = self.sweep.place > 0;
        let wants_room = !place && waiting > 0;
        let released = std::mem::take(&mut self.released);
        if wants_room && self.pace.is_rested() && !released && is_much_quarantined(&res.alloc) {
            // What the next checkpoint frees may be room enough.
            return self.await_checkpoint(false, ckpt);
        }
        let evacuate = (wants_room || is_scattered(space, &res.alloc))
            && self.choose_victims(space, wants_room, res);
        if !evacuate && changed == 0 && !(place && waiting > 0) {
            return self.stop(&mut res.alloc);
        }
        self.state = State::Sweep { evacuate };
        CleanStep::Working
    }

    /// Chooses regions to be emptied; `false` if none is worth it.
    fn choose_victims(&mut self, space: FreeSpace, wants_room: bool, res: &mut Resources) -> bool {
        let waiting = self.activity.waiting();
        if wants_room && self.pace.was_in_vain(waiting, space.empty) {
            self.pace.rest();
        }
        if !self.pace.is_rested() {
            return false;
        }
        let most = (res.geo.units / REGION_UNITS / VICTIMS_SHARE).max(VICTIMS_MIN);
        let wanted = if wants_room {
            // Windows take some of what becomes empty.
            waiting + 2 * keep_empty(res)
        } else {
            most
        };
        let credit = u32::try_from(self.pace.credit()).unwrap_or(u32::MAX);
        let units = credit.min(res.spare_units());
        let alloc = &mut res.alloc;
        let victims = alloc.choose_victims(wanted.min(most), VICTIM_UNITS_MAX, units);
        if victims.regions == 0 {
            self.pace.rest();
            return false;
        }
        self.pace.note_evacuation(wants_room, waiting, space.empty);
        // Map pages in them move when the next checkpoint writes them anew; leaves follow in the sweep.
        let table = &mut res.map.table;
        table.rewrite_pages(|unit| alloc.is_victim(unit));
        true
    }

    /// The next leaf that the sweep is for.
    fn next_leaf(&mut self, evacuate: bool, res: &mut Resources, ckpt: &Checkpointer) -> Next {
        let map = &res.map;
        for _ in 0..RECORDS_PER_STEP {
            if self.sweep.cursor.is_at_end(map) {
                return Next::Step(self.end_sweep(evacuate, ckpt));
            }
            let rec = self.sweep.cursor.rec();
            let is_chunk = map.table.record(rec).kind == record_kind::CHUNK;
            if is_chunk && !evacuate && !self.activity.has_news(rec) {
                self.sweep.cursor.skip_record();
                continue;
            }
            let Some(place) = self.sweep.cursor.take(map) else {
                self.activity.forget(rec);
                continue;
            };
            let look = self.activity.look(rec, place.leaf, evacuate);
            if look.is_wanted && map.has_leaf(rec, place.leaf) {
                self.job.hot = look.is_hot;
                self.is_busy = true;
                res.counters.cleaned_leaves += 1;
                return Next::Leaf(place);
            }
        }
        Next::Step(CleanStep::Working)
    }

    fn end_sweep(&mut self, evacuate: bool, ckpt: &Checkpointer) -> CleanStep {
        let moved = self.sweep.moves > 0;
        if evacuate || (moved && self.activity.waiting() > 0) {
            return self.await_checkpoint(evacuate, ckpt);
        }
        self.state = State::Idle;
        if moved {
            CleanStep::Working
        } else {
            CleanStep::Idle
        }
    }

    /// Waits for the checkpoint that frees all that was moved away until now.
    fn await_checkpoint(&mut self, evacuated: bool, ckpt: &Checkpointer) -> CleanStep {
        self.state = State::Release {
            checkpoint: ckpt.number() + 1 + u64::from(ckpt.is_running()),
            evacuated,
        };
        CleanStep::Working
    }

    fn await_release(
        &mut self,
        checkpoint: u64,
        evacuated: bool,
        res: &mut Resources,
        ckpt: &mut Checkpointer,
    ) -> CleanStep {
        // Durable, it frees units only when nobody reads them; the next one begins after that.
        let durable = ckpt.number();
        if durable < checkpoint || (durable == checkpoint && ckpt.is_running()) {
            ckpt.want();
            return CleanStep::Busy;
        }
        if evacuated {
            // What guests took of other empty regions meanwhile says nothing of the sweep.
            let (victims, emptied) = res.alloc.forget_victims();
            let gained = emptied.saturating_sub(self.sweep.evicted / REGION_UNITS);
            if gained * GAIN_SHARE < victims {
                self.pace.rest();
            }
        }
        self.pace.look_again();
        self.released = true;
        self.state = State::Idle;
        CleanStep::Working
    }

    /// Chooses what is moved of a record's leaf, which is in `slot`, and makes room for it; `false` if
    /// nothing is.
    pub(super) fn choose_moves(
        &mut self,
        (rec, leaf): (u32, u8),
        slot: u32,
        res: &mut Resources,
    ) -> bool {
        let entries = res.map.leaves.entries(slot);
        let shape = LeafShape::of(entries, &self.bad, |unit| res.alloc.is_victim(unit));
        self.job.look_at(entries);
        let page = res.map.leaf_ptr(rec, leaf).unit;
        if res.alloc.is_victim(page) && res.spares(1) {
            // Dirty, it goes elsewhere with the checkpoint that ends the sweep.
            res.map.leaves.entries_mut(slot);
        }
        if shape.breaks >= BREAKS_MIN && !self.job.hot {
            if self.make_room(shape.movable, true, res) {
                self.job.choose(&self.bad, |_| true);
                return true;
            }
            self.activity.wait_for_room(rec, leaf);
        }
        if shape.in_victims > 0 && self.make_room(shape.in_victims, false, res) {
            self.job.choose(&self.bad, |unit| res.alloc.is_victim(unit));
            if shape.breaks < BREAKS_MIN {
                // It may be in pieces now.
                self.activity.look_again(rec, leaf);
            }
            return true;
        }
        false
    }

    /// Hands the job room for so many units, in an empty region, or else in holes if it need not stay whole.
    fn make_room(&mut self, units: u32, whole: bool, res: &mut Resources) -> bool {
        if self.pace.credit() < u64::from(units) || !res.spares(units) {
            return false;
        }
        let (sweep, room) = (&mut self.sweep, &mut self.job.room);
        match res.alloc.take_stream(units, sweep.place > 0, room) {
            Some(regions) => {
                sweep.place -= regions;
                sweep.evicted += if whole { 0 } else { units };
            }
            None => {
                sweep.place = 0;
                if whole || !res.alloc.take_holes(units, RUNS_MAX, room) {
                    return false;
                }
            }
        }
        self.pace.spend(units);
        sweep.moves += 1;
        true
    }
}

/// Regions that are left empty for log windows and guests.
fn keep_empty(res: &Resources) -> u32 {
    (res.geo.units / REGION_UNITS / KEEP_SHARE).max(KEEP_MIN)
}

/// Whether most free space lies in regions that are partly used. What a checkpoint will free may still change
/// that.
fn is_scattered(space: FreeSpace, alloc: &Allocator) -> bool {
    let empty_units = space.empty * REGION_UNITS;
    !is_much_quarantined(alloc)
        && space.scattered_units > empty_units.max(VICTIMS_MIN * REGION_UNITS)
}

fn is_much_quarantined(alloc: &Allocator) -> bool {
    alloc.quarantined_units() * QUARANTINE_SHARE > u64::from(alloc.free_units())
}

impl ShardCore {
    pub(super) fn step_clean(&mut self) -> CleanStep {
        let (cleaner, res) = (&mut self.cleaner, &mut self.res);
        if cleaner.is_busy {
            return CleanStep::Busy;
        }
        let hopeless =
            res.faults.has_failed() || res.device.is_under_space_pressure() || res.log.hold;
        if hopeless || self.ckpt.is_closing() || !cleaner.is_roomy(res) {
            return cleaner.stop(&mut res.alloc);
        }
        let may_start = self.parts.free() > 0;
        match cleaner.step(res, &mut self.ckpt, may_start) {
            Next::Step(step) => step,
            Next::Leaf(place) => {
                self.start_unordered(PartKind::LocateVictims, &place);
                CleanStep::Working
            }
        }
    }
}
