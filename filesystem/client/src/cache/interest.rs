//! Which capabilities are worth asking for.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

#[cfg(doc)]
use fs_capabilities::Settings;
use fs_capabilities::{Instant, Kind};
use namespace::{Answer, Body, Content, Error, Ino, Inode, Query};

use super::{Cache, State};
use crate::sync::lock;

/// Questions about one inode for which its capability is asked for.
const QUESTIONS: u32 = 2;
/// The same, if it was recalled a short while ago ([`Settings::quiet`]): others change it.
const QUESTIONS_AFTER_RECALL: u32 = 32;

/// Inodes that are remembered. With more, all are forgotten.
const REMEMBERED_MAX: usize = 4096;

/// Names of a directory that is loaded as a whole. Of a larger one, names are asked for one by one.
const LOAD_NAMES_MAX: usize = 100_000;

/// An evicted directory is loaded again after one question for this many of its names: a large one takes
/// longer to load, and evicts more. The value is an estimate and was not tuned.
const NAMES_OF_A_QUESTION: usize = 32;

/// What has to come before names of a directory are found here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expected {
    /// Its capability.
    Granted,
    /// Pages of its names.
    Loading,
}

#[derive(Debug, Default)]
pub(super) struct Interest {
    /// A session and its link would be of use.
    is_link_wanted: bool,
    /// To be asked for once there is a link.
    wished: VecDeque<(Ino, Kind)>,
    /// Questions about inodes that were not cached.
    asked: HashMap<Ino, u32>,
    recalled: HashMap<Ino, Instant>,
    /// Evicted directories, and the questions after which each is loaded again.
    evicted: HashMap<Ino, u32>,
    /// Directories to be loaded once they are granted.
    awaited: HashSet<Ino>,
    /// Those of them whose grant did not come at once: another host has to give something up first.
    slow: HashSet<Ino>,
    to_load: VecDeque<Ino>,
    /// Those of [`Interest::to_load`], and what has been taken from there and is not loaded yet.
    loading: HashSet<Ino>,
}

impl Interest {
    pub(super) fn granted(&mut self, ino: Ino) {
        self.asked.remove(&ino);
        self.slow.remove(&ino);
        if self.awaited.remove(&ino) {
            self.load(ino);
        }
    }

    pub(super) fn refused(&mut self, ino: Ino) {
        self.awaited.remove(&ino);
        self.slow.remove(&ino);
        self.asked.remove(&ino);
    }

    fn load(&mut self, ino: Ino) {
        if self.loading.insert(ino) {
            self.to_load.push_back(ino);
        }
    }

    pub(super) fn recalled(&mut self, ino: Ino, now: Instant) {
        if self.recalled.len() >= REMEMBERED_MAX {
            self.recalled.clear();
        }
        self.recalled.insert(ino, now);
    }

    /// The cache was full, and a directory with this many cached names was evicted.
    pub(super) fn evicted(&mut self, ino: Ino, names: usize) {
        let questions = (names / NAMES_OF_A_QUESTION) as u32;
        if questions <= QUESTIONS {
            return;
        }
        if self.evicted.len() >= REMEMBERED_MAX {
            self.evicted.clear();
        }
        // It may not have been loaded as a whole since the last time.
        let known = self.evicted.entry(ino).or_default();
        *known = questions.max(*known);
    }

    /// Whether an inode was recalled a short while ago: others want it, too.
    pub(super) fn is_contended(&self, ino: Ino, now: Instant, short_while: Duration) -> bool {
        let recalled = self.recalled.get(&ino);
        recalled.is_some_and(|at| now.since(*at) < short_while)
    }

    pub(super) fn has_loads(&self) -> bool {
        !self.to_load.is_empty()
    }

    pub(super) fn is_link_wanted(&self) -> bool {
        self.is_link_wanted
    }

    /// A question about an inode was asked. Whether these are enough by now, or many, after a recall.
    fn note(&mut self, ino: Ino, enough: u32, now: Instant, short_while: Duration) -> bool {
        if self.asked.len() >= REMEMBERED_MAX {
            self.asked.clear();
        }
        let is_shared = self.is_contended(ino, now, short_while);
        let enough = match is_shared {
            true => enough.max(QUESTIONS_AFTER_RECALL),
            false => enough,
        };
        let count = self.asked.entry(ino).or_default();
        *count += 1;
        *count >= enough
    }
}

impl Cache {
    /// Asks for the capability of a directory that is to be listed. Whether it is to be waited for
    /// ([`Cache::is_requested`]).
    pub(crate) fn request_directory(&self, now: Instant, ino: Ino) -> bool {
        let mut state = lock(&self.state);
        state.at(now);
        let (now, quiet) = (state.now, state.limits.settings.quiet);
        if state.interest.note(ino, 1, now, quiet) {
            state.request(ino, Kind::DirectoryRead);
        }
        let is_requested = state.requested.contains(&ino);
        drop(state);
        self.wake.notify();
        is_requested
    }

    /// Whether a capability was asked for, and neither granted nor refused yet.
    pub(crate) fn is_requested(&self, ino: Ino) -> bool {
        lock(&self.state).requested.contains(&ino)
    }

    /// A directory to load; [`Cache::loaded`] ends that.
    pub(crate) fn next_load(&self) -> Option<Ino> {
        lock(&self.state).interest.to_load.pop_front()
    }

    pub(crate) fn loaded(&self, dir: Ino) {
        lock(&self.state).interest.loading.remove(&dir);
    }

    /// Whether the names of a directory are on their way here, or will be as soon as they are granted.
    pub(crate) fn expects_names(&self, dir: Ino) -> Option<Expected> {
        let state = lock(&self.state);
        let interest = &state.interest;
        if interest.loading.contains(&dir) {
            return Some(Expected::Loading);
        }
        let is_awaited = interest.awaited.contains(&dir) && state.requested.contains(&dir);
        (is_awaited && !interest.slow.contains(&dir)).then_some(Expected::Granted)
    }

    /// A directory's grant did not come at once: nobody else waits for it.
    pub(crate) fn note_slow(&self, dir: Ino) {
        let interest = &mut lock(&self.state).interest;
        if interest.awaited.contains(&dir) {
            interest.slow.insert(dir);
        }
    }

    /// Where the listing of a directory goes on that may be cached; none if nothing is to be loaded.
    pub(crate) fn load_from(&self, now: Instant, dir: Ino, from_begin: bool) -> Option<u64> {
        let mut state = lock(&self.state);
        state.at(now);
        let is_held = state.store.directory(dir).is_some() && state.may(dir, Kind::DirectoryRead);
        let names_max = LOAD_NAMES_MAX.min(state.limits.names_max / 2);
        if !is_held || state.store.names_of(dir) >= names_max {
            return None;
        }
        if from_begin {
            state.store.restart_stale(dir);
        }
        state.store.listing_end(dir)
    }

    /// Whether all names of a directory are known.
    pub(crate) fn is_complete(&self, dir: Ino) -> bool {
        lock(&self.state).store.is_complete(dir)
    }
}

impl State {
    /// Asks for a capability, if there is a link.
    fn request(&mut self, ino: Ino, kind: Kind) {
        self.interest.is_link_wanted = true;
        let now = self.now;
        let (Some(holder), Some(_)) = (&mut self.holder, self.link) else {
            if self.interest.wished.len() < REMEMBERED_MAX {
                self.interest.wished.push_back((ino, kind));
            }
            return;
        };
        if !holder.acquire(now, ino, kind, None) {
            self.requested.insert(ino);
        }
        self.act(0);
    }

    /// There is a link: asks for what was wished before.
    pub(super) fn request_wished(&mut self) {
        for (ino, kind) in std::mem::take(&mut self.interest.wished) {
            self.request(ino, kind);
        }
    }

    /// Asks for what would have answered a question.
    pub(super) fn note_question(&mut self, query: &Query, answer: &Result<Answer, Error>) {
        match (query, answer) {
            (Query::Lookup { parent, .. }, Ok(Answer::Inode(ino, inode))) => {
                self.note_directory(*parent);
                if let Body::Directory(_) = inode.body {
                    self.note_directory(*ino);
                } else if inode.parent.is_none() {
                    self.note_file(*ino);
                }
            }
            (Query::Lookup { parent, .. }, Err(Error::NotFound)) => self.note_directory(*parent),
            (Query::Inode(ino), Ok(Answer::Inode(_, inode))) => self.note_inode(*ino, inode),
            (Query::Content { ino, .. }, Ok(Answer::Content(inode, _))) => {
                self.note_inode(*ino, inode);
                if let Body::File(Content::Table(_)) = inode.body {
                    self.note_file(*ino);
                }
            }
            _ => {}
        }
    }

    fn note_inode(&mut self, ino: Ino, inode: &Inode) {
        if inode.nlink == 0 {
            return;
        }
        match (&inode.body, inode.parent) {
            (Body::Directory(_), _) => self.note_directory(ino),
            (_, Some(parent)) => self.note_directory(parent),
            (_, None) => self.note_file(ino),
        }
    }

    fn note_directory(&mut self, ino: Ino) {
        let is_held = self.store.directory(ino).is_some();
        let quiet = self.limits.settings.quiet;
        let evicted = self.interest.evicted.get(&ino).copied();
        // It is held without its names at first, and what is asked for is cached.
        let enough = evicted.filter(|_| is_held).unwrap_or(QUESTIONS);
        if self.store.is_complete(ino) || !self.interest.note(ino, enough, self.now, quiet) {
            return;
        }
        self.interest.asked.remove(&ino);
        if is_held {
            // Its loading was broken off, or put off.
            if self.interest.to_load.len() < REMEMBERED_MAX {
                self.interest.load(ino);
            }
        } else {
            if evicted.is_none() && self.interest.awaited.len() < REMEMBERED_MAX {
                self.interest.awaited.insert(ino);
            }
            self.request(ino, Kind::DirectoryRead);
        }
    }

    fn note_file(&mut self, ino: Ino) {
        let quiet = self.limits.settings.quiet;
        if self.store.file(ino).is_none() && self.interest.note(ino, QUESTIONS, self.now, quiet) {
            self.request(ino, Kind::FileRead);
        }
    }
}
