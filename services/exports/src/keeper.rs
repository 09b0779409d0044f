//! Looks again and again: takes exports over, has each export take its next step, and renews addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::failure::Result;
use meta::{AdminState, LEASE_DURATION, NODE_DOWN_AFTER, NodeId, NodeState, Role};
use nfs::placement::{NfsNode, successor};
use nfs::wire::Question;
use service::failures::meta_failure;

use crate::exports::Exports;

/// Pause between two looks.
const PAUSE: Duration = Duration::from_secs(1);
/// Addresses are renewed this often: a few times in a lease.
const RENEW_PAUSE: Duration = Duration::from_secs(2);
/// An NFS node that has been down for this long has lost its leases, or is about to. One that is only started
/// anew keeps its exports.
const TAKE_OVER_AFTER: Duration = LEASE_DURATION.saturating_sub(NODE_DOWN_AFTER);

/// Looks for as long as exports are served.
pub fn keep(exports: &Arc<Exports>) {
    let weak = Arc::downgrade(exports);
    tokio::spawn(async move {
        let mut down = DownSince::default();
        let mut told = false;
        while let Some(exports) = weak.upgrade() {
            match exports.look_after_exports(&mut down).await {
                Ok(()) => told = false,
                // Logged once: it is looked again.
                Err(failure) if !told => {
                    told = true;
                    tracing::warn!(%failure, "look after NFS exports");
                }
                Err(_) => {}
            }
            drop(exports);
            tokio::time::sleep(PAUSE).await;
        }
    });
    let weak = Arc::downgrade(exports);
    tokio::spawn(async move {
        while let Some(exports) = weak.upgrade() {
            exports.renew_addresses().await;
            drop(exports);
            tokio::time::sleep(RENEW_PAUSE).await;
        }
    });
}

/// Since when this node sees others down.
#[derive(Debug, Default)]
struct DownSince(BTreeMap<NodeId, Instant>);

impl DownSince {
    fn note(&mut self, map: &meta::ClusterMap, now: Instant) {
        let is_down = |id: NodeId| {
            map.node(id)
                .is_some_and(|node| node.state == NodeState::Down)
        };
        self.0.retain(|id, _| is_down(*id));
        for node in map.nodes().filter(|node| node.state == NodeState::Down) {
            self.0.entry(node.id).or_insert(now);
        }
    }

    /// Whether an export may be taken from a node by now.
    fn is_due(&self, id: NodeId, now: Instant) -> bool {
        let since = self.0.get(&id);
        since.is_none_or(|since| now.saturating_duration_since(*since) >= TAKE_OVER_AFTER)
    }
}

impl Exports {
    async fn look_after_exports(self: &Arc<Self>, down: &mut DownSince) -> Result<()> {
        let exports = self
            .cluster
            .meta
            .applied()
            .exports()
            .map_err(meta_failure)?;
        let map = self.cluster.meta.map();
        down.note(&map, Instant::now());
        // First what this node has: to take over waits for the leader of the metadata.
        self.advance_exports(&exports).await;
        self.take_exports_over(&exports, &map, down).await
    }

    async fn advance_exports(self: &Arc<Self>, exports: &[meta::Export]) {
        let own = self.cluster.node_id();
        let assigned = exports.iter().filter(|export| export.node == own);
        let known: BTreeSet<String> = self.progress().keys().cloned().collect();
        if assigned.count() == 0 && known.is_empty() && !self.may_have_exports() {
            // The helper is not even started on a node that never had an export.
            return;
        }
        let state = self.ask(|client| client.look()).await;
        let seen = match &state {
            Ok(state) => state
                .exports
                .iter()
                .map(|one| one.plan.name.clone())
                .collect(),
            Err(_) => BTreeSet::new(),
        };
        let ours = exports.iter().filter(|export| export.node == own);
        let names: BTreeSet<String> = ours
            .map(|export| export.name.to_string())
            .chain(seen)
            .chain(known)
            .collect();
        for name in names {
            self.advance_in_background(name);
        }
    }

    /// Whether this machine may have exports of an earlier process: asked of the helper's files, without
    /// starting it.
    fn may_have_exports(&self) -> bool {
        std::path::Path::new(nfs::helper::DIR).exists()
    }

    async fn take_exports_over(
        &self,
        exports: &[meta::Export],
        map: &meta::ClusterMap,
        down: &DownSince,
    ) -> Result<()> {
        let node = |node: &meta::Node| NfsNode {
            id: node.id.0,
            has_role: node.roles.contains(&Role::Nfs),
            is_up: node.state == NodeState::Up,
            is_draining: node.admin_state == AdminState::Draining,
        };
        let nodes: Vec<NfsNode> = map.nodes().map(node).collect();
        let (own, now) = (self.cluster.node_id(), Instant::now());
        for export in exports {
            let holder = export.node;
            if successor(&nodes, holder.0) != Some(own.0) || !down.is_due(holder, now) {
                continue;
            }
            tracing::warn!(export = %export.name, from = %holder, "take an NFS export over");
            let assigned = self
                .cluster
                .asked
                .assign_export(&export.name, (holder, own), false);
            assigned.await.map_err(meta_failure)?;
        }
        Ok(())
    }

    /// An export that takes long keeps no other waiting.
    fn advance_in_background(self: &Arc<Self>, name: String) {
        let mut all = self.progress();
        let progress = all.entry(name.clone()).or_default();
        if std::mem::replace(&mut progress.is_busy, true) {
            return;
        }
        drop(all);
        let exports = Arc::clone(self);
        tokio::spawn(async move { exports.advance(&name).await });
    }

    /// Keeps addresses for as long as leases last.
    async fn renew_addresses(&self) {
        let addresses = self.addresses.lock().await;
        for (name, volume) in &*addresses {
            let Some(valid_s) = self.address_valid_s(*volume) else {
                // The kernel removes it; a step notices.
                continue;
            };
            let question = Question::SetAddress {
                name: name.clone(),
                valid_s,
            };
            if let Err(failure) = self.carry_out(question).await {
                tracing::warn!(export = name, %failure, "renew an address");
            }
        }
    }

    /// Whole seconds for which an address may be here; none if that is less than one.
    pub(crate) fn address_valid_s(&self, volume: meta::VolumeId) -> Option<u32> {
        let until = self.volumes.lease_valid_until(volume)?;
        let left = until.saturating_duration_since(Instant::now());
        u32::try_from(left.as_secs())
            .ok()
            .filter(|seconds| *seconds > 0)
    }
}

#[cfg(test)]
mod tests {
    use meta::testing::Machine;
    use meta::{Command, Incarnation, NodeSpec, UnixMillis};

    use super::*;

    const AT: UnixMillis = UnixMillis(1);

    #[test]
    fn an_nfs_node_that_is_only_started_anew_keeps_its_exports() {
        let (mut machine, mut down, begin) =
            (Machine::default(), DownSince::default(), Instant::now());
        let bootstrap = Command::Bootstrap {
            cluster: uuid::Uuid::from_u128(1),
            node: NodeSpec::new(NodeId(1), "one"),
            pool: None,
            at: AT,
        };
        machine.apply(&bootstrap).unwrap();
        let mut set = |state, down: &mut DownSince, now| {
            let (node, incarnation) = (NodeId(1), Incarnation::default());
            let command = Command::SetNodeState {
                node,
                incarnation,
                state,
                at: AT,
            };
            machine.apply(&command).unwrap();
            down.note(&machine.map(), now);
        };
        set(NodeState::Down, &mut down, begin);
        assert!(!down.is_due(NodeId(1), begin));
        let late = begin + TAKE_OVER_AFTER;
        assert!(down.is_due(NodeId(1), late));
        // Back, and down again: counted anew.
        set(NodeState::Up, &mut down, late);
        set(NodeState::Down, &mut down, late);
        assert!(!down.is_due(NodeId(1), late));
        assert!(
            down.is_due(NodeId(2), begin),
            "of one that is no node there is nothing to wait for"
        );
    }
}
