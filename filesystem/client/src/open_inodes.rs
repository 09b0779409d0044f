//! What guests of this host have open, and what becomes of it when it has no name any more.
//!
//! The namespace keeps an inode without a name, an orphan, as long as some session holds it. Any host may
//! remove a name, and knows only what its own guests have open. So every session holds a new orphan, and each
//! host lets go of those that its guests do not have open:
//! - a host says that it holds an orphan itself, whether a guest of it has something open or not: which inode
//!   a name leads to is known only when it is removed, and it may be opened until then;
//! - an inode counts as open from before it is looked at until after it is closed. A file that is being
//!   created has no number yet, so while one is, nothing that was found to be held before is let go of;
//! - an inode without a name is opened only where it is open already: nobody else is sure to hold it.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex};

use namespace::Ino;

use crate::sync::{Signal, lock};

/// What is opened: names of directories are removed by other operations than those of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OpenKind {
    File,
    Directory,
}

/// Orphans that wait to be let go of. What does not fit is found again by asking what the session holds.
const RELEASES_MAX: usize = 4096;

#[derive(Default)]
pub(crate) struct OpenInodes {
    state: Mutex<State>,
    /// There is an orphan to let go of.
    pub(crate) wake: Signal,
}

#[derive(Default)]
struct State {
    inodes: HashMap<Ino, OpenInode>,
    /// Orphans that are being let go of.
    releasing: HashSet<Ino>,
    to_release: Vec<(Ino, Moment)>,
    /// Files that are being created, in the order in which that began.
    creating: BTreeSet<u64>,
    next_creation: u64,
}

#[derive(Default)]
struct OpenInode {
    /// Handles, and what looks whether it can be one.
    count: usize,
    /// Handles.
    handles: usize,
    is_orphan: bool,
}

/// A point in the order of creations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Moment(u64);

/// An inode that counts as open until this is dropped.
pub(crate) struct OpenGuard {
    inodes: Arc<OpenInodes>,
    ino: Ino,
    kind: OpenKind,
    is_handle: bool,
}

/// A file that is being created.
pub(crate) struct Creation {
    inodes: Arc<OpenInodes>,
    number: u64,
}

/// An orphan that is being let go of, and cannot be opened.
pub(crate) struct Release {
    inodes: Arc<OpenInodes>,
    ino: Ino,
}

impl OpenInodes {
    /// Counts an inode as open, unless it is being let go of: it has no name then.
    pub(crate) fn open(self: &Arc<Self>, ino: Ino, kind: OpenKind) -> Option<OpenGuard> {
        let mut state = lock(&self.state);
        if state.releasing.contains(&ino) {
            return None;
        }
        state.inodes.entry(ino).or_default().count += 1;
        Some(OpenGuard {
            inodes: Arc::clone(self),
            ino,
            kind,
            is_handle: false,
        })
    }

    /// Whether there is a handle of an inode.
    pub(crate) fn has_handle(&self, ino: Ino) -> bool {
        let state = lock(&self.state);
        state
            .inodes
            .get(&ino)
            .is_some_and(|inode| inode.handles > 0)
    }

    pub(crate) fn begin_creation(self: &Arc<Self>) -> Creation {
        let mut state = lock(&self.state);
        let number = state.next_creation;
        state.next_creation += 1;
        state.creating.insert(number);
        Creation {
            inodes: Arc::clone(self),
            number,
        }
    }

    /// Now: what has no name yet that is found at this moment was created before.
    pub(crate) fn moment(&self) -> Moment {
        Moment(lock(&self.state).next_creation)
    }

    /// This session holds an inode that has no name. If it is not open here, it is to be let go of.
    pub(crate) fn note_orphan(&self, ino: Ino, found: Moment) {
        let mut state = lock(&self.state);
        if let Some(inode) = state.inodes.get_mut(&ino) {
            inode.is_orphan = true;
            return;
        }
        state.note_release(ino, found);
        drop(state);
        self.wake.notify();
    }

    /// Orphans to let go of, at most `max`.
    pub(crate) fn take_releases(&self, max: usize) -> Vec<(Ino, Moment)> {
        let mut state = lock(&self.state);
        let count = state.to_release.len().min(max);
        state.to_release.drain(..count).collect()
    }

    /// Begins to let go of an orphan, if it is not open here and cannot become so.
    pub(crate) fn begin_release(self: &Arc<Self>, ino: Ino, found: Moment) -> Option<Release> {
        let mut state = lock(&self.state);
        let may_be_created = state.creating.first().is_some_and(|first| *first < found.0);
        if may_be_created || state.inodes.contains_key(&ino) || !state.releasing.insert(ino) {
            return None;
        }
        Some(Release {
            inodes: Arc::clone(self),
            ino,
        })
    }

    /// Inodes that count as open.
    pub(crate) fn len(&self) -> usize {
        lock(&self.state).inodes.len()
    }
}

impl State {
    fn note_release(&mut self, ino: Ino, found: Moment) {
        if self.to_release.len() < RELEASES_MAX {
            self.to_release.push((ino, found));
        }
    }

    /// Whether that was the last one of an orphan.
    fn close(&mut self, ino: Ino, is_handle: bool) -> bool {
        let inode = self.inodes.get_mut(&ino).expect("an open inode is counted");
        inode.count -= 1;
        inode.handles -= usize::from(is_handle);
        let is_last_of_orphan = inode.count == 0 && inode.is_orphan;
        if inode.count == 0 {
            self.inodes.remove(&ino);
        }
        is_last_of_orphan
    }
}

impl OpenGuard {
    /// It is open for good: there is a handle of it.
    pub(crate) fn into_handle(mut self) -> Self {
        if !self.is_handle {
            let mut state = lock(&self.inodes.state);
            let inode = state.inodes.get_mut(&self.ino);
            inode.expect("an open inode is counted").handles += 1;
            drop(state);
            self.is_handle = true;
        }
        self
    }

    pub(crate) fn ino(&self) -> Ino {
        self.ino
    }

    pub(crate) fn kind(&self) -> OpenKind {
        self.kind
    }
}

impl Drop for OpenGuard {
    fn drop(&mut self) {
        let mut state = lock(&self.inodes.state);
        if state.close(self.ino, self.is_handle) {
            let found = Moment(state.next_creation);
            state.note_release(self.ino, found);
            drop(state);
            self.inodes.wake.notify();
        }
    }
}

impl Drop for Creation {
    fn drop(&mut self) {
        lock(&self.inodes.state).creating.remove(&self.number);
    }
}

impl Drop for Release {
    fn drop(&mut self) {
        lock(&self.inodes.state).releasing.remove(&self.ino);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INO: Ino = Ino(7);

    #[test]
    fn an_orphan_is_let_go_of_when_its_last_handle_is_closed() {
        let inodes = Arc::new(OpenInodes::default());
        let first = inodes.open(INO, OpenKind::File).unwrap().into_handle();
        let second = inodes.open(INO, OpenKind::File).unwrap();
        inodes.note_orphan(INO, inodes.moment());
        assert!(inodes.take_releases(9).is_empty());
        drop(first);
        assert!(inodes.take_releases(9).is_empty());
        assert!(inodes.begin_release(INO, inodes.moment()).is_none());
        drop(second);
        let (ino, found) = inodes.take_releases(9)[0];
        let release = inodes.begin_release(ino, found).unwrap();
        assert!(inodes.open(INO, OpenKind::File).is_none(), "it goes");
        drop(release);
        assert_eq!(inodes.len(), 0);
    }

    #[test]
    fn nothing_is_let_go_of_that_may_just_be_created() {
        let inodes = Arc::new(OpenInodes::default());
        let creation = inodes.begin_creation();
        let found = inodes.moment();
        assert!(inodes.begin_release(INO, found).is_none());
        let _later = inodes.begin_creation();
        drop(creation);
        assert!(inodes.begin_release(INO, found).is_some());
    }
}
