//! By which ways a node's requests go to its peers: for people.

use std::collections::BTreeMap;
use std::sync::Mutex;

use fabric_types::NodeId;

/// How one node is reached.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerRoute {
    /// Connections with a queue pair beside them.
    pub rdma: usize,
    /// Connections without.
    pub tcp: usize,
    /// Why one of these has none.
    pub why_not: Option<String>,
}

/// How each data thread reaches each node; `Err` says why not by RDMA.
#[derive(Debug, Default)]
pub struct PeerRoutes(Mutex<BTreeMap<(NodeId, usize), Result<(), String>>>);

impl PeerRoutes {
    /// A data thread reaches a node so from now on; returns how it did before.
    pub(super) fn set(
        &self,
        lane: usize,
        node: NodeId,
        way: Result<(), String>,
    ) -> Option<Result<(), String>> {
        let mut peer_routes = self.0.lock().expect("no panic under this lock");
        peer_routes.insert((node, lane), way)
    }

    /// A data thread has lost its connection to a node; returns how it reached it.
    pub(super) fn forget(&self, lane: usize, node: NodeId) -> Option<Result<(), String>> {
        let mut peer_routes = self.0.lock().expect("no panic under this lock");
        peer_routes.remove(&(node, lane))
    }

    /// All nodes that are reached, and those that were if there can be no queue pairs.
    pub fn report(&self) -> Vec<(NodeId, PeerRoute)> {
        let peer_routes = self.0.lock().expect("no panic under this lock");
        let mut nodes: BTreeMap<NodeId, PeerRoute> = BTreeMap::new();
        for ((node, _), way) in peer_routes.iter() {
            let told = nodes.entry(*node).or_default();
            match way {
                Ok(()) => told.rdma += 1,
                Err(reason) => {
                    told.tcp += 1;
                    told.why_not = Some(reason.clone());
                }
            }
        }
        nodes.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_told_with_all_data_threads_and_a_reason() {
        let peer_routes = PeerRoutes::default();
        assert_eq!(peer_routes.set(0, NodeId(2), Ok(())), None);
        assert_eq!(peer_routes.set(1, NodeId(2), Ok(())), None);
        assert_eq!(peer_routes.set(0, NodeId(3), Ok(())), None);
        let before = peer_routes.set(1, NodeId(2), Err("torn".to_owned()));
        assert_eq!(before, Some(Ok(())));
        let told = peer_routes.report();
        let two = PeerRoute {
            rdma: 1,
            tcp: 1,
            why_not: Some("torn".to_owned()),
        };
        assert_eq!(told[0], (NodeId(2), two));
        assert_eq!((told[1].1.rdma, told[1].1.tcp), (1, 0));
    }
}
