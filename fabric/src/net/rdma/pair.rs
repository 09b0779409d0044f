//! A queue pair as connections use it, so that what stands above it runs without a device, too.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::pairing::End;
use super::slots::{Slot, Slots};

/// Where queue pairs are made: a device's port.
pub trait Port: Send + Sync {
    /// A queue pair over this memory, with all its receives posted. `Err` says why not, for people.
    fn open(&self, slots: &Arc<Slots>) -> Result<Box<dyn Pair>, String>;
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
    /// The message from this slot has arrived at the peer, and the slot is free.
    Sent(Slot),
    /// A message has arrived in this slot, of so many bytes.
    Received(Slot, u32),
}

/// A reliable connected queue pair. What is not connected yet takes receives only. Dropping it ends all that is posted.
pub trait Pair: Send {
    /// This end. The key is not told here.
    fn end(&self) -> End;

    /// Connects it with the other end. `Err` says why not, for people; it is then of no more use.
    fn connect(&mut self, peer: &End) -> Result<(), String>;

    /// Has this slot receive once more, with the next [`flush`](Self::flush).
    fn receive(&mut self, slot: Slot);

    /// Sends the slot's head and so many bytes of its payload, with the next [`flush`](Self::flush). It is not touched until it is told as sent.
    fn send(&mut self, slot: Slot, payload_len: u32);

    /// Hands everything to the device: first the receives. `Err` says why it has failed.
    fn flush(&mut self) -> Result<(), String>;

    /// Takes up what has happened. `Err` says why it has failed; what happened before stands in `done` all the same.
    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), String>;

    /// Ends it, and takes up what had happened before. True if it is certain that this is all: then nothing that arrived is missing.
    fn end_all(&mut self, done: &mut Vec<Done>) -> bool;

    /// Makes [`wait_fd`](Self::wait_fd) readable with what happens next; what happened meanwhile is to be polled once more.
    fn arm(&mut self) -> Result<(), String>;

    /// The descriptor was readable.
    fn heard(&mut self);

    /// See [`arm`](Self::arm).
    fn wait_fd(&self) -> BorrowedFd<'_>;
}
