//! State of the coordinators of a group, and what follows from what they decide.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use fs_capabilities::{Coordinator, Event, Limit, OperationId, Refusal};
use namespace::{FilesystemId, SessionId};
use tokio::sync::{Notify, oneshot};

type Verdict = Result<(), Refusal>;

/// All that a group decides while this node leads it.
#[derive(Default)]
pub(super) struct State {
    /// Nothing is decided any more.
    pub(super) is_closed: bool,
    /// The term of all that follows.
    pub(super) term: u64,
    pub(super) led: BTreeMap<FilesystemId, Led>,
    pub(super) last_operation: u64,
    pub(super) under_way: usize,
    /// Operations under way of earlier terms.
    pub(super) left_over: usize,
    pub(super) waiting: HashMap<OperationId, oneshot::Sender<Verdict>>,
}

/// A filesystem that this node leads.
pub(in crate::groups) struct Led {
    pub(in crate::groups) coordinator: Coordinator,
    /// Callers that wait for messages. Like the next two, only of sessions that the coordinator knows:
    /// whatever is sent for a session that has ended, nothing is kept of it.
    polls: BTreeMap<SessionId, Arc<Notify>>,
    /// Serializes the calls of each session that send messages.
    turns: BTreeMap<SessionId, Arc<tokio::sync::Mutex<()>>>,
    /// Sessions of which a closed link was logged as a warning.
    warned: BTreeSet<SessionId>,
    /// Callers that wait for the end of a session.
    pub(super) fences: BTreeMap<SessionId, Vec<oneshot::Sender<()>>>,
}

impl Led {
    pub(super) fn new(coordinator: Coordinator) -> Self {
        Self {
            coordinator,
            polls: BTreeMap::new(),
            turns: BTreeMap::new(),
            warned: BTreeSet::new(),
            fences: BTreeMap::new(),
        }
    }

    /// Returns the turn of a session to send messages; none if the session has ended.
    pub(super) fn turn(&mut self, session: SessionId) -> Option<Arc<tokio::sync::Mutex<()>>> {
        let turns = &mut self.turns;
        let turn = || Arc::clone(turns.entry(session).or_default());
        self.coordinator.knows(session).then(turn)
    }

    /// Returns what wakes callers that wait for messages to a session; none if the session has ended.
    pub(super) fn poll(&mut self, session: SessionId) -> Option<Arc<Notify>> {
        let polls = &mut self.polls;
        let poll = || Arc::clone(polls.entry(session).or_default());
        self.coordinator.knows(session).then(poll)
    }

    /// A session's link was closed.
    fn link_closed(&mut self, filesystem: FilesystemId, session: SessionId, limit: Limit) {
        let (filesystem, id) = (filesystem.0, session.0);
        // A host can have its links closed as often as it likes.
        match self.warned.insert(session) {
            true => tracing::warn!(
                filesystem, session = id, reason = %limit,
                "closed the link of a host's session; further ones of it are logged at DEBUG"
            ),
            false => tracing::debug!(
                filesystem, session = id, reason = %limit,
                "closed the link of a host's session"
            ),
        }
        if let Some(poll) = self.polls.get(&session) {
            poll.notify_waiters();
        }
    }

    /// A session has ended, and nothing of it is in use.
    fn fenced(&mut self, session: SessionId) {
        self.polls.remove(&session);
        self.turns.remove(&session);
        self.warned.remove(&session);
        let fences = self.fences.remove(&session);
        fences.into_iter().flatten().for_each(|fence| {
            // The caller may be gone.
            let _ = fence.send(());
        });
    }
}

impl State {
    /// Forgets what earlier terms decided.
    pub(super) fn enter(&mut self, term: u64) {
        if self.term == term {
            return;
        }
        self.term = term;
        self.left_over += std::mem::take(&mut self.under_way);
        // Who waits sees that its sender is gone.
        self.waiting.clear();
        for led in std::mem::take(&mut self.led).into_values() {
            led.polls.values().for_each(|poll| poll.notify_waiters());
        }
    }

    /// Does what a filesystem's coordinator says.
    pub(super) fn take_events(&mut self, filesystem: FilesystemId, now: fs_capabilities::Instant) {
        let Some(led) = self.led.get_mut(&filesystem) else {
            return;
        };
        while let Some(event) = led.coordinator.next_event() {
            match event {
                Event::Proceed { operation } => {
                    let waiting = self.waiting.remove(&operation);
                    match waiting.map(|waiting| waiting.send(Ok(()))) {
                        Some(Ok(())) => self.under_way += 1,
                        // Nobody waits for it any more.
                        _ => led.coordinator.end(now, operation),
                    }
                }
                Event::Refuse { operation, refusal } => {
                    if let Some(waiting) = self.waiting.remove(&operation) {
                        let _ = waiting.send(Err(refusal));
                    }
                }
                Event::Messages { session } => {
                    if let Some(poll) = led.polls.get(&session) {
                        poll.notify_waiters();
                    }
                }
                Event::Late { session, ino, .. } => {
                    tracing::warn!(
                        filesystem = filesystem.0,
                        session = session.0,
                        ino = ino.map(|ino| ino.0),
                        "a host does not give back what others change; they wait until its session has \
                         ended"
                    );
                }
                Event::Fenced { session } => led.fenced(session),
                Event::Reclaimed => {}
                Event::LinkClosed { session, limit } => {
                    led.link_closed(filesystem, session, limit);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use fs_capabilities::{Instant, SessionEnd, Settings};

    use super::*;

    const FILESYSTEM: FilesystemId = FilesystemId(1);
    const NOW: Instant = Instant::from_nanos(1_000);

    #[test]
    fn nothing_is_kept_of_sessions_that_have_ended() {
        let sessions = (1..=100).map(SessionId);
        let mut coordinator = Coordinator::new(NOW, 1, sessions.clone(), Settings::default());
        coordinator.lead_until(NOW, Instant::from_nanos(u64::MAX));
        let mut state = State::default();
        state.led.insert(FILESYSTEM, Led::new(coordinator));
        for session in sessions {
            let led = state.led.get_mut(&FILESYSTEM).unwrap();
            assert!(led.turn(session).is_some() && led.poll(session).is_some());
            led.link_closed(FILESYSTEM, session, Limit::Messages);
            led.coordinator
                .session_ended(NOW, session, SessionEnd::LeaseEnded);
            state.take_events(FILESYSTEM, NOW);
            // It sends and asks all the same.
            let led = state.led.get_mut(&FILESYSTEM).unwrap();
            assert!(led.turn(session).is_none() && led.poll(session).is_none());
            assert!(led.turns.is_empty() && led.polls.is_empty() && led.warned.is_empty());
        }
    }
}
