//! Layers that nodes may read and change, by the metadata that a node has applied, and the check of a sender.
//! A sender's start is checked by its connection, and connections are simulated.

use std::collections::{BTreeSet, HashMap, HashSet};

use fabric_replication::fence::Grant;
use fabric_transport::members::{MemberView, Members, Reach};
use fabric_types::ids::{LayerId, PeerId};
use fabric_types::{Incarnation, NodeId, Refusal, Reply, Request};

use super::{Answer, Node, Outputs, Parcel};
use crate::mutation::Mutation;

/// The only start of every node in [`Members`].
const START: Incarnation = Incarnation(1);

/// Sender of a request: a node, by one of its connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sender {
    /// The node's id in the metadata.
    pub node: NodeId,
    /// The connection.
    pub peer: PeerId,
}

/// Layers, leases and openings in the metadata.
#[derive(Debug, Clone, Default)]
pub struct Records {
    /// Number of applied commands.
    pub applied: u64,
    /// Existing layers and their newest leases.
    pub layers: HashMap<LayerId, Grant>,
    /// Layers that are open to nodes that may not access all layers.
    pub open: HashMap<NodeId, HashSet<LayerId>>,
}

/// Applied metadata of a node.
#[derive(Debug, Default)]
pub struct Access {
    members: Members,
    applied: u64,
    layers: HashMap<LayerId, Grant>,
}

impl Access {
    /// Creates the table of a node that has applied nothing. `limited` nodes access open layers only,
    /// `others` everything.
    pub fn new(limited: &BTreeSet<NodeId>, others: &BTreeSet<NodeId>) -> Self {
        let view = |reach| {
            move |node: &NodeId| {
                let view = MemberView {
                    incarnation: START,
                    former: Vec::new(),
                    reach,
                };
                (*node, view)
            }
        };
        let limited = limited.iter().map(view(Reach::OpenLayers));
        let others = others.iter().map(view(Reach::All));
        let mut members = Members::default();
        members.set_nodes(limited.chain(others).collect());
        Self {
            members,
            ..Self::default()
        }
    }

    /// Returns the known layers with their leases.
    pub fn layers(&self) -> HashMap<LayerId, Grant> {
        self.layers.clone()
    }

    /// Forgets all leases: the metadata of a starting process may be far behind.
    pub fn forget_leases(&mut self) {
        self.layers
            .values_mut()
            .for_each(|grant| *grant = Grant::default());
    }
}

impl Node {
    /// Applies newer records.
    pub fn set_records(&mut self, records: &Records) {
        if records.applied < self.access.applied {
            return;
        }
        self.access.applied = records.applied;
        self.access.layers = records.layers.clone();
        self.access.members.set_open(records.open.clone());
        self.update_leases();
    }

    /// Applies the grant of this lease, and no newer one of the layer.
    pub fn learn_grant(&mut self, layer: LayerId, grant: Grant) {
        self.access.layers.insert(layer, grant);
        self.update_leases();
    }

    /// Returns the newest known lease of a layer.
    pub fn grant_of(&self, layer: LayerId) -> Grant {
        self.access.layers.get(&layer).copied().unwrap_or_default()
    }

    /// Returns true if replicas check the lease before they execute a request.
    pub(super) fn checks_lease(&self, node: NodeId, request: &Request) -> bool {
        let layer = request.command.layer();
        let granted = layer.map_or_else(Grant::default, |layer| self.grant_of(layer));
        self.mutation
            .is_none_or(|mutation| !mutation.skips_lease_check(node, request, granted))
    }

    /// Unless the process is yet to hear which layers exist.
    fn update_leases(&mut self) {
        if let Some(process) = self.process.as_ref().filter(|process| process.knows_layers) {
            process.fences.set_layers(self.access.layers());
        }
    }

    /// Refuses a request whose sender may not access its layer. Returns whether it did.
    pub(super) fn is_kept_out(
        &self,
        sender: Sender,
        parcel: &Parcel,
        outputs: &mut Outputs,
    ) -> bool {
        let Some(process) = &self.process else {
            return true;
        };
        let access = self.access.members.access(sender.node, START);
        let refusal = match access.check(&parcel.request) {
            Err(refusal) if self.mutation != Some(Mutation::SkipReachCheck) => refusal,
            _ => return false,
        };
        let reply = Reply {
            id: parcel.request.id,
            incarnation: process.incarnation,
            result: Err::<(), Refusal>(refusal),
        };
        outputs.answers.push(Answer::new(sender.peer, reply, None));
        true
    }
}
