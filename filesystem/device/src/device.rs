//! The virtio-fs device as a guest sees it: features, configuration space, session and counters of one
//! attachment.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use fuse_codec::{Agreed, Wanted};
use vhost_backend::device::Device;
use vhost_backend::latency::{DeviceLatency, Latencies};
use vhost_backend::ring;
use vhost_backend::session::message::protocol;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;

use crate::counters::{FsCounters, LATENCY_CLASSES, LatencyClass, QueueCounters};
use crate::service::Filesystem;
use crate::session::Session;

/// Longest tag in bytes, a bound of the configuration space; a longer one is refused.
pub const TAG_BYTES_MAX: usize = 36;
/// Most request queues of one device; more are refused. A guest has at most as many as it has processors.
pub const REQUEST_QUEUES_MAX: u16 = 64;
/// Length of the configuration space: tag, and number of request queues.
pub const CONFIG_BYTES: usize = TAG_BYTES_MAX + 4;
/// Largest payload of READ and WRITE in bytes, and largest READDIR. A request takes one descriptor for each
/// page and [`FRAME_DESCRIPTORS`], so the queue size must be 1024. A shorter ring limits requests to fewer
/// pages.
pub const IO_BYTES_MAX: u32 = 1 << 20;
/// Size of a page in bytes, the unit of INIT's `max_pages`.
const PAGE_BYTES: u32 = 4096;
/// Number of pages in [`IO_BYTES_MAX`].
const IO_PAGES_MAX: u16 = (IO_BYTES_MAX / PAGE_BYTES) as u16;
/// Descriptors of a request in addition to its pages: a header and a body in each direction.
const FRAME_DESCRIPTORS: u16 = 4;
/// Most read-ahead and asynchronous requests that a guest has in flight: about what a ring has room for.
/// Without a word of ours kernels stop at 12.
const BACKGROUND_MAX: u16 = 1024;
/// From here on the guest's kernel counts the device as congested: three quarters, as kernels do by default.
const CONGESTION_THRESHOLD: u16 = BACKGROUND_MAX / 4 * 3;

/// Why a device could not be made, or a configuration write was refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum FsError {
    /// The tag has no bytes.
    #[error("an empty tag is not possible: give 1 to {TAG_BYTES_MAX} bytes")]
    TagEmpty,
    /// The tag has more than [`TAG_BYTES_MAX`] bytes.
    #[error("tag {tag:?} has {} bytes: give at most {TAG_BYTES_MAX}", tag.len())]
    TagTooLong {
        /// The tag.
        tag: String,
    },
    /// A newline would break what guests show in sysfs, a NUL ends the tag.
    #[error("tag {tag:?} has a newline or a NUL: leave it out")]
    TagCharacter {
        /// The tag.
        tag: String,
    },
    /// No request queues, or more than [`REQUEST_QUEUES_MAX`].
    #[error("{0} request queues are not possible: give 1 to {REQUEST_QUEUES_MAX}")]
    Queues(u16),
    /// Nothing in the configuration space can be written.
    #[error(
        "configuration write of {len} bytes at offset {offset} refused: nothing can be written"
    )]
    ConfigWrite {
        /// Offset in the configuration space.
        offset: u32,
        /// Length in bytes.
        len: usize,
    },
}

/// How an attachment presents its filesystem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FsOptions {
    /// What the guest mounts it by: 1 to [`TAG_BYTES_MAX`] bytes. QEMU shows its guest the tag of its own
    /// command line, which has to be the same.
    pub tag: String,
    /// Number of request queues, 1 to [`REQUEST_QUEUES_MAX`]; the hiprio queue is one more.
    pub request_queues: u16,
    /// Operations that would change something are answered EROFS.
    pub read_only: bool,
}

impl FsOptions {
    fn check(&self) -> Result<(), FsError> {
        let tag = || self.tag.clone();
        match self.tag.len() {
            0 => return Err(FsError::TagEmpty),
            1..=TAG_BYTES_MAX => {}
            _ => return Err(FsError::TagTooLong { tag: tag() }),
        }
        if self.tag.contains(['\n', '\0']) {
            return Err(FsError::TagCharacter { tag: tag() });
        }
        if self.request_queues == 0 || self.request_queues > REQUEST_QUEUES_MAX {
            return Err(FsError::Queues(self.request_queues));
        }
        Ok(())
    }
}

/// One virtio-fs device: a filesystem as one guest sees it. Shared by the session and all data threads.
#[derive(Debug)]
pub struct FsDevice<F> {
    filesystem: Arc<F>,
    options: FsOptions,
    pub(crate) session: Session,
    /// One per queue, written only by the thread that serves it.
    counters: Box<[QueueCounters]>,
    pub(crate) latency: DeviceLatency<LATENCY_CLASSES>,
    /// Descriptors that a request on each queue may have, as the queue was started last.
    room: Box<[AtomicU16]>,
}

impl<F: Filesystem> FsDevice<F> {
    /// A device for `filesystem`.
    pub fn new(filesystem: Arc<F>, options: FsOptions) -> Result<Arc<Self>, FsError> {
        options.check()?;
        let queues = || 0..=options.request_queues;
        Ok(Arc::new(Self {
            filesystem,
            session: Session::default(),
            counters: queues().map(|_| QueueCounters::default()).collect(),
            latency: DeviceLatency::new(options.request_queues + 1),
            room: queues().map(|_| AtomicU16::new(u16::MAX)).collect(),
            options,
        }))
    }

    /// The filesystem behind the device.
    pub fn filesystem(&self) -> &Arc<F> {
        &self.filesystem
    }

    /// How it is presented.
    pub fn options(&self) -> &FsOptions {
        &self.options
    }

    /// What holds for the mount; none while the guest has not mounted it.
    pub fn agreed(&self) -> Option<Agreed> {
        self.session.agreed()
    }

    /// Counters of all queues together, since the device was made.
    pub fn counters(&self) -> FsCounters {
        let queues = (0..).map_while(|index| self.queue_counters(index));
        queues.fold(FsCounters::default(), |sum, queue| sum.plus(&queue))
    }

    /// Counters of one queue; 0 is the hiprio queue. None if there is no such queue.
    pub fn queue_counters(&self, index: u16) -> Option<FsCounters> {
        let queue = self.counters.get(usize::from(index))?;
        Some(queue.snapshot(self.latency.in_flight_of(index)))
    }

    /// Latencies of one class of operations, of all queues together, since the device was made. A latency
    /// begins when a data thread takes the request off the ring, and ends when its answer is made visible to
    /// the guest. Operations that are answered with an error number are among them.
    pub fn latencies(&self, class: LatencyClass) -> Latencies {
        self.latency.of(class as usize)
    }

    /// Records that a queue of `size` entries was started. Without indirect descriptors its size bounds the
    /// requests.
    pub(crate) fn queue_started(&self, index: u16, size: u16, features: u64) {
        let is_direct = features & 1 << VIRTIO_RING_F_INDIRECT_DESC == 0;
        let room = if is_direct { size } else { u16::MAX };
        self.room[usize::from(index)].store(room, Ordering::Relaxed);
    }

    /// Largest number of pages of a request. Linux respects the size of the ring itself since 5.13; an
    /// earlier kernel waits forever to place a request that does not fit into a ring without indirect
    /// descriptors.
    fn pages_max(&self) -> u16 {
        let request_queues = self.room[1..].iter();
        let room = request_queues.map(|room| room.load(Ordering::Relaxed));
        let room = room.min().unwrap_or(u16::MAX);
        room.saturating_sub(FRAME_DESCRIPTORS)
            .clamp(1, IO_PAGES_MAX)
    }

    /// What INIT is answered by.
    pub(crate) fn wanted(&self) -> Wanted {
        let max_pages = self.pages_max();
        Wanted {
            read_only: self.options.read_only,
            nodeids_are_inodes: true,
            max_write_bytes: u32::from(max_pages) * PAGE_BYTES,
            max_pages,
            max_readahead_bytes: IO_BYTES_MAX,
            max_background: BACKGROUND_MAX,
            congestion_threshold: CONGESTION_THRESHOLD,
        }
    }

    /// The guest mounts it.
    pub(crate) fn begin_session(&self, agreed: Agreed) {
        let ended = || self.filesystem.end_session();
        let began = |agreed: &Agreed| self.filesystem.begin_session(agreed);
        self.session.begin(agreed, ended, began);
    }

    /// The guest has unmounted it. Without effect if there is no session. Whoever knows that no guest comes
    /// back to its mount may call it, too.
    pub fn end_session(&self) {
        self.session.end(|| self.filesystem.end_session());
    }

    #[inline]
    pub(crate) fn counters_of(&self, index: u16) -> &QueueCounters {
        &self.counters[usize::from(index)]
    }

    fn config(&self) -> [u8; CONFIG_BYTES] {
        let mut config = [0; CONFIG_BYTES];
        config[..self.options.tag.len()].copy_from_slice(self.options.tag.as_bytes());
        let queues = u32::from(self.options.request_queues);
        config[TAG_BYTES_MAX..].copy_from_slice(&queues.to_le_bytes());
        config
    }
}

impl<F: Filesystem> Device for FsDevice<F> {
    type Error = FsError;

    /// Those of the rings. `VIRTIO_FS_F_NOTIFICATION` is not among them: Linux's driver does not know it.
    fn features(&self) -> u64 {
        ring::FEATURES
    }

    /// Neither CONFIG nor INFLIGHT_SHMFD: see the crate's documentation.
    fn protocol_features(&self) -> u64 {
        protocol::OFFERED & !(protocol::CONFIG | protocol::INFLIGHT_SHMFD)
    }

    fn queues(&self) -> u16 {
        self.options.request_queues + 1
    }

    fn read_config(&self, offset: u32, out: &mut [u8]) {
        let config = self.config();
        let from = config.get(offset as usize..).unwrap_or(&[]);
        let len = from.len().min(out.len());
        out[..len].copy_from_slice(&from[..len]);
        out[len..].fill(0);
    }

    fn write_config(&self, offset: u32, bytes: &[u8]) -> Result<(), FsError> {
        let len = bytes.len();
        Err(FsError::ConfigWrite { offset, len })
    }

    fn reset(&self) {
        self.end_session();
    }
}
