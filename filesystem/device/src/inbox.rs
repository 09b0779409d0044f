//! Answers of other threads on their way to a data thread: a bounded queue, and an eventfd that wakes it.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

/// The inbox has as many messages as it has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the inbox of a data thread is full")]
pub struct InboxFull;

#[derive(Debug)]
struct Shared<T> {
    messages: Mutex<VecDeque<T>>,
    capacity: usize,
    /// Set after a message was added, cleared before messages are taken. The data thread looks at this and
    /// not at the lock.
    has_messages: AtomicBool,
    wake: OwnedFd,
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, VecDeque<T>> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A data thread's end.
#[derive(Debug)]
pub struct Inbox<T>(Arc<Shared<T>>);

/// The other threads' end. Clones lead to the same inbox.
#[derive(Debug)]
pub struct InboxSender<T>(Arc<Shared<T>>);

impl<T> Clone for InboxSender<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Inbox<T> {
    /// An empty inbox for `capacity` messages; it allocates their memory now. If each message answers a
    /// request of the data thread, the number of its requests in flight is enough.
    pub fn new(capacity: usize) -> io::Result<Self> {
        Ok(Self(Arc::new(Shared {
            messages: Mutex::new(VecDeque::with_capacity(capacity)),
            capacity,
            has_messages: AtomicBool::new(false),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })))
    }

    /// An end for another thread.
    pub fn sender(&self) -> InboxSender<T> {
        InboxSender(Arc::clone(&self.0))
    }

    /// Whether messages may be there. Takes no lock.
    #[inline]
    pub fn has_messages(&self) -> bool {
        self.0.has_messages.load(Ordering::Relaxed)
    }

    /// Moves all messages behind those of `to`; returns how many. Takes no lock if there are none.
    pub fn take(&self, to: &mut VecDeque<T>) -> usize {
        if !self.has_messages() {
            return 0;
        }
        // Before the messages are taken: who adds one later wakes the thread anew.
        self.0.has_messages.swap(false, Ordering::AcqRel);
        let mut messages = self.0.lock();
        let count = messages.len();
        to.extend(messages.drain(..));
        count
    }

    /// Is written when the first message comes after those before were taken. Its counter is never read: it
    /// has to be watched edge-triggered, as data threads do.
    pub fn wait_fd(&self) -> BorrowedFd<'_> {
        self.0.wake.as_fd()
    }
}

impl<T> InboxSender<T> {
    /// Adds a message and wakes the data thread. A message that has no room is dropped.
    pub fn post(&self, message: T) -> Result<(), InboxFull> {
        let mut messages = self.0.lock();
        if messages.len() == self.0.capacity {
            return Err(InboxFull);
        }
        messages.push_back(message);
        drop(messages);
        if !self.0.has_messages.swap(true, Ordering::AcqRel) {
            // It can only refuse when its counter is full, and then the reader is awake already.
            let _ = rustix::io::write(&self.0.wake, &1u64.to_ne_bytes());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writes(inbox: &Inbox<u32>) -> u64 {
        let mut count = [0; 8];
        match rustix::io::read(inbox.wait_fd(), &mut count) {
            Ok(_) => u64::from_ne_bytes(count),
            Err(_) => 0,
        }
    }

    #[test]
    fn the_thread_is_woken_once_for_messages_that_it_takes_together() {
        let inbox = Inbox::new(3).unwrap();
        let sender = inbox.sender();
        let mut taken = VecDeque::new();
        assert_eq!(inbox.take(&mut taken), 0);
        for message in 0..3 {
            sender.post(message).unwrap();
        }
        assert_eq!(sender.clone().post(3), Err(InboxFull));
        assert_eq!(writes(&inbox), 1);
        assert_eq!(inbox.take(&mut taken), 3);
        assert_eq!(taken, [0, 1, 2]);
        assert!(!inbox.has_messages());
        sender.post(4).unwrap();
        assert_eq!(writes(&inbox), 1);
    }

    #[test]
    fn no_message_is_lost_between_threads() {
        const MESSAGES: u32 = 20_000;
        let inbox = Inbox::new(64).unwrap();
        let sender = inbox.sender();
        let posting = std::thread::spawn(move || {
            for message in 0..MESSAGES {
                while sender.post(message).is_err() {
                    std::thread::yield_now();
                }
            }
        });
        let mut taken = VecDeque::new();
        while taken.len() < MESSAGES as usize {
            if inbox.take(&mut taken) == 0 {
                std::thread::yield_now();
            }
        }
        posting.join().unwrap();
        assert!(taken.into_iter().eq(0..MESSAGES));
    }
}
