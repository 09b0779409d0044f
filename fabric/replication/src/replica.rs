//! The replica machine: checks a request's fences, hands it to the store, answers.
//!
//! Events in: [`Replica::on_request`], [`Replica::on_remote_request`] and [`Replica::on_store`]. Actions out:
//! [`StorePort::submit`] and the replies returned. The transport decides which peer a reply goes to; the
//! machine returns the peer that it was passed.

use std::sync::Arc;

use fabric_types::ids::{LayerId, PeerId};
use fabric_types::iov::IoVecs;
use fabric_types::message::{FenceEntry, UnresolvedEntry};
use fabric_types::slab::{Key, Slab};
use fabric_types::{
    Command, Epoch, Generation, Incarnation, NodeId, Refusal, Reply, Request, RequestId,
};
use zerocopy::IntoBytes;

use super::fence::{FenceCache, Fences};
use super::groups::{GroupCache, Groups};
use super::unresolved::{self, Unresolved};

pub mod store_op;

/// Names a store operation between [`StorePort::submit`] and [`Replica::on_store`].
pub type StoreKey = Key;

/// Outcome of a store operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreFailure {
    /// Newer versions are in place, and with content. Only writes of the same lease that overlapped this one
    /// can have put them there (an older lease was fenced before), and then this write counts as done first
    /// and overwritten.
    Stale,
    /// A newer version is demanded where there may be nothing that overwrote this write.
    Renumber,
    /// No space left.
    NoSpace {
        /// Nothing of it was stored.
        untouched: bool,
    },
    /// A block failed its checksum.
    Corrupt,
    /// The device returned this errno; `EROFS`: its store takes no more writes.
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
    /// Takes a request that passed the fences. `Some`: finished already. `None`: the store keeps it, and
    /// [`Replica::on_store`] is told `key` and the request later. Takes as many as the replica has slots.
    fn submit(&mut self, key: StoreKey, request: &Request) -> Option<Result<(), StoreFailure>>;
}

/// What is known of a request that the store has. The store keeps the request itself.
#[derive(Clone, Copy)]
struct Held {
    peer: PeerId,
    /// Of a write that was noted because this replica is being compared: the receiving period.
    noted: Option<Epoch>,
}

/// State that a replica shares with the node's other data threads.
#[derive(Debug, Clone)]
pub struct Peers {
    /// Which groups this node is a member of.
    pub groups: Arc<Groups>,
    /// The unresolved writes, one share for each data thread.
    pub unresolved: Arc<[Arc<Unresolved>]>,
    /// This thread's share.
    pub lane: usize,
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
    peers: Peers,
    /// The groups of `peers`, as this thread knows them.
    groups: GroupCache,
}

impl Replica {
    /// A replica that holds up to `slots` requests at once.
    pub fn new(incarnation: Incarnation, fences: Arc<Fences>, slots: u32, peers: Peers) -> Self {
        let empty = Held {
            peer: PeerId(0),
            noted: None,
        };
        Self {
            incarnation,
            fences: FenceCache::new(fences),
            held: Slab::new(slots, || empty),
            groups: GroupCache::new(Arc::clone(&peers.groups)),
            peers,
        }
    }

    /// Handles a request that came from `peer`, a connection of another node. The connection was admitted for
    /// one start of that node, so (node, start) is certain here, and (node, generation) is checked against
    /// the lease.
    #[inline]
    pub fn on_remote_request<P: StorePort>(
        &mut self,
        (node, peer): (NodeId, PeerId),
        request: &Request,
        store: &mut P,
    ) -> Handled {
        match self.admit_change_of(node, request) {
            Ok(()) => self.on_request(peer, request, store),
            Err(refusal) => Handled::Replied(self.reply(request.id, Err(refusal))),
        }
    }

    /// Handles a request that came from `peer` of this node itself.
    #[inline]
    pub fn on_request<P: StorePort>(
        &mut self,
        peer: PeerId,
        request: &Request,
        store: &mut P,
    ) -> Handled {
        let noted = match self.admit(request) {
            Ok(noted) => noted,
            Err(refusal) => return Handled::Replied(self.reply(request.id, Err(refusal))),
        };
        if let Command::Join = request.command {
            return Handled::Replied(self.reply(request.id, Ok(())));
        }
        let Some(slot) = self.held.take() else {
            return Handled::Full;
        };
        match store.submit(self.held.key(slot), request) {
            Some(result) => {
                self.held.give_back(slot);
                self.note_stored(noted, request, result);
                if let (Command::TellFence { layer, buffers, .. }, Ok(())) =
                    (request.command, result)
                {
                    self.add_unpersisted(layer, &buffers);
                    self.tell_unresolved(layer, Generation::MAX, &buffers, size_of::<FenceEntry>());
                }
                Handled::Replied(self.reply(request.id, outcome(result)))
            }
            None => {
                self.held[slot] = Held { peer, noted };
                Handled::Held
            }
        }
    }

    /// The store finished `key`, which it was given for `request`. `None` if no such operation is held.
    #[inline]
    pub fn on_store(
        &mut self,
        key: StoreKey,
        request: &Request,
        result: Result<(), StoreFailure>,
    ) -> Option<(PeerId, Reply)> {
        let slot = self.held.find(key)?;
        let Held { peer, noted } = self.held[slot];
        self.held.give_back(slot);
        self.note_stored(noted, request, result);
        if let (Command::Fence { layer, buffers, .. }, Ok(())) = (request.command, result) {
            self.tell_unresolved(layer, request.generation, &buffers, 0);
        }
        Some((peer, self.reply(request.id, outcome(result))))
    }

    /// Checks that the node holds the lease of the layer that it changes. Reads need no lease.
    #[inline]
    fn admit_change_of(&mut self, node: NodeId, request: &Request) -> Result<(), Refusal> {
        if !request.command.mutates() {
            return Ok(());
        }
        let known = self.known();
        let layer = request.command.layer();
        match layer.and_then(|layer| self.fences.of(layer)) {
            Some(fence) => fence.admit_change_of(node, request, known),
            // The layer and its lease may be newer than the metadata that this node has applied.
            None => Err(Refusal::Behind(known)),
        }
    }

    /// Checks the fences, and notes what a write is about to change.
    #[inline]
    fn admit(&mut self, request: &Request) -> Result<Option<Epoch>, Refusal> {
        if let Some(layer) = request.command.layer() {
            match self.fences.of(layer) {
                Some(fence) => fence.admit(request)?,
                // It may have been created a moment ago: asked again, this node will have heard of it.
                None if request.command.mutates() => return Err(Refusal::Behind(self.known())),
                None => {}
            }
        }
        let noted = self.peers.admit(request, &mut self.groups)?;
        if let Command::Fence { layer, .. } = request.command
            && let Some(fence) = self.fences.of(layer)
        {
            // In memory first: no write slips in between.
            fence.raise(request.generation, request.epoch);
        }
        Ok(noted)
    }

    /// The newest map that this node knows.
    fn known(&self) -> Epoch {
        self.peers.groups.known()
    }

    /// The store is done with a write that was noted.
    #[inline]
    fn note_stored(
        &self,
        noted: Option<Epoch>,
        request: &Request,
        result: Result<(), StoreFailure>,
    ) {
        if let (Some(since), Ok(())) = (noted, result) {
            self.peers
                .groups
                .stored(request.pg, &request.command, since);
        }
    }

    /// A fence holds from the moment in which it was raised, which is before it is persisted.
    fn add_unpersisted(&mut self, layer: LayerId, buffers: &IoVecs) {
        let fence = self.fences.of(layer);
        let (generation, epoch) = fence.map_or_else(Default::default, |fence| fence.get());
        let raised = FenceEntry {
            generation: generation.0,
            epoch: epoch.0,
        };
        // SAFETY: the transport keeps the list and its memory until the reply.
        let buffer = unsafe { buffers.first_mut() };
        let both = FenceEntry::from_memory(buffer).max(raised);
        if let Some(place) = buffer.first_chunk_mut::<{ size_of::<FenceEntry>() }>() {
            place.copy_from_slice(both.as_bytes());
        }
    }

    /// Fills the list that is asked for, behind the first `skip` bytes; nothing if there is no room for one.
    fn tell_unresolved(
        &self,
        layer: LayerId,
        generation: Generation,
        buffers: &IoVecs,
        skip: usize,
    ) {
        let entry = size_of::<UnresolvedEntry>();
        // SAFETY: the transport keeps the list and its memory until the reply.
        let buffer = unsafe { buffers.first_mut() };
        let Some(buffer) = buffer.get_mut(skip..).filter(|b| b.len() >= entry) else {
            return;
        };
        let room = buffer.len() / entry;
        // The last one ends the list.
        let list = unresolved::list(&self.peers.unresolved, layer, generation, room - 1);
        buffer.fill(0);
        for (place, entry) in buffer.chunks_exact_mut(entry).zip(&list) {
            place.copy_from_slice(entry.as_bytes());
        }
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

impl Peers {
    /// The receiving period in which a write was noted, if it was.
    #[inline]
    fn admit(&self, request: &Request, groups: &mut GroupCache) -> Result<Option<Epoch>, Refusal> {
        groups.admit(request)?;
        Ok(match request.command {
            Command::Write { .. } | Command::Zero { .. } => {
                self.unresolved[self.lane].note(request);
                groups.note(request)
            }
            Command::Restore { .. } => groups.note(request),
            Command::Join => {
                self.groups.join(request.pg, request.epoch);
                None
            }
            _ => None,
        })
    }
}

/// What the client is told.
#[inline]
pub fn outcome(result: Result<(), StoreFailure>) -> Result<(), Refusal> {
    match result {
        Ok(()) | Err(StoreFailure::Stale) => Ok(()),
        Err(StoreFailure::Renumber) => Err(Refusal::Renumber),
        Err(StoreFailure::NoSpace { untouched }) => Err(Refusal::NoSpace { untouched }),
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
