//! A network inside one process: what several nodes in one test talk over.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use openraft::BasicNode;

use super::frame::transcode;
use super::{BoxFuture, PeerReply, PeerRequest, Transport, TransportError};
use crate::groups::{GroupCall, GroupReply};
use crate::ids::NodeId;
use crate::node::Peer;

#[derive(Default)]
struct Shared {
    peers: BTreeMap<NodeId, Peer>,
    cut_off: BTreeSet<NodeId>,
    unheard: BTreeSet<NodeId>,
}

/// Connects the nodes of one process. Clones are the same network. Each message is serialised on its way, so
/// that what works here works over a wire.
#[derive(Clone, Default)]
pub struct MemNetwork {
    shared: Arc<Mutex<Shared>>,
}

impl MemNetwork {
    /// Makes a node reachable.
    pub fn connect(&self, id: NodeId, peer: Peer) {
        self.lock().peers.insert(id, peer);
    }

    /// Forgets a node that has stopped.
    pub fn disconnect(&self, id: NodeId) {
        self.lock().peers.remove(&id);
    }

    /// Cuts a node off from all others, or joins it again.
    pub fn set_cut_off(&self, id: NodeId, cut_off: bool) {
        let mut shared = self.lock();
        if cut_off {
            shared.cut_off.insert(id);
        } else {
            shared.cut_off.remove(&id);
        }
    }

    /// Drops all that others send to a node, whose own requests are answered; or ends that.
    pub fn set_unheard(&self, id: NodeId, unheard: bool) {
        let mut shared = self.lock();
        match unheard {
            true => shared.unheard.insert(id),
            false => shared.unheard.remove(&id),
        };
    }

    /// The transport of one node on this network.
    #[must_use]
    pub fn transport_of(&self, id: NodeId) -> Arc<dyn Transport> {
        Arc::new(Port {
            network: self.clone(),
            from: id,
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Shared> {
        // The maps are whole after every statement, so a panic elsewhere leaves nothing half done.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reach(&self, from: NodeId, target: NodeId) -> Result<Peer, TransportError> {
        let shared = self.lock();
        let cut_off = shared.cut_off.contains(&from) || shared.cut_off.contains(&target);
        let cut_off = cut_off || shared.unheard.contains(&target);
        let peer = shared.peers.get(&target).filter(|_| !cut_off);
        let unreachable = || TransportError::Unreachable {
            target,
            detail: "it is not on this network".to_owned(),
        };
        peer.cloned().ok_or_else(unreachable)
    }
}

struct Port {
    network: MemNetwork,
    from: NodeId,
}

impl Port {
    /// The peer that is called, if it is reached and hears this node.
    fn peer(&self, target: NodeId) -> Result<Peer, TransportError> {
        let peer = self.network.reach(self.from, target)?;
        match peer.is_removed(self.from) {
            true => Err(TransportError::Removed { target }),
            false => Ok(peer),
        }
    }

    /// A node that was cut off meanwhile does not get the reply.
    fn check_reply(&self, target: NodeId) -> Result<(), TransportError> {
        let reached = self.network.reach(self.from, target);
        reached.map(drop).map_err(|error| lost(target, &error))
    }
}

fn lost(target: NodeId, error: &dyn std::fmt::Display) -> TransportError {
    let detail = error.to_string();
    TransportError::Lost { target, detail }
}

impl Transport for Port {
    fn call<'a>(
        &'a self,
        target: NodeId,
        _: &'a BasicNode,
        request: PeerRequest,
    ) -> BoxFuture<'a, Result<PeerReply, TransportError>> {
        Box::pin(async move {
            let failed = |error: io::Error| lost(target, &error);
            let peer = self.peer(target)?;
            let request = transcode(&request).map_err(failed)?;
            let checked = peer.check_request(self.from, &request);
            checked.map_err(|detail| lost(target, &detail))?;
            let reply = peer.handle_from(self.from, request).await;
            self.check_reply(target)?;
            transcode(&reply).map_err(failed)
        })
    }

    fn call_group<'a>(
        &'a self,
        target: NodeId,
        _: &'a BasicNode,
        call: GroupCall,
    ) -> BoxFuture<'a, Result<GroupReply, TransportError>> {
        Box::pin(async move {
            let failed = |error: io::Error| lost(target, &error);
            let peer = self.peer(target)?;
            let call = transcode(&call).map_err(failed)?;
            let checked = peer.check_group_call(self.from, &call);
            checked.map_err(|detail| lost(target, &detail))?;
            let reply = peer.handle_group_from(self.from, call).await;
            self.check_reply(target)?;
            transcode(&reply).map_err(failed)
        })
    }
}
