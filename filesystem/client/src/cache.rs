//! What this host knows of the namespace without asking, under capabilities of its session.
//!
//! The leader grants capabilities on a link ([`fs_capabilities`]) and recalls them before another host
//! changes what they cover. A directory's capability covers its names, and that there are no others; its own
//! record; and the records of what is no directory and has its only name there ([`Inode::parent`]). A file's
//! capability covers its record and its extents. Nothing else is cached. Records are cached as the leader has
//! them, also of a file of which changes are buffered ([`crate::buffer`]): these are put over them.
//!
//! # When an answer may be cached
//!
//! Questions and answers do not travel on the link. What an answer says is put under the capability of an
//! inode only if all of this holds when it has come:
//!
//! 1. The link is the one with which the question was asked. The leader says that it was the session's link
//!    when it looked at its records, and how many messages it had sent there before ([`Answered::sent`]).
//! 2. The capability is held, and the message that granted it is among these. Then it was held when the
//!    leader looked, and ever since: one that was lost and granted again has a later message. A
//!    recall that is on its way does not matter: until it is answered, nothing changes. A capability that was
//!    claimed on this link counts as granted before all messages; the leader may refuse a claim, so all
//!    messages that it had sent must have come, too.
//! 3. No change of this host that touches it was under way at any moment between question and answer: this
//!    host's own changes recall nothing from it ([`changes`]).
//!
//! Whoever answers from the cache asks [`Holder::may`] at that moment. So a lease that ended ends the cache.
//!
//! # Own changes
//!
//! What a change touches is forgotten when it begins, and neither answered from the cache nor put into it
//! until its outcome is known. A change of unknown outcome keeps its request, and that keeps this
//! ([`Change`]). It is sent to the leader when no other guest of this host uses what it was told any more.
//!
//! What a guest was told of a name goes with it when it renames it, in its kernel and so here. If another
//! guest's change of the same name is under way already, that one may come second and touch whatever this one
//! brings there: so it waits for all guests, its own included.
//!
//! A change that removes or moves a name touches the record of the inode that the name leads to. It is known
//! if the name is cached. If it is not, or may change before the change is done, all records are touched of
//! which it may be one: those with their place in that directory, and those without a known place.
//!
//! Replies of changes are cached where what they say is certain ([`replies`]). Access times are no changes:
//! what is cached may have an older one.
//!
//! # Validity for guests
//!
//! Guests are promised validity only for what is answered from the cache, of names and records that a
//! directory's capability covers, each by itself ([`Scope`]): a change of one name leaves others quiet, and
//! waits for no promise about them. One that may touch any inode of a directory waits for all of them. A
//! guest that goes on after its record was forgotten here is remembered until its validity has passed
//! ([`Promised`]), so that changes of it wait.

mod answers;
mod changes;
mod driver;
mod exclusive;
mod interest;
mod link;
mod looks;
mod promised;
mod replies;
mod store;
#[cfg(test)]
mod tests;
mod touches;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fs_capabilities::{GuestId, Holder, HolderAction, Instant, Kind, Link, Settings, ToManager};
use namespace::{Attributes, Entry, Extent, Ino, Inode, Operation, Removed, SessionId};

use crate::buffer::Buffer;
use crate::sync::{Signal, lock};
use changes::{Changes, Part};
use interest::Interest;
use promised::Promised;
use replies::Before;
use store::{Named, Store};
use touches::{Cover, Moved};

#[cfg(doc)]
use crate::backend::Answered;
#[cfg(doc)]
use fs_capabilities::Scope;

/// A mistake made on purpose, for tests of the tests.
#[cfg(feature = "testing")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mistake {
    /// An answer is cached whatever the leader had sent before it looked.
    CacheWithoutGrant,
    /// An answer is cached though this host changed it meanwhile.
    CacheDuringChange,
    /// What is recalled is given up, but not forgotten.
    IgnoreRecall,
    /// Changes do not wait for guests.
    ChangeDuringPromise,
    /// What was cached in a former session is used in the next one.
    KeepAfterSession,
    /// A name that is removed or moved is forgotten, but not the inode that it led to.
    KeepTarget,
    /// A file is given up before what was buffered of it is written back.
    RecallWithoutWriteBack,
    /// FSYNC is answered before the commit.
    SyncBeforeCommit,
    /// Guests are told sizes and times without what is buffered.
    AttributesPastBuffer,
    /// Guests read data without what is buffered.
    ReadPastBuffer,
    /// What was buffered in a former session is written back in the next one.
    BufferAfterSession,
    /// A change of a file counts as one of its directory's own attributes.
    ChangeOfDirectory,
    /// Cached data are found by their address alone, in whichever segment.
    DataWithoutSegment,
    /// Cached data are found by segment and address, of whichever filesystem.
    DataWithoutFilesystem,
    /// Releases a removed inode although a guest's kernel has looked it up.
    FreeLookedUp,
    /// Releases a removed inode although a reply with it is on its way to a guest.
    FreeBeforeTold,
    /// A file that was made without a name is let go of though it got one.
    FreeNamed,
    /// Zeros of discarded blocks are returned as content of the file.
    TakeDiscarded,
    /// Writes do not wait for freed space to come back.
    WaitForNoSpace,
}

/// How much is cached, and how.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    pub(crate) names_max: usize,
    pub(crate) inodes_max: usize,
    pub(crate) settings: Settings,
    #[cfg(feature = "testing")]
    pub(crate) mistake: Option<Mistake>,
}

/// What is cached of one filesystem.
pub(crate) struct Cache {
    state: Mutex<State>,
    /// There is something to do on the link.
    pub(crate) wake: Signal,
    /// Something was granted or refused, or the link is gone.
    pub(crate) settled: Signal,
    /// There is a directory to load.
    pub(crate) to_load: Signal,
}

struct State {
    limits: Limits,
    /// The time of the last call.
    now: Instant,
    session: Option<SessionId>,
    holder: Option<Holder>,
    link: Option<Link>,
    /// Messages that came on the link.
    received: u64,
    /// Messages to send on it; `first` is the number of the first.
    outgoing: VecDeque<ToManager>,
    first: u64,
    store: Store,
    changes: Changes,
    /// What is being changed, by the inode whose capability covers it.
    changing: HashMap<Cover, usize>,
    promised: Promised,
    /// Until when guests may use what they were told in former sessions.
    former_promises: Instant,
    /// Capabilities that were asked for.
    requested: HashSet<Ino>,
    interest: Interest,
    recalls: u64,
    buffer: Arc<Buffer>,
    /// Files that are held exclusively and not recalled, each with a number of its own.
    exclusive: HashMap<Ino, u64>,
    exclusive_grants: u64,
}

/// A change that is under way, until this is dropped.
pub(crate) struct Change {
    cache: Arc<Cache>,
    parts: Vec<Part>,
    covers: Vec<Cover>,
    before: Option<Before>,
}

/// What LOOKUP finds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Found {
    Inode(Told),
    Absent { entry_valid: Duration },
}

/// An inode as a guest is told, and for how long it may use that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) attributes: Attributes,
    pub(crate) entry_valid: Duration,
    pub(crate) attr_valid: Duration,
}

impl Told {
    /// What a guest may not use again.
    pub(crate) fn once(attributes: Attributes) -> Self {
        Self {
            attributes,
            entry_valid: Duration::ZERO,
            attr_valid: Duration::ZERO,
        }
    }
}

/// Figures.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Figures {
    pub(crate) recalls: u64,
    pub(crate) capabilities: u64,
}

impl Cache {
    pub(crate) fn new(limits: Limits, buffer: Arc<Buffer>) -> Arc<Self> {
        let state = State {
            limits,
            now: Instant::START,
            session: None,
            holder: None,
            link: None,
            received: 0,
            outgoing: VecDeque::new(),
            first: 1,
            store: Store::default(),
            changes: Changes::default(),
            changing: HashMap::new(),
            promised: Promised::default(),
            former_promises: Instant::START,
            requested: HashSet::new(),
            interest: Interest::default(),
            recalls: 0,
            buffer,
            exclusive: HashMap::new(),
            exclusive_grants: 0,
        };
        Arc::new(Self {
            state: Mutex::new(state),
            wake: Signal::default(),
            settled: Signal::default(),
            to_load: Signal::default(),
        })
    }

    pub(crate) fn figures(&self) -> Figures {
        let state = lock(&self.state);
        Figures {
            recalls: state.recalls,
            capabilities: state.holder.as_ref().map_or(0, Holder::count) as u64,
        }
    }

    /// The inode of a name, or that there is none.
    pub(crate) fn lookup(
        &self,
        now: Instant,
        guest: GuestId,
        dir: Ino,
        name: &[u8],
    ) -> Option<Found> {
        lock(&self.state).lookup(now, guest, dir, name)
    }

    /// The attributes of an inode, and for how long a guest may use them.
    pub(crate) fn attributes(&self, now: Instant, guest: GuestId, ino: Ino) -> Option<Told> {
        lock(&self.state).told(now, guest, ino)
    }

    /// An inode's record.
    pub(crate) fn inode(&self, now: Instant, ino: Ino) -> Option<Inode> {
        let mut state = lock(&self.state);
        state.record(now, ino).map(|(inode, _)| inode.clone())
    }

    /// The inode that a name leads to, with its record.
    pub(crate) fn named(
        &self,
        now: Instant,
        dir: Ino,
        name: &[u8],
    ) -> Option<Option<(Ino, Inode)>> {
        let mut state = lock(&self.state);
        match state.named(now, dir, name)? {
            Named::Absent => Some(None),
            Named::Present(ino, _) => {
                let record = state.record(now, ino);
                record.map(|(inode, _)| Some((ino, inode.clone())))
            }
        }
    }

    /// A file's record, and those of its extents that reach into a range.
    pub(crate) fn content(
        &self,
        now: Instant,
        ino: Ino,
        range: (u64, u64),
        max: usize,
    ) -> Option<(Inode, Vec<Extent>)> {
        lock(&self.state).content(now, ino, range, max)
    }

    /// At most `max` names behind a cookie. For a guest, each comes with the attributes of its inode, if
    /// these are cached.
    pub(crate) fn list(
        &self,
        now: Instant,
        guest: Option<GuestId>,
        dir: Ino,
        behind: u64,
        max: usize,
    ) -> Option<Vec<(Entry, Option<Told>)>> {
        lock(&self.state).list(now, guest, dir, behind, max)
    }

    /// A change begins: what it touches is forgotten, and neither used nor put until the change is dropped.
    /// It may be sent at the returned time. None of what changes nothing that is cached.
    pub(crate) fn begin_change(
        self: &Arc<Self>,
        now: Instant,
        guest: GuestId,
        operation: &Operation,
    ) -> Option<(Change, Instant)> {
        let mut state = lock(&self.state);
        state.at(now);
        let (parts, covers) = state.touches(operation)?;
        let before = state.before(operation);
        let moves = state.moves(operation);
        let until = state.begin(&parts, &covers, &moves, guest);
        let cache = Arc::clone(self);
        let change = Change {
            cache,
            parts,
            covers,
            before,
        };
        Some((change, until))
    }

    /// Time has passed, before a change ends.
    pub(crate) fn at(&self, now: Instant) {
        lock(&self.state).at(now);
    }

    /// An inode lost a name. Of one that has none any more, nothing is cached.
    pub(crate) fn removed(&self, removed: &Removed) {
        let mut state = lock(&self.state);
        let (now, ino) = (state.now, removed.ino);
        state.store.forget_inode(ino);
        // What is buffered of it is kept while it may be open somewhere.
        if removed.nlink == 0 && !state.buffer.note_orphan(ino) {
            if let Some(holder) = &mut state.holder {
                holder.release(now, ino);
            }
        }
        state.act(0);
        drop(state);
        self.wake.notify();
    }

    /// An access time was noted.
    pub(crate) fn set_access_time(&self, ino: Ino, atime: namespace::Time) {
        lock(&self.state).store.set_access_time(ino, atime);
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        let mut state = lock(&self.cache.state);
        state.end(&self.parts, &self.covers);
        if let Some(before) = &self.before {
            state.changes.end_question(before.asked);
        }
    }
}

impl State {
    /// Time has passed.
    fn at(&mut self, now: Instant) {
        self.now = self.now.max(now);
    }

    #[cfg(feature = "testing")]
    fn is_mistaken(&self, mistake: Mistake) -> bool {
        self.limits.mistake == Some(mistake)
    }

    /// A change begins; when it may be sent.
    fn begin(
        &mut self,
        parts: &[Part],
        covers: &[Cover],
        moves: &[Moved],
        guest: GuestId,
    ) -> Instant {
        let waits_for = match self.changes.note_guest(parts, guest) {
            true => GuestId::default(),
            false => guest,
        };
        let touched = self.changes.begin(parts);
        self.forget(&touched);
        let now = self.now;
        let mut until = self.former_promises.max(now);
        for cover in covers {
            *self.changing.entry(*cover).or_default() += 1;
            if let Some(holder) = &mut self.holder {
                until = until.max(holder.begin_change(now, cover.0, cover.1, waits_for));
            }
        }
        for (from, to) in moves {
            if let Some(holder) = &mut self.holder {
                until = until.max(holder.carry(now, *from, *to, guest));
            }
        }
        #[cfg(feature = "testing")]
        if self.is_mistaken(Mistake::ChangeDuringPromise) {
            return now;
        }
        until
    }

    fn end(&mut self, parts: &[Part], covers: &[Cover]) {
        self.changes.end(parts);
        for cover in covers {
            let count = self.changing.get_mut(cover);
            let count = count.expect("a change ends once");
            *count -= 1;
            if *count == 0 {
                self.changing.remove(cover);
            }
            if let Some(holder) = &mut self.holder {
                holder.end_change(self.now, cover.0, cover.1);
            }
        }
    }

    fn forget(&mut self, parts: &[Part]) {
        for part in parts {
            match part {
                Part::Name(dir, name) => self.store.forget_name(*dir, name),
                Part::Names(dir) => self.store.forget_listing(*dir),
                Part::Inode(ino) => self.store.forget_inode(*ino),
                Part::ChildOf(dir) => self.store.forget_inodes_in(Some(*dir)),
                Part::Linked => self.store.forget_inodes_in(None),
            }
        }
    }

    /// Does what the holder says. `number` is that of the message that it was passed, or 0.
    fn act(&mut self, number: u64) {
        while let Some(action) = self.holder.as_mut().and_then(Holder::next_action) {
            match action {
                HolderAction::Send { link, message } if self.link == Some(link) => {
                    self.outgoing.push_back(message);
                }
                // Of a link that is gone.
                HolderAction::Send { .. } => {}
                HolderAction::WriteBack { ino } => self.recalled_exclusive(ino),
                HolderAction::Granted { ino, kind } => self.granted(ino, kind, number),
                HolderAction::Refused { ino, kind, .. } => {
                    self.requested.remove(&ino);
                    self.interest.refused(ino);
                    if kind == Kind::FileExclusive {
                        self.interest.recalled(ino, self.now);
                    }
                }
                HolderAction::Invalidate { ino } => self.lost(ino),
                HolderAction::SessionOver => self.lost_all(),
            }
        }
    }

    fn granted(&mut self, ino: Ino, kind: Kind, number: u64) {
        self.requested.remove(&ino);
        let now = self.now;
        let may = self.holder.as_mut().and_then(|holder| holder.may(now, ino));
        // It may be given up already.
        if may == Some(kind) {
            let is_directory = kind == Kind::DirectoryRead;
            self.store.granted(ino, is_directory, number);
            self.interest.granted(ino);
            if kind == Kind::FileExclusive {
                self.granted_exclusive(ino);
            }
        }
    }

    /// A capability is given up. Others may change what it covered.
    fn lost(&mut self, ino: Ino) {
        #[cfg(feature = "testing")]
        if self.is_mistaken(Mistake::IgnoreRecall) {
            return;
        }
        self.store.drop_cover(ino);
        let touched = self.changes.contend_all(Some(ino));
        self.forget(&touched);
    }

    fn lost_all(&mut self) {
        self.exclusive.clear();
        self.lose_buffered();
        self.link = None;
        self.requested.clear();
        self.outgoing.clear();
        #[cfg(feature = "testing")]
        if self.is_mistaken(Mistake::KeepAfterSession) {
            return;
        }
        self.store.clear();
        // What was touched is not cached any more.
        self.changes.contend_all(None);
    }

    /// Gives up what was not used for long while there is too much.
    fn evict(&mut self) {
        let (names_max, inodes_max) = (self.limits.names_max, self.limits.inodes_max);
        while self.store.exceeds(names_max, inodes_max) {
            let Some(ino) = self.store.oldest() else {
                return;
            };
            let now = self.now;
            let names = self.store.names_of(ino);
            self.interest.evicted(ino, names);
            if let Some(holder) = &mut self.holder {
                holder.release(now, ino);
            }
            self.act(0);
            let is_left = self.store.directory(ino).is_some() || self.store.file(ino).is_some();
            if is_left {
                return;
            }
        }
    }
}
