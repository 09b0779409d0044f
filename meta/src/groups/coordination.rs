//! Capabilities of the group's filesystems while this node leads it: a [`Coordinator`] for each filesystem
//! and term, driven by this node's clock and by the group's lease.
//!
//! A coordinator is made when it is first asked for in a term, after
//! - all that earlier terms committed is applied here, so that no operation of an earlier leader is to come;
//! - all operations have ended that this node let go on in an earlier term: they are in no log of another
//!   node, and were not appended late to this one.
//!
//! **Lease.** Who has heard of a leader votes for nobody else for [`RaftTuning::vote_hold`]. So this node
//! leads for that long, less the drift of clocks, from when it asked a majority whether it does. Questions
//! and commits say that by the way; if nothing came by for long, the driver asks.

mod state;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fs_capabilities::{
    Coordinator, Counts, Footprint, Gone, Link, Moment, OperationId, Refusal, SessionEnd, Settings,
    ToHolder, Told,
};
use namespace::{FilesystemId, Ino, Namespace, SessionId};
use openraft::ServerState;
use raft_host::{RaftHandle, RaftTuning};
use tokio::sync::{Notify, oneshot};
use tokio::time::{sleep, timeout};

use super::blocking;
use super::reads::catch_up;
use super::store::NamespaceStore;
use crate::net::ProposeError;
use crate::storage::{Database, DbError};
use state::State;

pub(super) use state::Led;

/// Whoever waits for messages is answered after this, with none.
const MESSAGES_WAIT_MAX: Duration = Duration::from_secs(2);
/// The leadership is looked at this often while nothing happens.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// Pause before a majority is asked again whether this node leads.
const ASK_PAUSE: Duration = Duration::from_millis(20);
/// Operations of an earlier term have to end within this; then whoever asks looks for the leader again.
const LEFT_OVER_WAIT_MAX: Duration = Duration::from_secs(5);
/// Of the time for which others vote for nobody else, this much is not used: clocks drift.
const LEASE_MARGIN: u32 = 10;
/// Files that one hold of the coordinators' lock covers. For more files the lock is released and taken again.
const FILES_AT_ONCE: usize = 1024;

/// A session's link, by which it is known what the session may cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SessionLink {
    /// The filesystem.
    pub filesystem: FilesystemId,
    /// The session.
    pub session: SessionId,
    /// Its connection.
    pub link: Link,
}

/// An operation that was let go on. It is to be ended once it is certain what became of it.
#[derive(Debug)]
pub(super) struct Admitted {
    filesystem: FilesystemId,
    term: u64,
    operation: OperationId,
}

/// A moment of a filesystem's coordinator in a term.
pub(super) type TermMoment = (u64, Moment);

/// The coordinators of a group.
pub(super) struct Coordination {
    raft: RaftHandle,
    pub(super) store: Arc<NamespaceStore>,
    database: Arc<Database>,
    lease: Duration,
    /// What the coordinators' times count from.
    start: Instant,
    state: Mutex<State>,
    /// One coordinator is made at a time.
    making: tokio::sync::Mutex<()>,
    /// Held while messages of a session are processed ([`taking`](super::taking)): one session at a time.
    pub(super) taking: Arc<tokio::sync::Mutex<()>>,
    /// An operation of an earlier term has ended.
    left_over_ended: Notify,
    /// There is something for the driver to do.
    wake: Notify,
}

impl Coordination {
    pub(super) fn new(
        raft: RaftHandle,
        store: Arc<NamespaceStore>,
        database: Arc<Database>,
        tuning: &RaftTuning,
    ) -> Self {
        let hold = tuning.vote_hold();
        Self {
            raft,
            store,
            database,
            lease: hold - hold / LEASE_MARGIN,
            start: Instant::now(),
            state: Mutex::default(),
            making: tokio::sync::Mutex::default(),
            taking: Arc::default(),
            left_over_ended: Notify::new(),
            wake: Notify::new(),
        }
    }

    /// The term in which this node leads, as far as it knows.
    fn leading_term(&self) -> Result<u64, ProposeError> {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow();
        match metrics.state {
            ServerState::Leader => Ok(metrics.current_term),
            _ => {
                let leader = metrics
                    .current_leader
                    .filter(|leader| *leader != metrics.id);
                Err(ProposeError::NotLeader { leader })
            }
        }
    }

    /// Lets go of all that waits, for good.
    fn close(&self) {
        let mut state = self.lock();
        state.enter(0);
        state.is_closed = true;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn time(&self, at: Instant) -> fs_capabilities::Instant {
        let since = at.saturating_duration_since(self.start).as_nanos();
        fs_capabilities::Instant::from_nanos(u64::try_from(since).unwrap_or(u64::MAX))
    }

    /// The term in which this node leads and has a filesystem's coordinator, which is made if there is none.
    pub(super) async fn lead(&self, filesystem: FilesystemId) -> Result<u64, ProposeError> {
        let is_made = |term| {
            let mut state = self.lock();
            state.enter(term);
            state.led.contains_key(&filesystem)
        };
        if self.lock().is_closed {
            return Err(ProposeError::Stopped);
        }
        let term = self.leading_term()?;
        if is_made(term) {
            return Ok(term);
        }
        let _turn = self.making.lock().await;
        let term = self.leading_term()?;
        if is_made(term) {
            return Ok(term);
        }
        self.wait_for_left_over().await?;
        let asked = Instant::now();
        catch_up(&self.raft, &self.database).await?;
        let store = Arc::clone(&self.store);
        let sessions = blocking::read(move || open_sessions(&store, filesystem)).await;
        let sessions = sessions.map_err(|error| failed(&error))?;
        let sessions = sessions.map_err(|error| failed(&error))?;
        if self.leading_term()? != term {
            return Err(ProposeError::NotLeader { leader: None });
        }
        let now = self.time(Instant::now());
        let settings = Settings::default();
        let mut coordinator = Coordinator::new(now, term, sessions, settings);
        coordinator.lead_until(now, self.time(asked + self.lease));
        let led = Led::new(coordinator);
        let mut state = self.lock();
        if state.is_closed {
            return Err(ProposeError::Stopped);
        }
        state.enter(term);
        state.led.insert(filesystem, led);
        state.take_events(filesystem, now);
        drop(state);
        self.wake.notify_one();
        Ok(term)
    }

    async fn wait_for_left_over(&self) -> Result<(), ProposeError> {
        let ended = async {
            loop {
                let ended = self.left_over_ended.notified();
                if self.lock().left_over == 0 {
                    return;
                }
                ended.await;
            }
        };
        let waited = timeout(LEFT_OVER_WAIT_MAX, ended).await;
        waited.map_err(|_| ProposeError::NotLeader { leader: None })
    }

    /// The turn of a session whose messages are taken; none if the session has ended.
    pub(super) fn turn(
        &self,
        of: SessionLink,
        term: u64,
    ) -> Result<Option<Arc<tokio::sync::Mutex<()>>>, ProposeError> {
        self.with(of.filesystem, term, |led, _| led.turn(of.session))
    }

    /// Runs a closure on a filesystem's coordinator of this term. The closure must be short: all operations
    /// on the group's filesystems need this lock.
    pub(super) fn with<T>(
        &self,
        filesystem: FilesystemId,
        term: u64,
        act: impl FnOnce(&mut Led, fs_capabilities::Instant) -> T,
    ) -> Result<T, ProposeError> {
        let mut state = self.lock();
        let now = self.time(Instant::now());
        let led = match state.term == term {
            true => state.led.get_mut(&filesystem),
            false => None,
        };
        let led = led.ok_or(ProposeError::NotLeader { leader: None })?;
        let before = led.coordinator.next_wakeup();
        let done = act(led, now);
        let needs_driver = led.coordinator.is_stalled() || led.coordinator.next_wakeup() != before;
        state.take_events(filesystem, now);
        drop(state);
        if needs_driver {
            self.wake.notify_one();
        }
        Ok(done)
    }

    /// Waits until nobody else uses anything cached that an operation changes.
    ///
    /// # Errors
    /// This node does not lead, or not any more; or the refusal.
    pub(super) async fn admit(
        &self,
        filesystem: FilesystemId,
        session: SessionId,
        footprint: Footprint,
    ) -> Result<Result<Admitted, Refusal>, ProposeError> {
        let term = self.lead(filesystem).await?;
        let (verdict, decided) = oneshot::channel();
        let operation = {
            let mut state = self.lock();
            state.last_operation += 1;
            let operation = OperationId(state.last_operation);
            state.waiting.insert(operation, verdict);
            operation
        };
        let begun = self.with(filesystem, term, |led, now| {
            led.coordinator.begin(now, operation, session, footprint);
        });
        if begun.is_err() {
            self.lock().waiting.remove(&operation);
        }
        begun?;
        // Another term has begun if the sender is gone.
        let decided = decided.await;
        let decided = decided.map_err(|_| ProposeError::NotLeader { leader: None })?;
        Ok(decided.map(|()| Admitted {
            filesystem,
            term,
            operation,
        }))
    }

    /// Whether this node still leads in the term in which an operation was let go on.
    pub(super) fn leads_still(&self, admitted: &Admitted) -> bool {
        self.leading_term() == Ok(admitted.term)
    }

    /// An operation that was let go on has ended: it is applied, or never will be.
    pub(super) fn end(&self, admitted: &Admitted) {
        let Admitted {
            filesystem,
            term,
            operation,
        } = *admitted;
        {
            let mut state = self.lock();
            if state.term != term {
                state.left_over -= 1;
                drop(state);
                self.left_over_ended.notify_waiters();
                return;
            }
            state.under_way -= 1;
        }
        // If another term began in between, its coordinators know nothing of it.
        let _ = self.with(filesystem, term, |led, now| {
            led.coordinator.end(now, operation);
        });
    }

    /// A session was opened, or found.
    pub(super) async fn session_opened(&self, filesystem: FilesystemId, session: SessionId) {
        // A coordinator that is made later finds it in the records.
        if let Ok(term) = self.lead(filesystem).await {
            let _ = self.with(filesystem, term, |led, _| {
                led.coordinator.session_opened(session);
            });
        }
    }

    /// Returns once nothing of a session is in use any more that is over: neither by its host nor by guests.
    ///
    /// # Errors
    /// This node does not lead, or not any more.
    pub(super) async fn fence(
        &self,
        filesystem: FilesystemId,
        session: SessionId,
    ) -> Result<(), ProposeError> {
        let term = self.lead(filesystem).await?;
        let (fence, fenced) = oneshot::channel();
        self.with(filesystem, term, |led, now| {
            led.fences.entry(session).or_default().push(fence);
            // Whether the host is silent or was started anew, guests may use for a second what it told them.
            led.coordinator.session_opened(session);
            let end = SessionEnd::Restarted;
            led.coordinator.session_ended(now, session, end);
        })?;
        let fenced = fenced.await;
        fenced.map_err(|_| ProposeError::NotLeader { leader: None })
    }

    /// This node led when it asked a majority, at this time.
    pub(super) fn confirmed(&self, asked: Instant) {
        let mut state = self.lock();
        let (now, until) = (self.time(Instant::now()), self.time(asked + self.lease));
        let filesystems: Vec<FilesystemId> = state.led.keys().copied().collect();
        for filesystem in filesystems {
            if let Some(led) = state.led.get_mut(&filesystem) {
                led.coordinator.lead_until(now, until);
            }
            state.take_events(filesystem, now);
        }
    }

    /// How many messages were sent on a link; none if it is not the session's here.
    pub(super) fn sent(&self, of: SessionLink) -> Option<u64> {
        let term = of.link.term;
        let sent = self.with(of.filesystem, term, |led, _| {
            led.coordinator.sent(of.session, of.link)
        });
        sent.ok().flatten()
    }

    /// Now, before a filesystem's records are read; none if this node has no coordinator of it yet.
    pub(super) fn moment_if_led(&self, filesystem: FilesystemId) -> Option<TermMoment> {
        let term = self.leading_term().ok()?;
        let moment = self.with(filesystem, term, |led, _| led.coordinator.moment());
        Some((term, moment.ok()?))
    }

    /// Now, before a filesystem's records are read.
    ///
    /// # Errors
    /// This node does not lead.
    pub(super) async fn moment(
        &self,
        filesystem: FilesystemId,
    ) -> Result<TermMoment, ProposeError> {
        let term = self.lead(filesystem).await?;
        let moment = self.with(filesystem, term, |led, _| led.coordinator.moment())?;
        Ok((term, moment))
    }

    /// What is to be done before a session is told of files whose records were read since a moment, and
    /// whether it may cache what it is told. Of those in `written_back`, nobody buffers anything.
    ///
    /// # Errors
    /// This node does not lead any more in that term.
    pub(super) fn tell(
        &self,
        (filesystem, session): (FilesystemId, SessionId),
        files: &BTreeSet<Ino>,
        written_back: &BTreeSet<Ino>,
        (term, moment): TermMoment,
    ) -> Result<(Told, bool), ProposeError> {
        let files: Vec<Ino> = files.iter().copied().collect();
        let mut result = (Told::Now, true);
        // The files are checked in parts, so that a long answer does not hold the lock for long. The parts
        // may be checked at different moments, all after the request came, so each result is valid.
        for files in files.chunks(FILES_AT_ONCE) {
            let files: BTreeSet<Ino> = files.iter().copied().collect();
            let to_tell = files.difference(written_back).copied().collect();
            let (when, may_cache) = self.with(filesystem, term, |led, _| {
                let when = led.coordinator.tell(session, &to_tell, moment);
                (when, led.coordinator.may_cache(session, &files, moment))
            })?;
            result = (result.0.and(when), result.1 && may_cache);
        }
        Ok(result)
    }

    /// The term of this leader. Links of it are taken from now on.
    ///
    /// # Errors
    /// This node does not lead.
    pub(super) async fn term(&self, filesystem: FilesystemId) -> Result<u64, ProposeError> {
        self.lead(filesystem).await
    }

    /// Messages to a session behind a number; none after some time without any.
    ///
    /// # Errors
    /// This node does not lead.
    pub(super) async fn messages(
        &self,
        of: SessionLink,
        behind: u64,
    ) -> Result<Result<Vec<ToHolder>, Gone>, ProposeError> {
        let term = self.lead(of.filesystem).await?;
        let poll = self.with(of.filesystem, term, |led, _| led.poll(of.session))?;
        let Some(poll) = poll else {
            return Ok(Err(Gone));
        };
        let look = || {
            self.with(of.filesystem, term, |led, _| {
                led.coordinator.messages(of.session, of.link, behind)
            })
        };
        let some = async {
            loop {
                let notified = poll.notified();
                match look()? {
                    Ok(messages) if messages.is_empty() => notified.await,
                    answer => return Ok(answer),
                }
            }
        };
        match timeout(MESSAGES_WAIT_MAX, some).await {
            Ok(answer) => answer,
            Err(_) => look(),
        }
    }

    /// Sessions that others wait for since long, each with its filesystem.
    pub(super) fn late(&self) -> Vec<(FilesystemId, SessionId)> {
        let state = self.lock();
        let now = self.time(Instant::now());
        let led = state.led.iter();
        led.filter_map(|(filesystem, led)| Some((*filesystem, led.coordinator.late(now)?)))
            .collect()
    }

    /// Figures of a filesystem.
    ///
    /// # Errors
    /// This node does not lead.
    pub(super) async fn counts(&self, filesystem: FilesystemId) -> Result<Counts, ProposeError> {
        let term = self.lead(filesystem).await?;
        self.with(filesystem, term, |led, _| led.coordinator.counts())
    }

    /// Lets time pass for the coordinators, and asks a majority when something waits for that.
    pub(super) async fn drive(self: Arc<Self>) {
        let mut leadership = self.raft.server_metrics();
        loop {
            let woken = self.wake.notified();
            if let Ok(term) = self.leading_term() {
                self.lock().enter(term);
            } else {
                self.lock().enter(0);
            }
            let (next, is_stalled) = self.tick();
            if is_stalled {
                let asked = Instant::now();
                match catch_up(&self.raft, &self.database).await {
                    Ok(()) => self.confirmed(asked),
                    Err(_) => sleep(ASK_PAUSE).await,
                }
                continue;
            }
            let pause = next.map_or(LOOK_INTERVAL, |next| {
                let now = self.time(Instant::now());
                next.since(now).min(LOOK_INTERVAL)
            });
            tokio::select! {
                () = woken => {}
                () = sleep(pause) => {}
                changed = leadership.changed() => {
                    if changed.is_err() {
                        // Raft has ended. Operations that wait here keep the database open.
                        self.close();
                        return;
                    }
                }
            }
        }
    }

    /// When the next coordinator has something to do, and whether one waits for the lease.
    fn tick(&self) -> (Option<fs_capabilities::Instant>, bool) {
        let mut state = self.lock();
        let now = self.time(Instant::now());
        let filesystems: Vec<FilesystemId> = state.led.keys().copied().collect();
        let (mut next, mut is_stalled) = (None, false);
        for filesystem in filesystems {
            let Some(led) = state.led.get_mut(&filesystem) else {
                continue;
            };
            if led.coordinator.next_wakeup().is_some_and(|at| at <= now) {
                led.coordinator.tick(now);
            }
            is_stalled |= led.coordinator.is_stalled();
            let at = led.coordinator.next_wakeup();
            next = [next, at].into_iter().flatten().min();
            state.take_events(filesystem, now);
        }
        (next, is_stalled)
    }
}

/// Sessions of a filesystem whose end was not begun: nobody uses what the others held.
fn open_sessions(
    store: &NamespaceStore,
    filesystem: FilesystemId,
) -> Result<Vec<SessionId>, DbError> {
    store.0.read(|view| {
        let sessions = Namespace::new(view, filesystem).sessions(SessionId(0), usize::MAX)?;
        let open = sessions.into_iter().filter(|(_, session)| !session.ending);
        Ok(open.map(|(id, _)| id).collect())
    })
}

fn failed(error: &dyn std::error::Error) -> ProposeError {
    let detail = error.to_string();
    ProposeError::Failed { detail }
}
