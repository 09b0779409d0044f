//! Admission of nodes and the layers that a peer may access: the cluster map's records of nodes, and the
//! layers that leases and attachments open to nodes that may not access all layers.
//!
//! This node's map may be behind that of a peer. A peer that it does not know, or a start of it, is not
//! refused at once: the answer waits for a newer map. A layer that is not open yet is answered as whatever
//! comes before its map is, and asked for again.
//!
//! An open layer may be read. A change also needs the layer's lease, which the replica checks for every peer
//! (`fabric_replication::fence`).

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use fabric_types::ids::LayerId;
use fabric_types::{Incarnation, NodeId, Refusal, Request};

use super::hello::Refused;

/// What the cluster map says of a node.
#[derive(Debug, Clone)]
pub struct MemberView {
    /// The start of it that registered last.
    pub incarnation: Incarnation,
    /// Starts before that one, as far as they are known.
    pub former: Vec<Incarnation>,
    /// What it may reach.
    pub reach: Reach,
}

/// What a node may reach on another one's devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// All layers: it stores data, and brings replicas up to date.
    All,
    /// Layers of volumes that its leases and attachments are of.
    OpenLayers,
}

/// Whether a peer is let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// It is.
    Welcome,
    /// Not by this map. A newer one may know it.
    NotYet,
    /// It is not, whatever comes.
    Refused(Refused),
}

/// The nodes of the cluster, as far as this one knows.
#[derive(Debug, Default)]
pub struct Members {
    nodes: HashMap<NodeId, MemberView>,
    open: HashMap<NodeId, Arc<HashSet<LayerId>>>,
}

impl Members {
    /// Goes by these nodes.
    pub fn set_nodes(&mut self, nodes: HashMap<NodeId, MemberView>) {
        self.nodes = nodes;
    }

    /// These layers are open, to nodes that reach no others.
    pub fn set_open(&mut self, open: HashMap<NodeId, HashSet<LayerId>>) {
        let shared = |(node, layers)| (node, Arc::new(layers));
        self.open = open.into_iter().map(shared).collect();
    }

    /// Whether a node is one of the cluster.
    pub fn has(&self, node: NodeId) -> bool {
        self.nodes.contains_key(&node)
    }

    /// Whether this start of a node is let in.
    pub fn admit(&self, node: NodeId, incarnation: Incarnation) -> Admission {
        match self.nodes.get(&node) {
            Some(known) if known.incarnation == incarnation => Admission::Welcome,
            Some(known) if known.former.contains(&incarnation) => {
                Admission::Refused(Refused::FormerStart)
            }
            Some(_) | None => Admission::NotYet,
        }
    }

    /// Returns what this start of a node may access. Every start but the admitted one may access nothing.
    pub fn access(&self, node: NodeId, incarnation: Incarnation) -> Access {
        let known = self.nodes.get(&node);
        let current = known.filter(|known| known.incarnation == incarnation);
        match current.map(|known| known.reach) {
            Some(Reach::All) => Access::All,
            Some(Reach::OpenLayers) => {
                Access::Layers(self.open.get(&node).cloned().unwrap_or_default())
            }
            None => Access::Layers(Arc::default()),
        }
    }
}

/// What requests of a peer may touch.
#[derive(Debug, Clone)]
pub enum Access {
    /// Everything.
    All,
    /// These layers.
    Layers(Arc<HashSet<LayerId>>),
}

impl Access {
    /// Whether a request may be executed.
    ///
    /// A layer that is not open is answered by [`Refusal::Behind`]: the peer may have been granted its lease
    /// by a change that this node has not applied yet, and repeats the request. A peer that lost its lease
    /// learns that from meta. An open layer may be read; the replica checks changes again.
    #[inline]
    pub fn check(&self, request: &Request) -> Result<(), Refusal> {
        let Self::Layers(layers) = self else {
            return Ok(());
        };
        match request.command.layer() {
            Some(layer) if layers.contains(&layer) => Ok(()),
            Some(_) => Err(Refusal::Behind(request.epoch)),
            // What replicas ask each other, of all layers of a placement group. No client does.
            None => Err(Refusal::Invalid),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fabric_types::ids::ChunkKey;
    use fabric_types::iov::IoVecs;
    use fabric_types::{Command, Epoch};

    const HOST: NodeId = NodeId(1);
    const STORAGE: NodeId = NodeId(2);
    const OPEN: LayerId = LayerId(5);
    const CLOSED: LayerId = LayerId(6);

    fn members() -> Members {
        let view = |incarnation, reach| MemberView {
            incarnation: Incarnation(incarnation),
            former: vec![Incarnation(incarnation - 1)],
            reach,
        };
        let mut members = Members::default();
        members.set_nodes(HashMap::from([
            (HOST, view(10, Reach::OpenLayers)),
            (STORAGE, view(20, Reach::All)),
        ]));
        members.set_open(HashMap::from([(HOST, HashSet::from([OPEN]))]));
        members
    }

    #[test]
    fn the_registered_start_of_a_node_is_let_in() {
        let mut members = members();
        let admit = |members: &Members, start| members.admit(HOST, Incarnation(start));
        assert_eq!(admit(&members, 10), Admission::Welcome);
        assert_eq!(admit(&members, 9), Admission::Refused(Refused::FormerStart));
        assert_eq!(
            admit(&members, 11),
            Admission::NotYet,
            "a newer map may come"
        );
        let stranger = members.admit(NodeId(3), Incarnation(30));
        assert_eq!(stranger, Admission::NotYet);
        assert!(members.has(HOST) && !members.has(NodeId(3)));
        members.set_nodes(HashMap::new());
        assert_eq!(admit(&members, 10), Admission::NotYet, "it was removed");
        assert!(!members.has(HOST));
    }

    #[test]
    fn a_host_reaches_the_layers_that_are_open_to_it() {
        let members = members();
        let chunk = |layer| ChunkKey { layer, index: 0 };
        let (buffers, len) = (
            IoVecs {
                ptr: std::ptr::null(),
                len: 0,
            },
            0,
        );
        let commands = |layer: LayerId| {
            let (chunk, offset) = (chunk(layer), 0);
            let fua = false;
            [
                Command::Read {
                    chunk,
                    offset,
                    buffers,
                    len,
                },
                Command::Write {
                    chunk,
                    offset,
                    buffers,
                    len,
                    fua,
                    urgent: false,
                },
                Command::Zero {
                    chunk,
                    offset,
                    len,
                    fua,
                },
                Command::Flush { layer },
                Command::Fence {
                    layer,
                    buffers,
                    len,
                },
                Command::TellFence {
                    layer,
                    buffers,
                    len,
                },
            ]
        };
        let request = |command| Request {
            command,
            epoch: Epoch(7),
            ..Request::NOTHING
        };
        let check = |node: NodeId, command| {
            let start = Incarnation(node.0 * 10);
            members.access(node, start).check(&request(command))
        };
        for command in commands(OPEN) {
            assert_eq!(check(HOST, command), Ok(()), "{command:?}");
        }
        for command in commands(CLOSED) {
            let behind = Err(Refusal::Behind(Epoch(7)));
            assert_eq!(check(HOST, command), behind, "{command:?}");
            assert_eq!(check(STORAGE, command), Ok(()), "{command:?}");
            assert_eq!(check(NodeId(3), command), behind, "{command:?}");
        }
        let cursor = 0;
        let among_replicas = [
            Command::Join,
            Command::ListChunks {
                cursor,
                buffers,
                len,
            },
        ];
        for command in among_replicas {
            assert_eq!(check(HOST, command), Err(Refusal::Invalid));
            assert_eq!(check(STORAGE, command), Ok(()));
        }
    }

    #[test]
    fn what_closes_is_closed_and_what_opens_is_open() {
        let mut members = members();
        members.set_open(HashMap::from([(HOST, HashSet::from([CLOSED]))]));
        let flush = |layer| Request {
            command: Command::Flush { layer },
            ..Request::NOTHING
        };
        let access = members.access(HOST, Incarnation(10));
        assert!(access.check(&flush(OPEN)).is_err());
        assert_eq!(access.check(&flush(CLOSED)), Ok(()));
    }

    /// Its connection may still be open for a moment.
    #[test]
    fn a_former_start_of_a_node_reaches_nothing() {
        let members = members();
        let flush = Request {
            command: Command::Flush { layer: OPEN },
            ..Request::NOTHING
        };
        for (node, now) in [(HOST, 10), (STORAGE, 20)] {
            let check = |start| members.access(node, Incarnation(start)).check(&flush);
            assert_eq!(check(now), Ok(()));
            assert!(check(now - 1).is_err() && check(now + 1).is_err());
        }
    }
}
