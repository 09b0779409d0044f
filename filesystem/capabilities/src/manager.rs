//! The leader's side: who holds what, who waits for what, and what is recalled.

mod chores;
mod claims;
mod decide;
mod queue;
mod recalls;
mod recent;
mod sessions;
mod table;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use namespace::{Ino, SessionId};
use serde::{Deserialize, Serialize};

use crate::kind::{Access, Kind, Touch, Want};
use crate::limits::Limit;
use crate::message::{GrantId, Link, Refusal, ToHolder, ToManager};
use crate::settings::Settings;
use crate::time::Instant;
use chores::Chore;
use queue::{Goal, Item, Queue, Waiters};
use recalls::Recalls;
use recent::Recent;
use sessions::Sessions;
use table::{Held, Table};

/// Requests and operations of a session that wait. A further one is refused with [`Refusal::TooMany`]. A
/// session has 1,024 slots for operations; the other half is for requests of capabilities.
pub const WAITING_MAX: usize = 2048;

/// Inodes that an operation touches. A rename touches two directories, the inode that is moved and the one
/// that is replaced, as an inode and as a child.
pub const FOOTPRINT_MAX: usize = 8;

/// An operation that the caller began. No two that have not ended have the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OperationId(pub u64);

/// How a session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionEnd {
    /// Its heartbeat lease ended, by the clock of whoever watches it, so the holder has dropped all by
    /// itself; or it said goodbye after it had dropped all.
    LeaseEnded,
    /// The next incarnation of the node's daemon has registered. The holder is no more, but guests' kernels
    /// may use what they were told just before: their validity is waited out.
    Restarted,
}

/// A moment at which records are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// Exclusive capabilities that had been given up.
    exclusives: u64,
    /// Changes of files by who held them exclusively that had ended.
    changes: u64,
}

/// What the caller has to do, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Send a message to a session on this connection. It is dropped if the connection is not there any more.
    Send {
        /// The session.
        session: SessionId,
        /// The connection.
        link: Link,
        /// The message.
        message: ToHolder,
    },
    /// Nothing is in an operation's way: propose it, or read for it.
    Proceed {
        /// The operation, which is under way until [`Manager::end`].
        operation: OperationId,
    },
    /// An operation does not go on.
    Refuse {
        /// The operation, which is forgotten.
        operation: OperationId,
        /// Why.
        refusal: Refusal,
    },
    /// A session did not answer a recall in time, or did not claim. Others wait. For health; given once.
    Late {
        /// The session.
        session: SessionId,
        /// The inode that is recalled; none if the session has not claimed.
        ino: Option<Ino>,
        /// Since when it is waited for.
        since: Instant,
    },
    /// Nothing of an ended session is in use any more, by itself or by guests. The record of the session may
    /// be removed from the namespace now, and not before: a new leader has to know of it.
    Fenced {
        /// The session.
        session: SessionId,
    },
    /// All sessions have claimed or ended.
    Reclaimed,
    /// A session has exceeded a limit, and its connection counts as [`Manager::disconnected`]. The session
    /// may continue on another connection.
    Close {
        /// The session.
        session: SessionId,
        /// The limit.
        limit: Limit,
    },
}

/// Figures for `fs show` and metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counts {
    /// Sessions that are known.
    pub sessions: usize,
    /// Capabilities that are held.
    pub capabilities: usize,
    /// Recalls that were not answered yet.
    pub recalls: usize,
    /// Requests and operations that wait.
    pub waiting: usize,
    /// Operations under way.
    pub under_way: usize,
}

/// The capabilities of one filesystem, at the leader of its group, in one term.
///
/// A leader makes a new one for each term, once the state machine has applied the first entry of that term,
/// so that no operation of an earlier leader is still to come. It throws it away when it has lost the
/// leadership, and closes its connections. Until [`Manager::lead_until`] says that it leads, and whenever
/// that time has passed, nothing is granted and no operation goes on.
#[derive(Debug)]
pub struct Manager {
    term: u64,
    settings: Settings,
    now: Instant,
    lead_until: Instant,
    /// Something could not go on because the leader's lease had ended.
    is_stalled: bool,
    /// When sessions that have not claimed are reported.
    claims_late_at: Option<Instant>,
    started_at: Instant,
    is_reclaimed: bool,
    sessions: Sessions,
    table: Table,
    queue: Queue,
    /// Changes under way of files that their session holds exclusively: whoever has the directory cached was
    /// not asked to forget these.
    covered: BTreeMap<OperationId, Ino>,
    covered_ended: Recent,
    recalls: Recalls,
    last_grant: u64,
    /// Inodes that changed, and the waiting items that are checked again because of it.
    touched: BTreeMap<Ino, Waiters>,
    /// Work that is done in small steps.
    chores: VecDeque<Chore>,
    actions: VecDeque<Action>,
    /// Number of steps, for tests of the complexity.
    #[cfg(test)]
    steps: u64,
}

impl Manager {
    /// A new leader's. `sessions` are all that the namespace has a record of, as of the first entry of the
    /// term. They may hold capabilities: until each has claimed or ended, nothing goes on that could conflict
    /// with what they hold.
    pub fn new(
        now: Instant,
        term: u64,
        sessions: impl IntoIterator<Item = SessionId>,
        settings: Settings,
    ) -> Self {
        let late_at = now + settings.answer_within;
        let mut manager = Self {
            term,
            settings,
            now,
            lead_until: Instant::START,
            is_stalled: false,
            claims_late_at: None,
            started_at: now,
            is_reclaimed: false,
            sessions: Sessions::default(),
            table: Table::default(),
            queue: Queue::default(),
            covered: BTreeMap::new(),
            covered_ended: Recent::default(),
            recalls: Recalls::default(),
            last_grant: 0,
            touched: BTreeMap::new(),
            chores: VecDeque::new(),
            actions: VecDeque::new(),
            #[cfg(test)]
            steps: 0,
        };
        for session in sessions {
            manager.sessions.open(session, true);
        }
        manager.claims_late_at = Some(late_at);
        manager.reclaimed_if_all();
        manager
    }

    /// The leader's lease: until then nobody else leads. It counts from when the heartbeats were sent that
    /// a majority answered, and is shorter than what followers wait before they vote, by the drift bound.
    pub fn lead_until(&mut self, now: Instant, until: Instant) {
        self.advance(now);
        self.lead_until = self.lead_until.max(until);
        if self.is_stalled && self.now < self.lead_until {
            self.is_stalled = false;
            self.touch_all_waited_for();
        }
        self.pump();
    }

    /// A session that was opened in this term: it holds nothing.
    pub fn session_opened(&mut self, session: SessionId) {
        self.sessions.open(session, false);
    }

    /// A session has ended, as [`SessionEnd`] says. Whatever it still sends is ignored, its operations are
    /// refused, and what it held is given up once no guest uses it any more: [`Action::Fenced`].
    pub fn session_ended(&mut self, now: Instant, session: SessionId, end: SessionEnd) {
        self.advance(now);
        let until = match end {
            SessionEnd::LeaseEnded => self.now,
            SessionEnd::Restarted => self.now + self.settings.promise(),
        };
        self.sessions.end(session, until);
        for item in self.queue.take_of(session) {
            self.touch(&item);
            if let Goal::Operation(operation) = item.goal {
                let refusal = Refusal::SessionEnded;
                self.actions
                    .push_back(Action::Refuse { operation, refusal });
            }
        }
        self.advance(now);
        self.pump();
    }

    /// A session's connection broke. Its requests and operations that wait are forgotten, without an action:
    /// it sends them again on its next connection. Operations under way go on to their end.
    pub fn disconnected(&mut self, now: Instant, session: SessionId) {
        self.advance(now);
        self.sessions.disconnect(session);
        for item in self.queue.take_of(session) {
            self.touch(&item);
        }
        self.pump();
    }

    /// Processes a message that a session sent on this connection. Messages of old connections are ignored.
    /// The first claims begin a new connection: the old one counts as [`Manager::disconnected`].
    pub fn receive(&mut self, now: Instant, session: SessionId, link: Link, message: ToManager) {
        self.advance(now);
        if link.term != self.term {
            return;
        }
        match message {
            ToManager::Claims(claims) => self.claim(session, link, &claims, true),
            ToManager::SomeClaims(claims) => self.claim(session, link, &claims, false),
            _ if self.sessions.link(session) != Some(link) => {}
            _ if self.sessions.is_claiming(session) => self.close(session, Limit::Claims),
            ToManager::Request { ino, kind, parent } => self.request(session, ino, kind, parent),
            ToManager::Dropped { ino, grant, kept } => self.dropped(session, ino, grant, kept),
        }
        self.pump();
    }

    /// An operation of a session, or of the leader itself as [`SessionId::NONE`], wants to touch these
    /// inodes. [`Action::Proceed`] follows when nobody else has them cached, at once or later.
    pub fn begin(
        &mut self,
        now: Instant,
        operation: OperationId,
        session: SessionId,
        footprint: &[Touch],
    ) {
        assert!(footprint.len() <= FOOTPRINT_MAX, "a footprint is bounded");
        self.advance(now);
        let touches: BTreeSet<Touch> = footprint.iter().copied().collect();
        let wants = touches
            .iter()
            .map(|touch| (touch.ino, Want::Touch(touch.access)));
        let wants: Vec<(Ino, Want)> = wants.collect();
        let is_own = session == SessionId::NONE;
        let refusal = if !is_own && !self.sessions.may_operate(session) {
            Some(Refusal::SessionEnded)
        } else if self.queue.waiting_of(session) >= WAITING_MAX && !self.is_covered(session, &wants)
        {
            Some(Refusal::TooMany)
        } else {
            None
        };
        if let Some(refusal) = refusal {
            self.actions
                .push_back(Action::Refuse { operation, refusal });
        } else {
            let goal = Goal::Operation(operation);
            let ticket = self.queue.push(Item {
                session,
                goal,
                wants,
            });
            self.attempt(ticket);
        }
        self.pump();
    }

    /// An operation that went on has ended: it is applied, or never will be, or what it had to read is read.
    ///
    /// # Panics
    /// If it is not under way.
    pub fn end(&mut self, now: Instant, operation: OperationId) {
        self.advance(now);
        let item = self.queue.finish(operation);
        let item = item.expect("an operation ends once, and after it went on");
        if let Some(ino) = self.covered.remove(&operation) {
            self.covered_ended.note(ino);
        }
        self.touch(&item);
        for (ino, want) in item.wants {
            if want == Want::Touch(Access::MoveFile) {
                self.refuse_moved(ino);
            }
        }
        self.pump();
    }

    /// Time has passed: [`Manager::next_wakeup`] is reached.
    pub fn tick(&mut self, now: Instant) {
        self.advance(now);
        self.pump();
    }

    /// When [`Manager::tick`] is due.
    pub fn next_wakeup(&self) -> Option<Instant> {
        let times = [
            (!self.chores.is_empty()).then_some(self.now),
            self.recalls.next_deadline(),
            self.sessions.next_end(),
            self.claims_late_at,
        ];
        times.into_iter().flatten().min()
    }

    /// The next thing to do. Ask until there is none, at the time of the last call, before anything else
    /// is passed in.
    pub fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Whether some session has not claimed yet.
    pub fn is_reclaiming(&self) -> bool {
        !self.is_reclaimed
    }

    /// Whether a file's attributes, as the leader has them, are those of now, and may be cached by a session
    /// that holds its directory as [`Kind::DirectoryRead`]. If not, they are not told with the directory's
    /// names: they have to be asked for by an operation with [`Access::ReadFile`].
    pub fn may_cache_child(&self, session: SessionId, ino: Ino) -> bool {
        let held = self.table.get(session, ino);
        let is_known = held.is_some() || !self.sessions.is_reclaiming();
        let child = Want::Hold(Kind::FileRead);
        let is_exclusive =
            |other: &Held| other.session != session && other.kind == Kind::FileExclusive;
        is_known
            && !self.table.holders(ino).iter().any(is_exclusive)
            && !self.queue.is_used(session, ino, child)
    }

    /// Files among these that somebody else may have buffered changes of: the records may be older than what
    /// guests were answered. They are told to a session only while an operation of it with
    /// [`Access::ReadFile`] is under way.
    pub fn buffered_elsewhere(
        &self,
        session: SessionId,
        files: impl IntoIterator<Item = Ino>,
    ) -> Vec<Ino> {
        let is_reclaiming = self.sessions.is_reclaiming();
        let is_buffered = |ino: &Ino| {
            let mut holders = self.table.holders(*ino).iter();
            let is_exclusive =
                |held: &Held| held.session != session && held.kind == Kind::FileExclusive;
            is_reclaiming && self.table.get(session, *ino).is_none() || holders.any(is_exclusive)
        };
        files.into_iter().filter(is_buffered).collect()
    }

    /// Now, before records are read.
    pub fn moment(&self) -> Moment {
        Moment {
            exclusives: self.table.exclusives_ended().last(),
            changes: self.covered_ended.last(),
        }
    }

    /// Whether nobody gave up any of these files as exclusive since: then what
    /// [`Manager::buffered_elsewhere`] says now was true before the records were read.
    pub fn is_same(&self, files: &BTreeSet<Ino>, since: Moment) -> bool {
        let ended = self.table.exclusives_ended();
        let mut files = files.iter();
        !files.any(|ino| ended.is_since(*ino, since.exclusives))
    }

    /// Whether what the records said of these files may be cached as attributes of a directory's children:
    /// nobody else changes one, or has since.
    pub fn may_cache(&self, session: SessionId, files: &BTreeSet<Ino>, since: Moment) -> bool {
        let mut files = files.iter();
        files.all(|ino| {
            let is_same = !self.covered_ended.is_since(*ino, since.changes);
            is_same && self.may_cache_child(session, *ino)
        })
    }

    /// Refuses a request for a file as exclusive that named another directory than the records have.
    pub(crate) fn refuse_place(&mut self, session: SessionId, ino: Ino) {
        if self.sessions.is_claiming(session) {
            return self.close(session, Limit::Claims);
        }
        let (kind, refusal) = (Kind::FileExclusive, Refusal::Moved);
        self.send(session, ToHolder::Refuse { ino, kind, refusal });
    }

    /// Whether something could not go on because the leader's lease had ended.
    pub(crate) fn is_stalled(&self) -> bool {
        self.is_stalled
    }

    /// Returns whether a session is there, and not ended and given up.
    pub(crate) fn knows(&self, session: SessionId) -> bool {
        self.sessions.has(session)
    }

    /// Closes the connection of a session that has exceeded a limit, with [`Action::Close`]. Without a
    /// connection nothing happens.
    pub(crate) fn close_link(&mut self, now: Instant, session: SessionId, limit: Limit) {
        self.advance(now);
        self.close(session, limit);
        self.pump();
    }

    /// Returns whether a session has claimed all that it holds on its connection.
    pub(crate) fn has_claimed(&self, session: SessionId) -> bool {
        !self.sessions.is_claiming(session)
    }

    /// Returns the connection on which a session claims or has claimed.
    pub(crate) fn link(&self, session: SessionId) -> Option<Link> {
        self.sessions.link(session)
    }

    /// Whether an operation waits.
    pub(crate) fn waits(&self, operation: OperationId) -> bool {
        self.queue.has(operation)
    }

    /// Whether what the session holds lets it touch all of this, whatever others wait for.
    pub(crate) fn covers(&self, session: SessionId, touches: &[Touch]) -> bool {
        let wants = touches
            .iter()
            .map(|touch| (touch.ino, Want::Touch(touch.access)));
        self.is_covered(session, &wants.collect::<Vec<_>>())
    }

    /// A session that others wait for since long: it does not answer a recall, or has not claimed.
    pub fn late(&self, now: Instant) -> Option<SessionId> {
        let claims_late = self.started_at + self.settings.answer_within <= now;
        let unclaimed = self.sessions.unclaimed().next().filter(|_| claims_late);
        unclaimed.or_else(|| self.recalls.late(now))
    }

    /// Figures.
    pub fn counts(&self) -> Counts {
        Counts {
            sessions: self.sessions.count(),
            capabilities: self.table.count(),
            recalls: self.recalls.count(),
            waiting: self.queue.waiting(),
            under_way: self.queue.under_way(),
        }
    }

    fn request(&mut self, session: SessionId, ino: Ino, kind: Kind, parent: Option<Ino>) {
        // Replaces the session's earlier request for the inode.
        if let Some(before) = self.queue.take_request(session, ino) {
            self.touch(&before);
        }
        let is_full = self.table.count_of(session) >= self.settings.refused_at();
        if is_full || self.queue.waiting_of(session) >= WAITING_MAX {
            let refusal = Refusal::TooMany;
            self.send(session, ToHolder::Refuse { ino, kind, refusal });
            return;
        }
        let mut wants = vec![(ino, Want::Hold(kind))];
        if let (Kind::FileExclusive, Some(parent)) = (kind, parent) {
            wants.push((parent, Want::Touch(Access::ChangeChild(ino))));
        }
        let goal = Goal::Grant { ino, kind };
        let ticket = self.queue.push(Item {
            session,
            goal,
            wants,
        });
        self.attempt(ticket);
    }

    /// A file's names have changed: requests that wait for it may name a directory that it is not in.
    fn refuse_moved(&mut self, ino: Ino) {
        for item in self.queue.take_exclusive(ino) {
            self.touch(&item);
            let (kind, refusal) = (Kind::FileExclusive, Refusal::Moved);
            self.send(item.session, ToHolder::Refuse { ino, kind, refusal });
        }
    }

    fn dropped(&mut self, session: SessionId, ino: Ino, grant: GrantId, kept: Option<Kind>) {
        let held = self.table.get(session, ino);
        let Some(held) = held.filter(|held| held.grant == grant) else {
            return;
        };
        match kept.filter(|kept| held.kind.includes(*kept)) {
            Some(kept) => self.table.lower(session, ino, kept),
            None => {
                self.table.remove(session, ino);
            }
        }
        let left = self.table.get(session, ino).map(|held| held.kind);
        self.answered(session, ino, left);
        self.touched.insert(ino, Waiters::All);
    }

    /// Records what a session has left of an inode, according to its answer.
    fn answered(&mut self, session: SessionId, ino: Ino, left: Option<Kind>) {
        self.recalls.answer(session, ino, left);
        let is_recalled = self.recalls.is_recalled(session, ino);
        self.table.set_recalled(session, ino, is_recalled);
    }

    /// What ends or becomes late by now.
    fn advance(&mut self, now: Instant) {
        self.now = self.now.max(now);
        while let Some((session, ino, since)) = self.recalls.take_late(self.now) {
            let ino = Some(ino);
            self.actions.push_back(Action::Late {
                session,
                ino,
                since,
            });
        }
        if self.claims_late_at.is_some_and(|at| at <= self.now) {
            self.claims_late_at = None;
            let since = self.started_at;
            let late = self.sessions.unclaimed();
            let late = late.map(|session| Action::Late {
                session,
                ino: None,
                since,
            });
            self.actions.extend(late);
        }
        while let Some(session) = self.sessions.take_ended(self.now) {
            self.fence(session);
        }
    }
}
