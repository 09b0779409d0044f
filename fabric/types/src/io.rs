//! The seam between the guest side and the fabric: what a data thread asks of a volume, and how it learns the
//! outcome.
//!
//! `vhost-backend` is generic over [`Engine`], so its rings and sessions are tested on a memory engine and
//! ship on the fabric's own. An engine belongs to one data thread: nothing here is shared, locked or
//! allocated per request.

use std::os::fd::BorrowedFd;

/// Size of a logical sector of virtio-blk, in bytes; the granularity of every offset and length of a
/// [`Request`].
pub const SECTOR_BYTES: u64 = 512;

/// Names a request to the thread that submitted it. Opaque to the fabric, handed back in the completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tag(pub u64);

/// What a request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Fill the buffers from the volume.
    Read,
    /// Store the buffers' content; `fua` makes it durable before completion.
    Write {
        /// Force unit access: complete only once the data survive power loss.
        fua: bool,
    },
    /// Make every write completed before this request durable.
    Flush,
    /// Give the range's space back; it reads as zeroes afterwards.
    Discard,
    /// Make the range read as zeroes; `unmap` allows giving its space back.
    WriteZeroes {
        /// The space may be given back.
        unmap: bool,
    },
}

/// One request on a volume. `offset` and `len` are in bytes, multiples of [`SECTOR_BYTES`].
///
/// For `Read` and `Write` the buffers' lengths sum to `len`; for the others `buffers` is empty.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Returned in the completion.
    pub tag: Tag,
    /// What to do.
    pub op: Op,
    /// First byte on the volume.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Scatter list in host addresses. The slice itself is only borrowed for the call to [`Engine::submit`].
    pub buffers: &'a [libc::iovec],
}

/// Why a request failed. The guest sees `VIRTIO_BLK_S_IOERR` for each (or `UNSUPP` where noted).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum IoError {
    /// The range leaves the volume, or is not aligned to [`SECTOR_BYTES`].
    #[error("request outside the volume or unaligned")]
    OutOfRange,
    /// A write to a read-only volume or attachment.
    #[error("volume is read-only")]
    ReadOnly,
    /// No space left on the devices of the pool.
    #[error("no space left")]
    NoSpace,
    /// A block failed its checksum and no good replica is left.
    #[error("checksum mismatch")]
    Corrupt,
    /// The device returned this errno.
    #[error("device error {0}")]
    Device(i32),
    /// The lease's generation or the epoch is older than what a replica has persisted.
    #[error("fenced by a newer generation or epoch")]
    Fenced,
}

/// Outcome of a request.
pub type IoResult = Result<(), IoError>;

/// What [`Engine::submit`] did with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Submit {
    /// Finished already; there will be no completion for its tag.
    Done(IoResult),
    /// Accepted; its tag comes back from [`Engine::reap`].
    Pending,
    /// A bound was reached: nothing was done. Submit again after the next `reap` that returns something, if
    /// [`Engine::has_room`] says so.
    Busy,
}

/// A volume as a data thread sees it. Cheap to clone (a reference count).
pub trait Volume: Clone + Send + Sync + 'static {
    /// Current size in bytes, a multiple of [`SECTOR_BYTES`]; changes on live resize.
    fn size_bytes(&self) -> u64;

    /// Whether that is its size. While it waits for its lease it may be resized where it is in use; its
    /// requests are answered busy then.
    #[inline]
    fn knows_size(&self) -> bool {
        true
    }
}

/// Executes requests for one data thread.
///
/// Life of a request: `submit` (any number), one `kick`, then `reap` until its tag comes back. Before it
/// sleeps the thread waits for [`Engine::wait_fd`] to become readable; an engine whose requests all finish in
/// `submit` may never make it so.
pub trait Engine: Send {
    /// Volumes of this engine.
    type Volume: Volume;

    /// Takes a request.
    ///
    /// # Safety
    /// Every buffer stays valid (mapped, not freed) until the request is done: `Submit::Done`, `Submit::Busy`
    /// or its completion. The guest may change the content meanwhile; the engine must never rely on reading a
    /// byte twice.
    unsafe fn submit(&mut self, volume: &Self::Volume, request: &Request<'_>) -> Submit;

    /// Whether it makes sense to submit again what was answered busy on this volume. To be asked first: a
    /// request of a thousand buffers is not looked at anew in every turn of the thread.
    #[inline]
    fn has_room(&self, _volume: &Self::Volume) -> bool {
        true
    }

    /// Hands everything submitted so far to the devices, in one system call where possible.
    fn kick(&mut self);

    /// Reports finished requests, at most a bounded number per call; returns how many. Never blocks and, with
    /// nothing to report, makes no system call, except that an engine with connections asks for those that
    /// are readable.
    fn reap(&mut self, done: &mut dyn FnMut(Tag, IoResult)) -> usize;

    /// Number of requests accepted and not yet reported.
    fn in_flight(&self) -> usize;

    /// Whether `reap` has to be called: while requests are in flight, and while this engine waits for a
    /// device on behalf of requests of other threads.
    #[inline]
    fn must_reap(&self) -> bool {
        self.in_flight() > 0
    }

    /// Becomes readable (poll/epoll) when `reap` has something to do.
    fn wait_fd(&self) -> BorrowedFd<'_>;
}
