//! Work that grows with the number of capabilities of a session. It is done in small steps, so that no call
//! takes long.

use namespace::SessionId;

use super::{Action, Manager};
use crate::message::{GrantId, Link, ToHolder};

/// Steps of such work in one call. The rest is done in the next call, or in [`Manager::tick`], which is due
/// at once.
const STEPS_MAX: usize = 256;

/// Work that is done in small steps.
#[derive(Debug, Clone, Copy)]
pub(super) enum Chore {
    /// Ends the claims of a session on this connection: removes what it did not claim, and repeats its open
    /// recalls.
    Settle {
        session: SessionId,
        link: Link,
        /// The last grant that was processed.
        behind: Option<GrantId>,
        /// The last grant that the claims may contain. Later ones were made on this connection.
        until: GrantId,
    },
    /// Recalls the least recently granted capabilities of a session that has too many.
    Trim(SessionId),
    /// Removes all capabilities of an ended session.
    Fence(SessionId),
}

impl Manager {
    /// Does a part of the pending work, round robin.
    pub(super) fn do_chores(&mut self) {
        for _ in 0..STEPS_MAX {
            let Some(chore) = self.chores.pop_front() else {
                return;
            };
            self.count_step();
            if let Some(left) = self.step(chore) {
                self.chores.push_back(left);
            }
        }
    }

    /// Does one step. Returns the rest of the work.
    fn step(&mut self, chore: Chore) -> Option<Chore> {
        match chore {
            Chore::Settle {
                session,
                link,
                behind,
                until,
            } => {
                // A new connection has its own work.
                if self.sessions.link(session) != Some(link) {
                    return None;
                }
                let next = self.table.next_of(session, behind);
                let Some((grant, ino)) = next.filter(|(grant, _)| *grant <= until) else {
                    self.sessions.settled(session);
                    return Some(Chore::Trim(session));
                };
                if !self.sessions.has_claimed(session, ino) {
                    self.dropped(session, ino, grant, None);
                } else if let Some(keep) = self.recalls.keep(session, ino) {
                    self.send(session, ToHolder::Recall { ino, grant, keep });
                }
                Some(Chore::Settle {
                    session,
                    link,
                    behind: Some(grant),
                    until,
                })
            }
            Chore::Trim(session) => self.trim_one(session).then_some(chore),
            Chore::Fence(session) => {
                let Some((_, ino)) = self.table.next_of(session, None) else {
                    self.actions.push_back(Action::Fenced { session });
                    self.reclaimed_if_all();
                    return None;
                };
                self.give_up(session, ino);
                Some(chore)
            }
        }
    }
}
