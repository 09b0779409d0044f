//! The node that hostile messages are executed on: a replica machine, its fences and groups, and a chunk
//! store on a disk in memory. As `engine::shard_port`, for one shard, without threads and rings.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use fabric_replication::fence::{Fences, Grant};
use fabric_replication::groups::{GroupCache, Groups, LeafKey};
use fabric_replication::replica::store_op::{
    failure, list_chunks, operation, still_admitted, tell_fence,
};
use fabric_replication::replica::{Handled, Peers, Replica, StoreFailure, StoreKey, StorePort};
use fabric_replication::unresolved::Unresolved;
use fabric_store as store;
use fabric_store::ShardCore;
use fabric_store::api::{CoreParams, DeviceLabel, Fence, OpId, StoreCore, Submitted};
use fabric_store::testing::sim_disk::{CrashKind, IoKind, SimDisk};
use fabric_types::block::BlockStamp;
use fabric_types::ids::{ChunkKey, LayerId, PeerId};
use fabric_types::iov::IoVecs;
use fabric_types::membership::ReplicaState;
use fabric_types::message::{ChunkEntry, UnresolvedEntry};
use fabric_types::{
    Command, Epoch, Generation, Incarnation, NodeId, PgId, Reply, Request, RequestId,
};
use zerocopy::FromBytes;

use super::input::Input;

/// Layers that requests name.
pub const LAYERS: [LayerId; 4] = [LayerId(1), LayerId(2), LayerId(3), LayerId(99)];
/// The node that sends all requests.
const PEER: NodeId = NodeId(2);
/// Generation of the lease that it holds of every layer.
const GRANTED: Generation = Generation(6);
/// Requests that the replica holds at once.
const SLOTS: u32 = 24;
/// What memory holds before it is filled, as if it were another request's data.
const STALE: u8 = 0xa5;
/// Bytes on both sides of a request's memory that nobody may touch.
const MARGIN: usize = 512;
/// What they hold.
const MARGIN_BYTES: [u8; MARGIN] = [STALE; MARGIN];
/// Alignment that devices like.
const PAGE: usize = 4096;
/// A small store: everything happens often, and it is opened quickly.
const DISK_BYTES: u64 = 6 << 20;
/// Turns in which whatever was begun is done.
const TURNS_MAX: usize = 200_000;

fn params() -> CoreParams {
    CoreParams {
        cluster: None,
        ops_max: 16,
        leaf_cache_bytes: 256 << 10,
        buffer_bytes: 4 << 20,
    }
}

thread_local! {
    /// A disk with an empty store.
    static FORMATTED: SimDisk = {
        let mut disk = SimDisk::new(DISK_BYTES, 1);
        let label = DeviceLabel {
            cluster: [7; 16],
            device: [9; 16],
        };
        store::format(&mut disk, label, false).expect("a blank disk");
        disk
    };
}

/// A request's memory, with a margin on both sides.
pub struct Memory {
    bytes: Box<[u8]>,
    start: usize,
    len: usize,
    /// Where it is named; it stays where it is.
    list: Box<libc::iovec>,
}

impl Memory {
    fn new(len: usize, filling: u8, aligned: bool) -> Self {
        let mut bytes = vec![STALE; len + 2 * PAGE + 2 * MARGIN].into_boxed_slice();
        let skew = if aligned { 0 } else { 16 };
        let start = bytes[MARGIN..].as_ptr().align_offset(PAGE) + MARGIN + skew;
        bytes[start..start + len].fill(filling);
        let list = Box::new(libc::iovec {
            iov_base: bytes[start..].as_mut_ptr().cast(),
            iov_len: len,
        });
        Self {
            bytes,
            start,
            len,
            list,
        }
    }

    /// Puts these bytes in front.
    pub fn fill(&mut self, bytes: &[u8]) {
        let len = bytes.len().min(self.len);
        self.bytes[self.start..][..len].copy_from_slice(&bytes[..len]);
        // What the list names is this memory; it was borrowed meanwhile.
        self.list.iov_base = self.bytes[self.start..].as_mut_ptr().cast();
    }

    /// As servings name their memory: an empty list if there is none.
    pub fn list(&self) -> IoVecs {
        match self.len {
            0 => IoVecs::NONE,
            _ => IoVecs {
                ptr: &raw const *self.list,
                len: 1,
            },
        }
    }

    fn content(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    fn assert_margins(&self) {
        let (before, rest) = self.bytes.split_at(self.start);
        let untouched = before.ends_with(&MARGIN_BYTES);
        assert!(untouched, "memory before the request's");
        let untouched = rest[self.len..].starts_with(&MARGIN_BYTES);
        assert!(untouched, "memory behind the request's");
    }
}

/// A request in the replica's hands, with its memory.
struct Asked {
    request: Request,
    memory: Memory,
}

/// What the store is done with.
type Finished = (StoreKey, Request, Result<(), StoreFailure>);

/// The store as the replica machine sees it.
struct Port {
    core: ShardCore,
    fences: Arc<Fences>,
    groups: GroupCache,
    /// Requests that the store has not taken yet.
    waiting: VecDeque<u64>,
    held: BTreeMap<u64, (StoreKey, Request)>,
    next: u64,
    finished: VecDeque<Finished>,
}

impl StorePort for Port {
    fn submit(&mut self, key: StoreKey, request: &Request) -> Option<Result<(), StoreFailure>> {
        match request.command {
            Command::TellFence { layer, buffers, .. } => {
                let persisted = std::iter::once(self.core.fence(layer));
                // SAFETY: the memory is there until the answer.
                unsafe { tell_fence(&buffers, persisted) };
                return Some(Ok(()));
            }
            Command::ListChunks {
                cursor, buffers, ..
            } => {
                let next = |cursor: u64| {
                    let (layer, index, behind) = self.core.next_chunk(cursor as u32)?;
                    Some((ChunkKey { layer, index }, u64::from(behind)))
                };
                // SAFETY: as above.
                unsafe { list_chunks(cursor, &buffers, next) };
                return Some(Ok(()));
            }
            Command::Join => panic!("the replica machine answers it"),
            _ => {}
        }
        self.held.insert(self.next, (key, *request));
        self.waiting.push_back(self.next);
        self.next += 1;
        None
    }
}

impl Port {
    /// Hands to the store what it has room for.
    fn submit_waiting(&mut self) {
        while let Some(number) = self.waiting.front() {
            let (key, request) = self.held[number];
            let fence = request.command.layer();
            let fence = fence.and_then(|layer| self.fences.of(layer));
            if let Err(refusal) = still_admitted(&request, fence.as_deref(), &mut self.groups) {
                self.held.remove(number);
                self.waiting.pop_front();
                let failure = StoreFailure::Fenced(refusal);
                self.finished.push_back((key, request, Err(failure)));
                continue;
            }
            // SAFETY: the memory is there until the answer.
            let submitted = unsafe {
                let op = operation(&request).expect("only what a shard executes waits for one");
                self.core.submit(OpId(*number), op)
            };
            match submitted {
                Submitted::Accepted => self.waiting.pop_front(),
                Submitted::Busy => return,
            };
        }
    }

    fn next_finished(&mut self) -> Option<Finished> {
        if let Some(finished) = self.finished.pop_front() {
            return Some(finished);
        }
        let (id, result) = self.core.poll_completion()?;
        let held = self.held.remove(&id.0);
        let (key, request) = held.expect("an operation ends once");
        let result = result.map_err(|error| failure(error, &request));
        Some((key, request, result))
    }
}

/// One start of the node.
struct Process {
    port: Port,
    replica: Replica,
    fences: Arc<Fences>,
    groups: Arc<Groups>,
    unresolved: Arc<Unresolved>,
}

impl Process {
    /// Opens what is on the disk.
    fn start(disk: &mut SimDisk, start: u64) -> Self {
        let mut nonce = [0x5e; 16];
        nonce[..8].copy_from_slice(&start.to_le_bytes());
        let (mut cores, _) = store::open(disk, &params(), nonce).expect("what is stored is sound");
        assert_eq!(cores.len(), 1, "a small disk has one shard");
        let fences = Arc::new(Fences::default());
        let groups: Arc<Groups> = Arc::default();
        let unresolved: Arc<Unresolved> = Arc::default();
        let peers = Peers {
            groups: Arc::clone(&groups),
            unresolved: Arc::new([Arc::clone(&unresolved)]),
            lane: 0,
        };
        let replica = Replica::new(Incarnation(start), Arc::clone(&fences), SLOTS, peers);
        let port = Port {
            core: cores.remove(0),
            fences: Arc::clone(&fences),
            groups: GroupCache::new(Arc::clone(&groups)),
            waiting: VecDeque::new(),
            held: BTreeMap::new(),
            next: 0,
            finished: VecDeque::new(),
        };
        Self {
            port,
            replica,
            fences,
            groups,
            unresolved,
        }
    }
}

/// See the module.
pub struct Node {
    process: Process,
    epoch: u64,
    layers: u8,
    starts: u64,
    disk: SimDisk,
    asked: BTreeMap<u64, Asked>,
    next: u64,
    /// What the last answer to an inspection told, from which block on.
    inspected: (u32, Vec<BlockStamp>),
    /// See [`end`](Self::end).
    reopens: bool,
    /// Requests that were done.
    pub done: usize,
}

impl Node {
    /// With an empty store. The seed says in which order device requests end.
    pub fn new(seed: u64) -> Self {
        let mut disk = FORMATTED.with(|disk| disk.crash(CrashKind::Process, seed));
        let mut node = Self {
            process: Process::start(&mut disk, 1),
            epoch: 1,
            layers: 0,
            starts: 1,
            disk,
            asked: BTreeMap::new(),
            next: 0,
            inspected: (0, Vec::new()),
            reopens: seed % 4 == 0,
            done: 0,
        };
        node.set_layers(u8::MAX);
        node.change_map(PgId(0), ReplicaState::InSync, true);
        node
    }

    /// These of [`LAYERS`] exist, a bit for each; the last one never does.
    pub fn set_layers(&mut self, layers: u8) {
        self.layers = layers & 0b111;
        let known = LAYERS.iter().enumerate();
        let known = known.filter(|(nth, _)| self.layers >> nth & 1 != 0);
        let grant = Grant {
            holder: Some(PEER),
            generation: GRANTED,
        };
        self.process
            .fences
            .set_layers(known.map(|(_, layer)| (*layer, grant)).collect());
    }

    /// The newest map that it knows.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// A newer map says this of a group.
    pub fn change_map(&mut self, pg: PgId, state: ReplicaState, is_open: bool) {
        self.epoch += 1;
        let epoch = Epoch(self.epoch);
        self.process.groups.place(pg, 0, 4, epoch);
        self.process.groups.set(pg, state, epoch);
        self.process.groups.applied(epoch);
        let Some(group) = self.process.groups.get(pg).filter(|_| is_open) else {
            return;
        };
        // As far as a round of comparison would have come.
        for layer in LAYERS {
            group.fenced(layer);
            for leaf in 0..2 {
                let chunk = 0;
                group.compared(LeafKey { layer, chunk, leaf });
            }
        }
    }

    /// The next device request of a kind fails.
    pub fn fail_device(&mut self, kind: u8) {
        let kind = match kind % 3 {
            0 => IoKind::Read,
            1 => IoKind::Write,
            _ => IoKind::Flush,
        };
        self.disk.fail(kind, 0, libc::EIO);
    }

    /// What the store does beside requests.
    pub fn maintain(&mut self, which: u8) {
        match which % 3 {
            0 if self.process.port.core.in_flight() == 0 => self.process.port.core.on_idle(),
            0 => {}
            1 => drop(self.process.port.core.scrub_step()),
            _ => drop(self.process.port.core.clean_step()),
        }
        self.run(4);
    }

    /// Memory for a request's data.
    pub fn memory(&self, bytes: usize, input: &mut Input<'_>) -> Memory {
        let choice = input.byte();
        Memory::new(bytes, choice % 2, choice & 2 == 0)
    }

    /// The block with this place among those of the last inspection.
    pub fn inspected_block(&self, nth: u8) -> u32 {
        let (first, stamps) = &self.inspected;
        first + u32::from(nth) % (stamps.len().max(1) as u32)
    }

    /// What was told of a block.
    pub fn inspected(&self, block: u32) -> Option<BlockStamp> {
        let (first, stamps) = &self.inspected;
        let nth = block.checked_sub(*first)?;
        stamps.get(nth as usize).copied()
    }

    /// Hands a decoded request to the replica.
    pub fn execute(&mut self, request: Request, mut memory: Memory) {
        let fills = matches!(
            request.command,
            Command::Read { .. }
                | Command::Inspect { .. }
                | Command::ListChunks { .. }
                | Command::Fence { .. }
                | Command::TellFence { .. }
        );
        if fills {
            memory.fill(&vec![STALE; memory.len]);
        }
        let id = RequestId(self.next);
        self.next += 1;
        let request = Request { id, ..request };
        self.asked.insert(id.0, Asked { request, memory });
        let Process { replica, port, .. } = &mut self.process;
        match replica.on_remote_request((PEER, PeerId(1)), &request, port) {
            Handled::Replied(reply) => self.answered(&reply),
            Handled::Held => {}
            Handled::Full => {
                assert_eq!(self.process.replica.in_flight(), SLOTS as usize);
                self.asked.remove(&id.0);
            }
        }
        self.assert_bounded();
    }

    fn answered(&mut self, reply: &Reply) {
        let asked = self.asked.remove(&reply.id.0);
        let Asked { request, memory } = asked.expect("a request is answered once");
        memory.assert_margins();
        if reply.result.is_err() {
            return;
        }
        self.done += 1;
        let command = &request.command;
        let invented = command.mutates() && command.layer() == LAYERS.last().copied();
        assert!(!invented, "a change of a layer that nobody created");
        let claimed = command.mutates() && request.generation > GRANTED;
        assert!(!claimed, "a change under a lease that was not granted");
        self.look_at(&request.command, memory.content());
    }

    /// An answer leaves nothing of what the memory held before.
    fn look_at(&mut self, command: &Command, content: &[u8]) {
        let entry = match command {
            Command::ListChunks { .. } => size_of::<ChunkEntry>(),
            Command::Fence { .. } => size_of::<UnresolvedEntry>(),
            Command::Inspect { block, .. } => {
                let stamps = content.chunks_exact(size_of::<BlockStamp>());
                let stamps = stamps.filter_map(|bytes| BlockStamp::read_from_bytes(bytes).ok());
                self.inspected = (*block, stamps.collect());
                return;
            }
            // Blocks are filled with few values, none of them that one.
            Command::Read { .. } => {
                assert!(!content.contains(&STALE), "memory that was not filled");
                return;
            }
            _ => return,
        };
        let whole = content.len() / entry * entry;
        let rest = &content[whole..];
        assert!(rest.iter().all(|byte| *byte == 0), "stale bytes at the end");
        let last = content[..whole].last_chunk::<4>();
        assert_ne!(last, Some(&[STALE; 4]), "a stale entry at the end");
    }

    /// Whatever a peer sends, what is remembered of it stays within bounds.
    fn assert_bounded(&self) {
        assert!(self.process.fences.len() < LAYERS.len());
        let invented = self.process.port.core.fence(LAYERS[LAYERS.len() - 1]);
        assert_eq!(invented, Fence::default(), "of a layer that nobody created");
        for layer in LAYERS {
            let persisted = self.process.port.core.fence(layer);
            assert!(u64::from(persisted.generation) <= GRANTED.0 && persisted.epoch <= self.epoch);
        }
        assert!(self.process.unresolved.len() <= 3 * 16_384);
        assert!(self.process.replica.in_flight() <= SLOTS as usize);
    }

    /// Lets so many device requests end, and all that follows from it.
    pub fn run(&mut self, device_requests: usize) {
        for _ in 0..=device_requests {
            self.pump();
            match self.disk.complete_any() {
                Some((key, result)) => self.process.port.core.on_device(key.id, result),
                None => break,
            }
        }
        self.pump();
    }

    fn pump(&mut self) {
        loop {
            self.process.port.submit_waiting();
            let mut moved = false;
            while let Some(action) = self.process.port.core.poll_action() {
                moved = true;
                self.disk.submit(0, action);
            }
            while let Some((key, request, result)) = self.process.port.next_finished() {
                moved = true;
                let answer = self.process.replica.on_store(key, &request, result);
                let (_, reply) = answer.expect("the replica holds it");
                self.answered(&reply);
            }
            if !moved {
                return;
            }
        }
    }

    /// Everything that was asked is answered.
    fn drain(&mut self) {
        for _ in 0..TURNS_MAX {
            self.run(16);
            if self.asked.is_empty() && self.disk.in_flight() == 0 {
                break;
            }
        }
        assert!(self.asked.is_empty(), "requests without an answer");
        assert_eq!(self.process.replica.in_flight(), 0);
        assert!(self.process.port.held.is_empty());
    }

    /// The process dies, or the machine; the next one opens what is on the disk.
    pub fn restart(&mut self, how: u8) {
        if how & 1 != 0 {
            self.drain();
        }
        let kind = match how & 2 {
            0 => CrashKind::Process,
            _ => CrashKind::Power,
        };
        self.disk = self.disk.crash(kind, u64::from(how));
        self.disk.forget_faults();
        self.starts += 1;
        self.asked.clear();
        self.process = Process::start(&mut self.disk, self.starts);
        self.set_layers(self.layers);
        self.change_map(PgId(0), ReplicaState::InSync, true);
    }

    /// Everything is answered. In some runs what was stored is opened once more, which takes longer than all
    /// else.
    pub fn end(&mut self) {
        self.drain();
        if self.reopens {
            self.restart(1);
        }
    }
}
