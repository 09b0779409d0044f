//! Requests by the queue pair, and the replies to them. Data that lie in memory which is open to the device
//! are not copied: small ones are gathered from there into the message, larger ones, and those that are asked
//! for, travel by windows. Other data go through a buffer, and are counted.

use fabric_types::iov::{IoVecs, IovCursor, copy_from};

use super::*;
use crate::frame::CRCS_MAX;
use crate::pool::{Buffer, Pool};
use crate::queue_pair::endpoint::Load;
use crate::queue_pair::message::Received;
use crate::queue_pair::pair::{Reach, WINDOWS_MAX};
use crate::queue_pair::slots::PAYLOAD_BYTES;

/// A request that went by the queue pair.
#[derive(Default)]
pub(super) struct Sent {
    /// What is needed to send it once more, with the checksums; `None` if it is done with.
    pub(super) what: Option<(Request, Shape)>,
    pub(super) crcs: Vec<u32>,
    /// Where its data lie for the device.
    bounce: Option<Buffer>,
    has_windows: bool,
    /// The device may yet read its data for the message.
    is_sending: bool,
    /// Windows are yet to be closed.
    is_closing: bool,
    /// Its answer, which is told when the device is done with its data.
    answer: Option<Reply>,
}

/// Whether a request went by the queue pair.
pub(in super::super) enum PairSend {
    Sent,
    /// There is none.
    None,
    /// There is no credit, or no memory.
    Exhausted,
}

impl Sent {
    /// To be sent once more, as for the first time.
    pub(super) fn waiting(&mut self) -> Option<Waiting> {
        let (request, shape) = self.what.take()?;
        Some(Waiting {
            request,
            shape,
            crcs: self.crcs.as_slice().into(),
        })
    }
}

/// How the data of a request travel.
enum Plan {
    /// Inside of the message, or there are none.
    Message(Load),
    /// Inside of the reply.
    Reply,
    /// By windows onto the parts that were found.
    Windows(Reach, Option<Buffer>),
}

/// A list of one piece of memory.
fn whole(at: *mut u8, len: usize) -> [libc::iovec; 1] {
    [libc::iovec {
        iov_base: at.cast(),
        iov_len: len,
    }]
}

fn list_of(pieces: &[libc::iovec]) -> IoVecs {
    IoVecs {
        ptr: pieces.as_ptr(),
        len: pieces.len() as u32,
    }
}

/// # Safety
/// The list is valid.
unsafe fn pieces<'a>(list: &IoVecs) -> &'a [libc::iovec] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(list.ptr, list.len as usize) }
}

/// Finds out how the data of a request travel; `None` if they cannot go by the queue pair now.
///
/// # Safety
/// Its buffers are valid.
unsafe fn plan(
    endpoint: &mut QueuePairEndpoint,
    shape: &Shape,
    bounces: &mut Pool,
    counters: &Counters,
) -> Option<Plan> {
    let (list, len, reach) = match (shape.payload, shape.destination) {
        (Some(list), _) if shape.payload_len > 0 => (list, shape.payload_len, Reach::Read),
        (_, Some(list)) if shape.room > 0 => (list, shape.room, Reach::Write),
        _ => return Some(Plan::Message(Load::Elsewhere)),
    };
    let is_small = len as usize <= PAYLOAD_BYTES;
    // SAFETY: the caller's promise.
    unsafe {
        match (is_small, reach) {
            (true, Reach::Read) => {
                let load = match endpoint.find_for_message(&list, len) {
                    true => Load::Found,
                    false => Load::Page,
                };
                return Some(Plan::Message(load));
            }
            (true, Reach::Write) if !endpoint.find(&list, len, WINDOWS_MAX) => {
                return Some(Plan::Reply);
            }
            (false, _) if !endpoint.find(&list, len, WINDOWS_MAX) => {}
            _ => return Some(Plan::Windows(reach, None)),
        }
        let buffer = bounces.take(len as usize)?;
        let place = whole(buffer.as_ptr(), len as usize);
        if reach == Reach::Read {
            let to = std::slice::from_raw_parts_mut(buffer.as_ptr(), len as usize);
            copy_from(pieces(&list), 0, to);
            counters.add(Count::CopiedBytes, u64::from(len));
        }
        let found = endpoint.find(&list_of(&place), len, WINDOWS_MAX);
        assert!(found, "the pool is open to the device");
        Some(Plan::Windows(reach, Some(buffer)))
    }
}

impl Requester {
    /// Sends a request by the queue pair, if it can go so now.
    ///
    /// # Safety
    /// Its buffers stay valid until the answer, or until the connection is lost.
    pub(in super::super) unsafe fn send(
        &mut self,
        caller: &mut Caller,
        request: &Request,
        (shape, crcs): (&Shape, &[u32]),
        bounces: &mut Pool,
        counters: &Counters,
    ) -> PairSend {
        let Stage::Up(up) = &mut self.stage else {
            return PairSend::None;
        };
        let endpoint = &mut up.endpoint;
        let has_credit = up.used < up.credits && shape.cost() <= up.bytes_left;
        if !caller.has_flight() || !has_credit || !endpoint.has_free() {
            return PairSend::Exhausted;
        }
        // SAFETY: the caller's promise.
        let Some(plan) = (unsafe { plan(endpoint, shape, bounces, counters) }) else {
            return PairSend::Exhausted;
        };
        let mut room = [0; shape::REQUEST_BYTES_MAX];
        let message = caller.send_on_queue_pair(request, shape, crcs, &mut room);
        let at = Key(message.pair).index();
        let (load, bounce, has_windows) = match plan {
            Plan::Message(load) => (load, None, false),
            Plan::Reply => (Load::Elsewhere, None, false),
            Plan::Windows(reach, bounce) => {
                // SAFETY: the caller's promise; a buffer is kept as long.
                if !unsafe { endpoint.open_found(reach, at) } {
                    caller.forget(message.pair);
                    bounce.into_iter().for_each(|b| bounces.give_back(b));
                    return PairSend::Exhausted;
                }
                counters.add(Count::Windows, endpoint.opened() as u64);
                (Load::Elsewhere, bounce, true)
            }
        };
        let slot = endpoint.take().expect("it has one that is free");
        if let (Load::Page, Some(list)) = (load, &shape.payload) {
            // SAFETY: the caller's promise.
            unsafe { endpoint.bring(slot, list, shape.payload_len) };
            counters.add(Count::CopiedBytes, u64::from(shape.payload_len));
        }
        // SAFETY: the caller's promise.
        unsafe { endpoint.send_request(slot, &message, load) };
        up.used += 1;
        up.bytes_left -= shape.cost();
        let is_gathered = load == Load::Found;
        self.gathered[usize::from(slot.0)] = is_gathered.then_some(at);
        let is_inside = shape.payload_len > 0 && !has_windows;
        counters.add(Count::Inside, u64::from(is_inside));
        counters.add(Count::MessagesOut, 1);
        counters.add(Count::RdmaBytesOut, u64::from(shape.payload_len));
        let sent = &mut self.sent[at as usize];
        sent.what = Some((*request, *shape));
        sent.crcs.clear();
        if crcs.len() > sent.crcs.capacity() {
            // Once, and not again for each that is longer.
            sent.crcs.reserve_exact(CRCS_MAX);
        }
        sent.crcs.extend_from_slice(crcs);
        assert!(sent.bounce.is_none() && sent.answer.is_none());
        (sent.bounce, sent.has_windows) = (bounce, has_windows);
        (sent.is_sending, sent.is_closing) = (is_gathered, false);
        PairSend::Sent
    }

    /// A message has come by a queue pair that is yet to prove itself: whether it is what was to come back.
    /// Then requests go by it from now on.
    fn prove(&mut self, (slot, len): (Slot, u32)) -> bool {
        let Stage::Probing(connected) = &mut self.stage else {
            return false;
        };
        let endpoint = &mut connected.endpoint;
        let received = endpoint.read_message(slot, len);
        // SAFETY: its slot is posted again below.
        let is_probe = received.is_ok_and(|received| unsafe { endpoint.is_probe(&received) });
        endpoint.receive(slot);
        if is_probe {
            match std::mem::replace(&mut self.stage, Stage::Pause(0)) {
                Stage::Probing(connected) => self.begin(Stage::Up(connected)),
                other => self.stage = other,
            }
        }
        is_probe
    }

    /// Takes up a reply; it is told now if the device is done with the request's data.
    fn take_reply(
        &mut self,
        caller: &mut Caller,
        (slot, len, closed): (Slot, u32, Option<u32>),
        bounces: &mut Pool,
        counters: &Counters,
    ) -> Result<Option<Reply>, LinkError> {
        let up = match &mut self.stage {
            Stage::Up(up) => up,
            _ => return Err(LinkError::Protocol("a reply to nothing")),
        };
        let (endpoint, used, bytes_left) = (&mut up.endpoint, &mut up.used, &mut up.bytes_left);
        let received = endpoint.read_message(slot, len)?;
        // SAFETY: it is posted again below.
        let header = unsafe { received.header(endpoint.slots()) };
        let (at, Destination { list, mut reply }) =
            caller.take_from_queue_pair(&received.head, header)?;
        let sent = &mut self.sent[at as usize];
        *used -= 1;
        *bytes_left += sent.what.as_ref().map_or(0, |(_, shape)| shape.cost());
        let is_pushed = received.head.payload_len > 0 && !received.is_inside;
        let as_asked = match sent.has_windows {
            true => !received.is_inside,
            // A key that is another request's, which that one's reply will close.
            false => !is_pushed && closed.is_none(),
        };
        if !as_asked || received.has_windows() {
            return Err(LinkError::Protocol("a reply's data on another way"));
        }
        // SAFETY: the slot is posted again below; the client's list is valid until it is told of the answer.
        match unsafe { bring_home(endpoint, &received, &list, sent.bounce.as_ref()) } {
            Some(copied) => counters.add(Count::CopiedBytes, copied),
            None => reply.result = Err(Refusal::Mismatch),
        }
        counters.add(Count::MessagesIn, 1);
        counters.add(Count::RdmaBytesIn, u64::from(received.head.payload_len));
        endpoint.receive(slot);
        if sent.has_windows {
            let closed = endpoint.close(at, closed);
            let all = closed.map_err(|_| LinkError::Protocol("what was opened was not closed"))?;
            sent.is_closing = !all;
        }
        sent.answer = Some(reply);
        Ok(self.take_answer(caller, at, bounces))
    }

    /// The answer of a request, if it is there and the device is done with the request's data. That is then
    /// done with.
    fn take_answer(&mut self, caller: &mut Caller, at: u32, bounces: &mut Pool) -> Option<Reply> {
        let sent = self.sent.get_mut(at as usize)?;
        if sent.is_sending || sent.is_closing {
            return None;
        }
        let answer = sent.answer.take()?;
        self.finish(caller, at, bounces);
        Some(answer)
    }

    /// A message has arrived at the peer: the answer that waited for it.
    fn arrived(&mut self, caller: &mut Caller, slot: Slot, bounces: &mut Pool) -> Option<Reply> {
        self.endpoint()?.sent(slot);
        let at = self.gathered[usize::from(slot.0)].take()?;
        self.sent[at as usize].is_sending = false;
        self.take_answer(caller, at, bounces)
    }

    /// A request is done with.
    fn finish(&mut self, caller: &mut Caller, at: u32, bounces: &mut Pool) {
        let sent = &mut self.sent[at as usize];
        sent.what = None;
        sent.bounce
            .take()
            .into_iter()
            .for_each(|buffer| bounces.give_back(buffer));
        caller.finish_on_queue_pair(at);
    }

    /// What was opened for a request is closed: the answer that waited for it.
    fn closed(&mut self, caller: &mut Caller, at: u32, bounces: &mut Pool) -> Option<Reply> {
        self.sent.get_mut(at as usize)?.is_closing = false;
        self.take_answer(caller, at, bounces)
    }

    /// The queue pair is destroyed, and so the device is done with everything: the answers that waited for
    /// that.
    pub(super) fn all_closed(&mut self, caller: &mut Caller, bounces: &mut Pool) -> Vec<Reply> {
        for sent in &mut self.sent {
            (sent.is_sending, sent.is_closing) = (false, false);
        }
        let all = 0..self.sent.len() as u32;
        let answers = all.filter_map(|at| self.take_answer(caller, at, bounces));
        let answers = answers.collect();
        self.let_go(bounces);
        answers
    }

    /// Gives back all buffers; no device works on them any more.
    pub(super) fn let_go(&mut self, bounces: &mut Pool) {
        let buffers = self.sent.iter_mut().filter_map(|sent| sent.bounce.take());
        buffers.for_each(|buffer| bounces.give_back(buffer));
    }
}

/// Brings a reply's payload to where the client wants it: how many bytes had to be copied. `None` if it is
/// not what was announced.
///
/// # Safety
/// The slot was not posted again, and the list is valid.
unsafe fn bring_home(
    endpoint: &QueuePairEndpoint,
    received: &Received,
    list: &IoVecs,
    bounce: Option<&Buffer>,
) -> Option<u64> {
    let len = received.head.payload_len as usize;
    if len == 0 {
        return Some(0);
    }
    // SAFETY: the caller's promise; a buffer has room for the request's data.
    unsafe {
        let brought = match (bounce, received.is_inside) {
            (_, true) => Some(received.inside(endpoint.slots())),
            (Some(buffer), false) => Some(std::slice::from_raw_parts(buffer.as_ptr(), len)),
            (None, false) => None,
        };
        let Some(bytes) = brought else {
            let is_intact = received.is_intact(endpoint.slots(), pieces(list));
            return is_intact.then_some(0);
        };
        let place = whole(bytes.as_ptr().cast_mut(), len);
        if !received.is_intact(endpoint.slots(), &place) {
            return None;
        }
        IovCursor::default().copy_to(pieces(list), bytes);
    }
    Some(len as u64)
}

impl Lane {
    /// Takes in what has come by a queue pair on which this node asks; true if there was something.
    pub(in super::super) fn poll_requester(&mut self, index: u32) -> bool {
        let mut done = std::mem::take(&mut self.pairs.done);
        done.clear();
        let polled = match self
            .requester(index)
            .and_then(|(.., requester)| requester.endpoint())
        {
            Some(endpoint) => endpoint.poll(&mut done),
            None => Ok(()),
        };
        let busy = !done.is_empty() || polled.is_err();
        let taken = match self.is_probing(index) {
            true => self.take_proof(index, &done),
            false => self.take_done(index, &done),
        };
        self.pairs.done = done;
        let outcome = taken.and_then(|()| match polled {
            Err(reason) => self.tear_requester(index, &reason),
            Ok(()) => {
                self.go_on(index, busy);
                Ok(())
            }
        });
        if let Err(error) = outcome {
            self.lose(index, &error);
        }
        busy
    }

    fn is_probing(&mut self, index: u32) -> bool {
        let requester = self.requester(index);
        requester.is_some_and(|(.., requester)| matches!(requester.stage, Stage::Probing(_)))
    }

    /// Takes up what has happened on a queue pair by which no request has gone.
    fn take_proof(&mut self, index: u32, done: &[Done]) -> Result<(), LinkError> {
        let Some((node, _, requester)) = self.requester(index) else {
            return Ok(());
        };
        let mut is_proven = true;
        let mut has_come = false;
        for one in done {
            match *one {
                Done::Received { slot, len, .. } => {
                    has_come = true;
                    is_proven &= requester.prove((slot, len));
                }
                Done::Sent(slot) => requester.endpoint().into_iter().for_each(|b| b.sent(slot)),
                Done::Read(_) | Done::Closed(_) => {}
            }
        }
        match (has_come, is_proven) {
            (false, _) => Ok(()),
            (true, true) => {
                self.tell_way(node, Ok(()));
                Ok(())
            }
            // Whatever lies between changes it. The connection's data are another matter.
            (true, false) => self.tear_requester(index, "another message came back than was sent"),
        }
    }

    /// Something has come: what waited for credit is sent.
    fn go_on(&mut self, index: u32, busy: bool) {
        if let Some((node, ..)) = self.requester(index).filter(|_| busy) {
            self.mark(index);
            self.send_waiting(node);
        }
    }

    /// Takes up what has happened on a queue pair on which this node asks.
    pub(super) fn take_done(&mut self, index: u32, done: &[Done]) -> Result<(), LinkError> {
        let Some(link) = self.links[index].as_deref_mut() else {
            return Ok(());
        };
        let (End::Caller(node, caller), Some(requester)) = (&mut link.end, &mut link.requester)
        else {
            return Ok(());
        };
        let node = *node;
        let (bounces, counters) = (&mut self.pairs.bounces, &self.counters);
        for one in done {
            let reply = match *one {
                Done::Sent(slot) => requester.arrived(caller, slot, bounces),
                Done::Received { slot, len, closed } => {
                    requester.take_reply(caller, (slot, len, closed), bounces, counters)?
                }
                Done::Closed(at) => requester.closed(caller, at, bounces),
                Done::Read(_) => return Err(LinkError::Protocol("nothing is read by who asks")),
            };
            let event = reply.map(|reply| Event::Reply(node, reply));
            self.events.extend(event);
        }
        Ok(())
    }
}
