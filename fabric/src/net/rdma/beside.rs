//! One end of the queue pair beside a connection: its slots, the numbering of its frames, and what is on its way.
//!
//! Requests go one way and replies the other, as on the connection. Who asks has at most as many requests unanswered as the peer has receives posted, and
//! a receive is posted again before the reply to what came in it: so no message finds the receiver unready, and none is about credits.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::message;
use super::pair::{Done, Pair, Port};
use super::pairing::End;
use super::slots::{Slot, Slots};
use crate::net::tcp::frame::{FrameError, Key, Message, Stamp};
use crate::store::device::IoVecs;
use crate::store::iov;

/// See the module.
pub struct Beside {
    number: u32,
    key: Key,
    // Before the memory that it works on.
    pair: Box<dyn Pair>,
    slots: Arc<Slots>,
    send_stamp: Stamp,
    receive_stamp: Option<Stamp>,
    free: Vec<Slot>,
    /// Something is to be flushed.
    dirty: bool,
    scratch: Vec<u8>,
}

impl Beside {
    /// The queue pair of this number, with `key` in the checksums of what it sends.
    pub fn open(port: &dyn Port, number: u32, key: Key) -> Result<Self, String> {
        let slots = Arc::new(Slots::default());
        Ok(Self {
            number,
            key,
            pair: port.open(&slots)?,
            slots,
            send_stamp: Stamp::new(key),
            receive_stamp: None,
            free: Slot::sends().rev().collect(),
            dirty: false,
            scratch: Vec::with_capacity(super::slots::HEAD_BYTES),
        })
    }

    /// Which of its connection it is.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// What the peer is told of this end.
    pub fn end(&self) -> End {
        End {
            key: self.key,
            ..self.pair.end()
        }
    }

    /// Connects it with the peer's.
    pub fn connect(&mut self, peer: &End) -> Result<(), String> {
        self.receive_stamp = Some(Stamp::new(peer.key));
        self.pair.connect(peer)
    }

    /// The memory; whoever works on a slot holds it.
    pub fn slots(&self) -> &Arc<Slots> {
        &self.slots
    }

    /// A slot to send from, until [`sent`](Self::sent).
    pub fn take(&mut self) -> Option<Slot> {
        self.free.pop()
    }

    /// Whether there is one.
    pub fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// A slot is free again.
    pub fn sent(&mut self, slot: Slot) {
        self.free.push(slot);
    }

    /// Copies a payload to a slot.
    ///
    /// # Safety
    /// The list and its memory are valid now. The memory may be a guest's and change: that only spoils a checksum.
    ///
    /// # Panics
    /// If it is longer than a slot's.
    pub unsafe fn bring(&mut self, slot: Slot, payload: &IoVecs, len: u32) {
        assert!(
            len as usize <= super::slots::PAYLOAD_BYTES,
            "too long for a message"
        );
        // SAFETY: the slot was taken, so neither the device nor anybody else uses it; the caller's promise.
        unsafe {
            let to = std::slice::from_raw_parts_mut(self.slots.payload(slot), len as usize);
            let list = std::slice::from_raw_parts(payload.ptr, payload.len as usize);
            iov::copy_from(list, 0, to);
        }
    }

    /// Sends a message from a slot that was taken, with the payload that lies in it.
    pub fn send(&mut self, slot: Slot, message: &Message<'_>) {
        // SAFETY: the slot was taken, so neither the device nor anybody else uses it.
        unsafe {
            message::write(
                message,
                &mut self.send_stamp,
                &self.slots,
                slot,
                &mut self.scratch,
            );
        }
        self.pair.send(slot, message.payload_len);
        self.dirty = true;
    }

    /// Has a slot receive once more.
    pub fn receive(&mut self, slot: Slot) {
        self.pair.receive(slot);
        self.dirty = true;
    }

    /// Reads the message that was received in a slot.
    pub fn read(&mut self, slot: Slot, len: u32) -> Result<message::Received, FrameError> {
        let stamp = self.receive_stamp.as_mut();
        let stamp = stamp.ok_or(FrameError::Field("kind"))?;
        // SAFETY: it was received, and is posted again only by `receive`.
        unsafe { message::read(&self.slots, slot, len, stamp) }
    }

    /// Hands to the device what is to be sent and received.
    pub fn flush(&mut self) -> Result<(), String> {
        match std::mem::take(&mut self.dirty) {
            true => self.pair.flush(),
            false => Ok(()),
        }
    }

    /// See [`Pair::poll`].
    pub fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), String> {
        self.pair.poll(done)
    }

    /// See [`Pair::end_all`].
    pub fn end_all(&mut self, done: &mut Vec<Done>) -> bool {
        self.pair.end_all(done)
    }

    /// See [`Pair::arm`].
    pub fn arm(&mut self) -> Result<(), String> {
        self.pair.arm()
    }

    /// See [`Pair::heard`].
    pub fn heard(&mut self) {
        self.pair.heard();
    }

    /// See [`Pair::wait_fd`].
    pub fn wait_fd(&self) -> BorrowedFd<'_> {
        self.pair.wait_fd()
    }
}
