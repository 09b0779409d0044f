//! Requests in flight, and the slots of the virtqueue that they use. A request that is longer than a slot's
//! buffer uses several.

use std::collections::HashMap;

use super::memory::SLOTS;
use super::protocol::Kind;

/// Number of a request.
type Id = u64;

/// Next step after the completion of a slot.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Other slots of the request are in flight.
    Nothing,
    /// FUA: submit a flush in this slot.
    Flush(u16),
    /// Send the reply, then free the slots.
    Answer(Answer),
}

/// A completed request.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    /// Cookie of the request.
    pub cookie: [u8; 8],
    /// It failed.
    pub failed: bool,
    /// Where its data are, in order, if it was a read: slots and bytes in them.
    pub data: Vec<(u16, u32)>,
    slots: Vec<u16>,
}

#[derive(Debug)]
struct Pending {
    kind: Kind,
    cookie: [u8; 8],
    /// Slots and bytes in them.
    pieces: Vec<(u16, u32)>,
    under_way: usize,
    /// All its slots have been submitted.
    whole: bool,
    failed: bool,
    flushed: bool,
}

/// All requests in flight.
#[derive(Debug)]
pub struct Requests {
    free: Vec<u16>,
    /// Request of each slot in flight.
    owners: HashMap<u16, Id>,
    pending: HashMap<Id, Pending>,
    next: Id,
}

impl Default for Requests {
    fn default() -> Self {
        Self {
            free: (0..SLOTS).rev().collect(),
            owners: HashMap::new(),
            pending: HashMap::new(),
            next: 0,
        }
    }
}

impl Requests {
    /// A request begins.
    pub fn begin(&mut self, kind: Kind, cookie: [u8; 8]) -> Id {
        let id = self.next;
        self.next += 1;
        let pending = Pending {
            kind,
            cookie,
            pieces: Vec::new(),
            under_way: 0,
            whole: false,
            failed: false,
            flushed: false,
        };
        self.pending.insert(id, pending);
        id
    }

    /// A free slot for the next bytes of a request; none while all are taken.
    pub fn take_slot(&mut self, id: Id, bytes: u32) -> Option<u16> {
        let pending = self.pending.get_mut(&id)?;
        let slot = self.free.pop()?;
        pending.pieces.push((slot, bytes));
        pending.under_way += 1;
        self.owners.insert(slot, id);
        Some(slot)
    }

    /// All slots of a request have been submitted; they may be completed already.
    pub fn is_whole(&mut self, id: Id) -> Next {
        match self.pending.get_mut(&id) {
            Some(pending) => pending.whole = true,
            None => return Next::Nothing,
        }
        self.next(id)
    }

    /// The connection died in the middle of a request: the kernel requeues it.
    pub fn break_off(&mut self, id: Id) {
        if let Some(pending) = self.pending.get_mut(&id) {
            (pending.whole, pending.kind) = (true, Kind::Unknown);
        }
        if let Next::Answer(answer) = self.next(id) {
            self.free(answer);
        }
    }

    /// A slot that was taken and never submitted.
    pub fn give_back(&mut self, id: Id, slot: u16) {
        if let Some(pending) = self.pending.get_mut(&id) {
            pending.under_way -= 1;
        }
        self.owners.remove(&slot);
    }

    /// The daemon has completed a slot.
    pub fn answered(&mut self, slot: u16, success: bool) -> Next {
        let Some(id) = self.owners.remove(&slot) else {
            return Next::Nothing;
        };
        let Some(pending) = self.pending.get_mut(&id) else {
            return Next::Nothing;
        };
        pending.under_way -= 1;
        pending.failed |= !success;
        self.next(id)
    }

    fn next(&mut self, id: Id) -> Next {
        let Some(pending) = self.pending.get_mut(&id) else {
            return Next::Nothing;
        };
        if !pending.whole || pending.under_way > 0 {
            return Next::Nothing;
        }
        let first = pending.pieces.first().map(|(slot, _)| *slot);
        if pending.kind == (Kind::Write { fua: true })
            && !pending.failed
            && !pending.flushed
            && let Some(slot) = first
        {
            pending.flushed = true;
            pending.under_way = 1;
            self.owners.insert(slot, id);
            return Next::Flush(slot);
        }
        let Some(pending) = self.pending.remove(&id) else {
            return Next::Nothing;
        };
        let slots = pending.pieces.iter().map(|(slot, _)| *slot).collect();
        let has_data = pending.kind == Kind::Read && !pending.failed;
        Next::Answer(Answer {
            cookie: pending.cookie,
            failed: pending.failed,
            data: if has_data { pending.pieces } else { Vec::new() },
            slots,
        })
    }

    /// The reply was sent.
    pub fn free(&mut self, answer: Answer) {
        self.free.extend(answer.slots);
    }

    /// Whether no request is in flight.
    pub fn are_done(&self) -> bool {
        self.free.len() == usize::from(SLOTS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(next: Next) -> Answer {
        match next {
            Next::Answer(answer) => answer,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_long_read_is_answered_whole_and_in_order() {
        let mut requests = Requests::default();
        let id = requests.begin(Kind::Read, *b"12345678");
        let slots = [10, 20, 30].map(|bytes| requests.take_slot(id, bytes).unwrap());
        assert_eq!(requests.answered(slots[1], true), Next::Nothing);
        assert_eq!(requests.answered(slots[0], true), Next::Nothing);
        assert_eq!(requests.is_whole(id), Next::Nothing);
        let answer = answer(requests.answered(slots[2], true));
        assert_eq!(
            answer.data,
            [(slots[0], 10), (slots[1], 20), (slots[2], 30)]
        );
        assert!(!answer.failed && !requests.are_done());
        requests.free(answer);
        assert!(requests.are_done());
    }

    #[test]
    fn a_write_that_is_to_be_durable_is_flushed_before_it_is_answered() {
        let mut requests = Requests::default();
        let id = requests.begin(Kind::Write { fua: true }, [0; 8]);
        let slot = requests.take_slot(id, 512).unwrap();
        assert_eq!(requests.is_whole(id), Next::Nothing);
        assert_eq!(requests.answered(slot, true), Next::Flush(slot));
        assert!(!answer(requests.answered(slot, true)).failed);
        // One that failed is not.
        let id = requests.begin(Kind::Write { fua: true }, [0; 8]);
        let slot = requests.take_slot(id, 512).unwrap();
        assert_eq!(requests.answered(slot, false), Next::Nothing);
        assert!(answer(requests.is_whole(id)).failed);
    }

    #[test]
    fn slots_run_out_and_come_back() {
        let mut requests = Requests::default();
        let id = requests.begin(Kind::Write { fua: false }, [0; 8]);
        let slots: Vec<u16> = (0..SLOTS)
            .map(|_| requests.take_slot(id, 1).unwrap())
            .collect();
        assert_eq!(requests.take_slot(id, 1), None);
        requests.give_back(id, slots[0]);
        requests.break_off(id);
        for slot in &slots[1..] {
            if let Next::Answer(answer) = requests.answered(*slot, true) {
                assert!(answer.data.is_empty());
                requests.free(answer);
            }
        }
        assert!(requests.are_done());
    }
}
