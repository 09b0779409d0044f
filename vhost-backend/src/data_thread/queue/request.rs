//! The way of one request: parsed, handed to the engine, answered.

use std::sync::Arc;

use fabric_types::io::{Engine, IoError, IoResult, Op, Request, Submit, Tag, Volume};
use virtio_bindings::virtio_blk::VIRTIO_BLK_F_FLUSH;

use super::{FREE, InOrder, Queue, Scratch, Slot, Stamp};
use crate::blk::RequestKind;
use crate::blk::request::{Action, Limits, Range, Status, parse};
use crate::memory::MemoryView;
use crate::ring::{Chain, Ring, RingError, write_bytes};

/// A request that the engine is done with.
struct Done {
    status: *mut u8,
    taken: Stamp,
    op: Op,
    bytes: u64,
}

impl<V: Volume, R: Ring> Queue<V, R> {
    /// Reads one request and does it or hands it to the engine. False if the engine has no room.
    #[inline(always)]
    pub(super) fn run<E: Engine<Volume = V>>(
        &mut self,
        id: u16,
        engine: &mut E,
        scratch: &mut Scratch,
    ) -> Result<bool, RingError> {
        self.ring.walk(id, &mut self.view, &mut scratch.chain)?;
        let volume = self.device.volume();
        let limits = Limits {
            // The engine refuses, once it is known, what does not fit.
            size_bytes: match volume.knows_size() {
                true => volume.size_bytes(),
                false => u64::MAX,
            },
            read_only: self.device.options().read_only,
            fua: self.features & 1 << VIRTIO_BLK_F_FLUSH == 0 || !self.device.writeback(),
        };
        let (action, status) = parse(&mut scratch.chain, &limits, &mut self.ranges)?;
        match action {
            Action::Submit(range) => Ok(self.submit(id, range, status, engine, scratch)),
            Action::SubmitRanges => {
                self.begin_ranges(id, status);
                Ok(self.submit_ranges(id, engine, scratch))
            }
            Action::GetId => {
                self.get_id(id, status, scratch);
                Ok(true)
            }
            Action::Answer(outcome) => {
                if outcome != Status::Ok {
                    self.counters_failed();
                }
                self.answer(id, status, outcome, 1, &mut scratch.chain);
                Ok(true)
            }
        }
    }

    #[inline(always)]
    fn submit<E: Engine<Volume = V>>(
        &mut self,
        id: u16,
        range: Range,
        status: *mut u8,
        engine: &mut E,
        scratch: &mut Scratch,
    ) -> bool {
        let Range { op, offset, len } = range;
        let buffers = match op {
            Op::Read => scratch.chain.writable.as_slice(),
            Op::Write { .. } => scratch.chain.readable.as_slice(),
            Op::Flush | Op::Discard | Op::WriteZeroes { .. } => &[],
        };
        let request = Request {
            tag: Tag(self.tag | u64::from(id)),
            op,
            offset,
            len,
            buffers,
        };
        // SAFETY: the buffers were translated in the memory that `view` holds, and the queue keeps it until
        // no request is in flight.
        match unsafe { engine.submit(self.device.volume(), &request) } {
            Submit::Done(result) => {
                let request = Done {
                    status,
                    taken: self.timing.taken(),
                    op,
                    bytes: len,
                };
                self.finish(id, request, result, &mut scratch.chain);
            }
            Submit::Pending => {
                self.slots[usize::from(id)] = Slot {
                    status,
                    taken: self.timing.taken(),
                    op,
                    bytes: len,
                    outstanding: 1,
                    busy: true,
                    ..FREE
                };
                self.busy_slots += 1;
                scratch.submitted = true;
            }
            Submit::Busy => return false,
        }
        true
    }

    /// Discard and write-zeroes: several requests to the engine, one answer.
    #[cold]
    fn begin_ranges(&mut self, id: u16, status: *mut u8) {
        self.slots[usize::from(id)] = Slot {
            status,
            taken: self.timing.taken(),
            op: self.ranges.as_slice()[0].op,
            busy: true,
            submitting: true,
            ..FREE
        };
        self.busy_slots += 1;
    }

    /// Submits the ranges that are left of the request that was begun last. False if the engine has no room.
    #[cold]
    pub(super) fn submit_ranges<E: Engine<Volume = V>>(
        &mut self,
        id: u16,
        engine: &mut E,
        scratch: &mut Scratch,
    ) -> bool {
        let at = usize::from(id);
        let ranges = self.ranges.as_slice();
        while let Some(range) = ranges.get(usize::from(self.slots[at].next_range)) {
            let tag = Tag(self.tag | u64::from(self.slots[at].next_range) << 16 | u64::from(id));
            let request = Request {
                tag,
                op: range.op,
                offset: range.offset,
                len: range.len,
                buffers: &[],
            };
            // SAFETY: there are no buffers.
            match unsafe { engine.submit(self.device.volume(), &request) } {
                Submit::Done(Ok(())) => {}
                Submit::Done(Err(_)) => {
                    self.slots[at].failed = true;
                    break;
                }
                Submit::Pending => {
                    self.slots[at].outstanding += 1;
                    scratch.submitted = true;
                }
                Submit::Busy => return false,
            }
            self.slots[at].next_range += 1;
            self.slots[at].bytes += range.len;
        }
        self.slots[at].submitting = false;
        self.finish_slot(id, &mut scratch.chain);
        true
    }

    #[cold]
    fn get_id(&mut self, id: u16, status: *mut u8, scratch: &mut Scratch) {
        let serial = self.device.serial();
        let mut at = 0;
        for piece in &scratch.chain.writable {
            let len = piece.iov_len.min(serial.len() - at);
            // SAFETY: the piece was translated and has at least `len` bytes.
            unsafe { write_bytes(piece.iov_base.cast(), &serial[at..at + len]) };
            at += len;
        }
        self.answer(id, status, Status::Ok, at as u32 + 1, &mut scratch.chain);
    }

    /// The engine finished a request.
    pub(crate) fn complete(&mut self, tag: Tag, result: IoResult, scratch: &mut Scratch) {
        let id = tag.0 as u16;
        let slot = &mut self.slots[usize::from(id)];
        assert!(slot.busy && slot.outstanding > 0);
        slot.outstanding -= 1;
        slot.failed |= result.is_err();
        if let Err(error) = result {
            tracing::debug!(queue = self.index, ?tag, %error, "request failed");
        }
        self.finish_slot(id, &mut scratch.chain);
    }

    fn finish_slot(&mut self, id: u16, chain: &mut Chain) {
        let slot = self.slots[usize::from(id)];
        if slot.outstanding > 0 || slot.submitting {
            return;
        }
        self.slots[usize::from(id)].busy = false;
        self.busy_slots -= 1;
        let result = if slot.failed {
            Err(IoError::Device(libc::EIO))
        } else {
            Ok(())
        };
        let request = Done {
            status: slot.status,
            taken: slot.taken,
            op: slot.op,
            bytes: slot.bytes,
        };
        self.finish(id, request, result, chain);
    }

    #[inline(always)]
    fn finish(&mut self, id: u16, request: Done, result: IoResult, chain: &mut Chain) {
        let Done {
            status,
            taken,
            op,
            bytes,
        } = request;
        let outcome = match result {
            Ok(()) => {
                if let Some(counters) = self.device.queue_counters(self.index) {
                    counters.completed(op, bytes);
                }
                self.timing.answered(RequestKind::of(op), taken);
                Status::Ok
            }
            Err(_) => {
                self.counters_failed();
                Status::IoErr
            }
        };
        let written = if op == Op::Read && outcome == Status::Ok {
            bytes as u32 + 1
        } else {
            1
        };
        self.answer(id, status, outcome, written, chain);
    }

    #[cold]
    fn counters_failed(&self) {
        if let Some(counters) = self.device.queue_counters(self.index) {
            counters.failed();
        }
    }

    #[inline(always)]
    fn answer(
        &mut self,
        id: u16,
        status: *mut u8,
        outcome: Status,
        written: u32,
        chain: &mut Chain,
    ) {
        // SAFETY: the byte was translated in the memory that `view` holds.
        unsafe { status.write_volatile(outcome as u8) };
        if self.log.is_some() {
            self.log_written(id, status, chain);
        }
        if self.order.is_some() {
            return self.answer_in_order(id, written);
        }
        self.add_used(id, written);
    }

    #[inline(always)]
    fn add_used(&mut self, id: u16, written: u32) {
        self.ring.answer(id, written);
        if let Some(record) = &mut self.inflight {
            record.answered(id);
            self.answered.push(id);
        }
    }

    #[cold]
    fn answer_in_order(&mut self, id: u16, written: u32) {
        if let Some(order) = &mut self.order {
            order.finish(id, written);
        }
        while let Some((id, written)) = self.order.as_mut().and_then(InOrder::next) {
            self.add_used(id, written);
        }
    }

    /// Marks what a request wrote. The chain is walked once more, as only a migration pays for this: a guest
    /// that has changed it meanwhile spoils its own copy and nothing else.
    #[cold]
    fn log_written(&mut self, id: u16, status: *mut u8, chain: &mut Chain) {
        let Some(log) = &self.log else { return };
        let mark = |host: *const u8, len: usize| {
            if let Some(guest) = self.view.memory().host_to_guest(host) {
                log.mark(guest, len as u64);
            }
        };
        mark(status, 1);
        let mut view = MemoryView::new(Arc::clone(self.view.memory()));
        if self.ring.walk(id, &mut view, chain).is_ok() {
            chain
                .writable
                .iter()
                .for_each(|piece| mark(piece.iov_base.cast(), piece.iov_len));
        }
    }
}
