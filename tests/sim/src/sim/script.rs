//! For scenarios that are written down: requests one at a time, and what the cluster is made to do in
//! between.

use fabric_types::NodeId;
use fabric_types::ids::ChunkKey;
use fabric_types::io::Op;
use fabric_types::membership::ReplicaState;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::Sim;
use crate::checker::{self, Tag};
use crate::node::{Device, DeviceAt};
use crate::plan::Plan;
use crate::queue::Span;
use crate::workload::GuestOp;

impl Sim {
    /// One host with one volume in one group on three nodes; its guest asks only for what the scenario says.
    pub fn scripted() -> Self {
        Self::scripted_with_hosts(1)
    }

    /// The same with more hosts to which the guest can move.
    pub fn scripted_with_hosts(hosts: usize) -> Self {
        Self::scripted_as(Plan {
            hosts,
            ..Self::scripted_plan()
        })
    }

    /// The same with as many nodes, of which the last ones are spare.
    pub fn scripted_with_nodes(nodes: usize, spares: usize) -> Self {
        Self::scripted_as(Plan {
            nodes,
            spares,
            ..Self::scripted_plan()
        })
    }

    /// One host, whose requests take a while to leave its guest's memory.
    pub fn scripted_with_slow_pickup() -> Self {
        let mut plan = Self::scripted_plan();
        plan.net.pickup = Span(500);
        Self::scripted_as(plan)
    }

    /// Nodes of so many devices, and a volume that has chunks on each of them.
    pub fn scripted_with_devices(devices: usize) -> Self {
        Self::scripted_as(Plan {
            devices,
            groups: 4,
            chunks: 4,
            ..Self::scripted_plan()
        })
    }

    /// Three nodes, the last of which has a smaller device.
    pub fn scripted_with_small_device(bytes: u64) -> Self {
        Self::scripted_as(Plan {
            small_device_bytes: Some(bytes),
            ..Self::scripted_plan()
        })
    }

    fn scripted_plan() -> Plan {
        Plan {
            hosts: 1,
            lanes: 1,
            groups: 1,
            volumes: 1,
            ops: 0,
            ..Plan::calm()
        }
    }

    fn scripted_as(plan: Plan) -> Self {
        Self::new(plan, ChaCha8Rng::seed_from_u64(1), false)
    }

    /// Asks for something; the request's name.
    pub fn ask(&mut self, op: Op, first: u64, sectors: u64) -> u64 {
        let tag = Tag(self.next_tag);
        self.next_tag += 1;
        let moves_data = matches!(op, Op::Read | Op::Write { .. });
        let bytes = if moves_data { sectors * 512 } else { 0 };
        let asked = GuestOp {
            op,
            first,
            sectors,
            tag,
            begun: None,
            since: self.now,
            lane: 0,
            memory: vec![0; bytes as usize].into(),
        };
        self.submit(0, asked).expect("the client has room")
    }

    /// The guest changes the buffer of a write under way, but for the first sector, which names the write.
    pub fn change_buffer(&mut self, name: u64) {
        let tag = Tag(self.next_tag);
        self.next_tag += 1;
        let op = self.guests[0].in_flight.get_mut(&name);
        let op = op.expect("it is under way");
        checker::fill(&mut op.memory[512..], 0, op.first + 1, tag);
    }

    /// Flips a bit of what a node's disk holds of a block of the first chunk, wherever it lies.
    pub fn flip_bit(&mut self, node: usize, block: u32) {
        self.flip_bit_of(node, 0, block);
    }

    /// The same of a block of another chunk.
    pub fn flip_bit_of(&mut self, node: usize, chunk: u32, block: u32) {
        let (at, places) = self.places_of(node, chunk, block);
        for place in places {
            self.device(at).disk.flip_bit(place + 100, 3);
        }
    }

    /// From now on a node's disk does not give what it holds of a block of the first chunk.
    pub fn spoil_block(&mut self, node: usize, block: u32) {
        let (at, places) = self.places_of(node, 0, block);
        for place in places {
            self.device(at).disk.spoil(place);
        }
        self.note_spoilt(at, block);
    }

    /// The disks of a node give all again.
    pub fn repair_disk(&mut self, node: usize) {
        for Device { disk, .. } in &mut self.nodes[node].devices {
            for place in disk.spoilt() {
                disk.repair(place);
            }
        }
    }

    /// The device that holds a chunk of the first volume on a node.
    pub fn home(&self, node: usize, chunk: u32) -> DeviceAt {
        let group = &self.meta.groups()[self.group_of(0, chunk).0 as usize];
        let home = group.device_of(NodeId(node as u64));
        home.unwrap_or(DeviceAt::first_of(node))
    }

    /// Reads a range of a chunk of the first volume as a node's device holds it.
    fn peek(&mut self, node: usize, index: u32, range: (u32, u32)) -> Result<Vec<u8>, String> {
        let at = self.home(node, index);
        let layer = super::layer_of(0);
        self.nodes[node].peek(at.device, ChunkKey { layer, index }, range)
    }

    /// Where a node has a block of a chunk of the first volume: the device, and there in bytes.
    fn places_of(&mut self, node: usize, chunk: u32, block: u32) -> (DeviceAt, Vec<u64>) {
        let content = self.peek(node, chunk, (block * 4096, 4096));
        let content = content.expect("it can be read");
        let at = self.home(node, chunk);
        let disk = &self.device(at).disk;
        let has_it = |place: &u64| {
            let mut there = vec![0; 4096];
            disk.peek(*place, &mut there);
            there == content
        };
        let places = disk.written_blocks().into_iter().map(|at| at * 4096);
        let found: Vec<u64> = places.filter(has_it).collect();
        assert!(!found.is_empty(), "the disk has it somewhere");
        (at, found)
    }

    /// Whether the node can read a block of the first chunk.
    pub fn can_read(&mut self, node: usize, block: u32) -> bool {
        self.peek(node, 0, (block * 4096, 4096)).is_ok()
    }

    /// Lets a node's scrubber read everything once; how many blocks it finds bad. It then has them repaired.
    pub fn scrub(&mut self, node: usize) -> usize {
        let mut found = 0;
        self.with_node(node, |node, outputs| found = node.scrub(outputs));
        found
    }

    /// Whether a request has been answered.
    pub fn is_done(&self, name: u64) -> bool {
        !self.guests[0].in_flight.contains_key(&name)
    }

    /// Requests that ended with an error.
    pub fn errors(&self) -> u64 {
        self.ops.1
    }

    /// Waits for the answer.
    pub fn wait_for(&mut self, name: u64) {
        let done = self.run_until(Span::seconds(30), |sim| sim.is_done(name));
        assert!(done, "no answer: {:?}", self.failure);
    }

    /// Writes some blocks and waits for the answer.
    pub fn write_blocks(&mut self, first: u64, blocks: u64) {
        let name = self.ask(Op::Write { fua: false }, first * 8, blocks * 8);
        self.wait_for(name);
    }

    /// Reads some blocks, which the checker compares with what was written.
    pub fn read_blocks(&mut self, first: u64, blocks: u64) {
        let name = self.ask(Op::Read, first * 8, blocks * 8);
        self.wait_for(name);
    }

    /// Flushes and waits.
    pub fn flush(&mut self) {
        let name = self.ask(Op::Flush, 0, 0);
        self.wait_for(name);
    }

    /// Lets time pass.
    pub fn pass(&mut self, span: Span) {
        self.run_until(span, |_| false);
        assert!(self.failure.is_none(), "{:?}", self.failure);
    }

    /// The state of a node in the only group.
    pub fn state(&self, node: usize) -> ReplicaState {
        let members = &self.meta.groups()[0].members;
        let member = members.iter().find(|m| m.node.0 as usize == node);
        member.map_or(ReplicaState::Out, |m| m.state)
    }

    /// Waits until a node has this state.
    pub fn wait_until(&mut self, node: usize, state: ReplicaState) {
        let reached = self.run_until(Span::seconds(30), |sim| sim.state(node) == state);
        assert!(reached, "node {node} is {:?}", self.state(node));
    }

    /// What the node itself holds in a sector: the write that made it.
    pub fn tag_at(&mut self, node: usize, sector: u64) -> u32 {
        let (chunk, at) = ((sector / 8192) as u32, (sector % 8192 * 512) as u32);
        let bytes = self.peek(node, chunk, (at, 512));
        let bytes = bytes.expect("it can be read");
        u32::from_le_bytes(*bytes.first_chunk().expect("a sector"))
    }

    /// Waits until the only group has all its replicas, and whether a node is one of them.
    pub fn wait_until_whole(&mut self) {
        let whole = |sim: &Self| sim.meta.is_whole(&sim.meta.groups()[0]);
        let reached = self.run_until(Span::seconds(60), whole);
        assert!(reached, "{:?}", self.meta.groups());
    }

    /// Whether a node is a member of the only group.
    pub fn is_member(&self, node: usize) -> bool {
        let members = &self.meta.groups()[0].members;
        members.iter().any(|m| m.node.0 as usize == node)
    }

    /// A member of the only group, the nth.
    pub fn member(&self, nth: usize) -> usize {
        self.meta.groups()[0].members[nth].node.0 as usize
    }

    /// Waits until the guest's host has the lease.
    pub fn wait_for_lease(&mut self) {
        let has = self.run_until(Span::seconds(30), |sim| !sim.guests[0].suspended);
        assert!(has, "no lease: {:?}", self.failure);
    }

    /// Repairs everything; then all replicas are in sync and hold the same.
    pub fn end(mut self) {
        for guest in &mut self.guests {
            // Everywhere that scenarios write.
            guest.spots = vec![0, 256];
        }
        self.heal();
        self.converge();
        assert!(self.failure.is_none(), "{}", self.failure.expect("some"));
    }
}
