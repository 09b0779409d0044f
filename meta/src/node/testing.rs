//! A node whose peers answer as a test says.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

use openraft::BasicNode;

use super::{Core, MetaConfig, MetaNode};
use crate::command::NodeSpec;
use crate::groups::{GroupCall, GroupReply};
use crate::ids::NodeId;
use crate::model::Role;
use crate::net::{
    AddressSource, BoxFuture, LeaderLocation, PeerReply, PeerRequest, Transport, TransportError,
};

/// Peers with the role `meta`.
pub(super) const META: NodeId = NodeId(2);
pub(super) const OTHER_META: NodeId = NodeId(3);
/// Peer with the role `host` alone.
pub(super) const HOST: NodeId = NodeId(7);

/// Answers of the peers, and what was done about them.
#[derive(Default)]
pub(super) struct Script {
    /// Leaders that they name. A peer that is not among these does not answer.
    pub(super) leaders: BTreeMap<NodeId, Option<LeaderLocation>>,
    /// Peers that say that the node was removed.
    pub(super) turns_away: BTreeSet<NodeId>,
    /// Nodes that were called.
    pub(super) called: Vec<NodeId>,
    /// Nodes of which something is kept.
    pub(super) kept: BTreeSet<NodeId>,
}

#[derive(Default)]
pub(super) struct ScriptedPeers(Mutex<Script>);

impl ScriptedPeers {
    pub(super) fn lock(&self) -> MutexGuard<'_, Script> {
        self.0.lock().unwrap()
    }
}

impl Transport for ScriptedPeers {
    fn call<'a>(
        &'a self,
        target: NodeId,
        _: &'a BasicNode,
        request: PeerRequest,
    ) -> BoxFuture<'a, Result<PeerReply, TransportError>> {
        let mut script = self.lock();
        script.called.push(target);
        script.kept.insert(target);
        let answer = match (request, script.leaders.get(&target)) {
            _ if script.turns_away.contains(&target) => Err(TransportError::Removed { target }),
            (PeerRequest::FindLeader, Some(leader)) => Ok(PeerReply::Leader(leader.clone())),
            _ => Err(TransportError::Gone { target }),
        };
        Box::pin(async move { answer })
    }

    fn call_group<'a>(
        &'a self,
        target: NodeId,
        _: &'a BasicNode,
        _: GroupCall,
    ) -> BoxFuture<'a, Result<GroupReply, TransportError>> {
        Box::pin(async move { Err(TransportError::Gone { target }) })
    }

    fn forget(&self, node: NodeId) {
        self.lock().kept.remove(&node);
    }

    fn learn(&self, node: NodeId, _: &str, _: AddressSource) {
        self.lock().kept.insert(node);
    }
}

/// A node that leads alone, and has [`META`], [`OTHER_META`] and [`HOST`] in its map.
pub(super) struct ScriptedNode {
    pub(super) core: Arc<Core>,
    pub(super) script: Arc<ScriptedPeers>,
    node: MetaNode,
    _dir: tempfile::TempDir,
}

impl ScriptedNode {
    pub(super) async fn open() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let script = Arc::<ScriptedPeers>::default();
        let transport: Arc<dyn Transport> = script.clone();
        let config = MetaConfig {
            transport,
            ..MetaConfig::embedded("test")
        };
        let node = MetaNode::open(dir.path(), config).await.unwrap();
        let roles = [
            (META, Role::Meta),
            (OTHER_META, Role::Meta),
            (HOST, Role::Host),
        ];
        for (id, role) in roles {
            let spec = NodeSpec {
                roles: [role].into(),
                ..NodeSpec::new(id, format!("node{id}"))
            };
            node.meta().register_node(spec).await.unwrap();
        }
        Self {
            core: Arc::clone(&node.core),
            script,
            node,
            _dir: dir,
        }
    }

    pub(super) async fn end(self) {
        let Self { core, node, .. } = self;
        // The database is closed with the last of them.
        drop(core);
        node.shutdown().await.unwrap();
    }
}
