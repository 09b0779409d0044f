//! One queue of a block device on its data thread: requests go to the engine, their status to the guest.

use std::sync::Arc;

use fabric_types::io::{Engine, IoError, IoResult, Op, Request, Submit, Tag, Volume};
use virtio_bindings::virtio_blk::VIRTIO_BLK_F_FLUSH;

use super::request::{Action, Limits, Range, Ranges, Status, parse};
use super::{BlkDevice, KINDS, QueueCounters, RequestKind};
use crate::device::{DeviceEngine, DeviceQueue, Submitted};
use crate::latency::{Stamp, Timing};
use crate::ring::{Chain, RingError, write_scattered};

/// A queue of a block device whose requests engine `E` carries out.
pub struct BlkQueue<E: Engine> {
    device: Arc<BlkDevice<E::Volume>>,
    index: u16,
    /// The guest's driver does not flush, so every write must be durable before it is answered.
    never_flushes: bool,
    /// Ranges of the request that has them, as they were checked. They stay while it is stalled half way:
    /// what is with the engine already and what is still to come must be of one request, whatever the guest
    /// writes over it meanwhile.
    ranges: Box<Ranges>,
    timing: Timing<KINDS>,
}

/// A request between submission and answer.
#[derive(Debug, Clone, Copy)]
pub struct BlkRequest {
    status: *mut u8,
    taken: Stamp,
    op: Op,
    bytes: u64,
    /// Engine requests under way.
    outstanding: u16,
    /// Ranges submitted so far.
    next_range: u16,
    /// Not all ranges are submitted yet.
    submitting: bool,
    failed: bool,
}

// SAFETY: `status` leads into guest memory, which stays mapped until the request is answered; one thread uses
// the request.
unsafe impl Send for BlkRequest {}

const NONE: BlkRequest = BlkRequest {
    status: std::ptr::null_mut(),
    taken: Stamp::NONE,
    op: Op::Flush,
    bytes: 0,
    outstanding: 0,
    next_range: 0,
    submitting: false,
    failed: false,
};

impl Default for BlkRequest {
    fn default() -> Self {
        NONE
    }
}

/// A request that the engine is done with.
struct Done {
    status: *mut u8,
    taken: Stamp,
    op: Op,
    bytes: u64,
}

/// Every engine of volumes serves virtio-blk.
impl<E: Engine> DeviceEngine for E {
    type Queue = BlkQueue<E>;
    type Outcome<'a> = IoResult;

    #[inline(always)]
    fn kick(&mut self) {
        Engine::kick(self);
    }

    #[inline(always)]
    fn reap<'r>(&'r mut self, done: &'r mut dyn FnMut(Tag, IoResult)) -> usize {
        Engine::reap(self, done)
    }

    #[inline(always)]
    fn in_flight(&self) -> usize {
        Engine::in_flight(self)
    }

    #[inline(always)]
    fn must_reap(&self) -> bool {
        Engine::must_reap(self)
    }

    fn wait_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        Engine::wait_fd(self)
    }
}

impl<E: Engine> DeviceQueue for BlkQueue<E> {
    type Device = BlkDevice<E::Volume>;
    type Engine = E;
    type Request = BlkRequest;

    fn start(device: &Arc<Self::Device>, index: u16, size: u16, features: u64) -> Self {
        device.check_ring(index, size, features);
        Self {
            index,
            never_flushes: features & 1 << VIRTIO_BLK_F_FLUSH == 0,
            ranges: Box::default(),
            timing: device.latency.timing(index, size),
            device: Arc::clone(device),
        }
    }

    #[inline(always)]
    unsafe fn submit(
        &mut self,
        engine: &mut E,
        tag: Tag,
        chain: &mut Chain,
        request: &mut BlkRequest,
    ) -> Result<Submitted, RingError> {
        let (action, status) = parse(chain, &self.limits(), &mut self.ranges)?;
        Ok(match action {
            Action::Submit(range) => {
                // SAFETY: by the caller's promise.
                let outcome = unsafe { self.hand_over(engine, tag, range, chain) };
                self.on_submitted(outcome, range, status, request)
            }
            Action::SubmitRanges => {
                self.begin_ranges(status, request);
                self.submit_ranges(engine, tag, request)
            }
            Action::GetId => Submitted::Done(self.get_id(status, chain)),
            Action::Answer(outcome) => {
                if outcome != Status::Ok {
                    self.failed();
                }
                Submitted::Done(answer(status, outcome, 0))
            }
        })
    }

    #[cold]
    fn resume(&mut self, engine: &mut E, tag: Tag, request: &mut BlkRequest) -> Submitted {
        self.submit_ranges(engine, tag, request)
    }

    fn abandon(&mut self, request: &mut BlkRequest) -> bool {
        request.submitting = false;
        request.outstanding > 0
    }

    fn complete(&mut self, tag: Tag, outcome: IoResult, request: &mut BlkRequest) -> Option<u32> {
        assert!(request.outstanding > 0, "an answer to no request");
        request.outstanding -= 1;
        request.failed |= outcome.is_err();
        if let Err(error) = outcome {
            tracing::debug!(queue = self.index, ?tag, %error, "request failed");
        }
        self.finish_if_done(request)
    }

    fn has_room(&self, engine: &E) -> bool {
        engine.has_room(self.device.volume())
    }

    #[inline(always)]
    fn taking(&mut self) {
        self.timing.take();
    }

    #[inline(always)]
    fn published(&mut self, in_flight: usize) {
        self.timing.published(in_flight);
    }

    #[inline(always)]
    fn set_in_flight(&mut self, requests: usize) {
        self.timing.set_in_flight(requests);
    }

    fn interrupted(&mut self) {
        self.counters().interrupted();
    }
}

impl<E: Engine> BlkQueue<E> {
    #[inline(always)]
    fn limits(&self) -> Limits {
        let volume = self.device.volume();
        Limits {
            // The engine refuses, once it is known, what does not fit.
            size_bytes: match volume.knows_size() {
                true => volume.size_bytes(),
                false => u64::MAX,
            },
            read_only: self.device.options().read_only,
            fua: self.never_flushes || !self.device.writeback(),
        }
    }

    /// Submits a range with the buffers of a chain that holds the data alone.
    ///
    /// # Safety
    /// As for [`DeviceQueue::submit`].
    #[inline(always)]
    unsafe fn hand_over(&self, engine: &mut E, tag: Tag, range: Range, chain: &Chain) -> Submit {
        let Range { op, offset, len } = range;
        let buffers = match op {
            Op::Read => chain.writable.as_slice(),
            Op::Write { .. } => chain.readable.as_slice(),
            Op::Flush | Op::Discard | Op::WriteZeroes { .. } => &[],
        };
        let request = Request {
            tag,
            op,
            offset,
            len,
            buffers,
        };
        // SAFETY: by the caller's promise the buffers stay mapped until the request is answered.
        unsafe { engine.submit(self.device.volume(), &request) }
    }

    #[inline(always)]
    fn on_submitted(
        &mut self,
        outcome: Submit,
        range: Range,
        status: *mut u8,
        request: &mut BlkRequest,
    ) -> Submitted {
        let (taken, op, bytes) = (self.timing.taken(), range.op, range.len);
        match outcome {
            Submit::Done(result) => {
                let done = Done {
                    status,
                    taken,
                    op,
                    bytes,
                };
                Submitted::Done(self.finish(done, result))
            }
            Submit::Pending => {
                *request = BlkRequest {
                    status,
                    taken,
                    op,
                    bytes,
                    outstanding: 1,
                    ..NONE
                };
                Submitted::Pending
            }
            Submit::Busy => Submitted::Busy,
        }
    }

    /// Discard and write-zeroes: several requests to the engine, one answer.
    #[cold]
    fn begin_ranges(&mut self, status: *mut u8, request: &mut BlkRequest) {
        *request = BlkRequest {
            status,
            taken: self.timing.taken(),
            op: self.ranges.as_slice()[0].op,
            submitting: true,
            ..NONE
        };
    }

    /// Submits the ranges that are left of the request that was begun last.
    #[cold]
    fn submit_ranges(&mut self, engine: &mut E, tag: Tag, request: &mut BlkRequest) -> Submitted {
        let ranges = self.ranges.as_slice();
        while let Some(range) = ranges.get(usize::from(request.next_range)) {
            let piece = Request {
                tag: Tag(tag.0 | u64::from(request.next_range) << 16),
                op: range.op,
                offset: range.offset,
                len: range.len,
                buffers: &[],
            };
            // SAFETY: there are no buffers.
            match unsafe { engine.submit(self.device.volume(), &piece) } {
                Submit::Done(Ok(())) => {}
                Submit::Done(Err(_)) => {
                    request.failed = true;
                    break;
                }
                Submit::Pending => request.outstanding += 1,
                Submit::Busy if request.next_range == 0 => return Submitted::Busy,
                Submit::Busy => return Submitted::Partial,
            }
            request.next_range += 1;
            request.bytes += range.len;
        }
        request.submitting = false;
        match self.finish_if_done(request) {
            Some(written) => Submitted::Done(written),
            None => Submitted::Pending,
        }
    }

    /// Writes the serial number; returns the bytes written.
    #[cold]
    fn get_id(&self, status: *mut u8, chain: &Chain) -> u32 {
        // SAFETY: the pieces were translated.
        let written = unsafe { write_scattered(&chain.writable, self.device.serial()) };
        answer(status, Status::Ok, written as u32)
    }

    /// Answers a request of which the engine has nothing any more.
    fn finish_if_done(&mut self, request: &BlkRequest) -> Option<u32> {
        if request.outstanding > 0 || request.submitting {
            return None;
        }
        let result = if request.failed {
            Err(IoError::Device(libc::EIO))
        } else {
            Ok(())
        };
        let done = Done {
            status: request.status,
            taken: request.taken,
            op: request.op,
            bytes: request.bytes,
        };
        Some(self.finish(done, result))
    }

    #[inline(always)]
    fn finish(&mut self, request: Done, result: IoResult) -> u32 {
        let Done {
            status,
            taken,
            op,
            bytes,
        } = request;
        if result.is_err() {
            self.failed();
            return answer(status, Status::IoErr, 0);
        }
        self.counters().completed(op, bytes);
        self.timing.answered(RequestKind::of(op) as usize, taken);
        let data = if op == Op::Read { bytes as u32 } else { 0 };
        answer(status, Status::Ok, data)
    }

    #[cold]
    fn failed(&self) {
        self.counters().failed();
    }

    #[inline(always)]
    fn counters(&self) -> &QueueCounters {
        &self.device.counters[usize::from(self.index)]
    }
}

/// Writes the status byte; returns the bytes written, with `data` bytes before it.
#[inline(always)]
fn answer(status: *mut u8, outcome: Status, data: u32) -> u32 {
    // SAFETY: the byte was translated, and stays mapped until the request is answered.
    unsafe { status.write_volatile(outcome as u8) };
    data + 1
}
