//! A queue pair as connections use it, so that what stands above it runs without a device, too.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use fabric_types::registrar::Registered;

use super::message::Window;
use super::pairing::End;
use super::regions::RegionCounts;
use super::slots::{Slot, Slots};

/// Which end of a connection a queue pair is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The one that asks, and opens its memory to the other for the time of a request.
    Asks,
    /// The one that is asked, and reads and writes what is opened to it.
    ReceivedRequest,
}

/// What the peer may do with memory that is opened to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// Read it.
    Read,
    /// Write it.
    Write,
}

/// Where queue pairs are made: a device's port.
pub trait Port: Send + Sync {
    /// A queue pair over this memory, with all its receives posted. `Err` says why not, for people.
    fn open(&self, slots: &Arc<Slots>, side: Side) -> Result<Box<dyn Pair>, String>;

    /// Opens memory to the device, so that what lies in it is sent, read and written without a copy. `Err`
    /// says why not, for people.
    ///
    /// # Safety
    /// The memory stays mapped as it is until what is returned is dropped. The device reads and writes it at
    /// the word of [`Pair`]'s callers: nobody has a reference to bytes that they have it write then, nor an
    /// exclusive one to bytes that they have it read.
    unsafe fn register(&self, start: NonNull<u8>, bytes: usize) -> Result<Registered, String>;

    /// How much is open.
    fn counts(&self) -> RegionCounts;
}

/// Whether a node's connections have queue pairs beside them.
#[derive(Clone)]
pub enum Offered {
    /// They have none, and why, for people.
    No(String),
    /// They are made here.
    Port(Arc<dyn Port>),
}

impl std::fmt::Debug for Offered {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::No(reason) => formatter.debug_tuple("No").field(reason).finish(),
            Self::Port(_) => formatter.write_str("Port"),
        }
    }
}

/// What has happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Done {
    /// The message from this slot has arrived at the peer, with all that was written before it, and the slot
    /// is free.
    Sent(Slot),
    /// A message has arrived.
    Received {
        /// Where.
        slot: Slot,
        /// Its bytes.
        len: u32,
        /// The key of ours that it has closed.
        closed: Option<u32>,
    },
    /// What was to be read under this token is there.
    Read(u32),
    /// What was opened under this token is closed.
    Closed(u32),
}

/// What is sent besides the head of a slot.
#[derive(Clone, Copy)]
pub enum Body<'a> {
    /// So many bytes of the slot's page.
    Page(u32),
    /// What lies in these parts of memory, each [open](Pair::reaches) to the device; [`PARTS_MAX`] at most.
    Parts(&'a [libc::iovec]),
}

/// Most parts of memory from which one message is gathered.
pub const PARTS_MAX: usize = 4;
/// Most windows of one request.
pub const WINDOWS_MAX: usize = 16;

/// A reliable connected queue pair. What is not connected yet takes receives only. Dropping it ends all that
/// is posted; nothing is open to the peer from then on.
///
/// What is asked for goes to the device with the next [`flush`](Self::flush), in order.
pub trait Pair: Send {
    /// This end. The key is not told here.
    fn end(&self) -> End;

    /// Connects it with the other end. `Err` says why not, for people; it is then of no more use.
    fn connect(&mut self, peer: &End) -> Result<(), String>;

    /// Work requests for which there is room: one for each message, READ and WRITE, for each window that is
    /// bound, and for each that is closed here.
    fn room(&self) -> usize;

    /// Whether it was given work whose end it has not told of.
    fn is_busy(&self) -> bool;

    /// Whether all of this lies in one piece of memory that is open to the device.
    fn reaches(&mut self, part: &libc::iovec) -> bool;

    /// Has this slot receive once more.
    fn receive(&mut self, slot: Slot);

    /// Sends the slot's head and a body, and closes a key of the peer's. The slot and the body are not
    /// touched until it is told as sent.
    ///
    /// # Safety
    /// Parts are valid until then, or until this is dropped. They may change meanwhile.
    unsafe fn send(&mut self, slot: Slot, body: Body<'_>, closes: Option<u32>);

    /// Opens these parts to the peer under a token that is not in use, and appends their windows; false if
    /// there are not enough. The first is closed by the peer's message, the others with
    /// [`close`](Self::close).
    ///
    /// # Safety
    /// Parts are valid until they are closed, or until this is dropped.
    unsafe fn open(
        &mut self,
        parts: &[libc::iovec],
        reach: Reach,
        token: u32,
        windows: &mut Vec<Window>,
    ) -> bool;

    /// The peer's message that closes the first window has come. True if that was all; else [`Done::Closed`]
    /// tells when the others are closed, too. `Err`: it has closed another one, or none.
    fn close(&mut self, token: u32, closed: Option<u32>) -> Result<bool, String>;

    /// Reads the peer's windows one after the other to this place, which is open to the device.
    /// [`Done::Read`] tells when it is done.
    ///
    /// # Safety
    /// The place has room for all of them and is valid until then, or until this is dropped, and nobody else
    /// uses it.
    unsafe fn read(&mut self, to: NonNull<u8>, windows: &[Window], token: u32);

    /// Writes from this place, which is open to the device, to the peer's windows one after the other, as far
    /// as `len` bytes go.
    ///
    /// # Safety
    /// The place is valid until the next message is told as sent, or until this is dropped, and nobody writes
    /// there meanwhile.
    unsafe fn write(&mut self, from: NonNull<u8>, len: u32, windows: &[Window]);

    /// Hands everything to the device: first the receives. `Err` says why it has failed.
    fn flush(&mut self) -> Result<(), String>;

    /// Takes up what has happened. `Err` says why it has failed; what happened before stands in `done` all
    /// the same.
    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), String>;

    /// Ends it, and takes up what had happened before. True if it is certain that this is all: then nothing
    /// that arrived is missing.
    fn end_all(&mut self, done: &mut Vec<Done>) -> bool;

    /// Makes [`wait_fd`](Self::wait_fd) readable with what happens next; what happened meanwhile is to be
    /// polled once more.
    fn arm(&mut self) -> Result<(), String>;

    /// The descriptor was readable.
    fn heard(&mut self);

    /// See [`arm`](Self::arm).
    fn wait_fd(&self) -> BorrowedFd<'_>;
}
