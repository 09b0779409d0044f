//! Wakes whoever waits.

use std::sync::Mutex;

use futures_channel::oneshot::{Receiver, Sender, channel};

use super::lock;

/// Something that happens now and then.
#[derive(Default)]
pub(crate) struct Signal(Mutex<Vec<Sender<()>>>);

impl Signal {
    /// Completes at the next notification. Listen first, then look whether waiting is needed.
    pub(crate) fn listen(&self) -> Receiver<()> {
        let (sender, receiver) = channel();
        let mut listeners = lock(&self.0);
        listeners.retain(|listener| !listener.is_canceled());
        listeners.push(sender);
        receiver
    }

    /// Wakes all that listen.
    pub(crate) fn notify(&self) {
        let listeners = std::mem::take(&mut *lock(&self.0));
        for listener in listeners {
            // One that does not listen any more needs no waking.
            let _ = listener.send(());
        }
    }
}
