//! What the two ends of queue pairs beside connections have in common in a lane.

use super::*;
use crate::queue_pair::endpoint::QueuePairEndpoint;
use crate::queue_pair::pair::Done;

/// Bytes of [`Pairs::bounces`].
const BOUNCE_BYTES: usize = 16 << 20;

/// What a lane has for its queue pairs.
pub(super) struct Pairs {
    /// Connections that have one beside them.
    links: Vec<u32>,
    /// Messages that came by one wait for room.
    pub wait: bool,
    /// What has come by one; kept for its memory.
    pub done: Vec<Done>,
    /// Memory for data of this node's requests that is not open to the device. Of its own: while a peer waits
    /// for memory of the other pool, the request that it serves needs none of that.
    pub bounces: Pool,
}

impl Default for Pairs {
    fn default() -> Self {
        Self {
            links: Vec::new(),
            wait: false,
            done: Vec::new(),
            bounces: Pool::new(BOUNCE_BYTES),
        }
    }
}

impl Pairs {
    /// The connection has none any more.
    pub fn remove(&mut self, index: u32) {
        self.links.retain(|link| *link != index);
    }
}

fn endpoint_of(link: &mut Link) -> Option<&mut QueuePairEndpoint> {
    match (&mut link.requester, &mut link.pair_responder) {
        (Some(requester), _) => requester.endpoint(),
        (_, Some(pair_responder)) => pair_responder.endpoint(),
        _ => None,
    }
}

impl Lane {
    fn endpoint(&mut self, index: u32) -> Option<&mut QueuePairEndpoint> {
        self.links[index].as_deref_mut().and_then(endpoint_of)
    }

    /// A queue pair is there: it is looked at in each turn, and wakes the thread.
    pub(super) fn watch_pair(&mut self, index: u32) {
        self.pairs.links.push(index);
        let Some(endpoint) = self.links[index].as_deref_mut().and_then(endpoint_of) else {
            return;
        };
        self.readiness.add_pair(endpoint.wait_fd());
    }

    /// The peer's words about queue pairs; true if there were any.
    pub(super) fn take_pairings(&mut self, index: u32) -> Result<bool, LinkError> {
        let mut any = false;
        while let Some(link) = self.links[index].as_deref_mut() {
            match &mut link.end {
                End::Caller(_, caller) => match caller.next_pairing() {
                    Some(told) => self.requester_notified(index, told)?,
                    None => return Ok(any),
                },
                End::Responder(responder) => match responder.next_pairing() {
                    Some(told) => self.responder_notified(index, told)?,
                    None => return Ok(any),
                },
            }
            any = true;
        }
        Ok(any)
    }

    /// Takes in what has come by queue pairs; true if there was something.
    pub(super) fn poll_pairs(&mut self) -> bool {
        self.pairs.wait = false;
        // Each is the first in turn: those that wait for memory share what becomes free.
        if self.pairs.links.len() > 1 {
            self.pairs.links.rotate_left(1);
        }
        let mut busy = false;
        let mut at = 0;
        while let Some(&index) = self.pairs.links.get(at) {
            let is_caller = self.links[index]
                .as_deref()
                .is_some_and(|link| link.requester.is_some());
            busy |= match is_caller {
                true => self.poll_requester(index),
                false => self.poll_responder(index),
            };
            // If it is over, another one has its place.
            at += usize::from(self.pairs.links.get(at) == Some(&index));
        }
        busy
    }

    /// Something has told of itself by the descriptor of a queue pair.
    pub(super) fn pairs_heard(&mut self) {
        for at in 0..self.pairs.links.len() {
            if let Some(endpoint) = self.endpoint(self.pairs.links[at]) {
                endpoint.heard();
            }
        }
    }

    /// Nothing was there: has the descriptors tell what comes next. True if something came meanwhile.
    pub(super) fn arm_pairs(&mut self) -> bool {
        let mut failed = Vec::new();
        for at in 0..self.pairs.links.len() {
            let index = self.pairs.links[at];
            let armed = self.endpoint(index).map_or(Ok(()), QueuePairEndpoint::arm);
            if let Err(reason) = armed {
                failed.push((index, reason));
            }
        }
        for (index, reason) in failed {
            self.tear(index, &reason);
        }
        !self.pairs.links.is_empty() && self.poll_pairs()
    }

    /// Hands to the device what is to be sent.
    pub(super) fn flush_pair(&mut self, index: u32) {
        let flushed = self
            .endpoint(index)
            .map_or(Ok(()), QueuePairEndpoint::flush);
        if let Err(reason) = flushed {
            self.tear(index, &reason);
        }
    }

    /// Time passes. A device that tells of nothing costs the queue pair, before it costs the connection.
    pub(super) fn tick_pair(&mut self, index: u32) {
        let ticked = self.endpoint(index).map_or(Ok(()), QueuePairEndpoint::tick);
        if let Err(reason) = ticked {
            self.tear(index, &reason);
            // At once: others may have failed with it, and to end each takes a while.
            self.kick();
        }
    }

    pub(super) fn tear(&mut self, index: u32, reason: &str) {
        let is_caller = self.links[index]
            .as_deref()
            .is_some_and(|link| link.requester.is_some());
        let outcome = match is_caller {
            true => self.tear_requester(index, reason),
            false => self.tear_responder(index, reason, true),
        };
        if let Err(error) = outcome {
            self.lose(index, &error);
        }
    }

    /// By which way requests to a node go from now on, and why not by RDMA.
    pub(super) fn tell_way(&self, node: NodeId, way: Result<(), String>) {
        let before = self.control.peer_routes.set(self.index, node, way.clone());
        match (&way, before) {
            (Ok(()), _) => tracing::info!(%node, "data go over RDMA"),
            (Err(reason), Some(Ok(()))) => tracing::info!(%node, reason, "all goes over TCP"),
            (Err(reason), _) => tracing::debug!(%node, reason, "all goes over TCP"),
        }
    }
}
