//! What guests may use at most, whatever has become of it here.

use std::collections::{HashMap, VecDeque};

use fs_capabilities::Instant;
use namespace::Ino;

/// Inodes that guests may use records of. With more, nothing is promised.
const PROMISED_MAX: usize = 1 << 16;

#[derive(Debug, Clone, Copy)]
struct Promise {
    until: Instant,
    /// The directory whose capability covers the record.
    cover: Ino,
    place: Option<Ino>,
}

/// Inodes whose records were told to guests with a validity that has not passed, by which capability.
#[derive(Debug, Default)]
pub(super) struct Promised {
    inodes: HashMap<Ino, Promise>,
    /// In the order in which they end, but for those that were renewed.
    ends: VecDeque<(Instant, Ino)>,
    last: Instant,
}

impl Promised {
    /// Whether nothing more may be promised.
    pub(super) fn is_full(&mut self, now: Instant) -> bool {
        while let Some((until, ino)) = self.ends.front().copied() {
            if until > now {
                break;
            }
            self.ends.pop_front();
            match self.inodes.get(&ino) {
                Some(promise) if promise.until > now => {
                    self.ends.push_back((promise.until, ino));
                }
                _ => {
                    self.inodes.remove(&ino);
                }
            }
        }
        self.inodes.len() >= PROMISED_MAX
    }

    /// A record was promised, by the capability of `cover`.
    pub(super) fn note(&mut self, until: Instant, ino: Ino, (cover, place): (Ino, Option<Ino>)) {
        self.note_name(until);
        let promise = Promise {
            until,
            cover,
            place,
        };
        if self.inodes.insert(ino, promise).is_none() {
            self.ends.push_back((until, ino));
        }
    }

    /// A name was promised. Its directory covers it.
    pub(super) fn note_name(&mut self, until: Instant) {
        self.last = self.last.max(until);
    }

    /// When the last of all validities ends.
    pub(super) fn last(&self) -> Instant {
        self.last
    }

    /// The capability by which an inode's record was promised.
    pub(super) fn cover_of(&self, ino: Ino) -> Option<Ino> {
        self.inodes.get(&ino).map(|promise| promise.cover)
    }

    /// The capabilities by which records were promised of inodes that have their only name in a directory.
    pub(super) fn covers_in(&self, dir: Ino) -> impl Iterator<Item = Ino> {
        let promises = self.inodes.values();
        let there = promises.filter(move |promise| promise.place == Some(dir));
        there.map(|promise| promise.cover)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(seconds: u64) -> Instant {
        Instant::START + Duration::from_secs(seconds)
    }

    #[test]
    fn a_promise_is_remembered_until_it_has_passed() {
        let mut promised = Promised::default();
        promised.note(at(1), Ino(7), (Ino(1), Some(Ino(1))));
        promised.note(at(2), Ino(8), (Ino(8), Some(Ino(1))));
        promised.note(at(3), Ino(7), (Ino(1), Some(Ino(1))));
        assert_eq!(promised.covers_in(Ino(1)).count(), 2);
        assert!(!promised.is_full(at(2)));
        assert_eq!(promised.cover_of(Ino(7)), Some(Ino(1)), "it was renewed");
        assert_eq!(promised.cover_of(Ino(8)), None);
        assert!(!promised.is_full(at(3)));
        assert!(promised.inodes.is_empty() && promised.ends.is_empty());
        assert_eq!(promised.last(), at(3));
    }
}
