//! What the two ends of queue pairs beside connections have in common in a lane.

use super::*;
use crate::net::rdma::beside::Beside;

fn beside_of(link: &mut Link) -> Option<&mut Beside> {
    match (&mut link.asker, &mut link.answerer) {
        (Some(asker), _) => asker.beside(),
        (_, Some(answerer)) => answerer.beside(),
        _ => None,
    }
}

impl Lane {
    fn beside(&mut self, index: u32) -> Option<&mut Beside> {
        self.links[index].as_deref_mut().and_then(beside_of)
    }

    /// A queue pair is there: it is looked at in each turn, and wakes the thread.
    pub(super) fn watch_pair(&mut self, index: u32) {
        self.paired.push(index);
        let Some(beside) = self.links[index].as_deref_mut().and_then(beside_of) else {
            return;
        };
        let data = EventData::new_u64(PAIRS);
        if let Err(error) = epoll::add(&self.epoll, beside.wait_fd(), data, EventFlags::IN) {
            tracing::error!(%error, "cannot watch a queue pair");
        }
    }

    /// The peer's words about queue pairs; true if there were any.
    pub(super) fn take_pairings(&mut self, index: u32) -> Result<bool, LinkError> {
        let mut any = false;
        while let Some(link) = self.links[index].as_deref_mut() {
            match &mut link.end {
                End::Caller(_, caller) => match caller.next_pairing() {
                    Some(told) => self.asker_told(index, told)?,
                    None => return Ok(any),
                },
                End::Responder(responder) => match responder.next_pairing() {
                    Some(told) => self.answerer_told(index, told)?,
                    None => return Ok(any),
                },
            }
            any = true;
        }
        Ok(any)
    }

    /// Takes in what has come by queue pairs; true if there was something.
    pub(super) fn poll_pairs(&mut self) -> bool {
        self.pairs_wait = false;
        // Each is the first in turn: those that wait for memory share what becomes free.
        if self.paired.len() > 1 {
            self.paired.rotate_left(1);
        }
        let mut busy = false;
        let mut at = 0;
        while let Some(&index) = self.paired.get(at) {
            let is_caller = self.links[index]
                .as_deref()
                .is_some_and(|link| link.asker.is_some());
            busy |= match is_caller {
                true => self.poll_asker(index),
                false => self.poll_answerer(index),
            };
            // If it is over, another one has its place.
            at += usize::from(self.paired.get(at) == Some(&index));
        }
        busy
    }

    /// Something has told of itself by the descriptor of a queue pair.
    pub(super) fn pairs_heard(&mut self) {
        for at in 0..self.paired.len() {
            if let Some(beside) = self.beside(self.paired[at]) {
                beside.heard();
            }
        }
    }

    /// Nothing was there: has the descriptors tell what comes next. True if something came meanwhile.
    pub(super) fn arm_pairs(&mut self) -> bool {
        let mut failed = Vec::new();
        for at in 0..self.paired.len() {
            let index = self.paired[at];
            let armed = self.beside(index).map_or(Ok(()), Beside::arm);
            if let Err(reason) = armed {
                failed.push((index, reason));
            }
        }
        for (index, reason) in failed {
            self.tear(index, &reason);
        }
        !self.paired.is_empty() && self.poll_pairs()
    }

    /// Hands to the device what is to be sent.
    pub(super) fn flush_pair(&mut self, index: u32) {
        let flushed = self.beside(index).map_or(Ok(()), Beside::flush);
        if let Err(reason) = flushed {
            self.tear(index, &reason);
        }
    }

    /// Time passes. A device that tells of nothing costs the queue pair, before it costs the connection.
    pub(super) fn tick_pair(&mut self, index: u32) {
        let ticked = self.beside(index).map_or(Ok(()), Beside::tick);
        if let Err(reason) = ticked {
            self.tear(index, &reason);
            // At once: others may have failed with it, and to end each takes a while.
            self.kick();
        }
    }

    pub(super) fn tear(&mut self, index: u32, reason: &str) {
        let is_caller = self.links[index]
            .as_deref()
            .is_some_and(|link| link.asker.is_some());
        let outcome = match is_caller {
            true => self.tear_asker(index, reason),
            false => self.tear_answerer(index, reason, true),
        };
        if let Err(error) = outcome {
            self.lose(index, &error);
        }
    }

    /// By which way requests to a node go from now on, and why not by RDMA.
    pub(super) fn tell_way(&self, node: NodeId, way: Result<(), String>) {
        let before = self.control.ways.set(self.index, node, way.clone());
        match (&way, before) {
            (Ok(()), _) => tracing::info!(%node, "data go over RDMA"),
            (Err(reason), Some(Ok(()))) => tracing::info!(%node, reason, "all goes over TCP"),
            (Err(reason), _) => tracing::debug!(%node, reason, "all goes over TCP"),
        }
    }
}
