//! Which inodes something happened to lately.

use std::collections::{HashMap, VecDeque};

use namespace::Ino;

/// Happenings that are remembered. Before these, anything may have happened to any inode.
const REMEMBERED_MAX: usize = 1 << 14;

#[derive(Debug, Default)]
pub(super) struct Recent {
    last: u64,
    inodes: HashMap<Ino, u64>,
    order: VecDeque<(u64, Ino)>,
    forgotten: u64,
}

impl Recent {
    /// Happenings so far.
    pub(super) fn last(&self) -> u64 {
        self.last
    }

    pub(super) fn note(&mut self, ino: Ino) {
        self.last += 1;
        self.inodes.insert(ino, self.last);
        self.order.push_back((self.last, ino));
        if self.order.len() > REMEMBERED_MAX {
            let (number, ino) = self.order.pop_front().expect("there is one");
            self.forgotten = number;
            if self.inodes.get(&ino) == Some(&number) {
                self.inodes.remove(&ino);
            }
        }
    }

    /// Whether something may have happened to an inode behind the first `count` happenings.
    pub(super) fn is_since(&self, ino: Ino, count: u64) -> bool {
        count < self.forgotten || self.inodes.get(&ino).is_some_and(|number| *number > count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happened_is_known_by_inode_until_it_is_too_much() {
        let mut recent = Recent::default();
        recent.note(Ino(7));
        assert!(recent.is_since(Ino(7), 0) && !recent.is_since(Ino(8), 0));
        assert!(!recent.is_since(Ino(7), recent.last()));
        for number in 0..REMEMBERED_MAX as u64 {
            recent.note(Ino(100 + number));
        }
        assert!(recent.is_since(Ino(8), 0), "it is not known");
        assert!(!recent.is_since(Ino(8), 1));
        assert_eq!(recent.inodes.len(), REMEMBERED_MAX);
    }
}
