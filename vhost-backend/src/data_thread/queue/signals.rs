//! How a queue reaches its guest: interrupts, and the word that its ring is broken.

use std::os::fd::OwnedFd;

use crate::data_thread::handle::{Change, notify};
use crate::ring::Ring;

/// Turns without work before a guest that did not want the interrupt before is asked about the next, which
/// takes a full fence: a guest that polls has its next request there by then. One that sleeps is asked at
/// once.
const SIGNAL_TURNS: u32 = 256;

/// The descriptors that a front end listens to, and when the guest is asked whether it wants an interrupt.
#[derive(Debug)]
pub(super) struct Signals {
    call: Option<OwnedFd>,
    err: Option<OwnedFd>,
    /// Turns without work after which the guest is asked.
    turns: u32,
}

impl Signals {
    pub(super) fn new(call: Option<OwnedFd>, err: Option<OwnedFd>) -> Self {
        [&call, &err].into_iter().for_each(never_block);
        Self {
            call,
            err,
            turns: 0,
        }
    }

    /// Whether a guest is to be asked after so many turns without work.
    #[inline(always)]
    pub(super) fn is_time(&self, idle_turns: u32) -> bool {
        idle_turns >= self.turns
    }

    /// Asks the guest whether it wants an interrupt for what was published.
    pub(super) fn is_due(&mut self, ring: &mut impl Ring) -> bool {
        if self.call.is_none() {
            return false;
        }
        let is_due = ring.interrupt_due();
        self.turns = if is_due { 0 } else { SIGNAL_TURNS };
        is_due
    }

    /// Interrupts the guest. False if there is no way to.
    pub(super) fn interrupt(&self) -> bool {
        self.call.as_ref().map(notify).is_some()
    }

    /// Tells the front end that the ring is broken.
    pub(super) fn tell_broken(&self) {
        if let Some(err) = &self.err {
            notify(err);
        }
    }

    /// Changes a descriptor. True if the guest must be interrupted once, since an answer may have been
    /// announced on the old one.
    pub(super) fn change(&mut self, change: Change) -> bool {
        match change {
            Change::Call(call) => {
                never_block(&call);
                self.call = call;
                true
            }
            Change::Err(err) => {
                never_block(&err);
                self.err = err;
                false
            }
        }
    }
}

/// Writing an event must never hold up a data thread, whatever kind of descriptor the front end sent.
fn never_block(fd: &Option<OwnedFd>) {
    if let Some(fd) = fd {
        let outcome = rustix::fs::fcntl_getfl(fd)
            .and_then(|f| rustix::fs::fcntl_setfl(fd, f | rustix::fs::OFlags::NONBLOCK));
        if let Err(error) = outcome {
            tracing::warn!(%error, "cannot make an event descriptor non-blocking");
        }
    }
}
