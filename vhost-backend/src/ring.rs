//! Virtqueues: what a data thread asks of a ring, whatever its layout, and the checked chain that comes off
//! it.
//!
//! Everything in a ring is written by the guest while we read it. A value is read once, checked, and used;
//! nothing read before is trusted again. A ring that breaks a rule gives a [`RingError`], after which its
//! queue is served no more.

mod guest;
pub(crate) mod packed;
mod split;

use std::sync::Arc;

use virtio_bindings::virtio_config::{VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use crate::dirty::DirtyLog;
use crate::memory::{GuestAddr, MemoryView};

pub use guest::{prefetch_read, prefetch_write, read_bytes, read_scattered, write_scattered};
pub use packed::{PackedRing, PackedRingConfig};
pub use split::{SplitRing, SplitRingConfig};

/// Largest queue size of virtio. A larger queue is refused.
pub const MAX_QUEUE_SIZE: u16 = 32768;
/// Largest queue size of QEMU.
pub const QEMU_QUEUE_SIZE_MAX: u16 = 1024;
/// Largest sum of the queue sizes of a device, which bounds the memory for its requests: 256 queues of QEMU's
/// largest size. A queue that exceeds the sum is refused, and so is a record of requests in flight.
pub const MAX_DEVICE_ENTRIES: u32 = 256 * QEMU_QUEUE_SIZE_MAX as u32;
/// Longest chain in the ring itself, whatever the ring's size, so that the guest does not decide how many
/// descriptors are read for one request. A longer chain is an error of the queue.
pub const MAX_CHAIN: u16 = 1024;
/// Most descriptors in an indirect table. A longer table is an error of the queue.
pub const MAX_INDIRECT: u32 = 1024;
/// Most pieces of host memory a chain may have in either direction, which leaves room for a header and a
/// status beside the longest chain of data. One piece more is an error of the queue.
pub const MAX_SEGMENTS: usize = MAX_INDIRECT as usize + 2;

/// Virtio features of our rings, which every device offers beside its own.
pub const FEATURES: u64 = 1 << VIRTIO_F_VERSION_1
    | 1 << VIRTIO_F_RING_PACKED
    | 1 << VIRTIO_RING_F_EVENT_IDX
    | 1 << VIRTIO_RING_F_INDIRECT_DESC;

/// Bytes of a descriptor, in either layout.
const DESC_BYTES: u64 = 16;

/// The host's address of an indirect table at `addr` with `len` bytes, and its number of descriptors. All of
/// them can be read.
#[inline(always)]
fn indirect_table(
    addr: u64,
    len: u32,
    is_negotiated: bool,
    view: &mut MemoryView,
) -> Result<(*const u8, u32), RingError> {
    if !is_negotiated {
        return Err(RingError::IndirectNotNegotiated);
    }
    let entries = len / DESC_BYTES as u32;
    if entries == 0 || entries > MAX_INDIRECT || len != entries * DESC_BYTES as u32 {
        return Err(RingError::IndirectLength(len));
    }
    let outside = RingError::BufferAddress {
        addr,
        len: u64::from(len),
    };
    let base = view
        .translate(GuestAddr(addr), u64::from(len))
        .ok_or(outside)?;
    Ok((base.cast_const(), entries))
}

/// How a guest (or a front end, in the configuration) broke the rules of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// The size is 0, above [`MAX_QUEUE_SIZE`], or not a power of two for a split ring.
    #[error(
        "invalid queue size {0}: a split ring has a power of two up to {MAX_QUEUE_SIZE}, a packed \
         one 1 to {MAX_QUEUE_SIZE}"
    )]
    QueueSize(u16),
    /// A part of the ring is outside guest memory or not aligned.
    #[error("{part} at guest address {addr:#x} is outside guest memory or unaligned")]
    RingAddress {
        /// Which part.
        part: &'static str,
        /// Where it was said to be.
        addr: u64,
    },
    /// The available index moved by more than the ring holds.
    #[error("available index jumped from {from} to {to} in a queue of {size}")]
    IndexJump {
        /// Last index taken.
        from: u16,
        /// Index found.
        to: u16,
        /// Entries of the queue.
        size: u16,
    },
    /// A descriptor index outside its table.
    #[error("descriptor {index} in a table of {size}")]
    DescriptorIndex {
        /// The index.
        index: u16,
        /// Entries of the table.
        size: u32,
    },
    /// More descriptors than the table has, so there is a loop.
    #[error("descriptor chain has a loop or more than {0} entries")]
    TooLong(u32),
    /// More pieces than [`MAX_SEGMENTS`].
    #[error("descriptor chain has more than {MAX_SEGMENTS} segments")]
    TooManySegments,
    /// A buffer outside guest memory.
    #[error("buffer of {len} bytes at guest address {addr:#x} is outside guest memory")]
    BufferAddress {
        /// First guest address.
        addr: u64,
        /// Length in bytes.
        len: u64,
    },
    /// A readable buffer after a writable one.
    #[error("device-readable descriptor after a device-writable one")]
    Order,
    /// An indirect descriptor though the feature was not negotiated.
    #[error("indirect descriptor without the feature")]
    IndirectNotNegotiated,
    /// An indirect descriptor in an indirect table, or together with `NEXT`.
    #[error("indirect descriptor inside an indirect table or with a next one")]
    IndirectNested,
    /// An indirect table that is empty, longer than [`MAX_INDIRECT`] or not a whole number of descriptors.
    #[error("indirect table of {0} bytes")]
    IndirectLength(u32),
    /// A head that was taken before and has no answer yet.
    #[error("descriptor {0} is already in flight")]
    InFlight(u16),
    /// A base outside the ring.
    #[error("base {0:#x} is outside the ring")]
    Base(u32),
    /// A descriptor that was available and is not any more.
    #[error("descriptor {0} was made available and taken back")]
    TakenBack(u16),
    /// A packed ring whose daemon was gone when its guest was stopped.
    #[error(
        "where the packed ring stands is not known: its daemon was gone when the guest was stopped. Reset \
         the guest"
    )]
    NotClosed,
    /// A record of requests in flight that cannot be.
    #[error("the record of requests in flight contradicts itself")]
    Record,
    /// A request that its device can neither carry out nor answer.
    #[error("request {0}")]
    Unanswerable(&'static str),
    /// The chain is too short to be a request.
    #[error("request without a whole header or without a status byte")]
    Incomplete,
}

/// A descriptor chain as host memory: what the device reads, then what it writes. Reused from request to
/// request.
#[derive(Debug)]
pub struct Chain {
    /// Pieces to read.
    pub readable: Vec<libc::iovec>,
    /// Pieces to write.
    pub writable: Vec<libc::iovec>,
    /// Bytes in `readable`.
    pub readable_bytes: u64,
    /// Bytes in `writable`.
    pub writable_bytes: u64,
}

// SAFETY: the pointers are only followed while the memory they were translated in is held; a chain itself
// owns nothing.
unsafe impl Send for Chain {}

impl Default for Chain {
    fn default() -> Self {
        let room = || Vec::with_capacity(MAX_SEGMENTS);
        Self {
            readable: room(),
            writable: room(),
            readable_bytes: 0,
            writable_bytes: 0,
        }
    }
}

impl Chain {
    /// Empties the chain and keeps its room.
    #[inline]
    pub fn clear(&mut self) {
        self.readable.clear();
        self.writable.clear();
        self.readable_bytes = 0;
        self.writable_bytes = 0;
    }

    /// Appends a guest buffer, cut where memory regions meet. Empty buffers are left out.
    #[inline(always)]
    fn push(
        &mut self,
        view: &mut MemoryView,
        addr: u64,
        len: u32,
        writable: bool,
    ) -> Result<(), RingError> {
        let (list, bytes) = if writable {
            (&mut self.writable, &mut self.writable_bytes)
        } else if self.writable.is_empty() {
            (&mut self.readable, &mut self.readable_bytes)
        } else {
            return Err(RingError::Order);
        };
        let (mut at, mut left) = (addr, u64::from(len));
        *bytes += left;
        while left > 0 {
            let outside = RingError::BufferAddress {
                addr,
                len: u64::from(len),
            };
            let (host, part) = view.translate_part(GuestAddr(at), left).ok_or(outside)?;
            if list.len() == MAX_SEGMENTS {
                return Err(RingError::TooManySegments);
            }
            list.push(libc::iovec {
                iov_base: host.cast(),
                iov_len: part as usize,
            });
            (at, left) = (at.wrapping_add(part), left - part);
        }
        Ok(())
    }
}

/// What a data thread needs of a virtqueue. An id names a request from [`Ring::take`] until [`Ring::answer`].
pub trait Ring: Send {
    /// How many requests can be taken now. Looks at the guest's index only when all it announced before are
    /// taken.
    fn available(&mut self) -> Result<u16, RingError>;

    /// Asks the processor for the lines that the next `count` requests will need.
    fn prefetch(&mut self, count: u16, view: &mut MemoryView);

    /// Takes the next request; one must be [`Ring::available`].
    fn take(&mut self) -> Result<u16, RingError>;

    /// Puts the request that was taken last back: it is the next one again.
    fn untake(&mut self);

    /// Reads the chain of a request that was taken.
    fn walk(&self, id: u16, view: &mut MemoryView, chain: &mut Chain) -> Result<(), RingError>;

    /// Puts an answer into the ring, not yet visible to the guest.
    fn answer(&mut self, id: u16, written_bytes: u32);

    /// Answers that are not yet visible.
    fn unpublished(&self) -> u16;

    /// Makes the answers visible.
    fn publish(&mut self);

    /// Answers made visible since the last [`Ring::interrupt_due`].
    fn unsignalled(&self) -> u16;

    /// Whether the guest wants an interrupt for what was published since the last call.
    fn interrupt_due(&mut self) -> bool;

    /// Asks the guest to kick; returns true if there is something to take already.
    fn arm(&mut self) -> Result<bool, RingError>;

    /// Lets the guest know that kicks are not needed.
    fn disarm(&mut self);

    /// The last thing before the ring is left to whoever serves it next, who may wait for a kick.
    fn close(&mut self);

    /// Where to go on, as GET_VRING_BASE answers it for this layout.
    fn base(&self) -> u32;

    /// Index of the next answer.
    fn next_used(&self) -> u16;

    /// Starts, changes or ends dirty logging of the ring itself.
    fn set_log(&mut self, log: Option<(Arc<DirtyLog>, GuestAddr)>);
}
