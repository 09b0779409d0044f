//! A node's chunk store as its replica machines see it: as `engine::shard_port`, without threads and rings.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use fabric::core::fence::Fences;
use fabric::core::groups::{Groups, LEAF_BLOCKS};
use fabric::core::replica::store_op::{
    ROUND, failure, list_chunks, operation, still_admitted, tell_fence,
};
use fabric::core::replica::{StoreFailure, StoreKey, StorePort};
use fabric::core::resync::rounds::Token;
use fabric::io::SECTOR_BYTES;
use fabric::proto::ids::{CHUNK_BYTES, ChunkKey, LayerId, Version};
use fabric::proto::message::BlockStamp;
use fabric::proto::{Command, Generation, PgId, Refusal, Request, placement};
use fabric::store::ShardCore;
use fabric::store::api::{
    Holds, OpId, ScrubFinding, ScrubStep, StoreCore, StoreError, StoreOp, StoreResult, Submitted,
};
use fabric::store::device::{BLOCK_BYTES, DeviceAction, IoVecs};
use fabric::testing::sim_disk::{IoKey, IoKind, SimDisk};

use super::memory::{Buffer, Use, buffers_of, usage};
use super::{Parcel, Stored};

/// Operations below this number are the replicas'; those above look in beside the data path.
const PEEK: u64 = 1 << 60;

/// For whom the store works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum For {
    /// A replica machine, by data thread.
    Replica(usize, StoreKey),
    /// A round of comparison.
    Round(Token),
}

/// A request's memory: what is written, or what is filled.
struct Memory {
    buffer: Buffer,
    /// Only named by the request.
    _list: Box<[libc::iovec; 1]>,
}

/// A request in the store's hands.
struct Held {
    whom: For,
    request: Request,
    memory: Memory,
    /// The lease that the shard had persisted when it took the request.
    fence: Generation,
}

/// A finished store operation. Its memory is that of the request, which the replica machine may still fill.
pub struct Finished {
    pub whom: For,
    pub result: Result<(), StoreFailure>,
    memory: Option<Memory>,
}

impl Finished {
    /// What it filled.
    pub fn data(self) -> Option<Arc<[u8]>> {
        self.memory.map(|m| m.buffer.bytes().into())
    }
}

/// See the module.
pub struct Port {
    pub core: ShardCore,
    groups: usize,
    held: BTreeMap<u64, Held>,
    waiting: VecDeque<u64>,
    /// Blocks that others' requests have found bad since they were asked for last.
    pub damaged: Vec<(ChunkKey, u32)>,
    /// Blocks that a round or a takeover has made known as lost since they were asked for last.
    pub lost: Vec<(ChunkKey, u32)>,
    /// A fence rose before their turn came.
    refused: VecDeque<(u64, StoreFailure)>,
    /// The request that is being handed to a replica.
    incoming: Option<(usize, Memory)>,
    /// What the last request that was answered at once has filled.
    at_once: Option<Memory>,
    next: u64,
    requests: u64,
    pub stored: Vec<Stored>,
}

/// Begins a disk request.
pub fn begin(disk: &mut SimDisk, action: DeviceAction) -> (IoKey, IoKind) {
    let id = match &action {
        DeviceAction::Read { id, .. }
        | DeviceAction::Write { id, .. }
        | DeviceAction::Flush { id }
        | DeviceAction::Discard { id, .. } => *id,
    };
    let kind = disk.submit(0, action);
    (IoKey { shard: 0, id }, kind)
}

impl Port {
    /// A store whose chunks lie in so many groups.
    pub fn new(core: ShardCore, groups: usize) -> Self {
        Self {
            core,
            groups,
            held: BTreeMap::new(),
            waiting: VecDeque::new(),
            damaged: Vec::new(),
            lost: Vec::new(),
            refused: VecDeque::new(),
            incoming: None,
            at_once: None,
            next: 0,
            requests: 0,
            stored: Vec::new(),
        }
    }

    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Gives a request that came from far the memory it names.
    pub fn receive(&mut self, thread: usize, parcel: Parcel) -> Request {
        let (request, memory) = self.with_memory(parcel);
        self.incoming = Some((thread, memory));
        request
    }

    /// What a request filled that was answered at once.
    pub fn take_at_once(&mut self) -> Option<Arc<[u8]>> {
        self.incoming = None;
        self.at_once.take().map(|m| m.buffer.bytes().into())
    }

    /// Executes a command of a round of comparison, past all fences. `Some`: done at once.
    pub fn submit_local(&mut self, whom: For, parcel: Parcel) -> Option<Arc<[u8]>> {
        let (request, memory) = self.with_memory(parcel);
        if let Command::ListChunks {
            cursor, buffers, ..
        } = request.command
        {
            self.list(request.pg, cursor, &buffers);
            return Some(memory.buffer.bytes().into());
        }
        self.hold(whom, request, memory);
        None
    }

    /// The memory that a request names: one time aligned, one time not.
    fn with_memory(&mut self, parcel: Parcel) -> (Request, Memory) {
        let Parcel {
            mut request, data, ..
        } = parcel;
        self.requests += 1;
        let aligned = self.requests % 2 == 0;
        let mut buffer = match usage(&request.command) {
            Use::Destination(len) => Buffer::new(len, 0xa5, aligned),
            _ => Buffer::of(&data, aligned),
        };
        let list = buffer.list();
        if let Some(buffers) = buffers_of(&mut request.command) {
            *buffers = IoVecs {
                ptr: list.as_ptr(),
                len: 1,
            };
        }
        let memory = Memory {
            buffer,
            _list: list,
        };
        (request, memory)
    }

    fn hold(&mut self, whom: For, request: Request, memory: Memory) {
        let number = self.next;
        self.next += 1;
        let held = Held {
            whom,
            request,
            memory,
            fence: Generation(0),
        };
        self.held.insert(number, held);
        self.waiting.push_back(number);
    }

    /// Lists the group's chunks.
    fn list(&self, pg: PgId, cursor: u64, buffers: &IoVecs) {
        let next = |cursor: u64| {
            let first = self.core.next_chunk(cursor as u32);
            let mut all = std::iter::successors(first, |c| self.core.next_chunk(c.2));
            let in_group = |(layer, chunk, _): &(LayerId, u32, u32)| {
                let chunk = ChunkKey {
                    layer: *layer,
                    index: *chunk,
                };
                placement::pg_of(chunk, self.groups as u32) == pg
            };
            let (layer, index, behind) = all.find(in_group)?;
            Some((ChunkKey { layer, index }, u64::from(behind)))
        };
        // SAFETY: the list and its memory are held by the caller.
        unsafe { list_chunks(cursor, buffers, next) };
    }

    /// Hands to the core what it has room for.
    pub fn submit_waiting(&mut self, fences: &Fences, groups: &Groups) {
        while let Some(&number) = self.waiting.front() {
            let held = self.held.get_mut(&number).expect("it waits");
            if let Err(failure) = may_still(held, fences, groups) {
                self.waiting.pop_front();
                self.refused.push_back((number, failure));
                continue;
            }
            let layer = held.request.command.layer();
            let fence = layer.map_or(0, |layer| self.core.fence(layer).generation);
            held.fence = Generation(u64::from(fence));
            // SAFETY: the memory is in `held` until the completion.
            let submitted = unsafe {
                let op = operation(&held.request).expect("answered without the store");
                self.core.submit(OpId(number), op)
            };
            match submitted {
                Submitted::Accepted => self.waiting.pop_front(),
                Submitted::Busy => return,
            };
        }
    }

    /// Next operation that the store finished.
    pub fn next_finished(&mut self) -> Option<Finished> {
        if let Some((number, failure)) = self.refused.pop_front() {
            let held = self.held.remove(&number).expect("it was never begun");
            return Some(Finished {
                whom: held.whom,
                result: Err(failure),
                memory: None,
            });
        }
        let (id, result) = self.core.poll_completion()?;
        let held = self.held.remove(&id.0).expect("an operation ends once");
        if matches!(result, Ok(()) | Err(StoreError::Stale { .. })) {
            self.note_stored(&held);
        }
        if result.is_ok() {
            self.lost.extend(lost_by(&held.request.command));
        }
        if let Err(StoreError::Corrupt {
            layer,
            chunk,
            block,
            ..
        }) = result
            && held.request.generation != ROUND
        {
            let index = chunk;
            self.damaged.push((ChunkKey { layer, index }, block));
        }
        let fills = matches!(usage(&held.request.command), Use::Destination(_));
        Some(Finished {
            whom: held.whom,
            result: result.map_err(|error| failure(error, &held.request)),
            memory: fills.then_some(held.memory),
        })
    }

    fn note_stored(&mut self, held: &Held) {
        let (chunk, offset, len) = match held.request.command {
            Command::Write {
                chunk, offset, len, ..
            }
            | Command::Zero {
                chunk, offset, len, ..
            } => (chunk, offset, len),
            Command::Restore {
                chunk, block, len, ..
            } => (chunk, block * BLOCK_BYTES as u32, len),
            _ => return,
        };
        let generation = held.request.generation;
        let version = match held.request.command {
            Command::Restore { stamps, .. } => stamps[1].version,
            _ => Version::of(held.request.generation, held.request.sequence).0,
        };
        let mut at = u64::from(chunk.index) * CHUNK_BYTES + u64::from(offset);
        let mut stored = |at, len, tag| {
            self.stored.push(Stored {
                layer: chunk.layer,
                version,
                offset: at,
                len,
                tag,
                generations: (generation, held.fence),
            });
        };
        let tag_of = |sector: &[u8]| {
            u32::from_le_bytes(sector[..4].try_into().expect("a sector has 4 bytes"))
        };
        match held.request.command {
            Command::Write { .. } => stored(at, u64::from(len), tag_of(held.memory.buffer.bytes())),
            Command::Restore { .. } => {
                for sector in held
                    .memory
                    .buffer
                    .bytes()
                    .chunks_exact(SECTOR_BYTES as usize)
                {
                    stored(at, SECTOR_BYTES, tag_of(sector));
                    at += SECTOR_BYTES;
                }
            }
            _ => stored(at, u64::from(len), 0),
        }
    }

    /// Reads beside the data path.
    pub fn peek(
        &mut self,
        disk: &mut SimDisk,
        layer: LayerId,
        chunk: u32,
        (offset, len): (u32, u32),
    ) -> Result<Vec<u8>, String> {
        assert_eq!(self.core.in_flight(), 0, "only while the store is idle");
        let mut buffer = Buffer::new(len as usize, 0, true);
        let list = buffer.list();
        let op = StoreOp::Read {
            layers: &[layer],
            chunk,
            offset,
            iovecs: &*list,
        };
        // SAFETY: the memory is on this stack until the completion below.
        let taken = unsafe { self.core.submit(OpId(PEEK), op) };
        assert_eq!(taken, Submitted::Accepted, "an idle store has room");
        let result = self.run_alone(disk);
        result.map_err(|e| e.to_string())?;
        Ok(buffer.bytes().to_vec())
    }

    /// What the blocks of a chunk are, beside the data path.
    pub fn stamps(
        &mut self,
        disk: &mut SimDisk,
        chunk: ChunkKey,
    ) -> Result<Vec<BlockStamp>, String> {
        let mut stamps = vec![BlockStamp::default(); (CHUNK_BYTES as usize) / BLOCK_BYTES];
        for (nth, page) in stamps.chunks_mut(LEAF_BLOCKS as usize).enumerate() {
            let list = [libc::iovec {
                iov_base: page.as_mut_ptr().cast(),
                iov_len: size_of_val(page),
            }];
            let op = StoreOp::Inspect {
                layer: chunk.layer,
                chunk: chunk.index,
                block: nth as u32 * LEAF_BLOCKS,
                iovecs: &list,
            };
            // SAFETY: the memory is on this stack until the completion below.
            let taken = unsafe { self.core.submit(OpId(PEEK), op) };
            assert_eq!(taken, Submitted::Accepted, "an idle store has room");
            let result = self.run_alone(disk);
            result.map_err(|e| e.to_string())?;
        }
        Ok(stamps)
    }

    /// Reads every block once beside the data path.
    pub fn scrub(&mut self, disk: &mut SimDisk) -> Vec<ScrubFinding> {
        assert_eq!(self.core.in_flight(), 0, "only while the store is idle");
        while self.core.scrub_step() != ScrubStep::PassDone {
            self.run_device(disk);
        }
        std::iter::from_fn(|| self.core.poll_finding()).collect()
    }

    fn run_device(&mut self, disk: &mut SimDisk) {
        while let Some(action) = self.core.poll_action() {
            let (key, _) = begin(disk, action);
            let result = disk.complete(key).expect("it was begun just now");
            self.core.on_device(key.id, result);
        }
    }

    fn run_alone(&mut self, disk: &mut SimDisk) -> StoreResult {
        loop {
            self.run_device(disk);
            if let Some((_, result)) = self.core.poll_completion() {
                return result;
            }
        }
    }
}

impl StorePort for Port {
    fn submit(&mut self, key: StoreKey, request: &Request) -> Option<Result<(), StoreFailure>> {
        let taken = self.incoming.take();
        let (thread, memory) = taken.expect("set by the caller of the replica");
        if let Command::ListChunks {
            cursor, buffers, ..
        } = request.command
        {
            self.list(request.pg, cursor, &buffers);
            self.at_once = Some(memory);
            return Some(Ok(()));
        }
        if let Command::TellFence { layer, buffers, .. } = request.command {
            let persisted = std::iter::once(self.core.fence(layer));
            // SAFETY: the list and its memory are held here.
            unsafe { tell_fence(&buffers, persisted) };
            self.at_once = Some(memory);
            return Some(Ok(()));
        }
        self.hold(For::Replica(thread, key), *request, memory);
        None
    }
}

/// The last look at a request.
fn may_still(held: &Held, fences: &Fences, groups: &Groups) -> Result<(), StoreFailure> {
    let request = &held.request;
    let fence = request.command.layer().map(|layer| fences.of(layer));
    let looked = still_admitted(request, fence.as_deref(), Some(groups));
    looked.map_err(|refusal| match refusal {
        Refusal::Changed => StoreFailure::Changed,
        other => StoreFailure::Fenced(other),
    })
}

/// The block that the command makes known as lost.
fn lost_by(command: &Command) -> Option<(ChunkKey, u32)> {
    match *command {
        Command::Restore {
            chunk,
            block,
            stamps: [_, stamp],
            len: 0,
            ..
        } if stamp.holds() == Holds::Data => Some((chunk, block)),
        _ => None,
    }
}
