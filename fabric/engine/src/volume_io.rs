//! Blocking access to a volume in large pieces, for import, export and tools. Not for a data thread.

use fabric_types::io::{Engine, IoError, IoResult, Op, Request, Submit, Tag, Volume};
use rustix::event::{PollFd, PollFlags, poll};

use super::{Fabric, FabricEngine, FabricError, VolumeHandle};

/// Bytes of one request; a longer transfer is split.
const REQUEST_BYTES: usize = 1 << 20;

/// Pause before a request that was not taken is tried again.
const BUSY_PAUSE: rustix::time::Timespec = rustix::time::Timespec {
    tv_sec: 0,
    tv_nsec: 2_000_000,
};

/// Requests in flight together.
const DEPTH: usize = 8;

/// A volume opened for blocking I/O. Offsets and lengths are multiples of [`fabric_types::io::SECTOR_BYTES`].
/// Buffers aligned to 4096 bytes spare a copy.
pub struct VolumeIo {
    engine: FabricEngine,
    volume: VolumeHandle,
}

impl VolumeIo {
    /// Takes an engine (one of the bounded number of lanes) until it is dropped.
    pub fn new(fabric: &Fabric, volume: &VolumeHandle) -> Result<Self, FabricError> {
        Ok(Self {
            engine: fabric.idle_engine()?,
            volume: volume.clone(),
        })
    }

    /// Present size of the volume.
    pub fn size_bytes(&self) -> u64 {
        self.volume.size_bytes()
    }

    /// Fills `buf` from byte `offset`.
    pub fn read_at(&mut self, offset: u64, buf: &mut [u8]) -> IoResult {
        self.transfer(Op::Read, offset, buf.as_mut_ptr(), buf.len())
    }

    /// Writes `buf` at byte `offset`.
    pub fn write_at(&mut self, offset: u64, buf: &[u8]) -> IoResult {
        self.transfer(
            Op::Write { fua: false },
            offset,
            buf.as_ptr().cast_mut(),
            buf.len(),
        )
    }

    /// Makes a range read as zeroes and gives its space back.
    pub fn zero(&mut self, offset: u64, len: u64) -> IoResult {
        self.single(Op::WriteZeroes { unmap: true }, offset, len)
    }

    /// Makes everything written before durable.
    pub fn flush(&mut self) -> IoResult {
        self.single(Op::Flush, 0, 0)
    }

    fn single(&mut self, op: Op, offset: u64, len: u64) -> IoResult {
        let request = Request {
            tag: Tag(0),
            op,
            offset,
            len,
            buffers: &[],
        };
        let mut result = Ok(());
        // SAFETY: the request has no buffers.
        while !unsafe { self.start(&request, &mut result) } {
            self.finish_some(&mut result);
        }
        self.finish_all(&mut result);
        result
    }

    /// Reads into or writes from `len` bytes at `memory`, which the caller's slice keeps valid: on return
    /// nothing is in flight.
    fn transfer(&mut self, op: Op, offset: u64, memory: *mut u8, len: usize) -> IoResult {
        let mut result = Ok(());
        let mut at = 0;
        while at < len && result.is_ok() {
            let part = REQUEST_BYTES.min(len - at);
            let buffers = [libc::iovec {
                iov_base: memory.wrapping_add(at).cast(),
                iov_len: part,
            }];
            let request = Request {
                tag: Tag(at as u64),
                op,
                offset: offset + at as u64,
                len: part as u64,
                buffers: &buffers,
            };
            // SAFETY: the range lies in the caller's slice, and `finish_all` below waits for every request.
            let started =
                self.engine.in_flight() < DEPTH && unsafe { self.start(&request, &mut result) };
            if started {
                at += part;
            } else {
                self.finish_some(&mut result);
            }
        }
        self.finish_all(&mut result);
        result
    }

    /// Submits; false if it has to be done again.
    ///
    /// # Safety
    /// As [`Engine::submit`].
    unsafe fn start(&mut self, request: &Request<'_>, result: &mut IoResult) -> bool {
        // SAFETY: the caller's promise.
        match unsafe { self.engine.submit(&self.volume, request) } {
            Submit::Done(done) => *result = result.and(done),
            Submit::Pending => {}
            // It would be busy for ever.
            Submit::Busy if self.volume.is_revoked() => *result = Err(IoError::Fenced),
            Submit::Busy => return false,
        }
        true
    }

    fn finish_some(&mut self, result: &mut IoResult) {
        self.engine.kick();
        let mut first: Option<IoError> = None;
        let mut take = |_, done: IoResult| {
            if let Err(error) = done {
                first.get_or_insert(error);
            }
        };
        if self.engine.reap(&mut take) == 0 {
            // With nothing under way the request found no room, no lease or no map, and has to be tried
            // again.
            let again = (self.engine.in_flight() == 0).then_some(&BUSY_PAUSE);
            let fd = self.engine.wait_fd();
            // Interrupted or not, `reap` says what there is.
            let _ = poll(&mut [PollFd::new(&fd, PollFlags::IN)], again);
        }
        if let Some(error) = first {
            *result = result.and(Err(error));
        }
    }

    fn finish_all(&mut self, result: &mut IoResult) {
        while self.engine.in_flight() > 0 {
            self.finish_some(result);
        }
        // Between calls nobody reaps; what other threads wait for must not wait for the next call.
        self.engine.drain_completions();
    }
}
