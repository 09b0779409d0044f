//! The replica is in this process, on this thread: sending is a call.

use fabric_replication::client::Transport;
use fabric_replication::replica::{Handled, Replica, StoreFailure, StoreKey};
use fabric_types::ids::PeerId;
use fabric_types::{Incarnation, NodeId, Refusal, Reply, Request};

use crate::store_port::StorePorts;

/// The peer that reaches the replica by a call.
pub const LOCAL: PeerId = PeerId(0);

/// Direct calls into one replica and its store.
pub struct MemTransport {
    replica: Replica,
    store: StorePorts,
}

impl MemTransport {
    /// A transport to `replica`, which keeps its data in `store`.
    pub fn new(replica: Replica, store: StorePorts) -> Self {
        Self { replica, store }
    }

    /// The replica's store.
    #[inline]
    pub fn store(&mut self) -> &mut StorePorts {
        &mut self.store
    }

    /// The store, for looking.
    pub fn store_ref(&self) -> &StorePorts {
        &self.store
    }

    /// The store finished an operation: the reply that comes of it, and to whom ([`LOCAL`] or a peer).
    #[inline]
    pub fn on_store(
        &mut self,
        key: StoreKey,
        result: Result<(), StoreFailure>,
    ) -> Option<(PeerId, Reply)> {
        self.replica.on_store(key, self.store.request(key), result)
    }

    /// The start of the replica.
    pub fn incarnation(&self) -> Incarnation {
        self.replica.incarnation()
    }

    /// Handles a request of this node under the name of a peer. `None`: the answer comes from
    /// [`on_store`](Self::on_store).
    pub fn request_of(&mut self, peer: PeerId, request: &Request) -> Option<Reply> {
        let handled = self.replica.on_request(peer, request, &mut self.store);
        self.answer(request, handled)
    }

    /// Handles a request of another node that came by another transport, on the node's connection of this
    /// name.
    pub fn remote_request(&mut self, from: (NodeId, PeerId), request: &Request) -> Option<Reply> {
        let store = &mut self.store;
        let handled = self.replica.on_remote_request(from, request, store);
        self.answer(request, handled)
    }

    fn answer(&self, request: &Request, handled: Handled) -> Option<Reply> {
        match handled {
            Handled::Replied(reply) => Some(reply),
            Handled::Held => None,
            // The replica has as many slots as its only client has pieces and its peers have requests. It can
            // be full only while its groups move between devices, for then a piece may need two: it is asked
            // again in a moment.
            Handled::Full => Some(Reply {
                id: request.id,
                incarnation: self.replica.incarnation(),
                result: Err(Refusal::Behind(request.epoch)),
            }),
        }
    }
}

impl Transport for MemTransport {
    #[inline]
    fn send(&mut self, _node: NodeId, request: &Request) -> Option<Reply> {
        self.request_of(LOCAL, request)
    }
}
