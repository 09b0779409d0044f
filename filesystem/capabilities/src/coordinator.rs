//! The leader's side of one filesystem: the manager, operations that wait for each other, and numbered
//! messages to sessions.

mod outbox;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use namespace::{Ino, SessionId};

use crate::exclusion::Exclusion;
use crate::footprint::Footprint;
use crate::kind::{Access, Kind, Touch};
use crate::limits::{Limit, MESSAGES_MAX};
use crate::manager::{
    Action, Counts, FOOTPRINT_MAX, Manager, Moment, OperationId, SessionEnd, WAITING_MAX,
};
use crate::message::{Link, Refusal, ToHolder, ToManager};
use crate::settings::Settings;
use crate::time::Instant;
pub use outbox::Gone;
use outbox::Outbox;

/// What the owner of a [`Coordinator`] has to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Nothing is in an operation's way. If [`footprint`](crate::footprint()) still says the same of it,
    /// apply it and then say [`Coordinator::end`]; else say `end` at once, and begin it anew.
    Proceed {
        /// The operation, which is under way until it is ended.
        operation: OperationId,
    },
    /// An operation does not go on. It is forgotten.
    Refuse {
        /// The operation.
        operation: OperationId,
        /// Why.
        refusal: Refusal,
    },
    /// There are messages for a session: answer who waits in [`Coordinator::messages`].
    Messages {
        /// The session.
        session: SessionId,
    },
    /// A session did not answer a recall in time, or did not claim what it holds.
    Late {
        /// The session.
        session: SessionId,
        /// The inode that is recalled; none if it did not claim.
        ino: Option<Ino>,
        /// Since when it is waited for.
        since: Instant,
    },
    /// What an ended session held is given up.
    Fenced {
        /// The session.
        session: SessionId,
    },
    /// All sessions of before this leader have claimed, or ended.
    Reclaimed,
    /// A session has exceeded a limit and lost its link: wake the callers that wait for
    /// [`Coordinator::messages`].
    LinkClosed {
        /// The session.
        session: SessionId,
        /// The limit.
        limit: Limit,
    },
}

/// What a leader does with an answer that tells of files ([`files_told`](crate::files_told)).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Told {
    /// It is as new as what guests were answered.
    Now,
    /// Something was written back meanwhile: read the records once more.
    Anew,
    /// Somebody else may have buffered changes of these files. Begin an operation with each footprint, and
    /// once they go on read the records once more. End them when the answer is told.
    Buffered(Vec<(Vec<Ino>, Footprint)>),
}

impl Told {
    /// Combines the actions for both sets of files.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Buffered(mut one), Self::Buffered(two)) => {
                one.extend(two);
                Self::Buffered(one)
            }
            (Self::Buffered(one), _) | (_, Self::Buffered(one)) => Self::Buffered(one),
            (Self::Anew, _) | (_, Self::Anew) => Self::Anew,
            (Self::Now, Self::Now) => Self::Now,
        }
    }
}

#[derive(Debug)]
struct Pending {
    session: SessionId,
    touches: Vec<Touch>,
    /// It has its parts, and is with the manager.
    is_begun: bool,
}

/// The leader's side of one filesystem.
///
/// Operations do not travel on sessions' links, so a link that breaks lets none be forgotten: each ends with
/// [`Event::Proceed`] and [`Coordinator::end`], or with [`Event::Refuse`].
#[derive(Debug)]
pub struct Coordinator {
    manager: Manager,
    exclusion: Exclusion,
    /// Operations that wait.
    pending: BTreeMap<OperationId, Pending>,
    /// Waiting operations by session.
    pending_of: BTreeMap<SessionId, BTreeSet<OperationId>>,
    /// Operations that have their parts, to be passed to the manager.
    to_begin: VecDeque<OperationId>,
    outboxes: BTreeMap<SessionId, Outbox>,
    /// Sessions whose waiting requests the manager has discarded.
    forgotten: BTreeSet<SessionId>,
    held_max: usize,
    events: VecDeque<Event>,
}

impl Coordinator {
    /// A new leader's, of this term. `sessions` are all that the records have as of the first entry of the
    /// term.
    pub fn new(
        now: Instant,
        term: u64,
        sessions: impl IntoIterator<Item = SessionId>,
        settings: Settings,
    ) -> Self {
        let held_max = settings.held_max();
        let mut coordinator = Self {
            manager: Manager::new(now, term, sessions, settings),
            exclusion: Exclusion::default(),
            pending: BTreeMap::new(),
            pending_of: BTreeMap::new(),
            to_begin: VecDeque::new(),
            outboxes: BTreeMap::new(),
            forgotten: BTreeSet::new(),
            held_max,
            events: VecDeque::new(),
        };
        coordinator.run(now);
        coordinator
    }

    /// The leader's lease, as in [`Manager::lead_until`].
    pub fn lead_until(&mut self, now: Instant, until: Instant) {
        self.manager.lead_until(now, until);
        self.run(now);
    }

    /// Whether something waits because the leader's lease has ended.
    pub fn is_stalled(&self) -> bool {
        self.manager.is_stalled()
    }

    /// A session that was opened in this term, or found to be there.
    pub fn session_opened(&mut self, session: SessionId) {
        self.manager.session_opened(session);
    }

    /// Returns whether a session is there, and not ended and given up.
    pub fn knows(&self, session: SessionId) -> bool {
        self.manager.knows(session)
    }

    /// A session has ended.
    pub fn session_ended(&mut self, now: Instant, session: SessionId, end: SessionEnd) {
        self.outboxes.remove(&session);
        self.manager.session_ended(now, session, end);
        self.run(now);
    }

    /// An operation of a session, or of the leader itself as [`SessionId::NONE`], begins. It waits for
    /// operations that decide about its footprint, and then for whoever has cached what it touches.
    pub fn begin(
        &mut self,
        now: Instant,
        operation: OperationId,
        session: SessionId,
        footprint: Footprint,
    ) {
        // What its own capability covers, nobody else moves: it may have to be done before others go on.
        let touches: Vec<Touch> = footprint.touches.iter().copied().collect();
        let needs_parts = touches.is_empty() || !self.manager.covers(session, &touches);
        let waiting = self.pending_of.get(&session).map_or(0, BTreeSet::len);
        if needs_parts && session != SessionId::NONE && waiting >= WAITING_MAX {
            let refusal = Refusal::TooMany;
            self.events.push_back(Event::Refuse { operation, refusal });
            return;
        }
        if !needs_parts || self.exclusion.begin(operation, &footprint) {
            self.to_begin.push_back(operation);
        }
        let pending = Pending {
            session,
            touches,
            is_begun: false,
        };
        self.pending_of
            .entry(session)
            .or_default()
            .insert(operation);
        let before = self.pending.insert(operation, pending);
        assert!(before.is_none(), "an operation begins once");
        self.run(now);
    }

    /// An operation that went on has ended: it is applied, or never will be.
    ///
    /// # Panics
    /// If it is not under way.
    pub fn end(&mut self, now: Instant, operation: OperationId) {
        self.manager.end(now, operation);
        self.to_begin.extend(self.exclusion.end(operation));
        self.run(now);
    }

    /// Takes messages of a session on this link, numbered from `first`. The first messages of a link are
    /// claims. Those that were taken already are skipped. `place_of` finds in the records, as
    /// they are during this call, the directory that has a file's only name ([`namespace::Inode::parent`]);
    /// none if there is no such inode. It is passed what the request says.
    ///
    /// A caller may split the messages of one call, so that it uses the coordinator for a short time only.
    ///
    /// # Errors
    /// The link is not the session's, a message between was lost, or the session has ended or exceeded a
    /// limit.
    pub fn take(
        &mut self,
        now: Instant,
        session: SessionId,
        link: Link,
        first: u64,
        messages: Vec<ToManager>,
        mut place_of: impl FnMut(Ino, Option<Ino>) -> Option<Option<Ino>>,
    ) -> Result<(), Gone> {
        if first.checked_add(messages.len() as u64).is_none() {
            return Err(Gone);
        }
        for (number, message) in (first..).zip(messages) {
            let is_claims = matches!(message, ToManager::Claims(_) | ToManager::SomeClaims(_));
            let outbox = self.outboxes.get(&session);
            let is_new = match outbox.filter(|outbox| outbox.link == link) {
                Some(outbox) if number <= outbox.taken => continue,
                Some(outbox) if number > outbox.taken + 1 => return Err(Gone),
                Some(_) => false,
                None if number == 1 && is_claims => true,
                None => return Err(Gone),
            };
            match message {
                ToManager::Request {
                    ino,
                    kind: Kind::FileExclusive,
                    parent,
                } if place_of(ino, parent) != Some(parent) => {
                    self.manager.refuse_place(session, ino);
                }
                message => self.manager.receive(now, session, link, message),
            }
            if is_new && self.manager.link(session) == Some(link) {
                let outbox = Outbox::new(link, self.held_max);
                self.outboxes.insert(session, outbox);
                self.forgotten.insert(session);
            }
            if let Some(outbox) = self.outboxes.get_mut(&session) {
                outbox.taken = number;
            }
            self.run(now);
            if self.manager.link(session) != Some(link) {
                return Err(Gone);
            }
        }
        Ok(())
    }

    /// Checks a call before its messages are taken, and closes the session's link if there are too many.
    ///
    /// # Errors
    /// The call has more than [`MESSAGES_MAX`] messages and claims.
    pub fn check(
        &mut self,
        now: Instant,
        session: SessionId,
        messages: &[ToManager],
    ) -> Result<(), Gone> {
        let weights = messages.iter().map(ToManager::weight);
        if weights.sum::<usize>() <= MESSAGES_MAX {
            return Ok(());
        }
        self.manager.close_link(now, session, Limit::Messages);
        self.run(now);
        Err(Gone)
    }

    /// Returns the next messages to a session on this link after number `behind`, in order, at most
    /// [`MESSAGES_MAX`]. Earlier ones are acknowledged and dropped.
    ///
    /// # Errors
    /// The link is not the session's, or the messages were never sent or are dropped already.
    pub fn messages(
        &mut self,
        session: SessionId,
        link: Link,
        behind: u64,
    ) -> Result<Vec<ToHolder>, Gone> {
        let outbox = self.outboxes.get_mut(&session);
        let outbox = outbox.filter(|outbox| outbox.link == link).ok_or(Gone)?;
        outbox.behind(behind)
    }

    /// Returns the number of messages that were sent to a session on this link. `None` if the link is not the
    /// session's, or if the session has not claimed all that it holds. Records that are read after this call
    /// may be cached under a grant among these messages.
    pub fn sent(&self, session: SessionId, link: Link) -> Option<u64> {
        let outbox = self.outboxes.get(&session)?;
        let is_linked = outbox.link == link && self.manager.has_claimed(session);
        is_linked.then_some(outbox.sent)
    }

    /// As [`Manager::moment`].
    pub fn moment(&self) -> Moment {
        self.manager.moment()
    }

    /// What is to be done before a session gets an answer about files whose records were read since a moment.
    /// Leave out those with operations under way ([`Told::Buffered`]): nobody buffers changes of them.
    pub fn tell(&self, session: SessionId, files: &BTreeSet<Ino>, since: Moment) -> Told {
        let buffered = self
            .manager
            .buffered_elsewhere(session, files.iter().copied());
        if buffered.is_empty() {
            return match self.manager.is_same(files, since) {
                true => Told::Now,
                false => Told::Anew,
            };
        }
        let parts = buffered.chunks(FOOTPRINT_MAX).map(|files| {
            let touches = files.iter().map(|ino| Touch {
                ino: *ino,
                access: Access::ReadFile,
            });
            let footprint = Footprint {
                touches: touches.collect(),
                ..Footprint::default()
            };
            (files.to_vec(), footprint)
        });
        Told::Buffered(parts.collect())
    }

    /// As [`Manager::may_cache`]. Of what may not be cached, the answer is told without
    /// [`Coordinator::sent`].
    pub fn may_cache(&self, session: SessionId, files: &BTreeSet<Ino>, since: Moment) -> bool {
        self.manager.may_cache(session, files, since)
    }

    /// As [`Manager::late`].
    pub fn late(&self, now: Instant) -> Option<SessionId> {
        self.manager.late(now)
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Instant) {
        self.manager.tick(now);
        self.run(now);
    }

    /// When [`Coordinator::tick`] is due.
    pub fn next_wakeup(&self) -> Option<Instant> {
        self.manager.next_wakeup()
    }

    /// The next thing to do.
    pub fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Figures. Operations that wait for each other are not among those that wait.
    pub fn counts(&self) -> Counts {
        self.manager.counts()
    }

    /// Does all that follows from a call.
    fn run(&mut self, now: Instant) {
        loop {
            self.take_actions(now);
            while let Some(session) = self.forgotten.pop_first() {
                self.begin_forgotten(session);
            }
            let Some(operation) = self.to_begin.pop_front() else {
                return;
            };
            let Some(pending) = self.pending.get_mut(&operation) else {
                continue;
            };
            pending.is_begun = true;
            let session = pending.session;
            self.manager
                .begin(now, operation, session, &pending.touches);
        }
    }

    /// The manager forgets what waits of a session that connects anew. These operations do not belong to a
    /// connection.
    fn begin_forgotten(&mut self, session: SessionId) {
        let pending = self.pending_of.get(&session).into_iter().flatten();
        let begun = pending.filter(|operation| self.pending[operation].is_begun);
        let forgotten = begun.filter(|operation| !self.manager.waits(**operation));
        self.to_begin.extend(forgotten);
    }

    /// Ends the wait of an operation.
    fn end_wait(&mut self, operation: OperationId) {
        let Some(pending) = self.pending.remove(&operation) else {
            return;
        };
        if let Some(of_session) = self.pending_of.get_mut(&pending.session) {
            of_session.remove(&operation);
            if of_session.is_empty() {
                self.pending_of.remove(&pending.session);
            }
        }
    }

    /// Turns what the manager says into events and messages.
    fn take_actions(&mut self, now: Instant) {
        while let Some(action) = self.manager.next_action() {
            let event = match action {
                Action::Send {
                    session,
                    link,
                    message,
                } => {
                    let outbox = self.outboxes.get_mut(&session);
                    let Some(outbox) = outbox.filter(|outbox| outbox.link == link) else {
                        continue;
                    };
                    if !outbox.push(message) {
                        self.manager.close_link(now, session, Limit::Outbox);
                    }
                    Event::Messages { session }
                }
                Action::Proceed { operation } => {
                    self.end_wait(operation);
                    Event::Proceed { operation }
                }
                Action::Refuse { operation, refusal } => {
                    self.end_wait(operation);
                    self.to_begin.extend(self.exclusion.end(operation));
                    Event::Refuse { operation, refusal }
                }
                Action::Late {
                    session,
                    ino,
                    since,
                } => Event::Late {
                    session,
                    ino,
                    since,
                },
                Action::Fenced { session } => Event::Fenced { session },
                Action::Reclaimed => Event::Reclaimed,
                Action::Close { session, limit } => {
                    self.outboxes.remove(&session);
                    self.forgotten.insert(session);
                    Event::LinkClosed { session, limit }
                }
            };
            self.events.push_back(event);
        }
    }
}
