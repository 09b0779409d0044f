//! The capabilities of a session, and which of them are being given up.

use std::collections::{BTreeMap, BTreeSet};

use namespace::Ino;

use super::promises::Promises;
use crate::kind::Kind;
use crate::message::GrantId;
use crate::time::Instant;

/// Capabilities that are looked at in a step of the search for unused ones.
pub(super) const SCAN_MAX: usize = 256;

/// A capability.
#[derive(Debug, Clone)]
pub(super) struct Held {
    pub(super) grant: GrantId,
    pub(super) kind: Kind,
    pub(super) used_at: Instant,
    /// Since when nobody else has changed anything under it, nor this host of unknown scope.
    pub(super) quiet_since: Instant,
    /// Of all scopes together.
    pub(super) promises: Promises,
    /// Of scopes that are not remembered by themselves.
    pub(super) promises_of_any: Promises,
    /// Set while it is given up.
    pub(super) dropping: Option<Dropping>,
}

/// A capability is being given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Dropping {
    /// What is kept.
    pub(super) keep: Option<Kind>,
    /// The owner has written back what it had buffered.
    pub(super) is_clean: bool,
}

impl Held {
    /// What may be done under it now.
    pub(super) fn usable(&self) -> Option<Kind> {
        match self.dropping {
            Some(dropping) => dropping.keep,
            None => Some(self.kind),
        }
    }
}

/// All capabilities of a session.
#[derive(Debug, Default)]
pub(super) struct HeldTable {
    all: BTreeMap<Ino, Held>,
    /// When the last promise ends of those that are clean and wait for nothing else.
    ends: BTreeSet<(Instant, Ino)>,
    /// Where the search for unused ones goes on.
    cursor: Ino,
}

impl HeldTable {
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn get(&self, ino: Ino) -> Option<&Held> {
        self.all.get(&ino)
    }

    pub(super) fn get_mut(&mut self, ino: Ino) -> Option<&mut Held> {
        self.all.get_mut(&ino)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Ino, &Held)> {
        self.all.iter().map(|(ino, held)| (*ino, held))
    }

    pub(super) fn insert(&mut self, ino: Ino, held: Held) {
        self.all.insert(ino, held);
    }

    pub(super) fn remove(&mut self, ino: Ino) -> Option<Held> {
        self.all.remove(&ino)
    }

    pub(super) fn clear(&mut self) {
        self.all.clear();
        self.ends.clear();
    }

    /// The capability is free of promises at `at`.
    pub(super) fn wait_until(&mut self, at: Instant, ino: Ino) {
        self.ends.insert((at, ino));
    }

    pub(super) fn next_end(&self) -> Option<Instant> {
        self.ends.first().map(|(at, _)| *at)
    }

    pub(super) fn take_end(&mut self, now: Instant) -> Option<Ino> {
        let (at, ino) = *self.ends.first()?;
        if now < at {
            return None;
        }
        self.ends.remove(&(at, ino));
        Some(ino)
    }

    /// The next ones in the search for unused ones, with when they were used. Those that are given up are
    /// left out.
    pub(super) fn scan(&mut self) -> Vec<(Ino, Instant)> {
        let behind = self.all.range(self.cursor..);
        let scanned = behind.chain(self.all.range(..self.cursor)).take(SCAN_MAX);
        let scanned: Vec<(Ino, &Held)> = scanned.map(|(ino, held)| (*ino, held)).collect();
        let next = scanned.last().map(|(ino, _)| Ino(ino.0.wrapping_add(1)));
        let kept = scanned.iter().filter(|(_, held)| held.dropping.is_none());
        let found = kept.map(|(ino, held)| (*ino, held.used_at)).collect();
        self.cursor = next.unwrap_or_default();
        found
    }
}
