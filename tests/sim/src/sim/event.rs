//! What may happen in a run.

use std::sync::Arc;

use fabric_store::testing::sim_disk::IoKey;
use fabric_types::membership::ReplicaSet;
use fabric_types::{Epoch, Generation, Incarnation, Reply};

use super::control::{LeaseSeeker, MetaMessage};
use super::faults::Fault;
use super::lease_time::Renewal;
use super::leases::Lease;
use crate::node::{Answer, DeviceAt, NodeMap, Parcel, Records};
use crate::pace::Upkeep;

/// What may happen.
#[derive(Debug)]
pub(crate) enum Event {
    /// A guest's turn.
    Guest(usize),
    /// A request's data leave the guest's memory.
    Pickup { conn: usize, id: u64 },
    /// A request arrives.
    Request { conn: usize, parcel: Parcel },
    /// An answer arrives.
    Answer { answer: Answer },
    /// A disk request ends.
    Disk {
        at: DeviceAt,
        incarnation: Incarnation,
        key: IoKey,
    },
    /// Has this connection been silent for too long?
    Watch { conn: usize },
    /// A data thread tries to connect.
    Connect {
        host: usize,
        life: u64,
        lane: usize,
        node: usize,
    },
    /// An idle node looks at its store.
    Idle(usize),
    /// A node's maintenance does something of its own accord.
    Upkeep(usize, Upkeep),
    /// A node looks at its rounds of comparison.
    RoundTick(usize),
    /// A node tells meta that it lives.
    HeartbeatReply(usize),
    /// Meta's planner.
    Plan,
    /// Something arrives at meta.
    MetaMessage(MetaMessage),
    /// Raft has committed a command; a host may wait for what it says. How often leaders had been lost then.
    Commit(Box<meta::Command>, Option<(LeaseSeeker, u32)>),
    /// Reports are judged without a witness.
    JudgeReports,
    /// A node's share is given to others.
    Replace(usize),
    /// A map arrives at a host.
    Map {
        host: usize,
        life: u64,
        epoch: Epoch,
        sets: Vec<ReplicaSet>,
        leases: Vec<Lease>,
    },
    /// A host hears that it has a lease.
    Granted {
        seeker: LeaseSeeker,
        generation: Generation,
        epoch: Epoch,
    },
    /// A host renews what it holds.
    RenewLeases(usize),
    /// It hears that it did.
    Renewed(Renewal),
    /// It hears that the lease is not the newest.
    RenewalRefused(Renewal),
    /// Records of layers and leases arrive at a node.
    Records { node: usize, records: Arc<Records> },
    /// A hostile host sends requests.
    Visit,
    /// A guest that waits for the lease looks after it.
    AskLease(usize),
    /// A takeover, of a volume by a host, looks at what waits for a moment.
    LeaseRecoveryTick { by: (usize, usize), number: u64 },
    /// A map arrives at a node.
    NodeMap { node: usize, map: NodeMap },
    /// See [`Mutation::ForgetIncoming`](crate::mutation::Mutation::ForgetIncoming).
    Forgotten { conn: usize, reply: Reply },
    /// A data thread looks again at what waits for a moment.
    Tick { host: usize, life: u64, lane: usize },
    /// A call between machines arrives.
    Call { number: usize, parcel: Parcel },
    /// Its answer is overdue.
    CallOver(usize),
    /// A host repeats what it told meta.
    Report(usize),
    /// Something goes wrong, or is repaired.
    Fault(Fault),
}
