//! Requests and operations that wait, in order; and the operations that are under way.

use std::collections::{BTreeMap, BTreeSet};

use namespace::{Ino, SessionId};

use super::OperationId;
use crate::kind::{Access, Kind, Want};

/// A place in the order of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ticket(u64);

/// What is done once nothing is in the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Goal {
    Grant { ino: Ino, kind: Kind },
    Operation(OperationId),
}

/// Something that waits.
#[derive(Debug, Clone)]
pub(super) struct Item {
    pub(super) session: SessionId,
    pub(super) goal: Goal,
    /// All must be free at the same time.
    pub(super) wants: Vec<(Ino, Want)>,
}

/// Items waiting for an inode that a change may unblock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Waiters {
    /// Requests for capabilities: an operation has ended or stopped waiting. No operation waits for another
    /// one.
    Grants,
    /// All items: a capability was removed or granted.
    All,
}

/// What waits for an inode, and what is under way on it. Grants are apart: operations wait for no operation,
/// so an operation looks at the few grants alone.
#[derive(Debug, Default)]
struct Line {
    grants: BTreeMap<Ticket, (SessionId, Kind)>,
    touches: BTreeSet<(Ticket, SessionId, Access)>,
    under_way: BTreeSet<(OperationId, SessionId, Access)>,
}

impl Line {
    fn is_empty(&self) -> bool {
        self.grants.is_empty() && self.touches.is_empty() && self.under_way.is_empty()
    }
}

/// Waiting items of one session.
#[derive(Debug, Default)]
struct Waiting {
    tickets: BTreeSet<Ticket>,
    /// At most one request for each inode.
    requests: BTreeMap<Ino, Ticket>,
}

#[derive(Debug, Default)]
pub(super) struct Queue {
    items: BTreeMap<Ticket, Item>,
    /// Operations among them.
    operations: BTreeSet<OperationId>,
    lines: BTreeMap<Ino, Line>,
    under_way: BTreeMap<OperationId, Item>,
    /// Items of each session.
    sessions: BTreeMap<SessionId, Waiting>,
    last: u64,
}

impl Queue {
    pub(super) fn waiting(&self) -> usize {
        self.items.len()
    }

    pub(super) fn waiting_of(&self, session: SessionId) -> usize {
        let waiting = self.sessions.get(&session);
        waiting.map_or(0, |waiting| waiting.tickets.len())
    }

    pub(super) fn under_way(&self) -> usize {
        self.under_way.len()
    }

    pub(super) fn get(&self, ticket: Ticket) -> Option<&Item> {
        self.items.get(&ticket)
    }

    /// Whether an operation waits.
    pub(super) fn has(&self, operation: OperationId) -> bool {
        self.operations.contains(&operation)
    }

    /// Inodes that something waits for.
    pub(super) fn inodes(&self) -> impl Iterator<Item = Ino> {
        self.lines.keys().copied()
    }

    /// What waits for an inode, in order.
    pub(super) fn waiting_at(&self, ino: Ino, which: Waiters) -> BTreeSet<Ticket> {
        let Some(line) = self.lines.get(&ino) else {
            return BTreeSet::new();
        };
        let mut waiting: BTreeSet<Ticket> = line.grants.keys().copied().collect();
        if which == Waiters::All {
            waiting.extend(line.touches.iter().map(|(ticket, ..)| *ticket));
        }
        waiting
    }

    pub(super) fn push(&mut self, item: Item) -> Ticket {
        self.last += 1;
        let ticket = Ticket(self.last);
        for (ino, want) in &item.wants {
            let line = self.lines.entry(*ino).or_default();
            match want {
                Want::Hold(kind) => {
                    line.grants.insert(ticket, (item.session, *kind));
                }
                Want::Touch(access) => {
                    line.touches.insert((ticket, item.session, *access));
                }
            }
        }
        let waiting = self.sessions.entry(item.session).or_default();
        waiting.tickets.insert(ticket);
        match item.goal {
            Goal::Operation(operation) => drop(self.operations.insert(operation)),
            Goal::Grant { ino, .. } => {
                let before = waiting.requests.insert(ino, ticket);
                assert!(before.is_none(), "a session waits once for an inode");
            }
        }
        self.items.insert(ticket, item);
        ticket
    }

    /// Takes an item out, as it goes on or is not wanted any more.
    pub(super) fn take(&mut self, ticket: Ticket) -> Option<Item> {
        let item = self.items.remove(&ticket)?;
        let waiting = self.sessions.get_mut(&item.session);
        let waiting = waiting.expect("an item that waits is known by its session");
        waiting.tickets.remove(&ticket);
        match item.goal {
            Goal::Operation(operation) => drop(self.operations.remove(&operation)),
            Goal::Grant { ino, .. } => drop(waiting.requests.remove(&ino)),
        }
        if waiting.tickets.is_empty() {
            self.sessions.remove(&item.session);
        }
        for (ino, want) in &item.wants {
            self.at(*ino, |line| match want {
                Want::Hold(_) => {
                    line.grants.remove(&ticket);
                }
                Want::Touch(access) => {
                    line.touches.remove(&(ticket, item.session, *access));
                }
            });
        }
        Some(item)
    }

    /// Removes and returns the request of a session for an inode.
    pub(super) fn take_request(&mut self, session: SessionId, ino: Ino) -> Option<Item> {
        let ticket = *self.sessions.get(&session)?.requests.get(&ino)?;
        self.take(ticket)
    }

    /// Takes out all that waits of a session.
    pub(super) fn take_of(&mut self, session: SessionId) -> Vec<Item> {
        let waiting = self.sessions.get(&session);
        let tickets: Vec<Ticket> = waiting
            .into_iter()
            .flat_map(|waiting| &waiting.tickets)
            .copied()
            .collect();
        let items = tickets.into_iter();
        items.filter_map(|ticket| self.take(ticket)).collect()
    }

    /// An operation begins.
    pub(super) fn start(&mut self, operation: OperationId, item: Item) {
        for (ino, want) in &item.wants {
            if let Want::Touch(access) = want {
                let line = self.lines.entry(*ino).or_default();
                line.under_way.insert((operation, item.session, *access));
            }
        }
        let before = self.under_way.insert(operation, item);
        assert!(before.is_none(), "an operation begins once");
    }

    /// An operation ended.
    pub(super) fn finish(&mut self, operation: OperationId) -> Option<Item> {
        let item = self.under_way.remove(&operation)?;
        for (ino, want) in &item.wants {
            if let Want::Touch(access) = want {
                self.at(*ino, |line| {
                    line.under_way.remove(&(operation, item.session, *access));
                });
            }
        }
        Some(item)
    }

    /// Whether something of another session that came earlier and conflicts waits for the inode.
    pub(super) fn is_behind(
        &self,
        ticket: Ticket,
        session: SessionId,
        ino: Ino,
        want: Want,
    ) -> bool {
        let Some(line) = self.lines.get(&ino) else {
            return false;
        };
        let behind_grant = line
            .grants
            .range(..ticket)
            .any(|(_, (other, kind))| *other != session && Want::Hold(*kind).conflicts(want));
        let is_grant = matches!(want, Want::Hold(_));
        behind_grant
            || is_grant
                && line
                    .touches
                    .iter()
                    .take_while(|(earlier, ..)| *earlier < ticket)
                    .any(|(_, other, access)| {
                        *other != session && Want::Touch(*access).conflicts(want)
                    })
    }

    /// Whether an operation that conflicts is under way, of another session, or one of any session that moves
    /// a file away from the directory with which it was asked for.
    pub(super) fn is_used(&self, session: SessionId, ino: Ino, want: Want) -> bool {
        let line = self.lines.get(&ino);
        let mut under_way = line.into_iter().flat_map(|line| &line.under_way);
        let is_exclusive = want == Want::Hold(Kind::FileExclusive);
        under_way.any(|(_, other, access)| {
            let counts = *other != session || is_exclusive && *access == Access::MoveFile;
            counts && Want::Touch(*access).conflicts(want)
        })
    }

    /// Takes out what waits for a file as exclusive.
    pub(super) fn take_exclusive(&mut self, ino: Ino) -> Vec<Item> {
        let line = self.lines.get(&ino);
        let grants = line.into_iter().flat_map(|line| &line.grants);
        let exclusive = grants.filter(|(_, (_, kind))| *kind == Kind::FileExclusive);
        let tickets: Vec<Ticket> = exclusive.map(|(ticket, _)| *ticket).collect();
        let tickets = tickets.into_iter();
        tickets.filter_map(|ticket| self.take(ticket)).collect()
    }

    /// Changes an inode's line, and forgets it if nothing is left.
    fn at(&mut self, ino: Ino, change: impl FnOnce(&mut Line)) {
        if let Some(line) = self.lines.get_mut(&ino) {
            change(line);
            if line.is_empty() {
                self.lines.remove(&ino);
            }
        }
    }
}
