//! The session of this host with the filesystem: what it may have under way, and what it writes.
//!
//! The namespace's leader ends the session of a host that it has not heard of for long. This host then opens
//! another one, with new slots and new segments. Open files stay open, as inodes are found by number. An
//! operation is repeated in the new session if it certainly was not done in the old one.
//!
//! An operation whose outcome is not known may be done at any time later. So before another one is begun, it
//! is repeated until it is answered: otherwise a removal that failed could take away what its program made
//! anew.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;

use fs_capabilities::GuestId;
use namespace::{
    Answer, Error, Ino, Operation, Outcome, Query, Reply, Request, SegmentId, SessionId, Time,
};

use crate::backend::{ApplyError, Backend, DataError};
use crate::background::AT_ONCE_MAX;
use crate::cache::Change;
use crate::client::Client;
use crate::failure::Failure;
use crate::segment_writer::SegmentWriter;
use crate::slots::{SlotGuard, Slots};
use crate::sync::{Semaphore, lock};

/// Sessions that one operation is tried in. Each try follows a session that was ended just then.
pub(crate) const SESSIONS_TRIED_MAX: usize = 8;

/// Pause before it is looked again whether another task has settled a doubt.
const DOUBT_PAUSE: Duration = Duration::from_millis(1);

/// A session of this host.
pub(crate) struct Session {
    pub(crate) id: SessionId,
    pub(crate) slots: Arc<Slots>,
    pub(crate) segments: SegmentWriter,
    /// One task at a time settles doubts.
    settling: Semaphore,
    is_over: AtomicBool,
}

impl Session {
    /// Whether it is known to have ended.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }
}

/// The present session, and former ones whose segments have leases still.
pub(crate) struct Sessions {
    state: Mutex<State>,
    /// One task at a time opens a session.
    opening: Semaphore,
}

#[derive(Default)]
struct State {
    current: Option<Arc<Session>>,
    former: Vec<Arc<Session>>,
}

impl Sessions {
    pub(crate) fn new() -> Self {
        Self {
            state: Mutex::default(),
            opening: Semaphore::new(1),
        }
    }

    /// The present session, which may have ended. None before the first change or open.
    pub(crate) fn current(&self) -> Option<Arc<Session>> {
        lock(&self.state).current.clone()
    }

    fn usable(&self) -> Option<Arc<Session>> {
        self.current().filter(|session| !session.is_over())
    }

    /// Former sessions. Those with segments left are to be given back.
    pub(crate) fn take_former(&self) -> Vec<Arc<Session>> {
        std::mem::take(&mut lock(&self.state).former)
    }

    pub(crate) fn put_former(&self, session: Arc<Session>) {
        lock(&self.state).former.push(session);
    }

    fn replace(&self, session: Arc<Session>) {
        let mut state = lock(&self.state);
        if let Some(former) = state.current.replace(session) {
            former.segments.retire_current();
            former.slots.end_changes();
            state.former.push(former);
        }
    }
}

impl<B: Backend> Client<B> {
    /// A session that is not known to have ended; opened if there is none.
    pub(crate) async fn session(&self) -> Result<Arc<Session>, Failure> {
        if let Some(session) = self.sessions.usable() {
            return Ok(session);
        }
        let _turn = self.sessions.opening.acquire().await;
        if let Some(session) = self.sessions.usable() {
            return Ok(session);
        }
        let id = self.backend.open_session().await?;
        if let Some(session) = self.sessions.current().filter(|session| session.id == id) {
            // Its slots have been used: beginning anew would repeat their numbers.
            session.is_over.store(false, Ordering::Release);
            return Ok(session);
        }
        self.counters.sessions.add(1);
        let session = Arc::new(Session {
            id,
            slots: Slots::new(self.options.operations_max),
            segments: SegmentWriter::new(),
            settling: Semaphore::new(1),
            is_over: AtomicBool::new(false),
        });
        self.sessions.replace(Arc::clone(&session));
        self.open.session_replaced();
        self.cache.wake.notify();
        Ok(session)
    }

    /// Looks whether a session has ended. One that is there was there whenever something was asked in it
    /// before, as sessions do not come back.
    pub(crate) async fn has_ended(&self, session: &Session) -> Result<bool, Failure> {
        let query = Query::Sessions {
            from: session.id,
            max: 1,
        };
        let is_there = match self.backend.read(query, None).await?.answer {
            Ok(Answer::Sessions(found)) => {
                let mut found = found.iter();
                found.any(|(id, record)| *id == session.id && !record.ending)
            }
            // The filesystem itself is gone.
            Err(_) => false,
            Ok(other) => return Err(Failure::unfit(&other)),
        };
        if !is_there {
            session.is_over.store(true, Ordering::Release);
            session.segments.retire_current();
            self.cache.session_ended(session.id);
        }
        Ok(!is_there)
    }

    /// Repeats requests whose outcome is not known until it is.
    pub(crate) async fn settle_doubts(&self, session: &Arc<Session>) -> Result<(), Failure> {
        if !session.slots.has_doubt() {
            return Ok(());
        }
        let _turn = session.settling.acquire().await;
        loop {
            let slots = session.slots.take_unsettled(AT_ONCE_MAX);
            if slots.is_empty() {
                return Ok(());
            }
            let repeats = slots.into_iter().map(|slot| self.repeat(session, slot));
            let settled = join_all(repeats).await;
            settled.into_iter().collect::<Result<(), Failure>>()?;
        }
    }

    /// The same of requests that change a file that is held exclusively. They wait for nobody else.
    pub(crate) async fn settle_doubts_of(
        &self,
        session: &Arc<Session>,
        ino: Ino,
    ) -> Result<(), Failure> {
        while session.slots.has_doubt_of(ino) {
            let slots = session.slots.take_unsettled_of(ino, AT_ONCE_MAX);
            if slots.is_empty() {
                // Another task has it.
                self.backend.sleep(DOUBT_PAUSE).await;
            }
            let repeats = slots.into_iter().map(|slot| self.repeat(session, slot));
            let settled = join_all(repeats).await;
            settled.into_iter().collect::<Result<(), Failure>>()?;
        }
        Ok(())
    }

    async fn repeat(&self, session: &Arc<Session>, mut slot: SlotGuard) -> Result<(), Failure> {
        let Some(request) = slot.request().cloned() else {
            return Ok(());
        };
        let reply = self.backend.apply(request).await;
        self.cache.at(self.backend.monotonic());
        match reply {
            Err(error) => return Err(error.into()),
            Ok(Err(Error::Stale)) if self.has_ended(session).await? => {
                return Err(Failure::SessionOver);
            }
            Ok(Err(Error::OutOfSequence)) => slot.abandon(),
            Ok(reply) => {
                self.note_first_name(slot.request(), &reply);
                slot.settle();
                self.undo_unwanted(session, reply);
            }
        }
        Ok(())
    }

    /// A file that was linked is no orphan, if it was one.
    fn note_first_name(&self, request: Option<&Request>, reply: &Reply) {
        let operation = request.map(|request| &request.operation);
        if let (Some(Operation::Link { ino, .. }), Ok(_)) = (operation, reply) {
            self.open.note_name(*ino);
        }
    }

    /// Gives back what nobody waits for any more.
    fn undo_unwanted(&self, session: &Session, reply: Reply) {
        match reply {
            Ok(Outcome::Segment(id)) => session.segments.retire_unused(id),
            Ok(Outcome::Removed(Some(removed))) if removed.nlink == 0 && removed.kept => {
                self.note_orphan(removed.ino);
            }
            _ => {}
        }
    }

    /// Has an operation of this host done in this session.
    pub(crate) async fn apply_in(
        &self,
        session: &Arc<Session>,
        operation: Operation,
    ) -> Result<Outcome, Failure> {
        let host = GuestId::default();
        self.apply_in_for(host, session, operation).await
    }

    /// Has an operation of a guest done in this session, once no other guest uses what it makes untrue.
    pub(crate) async fn apply_in_for(
        &self,
        guest: GuestId,
        session: &Arc<Session>,
        operation: Operation,
    ) -> Result<Outcome, Failure> {
        if session.is_over() {
            return Err(Failure::SessionOver);
        }
        // Whoever writes back needs segments, and must not wait for others.
        let is_reserved = matches!(
            operation,
            Operation::NewSegment | Operation::SealSegment { .. }
        );
        if !is_reserved {
            self.settle_doubts(session).await?;
        }
        let now = self.backend.monotonic();
        let begun = self.cache.begin_change(now, guest, &operation);
        let change = match begun {
            Some((change, until)) => {
                if until > now {
                    self.backend.sleep(until.since(now)).await;
                }
                Some(change)
            }
            None => None,
        };
        self.note_moves(&operation, change.as_ref());
        let at = self.backend.now();
        if let Operation::SetAccessTime { ino, atime } = operation {
            let noted = self
                .apply_now(session, at, operation, change, false)
                .await?;
            self.cache.set_access_time(ino, atime);
            return Ok(noted);
        }
        self.apply_now(session, at, operation, change, is_reserved)
            .await
    }

    /// Has a change of a file done in this session that is held exclusively, so that it waits for nobody
    /// else: others may wait for it. Without a guest, it changes nothing that guests see.
    pub(crate) async fn apply_held(
        &self,
        guest: Option<GuestId>,
        session: &Arc<Session>,
        (at, ino): (Time, Ino),
        operation: Operation,
    ) -> Result<Outcome, Failure> {
        if session.is_over() {
            return Err(Failure::SessionOver);
        }
        self.settle_doubts_of(session, ino).await?;
        let now = self.backend.monotonic();
        let for_whom = guest.unwrap_or_default();
        let begun = self.cache.begin_change(now, for_whom, &operation);
        let change = match begun {
            Some((change, until)) => {
                if until > now && guest.is_some() {
                    self.backend.sleep(until.since(now)).await;
                }
                Some(change)
            }
            None => None,
        };
        self.apply_now(session, at, operation, change, true).await
    }

    /// Names of files change: what is buffered of these is committed with a time of its own.
    fn note_moves(&self, operation: &Operation, change: Option<&Change>) {
        let moves = matches!(
            operation,
            Operation::Link { .. } | Operation::Unlink { .. } | Operation::Rename(_)
        );
        let Some(change) = change.filter(|_| moves) else {
            return;
        };
        match change.inodes() {
            Some(inodes) => inodes.for_each(|ino| self.buffer.note_move(Some(ino))),
            None => self.buffer.note_move(None),
        }
    }

    async fn apply_now(
        &self,
        session: &Arc<Session>,
        at: Time,
        operation: Operation,
        change: Option<Change>,
        is_reserved: bool,
    ) -> Result<Outcome, Failure> {
        let Ok(mut slot) = session.slots.acquire(is_reserved).await else {
            return Err(Failure::EIO);
        };
        if session.is_over() {
            return Err(Failure::SessionOver);
        }
        self.counters.operations.add(1);
        let request = slot.begin(session.id, at, operation, change);
        let reply = self.backend.apply(request).await;
        self.cache.at(self.backend.monotonic());
        match reply {
            Err(error @ ApplyError::NoSpace) => {
                slot.withdraw();
                Err(error.into())
            }
            Err(error @ ApplyError::Unavailable(_)) => {
                // The slot keeps the request, to be repeated.
                self.counters.unknown_outcomes.add(1);
                Err(error.into())
            }
            Ok(Err(Error::Stale)) if self.has_ended(session).await? => {
                slot.withdraw();
                Err(Failure::SessionOver)
            }
            Ok(Err(Error::OutOfSequence)) => {
                tracing::error!(session = session.id.0, "a session's slot counts otherwise");
                slot.abandon();
                Err(Failure::EIO)
            }
            Ok(reply) => {
                if let (Some(request), Some(change), Ok(outcome)) =
                    (slot.request(), slot.change(), &reply)
                {
                    let now = self.backend.monotonic();
                    let operation = &request.operation;
                    self.cache.replied(now, change, operation, outcome);
                }
                self.note_first_name(slot.request(), &reply);
                slot.settle();
                if let Ok(Outcome::Removed(Some(removed))) = &reply {
                    self.cache.removed(removed);
                }
                reply.map_err(Failure::Refused)
            }
        }
    }

    /// Has an operation of this host done that means the same in any session.
    pub(crate) async fn apply(&self, operation: Operation) -> Result<Outcome, Failure> {
        self.apply_for(GuestId::default(), operation).await
    }

    /// The same of a guest.
    pub(crate) async fn apply_for(
        &self,
        guest: GuestId,
        operation: Operation,
    ) -> Result<Outcome, Failure> {
        for _ in 0..SESSIONS_TRIED_MAX {
            let session = self.session().await?;
            match self.apply_in_for(guest, &session, operation.clone()).await {
                Err(Failure::SessionOver) => {}
                done => return done,
            }
        }
        Err(Failure::EIO)
    }

    /// What a failed write to a segment means. A segment that cannot be written is given up, so that the next
    /// write begins another one; if its lease is gone, the session may have ended as well.
    pub(crate) async fn data_failure(
        &self,
        session: &Session,
        segment: SegmentId,
        error: DataError,
    ) -> Failure {
        match error {
            DataError::NoSpace => Failure::PoolFull,
            DataError::Late | DataError::Io => {
                session.segments.retire(segment);
                Failure::EIO
            }
            DataError::Fenced => {
                session.segments.retire(segment);
                match self.has_ended(session).await {
                    Ok(_) => Failure::SessionOver,
                    Err(failure) => failure,
                }
            }
        }
    }
}
