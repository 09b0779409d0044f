//! The replica machine: checks a request's fences, hands it to the store, answers.
//!
//! Events in: [`Replica::on_request`] and [`Replica::on_store`]. Actions out: [`StorePort::submit`] and the replies
//! returned. Which peer a reply goes to is the transport's business; the machine gives back the peer it was told.

use std::sync::Arc;

use super::fence::{FenceCache, Fences};
use super::slab::{Key, Slab};
use crate::proto::{Incarnation, Refusal, Reply, Request, RequestId};

/// Names a store operation between [`StorePort::submit`] and [`Replica::on_store`].
pub type StoreKey = Key;

/// Outcome of a store operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreFailure {
    /// Newer versions are in place, and with content. Only writes of the same lease that overlapped this one can have put
    /// them there (an older lease was fenced before), and then this write counts as done first and overwritten.
    Stale,
    /// A newer version is demanded where there may be nothing that overwrote this write.
    Renumber,
    /// No space left.
    NoSpace,
    /// A block failed its checksum.
    Corrupt,
    /// The device returned this errno.
    Device(i32),
    /// The fence rose while the operation waited.
    Fenced(Refusal),
    /// The block to be restored has changed.
    Changed,
    /// The data do not fit their checksum.
    Mismatch,
    /// The request is malformed.
    Invalid,
}

/// A store as the replica sees it.
pub trait StorePort {
    /// Takes a request that passed the fences. `Some`: finished already. `None`: [`Replica::on_store`] is told `key`
    /// later. Takes as many as the replica has slots.
    fn submit(&mut self, key: StoreKey, request: &Request) -> Option<Result<(), StoreFailure>>;

    /// True if `submit` always returns the outcome.
    #[inline]
    fn answers_in_place(&self) -> bool {
        false
    }
}

/// A peer of the replica; the transport gives and interprets it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct PeerId(pub u32);

#[derive(Clone, Copy)]
struct Held {
    peer: PeerId,
    id: RequestId,
}

/// What [`Replica::on_request`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Handled {
    /// The answer.
    Replied(Reply),
    /// The answer comes from [`Replica::on_store`].
    Held,
    /// Every slot is taken: nothing was done. The transport's credits keep clients from getting here.
    Full,
}

/// The machine. One per data thread; the fences are shared by all of a node.
pub struct Replica {
    incarnation: Incarnation,
    fences: FenceCache,
    held: Slab<Held>,
}

impl Replica {
    /// A replica that holds up to `slots` requests at once.
    pub fn new(incarnation: Incarnation, fences: Arc<Fences>, slots: u32) -> Self {
        let empty = Held {
            peer: PeerId(0),
            id: RequestId(0),
        };
        Self {
            incarnation,
            fences: FenceCache::new(fences),
            held: Slab::new(slots, || empty),
        }
    }

    /// A request came from `peer`.
    #[inline]
    pub fn on_request<P: StorePort>(
        &mut self,
        peer: PeerId,
        request: &Request,
        store: &mut P,
    ) -> Handled {
        let fence = self.fences.of(request.command.layer());
        if let Err(refusal) = fence.admit(request) {
            return Handled::Replied(self.reply(request.id, Err(refusal)));
        }
        if store.answers_in_place() {
            // No slot is taken: nobody will name this key.
            if let Some(result) = store.submit(Key(u64::MAX), request) {
                return Handled::Replied(self.reply(request.id, outcome(result)));
            }
        }
        let Some(slot) = self.held.take() else {
            return Handled::Full;
        };
        match store.submit(self.held.key(slot), request) {
            Some(result) => {
                self.held.give_back(slot);
                Handled::Replied(self.reply(request.id, outcome(result)))
            }
            None => {
                let id = request.id;
                self.held[slot] = Held { peer, id };
                Handled::Held
            }
        }
    }

    /// The store finished `key`. `None` if no such operation is held.
    #[inline]
    pub fn on_store(
        &mut self,
        key: StoreKey,
        result: Result<(), StoreFailure>,
    ) -> Option<(PeerId, Reply)> {
        let slot = self.held.find(key)?;
        let Held { peer, id } = self.held[slot];
        self.held.give_back(slot);
        Some((peer, self.reply(id, outcome(result))))
    }

    /// This start of the replica.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// Requests held.
    pub fn in_flight(&self) -> usize {
        self.held.taken()
    }

    #[inline]
    fn reply(&self, id: RequestId, result: Result<(), Refusal>) -> Reply {
        Reply {
            id,
            incarnation: self.incarnation,
            result,
        }
    }
}

#[inline]
fn outcome(result: Result<(), StoreFailure>) -> Result<(), Refusal> {
    match result {
        Ok(()) | Err(StoreFailure::Stale) => Ok(()),
        Err(StoreFailure::Renumber) => Err(Refusal::Renumber),
        Err(StoreFailure::NoSpace) => Err(Refusal::NoSpace),
        Err(StoreFailure::Corrupt) => Err(Refusal::Corrupt),
        Err(StoreFailure::Device(errno)) => Err(Refusal::Device(errno)),
        Err(StoreFailure::Fenced(refusal)) => Err(refusal),
        Err(StoreFailure::Changed) => Err(Refusal::Changed),
        Err(StoreFailure::Mismatch) => Err(Refusal::Mismatch),
        Err(StoreFailure::Invalid) => Err(Refusal::Invalid),
    }
}

#[cfg(test)]
mod tests;
