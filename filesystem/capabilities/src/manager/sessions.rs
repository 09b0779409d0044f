//! Sessions as a leader knows them.

use std::collections::{BTreeMap, BTreeSet};

use namespace::{Ino, SessionId};

use crate::message::Link;
use crate::time::Instant;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Was there before this leader, and has not said what it holds.
    Unclaimed,
    Live,
    /// Ended; its guests may use what they were told until then.
    Ending(Instant),
}

#[derive(Debug)]
struct Session {
    phase: Phase,
    link: Option<Link>,
    /// The newest connection, also if it broke.
    last_round: u64,
    /// Inodes claimed on the current connection, until the claims are settled.
    claimed: BTreeSet<Ino>,
    /// More claims follow.
    is_claiming: bool,
}

#[derive(Debug, Default)]
pub(super) struct Sessions {
    sessions: BTreeMap<SessionId, Session>,
    unclaimed: BTreeSet<SessionId>,
    ending: BTreeSet<(Instant, SessionId)>,
}

impl Sessions {
    pub(super) fn count(&self) -> usize {
        self.sessions.len()
    }

    pub(super) fn has(&self, id: SessionId) -> bool {
        self.sessions.contains_key(&id)
    }

    /// A session that is there. It is awaited if it may hold something already.
    pub(super) fn open(&mut self, id: SessionId, is_awaited: bool) {
        if self.sessions.contains_key(&id) {
            return;
        }
        let phase = if is_awaited {
            self.unclaimed.insert(id);
            Phase::Unclaimed
        } else {
            Phase::Live
        };
        let session = Session {
            phase,
            link: None,
            last_round: 0,
            claimed: BTreeSet::new(),
            is_claiming: false,
        };
        self.sessions.insert(id, session);
    }

    /// Whether some session has not claimed yet.
    pub(super) fn is_reclaiming(&self) -> bool {
        !self.unclaimed.is_empty()
    }

    pub(super) fn unclaimed(&self) -> impl Iterator<Item = SessionId> {
        self.unclaimed.iter().copied()
    }

    pub(super) fn is_unclaimed(&self, id: SessionId) -> bool {
        self.unclaimed.contains(&id)
    }

    /// Whether operations of the session may begin.
    pub(super) fn may_operate(&self, id: SessionId) -> bool {
        let session = self.sessions.get(&id);
        session.is_some_and(|session| !matches!(session.phase, Phase::Ending(_)))
    }

    /// Returns the connection on which the session claims or has claimed.
    pub(super) fn link(&self, id: SessionId) -> Option<Link> {
        self.sessions.get(&id).and_then(|session| session.link)
    }

    pub(super) fn disconnect(&mut self, id: SessionId) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.link = None;
            session.is_claiming = false;
            session.claimed.clear();
        }
    }

    /// Records the connection of the first claims. Returns false if it is an old one, or the session has
    /// ended.
    pub(super) fn connect(&mut self, id: SessionId, link: Link) -> bool {
        let may_operate = self.may_operate(id);
        let session = self.sessions.get_mut(&id);
        let Some(session) = session.filter(|old| may_operate && old.last_round < link.round) else {
            return false;
        };
        session.link = Some(link);
        session.last_round = link.round;
        session.is_claiming = true;
        session.claimed.clear();
        true
    }

    /// Returns whether more claims of the session follow.
    pub(super) fn is_claiming(&self, id: SessionId) -> bool {
        let session = self.sessions.get(&id);
        session.is_some_and(|session| session.is_claiming)
    }

    /// Records claims of the session. Returns false if there are more than `max`, or if it has claimed
    /// already.
    pub(super) fn claim(
        &mut self,
        id: SessionId,
        inodes: impl Iterator<Item = Ino>,
        max: usize,
    ) -> bool {
        let Some(session) = self.sessions.get_mut(&id).filter(|one| one.is_claiming) else {
            return false;
        };
        session.claimed.extend(inodes);
        session.claimed.len() <= max
    }

    /// Returns whether the session has claimed this inode on its connection.
    pub(super) fn has_claimed(&self, id: SessionId, ino: Ino) -> bool {
        let session = self.sessions.get(&id);
        session.is_some_and(|session| session.claimed.contains(&ino))
    }

    /// The session has said what it holds.
    pub(super) fn claimed(&mut self, id: SessionId) {
        self.unclaimed.remove(&id);
        if let Some(session) = self.sessions.get_mut(&id) {
            session.phase = Phase::Live;
            session.is_claiming = false;
        }
    }

    /// Ends the claims: the session holds exactly what it has claimed.
    pub(super) fn settled(&mut self, id: SessionId) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.claimed.clear();
        }
    }

    /// The session has ended; what it held is given up at `until`. The earliest such time counts.
    pub(super) fn end(&mut self, id: SessionId, until: Instant) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        session.link = None;
        session.is_claiming = false;
        let before = match session.phase {
            Phase::Ending(before) => before,
            Phase::Unclaimed | Phase::Live => Instant::from_nanos(u64::MAX),
        };
        self.ending.remove(&(before, id));
        let until = until.min(before);
        session.phase = Phase::Ending(until);
        self.ending.insert((until, id));
    }

    pub(super) fn next_end(&self) -> Option<Instant> {
        self.ending.first().map(|(at, _)| *at)
    }

    /// Forgets a session whose end is reached.
    pub(super) fn take_ended(&mut self, now: Instant) -> Option<SessionId> {
        let (at, id) = *self.ending.first()?;
        if now < at {
            return None;
        }
        self.ending.remove(&(at, id));
        self.unclaimed.remove(&id);
        self.sessions.remove(&id);
        Some(id)
    }
}
