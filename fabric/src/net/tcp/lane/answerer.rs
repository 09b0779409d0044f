//! The queue pair beside a connection on which this node is asked: accepted, served, and given up without losing or repeating a request
//! (`docs/decisions/0009-rdma-transport.md`).

use super::*;
use crate::net::rdma::beside::Beside;
use crate::net::rdma::pair::{Done, Offered};
use crate::net::rdma::pairing::{End as PairEnd, Pairing};
use crate::net::rdma::slots::{PAYLOAD_BYTES, Slot};
use crate::net::tcp::frame::Kind;
use crate::net::tcp::hello::Wire;
use crate::net::tcp::serving::Way;
use crate::proto::wire::ReplyHeader;
use zerocopy::IntoBytes;

/// A reply that was sent by a queue pair and is not known to have arrived, with the request's serving.
#[derive(Clone, Copy)]
struct Leaving {
    serving: u32,
    reply: Reply,
}

/// A queue pair that is over, until the peer has told what it has no answer to.
struct Torn {
    number: u32,
    unacknowledged: Vec<Leaving>,
}

/// See the module. Of one connection.
pub(super) struct Answerer {
    /// The connection's data are plain.
    is_plain: bool,
    beside: Option<Beside>,
    /// By the slot that each was sent from.
    leaving: Vec<Option<Leaving>>,
    /// Messages that have arrived and wait for room.
    arrived: VecDeque<(Slot, u32)>,
    /// Replies that wait for a slot.
    unsent: VecDeque<Leaving>,
    torn: Option<Torn>,
}

impl Answerer {
    /// For a connection that was agreed so.
    pub(super) fn new(established: &Established) -> Box<Self> {
        Box::new(Self {
            is_plain: established.agreed.wire == Wire::Crc,
            beside: None,
            leaving: Vec::new(),
            arrived: VecDeque::new(),
            unsent: VecDeque::new(),
            torn: None,
        })
    }

    pub(super) fn beside(&mut self) -> Option<&mut Beside> {
        self.beside.as_mut()
    }

    /// Servings whose requests the store is done with, when the connection is lost.
    pub(super) fn into_held(self) -> impl Iterator<Item = u32> {
        let torn = self.torn.into_iter().flat_map(|torn| torn.unacknowledged);
        let leaving = self.leaving.into_iter().flatten();
        let held = leaving.chain(self.unsent).chain(torn);
        held.map(|leaving| leaving.serving)
    }
}

impl Lane {
    fn answerer(&mut self, index: u32) -> Option<(&mut Responder<u32>, &mut Answerer)> {
        let link = self.links[index].as_deref_mut()?;
        match (&mut link.end, &mut link.answerer) {
            (End::Responder(responder), Some(answerer)) => Some((responder, answerer)),
            _ => None,
        }
    }

    /// The peer has told something of the queue pair.
    pub(super) fn answerer_told(&mut self, index: u32, told: Pairing) -> Result<(), LinkError> {
        match told {
            Pairing::Offer { number, end } => self.accept_pair(index, number, &end),
            Pairing::Torn { number, unanswered } => self.settle_pair(index, number, &unanswered),
            _ => Err(LinkError::Protocol("the word of the side that is asked")),
        }
    }

    fn accept_pair(&mut self, index: u32, number: u32, end: &PairEnd) -> Result<(), LinkError> {
        let control = Arc::clone(&self.control);
        let Some((responder, answerer)) = self.answerer(index) else {
            return Ok(());
        };
        if answerer.beside.is_some() || answerer.torn.is_some() {
            return Err(LinkError::Protocol("a second queue pair"));
        }
        let opened = match (control.pairs(), answerer.is_plain) {
            (Offered::No(reason), _) => Err(reason.clone()),
            (_, false) => Err("data on this connection are encrypted".to_owned()),
            (Offered::Port(port), true) => {
                let key = control.identity.random_key();
                let key = key.map_err(|error| error.to_string());
                key.and_then(|key| Beside::open(&**port, number, key))
            }
        };
        let connected = opened.and_then(|mut beside| beside.connect(end).map(|()| beside));
        match connected {
            Ok(beside) => {
                responder.tell(&Pairing::Accept {
                    number,
                    end: beside.end(),
                });
                answerer.leaving.clear();
                let slots = usize::from(crate::net::rdma::slots::RECEIVES)
                    + usize::from(crate::net::rdma::slots::SENDS);
                answerer.leaving.resize(slots, None);
                answerer.beside = Some(beside);
                self.watch_pair(index);
            }
            Err(reason) => responder.tell(&Pairing::Refuse { number, reason }),
        }
        self.mark(index);
        Ok(())
    }

    /// Takes in what has come by a queue pair on which this node is asked; true if there was something.
    pub(super) fn poll_answerer(&mut self, index: u32) -> bool {
        let mut done = std::mem::take(&mut self.done);
        done.clear();
        let polled = match self.answerer(index).and_then(|(_, a)| a.beside()) {
            Some(beside) => beside.poll(&mut done),
            None => Ok(()),
        };
        let busy = !done.is_empty() || polled.is_err();
        self.take_up(index, &done);
        self.done = done;
        match (self.take_arrived(index), polled) {
            (Err(error), _) => self.lose(index, &error),
            (Ok(()), Err(reason)) => self.tear_answerer(index, &reason, true),
            (Ok(()), Ok(())) => self.send_unsent(index),
        }
        busy
    }

    /// Notes what has happened.
    fn take_up(&mut self, index: u32, done: &[Done]) {
        for one in done {
            let Some((_, answerer)) = self.answerer(index) else {
                return;
            };
            match *one {
                Done::Received(slot, len) => answerer.arrived.push_back((slot, len)),
                Done::Sent(slot) => {
                    let left = answerer.leaving[usize::from(slot.0)].take();
                    if let Some(beside) = answerer.beside() {
                        beside.sent(slot);
                    }
                    if let Some(left) = left {
                        self.servings.free(left.serving);
                    }
                }
            }
        }
    }

    /// Takes up requests that have arrived, as far as there is room.
    fn take_arrived(&mut self, index: u32) -> Result<(), LinkError> {
        loop {
            let key = self.links.key(index);
            let room = self.servings.has_room();
            let Some((_, answerer)) = self.answerer(index) else {
                return Ok(());
            };
            let Some(beside) = &mut answerer.beside else {
                return Ok(());
            };
            if !room || !beside.has_free() {
                self.pairs_wait |= !answerer.arrived.is_empty();
                return Ok(());
            }
            let Some((slot, len)) = answerer.arrived.pop_front() else {
                return Ok(());
            };
            let received = beside.read(slot, len)?;
            let head = received.head;
            if head.kind != Kind::Request || head.room as usize > PAYLOAD_BYTES {
                return Err(LinkError::Protocol(
                    "what is no request of a message's size",
                ));
            }
            let reply = (head.room > 0).then(|| beside.take().expect("looked for above"));
            // SAFETY: it was received in and is not posted again, and nobody else writes there.
            let intact = unsafe { received.is_intact(beside.slots(), slot) };
            let (slots, number) = (Arc::clone(beside.slots()), beside.number());
            let serving = self.servings.begin_beside(
                key,
                (&head, received.header()),
                (number, slot, reply),
                &slots,
            )?;
            let request = self.servings.complete(serving, received.header())?;
            if let Some((responder, _)) = self.answerer(index) {
                responder.begun_beside();
            }
            self.control
                .counters
                .messages_in
                .fetch_add(1, Ordering::Relaxed);
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
        }
    }

    /// Answers a request that came by a queue pair there, if that still works; false if not. The answer's payload lies in the slot that
    /// was taken for it.
    pub(super) fn reply_beside(
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
        let Some(slot) = place.or_else(|| beside.take()) else {
            answerer.unsent.push_back(leaving);
            return true;
        };
        let header = ReplyHeader::encode(reply, answer.payload_len, answer.crcs.len() as u32);
        let message = answer.message(header.as_bytes());
        // Before the reply, which tells the peer that there is room for another request.
        beside.receive(received);
        beside.send(slot, &message);
        answerer.leaving[usize::from(slot.0)] = Some(leaving);
        responder.answered_beside();
        self.control
            .counters
            .messages_out
            .fetch_add(1, Ordering::Relaxed);
        self.mark(index);
        true
    }

    /// Sends replies that waited for a slot.
    fn send_unsent(&mut self, index: u32) {
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

    /// The queue pair is over, the connection is not: takes up what had arrived, and waits for the peer to tell what it lacks.
    pub(super) fn tear_answerer(&mut self, index: u32, reason: &str, tell: bool) {
        let mut done = Vec::new();
        let Some((responder, answerer)) = self.answerer(index) else {
            return;
        };
        let Some(beside) = answerer.beside() else {
            return;
        };
        // Whatever arrived and is not seen now is told to be unknown, and never executed.
        let _ = beside.end_all(&mut done);
        let number = beside.number();
        tracing::warn!(node = %responder.peer(), reason, "the queue pair is given up, data go on over TCP");
        self.control.counters.torn.fetch_add(1, Ordering::Relaxed);
        self.take_up(index, &done);
        if let Err(error) = self.take_arrived(index) {
            self.lose(index, &error);
            return;
        }
        let Some((responder, answerer)) = self.answerer(index) else {
            return;
        };
        // Here it is destroyed: from now on no device touches memory for it.
        answerer.beside = None;
        answerer.arrived.clear();
        let unacknowledged = answerer.leaving.iter_mut().filter_map(Option::take);
        answerer.torn = Some(Torn {
            number,
            unacknowledged: unacknowledged.collect(),
        });
        let unsent = std::mem::take(&mut answerer.unsent);
        if tell {
            responder.tell(&Pairing::Broken { number });
        }
        for leaving in unsent {
            self.answer(leaving.serving, &leaving.reply);
        }
        self.paired.retain(|paired| *paired != index);
        self.mark(index);
    }

    /// The peer's end is over, and this is what it has no answer to.
    fn settle_pair(
        &mut self,
        index: u32,
        number: u32,
        unanswered: &[u64],
    ) -> Result<(), LinkError> {
        let key = self.links.key(index);
        let Some((_, answerer)) = self.answerer(index) else {
            return Ok(());
        };
        if answerer.beside().is_some_and(|b| b.number() == number) {
            self.tear_answerer(index, "the peer's end has failed", false);
        }
        let Some((_, answerer)) = self.answerer(index) else {
            return Ok(());
        };
        // One that was refused here is not known, and has nothing unanswered.
        let torn = answerer.torn.take_if(|torn| torn.number == number);
        let known: Vec<u64> = self.servings.beside(key, number).collect();
        let unacknowledged = torn.map_or_else(Vec::new, |torn| torn.unacknowledged);
        for leaving in unacknowledged {
            let pair = self.servings[leaving.serving].pair;
            match unanswered.contains(&pair) {
                true => {
                    if let Some((responder, _)) = self.answerer(index) {
                        responder.begun_beside();
                    }
                    self.answer(leaving.serving, &leaving.reply);
                }
                // It had arrived.
                false => self.servings.free(leaving.serving),
            }
        }
        let unknown = unanswered.iter().copied();
        let unknown = unknown.filter(|pair| !known.contains(pair));
        let settled = Pairing::Settled {
            number,
            unknown: unknown.collect(),
        };
        if let Some((responder, _)) = self.answerer(index) {
            responder.tell(&settled);
            self.mark(index);
        }
        Ok(())
    }
}
