//! Requests that the node itself makes to replicas, beside those of its guests: takeovers and rounds of
//! comparison.

use fabric_replication::client::Transport;
use fabric_types::slab::{Key, Slab};
use fabric_types::{Incarnation, NodeId, Refusal, Reply, Request, RequestId};

use crate::stores::HELD_MAX;
use crate::transport::{NodeTransport, TransportEvent};

/// A request that is not answered yet.
#[derive(Clone, Copy)]
struct Open<T> {
    node: NodeId,
    /// The start of the node that is meant: another one's answer says nothing.
    incarnation: Incarnation,
    token: T,
}

/// Requests in flight, each with its caller's token.
pub struct Requests<T> {
    /// The ways that they go.
    pub transport: NodeTransport,
    open: Slab<Open<T>>,
}

impl<T: Copy + Default> Requests<T> {
    /// None yet.
    pub fn new(transport: NodeTransport) -> Self {
        let empty = || Open {
            node: NodeId(0),
            incarnation: Incarnation(0),
            token: T::default(),
        };
        Self {
            transport,
            open: Slab::new(HELD_MAX, empty),
        }
    }

    /// Requests that are not answered yet: their memory is in use.
    pub fn in_flight(&self) -> usize {
        self.open.taken()
    }

    /// Sends a request, whose id is filled in. `Some`: answered, or refused for want of room. The memory it
    /// names is in use until the answer.
    pub fn send(
        &mut self,
        (node, incarnation): (NodeId, Incarnation),
        request: &Request,
        token: T,
    ) -> Option<Result<(), Refusal>> {
        let Some(slot) = self.open.take() else {
            return Some(Err(Refusal::Device(libc::ENOBUFS)));
        };
        self.open[slot] = Open {
            node,
            incarnation,
            token,
        };
        let id = RequestId(self.open.key(slot).0);
        let reply = self.transport.send(node, &Request { id, ..*request })?;
        self.end(node, &reply).map(|(_, result)| result)
    }

    fn end(&mut self, node: NodeId, reply: &Reply) -> Option<(T, Result<(), Refusal>)> {
        let slot = self.open.find(Key(reply.id.0))?;
        let open = self.open[slot];
        if open.node != node {
            return None;
        }
        self.open.give_back(slot);
        // Invariant *No trust on return*.
        let known = reply.incarnation == open.incarnation;
        let result = if known {
            reply.result
        } else {
            Err(Refusal::Unreachable)
        };
        Some((open.token, result))
    }

    /// Takes in what came; true if anything did.
    pub fn poll(&mut self, mut answered: impl FnMut(T, Result<(), Refusal>)) -> bool {
        self.transport.kick();
        self.transport.reap();
        let mut worked = false;
        while let Some(told) = self.transport.next(&mut worked) {
            self.take(told, &mut answered);
        }
        worked
    }

    /// The same for what other nodes say alone: the node's own store is somebody else's.
    pub fn poll_remote(&mut self, mut answered: impl FnMut(T, Result<(), Refusal>)) -> bool {
        let mut worked = false;
        while let Some(told) = self.transport.next_remote(&mut worked) {
            self.take(told, &mut answered);
        }
        worked
    }

    fn take(&mut self, told: TransportEvent, answered: &mut impl FnMut(T, Result<(), Refusal>)) {
        match told {
            TransportEvent::Reply(node, reply) => {
                if let Some((token, result)) = self.end(node, &reply) {
                    answered(token, result);
                }
            }
            TransportEvent::Lost(node) => self.lose(node, answered),
        }
    }

    fn lose(&mut self, lost: NodeId, answered: &mut impl FnMut(T, Result<(), Refusal>)) {
        for slot in 0..self.open.capacity() {
            if self.open.is_taken(slot) && self.open[slot].node.base() == lost {
                let token = self.open[slot].token;
                self.open.give_back(slot);
                answered(token, Err(Refusal::Unreachable));
            }
        }
    }
}
