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

#[derive(Debug, Default)]
pub(super) struct Queue {
    items: BTreeMap<Ticket, Item>,
    /// Operations among them.
    operations: BTreeSet<OperationId>,
    lines: BTreeMap<Ino, Line>,
    under_way: BTreeMap<OperationId, Item>,
    /// How many items of each session wait.
    waiting: BTreeMap<SessionId, usize>,
    last: u64,
}

impl Queue {
    pub(super) fn waiting(&self) -> usize {
        self.items.len()
    }

    pub(super) fn waiting_of(&self, session: SessionId) -> usize {
        self.waiting.get(&session).copied().unwrap_or(0)
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
    pub(super) fn waiting_at(&self, ino: Ino) -> BTreeSet<Ticket> {
        let Some(line) = self.lines.get(&ino) else {
            return BTreeSet::new();
        };
        let touches = line.touches.iter().map(|(ticket, ..)| *ticket);
        line.grants.keys().copied().chain(touches).collect()
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
        *self.waiting.entry(item.session).or_default() += 1;
        if let Goal::Operation(operation) = item.goal {
            self.operations.insert(operation);
        }
        self.items.insert(ticket, item);
        ticket
    }

    /// Takes an item out, as it goes on or is not wanted any more.
    pub(super) fn take(&mut self, ticket: Ticket) -> Option<Item> {
        let item = self.items.remove(&ticket)?;
        if let Goal::Operation(operation) = item.goal {
            self.operations.remove(&operation);
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
        let waiting = self.waiting.get_mut(&item.session);
        let waiting = waiting.expect("an item that waits is counted");
        *waiting -= 1;
        if *waiting == 0 {
            self.waiting.remove(&item.session);
        }
        Some(item)
    }

    /// Takes out all that waits of a session.
    pub(super) fn take_of(&mut self, session: SessionId) -> Vec<Item> {
        if self.waiting_of(session) == 0 {
            return Vec::new();
        }
        let items = self.items.iter();
        let tickets: Vec<Ticket> = items
            .filter(|(_, item)| item.session == session)
            .map(|(ticket, _)| *ticket)
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
