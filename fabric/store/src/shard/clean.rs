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
//! anything moved without *credit*, which bounds the bytes moved to [`CREDIT_PER_WRITE`] for each that guests
//! wrote, [`CREDIT_PER_DISCARD`] for each discarded, and [`CREDIT_AT_START`] for each stored when the shard
//! was opened.

use std::collections::VecDeque;

use super::super::alloc::{FreeSpace, Run};
use super::super::api::CleanStep;
use super::super::arena::AlignedBuf;
use super::super::format::{
    CHUNK_LEAVES, LEAF_BLOCKS, MapEntry, REGION_UNITS, UNIT_BYTES, is_place, record_kind,
};
use super::super::table::NONE;
use super::{PartKind, ShardCore};

/// Blocks that may be moved for each block that a guest wrote.
const CREDIT_PER_WRITE: u64 = 4;
/// Blocks that may be moved for each block that was discarded.
const CREDIT_PER_DISCARD: u64 = 1;
/// Blocks that may be moved for each block stored when the shard was opened: how scattered those are is not
/// known.
const CREDIT_AT_START: u64 = 2;
/// Credit does not grow beyond so many times the shard.
const CREDIT_SHARDS_MAX: u64 = 4;
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
/// After a sweep in vain, guests have to change one in so many units before the next.
const WAKE_SHARE: u32 = 512;
/// Records without anything to do that a step passes at most.
const RECORDS_PER_STEP: u32 = 1 << 16;
/// Bad blocks that are remembered; with more the oldest are met again.
const BAD_MAX: usize = 64;
/// Runs that the blocks of one leaf are moved to at most.
const RUNS_MAX: usize = LEAF_BLOCKS;

/// Bits of a record's activity, one for each leaf.
const CHANGED: u32 = 0;
const HOT: u32 = 4;
const WAITS: u32 = 8;
const NEWS: u16 = 0x0f;
const ANY: u16 = 0xf0f;

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

/// See the module.
#[derive(Debug)]
pub(super) struct Clean {
    activity: Vec<u16>,
    /// Leaves that changed or wait, each counted once for each.
    changed: u32,
    waiting: u32,
    state: State,
    rec: u32,
    leaf: usize,
    /// A part is under way.
    pub(super) busy: bool,
    /// Empty regions that this sweep may still fill, and units that it moved out of victims to such.
    place: u32,
    evicted: u32,
    /// Moves of this sweep.
    moves: u32,
    /// What was moved, or freed by guests, before the last sweep is free.
    released: bool,
    /// `changes`, waiting leaves and empty regions when victims were last chosen for want of room.
    evacuated_at: Option<(u64, u32, u32)>,
    credit: u64,
    /// Blocks that guests changed, and how many of them there must be before victims are chosen again.
    changes: u64,
    wake_at: u64,
    /// `changes`, free units and waiting leaves when a sweep was last considered.
    looked_at: Option<(u64, u32, u32)>,
    /// Bad blocks that were met: they stay where they are. Reported once, while they are remembered.
    bad: VecDeque<MapEntry>,
    pub(super) job: Job,
}

/// What is done to one leaf.
#[derive(Debug, Default)]
pub(super) struct Job {
    pub(super) rec: u32,
    pub(super) leaf: u8,
    /// What the leaf said when it was looked at, and which of its blocks are moved.
    pub(super) entries: Vec<MapEntry>,
    pub(super) chosen: Vec<bool>,
    /// Where to.
    pub(super) room: Vec<Run>,
    /// Content, by block of the leaf. Only while there is work.
    pub(super) buffer: Option<AlignedBuf>,
    pub(super) retry: Vec<u16>,
    /// Its page was not in the cache.
    pub(super) loaded: bool,
    /// Guests are at it: only what lies in victims is moved.
    hot: bool,
}

/// How a leaf's blocks lie.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct LeafShape {
    /// Mapped blocks that are not known to be bad, and of those the ones in victims.
    movable: u32,
    in_victims: u32,
    /// Where a block does not lie behind the one before it.
    breaks: u32,
}

impl Clean {
    /// For a shard with so many records and units in use. What was stored before may lie anywhere.
    pub(super) fn new(records: u32, used_units: u32) -> Self {
        Self {
            activity: vec![NEWS; records as usize],
            changed: records * CHUNK_LEAVES as u32,
            waiting: 0,
            state: State::Idle,
            rec: 0,
            leaf: 0,
            busy: false,
            place: 0,
            evicted: 0,
            moves: 0,
            released: false,
            evacuated_at: None,
            credit: u64::from(used_units) * CREDIT_AT_START,
            changes: 0,
            wake_at: 0,
            looked_at: None,
            bad: VecDeque::new(),
            job: Job::default(),
        }
    }

    /// Map pages to look at.
    pub(super) fn leaves_left(&self) -> u64 {
        u64::from(self.changed) + u64::from(self.waiting)
    }

    pub(super) fn ram_bytes(&self) -> u64 {
        let buffer = self.job.buffer.as_ref().map_or(0, AlignedBuf::len) as u64;
        let job = self.job.entries.capacity() * (size_of::<MapEntry>() + 1);
        buffer + self.activity.capacity() as u64 * 2 + job as u64
    }

    /// A block is bad and stays where it is.
    pub(super) fn note_bad(&mut self, entry: MapEntry) {
        if self.bad.len() == BAD_MAX {
            self.bad.pop_front();
        }
        self.bad.push_back(entry);
    }

    /// Blocks that the part being logged still has to place.
    pub(super) fn blocks_left(&self, from: u32) -> u32 {
        self.job.chosen_from(from)
    }

    fn set(&mut self, rec: u32, leaf: u8, bits: u32) {
        if self.activity.len() <= rec as usize {
            self.activity.resize(rec as usize + 1, 0);
        }
        let mask = 1u16 << (bits + u32::from(leaf));
        let word = &mut self.activity[rec as usize];
        let fresh = u32::from(*word & mask == 0);
        *word |= mask;
        self.changed += if bits == CHANGED { fresh } else { 0 };
        self.waiting += if bits == WAITS { fresh } else { 0 };
    }

    /// The record is no chunk's any more.
    fn forget(&mut self, rec: u32) {
        for leaf in 0..CHUNK_LEAVES as u8 {
            for bits in [CHANGED, HOT, WAITS] {
                self.clear(rec, leaf, bits);
            }
        }
    }

    /// Clears a bit; whether it was set.
    fn clear(&mut self, rec: u32, leaf: u8, bits: u32) -> bool {
        let mask = 1u16 << (bits + u32::from(leaf));
        let Some(word) = self.activity.get_mut(rec as usize) else {
            return false;
        };
        let was = *word & mask != 0;
        *word &= !mask;
        self.changed -= u32::from(was && bits == CHANGED);
        self.waiting -= u32::from(was && bits == WAITS);
        was
    }
}

impl LeafShape {
    fn of(entries: &[MapEntry], bad: &VecDeque<MapEntry>, is_victim: impl Fn(u32) -> bool) -> Self {
        let mut shape = Self::default();
        let mut last = 0;
        for entry in entries {
            if is_place(entry.unit) {
                let good = u32::from(bad.is_empty() || !bad.contains(entry));
                shape.movable += good;
                shape.breaks += u32::from(is_place(last) && entry.unit != last + 1);
                shape.in_victims += good * u32::from(is_victim(entry.unit));
            }
            last = entry.unit;
        }
        shape
    }
}

impl ShardCore {
    /// A guest changed blocks of the part's leaf.
    pub(super) fn note_change(&mut self, part: u32, blocks: u16, written: bool) {
        let p = &self.parts[part];
        let (rec, leaf) = (p.rec, p.leaf);
        let clean = &mut self.clean;
        clean.set(rec, leaf, CHANGED);
        clean.set(rec, leaf, HOT);
        let each = if written {
            CREDIT_PER_WRITE
        } else {
            CREDIT_PER_DISCARD
        };
        let most = u64::from(self.res.geo.units) * CREDIT_SHARDS_MAX;
        let earned = clean.credit + u64::from(blocks) * each;
        clean.credit = earned.min(most.max(clean.credit));
        clean.changes += u64::from(blocks);
    }

    pub(super) fn step_clean(&mut self) -> CleanStep {
        let clean = &self.clean;
        if clean.busy {
            return CleanStep::Busy;
        }
        let hopeless = self.res.faults.has_failed()
            || self.res.device.is_under_space_pressure()
            || self.res.log.hold;
        if hopeless || self.ckpt.is_closing() || !self.is_roomy() {
            self.stop_cleaning();
            return CleanStep::Idle;
        }
        match clean.state {
            State::Idle => self.begin_sweep(),
            State::Sweep { evacuate } => self.sweep(evacuate),
            State::Release {
                checkpoint,
                evacuated,
            } => self.await_release(checkpoint, evacuated),
        }
    }

    /// Whether enough is free, or will be, for cleaning to be of use.
    fn is_roomy(&self) -> bool {
        let free = u64::from(self.res.alloc.free_units()) + self.res.alloc.quarantined_units();
        self.clean.credit >= LEAF_BLOCKS as u64
            && free >= u64::from(self.res.alloc.total_units() / FREE_SHARE_MIN)
    }

    fn stop_cleaning(&mut self) {
        if self.clean.state != State::Idle {
            self.clean.state = State::Idle;
            self.res.alloc.forget_victims();
        }
        self.clean.job = Job::default();
    }

    fn keep_empty(&self) -> u32 {
        (self.res.geo.units / REGION_UNITS / KEEP_SHARE).max(KEEP_MIN)
    }

    /// Decides what the next sweep is for, if one is worth while.
    fn begin_sweep(&mut self) -> CleanStep {
        let clean = &self.clean;
        let now = (clean.changes, self.res.alloc.free_units(), clean.waiting);
        if clean.changed == 0 && clean.looked_at == Some(now) {
            self.stop_cleaning();
            return CleanStep::Idle;
        }
        let space = self.res.alloc.free_space();
        self.clean.looked_at = Some(now);
        self.clean.place = space.empty.saturating_sub(self.keep_empty());
        (self.clean.moves, self.clean.evicted) = (0, 0);
        (self.clean.rec, self.clean.leaf) = (0, 0);
        let place = self.clean.place > 0;
        let wants_room = !place && self.clean.waiting > 0;
        let released = std::mem::take(&mut self.clean.released);
        let rested = self.clean.changes >= self.clean.wake_at;
        if wants_room && rested && !released && self.is_much_quarantined() {
            // What the next checkpoint frees may be room enough.
            return self.await_checkpoint(false);
        }
        let evacuate =
            (wants_room || self.is_scattered(space)) && self.choose_victims(space, wants_room);
        if !evacuate && self.clean.changed == 0 && !(place && self.clean.waiting > 0) {
            self.stop_cleaning();
            return CleanStep::Idle;
        }
        self.clean.state = State::Sweep { evacuate };
        CleanStep::Working
    }

    /// Whether most free space lies in regions that are partly used. What a checkpoint will free may still
    /// change that.
    fn is_scattered(&self, space: FreeSpace) -> bool {
        let empty_units = space.empty * REGION_UNITS;
        !self.is_much_quarantined()
            && space.scattered_units > empty_units.max(VICTIMS_MIN * REGION_UNITS)
    }

    fn is_much_quarantined(&self) -> bool {
        self.res.alloc.quarantined_units() * QUARANTINE_SHARE
            > u64::from(self.res.alloc.free_units())
    }

    /// Chooses regions to be emptied; `false` if none is worth it.
    fn choose_victims(&mut self, space: FreeSpace, wants_room: bool) -> bool {
        let clean = &self.clean;
        let now = (clean.changes, clean.waiting, space.empty);
        let in_vain = |was: (u64, u32, u32)| now.0 == was.0 && now.1 >= was.1 && now.2 <= was.2;
        if wants_room && clean.evacuated_at.is_some_and(in_vain) {
            self.rest();
        }
        if self.clean.changes < self.clean.wake_at {
            return false;
        }
        let most = (self.res.geo.units / REGION_UNITS / VICTIMS_SHARE).max(VICTIMS_MIN);
        let wanted = if wants_room {
            // Windows take some of what becomes empty.
            self.clean.waiting + 2 * self.keep_empty()
        } else {
            most
        };
        let credit = u32::try_from(self.clean.credit).unwrap_or(u32::MAX);
        let units = credit.min(self.res.spare_units());
        let victims = self
            .res
            .alloc
            .choose_victims(wanted.min(most), VICTIM_UNITS_MAX, units);
        if victims.regions == 0 {
            self.rest();
            return false;
        }
        self.clean.evacuated_at = wants_room.then_some(now);
        // Map pages in them move when the next checkpoint writes them anew; leaves follow in the sweep.
        let alloc = &self.res.alloc;
        self.res
            .map
            .table
            .rewrite_pages(|unit| alloc.is_victim(unit));
        true
    }

    /// No victims are chosen again before guests have changed something to speak of.
    fn rest(&mut self) {
        let share = u64::from(self.res.geo.units / WAKE_SHARE).max(LEAF_BLOCKS as u64);
        self.clean.wake_at = self.clean.changes + share;
    }

    /// Looks at the next leaf that the sweep is for.
    fn sweep(&mut self, evacuate: bool) -> CleanStep {
        if self.parts.free() == 0 {
            return CleanStep::Busy;
        }
        for _ in 0..RECORDS_PER_STEP {
            let (rec, leaf) = (self.clean.rec, self.clean.leaf);
            if rec >= self.res.map.table.slots() {
                return self.end_sweep(evacuate);
            }
            let news = self.clean.activity.get(rec as usize).unwrap_or(&0) & ANY != 0;
            let record = self.res.map.table.record(rec);
            if record.kind != record_kind::CHUNK {
                self.clean.forget(rec);
            }
            if record.kind != record_kind::CHUNK || !(news || evacuate) {
                (self.clean.rec, self.clean.leaf) = (rec + 1, 0);
                continue;
            }
            self.clean.leaf = (leaf + 1) % CHUNK_LEAVES;
            self.clean.rec += u32::from(self.clean.leaf == 0);
            let (layer, chunk) = (record.layer, record.index);
            let cached = self.res.map.table.runtime(rec).leaf_slots[leaf] != NONE;
            let there = cached || record.leaves[leaf].unit != 0;
            if !self.is_wanted(rec, leaf as u8, evacuate) || !there {
                continue;
            }
            let bytes = (LEAF_BLOCKS * UNIT_BYTES) as u32;
            let range = (leaf as u32 * bytes, (leaf as u32 + 1) * bytes);
            self.clean.busy = true;
            self.res.counters.cleaned_leaves += 1;
            // Without a record the part waits for no write in flight: it looks at what is mapped now.
            self.start_part(
                NONE,
                PartKind::LocateVictims,
                (layer, chunk, NONE),
                range,
                0,
            );
            return CleanStep::Working;
        }
        CleanStep::Working
    }

    /// Whether the sweep is to look at the leaf. One that changed since the last sweep is left alone until
    /// the next.
    fn is_wanted(&mut self, rec: u32, leaf: u8, evacuate: bool) -> bool {
        let clean = &mut self.clean;
        let hot = clean.clear(rec, leaf, HOT);
        if hot && !evacuate {
            return false;
        }
        let changed = clean.clear(rec, leaf, CHANGED);
        let waits = clean.clear(rec, leaf, WAITS);
        clean.job.hot = hot;
        if hot && changed {
            clean.set(rec, leaf, CHANGED);
        }
        if hot && waits {
            clean.set(rec, leaf, WAITS);
        }
        changed || waits || evacuate
    }

    fn end_sweep(&mut self, evacuate: bool) -> CleanStep {
        let moved = self.clean.moves > 0;
        if evacuate || (moved && self.clean.waiting > 0) {
            return self.await_checkpoint(evacuate);
        }
        self.clean.state = State::Idle;
        if moved {
            CleanStep::Working
        } else {
            CleanStep::Idle
        }
    }

    /// Waits for the checkpoint that frees all that was moved away until now.
    fn await_checkpoint(&mut self, evacuated: bool) -> CleanStep {
        let checkpoint = self.ckpt.number() + 1 + u64::from(self.ckpt.is_running());
        self.clean.state = State::Release {
            checkpoint,
            evacuated,
        };
        CleanStep::Working
    }

    fn await_release(&mut self, checkpoint: u64, evacuated: bool) -> CleanStep {
        // Durable, it frees units only when nobody reads them; the next one begins after that.
        let durable = self.ckpt.number();
        if durable < checkpoint || (durable == checkpoint && self.ckpt.is_running()) {
            self.ckpt.want();
            return CleanStep::Busy;
        }
        if evacuated {
            // What guests took of other empty regions meanwhile says nothing of the sweep.
            let (victims, emptied) = self.res.alloc.forget_victims();
            let gained = emptied.saturating_sub(self.clean.evicted / REGION_UNITS);
            if gained * GAIN_SHARE < victims {
                self.rest();
            }
        }
        self.clean.looked_at = None;
        self.clean.released = true;
        self.clean.state = State::Idle;
        CleanStep::Working
    }

    /// Chooses what of the leaf in `slot` is moved, and makes room for it; `false` if nothing is.
    pub(super) fn choose_moves(&mut self, slot: u32) -> bool {
        let alloc = &self.res.alloc;
        let entries = self.res.map.leaves.entries(slot);
        let shape = LeafShape::of(entries, &self.clean.bad, |unit| alloc.is_victim(unit));
        let job = &mut self.clean.job;
        job.entries.clear();
        job.entries.extend_from_slice(entries);
        job.room.clear();
        let (rec, leaf) = (job.rec, job.leaf);
        let page = self.res.map.table.record(rec).leaves[usize::from(leaf)].unit;
        if self.res.alloc.is_victim(page) && self.res.spares(1) {
            // Dirty, it goes elsewhere with the checkpoint that ends the sweep.
            self.res.map.leaves.entries_mut(slot);
        }
        if shape.breaks >= BREAKS_MIN && !self.clean.job.hot {
            if self.make_room(shape.movable, true) {
                self.choose(|_, _| true);
                return true;
            }
            self.clean.set(rec, leaf, WAITS);
        }
        if shape.in_victims > 0 && self.make_room(shape.in_victims, false) {
            self.choose(|core, unit| core.res.alloc.is_victim(unit));
            if shape.breaks < BREAKS_MIN {
                // It may be in pieces now.
                self.clean.set(rec, leaf, CHANGED);
            }
            return true;
        }
        false
    }

    /// Marks the good blocks in units that are wanted.
    fn choose(&mut self, wanted: impl Fn(&Self, u32) -> bool) {
        let bad = &self.clean.bad;
        let good = |e: &MapEntry| is_place(e.unit) && (bad.is_empty() || !bad.contains(e));
        let mut chosen = std::mem::take(&mut self.clean.job.chosen);
        chosen.clear();
        let entries = self.clean.job.entries.iter();
        chosen.extend(entries.map(|e| good(e) && wanted(self, e.unit)));
        self.clean.job.chosen = chosen;
    }

    /// Hands the job room for so many units, in an empty region, or else in holes if it need not stay whole.
    fn make_room(&mut self, units: u32, whole: bool) -> bool {
        if self.clean.credit < u64::from(units) || !self.res.spares(units) {
            return false;
        }
        let may_begin = self.clean.place > 0;
        let clean = &mut self.clean;
        let begun = self
            .res
            .alloc
            .take_stream(units, may_begin, &mut clean.job.room);
        match begun {
            Some(regions) => {
                clean.place -= regions;
                clean.evicted += if whole { 0 } else { units };
            }
            None => {
                clean.place = 0;
                if whole
                    || !self
                        .res
                        .alloc
                        .take_holes(units, RUNS_MAX, &mut clean.job.room)
                {
                    return false;
                }
            }
        }
        clean.credit -= u64::from(units);
        clean.moves += 1;
        true
    }
}

impl Job {
    /// Chosen blocks from `from` on.
    pub(super) fn chosen_from(&self, from: u32) -> u32 {
        let rest = self.chosen.get(from as usize..).unwrap_or_default();
        rest.iter().filter(|&&chosen| chosen).count() as u32
    }
}
