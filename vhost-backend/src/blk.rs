//! The virtio-blk device model: features, configuration space, write cache mode and counters of one
//! attachment.

mod config;
mod counters;
mod kind;
mod queue;
pub mod request;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fabric_types::io::Volume;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX,
    VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_config::VIRTIO_F_ANY_LAYOUT;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;

use crate::device::Device;
use crate::latency::{DeviceLatency, Latencies};
use crate::ring::{self, MAX_QUEUE_SIZE};

use kind::KINDS;

pub use config::{CONFIG_BYTES, WRITEBACK_OFFSET};
pub use counters::{BlkCounters, QueueCounters};
pub use kind::RequestKind;
pub use queue::{BlkQueue, BlkRequest};

/// Largest `seg_max` that a device offers. A ring accepts chains of up to [`crate::ring::MAX_SEGMENTS`]
/// segments.
pub const SEG_MAX: u32 = 257;
/// Largest `size_max` that a device offers, in bytes.
pub const SIZE_MAX: u32 = 63 * 4096;
/// Descriptors of a request in addition to those of its data: header and status.
const FRAME_DESCRIPTORS: u32 = 2;
/// Default size of QEMU's virtqueues.
pub const QUEUE_SIZE_DEFAULT: u16 = 128;
/// Largest read or write we carry out: what `SEG_MAX` segments of `SIZE_MAX` bytes hold. A larger one gets an
/// I/O error.
pub const MAX_REQUEST_BYTES: u64 = SEG_MAX as u64 * SIZE_MAX as u64;
/// Most ranges in one discard or write-zeroes request; a request with more gets an I/O error.
pub const MAX_RANGES: u32 = 16;
/// Most sectors in one range of a discard or write-zeroes request (1 GiB); a longer one gets an I/O error.
pub const MAX_RANGE_SECTORS: u32 = 2 * 1024 * 1024;
/// Bytes of a physical block, which the guest learns from the topology: the granularity of checksums and of
/// space.
pub const PHYSICAL_BLOCK_BYTES: u32 = 4096;
/// Most queues of one device; an attachment with more is refused.
pub const MAX_QUEUES: u16 = 256;
/// Length of the serial number in a `GET_ID` answer; a longer serial is refused.
pub const SERIAL_BYTES: usize = 20;

/// Why a device could not be made or a configuration write was refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BlkError {
    /// No queues, or more than [`MAX_QUEUES`].
    #[error("{0} queues are not possible: give 1 to {MAX_QUEUES}")]
    Queues(u16),
    /// Not a power of two, or larger than [`MAX_QUEUE_SIZE`].
    #[error("invalid queue size {0}: use a power of two up to {MAX_QUEUE_SIZE}")]
    QueueSize(u16),
    /// The serial does not fit or is not printable ASCII.
    #[error("serial {0:?} is not possible: give at most {SERIAL_BYTES} printable ASCII characters")]
    Serial(String),
    /// The write cache mode could not be kept for a later process, so it stays as it was.
    #[error("the write cache mode cannot be switched: {0}")]
    ModeNotKept(String),
    /// A write to a field of the configuration space that is not `writeback`.
    #[error(
        "configuration write of {len} bytes at offset {offset} refused: only `writeback` can be written"
    )]
    ConfigWrite {
        /// Offset in the configuration space.
        offset: u32,
        /// Length in bytes.
        len: usize,
    },
}

/// Keeps what a guest chose for longer than this process lives: a front end that reconnects to the next one
/// does not say it again.
pub trait ModeKeeper: std::fmt::Debug + Send + Sync {
    /// Keeps the write cache mode. Called by the session's thread, which answers the front end only after it.
    /// A later process must find writethrough (`false`) from then on. Writeback (`true`) it may find later:
    /// until then it flushes more than it has to.
    fn keep(&self, writeback: bool) -> Result<(), String>;
}

/// How an attachment presents its volume.
#[derive(Debug, Clone)]
pub struct BlkOptions {
    /// Refuse writes, and tell the guest so.
    pub read_only: bool,
    /// Serial number, seen in the guest as `/dev/disk/by-id/virtio-SERIAL`.
    pub serial: String,
    /// Number of queues.
    pub queues: u16,
    /// Size of the front end's virtqueues, a power of two. The device cannot derive it from the rings: the
    /// front end reads the configuration space before it sets the size of a ring, and QEMU reads `seg_max`
    /// only once.
    pub queue_size: u16,
    /// Write cache mode to begin with: what the guest chose last, as its driver goes on relying on it.
    pub writeback: bool,
    /// Who keeps the mode when the guest changes it; nobody if absent.
    pub keeper: Option<Arc<dyn ModeKeeper>>,
}

impl Default for BlkOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            serial: String::new(),
            queues: 1,
            queue_size: QUEUE_SIZE_DEFAULT,
            writeback: true,
            keeper: None,
        }
    }
}

impl BlkOptions {
    /// Returns the largest number of data segments that fits a ring without indirect descriptors.
    fn seg_max(&self) -> u32 {
        let room = u32::from(self.queue_size).saturating_sub(FRAME_DESCRIPTORS);
        room.clamp(1, SEG_MAX)
    }

    /// Returns the largest segment. SeaBIOS (1.16) computes the bytes of one read as the low 16 bits of
    /// `seg_max * size_max`. If the result is less than a sector it reads nothing, forever. The value here
    /// makes the result as large as possible.
    fn size_max(&self) -> u32 {
        let pages = (1..=SIZE_MAX / PHYSICAL_BLOCK_BYTES).map(|pages| pages * PHYSICAL_BLOCK_BYTES);
        let read_bytes = |size: &u32| (self.seg_max() * size) as u16;
        // `max_by_key` returns the last of several maxima, the largest segment.
        pages.max_by_key(read_bytes).unwrap_or(SIZE_MAX)
    }

    /// Returns the largest number of ranges of one discard or write-zeroes request, assuming a descriptor per
    /// range.
    fn ranges_max(&self) -> u32 {
        self.seg_max().min(MAX_RANGES)
    }

    /// Something for each queue.
    fn queues_of<T>(&self, make: impl Fn() -> T) -> Box<[T]> {
        (0..self.queues).map(|_| make()).collect()
    }
}

/// One virtio-blk device: a volume as one guest sees it. Shared by the session and all data threads.
#[derive(Debug)]
pub struct BlkDevice<V> {
    volume: V,
    options: BlkOptions,
    serial: [u8; SERIAL_BYTES],
    /// Write cache mode, which the guest may switch (`CONFIG_WCE`).
    writeback: AtomicBool,
    /// One per queue, written only by the thread that serves it.
    counters: Box<[QueueCounters]>,
    latency: DeviceLatency<KINDS>,
    began: Instant,
    /// Set when a short ring was logged. The front end may start the ring often; it is logged once.
    short_ring_logged: AtomicBool,
}

impl<V: Volume> BlkDevice<V> {
    /// A device for `volume`.
    pub fn new(volume: V, options: BlkOptions) -> Result<Arc<Self>, BlkError> {
        if options.queues == 0 || options.queues > MAX_QUEUES {
            return Err(BlkError::Queues(options.queues));
        }
        if !options.queue_size.is_power_of_two() || options.queue_size > MAX_QUEUE_SIZE {
            return Err(BlkError::QueueSize(options.queue_size));
        }
        let text = options.serial.as_bytes();
        if text.len() > SERIAL_BYTES || !text.iter().all(|c| c.is_ascii_graphic() || *c == b' ') {
            return Err(BlkError::Serial(options.serial));
        }
        let mut serial = [0; SERIAL_BYTES];
        serial[..text.len()].copy_from_slice(text);
        let counters = options.queues_of(QueueCounters::default);
        Ok(Arc::new(Self {
            volume,
            serial,
            writeback: AtomicBool::new(options.writeback),
            latency: DeviceLatency::new(options.queues),
            began: Instant::now(),
            short_ring_logged: AtomicBool::new(false),
            options,
            counters,
        }))
    }

    /// The volume behind the device.
    #[inline]
    pub fn volume(&self) -> &V {
        &self.volume
    }

    /// How the volume is presented.
    #[inline]
    pub fn options(&self) -> &BlkOptions {
        &self.options
    }

    /// The answer to `GET_ID`: the serial, padded with zeroes.
    pub fn serial(&self) -> &[u8; SERIAL_BYTES] {
        &self.serial
    }

    /// Whether the guest wants writes cached until it flushes.
    #[inline]
    pub fn writeback(&self) -> bool {
        self.writeback.load(Ordering::Relaxed)
    }

    /// Only the session's thread changes the mode. It is kept before the guest is answered, which relies on
    /// it from then on. Writethrough holds at once, also while it is being kept: that may take long, and
    /// writes of other queues go on meanwhile.
    fn switch(&self, writeback: bool) -> Result<(), BlkError> {
        let before = self.writeback();
        if writeback == before {
            return Ok(());
        }
        if !writeback {
            self.writeback.store(false, Ordering::Relaxed);
        }
        let kept = match &self.options.keeper {
            Some(keeper) => keeper.keep(writeback),
            None => Ok(()),
        };
        let now = if kept.is_ok() { writeback } else { before };
        self.writeback.store(now, Ordering::Relaxed);
        kept.map_err(BlkError::ModeNotKept)
    }

    /// Goes on in the write cache mode that the guest chose elsewhere, where it is kept, too.
    pub fn adopt_writeback(&self, writeback: bool) {
        self.writeback.store(writeback, Ordering::Relaxed);
    }

    /// Counters of all queues together, since the device was made.
    pub fn counters(&self) -> BlkCounters {
        self.counters
            .iter()
            .fold(BlkCounters::default(), |sum, queue| {
                sum.plus(&queue.snapshot())
            })
    }

    /// How long ago the device was made: what its counters cover.
    pub fn age(&self) -> Duration {
        self.began.elapsed()
    }

    /// Latencies of one kind of requests that succeeded, of all queues together, since the device was made. A
    /// request's latency begins when a data thread takes it off the ring, and ends when its answer is made
    /// visible to the guest.
    pub fn latencies(&self, kind: RequestKind) -> Latencies {
        self.latency.of(kind as usize)
    }

    /// Requests taken off the rings and not answered yet, of all queues together.
    pub fn in_flight(&self) -> u64 {
        self.latency.in_flight()
    }

    /// Logs a ring that is shorter than the largest request that the device offers. Without indirect
    /// descriptors a driver waits forever for room for such a request, and nothing reaches the device.
    fn check_ring(&self, index: u16, size: u16, features: u64) {
        let is_direct = features & 1 << VIRTIO_RING_F_INDIRECT_DESC == 0;
        let segments = self.options.seg_max();
        if !is_direct
            || u32::from(size) >= segments + FRAME_DESCRIPTORS
            || self.short_ring_logged.swap(true, Ordering::Relaxed)
        {
            return;
        }
        let problem = "ring without indirect descriptors is shorter than the largest request: the guest \
                       hangs on one; attach the volume with --queue-size of that many entries";
        // Firmware uses at most 128 entries of a longer ring and sends only short requests, so that is not a
        // warning.
        match size < QUEUE_SIZE_DEFAULT {
            true => tracing::warn!(queue = index, entries = size, segments, "{problem}"),
            false => tracing::info!(queue = index, entries = size, segments, "{problem}"),
        }
    }
}

impl<V: Volume> Device for BlkDevice<V> {
    type Error = BlkError;

    fn features(&self) -> u64 {
        let mut bits = vec![
            VIRTIO_F_ANY_LAYOUT,
            VIRTIO_BLK_F_SIZE_MAX,
            VIRTIO_BLK_F_SEG_MAX,
            VIRTIO_BLK_F_BLK_SIZE,
            VIRTIO_BLK_F_FLUSH,
            VIRTIO_BLK_F_TOPOLOGY,
            VIRTIO_BLK_F_CONFIG_WCE,
            VIRTIO_BLK_F_MQ,
        ];
        if self.options.read_only {
            bits.push(VIRTIO_BLK_F_RO);
        } else {
            bits.extend([VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES]);
        }
        bits.into_iter()
            .fold(ring::FEATURES, |all, bit| all | 1 << bit)
    }

    fn queues(&self) -> u16 {
        self.options.queues
    }

    fn read_config(&self, offset: u32, out: &mut [u8]) {
        let config = config::bytes(self.volume.size_bytes(), &self.options, self.writeback());
        let from = config.get(offset as usize..).unwrap_or(&[]);
        let len = from.len().min(out.len());
        out[..len].copy_from_slice(&from[..len]);
        out[len..].fill(0);
    }

    /// Only `writeback` can be written.
    fn write_config(&self, offset: u32, bytes: &[u8]) -> Result<(), BlkError> {
        match (offset, bytes) {
            (WRITEBACK_OFFSET, [mode @ (0 | 1)]) => self.switch(*mode == 1),
            _ => Err(BlkError::ConfigWrite {
                offset,
                len: bytes.len(),
            }),
        }
    }

    fn reset(&self) {
        if let Err(error) = self.switch(true) {
            // The next process then flushes more than its guest asks for, which harms nobody.
            tracing::warn!(%error, "reset");
            self.writeback.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests;
