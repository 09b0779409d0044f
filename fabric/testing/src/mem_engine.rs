//! A RAM disk with a script: completes inline, queued or delayed, holds requests back and fails those it is
//! told to.
//!
//! ```
//! use fabric_types::io::{Engine, IoError, Op, Request, Submit, Tag};
//! use fabric_testing::{Completion, MemEngine, MemVolume, OpKind};
//!
//! let volume = MemVolume::new(1 << 20);
//! let mut engine = MemEngine::new(Completion::Inline)?;
//! volume.fail_next(OpKind::Flush, IoError::NoSpace, 1);
//! let flush = Request { tag: Tag(1), op: Op::Flush, offset: 0, len: 0, buffers: &[] };
//! // SAFETY: the request has no buffers.
//! let outcome = unsafe { engine.submit(&volume, &flush) };
//! assert_eq!(outcome, Submit::Done(Err(IoError::NoSpace)));
//! # std::io::Result::Ok(())
//! ```

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use fabric_types::io::{Engine, IoError, IoResult, Op, Request, SECTOR_BYTES, Submit, Tag, Volume};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

/// Most requests one [`MemEngine`] holds unless told otherwise; beyond it `submit` answers [`Submit::Busy`].
pub const IN_FLIGHT_MAX: usize = 1024;

/// Most completions per `reap`; the rest come with the next call.
pub const REAP_MAX: usize = 256;

/// How often a held request is looked at again.
const HOLD_POLL: Duration = Duration::from_millis(1);

/// When a [`MemEngine`] reports a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completion {
    /// Inside `submit`, by [`Submit::Done`].
    Inline,
    /// By `reap`, after the next `kick`.
    Queued,
    /// By `reap`, this long after the `kick`. Zero is the same as `Queued`.
    Delayed(Duration),
}

/// Kind of a request, for scripting faults and counting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpKind {
    /// [`Op::Read`]
    Read,
    /// [`Op::Write`]
    Write,
    /// [`Op::Flush`]
    Flush,
    /// [`Op::Discard`]
    Discard,
    /// [`Op::WriteZeroes`]
    WriteZeroes,
}

/// Number of [`OpKind`]s.
const KINDS: usize = 5;

impl From<Op> for OpKind {
    fn from(op: Op) -> Self {
        match op {
            Op::Read => Self::Read,
            Op::Write { .. } => Self::Write,
            Op::Flush => Self::Flush,
            Op::Discard => Self::Discard,
            Op::WriteZeroes { .. } => Self::WriteZeroes,
        }
    }
}

/// A RAM disk. Clones share the content, the script and the counters.
#[derive(Debug, Clone)]
pub struct MemVolume {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    size_bytes: AtomicU64,
    read_only: AtomicBool,
    held: AtomicBool,
    done: [AtomicU64; KINDS],
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    data: Vec<u8>,
    faults: Vec<Fault>,
}

#[derive(Debug)]
struct Fault {
    kind: OpKind,
    error: IoError,
    left: u64,
}

impl MemVolume {
    /// A zeroed disk of `size_bytes`.
    ///
    /// # Panics
    /// If the size is not a multiple of [`SECTOR_BYTES`].
    pub fn new(size_bytes: u64) -> Self {
        assert_eq!(size_bytes % SECTOR_BYTES, 0, "a disk has whole sectors");
        let data = vec![0; usize::try_from(size_bytes).expect("fits memory")];
        Self {
            shared: Arc::new(Shared {
                size_bytes: AtomicU64::new(size_bytes),
                read_only: AtomicBool::new(false),
                held: AtomicBool::new(false),
                done: Default::default(),
                state: Mutex::new(State {
                    data,
                    faults: Vec::new(),
                }),
            }),
        }
    }

    /// Grows (with zeroes) or shrinks the disk.
    ///
    /// # Panics
    /// If the size is not a multiple of [`SECTOR_BYTES`].
    pub fn resize(&self, size_bytes: u64) {
        assert_eq!(size_bytes % SECTOR_BYTES, 0, "a disk has whole sectors");
        let len = usize::try_from(size_bytes).expect("fits memory");
        self.state().data.resize(len, 0);
        self.shared.size_bytes.store(size_bytes, Ordering::Release);
    }

    /// Refuses writes from now on, or takes them again.
    pub fn set_read_only(&self, read_only: bool) {
        self.shared.read_only.store(read_only, Ordering::Release);
    }

    /// Withholds completions (of engines that do not complete inline) until [`release`](Self::release).
    pub fn hold(&self) {
        self.shared.held.store(true, Ordering::Release);
    }

    /// Lets held requests complete.
    pub fn release(&self) {
        self.shared.held.store(false, Ordering::Release);
    }

    /// Makes the next `count` requests of `kind` fail with `error`, without any effect on the content.
    pub fn fail_next(&self, kind: OpKind, error: IoError, count: u64) {
        self.state().faults.push(Fault {
            kind,
            error,
            left: count,
        });
    }

    /// Requests of `kind` that were executed with success.
    pub fn done(&self, kind: OpKind) -> u64 {
        self.shared.done[kind as usize].load(Ordering::Acquire)
    }

    /// A copy of `len` bytes at `offset`.
    ///
    /// # Panics
    /// If the range leaves the disk.
    pub fn peek(&self, offset: usize, len: usize) -> Vec<u8> {
        self.state().data[offset..offset + len].to_vec()
    }

    /// Puts `bytes` at `offset` behind the guest's back.
    ///
    /// # Panics
    /// If the range leaves the disk.
    pub fn poke(&self, offset: usize, bytes: &[u8]) {
        self.state().data[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared
            .state
            .lock()
            .expect("no test panics with the disk locked")
    }

    fn check(&self, request: &Request<'_>) -> IoResult {
        let writes = !matches!(request.op, Op::Read | Op::Flush);
        if writes && self.shared.read_only.load(Ordering::Acquire) {
            return Err(IoError::ReadOnly);
        }
        if request.op == Op::Flush {
            return Ok(());
        }
        let aligned = request.offset % SECTOR_BYTES == 0 && request.len % SECTOR_BYTES == 0;
        let end = request.offset.checked_add(request.len);
        if !aligned || end.is_none_or(|end| end > self.size_bytes()) {
            return Err(IoError::OutOfRange);
        }
        Ok(())
    }

    /// Executes the request at once.
    ///
    /// # Safety
    /// The request's buffers are valid.
    unsafe fn execute(&self, request: &Request<'_>) -> IoResult {
        self.check(request)?;
        let kind = OpKind::from(request.op);
        let mut state = self.state();
        if let Some(at) = state
            .faults
            .iter()
            .position(|f| f.kind == kind && f.left > 0)
        {
            state.faults[at].left -= 1;
            return Err(state.faults[at].error);
        }
        let start = usize::try_from(request.offset).map_err(|_| IoError::OutOfRange)?;
        let len = usize::try_from(request.len).map_err(|_| IoError::OutOfRange)?;
        match request.op {
            Op::Flush => {}
            Op::Discard | Op::WriteZeroes { .. } => state.data[start..start + len].fill(0),
            Op::Read | Op::Write { .. } => {
                let mut at = start;
                for buffer in request.buffers {
                    let disk = &mut state.data[at..at + buffer.iov_len];
                    let guest = buffer.iov_base.cast::<u8>();
                    // SAFETY: the caller's promise; `disk` is private memory, so the two do not overlap.
                    unsafe {
                        if request.op == Op::Read {
                            std::ptr::copy_nonoverlapping(disk.as_ptr(), guest, disk.len());
                        } else {
                            std::ptr::copy_nonoverlapping(guest, disk.as_mut_ptr(), disk.len());
                        }
                    }
                    at += buffer.iov_len;
                }
            }
        }
        self.shared.done[kind as usize].fetch_add(1, Ordering::AcqRel);
        Ok(())
    }
}

impl Volume for MemVolume {
    fn size_bytes(&self) -> u64 {
        self.shared.size_bytes.load(Ordering::Acquire)
    }
}

/// A request between `submit` and its report. It is executed when it is reported, as a slow disk would.
struct Waiting {
    volume: MemVolume,
    tag: Tag,
    op: Op,
    offset: u64,
    len: u64,
    buffers: Vec<libc::iovec>,
    due: Option<Instant>,
}

/// Engine over [`MemVolume`]s for one thread.
pub struct MemEngine {
    completion: Completion,
    in_flight_max: usize,
    waiting: VecDeque<Waiting>,
    timer: OwnedFd,
    armed: bool,
}

// SAFETY: the raw buffer addresses are only descriptions; the submitter keeps the memory valid on whatever
// thread.
unsafe impl Send for MemEngine {}

impl MemEngine {
    /// An engine that reports as `completion` says.
    pub fn new(completion: Completion) -> io::Result<Self> {
        Self::with_limit(completion, IN_FLIGHT_MAX)
    }

    /// As [`new`](Self::new), answering [`Submit::Busy`] with `in_flight_max` requests inside.
    pub fn with_limit(completion: Completion, in_flight_max: usize) -> io::Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        Ok(Self {
            completion,
            in_flight_max,
            waiting: VecDeque::with_capacity(in_flight_max),
            timer: timerfd_create(TimerfdClockId::Monotonic, flags)?,
            armed: false,
        })
    }

    /// Makes `wait_fd` readable after `delay`; `None` makes it unreadable.
    fn arm(&mut self, delay: Option<Duration>) {
        let value = match delay {
            None => Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            },
            // A zero value would disarm the timer.
            Some(delay) => Timespec {
                tv_sec: i64::try_from(delay.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(delay.subsec_nanos().max(1)),
            },
        };
        let spec = Itimerspec {
            it_interval: Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            },
            it_value: value,
        };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec)
            .expect("an owned timerfd takes a valid time");
        self.armed = delay.is_some();
    }

    fn arm_for_earliest(&mut self, now: Instant) {
        let delay = self
            .waiting
            .iter()
            .filter_map(|w| {
                let left = w.due?.saturating_duration_since(now);
                let held = w.volume.shared.held.load(Ordering::Acquire);
                Some(if held { left.max(HOLD_POLL) } else { left })
            })
            .min();
        if delay.is_some() || self.armed {
            self.arm(delay);
        }
    }
}

impl Engine for MemEngine {
    type Volume = MemVolume;

    unsafe fn submit(&mut self, volume: &MemVolume, request: &Request<'_>) -> Submit {
        if self.completion == Completion::Inline {
            // SAFETY: the caller's promise.
            return Submit::Done(unsafe { volume.execute(request) });
        }
        if let Err(error) = volume.check(request) {
            return Submit::Done(Err(error));
        }
        if self.waiting.len() >= self.in_flight_max {
            return Submit::Busy;
        }
        self.waiting.push_back(Waiting {
            volume: volume.clone(),
            tag: request.tag,
            op: request.op,
            offset: request.offset,
            len: request.len,
            buffers: request.buffers.to_vec(),
            due: None,
        });
        Submit::Pending
    }

    fn kick(&mut self) {
        let delay = match self.completion {
            Completion::Inline => return,
            Completion::Queued => Duration::ZERO,
            Completion::Delayed(delay) => delay,
        };
        let now = Instant::now();
        for waiting in self.waiting.iter_mut().filter(|w| w.due.is_none()) {
            waiting.due = Some(now + delay);
        }
        self.arm_for_earliest(now);
    }

    fn reap(&mut self, done: &mut dyn FnMut(Tag, IoResult)) -> usize {
        if self.waiting.is_empty() {
            return 0;
        }
        let now = Instant::now();
        let mut reported = 0;
        let mut at = 0;
        while at < self.waiting.len() && reported < REAP_MAX {
            let w = &self.waiting[at];
            let ready = w.due.is_some_and(|due| due <= now)
                && !w.volume.shared.held.load(Ordering::Acquire);
            if !ready {
                at += 1;
                continue;
            }
            let w = self.waiting.remove(at).expect("index is in range");
            let request = Request {
                tag: w.tag,
                op: w.op,
                offset: w.offset,
                len: w.len,
                buffers: &w.buffers,
            };
            // SAFETY: the submitter keeps the buffers until this report.
            let result = unsafe { w.volume.execute(&request) };
            done(w.tag, result);
            reported += 1;
        }
        // Between the disk's due time and now the timer has fired and stays readable: set it for what is
        // left.
        self.arm_for_earliest(now);
        reported
    }

    fn in_flight(&self) -> usize {
        self.waiting.len()
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}

#[cfg(test)]
mod tests;
