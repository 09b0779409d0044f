//! What the replica machine (above) and the executor of device requests (beside) see of the chunk store.
//!
//! A store on one device is a fixed number of independent shards; [`shard_of`] says which shard owns a chunk.
//! Each shard is one [`StoreCore`]: a sans-IO machine that takes operations, emits [`DeviceAction`]s and
//! reports outcomes. It owns no clock, thread, file or random source, so that production and the simulated
//! disk drive the same code.
//!
//! One turn of a data thread: `submit` (any number), `poll_action` until `None` (this is where many small
//! writes become one device write), execute, `on_device` for each outcome, `poll_completion` until `None`,
//! again `poll_action` until `None` (a completion may have unblocked something).

mod error;

use std::fmt;

pub use fabric_types::block::{BlockStamp, Holds};
pub use fabric_types::ids::{CHUNK_BYTES, ChunkKey, LayerId, Version};

use super::device::{DeviceAction, IoId};
use super::metrics::StoreMetrics;

pub use error::StoreError;

/// Longest layer chain that a read follows; a longer one is refused as [`StoreError::OutOfRange`].
pub const LAYER_CHAIN_MAX: usize = 16;

/// Which of `shards` shards holds chunk `index` of every layer of a volume.
///
/// `placement` is the same for all layers of one volume (its first layer, say), so that a shard resolves a
/// layer chain without asking another.
#[must_use]
pub fn shard_of(placement: LayerId, index: u32, shards: usize) -> usize {
    let mut mixed = placement.0 ^ (u64::from(index)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    mixed ^= mixed >> 32;
    (mixed % shards as u64) as usize
}

/// What a shard has persisted about who may write a layer. Writes of an older generation are refused by the
/// store; the epoch is for the replica machine to compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Fence {
    /// Writes of an older generation are refused.
    pub generation: u32,
    /// Cluster map epoch recorded with it.
    pub epoch: u64,
}

/// Names an operation to its submitter. Opaque to the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId(pub u64);

/// An operation on one chunk, or on the shard. Offsets and lengths are bytes, multiples of 512, inside the
/// chunk.
///
/// `layers` is the chain from the newest (the one that is written) to the oldest, at most
/// [`LAYER_CHAIN_MAX`]. Slices are borrowed only for the call to [`StoreCore::submit`]; the memory behind the
/// iovecs until the completion.
#[derive(Debug, Clone, Copy)]
pub enum StoreOp<'a> {
    /// Fill the buffers; a block comes from the first layer that maps it, and is zero when none does.
    Read {
        /// Newest layer first.
        layers: &'a [LayerId],
        /// Chunk index.
        chunk: u32,
        /// First byte within the chunk.
        offset: u32,
        /// Destination.
        iovecs: &'a [libc::iovec],
    },
    /// Store the buffers' content in `layers[0]`.
    Write {
        /// Newest layer first; the older ones complete partially written blocks.
        layers: &'a [LayerId],
        /// Chunk index.
        chunk: u32,
        /// First byte within the chunk.
        offset: u32,
        /// Source. Copied once, in `poll_action`: the guest may change it, the checksum fits what was stored.
        iovecs: &'a [libc::iovec],
        /// Version of the write.
        version: Version,
        /// Complete only once durable.
        fua: bool,
        /// It may use a part of the reserve: others have stored it already, and wait for this store.
        urgent: bool,
    },
    /// Make the range read as zeroes and give its space back (discard, and write-zeroes with or without
    /// unmap).
    Zero {
        /// Newest layer first; with more than one layer the range is marked so that older layers stay hidden.
        layers: &'a [LayerId],
        /// Chunk index.
        chunk: u32,
        /// First byte within the chunk.
        offset: u32,
        /// Length in bytes.
        len: u32,
        /// Version of the write.
        version: Version,
        /// Complete only once durable.
        fua: bool,
    },
    /// Tell what the layer itself holds in some blocks of one map page (256 blocks), without reading them.
    /// Waits for writes to them that were submitted before.
    Inspect {
        /// Layer.
        layer: LayerId,
        /// Chunk index.
        chunk: u32,
        /// First block within the chunk.
        block: u32,
        /// One buffer that takes a [`BlockStamp`] for each block, aligned as one.
        iovecs: &'a [libc::iovec],
    },
    /// Make one block of `layer` what another replica has, whatever the order of versions, provided that it
    /// still is as it was when that was decided.
    Restore {
        /// Layer.
        layer: LayerId,
        /// Chunk index.
        chunk: u32,
        /// Block within the chunk.
        block: u32,
        /// What is there now; else [`StoreError::Changed`], and nothing is done.
        expect: BlockStamp,
        /// What shall be there.
        stamp: BlockStamp,
        /// Its 4096 bytes, which must have the stamp's checksum ([`StoreError::Mismatch`]); empty if it holds
        /// no data. Empty also if it does and they are lost, so that no replica can read them: it has the
        /// stamp from then on, and reading it fails as of any bad block, until it is written or restored with
        /// the data. A block that is as `stamp` says already is so given up only if it could not be read
        /// before.
        iovecs: &'a [libc::iovec],
        /// Use a part of the reserve that other operations leave.
        urgent: bool,
    },
    /// Make every operation that was reported complete before this call durable.
    Flush,
    /// Wait until no log batch is under way that is older than one already done: what a flush covers is then
    /// a beginning of the log, which one number can describe. See [`StoreCore::flush_mark`].
    OrderLog,
    /// Write down in the log how far the flushes so far made it durable, unless that is there already. See
    /// [`StoreCore::flush_mark`].
    RecordFlush,
    /// Raise the layer's fence to at least these values; complete once durable.
    SetFence {
        /// Layer.
        layer: LayerId,
        /// Least generation that may write from now on.
        fence: Fence,
    },
    /// Unmap every chunk of the layer in this shard and forget its fence. Not atomic: submit again after a
    /// crash.
    DropLayer {
        /// Layer; the caller makes sure that nothing else uses it meanwhile.
        layer: LayerId,
    },
    /// Unmap one chunk of the layer, whatever the versions there, and forget them. What was submitted before
    /// is done first, and what is submitted after finds nothing.
    DropChunk {
        /// Layer.
        layer: LayerId,
        /// Chunk index.
        chunk: u32,
    },
    /// Write a checkpoint that covers everything complete by now; `clean` promises that no write follows
    /// (close).
    Checkpoint {
        /// The next open need not scan the log.
        clean: bool,
    },
}

/// What `submit` did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Submitted {
    /// The id comes back from [`StoreCore::poll_completion`].
    Accepted,
    /// The operation table is full; nothing was done. Submit again after a completion.
    Busy,
}

/// Outcome of an operation.
pub type StoreResult = Result<(), StoreError>;

/// Identity of a device, written when it is formatted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLabel {
    /// Cluster that owns the device.
    pub cluster: [u8; 16],
    /// The device itself.
    pub device: [u8; 16],
}

/// Bounds of one store (all shards of one device together); fixed while it is open.
#[derive(Debug, Clone, Copy)]
pub struct CoreParams {
    /// Open refuses a device of another cluster; `None` takes any (tools).
    pub cluster: Option<[u8; 16]>,
    /// Operations in flight per shard; more get [`Submitted::Busy`].
    pub ops_max: u32,
    /// RAM for cached map pages; beyond it the oldest clean ones go, and a checkpoint cleans dirty ones.
    pub leaf_cache_bytes: u64,
    /// RAM for data on its way to the device, and for reads into unaligned memory; when used up operations
    /// wait.
    pub buffer_bytes: u64,
}

impl Default for CoreParams {
    fn default() -> Self {
        Self {
            cluster: None,
            ops_max: 512,
            leaf_cache_bytes: 64 << 20,
            buffer_bytes: 64 << 20,
        }
    }
}

/// What opening did. `Display` is the one line for the log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RecoveryReport {
    /// Shards of the store.
    pub shards: u32,
    /// Shards that were closed cleanly.
    pub clean_shards: u32,
    /// Shards whose space map was made anew from what the chunk table reaches: it was damaged, or had units
    /// in use that nothing names.
    pub rebuilt_shards: u32,
    /// Map pages that opening wanted, that cannot be read, and that it has replaced. Of the blocks that they
    /// map only what the log has is known; the others are bad until they are written, or restored from
    /// another replica.
    pub lost_leaves: u32,
    /// Copies of the label that were damaged or missing, and were written again from the other one.
    pub mended_labels: u32,
    /// Log batches replayed.
    pub batches: u64,
    /// Blocks mapped or unmapped by the replay.
    pub blocks: u64,
    /// Blocks of unflushed writes found incomplete, hence left at their older content.
    pub torn_blocks: u64,
    /// Bytes read from the device.
    pub read_bytes: u64,
    /// Chunks known after opening.
    pub chunks: u64,
    /// Space in use.
    pub used_bytes: u64,
    /// Capacity for data.
    pub total_bytes: u64,
}

impl RecoveryReport {
    /// Adds what opening a shard did.
    pub(super) fn add(&mut self, shard: &Self) {
        self.clean_shards += shard.clean_shards;
        self.rebuilt_shards += shard.rebuilt_shards;
        self.lost_leaves += shard.lost_leaves;
        self.mended_labels += shard.mended_labels;
        self.batches += shard.batches;
        self.blocks += shard.blocks;
        self.torn_blocks += shard.torn_blocks;
        self.read_bytes += shard.read_bytes;
        self.chunks += shard.chunks;
        self.used_bytes += shard.used_bytes;
        self.total_bytes += shard.total_bytes;
    }
}

impl fmt::Display for RecoveryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes >> 20;
        if self.clean_shards == self.shards {
            write!(f, "closed cleanly")?;
        } else {
            write!(
                f,
                "recovered after a crash: replayed {} log batches with {} blocks, dropped {} incomplete \
                 unflushed blocks",
                self.batches, self.blocks, self.torn_blocks
            )?;
        }
        if self.rebuilt_shards > 0 {
            let plural = if self.rebuilt_shards == 1 { "" } else { "s" };
            let n = self.rebuilt_shards;
            write!(
                f,
                "; the space map of {n} shard{plural} was damaged or had leaks, and was made anew"
            )?;
        }
        if self.lost_leaves > 0 {
            write!(f, "; map pages that cannot be read: {}", self.lost_leaves)?;
        }
        if self.mended_labels > 0 {
            write!(f, "; a damaged copy of the label was written again")?;
        }
        write!(
            f,
            "; {} chunks, {} of {} MiB used, {} MiB read",
            self.chunks,
            mib(self.used_bytes),
            mib(self.total_bytes),
            mib(self.read_bytes)
        )
    }
}

/// A point in the history of one shard, see [`StoreCore::flush_mark`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FlushMark {
    /// Newest batch with all before it done. Batches after it may be done as well, so that this alone does
    /// not say whether there is something to flush.
    pub(super) lsn: u64,
    /// Batches done since opening, in whatever order.
    pub(super) finished: u64,
}

/// Space of a shard in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Space {
    /// Total.
    pub total_bytes: u64,
    /// In use: data and map pages. What only waits for a checkpoint to be free does not count.
    pub used_bytes: u64,
    /// It refuses writes for want of room: it did so, and neither has more become free since nor, where there
    /// was room in the shard but none below its device, a write been stored.
    pub is_full: bool,
}

/// The memory that device writes (and some reads) of a shard come from: one range, fixed while the shard is
/// open, so that the executor can register it. Other iovecs lie in the memory of the operations.
#[derive(Debug, Clone, Copy)]
pub struct BufferRange {
    /// First byte.
    pub ptr: *mut u8,
    /// Length in bytes.
    pub len: usize,
}

/// A bad block found by scrubbing, read twice before it is accused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScrubFinding {
    /// Layer.
    pub layer: LayerId,
    /// Chunk index.
    pub chunk: u32,
    /// Block within the chunk.
    pub block: u32,
    /// Version of the block.
    pub version: Version,
    /// Where on the device; 0 if the data are lost ([`StoreOp::Restore`]).
    pub device_offset: u64,
}

/// State of the scrubber after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScrubStep {
    /// Reads were queued (`poll_action` hands them out); step again at leisure.
    Reading,
    /// The previous step is still reading; step again later.
    Busy,
    /// Every mapped block has been read once since the last `PassDone`; the next step starts over.
    PassDone,
}

/// State of the cleaner after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CleanStep {
    /// Work was queued (`poll_action` hands it out); step again at leisure.
    Working,
    /// An earlier step is still at work, or a checkpoint is waited for; step again later.
    Busy,
    /// Nothing is worth doing now: step again after a rest, which lets what was just written come to rest,
    /// too.
    Idle,
}

/// One shard of a store. See the module for the order of calls.
pub trait StoreCore: Send {
    /// Takes an operation.
    ///
    /// # Safety
    /// The memory behind the iovecs stays valid until the operation's completion was handed out (or `Busy`
    /// returned). It may change meanwhile: it is guest memory.
    unsafe fn submit(&mut self, id: OpId, op: StoreOp<'_>) -> Submitted;

    /// Next device request, to be executed in any order with the others.
    fn poll_action(&mut self) -> Option<DeviceAction>;

    /// Tells the outcome of a device request: `Ok` only if all bytes were transferred, else an errno.
    fn on_device(&mut self, id: IoId, result: Result<(), i32>);

    /// As [`StoreCore::on_device`] for a read, of which the caller has taken the sums of all blocks (see
    /// [`IoVecs::digest`](super::device::IoVecs::digest)) since it ended well: where several threads share a
    /// shard, before it locks out the others.
    fn on_read(&mut self, id: IoId, crcs: &[u32]);

    /// Next finished operation.
    fn poll_completion(&mut self) -> Option<(OpId, StoreResult)>;

    /// Operations accepted and not yet handed out by `poll_completion`.
    fn in_flight(&self) -> usize;

    /// Device requests (checkpoint included) handed out whose outcome is not yet told.
    fn device_in_flight(&self) -> usize;

    /// To be called at a steady pace, a few times a second, while nothing is in flight: writes what was put
    /// off (the record of the last flush, at length the checkpoint that frees what was discarded), and counts
    /// what was stored before there were counts ([`StoreCore::next_stored`]).
    /// `poll_action` may have something afterwards.
    fn on_idle(&mut self);

    /// For an executor that flushes the device once for many shards, as an alternative to [`StoreOp::Flush`].
    /// It
    /// 1. has each shard bring its log in order ([`StoreOp::OrderLog`], unless
    ///    [`StoreCore::is_log_in_order`]),
    /// 2. takes the mark of each shard and flushes the device unless no shard has one,
    /// 3. hands each mark to [`StoreCore::flushed`], or the errno to [`StoreCore::flush_failed`],
    /// 4. has each shard write it down ([`StoreOp::RecordFlush`], unless [`StoreCore::is_flush_recorded`]).
    ///
    /// Whatever was handed out by `poll_completion` before the first step is durable after the third; after
    /// the last, damage to it is told from a write that a crash cut short.
    ///
    /// `None`: all of it is durable already. An error: a flush failed earlier, and none can promise anything
    /// any more.
    fn flush_mark(&self) -> Result<Option<FlushMark>, StoreError>;

    /// Whether no log batch is under way that is older than one already done.
    fn is_log_in_order(&self) -> bool;

    /// Whether the log says how far flushes made it durable.
    fn is_flush_recorded(&self) -> bool;

    /// See [`StoreCore::flush_mark`]. An error if another flush failed meanwhile: then this one proves
    /// nothing.
    fn flushed(&mut self, mark: FlushMark) -> StoreResult;

    /// A flush of the device failed, whoever asked for it. What the device still holds is unknown, and a
    /// later flush that succeeds says nothing about it: the kernel reports a lost write once. The shard
    /// refuses writes and flushes until it is opened again. Every shard of the device is to be told.
    fn flush_failed(&mut self, errno: i32);

    /// The chunks in the order of the shard's table, from position `cursor` on: the next one and the position
    /// behind it; `None` at the end. A chunk that is there all the while is met; one made meanwhile may be
    /// missed.
    fn next_chunk(&self, cursor: u32) -> Option<(LayerId, u32, u32)>;

    /// The chunks as [`StoreCore::next_chunk`] gives them, with the bytes of data that each stores: blocks
    /// that were written and not discarded since, in whichever layer of the chain the chunk is. Neither
    /// zeroes nor blocks whose data are lost count. `None` for a chunk that a program of an earlier version
    /// stored and that is not counted yet. Takes the longer the more has changed since the last checkpoint,
    /// at most a microsecond for each chunk.
    fn next_stored(&self, cursor: u32) -> Option<(ChunkKey, Option<u64>, u32)>;

    /// The layer's fence; all zero when none was set.
    fn fence(&self, layer: LayerId) -> Fence;

    /// The fences in the order of the shard's table, as [`StoreCore::next_chunk`] gives chunks.
    fn next_fence(&self, cursor: u32) -> Option<(LayerId, Fence, u32)>;

    /// Space of this shard.
    fn space(&self) -> Space;

    /// Memory to register with the executor.
    fn buffers(&self) -> BufferRange;

    /// Lets the scrubber queue its next reads: the mapped blocks of one map page (at most 1 MiB).
    fn scrub_step(&mut self) -> ScrubStep;

    /// Whether the file system under the device is so short of space that the rest is for others: then plain
    /// writes are refused as by a full store. Discards, flushes and what has begun go on.
    fn leave_host_space(&mut self, leave: bool);

    /// The scrubber's next step begins a pass.
    fn scrub_restart(&mut self);

    /// Lets the cleaner look at the next map page, and move what it maps (at most 1 MiB) if that is worth
    /// while.
    fn clean_step(&mut self) -> CleanStep;

    /// Next bad block found, by the scrubber or the cleaner, or because a map page cannot be read.
    fn poll_finding(&mut self) -> Option<ScrubFinding>;

    /// Next block that somebody was told to be bad, and that is not any more since it was written, restored
    /// with its data, or freed.
    fn poll_healed(&mut self) -> Option<(ChunkKey, u32)>;

    /// Counters and memory use.
    fn metrics(&self) -> StoreMetrics;
}
