//! What the sans-IO store core asks of a device, and the synchronous view that opening and formatting use.
//!
//! In steady state the core never touches a device: it emits [`DeviceAction`]s, and is told of each outcome
//! by [`IoId`]. Production executes them with io_uring, the tests with a simulated disk that drops, tears and
//! reorders what was not flushed.

use std::io;

pub use fabric_types::block::BLOCK_BYTES;
pub use fabric_types::iov::IoVecs;

/// Names one device request between its action and its completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IoId(pub u64);

/// A device request that the core wants executed. Actions may run in any order and concurrently: where order
/// matters the core waits for the completion of the first before it emits the second.
#[derive(Debug)]
pub enum DeviceAction {
    /// Read `iovecs`' total length at byte `offset` of the device.
    Read {
        /// Completion name.
        id: IoId,
        /// Byte offset, a multiple of [`BLOCK_BYTES`].
        offset: u64,
        /// Destination; lives until the completion.
        iovecs: IoVecs,
    },
    /// Write `iovecs`' total length at byte `offset` of the device.
    Write {
        /// Completion name.
        id: IoId,
        /// Byte offset, a multiple of [`BLOCK_BYTES`].
        offset: u64,
        /// Source; lives until the completion.
        iovecs: IoVecs,
    },
    /// Make every write whose completion was delivered before this action durable.
    Flush {
        /// Completion name.
        id: IoId,
    },
    /// Tell the device that the range is not needed (hole punch, BLKDISCARD). Advisory: failure is ignored.
    Discard {
        /// Completion name.
        id: IoId,
        /// Byte offset, a multiple of [`BLOCK_BYTES`].
        offset: u64,
        /// Length in bytes, a multiple of [`BLOCK_BYTES`].
        len: u64,
    },
}

/// One of several reads that are made together.
#[derive(Debug)]
pub struct ReadAt<'a> {
    /// Byte offset.
    pub offset: u64,
    /// Destination.
    pub buf: &'a mut [u8],
}

/// Synchronous device access, for format, open (recovery) and tools. Offsets and lengths are multiples of
/// [`BLOCK_BYTES`]; buffers are aligned to [`BLOCK_BYTES`].
pub trait SyncDevice {
    /// Capacity in bytes.
    fn capacity_bytes(&self) -> u64;
    /// Fills `buf` from byte `offset`.
    fn read_at(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<()>;
    /// Writes `buf` at byte `offset`.
    fn write_at(&mut self, offset: u64, buf: &[u8]) -> io::Result<()>;
    /// Makes all earlier writes durable.
    fn flush(&mut self) -> io::Result<()>;

    /// Makes several reads, at the same time where the device can. If any fails, none of the buffers is to be
    /// used.
    fn read_many(&mut self, reads: &mut [ReadAt<'_>]) -> io::Result<()> {
        reads
            .iter_mut()
            .try_for_each(|read| self.read_at(read.offset, read.buf))
    }

    /// One more handle on the device, for another thread; `None` if it has only this one.
    fn handle(&self) -> Option<Box<dyn SyncDevice + Send>> {
        None
    }
}
