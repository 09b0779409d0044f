//! The way of one request: read off the ring, handed to the device, answered.

use std::sync::Arc;

use fabric_types::io::Tag;

use super::{InOrder, Queue, Scratch};
use crate::device::{DeviceEngine, DeviceQueue, Submitted};
use crate::memory::MemoryView;
use crate::ring::{Chain, Ring, RingError};

impl<Q: DeviceQueue, R: Ring> Queue<Q, R> {
    /// Reads one request and hands it to the device.
    #[inline(always)]
    pub(super) fn run(
        &mut self,
        id: u16,
        engine: &mut Q::Engine,
        scratch: &mut Scratch,
    ) -> Result<Submitted, RingError> {
        let chain = &mut scratch.chain;
        self.ring.walk(id, &mut self.view, chain)?;
        let tag = self.in_flight.tag(id);
        let request = self.in_flight.request(id);
        // SAFETY: the pieces were translated in the memory that `view` holds, and the queue keeps it until no
        // request is in flight.
        let submitted = unsafe { self.device.submit(engine, tag, chain, request)? };
        match submitted {
            Submitted::Done(written) => self.answer(id, written, chain),
            Submitted::Pending | Submitted::Partial => {
                self.in_flight.begin(id);
                scratch.submitted = true;
            }
            Submitted::Busy => {}
        }
        Ok(submitted)
    }

    /// Submits the rest of a request of which the engine has a part.
    #[cold]
    pub(super) fn resume(
        &mut self,
        id: u16,
        engine: &mut Q::Engine,
        scratch: &mut Scratch,
    ) -> Submitted {
        let tag = self.in_flight.tag(id);
        let request = self.in_flight.request(id);
        let submitted = self.device.resume(engine, tag, request);
        scratch.submitted = true;
        if let Submitted::Done(written) = submitted {
            self.in_flight.end(id);
            self.answer(id, written, &mut scratch.chain);
        }
        submitted
    }

    /// The engine finished a request, or a piece of one.
    pub(crate) fn complete(
        &mut self,
        tag: Tag,
        outcome: <Q::Engine as DeviceEngine>::Outcome<'_>,
        scratch: &mut Scratch,
    ) {
        let (id, request) = self.in_flight.named(tag);
        if let Some(written) = self.device.complete(tag, outcome, request) {
            self.in_flight.end(id);
            self.answer(id, written, &mut scratch.chain);
        }
    }

    #[inline(always)]
    fn answer(&mut self, id: u16, written: u32, chain: &mut Chain) {
        if self.log.is_some() {
            self.log_written(id, chain);
        }
        if self.order.is_some() {
            return self.answer_in_order(id, written);
        }
        self.add_used(id, written);
    }

    #[inline(always)]
    fn add_used(&mut self, id: u16, written: u32) {
        self.ring.answer(id, written);
        if let Some(record) = &mut self.record {
            record.answered(id);
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

    /// Marks what a request wrote, its status included. The chain is walked once more, as only a migration
    /// pays for this: a guest that has changed it meanwhile spoils its own copy and nothing else.
    #[cold]
    fn log_written(&mut self, id: u16, chain: &mut Chain) {
        let Some(log) = &self.log else { return };
        let mut view = MemoryView::new(Arc::clone(self.view.memory()));
        if self.ring.walk(id, &mut view, chain).is_err() {
            return;
        }
        for piece in &chain.writable {
            if let Some(guest) = view.memory().host_to_guest(piece.iov_base.cast()) {
                log.mark(guest, piece.iov_len as u64);
            }
        }
    }
}
