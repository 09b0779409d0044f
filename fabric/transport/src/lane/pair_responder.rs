//! The queue pair beside a connection on which this node is asked: accepted, served, and given up without
//! losing or repeating a request (`docs/decisions/0009-rdma-transport.md`).

use super::*;
use crate::hello::Wire;
use crate::pool::Buffer;
use crate::queue_pair::endpoint::QueuePairEndpoint;
use crate::queue_pair::message::Received;
use crate::queue_pair::pair::{Done, Offered, Side};
use crate::queue_pair::pairing::{End as PairEnd, Pairing};
use crate::queue_pair::slots::{RECEIVES, SENDS, Slot};
use std::ptr::NonNull;

use requests::Incoming;

mod requests;

/// A reply that was sent by a queue pair and is not known to have arrived, with the request's serving.
#[derive(Clone, Copy)]
struct Leaving {
    serving: u32,
    reply: Reply,
}

/// A queue pair that is over, until the peer has told what it has no answer to.
struct FailedPair {
    number: u32,
    unacknowledged: Vec<Leaving>,
}

/// See the module. Of one connection.
pub(super) struct PairResponder {
    /// Why the connection can have none.
    refusal: Option<&'static str>,
    endpoint: Option<QueuePairEndpoint>,
    /// Requests have come by it.
    is_used: bool,
    /// The number of the last one that was offered.
    last: u32,
    /// Bytes of payload of requests that are not answered.
    bytes: u32,
    /// By the slot that each was sent from.
    leaving: Vec<Option<Leaving>>,
    /// Requests that were taken up and are not answered, by the slot that they lie in.
    incoming: Vec<Option<Incoming>>,
    /// Messages that have arrived and wait for room.
    arrived: VecDeque<(Slot, u32)>,
    /// The one before these, which was read and waits for memory.
    waits: Option<Received>,
    /// Replies that wait for a slot.
    unsent: VecDeque<Leaving>,
    failed: Option<FailedPair>,
}

impl PairResponder {
    /// For a connection that was agreed so.
    pub(super) fn new(established: &Established) -> Box<Self> {
        let refusal = match established.agreed.wire {
            Wire::Tls => Some("data on this connection are encrypted"),
            Wire::Crc => None,
        };
        Box::new(Self {
            refusal,
            endpoint: None,
            is_used: false,
            last: 0,
            bytes: 0,
            leaving: Vec::new(),
            incoming: Vec::new(),
            arrived: VecDeque::new(),
            waits: None,
            unsent: VecDeque::new(),
            failed: None,
        })
    }

    pub(super) fn endpoint(&mut self) -> Option<&mut QueuePairEndpoint> {
        self.endpoint.as_mut()
    }

    /// Whether something waits for room.
    fn has_arrived(&self) -> bool {
        self.waits.is_some() || !self.arrived.is_empty()
    }

    /// Ends the queue pair when the connection is lost: servings that are with no store.
    pub(super) fn end(mut self) -> impl Iterator<Item = u32> {
        self.endpoint = None;
        let unread = self.forget_incoming();
        let failed = self
            .failed
            .into_iter()
            .flat_map(|failed| failed.unacknowledged);
        let leaving = self.leaving.into_iter().flatten();
        let held = leaving.chain(self.unsent).chain(failed);
        unread
            .into_iter()
            .chain(held.map(|leaving| leaving.serving))
    }
}

impl Lane {
    fn pair_responder(&mut self, index: u32) -> Option<(&mut Responder<u32>, &mut PairResponder)> {
        let link = self.links[index].as_deref_mut()?;
        match (&mut link.end, &mut link.pair_responder) {
            (End::Responder(responder), Some(pair_responder)) => Some((responder, pair_responder)),
            _ => None,
        }
    }

    /// The peer has told something of the queue pair.
    pub(super) fn responder_notified(
        &mut self,
        index: u32,
        told: Pairing,
    ) -> Result<(), LinkError> {
        match told {
            Pairing::Offer { number, end } => self.accept_pair(index, number, &end),
            Pairing::FailedPair { number, unanswered } => {
                self.reconcile_pair(index, number, &unanswered)
            }
            _ => Err(LinkError::Protocol("the word of the side that is asked")),
        }
    }

    fn accept_pair(&mut self, index: u32, number: u32, end: &PairEnd) -> Result<(), LinkError> {
        let control = Arc::clone(&self.control);
        let registered = match control.pairs() {
            Offered::Port(port) => self.servings.register(&**port),
            Offered::No(_) => Ok(()),
        };
        let Some((responder, pair_responder)) = self.pair_responder(index) else {
            return Ok(());
        };
        // By its number a request is known to be of this one: no other ever had it.
        if pair_responder.endpoint.is_some()
            || pair_responder.failed.is_some()
            || number <= pair_responder.last
        {
            return Err(LinkError::Protocol("a second queue pair"));
        }
        pair_responder.last = number;
        let opened = match (control.pairs(), pair_responder.refusal) {
            (Offered::No(reason), _) => Err(reason.clone()),
            (_, Some(reason)) => Err(reason.to_owned()),
            (Offered::Port(port), None) => {
                let key = control.identity.random_key();
                let key = registered.and(key.map_err(|error| error.to_string()));
                key.and_then(|key| {
                    QueuePairEndpoint::open(&**port, Side::ReceivedRequest, number, key)
                })
            }
        };
        let connected = opened.and_then(|mut endpoint| endpoint.connect(end).map(|()| endpoint));
        match connected {
            Ok(endpoint) => {
                responder.tell(&Pairing::Accept {
                    number,
                    end: endpoint.end(),
                });
                pair_responder.leaving.clear();
                pair_responder
                    .leaving
                    .resize(usize::from(RECEIVES) + usize::from(SENDS), None);
                pair_responder.incoming.clear();
                pair_responder.incoming.resize(usize::from(RECEIVES), None);
                pair_responder.endpoint = Some(endpoint);
                pair_responder.is_used = false;
                self.watch_pair(index);
            }
            Err(reason) => responder.tell(&Pairing::Refuse { number, reason }),
        }
        self.mark(index);
        Ok(())
    }

    /// Takes in what has come by a queue pair on which this node is asked; true if there was something.
    pub(super) fn poll_responder(&mut self, index: u32) -> bool {
        let mut done = std::mem::take(&mut self.pairs.done);
        done.clear();
        let polled = match self.pair_responder(index).and_then(|(_, a)| a.endpoint()) {
            Some(endpoint) => endpoint.poll(&mut done),
            None => Ok(()),
        };
        let busy = !done.is_empty() || polled.is_err();
        let taken = self.take_up(index, &done);
        self.pairs.done = done;
        let taken = taken.and_then(|()| self.take_arrived(index));
        let outcome = taken.and_then(|unproven| match unproven.map_or(polled, Err) {
            Err(reason) => self.tear_responder(index, &reason, true),
            Ok(()) => {
                self.send_unsent(index);
                Ok(())
            }
        });
        if let Err(error) = outcome {
            self.lose(index, &error);
        }
        busy
    }

    /// Notes what has happened.
    fn take_up(&mut self, index: u32, done: &[Done]) -> Result<(), LinkError> {
        for one in done {
            let Some((responder, pair_responder)) = self.pair_responder(index) else {
                return Ok(());
            };
            match *one {
                Done::Received { slot, len, .. } => {
                    // From now on, though it may wait for room: signs of life are due.
                    responder.begun_on_queue_pair();
                    pair_responder.arrived.push_back((slot, len));
                }
                Done::Read(serving) => self.payload_read(index, serving)?,
                Done::Closed(_) => {}
                Done::Sent(slot) => {
                    let left = pair_responder.leaving[usize::from(slot.0)].take();
                    if let Some(endpoint) = pair_responder.endpoint() {
                        endpoint.sent(slot);
                    }
                    if let Some(left) = left {
                        self.servings.free(left.serving);
                    }
                }
            }
        }
        Ok(())
    }

    /// The queue pair is over, the connection is not: takes up what had arrived, and waits for the peer to
    /// tell what it lacks.
    pub(super) fn tear_responder(
        &mut self,
        index: u32,
        reason: &str,
        tell: bool,
    ) -> Result<(), LinkError> {
        let mut done = Vec::new();
        let Some((responder, pair_responder)) = self.pair_responder(index) else {
            return Ok(());
        };
        let Some(endpoint) = pair_responder.endpoint() else {
            return Ok(());
        };
        // Whatever arrived and is not seen now is told to be unknown, and never executed.
        let _ = endpoint.end_all(&mut done);
        let number = endpoint.number();
        let node = responder.peer();
        if pair_responder.is_used {
            tracing::warn!(%node, reason, "the queue pair is given up, data go on over TCP");
            self.counters.add(Count::FailedPair, 1);
        } else {
            tracing::debug!(%node, reason, "the queue pair does not work");
        }
        self.take_up(index, &done)?;
        // It ends anyway, so what else is wrong with it is nobody's business.
        let _unproven: Option<String> = self.take_arrived(index)?;
        let Some((responder, pair_responder)) = self.pair_responder(index) else {
            return Ok(());
        };
        // Here it is destroyed: from now on no device touches memory for it.
        pair_responder.endpoint = None;
        let never_begun = pair_responder.arrived.drain(..).count();
        let never_begun = never_begun + usize::from(pair_responder.waits.take().is_some());
        let unread = pair_responder.forget_incoming();
        pair_responder.bytes = 0;
        (0..never_begun).for_each(|_| responder.answered_on_queue_pair());
        let unacknowledged = pair_responder.leaving.iter_mut().filter_map(Option::take);
        pair_responder.failed = Some(FailedPair {
            number,
            unacknowledged: unacknowledged.collect(),
        });
        let unsent = std::mem::take(&mut pair_responder.unsent);
        unread
            .iter()
            .for_each(|_| responder.answered_on_queue_pair());
        if tell {
            responder.tell(&Pairing::Broken { number });
        }
        for serving in unread {
            self.servings.free(serving);
        }
        for leaving in unsent {
            self.answer(leaving.serving, &leaving.reply);
        }
        self.pairs.remove(index);
        self.mark(index);
        Ok(())
    }

    /// The peer's end is over, and this is what it has no answer to.
    fn reconcile_pair(
        &mut self,
        index: u32,
        number: u32,
        unanswered: &[u64],
    ) -> Result<(), LinkError> {
        let key = self.links.key(index);
        let Some((_, pair_responder)) = self.pair_responder(index) else {
            return Ok(());
        };
        if pair_responder
            .endpoint()
            .is_some_and(|b| b.number() == number)
        {
            self.tear_responder(index, "the peer's end has failed", false)?;
        }
        let Some((_, pair_responder)) = self.pair_responder(index) else {
            return Ok(());
        };
        // One that was refused here is not known, and has nothing unanswered.
        let failed = pair_responder
            .failed
            .take_if(|failed| failed.number == number);
        let known: Vec<u64> = self.servings.endpoint(key, number).collect();
        let unacknowledged = failed.map_or_else(Vec::new, |failed| failed.unacknowledged);
        for leaving in unacknowledged {
            let pair = self.servings[leaving.serving].pair;
            match unanswered.contains(&pair) {
                true => {
                    if let Some((responder, _)) = self.pair_responder(index) {
                        responder.begun_on_queue_pair();
                    }
                    self.answer(leaving.serving, &leaving.reply);
                }
                // It had arrived.
                false => self.servings.free(leaving.serving),
            }
        }
        let unknown = unanswered.iter().copied();
        let unknown = unknown.filter(|pair| !known.contains(pair));
        let reconciled = Pairing::Reconciled {
            number,
            unknown: unknown.collect(),
        };
        if let Some((responder, _)) = self.pair_responder(index) {
            responder.tell(&reconciled);
            self.mark(index);
        }
        Ok(())
    }
}
