//! Wakes whoever waits.

use std::sync::Mutex;

use futures_channel::oneshot::{Receiver, Sender, channel};

use super::lock;

/// Something that happens now and then.
#[derive(Default)]
pub(crate) struct Signal(Mutex<Listeners>);

#[derive(Default)]
struct Listeners {
    senders: Vec<Sender<()>>,
    /// Number of listeners at which dropped ones are removed. Each is checked a few times at most, however
    /// many requests of guests wait.
    prune_at: usize,
}

/// Smallest number of listeners at which dropped ones are removed.
const PRUNE_MIN: usize = 16;

impl Signal {
    /// Completes at the next notification. Listen first, then look whether waiting is needed.
    pub(crate) fn listen(&self) -> Receiver<()> {
        let (sender, receiver) = channel();
        let mut listeners = lock(&self.0);
        if listeners.senders.len() >= listeners.prune_at {
            listeners.senders.retain(|sender| !sender.is_canceled());
            listeners.prune_at = PRUNE_MIN.max(2 * listeners.senders.len());
        }
        listeners.senders.push(sender);
        receiver
    }

    /// Wakes all that listen.
    pub(crate) fn notify(&self) {
        let listeners = std::mem::take(&mut *lock(&self.0));
        for sender in listeners.senders {
            // One that does not listen any more needs no waking.
            let _ = sender.send(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_listeners_are_removed() {
        let signal = Signal::default();
        let kept: Vec<_> = (0..100).map(|_| signal.listen()).collect();
        for _ in 0..10_000 {
            drop(signal.listen());
        }
        assert!(lock(&signal.0).senders.len() <= 2 * kept.len() + PRUNE_MIN);
        signal.notify();
        for mut receiver in kept {
            assert_eq!(receiver.try_recv(), Ok(Some(())));
        }
    }
}
