//! What all data threads share about one open volume.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fabric_types::ids::{CHUNK_BYTES, ChunkKey, LayerId};
use fabric_types::{Epoch, Generation};

use super::overlap::Overlap;
use super::unflushed::Unflushed;
use super::watermark::{LANES_MAX, Watermark};

/// When a write is acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durability {
    /// When every in-sync replica's device took it; it survives power loss after the guest's next flush.
    #[default]
    Flush,
    /// When it survives power loss.
    Write,
}

/// What becomes of a write while replicas have no space for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OnFull {
    /// How long it waits for space before it fails; zero: not at all. What some replicas have stored by then
    /// waits on while too few have.
    pub wait: Duration,
}

impl OnFull {
    /// It fails at once.
    pub const ERROR: Self = Self {
        wait: Duration::ZERO,
    };

    fn us(self) -> u64 {
        u64::try_from(self.wait.as_micros()).unwrap_or(u64::MAX)
    }
}

impl Default for OnFull {
    /// A minute.
    fn default() -> Self {
        Self {
            wait: Duration::from_secs(60),
        }
    }
}

/// Writes of a volume that wait for space on full devices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HeldWrites {
    /// Pieces of writes, each of at most 4 MiB.
    pub pieces: u64,
    /// How long the first of them has waited, to about a second.
    pub longest: Duration,
}

/// What is known of a volume when it is opened.
#[derive(Debug, Clone, Copy)]
pub struct VolumeParams {
    /// The layer that takes writes.
    pub layer: LayerId,
    /// Size in bytes, a multiple of the sector size.
    pub size_bytes: u64,
    /// The lease.
    pub generation: Generation,
    /// The cluster map under which the lease was granted.
    pub epoch: Epoch,
    /// Refuse writes.
    pub read_only: bool,
    /// When writes are acknowledged.
    pub durability: Durability,
    /// What becomes of writes that find no space.
    pub on_full: OnFull,
}

/// Requests and bytes of a volume, summed over the data threads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VolumeCounters {
    /// Reads finished.
    pub reads: u64,
    /// Writes finished.
    pub writes: u64,
    /// Flushes finished.
    pub flushes: u64,
    /// Discards and write-zeroes finished.
    pub discards: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Requests that failed.
    pub errors: u64,
}

/// One thread's counters, alone on their cache line: only that thread writes them.
#[derive(Debug, Default)]
#[repr(align(64))]
struct LaneCounters {
    reads: AtomicU64,
    writes: AtomicU64,
    flushes: AtomicU64,
    discards: AtomicU64,
    read_bytes: AtomicU64,
    write_bytes: AtomicU64,
    errors: AtomicU64,
    /// Pieces that wait for space now, and how long the first of them has.
    held: AtomicU64,
    held_for_us: AtomicU64,
}

/// Kind of a finished request, for counting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finished {
    /// A read of so many bytes.
    Read(u64),
    /// A write of so many bytes.
    Write(u64),
    /// A flush.
    Flush,
    /// A discard or write-zeroes.
    Discard,
    /// Anything that failed.
    Error,
}

/// Nothing is to be recovered: requests are served. No lease has this generation.
const RECOVERED: u64 = 0;
/// There is no lease. No lease has this generation.
const NO_LEASE: u64 = u64::MAX;

/// An open volume.
#[derive(Debug)]
pub struct VolumeState {
    /// Never used twice in a process: tells a slot's users apart.
    id: u64,
    /// Index into the tables that data threads keep of open volumes.
    slot: u32,
    layer: LayerId,
    size_bytes: AtomicU64,
    epoch: AtomicU64,
    lease_until_us: AtomicU64,
    /// Why requests wait: [`RECOVERED`], [`NO_LEASE`], or the generation whose lease recovery is not done.
    recovering: AtomicU64,
    read_only: AtomicBool,
    durable_writes: AtomicBool,
    on_full_us: AtomicU64,
    /// The lease is another's by now.
    revoked: AtomicBool,
    /// Requests in flight, if the volume is replicated.
    pub(super) overlap: OnceLock<Overlap>,
    /// What a loss of power of all replicas would take, if the volume is replicated.
    pub(super) unflushed: Unflushed,
    /// Draws write versions; holds the generation.
    pub(super) watermark: Watermark,
    counters: Box<[LaneCounters]>,
}

impl VolumeState {
    /// An open volume. `id` is unique in the process; `slot` is not in use by another open volume.
    pub fn new(id: u64, slot: u32, params: &VolumeParams) -> Self {
        Self {
            id,
            slot,
            layer: params.layer,
            size_bytes: AtomicU64::new(params.size_bytes),
            epoch: AtomicU64::new(params.epoch.0),
            lease_until_us: AtomicU64::new(u64::MAX),
            recovering: AtomicU64::new(RECOVERED),
            read_only: AtomicBool::new(params.read_only),
            durable_writes: AtomicBool::new(params.durability == Durability::Write),
            on_full_us: AtomicU64::new(params.on_full.us()),
            revoked: AtomicBool::new(false),
            overlap: OnceLock::new(),
            unflushed: Unflushed::new(params.epoch),
            watermark: Watermark::new(params.generation, LANES_MAX),
            counters: (0..LANES_MAX).map(|_| LaneCounters::default()).collect(),
        }
    }

    /// The same, but that the watermark of its writes is raised once in so many of them, a power of two.
    #[must_use]
    pub fn with_watermark_every(mut self, writes: u64) -> Self {
        self.watermark.set_refresh_every(writes);
        self
    }

    /// See [`new`](Self::new).
    #[inline]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// See [`new`](Self::new).
    #[inline]
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// The layer that takes writes.
    #[inline]
    pub fn layer(&self) -> LayerId {
        self.layer
    }

    /// Present size.
    #[inline]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    /// Changes the size for requests submitted from now on.
    pub fn set_size_bytes(&self, size_bytes: u64) {
        self.size_bytes.store(size_bytes, Ordering::Release);
    }

    /// The map in use.
    #[inline]
    pub fn epoch(&self) -> Epoch {
        Epoch(self.epoch.load(Ordering::Acquire))
    }

    /// Goes on with a newer map; an older one is ignored.
    pub fn set_epoch(&self, epoch: Epoch) {
        self.epoch.fetch_max(epoch.0, Ordering::AcqRel);
    }

    /// The lease in use.
    #[inline]
    pub fn generation(&self) -> Generation {
        self.watermark.generation()
    }

    /// Whether it was ever opened under a lease: without one it is only read, and repairs nothing.
    #[inline]
    pub fn had_lease(&self) -> bool {
        self.generation() > Generation(0)
    }

    /// Goes on with a newer lease; false if it is not newer.
    pub fn renew_lease(&self, generation: Generation) -> bool {
        self.watermark.renew(generation)
    }

    /// Whether there is a lease, and replicas agree on what earlier ones left behind. Requests wait until
    /// then.
    #[inline]
    pub fn is_recovered(&self) -> bool {
        self.recovering.load(Ordering::Acquire) == RECOVERED
    }

    /// The lease of this generation is to be recovered: requests wait from now on.
    pub fn begin_recovery(&self, generation: Generation) {
        self.recovering.store(generation.0, Ordering::SeqCst);
    }

    /// The lease recovery of this generation is done. It changes nothing if the lease was given up meanwhile,
    /// or a later one is being recovered.
    pub fn end_recovery(&self, generation: Generation) {
        let order = (Ordering::SeqCst, Ordering::Relaxed);
        let _ = self
            .recovering
            .compare_exchange(generation.0, RECOVERED, order.0, order.1);
    }

    /// There is no lease from now on: requests wait until the next one is recovered. Those that have begun
    /// are not waited for.
    pub fn suspend(&self) {
        self.recovering.store(NO_LEASE, Ordering::SeqCst);
    }

    /// Undoes [`suspend`](Self::suspend), if the lease was not given back meanwhile.
    pub fn unsuspend(&self) {
        let order = (Ordering::SeqCst, Ordering::Relaxed);
        let _ = self
            .recovering
            .compare_exchange(NO_LEASE, RECOVERED, order.0, order.1);
    }

    /// When the lease ends by the clock that clients are told; `u64::MAX` if it does not.
    #[inline]
    pub fn lease_until_us(&self) -> u64 {
        self.lease_until_us.load(Ordering::Acquire)
    }

    /// From this moment on requests wait until it is moved: somebody else may be given the lease then.
    pub fn set_lease_until_us(&self, until_us: u64) {
        self.lease_until_us.store(until_us, Ordering::Release);
    }

    /// Writes that this lease can still number. The lease is to be renewed well before zero.
    pub fn sequences_left(&self) -> u64 {
        self.watermark.sequences_left()
    }

    /// True if writes are refused.
    #[inline]
    pub fn read_only(&self) -> bool {
        self.read_only.load(Ordering::Relaxed)
    }

    /// Refuses writes submitted from now on, or takes them again.
    pub fn set_read_only(&self, read_only: bool) {
        self.read_only.store(read_only, Ordering::Relaxed);
    }

    /// The lease has run out, or is another's: nothing is sent any more, whatever maps come. What replicas
    /// are still to answer they answer; the rest ends as fenced when
    /// [`Client::end_revoked`](super::client::Client::end_revoked) is told.
    pub fn revoke(&self) {
        self.revoked.store(true, Ordering::Release);
    }

    /// See [`revoke`](Self::revoke).
    #[inline]
    pub fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire)
    }

    /// True if every write is made durable before its acknowledgement.
    #[inline]
    pub fn durable_writes(&self) -> bool {
        self.durable_writes.load(Ordering::Relaxed)
    }

    /// Changes when writes submitted from now on are acknowledged.
    pub fn set_durability(&self, durability: Durability) {
        let durable = durability == Durability::Write;
        self.durable_writes.store(durable, Ordering::Relaxed);
    }

    /// How long writes wait for space, in microseconds.
    #[inline]
    pub fn on_full_us(&self) -> u64 {
        self.on_full_us.load(Ordering::Relaxed)
    }

    /// Changes what becomes of writes that find no space, also of those that wait.
    pub fn set_on_full(&self, on_full: OnFull) {
        self.on_full_us.store(on_full.us(), Ordering::Relaxed);
    }

    /// So many pieces of one thread's writes wait for space. Only the thread that owns `lane` calls it.
    pub(super) fn note_held(&self, lane: usize, pieces: u32, for_us: u64) {
        let lane = &self.counters[lane];
        lane.held.store(u64::from(pieces), Ordering::Relaxed);
        lane.held_for_us.store(for_us, Ordering::Relaxed);
    }

    /// Writes that wait for space on full devices, over all threads.
    pub fn held_writes(&self) -> HeldWrites {
        let mut all = HeldWrites::default();
        for lane in &self.counters {
            let for_us = lane.held_for_us.load(Ordering::Relaxed);
            all.pieces += lane.held.load(Ordering::Relaxed);
            all.longest = all.longest.max(Duration::from_micros(for_us));
        }
        all
    }

    /// The chunk that holds byte `offset`; `None` past the last chunk a layer can have.
    #[inline]
    pub fn chunk_at(&self, offset: u64) -> Option<ChunkKey> {
        let index = u32::try_from(offset / CHUNK_BYTES).ok()?;
        Some(ChunkKey {
            layer: self.layer,
            index,
        })
    }

    /// Counts a finished request. Only the thread that owns `lane` calls it.
    #[inline]
    pub fn count(&self, lane: usize, finished: Finished) {
        let lane = &self.counters[lane];
        // A load and a store instead of an atomic add: there is one writer.
        let add = |counter: &AtomicU64, n: u64| {
            counter.store(
                counter.load(Ordering::Relaxed).wrapping_add(n),
                Ordering::Relaxed,
            );
        };
        match finished {
            Finished::Read(bytes) => {
                add(&lane.reads, 1);
                add(&lane.read_bytes, bytes);
            }
            Finished::Write(bytes) => {
                add(&lane.writes, 1);
                add(&lane.write_bytes, bytes);
            }
            Finished::Flush => add(&lane.flushes, 1),
            Finished::Discard => add(&lane.discards, 1),
            Finished::Error => add(&lane.errors, 1),
        }
    }

    /// The sums over all threads.
    pub fn counters(&self) -> VolumeCounters {
        let sum = |pick: fn(&LaneCounters) -> &AtomicU64| {
            self.counters
                .iter()
                .map(|lane| pick(lane).load(Ordering::Relaxed))
                .sum()
        };
        VolumeCounters {
            reads: sum(|l| &l.reads),
            writes: sum(|l| &l.writes),
            flushes: sum(|l| &l.flushes),
            discards: sum(|l| &l.discards),
            read_bytes: sum(|l| &l.read_bytes),
            write_bytes: sum(|l| &l.write_bytes),
            errors: sum(|l| &l.errors),
        }
    }
}
