//! Requests that come by the queue pair, and the replies to them. Larger payloads are read from the peer's memory before the request is handed
//! out, and written to it before the reply.

use super::*;
use crate::net::rdma::beside::Load;
use crate::net::rdma::message::Received;
use crate::net::rdma::slots::PAYLOAD_BYTES;
use crate::net::tcp::frame::Kind;
use crate::net::tcp::hello::CREDIT_BYTES;
use crate::net::tcp::responder;
use crate::net::tcp::serving::{Place, Way};
use crate::proto::wire::ReplyHeader;
use zerocopy::IntoBytes;

/// A request, until it is answered or the queue pair is over.
#[derive(Clone, Copy)]
pub(super) struct Incoming {
    received: Received,
    serving: u32,
    /// Its payload is on its way.
    reading: bool,
}

impl Answerer {
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

/// What has arrived.
enum Next {
    /// What proves the queue pair, in this slot.
    Probe(Slot),
    /// A request, with the memory that its data take.
    Request(Received, Option<Buffer>),
}

/// The bytes of the windows of a request, if they are those of its payload or its reply's.
fn checked(beside: &mut Beside, received: &Received) -> Result<usize, LinkError> {
    let head = &received.head;
    let wrong = |what| Err(LinkError::Protocol(what));
    if head.kind != Kind::Request {
        return wrong("what is no request where requests go");
    }
    let bytes = head.payload_len.max(head.room) as usize;
    if !received.has_windows() {
        let fits = head.payload_len == 0 || received.is_inside;
        return match fits && bytes <= PAYLOAD_BYTES {
            true => Ok(0),
            false => wrong("a request without windows that needs some"),
        };
    }
    // SAFETY: its slot is posted again with the reply.
    let windows = unsafe { beside.windows_of(received) };
    let opened: u64 = windows.iter().map(|window| u64::from(window.len)).sum();
    let whole = windows.iter().all(|window| window.len > 0) && opened == bytes as u64;
    let one_way = head.payload_len == 0 || head.room == 0;
    match whole && one_way && !received.is_inside {
        true => Ok(bytes),
        false => wrong("windows of another length than the data"),
    }
}

impl Lane {
    /// Takes up requests that have arrived, as far as there is room. `Some`: the queue pair does not work, and why.
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

    /// A message is not what was sent, or not what was due. If no request has come by the queue pair yet, none can be missing, and the connection is spared.
    fn unproven(&mut self, index: u32, error: LinkError) -> Result<Option<String>, LinkError> {
        match self.answerer(index) {
            Some((responder, answerer)) if !answerer.is_used => {
                // It was taken up, and is never answered.
                responder.answered_beside();
                Ok(Some(format!("the first message: {error}")))
            }
            _ => Err(error),
        }
    }

    /// The next request for which there is room.
    fn next_arrived(&mut self, index: u32) -> Result<Option<Next>, LinkError> {
        let link = self.links[index].as_deref_mut();
        let Some(answerer) = link.and_then(|link| link.answerer.as_deref_mut()) else {
            return Ok(None);
        };
        let Some(beside) = &mut answerer.beside else {
            return Ok(None);
        };
        if !self.servings.has_room() || !beside.has_free() {
            self.pairs_wait |= answerer.has_arrived();
            return Ok(None);
        }
        let received = match (answerer.waits.take(), answerer.arrived.pop_front()) {
            (Some(received), next) => {
                next.into_iter()
                    .for_each(|n| answerer.arrived.push_front(n));
                received
            }
            (None, Some((slot, len))) => beside.read_message(slot, len)?,
            (None, None) => return Ok(None),
        };
        // SAFETY: its slot is posted again by what answers it.
        if unsafe { beside.is_probe(&received) } {
            return Ok(Some(Next::Probe(received.slot)));
        }
        let bytes = checked(beside, &received)?;
        let all = answerer
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
                    answerer.waits = Some(received);
                    self.pairs_wait = true;
                    return Ok(None);
                }
            },
        };
        answerer.bytes = all;
        answerer.is_used = true;
        Ok(Some(Next::Request(received, buffer)))
    }

    /// Sends back what shall prove the queue pair. There is a slot: this is looked at before a message is taken up.
    fn answer_probe(&mut self, index: u32, slot: Slot) {
        let Some((responder, answerer)) = self.answerer(index) else {
            return;
        };
        responder.answered_beside();
        if let Some(beside) = answerer.beside() {
            // Before the answer, as with replies.
            beside.receive(slot);
            beside.send_probe();
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
        let Some(answerer) = &mut link.answerer else {
            return Ok(());
        };
        let beside = answerer.beside.as_mut().expect("looked at above");
        let head = received.head;
        let slots = Arc::clone(beside.slots());
        // SAFETY: its slot is posted again with the reply.
        let header = unsafe { received.header(&slots) };
        let reads = head.payload_len > 0 && !received.is_inside;
        let reply = match head.room > 0 && buffer.is_none() {
            true => Some(beside.reserve().expect("it has one that is free")),
            false => None,
        };
        let way = Way::Beside {
            number: beside.number(),
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
            .begin_beside(key, (&head, header), way, place)?;
        answerer.incoming[usize::from(received.slot.0)] = Some(Incoming {
            received,
            serving,
            reading: reads,
        });
        let counters = &self.counters;
        counters.add(Count::MessagesIn, 1);
        counters.add(Count::RdmaBytesIn, u64::from(head.payload_len));
        match start.filter(|_| reads) {
            Some(start) => {
                let beside = answerer.beside.as_mut().expect("looked at above");
                // SAFETY: the serving has the buffer until the payload is there, or the queue pair is destroyed.
                let reads = unsafe { beside.read(start, &received, serving) };
                counters.add(Count::Reads, reads as u64);
                self.mark(index);
                Ok(())
            }
            None => self.complete(index, received.slot),
        }
    }

    /// A payload was read.
    pub(super) fn payload_read(&mut self, index: u32, serving: u32) -> Result<(), LinkError> {
        let Way::Beside { received, .. } = self.servings[serving].way else {
            return Ok(());
        };
        self.complete(index, received)
    }

    /// A request is there with its payload: hands it out, or refuses it if that is not what was announced.
    fn complete(&mut self, index: u32, slot: Slot) -> Result<(), LinkError> {
        let link = self.links[index].as_deref_mut();
        let answerer = link.and_then(|link| link.answerer.as_deref_mut());
        let Some(answerer) = answerer else {
            return Ok(());
        };
        let Some(incoming) = answerer.incoming(slot) else {
            return Ok(());
        };
        incoming.reading = false;
        let Incoming {
            received, serving, ..
        } = *incoming;
        let Some(beside) = &answerer.beside else {
            return Ok(());
        };
        let list = self.servings.list(serving);
        // SAFETY: its slot is posted again with the reply, and the serving has the list and its memory.
        let (header, intact) = unsafe {
            let list = std::slice::from_raw_parts(list.ptr, list.len as usize);
            let intact = received.head.payload_len == 0 || received.is_intact(beside.slots(), list);
            (received.header(beside.slots()), intact)
        };
        let request = self.servings.complete(serving, header)?;
        match intact {
            true => {
                let peer = PeerId(index + 1);
                self.events.push_back(Event::Request(peer, request));
            }
            false => self.reply(&Reply {
                id: request.id,
                incarnation: self.control.incarnation(),
                result: Err(Refusal::Mismatch),
            }),
        }
        Ok(())
    }

    /// Answers a request that came by a queue pair there, if that still works; false if not. The answer's payload lies in the slot that
    /// was taken for it, or in the serving's buffer.
    pub(in super::super) fn reply_beside(
        &mut self,
        index: u32,
        serving: u32,
        reply: &Reply,
        answer: &Answer<'_>,
    ) -> bool {
        let Way::Beside {
            number,
            received,
            reply: place,
        } = self.servings[serving].way
        else {
            return false;
        };
        let Some((responder, answerer)) = self.answerer(index) else {
            return false;
        };
        let Some(beside) = answerer.beside.as_mut().filter(|b| b.number() == number) else {
            return false;
        };
        let leaving = Leaving {
            serving,
            reply: *reply,
        };
        let has_free = beside.has_free();
        let Some(slot) = place.or_else(|| has_free.then(|| beside.take()).flatten()) else {
            answerer.unsent.push_back(leaving);
            return true;
        };
        if place.is_some() {
            beside.keep_reserved();
        }
        let request = answerer.incoming[usize::from(received.0)].take();
        let request = request
            .expect("it was taken up, and is answered once")
            .received;
        answerer.bytes -= responder::cost(&request.head);
        // SAFETY: its slot is posted again below.
        let closes = unsafe { beside.windows_of(&request) }
            .first()
            .map(|window| window.key);
        let header = ReplyHeader::encode(reply, answer.payload_len, answer.crcs.len() as u32);
        let message = answer.message(header.as_bytes());
        let pushed = answer.payload.filter(|_| closes.is_some());
        let mut writes = 0;
        let load = match (answer.payload_len, pushed) {
            (0, _) => Load::Elsewhere,
            (_, None) => Load::Page,
            (len, Some(list)) => {
                // SAFETY: the serving has the buffer until the reply is told as sent, or the queue pair is destroyed.
                unsafe {
                    let start = NonNull::new((*list.ptr).iov_base.cast::<u8>());
                    writes = beside.write(start.expect("a buffer"), len, &request);
                }
                Load::Elsewhere
            }
        };
        // Before the reply, which tells the peer that there is room for another request.
        beside.receive(received);
        beside.send_reply(slot, &message, load, closes);
        answerer.leaving[usize::from(slot.0)] = Some(leaving);
        responder.answered_beside();
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
        while let Some((_, answerer)) = self.answerer(index) {
            if !answerer.beside().is_some_and(|beside| beside.has_free()) {
                return;
            }
            let Some(leaving) = answerer.unsent.pop_front() else {
                return;
            };
            self.answer(leaving.serving, &leaving.reply);
        }
    }
}
