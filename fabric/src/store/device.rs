//! What the sans-IO store core asks of a device, and the synchronous view that opening and formatting use.
//!
//! In steady state the core never touches a device: it emits [`DeviceAction`]s, and is told of each outcome
//! by [`IoId`]. Production executes them with io_uring, the tests with a simulated disk that drops, tears and
//! reorders what was not flushed.

use std::io;

use super::iov::IovCursor;

/// Unit of checksum, mapping and allocation on a device, in bytes.
pub const BLOCK_BYTES: usize = 4096;

/// Whether a read that ends with this errno says that the blocks cannot be given, and not that the device, or
/// the way to it, is gone, slow or busy.
///
/// For a block device Linux names the errnos in `blk_errors` (block/blk-core.c): `ENODATA` is a medium error,
/// `EILSEQ` a failed protection check, and `EIO` whatever has no errno of its own, the error of most drives
/// and drivers among it. A file's file system adds what it finds itself: `EBADMSG` is a checksum of its own
/// that does not fit, `EUCLEAN` a map of the file that is damaged (`EFSBADCRC` and `EFSCORRUPTED` of ext4 and
/// XFS).
///
/// A device that dies as a whole may answer `EIO`, too, to everything. Who takes blocks for lost must bound
/// how many.
pub fn is_media_error(errno: i32) -> bool {
    matches!(
        errno,
        libc::EIO | libc::ENODATA | libc::EILSEQ | libc::EBADMSG | libc::EUCLEAN
    )
}

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

/// A scatter list owned by the core, valid until the completion of its action is delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IoVecs {
    /// First element of an array of `len` iovecs.
    pub ptr: *const libc::iovec,
    /// Number of elements; 0 only where nothing is read or filled.
    pub len: u32,
}

// SAFETY: `IoVecs` is a description; whoever executes the action upholds the lifetime promise above, on any
// thread.
unsafe impl Send for IoVecs {}

impl IoVecs {
    /// No memory.
    pub const NONE: Self = Self {
        ptr: std::ptr::null(),
        len: 0,
    };

    /// The first piece of memory; nothing if the list is empty.
    ///
    /// # Safety
    /// The list is valid, as is the memory, which nobody else uses meanwhile.
    pub unsafe fn first_mut<'a>(&self) -> &'a mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: the caller's promise; the list has an element.
        let iov = unsafe { &*self.ptr };
        if iov.iov_len == 0 {
            return &mut [];
        }
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(iov.iov_base.cast(), iov.iov_len) }
    }

    /// Appends the CRC32C of each block of what the list names.
    ///
    /// # Safety
    /// The list and the memory are valid. The memory may change meanwhile (it may be a guest's): that only
    /// spoils a sum.
    pub unsafe fn digest(&self, out: &mut Vec<u32>) {
        // SAFETY: the caller's promise.
        let list = unsafe { std::slice::from_raw_parts(self.ptr, self.len as usize) };
        let bytes: usize = list.iter().map(|iov| iov.iov_len).sum();
        let mut cursor = IovCursor::default();
        for _ in 0..bytes / BLOCK_BYTES {
            // SAFETY: the caller's promise; the list holds so many blocks.
            out.push(unsafe { cursor.crc(list, BLOCK_BYTES) });
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_piece_of_an_empty_list_is_empty() {
        let blank = libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        let one = IoVecs {
            ptr: &raw const blank,
            len: 1,
        };
        for list in [IoVecs::NONE, one] {
            // SAFETY: there is no memory.
            assert!(unsafe { list.first_mut() }.is_empty());
        }
    }
}
