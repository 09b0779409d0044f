//! A host: data threads with a client each, their connections, and the volumes that its guests use.

use std::collections::BTreeMap;
use std::sync::Arc;

use fabric_replication::client::{Client, Transport, WindowSizes};
use fabric_replication::volume::VolumeState;
use fabric_types::io::{IoResult, Tag};
use fabric_types::membership::{Member, ReplicaSet};
use fabric_types::{Epoch, Incarnation, NodeId, PgId, Refusal, Reply, Request};

use crate::plan::Plan;
use crate::queue::At;

/// What a data thread's client hands to the network.
#[derive(Debug, Default)]
pub struct Wire {
    /// Whether there is a connection to a node, by its number.
    pub up: Vec<bool>,
    /// Requests since the last look, in order.
    pub sent: Vec<(usize, Request)>,
}

impl Transport for Wire {
    fn send(&mut self, node: NodeId, request: &Request) -> Option<Reply> {
        let number = node.base().0 as usize;
        if self.up[number] {
            self.sent.push((number, request.to_replica(node)));
            return None;
        }
        Some(Reply {
            id: request.id,
            incarnation: Incarnation(0),
            result: Err(Refusal::Unreachable),
        })
    }
}

/// Of the sizes of simulated requests, so that long ones go in several pieces and wait for each other's data.
const NARROW: WindowSizes = WindowSizes {
    window_bytes: 256 << 10,
    shared_window_bytes: 128 << 10,
    small_window_bytes: 64 << 10,
    piece_bytes: 64 << 10,
    shared_piece_bytes: 32 << 10,
};

/// A data thread.
pub struct Lane {
    /// The machine under test.
    pub client: Client,
    /// Its way to the network.
    pub wire: Wire,
    /// Connections by node.
    pub links: Vec<Option<usize>>,
    /// Requests that are done and not yet reported to their guest.
    pub done: Vec<(Tag, IoResult)>,
    /// A tick is due.
    pub ticking: bool,
}

impl Lane {
    /// A thread without connections.
    pub fn new(number: usize, sets: Vec<ReplicaSet>, plan: &Plan) -> Self {
        let mut client = Client::new(number, sets);
        if plan.has_narrow_windows {
            client.set_window(NARROW);
        }
        Self {
            client,
            wire: Wire {
                up: vec![false; plan.nodes],
                sent: Vec::new(),
            },
            links: vec![None; plan.nodes],
            done: Vec::new(),
            ticking: false,
        }
    }

    /// An answer for the client.
    pub fn on_reply(&mut self, node: usize, reply: &Reply) {
        let done = &mut self.done;
        let (replica, reply) = reply.from_replica(NodeId(node as u64));
        let report = &mut |tag, result| done.push((tag, result));
        self.client
            .on_reply(replica, &reply, &mut self.wire, report);
    }

    /// The connection to a node is gone.
    pub fn on_lost(&mut self, node: usize) {
        self.links[node] = None;
        self.wire.up[node] = false;
        let done = &mut self.done;
        let report = &mut |tag, result| done.push((tag, result));
        self.client
            .on_lost(NodeId(node as u64), &mut self.wire, report);
    }

    /// A moment has passed.
    pub fn on_tick(&mut self) {
        let done = &mut self.done;
        let report = &mut |tag, result| done.push((tag, result));
        self.client.on_tick(&mut self.wire, report);
    }

    /// Leases were lost.
    pub fn end_revoked(&mut self) {
        let done = &mut self.done;
        let report = &mut |tag, result| done.push((tag, result));
        self.client.end_revoked(&mut self.wire, report);
    }

    /// A newer map.
    pub fn on_map(&mut self, sets: Vec<ReplicaSet>) {
        let done = &mut self.done;
        let report = &mut |tag, result| done.push((tag, result));
        self.client.on_map(sets, &mut self.wire, report);
    }
}

/// A machine whose guests use volumes.
pub struct Host {
    /// Data threads; none after a crash.
    pub lanes: Vec<Lane>,
    /// Volumes that it has the lease of.
    pub volumes: BTreeMap<usize, Arc<VolumeState>>,
    /// Volumes whose guests went elsewhere in good order: they stay open without a lease, as the source of a
    /// live migration keeps them, and go on under the next one.
    pub suspended: BTreeMap<usize, Arc<VolumeState>>,
    /// Replicas that its clients gave up, and the map by which they did: told to meta until a newer map
    /// comes.
    pub reports: BTreeMap<(PgId, NodeId), (Epoch, Member)>,
    /// Starts so far.
    pub life: u64,
    /// It runs.
    pub up: bool,
    /// The map, and its version.
    pub sets: Vec<ReplicaSet>,
    /// See `sets`.
    pub map: Epoch,
    /// The maps before, and until when it went by each.
    pub past: Vec<(At, Vec<ReplicaSet>)>,
}

/// A request on a connection.
#[derive(Debug)]
pub struct Outstanding {
    /// The request as the client made it: its buffers are the guest's.
    pub request: Request,
    /// When it was made.
    pub since: At,
    /// The checksum of its data at that time.
    pub crc: u32,
}

/// A connection from a data thread to a node's process. One that broke is never used again.
#[derive(Debug)]
pub struct Conn {
    /// Host.
    pub host: usize,
    /// Which start of it.
    pub life: u64,
    /// Data thread.
    pub lane: usize,
    /// Node.
    pub node: usize,
    /// Which start of it.
    pub incarnation: Incarnation,
    /// The host still uses it.
    pub open: bool,
    /// Until when the node takes what was sent before the host gave it up.
    pub taken_until: At,
    /// Requests without an answer.
    pub outstanding: BTreeMap<u64, Outstanding>,
    /// A message overtakes no other one of its direction: when the last one arrives, there and here.
    pub last: [At; 2],
    /// A check of its silence is due.
    pub watched: bool,
}
