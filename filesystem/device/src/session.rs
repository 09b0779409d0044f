//! What the guest's kernel and the device agreed on by INIT, shared by the queues of a device, which run on
//! different threads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use fuse_codec::Agreed;

/// What is agreed now.
#[derive(Debug, Default)]
pub(crate) struct Session {
    /// Counts changes, so that queues look at the rest only then.
    changes: AtomicU64,
    agreed: Mutex<Option<Agreed>>,
}

/// What a queue knows of the session.
#[derive(Debug, Default)]
pub(crate) struct SessionView {
    changes: u64,
    agreed: Option<Agreed>,
}

impl Session {
    /// Ends the session and begins another. `ended` and `began` are called in between, and no queue sees the
    /// new one before they return.
    pub(crate) fn begin(&self, agreed: Agreed, ended: impl FnOnce(), began: impl FnOnce(&Agreed)) {
        let mut guard = self.lock();
        if guard.take().is_some() {
            ended();
        }
        began(&agreed);
        *guard = Some(agreed);
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// Ends the session, if there is one.
    pub(crate) fn end(&self, ended: impl FnOnce()) {
        let mut guard = self.lock();
        if guard.take().is_some() {
            self.changes.fetch_add(1, Ordering::Release);
            ended();
        }
    }

    /// What is agreed now, for who is not a queue.
    pub(crate) fn agreed(&self) -> Option<Agreed> {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Agreed>> {
        self.agreed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SessionView {
    /// What is agreed; none before INIT and after DESTROY.
    #[inline]
    pub(crate) fn agreed(&mut self, session: &Session) -> Option<&Agreed> {
        if session.changes.load(Ordering::Acquire) != self.changes {
            self.reload(session);
        }
        self.agreed.as_ref()
    }

    #[cold]
    fn reload(&mut self, session: &Session) {
        let agreed = session.lock();
        self.changes = session.changes.load(Ordering::Acquire);
        self.agreed = *agreed;
    }
}
