//! Which sessions are over, by what the cluster map says of their nodes.
//!
//! A session ends when its host cannot serve guests any more. That is certain
//! - once another start of its node has registered: the former one's connections end then, and it is refused;
//! - once its node has been down, or gone from the map, for longer than a heartbeat lease lasts: from the end
//!   of that the node serves nothing by itself.
//!
//! The rule is that of volumes' leases (`leases.rs`): the holder counts from before it asks, who waits counts
//! from after it knows, and longer by the drift bound. A node is said to be down after its last heartbeat was
//! heard, so the time from that word on is longer than what was left of its lease.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use namespace::Session;

use crate::ids::NodeId;
use crate::leases::wait_for_end;
use crate::map::ClusterMap;
use crate::model::{Node, NodeState};
use crate::watch::HEARTBEAT_LEASE;

/// How long a node that is down may still serve guests.
fn silence_max() -> Duration {
    wait_for_end(HEARTBEAT_LEASE)
}

/// Nodes that are down or gone, and since when this leader knows. One that is new knows of none, and gives
/// each its full time.
#[derive(Default)]
pub(super) struct SilentNodes(BTreeMap<NodeId, Silence>);

struct Silence {
    /// The node's record, none if it was removed. A record that was written anew is another one in memory:
    /// the node may have been up in between, and its time begins anew.
    record: Option<Arc<Node>>,
    since: Instant,
}

impl SilentNodes {
    /// Whether a session is over. The map must be as new as the session, else its start may be one that has
    /// not come here yet.
    pub(super) fn is_over(&mut self, session: &Session, map: &ClusterMap, now: Instant) -> bool {
        let id = NodeId(session.node);
        let record = map.node_record(id);
        let start = record.map(|node| u128::from(node.incarnation.0));
        if start.is_some_and(|start| start != session.incarnation) {
            return true;
        }
        if record.is_some_and(|node| node.state == NodeState::Up) {
            self.0.remove(&id);
            return false;
        }
        let silence = self.0.entry(id).or_insert_with(|| Silence {
            record: record.cloned(),
            since: now,
        });
        let is_same = match (&silence.record, record) {
            (Some(known), Some(record)) => Arc::ptr_eq(known, record),
            (None, None) => true,
            _ => false,
        };
        if !is_same {
            let record = record.cloned();
            *silence = Silence { record, since: now };
        }
        now.saturating_duration_since(silence.since) >= silence_max()
    }
}

#[cfg(test)]
mod tests {
    use namespace::Time;
    use uuid::Uuid;

    use super::*;
    use crate::command::{Command, NodeSpec};
    use crate::ids::{Incarnation, UnixMillis};
    use crate::testing::Machine;

    const AT: UnixMillis = UnixMillis(0);
    const HOST: NodeId = NodeId(2);

    fn register(machine: &mut Machine, start: u64) {
        let known = machine.map().node(HOST).map(|node| node.incarnation);
        let register = Command::RegisterNode {
            node: NodeSpec {
                incarnation: Incarnation(start),
                ..NodeSpec::new(HOST, "host")
            },
            replaces: known.unwrap_or_default(),
            at: AT,
        };
        machine.apply(&register).unwrap();
    }

    fn set_state(machine: &mut Machine, state: NodeState) {
        let incarnation = machine.map().node(HOST).unwrap().incarnation;
        let say = Command::SetNodeState {
            node: HOST,
            incarnation,
            state,
            at: AT,
        };
        machine.apply(&say).unwrap();
    }

    /// Two nodes, of which the second has started for the seventh time.
    fn cluster() -> Machine {
        let mut machine = Machine::default();
        let bootstrap = Command::Bootstrap {
            cluster: Uuid::from_u128(1),
            node: NodeSpec::new(NodeId(1), "meta"),
            pool: None,
            at: AT,
        };
        machine.apply(&bootstrap).unwrap();
        register(&mut machine, 7);
        machine
    }

    fn session(start: u128) -> Session {
        Session {
            node: HOST.0,
            incarnation: start,
            opened_at: Time::default(),
            ending: false,
            open_segments: Vec::new(),
        }
    }

    #[test]
    fn a_session_is_over_when_its_node_has_started_again() {
        let (mut machine, mut silent) = (cluster(), SilentNodes::default());
        let now = Instant::now();
        assert!(!silent.is_over(&session(7), &machine.map(), now));
        assert!(silent.is_over(&session(6), &machine.map(), now));
        register(&mut machine, 8);
        assert!(silent.is_over(&session(7), &machine.map(), now));
    }

    #[test]
    fn a_session_outlives_its_nodes_silence_as_long_as_that_may_serve() {
        let (mut machine, mut silent) = (cluster(), SilentNodes::default());
        let start = Instant::now();
        set_state(&mut machine, NodeState::Down);
        let mut over = |machine: &Machine, after: Duration| {
            silent.is_over(&session(7), &machine.map(), start + after)
        };
        assert!(!over(&machine, Duration::ZERO));
        assert!(!over(&machine, HEARTBEAT_LEASE));
        // It is heard again, and falls silent anew before anybody looks.
        set_state(&mut machine, NodeState::Up);
        set_state(&mut machine, NodeState::Down);
        let longest = silence_max();
        assert!(!over(&machine, longest));
        assert!(!over(&machine, longest * 2 - Duration::from_millis(1)));
        set_state(&mut machine, NodeState::Up);
        assert!(!over(&machine, longest * 2));
        set_state(&mut machine, NodeState::Down);
        assert!(!over(&machine, longest * 3));
        assert!(over(&machine, longest * 4));
    }

    #[test]
    fn a_removed_nodes_session_is_over_once_it_has_noticed() {
        let (mut machine, mut silent) = (cluster(), SilentNodes::default());
        let now = Instant::now();
        let remove = Command::RemoveNode { node: HOST, at: AT };
        machine.apply(&remove).unwrap();
        assert!(!silent.is_over(&session(7), &machine.map(), now));
        assert!(silent.is_over(&session(7), &machine.map(), now + silence_max()));
    }
}
