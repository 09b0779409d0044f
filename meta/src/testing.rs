//! For simulators: the state machine that ships, with its records in a map in memory. No Raft, no disk, no
//! clock.
//!
//! A simulated metadata service is this, [`Watch`](crate::Watch) and a queue of commands:
//!
//! ```
//! use std::time::Duration;
//! use meta::testing::Machine;
//! use meta::{Command, NodeId, NodeSpec, UnixMillis, Watch};
//!
//! let mut machine = Machine::default();
//! let cluster = uuid::Uuid::from_u128(1);
//! let node = NodeSpec::new(NodeId(1), "one");
//! machine.apply(&Command::Bootstrap { cluster, node, pool: None, at: UnixMillis(0) }).unwrap();
//!
//! let (mut watch, mut now) = (Watch::default(), Duration::ZERO);
//! watch.lead(now);
//! now += Duration::from_secs(60);
//! // Nobody sent a heartbeat: the node is found to be down.
//! for command in watch.plan(&machine.map(), now, UnixMillis(60_000)) {
//!     machine.apply(&command).unwrap();
//! }
//! assert_eq!(machine.map().node(NodeId(1)).unwrap().state, meta::NodeState::Down);
//! ```
//!
//! What production adds around it: commands of others reach the leader, which fills in
//! [`Heard`](crate::Heard) of [`Command::ReportFailed`] (what
//! [`Watch::heard_since`](crate::Watch::heard_since) says of the moment the report came in, asked again until
//! a member in sync is among them or time is over) and judges leases; a leader that was deposed plans
//! nothing; a node counts [`HEARTBEAT_LEASE`](crate::HEARTBEAT_LEASE) from when it sent the heartbeat that
//! was answered. A model of leader change calls [`Watch::lead`](crate::Watch::lead) on a fresh watch.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::command::{Command, Reply};
use crate::ids::NodeId;
use crate::layers::{LayerWrites, Layers};
pub use crate::leases::LeaseWatch;
use crate::map::ClusterMap;
use crate::model::Event;
use crate::openings::{self, OpenLayers};
use crate::state::tables::EVENTS;
use crate::state::{self, Txn};

/// The records, and the map made of them.
#[derive(Debug, Clone, Default)]
pub struct Machine {
    records: BTreeMap<Vec<u8>, Vec<u8>>,
    map: Arc<ClusterMap>,
    layers: Layers,
}

impl Machine {
    /// Applies one command, as every node does once it is committed.
    ///
    /// # Errors
    /// The command is refused, and nothing changed.
    ///
    /// # Panics
    /// If the records cannot be read, which they always can.
    pub fn apply(&mut self, command: &Command) -> Reply {
        let (reply, writes) = {
            let mut txn = Txn::over(&self.records);
            let reply = state::apply(&mut txn, command).expect("records in memory can be read");
            (reply, txn.into_writes())
        };
        let changed = self.map.with(&writes);
        if let Some(map) = changed.expect("records in memory can be read") {
            self.map = Arc::new(map);
        }
        let changed = LayerWrites::of(&writes).expect("records in memory can be read");
        self.layers.apply(&changed);
        for (key, value) in writes {
            match value {
                Some(value) => self.records.insert(key, value),
                None => self.records.remove(&key),
            };
        }
        reply
    }

    /// The cluster map as it is now.
    #[must_use]
    pub fn map(&self) -> Arc<ClusterMap> {
        Arc::clone(&self.map)
    }

    /// The layers of all volumes.
    #[must_use]
    pub fn layers(&self) -> &Layers {
        &self.layers
    }

    /// Returns the layers that leases and attachments open to these nodes.
    ///
    /// # Panics
    /// If the records cannot be read. Records in memory always can.
    #[must_use]
    pub fn open_layers(&self, nodes: &BTreeSet<NodeId>) -> OpenLayers {
        let open = openings::open_layers(&self.records, nodes);
        open.expect("records in memory can be read")
    }

    /// What happened, oldest first.
    ///
    /// # Panics
    /// If the records cannot be read, which they always can.
    #[must_use]
    pub fn events(&self) -> Vec<Event> {
        let events = EVENTS.all(&self.records);
        events.expect("records in memory can be read")
    }

    /// The layers read from the records anew: the same, unless something is wrong.
    #[cfg(test)]
    pub(crate) fn reloaded_layers(&self) -> Layers {
        Layers::load(&self.records).unwrap()
    }

    /// The map likewise.
    #[cfg(test)]
    pub(crate) fn reloaded(&self) -> ClusterMap {
        ClusterMap::load(&self.records).unwrap()
    }
}
