//! Claims: the capabilities that a session reports at the beginning of each connection.

use namespace::{Ino, SessionId};

use super::chores::Chore;
use super::queue::Waiters;
use super::{Action, Manager};
use crate::kind::{Kind, Want};
use crate::limits::Limit;
use crate::message::{Claim, Link, ToHolder};

impl Manager {
    /// Processes claims of a new connection. They replace what was known of the session. Until its last claim
    /// the session also counts as holding what was known.
    pub(super) fn claim(
        &mut self,
        session: SessionId,
        link: Link,
        claims: &[Claim],
        is_last: bool,
    ) {
        if self.sessions.link(session) != Some(link) {
            if !self.sessions.connect(session, link) {
                return;
            }
            for item in self.queue.take_of(session) {
                self.touch(&item);
            }
        }
        let is_within = self.sessions.claim(
            session,
            claims.iter().map(|claim| claim.ino),
            self.settings.held_max(),
        );
        if !is_within {
            self.close(session, Limit::Claims);
            return;
        }
        let is_first = self.sessions.is_unclaimed(session);
        for claim in claims {
            self.claim_one(session, claim, is_first);
        }
        if is_last {
            self.sessions.claimed(session);
            self.reclaimed_if_all();
            self.chores.push_back(Chore::Settle {
                session,
                link,
                behind: None,
                until: self.newest_grant(),
            });
        }
    }

    fn claim_one(&mut self, session: SessionId, claim: &Claim, is_first: bool) {
        let Claim { ino, grant, kind } = *claim;
        self.touched.insert(ino, Waiters::All);
        let held = self.table.get(session, ino);
        let has_room = self.table.count_of(session) < self.settings.held_max();
        let is_possible = match held {
            // If a grant was lost with the connection, the holder still has the one that it should have
            // replaced.
            Some(held) => held.kind.includes(kind),
            None => is_first && has_room && self.is_claimable(session, ino, kind),
        };
        // A number that was not assigned yet will belong to another grant.
        let is_possible = is_possible && grant <= self.newest_grant();
        let other = self.table.inode_of(session, grant);
        if is_possible && other.is_none_or(|other| other == ino) {
            self.hold(session, ino, grant, kind);
            self.answered(session, ino, Some(kind));
        } else {
            // No session can hold this unless two leaders granted at the same time. The claim is not
            // recorded, so that no operation waits for it.
            self.send(
                session,
                ToHolder::Recall {
                    ino,
                    grant,
                    keep: None,
                },
            );
        }
    }

    fn is_claimable(&self, session: SessionId, ino: Ino, kind: Kind) -> bool {
        let want = Want::Hold(kind);
        let mut holders = self.table.holders(ino).iter();
        holders.all(|held| !Want::Hold(held.kind).conflicts(want))
            && !self.queue.is_used(session, ino, want)
    }

    /// Ends the reclaim phase when all sessions have claimed.
    pub(super) fn reclaimed_if_all(&mut self) {
        if self.is_reclaimed || self.sessions.is_reclaiming() {
            return;
        }
        self.is_reclaimed = true;
        self.claims_late_at = None;
        self.touch_all_waited_for();
        self.actions.push_back(Action::Reclaimed);
    }
}
