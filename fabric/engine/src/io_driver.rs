//! One thread's means of working on shards: its ring, and what it found done.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use fabric_store::api::{OpId, StoreCore, StoreResult};
use fabric_store::uring::{DEPTH, Finished, Owner, Uring};
use fabric_types::ids::ChunkKey;
use rustix::event::epoll;

use super::config::FabricError;
use super::stores::{HELD_MAX, MAINTENANCE_LANE, ShardState, Stores, lane_of};

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
    /// Devices in the ring's table, one bit each.
    registered: u32,
    /// The changes to devices that the ring knows, see [`Stores::changes`].
    changes: u32,
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
        let mut uring = Uring::new(&[]).map_err(FabricError::os("set up io_uring"))?;
        // The kernel takes all at once: those of devices that are added later stay unregistered.
        let buffers: Vec<_> = stores
            .shard_indexes()
            .map(|shard| stores.lock(shard).core.buffers())
            .collect();
        // SAFETY: the cores live in `stores`. Whoever holds an `IoDriver` has an `Arc` of them in a field
        // that is declared, and so dropped, after it.
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
        let mut driver = Self {
            lane,
            uring,
            epoll,
            mine: std::collections::VecDeque::with_capacity(HELD_MAX as usize),
            others: Vec::with_capacity(HELD_MAX as usize),
            wake: 0,
            starved: 0,
            closing: false,
            registered: 0,
            // Not what it is now: the devices are registered below.
            changes: stores.changes().wrapping_sub(1),
            finished: Vec::with_capacity(DEPTH as usize),
            crcs: Vec::with_capacity(DEPTH as usize * CRCS_TYPICAL),
            crcs_of: Vec::with_capacity(DEPTH as usize + 1),
            healed: Vec::new(),
        };
        driver.update_devices(stores)?;
        Ok(driver)
    }

    /// Whether devices were added, removed or closed since the last
    /// [`update_devices`](Self::update_devices), or that has left something to do.
    #[inline]
    pub fn devices_changed(&self, stores: &Stores) -> bool {
        stores.changes() != self.changes
    }

    /// Registers devices that were added with the ring, and takes out those that are closed. One that
    /// requests of this thread are under way on is left for the next call.
    #[cold]
    pub fn update_devices(&mut self, stores: &Stores) -> Result<(), FabricError> {
        let changes = stores.changes();
        let mut is_complete = true;
        for index in 0..stores.device_count() {
            let bit = 1 << index;
            let file = stores.device(index).file();
            let fd = file.as_ref().map(|file| file.as_fd());
            if (self.registered & bit != 0) == fd.is_some() {
                continue;
            }
            if fd.is_none() && self.uring.is_using(index) {
                is_complete = false;
                continue;
            }
            self.uring
                .set_device(index, fd)
                .map_err(FabricError::os("register a device with io_uring"))?;
            self.registered ^= bit;
        }
        if is_complete {
            self.changes = changes;
        }
        Ok(())
    }

    pub fn wait_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Executes what the core wants and sorts what it finished, until it wants nothing more.
    pub fn work(&mut self, shard: u32, device: u32, state: &mut ShardState) {
        self.starved &= !(1 << shard);
        if state.is_closed {
            return;
        }
        if !self.knows(device) {
            // The device was added a moment ago. The shard's turn comes once it is registered.
            self.starved |= 1 << shard;
            return;
        }
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

    /// Whether a device is registered with the ring.
    fn knows(&self, device: u32) -> bool {
        self.registered & 1 << device != 0
    }

    /// Starts a flush of a device; false if the ring is full, or does not know the device yet.
    pub fn start_flush(&mut self, device: u32) -> bool {
        if self.uring.room() == 0 || !self.knows(device) {
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
                // SAFETY: the core keeps the memory of an action until it has the outcome.
                unsafe { filled.digest(&mut self.crcs) };
            }
        }
        self.crcs_of.push(self.crcs.len() as u32);
    }

    /// Tells all shards of a device that its flush failed, before any other outcome is looked at: the kernel
    /// reports a lost write only once, maybe to another shard or another thread. This does not catch a flush
    /// of another thread that began after the failed one had ended in the kernel and is reaped before it.
    #[cold]
    pub fn spread_lost_flushes(&mut self, stores: &Stores) {
        for at in 0..self.finished.len() {
            let Finished { owner, result, .. } = self.finished[at];
            let (true, Err(errno)) = (self.finished[at].flush, result) else {
                continue;
            };
            let device = match owner.checked_sub(FLUSH_OWNER) {
                Some(device) => device,
                None => stores.device_of(owner),
            };
            let known = stores.device(device);
            tracing::error!(
                device = %known.path.display(),
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
                    self.work(shard, stores.device_of(shard), &mut state);
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
