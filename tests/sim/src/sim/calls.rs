//! Single calls between machines: what a returning replica asks its source, and a new lease all replicas.

use fabric_replication::lease_recovery::Call;
use fabric_replication::resync::rounds::Token;
use fabric_types::ids::PeerId;
use fabric_types::{Incarnation, NodeId, Refusal, Request, RequestId};

use super::{End, Event, Sim};
use crate::metadata::host_id;
use crate::node::{Answer, Ask, Parcel, Sender, memory};
use crate::queue::Span;

/// Peers from this number on are calls, those below connections.
pub(super) const CALLS_FROM: u32 = 1 << 31;
/// A call without an answer is given up after this time.
const CALL_TIMEOUT: Span = Span::millis(500);

/// Who calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Caller {
    /// A round of comparison on a node, and its name for the call.
    Round {
        node: usize,
        incarnation: Incarnation,
        token: Token,
    },
    /// A takeover of a volume: its number, and its name for the call.
    Lease {
        host: usize,
        life: u64,
        volume: usize,
        number: u64,
        call: Call,
    },
}

/// A call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CallState {
    caller: Caller,
    to: usize,
    /// The process that is meant.
    expected: Incarnation,
    /// The one that it was sent to.
    incarnation: Option<Incarnation>,
    open: bool,
}

impl Caller {
    fn end(self) -> End {
        match self {
            Self::Round { node, .. } => End::Node(node),
            Self::Lease { host, .. } => End::Host(host),
        }
    }

    /// The caller's node, as replicas know it.
    fn node(self) -> NodeId {
        match self {
            Self::Round { node, .. } => NodeId(node as u64),
            Self::Lease { host, .. } => host_id(host),
        }
    }
}

impl Sim {
    pub(super) fn ask_source(&mut self, node: usize, incarnation: Incarnation, ask: Ask) {
        let caller = Caller::Round {
            node,
            incarnation,
            token: ask.token,
        };
        self.call(caller, ask.source, ask.request);
    }

    /// Sends a request to a process; another one's answer says nothing.
    pub(super) fn call(
        &mut self,
        caller: Caller,
        (to, expected): (NodeId, Incarnation),
        request: Request,
    ) {
        let number = self.calls.len();
        let request = request.to_replica(to);
        let to = to.base().0 as usize;
        self.calls.push(CallState {
            caller,
            to,
            expected,
            incarnation: self.nodes[to].process.as_ref().map(|p| p.incarnation),
            open: true,
        });
        let data = memory::pick_up(request.command);
        let numbers = [21, number as u64, to as u64, request.epoch.0];
        self.trace.note(self.now, &numbers, || {
            format!(
                "{caller:?} asks node {to} by {}: {}",
                request.epoch,
                super::net::describe(&request.command)
            )
        });
        let request = Request {
            id: RequestId(number as u64),
            ..request
        };
        let crc = fabric_types::checksum::crc32c(&data);
        let parcel = Parcel { request, data, crc };
        let (from, to) = (caller.end(), End::Node(to));
        self.send_control(from, to, Event::Call { number, parcel });
        self.after(CALL_TIMEOUT, Event::CallOver(number));
    }

    /// A call arrives.
    pub(super) fn on_call(&mut self, number: usize, parcel: Parcel) {
        let CallState {
            caller,
            to,
            incarnation,
            ..
        } = self.calls[number];
        if !incarnation.is_some_and(|i| self.nodes[to].runs(i)) {
            return;
        }
        if self.nodes[to].paused_until > self.now {
            self.at(self.nodes[to].paused_until, Event::Call { number, parcel });
            return;
        }
        let sender = Sender {
            node: caller.node(),
            peer: PeerId(CALLS_FROM + u32::try_from(number).expect("few calls")),
        };
        self.catch_up(to, &parcel.request);
        self.with_node(to, |node, outputs| {
            node.on_request(sender, number, parcel, outputs);
        });
    }

    pub(super) fn send_call_answer(&mut self, answer: Answer) {
        let state = self.calls[(answer.peer.0 - CALLS_FROM) as usize];
        let (from, to) = (End::Node(state.to), state.caller.end());
        self.send_control(from, to, Event::Answer { answer });
    }

    /// The answer to a call arrives.
    pub(super) fn on_call_answer(&mut self, answer: Answer) {
        let number = (answer.peer.0 - CALLS_FROM) as usize;
        let expected = self.calls[number].expected;
        let result = match answer.reply.incarnation == expected {
            true => answer.reply.result,
            false => Err(Refusal::Unreachable),
        };
        self.end_call(number, result, answer.data.as_deref());
    }

    pub(super) fn end_call(
        &mut self,
        number: usize,
        result: Result<(), Refusal>,
        data: Option<&[u8]>,
    ) {
        if !std::mem::replace(&mut self.calls[number].open, false) {
            return;
        }
        match self.calls[number].caller {
            Caller::Round {
                node,
                incarnation,
                token,
            } => {
                let numbers = [20, node as u64, number as u64, u64::from(result.is_ok())];
                self.trace.note(self.now, &numbers, || {
                    format!("node {node}: {token:?} hears {result:?}")
                });
                if self.nodes[node].runs(incarnation) {
                    self.with_node(node, |node, outputs| {
                        node.on_round(token, result, data, outputs);
                    });
                }
            }
            Caller::Lease {
                host,
                life,
                volume,
                number: takeover,
                call,
            } => {
                let numbers = [34, host as u64, number as u64, u64::from(result.is_ok())];
                self.trace.note(self.now, &numbers, || {
                    format!("host {host}: takeover of volume {volume} hears {call:?} {result:?}")
                });
                if self.hosts[host].life == life {
                    let takeover = ((volume, host), takeover);
                    self.on_lease_recovery_reply(takeover, call, result, data);
                }
            }
        }
    }
}
