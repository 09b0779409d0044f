//! How one thread tells another that its operation is done.
//!
//! A shard's completions go to whoever polled them. Most often that is the submitter; if thread B's read
//! waited for a write of thread A, it is A, and A puts the outcome into B's mailbox.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use fabric_store::api::{OpId, StoreResult};
use rustix::event::{EventfdFlags, eventfd};

/// One thread's mailbox.
pub struct Mailbox {
    /// A hint that spares the lock: set after a push, cleared before a drain.
    full: AtomicBool,
    /// Bounded by the operations that its owner has in flight.
    completions: Mutex<Vec<(OpId, StoreResult)>>,
    eventfd: OwnedFd,
}

impl Mailbox {
    /// An empty mailbox with room for `completions`; more cannot come, for each answers an operation of the
    /// owner.
    pub fn new(completions: usize) -> std::io::Result<Self> {
        Ok(Self {
            full: AtomicBool::new(false),
            completions: Mutex::new(Vec::with_capacity(completions)),
            eventfd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Puts an outcome in. The owner is woken by [`signal`](Self::signal).
    pub fn push(&self, op: OpId, result: StoreResult) {
        let mut completions = self.completions.lock().expect("no panic under this lock");
        completions.push((op, result));
    }

    /// Wakes the owner, once until it looks.
    pub fn signal(&self) {
        if !self.full.swap(true, Ordering::AcqRel) {
            // Fails only if the counter is full, and then it is readable, too.
            let _ = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
        }
    }

    /// True if the owner was woken since it last drained.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.full.load(Ordering::Acquire)
    }

    /// Hands out everything.
    pub fn drain(&self, mut take: impl FnMut(OpId, StoreResult)) {
        let mut count = [0u8; 8];
        // Cleared before the completions are taken: one that comes later rings again. Not cleared while the
        // eventfd of its setter is yet to be written: it would stay readable without a completion.
        if rustix::io::read(&self.eventfd, &mut count).is_ok() {
            self.full.store(false, Ordering::Release);
        }
        let mut completions = self.completions.lock().expect("no panic under this lock");
        for (op, result) in completions.drain(..) {
            take(op, result);
        }
    }

    /// Readable while the owner has been woken.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }
}
