//! What may go on: grants, operations and the recalls that make room for them.

use namespace::{Ino, SessionId};

use super::chores::Chore;
use super::queue::{Goal, Item, Ticket, Waiters};
use super::table::Held;
use super::{Action, Manager};
use crate::kind::{Access, Kind, Want};
use crate::limits::Limit;
use crate::message::{GrantId, ToHolder};

impl Manager {
    /// Looks again at requests that wait for inodes that changed.
    pub(super) fn pump(&mut self) {
        self.do_chores();
        while let Some((ino, which)) = self.touched.pop_first() {
            for ticket in self.queue.waiting_at(ino, which) {
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
        self.count_step();
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
        let grant = self.newest_grant();
        self.hold(session, ino, grant, kind);
        self.send(session, ToHolder::Grant { ino, grant, kind });
        self.trim(session);
    }

    /// Notes what a session holds from now on.
    pub(super) fn hold(&mut self, session: SessionId, ino: Ino, grant: GrantId, kind: Kind) {
        let held = Held {
            session,
            grant,
            kind,
        };
        self.table.insert(ino, held);
    }

    /// Recalls the least recently granted capabilities of a session that has too many: two at most for each
    /// that is granted.
    fn trim(&mut self, session: SessionId) {
        let _ = self.trim_one(session) && self.trim_one(session);
    }

    /// Recalls one of them. Returns false if the session is within its limit.
    pub(super) fn trim_one(&mut self, session: SessionId) -> bool {
        if self.table.kept_by(session) <= self.settings.capabilities_max {
            return false;
        }
        self.count_step();
        let ino = self.table.oldest_kept(session);
        let ino = ino.expect("a session that has too many holds something");
        let held = self.table.get(session, ino).expect("it is held");
        self.recall(&held, ino, None);
        true
    }

    fn recall(&mut self, held: &Held, ino: Ino, keep: Option<Kind>) {
        let late_at = self.now + self.settings.answer_within;
        let (session, grant) = (held.session, held.grant);
        let is_new = self.recalls.begin(session, ino, keep, self.now, late_at);
        self.table.set_recalled(session, ino, true);
        // The session's claims may name another grant, which then replaces this one. The recall is sent after
        // the last claim.
        if is_new && !self.sessions.is_claiming(session) {
            self.send(session, ToHolder::Recall { ino, grant, keep });
        }
    }

    /// Removes all capabilities of an ended session in small steps.
    pub(super) fn fence(&mut self, session: SessionId) {
        self.chores.push_back(Chore::Fence(session));
    }

    /// Removes the capability of an ended session for an inode.
    pub(super) fn give_up(&mut self, session: SessionId, ino: Ino) {
        self.table.remove(session, ino);
        self.recalls.answer(session, ino, None);
        self.touched.insert(ino, Waiters::All);
    }

    /// Marks the item's inodes: what waits for them is checked again, because the item no longer waits or has
    /// ended.
    pub(super) fn touch(&mut self, item: &Item) {
        for (ino, want) in &item.wants {
            let which = match want {
                Want::Hold(_) => Waiters::All,
                Want::Touch(_) => Waiters::Grants,
            };
            let touched = self.touched.entry(*ino).or_insert(which);
            *touched = which.max(*touched);
        }
    }

    /// Marks all inodes that items wait for.
    pub(super) fn touch_all_waited_for(&mut self) {
        let inodes = self.queue.inodes();
        self.touched.extend(inodes.map(|ino| (ino, Waiters::All)));
    }

    /// Closes the link of a session that has exceeded a limit. A session without a link is left as it is:
    /// there is one [`Action::Close`] for each link.
    pub(super) fn close(&mut self, session: SessionId, limit: Limit) {
        if self.sessions.link(session).is_none() {
            return;
        }
        self.sessions.disconnect(session);
        for item in self.queue.take_of(session) {
            self.touch(&item);
        }
        self.actions.push_back(Action::Close { session, limit });
    }

    /// Returns the newest grant.
    pub(super) fn newest_grant(&self) -> GrantId {
        GrantId {
            term: self.term,
            number: self.last_grant,
        }
    }

    /// Counts a step, for tests of the complexity.
    pub(super) fn count_step(&mut self) {
        #[cfg(test)]
        {
            self.steps += 1;
        }
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
