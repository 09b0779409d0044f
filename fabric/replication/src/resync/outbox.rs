//! What a round asks of its source and of this node's store.

use std::collections::VecDeque;

use fabric_types::ids::LayerId;
use fabric_types::message::FenceEntry;
use fabric_types::{Command, Epoch, Generation};

use super::{Action, WANTED_WORKER};
use crate::calls::{Call, Calls};

/// What a call was for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    Join,
    ListSource,
    ListLocal,
    Worker(u32),
    /// What the source's fence of the layer is.
    TellFence(LayerId),
    /// The layer's fence is being raised here.
    Fence(LayerId),
    /// What the source remembers of the layer.
    Remember(LayerId),
    /// A fence that the source remembers is being raised here.
    FenceRemembered,
    Flush,
}

/// Actions that the shell has not taken, and calls whose answers are due.
#[derive(Debug)]
pub(super) struct Outbox {
    calls: Calls<Purpose>,
    /// Comparisons and reads of the source, which the shell may hold back.
    comparisons: VecDeque<Action>,
    /// Everything else.
    urgent: VecDeque<Action>,
}

impl Outbox {
    pub(super) fn new() -> Self {
        Self {
            calls: Calls::new(),
            comparisons: VecDeque::new(),
            urgent: VecDeque::new(),
        }
    }

    /// Has the source execute a command.
    pub(super) fn ask(&mut self, purpose: Purpose, command: Command) {
        let call = self.calls.begin(purpose);
        let queue = match purpose {
            Purpose::Worker(worker) if worker != WANTED_WORKER => &mut self.comparisons,
            _ => &mut self.urgent,
        };
        queue.push_back(Action::Ask(call, command));
    }

    /// Has this node's store execute a command.
    pub(super) fn local(&mut self, purpose: Purpose, command: Command) {
        let call = self.calls.begin(purpose);
        self.urgent.push_back(Action::Local(call, command));
    }

    /// Has a layer's fence raised here to what the source has told.
    pub(super) fn raise(&mut self, purpose: Purpose, layer: LayerId, told: FenceEntry) {
        let call = self.calls.begin(purpose);
        let (generation, epoch) = (Generation(told.generation), Epoch(told.epoch));
        // What a peer wrote is any bytes.
        let generation = generation.min(Generation::MAX);
        let action = Action::Fence(call, layer, generation, epoch);
        self.urgent.push_back(action);
    }

    /// Tells how the round has ended.
    pub(super) fn tell(&mut self, action: Action) {
        self.urgent.push_back(action);
    }

    /// The next action that is not to be held back.
    pub(super) fn next_urgent(&mut self) -> Option<Action> {
        self.urgent.pop_front()
    }

    /// Whether it has no comparison that may be held back.
    pub(super) fn lacks_comparisons(&self) -> bool {
        self.comparisons.is_empty()
    }

    /// The next action of whatever kind.
    pub(super) fn next(&mut self) -> Option<Action> {
        self.comparisons.pop_front().or_else(|| self.next_urgent())
    }

    /// An answer is there. `None`: it is to a call of an earlier life.
    pub(super) fn end_call(&mut self, call: Call) -> Option<Purpose> {
        self.calls.end(call)
    }

    /// Drops what the shell has not taken.
    pub(super) fn clear(&mut self) {
        // Nobody has heard of these, so nobody answers them.
        let unheard = self.comparisons.drain(..).chain(self.urgent.drain(..));
        for call in unheard.filter_map(|action| action.call()) {
            self.calls.end(call);
        }
    }

    /// Calls whose answers are due.
    pub(super) fn calls_due(&self) -> usize {
        self.calls.len()
    }
}
