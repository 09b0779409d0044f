//! What may go on: grants, operations and the recalls that make room for them.

use namespace::{Ino, SessionId};

use super::queue::{Goal, Item, Ticket};
use super::table::Held;
use super::{Action, Manager};
use crate::kind::{Access, Kind, Want};
use crate::message::{GrantId, ToHolder};

impl Manager {
    /// Looks again at requests that wait for inodes that changed.
    pub(super) fn pump(&mut self) {
        while let Some(ino) = self.touched.pop_first() {
            for ticket in self.queue.waiting_at(ino) {
                self.attempt(ticket);
            }
        }
    }

    /// Lets what waits go on, or recalls what is in its way.
    pub(super) fn attempt(&mut self, ticket: Ticket) {
        // A deposed leader decides nothing: its successor may have let others change all of this.
        if self.now >= self.lead_until {
            self.is_stalled = true;
            return;
        }
        let Some(item) = self.queue.get(ticket).cloned() else {
            return;
        };
        let mut is_free = true;
        for (ino, want) in &item.wants {
            // Not the first hindrance alone, so that all recalls are under way at a time.
            is_free &= self.is_free(ticket, item.session, *ino, *want);
        }
        if let Goal::Grant { ino, .. } = item.goal {
            // The answer that is on its way names the grant that would be replaced.
            is_free &= !self.recalls.is_recalled(item.session, ino);
        }
        if !is_free {
            return;
        }
        self.queue.take(ticket);
        self.touch(&item);
        match item.goal {
            Goal::Grant { ino, kind } => self.grant(item.session, ino, kind),
            Goal::Operation(operation) => {
                let covered = item.wants.iter().find_map(|(_, want)| match want {
                    Want::Touch(Access::ChangeChild(child)) => Some(*child),
                    _ => None,
                });
                let covered = covered.filter(|child| {
                    let held = self.table.get(item.session, *child);
                    held.is_some_and(|held| held.kind == Kind::FileExclusive)
                });
                covered.map(|child| self.covered.insert(operation, child));
                self.queue.start(operation, item);
                self.actions.push_back(Action::Proceed { operation });
            }
        }
    }

    /// Whether nothing keeps a session from an inode. Recalls what does, in its turn.
    fn is_free(&mut self, ticket: Ticket, session: SessionId, ino: Ino, want: Want) -> bool {
        // A holder that is recalled has to flush: its own operations overtake whoever waits for that.
        if self.is_free_already(session, ino, want) {
            return true;
        }
        let awaits_claims = self.sessions.is_reclaiming() && could_conflict_with_claims(want);
        if self.queue.is_behind(ticket, session, ino, want) {
            return false;
        }
        let others = self.table.holders(ino).iter();
        let in_the_way =
            others.filter(|held| held.session != session && Want::Hold(held.kind).conflicts(want));
        let in_the_way: Vec<Held> = in_the_way.copied().collect();
        for held in &in_the_way {
            self.recall(held, ino, held.kind.left_beside(want));
        }
        in_the_way.is_empty() && !awaits_claims && !self.queue.is_used(session, ino, want)
    }

    /// Whether what the session holds says that nobody else has anything that conflicts.
    fn is_free_already(&self, session: SessionId, ino: Ino, want: Want) -> bool {
        match want {
            Want::Touch(Access::ChangeChild(child)) => {
                let held = self.table.get(session, child);
                held.is_some_and(|held| held.kind == Kind::FileExclusive)
            }
            _ => {
                let held = self.table.get(session, ino);
                held.is_some_and(|held| want.is_covered_by(held.kind))
            }
        }
    }

    /// Whether this holds for all that an operation touches.
    pub(super) fn is_covered(&self, session: SessionId, wants: &[(Ino, Want)]) -> bool {
        let mut wants = wants.iter();
        wants.all(|(ino, want)| self.is_free_already(session, *ino, *want))
    }

    /// Grants what was asked for, or what is held already if that is more. The grant is a new one in any
    /// case: the holder may be about to give the old one up, and what it says of that must not count for
    /// this one.
    fn grant(&mut self, session: SessionId, ino: Ino, kind: Kind) {
        let held = self.table.get(session, ino).map(|held| held.kind);
        let kind = held.filter(|held| held.includes(kind)).unwrap_or(kind);
        self.last_grant += 1;
        let grant = GrantId {
            term: self.term,
            number: self.last_grant,
        };
        self.table.insert(
            ino,
            Held {
                session,
                grant,
                kind,
            },
        );
        self.send(session, ToHolder::Grant { ino, grant, kind });
        self.trim(session);
    }

    /// Recalls the least recently granted capability of a session that has too many.
    pub(super) fn trim(&mut self, session: SessionId) {
        let count = self.table.count_of(session);
        let mut excess = count.saturating_sub(self.settings.capabilities_max);
        if excess == 0 {
            return;
        }
        excess = excess.saturating_sub(self.recalls.of_session(session).count());
        let held = self.table.of_session(session).map(|(_, ino)| ino);
        let held = held.filter(|ino| !self.recalls.is_recalled(session, *ino));
        let oldest: Vec<Ino> = held.take(excess).collect();
        for ino in oldest {
            let held = self.table.get(session, ino).expect("it is held");
            self.recall(&held, ino, None);
        }
    }

    fn recall(&mut self, held: &Held, ino: Ino, keep: Option<Kind>) {
        let late_at = self.now + self.settings.answer_within;
        let (session, grant) = (held.session, held.grant);
        if self.recalls.begin(session, ino, keep, self.now, late_at) {
            self.send(session, ToHolder::Recall { ino, grant, keep });
        }
    }

    /// Gives up all that an ended session held.
    pub(super) fn fence(&mut self, session: SessionId) {
        let held: Vec<Ino> = self.table.of_session(session).map(|(_, ino)| ino).collect();
        for ino in held {
            self.table.remove(session, ino);
            self.recalls.answer(session, ino, None);
            self.touched.insert(ino);
        }
        self.actions.push_back(Action::Fenced { session });
        self.reclaimed_if_all();
    }

    /// What waits for the item's inodes is looked at again.
    pub(super) fn touch(&mut self, item: &Item) {
        self.touched.extend(item.wants.iter().map(|(ino, _)| *ino));
    }

    /// Sends a message if the session is connected. A recall is sent again once it has claimed.
    pub(super) fn send(&mut self, session: SessionId, message: ToHolder) {
        if let Some(link) = self.sessions.link(session) {
            self.actions.push_back(Action::Send {
                session,
                link,
                message,
            });
        }
    }
}

/// Whether sessions that have not claimed could hold what conflicts.
fn could_conflict_with_claims(want: Want) -> bool {
    // All operations of earlier leaders are over, and nothing that is held keeps others from reading names.
    want != Want::Hold(Kind::DirectoryRead)
}
