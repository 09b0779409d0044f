//! One data thread's way to the shards: requests are queued per shard, and a kick plans each shard's queue
//! under one lock, so that many small writes become one device write.

mod fan_out;
mod flush;
mod list;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use fabric_replication::fence::{FenceCache, Fences};
use fabric_replication::groups::{Group, GroupCache, Groups};
use fabric_replication::replica::store_op::{
    ROUND, failure, operation, still_admitted, tell_fence,
};
use fabric_replication::replica::{StoreFailure, StoreKey};
use fabric_store::api::{OpId, ScrubFinding, StoreCore, StoreError, Submitted};
use fabric_types::block::Holds;
use fabric_types::ids::{ChunkKey, Version};
use fabric_types::{Command, Refusal, Request};

use self::flush::DeviceFlush;
use super::config::FabricError;
use super::io_driver::{Event, IoDriver};
use super::shared::Lane;
use super::stores::{HELD_MAX, ShardState, Stores, name_of, op_id};

/// Pause after a device could not be registered with the ring: the kernel is short of memory.
const UPDATE_PAUSE: Duration = Duration::from_millis(10);

/// No element of a queue.
const NONE: u32 = u32::MAX;

/// A request between the replica machine and its completion, at the index of its key.
struct Slot {
    key: StoreKey,
    request: Request,
    next: u32,
    /// Of a request that concerns every shard or every device, one after another: where it is.
    stop: u32,
}

/// A first-in first-out list of slots.
#[derive(Clone, Copy)]
struct Queue {
    head: u32,
    tail: u32,
}

const EMPTY: Queue = Queue {
    head: NONE,
    tail: NONE,
};

/// The port.
pub struct ShardPort {
    /// Before `stores`: fields are dropped in this order, and the ring has the cores' memory registered.
    driver: IoDriver,
    stores: Arc<Stores>,
    fences: FenceCache,
    groups: GroupCache,
    slots: Box<[Slot]>,
    /// Of each shard that this thread knows.
    queues: Vec<Queue>,
    queued: u32,
    /// Of each device that this thread knows.
    flushes: Vec<DeviceFlush>,
    _lane: Lane,
}

impl ShardPort {
    /// A port to the shards; `groups` are those that the node has replicas of.
    pub fn new(
        stores: Arc<Stores>,
        fences: Arc<Fences>,
        groups: Arc<Groups>,
        lane: Lane,
    ) -> Result<Self, FabricError> {
        let driver = IoDriver::new(&stores, lane.index())?;
        // What a previous user of the lane was sent too late.
        stores.mailbox(lane.index()).drain(|_, _| ());
        let slot = |_| Slot {
            key: fabric_types::slab::Key(0),
            request: Request::NOTHING,
            next: NONE,
            stop: 0,
        };
        let mut port = Self {
            fences: FenceCache::new(fences),
            groups: GroupCache::new(groups),
            driver,
            slots: (0..HELD_MAX).map(slot).collect(),
            queues: Vec::new(),
            queued: 0,
            flushes: Vec::new(),
            _lane: lane,
            stores,
        };
        port.make_room();
        Ok(port)
    }

    /// Takes up which devices were added, removed or closed.
    #[cold]
    fn update_devices(&mut self) {
        if let Err(error) = self.driver.update_devices(&self.stores) {
            // Repeated at the next look, which this brings about; requests for the device wait.
            tracing::error!(%error, lane = self.driver.lane, "register a device");
            std::thread::sleep(UPDATE_PAUSE);
            self.stores.mailbox(self.driver.lane).signal();
        }
        self.make_room();
    }

    /// Makes queues for devices that were added.
    fn make_room(&mut self) {
        for device in self.flushes.len() as u32..self.stores.device_count() {
            let device = self.stores.device(device);
            self.flushes.push(DeviceFlush::new(device.shards));
            self.queues
                .resize(device.shard_indexes().end as usize, EMPTY);
        }
    }

    /// To be called before a request is queued for a device: it may have been added since the last look.
    #[inline]
    fn know_device(&mut self, device: u32) {
        if device as usize >= self.flushes.len() {
            self.update_devices();
        }
    }

    #[inline]
    fn devices_changed(&self) -> bool {
        self.driver.devices_changed(&self.stores)
    }

    /// Whether [`reap`](Self::reap) is to be called although no device owes an answer: somebody has woken
    /// this thread, or devices were added, removed or closed.
    #[inline]
    pub fn must_look(&self) -> bool {
        self.devices_changed() || self.stores.mailbox(self.driver.lane).is_full()
    }

    pub fn wait_fd(&self) -> BorrowedFd<'_> {
        self.driver.wait_fd()
    }

    /// Whether devices owe answers. Among them may be those to other threads' requests: who works on a shard
    /// executes whatever it wants done.
    #[inline]
    pub fn awaits_devices(&self) -> bool {
        self.driver.uring.in_flight() > 0
    }

    /// Waits for outstanding device requests without starting new ones.
    pub fn drain_completions(&mut self) {
        if self.awaits_devices() {
            self.driver.close(&self.stores);
            self.driver.reopen();
        }
    }

    /// Queues a request; [`kick`](Self::kick) hands it to its shard.
    #[inline]
    pub fn submit(&mut self, key: StoreKey, request: &Request) -> Option<Result<(), StoreFailure>> {
        let index = key.index();
        let slot = &mut self.slots[index as usize];
        slot.key = key;
        slot.request = *request;
        slot.stop = 0;
        let chunk = match request.command {
            Command::Read { chunk, .. }
            | Command::Write { chunk, .. }
            | Command::Zero { chunk, .. }
            | Command::Inspect { chunk, .. }
            | Command::Restore { chunk, .. } => chunk,
            Command::Flush { .. } | Command::Fence { .. } => return self.begin_tour(index),
            Command::ListChunks { .. } => return Some(self.list_chunks(request)),
            Command::TellFence { layer, buffers, .. } => {
                let shards = self.stores.shard_indexes();
                let persisted = shards.map(|shard| self.stores.lock(shard).core.fence(layer));
                // SAFETY: whoever asks keeps the list and its memory until the answer.
                unsafe { tell_fence(&buffers, persisted) };
                return Some(Ok(()));
            }
            // The replica machine answers it.
            Command::Join => return Some(Err(StoreFailure::Invalid)),
        };
        let Some(home) = self.home_of(request) else {
            return Some(Err(self.homeless()));
        };
        self.know_device(home);
        let shard = self.stores.shard_for(home, chunk.layer, chunk.index);
        self.queue(shard, index);
        None
    }

    /// What was submitted as `key`, which no other request has been given since.
    #[inline]
    pub fn request(&self, key: StoreKey) -> &Request {
        &self.slots[key.index() as usize].request
    }

    #[inline]
    fn queue(&mut self, shard: u32, index: u32) {
        self.queues[shard as usize].push(&mut self.slots, index);
        self.queued += 1;
    }

    /// The device of the group that a request is for.
    #[inline]
    fn home_of(&mut self, request: &Request) -> Option<u32> {
        if self.stores.device_count() == 1 {
            return Some(0);
        }
        self.groups.get(request.pg).map(Group::device)
    }

    /// Failure of a request whose group is not here. It was when the request was admitted: a newer map took
    /// it away.
    #[cold]
    fn homeless(&self) -> StoreFailure {
        StoreFailure::Fenced(Refusal::StaleEpoch(self.groups.shared().known()))
    }

    /// Plans what was submitted and enters the kernel once.
    #[inline]
    pub fn kick(&mut self) {
        self.plan_queues();
        self.step_flushes();
        self.driver.send(&self.stores);
    }

    #[inline]
    fn plan_queues(&mut self) {
        if self.queued == 0 && !self.driver.any_starved() {
            return;
        }
        for shard in 0..self.queues.len() as u32 {
            if self.queues[shard as usize].head != NONE || self.driver.is_starved(shard) {
                let stores = Arc::clone(&self.stores);
                let mut state = stores.lock(shard);
                self.work(shard, &mut state);
            }
        }
    }

    /// Submits a shard's queue and executes what follows.
    #[inline]
    fn work(&mut self, shard: u32, state: &mut ShardState) {
        while self.queues[shard as usize].head != NONE {
            let index = self.queues[shard as usize].head;
            let slot = &self.slots[index as usize];
            let groups = &mut self.groups;
            match submit_one(state, &mut self.fences, groups, self.driver.lane, slot) {
                Ok(Submitted::Accepted) => {}
                Ok(Submitted::Busy) => {
                    // Whoever completes an operation of this shard next wakes this thread.
                    state.waiting |= 1 << self.driver.lane;
                    break;
                }
                Err(refusal) => self.refused(index, refusal),
            }
            self.queues[shard as usize].pop(&mut self.slots);
            self.queued -= 1;
        }
        let device = self.stores.device_of(shard);
        self.driver.work(shard, device, state);
    }

    /// A fence rose between the replica's check and the shard's turn.
    #[cold]
    fn refused(&mut self, index: u32, refusal: Refusal) {
        let fenced = |generation| StoreError::Fenced {
            generation: u32::try_from(generation).unwrap_or(u32::MAX),
        };
        let error = match refusal {
            Refusal::StaleGeneration(generation) => fenced(generation.0),
            Refusal::Changed => StoreError::Changed,
            _ => fenced(0),
        };
        let op = self.op_of(index);
        self.driver.mine.push_back((op, Err(error)));
    }

    fn op_of(&self, index: u32) -> OpId {
        op_id(self.driver.lane, self.slots[index as usize].key.0)
    }

    /// Takes in what the devices finished and what other threads finished for this one; tells whether there
    /// is more.
    #[inline]
    pub fn reap(&mut self) -> bool {
        let mut busy = self.devices_changed();
        if busy {
            self.update_devices();
        }
        let more = self.driver.collect(&self.stores);
        let mut at = 0;
        while let Some(event) = self.driver.next_event(&mut at) {
            busy = true;
            match event {
                Event::Shard(shard, range) => {
                    let stores = Arc::clone(&self.stores);
                    let mut state = stores.lock(shard);
                    self.driver.tell(&mut state, range);
                    self.work(shard, &mut state);
                }
                Event::Flushed(device, result) => self.flushed(device as usize, result),
            }
        }
        busy |= self.driver.read_inbox(&self.stores);
        if busy {
            self.plan_queues();
            self.step_flushes();
            self.driver.send(&self.stores);
        }
        more
    }

    /// Next finished operation.
    #[inline]
    pub fn next_completion(&mut self) -> Option<(StoreKey, Result<(), StoreFailure>)> {
        loop {
            let (op, result) = self.driver.mine.pop_front()?;
            let name = name_of(op);
            let Some(slot) = self.slots.get(slot_index(name)) else {
                self.on_flush_step(name, result);
                continue;
            };
            // The lane took the upper bits of the key; what is left still tells uses apart.
            if name_of(OpId(slot.key.0)) == name {
                let result = match self.next_stop(slot.key.index(), result) {
                    Some(result) => result,
                    None => continue,
                };
                match result {
                    Err(error) => self.note_damage(slot_index(name), error),
                    Ok(()) => self.note_lost(slot_index(name)),
                }
                let slot = &self.slots[slot_index(name)];
                let result = result.map_err(|error| failure(error, &slot.request));
                return Some((slot.key, result));
            }
        }
    }

    /// A block whose loss a round or a takeover has brought is to be repaired as soon as somebody can read
    /// it.
    #[inline]
    fn note_lost(&mut self, slot: usize) {
        let request = &self.slots[slot].request;
        if let Command::Restore {
            chunk,
            block,
            stamps: [_, stamp],
            len: 0,
            ..
        } = request.command
            && stamp.holds() == Holds::Data
        {
            self.list_damage(slot, chunk, (block, Version(stamp.version)), 0);
        }
    }

    /// A block that a guest, or another node, has met is as good as found by the scrubber.
    #[cold]
    fn note_damage(&mut self, slot: usize, error: StoreError) {
        let request = self.slots[slot].request;
        let Some(found) = error.finding() else {
            return;
        };
        // Whoever compares or repairs knows.
        if request.generation == ROUND {
            return;
        }
        let (layer, index) = (found.layer, found.chunk);
        let place = (found.block, found.version);
        self.list_damage(slot, ChunkKey { layer, index }, place, found.device_offset);
    }

    #[cold]
    fn list_damage(
        &mut self,
        slot: usize,
        chunk: ChunkKey,
        (block, version): (u32, Version),
        device_offset: u64,
    ) {
        let request = self.slots[slot].request;
        if let Some(device) = self.home_of(&request) {
            let finding = ScrubFinding {
                layer: chunk.layer,
                chunk: chunk.index,
                block,
                version,
                device_offset,
            };
            self.stores.damage.on_read(device as usize, finding);
        }
    }
}

/// The slot that an operation's name tells.
#[inline]
fn slot_index(name: u64) -> usize {
    (name & u64::from(u32::MAX)) as usize
}

impl Drop for ShardPort {
    fn drop(&mut self) {
        self.driver.close(&self.stores);
    }
}

impl Queue {
    #[inline]
    fn push(&mut self, slots: &mut [Slot], index: u32) {
        slots[index as usize].next = NONE;
        if self.head == NONE {
            self.head = index;
        } else {
            slots[self.tail as usize].next = index;
        }
        self.tail = index;
    }

    #[inline]
    fn pop(&mut self, slots: &mut [Slot]) {
        self.head = slots[self.head as usize].next;
    }
}

/// Hands a request to its shard. The fences are looked at again: under the shard's lock nothing comes between
/// this check and the plan.
#[inline]
fn submit_one(
    state: &mut ShardState,
    fences: &mut FenceCache,
    groups: &mut GroupCache,
    lane: usize,
    slot: &Slot,
) -> Result<Submitted, Refusal> {
    let request = &slot.request;
    if state.is_closed {
        // By a newer map its group is elsewhere.
        return Err(Refusal::StaleEpoch(request.epoch));
    }
    let fence = request.command.layer().and_then(|layer| fences.of(layer));
    still_admitted(request, fence.map(|fence| &**fence), groups)?;
    // SAFETY: the client's piece holds the list until the request is answered, and the submitter of the guest
    // request keeps its buffers.
    unsafe {
        let op = operation(request).expect("only what a shard executes is queued for one");
        Ok(state.core.submit(op_id(lane, slot.key.0), op))
    }
}

#[cfg(test)]
mod tests;
