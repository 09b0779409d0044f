//! Changes of this host that are under way, and what they touch of the cache.
//!
//! A question that was under way at the same time as a change may be answered by what was before it. So each
//! question is noted when it is asked, and each end of a change with a number: what a change touched since
//! then is not put into the cache.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use fs_capabilities::GuestId;
use namespace::Ino;

/// Ends of changes that are remembered for questions under way. With more, the oldest are forgotten, and what
/// was asked before them is not cached.
const ENDED_MAX: usize = 1 << 16;

/// A part of the cache that changes touch.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Part {
    /// Which inode a name of a directory leads to.
    Name(Ino, Vec<u8>),
    /// Any name of a directory: a listing.
    Names(Ino),
    /// An inode's record, and a file's extents.
    Inode(Ino),
    /// The record of some inode whose only name is in this directory; of a subdirectory, too.
    ChildOf(Ino),
    /// The record of some inode whose directories are not known.
    Linked,
}

/// What changes under way touch, and what changed since the oldest question under way was asked.
#[derive(Debug, Default)]
pub(super) struct Changes {
    under_way: HashMap<Part, usize>,
    /// The guest that changes each name; [`GuestId::default`] if several do.
    guests: HashMap<Part, GuestId>,
    /// Names that several changes were under way of at a time, or whose directory others may change: which
    /// inode such a change takes the name from is not known.
    contended: HashSet<(Ino, Vec<u8>)>,
    /// Counts the ends of changes.
    last: u64,
    /// The last end of a change of each part, as far as questions need it.
    ended: HashMap<Part, u64>,
    order: VecDeque<(u64, Part)>,
    /// Ends up to this one are forgotten.
    forgotten: u64,
    /// Questions under way, by the number of changes that had ended.
    questions: BTreeMap<u64, usize>,
}

impl Changes {
    /// A question is asked; to be ended with this number.
    pub(super) fn ask(&mut self) -> u64 {
        *self.questions.entry(self.last).or_default() += 1;
        self.last
    }

    /// A question was answered, or is dropped.
    pub(super) fn end_question(&mut self, asked: u64) {
        let count = self.questions.get_mut(&asked);
        let count = count.expect("a question ends once");
        *count -= 1;
        if *count == 0 {
            self.questions.remove(&asked);
            self.prune();
        }
    }

    /// A change begins to touch parts. They, and further ones that are in doubt by this, are not to be in the
    /// cache.
    pub(super) fn begin(&mut self, parts: &[Part]) -> Vec<Part> {
        let mut touched = Vec::new();
        for part in parts {
            let count = self.under_way.entry(part.clone()).or_default();
            *count += 1;
            touched.push(part.clone());
            if let (Part::Name(dir, name), 2..) = (part, *count) {
                touched.extend(self.contend(*dir, name));
            }
        }
        touched
    }

    /// Which inode a name leads to when it is changed is not known any more.
    fn contend(&mut self, dir: Ino, name: &[u8]) -> Vec<Part> {
        if !self.contended.insert((dir, name.to_vec())) {
            return Vec::new();
        }
        let further = vec![Part::ChildOf(dir), Part::Linked];
        for part in &further {
            *self.under_way.entry(part.clone()).or_default() += 1;
        }
        further
    }

    /// Others may change names of a directory from now on. Parts that are in doubt by this.
    pub(super) fn contend_all(&mut self, dir: Option<Ino>) -> Vec<Part> {
        let names = self.under_way.keys().filter_map(|part| match part {
            Part::Name(of, name) if dir.is_none_or(|dir| dir == *of) => Some((*of, name.clone())),
            _ => None,
        });
        let names: Vec<(Ino, Vec<u8>)> = names.collect();
        let names = names.into_iter();
        names
            .flat_map(|(dir, name)| self.contend(dir, &name))
            .collect()
    }

    /// A change that touched these parts is over.
    pub(super) fn end(&mut self, parts: &[Part]) {
        self.last += 1;
        for part in parts {
            let is_last = self.end_part(part);
            if let (Part::Name(dir, name), true) = (part, is_last) {
                if self.contended.remove(&(*dir, name.clone())) {
                    self.end_part(&Part::ChildOf(*dir));
                    self.end_part(&Part::Linked);
                }
            }
        }
        self.prune();
    }

    /// Whether that was the last change of the part.
    fn end_part(&mut self, part: &Part) -> bool {
        let count = self.under_way.get_mut(part);
        let count = count.expect("a change ends once");
        *count -= 1;
        let is_last = *count == 0;
        if is_last {
            self.under_way.remove(part);
            self.guests.remove(part);
        }
        self.ended.insert(part.clone(), self.last);
        self.order.push_back((self.last, part.clone()));
        is_last
    }

    /// Forgets what no question needs.
    fn prune(&mut self) {
        let oldest = self.questions.first_key_value();
        let oldest = oldest.map_or(u64::MAX, |(asked, _)| *asked);
        while let Some((number, _)) = self.order.front() {
            if *number > oldest && self.order.len() <= ENDED_MAX {
                break;
            }
            let (number, part) = self.order.pop_front().expect("there is one");
            self.forgotten = number;
            if self.ended.get(&part) == Some(&number) {
                self.ended.remove(&part);
            }
        }
    }

    /// Whether no change of the part is under way.
    pub(super) fn is_quiet(&self, part: &Part) -> bool {
        !self.under_way.contains_key(part)
    }

    /// A guest's change is about to begin. Whether another guest's change of one of its names is under way.
    pub(super) fn note_guest(&mut self, parts: &[Part], guest: GuestId) -> bool {
        let mut is_contended = false;
        for part in parts {
            if !matches!(part, Part::Name(..)) {
                continue;
            }
            let known = self.guests.entry(part.clone()).or_insert(guest);
            if *known != guest {
                *known = GuestId::default();
                is_contended = true;
            }
        }
        is_contended
    }

    /// Whether no change of a name is under way.
    pub(super) fn is_name_quiet(&self, dir: Ino, name: &[u8]) -> bool {
        self.under_way.is_empty() || self.is_quiet(&Part::Name(dir, name.to_vec()))
    }

    /// Whether an inode's record may be used: no change of it is under way, nor of an inode that it may be.
    pub(super) fn is_inode_quiet(&self, ino: Ino, place: Option<Ino>) -> bool {
        self.under_way.is_empty()
            || self.is_quiet(&Part::Inode(ino)) && self.is_quiet(&some_inode(place))
    }

    /// Whether a part is as it was when a question was asked.
    pub(super) fn is_same(&self, part: &Part, asked: u64) -> bool {
        let is_later = |ended: &u64| *ended > asked;
        self.remembers(asked) && self.is_quiet(part) && !self.ended.get(part).is_some_and(is_later)
    }

    /// Whether one change of a part is under way, and no other one was since that began.
    pub(super) fn is_alone(&self, part: &Part, asked: u64) -> bool {
        let is_later = self.ended.get(part).is_some_and(|ended| *ended > asked);
        self.remembers(asked) && self.under_way.get(part) == Some(&1) && !is_later
    }

    /// Whether no change of some inode with a name in this directory was under way since.
    pub(super) fn is_place_same(&self, place: Option<Ino>, asked: u64) -> bool {
        self.is_same(&some_inode(place), asked)
    }

    /// The same of a name.
    pub(super) fn is_name_same(&self, dir: Ino, name: &[u8], asked: u64) -> bool {
        let is_idle = self.under_way.is_empty() && self.ended.is_empty();
        is_idle && self.remembers(asked) || self.is_same(&Part::Name(dir, name.to_vec()), asked)
    }

    /// The same of an inode's record.
    pub(super) fn is_inode_same(&self, ino: Ino, place: Option<Ino>, asked: u64) -> bool {
        self.is_same(&Part::Inode(ino), asked) && self.is_same(&some_inode(place), asked)
    }

    /// Whether all is known that changed since a question was asked.
    fn remembers(&self, asked: u64) -> bool {
        asked >= self.forgotten
    }

    /// Names of a directory that may have changed since a question was asked, if that is known.
    pub(super) fn names_changed(&self, dir: Ino, asked: u64) -> Option<HashSet<Vec<u8>>> {
        if !self.remembers(asked) {
            return None;
        }
        let ended = self.ended.iter();
        let ended = ended.filter(|(_, number)| **number > asked);
        let parts = self.under_way.keys().chain(ended.map(|(part, _)| part));
        let names = parts.filter_map(|part| match part {
            Part::Name(of, name) if *of == dir => Some(name.clone()),
            _ => None,
        });
        Some(names.collect())
    }
}

/// The part that stands for some inode with a name in this directory.
fn some_inode(place: Option<Ino>) -> Part {
    place.map_or(Part::Linked, Part::ChildOf)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIR: Ino = Ino(1);
    const FILE: Ino = Ino(7);

    fn name(text: &str) -> Part {
        Part::Name(DIR, text.into())
    }

    #[test]
    fn what_changed_since_a_question_was_asked_is_known_until_it_ends() {
        let mut changes = Changes::default();
        let before = changes.ask();
        changes.begin(&[Part::Inode(FILE)]);
        let during = changes.ask();
        assert!(!changes.is_inode_same(FILE, Some(DIR), before));
        changes.end(&[Part::Inode(FILE)]);
        let after = changes.ask();
        assert!(!changes.is_inode_same(FILE, Some(DIR), before));
        assert!(!changes.is_inode_same(FILE, Some(DIR), during));
        assert!(changes.is_inode_same(FILE, Some(DIR), after));
        assert!(changes.is_inode_same(Ino(8), Some(DIR), before));
        for asked in [before, during, after] {
            changes.end_question(asked);
        }
        assert!(
            changes.ended.is_empty() && changes.order.is_empty() && changes.questions.is_empty()
        );
    }

    #[test]
    fn a_name_that_two_change_at_a_time_puts_all_children_in_doubt_until_both_are_over() {
        let mut changes = Changes::default();
        assert_eq!(changes.begin(&[name("a")]), [name("a")]);
        assert!(changes.is_inode_quiet(FILE, Some(DIR)));
        let touched = changes.begin(&[name("a")]);
        assert_eq!(touched, [name("a"), Part::ChildOf(DIR), Part::Linked]);
        let asked = changes.ask();
        changes.end(&[name("a")]);
        assert!(!changes.is_inode_quiet(FILE, Some(DIR)));
        assert!(!changes.is_inode_quiet(FILE, None));
        assert!(changes.is_inode_quiet(FILE, Some(Ino(2))));
        changes.end(&[name("a")]);
        assert!(changes.is_inode_quiet(FILE, Some(DIR)));
        assert!(!changes.is_inode_same(FILE, Some(DIR), asked));
        assert_eq!(changes.names_changed(DIR, asked).unwrap().len(), 1);
        changes.end_question(asked);
    }

    #[test]
    fn whose_change_of_a_name_is_under_way_is_known() {
        let (one, two) = (GuestId(1), GuestId(2));
        let mut changes = Changes::default();
        let begin = |changes: &mut Changes, guest| {
            let is_contended = changes.note_guest(&[name("a"), Part::Names(DIR)], guest);
            changes.begin(&[name("a"), Part::Names(DIR)]);
            is_contended
        };
        assert!(!begin(&mut changes, one) && !begin(&mut changes, one));
        assert!(begin(&mut changes, two) && begin(&mut changes, one));
        for _ in 0..4 {
            changes.end(&[name("a"), Part::Names(DIR)]);
        }
        assert!(!begin(&mut changes, two));
        assert_eq!(changes.guests.len(), 1);
    }

    #[test]
    fn a_question_that_lasts_too_long_is_answered_in_vain() {
        let mut changes = Changes::default();
        let asked = changes.ask();
        for number in 0..=ENDED_MAX as u64 {
            let part = [Part::Inode(Ino(number))];
            changes.begin(&part);
            changes.end(&part);
        }
        assert_eq!(changes.order.len(), ENDED_MAX);
        assert!(!changes.is_inode_same(Ino(u64::MAX), None, asked));
        assert!(!changes.is_name_same(DIR, b"a", asked));
        assert_eq!(changes.names_changed(DIR, asked), None);
        let later = changes.ask();
        assert!(changes.is_inode_same(Ino(0), None, later));
    }

    #[test]
    fn a_directory_that_others_may_change_puts_its_children_in_doubt() {
        let mut changes = Changes::default();
        changes.begin(&[name("a"), Part::Names(DIR)]);
        assert_eq!(changes.contend_all(Some(Ino(2))), []);
        assert_eq!(changes.contend_all(Some(DIR)).len(), 2);
        assert_eq!(changes.contend_all(None), []);
        changes.end(&[name("a"), Part::Names(DIR)]);
        assert!(changes.under_way.is_empty() && changes.contended.is_empty());
    }
}
