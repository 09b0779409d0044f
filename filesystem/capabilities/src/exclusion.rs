//! Operations whose footprints depend on what others change: these wait for each other, in order of arrival.

use std::collections::{BTreeMap, BTreeSet};

use crate::footprint::{Footprint, Part};
use crate::manager::OperationId;

/// Parts that an operation changes, and parts that its footprint was found by.
#[derive(Debug, Clone, Default)]
struct Claim {
    changes: BTreeSet<Part>,
    depends: BTreeSet<Part>,
}

/// Position in the order of arrival.
type Arrival = u64;

/// Users of a part, and operations that wait for it.
#[derive(Debug, Default)]
struct Line {
    is_changed: bool,
    dependents: usize,
    /// Waiting operations that change the part.
    changers: BTreeSet<Arrival>,
    /// Waiting operations that depend on the part.
    waiting_dependents: BTreeSet<Arrival>,
}

impl Line {
    /// Returns whether an operation that came at `arrival` may change the part.
    fn may_change(&self, arrival: Arrival) -> bool {
        let is_first =
            |waiting: &BTreeSet<Arrival>| waiting.first().is_none_or(|at| *at >= arrival);
        let is_used = self.is_changed || self.dependents > 0;
        !is_used && is_first(&self.changers) && is_first(&self.waiting_dependents)
    }

    /// Returns whether an operation that came at `arrival` may depend on the part.
    fn may_depend(&self, arrival: Arrival) -> bool {
        !self.is_changed && self.changers.first().is_none_or(|at| *at >= arrival)
    }

    /// Waiting operations that no earlier waiting operation keeps from this part.
    fn candidates(&self) -> impl Iterator<Item = Arrival> {
        let changer = self.changers.first().copied();
        let before = ..changer.unwrap_or(Arrival::MAX);
        self.waiting_dependents
            .range(before)
            .copied()
            .chain(changer)
    }

    fn is_empty(&self) -> bool {
        let nobody_waits = self.changers.is_empty() && self.waiting_dependents.is_empty();
        !self.is_changed && self.dependents == 0 && nobody_waits
    }
}

/// Which operations may be under way together. An operation gets all its parts at once, so none waits for
/// another one that waits.
///
/// The end of an operation costs one check of each candidate for its parts, however many operations wait.
#[derive(Debug, Default)]
pub(crate) struct Exclusion {
    lines: BTreeMap<Part, Line>,
    under_way: BTreeMap<OperationId, Claim>,
    waiting: BTreeMap<Arrival, (OperationId, Claim)>,
    arrivals: BTreeMap<OperationId, Arrival>,
    last: Arrival,
    /// Number of checks, for tests of the complexity.
    #[cfg(test)]
    checks: u64,
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
        self.last += 1;
        let arrival = self.last;
        if self.may_begin(arrival, &claim) {
            self.take(operation, claim);
            return true;
        }
        for part in &claim.changes {
            self.line(part).changers.insert(arrival);
        }
        for part in &claim.depends {
            self.line(part).waiting_dependents.insert(arrival);
        }
        self.waiting.insert(arrival, (operation, claim));
        self.arrivals.insert(operation, arrival);
        false
    }

    /// An operation gives its parts back, or waits no more. Those that have theirs by that.
    pub(crate) fn end(&mut self, operation: OperationId) -> Vec<OperationId> {
        let claim = match self.under_way.remove(&operation) {
            Some(claim) => {
                self.give_back(&claim);
                claim
            }
            None => match self.arrivals.get(&operation) {
                Some(arrival) => self.stop_waiting(*arrival).1,
                None => return Vec::new(),
            },
        };
        let parts = claim.changes.iter().chain(&claim.depends);
        let lines = parts.filter_map(|part| self.lines.get(part));
        let candidates: BTreeSet<Arrival> = lines.flat_map(Line::candidates).collect();
        let mut ready = Vec::new();
        for arrival in candidates {
            let claim = self.waiting[&arrival].1.clone();
            if self.may_begin(arrival, &claim) {
                let (operation, claim) = self.stop_waiting(arrival);
                self.take(operation, claim);
                ready.push(operation);
            }
        }
        for part in claim.changes.iter().chain(&claim.depends) {
            if self.lines.get(part).is_some_and(Line::is_empty) {
                self.lines.remove(part);
            }
        }
        ready
    }

    /// Returns whether the operation's parts are free and no earlier operation waits for them.
    fn may_begin(&mut self, arrival: Arrival, claim: &Claim) -> bool {
        #[cfg(test)]
        {
            self.checks += 1;
        }
        let lines = &self.lines;
        let may_change = |part| lines.get(part).is_none_or(|line| line.may_change(arrival));
        let may_depend = |part| lines.get(part).is_none_or(|line| line.may_depend(arrival));
        claim.changes.iter().all(may_change) && claim.depends.iter().all(may_depend)
    }

    fn line(&mut self, part: &Part) -> &mut Line {
        self.lines.entry(part.clone()).or_default()
    }

    fn take(&mut self, operation: OperationId, claim: Claim) {
        for part in &claim.changes {
            self.line(part).is_changed = true;
        }
        for part in &claim.depends {
            self.line(part).dependents += 1;
        }
        let before = self.under_way.insert(operation, claim);
        assert!(before.is_none(), "an operation begins once");
    }

    fn give_back(&mut self, claim: &Claim) {
        for part in &claim.changes {
            self.line(part).is_changed = false;
        }
        for part in &claim.depends {
            self.line(part).dependents -= 1;
        }
    }

    /// Removes an operation from those that wait.
    fn stop_waiting(&mut self, arrival: Arrival) -> (OperationId, Claim) {
        let (operation, claim) = self.waiting.remove(&arrival).expect("the operation waits");
        self.arrivals.remove(&operation);
        for part in &claim.changes {
            self.line(part).changers.remove(&arrival);
        }
        for part in &claim.depends {
            self.line(part).waiting_dependents.remove(&arrival);
        }
        (operation, claim)
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
        assert!(exclusion.lines.is_empty() && exclusion.under_way.is_empty());
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
        assert!(exclusion.lines.is_empty());
    }

    /// Returns the number of checks until `count` operations on one name have run one after the other.
    fn checks_for(count: u64) -> u64 {
        let mut exclusion = Exclusion::default();
        for number in 1..=count {
            exclusion.begin(OperationId(number), &changes(&[name(b"a")]));
        }
        for number in 1..count {
            assert_eq!(
                exclusion.end(OperationId(number)),
                [OperationId(number + 1)]
            );
        }
        assert!(exclusion.end(OperationId(count)).is_empty());
        assert!(exclusion.lines.is_empty());
        exclusion.checks
    }

    #[test]
    fn the_work_for_operations_on_one_name_is_linear() {
        let (few, many) = (checks_for(1000), checks_for(4000));
        assert!(
            many <= 4 * few + 4,
            "{few} checks for 1000, {many} for 4000"
        );
    }
}
