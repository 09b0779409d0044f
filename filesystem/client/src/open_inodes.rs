//! Inodes that guests of this host use, and their release after they have lost their last name.
//!
//! A guest uses an inode that it has open, or that its kernel has looked up and not forgotten: O_PATH
//! descriptors, working directories and an open(2) that follows a lookup have no handle here.
//!
//! The namespace keeps an inode without a name, an orphan, as long as a session holds it. Any host may remove
//! a name, and knows only which inodes its own guests use. Therefore every session holds a new orphan, and
//! each host releases those that its guests do not use. A lookup needs no message.
//! - A host also holds an orphan that it made itself: it learns the inode of a name only when the name is
//!   removed, and a guest may look the inode up until then.
//! - An inode counts as open from before it is looked at until after it is closed.
//! - A request that tells a guest of an inode ([`Telling`]) learns its number from a name, or makes it. Until
//!   the guest's lookup is counted, the inode may have lost that name, and may have been found to be held. So
//!   what was found is let go of only when all requests have ended that had begun before. Later ones do not
//!   find the name.
//! - An inode without a name is opened, or looked up by its number, only where it is used already: no other
//!   host is sure to hold it.
//! - A file that a guest makes without a name is an orphan from the start, which this session alone holds.
//!   The guest that uses it may give it its first name. It is no orphan from then on, whatever an answer says
//!   that was given before.
//!
//! A session that ends releases all orphans that it held.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fs_capabilities::{GuestId, Instant};
use fuse_codec::Errno;
use namespace::Ino;

#[cfg(feature = "testing")]
use crate::cache::Mistake;
use crate::handles::GuestSession;
use crate::looked_up::{LOOKED_UP_MAX, LookedUp};
use crate::sync::{Signal, lock};

/// What is opened: names of directories are removed by other operations than those of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OpenKind {
    File,
    Directory,
}

/// Orphans that wait for their release. Others are found again by the query for held orphans.
const RELEASES_MAX: usize = 4096;

/// Files that got their first name during one question for held orphans and are remembered until it is
/// answered. With more, that answer is not used; the next round asks again.
const NAMED_MAX: usize = 4096;

/// Age from which an orphan that is looked up and not open is given up where the pool is short of space.
pub(crate) const GIVEN_UP_AFTER: Duration = Duration::from_secs(60);

/// Lookups of former mounts that are freed while the table is locked.
const FREED_AT_ONCE_MAX: usize = 1024;
/// How often that is done in one round of the background. More waits for the next round.
const FREED_ROUNDS_MAX: usize = 64;

pub(crate) struct OpenInodes {
    state: Mutex<State>,
    /// Notified when there is an orphan to release.
    pub(crate) wake: Signal,
    #[cfg(feature = "testing")]
    mistake: Option<Mistake>,
}

#[derive(Default)]
struct State {
    open: HashMap<Ino, OpenInode>,
    guests: BTreeMap<GuestId, Guest>,
    /// Orphans that guests use.
    orphans: BTreeMap<Ino, Orphan>,
    /// Orphans that are being released.
    releasing: HashSet<Ino>,
    to_release: VecDeque<ToRelease>,
    /// Requests whose replies may contain an inode, in the order in which they began.
    telling: BTreeSet<u64>,
    next_telling: u64,
    /// Position of the search for held orphans.
    held_from: Ino,
    /// Files that got their first name since a question for held orphans was begun that is under way.
    named: Option<BTreeSet<Ino>>,
    /// Some guest has looked up more than is remembered, which is logged once.
    is_dropping: bool,
}

#[derive(Default)]
struct OpenInode {
    /// Handles, and what looks whether it can be one.
    count: usize,
    /// Handles.
    handles: usize,
}

struct Guest {
    session: GuestSession,
    looked_up: LookedUp,
}

#[derive(Debug, Clone, Copy)]
struct Orphan {
    found: Moment,
    since: Instant,
}

#[derive(Debug, Clone, Copy)]
struct ToRelease {
    ino: Ino,
    found: Moment,
    /// Set if a guest's kernel may still know the inode.
    is_given_up: bool,
}

/// Position in the order of [`Telling`]s.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(u64);

/// An inode that counts as open until this is dropped.
pub(crate) struct OpenGuard {
    inodes: Arc<OpenInodes>,
    ino: Ino,
    kind: OpenKind,
    is_handle: bool,
}

/// A request whose reply may contain an inode.
pub(crate) struct Telling {
    inodes: Arc<OpenInodes>,
    guest: GuestId,
    session: GuestSession,
    number: u64,
}

/// An orphan that is being released and cannot be opened.
pub(crate) struct Release {
    inodes: Arc<OpenInodes>,
    pub(crate) ino: Ino,
}

impl OpenInodes {
    pub(crate) fn new(#[cfg(feature = "testing")] mistake: Option<Mistake>) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::default(),
            wake: Signal::default(),
            #[cfg(feature = "testing")]
            mistake,
        })
    }

    /// Counts an inode as open. Returns `None` if it is being released: it has no name then.
    pub(crate) fn open(self: &Arc<Self>, ino: Ino, kind: OpenKind) -> Option<OpenGuard> {
        let mut state = lock(&self.state);
        if state.releasing.contains(&ino) {
            return None;
        }
        state.open.entry(ino).or_default().count += 1;
        Some(OpenGuard {
            inodes: Arc::clone(self),
            ino,
            kind,
            is_handle: false,
        })
    }

    /// Whether there is a handle of an inode.
    pub(crate) fn has_handle(&self, ino: Ino) -> bool {
        lock(&self.state).has_handle(ino)
    }

    /// Returns whether a guest has a handle of an inode, or has looked it up.
    pub(crate) fn has_user(&self, ino: Ino) -> bool {
        let state = lock(&self.state);
        state.has_handle(ino) || state.is_looked_up(ino)
    }

    /// Number of inodes that count as open.
    pub(crate) fn len(&self) -> usize {
        lock(&self.state).open.len()
    }

    /// A guest mounts. Called by data threads: what a former mount of it has looked up is freed later
    /// ([`Self::free_former`]), and its orphans are found by the background.
    pub(crate) fn add_guest(&self, id: GuestId, session: GuestSession) {
        let mut state = lock(&self.state);
        let guest = state.guests.entry(id).or_insert_with(|| Guest {
            session,
            looked_up: LookedUp::new(LOOKED_UP_MAX),
        });
        guest.session = session;
        guest.looked_up.restart();
    }

    /// Frees some of what former mounts have looked up.
    pub(crate) fn free_former(&self) {
        for _ in 0..FREED_ROUNDS_MAX {
            let mut state = lock(&self.state);
            let mut guests = state.guests.values_mut();
            if !guests.any(|guest| guest.looked_up.free_former(FREED_AT_ONCE_MAX)) {
                return;
            }
        }
    }

    /// Removes a guest that will not mount any more.
    pub(crate) fn remove_guest(&self, id: GuestId) {
        let removed = lock(&self.state).guests.remove(&id);
        drop(removed);
    }

    /// Begins a request whose reply may contain an inode.
    pub(crate) fn begin_telling(
        self: &Arc<Self>,
        guest: GuestId,
        session: GuestSession,
    ) -> Telling {
        let mut state = lock(&self.state);
        let number = state.next_telling;
        state.next_telling += 1;
        state.telling.insert(number);
        Telling {
            inodes: Arc::clone(self),
            guest,
            session,
            number,
        }
    }

    /// Subtracts lookups that a guest's kernel gives up.
    pub(crate) fn forget(&self, guest: GuestId, ino: Ino, lookups: u64) {
        let mut state = lock(&self.state);
        let Some(guest) = state.guests.get_mut(&guest) else {
            return;
        };
        if guest.looked_up.forget(ino, lookups) && state.note_unused(ino) {
            drop(state);
            self.wake.notify();
        }
    }

    /// Returns the current position. An inode found without a name now lost it before this moment.
    pub(crate) fn moment(&self) -> Moment {
        Moment(lock(&self.state).next_telling)
    }

    /// Notes that this session holds an inode without a name. It is released if no guest uses it.
    pub(crate) fn note_orphan(&self, now: Instant, ino: Ino, found: Moment) {
        self.note_unless(|_| false, now, ino, found);
    }

    fn note_unless(
        &self,
        is_over: impl FnOnce(&State) -> bool,
        now: Instant,
        ino: Ino,
        found: Moment,
    ) {
        let mut state = lock(&self.state);
        if is_over(&state) || !self.frees_looked_up() && state.keep(now, ino, found) {
            return;
        }
        state.orphans.remove(&ino);
        state.note_release(ToRelease {
            ino,
            found,
            is_given_up: false,
        });
        drop(state);
        self.wake.notify();
    }

    /// Removes and returns at most `max` orphans to release: no guest uses them, and no pending reply may
    /// contain them.
    pub(crate) fn begin_releases(self: &Arc<Self>, now: Instant, max: usize) -> Vec<Release> {
        let mut state = lock(&self.state);
        let mut releases = Vec::new();
        while releases.len() < max {
            let Some(next) = state.to_release.front().copied() else {
                break;
            };
            if state.is_awaited(next.found) && !self.frees_untold() {
                break;
            }
            state.to_release.pop_front();
            let is_kept = match next.is_given_up || self.frees_looked_up() {
                true => state.open.contains_key(&next.ino),
                false => state.keep(now, next.ino, next.found),
            };
            if !is_kept && state.releasing.insert(next.ino) {
                releases.push(Release {
                    inodes: Arc::clone(self),
                    ino: next.ino,
                });
            }
        }
        releases
    }

    /// Gives up orphans that kernels have looked up and no guest has open, if they are older than
    /// [`GIVEN_UP_AFTER`]. Checks `max` orphans from a number on. Returns the number to continue at and the
    /// number of orphans that were given up.
    pub(crate) fn give_up(&self, now: Instant, from: Ino, max: usize) -> (Option<Ino>, usize) {
        let mut state = lock(&self.state);
        let seen: Vec<(Ino, Orphan)> = state
            .orphans
            .range(from..)
            .take(max)
            .map(|(ino, orphan)| (*ino, *orphan))
            .collect();
        let mut count = 0;
        for (ino, orphan) in &seen {
            let is_due = orphan.since + GIVEN_UP_AFTER <= now;
            if !is_due || state.open.contains_key(ino) {
                continue;
            }
            state.orphans.remove(ino);
            state.note_release(ToRelease {
                ino: *ino,
                found: orphan.found,
                is_given_up: true,
            });
            count += 1;
        }
        let next = seen.last().filter(|_| seen.len() == max);
        (next.map(|(ino, _)| Ino(ino.0 + 1)), count)
    }

    /// A question for orphans that the session holds is about to be asked, one at a time. Returns where the
    /// search continues.
    pub(crate) fn begin_held(&self) -> Ino {
        let mut state = lock(&self.state);
        state.named = Some(BTreeSet::new());
        state.held_from
    }

    /// The answer says that this session holds an inode. That is over if it got its first name since.
    pub(crate) fn note_held(&self, now: Instant, ino: Ino, found: Moment) {
        let is_named = |named: &BTreeSet<Ino>| named.len() >= NAMED_MAX || named.contains(&ino);
        let is_over = |state: &State| state.named.as_ref().is_some_and(is_named);
        self.note_unless(is_over, now, ino, found);
    }

    /// The answer was used.
    pub(crate) fn end_held(&self) {
        let named = lock(&self.state).named.take();
        drop(named);
    }

    /// An inode that may have had no name was linked.
    pub(crate) fn note_name(&self, ino: Ino) {
        #[cfg(feature = "testing")]
        if self.mistake == Some(Mistake::FreeNamed) {
            return;
        }
        let mut state = lock(&self.state);
        state.orphans.remove(&ino);
        let named = state.named.as_mut().filter(|named| named.len() < NAMED_MAX);
        named.map(|named| named.insert(ino));
    }

    pub(crate) fn set_held_from(&self, from: Ino) {
        lock(&self.state).held_from = from;
    }

    /// Forgets all orphans: a new session begins, which holds none.
    pub(crate) fn session_replaced(&self) {
        let mut state = lock(&self.state);
        let orphans = std::mem::take(&mut state.orphans);
        state.to_release.clear();
        state.held_from = Ino(0);
        drop(state);
        drop(orphans);
    }

    #[cfg(feature = "testing")]
    fn frees_looked_up(&self) -> bool {
        self.mistake == Some(Mistake::FreeLookedUp)
    }

    #[cfg(feature = "testing")]
    fn frees_untold(&self) -> bool {
        self.mistake == Some(Mistake::FreeBeforeTold)
    }

    #[cfg(not(feature = "testing"))]
    fn frees_looked_up(&self) -> bool {
        false
    }

    #[cfg(not(feature = "testing"))]
    fn frees_untold(&self) -> bool {
        false
    }
}

impl State {
    fn has_handle(&self, ino: Ino) -> bool {
        self.open.get(&ino).is_some_and(|inode| inode.handles > 0)
    }

    fn is_looked_up(&self, ino: Ino) -> bool {
        let mut guests = self.guests.values();
        guests.any(|guest| guest.looked_up.knows(ino))
    }

    fn is_used(&self, ino: Ino) -> bool {
        self.open.contains_key(&ino) || self.is_looked_up(ino)
    }

    /// Returns whether a pending reply may contain an inode that was found at this moment.
    fn is_awaited(&self, found: Moment) -> bool {
        self.telling.first().is_some_and(|first| *first < found.0)
    }

    /// Keeps an orphan if it is used. Returns whether it is.
    fn keep(&mut self, now: Instant, ino: Ino, found: Moment) -> bool {
        let is_used = self.is_used(ino);
        if is_used {
            let orphan = Orphan { found, since: now };
            self.orphans.entry(ino).or_insert(orphan);
        }
        is_used
    }

    fn note_release(&mut self, release: ToRelease) {
        if self.to_release.len() < RELEASES_MAX {
            self.to_release.push_back(release);
        }
    }

    /// Handles the close or the last FORGET of an inode. Returns whether it is an orphan to release.
    fn note_unused(&mut self, ino: Ino) -> bool {
        // Checked first because few inodes are orphans, and the check for users searches the tables of all
        // guests.
        let Some(Orphan { found, .. }) = self.orphans.get(&ino).copied() else {
            return false;
        };
        if self.is_used(ino) {
            return false;
        }
        self.orphans.remove(&ino);
        self.note_release(ToRelease {
            ino,
            found,
            is_given_up: false,
        });
        true
    }

    /// Closes an inode. Returns whether that was the last use of an orphan.
    fn close(&mut self, ino: Ino, is_handle: bool) -> bool {
        let inode = self.open.get_mut(&ino).expect("an open inode is counted");
        inode.count -= 1;
        inode.handles -= usize::from(is_handle);
        if inode.count > 0 {
            return false;
        }
        self.open.remove(&ino);
        self.note_unused(ino)
    }
}

impl OpenGuard {
    /// It is open for good: there is a handle of it.
    pub(crate) fn into_handle(mut self) -> Self {
        if !self.is_handle {
            let mut state = lock(&self.inodes.state);
            let inode = state.open.get_mut(&self.ino);
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
            drop(state);
            self.inodes.wake.notify();
        }
    }
}

impl Telling {
    /// Counts a lookup just before the reply with the inode is sent. `has_name`: the request found the inode
    /// by a name, or created it. Otherwise the inode must be in use.
    pub(crate) fn tell(&self, ino: Ino, has_name: bool) -> Result<(), Errno> {
        // The root is never removed, and kernels do not forget it.
        if ino == Ino::ROOT {
            return Ok(());
        }
        let mut state = lock(&self.inodes.state);
        if state.releasing.contains(&ino) || !has_name && !state.is_used(ino) {
            return Err(Errno::ESTALE);
        }
        let guest = state.guests.get_mut(&self.guest);
        let guest = guest.filter(|guest| guest.session == self.session);
        // After an unmount no FORGET would subtract this lookup.
        let dropped = guest.ok_or(Errno::EIO)?.looked_up.note(ino);
        if dropped.is_empty() {
            return Ok(());
        }
        let is_first = !std::mem::replace(&mut state.is_dropping, true);
        drop(state);
        if is_first {
            tracing::warn!(
                limit = LOOKED_UP_MAX,
                "a guest's kernel has looked up more inodes than this host remembers: the oldest are \
                 dropped, and answer ESTALE if they are removed and not open"
            );
        }
        Ok(())
    }
}

impl Telling {
    /// Counts lookups of inodes that were found by their names, in one reply: all, or none if that fails.
    pub(crate) fn tell_all(&self, inodes: &[Ino]) -> Result<(), Errno> {
        for (count, ino) in inodes.iter().enumerate() {
            if let Err(errno) = self.tell(*ino, true) {
                inodes[..count].iter().for_each(|ino| self.take_back(*ino));
                return Err(errno);
            }
        }
        Ok(())
    }

    /// Takes a lookup back: the reply does not show the guest the inode.
    fn take_back(&self, ino: Ino) {
        let mut state = lock(&self.inodes.state);
        let guest = state.guests.get_mut(&self.guest);
        // The lookups of a guest that unmounted meanwhile are gone.
        let guest = guest.filter(|guest| guest.session == self.session);
        let is_gone = guest.is_some_and(|guest| guest.looked_up.forget(ino, 1));
        if is_gone && state.note_unused(ino) {
            drop(state);
            self.inodes.wake.notify();
        }
    }
}

impl Drop for Telling {
    fn drop(&mut self) {
        let mut state = lock(&self.inodes.state);
        state.telling.remove(&self.number);
        let next = state.to_release.front();
        if next.is_some_and(|next| !state.is_awaited(next.found)) {
            drop(state);
            self.inodes.wake.notify();
        }
    }
}

impl Drop for Release {
    fn drop(&mut self) {
        lock(&self.inodes.state).releasing.remove(&self.ino);
    }
}

#[cfg(test)]
mod tests;
