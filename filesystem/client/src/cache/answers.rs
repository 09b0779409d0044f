//! Answers of the leader, and what of them may be cached.

use std::sync::Arc;

use fs_capabilities::{Instant, Kind};
use namespace::{
    Answer, Body, Content, Entry, Error, Extent, ITEMS_MAX, Ino, Inode, Query, SIZE_MAX,
};

use super::store::{self, Named};
use super::{Cache, State};
use crate::backend::Reader;
use crate::sync::lock;

/// A question that is under way.
pub(crate) struct Question {
    cache: Arc<Cache>,
    /// Counts the changes that had ended when it was asked.
    asked: u64,
    reader: Option<Reader>,
}

/// What counts of a question once it is answered.
#[derive(Clone, Copy)]
struct Stamp {
    asked: u64,
    sent: u64,
}

impl Cache {
    /// A question is asked.
    pub(crate) fn ask(self: &Arc<Self>) -> Question {
        let mut state = lock(&self.state);
        let link = state.link;
        let reader = state.session.zip(link);
        Question {
            asked: state.changes.ask(),
            reader: reader.map(|(session, link)| Reader { session, link }),
            cache: Arc::clone(self),
        }
    }
}

impl Question {
    /// On whose behalf it is asked.
    pub(crate) fn reader(&self) -> Option<Reader> {
        self.reader
    }

    /// It was answered. `sent`: messages that the leader had sent on the session's link before it looked.
    pub(crate) fn answered(
        self,
        now: Instant,
        sent: Option<u64>,
        query: &Query,
        answer: &Result<Answer, Error>,
    ) {
        let mut state = lock(&self.cache.state);
        state.at(now);
        let link = self.reader.map(|reader| reader.link);
        if let (Some(sent), true) = (sent, link.is_some() && state.link == link) {
            let asked = self.asked;
            state.put(Stamp { asked, sent }, query, answer);
            state.evict();
        }
        let was_wanted = state.interest.is_link_wanted();
        state.note_question(query, answer);
        let is_due = !was_wanted || !state.outgoing.is_empty();
        let has_loads = state.interest.has_loads();
        drop(state);
        if is_due {
            self.cache.wake.notify();
        }
        if has_loads {
            self.cache.to_load.notify();
        }
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        lock(&self.cache.state).changes.end_question(self.asked);
    }
}

impl State {
    /// Whether an answer may be cached under the capability of an inode: rule 2.
    fn may_put(&mut self, stamp: Stamp, cover: Ino, kind: Kind) -> bool {
        let granted = match kind {
            Kind::DirectoryRead => self
                .store
                .directory(cover)
                .map(|directory| directory.granted),
            _ => self.store.file(cover).map(|file| file.granted),
        };
        let Some(granted) = granted else {
            return false;
        };
        let was_held = match granted {
            0 => self.received >= stamp.sent,
            number => number <= stamp.sent,
        };
        #[cfg(feature = "testing")]
        let was_held = was_held || self.is_mistaken(super::Mistake::CacheWithoutGrant);
        was_held && self.may(cover, kind)
    }

    /// Whether a name is as it was when the question was asked: rule 3.
    fn is_name_same(&self, stamp: Stamp, dir: Ino, name: &[u8]) -> bool {
        #[cfg(feature = "testing")]
        if self.is_mistaken(super::Mistake::CacheDuringChange) {
            return true;
        }
        self.changes.is_name_same(dir, name, stamp.asked)
    }

    /// The same of an inode's record.
    fn is_inode_same(&self, stamp: Stamp, ino: Ino, place: Option<Ino>) -> bool {
        #[cfg(feature = "testing")]
        if self.is_mistaken(super::Mistake::CacheDuringChange) {
            return true;
        }
        self.changes.is_inode_same(ino, place, stamp.asked)
    }

    fn put(&mut self, stamp: Stamp, query: &Query, answer: &Result<Answer, Error>) {
        match (query, answer) {
            (Query::Lookup { parent, name }, Ok(Answer::Inode(ino, inode))) => {
                let named = Named::Present(*ino, inode.body.kind());
                self.put_name(stamp, *parent, name, named);
                self.put_inode(stamp, *ino, inode);
            }
            (Query::Lookup { parent, name }, Err(Error::NotFound)) => {
                self.put_name(stamp, *parent, name, Named::Absent);
            }
            (Query::Inode(_), Ok(Answer::Inode(ino, inode))) => self.put_inode(stamp, *ino, inode),
            (Query::Readdir { parent, behind, .. }, Ok(Answer::Names(page))) => {
                self.put_page(stamp, *parent, *behind, page);
            }
            (Query::Content { ino, range, max }, Ok(Answer::Content(inode, extents))) => {
                self.put_inode(stamp, *ino, inode);
                let is_all = *range == (0, SIZE_MAX) && extents.len() < *max as usize;
                if is_all {
                    self.put_extents(stamp, *ino, inode, extents);
                }
            }
            _ => {}
        }
    }

    fn put_name(&mut self, stamp: Stamp, dir: Ino, name: &[u8], named: Named) {
        if self.may_put(stamp, dir, Kind::DirectoryRead) && self.is_name_same(stamp, dir, name) {
            self.store.put_name(dir, name, named);
        }
    }

    /// Puts a record where it is covered. What has no name is not cached: its end is nobody's change.
    fn put_inode(&mut self, stamp: Stamp, ino: Ino, inode: &Inode) {
        let place = store::place_of(inode);
        if inode.nlink == 0 || !self.is_inode_same(stamp, ino, place) {
            return;
        }
        let is_directory = inode.body.kind() == namespace::Kind::Directory;
        let cover = if is_directory { Some(ino) } else { place };
        if cover.is_some_and(|cover| self.may_put(stamp, cover, Kind::DirectoryRead)) {
            self.store.put_inode(ino, inode);
        }
        if !is_directory && self.may_put(stamp, ino, Kind::FileRead) {
            self.store.put_file(ino, inode, None);
        }
    }

    fn put_extents(&mut self, stamp: Stamp, ino: Ino, inode: &Inode, extents: &[Extent]) {
        let is_same = self.is_inode_same(stamp, ino, store::place_of(inode));
        if inode.nlink > 0 && is_same && self.may_put(stamp, ino, Kind::FileRead) {
            self.store.put_file(ino, inode, Some(extents.into()));
        }
    }

    fn put_page(&mut self, stamp: Stamp, dir: Ino, behind: u64, page: &[(Entry, Inode)]) {
        for (entry, inode) in page {
            let named = Named::Present(entry.ino, entry.kind);
            self.put_name(stamp, dir, &entry.name, named);
            self.put_inode(stamp, entry.ino, inode);
        }
        if !self.may_put(stamp, dir, Kind::DirectoryRead) {
            return;
        }
        #[cfg(feature = "testing")]
        if self.is_mistaken(super::Mistake::CacheDuringChange) {
            self.store.put_page(dir, behind, page, Default::default());
            return;
        }
        if let Some(changed) = self.changes.names_changed(dir, stamp.asked) {
            self.store.put_page(dir, behind, page, changed);
        }
    }
}

impl Cache {
    /// Whether all extents of a file are to be asked for, to be cached: they are not too many, and some were
    /// asked for since it was changed.
    pub(crate) fn wants_extents(&self, now: Instant, ino: Ino) -> bool {
        let mut state = lock(&self.state);
        state.at(now);
        let file = state.store.file(ino);
        let is_missing = file.is_some_and(|file| {
            let content = file.inode.as_ref().map(|inode| &inode.body);
            let is_small = matches!(
                content,
                Some(Body::File(Content::Table(count))) if *count < ITEMS_MAX as u64
            );
            file.extents.is_none() && is_small
        });
        is_missing && state.may(ino, Kind::FileRead)
    }
}
