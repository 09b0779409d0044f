//! Inodes that one guest's kernel has looked up and not forgotten.
//!
//! A reply with an inode counts as one lookup of it. FORGET subtracts lookups; at zero the kernel does not
//! use the inode any more.

use std::collections::BTreeMap;

use namespace::Ino;

/// Largest number of looked-up inodes of one guest that are remembered, about 30 bytes each. Beyond it the
/// half that was looked up longest ago is dropped. If such an inode has no name and is not open, it is
/// released although the guest's kernel knows it, and requests for it get ESTALE.
pub(crate) const LOOKED_UP_MAX: usize = 1 << 20;

/// Entries of former mounts that are freed with each lookup: more than it adds. So a guest that mounts again
/// and again has no more memory than one that mounts once.
const FREED_PER_LOOKUP: usize = 2;

/// Lookups by inode.
type Counts = BTreeMap<Ino, u64>;

/// Lookup counts of one guest, in two generations. An ordered map grows without ever being copied as a whole,
/// and what a former mount has looked up is freed bit by bit. So no guest decides how long the lock around it
/// is held, or how long a data thread handles its INIT.
#[derive(Debug)]
pub(crate) struct LookedUp {
    generation_max: usize,
    recent: Counts,
    older: Counts,
    /// Counts of former mounts, to be freed. None is empty.
    former: Vec<Counts>,
}

impl LookedUp {
    /// Remembers at most `max` inodes.
    pub(crate) fn new(max: usize) -> Self {
        assert!(max >= 2, "each generation holds at least one inode");
        Self {
            generation_max: max / 2,
            recent: Counts::new(),
            older: Counts::new(),
            former: Vec::new(),
        }
    }

    /// Forgets all lookups: the guest has unmounted. Frees nothing yet ([`Self::free_former`]).
    pub(crate) fn restart(&mut self) {
        let counts = [&mut self.recent, &mut self.older].map(std::mem::take);
        self.former
            .extend(counts.into_iter().filter(|counts| !counts.is_empty()));
    }

    /// Frees at most `max` entries of former mounts. Returns whether there are more.
    pub(crate) fn free_former(&mut self, max: usize) -> bool {
        for _ in 0..max {
            let Some(last) = self.former.last_mut() else {
                break;
            };
            last.pop_first();
            if last.is_empty() {
                self.former.pop();
            }
        }
        !self.former.is_empty()
    }

    /// Counts a lookup. Returns what is dropped for it, to be freed without the lock; usually nothing.
    pub(crate) fn note(&mut self, ino: Ino) -> Counts {
        self.free_former(FREED_PER_LOOKUP);
        let before = self.older.remove(&ino).unwrap_or(0);
        *self.recent.entry(ino).or_default() += before + 1;
        let is_full = self.recent.len() >= self.generation_max;
        let dropped = match is_full {
            true => {
                let recent = std::mem::take(&mut self.recent);
                std::mem::replace(&mut self.older, recent)
            }
            false => Counts::new(),
        };
        assert!(self.len() <= 2 * self.generation_max);
        dropped
    }

    /// Subtracts lookups. Returns whether this made the inode unknown. More lookups than were counted remove
    /// it: some may have been dropped.
    pub(crate) fn forget(&mut self, ino: Ino, lookups: u64) -> bool {
        for counts in [&mut self.recent, &mut self.older] {
            let Some(count) = counts.get_mut(&ino) else {
                continue;
            };
            *count = count.saturating_sub(lookups);
            if *count == 0 {
                counts.remove(&ino);
                return true;
            }
        }
        false
    }

    /// Returns whether the guest's kernel may use the inode.
    pub(crate) fn knows(&self, ino: Ino) -> bool {
        self.recent.contains_key(&ino) || self.older.contains_key(&ino)
    }

    /// Number of remembered inodes.
    pub(crate) fn len(&self) -> usize {
        self.recent.len() + self.older.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_is_known_until_all_its_lookups_are_subtracted() {
        let mut looked_up = LookedUp::new(100);
        let ino = Ino(7);
        for _ in 0..3 {
            assert!(looked_up.note(ino).is_empty());
        }
        assert!(!looked_up.forget(ino, 2) && looked_up.knows(ino));
        assert!(looked_up.forget(ino, 1) && !looked_up.knows(ino));
        assert!(!looked_up.forget(ino, 1), "the inode was not known");
        looked_up.note(ino);
        assert!(looked_up.forget(ino, u64::MAX));
        assert_eq!(looked_up.len(), 0);
    }

    #[test]
    fn memory_is_bounded_and_recent_lookups_are_kept() {
        let mut looked_up = LookedUp::new(100);
        let mut dropped = 0;
        for number in 1..=10_000 {
            dropped += looked_up.note(Ino(number)).len();
            // This inode is looked up all the time.
            dropped += looked_up.note(Ino(1)).len();
            assert!(looked_up.len() <= 100);
            let newest = number.saturating_sub(40).max(1)..=number;
            assert!(
                newest
                    .into_iter()
                    .all(|number| looked_up.knows(Ino(number)))
            );
        }
        assert!(looked_up.knows(Ino(1)));
        assert_eq!(dropped + looked_up.len(), 10_000);
        let forgotten = (1..=10_000).filter(|number| looked_up.forget(Ino(*number), u64::MAX));
        assert!(forgotten.count() < 100 && looked_up.len() == 0);
    }

    fn former(looked_up: &LookedUp) -> usize {
        looked_up.former.iter().map(Counts::len).sum()
    }

    #[test]
    fn what_a_former_mount_has_looked_up_is_freed_bit_by_bit() {
        let mut looked_up = LookedUp::new(100);
        for number in 1..=90 {
            looked_up.note(Ino(number));
        }
        looked_up.restart();
        assert_eq!((looked_up.len(), former(&looked_up)), (0, 90));
        assert!(!looked_up.knows(Ino(1)) && !looked_up.forget(Ino(2), 1));
        looked_up.note(Ino(1));
        assert_eq!((looked_up.len(), former(&looked_up)), (1, 88));
        assert!(looked_up.free_former(87) && !looked_up.free_former(87));
        assert_eq!((looked_up.len(), former(&looked_up)), (1, 0));
    }

    #[test]
    fn a_guest_that_mounts_again_and_again_has_no_more_memory() {
        let mut looked_up = LookedUp::new(100);
        for mount in 0..1000_u64 {
            looked_up.restart();
            for number in 0..mount * 7 % 120 {
                looked_up.note(Ino(1 + number));
                assert!(looked_up.len() + former(&looked_up) <= 100);
            }
        }
    }

    #[test]
    fn lookups_of_two_generations_are_one_count() {
        let mut looked_up = LookedUp::new(4);
        looked_up.note(Ino(1));
        looked_up.note(Ino(2));
        looked_up.note(Ino(1));
        assert!(!looked_up.forget(Ino(1), 1) && looked_up.forget(Ino(1), 1));
    }
}
