//! The capabilities that are held, by inode and by session.

use std::collections::BTreeMap;
use std::ops::Bound;

use namespace::{Ino, SessionId};

use super::recent::Recent;
use crate::kind::Kind;
use crate::message::GrantId;

/// A capability that a session holds of an inode.
#[derive(Debug, Clone, Copy)]
pub(super) struct Held {
    pub(super) session: SessionId,
    pub(super) grant: GrantId,
    pub(super) kind: Kind,
}

/// Grants of one session, in the order in which they were granted.
#[derive(Debug, Default)]
struct Grants {
    /// Grants that are not recalled.
    kept: BTreeMap<GrantId, Ino>,
    recalled: BTreeMap<GrantId, Ino>,
}

impl Grants {
    fn len(&self) -> usize {
        self.kept.len() + self.recalled.len()
    }
}

/// All capabilities. A session has at most one of an inode.
#[derive(Debug, Default)]
pub(super) struct Table {
    /// Mostly one or a few holders each; a shared directory has one for each host.
    inodes: BTreeMap<Ino, Vec<Held>>,
    sessions: BTreeMap<SessionId, Grants>,
    count: usize,
    /// Exclusive capabilities that were given up.
    exclusives_ended: Recent,
}

impl Table {
    pub(super) fn exclusives_ended(&self) -> &Recent {
        &self.exclusives_ended
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    pub(super) fn count_of(&self, session: SessionId) -> usize {
        self.sessions.get(&session).map_or(0, Grants::len)
    }

    pub(super) fn holders(&self, ino: Ino) -> &[Held] {
        self.inodes.get(&ino).map_or(&[], Vec::as_slice)
    }

    pub(super) fn get(&self, session: SessionId, ino: Ino) -> Option<Held> {
        let mut holders = self.holders(ino).iter();
        holders.find(|held| held.session == session).copied()
    }

    /// The inode that a session's grant is of.
    pub(super) fn inode_of(&self, session: SessionId, grant: GrantId) -> Option<Ino> {
        let grants = self.sessions.get(&session)?;
        let found = grants.kept.get(&grant).or(grants.recalled.get(&grant));
        found.copied()
    }

    /// Returns the next capability of a session after a grant, in the order in which they were granted.
    pub(super) fn next_of(
        &self,
        session: SessionId,
        behind: Option<GrantId>,
    ) -> Option<(GrantId, Ino)> {
        let grants = self.sessions.get(&session)?;
        let behind = behind.map_or(Bound::Unbounded, Bound::Excluded);
        let next = |of: &BTreeMap<GrantId, Ino>| {
            let next = of.range((behind, Bound::Unbounded)).next();
            next.map(|(grant, ino)| (*grant, *ino))
        };
        [next(&grants.kept), next(&grants.recalled)]
            .into_iter()
            .flatten()
            .min()
    }

    /// Number of capabilities of a session that are not recalled.
    pub(super) fn kept_by(&self, session: SessionId) -> usize {
        let grants = self.sessions.get(&session);
        grants.map_or(0, |grants| grants.kept.len())
    }

    /// Returns the least recently granted capability of a session that is not recalled.
    pub(super) fn oldest_kept(&self, session: SessionId) -> Option<Ino> {
        let grants = self.sessions.get(&session)?;
        grants.kept.first_key_value().map(|(_, ino)| *ino)
    }

    /// Records whether the capability of a session for an inode is recalled.
    pub(super) fn set_recalled(&mut self, session: SessionId, ino: Ino, is_recalled: bool) {
        let Some(held) = self.get(session, ino) else {
            return;
        };
        let grants = self.sessions.get_mut(&session);
        let grants = grants.expect("a session that holds something has grants");
        let (from, to) = match is_recalled {
            true => (&mut grants.kept, &mut grants.recalled),
            false => (&mut grants.recalled, &mut grants.kept),
        };
        if from.remove(&held.grant).is_some() {
            to.insert(held.grant, ino);
        }
    }

    /// Replaces the session's capability for the inode. The new one counts as not recalled.
    pub(super) fn insert(&mut self, ino: Ino, held: Held) {
        self.remove(held.session, ino);
        self.inodes.entry(ino).or_default().push(held);
        let grants = self.sessions.entry(held.session).or_default();
        let replaced = grants.kept.insert(held.grant, ino);
        assert!(replaced.is_none(), "a grant is of one inode");
        self.count += 1;
    }

    /// Lowers what a session holds of an inode to `kind`.
    pub(super) fn lower(&mut self, session: SessionId, ino: Ino, kind: Kind) {
        let holders = self.inodes.get_mut(&ino).into_iter().flatten();
        for held in holders.filter(|held| held.session == session) {
            assert!(held.kind.includes(kind), "nothing is added to a grant");
            let is_less = held.kind == Kind::FileExclusive && kind != Kind::FileExclusive;
            held.kind = kind;
            if is_less {
                self.exclusives_ended.note(ino);
            }
        }
    }

    pub(super) fn remove(&mut self, session: SessionId, ino: Ino) -> Option<Held> {
        let holders = self.inodes.get_mut(&ino)?;
        let index = holders.iter().position(|held| held.session == session)?;
        let held = holders.swap_remove(index);
        if holders.is_empty() {
            self.inodes.remove(&ino);
        }
        if let Some(grants) = self.sessions.get_mut(&session) {
            grants.kept.remove(&held.grant);
            grants.recalled.remove(&held.grant);
            if grants.len() == 0 {
                self.sessions.remove(&session);
            }
        }
        self.count -= 1;
        if held.kind == Kind::FileExclusive {
            self.exclusives_ended.note(ino);
        }
        Some(held)
    }
}
