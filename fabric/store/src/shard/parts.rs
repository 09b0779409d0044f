//! Parts of operations in flight, and the order of overlapping ones.

use fabric_types::slab::Slab;

use super::super::table::{NONE, Table};
use super::part::{Part, PartKind, PartState, Place};
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

    /// Makes a part and lets it run unless an earlier write overlaps.
    pub(super) fn start(
        &mut self,
        op: u32,
        kind: PartKind,
        place: Place,
        version: u64,
        (table, waiting): (&mut Table, &mut Waiting),
    ) -> u32 {
        let slot = self
            .slots
            .take()
            .expect("parts are reserved before an operation is accepted");
        self.slots[slot].renew(op, kind, place, version, self.next_seq);
        self.next_seq += 1;
        let has_record = place.rec != NONE;
        if self.slots[slot].state == PartState::Logging {
            waiting.push_ready(slot);
        } else if has_record && self.has_hazard(slot, table) {
            self.link(slot, table);
            let part = &mut self.slots[slot];
            part.hazard.resume = std::mem::replace(&mut part.state, PartState::WaitHazard);
        } else {
            if has_record && kind.is_writer() {
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
        let mut at = table.runtime(part.place.rec).hazards;
        while at != NONE {
            let other = &self.slots[at];
            let overlap = part.place.overlaps(&other.place);
            // Before and after a move a block reads the same: its readers need not wait.
            let harmless = other.kind == PartKind::Move
                && matches!(part.kind, PartKind::Read | PartKind::Inspect);
            let is_earlier = other.hazard.seq < part.hazard.seq;
            if other.kind.is_writer() && is_earlier && overlap && !harmless {
                return true;
            }
            at = other.hazard.next;
        }
        false
    }

    fn link(&mut self, slot: u32, table: &mut Table) {
        let part = &mut self.slots[slot];
        let head = &mut table.runtime_mut(part.place.rec).hazards;
        part.hazard.is_linked = true;
        part.hazard.next = *head;
        *head = slot;
    }

    /// The part has ended: whoever waited for nothing but it goes on.
    pub(super) fn unlink(&mut self, slot: u32, table: &mut Table, waiting: &mut Waiting) {
        let part = &mut self.slots[slot];
        if !std::mem::take(&mut part.hazard.is_linked) {
            return;
        }
        let (rec, next, kind) = (part.place.rec, part.hazard.next, part.kind);
        let head = table.runtime(rec).hazards;
        if head == slot {
            table.runtime_mut(rec).hazards = next;
        } else {
            let mut at = head;
            while self.slots[at].hazard.next != slot {
                at = self.slots[at].hazard.next;
            }
            self.slots[at].hazard.next = next;
        }
        if kind.is_writer() {
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
            at = part.hazard.next;
        }
        // The list is newest first.
        for slot in woken.drain(..).rev() {
            let part = &mut self.slots[slot];
            part.state = part.hazard.resume;
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
