//! The connections of one data thread: those to its peers, on which it asks, and those handed to it, on which
//! it answers. A request never changes threads.
//!
//! A turn: [`Lane::send`] and [`Lane::reply`] queue, [`Lane::kick`] writes each connection's queue at once,
//! [`Lane::poll`] takes in what came, and [`Lane::next_event`] tells of it.

use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::event::epoll::EventFlags;

use super::caller::{Caller, LinkError, shape_of};
use super::control::{ConnectorCommand, Control};
use super::counts::{Count, Counters};
use super::handshake::Established;
use super::inbox::{Inbox, InboxMessage};
use super::members::{Access, Admission};
use super::pool::{POOL_BYTES, Pool};
use super::responder::{Answer, ReceivedRequest, Responder};
use super::serving::{Serving, Servings};
use super::shape::{self, Shape};
use super::socket::Socket;
use crate::queue_pair::pair::Offered;
use fabric_types::ids::PeerId;
use fabric_types::message::PIECES_MAX;
use fabric_types::slab::{Key, Slab};
use fabric_types::{Incarnation, NodeId, Refusal, Reply, Request};

use pair_responder::PairResponder;
use pairs::Pairs;
use readiness::{Readiness, Ready};
use requester::{PairSend, Requester};
use sums::Sums;

mod links;
mod pair_responder;
mod pairs;
mod readiness;
mod receive;
mod requester;
mod sums;
#[cfg(test)]
mod tests;

/// Connections of a data thread; one more is closed at once.
const LINKS_MAX: u32 = 2048;

/// How often time is looked at while there are connections. The machines count in these.
const TICK_MS: i64 = 250;

/// Times that a connection is read before others have their turn.
const READS_MAX: usize = 16;

/// Rounds of a poll; with more to do it notifies itself and returns.
const ROUNDS_MAX: usize = 16;

/// What happened.
#[derive(Debug, Clone, Copy)]
pub enum Event {
    /// A replica answered.
    Reply(NodeId, Reply),
    /// A replica is lost: it will answer nothing that was sent before.
    Lost(NodeId),
    /// A request of a node, on its connection of this name. The answer is due by [`Lane::reply`] under the
    /// request's id.
    Request(NodeId, PeerId, Request),
}

enum End {
    Caller(NodeId, Caller),
    Responder(Responder<u32>),
}

struct Link {
    // Before the rest: what a device works on ends first.
    requester: Option<Box<Requester>>,
    pair_responder: Option<Box<PairResponder>>,
    socket: Socket,
    end: End,
    /// The start of the peer.
    incarnation: Incarnation,
    /// What requests of the peer may touch, as it was at this version of the members.
    access: (u64, Access),
    /// The request that is being received.
    receiving: Option<u32>,
    /// Waits for memory, and is not read meanwhile.
    stalled: bool,
    /// Has something to send that was not tried to be sent.
    dirty: bool,
    /// The socket is full.
    blocked: bool,
}

enum LinkState {
    /// Never tried, or quietly closed.
    None,
    /// Being tried for the first time since it was last good.
    Dialing,
    /// Open.
    Up(u32),
    /// Failed; being tried in the background.
    Down,
}

/// A request for which there is no credit, or no connection yet.
struct Waiting {
    request: Request,
    shape: Shape,
    crcs: Box<[u32]>,
}

struct Peer {
    link: LinkState,
    /// Ticks before a queue pair is offered once more, as it was with the last connection.
    pause: u32,
    /// Why there was none with it in the end.
    why_not: Option<String>,
    /// Bounded by what a client has in flight.
    waiting: VecDeque<Waiting>,
}

/// See the module.
pub struct Lane {
    index: usize,
    inbox: Arc<Inbox>,
    control: Arc<Control>,
    readiness: Readiness,
    links: Slab<Option<Box<Link>>>,
    peers: HashMap<NodeId, Peer>,
    dirty: Vec<u32>,
    stalled: VecDeque<Key>,
    pairs: Pairs,
    servings: Servings,
    /// Version of the members by which connections were looked at.
    members_version: u64,
    counters: Arc<Counters>,
    events: VecDeque<Event>,
    sums: Sums,
}

// SAFETY: requests name memory that their submitters keep valid on whatever thread.
unsafe impl Send for Lane {}

impl Lane {
    /// The lane of the data thread of this number. One that `serves` is handed connections of other nodes,
    /// and must be polled as long as it lives.
    pub fn new(control: Arc<Control>, index: usize, serves: bool) -> std::io::Result<Self> {
        let inbox = Arc::new(Inbox::new()?);
        let readiness = Readiness::new(inbox.eventfd.fd())?;
        let counters = control.counters.begin();
        let mut servings = Servings::new(Pool::new(POOL_BYTES));
        let mut pairs = Pairs::default();
        if let Offered::Port(port) = control.pairs() {
            // Now, when no request waits for it: pinning so much takes a while. What fails is tried again,
            // and told, when there is to be a queue pair.
            let _ = pairs.bounces.register(&**port);
            if serves {
                let _ = servings.register(&**port);
            }
        }
        control.command(ConnectorCommand::Register {
            lane: index,
            inbox: Arc::clone(&inbox),
            serves,
        });
        Ok(Self {
            index,
            inbox,
            control,
            readiness,
            links: Slab::new(LINKS_MAX, || None),
            peers: HashMap::new(),
            dirty: Vec::new(),
            stalled: VecDeque::new(),
            pairs,
            servings,
            members_version: 0,
            counters,
            events: VecDeque::new(),
            sums: Sums::default(),
        })
    }

    /// Readable when [`poll`](Self::poll) has something to do.
    pub fn wait_fd(&self) -> BorrowedFd<'_> {
        self.readiness.fd()
    }

    /// Whether `poll` has to be called.
    #[inline]
    pub fn is_active(&self) -> bool {
        self.links.taken() > 0 || self.inbox.eventfd.is_signalled() || !self.events.is_empty()
    }

    /// Requests of other nodes that were handed out and not answered; the store may be using their memory.
    pub fn serving(&self) -> usize {
        self.servings.asked()
    }

    /// Sends a request to a node. `Some`: it cannot be reached. Else an event tells of the answer, or of the
    /// loss.
    pub fn send(&mut self, node: NodeId, request: &Request) -> Option<Reply> {
        let shape = shape_of(request);
        self.sums.take(request, &shape);
        let peer = self.peers.entry(node).or_insert_with(|| Peer {
            link: LinkState::None,
            pause: requester::PAUSE_TICKS_MIN,
            why_not: None,
            waiting: VecDeque::new(),
        });
        match peer.link {
            LinkState::Down => return Some(unreachable(request)),
            LinkState::Up(index) if peer.waiting.is_empty() => {
                let link = self.links[index].as_deref_mut().expect("up means linked");
                let (what, counters) = ((&shape, self.sums.crcs()), &self.counters);
                // SAFETY: the client keeps the buffers until the answer or the loss.
                if unsafe { link.send(request, what, &mut self.pairs.bounces, counters) } {
                    self.mark(index);
                    return None;
                }
            }
            LinkState::Up(_) | LinkState::Dialing => {}
            LinkState::None if !self.control.knows(node) => return Some(unreachable(request)),
            LinkState::None => {
                peer.link = LinkState::Dialing;
                self.control.command(ConnectorCommand::Dial {
                    lane: self.index,
                    node,
                    failed: false,
                });
            }
        }
        // A piece may be sent to two devices of a node.
        if peer.waiting.len() >= 2 * PIECES_MAX as usize {
            return Some(unreachable(request));
        }
        peer.waiting.push_back(Waiting {
            request: *request,
            shape,
            crcs: self.sums.crcs().into(),
        });
        None
    }

    /// Answers a request that an event told of.
    pub fn reply(&mut self, reply: &Reply) {
        let Some(slot) = self.servings.find(Key(reply.id.0)) else {
            return;
        };
        self.servings.answered(slot);
        self.answer(slot, reply);
    }

    fn answer(&mut self, slot: u32, reply: &Reply) {
        let Serving {
            link,
            pair,
            cost,
            id,
            skip,
            room,
            ..
        } = self.servings[slot];
        let Some(index) = self.links.find(link) else {
            // Whoever asked is gone.
            self.servings.free(slot);
            return;
        };
        let mut crcs = self.sums.lend();
        let mut answer = Answer {
            pair,
            cost,
            payload: None,
            payload_len: 0,
            skip,
            crcs: &[],
        };
        if reply.result.is_ok() && room > 0 {
            let list = self.servings.list(slot);
            // SAFETY: the serving holds the list and its memory until the reply is out.
            unsafe { shape::sums(&list, skip, room, &mut crcs) };
            self.sums.forget();
            answer.payload = Some(list);
            answer.payload_len = room;
            answer.crcs = &crcs;
        }
        let reply = Reply { id, ..*reply };
        if !self.reply_on_queue_pair(index, slot, &reply, &answer)
            && let Some(Link {
                end: End::Responder(responder),
                ..
            }) = self.links[index].as_deref_mut()
        {
            // SAFETY: as above.
            unsafe { responder.reply(&reply, &answer, slot) };
            let out = u64::from(answer.payload_len);
            self.counters.add(Count::TcpBytesOut, out);
            self.mark(index);
        }
        self.sums.give_back(crcs);
    }

    /// Notes that a connection has something to send.
    #[inline]
    fn mark(&mut self, index: u32) {
        let link = self.links[index].as_deref_mut().expect("it is linked");
        if !link.dirty {
            link.dirty = true;
            self.dirty.push(index);
        }
    }

    /// Sends what was queued.
    #[inline]
    pub fn kick(&mut self) {
        self.sums.forget();
        while let Some(index) = self.dirty.pop() {
            let Some(link) = self.links[index].as_deref_mut() else {
                continue;
            };
            link.dirty = false;
            self.flush_pair(index);
            if self.links[index].is_some()
                && let Err(error) = self.flush(index)
            {
                self.lose(index, &error);
            }
        }
        let waits = !self.stalled.is_empty() || self.pairs.wait;
        if self.servings.has_freed() && waits {
            self.inbox.eventfd.signal();
        }
    }

    /// Writes a connection's queue, and takes back what the replies that are out held.
    fn flush(&mut self, index: u32) -> Result<(), LinkError> {
        let link = self.links[index].as_deref_mut().expect("it is linked");
        let all = match &mut link.end {
            End::Caller(_, caller) => link.socket.send(caller.queue())?,
            End::Responder(responder) => link.socket.send(responder.queue())?,
        };
        if all == link.blocked {
            link.blocked = !all;
            self.watch(index);
        }
        self.release_sent(index);
        Ok(())
    }

    fn release_sent(&mut self, index: u32) {
        let link = self.links[index].as_deref_mut().expect("it is linked");
        if let End::Responder(responder) = &mut link.end {
            while let Some(slot) = responder.next_sent() {
                self.servings.free(slot);
            }
        }
    }

    /// Tells epoll what a connection waits for.
    fn watch(&mut self, index: u32) {
        let link = self.links[index].as_deref().expect("it is linked");
        let mut flags = EventFlags::empty();
        if !link.stalled {
            flags |= EventFlags::IN;
        }
        if link.blocked {
            flags |= EventFlags::OUT;
        }
        let key = self.links.key(index).0;
        self.readiness
            .change_connection(link.socket.fd(), key, flags);
    }

    /// Takes in what came. Nothing is done while there are events to tell of: a node that comes back is never
    /// used before its loss is known.
    pub fn poll(&mut self) {
        if !self.events.is_empty() {
            // What is readable meanwhile has told of itself already, and is not to be slept on.
            self.inbox.eventfd.signal();
            return;
        }
        for _ in 0..ROUNDS_MAX {
            if !self.poll_once() {
                return;
            }
        }
        self.inbox.eventfd.signal();
    }

    /// One round; false if there was nothing.
    fn poll_once(&mut self) -> bool {
        let ready = self.readiness.look();
        let mut ticked = false;
        for at in 0..ready {
            match self.readiness.ready(at) {
                Ready::Inbox => {
                    self.drain_inbox();
                    self.look_at_members();
                }
                Ready::Timer => ticked = true,
                Ready::Pairs => self.pairs_heard(),
                Ready::Connection(key, flags) => {
                    if let Some(index) = self.links.find(Key(key)) {
                        self.serve(index, flags);
                    }
                }
            }
        }
        let has_freed = self.servings.take_freed();
        self.resume_stalled(has_freed);
        let by_pairs = self.poll_pairs();
        // Last: a thread that was away itself has first looked at what came meanwhile.
        if ticked {
            self.tick();
        }
        self.kick();
        ready > 0 || by_pairs || self.arm_pairs()
    }

    /// Next thing that happened.
    #[inline]
    pub fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn tick(&mut self) {
        self.readiness.clear_timer();
        for index in 0..self.links.capacity() {
            if !self.links.is_taken(index) {
                continue;
            }
            let link = self.links[index].as_deref_mut().expect("it is linked");
            let outcome = match &mut link.end {
                End::Caller(_, caller) => caller.tick(),
                End::Responder(responder) => responder.tick(),
            };
            match outcome {
                Ok(()) => self.mark(index),
                Err(error) => {
                    self.lose(index, &error);
                    continue;
                }
            }
            self.tick_pair(index);
            self.tick_requester(index);
        }
    }

    /// Takes no more requests of other nodes; those taken over are yet to be answered.
    pub fn stop_serving(&mut self) {
        self.control
            .command(ConnectorCommand::Unregister { lane: self.index });
        for index in 0..self.links.capacity() {
            let serves = self.links[index]
                .as_deref()
                .is_some_and(|link| matches!(link.end, End::Responder(_)));
            if serves {
                self.lose(index, &LinkError::Closed);
            }
        }
    }
}

impl Link {
    /// Sends a request by the queue pair or on the connection; false if there is no credit for it now.
    ///
    /// # Safety
    /// Its buffers stay valid until the answer, or until the connection is lost.
    unsafe fn send(
        &mut self,
        request: &Request,
        (shape, crcs): (&Shape, &[u32]),
        bounces: &mut Pool,
        counters: &Counters,
    ) -> bool {
        let End::Caller(_, caller) = &mut self.end else {
            return false;
        };
        let mut is_exhausted = false;
        if let Some(requester) = &mut self.requester {
            // SAFETY: the caller's promise.
            match unsafe { requester.send(caller, request, (shape, crcs), bounces, counters) } {
                PairSend::Sent => return true,
                PairSend::Exhausted => is_exhausted = true,
                PairSend::None => {}
            }
        }
        let has_credit = caller.has_credit(shape);
        if has_credit {
            // SAFETY: the caller's promise.
            unsafe { caller.send(request, shape, crcs) };
            counters.add(Count::TcpBytesOut, u64::from(shape.payload_len));
            counters.add(Count::CreditsExhausted, u64::from(is_exhausted));
        }
        has_credit
    }
}

/// The answer for a node that cannot be reached.
pub fn unreachable(request: &Request) -> Reply {
    Reply {
        id: request.id,
        incarnation: Incarnation(0),
        result: Err(Refusal::Unreachable),
    }
}
