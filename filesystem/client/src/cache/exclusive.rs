//! Files that are held exclusively: changes of them may be buffered.

use std::sync::Arc;

use fs_capabilities::{GuestId, Instant, Kind};
use namespace::{Ino, SessionId};

use super::changes::Part;
use super::{Cache, Change, State};
use crate::sync::lock;

impl Cache {
    /// The grant under which changes of a file may be buffered now.
    pub(crate) fn exclusive(&self, now: Instant, ino: Ino) -> Option<u64> {
        let mut state = lock(&self.state);
        state.at(now);
        state.exclusive(ino)
    }

    /// Whether it is worth asking for: there is a link, and nobody else wanted the file a short while ago.
    pub(crate) fn wants_exclusive(&self, now: Instant, ino: Ino) -> bool {
        let mut state = lock(&self.state);
        state.at(now);
        let quiet = state.limits.settings.quiet;
        state.link.is_some() && !state.interest.is_contended(ino, state.now, quiet)
    }

    /// Asks for a file as exclusive, whose only name is in the directory `parent`.
    pub(crate) fn request_exclusive(&self, now: Instant, ino: Ino, parent: Option<Ino>) {
        let mut state = lock(&self.state);
        state.at(now);
        let (now, link) = (state.now, state.link);
        if let (Some(holder), Some(_)) = (&mut state.holder, link) {
            if !holder.acquire(now, ino, Kind::FileExclusive, parent) {
                state.requested.insert(ino);
            }
            state.act(0);
        }
        drop(state);
        self.wake.notify();
    }

    /// It was waited for in vain. It is not waited for again for a while.
    pub(crate) fn exclusive_is_late(&self, now: Instant, ino: Ino) {
        let mut state = lock(&self.state);
        state.at(now);
        let now = state.now;
        state.interest.recalled(ino, now);
    }

    /// Does something while a file is held exclusively under this grant, unless it is not.
    pub(crate) fn while_exclusive<T>(
        &self,
        now: Instant,
        ino: Ino,
        grant: u64,
        act: impl FnOnce(SessionId) -> T,
    ) -> Option<T> {
        let mut state = lock(&self.state);
        state.at(now);
        let is_held = state.exclusive(ino) == Some(grant);
        let session = state.session.filter(|_| is_held)?;
        Some(act(session))
    }

    /// A write that is to be buffered begins: it may be put there at the returned time, when no other guest
    /// of this host uses what it was told of the file. The record that is cached stays as true as it was.
    pub(crate) fn begin_buffered(
        self: &Arc<Self>,
        now: Instant,
        guest: GuestId,
        ino: Ino,
    ) -> (Change, Instant) {
        let mut state = lock(&self.state);
        state.at(now);
        let covers = state.covers_of(ino);
        let until = state.begin(&[], &covers, &[], guest);
        let cache = Arc::clone(self);
        let parts = Vec::new();
        let change = Change {
            cache,
            parts,
            covers,
            before: None,
        };
        (change, until)
    }

    /// A file is written back. `finish` names it if it was recalled, and has nothing buffered any more.
    pub(crate) fn finish_write_back(&self, now: Instant, finish: impl FnOnce() -> Option<Ino>) {
        let mut state = lock(&self.state);
        state.at(now);
        if let Some(ino) = finish() {
            state.written_back(ino);
        }
        state.act(0);
        drop(state);
        self.wake.notify();
    }

    /// Time has passed, and the lease ends then, as far as that is known: all is lost if it has ended. A link
    /// is not needed to know that, and may be away for longer.
    pub(crate) fn expire(&self, now: Instant, lease_until: Option<Instant>) {
        let mut state = lock(&self.state);
        state.at(now);
        let now = state.now;
        if let Some(holder) = &mut state.holder {
            if let Some(until) = lease_until {
                holder.lease_until(now, until);
            }
            // The holder notices by whatever it is asked.
            holder.may(now, Ino::default());
        }
        state.act(0);
    }

    /// Gives up the capability of an inode that is gone.
    pub(crate) fn release(&self, ino: Ino) {
        let mut state = lock(&self.state);
        let now = state.now;
        if let Some(holder) = &mut state.holder {
            holder.release(now, ino);
        }
        state.act(0);
        drop(state);
        self.wake.notify();
    }
}

impl State {
    fn exclusive(&mut self, ino: Ino) -> Option<u64> {
        let now = self.now;
        let may = self.holder.as_mut().and_then(|holder| holder.may(now, ino));
        self.act(0);
        let grant = self.exclusive.get(&ino).copied();
        grant.filter(|_| may == Some(Kind::FileExclusive))
    }

    /// A file was granted, or is granted anew while it is held.
    pub(super) fn granted_exclusive(&mut self, ino: Ino) {
        self.exclusive_grants += 1;
        let grant = self.exclusive_grants;
        self.exclusive.entry(ino).or_insert(grant);
    }

    /// A file is not to be buffered any more. It is given up once what was buffered is committed.
    pub(super) fn recalled_exclusive(&mut self, ino: Ino) {
        self.exclusive.remove(&ino);
        #[cfg(feature = "testing")]
        if self.is_mistaken(super::Mistake::RecallWithoutWriteBack) {
            self.written_back(ino);
            return;
        }
        if !self.buffer.recall(ino) {
            self.written_back(ino);
        }
    }

    /// The session is over: others may use what was held.
    pub(super) fn lose_buffered(&mut self) {
        #[cfg(feature = "testing")]
        if self.is_mistaken(super::Mistake::BufferAfterSession) {
            return;
        }
        self.buffer.lose_all();
    }

    fn written_back(&mut self, ino: Ino) {
        let now = self.now;
        if let Some(holder) = &mut self.holder {
            holder.written_back(now, ino);
        }
    }
}

impl Change {
    /// The inodes that the change touches; none if they are not known.
    pub(crate) fn inodes(&self) -> Option<impl Iterator<Item = Ino>> {
        let mut parts = self.parts.iter();
        let is_unknown = |part: &Part| matches!(part, Part::ChildOf(_) | Part::Linked);
        if parts.any(is_unknown) {
            return None;
        }
        Some(self.parts.iter().filter_map(|part| match part {
            Part::Inode(ino) => Some(*ino),
            _ => None,
        }))
    }
}
