//! The devices and shards of a node. Devices are added and removed while threads work on the others: each
//! gets an index that is never used again. Threads compare a counter of such changes with what they have
//! seen, and then register the devices with their rings anew.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};

use fabric_replication::watermark::LANES_MAX;
use fabric_store::ShardCore;
use fabric_store::api::{DeviceLabel, Fence, OpId, RecoveryReport, StoreCore, shard_of};
use fabric_store::file::DeviceFile;
pub use fabric_store::uring::DEVICES_MAX;
use fabric_transport::serving::SERVINGS_MAX;
use fabric_types::ids::{ChunkKey, LayerId};
use fabric_types::message::PIECES_MAX;

use super::config::FabricError;
use super::damage::Damage;
use super::mailbox::Mailbox;
use super::scrub::Scrubs;

/// Operations that a data thread has in its replica at once: what its client has in flight, and what other
/// nodes ask.
pub const HELD_MAX: u32 = PIECES_MAX + SERVINGS_MAX;

/// Chunks looked at under one lock.
const LISTED_MAX: usize = 4096;

/// Most shards of a node: a set of them fits a `u128`. The most devices have 8 each.
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
    /// Where it is.
    pub path: PathBuf,
    pub label: DeviceLabel,
    pub report: RecoveryReport,
    /// Its shards among all.
    pub first_shard: u32,
    pub shards: u32,
    /// Nothing is stored here any more, and it gets no new requests.
    is_removed: AtomicBool,
    /// `None` once it is closed.
    file: Mutex<Option<DeviceFile>>,
}

impl Device {
    /// Indexes of its shards.
    pub fn shard_indexes(&self) -> std::ops::Range<u32> {
        self.first_shard..self.first_shard + self.shards
    }

    /// Whether it was removed.
    pub fn is_removed(&self) -> bool {
        self.is_removed.load(Ordering::Acquire)
    }

    /// Whether its file is open here. What threads have of it may be open for a moment longer.
    pub fn is_open(&self) -> bool {
        self.file().is_some()
    }

    /// The open file, for a look. It stays open meanwhile.
    pub fn file(&self) -> MutexGuard<'_, Option<DeviceFile>> {
        self.file.lock().expect("no panic under this lock")
    }
}

/// One shard. The lock is held for planning only, never over a system call.
struct Shard {
    state: Mutex<ShardState>,
    device: u32,
}

/// What the lock guards.
pub struct ShardState {
    pub core: ShardCore,
    /// Lanes whose operations found the core's table full.
    pub waiting: u128,
    /// Its device is closed: it takes no operations, and none of its actions are executed.
    pub is_closed: bool,
}

/// All of them.
pub struct Stores {
    devices: Box<[OnceLock<Device>]>,
    shards: Box<[OnceLock<Shard>]>,
    /// Devices that were ever added. Raised last: whoever reads it finds them, and their shards.
    count: AtomicU32,
    /// How often a device was added, removed or closed.
    changes: AtomicU32,
    /// Held while one is opened: they are added one after another.
    adding: Mutex<()>,
    mailboxes: Box<[Mailbox]>,
    /// What they cannot give.
    pub damage: Damage,
    /// What is asked of the scrubbers, and where they are.
    pub scrubs: Scrubs,
}

const _: () = assert!(LANES_MAX < u128::BITS as usize);
const _: () = assert!(DEVICES_MAX <= fabric_replication::groups::FAN_OUT_DEVICES_MAX as usize);

impl Stores {
    /// Takes over stores that are open.
    pub fn new(open: Vec<OpenStore>) -> Result<Self, FabricError> {
        if open.len() > DEVICES_MAX {
            return Err(FabricError::TooManyDevices(DEVICES_MAX));
        }
        let mailboxes: Result<_, _> = (0..=MAINTENANCE_LANE)
            .map(|_| Mailbox::new(HELD_MAX as usize))
            .collect();
        let stores = Self {
            devices: (0..DEVICES_MAX).map(|_| OnceLock::new()).collect(),
            shards: (0..SHARDS_MAX).map(|_| OnceLock::new()).collect(),
            count: AtomicU32::new(0),
            changes: AtomicU32::new(0),
            adding: Mutex::new(()),
            damage: Damage::default(),
            scrubs: Scrubs::default(),
            mailboxes: mailboxes.map_err(FabricError::os("create an eventfd"))?,
        };
        for store in open {
            stores.put(store)?;
        }
        Ok(stores)
    }

    /// Adds the store that `open` opens, if there is an index left. Returns its index.
    pub fn add(
        &self,
        open: impl FnOnce() -> Result<OpenStore, FabricError>,
    ) -> Result<u32, FabricError> {
        let _one = self.adding.lock().expect("no panic under this lock");
        // Before anything is formatted.
        if self.device_count() as usize == DEVICES_MAX {
            return Err(FabricError::NoPlace(DEVICES_MAX));
        }
        self.put(open()?)
    }

    /// Gives a store the next index. Called by one at a time.
    fn put(&self, store: OpenStore) -> Result<u32, FabricError> {
        let (index, first_shard) = (self.device_count(), self.shard_count());
        let shards = store.cores.len() as u32;
        if (first_shard + shards) as usize > SHARDS_MAX {
            return Err(FabricError::NoPlace(DEVICES_MAX));
        }
        for (shard, core) in (first_shard..).zip(store.cores) {
            let state = Mutex::new(ShardState {
                core,
                waiting: 0,
                is_closed: false,
            });
            let shard = self.shards[shard as usize].set(Shard {
                state,
                device: index,
            });
            assert!(shard.is_ok(), "a shard's index is used once");
        }
        self.damage.add_device();
        self.scrubs.add_device();
        let device = self.devices[index as usize].set(Device {
            path: store.device.path().to_owned(),
            label: store.label,
            report: store.report,
            first_shard,
            shards,
            is_removed: AtomicBool::new(false),
            file: Mutex::new(Some(store.device)),
        });
        assert!(device.is_ok(), "a device's index is used once");
        self.count.store(index + 1, Ordering::Release);
        self.changes.fetch_add(1, Ordering::AcqRel);
        Ok(index)
    }

    /// A device is not shown any more, and gets no requests but those that are under way. The maintenance
    /// thread closes it when these have ended.
    pub fn remove(&self, device: u32) {
        self.device(device)
            .is_removed
            .store(true, Ordering::Release);
        self.changes.fetch_add(1, Ordering::AcqRel);
        self.mailbox(MAINTENANCE_LANE).signal();
    }

    /// Closes a removed device, if nothing is under way on it, and wakes all threads, for their rings keep it
    /// open, too. True if it is closed.
    pub fn close_removed(&self, device: u32) -> bool {
        let gone = self.device(device);
        let is_quiet = |shard| {
            let mut state = self.lock(shard);
            state.is_closed |= state.core.in_flight() == 0 && state.core.device_in_flight() == 0;
            state.is_closed
        };
        // Each by itself: one that is quiet takes nothing new.
        if gone
            .shard_indexes()
            .filter(|shard| !is_quiet(*shard))
            .count()
            > 0
        {
            return false;
        }
        if let Some(file) = gone.file().take() {
            file.close();
        }
        self.changes.fetch_add(1, Ordering::AcqRel);
        (0..=MAINTENANCE_LANE).for_each(|lane| self.mailbox(lane).signal());
        true
    }

    /// Devices that were ever added: each lower index is one's.
    #[inline]
    pub fn device_count(&self) -> u32 {
        self.count.load(Ordering::Acquire)
    }

    /// Shards of devices that were ever added.
    pub fn shard_count(&self) -> u32 {
        let last = self.device_count().checked_sub(1);
        last.map_or(0, |last| self.device(last).shard_indexes().end)
    }

    /// Changes whenever a device was added, removed or closed.
    #[inline]
    pub fn changes(&self) -> u32 {
        self.changes.load(Ordering::Acquire)
    }

    /// The device of this index.
    ///
    /// # Panics
    /// No device was added with it.
    #[inline]
    pub fn device(&self, index: u32) -> &Device {
        let device = self.devices[index as usize].get();
        device.expect("indexes are those of devices that were added")
    }

    /// The device that a shard is of.
    #[inline]
    pub fn device_of(&self, shard: u32) -> u32 {
        self.shard(shard).device
    }

    #[inline]
    fn shard(&self, index: u32) -> &Shard {
        let shard = self.shards[index as usize].get();
        shard.expect("indexes are those of shards that were added")
    }

    /// The devices that are not removed, with their indexes.
    pub fn devices(&self) -> impl Iterator<Item = (u32, &Device)> {
        let all = (0..self.device_count()).map(|index| (index, self.device(index)));
        all.filter(|(_, device)| !device.is_removed())
    }

    /// The shards of devices that are not removed.
    pub fn shard_indexes(&self) -> impl Iterator<Item = u32> {
        self.devices()
            .flat_map(|(_, device)| device.shard_indexes())
    }

    /// The device with this identity.
    pub fn index_of(&self, id: &[u8; 16]) -> Option<u32> {
        let mut devices = self.devices();
        let found = devices.find(|(_, device)| device.label.device == *id)?;
        Some(found.0)
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
        for shard in self.shard_indexes() {
            let device = self.device_of(shard);
            self.walk(shard, |core, cursor| {
                let (layer, index, next) = core.next_chunk(cursor)?;
                show(device, ChunkKey { layer, index });
                Some(next)
            });
        }
    }

    /// Shows all fences of a device. Called under a shard's lock.
    pub fn each_fence(&self, device: u32, mut show: impl FnMut(LayerId, Fence)) {
        for shard in self.device(device).shard_indexes() {
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
        self.shard(shard)
            .state
            .lock()
            .expect("a shard's core panicked")
    }

    /// The shard that holds a chunk of a layer on this device.
    #[inline]
    pub fn shard_for(&self, device: u32, layer: LayerId, chunk: u32) -> u32 {
        let device = self.device(device);
        if device.shards == 1 {
            return device.first_shard;
        }
        device.first_shard + shard_of(layer, chunk, device.shards as usize) as u32
    }

    /// Operations that all stores have done.
    pub fn ops(&self) -> u64 {
        // Those of removed devices, too: the sum never falls.
        let shards = 0..self.shard_count();
        shards.map(|s| self.lock(s).core.metrics().ops).sum()
    }

    pub fn mailbox(&self, lane: usize) -> &Mailbox {
        &self.mailboxes[lane]
    }
}
