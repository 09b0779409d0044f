//! What keeps the messages of leaders and candidates from leaving a node.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::TransportError;
use crate::ids::NodeId;

/// Stands between Raft and the transport, in all groups of a node. Clones are the same gate.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gate(Arc<AtomicBool>);

impl Gate {
    pub(crate) fn is_shut(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn set_shut(&self, shut: bool) {
        self.0.store(shut, Ordering::Relaxed);
    }

    /// Refuses a message while the gate is shut.
    pub(crate) fn check(&self, target: NodeId) -> Result<(), TransportError> {
        match self.is_shut() {
            true => Err(TransportError::Unreachable {
                target,
                detail: "this node has withdrawn, for it does not hear others".to_owned(),
            }),
            false => Ok(()),
        }
    }
}
