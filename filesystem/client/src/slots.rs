//! Slots of a session: by slot and sequence number the namespace recognises a request that is repeated.
//!
//! A slot has one request at a time. Its next request says by its number that the one before is over, so a
//! request whose outcome is not known keeps its slot: the slot is used again once the same request was
//! repeated and answered, and never if the session ends before. A request in doubt may be done at any time
//! until then: nothing else is to be begun in the session, as it could be undone by that.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use namespace::{Ino, Operation, Request, SLOTS_MAX, SessionId, Time};

use crate::cache::Change;
use crate::sync::{Permit, Semaphore, lock};

/// Every slot has a request whose outcome is not known.
#[derive(Debug)]
pub(crate) struct Exhausted;

/// Slots of writes back and of what they need, beside those of other operations: these may wait for other
/// hosts, which may wait for what is written back.
const RESERVED: usize = 128;

pub(crate) struct Slots {
    permits: Semaphore,
    reserved: Semaphore,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Slots without a request. The last one used is the next one, so that few are used.
    idle: Vec<Slot>,
    /// How many slots were used so far.
    made: u16,
    /// Slots whose request may have been done.
    unsettled: Vec<(Slot, Pending)>,
    /// Their number, with those that are being settled.
    in_doubt: usize,
    /// The same of those that change a file or another inode by its number.
    in_doubt_of: HashMap<Ino, usize>,
}

impl State {
    fn doubt_begins(&mut self, ino: Option<Ino>) {
        self.in_doubt += 1;
        if let Some(ino) = ino {
            *self.in_doubt_of.entry(ino).or_default() += 1;
        }
    }

    fn doubt_ends(&mut self, ino: Option<Ino>) {
        self.in_doubt -= 1;
        if let Some(ino) = ino {
            let count = self.in_doubt_of.get_mut(&ino);
            let count = count.expect("a doubt ends once");
            *count -= 1;
            if *count == 0 {
                self.in_doubt_of.remove(&ino);
            }
        }
    }
}

/// The inode whose content or attributes an operation changes, by its number.
fn changed_inode(operation: &Operation) -> Option<Ino> {
    match operation {
        Operation::SetAttributes(set) => Some(set.ino),
        Operation::Commit(commit) => Some(commit.ino),
        Operation::Punch(punch) => Some(punch.ino),
        Operation::CopyRange(copy) => Some(copy.to),
        Operation::SetXattr { ino, .. } | Operation::RemoveXattr { ino, .. } => Some(*ino),
        _ => None,
    }
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    number: u16,
    /// Of the last request that is over.
    sequence: u64,
}

/// A request that may be done, and what is therefore not cached.
struct Pending {
    request: Request,
    change: Option<Change>,
}

/// A slot in use. Dropped with a request that was not answered, it goes to the unsettled ones.
pub(crate) struct SlotGuard {
    slots: Arc<Slots>,
    slot: Slot,
    request: Option<Pending>,
    /// The request is being repeated. It changes this inode.
    in_doubt: Option<Option<Ino>>,
    is_lost: bool,
    _permit: Option<Permit>,
}

impl Slots {
    /// At most so many requests are under way.
    pub(crate) fn new(under_way_max: usize) -> Arc<Self> {
        Arc::new(Self {
            permits: Semaphore::new(under_way_max.clamp(1, usize::from(SLOTS_MAX))),
            reserved: Semaphore::new(RESERVED),
            state: Mutex::default(),
        })
    }

    /// A slot without a request.
    pub(crate) async fn acquire(
        self: &Arc<Self>,
        is_reserved: bool,
    ) -> Result<SlotGuard, Exhausted> {
        let permits = match is_reserved {
            true => &self.reserved,
            false => &self.permits,
        };
        let permit = permits.acquire().await;
        let mut state = lock(&self.state);
        let slot = match state.idle.pop() {
            Some(slot) => slot,
            None if state.made == SLOTS_MAX => return Err(Exhausted),
            None => {
                state.made += 1;
                Slot {
                    number: state.made - 1,
                    sequence: 0,
                }
            }
        };
        Ok(SlotGuard {
            slots: Arc::clone(self),
            slot,
            request: None,
            in_doubt: None,
            is_lost: false,
            _permit: Some(permit),
        })
    }

    /// Whether the outcome of some request is not known.
    pub(crate) fn has_doubt(&self) -> bool {
        lock(&self.state).in_doubt > 0
    }

    /// The same of a request that changes this inode.
    pub(crate) fn has_doubt_of(&self, ino: Ino) -> bool {
        lock(&self.state).in_doubt_of.contains_key(&ino)
    }

    /// The session has ended: what may have been done was done before, or never will be.
    pub(crate) fn end_changes(&self) {
        let mut state = lock(&self.state);
        let pending = state.unsettled.iter_mut();
        let ended: Vec<_> = pending.map(|(_, pending)| pending.change.take()).collect();
        drop(state);
        drop(ended);
    }

    /// Slots whose request is to be repeated, at most `max`.
    pub(crate) fn take_unsettled(self: &Arc<Self>, max: usize) -> Vec<SlotGuard> {
        self.take_unsettled_if(max, |_| true)
    }

    /// The same of requests that change this inode.
    pub(crate) fn take_unsettled_of(self: &Arc<Self>, ino: Ino, max: usize) -> Vec<SlotGuard> {
        self.take_unsettled_if(max, |operation| changed_inode(operation) == Some(ino))
    }

    fn take_unsettled_if(
        self: &Arc<Self>,
        max: usize,
        is_wanted: impl Fn(&Operation) -> bool,
    ) -> Vec<SlotGuard> {
        let mut state = lock(&self.state);
        let (mut taken, mut left) = (Vec::new(), Vec::new());
        for (slot, pending) in state.unsettled.drain(..) {
            let operation = &pending.request.operation;
            if taken.len() >= max || !is_wanted(operation) {
                left.push((slot, pending));
                continue;
            }
            let in_doubt = Some(changed_inode(operation));
            taken.push(SlotGuard {
                slots: Arc::clone(self),
                slot,
                request: Some(pending),
                in_doubt,
                is_lost: false,
                _permit: None,
            });
        }
        state.unsettled = left;
        taken
    }
}

impl SlotGuard {
    /// The slot's next request.
    pub(crate) fn begin(
        &mut self,
        session: SessionId,
        at: Time,
        operation: Operation,
        change: Option<Change>,
    ) -> Request {
        assert!(self.request.is_none(), "a slot has one request at a time");
        let request = Request {
            session,
            slot: self.slot.number,
            sequence: self.slot.sequence + 1,
            at,
            operation,
        };
        self.request = Some(Pending {
            request: request.clone(),
            change,
        });
        request
    }

    /// The request under way, to repeat it.
    pub(crate) fn request(&self) -> Option<&Request> {
        self.request.as_ref().map(|pending| &pending.request)
    }

    /// What the request under way changes.
    pub(crate) fn change(&self) -> Option<&Change> {
        self.request.as_ref()?.change.as_ref()
    }

    /// The request was answered from the slot.
    pub(crate) fn settle(&mut self) {
        assert!(self.request.take().is_some(), "a request was under way");
        self.slot.sequence += 1;
    }

    /// The request certainly did not reach the slot.
    pub(crate) fn withdraw(&mut self) {
        assert!(self.request.take().is_some(), "a request was under way");
    }

    /// The namespace counts otherwise: the slot is not used again.
    pub(crate) fn abandon(&mut self) {
        self.request = None;
        self.is_lost = true;
    }
}

impl Drop for SlotGuard {
    fn drop(&mut self) {
        let mut state = lock(&self.slots.state);
        let request = self.request.take();
        if let Some(ino) = self.in_doubt {
            state.doubt_ends(ino);
        }
        match request {
            Some(request) => {
                state.doubt_begins(changed_inode(&request.request.operation));
                state.unsettled.push((self.slot, request));
            }
            None if self.is_lost => {}
            None => state.idle.push(self.slot),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    const AT: Time = Time {
        seconds: 1,
        nanoseconds: 0,
    };

    fn take(slots: &Arc<Slots>) -> SlotGuard {
        slots.acquire(false).now_or_never().unwrap().unwrap()
    }

    fn begin(guard: &mut SlotGuard) -> (u16, u64) {
        let request = guard.begin(SessionId(1), AT, Operation::NewSegment, None);
        (request.slot, request.sequence)
    }

    #[test]
    fn a_slot_counts_its_requests() {
        let slots = Slots::new(2);
        for sequence in 1..4 {
            let mut guard = take(&slots);
            assert_eq!(begin(&mut guard), (0, sequence));
            guard.settle();
        }
        let (mut first, mut second) = (take(&slots), take(&slots));
        assert_eq!(begin(&mut first), (0, 4));
        assert_eq!(begin(&mut second), (1, 1));
        assert!(
            slots.acquire(false).now_or_never().is_none(),
            "two at a time"
        );
        first.withdraw();
        drop(first);
        let mut again = take(&slots);
        assert_eq!(begin(&mut again), (0, 4), "the number was not used");
    }

    #[test]
    fn an_unanswered_request_keeps_its_slot_until_it_is_repeated() {
        let slots = Slots::new(1);
        let mut guard = take(&slots);
        begin(&mut guard);
        assert!(!slots.has_doubt());
        drop(guard);
        assert!(slots.has_doubt());
        let mut other = take(&slots);
        assert_eq!(begin(&mut other), (1, 1), "the slot is taken");
        other.settle();
        drop(other);
        let mut unsettled = slots.take_unsettled(9);
        assert_eq!(unsettled.len(), 1);
        let request = unsettled[0].request().unwrap();
        assert_eq!((request.slot, request.sequence), (0, 1));
        unsettled[0].settle();
        assert!(slots.has_doubt(), "until the slot is free");
        drop(unsettled);
        assert!(!slots.has_doubt());
        assert!(slots.take_unsettled(9).is_empty());
        let mut guard = take(&slots);
        assert_eq!(begin(&mut guard), (0, 2));
    }

    #[test]
    fn without_usable_slots_requests_fail_at_once() {
        let slots = Slots::new(1);
        for _ in 0..SLOTS_MAX {
            begin(&mut take(&slots));
        }
        assert!(slots.acquire(false).now_or_never().unwrap().is_err());
        let mut one = slots.take_unsettled(1);
        one[0].settle();
        drop(one);
        assert_eq!(begin(&mut take(&slots)).1, 2);
    }
}
