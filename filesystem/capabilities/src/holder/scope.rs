//! Parts of what a capability covers: which of them change, changed a short while ago, or were promised.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{DefaultHasher, Hasher};

use namespace::Ino;

use super::promises::Promises;
use crate::holder::GuestId;
use crate::time::Instant;

/// Scopes that are remembered to have changed a short while ago. With more, their capabilities count as
/// changed as a whole.
const CHANGED_MAX: usize = 1 << 16;

/// Scopes whose promises are remembered each. With more, every change under the capability waits for the
/// others.
const PROMISED_MAX: usize = 1 << 16;

/// A part of what a capability covers, as guests are told it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// All that it covers.
    All,
    /// The attributes of the inode itself.
    Itself,
    /// Which inode a name of the directory leads to, or that there is none: [`Scope::name`].
    Name(u64),
    /// The attributes of an inode that has its only name in the directory and is no directory.
    Child(Ino),
}

impl Scope {
    /// A name's, by its hash. Two names of one hash count as one name, which is safe.
    pub fn name(name: &[u8]) -> Self {
        let mut hasher = DefaultHasher::new();
        hasher.write(name);
        Self::Name(hasher.finish())
    }
}

/// Changes of this host that have begun.
#[derive(Debug, Default)]
pub(super) struct Changing(BTreeMap<Ino, BTreeMap<Scope, usize>>);

impl Changing {
    pub(super) fn begin(&mut self, ino: Ino, scope: Scope) {
        *self.0.entry(ino).or_default().entry(scope).or_default() += 1;
    }

    /// # Panics
    /// If none has begun.
    pub(super) fn end(&mut self, ino: Ino, scope: Scope) {
        let scopes = self.0.get_mut(&ino);
        let scopes = scopes.expect("a change that ends has begun");
        let count = scopes.get_mut(&scope);
        let count = count.expect("a change that ends has begun");
        *count -= 1;
        if *count == 0 {
            scopes.remove(&scope);
        }
        if scopes.is_empty() {
            self.0.remove(&ino);
        }
    }

    /// Whether a change has begun that touches the scope.
    pub(super) fn touches(&self, ino: Ino, scope: Scope) -> bool {
        self.0.get(&ino).is_some_and(|scopes| {
            scope == Scope::All || scopes.contains_key(&scope) || scopes.contains_key(&Scope::All)
        })
    }
}

/// What changes of this host touched a short while ago.
#[derive(Debug, Default)]
pub(super) struct Changed {
    at: HashMap<(Ino, Scope), Instant>,
    /// In the order of their ends, but for those that changed again.
    order: VecDeque<(Instant, (Ino, Scope))>,
}

impl Changed {
    /// A change ended now. Forgets those before `since`. False if there is no room for it.
    pub(super) fn note(&mut self, now: Instant, of: (Ino, Scope), since: Instant) -> bool {
        while let Some((at, of)) = self.order.front().copied() {
            if at >= since {
                break;
            }
            self.order.pop_front();
            match self.at.get(&of).filter(|last| **last >= since) {
                Some(last) => self.order.push_back((*last, of)),
                None => {
                    self.at.remove(&of);
                }
            }
        }
        if let Some(at) = self.at.get_mut(&of) {
            *at = now;
            return true;
        }
        if self.at.len() >= CHANGED_MAX {
            return false;
        }
        self.at.insert(of, now);
        self.order.push_back((now, of));
        true
    }

    /// When the last change of a scope ended, unless that is long ago.
    pub(super) fn at(&self, of: (Ino, Scope)) -> Option<Instant> {
        self.at.get(&of).copied()
    }
}

/// Until when guests may use what they were told, by scope.
#[derive(Debug, Default)]
pub(super) struct Promised {
    by_scope: HashMap<(Ino, Scope), Promises>,
    /// In the order in which they end, but for those that were renewed.
    ends: VecDeque<(Instant, (Ino, Scope))>,
}

impl Promised {
    /// A guest is told something. False if there is no room for it.
    pub(super) fn give(
        &mut self,
        now: Instant,
        of: (Ino, Scope),
        guest: GuestId,
        until: Instant,
    ) -> bool {
        self.forget_ended(now);
        if let Some(promises) = self.by_scope.get_mut(&of) {
            promises.give(now, guest, until);
            return true;
        }
        if self.by_scope.len() >= PROMISED_MAX {
            return false;
        }
        let promises = self.by_scope.entry(of).or_default();
        promises.give(now, guest, until);
        self.ends.push_back((until, of));
        true
    }

    fn forget_ended(&mut self, now: Instant) {
        while let Some((until, of)) = self.ends.front().copied() {
            if until > now {
                break;
            }
            self.ends.pop_front();
            let end = self.by_scope.get(&of).map(Promises::end);
            match end.filter(|end| *end > now) {
                Some(end) => self.ends.push_back((end, of)),
                None => {
                    self.by_scope.remove(&of);
                }
            }
        }
    }

    /// When the validity ends that this guest has of a scope.
    pub(super) fn end_of(&self, of: (Ino, Scope), guest: GuestId) -> Option<Instant> {
        let promises = self.by_scope.get(&of)?;
        Some(promises.end_of(guest))
    }

    /// When no guest but this one uses what it was told of a scope.
    pub(super) fn end_beside(&self, of: (Ino, Scope), guest: GuestId) -> Option<Instant> {
        let promises = self.by_scope.get(&of)?;
        Some(promises.end_beside(guest))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const D: Ino = Ino(2);

    fn at(seconds: u64) -> Instant {
        Instant::START + Duration::from_secs(seconds)
    }

    #[test]
    fn a_change_touches_its_scope_and_one_of_all_touches_every_scope() {
        let mut changing = Changing::default();
        changing.begin(D, Scope::Itself);
        assert!(changing.touches(D, Scope::Itself) && changing.touches(D, Scope::All));
        assert!(!changing.touches(D, Scope::name(b"a")) && !changing.touches(Ino(3), Scope::All));
        changing.begin(D, Scope::All);
        assert!(changing.touches(D, Scope::name(b"a")));
        changing.end(D, Scope::All);
        changing.end(D, Scope::Itself);
        assert!(!changing.touches(D, Scope::All) && changing.0.is_empty());
    }

    #[test]
    fn what_changed_is_remembered_for_a_while_as_far_as_there_is_room() {
        let mut changed = Changed::default();
        for number in 0..CHANGED_MAX as u64 {
            assert!(changed.note(at(1), (Ino(number), Scope::Itself), at(0)));
        }
        assert!(!changed.note(at(2), (D, Scope::name(b"a")), at(1)));
        assert_eq!(changed.at((D, Scope::Itself)), Some(at(1)));
        assert!(
            changed.note(at(2), (D, Scope::Itself), at(1)),
            "it is there"
        );
        assert!(changed.note(at(3), (Ino(3), Scope::Itself), at(2)));
        assert_eq!(changed.at((D, Scope::Itself)), Some(at(2)));
        assert_eq!((changed.at.len(), changed.order.len()), (2, 2));
        assert!(changed.note(at(5), (Ino(3), Scope::Itself), at(4)));
        assert_eq!((changed.at.len(), changed.order.len()), (1, 1));
    }

    #[test]
    fn promises_are_remembered_until_they_end_as_far_as_there_is_room() {
        let mut promised = Promised::default();
        let (one, two) = (GuestId(1), GuestId(2));
        for number in 0..PROMISED_MAX as u64 {
            assert!(promised.give(at(0), (D, Scope::Name(number)), one, at(1)));
        }
        assert!(!promised.give(at(0), (D, Scope::Itself), one, at(1)));
        let first = (D, Scope::Name(0));
        assert!(promised.give(at(0), first, two, at(2)), "it is there");
        assert_eq!(promised.end_beside(first, one), Some(at(2)));
        assert!(promised.give(at(1), (D, Scope::Itself), one, at(3)));
        assert_eq!(promised.by_scope.len(), 2);
        assert_eq!(
            promised.end_beside(first, one),
            Some(at(2)),
            "it was renewed"
        );
        assert!(promised.give(at(3), (D, Scope::Itself), one, at(4)));
        assert_eq!((promised.by_scope.len(), promised.ends.len()), (1, 1));
    }
}
