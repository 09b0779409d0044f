//! Hostile hosts with valid certificates.
//!
//! One holds the lease of its own volume, and no other layer is open to it, like a host with an incoming
//! attachment. To the other all layers are open, like those of a mounted filesystem; it may read, and holds
//! no lease of them. Both send arbitrary requests to replicas: reads, writes, zeroes, restorations and
//! fences, with the generation of the volume's user, older and newer ones, and any epoch, sequence and
//! watermark.
//!
//! No replica may execute a request that needs a lease they do not hold, or a read of a layer that is not
//! open. As in every run, the simulator checks that no guest finds its blocks changed, and that every write
//! of a guest ends.
//!
//! The host with a lease also restores blocks of its own volume, with versions of its own generation and of
//! later ones. No replica may store a version of a later one: it would hide the writes of the next holder.
//!
//! In runs with such hosts nodes learn of leases late, and the hosts with guests reach open layers only.

use std::collections::BTreeMap;

use fabric_types::block::{BLOCK_BYTES, BlockStamp, Holds};
use fabric_types::ids::{ChunkKey, PeerId, Version};
use fabric_types::iov::IoVecs;
use fabric_types::{Command, Epoch, Generation, NodeId, Request, RequestId, Sequence};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::{End, Event, Sim, layer_of, rng_of};
use crate::metadata::{READER, Records, STRANGER};
use crate::node::{Answer, DeviceAt, Parcel, Sender, memory};
use crate::queue::Span;

/// Connections of hostile hosts are peers from this number on.
pub(super) const STRANGERS_FROM: u32 = 3 << 30;
/// Longest pause between two visits.
const VISIT_EVERY: Span = Span::millis(10);
/// Most requests of a visit.
const REQUESTS_MAX: u32 = 4;
/// Unanswered requests that are remembered, because a node that dies answers none. One more drops the oldest.
const OPEN_MAX: usize = 64;
/// Time within which most records reach a node.
const SOON: Span = Span::millis(20);
/// Time within which the others do.
const LATE: Span = Span::millis(400);
/// Generation of the lease that a host has of its own volume. It is granted once.
const OWN: Generation = Generation(1);
/// Blocks of its volume that the host restores.
const OWN_BLOCKS: u32 = 8;
/// Block that is written.
const FOREIGN: [u8; BLOCK_BYTES] = [0x66; BLOCK_BYTES];

/// A request and the state at the time of sending.
#[derive(Debug, Clone, Copy)]
struct Sent {
    from: NodeId,
    request: Request,
    /// The newest map at that time.
    epoch: Epoch,
}

/// State and results of the hostile hosts.
pub(super) struct Strangers {
    rng: ChaCha8Rng,
    next: u32,
    open: BTreeMap<u32, Sent>,
    /// Refused requests for layers of others.
    pub refused: u32,
    /// Executed requests: reads of open layers, and requests under the host's own lease.
    pub done: u32,
    /// Blocks of the own volume that were restored.
    pub restored: u32,
}

impl Strangers {
    /// Creates the hosts without any requests.
    pub fn new(rng: ChaCha8Rng) -> Self {
        Self {
            rng,
            next: 0,
            open: BTreeMap::new(),
            refused: 0,
            done: 0,
            restored: 0,
        }
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.rng.random_range(0..of.len())]
    }

    /// Returns a random command for a block of a chunk, or for its layer.
    fn command(&mut self, chunk: ChunkKey, block: u32) -> Command {
        let (layer, buffers) = (chunk.layer, IoVecs::NONE);
        let (offset, len) = (block * BLOCK_BYTES as u32, BLOCK_BYTES as u32);
        let fua = self.rng.random();
        match self.rng.random_range(0..8) {
            0 | 1 => Command::Write {
                chunk,
                offset,
                buffers,
                len,
                fua,
                urgent: self.rng.random(),
            },
            2 => Command::Zero {
                chunk,
                offset,
                len,
                fua,
            },
            3 => self.restoration(chunk, block),
            4 | 5 => Command::Fence {
                layer,
                buffers,
                len: 240,
            },
            6 => Command::Inspect {
                chunk,
                block,
                buffers,
                len: 16,
            },
            _ => Command::Read {
                chunk,
                offset,
                buffers,
                len,
            },
        }
    }

    fn restoration(&mut self, chunk: ChunkKey, block: u32) -> Command {
        let (expected, stamp) = (self.stamp(), self.stamp());
        Command::Restore {
            chunk,
            block,
            stamps: [self.pick(&[BlockStamp::default(), expected]), stamp],
            buffers: IoVecs::NONE,
            len: 0,
        }
    }

    /// A block without data.
    fn stamp(&mut self) -> BlockStamp {
        let generation = self.pick(&[1, 2, Version::GENERATION_MAX]);
        BlockStamp {
            version: Version::new(generation, 1 << 30).0,
            crc: 0,
            holds: self.pick(&[Holds::Nothing, Holds::Zeroes]) as u32,
        }
    }

    /// Something to be done to the own volume. Its data would have to be distinguished from what is left over
    /// at the end of a run, so it has none.
    fn own_command(&mut self, chunk: ChunkKey) -> Command {
        let block = self.rng.random_range(0..OWN_BLOCKS);
        if self.rng.random() {
            return self.restoration(chunk, block);
        }
        match self.command(chunk, block) {
            Command::Write { .. } | Command::Zero { .. } => Command::Fence {
                layer: chunk.layer,
                buffers: IoVecs::NONE,
                len: 240,
            },
            command => command,
        }
    }

    /// Creates a request. `generation` is that of the layer's newest lease, `epoch` that of the newest map.
    fn request(&mut self, generation: Generation, epoch: Epoch, command: Command) -> Request {
        let Generation(current) = generation;
        let near = [current, current, current + 1, current.saturating_sub(1)];
        let far = [2, Generation::MAX.0 - 1, Generation::MAX.0];
        let epochs = [epoch.0, epoch.0, epoch.0 + 1, 1, 1 << 40, u64::MAX];
        let generation = match self.rng.random_ratio(2, 3) {
            true => self.pick(&near),
            false => self.pick(&far),
        };
        Request {
            generation: Generation(generation),
            epoch: Epoch(self.pick(&epochs)),
            sequence: Sequence(self.pick(&[1, 1 << 20, Sequence::MAX.0])),
            watermark: Sequence(self.pick(&[0, 1, Sequence::MAX.0])),
            command,
            ..Request::NOTHING
        }
    }
}

impl Sim {
    /// Starts the visits. They end when all is repaired.
    pub(super) fn begin_strangers(&mut self, seed: u64) {
        self.strangers.rng = rng_of(seed, 8);
        if self.plan.has_strangers {
            self.visit_again();
        }
    }

    /// Gives nodes the nodes and volumes of the start.
    pub(super) fn begin_access(&mut self) {
        let records = self.meta.records();
        for node in &mut self.nodes {
            node.access = self.meta.access(&self.plan);
            node.set_records(&records);
            if !self.plan.has_strangers {
                node.access.forget_leases();
            }
        }
    }

    fn visit_again(&mut self) {
        let rng = &mut self.strangers.rng;
        let (pause, tie) = (rng.random_range(1..=VISIT_EVERY.0), rng.random());
        self.queue.push(self.now + Span(pause), tie, Event::Visit);
    }

    /// Sends requests of a hostile host to a node.
    pub(super) fn on_visit(&mut self) {
        if self.peace {
            return;
        }
        let node = self.strangers.rng.random_range(0..self.nodes.len());
        for _ in 0..self.strangers.rng.random_range(1..=REQUESTS_MAX) {
            self.send_strange(node);
        }
        self.visit_again();
    }

    fn send_strange(&mut self, node: usize) {
        let is_deaf = !self.nodes[node].is_up() || self.nodes[node].paused_until > self.now;
        if is_deaf {
            return;
        }
        if self.strangers.open.len() >= OPEN_MAX {
            self.strangers.open.pop_first();
        }
        let epoch = self.meta.epoch();
        let strangers = &mut self.strangers;
        let from = strangers.pick(&[STRANGER, READER]);
        let own = self.plan.volumes;
        let is_own = from == STRANGER && strangers.rng.random_ratio(1, 4);
        let volume = match is_own {
            true => own,
            false => strangers.rng.random_range(0..own),
        };
        let spots = self.guests.get(volume).map(|guest| guest.spots.clone());
        let sector = spots.map_or(0, |spots| strangers.pick(&spots));
        let chunk = ChunkKey {
            layer: layer_of(volume),
            index: (sector / crate::workload::CHUNK_SECTORS) as u32,
        };
        let block = (sector % crate::workload::CHUNK_SECTORS / 8) as u32;
        let command = match is_own {
            true => strangers.own_command(chunk),
            false => strangers.command(chunk, block),
        };
        let generation = match is_own {
            true => OWN,
            false => self.leases[volume].generation,
        };
        let request = strangers.request(generation, epoch, command);
        let pg = self.group_of(volume, chunk.index);
        let number = self.strangers.next;
        self.strangers.next += 1;
        let request = Request {
            id: RequestId(u64::from(number)),
            pg,
            ..request
        };
        let sent = Sent {
            from,
            request,
            epoch,
        };
        self.strangers.open.insert(number, sent);
        self.hand_over(node, sent);
    }

    fn hand_over(&mut self, node: usize, sent: Sent) {
        let Sent { from, request, .. } = sent;
        let numbers = [
            44,
            node as u64,
            from.0,
            request.generation.0,
            request.epoch.0,
        ];
        self.trace.note(self.now, &numbers, || {
            let what = super::net::describe(&request.command);
            format!(
                "hostile host {from} asks node {node}: {what} as {} by {}",
                request.generation, request.epoch
            )
        });
        let data: Box<[u8]> = match memory::usage(&request.command) {
            memory::Use::Source(len) => FOREIGN[..len].into(),
            _ => Box::default(),
        };
        let crc = fabric_types::checksum::crc32c(&data);
        let parcel = Parcel { request, data, crc };
        let number = request.id.0 as u32;
        let sender = Sender {
            node: from,
            peer: PeerId(STRANGERS_FROM + number % (1 << 30)),
        };
        self.with_node(node, |node, outputs| {
            node.on_request(sender, number as usize, parcel, outputs);
        });
    }

    /// Checks a node's answer to a hostile host.
    pub(super) fn on_strange_answer(&mut self, answer: &Answer) {
        let number = answer.peer.0 - STRANGERS_FROM;
        let Some(sent) = self.strangers.open.remove(&number) else {
            return;
        };
        let Sent {
            from,
            request,
            epoch,
        } = sent;
        let command = &request.command;
        let is_own = from == STRANGER && command.layer() == Some(layer_of(self.plan.volumes));
        if answer.reply.result.is_err() {
            self.strangers.refused += u32::from(!is_own);
            return;
        }
        self.strangers.done += 1;
        let is_restored = matches!(command, Command::Restore { .. });
        self.strangers.restored += u32::from(is_restored && is_own);
        let what = || {
            let (generation, by) = (request.generation, request.epoch);
            let what = super::net::describe(command);
            format!("{what} as {generation} by {by} for host {from}")
        };
        if command.mutates() && !is_own {
            let what = what();
            self.fail(format!(
                "invariant One writer: a node did {what}, which holds no lease"
            ));
        } else if command.mutates()
            && (request.generation > OWN || request.epoch > epoch || has_later_version(command))
        {
            let what = what();
            self.fail(format!(
                "invariant One writer: a node did {what}, beyond its grant"
            ));
        } else if from == STRANGER && !is_own {
            let what = what();
            self.fail(format!(
                "invariant Hostile hosts: a node did {what}, to which the layer is not open"
            ));
        }
    }

    /// Invariant *One writer*: no replica holds a version of a generation that was not granted. To be called
    /// when all stores are idle.
    pub(super) fn no_later_version_is_stored(&mut self) {
        if !self.plan.has_strangers {
            return;
        }
        let layer = layer_of(self.plan.volumes);
        for node in 0..self.nodes.len() {
            for device in 0..self.plan.devices {
                let Some(process) = &self.nodes[node].process else {
                    continue;
                };
                let chunks = process.chunks(device).into_iter();
                for chunk in chunks.filter(|chunk| chunk.layer == layer) {
                    // What cannot be read is reported by the check of its space.
                    let stamps = self.nodes[node].stamps(device, chunk).unwrap_or_default();
                    if let Some(stamp) = stamps.iter().find(|stamp| is_later(stamp)) {
                        let at = DeviceAt { node, device };
                        return self.fail(format!(
                            "invariant One writer: {at} holds {stamp:?}, which is more than was granted"
                        ));
                    }
                }
            }
        }
    }

    /// Records have changed: nodes hear of it sooner or later, or with the next time that this is called.
    pub(super) fn publish_records(&mut self) {
        if !self.plan.has_strangers {
            return;
        }
        let records = std::sync::Arc::new(self.meta.records());
        for node in 0..self.nodes.len() {
            let rng = &mut self.strangers.rng;
            let within = if rng.random_ratio(1, 8) { LATE } else { SOON };
            let (delay, tie) = (rng.random_range(0..=within.0), rng.random());
            if self.passes(End::Meta, End::Node(node)) {
                let records = std::sync::Arc::clone(&records);
                let event = Event::Records { node, records };
                self.queue.push(self.now + Span(delay), tie, event);
            }
        }
    }

    pub(super) fn on_records(&mut self, node: usize, records: &Records) {
        if self.nodes[node].paused_until <= self.now {
            self.nodes[node].set_records(records);
        }
    }

    /// In runs without hostile hosts a node applies the grant of a lease when that lease is first used there,
    /// and no newer one: until then an older one is valid unless it is fenced.
    pub(super) fn catch_up(&mut self, node: usize, request: &Request) {
        let Some(layer) = request
            .command
            .layer()
            .filter(|_| request.command.mutates())
        else {
            return;
        };
        let is_known = self.nodes[node].grant_of(layer).generation >= request.generation;
        if self.plan.has_strangers || is_known {
            return;
        }
        if let Some(grant) = self.meta.grant_of(layer, request.generation) {
            self.nodes[node].learn_grant(layer, grant);
        }
    }
}

/// A version of a generation that the host was not granted.
fn is_later(stamp: &BlockStamp) -> bool {
    u64::from(Version(stamp.version).generation()) > OWN.0
}

fn has_later_version(command: &Command) -> bool {
    matches!(command, Command::Restore { stamps: [_, stamp], .. } if is_later(stamp))
}
