//! Frames out, bytes out: the sending half of a connection, without the socket.
//!
//! Heads are encoded when they are queued; payloads stay where they are and are named in the list that
//! [`SendQueue::gather`] gives, so that all that was queued in a turn is one `writev`. Bounded by the credits
//! of whoever queues.

use std::collections::VecDeque;

use fabric_types::iov::{IoVecs, IovCursor};

use super::frame::{Key, Kind, Message, Stamp};
use crate::queue_pair::pairing::Pairing;

/// Used-up heads are dropped from the front when they are so many bytes.
const SPENT_BYTES: usize = 64 << 10;

enum Part {
    /// So many bytes of `heads`.
    Heads(usize),
    /// A payload.
    Memory { list: IoVecs, len: usize },
}

/// The queue.
pub struct SendQueue {
    stamp: Stamp,
    heads: Vec<u8>,
    /// Bytes of `heads` that are sent.
    spent: usize,
    parts: VecDeque<Part>,
    /// Bytes of the first part that are sent.
    skip: usize,
    queued: u64,
    sent: u64,
}

// SAFETY: the lists describe memory that whoever queued a payload keeps valid, on whatever thread.
unsafe impl Send for SendQueue {}

impl SendQueue {
    /// For the first frame under this key.
    pub fn new(key: Key) -> Self {
        Self {
            stamp: Stamp::new(key),
            heads: Vec::new(),
            spent: 0,
            parts: VecDeque::new(),
            skip: 0,
            queued: 0,
            sent: 0,
        }
    }

    /// Queues a frame; returns the position of its end, which [`sent`](Self::sent) reaches when it is out.
    ///
    /// # Safety
    /// The list and the memory hold the payload and stay valid until then, or until the queue is dropped. The
    /// memory may be a guest's and change.
    pub unsafe fn push(&mut self, message: &Message<'_>, payload: Option<IoVecs>) -> u64 {
        let before = self.heads.len();
        message.encode(&mut self.stamp, &mut self.heads);
        let head = self.heads.len() - before;
        match self.parts.back_mut() {
            Some(Part::Heads(len)) => *len += head,
            _ => self.parts.push_back(Part::Heads(head)),
        }
        let len = message.payload_len as usize;
        if let Some(list) = payload.filter(|_| len > 0) {
            self.parts.push_back(Part::Memory { list, len });
        }
        self.queued += (head + len) as u64;
        self.queued
    }

    /// Queues what is told of the queue pair beside the connection.
    pub fn push_pairing(&mut self, pairing: &Pairing) {
        let header = pairing.encode();
        let message = Message {
            kind: Kind::Pairing,
            pair: 0,
            header: &header,
            crcs: &[],
            payload_len: 0,
            room: 0,
            skip: 0,
        };
        // SAFETY: there is no payload.
        unsafe { self.push(&message, None) };
    }

    /// True if nothing is to be sent.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Bytes sent so far.
    #[inline]
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Appends what is to be sent next, up to `most` elements.
    pub fn gather(&self, out: &mut Vec<libc::iovec>, most: usize) {
        let (mut at, mut skip) = (self.spent, self.skip);
        for part in &self.parts {
            match part {
                Part::Heads(len) => {
                    let bytes = &self.heads[at..at + len - skip];
                    out.push(libc::iovec {
                        iov_base: bytes.as_ptr().cast_mut().cast(),
                        iov_len: bytes.len(),
                    });
                    at += bytes.len();
                }
                Part::Memory { list, len } => {
                    // SAFETY: `push`'s promise.
                    let list = unsafe { std::slice::from_raw_parts(list.ptr, list.len as usize) };
                    let mut cursor = IovCursor::default();
                    cursor.seek(list, skip);
                    cursor.slice(list, len - skip, out);
                }
            }
            skip = 0;
            if out.len() >= most {
                out.truncate(most);
                return;
            }
        }
    }

    /// So many of the bytes that `gather` named are out.
    pub fn advance(&mut self, bytes: usize) {
        self.sent += bytes as u64;
        let mut left = bytes;
        while left > 0 {
            let part = self.parts.front().expect("no more is sent than was queued");
            let (Part::Heads(len) | Part::Memory { len, .. }) = part;
            let step = left.min(len - self.skip);
            if let Part::Heads(_) = part {
                self.spent += step;
            }
            self.skip += step;
            left -= step;
            if self.skip == *len {
                self.parts.pop_front();
                self.skip = 0;
            }
        }
        if self.parts.is_empty() {
            self.heads.clear();
            self.spent = 0;
        } else if self.spent >= SPENT_BYTES {
            self.heads.drain(..self.spent);
            self.spent = 0;
        }
    }
}
