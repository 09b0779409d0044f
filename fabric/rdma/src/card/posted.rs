//! Work requests that were handed to the device and are not known to be done. They are done in order, and
//! only some tell of it: one that does speaks for all before it.

use std::collections::VecDeque;

use fabric_transport::queue_pair::pair::Done;
use fabric_transport::queue_pair::slots::Slot;

/// What is known when a work request is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnCompletion {
    /// Nothing of its own.
    Nothing,
    /// The message from this slot has arrived.
    Sent(Slot),
    /// All has been read for this token.
    Read(u32),
    /// All is closed of this token.
    Closed(u32),
}

/// See the module.
#[derive(Debug)]
pub struct Posted {
    next: u64,
    waiting: VecDeque<(u64, OnCompletion)>,
}

impl Posted {
    /// With room for so many.
    pub fn new(room: usize) -> Self {
        Self {
            next: 0,
            waiting: VecDeque::with_capacity(room),
        }
    }

    /// A number for one's completion.
    pub fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// The one of this number is about to be posted, as the last of all.
    pub fn push(&mut self, id: u64, then: OnCompletion) {
        self.waiting.push_back((id, then));
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// The one of this number is done, and so are all before it.
    pub fn done(&mut self, id: u64, done: &mut Vec<Done>) {
        while let Some((of, then)) = self.waiting.pop_front() {
            match then {
                OnCompletion::Nothing => {}
                OnCompletion::Sent(slot) => done.push(Done::Sent(slot)),
                OnCompletion::Read(token) => done.push(Done::Read(token)),
                OnCompletion::Closed(token) => done.push(Done::Closed(token)),
            }
            if of == id {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_completion_speaks_for_all_before_it() {
        let mut posted = Posted::new(4);
        let thens = [
            OnCompletion::Sent(Slot(1)),
            OnCompletion::Nothing,
            OnCompletion::Read(7),
            OnCompletion::Closed(8),
        ];
        let mut ids: Vec<u64> = thens.iter().map(|_| posted.number()).collect();
        // Numbers come in any order.
        ids.swap(0, 1);
        for (id, then) in ids.iter().zip(thens) {
            posted.push(*id, then);
        }
        let mut done = Vec::new();
        posted.done(ids[2], &mut done);
        assert_eq!(done, [Done::Sent(Slot(1)), Done::Read(7)]);
        assert_eq!(posted.len(), 1);
        posted.done(ids[3], &mut done);
        assert_eq!((done.last(), posted.len()), (Some(&Done::Closed(8)), 0));
    }
}
