//! Hedged reads: a read that a replica keeps for unusually long is asked of another one, too. See
//! [`super::latency`].

use std::collections::VecDeque;

use fabric_types::io::{IoResult, Tag};
use fabric_types::membership::Members;
use fabric_types::message::PIECES_MAX;
use fabric_types::slab::Key;
use fabric_types::{Command, NodeId, RequestId};

use super::latency::Latency;
use super::{Client, Transport};

/// Reads that are watched at a time; further ones are not doubled.
const SENT_MAX: usize = 2 * PIECES_MAX as usize;

/// A read that was sent to one replica.
#[derive(Debug, Clone, Copy)]
struct Sent {
    piece: Key,
    at_us: u64,
}

/// Reads that may have to be asked of another replica, and how fast replicas are.
#[derive(Debug)]
pub(super) struct Hedging {
    latency: Latency,
    /// Oldest first; some may have been answered.
    sent: VecDeque<Sent>,
    hedged_reads: u64,
}

impl Hedging {
    pub(super) fn new() -> Self {
        Self {
            latency: Latency::default(),
            // A thread that serves requests does not allocate.
            sent: VecDeque::with_capacity(SENT_MAX),
            hedged_reads: 0,
        }
    }

    /// A read was sent to one replica.
    #[inline]
    fn watch(&mut self, piece: Key, at_us: u64) {
        if self.sent.len() < SENT_MAX {
            self.sent.push_back(Sent { piece, at_us });
        }
    }

    /// No read is watched.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.sent.is_empty()
    }
}

impl Client {
    /// What time it is, in microseconds of any monotonic clock. To be told once a turn.
    #[inline]
    pub fn set_now_us(&mut self, now_us: u64) {
        self.now_us = now_us;
    }

    /// A piece was sent to these.
    #[inline]
    pub(super) fn note_sent(&mut self, piece: u32, to: Members) {
        let slot = &mut self.pieces[piece];
        if let Some(asked) = slot.asked_mut() {
            asked.sent_us = self.now_us;
        }
        let read = matches!(slot.request.command, Command::Read { .. });
        let may_hedge = self.groups.set(slot.group).in_sync().len() > 1;
        if read && may_hedge && !slot.answers.is_hedged() && to.len() == 1 {
            let key = self.pieces.key(piece);
            self.hedging.watch(key, self.now_us);
        }
    }

    /// A replica did what it was asked.
    #[inline]
    pub(super) fn note_answered(&mut self, piece: u32, node: NodeId) {
        let slot = &self.pieces[piece];
        let Some(sent_us) = slot.sent_us() else {
            return;
        };
        let us = self.now_us.saturating_sub(sent_us);
        match slot.request.command {
            // Of a doubled read it is not known how long the first one takes.
            Command::Read { .. } if slot.answers.is_hedged() => {}
            Command::Read { .. } => self.hedging.latency.read(node, us),
            Command::Write { .. } => self.hedging.latency.write(node, us),
            _ => {}
        }
    }

    /// Asks another replica for what one keeps for too long.
    pub(super) fn hedge<T: Transport>(
        &mut self,
        transport: &mut T,
        done: &mut dyn FnMut(Tag, IoResult),
    ) {
        while let Some(&Sent { piece: key, at_us }) = self.hedging.sent.front() {
            let due = self.due_for_hedge(key, at_us);
            if due == Some(false) {
                return;
            }
            self.hedging.sent.pop_front();
            let Some(piece) = self.pieces.find(key).filter(|_| due == Some(true)) else {
                continue;
            };
            let slot = &self.pieces[piece];
            let set = self.groups.set(slot.group);
            // One that began anew meanwhile has yet to answer as what it was: until then it must not be asked
            // twice.
            let untried = set.in_sync().without(slot.answers.busy());
            let Some(other) = set.nearest(untried) else {
                continue;
            };
            self.pieces[piece].answers.note_hedged();
            self.hedging.hedged_reads += 1;
            self.dispatch(piece, Members::only(other), transport);
            self.drop_slower(piece, transport);
            if self.pieces[piece].answers.are_complete() {
                self.go_on(piece, transport, done);
            }
        }
    }

    /// Whether the oldest read is to be doubled now; `None` if it needs no doubling any more.
    fn due_for_hedge(&mut self, key: Key, at_us: u64) -> Option<bool> {
        let piece = self.pieces.find(key)?;
        let slot = &self.pieces[piece];
        let waited_for = slot.answers.waiting().iter().next();
        if slot.answers.is_hedged() || waited_for.is_none() || slot.sent_us() != Some(at_us) {
            return None;
        }
        let node = self.groups.set(slot.group).members()[waited_for?].node;
        let wait = self.hedging.latency.hedge_after_us(node);
        Some(self.now_us.saturating_sub(at_us) >= wait)
    }

    /// One replica has answered a read: nobody waits for the other, if the transport can promise that it does
    /// not touch the guest's buffers any more.
    pub(super) fn drop_slower<T: Transport>(&mut self, piece: u32, transport: &mut T) {
        let answers = &self.pieces[piece].answers;
        if !answers.is_hedged() || !answers.has_answer() {
            return;
        }
        let id = RequestId(self.pieces.key(piece).0);
        let group = self.pieces[piece].group;
        for member in self.pieces[piece].answers.waiting().iter() {
            let node = self.groups.set(group).members()[member].node;
            if transport.abandon(node, id) {
                self.pieces[piece].answers.receive(member);
                self.groups.note_answered(group, member);
            }
        }
    }

    /// Reads that were asked of a second replica.
    pub fn hedged_reads(&self) -> u64 {
        self.hedging.hedged_reads
    }

    /// Says which replicas hold every write up.
    pub(super) fn report_grey(&mut self) {
        for node in self.hedging.latency.grey(self.now_us) {
            self.groups.report_slow(node, &mut self.actions);
        }
    }
}
