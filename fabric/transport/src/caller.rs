//! The end of a connection that asks: requests out, replies in, without the socket.
//!
//! Every request that was sent is answered once: by [`Caller::poll`], or by the loss of the connection, of
//! which the owner tells the client.

use std::collections::VecDeque;

use fabric_types::iov::IoVecs;
use fabric_types::slab::{Key, Slab};
use fabric_types::wire::{ReplyHeader, WireError};
use fabric_types::{Incarnation, Refusal, Reply, Request, RequestId};

use super::frame::{FrameError, Head, Kind, Message};
use super::handshake::Agreed;
use super::queue::SendQueue;
use super::reader::{NOWHERE, Progress, Reader};
use super::shape::{self, Shape};
use crate::queue_pair::pairing::Pairing;

/// Ticks without a byte, with requests unanswered, after which the peer counts as lost. It gives a sign of
/// life in between if a request takes long ([`super::responder`]).
pub const QUIET_TICKS_MAX: u32 = 8;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The bytes are no frames.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A message's header is impossible.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The frames are good, but not what this end may be sent now.
    #[error("the peer does not follow the protocol: {0}")]
    Protocol(&'static str),
    /// TLS failed.
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    /// The socket failed.
    #[error(transparent)]
    Socket(#[from] std::io::Error),
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// The cluster map does not have the peer any more, or another start of it.
    #[error("the peer is not in the cluster map any more")]
    NotMember,
    /// No byte for too long.
    #[error("the peer does not answer")]
    Silent,
}

/// A request that was sent.
#[derive(Clone, Copy)]
struct Flight {
    id: RequestId,
    destination: IoVecs,
    room: u32,
    exact: bool,
    cost: u32,
    skip: u16,
    /// Where in the bytes sent it ends: a reply that comes before that is a lie, and its memory still in use.
    /// 0 if it went by the queue pair.
    end: u64,
    endpoint: bool,
    /// Its answer has come by the queue pair, and it is not finished.
    answered: bool,
}

// SAFETY: the list describes memory that the client keeps valid until the answer, on whatever thread.
unsafe impl Send for Flight {}

/// The machine.
pub struct Caller {
    reader: Reader,
    queue: SendQueue,
    flights: Slab<Flight>,
    bytes_left: u32,
    incarnation: Incarnation,
    quiet_ticks: u32,
    pairings: VecDeque<Pairing>,
}

/// Where the payload of an answer goes that came by the queue pair.
pub struct Destination {
    /// The place; it has room.
    pub list: IoVecs,
    /// The answer. If the payload is not what was announced, it is to be made [`Refusal::Mismatch`].
    pub reply: Reply,
}

impl Caller {
    /// For a connection that was agreed so.
    pub fn new(agreed: &Agreed) -> Self {
        let empty = Flight {
            id: RequestId(0),
            destination: NOWHERE,
            room: 0,
            exact: true,
            cost: 0,
            skip: 0,
            end: 0,
            endpoint: false,
            answered: false,
        };
        let requests = agreed.credit_requests.min(super::hello::CREDIT_REQUESTS);
        Self {
            reader: Reader::new(agreed.receive_key),
            queue: SendQueue::new(agreed.send_key),
            flights: Slab::new(requests, || empty),
            bytes_left: agreed.credit_bytes,
            incarnation: agreed.incarnation,
            quiet_ticks: 0,
            pairings: VecDeque::new(),
        }
    }

    /// Tells the peer something of the queue pair.
    pub fn tell(&mut self, pairing: &Pairing) {
        self.queue.push_pairing(pairing);
    }

    /// What the peer has told of it.
    pub fn next_pairing(&mut self) -> Option<Pairing> {
        self.pairings.pop_front()
    }

    /// The start of the peer that answers here.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// Whether the credits allow a request of this shape now.
    #[inline]
    pub fn has_credit(&self, shape: &Shape) -> bool {
        self.flights.free() > 0 && shape.cost() <= self.bytes_left
    }

    /// Requests without an answer.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.flights.taken()
    }

    /// Queues a request, with the CRC of each block of its payload.
    ///
    /// # Panics
    /// If there is [no credit](Self::has_credit).
    ///
    /// # Safety
    /// Its buffers stay valid until the answer, or until this machine is dropped.
    pub unsafe fn send(&mut self, request: &Request, shape: &Shape, crcs: &[u32]) {
        assert!(shape.cost() <= self.bytes_left, "no credit");
        self.bytes_left -= shape.cost();
        let slot = self.begin(request, shape, shape.cost());
        let mut room = [0; shape::REQUEST_BYTES_MAX];
        let header = shape::encode(request, &mut room);
        let message = self.message(slot, header, shape, crcs);
        // SAFETY: the caller's promise, and until its answer is taken a request is out (see `end`).
        let end = unsafe { self.queue.push(&message, shape.payload) };
        self.flights[slot].end = end;
    }

    fn begin(&mut self, request: &Request, shape: &Shape, cost: u32) -> u32 {
        let slot = self.flights.take().expect("the caller asked for credit");
        if self.flights.taken() == 1 {
            // It is silent from now on only.
            self.quiet_ticks = 0;
        }
        self.flights[slot] = Flight {
            id: request.id,
            destination: shape.destination.unwrap_or(NOWHERE),
            room: shape.room,
            exact: shape.exact,
            cost,
            skip: shape.skip,
            end: 0,
            endpoint: false,
            answered: false,
        };
        slot
    }

    fn message<'a>(
        &self,
        slot: u32,
        header: &'a [u8],
        shape: &Shape,
        crcs: &'a [u32],
    ) -> Message<'a> {
        Message {
            kind: Kind::Request,
            pair: self.flights.key(slot).0,
            header,
            crcs,
            payload_len: shape.payload_len,
            room: shape.room,
            skip: shape.skip,
        }
    }

    /// Whether one more request can be sent by the queue pair, as far as this machine goes.
    #[inline]
    pub fn has_flight(&self) -> bool {
        self.flights.free() > 0
    }

    /// The message of a request that goes by the queue pair; `room` is where its header is written to. It
    /// takes no credit of the connection.
    ///
    /// # Panics
    /// If there is [no room](Self::has_flight).
    pub fn send_on_queue_pair<'a>(
        &mut self,
        request: &Request,
        shape: &Shape,
        crcs: &'a [u32],
        room: &'a mut [u8; shape::REQUEST_BYTES_MAX],
    ) -> Message<'a> {
        let slot = self.begin(request, shape, 0);
        self.flights[slot].endpoint = true;
        let header = shape::encode(request, room);
        self.message(slot, header, shape, crcs)
    }

    /// A reply came by the queue pair: which request it answers, by its place among the connection's. That is
    /// done with when it is [finished](Self::finish_on_queue_pair).
    pub fn take_from_queue_pair(
        &mut self,
        head: &Head,
        header: &[u8],
    ) -> Result<(u32, Destination), LinkError> {
        if head.kind != Kind::Reply {
            return Err(LinkError::Protocol("what is no reply where replies go"));
        }
        let (slot, reply) = self.answered(head, header)?;
        let flight = &mut self.flights[slot];
        if !flight.endpoint {
            return Err(LinkError::Protocol(
                "a reply on another way than its request",
            ));
        }
        (flight.endpoint, flight.answered) = (false, true);
        self.quiet_ticks = 0;
        let list = flight.destination;
        Ok((slot, Destination { list, reply }))
    }

    /// A request is done with whose answer was [taken](Self::take_from_queue_pair).
    pub fn finish_on_queue_pair(&mut self, slot: u32) {
        self.flights.give_back(slot);
    }

    /// The queue pair is over: requests that went by it and have no answer. From now on they are answered on
    /// the connection, or [forgotten](Self::forget).
    pub fn leave_queue_pair(&mut self) -> Vec<u64> {
        let mut unanswered = Vec::new();
        for slot in 0..self.flights.capacity() {
            if self.flights.is_taken(slot) && std::mem::take(&mut self.flights[slot].endpoint) {
                unanswered.push(self.flights.key(slot).0);
            }
        }
        unanswered
    }

    /// A request is not waited for any more: its place, or `None` if it was answered.
    pub fn forget(&mut self, pair: u64) -> Option<u32> {
        let slot = self.flights.find(Key(pair))?;
        self.bytes_left += self.flights[slot].cost;
        self.flights.give_back(slot);
        Some(slot)
    }

    /// Most requests without an answer.
    pub fn flights_max(&self) -> usize {
        self.flights.capacity() as usize
    }

    /// What is to be sent.
    pub fn queue(&mut self) -> &mut SendQueue {
        &mut self.queue
    }

    /// What receives.
    pub fn reader(&mut self) -> &mut Reader {
        &mut self.reader
    }

    /// Bytes came.
    pub fn heard(&mut self) {
        self.quiet_ticks = 0;
    }

    /// Time passes.
    pub fn tick(&mut self) -> Result<(), LinkError> {
        if self.flights.taken() == 0 {
            return Ok(());
        }
        self.quiet_ticks += 1;
        match self.quiet_ticks > QUIET_TICKS_MAX {
            true => Err(LinkError::Silent),
            false => Ok(()),
        }
    }

    /// The next answer that is complete, and the bytes of its payload. One that does not match its checksums
    /// makes it `Refusal::Mismatch`.
    pub fn poll(&mut self) -> Result<Option<(Reply, u32)>, LinkError> {
        loop {
            // What the peer says of the queue pair is acted upon before what follows.
            if !self.pairings.is_empty() {
                return Ok(None);
            }
            match self.reader.progress()? {
                Progress::Bytes => return Ok(None),
                Progress::Head => self.place()?,
                Progress::Frame { intact } => {
                    let bytes = self.reader.head().payload_len;
                    return self.take(intact).map(|reply| Some((reply, bytes)));
                }
            }
        }
    }

    /// Finds the place of a reply's payload.
    fn place(&mut self) -> Result<(), LinkError> {
        let head = self.reader.head();
        match head.kind {
            Kind::Alive => return Ok(self.reader.skip_bare()?),
            Kind::Reply => {}
            Kind::Pairing => {
                self.pairings
                    .push_back(Pairing::parse(self.reader.header())?);
                return Ok(self.reader.skip_bare()?);
            }
            Kind::Request => {
                return Err(LinkError::Protocol("a request where replies go"));
            }
        }
        let (slot, _) = self.answered(&head, self.reader.header())?;
        if self.flights[slot].endpoint {
            return Err(LinkError::Protocol(
                "a reply on another way than its request",
            ));
        }
        // SAFETY: the promise made to `send`: the list holds `room` bytes and lives until the answer.
        unsafe { self.reader.take_payload(self.flights[slot].destination) };
        Ok(())
    }

    /// Which request a reply answers, by whatever way it came.
    fn answered(&self, head: &Head, header: &[u8]) -> Result<(u32, Reply), LinkError> {
        let slot = self.flights.find(Key(head.pair));
        let slot = slot.ok_or(LinkError::Protocol("a reply to nothing"))?;
        let flight = &self.flights[slot];
        if flight.answered {
            return Err(LinkError::Protocol("a second reply"));
        }
        if self.queue.sent() < flight.end {
            return Err(LinkError::Protocol("a reply to a request that is not sent"));
        }
        let header = ReplyHeader::parse(header)?;
        if header.request.get() != flight.id.0 {
            return Err(LinkError::Protocol("a reply to another request"));
        }
        let reply = header.decode()?;
        let done = reply.result.is_ok();
        let fits = match (done, flight.exact) {
            (false, _) => head.payload_len == 0,
            (true, true) => head.payload_len == flight.room,
            (true, false) => head.payload_len <= flight.room,
        };
        if !fits || (head.payload_len > 0 && head.skip != flight.skip) {
            return Err(LinkError::Protocol("a reply of another length"));
        }
        Ok((slot, reply))
    }

    fn take(&mut self, intact: bool) -> Result<Reply, LinkError> {
        let slot = self.flights.find(Key(self.reader.head().pair));
        let slot = slot.expect("it was there when the head came");
        let mut reply = ReplyHeader::parse(self.reader.header())?.decode()?;
        if !intact {
            reply.result = Err(Refusal::Mismatch);
        }
        self.reader.finish();
        self.bytes_left += self.flights[slot].cost;
        self.flights.give_back(slot);
        Ok(reply)
    }
}

/// The shape of a request, for [`Caller::has_credit`] and [`Caller::send`].
pub fn shape_of(request: &Request) -> Shape {
    shape::of(&request.command)
}
