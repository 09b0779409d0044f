//! The coordinators of one term, and who waits for what they decide.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use fs_capabilities::{Coordinator, Event, OperationId, Refusal};
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
    /// Who waits for messages.
    pub(super) polls: BTreeMap<SessionId, Arc<Notify>>,
    /// Messages of each session are taken one call after the other.
    pub(super) turns: BTreeMap<SessionId, Arc<tokio::sync::Mutex<()>>>,
    /// Who waits for the end of a session.
    pub(super) fences: BTreeMap<SessionId, Vec<oneshot::Sender<()>>>,
}

impl Led {
    pub(super) fn new(coordinator: Coordinator) -> Self {
        Self {
            coordinator,
            polls: BTreeMap::new(),
            turns: BTreeMap::new(),
            fences: BTreeMap::new(),
        }
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
                Event::Fenced { session } => {
                    led.polls.remove(&session);
                    led.turns.remove(&session);
                    // Whoever waited may be gone.
                    let fences = led.fences.remove(&session);
                    fences.into_iter().flatten().for_each(|fence| {
                        let _ = fence.send(());
                    });
                }
                Event::Reclaimed => {}
                Event::LinkClosed { session, limit } => {
                    tracing::warn!(
                        filesystem = filesystem.0,
                        session = session.0,
                        reason = %limit,
                        "closed the link of a host's session"
                    );
                    if let Some(poll) = led.polls.get(&session) {
                        poll.notify_waiters();
                    }
                }
            }
        }
    }
}
