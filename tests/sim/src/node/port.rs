//! A node's chunk stores as its replica machines see them: as `engine::shard_port`, without threads and
//! rings.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use fabric_replication::fence::Fences;
use fabric_replication::groups::{GroupCache, Groups};
use fabric_replication::repair::queue::BadBlock;
use fabric_replication::replica::store_op::{
    ROUND, failure, list_chunks, operation, still_admitted, tell_fence,
};
use fabric_replication::replica::{StoreFailure, StoreKey, StorePort};
use fabric_replication::resync::rounds::Token;
use fabric_store::ShardCore;
use fabric_store::api::{OpId, StoreCore, StoreError, StoreResult, Submitted};
use fabric_types::block::{BLOCK_BYTES, Holds};
use fabric_types::ids::{CHUNK_BYTES, ChunkKey, Version};
use fabric_types::io::SECTOR_BYTES;
use fabric_types::iov::IoVecs;
use fabric_types::{Command, Generation, Incarnation, PgId, Refusal, Request, placement};

use super::memory::{Buffer, Use, buffers_of, usage};
use super::store::Store;
use super::{Parcel, Stored};
use crate::mutation::{Asker, Mutation, without_fua};

/// For whom the store works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// A replica machine, by data thread.
    Replica(usize, StoreKey),
    /// A round of comparison.
    Round(Token),
    /// Whoever asked has been answered; see [`Mutation::answers_early`].
    Nobody,
}

/// A request's memory: what is written, or what is filled.
struct Memory {
    buffer: Buffer,
    /// Only named by the request.
    _list: Box<[libc::iovec; 1]>,
}

/// A request in the store's hands.
struct Held {
    purpose: Purpose,
    request: Request,
    memory: Memory,
    /// The lease that the shard had persisted when it took the request.
    fence: Generation,
    /// The device whose store has it. A fence and a flush go from one to the next.
    device: usize,
    /// It has been on another device before.
    is_on_tour: bool,
}

/// A finished store operation. Its memory is that of the request, which the replica machine may still fill.
pub struct Finished {
    pub purpose: Purpose,
    pub request: Request,
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
    /// By device.
    pub stores: Vec<Store>,
    fences: Arc<Fences>,
    groups: Arc<Groups>,
    cache: GroupCache,
    of_groups: usize,
    held: BTreeMap<u64, Held>,
    /// A fence or a flush has gone on to its next device.
    went_on: bool,
    /// Blocks that others' requests have found bad since they were asked for last.
    pub damaged: Vec<BadBlock>,
    /// Blocks that a round or a takeover has made known as lost since they were asked for last.
    pub lost: Vec<BadBlock>,
    /// A fence rose before their turn came.
    refused: VecDeque<(u64, StoreFailure)>,
    /// The request that is being handed to a replica.
    incoming: Option<(usize, Memory)>,
    /// What the last request that was answered at once has filled.
    at_once: Option<Memory>,
    next: u64,
    requests: u64,
    pub stored: Vec<Stored>,
    /// A mistake, and the process that makes it.
    mutation: Option<(Mutation, Incarnation)>,
}

impl Port {
    /// Stores whose chunks lie in so many groups, of which the node holds these.
    pub fn new(
        cores: Vec<ShardCore>,
        fences: Arc<Fences>,
        groups: Arc<Groups>,
        of_groups: usize,
        mutation: Option<(Mutation, Incarnation)>,
    ) -> Self {
        Self {
            stores: cores.into_iter().map(Store::new).collect(),
            fences,
            cache: GroupCache::new(Arc::clone(&groups)),
            groups,
            of_groups,
            held: BTreeMap::new(),
            went_on: false,
            damaged: Vec::new(),
            lost: Vec::new(),
            refused: VecDeque::new(),
            incoming: None,
            at_once: None,
            next: 0,
            requests: 0,
            stored: Vec::new(),
            mutation,
        }
    }

    pub fn waiting(&self) -> usize {
        self.stores.iter().map(|store| store.waiting.len()).sum()
    }

    /// Operations that the stores are at work on.
    pub fn in_flight(&self) -> usize {
        self.stores.iter().map(|s| s.core.in_flight()).sum()
    }

    /// Requests that the devices are at work on.
    pub fn device_in_flight(&self) -> usize {
        let stores = self.stores.iter();
        stores.map(|s| s.core.device_in_flight()).sum()
    }

    /// The device that holds a group; `None`: none does.
    fn home_of(&self, pg: PgId) -> Option<usize> {
        if self.stores.len() == 1 {
            return Some(0);
        }
        let group = self.groups.get(pg)?;
        Some(group.device() as usize)
    }

    /// A newer map took it away.
    fn homeless(&self) -> StoreFailure {
        StoreFailure::Fenced(Refusal::StaleEpoch(self.groups.known()))
    }

    /// The device on which a fence or a flush begins, or goes on after this one.
    fn next_stop(&self, request: &Request, after: Option<usize>) -> Option<usize> {
        let after = after.map(|device| device as u32);
        let next = self
            .groups
            .next_stop(request, after, self.stores.len() as u32);
        next.map(|device| device as usize)
    }

    /// The device that a request goes to first.
    fn first_stop(&self, request: &Request) -> Option<usize> {
        match request.command {
            Command::Flush { .. } | Command::Fence { .. } => self.next_stop(request, None),
            _ => self.home_of(request.pg),
        }
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
    pub fn submit_local(
        &mut self,
        purpose: Purpose,
        parcel: Parcel,
    ) -> Option<Result<Arc<[u8]>, StoreFailure>> {
        let (request, memory) = self.with_memory(parcel);
        let Some(device) = self.first_stop(&request) else {
            return Some(Err(self.homeless()));
        };
        if let Command::ListChunks {
            cursor, buffers, ..
        } = request.command
        {
            self.list(device, request.pg, cursor, &buffers);
            return Some(Ok(memory.buffer.bytes().into()));
        }
        if self.skips(&request.command, Asker::Round) {
            return Some(Ok(memory.buffer.bytes().into()));
        }
        if self.answers_early(&request.command, Asker::Round) {
            let data = memory.buffer.bytes().into();
            self.hold(Purpose::Nobody, request, memory, device);
            return Some(Ok(data));
        }
        self.hold(purpose, request, memory, device);
        None
    }

    fn skips(&self, command: &Command, by: Asker) -> bool {
        self.mutation
            .is_some_and(|(mutation, incarnation)| mutation.skips(command, incarnation, by))
    }

    fn answers_early(&self, command: &Command, by: Asker) -> bool {
        self.mutation
            .is_some_and(|(mutation, _)| mutation.answers_early(command, by))
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

    fn hold(&mut self, purpose: Purpose, mut request: Request, memory: Memory, device: usize) {
        if let Some((mutation, _)) = self.mutation {
            without_fua(mutation, &mut request.command);
        }
        let number = self.next;
        self.next += 1;
        let held = Held {
            purpose,
            request,
            memory,
            fence: Generation(0),
            device,
            is_on_tour: false,
        };
        self.held.insert(number, held);
        self.stores[device].waiting.push_back(number);
    }

    /// Lists the chunks of the group that lie on a device.
    fn list(&self, device: usize, pg: PgId, cursor: u64, buffers: &IoVecs) {
        let next = |cursor: u64| {
            let mut all = self.stores[device].chunks_from(cursor as u32);
            let of_groups = self.of_groups as u32;
            let in_group =
                |(chunk, _): &(ChunkKey, u32)| placement::pg_of(*chunk, of_groups) == pg.base();
            let (chunk, behind) = all.find(in_group)?;
            Some((chunk, u64::from(behind)))
        };
        // SAFETY: the list and its memory are held by the caller.
        unsafe { list_chunks(cursor, buffers, next) };
    }

    /// Hands to the stores what they have room for.
    pub fn submit_waiting(&mut self) {
        for device in 0..self.stores.len() {
            self.submit_to(device);
        }
    }

    fn submit_to(&mut self, device: usize) {
        let Store { core, waiting } = &mut self.stores[device];
        while let Some(&number) = waiting.front() {
            let held = self.held.get_mut(&number).expect("it waits");
            if let Err(failure) = may_still(held, &self.fences, &mut self.cache) {
                waiting.pop_front();
                self.refused.push_back((number, failure));
                continue;
            }
            let layer = held.request.command.layer();
            let fence = layer.map_or(0, |layer| core.fence(layer).generation);
            held.fence = Generation(u64::from(fence));
            // SAFETY: the memory is in `held` until the completion.
            let submitted = unsafe {
                let op = operation(&held.request).expect("answered without the store");
                core.submit(OpId(number), op)
            };
            match submitted {
                Submitted::Accepted => waiting.pop_front(),
                Submitted::Busy => return,
            };
        }
    }

    /// Whether a fence or a flush has gone on to its next device since the last look.
    pub fn take_went_on(&mut self) -> bool {
        std::mem::take(&mut self.went_on)
    }

    /// A fence is to be persisted on the devices, and a flush is one of them: sends what is done on one to
    /// the next. Its outcome, if that was the last, or it failed.
    fn go_on_tour(&mut self, number: u64, result: StoreResult) -> Option<StoreResult> {
        let held = self.held.get(&number).expect("an operation ends once");
        let (request, device) = (held.request, held.device);
        let result = match (request.command, result) {
            (Command::Flush { .. }, Err(_)) => {
                let devices = self.stores.len() as u32;
                let fails = self.groups.fails_flush(&request, device as u32, devices);
                if fails { result } else { Ok(()) }
            }
            // A store that knows a newer fence is as good as one that has this one.
            (Command::Fence { .. }, Err(StoreError::Stale { .. })) => Ok(()),
            (Command::Flush { .. } | Command::Fence { .. }, _) => result,
            _ => return Some(result),
        };
        let is_flush = matches!(request.command, Command::Flush { .. });
        let stops = matches!(self.mutation, Some((Mutation::FlushOneDevice, _)));
        let next = match result {
            Ok(()) if is_flush && stops => None,
            Ok(()) => self.next_stop(&request, Some(device)),
            Err(_) => None,
        };
        let Some(next) = next else {
            return Some(result);
        };
        let held = self.held.get_mut(&number).expect("it was there just now");
        (held.device, held.is_on_tour) = (next, true);
        self.stores[next].waiting.push_back(number);
        self.went_on = true;
        None
    }

    fn next_completion(&mut self) -> Option<(OpId, StoreResult)> {
        let mut stores = self.stores.iter_mut();
        stores.find_map(Store::poll_completion)
    }

    /// Next operation that the stores finished.
    pub fn next_finished(&mut self) -> Option<Finished> {
        if let Some((number, failure)) = self.refused.pop_front() {
            let held = self.held.remove(&number).expect("it waited");
            return Some(Finished {
                purpose: held.purpose,
                request: held.request,
                result: Err(failure),
                memory: None,
            });
        }
        let (id, result) = loop {
            let (id, result) = self.next_completion()?;
            if let Some(result) = self.go_on_tour(id.0, result) {
                break (id, result);
            }
        };
        let held = self.held.remove(&id.0).expect("an operation ends once");
        if matches!(result, Ok(()) | Err(StoreError::Stale { .. })) {
            self.note_stored(&held);
        }
        let home = self.home_of(held.request.pg);
        let bad = |(chunk, block)| {
            let device = home? as u32;
            Some(BadBlock {
                device,
                chunk,
                block,
            })
        };
        if result.is_ok() {
            let lost = lost_by(&held.request.command);
            self.lost.extend(lost.and_then(bad));
        }
        if let Err(error) = &result
            && let Some(found) = error.finding()
            && held.request.generation != ROUND
        {
            let (layer, index) = (found.layer, found.chunk);
            self.damaged
                .extend(bad((ChunkKey { layer, index }, found.block)));
        }
        let fills = matches!(usage(&held.request.command), Use::Destination(_));
        Some(Finished {
            purpose: held.purpose,
            request: held.request,
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
                device: held.device,
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
}

impl StorePort for Port {
    fn submit(&mut self, key: StoreKey, request: &Request) -> Option<Result<(), StoreFailure>> {
        let taken = self.incoming.take();
        let (thread, memory) = taken.expect("set by the caller of the replica");
        if let Command::TellFence { layer, buffers, .. } = request.command {
            let persisted = self.stores.iter().map(|store| store.core.fence(layer));
            // SAFETY: the list and its memory are held here.
            unsafe { tell_fence(&buffers, persisted) };
            self.at_once = Some(memory);
            return Some(Ok(()));
        }
        let Some(device) = self.first_stop(request) else {
            return Some(Err(self.homeless()));
        };
        if let Command::ListChunks {
            cursor, buffers, ..
        } = request.command
        {
            self.list(device, request.pg, cursor, &buffers);
            self.at_once = Some(memory);
            return Some(Ok(()));
        }
        if self.skips(&request.command, Asker::Client) {
            return Some(Ok(()));
        }
        if self.answers_early(&request.command, Asker::Client) {
            self.hold(Purpose::Nobody, *request, memory, device);
            return Some(Ok(()));
        }
        self.hold(Purpose::Replica(thread, key), *request, memory, device);
        None
    }
}

/// The last look at a request.
fn may_still(held: &Held, fences: &Fences, groups: &mut GroupCache) -> Result<(), StoreFailure> {
    let request = &held.request;
    if matches!(request.command, Command::Flush { .. }) && held.is_on_tour {
        return Ok(());
    }
    let fence = request.command.layer().and_then(|layer| fences.of(layer));
    let looked = still_admitted(request, fence.as_deref(), groups);
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
