//! When files had nothing buffered any more: a record that was asked for before that may be older.

use std::collections::{HashMap, VecDeque};

use namespace::Ino;

/// Ends that are remembered. With more, any file may have been written back since.
const ENDS_MAX: usize = 1 << 14;

/// A point in the order of ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct Moment(u64);

#[derive(Default)]
pub(super) struct Ends {
    last: u64,
    ended: HashMap<Ino, u64>,
    order: VecDeque<(u64, Ino)>,
    /// Ends up to this one are forgotten.
    forgotten: u64,
}

impl Ends {
    pub(super) fn now(&self) -> Moment {
        Moment(self.last)
    }

    /// Some or all of what a file had is committed or lost.
    pub(super) fn end(&mut self, ino: Ino) {
        self.last += 1;
        self.ended.insert(ino, self.last);
        self.order.push_back((self.last, ino));
        if self.order.len() > ENDS_MAX {
            let (number, ino) = self.order.pop_front().expect("there is one");
            self.forgotten = number;
            if self.ended.get(&ino) == Some(&number) {
                self.ended.remove(&ino);
            }
        }
    }

    /// Whether something of a file may have been committed since.
    pub(super) fn is_since(&self, ino: Ino, moment: Moment) -> bool {
        let ended = self.ended.get(&ino);
        moment.0 < self.forgotten || ended.is_some_and(|number| *number > moment.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_known_by_file_until_there_are_too_many() {
        let mut ends = Ends::default();
        let before = ends.now();
        ends.end(Ino(7));
        let after = ends.now();
        assert!(ends.is_since(Ino(7), before) && !ends.is_since(Ino(7), after));
        assert!(!ends.is_since(Ino(8), before));
        for number in 0..ENDS_MAX as u64 {
            ends.end(Ino(100 + number));
        }
        assert!(ends.is_since(Ino(8), before), "it is not known");
        assert!(!ends.is_since(Ino(8), after));
        assert!(ends.ended.len() <= ENDS_MAX && ends.order.len() <= ENDS_MAX);
    }
}
