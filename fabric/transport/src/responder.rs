//! The end of a connection that is asked: requests in, replies out in the order in which they are done,
//! without the socket.
//!
//! Holds the peer to its credits: a peer that has more unanswered than it was granted is cut off, and what it
//! did not read yet counts as unanswered, so that one that does not read its replies cannot make this end
//! hold more.

use std::collections::VecDeque;

use fabric_types::iov::IoVecs;
use fabric_types::wire::ReplyHeader;
use fabric_types::{NodeId, Reply};
use zerocopy::IntoBytes;

use super::caller::LinkError;
use super::frame::{Head, Kind, Message};
use super::handshake::Agreed;
use super::queue::SendQueue;
use super::reader::{Progress, Reader};
use crate::queue_pair::pairing::Pairing;

/// Ticks after which a sign of life is due if a request is open and nothing was sent.
pub const ALIVE_TICKS: u32 = 2;

/// Ticks without progress after which a peer that does not read is cut off.
pub const STUCK_TICKS_MAX: u32 = 40;

/// A reply on its way out.
struct Leaving<T> {
    end: u64,
    /// What it gives back to the peer's credit; nothing if the request came by the queue pair.
    cost: Option<u32>,
    held: T,
}

/// The machine. `T` is what the owner keeps for a reply until it is out.
pub struct Responder<T> {
    reader: Reader,
    queue: SendQueue,
    peer: NodeId,
    requests_left: u32,
    bytes_left: u32,
    open: u32,
    leaving: VecDeque<Leaving<T>>,
    sent_at_tick: u64,
    still_ticks: u32,
    pairings: VecDeque<Pairing>,
}

/// What the reader has for the owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReceivedRequest {
    /// Nothing, until more bytes come.
    Nothing,
    /// A request begins: [`Responder::admit`] is due, now or later.
    Begins(Head),
    /// It is complete: [`Responder::begun`] is due.
    Complete {
        /// Its payload matches its checksums.
        intact: bool,
    },
}

/// What a request takes of the credits.
pub fn cost(head: &Head) -> u32 {
    head.payload_len.saturating_add(head.room)
}

impl<T> Responder<T> {
    /// For a connection that was agreed so.
    pub fn new(agreed: &Agreed) -> Self {
        Self {
            reader: Reader::new(agreed.receive_key),
            queue: SendQueue::new(agreed.send_key),
            peer: agreed.peer,
            requests_left: agreed.credit_requests,
            bytes_left: agreed.credit_bytes,
            open: 0,
            leaving: VecDeque::new(),
            sent_at_tick: 0,
            still_ticks: 0,
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

    /// A request came by the queue pair: signs of life are due as for any other.
    pub fn begun_on_queue_pair(&mut self) {
        self.open += 1;
    }

    /// It was answered there.
    pub fn answered_on_queue_pair(&mut self) {
        self.open -= 1;
    }

    /// The node that asks.
    pub fn peer(&self) -> NodeId {
        self.peer
    }

    /// What receives.
    pub fn reader(&mut self) -> &mut Reader {
        &mut self.reader
    }

    /// What is to be sent.
    pub fn queue(&mut self) -> &mut SendQueue {
        &mut self.queue
    }

    /// Looks at what came.
    pub fn poll(&mut self) -> Result<ReceivedRequest, LinkError> {
        loop {
            match self.reader.progress()? {
                Progress::Bytes => return Ok(ReceivedRequest::Nothing),
                Progress::Frame { intact } => return Ok(ReceivedRequest::Complete { intact }),
                Progress::Head => {}
            }
            let head = self.reader.head();
            match head.kind {
                Kind::Alive => self.reader.skip_bare()?,
                Kind::Pairing => {
                    self.pairings
                        .push_back(Pairing::parse(self.reader.header())?);
                    self.reader.skip_bare()?;
                }
                Kind::Reply => {
                    return Err(LinkError::Protocol("a reply where requests go"));
                }
                Kind::Request if self.requests_left == 0 || cost(&head) > self.bytes_left => {
                    return Err(LinkError::Protocol("more requests than it was granted"));
                }
                Kind::Request => return Ok(ReceivedRequest::Begins(head)),
            }
        }
    }

    /// The message's header of the request that begins, or is complete.
    pub fn header(&self) -> &[u8] {
        self.reader.header()
    }

    /// Takes the request that begins; its payload goes where `to` says.
    ///
    /// # Safety
    /// The list holds the payload and is valid until [`begun`](Self::begun), or until this machine is
    /// dropped.
    pub unsafe fn admit(&mut self, to: IoVecs) {
        let head = self.reader.head();
        self.requests_left -= 1;
        self.bytes_left -= cost(&head);
        self.open += 1;
        // SAFETY: the caller's promise.
        unsafe { self.reader.take_payload(to) };
    }

    /// The complete request was taken over; goes on to the next.
    pub fn begun(&mut self) {
        self.reader.finish();
    }

    /// Queues a reply to a request of this `pair` that cost so much. `held` comes back from
    /// [`next_sent`](Self::next_sent).
    ///
    /// # Safety
    /// The payload stays valid until then, or until this machine is dropped.
    pub unsafe fn reply(&mut self, reply: &Reply, answer: &Answer<'_>, held: T) {
        let header = ReplyHeader::encode(reply, answer.payload_len, answer.crcs.len() as u32);
        let message = answer.message(header.as_bytes());
        // SAFETY: the caller's promise.
        let end = unsafe { self.queue.push(&message, answer.payload) };
        self.open -= 1;
        self.leaving.push_back(Leaving {
            end,
            cost: answer.cost,
            held,
        });
    }

    /// The next reply that is out; its credit is free again.
    pub fn next_sent(&mut self) -> Option<T> {
        if self.leaving.front()?.end > self.queue.sent() {
            return None;
        }
        let out = self.leaving.pop_front()?;
        if let Some(cost) = out.cost {
            self.requests_left += 1;
            self.bytes_left += cost;
        }
        Some(out.held)
    }

    /// Takes back what the replies on their way hold, when the connection is lost.
    pub fn into_held(self) -> impl Iterator<Item = T> {
        self.leaving.into_iter().map(|leaving| leaving.held)
    }

    /// Requests that were taken up and are not answered.
    #[cfg(test)]
    pub fn open(&self) -> u32 {
        self.open
    }

    /// Time passes. A sign of life may have been queued.
    pub fn tick(&mut self) -> Result<(), LinkError> {
        let moved = self.queue.sent() != self.sent_at_tick;
        self.sent_at_tick = self.queue.sent();
        if moved || (self.open == 0 && self.queue.is_empty()) {
            self.still_ticks = 0;
            return Ok(());
        }
        self.still_ticks += 1;
        if !self.queue.is_empty() {
            return match self.still_ticks > STUCK_TICKS_MAX {
                true => Err(LinkError::Silent),
                false => Ok(()),
            };
        }
        if self.still_ticks >= ALIVE_TICKS {
            let alive = Message {
                kind: Kind::Alive,
                pair: 0,
                header: &[],
                crcs: &[],
                payload_len: 0,
                room: 0,
                skip: 0,
            };
            // SAFETY: there is no payload.
            unsafe { self.queue.push(&alive, None) };
        }
        Ok(())
    }
}

/// The parts of a reply besides its header.
#[derive(Debug, Clone, Copy)]
pub struct Answer<'a> {
    /// Which request of the peer it answers.
    pub pair: u64,
    /// What that took of the credits; `None` if it came by the queue pair.
    pub cost: Option<u32>,
    /// Its payload.
    pub payload: Option<IoVecs>,
    /// Bytes of it.
    pub payload_len: u32,
    /// Where in its block it begins.
    pub skip: u16,
    /// The CRC of each block of it.
    pub crcs: &'a [u32],
}

impl Answer<'_> {
    /// The message, by whatever way it goes; `header` is the reply's.
    pub fn message<'a>(&'a self, header: &'a [u8]) -> Message<'a> {
        Message {
            kind: Kind::Reply,
            pair: self.pair,
            header,
            crcs: self.crcs,
            payload_len: self.payload_len,
            room: 0,
            skip: if self.payload_len > 0 { self.skip } else { 0 },
        }
    }
}
