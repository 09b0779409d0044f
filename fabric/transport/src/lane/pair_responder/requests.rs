//! Requests that come by the queue pair, and the replies to them. Larger payloads are read from the peer's
//! memory before the request is handed out, and written to it before the reply.

use fabric_types::wire::ReplyHeader;
use zerocopy::IntoBytes;

use super::*;
use crate::hello::CREDIT_BYTES;
use crate::queue_pair::endpoint::Load;
use crate::queue_pair::message::Received;
use crate::responder;
use crate::serving::{Place, Route};

/// A request, until it is answered or the queue pair is over.
#[derive(Clone, Copy)]
pub(super) struct Incoming {
    received: Received,
    serving: u32,
    /// Its payload is on its way.
    reading: bool,
}

impl PairResponder {
    /// A request that was taken up by the queue pair that is there, by the slot that it lies in.
    fn incoming(&mut self, slot: Slot) -> Option<&mut Incoming> {
        self.incoming[usize::from(slot.0)].as_mut()
    }

    /// Forgets all requests: those whose payload has not come will never be executed.
    pub(super) fn forget_incoming(&mut self) -> Vec<u32> {
        let all = self.incoming.iter_mut().filter_map(Option::take);
        let unread = all.filter(|incoming| incoming.reading);
        unread.map(|incoming| incoming.serving).collect()
    }
}

/// Writes the payload of an answer to the memory that its request opened, if it did: where the payload is for
/// the message, and by how many WRITEs it goes.
///
/// # Safety
/// The request's slot is not posted yet. The payload stays until the reply is told as sent, or the queue pair
/// is destroyed.
unsafe fn push_payload(
    endpoint: &mut QueuePairEndpoint,
    request: &Received,
    answer: &Answer<'_>,
    is_open: bool,
) -> (Load, usize) {
    match (answer.payload_len, answer.payload.filter(|_| is_open)) {
        (0, _) => (Load::Elsewhere, 0),
        (_, None) => (Load::Page, 0),
        (len, Some(list)) => {
            // SAFETY: the caller's promise; the list has an element, for the payload has bytes.
            let writes = unsafe {
                let start = NonNull::new((*list.ptr).iov_base.cast::<u8>());
                endpoint.write(start.expect("a buffer"), len, request)
            };
            (Load::Elsewhere, writes)
        }
    }
}

/// What has arrived.
enum Next {
    /// What proves the queue pair, in this slot.
    Probe(Slot),
    /// A request, with the memory that its data take.
    Request(Received, Option<Buffer>),
}

/// The bytes of the windows of a request, if they are those of its payload or its reply's.
fn checked(endpoint: &mut QueuePairEndpoint, received: &Received) -> Result<usize, LinkError> {
    // SAFETY: its slot is posted again with the reply.
    let windows = unsafe { endpoint.windows_of(received) };
    received.moved_by(windows).map_err(LinkError::Protocol)
}

impl Lane {
    /// Takes up requests that have arrived, as far as there is room. `Some`: the queue pair does not work,
    /// and why.
    pub(super) fn take_arrived(&mut self, index: u32) -> Result<Option<String>, LinkError> {
        loop {
            match self.next_arrived(index) {
                Ok(None) => return Ok(None),
                Ok(Some(Next::Probe(slot))) => self.answer_probe(index, slot),
                Ok(Some(Next::Request(received, buffer))) => {
                    self.begin(index, (received, buffer))?;
                }
                Err(error) => return self.unproven(index, error),
            }
        }
    }

    /// A message is not what was sent, or not what was due. If no request has come by the queue pair yet,
    /// none can be missing, and the connection is spared.
    fn unproven(&mut self, index: u32, error: LinkError) -> Result<Option<String>, LinkError> {
        match self.pair_responder(index) {
            Some((responder, pair_responder)) if !pair_responder.is_used => {
                // It was taken up, and is never answered.
                responder.answered_on_queue_pair();
                Ok(Some(format!("the first message: {error}")))
            }
            _ => Err(error),
        }
    }

    /// The next request for which there is room.
    fn next_arrived(&mut self, index: u32) -> Result<Option<Next>, LinkError> {
        let link = self.links[index].as_deref_mut();
        let Some(pair_responder) = link.and_then(|link| link.pair_responder.as_deref_mut()) else {
            return Ok(None);
        };
        let Some(endpoint) = &mut pair_responder.endpoint else {
            return Ok(None);
        };
        if !self.servings.has_room() || !endpoint.has_free() {
            self.pairs.wait |= pair_responder.has_arrived();
            return Ok(None);
        }
        let received = match (
            pair_responder.waits.take(),
            pair_responder.arrived.pop_front(),
        ) {
            (Some(received), next) => {
                next.into_iter()
                    .for_each(|n| pair_responder.arrived.push_front(n));
                received
            }
            (None, Some((slot, len))) => endpoint.read_message(slot, len)?,
            (None, None) => return Ok(None),
        };
        // SAFETY: its slot is posted again by what answers it.
        if unsafe { endpoint.is_probe(&received) } {
            return Ok(Some(Next::Probe(received.slot)));
        }
        let bytes = checked(endpoint, &received)?;
        let all = pair_responder
            .bytes
            .saturating_add(responder::cost(&received.head));
        if all > CREDIT_BYTES {
            return Err(LinkError::Protocol("more data than it was granted"));
        }
        let buffer = match bytes {
            0 => None,
            bytes => match self.servings.buffer(bytes) {
                Some(buffer) => Some(buffer),
                None => {
                    pair_responder.waits = Some(received);
                    self.pairs.wait = true;
                    return Ok(None);
                }
            },
        };
        pair_responder.bytes = all;
        pair_responder.is_used = true;
        Ok(Some(Next::Request(received, buffer)))
    }

    /// Sends back what shall prove the queue pair. There is a slot: this is looked at before a message is
    /// taken up.
    fn answer_probe(&mut self, index: u32, slot: Slot) {
        let Some((responder, pair_responder)) = self.pair_responder(index) else {
            return;
        };
        responder.answered_on_queue_pair();
        if let Some(endpoint) = pair_responder.endpoint() {
            // Before the answer, as with replies.
            endpoint.receive(slot);
            endpoint.send_probe();
        }
        self.mark(index);
    }

    /// Hands a request out, or has its payload read first.
    fn begin(
        &mut self,
        index: u32,
        (received, buffer): (Received, Option<Buffer>),
    ) -> Result<(), LinkError> {
        let key = self.links.key(index);
        let link = self.links[index].as_deref_mut().expect("looked at above");
        let Some(pair_responder) = &mut link.pair_responder else {
            return Ok(());
        };
        let endpoint = pair_responder.endpoint.as_mut().expect("looked at above");
        let head = received.head;
        let slots = Arc::clone(endpoint.slots());
        // SAFETY: its slot is posted again with the reply.
        let header = unsafe { received.header(&slots) };
        let reads = head.payload_len > 0 && !received.is_inside;
        let reply = match head.room > 0 && buffer.is_none() {
            true => Some(endpoint.reserve().expect("it has one that is free")),
            false => None,
        };
        let way = Route::QueuePairEndpoint {
            number: endpoint.number(),
            received: received.slot,
            reply,
        };
        let start = buffer.as_ref().map(Buffer::start);
        let place = match buffer {
            Some(buffer) => Place::Buffer(buffer),
            None => Place::Slots(&slots),
        };
        let serving = self
            .servings
            .begin_on_queue_pair(key, (&head, header), way, place)?;
        pair_responder.incoming[usize::from(received.slot.0)] = Some(Incoming {
            received,
            serving,
            reading: reads,
        });
        let counters = &self.counters;
        counters.add(Count::MessagesIn, 1);
        counters.add(Count::RdmaBytesIn, u64::from(head.payload_len));
        match start.filter(|_| reads) {
            Some(start) => {
                let endpoint = pair_responder.endpoint.as_mut().expect("looked at above");
                // SAFETY: the serving has the buffer until the payload is there, or the queue pair is
                // destroyed.
                let reads = unsafe { endpoint.read(start, &received, serving) };
                counters.add(Count::Reads, reads as u64);
                self.mark(index);
                Ok(())
            }
            None => self.complete(index, received.slot),
        }
    }

    /// A payload was read.
    pub(super) fn payload_read(&mut self, index: u32, serving: u32) -> Result<(), LinkError> {
        let Route::QueuePairEndpoint { received, .. } = self.servings[serving].way else {
            return Ok(());
        };
        self.complete(index, received)
    }

    /// A request is there with its payload: hands it out, or refuses it if that is not what was announced.
    fn complete(&mut self, index: u32, slot: Slot) -> Result<(), LinkError> {
        let link = self.links[index].as_deref_mut();
        let pair_responder = link.and_then(|link| link.pair_responder.as_deref_mut());
        let Some(pair_responder) = pair_responder else {
            return Ok(());
        };
        let Some(incoming) = pair_responder.incoming(slot) else {
            return Ok(());
        };
        incoming.reading = false;
        let Incoming {
            received, serving, ..
        } = *incoming;
        let Some(endpoint) = &pair_responder.endpoint else {
            return Ok(());
        };
        let list = self.servings.list(serving);
        // SAFETY: its slot is posted again with the reply, and the serving has the list and its memory.
        let (header, intact) = unsafe {
            let list = std::slice::from_raw_parts(list.ptr, list.len as usize);
            let intact =
                received.head.payload_len == 0 || received.is_intact(endpoint.slots(), list);
            (received.header(endpoint.slots()), intact)
        };
        let request = self.servings.complete(serving, header)?;
        match intact {
            true => self.hand_out(index, request),
            false => self.reply(&Reply {
                id: request.id,
                incarnation: self.control.incarnation(),
                result: Err(Refusal::Mismatch),
            }),
        }
        Ok(())
    }

    /// Answers a request that came by a queue pair there, if that still works; false if not. The answer's
    /// payload lies in the slot that was taken for it, or in the serving's buffer.
    pub(in super::super) fn reply_on_queue_pair(
        &mut self,
        index: u32,
        serving: u32,
        reply: &Reply,
        answer: &Answer<'_>,
    ) -> bool {
        let Route::QueuePairEndpoint {
            number,
            received,
            reply: place,
        } = self.servings[serving].way
        else {
            return false;
        };
        let Some((responder, pair_responder)) = self.pair_responder(index) else {
            return false;
        };
        let Some(endpoint) = pair_responder
            .endpoint
            .as_mut()
            .filter(|b| b.number() == number)
        else {
            return false;
        };
        let leaving = Leaving {
            serving,
            reply: *reply,
        };
        let has_free = endpoint.has_free();
        let Some(slot) = place.or_else(|| has_free.then(|| endpoint.take()).flatten()) else {
            pair_responder.unsent.push_back(leaving);
            return true;
        };
        if place.is_some() {
            endpoint.keep_reserved();
        }
        let request = pair_responder.incoming[usize::from(received.0)].take();
        let request = request
            .expect("it was taken up, and is answered once")
            .received;
        pair_responder.bytes -= responder::cost(&request.head);
        // SAFETY: its slot is posted again below.
        let closes = unsafe { endpoint.windows_of(&request) }
            .first()
            .map(|window| window.key);
        let header = ReplyHeader::encode(reply, answer.payload_len, answer.crcs.len() as u32);
        let message = answer.message(header.as_bytes());
        // SAFETY: its slot is posted again below, and the serving has the buffer until the reply is told as
        // sent, or the queue pair is destroyed.
        let (load, writes) = unsafe { push_payload(endpoint, &request, answer, closes.is_some()) };
        // Before the reply, which tells the peer that there is room for another request.
        endpoint.receive(received);
        endpoint.send_reply(slot, &message, load, closes);
        pair_responder.leaving[usize::from(slot.0)] = Some(leaving);
        responder.answered_on_queue_pair();
        let counters = &self.counters;
        counters.add(Count::MessagesOut, 1);
        counters.add(Count::RdmaBytesOut, u64::from(answer.payload_len));
        counters.add(Count::Inside, u64::from(load == Load::Page));
        counters.add(Count::Writes, writes as u64);
        self.mark(index);
        true
    }

    /// Sends replies that waited for a slot.
    pub(super) fn send_unsent(&mut self, index: u32) {
        while let Some((_, pair_responder)) = self.pair_responder(index) {
            if !pair_responder
                .endpoint()
                .is_some_and(|endpoint| endpoint.has_free())
            {
                return;
            }
            let Some(leaving) = pair_responder.unsent.pop_front() else {
                return;
            };
            self.answer(leaving.serving, &leaving.reply);
        }
    }
}
