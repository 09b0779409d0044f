//! Operations whose footprints depend on what others change: these wait for each other, in order of arrival.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::footprint::{Footprint, Part};
use crate::manager::OperationId;

/// Parts that an operation changes, and parts that its footprint was found by.
#[derive(Debug, Clone, Default)]
struct Claim {
    changes: BTreeSet<Part>,
    depends: BTreeSet<Part>,
}

#[derive(Debug, Default)]
struct Use {
    is_changed: bool,
    dependents: usize,
}

/// Which operations may be under way together. An operation gets all its parts at once, so none waits for
/// another one that waits.
#[derive(Debug, Default)]
pub(crate) struct Exclusion {
    used: BTreeMap<Part, Use>,
    under_way: BTreeMap<OperationId, Claim>,
    waiting: VecDeque<(OperationId, Claim)>,
}

impl Exclusion {
    /// Whether the operation has its parts; otherwise it waits, and [`Exclusion::end`] tells when it has.
    pub(crate) fn begin(&mut self, operation: OperationId, footprint: &Footprint) -> bool {
        let claim = Claim {
            changes: footprint.changes.clone(),
            // What it changes itself is its alone already.
            depends: footprint
                .depends
                .difference(&footprint.changes)
                .cloned()
                .collect(),
        };
        let is_behind = self
            .waiting
            .iter()
            .any(|(_, earlier)| earlier.excludes(&claim));
        if is_behind || !self.is_free(&claim) {
            self.waiting.push_back((operation, claim));
            return false;
        }
        self.take(operation, claim);
        true
    }

    /// An operation gives its parts back, or waits no more. Those that have theirs by that.
    pub(crate) fn end(&mut self, operation: OperationId) -> Vec<OperationId> {
        match self.under_way.remove(&operation) {
            Some(claim) => self.give_back(&claim),
            None => self.waiting.retain(|(waiting, _)| *waiting != operation),
        }
        let mut ready = Vec::new();
        let mut left: VecDeque<(OperationId, Claim)> = VecDeque::new();
        for (operation, claim) in std::mem::take(&mut self.waiting) {
            let is_behind = left.iter().any(|(_, earlier)| earlier.excludes(&claim));
            if is_behind || !self.is_free(&claim) {
                left.push_back((operation, claim));
            } else {
                self.take(operation, claim);
                ready.push(operation);
            }
        }
        self.waiting = left;
        ready
    }

    fn is_free(&self, claim: &Claim) -> bool {
        let is_unused = |part| !self.used.contains_key(part);
        let is_unchanged = |part| self.used.get(part).is_none_or(|used| !used.is_changed);
        claim.changes.iter().all(is_unused) && claim.depends.iter().all(is_unchanged)
    }

    fn take(&mut self, operation: OperationId, claim: Claim) {
        for part in &claim.changes {
            self.used.entry(part.clone()).or_default().is_changed = true;
        }
        for part in &claim.depends {
            self.used.entry(part.clone()).or_default().dependents += 1;
        }
        let before = self.under_way.insert(operation, claim);
        assert!(before.is_none(), "an operation begins once");
    }

    fn give_back(&mut self, claim: &Claim) {
        for part in &claim.changes {
            self.used.remove(part);
        }
        for part in &claim.depends {
            let used = self.used.get_mut(part).expect("a part in use is counted");
            used.dependents -= 1;
            if used.dependents == 0 {
                self.used.remove(part);
            }
        }
    }
}

impl Claim {
    fn excludes(&self, other: &Self) -> bool {
        !self.changes.is_disjoint(&other.changes)
            || !self.changes.is_disjoint(&other.depends)
            || !self.depends.is_disjoint(&other.changes)
    }
}

#[cfg(test)]
mod tests {
    use namespace::Ino;

    use super::*;

    fn changes(parts: &[Part]) -> Footprint {
        Footprint {
            changes: parts.iter().cloned().collect(),
            ..Footprint::default()
        }
    }

    fn depends(parts: &[Part]) -> Footprint {
        Footprint {
            depends: parts.iter().cloned().collect(),
            ..Footprint::default()
        }
    }

    fn name(name: &[u8]) -> Part {
        Part::Name(Ino(1), name.to_vec())
    }

    const ONE: OperationId = OperationId(1);
    const TWO: OperationId = OperationId(2);
    const THREE: OperationId = OperationId(3);
    const FOUR: OperationId = OperationId(4);

    #[test]
    fn operations_on_different_names_go_on_together() {
        let mut exclusion = Exclusion::default();
        assert!(exclusion.begin(ONE, &changes(&[name(b"a")])));
        assert!(exclusion.begin(TWO, &changes(&[name(b"b")])));
        assert!(!exclusion.begin(THREE, &changes(&[name(b"a"), name(b"b")])));
        assert!(exclusion.end(ONE).is_empty());
        assert_eq!(exclusion.end(TWO), [THREE]);
        assert!(exclusion.end(THREE).is_empty());
        assert!(exclusion.used.is_empty() && exclusion.under_way.is_empty());
    }

    #[test]
    fn who_moves_a_file_waits_for_those_that_found_it_and_comes_before_later_ones() {
        let mut exclusion = Exclusion::default();
        let place = [Part::Place(Ino(7))];
        assert!(exclusion.begin(ONE, &depends(&place)));
        assert!(exclusion.begin(TWO, &depends(&place)));
        assert!(!exclusion.begin(THREE, &changes(&place)));
        assert!(!exclusion.begin(FOUR, &depends(&place)));
        assert!(exclusion.end(ONE).is_empty());
        assert_eq!(exclusion.end(TWO), [THREE]);
        assert_eq!(exclusion.end(THREE), [FOUR]);
    }

    #[test]
    fn who_waits_no_more_lets_those_behind_it_go_on() {
        let mut exclusion = Exclusion::default();
        assert!(exclusion.begin(ONE, &changes(&[name(b"a")])));
        assert!(!exclusion.begin(TWO, &changes(&[name(b"a"), name(b"b")])));
        assert!(!exclusion.begin(THREE, &changes(&[name(b"b")])));
        assert_eq!(exclusion.end(TWO), [THREE]);
    }

    #[test]
    fn an_operation_does_not_wait_for_itself() {
        let mut exclusion = Exclusion::default();
        let place: BTreeSet<Part> = [Part::Place(Ino(7))].into();
        let both = Footprint {
            changes: place.clone(),
            depends: place,
            ..Footprint::default()
        };
        assert!(exclusion.begin(ONE, &both));
        assert!(exclusion.end(ONE).is_empty());
        assert!(exclusion.used.is_empty());
    }
}
