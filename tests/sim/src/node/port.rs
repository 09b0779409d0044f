//! A node's chunk store as its replica machines see it: as `engine::shard_port`, without threads and rings.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use fabric::core::replica::{StoreFailure, StoreKey, StorePort};
use fabric::core::resync::Call;
use fabric::io::SECTOR_BYTES;
use fabric::proto::ids::{CHUNK_BYTES, LayerId, Version};
use fabric::proto::message::{ChunkEntry, chunk_entry};
use fabric::proto::{Command, Epoch, Generation, PgId, Refusal, Request};
use fabric::store::ShardCore;
use fabric::store::api::{
    Fence, OpId, StoreCore, StoreError, StoreOp, StoreResult, Submitted, shard_of,
};
use fabric::store::device::{BLOCK_BYTES, DeviceAction, IoVecs};
use fabric::testing::sim_disk::{IoKey, IoKind, SimDisk};

use zerocopy::IntoBytes;

use super::memory::{Use, buffers_of, usage};
use super::{Parcel, Stored};

/// Operations below this number are the replicas'; those above look in beside the data path.
const PEEK: u64 = 1 << 60;

/// For whom the store works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum For {
    /// A replica machine, by data thread.
    Replica(usize, StoreKey),
    /// A round of comparison: the group, its number, its call.
    Round(PgId, u64, Call),
}

/// A request's memory: what is written, or what is filled.
struct Memory {
    bytes: Box<[u8]>,
    list: Box<[libc::iovec; 1]>,
}

/// A request in the store's hands.
struct Held {
    whom: For,
    request: Request,
    memory: Memory,
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
        self.memory.map(|m| m.bytes.into())
    }
}

/// See the module.
pub struct Port {
    pub core: ShardCore,
    groups: usize,
    held: BTreeMap<u64, Held>,
    waiting: VecDeque<u64>,
    /// The request that is being handed to a replica.
    incoming: Option<(usize, Memory)>,
    /// What the last request that was answered at once has filled.
    at_once: Option<Memory>,
    next: u64,
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
            incoming: None,
            at_once: None,
            next: 0,
            stored: Vec::new(),
        }
    }

    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Gives a request that came from far the memory it names.
    pub fn receive(&mut self, thread: usize, parcel: Parcel) -> Request {
        let (request, memory) = with_memory(parcel);
        self.incoming = Some((thread, memory));
        request
    }

    /// What a request filled that was answered at once.
    pub fn take_at_once(&mut self) -> Option<Arc<[u8]>> {
        self.incoming = None;
        self.at_once.take().map(|m| m.bytes.into())
    }

    /// Executes a command of a round of comparison, past all fences. `Some`: done at once.
    pub fn submit_local(&mut self, whom: For, parcel: Parcel) -> Option<Arc<[u8]>> {
        let (request, memory) = with_memory(parcel);
        if let Command::ListChunks {
            cursor, buffers, ..
        } = request.command
        {
            self.list_chunks(request.pg, cursor, &buffers);
            return Some(memory.bytes.into());
        }
        self.hold(whom, request, memory);
        None
    }

    fn hold(&mut self, whom: For, request: Request, memory: Memory) {
        let number = self.next;
        self.next += 1;
        let held = Held {
            whom,
            request,
            memory,
        };
        self.held.insert(number, held);
        self.waiting.push_back(number);
    }

    /// Lists the group's chunks.
    fn list_chunks(&self, pg: PgId, cursor: u64, buffers: &IoVecs) {
        // SAFETY: the list and its memory are held by the caller.
        let out = unsafe { buffers.first_mut() };
        let mut cursor = cursor as u32;
        let mut places = out.chunks_exact_mut(size_of::<ChunkEntry>()).peekable();
        while let Some(place) = places.next() {
            let last = places.peek().is_none();
            let in_group = |(layer, chunk, _): &(LayerId, u32, u32)| {
                shard_of(*layer, *chunk, self.groups) as u64 == pg.0
            };
            let mut next = std::iter::successors(self.core.next_chunk(cursor), |(_, _, behind)| {
                self.core.next_chunk(*behind)
            });
            let next = next.find(in_group).filter(|_| !last);
            let mut entry = ChunkEntry {
                cursor: u64::from(cursor),
                kind: chunk_entry::END,
                ..ChunkEntry::default()
            };
            if let Some((layer, chunk, behind)) = next {
                cursor = behind;
                (entry.layer, entry.chunk) = (layer.0, chunk);
                (entry.cursor, entry.kind) = (u64::from(behind), chunk_entry::CHUNK);
            } else if last {
                entry.kind = chunk_entry::MORE;
            }
            place.copy_from_slice(entry.as_bytes());
            if next.is_none() {
                return;
            }
        }
    }

    /// Hands to the core what it has room for.
    pub fn submit_waiting(&mut self) {
        while let Some(&number) = self.waiting.front() {
            let held = &self.held[&number];
            // SAFETY: the memory is in `held` until the completion.
            match unsafe {
                self.core
                    .submit(OpId(number), operation(&held.request, &held.memory.list))
            } {
                Submitted::Accepted => self.waiting.pop_front(),
                Submitted::Busy => return,
            };
        }
    }

    /// Next operation that the store finished.
    pub fn next_finished(&mut self) -> Option<Finished> {
        let (id, result) = self.core.poll_completion()?;
        let held = self.held.remove(&id.0).expect("an operation ends once");
        if matches!(result, Ok(()) | Err(StoreError::Stale { .. })) {
            self.note_stored(&held);
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
        let fence = self.core.fence(chunk.layer).generation;
        // A round of comparison works past the fences.
        let generation = match held.whom {
            For::Replica(..) => held.request.generation,
            For::Round(..) => Generation(u64::MAX),
        };
        let mut at = u64::from(chunk.index) * CHUNK_BYTES + u64::from(offset);
        let mut stored = |at, len, tag| {
            self.stored.push(Stored {
                layer: chunk.layer,
                offset: at,
                len,
                tag,
                generations: (generation, Generation(u64::from(fence))),
            });
        };
        let tag_of = |sector: &[u8]| {
            u32::from_le_bytes(sector[..4].try_into().expect("a sector has 4 bytes"))
        };
        match held.request.command {
            Command::Write { .. } => stored(at, u64::from(len), tag_of(&held.memory.bytes)),
            Command::Restore { .. } => {
                for sector in held.memory.bytes.chunks_exact(SECTOR_BYTES as usize) {
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
        let mut bytes = vec![0; len as usize];
        let list = [libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        }];
        let op = StoreOp::Read {
            layers: &[layer],
            chunk,
            offset,
            iovecs: &list,
        };
        // SAFETY: the memory is on this stack until the completion below.
        let taken = unsafe { self.core.submit(OpId(PEEK), op) };
        assert_eq!(taken, Submitted::Accepted, "an idle store has room");
        let result = self.run_alone(disk);
        result.map_err(|e| e.to_string())?;
        Ok(bytes)
    }

    fn run_alone(&mut self, disk: &mut SimDisk) -> StoreResult {
        loop {
            while let Some(action) = self.core.poll_action() {
                let (key, _) = begin(disk, action);
                let result = disk.complete(key).expect("it was begun just now");
                self.core.on_device(key.id, result);
            }
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
            self.list_chunks(request.pg, cursor, &buffers);
            self.at_once = Some(memory);
            return Some(Ok(()));
        }
        self.hold(For::Replica(thread, key), *request, memory);
        None
    }
}

fn with_memory(parcel: Parcel) -> (Request, Memory) {
    let Parcel { mut request, data } = parcel;
    let mut bytes = match usage(&request.command) {
        Use::Destination(len) => vec![0xa5; len].into(),
        _ => data,
    };
    let list = Box::new([libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    }]);
    if let Some(buffers) = buffers_of(&mut request.command) {
        *buffers = IoVecs {
            ptr: list.as_ptr(),
            len: 1,
        };
    }
    (request, Memory { bytes, list })
}

/// What a request means to the store.
fn operation<'a>(request: &'a Request, list: &'a [libc::iovec; 1]) -> StoreOp<'a> {
    let version = Version::of(request.generation, request.sequence);
    match &request.command {
        Command::Read { chunk, offset, .. } => StoreOp::Read {
            layers: std::slice::from_ref(&chunk.layer),
            chunk: chunk.index,
            offset: *offset,
            iovecs: list,
        },
        Command::Write {
            chunk, offset, fua, ..
        } => StoreOp::Write {
            layers: std::slice::from_ref(&chunk.layer),
            chunk: chunk.index,
            offset: *offset,
            iovecs: list,
            version,
            fua: *fua,
        },
        Command::Zero {
            chunk,
            offset,
            len,
            fua,
        } => StoreOp::Zero {
            layers: std::slice::from_ref(&chunk.layer),
            chunk: chunk.index,
            offset: *offset,
            len: *len,
            version,
            fua: *fua,
        },
        Command::Flush { .. } => StoreOp::Flush,
        Command::Inspect { chunk, block, .. } => StoreOp::Inspect {
            layer: chunk.layer,
            chunk: chunk.index,
            block: *block,
            iovecs: list,
        },
        Command::Restore {
            chunk,
            block,
            stamps: [expect, stamp],
            len,
            ..
        } => StoreOp::Restore {
            layer: chunk.layer,
            chunk: chunk.index,
            block: *block,
            expect: *expect,
            stamp: *stamp,
            iovecs: if *len > 0 { list } else { &[] },
        },
        Command::Fence { layer, .. } => StoreOp::SetFence {
            layer: *layer,
            fence: Fence {
                generation: version.generation(),
                epoch: request.epoch.0,
            },
        },
        Command::ListChunks { .. } | Command::Join => unreachable!("answered without the store"),
    }
}

fn failure(error: StoreError, request: &Request) -> StoreFailure {
    match error {
        StoreError::Stale { .. } => StoreFailure::Stale,
        StoreError::Renumber { .. } => StoreFailure::Renumber,
        StoreError::NoSpace => StoreFailure::NoSpace,
        StoreError::OutOfRange => StoreFailure::Invalid,
        StoreError::Device(errno) | StoreError::ReadOnly(errno) => StoreFailure::Device(errno),
        StoreError::Corrupt { .. } => StoreFailure::Corrupt,
        StoreError::Changed => StoreFailure::Changed,
        StoreError::Mismatch => StoreFailure::Mismatch,
        StoreError::Fenced { generation } => {
            let generation = Generation(u64::from(generation));
            StoreFailure::Fenced(if generation > request.generation {
                Refusal::StaleGeneration(generation)
            } else {
                Refusal::StaleEpoch(Epoch(request.epoch.0 + 1))
            })
        }
    }
}
