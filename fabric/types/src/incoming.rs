//! Names of a replica on a device that its placement group is *coming to*, beside the one on another device
//! of the same node that serves until then.
//!
//! A node has one replica of a group, but for the time in which the group moves between two of its devices.
//! The second one is synced and promoted like that of any other node. So the cores take it for one: it has
//! names of its own, which are those of the node and of the group with one bit more. The map's members bear
//! the node's ([`NodeId::incoming`]); the way there ([`Request::to_replica`]) makes the group's of it
//! ([`PgId::incoming`]), under which the node knows its replica, and marks the request, so that the two
//! answers of one node are told apart ([`Reply::from_replica`]).

use super::{NodeId, PgId, Reply, Request, RequestId};

/// Numbers of nodes are counted from 1 and never get there.
const NODE_BIT: u64 = 1 << 63;
/// Within the index of a group in its pool, of which there are at most 16,384.
const PG_BIT: u64 = 1 << 31;
/// Above the uses of a slot that [`Key`](crate::slab::Key) counts.
const REQUEST_BIT: u64 = 1 << 63;

impl NodeId {
    /// The replica of this node on the device that a group is coming to.
    #[must_use]
    pub fn incoming(self) -> Self {
        Self(self.0 | NODE_BIT)
    }

    /// Whether it names such a replica.
    #[inline]
    #[must_use]
    pub fn is_incoming(self) -> bool {
        self.0 & NODE_BIT != 0
    }

    /// The node itself.
    #[inline]
    #[must_use]
    pub fn base(self) -> Self {
        Self(self.0 & !NODE_BIT)
    }
}

impl PgId {
    /// The group as the replica knows it that it is coming to.
    #[must_use]
    pub fn incoming(self) -> Self {
        Self(self.0 | PG_BIT)
    }

    /// Whether it is named as that replica knows it.
    #[inline]
    #[must_use]
    pub fn is_incoming(self) -> bool {
        self.0 & PG_BIT != 0
    }

    /// The group itself.
    #[inline]
    #[must_use]
    pub fn base(self) -> Self {
        Self(self.0 & !PG_BIT)
    }
}

impl RequestId {
    /// The id that the requester gave.
    #[inline]
    #[must_use]
    pub fn base(self) -> Self {
        Self(self.0 & !REQUEST_BIT)
    }
}

impl Request {
    /// The request as it goes on its way to this replica.
    #[inline]
    #[must_use]
    pub fn to_replica(&self, node: NodeId) -> Self {
        let mut request = *self;
        if node.is_incoming() {
            request.pg = request.pg.incoming();
            request.id.0 |= REQUEST_BIT;
        }
        request
    }
}

impl Reply {
    /// Which replica of a node it comes from, and the answer to what that was asked.
    #[inline]
    #[must_use]
    pub fn from_replica(mut self, node: NodeId) -> (NodeId, Self) {
        if self.id.0 & REQUEST_BIT == 0 {
            return (node, self);
        }
        self.id = self.id.base();
        (node.incoming(), self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Incarnation;
    use crate::ids::{ChunkKey, LayerId};
    use crate::placement::pg_of;

    #[test]
    fn an_answer_is_that_of_the_replica_that_was_asked() {
        let request = Request {
            id: RequestId(7),
            pg: PgId(3 << 32 | 5),
            ..Request::NOTHING
        };
        for node in [NodeId(4), NodeId(4).incoming()] {
            let sent = request.to_replica(node);
            assert_eq!(sent.pg.is_incoming(), node.is_incoming());
            assert_eq!(sent.pg.base(), request.pg);
            let reply = Reply {
                id: sent.id,
                incarnation: Incarnation(1),
                result: Ok(()),
            };
            let (from, reply) = reply.from_replica(node.base());
            assert_eq!((from, reply.id), (node, request.id));
        }
    }

    #[test]
    fn no_group_has_the_name_of_another_ones_incoming_replica() {
        let chunk = ChunkKey {
            layer: LayerId(u64::MAX),
            index: u32::MAX,
        };
        for groups in [1, 1024, 16_384] {
            let pg = pg_of(chunk, groups);
            assert!(!pg.is_incoming());
            assert_eq!(pg.incoming().base(), pg);
        }
    }
}
