//! The queue pair beside a connection on which this node asks: offered, used, and given up without losing a
//! request (`docs/decisions/0009-rdma-transport.md`).

use super::*;
use crate::caller::Destination;
use crate::hello::{CREDIT_BYTES, Wire};
use crate::queue_pair::endpoint::QueuePairEndpoint;
use crate::queue_pair::pair::{Done, Offered, Side};
use crate::queue_pair::pairing::{End as PairEnd, Pairing};
use crate::queue_pair::slots::{RECEIVES, SENDS, Slot};

pub(super) use requests::PairSend;
use requests::Sent;

mod requests;

/// Ticks before a queue pair is offered once more, doubled with each failure up to the maximum.
pub(super) const PAUSE_TICKS_MIN: u32 = 4;
/// See [`PAUSE_TICKS_MIN`]: a minute.
const PAUSE_TICKS_MAX: u32 = 240;
/// Ticks that a peer has to accept a queue pair, and then to send back what proves it.
const PROOF_TICKS_MAX: u32 = 8;
/// Ticks that a queue pair has to work for the next pause to be the shortest again.
const WORKS_TICKS: u32 = 40;

enum Stage {
    /// There is none; one is offered after so many ticks.
    Pause(u32),
    /// The peer has not answered.
    Offered(QueuePairEndpoint),
    /// It is connected, and a message was sent that shall come back. Connecting shows nothing: the network
    /// may lose all packets, and requests would wait until the device gives up.
    Probing(Connected),
    /// Requests go by it.
    Up(Connected),
    /// It is over, and the peer has yet to say which of these requests it has.
    Reconciling { number: u32, unanswered: Vec<u64> },
}

struct Connected {
    endpoint: QueuePairEndpoint,
    /// Receives that the peer has posted.
    credits: usize,
    /// Bytes of payload that may be on their way, in both directions: the peer keeps memory for them.
    bytes_left: u32,
    /// Requests that went by it and have no answer.
    used: usize,
}

/// See the module. Of one connection.
pub(super) struct Requester {
    stage: Stage,
    /// Ticks since the stage began.
    ticks: u32,
    number: u32,
    /// Ticks before another one is offered, should this one fail.
    pause: u32,
    /// By the place of the request among the connection's.
    sent: Vec<Sent>,
    /// Whose data lie outside of the message, by the slot that this was sent from.
    gathered: Vec<Option<u32>>,
}

impl Requester {
    /// For a connection that was agreed so, if there may be queue pairs beside it; else why not. `pause` is
    /// what the connection before it has [learned](Self::end).
    pub(super) fn new(
        established: &Established,
        offered: &Offered,
        pause: u32,
    ) -> Result<Box<Self>, String> {
        let agreed = &established.agreed;
        if let Offered::No(reason) = offered {
            return Err(reason.clone());
        }
        if agreed.wire != Wire::Crc {
            return Err(
                "data between these nodes are encrypted, which no RDMA card does; set `wire = \"crc\"` on \
                 both if the storage network is trusted"
                    .to_owned(),
            );
        }
        Ok(Box::new(Self {
            stage: match pause > PAUSE_TICKS_MIN {
                true => Stage::Pause(pause),
                false => Stage::Pause(0),
            },
            ticks: 0,
            number: 0,
            pause,
            sent: Vec::new(),
            gathered: Vec::new(),
        }))
    }

    #[cfg(test)]
    pub(super) fn pause(&self) -> u32 {
        self.pause
    }

    fn begin(&mut self, stage: Stage) {
        self.stage = stage;
        self.ticks = 0;
    }

    pub(super) fn endpoint(&mut self) -> Option<&mut QueuePairEndpoint> {
        match &mut self.stage {
            Stage::Offered(endpoint) => Some(endpoint),
            Stage::Probing(up) | Stage::Up(up) => Some(&mut up.endpoint),
            Stage::Pause(_) | Stage::Reconciling { .. } => None,
        }
    }

    /// The queue pair is over at both ends: the requests that the peer does not know.
    fn reconciled(&mut self, caller: &mut Caller, unknown: &[u64]) -> Vec<Waiting> {
        // One that is not there was answered on the connection before the peer heard of the question.
        let slots = unknown.iter().filter_map(|pair| caller.forget(*pair));
        let again = slots.filter_map(|slot| self.sent[slot as usize].waiting());
        let again = again.collect();
        self.wait();
        again
    }

    /// Waits before the next offer, longer each time.
    fn wait(&mut self) {
        self.begin(Stage::Pause(self.pause));
        self.pause = (2 * self.pause).min(PAUSE_TICKS_MAX);
    }

    /// The connection is lost: ends the queue pair, and gives back what was kept for it. How many ticks the
    /// next connection is to let pass before it offers one: the queue pair may be what cost this connection.
    pub(super) fn end(mut self, bounces: &mut Pool) -> u32 {
        match self.stage {
            Stage::Pause(_) => {}
            Stage::Up(_) if self.ticks >= WORKS_TICKS => {}
            _ => self.wait(),
        }
        self.begin(Stage::Pause(0));
        self.let_go(bounces);
        self.pause
    }
}

impl Lane {
    fn requester(&mut self, index: u32) -> Option<(NodeId, &mut Caller, &mut Requester)> {
        let link = self.links[index].as_deref_mut()?;
        match (&mut link.end, &mut link.requester) {
            (End::Caller(node, caller), Some(requester)) => Some((*node, caller, requester)),
            _ => None,
        }
    }

    /// Offers the peer a queue pair, if one is due.
    pub(super) fn offer(&mut self, index: u32) {
        let control = Arc::clone(&self.control);
        let Offered::Port(port) = control.pairs() else {
            return;
        };
        let requester = self.requester(index);
        if !requester.is_some_and(|(.., requester)| matches!(requester.stage, Stage::Pause(0))) {
            return;
        }
        let registered = self.pairs.bounces.register(&**port);
        let Some((node, caller, requester)) = self.requester(index) else {
            return;
        };
        requester.number += 1;
        let key = control.identity.random_key();
        let key = key.map_err(|error| error.to_string());
        let ready = registered.and(key);
        match ready
            .and_then(|key| QueuePairEndpoint::open(&**port, Side::Asks, requester.number, key))
        {
            Ok(endpoint) => {
                caller.tell(&Pairing::Offer {
                    number: requester.number,
                    end: endpoint.end(),
                });
                requester
                    .sent
                    .resize_with(caller.flights_max(), Sent::default);
                requester.gathered.clear();
                let slots = usize::from(RECEIVES) + usize::from(SENDS);
                requester.gathered.resize(slots, None);
                requester.begin(Stage::Offered(endpoint));
                self.watch_pair(index);
                self.mark(index);
            }
            Err(reason) => {
                requester.wait();
                self.tell_way(node, Err(reason));
            }
        }
    }

    /// Time passes.
    pub(super) fn tick_requester(&mut self, index: u32) {
        let Some((.., requester)) = self.requester(index) else {
            return;
        };
        requester.ticks = requester.ticks.saturating_add(1);
        match &mut requester.stage {
            Stage::Pause(0) => self.offer(index),
            Stage::Pause(ticks) => {
                *ticks -= 1;
                self.offer(index);
            }
            Stage::Up(_) if requester.ticks == WORKS_TICKS => requester.pause = PAUSE_TICKS_MIN,
            Stage::Offered(_) | Stage::Probing(_) if requester.ticks > PROOF_TICKS_MAX => {
                self.tear(index, "the peer does not answer by it");
            }
            Stage::Up(_) | Stage::Offered(_) | Stage::Probing(_) | Stage::Reconciling { .. } => {}
        }
    }

    /// The peer has told something of the queue pair.
    pub(super) fn requester_notified(
        &mut self,
        index: u32,
        told: Pairing,
    ) -> Result<(), LinkError> {
        let Some((node, caller, requester)) = self.requester(index) else {
            return Err(LinkError::Protocol("a queue pair that was not offered"));
        };
        match (told, &mut requester.stage) {
            (Pairing::Accept { number, end }, Stage::Offered(endpoint))
                if number == endpoint.number() =>
            {
                self.accepted(index, &end)?;
            }
            (Pairing::Refuse { number, reason }, Stage::Offered(endpoint))
                if number == endpoint.number() =>
            {
                requester.wait();
                self.pairs.remove(index);
                self.tell_way(node, Err(format!("the peer: {reason}")));
            }
            (
                Pairing::Broken { number },
                Stage::Up(Connected { endpoint, .. })
                | Stage::Probing(Connected { endpoint, .. })
                | Stage::Offered(endpoint),
            ) if number == endpoint.number() => {
                self.tear_requester(index, "the peer's end has failed")?;
            }
            // It was found here at the same time.
            (Pairing::Broken { .. }, _) => {}
            // It has failed here before the peer answered.
            (
                Pairing::Accept { number, .. } | Pairing::Refuse { number, .. },
                Stage::Reconciling { number: of, .. },
            ) if number == *of => {}
            (
                Pairing::Reconciled { number, unknown },
                Stage::Reconciling {
                    number: of,
                    unanswered,
                },
            ) if number == *of => {
                if unknown.iter().any(|pair| !unanswered.contains(pair)) {
                    return Err(LinkError::Protocol("a request that was not asked about"));
                }
                let again = requester.reconciled(caller, &unknown);
                self.send_again(node, again);
            }
            _ => return Err(LinkError::Protocol("a queue pair that was not offered")),
        }
        Ok(())
    }

    /// The peer's end is there: a message each way is to prove that they reach each other.
    fn accepted(&mut self, index: u32, end: &PairEnd) -> Result<(), LinkError> {
        let Some((.., requester)) = self.requester(index) else {
            return Ok(());
        };
        let Stage::Offered(mut endpoint) = std::mem::replace(&mut requester.stage, Stage::Pause(0))
        else {
            unreachable!("it was offered");
        };
        let connected = endpoint.connect(end);
        if connected.is_ok() {
            endpoint.send_probe();
        }
        requester.begin(Stage::Probing(Connected {
            endpoint,
            // Each takes a receive here, too, with its reply.
            credits: usize::from(end.receives.min(RECEIVES)),
            bytes_left: CREDIT_BYTES,
            used: 0,
        }));
        match connected {
            Ok(()) => self.mark(index),
            Err(reason) => self.tear_requester(index, &reason)?,
        }
        Ok(())
    }

    /// Requests that the peer never executed go on the connection, as for the first time.
    fn send_again(&mut self, node: NodeId, again: Vec<Waiting>) {
        let Some(peer) = self.peers.get_mut(&node) else {
            return;
        };
        for waiting in again.into_iter().rev() {
            peer.waiting.push_front(waiting);
        }
        self.send_waiting(node);
    }

    /// The queue pair is over, the connection is not: takes up what had arrived, and tells the peer what is
    /// missing.
    pub(super) fn tear_requester(&mut self, index: u32, reason: &str) -> Result<(), LinkError> {
        let mut done = Vec::new();
        let Some((node, _, requester)) = self.requester(index) else {
            return Ok(());
        };
        let Some(endpoint) = requester.endpoint() else {
            return Ok(());
        };
        let (number, is_all) = (endpoint.number(), endpoint.end_all(&mut done));
        if let Stage::Up(_) = requester.stage {
            tracing::warn!(%node, reason, "the queue pair is given up, data go on over TCP");
            self.counters.add(Count::FailedPair, 1);
            self.take_done(index, &done)?;
            if !is_all {
                // A reply may have arrived that nobody will ever see, and the peer has forgotten the request
                // by now.
                return Err(LinkError::Protocol("the device does not end a queue pair"));
            }
        } else {
            // No request has gone by it, and what does not work is tried again and again.
            tracing::debug!(%node, reason, "the queue pair does not work");
        }
        let Some(link) = self.links[index].as_deref_mut() else {
            return Ok(());
        };
        let (End::Caller(_, caller), Some(requester)) = (&mut link.end, &mut link.requester) else {
            return Ok(());
        };
        let unanswered = caller.leave_queue_pair();
        // Here it is destroyed: from now on no device touches memory for it.
        requester.begin(Stage::Reconciling {
            number,
            unanswered: unanswered.clone(),
        });
        caller.tell(&Pairing::FailedPair { number, unanswered });
        let answers = requester.all_closed(caller, &mut self.pairs.bounces);
        if !answers.is_empty() {
            // Found while sending, they would else be told only with the next thing that comes.
            self.inbox.eventfd.signal();
        }
        let answers = answers.into_iter();
        self.events
            .extend(answers.map(|reply| Event::Reply(node, reply)));
        self.pairs.remove(index);
        self.mark(index);
        self.tell_way(node, Err(reason.to_owned()));
        Ok(())
    }
}
