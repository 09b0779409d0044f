//! Links and connections.
//!
//! A connection is like TCP: what arrives does so once and in order, or the connection breaks and the host is
//! told that all its requests are lost, although the node may still take some of them.

use std::collections::BTreeMap;

use fabric_types::ids::PeerId;
use fabric_types::{Command, Refusal, Reply, Request, RequestId};
use rand::Rng;

use super::calls::CALLS_FROM;
use super::{End, Event, Sim};
use crate::host::{Conn, Outstanding};
use crate::metadata::host_id;
use crate::mutation::Mutation;
use crate::node::{Answer, Parcel, Sender, memory};
use crate::queue::{At, Span};

/// A data thread that failed to connect tries again.
const CONNECT_EVERY: Span = Span::millis(20);
/// What was sent before a connection broke arrives up to this much later, if it does.
const STRAGGLE: Span = Span::millis(30);

/// Directions of a connection.
const THERE: usize = 0;
const BACK: usize = 1;

impl Sim {
    /// How long a message takes now.
    fn delay(&mut self) -> Span {
        let net = self.plan.net;
        let mut delay = Span(net.base.0 + self.some(net.jitter).0);
        if net.spike_one_in > 0 && self.rng.random_range(0..net.spike_one_in) == 0 {
            delay.0 += net.spike.0;
        }
        delay
    }

    /// Whether messages pass from one end to the other.
    pub(super) fn passes(&self, from: End, to: End) -> bool {
        !self.cuts.contains_key(&(from, to))
    }

    /// Cuts a link in one direction.
    pub fn cut(&mut self, from: End, to: End) {
        *self.cuts.entry((from, to)).or_insert(0) += 1;
    }

    /// Restores a link in one direction; what waited goes on.
    pub fn reconnect(&mut self, from: End, to: End) {
        let Some(cuts) = self.cuts.get_mut(&(from, to)) else {
            return;
        };
        *cuts -= 1;
        if *cuts > 0 {
            return;
        }
        self.cuts.remove(&(from, to));
        let held = std::mem::take(&mut self.held);
        let (free, held): (Vec<_>, Vec<_>) = held
            .into_iter()
            .partition(|(f, t, _)| (*f, *t) == (from, to));
        self.held = held;
        // In their order.
        let start = self.now + self.plan.net.base;
        for ((_, _, event), nth) in free.into_iter().zip(0..) {
            self.at(start + Span(nth), event);
        }
    }

    /// A message outside of connections: lost on a cut link.
    pub(super) fn send_control(&mut self, from: End, to: End, event: Event) {
        if self.passes(from, to) {
            let delay = self.delay();
            self.after(delay, event);
        }
    }

    /// Puts a message on a connection.
    fn send_on(&mut self, conn: usize, direction: usize, event: Event) {
        let delay = self.delay();
        let state = &mut self.conns[conn];
        let arrives = (self.now + delay).max(state.last[direction] + Span(1));
        state.last[direction] = arrives;
        let (host, node) = (End::Host(state.host), End::Node(state.node));
        let (from, to) = [(host, node), (node, host)][direction];
        if self.passes(from, to) {
            self.at(arrives, event);
        } else {
            self.held.push((from, to, event));
        }
    }

    /// Connects a data thread to a node, if both can be reached; else later.
    pub(super) fn connect(&mut self, host: usize, lane: usize, node: usize) {
        let (here, there) = (End::Host(host), End::Node(node));
        let reached = self.passes(here, there) && self.passes(there, here);
        let awake = self.nodes[node].paused_until <= self.now;
        let life = self.hosts[host].life;
        let Some(process) = self.nodes[node]
            .process
            .as_ref()
            .filter(|_| reached && awake)
        else {
            let event = Event::Connect {
                host,
                life,
                lane,
                node,
            };
            let pause = self.some(CONNECT_EVERY);
            self.after(Span(CONNECT_EVERY.0 + pause.0), event);
            return;
        };
        let conn = self.conns.len();
        self.conns.push(Conn {
            host,
            life,
            lane,
            node,
            incarnation: process.incarnation,
            open: true,
            taken_until: At(u64::MAX),
            outstanding: BTreeMap::new(),
            last: [self.now; 2],
            watched: false,
        });
        let thread = &mut self.hosts[host].lanes[lane];
        thread.links[node] = Some(conn);
        thread.wire.up[node] = true;
    }

    pub(super) fn on_connect(&mut self, host: usize, life: u64, lane: usize, node: usize) {
        if self.hosts[host].life == life && self.hosts[host].lanes[lane].links[node].is_none() {
            self.connect(host, lane, node);
        }
    }

    /// A connection breaks: its host hears that all requests on it are lost.
    pub fn break_conn(&mut self, conn: usize) {
        let straggle = self.some(STRAGGLE);
        let state = &mut self.conns[conn];
        if !state.open {
            return;
        }
        state.open = false;
        state.taken_until = self.now + straggle;
        let unanswered = std::mem::take(&mut state.outstanding);
        let incarnation = state.incarnation;
        let (host, lane, node, life) = (state.host, state.lane, state.node, state.life);
        self.trace.note(self.now, &[3, conn as u64], || {
            format!("host {host} lane {lane} loses its connection to node {node}")
        });
        if self.hosts[host].life != life {
            return;
        }
        if self.plan.mutation == Some(Mutation::AckBeforeShrink) {
            self.hosts[host].lanes[lane].wire.up[node] = false;
            for (id, _) in unanswered {
                let (id, result) = (RequestId(id), Ok(()));
                let reply = Reply {
                    id,
                    incarnation,
                    result,
                };
                self.hosts[host].lanes[lane].on_reply(node, &reply);
            }
        }
        self.hosts[host].lanes[lane].on_lost(node);
        self.after_lane(host, lane);
        self.connect_later(host, lane, node);
    }

    /// A host is gone: nobody hears of its connections, and what was sent may still arrive.
    pub(super) fn close_conns_of(&mut self, host: usize) {
        for conn in self.open_conns() {
            let straggle = self.some(STRAGGLE);
            let state = &mut self.conns[conn];
            if state.host == host {
                state.open = false;
                state.taken_until = self.now + straggle;
                state.outstanding.clear();
            }
        }
    }

    fn connect_later(&mut self, host: usize, lane: usize, node: usize) {
        let event = Event::Connect {
            host,
            life: self.hosts[host].life,
            lane,
            node,
        };
        let pause = self.some(CONNECT_EVERY);
        self.after(pause, event);
    }

    /// Open connections, by number.
    pub fn open_conns(&self) -> Vec<usize> {
        (0..self.conns.len())
            .filter(|&c| self.conns[c].open)
            .collect()
    }

    /// Breaks all connections to a node.
    pub(super) fn break_conns_to(&mut self, node: usize) {
        for conn in self.open_conns() {
            if self.conns[conn].node == node {
                self.break_conn(conn);
            }
        }
    }

    pub(super) fn send_request(&mut self, host: usize, lane: usize, node: usize, request: Request) {
        let link = self.hosts[host].lanes[lane].links[node];
        let conn = link.expect("the wire takes requests only while it is up");
        let mut request = request;
        if self.plan.mutation == Some(Mutation::ForgetWatermark) {
            request.watermark = request.sequence;
        }
        let writes = matches!(
            request.command,
            Command::Write { .. } | Command::Zero { .. }
        );
        let is_forgotten = writes && request.pg.is_incoming();
        if is_forgotten && self.plan.mutation == Some(Mutation::ForgetIncoming) {
            let reply = Reply {
                id: request.id,
                incarnation: self.conns[conn].incarnation,
                result: Ok(()),
            };
            self.after(Span(1), Event::Forgotten { conn, reply });
            return;
        }
        let id = request.id.0;
        let since = self.now;
        let crc = fabric_types::checksum::crc32c(&memory::pick_up(request.command));
        let sent = Outstanding {
            request,
            since,
            crc,
        };
        if self.conns[conn].outstanding.insert(id, sent).is_some() {
            self.fail(format!("request {id:x} was sent twice to node {node}"));
            return;
        }
        if !self.conns[conn].watched {
            self.conns[conn].watched = true;
            self.after(self.plan.request_timeout, Event::Watch { conn });
        }
        let pickup = self.some(self.plan.net.pickup);
        if pickup == Span(0) {
            self.on_pickup(conn, id);
        } else {
            self.after(pickup, Event::Pickup { conn, id });
        }
    }

    /// The data of a request leave the guest's memory.
    pub(super) fn on_pickup(&mut self, conn: usize, id: u64) {
        let state = &self.conns[conn];
        let Some(Outstanding { request, crc, .. }) = state.outstanding.get(&id) else {
            return;
        };
        let (request, crc) = (*request, *crc);
        let data = memory::pick_up(request.command);
        let (host, node) = (state.host, state.node);
        let numbers = [4, conn as u64, id, request.sequence.0, request.epoch.0];
        self.trace.note(self.now, &numbers, || {
            let sequence = request.sequence;
            format!(
                "host {host} -> node {node}: {id:x} {} {} {sequence} watermark {} {}",
                describe(&request.command),
                request.epoch,
                request.watermark,
                request.pg,
            )
        });
        let parcel = Parcel { request, data, crc };
        self.send_on(conn, THERE, Event::Request { conn, parcel });
    }

    /// A request arrives at its node.
    pub(super) fn on_request(&mut self, conn: usize, parcel: Parcel) {
        let state = &self.conns[conn];
        let (node, thread, host) = (state.node, state.lane, state.host);
        if !self.nodes[node].runs(state.incarnation) || self.now > state.taken_until {
            return;
        }
        if self.nodes[node].paused_until > self.now {
            self.at(
                self.nodes[node].paused_until,
                Event::Request { conn, parcel },
            );
            return;
        }
        let sender = Sender {
            node: host_id(host),
            peer: PeerId(u32::try_from(conn).expect("few connections")),
        };
        self.catch_up(node, &parcel.request);
        self.with_node(node, |node, outputs| {
            node.on_request(sender, thread, parcel, outputs);
        });
    }

    pub(super) fn send_answer(&mut self, answer: Answer) {
        let conn = answer.peer.0 as usize;
        let double = self.plan.net.double_one_in;
        if double > 0 && self.rng.random_range(0..double) == 0 {
            let late = Span(self.delay().0 * 3);
            let mut answer = answer.clone();
            answer.again = true;
            self.after(late, Event::Answer { answer });
        }
        self.send_on(conn, BACK, Event::Answer { answer });
    }

    /// An answer arrives at its host.
    pub(super) fn on_answer(&mut self, answer: Answer) {
        if answer.peer.0 >= CALLS_FROM {
            self.on_call_answer(answer);
            return;
        }
        let conn = answer.peer.0 as usize;
        let state = &mut self.conns[conn];
        let (host, lane, node) = (state.host, state.lane, state.node);
        if !state.open || self.hosts[host].life != state.life {
            return;
        }
        let reply = answer.reply;
        if answer.again && state.outstanding.contains_key(&reply.id.0) {
            // Another request goes by that name now. A transport knows its requests apart, and each is
            // answered once.
            return;
        }
        let numbers = [5, conn as u64, reply.id.0, u64::from(reply.result.is_ok())];
        self.trace.note(self.now, &numbers, || {
            format!(
                "node {node} -> host {host}: {:x} {:?}",
                reply.id.0, reply.result
            )
        });
        // The second arrival of an answer fills no buffer: the transport knows that nobody waits.
        let waiting = state.outstanding.remove(&reply.id.0);
        if let Some(Outstanding { request, .. }) = waiting {
            match (reply.result, &answer.data) {
                // A store reads straight into the guest's buffer, and finds out then.
                (Err(Refusal::Corrupt | Refusal::Device(_)), _) => memory::spoil(request.command),
                (_, Some(data)) => memory::put_down(request.command, data),
                (_, None) => {}
            }
        }
        let now_us = self.clock_of(host);
        let thread = &mut self.hosts[host].lanes[lane];
        thread.client.set_now_us(now_us);
        thread.on_reply(node, &reply);
        self.after_lane(host, lane);
    }

    /// See [`Mutation::ForgetIncoming`].
    pub(super) fn on_forgotten(&mut self, conn: usize, reply: &Reply) {
        let state = &self.conns[conn];
        let (host, lane, node) = (state.host, state.lane, state.node);
        if state.open && self.hosts[host].life == state.life {
            self.hosts[host].lanes[lane].on_reply(node, reply);
            self.after_lane(host, lane);
        }
    }

    /// Breaks a connection that did not answer for too long.
    pub(super) fn on_watch(&mut self, conn: usize) {
        let state = &mut self.conns[conn];
        if !state.open {
            return;
        }
        let oldest = state.outstanding.values().map(|o| o.since).min();
        let Some(oldest) = oldest else {
            state.watched = false;
            return;
        };
        if self.now.since(oldest) >= self.plan.request_timeout {
            self.break_conn(conn);
        } else {
            self.at(oldest + self.plan.request_timeout, Event::Watch { conn });
        }
    }
}

pub(super) fn describe(command: &Command) -> String {
    match command {
        Command::Read {
            chunk, offset, len, ..
        } => format!("read {chunk:?} {offset}+{len}"),
        Command::Write {
            chunk, offset, len, ..
        } => format!("write {chunk:?} {offset}+{len}"),
        Command::Zero {
            chunk, offset, len, ..
        } => format!("zero {chunk:?} {offset}+{len}"),
        Command::Inspect { chunk, block, .. } => format!("inspect {chunk:?} from block {block}"),
        Command::Restore {
            chunk,
            block,
            stamps: [from, to],
            ..
        } => format!("restore {chunk:?} block {block}: {from:?} -> {to:?}"),
        Command::ListChunks { cursor, .. } => format!("list chunks from {cursor}"),
        Command::Fence { layer, .. } => format!("fence {layer:?}"),
        Command::TellFence { layer, .. } => format!("tell the fence of {layer:?}"),
        Command::Flush { .. } | Command::Join => format!("{command:?}"),
    }
}
