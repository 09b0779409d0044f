//! The devices and shards of a node, and how a thread works on them.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, RwLock};
use std::time::Duration;

use fabric_replication::watermark::LANES_MAX;
use fabric_store::ShardCore;
use fabric_store::api::{
    DeviceLabel, Fence, OpId, RecoveryReport, StoreCore, StoreResult, shard_of,
};
use fabric_store::file::DeviceFile;
use fabric_store::uring::{DEPTH, Finished, Owner, Uring};
use fabric_transport::serving::SERVINGS_MAX;
use fabric_types::ids::{ChunkKey, LayerId};
use fabric_types::message::PIECES_MAX;
use rustix::event::epoll;

use super::config::FabricError;
use super::damage::Damage;
use super::mailbox::Mailbox;
use super::scrub::Scrubs;

/// Operations that a data thread has in its replica at once: what its client has in flight, and what other
/// nodes ask.
pub const HELD_MAX: u32 = PIECES_MAX + SERVINGS_MAX;

/// Most devices of a node; one more is refused. With at most 8 shards each, a shard set fits a `u128`.
pub const DEVICES_MAX: usize = 16;

/// Chunks looked at under one lock.
const LISTED_MAX: usize = 4096;

/// Most shards of a node.
const SHARDS_MAX: usize = u128::BITS as usize;

/// The maintenance thread's lane, after those of the data threads.
pub const MAINTENANCE_LANE: usize = LANES_MAX;

/// Bits of an [`OpId`] below the lane.
const LANE_SHIFT: u32 = 56;

/// Names an operation by its submitter's lane and the low bits of its own name.
pub fn op_id(lane: usize, name: u64) -> OpId {
    OpId((lane as u64) << LANE_SHIFT | name & ((1 << LANE_SHIFT) - 1))
}

/// The lane that submitted an operation.
pub fn lane_of(op: OpId) -> usize {
    (op.0 >> LANE_SHIFT) as usize
}

/// The name without the lane.
pub fn name_of(op: OpId) -> u64 {
    op.0 & ((1 << LANE_SHIFT) - 1)
}

/// A store that was opened on a device.
pub struct OpenStore {
    /// The device.
    pub device: DeviceFile,
    /// Its identity.
    pub label: DeviceLabel,
    /// Its shards, in the order of [`shard_of`].
    pub cores: Vec<ShardCore>,
    /// What opening did.
    pub report: RecoveryReport,
}

/// A device at work.
pub struct Device {
    pub file: DeviceFile,
    pub label: DeviceLabel,
    pub report: RecoveryReport,
    /// Its shards among [`Stores::shards`].
    pub first_shard: u32,
    pub shards: u32,
}

impl Device {
    /// Indexes of its shards.
    pub fn shard_indexes(&self) -> std::ops::Range<u32> {
        self.first_shard..self.first_shard + self.shards
    }
}

/// One shard. The lock is held for planning only, never over a system call.
pub struct Shard {
    state: Mutex<ShardState>,
    pub device: u32,
}

/// What the lock guards.
pub struct ShardState {
    pub core: ShardCore,
    /// Lanes whose operations found the core's table full.
    pub waiting: u128,
}

/// All of them.
pub struct Stores {
    pub devices: Box<[Device]>,
    pub shards: Box<[Shard]>,
    mailboxes: Box<[Mailbox]>,
    homes: RwLock<HashMap<LayerId, u32>>,
    /// Devices that get no new layers, one bit each.
    retired: AtomicU32,
    /// What they cannot give.
    pub damage: Damage,
    /// What is asked of the scrubbers, and where they are.
    pub scrubs: Scrubs,
}

const _: () = assert!(LANES_MAX < u128::BITS as usize);
const _: () = assert!(DEVICES_MAX <= u32::BITS as usize);
const _: () = assert!(DEVICES_MAX <= fabric_replication::groups::FAN_OUT_DEVICES_MAX as usize);

impl Stores {
    /// Of a node that has peers other nodes have replicas.
    pub fn new(open: Vec<OpenStore>, has_peers: bool) -> Result<Self, FabricError> {
        if open.len() > DEVICES_MAX {
            return Err(FabricError::TooManyDevices(DEVICES_MAX));
        }
        let mut devices = Vec::new();
        let mut shards = Vec::new();
        for (index, store) in open.into_iter().enumerate() {
            devices.push(Device {
                file: store.device,
                label: store.label,
                report: store.report,
                first_shard: shards.len() as u32,
                shards: store.cores.len() as u32,
            });
            shards.extend(store.cores.into_iter().map(|core| Shard {
                state: Mutex::new(ShardState { core, waiting: 0 }),
                device: index as u32,
            }));
        }
        if shards.len() > SHARDS_MAX {
            return Err(FabricError::TooManyDevices(DEVICES_MAX));
        }
        let mailboxes: Result<_, _> = (0..=MAINTENANCE_LANE)
            .map(|_| Mailbox::new(HELD_MAX as usize))
            .collect();
        Ok(Self {
            damage: Damage::new(devices.len(), has_peers),
            scrubs: Scrubs::new(devices.len()),
            devices: devices.into(),
            shards: shards.into(),
            mailboxes: mailboxes.map_err(FabricError::os("create an eventfd"))?,
            homes: RwLock::new(HashMap::new()),
            retired: AtomicU32::new(0),
        })
    }

    /// The device with this identity.
    pub fn index_of(&self, id: &[u8; 16]) -> Option<u32> {
        let at = self.devices.iter().position(|d| d.label.device == *id)?;
        Some(at as u32)
    }

    /// The layers that have chunks here.
    pub fn layers(&self) -> BTreeSet<LayerId> {
        let mut layers = BTreeSet::new();
        self.each_chunk(|_, chunk| {
            layers.insert(chunk.layer);
        });
        layers
    }

    /// Shows all chunks, with the devices that they lie on. Called under a shard's lock.
    pub fn each_chunk(&self, mut show: impl FnMut(u32, ChunkKey)) {
        for shard in 0..self.shards.len() as u32 {
            let device = self.shards[shard as usize].device;
            self.walk(shard, |core, cursor| {
                let (layer, index, next) = core.next_chunk(cursor)?;
                show(device, ChunkKey { layer, index });
                Some(next)
            });
        }
    }

    /// Shows all fences of a device. Called under a shard's lock.
    pub fn each_fence(&self, device: u32, mut show: impl FnMut(LayerId, Fence)) {
        for shard in self.devices[device as usize].shard_indexes() {
            self.walk(shard, |core, cursor| {
                let (layer, fence, next) = core.next_fence(cursor)?;
                show(layer, fence);
                Some(next)
            });
        }
    }

    /// Goes through the table of a shard: `step` shows what it finds from a position on, and says where to go
    /// on.
    fn walk(&self, shard: u32, mut step: impl FnMut(&ShardCore, u32) -> Option<u32>) {
        let mut cursor = Some(0);
        while cursor.is_some() {
            // Bounded, for others want the lock, too.
            let state = self.lock(shard);
            for _ in 0..LISTED_MAX {
                let Some(at) = cursor else { break };
                cursor = step(&state.core, at);
            }
        }
    }

    pub fn lock(&self, shard: u32) -> MutexGuard<'_, ShardState> {
        // A panic in a core leaves it in an unknown state: better to stop than to go on with it.
        self.shards[shard as usize]
            .state
            .lock()
            .expect("a shard's core panicked")
    }

    /// The shard that holds a chunk of a layer on this device.
    #[inline]
    pub fn shard_for(&self, device: u32, layer: LayerId, chunk: u32) -> u32 {
        let device = &self.devices[device as usize];
        if device.shards == 1 {
            return device.first_shard;
        }
        device.first_shard + shard_of(layer, chunk, device.shards as usize) as u32
    }

    /// The device on which a layer lives: where a fence was set for it. `None`: it has none yet.
    pub fn home_of(&self, layer: LayerId) -> Option<u32> {
        if let Some(&home) = self
            .homes
            .read()
            .expect("no panic under this lock")
            .get(&layer)
        {
            return Some(home);
        }
        let home = (0..self.devices.len() as u32).find(|&device| {
            let mut shards = self.devices[device as usize].shard_indexes();
            shards.any(|shard| self.lock(shard).core.fence(layer) != Default::default())
        })?;
        self.set_home(layer, home);
        Some(home)
    }

    pub fn set_home(&self, layer: LayerId, device: u32) {
        let mut homes = self.homes.write().expect("no panic under this lock");
        homes.insert(layer, device);
    }

    pub fn forget_home(&self, layer: LayerId) {
        let mut homes = self.homes.write().expect("no panic under this lock");
        homes.remove(&layer);
    }

    /// Operations that all stores have done.
    pub fn ops(&self) -> u64 {
        let shards = 0..self.shards.len() as u32;
        shards.map(|s| self.lock(s).core.metrics().ops).sum()
    }

    /// The device with the most free space, for a new layer.
    pub fn roomiest(&self) -> u32 {
        let free = |device: &u32| {
            let shards = self.devices[*device as usize].shard_indexes();
            shards
                .map(|shard| {
                    let space = self.lock(shard).core.space();
                    space.total_bytes.saturating_sub(space.used_bytes)
                })
                .sum::<u64>()
        };
        let retired = self.retired.load(Ordering::Relaxed);
        (0..self.devices.len() as u32)
            .max_by_key(|device| (retired & 1 << device == 0, free(device)))
            .expect("a fabric has at least one device")
    }

    /// From now on no new layer gets its home on this device; false, and nothing is changed, if one has it
    /// there.
    pub fn retire(&self, device: u32) -> bool {
        let homes = self.homes.write().expect("no panic under this lock");
        // Not by the space in use: checkpoints take some, too.
        let mut shards = self.devices[device as usize].shard_indexes();
        let is_empty = shards.all(|s| self.lock(s).core.next_chunk(0).is_none())
            && homes.values().all(|home| *home != device);
        if is_empty {
            self.retired.fetch_or(1 << device, Ordering::Relaxed);
        }
        is_empty
    }

    /// New layers may have their home there again.
    pub fn reinstate(&self, device: u32) {
        self.retired.fetch_and(!(1 << device), Ordering::Relaxed);
    }

    pub fn mailbox(&self, lane: usize) -> &Mailbox {
        &self.mailboxes[lane]
    }
}

/// One thread's means of working on shards.
pub struct IoDriver {
    pub lane: usize,
    pub uring: Uring,
    /// Readable when the ring or the mailbox has something.
    epoll: OwnedFd,
    /// Outcomes of this thread's operations.
    pub mine: std::collections::VecDeque<(OpId, StoreResult)>,
    /// Outcomes of other threads' operations.
    others: Vec<(OpId, StoreResult)>,
    /// Lanes to wake because a table has room again.
    wake: u128,
    /// Shards whose actions did not all fit into the ring.
    starved: u128,
    /// No new actions: the thread is going away.
    closing: bool,
    finished: Vec<Finished>,
    /// Sums of the blocks that finished reads filled, and where those of each in `finished` begin.
    crcs: Vec<u32>,
    crcs_of: Vec<u32>,
    /// Bad blocks of devices that are none any more, to be told.
    healed: Vec<(u32, ChunkKey, u32)>,
}

/// Blocks of a read for which there is room from the start; with more the list of sums grows, at most to what
/// all requests together can read.
const CRCS_TYPICAL: usize = 32;

/// Owner of a device flush: the device's index plus this. Below are shards.
pub const FLUSH_OWNER: Owner = 1 << 31;

/// What a thread finds done.
pub enum Event {
    /// Requests of a shard; they are in `IoDriver::finished`, in this range.
    Shard(u32, std::ops::Range<usize>),
    /// A device flush.
    Flushed(u32, Result<(), i32>),
}

impl IoDriver {
    pub fn new(stores: &Stores, lane: usize) -> Result<Self, FabricError> {
        let fds: Vec<BorrowedFd<'_>> = stores.devices.iter().map(|d| d.file.as_fd()).collect();
        let mut uring = Uring::new(&fds).map_err(FabricError::os("set up io_uring"))?;
        let buffers: Vec<_> = (0..stores.shards.len() as u32)
            .map(|shard| stores.lock(shard).core.buffers())
            .collect();
        // SAFETY: the cores live in `stores`, of which every holder of `IoDriver` holds an `Arc` in a field
        // declared, and so dropped, after it.
        let registered = unsafe { uring.register_buffers(&buffers) };
        if !registered {
            tracing::debug!(lane, "store buffers not registered with io_uring");
        }
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(FabricError::os("create an epoll descriptor"))?;
        // SAFETY: the ring is open as long as `uring` lives.
        let ring = unsafe { BorrowedFd::borrow_raw(uring.as_raw_fd()) };
        for fd in [ring, stores.mailbox(lane).fd()] {
            epoll::add(
                &epoll,
                fd,
                epoll::EventData::new_u64(0),
                epoll::EventFlags::IN,
            )
            .map_err(FabricError::os("watch a descriptor"))?;
        }
        Ok(Self {
            lane,
            uring,
            epoll,
            mine: std::collections::VecDeque::with_capacity(HELD_MAX as usize),
            others: Vec::with_capacity(HELD_MAX as usize),
            wake: 0,
            starved: 0,
            closing: false,
            finished: Vec::with_capacity(DEPTH as usize),
            crcs: Vec::with_capacity(DEPTH as usize * CRCS_TYPICAL),
            crcs_of: Vec::with_capacity(DEPTH as usize + 1),
            healed: Vec::new(),
        })
    }

    pub fn wait_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Executes what the core wants and sorts what it finished, until it wants nothing more.
    pub fn work(&mut self, shard: u32, device: u32, state: &mut ShardState) {
        self.starved &= !(1 << shard);
        loop {
            let mut idle = true;
            while !self.closing {
                if self.uring.room() == 0 {
                    // Completions in this very ring come, and with them another look.
                    self.starved |= 1 << shard;
                    break;
                }
                let Some(action) = state.core.poll_action() else {
                    break;
                };
                // SAFETY: the core keeps the memory of an action until `on_device`.
                unsafe { self.uring.start(shard, device, &action) };
            }
            while let Some((op, result)) = state.core.poll_completion() {
                idle = false;
                if lane_of(op) == self.lane {
                    self.mine.push_back((op, result));
                } else {
                    self.others.push((op, result));
                }
            }
            while let Some((chunk, block)) = state.core.poll_healed() {
                self.healed.push((device, chunk, block));
            }
            if idle {
                return;
            }
            self.wake |= std::mem::take(&mut state.waiting);
        }
    }

    /// Starts a flush of a device; false if the ring is full.
    pub fn start_flush(&mut self, device: u32) -> bool {
        if self.uring.room() == 0 {
            return false;
        }
        let flush = fabric_store::device::DeviceAction::Flush {
            id: fabric_store::device::IoId(0),
        };
        // SAFETY: a flush names no memory.
        unsafe { self.uring.start(FLUSH_OWNER + device, device, &flush) };
        true
    }

    /// Takes in what the ring finished. To be followed by [`next_event`](Self::next_event) until `None`.
    /// Tells whether there is more to take in.
    pub fn collect(&mut self, stores: &Stores) -> bool {
        self.finished.clear();
        let mut more = false;
        if self.uring.in_flight() > 0 {
            let finished = &mut self.finished;
            let mut lost_flush = false;
            more = self.uring.reap(|f| {
                lost_flush |= f.flush && f.result.is_err();
                finished.push(f);
            });
            if lost_flush {
                self.spread_lost_flushes(stores);
            }
            if self.finished.len() > 1 {
                self.finished.sort_unstable_by_key(|f| f.owner);
            }
        }
        self.digest();
        more
    }

    /// Takes the sums of what was read. Here and not in the core, which is locked when it is told.
    #[inline]
    fn digest(&mut self) {
        self.crcs.clear();
        self.crcs_of.clear();
        for finished in &self.finished {
            self.crcs_of.push(self.crcs.len() as u32);
            if let Some(filled) = &finished.filled {
                // SAFETY: the core keeps the memory of an action until it is told of its end.
                unsafe { filled.digest(&mut self.crcs) };
            }
        }
        self.crcs_of.push(self.crcs.len() as u32);
    }

    /// Tells every shard of a device of which a flush failed, before any other outcome is looked at: the
    /// kernel tells of a lost write only once, and the one told may be another shard, or another thread. What
    /// this cannot catch is a flush of another thread that began after the failed one had ended in the kernel
    /// and is reaped before it.
    #[cold]
    pub fn spread_lost_flushes(&mut self, stores: &Stores) {
        for at in 0..self.finished.len() {
            let Finished { owner, result, .. } = self.finished[at];
            let (true, Err(errno)) = (self.finished[at].flush, result) else {
                continue;
            };
            let device = match owner.checked_sub(FLUSH_OWNER) {
                Some(device) => device,
                None => stores.shards[owner as usize].device,
            };
            let known = &stores.devices[device as usize];
            tracing::error!(
                device = %known.file.path().display(),
                errno,
                "device flush failed, the device is read-only until restart"
            );
            for shard in known.shard_indexes() {
                let mut state = stores.lock(shard);
                state.core.flush_failed(errno);
                self.work(shard, device, &mut state);
            }
        }
    }

    /// What was finished, by owner, from position `at` on, which is moved.
    pub fn next_event(&self, at: &mut usize) -> Option<Event> {
        let first = self.finished.get(*at)?;
        let start = *at;
        *at += 1;
        if first.owner >= FLUSH_OWNER {
            return Some(Event::Flushed(first.owner - FLUSH_OWNER, first.result));
        }
        while self
            .finished
            .get(*at)
            .is_some_and(|f| f.owner == first.owner)
        {
            *at += 1;
        }
        Some(Event::Shard(first.owner, start..*at))
    }

    /// Tells a core the outcomes of its requests.
    pub fn tell(&self, state: &mut ShardState, range: std::ops::Range<usize>) {
        for (finished, at) in self.finished[range.clone()].iter().zip(range) {
            if finished.filled.is_some() {
                let (from, to) = (self.crcs_of[at], self.crcs_of[at + 1]);
                let crcs = &self.crcs[from as usize..to as usize];
                state.core.on_read(finished.id, crcs);
            } else {
                state.core.on_device(finished.id, finished.result);
            }
        }
    }

    /// True if the shard has actions left because the ring was full.
    pub fn is_starved(&self, shard: u32) -> bool {
        self.starved & (1 << shard) != 0
    }

    /// True if any shard has.
    pub fn any_starved(&self) -> bool {
        self.starved != 0
    }

    /// Enters the kernel, and delivers what belongs to other threads.
    pub fn send(&mut self, stores: &Stores) {
        self.uring.kick();
        for (device, chunk, block) in self.healed.drain(..) {
            stores.damage.on_healed(device, chunk, block);
        }
        if self.others.is_empty() && self.wake == 0 {
            return;
        }
        for (op, result) in self.others.drain(..) {
            let lane = lane_of(op);
            stores.mailbox(lane).push(op, result);
            self.wake |= 1 << lane;
        }
        while self.wake != 0 {
            let lane = self.wake.trailing_zeros() as usize;
            self.wake &= self.wake - 1;
            stores.mailbox(lane).signal();
        }
    }

    /// Takes the outcomes that other threads delivered; true if woken.
    pub fn read_inbox(&mut self, stores: &Stores) -> bool {
        let mailbox = stores.mailbox(self.lane);
        if !mailbox.is_full() {
            return false;
        }
        let mine = &mut self.mine;
        mailbox.drain(|op, result| mine.push_back((op, result)));
        true
    }

    /// Ends this thread's work: requests in the kernel are waited for and told, nothing new is started. What
    /// the shards want next is left to the maintenance thread.
    pub fn close(&mut self, stores: &Stores) {
        self.closing = true;
        // A device that answers nothing for this long answers nothing at all.
        for _ in 0..CLOSE_TRIES {
            if self.uring.in_flight() == 0 {
                break;
            }
            if let Err(error) = self.uring.wait(CLOSE_POLL) {
                tracing::error!(%error, lane = self.lane, "cannot wait for device requests");
                break;
            }
            self.collect(stores);
            let mut at = 0;
            while let Some(event) = self.next_event(&mut at) {
                if let Event::Shard(shard, range) = event {
                    let mut state = stores.lock(shard);
                    self.tell(&mut state, range);
                    self.work(shard, stores.shards[shard as usize].device, &mut state);
                }
            }
        }
        self.wake |= 1 << MAINTENANCE_LANE;
        self.send(stores);
    }

    /// Takes on actions again after [`close`](Self::close).
    pub fn reopen(&mut self) {
        self.closing = false;
    }
}

/// How long closing waits for the device: 30 seconds.
const CLOSE_TRIES: u32 = 300;
const CLOSE_POLL: Duration = Duration::from_millis(100);
