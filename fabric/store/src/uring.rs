//! Executes [`DeviceAction`]s with io_uring, for one thread.
//!
//! Everything started since the last kick enters the kernel by one system call. The number of requests in the
//! kernel is bounded by [`DEPTH`]; with none free the caller leaves further actions in the store core, where
//! they are already bounded. Short transfers are continued, interrupted ones repeated; the caller sees all or
//! an errno.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use fabric_types::slab::{Key, Slab};
use io_uring::{IoUring, opcode, squeue, types};

use super::api::BufferRange;
use super::device::{DeviceAction, IoId, IoVecs};

/// Requests in the kernel per thread. Enough to keep a fast NVMe device busy many times over.
pub const DEPTH: u32 = 512;

/// Elements of a scatter list that the kernel takes at once; longer lists go in parts.
const IOVECS_MAX: usize = 1024;

/// How often one request is repeated or continued before it counts as failed: far more than the parts of the
/// longest list, so only a device that makes no progress gets here.
const ATTEMPTS_MAX: u16 = 4096;

/// Most requests that one [`Uring::reap`] reports. A device often finishes all that it was given at once;
/// answers that went out together would come back as new requests together, and the device would have nothing
/// to do meanwhile. In small groups the first are with the device again while the last are still looked at.
const REAP_MAX: u32 = 8;

/// Devices that one executor has at most.
pub const DEVICES_MAX: usize = 16;

/// What stands in the kernel's table where there is no device.
const NO_DEVICE: RawFd = -1;

/// How often a kick tries to hand over the first requests to a kernel that is short of memory.
const KICK_TRIES: u32 = 1000;

/// Names the shard (or other party) that started a request.
pub type Owner = u32;

/// A finished request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finished {
    /// Who started it.
    pub owner: Owner,
    /// The action's name.
    pub id: IoId,
    /// It was a flush.
    pub flush: bool,
    /// All done, or the errno.
    pub result: Result<(), i32>,
    /// What a read filled.
    pub filled: Option<IoVecs>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    Flush,
    Discard,
}

/// A request in the kernel. `iovecs` from `at`, `skip` bytes into it, is what is left.
#[derive(Clone, Copy)]
struct KernelRequest {
    owner: Owner,
    id: IoId,
    kind: Kind,
    device: u32,
    offset: u64,
    len: u64,
    iovecs: IoVecs,
    at: u32,
    skip: usize,
    attempts: u16,
}

// SAFETY: the iovecs lie in memory that the owner of the action keeps until its completion, on whatever
// thread.
unsafe impl Send for KernelRequest {}

/// The executor of one thread.
pub struct Uring {
    ring: IoUring,
    slots: Slab<KernelRequest>,
    buffers: Vec<libc::iovec>,
    queued: u32,
}

// SAFETY: the ring and the buffer ranges are used by one thread at a time (`&mut self`).
unsafe impl Send for Uring {}

impl Uring {
    /// An executor for these devices, addressed by their position, and for those that come later.
    pub fn new(devices: &[BorrowedFd<'_>]) -> io::Result<Self> {
        let ring = build()?;
        // What is opened later gets a place in the same table.
        let mut fds = [NO_DEVICE; DEVICES_MAX];
        for (place, device) in fds.iter_mut().zip(devices) {
            *place = device.as_raw_fd();
        }
        ring.submitter().register_files(&fds)?;
        let nothing = KernelRequest {
            owner: 0,
            id: IoId(0),
            kind: Kind::Flush,
            device: 0,
            offset: 0,
            len: 0,
            iovecs: IoVecs {
                ptr: std::ptr::null(),
                len: 0,
            },
            at: 0,
            skip: 0,
            attempts: 0,
        };
        Ok(Self {
            ring,
            slots: Slab::new(DEPTH, || nothing),
            buffers: Vec::new(),
            queued: 0,
        })
    }

    /// Opens the table's place of this index to a device, or clears it. The kernel then keeps the device open
    /// as long as it stands there, and no longer.
    pub fn set_device(&mut self, device: u32, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let fd = fd.map_or(NO_DEVICE, |fd| fd.as_raw_fd());
        self.ring
            .submitter()
            .register_files_update(device, &[fd])
            .map(drop)
    }

    /// Whether requests to this device are under way.
    pub fn is_using(&self, device: u32) -> bool {
        self.slots.iter().any(|request| request.device == device)
    }

    /// Registers memory that many actions use, which spares the kernel pinning it for each. False if the
    /// kernel refuses (the limit on locked memory, most often): everything works without, too.
    ///
    /// # Safety
    /// The ranges stay mapped as long as `self` lives.
    pub unsafe fn register_buffers(&mut self, ranges: &[BufferRange]) -> bool {
        let buffers: Vec<libc::iovec> = ranges
            .iter()
            .filter(|r| r.len > 0)
            .map(|r| libc::iovec {
                iov_base: r.ptr.cast(),
                iov_len: r.len,
            })
            .collect();
        if buffers.is_empty() {
            return false;
        }
        // SAFETY: the caller's promise.
        let registered = unsafe { self.ring.submitter().register_buffers(&buffers) };
        if registered.is_ok() {
            self.buffers = buffers;
        }
        registered.is_ok()
    }

    /// Requests that may be started now.
    #[inline]
    pub fn room(&self) -> usize {
        self.slots.free()
    }

    /// Requests started and not reported.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.slots.taken()
    }

    /// Queues an action; [`kick`](Self::kick) hands it to the kernel.
    ///
    /// # Panics
    /// If there is no [`room`](Self::room).
    ///
    /// # Safety
    /// The memory that the action names stays valid until it is reported.
    #[inline]
    pub unsafe fn start(&mut self, owner: Owner, device: u32, action: &DeviceAction) {
        let slot = self.slots.take().expect("the caller asked for room");
        let (id, kind, offset, len, iovecs) = match *action {
            DeviceAction::Read { id, offset, iovecs } => (id, Kind::Read, offset, 0, iovecs),
            DeviceAction::Write { id, offset, iovecs } => (id, Kind::Write, offset, 0, iovecs),
            DeviceAction::Flush { id } => (id, Kind::Flush, 0, 0, NO_IOVECS),
            DeviceAction::Discard { id, offset, len } => {
                (id, Kind::Discard, offset, len, NO_IOVECS)
            }
        };
        self.slots[slot] = KernelRequest {
            owner,
            id,
            kind,
            device,
            offset,
            len,
            iovecs,
            at: 0,
            skip: 0,
            attempts: 0,
        };
        self.push(slot);
    }

    /// Puts what is left of a request into the submission queue, which has an entry per slot.
    #[inline]
    fn push(&mut self, slot: u32) {
        let entry = self
            .entry(&self.slots[slot])
            .user_data(self.slots.key(slot).0);
        // SAFETY: descriptors are registered, and the memory is valid by the promise made to `start`.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.expect("the submission queue has an entry for every slot");
        self.queued += 1;
    }

    #[inline]
    fn entry(&self, request: &KernelRequest) -> squeue::Entry {
        let fd = types::Fixed(request.device);
        match request.kind {
            Kind::Flush => opcode::Fsync::new(fd)
                .flags(types::FsyncFlags::DATASYNC)
                .build(),
            Kind::Discard => opcode::Fallocate::new(fd, request.len)
                .offset(request.offset)
                .mode(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE)
                .build(),
            Kind::Read | Kind::Write => self.transfer(fd, request),
        }
    }

    #[inline]
    fn transfer(&self, fd: types::Fixed, request: &KernelRequest) -> squeue::Entry {
        let offset = request.offset;
        let list = request.left();
        let write = request.kind == Kind::Write;
        if request.skip == 0 && list.len() > 1 {
            let count = list.len().min(IOVECS_MAX) as u32;
            return if write {
                opcode::Writev::new(fd, list.as_ptr(), count)
                    .offset(offset)
                    .build()
            } else {
                opcode::Readv::new(fd, list.as_ptr(), count)
                    .offset(offset)
                    .build()
            };
        }
        // One element, or the rest of one that a short transfer cut.
        let base = list[0].iov_base.cast::<u8>().wrapping_add(request.skip);
        let len = u32::try_from(list[0].iov_len - request.skip).unwrap_or(MAX_RW_BYTES);
        let len = len.min(MAX_RW_BYTES);
        match (write, self.registered(base, len)) {
            (true, Some(buf)) => opcode::WriteFixed::new(fd, base, len, buf)
                .offset(offset)
                .build(),
            (true, None) => opcode::Write::new(fd, base, len).offset(offset).build(),
            (false, Some(buf)) => opcode::ReadFixed::new(fd, base, len, buf)
                .offset(offset)
                .build(),
            (false, None) => opcode::Read::new(fd, base, len).offset(offset).build(),
        }
    }

    /// Index of the registered buffer that holds the range.
    #[inline]
    fn registered(&self, base: *const u8, len: u32) -> Option<u16> {
        let (start, end) = (base.addr(), base.addr() + len as usize);
        let holds =
            |b: &libc::iovec| start >= b.iov_base.addr() && end <= b.iov_base.addr() + b.iov_len;
        Some(self.buffers.iter().position(holds)? as u16)
    }

    /// Enters the kernel if something was queued.
    #[inline]
    pub fn kick(&mut self) {
        if self.queued == 0 {
            return;
        }
        for _ in 0..KICK_TRIES {
            match self.ring.submit() {
                Ok(taken) => self.queued = self.queued.saturating_sub(taken as u32),
                // Short of memory or interrupted: it may go the next time.
                Err(error) if is_passing(&error) => {
                    tracing::debug!(%error, "io_uring submission deferred");
                }
                // Nothing would ever be submitted again, and whoever waits would wait for ever.
                Err(error) => panic!("io_uring refuses submissions: {error}"),
            }
            // With requests in the kernel the rest goes when one of them completes; with none nobody would
            // wake us.
            if (self.queued as usize) < self.in_flight() || self.queued == 0 {
                return;
            }
            std::thread::yield_now();
        }
        tracing::error!(
            queued = self.queued,
            "the kernel takes no device requests; free memory on this node"
        );
    }

    /// Reports some finished requests, and returns whether there are more. With nothing finished it makes no
    /// system call.
    #[inline]
    pub fn reap(&mut self, mut done: impl FnMut(Finished)) -> bool {
        if self.slots.taken() == 0 {
            return false;
        }
        // Completions may wait for this thread to enter the kernel; so may entries that a kick could not hand
        // over.
        if self.queued > 0 || self.ring.submission().taskrun() {
            if let Ok(taken) = self.ring.submit() {
                self.queued = self.queued.saturating_sub(taken as u32);
            }
        }
        let mut again = false;
        for _ in 0..REAP_MAX {
            let Some(entry) = self.ring.completion().next() else {
                break;
            };
            let Some(slot) = self.slots.find(Key(entry.user_data())) else {
                continue;
            };
            match self.slots[slot].progress(entry.result()) {
                Some(result) => {
                    let KernelRequest {
                        owner,
                        id,
                        kind,
                        iovecs,
                        ..
                    } = self.slots[slot];
                    self.slots.give_back(slot);
                    let flush = kind == Kind::Flush;
                    let read = kind == Kind::Read && result.is_ok();
                    let filled = read.then_some(iovecs);
                    done(Finished {
                        owner,
                        id,
                        flush,
                        result,
                        filled,
                    });
                }
                None => {
                    self.push(slot);
                    again = true;
                }
            }
        }
        if again {
            self.kick();
        }
        !self.ring.completion().is_empty()
    }

    /// Waits until something is finished or `timeout` is over.
    pub fn wait(&mut self, timeout: std::time::Duration) -> io::Result<()> {
        let spec = types::Timespec::from(timeout);
        let args = types::SubmitArgs::new().timespec(&spec);
        match self.ring.submitter().submit_with_args(1, &args) {
            Ok(taken) => self.queued = self.queued.saturating_sub(taken as u32),
            Err(error) if error.raw_os_error() == Some(libc::ETIME) => self.queued = 0,
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// The ring's descriptor: readable when something is finished.
    pub fn as_raw_fd(&self) -> RawFd {
        self.ring.as_raw_fd()
    }
}

impl Drop for Uring {
    /// The kernel may be using memory of requests in flight: wait for them before anybody frees it.
    fn drop(&mut self) {
        while self.in_flight() > 0 {
            if self.wait(std::time::Duration::from_secs(1)).is_err() {
                return;
            }
            self.reap(|_| ());
        }
    }
}

const NO_IOVECS: IoVecs = IoVecs {
    ptr: std::ptr::null(),
    len: 0,
};

/// What one read or write transfers at most (a kernel limit, less than 2 GiB), in whole blocks.
const MAX_RW_BYTES: u32 = 0x7fff_f000;

impl KernelRequest {
    /// The elements of the list that are not transferred in full.
    #[inline]
    fn left(&self) -> &[libc::iovec] {
        // SAFETY: the list lives until the completion, and `at` is within it.
        unsafe {
            std::slice::from_raw_parts(
                self.iovecs.ptr.add(self.at as usize),
                (self.iovecs.len - self.at) as usize,
            )
        }
    }

    /// Takes in what the kernel says: `Some` is the outcome, `None` means that there is more to do.
    #[inline]
    fn progress(&mut self, res: i32) -> Option<Result<(), i32>> {
        self.attempts += 1;
        if res < 0 {
            let errno = -res;
            let passing = matches!(errno, libc::EINTR | libc::EAGAIN);
            return match self.kind {
                // Advisory: a device that cannot do it keeps the space, nothing else.
                Kind::Discard => Some(Ok(())),
                _ if passing && self.attempts < ATTEMPTS_MAX => None,
                _ => Some(Err(errno)),
            };
        }
        if matches!(self.kind, Kind::Flush | Kind::Discard) {
            return Some(Ok(()));
        }
        let moved = res as usize;
        self.offset += moved as u64;
        self.advance(moved);
        if self.at == self.iovecs.len {
            return Some(Ok(()));
        }
        // No progress means the end of the device, which the core's offsets never pass on a sound one.
        if moved == 0 || self.attempts >= ATTEMPTS_MAX {
            return Some(Err(libc::EIO));
        }
        None
    }

    #[inline]
    fn advance(&mut self, mut moved: usize) {
        while self.at < self.iovecs.len {
            let left = self.left()[0].iov_len - self.skip;
            if moved < left {
                self.skip += moved;
                return;
            }
            moved -= left;
            self.at += 1;
            self.skip = 0;
        }
    }
}

/// Whether a failed submission can be repeated: the kernel is short of memory, its completion queue is full,
/// or a signal came.
fn is_passing(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EAGAIN | libc::EBUSY | libc::EINTR | libc::ENOMEM)
    )
}

/// Builds a ring, with the cheapest way of running completions that this kernel knows and that still wakes a
/// thread asleep in poll (deferred task work does not: its completions appear only once the thread enters the
/// ring). Not a single-issuer ring: blocking I/O of the control plane moves between threads, and the kernel
/// would refuse the second.
fn build() -> io::Result<IoUring> {
    let cooperative = IoUring::builder()
        .setup_coop_taskrun()
        .setup_taskrun_flag()
        .setup_cqsize(DEPTH * 2)
        .build(DEPTH);
    if let Ok(ring) = cooperative {
        return Ok(ring);
    }
    IoUring::builder().setup_cqsize(DEPTH * 2).build(DEPTH)
}

#[cfg(test)]
mod tests;
