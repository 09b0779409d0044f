//! One end of the queue pair beside a connection: its slots, the numbering of its frames, and what is on its
//! way.
//!
//! Requests go one way and replies the other, as on the connection. Who asks has at most as many requests
//! unanswered as the peer has receives posted, and a receive is posted again before the reply to what came in
//! it: so no message finds the receiver unready, and none is about credits.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use fabric_types::checksum::crc32c;
use fabric_types::iov::{self, IoVecs, IovCursor};

use super::message::{self, Received, Scratch, Window};
use super::pair::{Body, Done, PARTS_MAX, Pair, Port, Reach, Side, WINDOWS_MAX};
use super::pairing::End;
use super::slots::{PAYLOAD_BYTES, Slot, Slots};
use crate::frame::{FrameError, Head, Key, Kind, Message, Stamp};

/// Ticks without an end of anything that it was given, after which a device is taken not to work: up to a
/// second. It gives up itself after 0.4 s, or up to four times that; the peer counts as lost after two
/// seconds in which nothing comes from it by either way, and both ends may have to find out.
pub const STILL_TICKS_MAX: u32 = 3;

/// Where the payload of a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// Nowhere, or behind windows.
    Elsewhere,
    /// In the slot's page.
    Page,
    /// In the parts of memory that were [found](QueuePairEndpoint::find) last.
    Found,
}

/// See the module.
pub struct QueuePairEndpoint {
    number: u32,
    key: Key,
    // Before the memory that it works on.
    pair: Box<dyn Pair>,
    slots: Arc<Slots>,
    send_stamp: Stamp,
    receive_stamp: Option<Stamp>,
    free: Vec<Slot>,
    /// Slots that were taken for messages to come, for each of which there is to be room.
    reserved: usize,
    /// Something is to be flushed.
    dirty: bool,
    /// Ticks since the device has told the end of something, while it has something to tell of.
    still_ticks: u32,
    scratch: Scratch,
    /// The parts of memory that were found last.
    parts: Vec<libc::iovec>,
    /// The windows that go with the next request, or that came with the one that is looked at.
    windows: Vec<Window>,
}

impl QueuePairEndpoint {
    /// The queue pair of this number, with `key` in the checksums of what it sends.
    pub fn open(port: &dyn Port, side: Side, number: u32, key: Key) -> Result<Self, String> {
        let slots = Arc::new(Slots::default());
        Ok(Self {
            number,
            key,
            pair: port.open(&slots, side)?,
            slots,
            send_stamp: Stamp::new(key),
            receive_stamp: None,
            free: Slot::sends().rev().collect(),
            reserved: 0,
            dirty: false,
            still_ticks: 0,
            scratch: Scratch::default(),
            parts: Vec::with_capacity(WINDOWS_MAX),
            windows: Vec::with_capacity(WINDOWS_MAX),
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

    /// Whether there is one, and room for a message with as many windows or READs or WRITEs as there can be.
    pub fn has_free(&self) -> bool {
        !self.free.is_empty() && self.pair.room() > 2 * WINDOWS_MAX + self.reserved
    }

    /// A slot for a message that comes later, and room for it.
    pub fn reserve(&mut self) -> Option<Slot> {
        let slot = self.take()?;
        self.reserved += 1;
        Some(slot)
    }

    /// A message for which a slot was reserved is sent now.
    pub fn keep_reserved(&mut self) {
        self.reserved -= 1;
    }

    /// A slot is free again.
    pub fn sent(&mut self, slot: Slot) {
        self.free.push(slot);
    }

    /// Copies a payload to a slot.
    ///
    /// # Safety
    /// The list and its memory are valid now. The memory may be a guest's and change: that only spoils a
    /// checksum.
    ///
    /// # Panics
    /// If it is longer than a slot's.
    pub unsafe fn bring(&mut self, slot: Slot, payload: &IoVecs, len: u32) {
        assert!(len as usize <= PAYLOAD_BYTES, "too long for a message");
        // SAFETY: the slot was taken, so neither the device nor anybody else uses it; the caller's promise.
        unsafe {
            let to = std::slice::from_raw_parts_mut(self.slots.payload(slot), len as usize);
            let list = std::slice::from_raw_parts(payload.ptr, payload.len as usize);
            iov::copy_from(list, 0, to);
        }
    }

    /// Finds the parts of memory in which the first `len` bytes of a list lie; false if the device does not
    /// reach them all, or they are more than `most`.
    ///
    /// # Safety
    /// The list is valid now.
    pub unsafe fn find(&mut self, list: &IoVecs, len: u32, most: usize) -> bool {
        self.parts.clear();
        // SAFETY: the caller's promise.
        let list = unsafe { std::slice::from_raw_parts(list.ptr, list.len as usize) };
        IovCursor::default().slice(list, len as usize, &mut self.parts);
        self.parts.len() <= most && self.parts.iter().all(|part| self.pair.reaches(part))
    }

    /// The same for a message's payload.
    ///
    /// # Safety
    /// As for [`find`](Self::find).
    pub unsafe fn find_for_message(&mut self, list: &IoVecs, len: u32) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.find(list, len, PARTS_MAX) }
    }

    /// Opens the parts that were found last to the peer, under a token; the next message tells of them. False
    /// if too much is open already.
    ///
    /// # Safety
    /// They are valid until they are [closed](Self::close), or until this is dropped.
    pub unsafe fn open_found(&mut self, reach: Reach, token: u32) -> bool {
        self.windows.clear();
        // SAFETY: the caller's promise.
        unsafe { self.pair.open(&self.parts, reach, token, &mut self.windows) }
    }

    /// The windows that were opened last.
    pub fn opened(&self) -> usize {
        self.windows.len()
    }

    /// The peer has answered. See [`Pair::close`].
    pub fn close(&mut self, token: u32, closed: Option<u32>) -> Result<bool, String> {
        self.dirty = true;
        self.pair.close(token, closed)
    }

    /// Sends a request from a slot that was taken, with the windows that were opened for it.
    ///
    /// # Safety
    /// Parts that were found are valid until it is told as sent, if the payload is there.
    pub unsafe fn send_request(&mut self, slot: Slot, message: &Message<'_>, load: Load) {
        let windows = std::mem::take(&mut self.windows);
        // SAFETY: the caller's promise.
        unsafe { self.send(slot, message, &windows, load, None) };
        self.windows = windows;
        self.windows.clear();
    }

    /// Sends a reply from a slot that was taken, which closes a key of the peer's. Its payload lies in the
    /// slot, or was [written](Self::write).
    pub fn send_reply(
        &mut self,
        slot: Slot,
        message: &Message<'_>,
        load: Load,
        closes: Option<u32>,
    ) {
        assert_ne!(load, Load::Found, "replies are gathered from nowhere");
        // SAFETY: no parts.
        unsafe { self.send(slot, message, &[], load, closes) };
    }

    unsafe fn send(
        &mut self,
        slot: Slot,
        message: &Message<'_>,
        windows: &[Window],
        load: Load,
        closes: Option<u32>,
    ) {
        let place = (&*self.slots, slot);
        if load == Load::Page {
            // The head of a message with a payload inside leaves the page alone: it is short.
            assert!(windows.is_empty() && message.crcs.len() <= 2);
        }
        // SAFETY: the slot was taken, so neither the device nor anybody else uses it.
        let in_page = unsafe {
            message::write(
                message,
                windows,
                &mut self.send_stamp,
                place,
                &mut self.scratch,
            )
        };
        let body = match load {
            Load::Elsewhere => Body::Page(in_page),
            Load::Page => Body::Page(message.payload_len),
            Load::Found => Body::Parts(&self.parts),
        };
        assert!(load == Load::Elsewhere || in_page == 0, "a long head");
        // SAFETY: the caller's promise.
        unsafe { self.pair.send(slot, body, closes) };
        self.dirty = true;
    }

    /// Sends a message as large as any, with nothing to say: one each way proves that the queue pair works.
    /// Only heads that are acknowledged would not show that packets of full size get lost.
    pub fn send_probe(&mut self) {
        let Some(slot) = self.take() else {
            return;
        };
        // SAFETY: the slot was taken, so neither the device nor anybody else uses it.
        let crc = unsafe { crc32c(self.slots.page(slot)) };
        let message = Message {
            kind: Kind::Alive,
            pair: 0,
            header: &[],
            crcs: &[crc],
            payload_len: PAYLOAD_BYTES as u32,
            room: 0,
            skip: 0,
        };
        // SAFETY: no parts.
        unsafe { self.send(slot, &message, &[], Load::Page, None) };
    }

    /// Whether a message is a [probe](Self::send_probe), as it was sent.
    ///
    /// # Safety
    /// Its slot was not posted again.
    pub unsafe fn is_probe(&self, received: &Received) -> bool {
        let Head {
            kind, payload_len, ..
        } = received.head;
        // SAFETY: the caller's promise.
        unsafe {
            let page = self.slots.page(received.slot);
            let list = [libc::iovec {
                iov_base: page.as_ptr().cast_mut().cast(),
                iov_len: page.len(),
            }];
            kind == Kind::Alive
                && received.is_inside
                && payload_len as usize == PAYLOAD_BYTES
                && received.is_intact(&self.slots, &list)
        }
    }

    /// Has a slot receive once more.
    pub fn receive(&mut self, slot: Slot) {
        self.pair.receive(slot);
        self.dirty = true;
    }

    /// Reads the message that was received in a slot.
    pub fn read_message(&mut self, slot: Slot, len: u32) -> Result<Received, FrameError> {
        let stamp = self.receive_stamp.as_mut();
        let stamp = stamp.ok_or(FrameError::Field("kind"))?;
        // SAFETY: it was received, and is posted again only by `receive`.
        unsafe { message::read(&self.slots, slot, len, stamp) }
    }

    /// Has the peer's windows of a request read one after the other to a place. [`Done::Read`] tells of it.
    /// So many READs.
    ///
    /// # Safety
    /// The slot of the request was not posted again. The place is open to the device, has room for all of
    /// them and is valid until then, or until this is dropped, and nobody else uses it.
    pub unsafe fn read(&mut self, to: NonNull<u8>, request: &Received, token: u32) -> usize {
        // SAFETY: the caller's promise.
        unsafe {
            request.windows(&self.slots, &mut self.windows);
            self.pair.read(to, &self.windows, token);
        }
        self.dirty = true;
        self.windows.len()
    }

    /// Writes a reply's payload of `len` bytes, as many as they have, to the windows of its request, before
    /// the reply itself. So many WRITEs.
    ///
    /// # Safety
    /// The slot of the request was not posted again. The place is open to the device and valid until the
    /// reply is told as sent, or until this is dropped, and nobody writes there meanwhile.
    pub unsafe fn write(&mut self, from: NonNull<u8>, len: u32, request: &Received) -> usize {
        // SAFETY: the caller's promise.
        unsafe {
            request.windows(&self.slots, &mut self.windows);
            self.pair.write(from, len, &self.windows);
        }
        self.dirty = true;
        self.windows.len()
    }

    /// The windows of a request.
    ///
    /// # Safety
    /// Its slot was not posted again.
    pub unsafe fn windows_of(&mut self, request: &Received) -> &[Window] {
        // SAFETY: the caller's promise.
        unsafe { request.windows(&self.slots, &mut self.windows) };
        &self.windows
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
        let from = done.len();
        let polled = self.pair.poll(done);
        let is_end = |done: &Done| !matches!(done, Done::Received { .. });
        if done[from..].iter().any(is_end) {
            self.still_ticks = 0;
        }
        polled
    }

    /// Time passes. `Err`, for people, if the device tells of nothing any more.
    pub fn tick(&mut self) -> Result<(), String> {
        self.still_ticks = match self.pair.is_busy() {
            true => self.still_ticks + 1,
            false => 0,
        };
        match self.still_ticks > STILL_TICKS_MAX {
            true => Err("the device does not tell what has become of what was sent".to_owned()),
            false => Ok(()),
        }
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
