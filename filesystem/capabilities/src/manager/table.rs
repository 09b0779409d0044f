//! The capabilities that are held, by inode and by session.

use std::collections::BTreeMap;

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

/// All capabilities. A session has at most one of an inode.
#[derive(Debug, Default)]
pub(super) struct Table {
    /// Mostly one or a few holders each; a shared directory has one for each host.
    inodes: BTreeMap<Ino, Vec<Held>>,
    /// In the order in which they were granted.
    sessions: BTreeMap<SessionId, BTreeMap<GrantId, Ino>>,
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
        self.sessions.get(&session).map_or(0, BTreeMap::len)
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
        self.sessions.get(&session)?.get(&grant).copied()
    }

    /// What a session holds, the least recently granted first.
    pub(super) fn of_session(&self, session: SessionId) -> impl Iterator<Item = (GrantId, Ino)> {
        let grants = self.sessions.get(&session);
        grants
            .into_iter()
            .flatten()
            .map(|(grant, ino)| (*grant, *ino))
    }

    /// Puts a capability in the place of what the session held of the inode.
    pub(super) fn insert(&mut self, ino: Ino, held: Held) {
        self.remove(held.session, ino);
        self.inodes.entry(ino).or_default().push(held);
        let grants = self.sessions.entry(held.session).or_default();
        let replaced = grants.insert(held.grant, ino);
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
            grants.remove(&held.grant);
            if grants.is_empty() {
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
