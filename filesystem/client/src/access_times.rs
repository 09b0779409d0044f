//! Access times, noted in the background as relatime has it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use fuse_codec::OpenFlags;
use namespace::{Ino, Inode, Time};

use crate::sync::{Signal, lock};

/// An access time this old is renewed by the next read.
const RENEWED_AFTER_SECONDS: i64 = 24 * 3600;

/// Inodes whose access waits to be noted. One more is not: a later read notes it.
const WAITING_MAX: usize = 1024;

#[derive(Default)]
pub(crate) struct AccessTimes {
    state: Mutex<State>,
    pub(crate) wake: Signal,
}

#[derive(Default)]
struct State {
    waiting: BTreeMap<Ino, Time>,
    under_way: BTreeSet<Ino>,
}

impl AccessTimes {
    /// A file was read now.
    pub(crate) fn note(&self, ino: Ino, inode: &Inode, flags: OpenFlags, now: Time) {
        if flags.bits() & libc::O_NOATIME as u32 != 0 || !is_due(inode, now) {
            return;
        }
        let mut state = lock(&self.state);
        if state.under_way.contains(&ino) || state.waiting.len() >= WAITING_MAX {
            return;
        }
        if state.waiting.insert(ino, now).is_none() {
            drop(state);
            self.wake.notify();
        }
    }

    /// Accesses to note, at most `max`. Each is to be ended.
    pub(crate) fn begin(&self, max: usize) -> Vec<(Ino, Time)> {
        let mut state = lock(&self.state);
        let taken: Vec<_> = state
            .waiting
            .iter()
            .take(max)
            .map(|(ino, at)| (*ino, *at))
            .collect();
        for (ino, _) in &taken {
            state.waiting.remove(ino);
            state.under_way.insert(*ino);
        }
        taken
    }

    pub(crate) fn end(&self, ino: Ino) {
        lock(&self.state).under_way.remove(&ino);
    }
}

/// Linux's relatime (`relatime_need_update` in `fs/inode.c`): the time tells whether a file was read since it
/// was changed, and on which day.
fn is_due(inode: &Inode, now: Time) -> bool {
    let is_old = now.seconds.saturating_sub(inode.atime.seconds) >= RENEWED_AFTER_SECONDS;
    inode.atime <= inode.mtime || inode.atime <= inode.ctime || is_old
}
