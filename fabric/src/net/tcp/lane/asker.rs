//! The queue pair beside a connection on which this node asks: offered, used for what fits a message, and given up without losing a request
//! (`docs/decisions/0009-rdma-transport.md`).

use super::*;
use crate::net::rdma::beside::Beside;
use crate::net::rdma::message;
use crate::net::rdma::pair::{Done, Offered};
use crate::net::rdma::pairing::{End as PairEnd, Pairing, UNANSWERED_MAX};
use crate::net::rdma::slots::Slot;
use crate::net::tcp::caller::Destination;
use crate::net::tcp::control::Counters;
use crate::net::tcp::hello::Wire;
use crate::store::iov::IovCursor;

/// Ticks before a queue pair is offered once more, doubled with each failure up to the maximum.
const PAUSE_TICKS_MIN: u32 = 4;
/// See [`PAUSE_TICKS_MIN`]: a minute.
const PAUSE_TICKS_MAX: u32 = 240;
/// Ticks that a queue pair has to work for the next pause to be the shortest again.
const WORKS_TICKS: u32 = 40;
/// Most blocks that a message's payload touches.
const MESSAGE_CRCS_MAX: usize = 2;

/// What is needed to send a request once more.
#[derive(Clone, Copy)]
struct Sent {
    request: Request,
    shape: Shape,
    crcs: [u32; MESSAGE_CRCS_MAX],
    crc_count: usize,
}

enum Stage {
    /// There is none; one is offered after so many ticks.
    Pause(u32),
    /// The peer has not answered.
    Offered(Beside),
    /// Requests go by it.
    Up(Up),
    /// It is over, and the peer has yet to say which of these requests it has.
    Settling { number: u32, unanswered: Vec<u64> },
}

struct Up {
    beside: Beside,
    /// Receives that the peer has posted.
    credits: usize,
    /// Requests that went by it and have no answer.
    used: usize,
    ticks: u32,
}

/// See the module. Of one connection.
pub(super) struct Asker {
    stage: Stage,
    number: u32,
    pause: u32,
    /// By the place of the request among the connection's.
    sent: Vec<Option<Sent>>,
}

impl Asker {
    /// For a connection that was agreed so, if there may be queue pairs beside it; else why not.
    pub(super) fn new(established: &Established, offered: &Offered) -> Result<Box<Self>, String> {
        let agreed = &established.agreed;
        if let Offered::No(reason) = offered {
            return Err(reason.clone());
        }
        if agreed.version < crate::net::tcp::hello::PAIRING_SINCE {
            return Err("the peer is of a version without RDMA; upgrade it".to_owned());
        }
        if agreed.wire != Wire::Crc {
            return Err(
                "data between these nodes are encrypted, which no RDMA card does; set `wire = \"crc\"` on both if the storage network is trusted"
                    .to_owned(),
            );
        }
        Ok(Box::new(Self {
            stage: Stage::Pause(0),
            number: 0,
            pause: PAUSE_TICKS_MIN,
            sent: Vec::new(),
        }))
    }

    fn up(&mut self) -> Option<&mut Up> {
        match &mut self.stage {
            Stage::Up(up) => Some(up),
            _ => None,
        }
    }

    pub(super) fn beside(&mut self) -> Option<&mut Beside> {
        match &mut self.stage {
            Stage::Offered(beside) => Some(beside),
            Stage::Up(up) => Some(&mut up.beside),
            Stage::Pause(_) | Stage::Settling { .. } => None,
        }
    }

    /// Waits before the next offer, longer each time.
    fn wait(&mut self) {
        self.stage = Stage::Pause(self.pause);
        self.pause = (2 * self.pause).min(PAUSE_TICKS_MAX);
    }

    /// Whether a request of this shape can go by the queue pair now.
    #[inline]
    pub(super) fn has_credit(&mut self, shape: &Shape, counters: &Counters) -> bool {
        let Some(up) = self.up() else {
            return false;
        };
        if !message::fits(shape) {
            return false;
        }
        let has = up.used < up.credits && up.beside.has_free();
        if !has {
            counters.credits_exhausted.fetch_add(1, Ordering::Relaxed);
        }
        has
    }

    /// Sends a request by the queue pair.
    ///
    /// # Safety
    /// Its buffers stay valid until the answer, or until the connection is lost.
    pub(super) unsafe fn send(
        &mut self,
        caller: &mut Caller,
        request: &Request,
        shape: &Shape,
        crcs: &[u32],
        counters: &Counters,
    ) {
        let Stage::Up(up) = &mut self.stage else {
            unreachable!("asked for its credit");
        };
        let slot = up.beside.take().expect("asked for its credit");
        if let Some(list) = shape.payload.filter(|_| shape.payload_len > 0) {
            // SAFETY: the caller's promise.
            unsafe { up.beside.bring(slot, &list, shape.payload_len) };
            let copied = u64::from(shape.payload_len);
            counters.copied_bytes.fetch_add(copied, Ordering::Relaxed);
        }
        counters.messages_out.fetch_add(1, Ordering::Relaxed);
        let mut room = [0; shape::REQUEST_BYTES_MAX];
        let message = caller.send_beside(request, shape, crcs, &mut room);
        let at = Key(message.pair).index() as usize;
        up.beside.send(slot, &message);
        up.used += 1;
        let mut sent = Sent {
            request: *request,
            shape: *shape,
            crcs: [0; MESSAGE_CRCS_MAX],
            crc_count: crcs.len(),
        };
        sent.crcs[..crcs.len()].copy_from_slice(crcs);
        self.sent[at] = Some(sent);
    }
}

impl Lane {
    fn asker(&mut self, index: u32) -> Option<(NodeId, &mut Caller, &mut Asker)> {
        let link = self.links[index].as_deref_mut()?;
        match (&mut link.end, &mut link.asker) {
            (End::Caller(node, caller), Some(asker)) => Some((*node, caller, asker)),
            _ => None,
        }
    }

    /// Offers the peer a queue pair, if one is due.
    pub(super) fn offer(&mut self, index: u32) {
        let control = Arc::clone(&self.control);
        let Some((node, caller, asker)) = self.asker(index) else {
            return;
        };
        let (Stage::Pause(0), Offered::Port(port)) = (&asker.stage, control.pairs()) else {
            return;
        };
        asker.number += 1;
        let key = control.identity.random_key();
        let opened = key.map_err(|error| error.to_string());
        match opened.and_then(|key| Beside::open(&**port, asker.number, key)) {
            Ok(beside) => {
                caller.tell(&Pairing::Offer {
                    number: asker.number,
                    end: beside.end(),
                });
                asker.sent.resize(caller.flights_max(), None);
                asker.stage = Stage::Offered(beside);
                self.watch_pair(index);
                self.mark(index);
            }
            Err(reason) => {
                asker.wait();
                self.tell_way(node, Err(reason));
            }
        }
    }

    /// Time passes.
    pub(super) fn tick_asker(&mut self, index: u32) {
        let Some((.., asker)) = self.asker(index) else {
            return;
        };
        match &mut asker.stage {
            Stage::Pause(0) => {}
            Stage::Pause(ticks) => *ticks -= 1,
            Stage::Up(up) => {
                up.ticks = up.ticks.saturating_add(1);
                if up.ticks == WORKS_TICKS {
                    asker.pause = PAUSE_TICKS_MIN;
                }
                return;
            }
            Stage::Offered(_) | Stage::Settling { .. } => return,
        }
        self.offer(index);
    }

    /// The peer has told something of the queue pair.
    pub(super) fn asker_told(&mut self, index: u32, told: Pairing) -> Result<(), LinkError> {
        let Some((node, caller, asker)) = self.asker(index) else {
            return Err(LinkError::Protocol("a queue pair that was not offered"));
        };
        match (told, &mut asker.stage) {
            (Pairing::Accept { number, end }, Stage::Offered(beside))
                if number == beside.number() =>
            {
                self.accepted(index, &end);
            }
            (Pairing::Refuse { number, reason }, Stage::Offered(beside))
                if number == beside.number() =>
            {
                asker.wait();
                self.paired.retain(|paired| *paired != index);
                self.tell_way(node, Err(format!("the peer: {reason}")));
            }
            (Pairing::Broken { number }, Stage::Up(Up { beside, .. }) | Stage::Offered(beside))
                if number == beside.number() =>
            {
                self.tear_asker(index, "the peer's end has failed");
            }
            // It was found here at the same time.
            (Pairing::Broken { .. }, _) => {}
            (
                Pairing::Settled { number, unknown },
                Stage::Settling {
                    number: of,
                    unanswered,
                },
            ) if number == *of => {
                if unknown.iter().any(|pair| !unanswered.contains(pair)) {
                    return Err(LinkError::Protocol("a request that was not asked about"));
                }
                // One that is not there was answered on the connection before the peer heard of the question.
                let slots = unknown.iter().filter_map(|pair| caller.forget(*pair));
                let again = slots.filter_map(|slot| asker.sent[slot as usize].take());
                let again: Vec<Sent> = again.collect();
                asker.wait();
                self.send_again(node, again);
            }
            _ => return Err(LinkError::Protocol("a queue pair that was not offered")),
        }
        Ok(())
    }

    /// The peer's end is there: requests go by the queue pair from now on.
    fn accepted(&mut self, index: u32, end: &PairEnd) {
        let Some((node, _, asker)) = self.asker(index) else {
            return;
        };
        let Stage::Offered(mut beside) = std::mem::replace(&mut asker.stage, Stage::Pause(0))
        else {
            unreachable!("it was offered");
        };
        let connected = beside.connect(end);
        asker.stage = Stage::Up(Up {
            beside,
            credits: usize::from(end.receives).min(UNANSWERED_MAX),
            used: 0,
            ticks: 0,
        });
        match connected {
            Ok(()) => self.tell_way(node, Ok(())),
            Err(reason) => self.tear_asker(index, &reason),
        }
        if self.links[index].is_some() {
            self.send_waiting(node);
        }
    }

    /// Requests that the peer never executed go on the connection, as for the first time.
    fn send_again(&mut self, node: NodeId, again: Vec<Sent>) {
        let Some(peer) = self.peers.get_mut(&node) else {
            return;
        };
        for sent in again.iter().rev() {
            peer.waiting.push_front(Waiting {
                request: sent.request,
                shape: sent.shape,
                crcs: sent.crcs[..sent.crc_count].into(),
            });
        }
        self.send_waiting(node);
    }

    /// Takes in what has come by a queue pair on which this node asks; true if there was something.
    pub(super) fn poll_asker(&mut self, index: u32) -> bool {
        let mut done = std::mem::take(&mut self.done);
        done.clear();
        let polled = match self.asker(index).and_then(|(.., asker)| asker.beside()) {
            Some(beside) => beside.poll(&mut done),
            None => Ok(()),
        };
        let busy = !done.is_empty() || polled.is_err();
        let taken = self.take_replies(index, &done);
        self.done = done;
        match (taken, polled) {
            (Err(error), _) => self.lose(index, &error),
            (Ok(()), Err(reason)) => self.tear_asker(index, &reason),
            (Ok(()), Ok(())) => {}
        }
        busy
    }

    fn take_replies(&mut self, index: u32, done: &[Done]) -> Result<(), LinkError> {
        let (mut replies, mut copied) = (0, 0);
        for one in done {
            let Some((node, caller, asker)) = self.asker(index) else {
                return Ok(());
            };
            let Some(beside) = asker.beside() else {
                return Ok(());
            };
            match *one {
                Done::Sent(slot) => beside.sent(slot),
                Done::Received(slot, len) => {
                    let (reply, bytes) = take_reply(caller, beside, slot, len)?;
                    copied += bytes;
                    if let Some(up) = asker.up() {
                        up.used = up.used.saturating_sub(1);
                    }
                    replies += 1;
                    self.events.push_back(Event::Reply(node, reply));
                }
            }
        }
        if replies > 0 {
            let counters = &self.control.counters;
            counters.messages_in.fetch_add(replies, Ordering::Relaxed);
            counters.copied_bytes.fetch_add(copied, Ordering::Relaxed);
            self.mark(index);
            if let Some((node, ..)) = self.asker(index) {
                self.send_waiting(node);
            }
        }
        Ok(())
    }

    /// The queue pair is over, the connection is not: takes up what had arrived, and tells the peer what is missing.
    pub(super) fn tear_asker(&mut self, index: u32, reason: &str) {
        let mut done = Vec::new();
        let Some((node, _, asker)) = self.asker(index) else {
            return;
        };
        let Some(beside) = asker.beside() else {
            return;
        };
        let (number, is_all) = (beside.number(), beside.end_all(&mut done));
        tracing::warn!(%node, reason, "the queue pair is given up, data go on over TCP");
        self.control.counters.torn.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = self.take_replies(index, &done) {
            self.lose(index, &error);
            return;
        }
        if !is_all {
            // A reply may have arrived that nobody will ever see, and the peer has forgotten the request by now.
            self.lose(
                index,
                &LinkError::Protocol("the device does not end a queue pair"),
            );
            return;
        }
        let Some((_, caller, asker)) = self.asker(index) else {
            return;
        };
        // Here it is destroyed: from now on no device touches memory for it.
        let unanswered = caller.leave_beside();
        asker.stage = Stage::Settling {
            number,
            unanswered: unanswered.clone(),
        };
        caller.tell(&Pairing::Torn { number, unanswered });
        self.paired.retain(|paired| *paired != index);
        self.mark(index);
        self.tell_way(node, Err(reason.to_owned()));
    }
}

/// Takes a reply out of its slot, and has that receive the next. Also, how many bytes were copied.
fn take_reply(
    caller: &mut Caller,
    beside: &mut Beside,
    slot: Slot,
    len: u32,
) -> Result<(Reply, u64), LinkError> {
    let received = beside.read(slot, len)?;
    let Destination { list, mut reply } = caller.take_beside(&received.head, received.header())?;
    let mut payload_len = received.head.payload_len as usize;
    // SAFETY: the slot was received in and is not posted again, and nobody else writes there.
    if !unsafe { received.is_intact(beside.slots(), slot) } {
        reply.result = Err(Refusal::Mismatch);
        payload_len = 0;
    }
    if payload_len > 0 {
        // SAFETY: as above; the client's list holds so many bytes and lives until it is told of the answer.
        unsafe {
            let payload = std::slice::from_raw_parts(beside.slots().payload(slot), payload_len);
            let list = std::slice::from_raw_parts(list.ptr, list.len as usize);
            IovCursor::default().copy_to(list, payload);
        }
    }
    beside.receive(slot);
    Ok((reply, payload_len as u64))
}
