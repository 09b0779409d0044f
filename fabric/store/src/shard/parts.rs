//! Parts of operations in flight, and the order of overlapping ones.

use fabric_types::slab::Slab;

use super::super::format::{LEAF_BLOCKS, UNIT_BYTES};
use super::super::table::{NONE, Table};
use super::map::LEAF_BYTES;
use super::state::{Part, PartKind, PartState};
use super::waiting::Waiting;

/// The parts of one shard. Those of one record are linked, newest first.
#[derive(Debug)]
pub(super) struct Parts {
    slots: Slab<Part>,
    next_seq: u64,
    /// Parts that a write lets go when it ends; empty in between.
    woken: Vec<u32>,
}

impl Parts {
    pub(super) fn new(count: u32) -> Self {
        Self {
            slots: Slab::new(count, Part::default),
            next_seq: 1,
            woken: Vec::new(),
        }
    }

    pub(super) fn free(&self) -> usize {
        self.slots.free()
    }

    pub(super) fn taken(&self) -> usize {
        self.slots.taken()
    }

    pub(super) fn give_back(&mut self, slot: u32) {
        self.slots.give_back(slot);
    }

    pub(super) fn ram_bytes(&self) -> usize {
        self.slots.capacity() as usize * size_of::<Part>()
    }

    /// Makes a part of `start..end` (within one leaf) and lets it run unless an earlier write overlaps.
    pub(super) fn start(
        &mut self,
        op: u32,
        kind: PartKind,
        (layer, chunk, rec): (u64, u32, u32),
        (start, end): (u32, u32),
        version: u64,
        (table, waiting): (&mut Table, &mut Waiting),
    ) -> u32 {
        let slot = self
            .slots
            .take()
            .expect("parts are reserved before an operation is accepted");
        let block = UNIT_BYTES as u32;
        let (first, last) = (start / block, end.div_ceil(block));
        let part = &mut self.slots[slot];
        let (mut map, mut retry) = (
            std::mem::take(&mut part.map),
            std::mem::take(&mut part.retry),
        );
        map.clear();
        retry.clear();
        *part = Part {
            op,
            kind,
            seq: self.next_seq,
            layer,
            chunk,
            rec,
            start,
            end,
            version,
            ..Default::default()
        };
        (part.map, part.retry) = (map, retry);
        part.leaf = (start / LEAF_BYTES) as u8;
        part.first = (first % LEAF_BLOCKS as u32) as u16;
        part.count = (last - first) as u16;
        self.next_seq += 1;
        part.state = first_state(kind, start % block != 0 || end % block != 0);
        if part.state == PartState::Resolve {
            part.begin_resolve();
        }
        let part = &self.slots[slot];
        if part.state == PartState::Logging {
            waiting.push_ready(slot);
        } else if rec != NONE && self.has_hazard(slot, table) {
            self.link(slot, table);
            self.slots[slot].wait_next = state_code(self.slots[slot].state);
            self.slots[slot].state = PartState::WaitHazard;
        } else {
            if rec != NONE && is_writer(kind) {
                self.link(slot, table);
            }
            waiting.run(slot);
        }
        slot
    }

    /// Whether an earlier write in flight overlaps the part. Invariant *Stable reads*: who answers true
    /// waits.
    fn has_hazard(&self, slot: u32, table: &Table) -> bool {
        let part = &self.slots[slot];
        let mut at = table.runtime(part.rec).hazards;
        while at != NONE {
            let other = &self.slots[at];
            let overlap = other.leaf == part.leaf
                && other.first < part.first + part.count
                && part.first < other.first + other.count;
            // Before and after a move a block reads the same: its readers need not wait.
            let harmless = other.kind == PartKind::Move
                && matches!(part.kind, PartKind::Read | PartKind::Inspect);
            if is_writer(other.kind) && other.seq < part.seq && overlap && !harmless {
                return true;
            }
            at = other.hazard_next;
        }
        false
    }

    fn link(&mut self, slot: u32, table: &mut Table) {
        let part = &mut self.slots[slot];
        part.linked = true;
        let head = &mut table.runtime_mut(part.rec).hazards;
        part.hazard_next = *head;
        *head = slot;
    }

    /// The part has ended: whoever waited for nothing but it goes on.
    pub(super) fn unlink(&mut self, slot: u32, table: &mut Table, waiting: &mut Waiting) {
        let part = &mut self.slots[slot];
        if !std::mem::take(&mut part.linked) {
            return;
        }
        let (rec, next, kind) = (part.rec, part.hazard_next, part.kind);
        let head = table.runtime(rec).hazards;
        if head == slot {
            table.runtime_mut(rec).hazards = next;
        } else {
            let mut at = head;
            while self.slots[at].hazard_next != slot {
                at = self.slots[at].hazard_next;
            }
            self.slots[at].hazard_next = next;
        }
        if is_writer(kind) {
            self.wake(rec, table, waiting);
        }
    }

    /// Lets go whoever waited for a write that has finished.
    fn wake(&mut self, rec: u32, table: &Table, waiting: &mut Waiting) {
        let mut woken = std::mem::take(&mut self.woken);
        let mut at = table.runtime(rec).hazards;
        while at != NONE {
            let part = &self.slots[at];
            if part.state == PartState::WaitHazard && !self.has_hazard(at, table) {
                woken.push(at);
            }
            at = part.hazard_next;
        }
        // The list is newest first.
        for slot in woken.drain(..).rev() {
            let part = &mut self.slots[slot];
            part.state = state_from_code(part.wait_next);
            part.wait_next = NONE;
            waiting.run(slot);
        }
        self.woken = woken;
    }
}

impl std::ops::Index<u32> for Parts {
    type Output = Part;

    #[inline]
    fn index(&self, part: u32) -> &Part {
        &self.slots[part]
    }
}

impl std::ops::IndexMut<u32> for Parts {
    #[inline]
    fn index_mut(&mut self, part: u32) -> &mut Part {
        &mut self.slots[part]
    }
}

/// What a part begins with. A write of a block that it covers `partly` needs what is there.
fn first_state(kind: PartKind, partly: bool) -> PartState {
    match kind {
        PartKind::Read | PartKind::Scrub => PartState::Resolve,
        PartKind::Write | PartKind::Zero if partly => PartState::Resolve,
        PartKind::Write
        | PartKind::Zero
        | PartKind::Drop
        | PartKind::Inspect
        | PartKind::Restore
        | PartKind::Move => PartState::Acquire,
        PartKind::LocateVictims => PartState::LocateVictims,
        PartKind::Fence | PartKind::FenceDrop => PartState::Logging,
    }
}

pub(super) fn is_writer(kind: PartKind) -> bool {
    matches!(
        kind,
        PartKind::Write | PartKind::Zero | PartKind::Drop | PartKind::Restore | PartKind::Move
    )
}

/// A waiting part is in no leaf's list, so `wait_next` keeps the state it goes on with.
fn state_code(state: PartState) -> u32 {
    u32::from(state == PartState::Acquire)
}

fn state_from_code(code: u32) -> PartState {
    if code == 1 {
        PartState::Acquire
    } else {
        PartState::Resolve
    }
}
