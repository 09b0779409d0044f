//! What the connecting thread tells a data thread, and what it is asked.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use rustix::event::{EventfdFlags, eventfd};

use super::handshake::Established;
use crate::proto::NodeId;

/// To a data thread.
pub enum InboxMessage {
    /// It reached the node: the connection is the data thread's from now on.
    Connected(NodeId, OwnedFd, Box<Established>),
    /// It did not, and goes on trying.
    Unreachable(NodeId),
    /// The node has no address any more.
    Unknown(NodeId),
    /// A node connected to us.
    Accepted(OwnedFd, Box<Established>),
}

/// An eventfd that is written once until it is read.
pub struct EventFd {
    fd: OwnedFd,
    rung: AtomicBool,
}

impl EventFd {
    /// An eventfd that is not readable.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            rung: AtomicBool::new(false),
        })
    }

    /// Makes the descriptor readable.
    pub fn ring(&self) {
        if !self.rung.swap(true, Ordering::AcqRel) {
            // Fails only if the counter is full, and then it is readable, too.
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }

    /// True if it was rung since it was last heard.
    #[inline]
    pub fn is_signalled(&self) -> bool {
        self.rung.load(Ordering::Acquire)
    }

    /// Silences it, before what it was rung for is looked at.
    pub fn clear(&self) {
        let mut count = [0u8; 8];
        // Not while the ring of the one who set the flag is yet to come: it would stay readable with nothing
        // to say.
        if rustix::io::read(&self.fd, &mut count).is_ok() {
            self.rung.store(false, Ordering::Release);
        }
    }

    /// Readable while rung.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A data thread's letters.
pub struct Inbox {
    messages: Mutex<Vec<InboxMessage>>,
    /// Rung for letters, and by the data thread for itself when it has more to do.
    pub eventfd: EventFd,
    /// Connections that it serves, or that are on their way to it.
    pub served: AtomicU32,
}

impl Inbox {
    /// No letters.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            messages: Mutex::new(Vec::new()),
            eventfd: EventFd::new()?,
            served: AtomicU32::new(0),
        })
    }

    /// Posts a letter. Bounded by the peers dialed for the thread, and by how many connections it serves.
    pub fn post(&self, message: InboxMessage) {
        let mut messages = self.messages.lock().expect("no panic under this lock");
        messages.push(message);
        drop(messages);
        self.eventfd.ring();
    }

    /// Takes all letters.
    pub fn open(&self) -> Vec<InboxMessage> {
        self.eventfd.clear();
        std::mem::take(&mut *self.messages.lock().expect("no panic under this lock"))
    }
}
