//! Messages from the connector to a data thread, and the eventfd that wakes it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use fabric_types::NodeId;
use rustix::event::{EventfdFlags, eventfd};

use super::handshake::Established;

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
    signalled: AtomicBool,
}

impl EventFd {
    /// An eventfd that is not readable.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            signalled: AtomicBool::new(false),
        })
    }

    /// Makes the descriptor readable.
    pub fn signal(&self) {
        if !self.signalled.swap(true, Ordering::AcqRel) {
            // Fails only if the counter is full, and then it is readable, too.
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }

    /// True if it was signalled since it was last cleared.
    #[inline]
    pub fn is_signalled(&self) -> bool {
        self.signalled.load(Ordering::Acquire)
    }

    /// Clears it. To be called before the data that it announces are read.
    pub fn clear(&self) {
        let mut count = [0u8; 8];
        // If the read fails, the write of whoever set the flag is still to come: the flag stays set, so that
        // the descriptor is cleared then.
        if rustix::io::read(&self.fd, &mut count).is_ok() {
            self.signalled.store(false, Ordering::Release);
        }
    }

    /// Readable while it is signalled.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Messages of the connector that a data thread has yet to take.
pub struct Inbox {
    messages: Mutex<Vec<InboxMessage>>,
    /// Signalled for messages, and by the data thread for itself when it has more to do.
    pub eventfd: EventFd,
    /// Connections that it serves, or that are on their way to it.
    pub served: AtomicU32,
}

impl Inbox {
    /// An empty inbox.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            messages: Mutex::new(Vec::new()),
            eventfd: EventFd::new()?,
            served: AtomicU32::new(0),
        })
    }

    /// Adds a message and wakes the data thread. Bounded by the peers dialed for the thread, and by how many
    /// connections it serves.
    pub fn post(&self, message: InboxMessage) {
        let mut messages = self.messages.lock().expect("no panic under this lock");
        messages.push(message);
        drop(messages);
        self.eventfd.signal();
    }

    /// Takes all messages.
    pub fn open(&self) -> Vec<InboxMessage> {
        self.eventfd.clear();
        std::mem::take(&mut *self.messages.lock().expect("no panic under this lock"))
    }
}
