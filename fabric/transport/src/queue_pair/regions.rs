//! Memory of this process that a device may reach, found by where it lies: registered once, when it is handed
//! over, and never per request.
//!
//! Data threads look places up for each request, so each has a [`View`] that is looked at anew only when
//! something was registered or closed. A view does not hold regions: one that is closed is given back by the
//! device at once, however long its views sleep.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

struct Entry<T> {
    start: usize,
    bytes: usize,
    region: Weak<T>,
}

impl<T> Clone for Entry<T> {
    fn clone(&self) -> Self {
        Self {
            region: Weak::clone(&self.region),
            ..*self
        }
    }
}

/// How much is open to a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RegionCounts {
    /// Regions that are open now.
    pub regions: u64,
    /// Bytes in them, all pinned.
    pub bytes: u64,
    /// Regions that were ever opened.
    pub registrations: u64,
}

/// All of a device; `T` is the device's own region.
pub struct Regions<T> {
    /// Sorted by where they begin.
    table: Mutex<Arc<Vec<Entry<T>>>>,
    generation: AtomicU64,
    registrations: AtomicU64,
}

impl<T> Default for Regions<T> {
    fn default() -> Self {
        Self {
            table: Mutex::default(),
            generation: AtomicU64::new(0),
            registrations: AtomicU64::new(0),
        }
    }
}

impl<T> Regions<T> {
    fn lock(&self) -> MutexGuard<'_, Arc<Vec<Entry<T>>>> {
        self.table.lock().expect("no panic under this lock")
    }

    /// From now on this region is found, until what is returned is dropped. `None` if a part of it is there
    /// already.
    pub fn insert(self: &Arc<Self>, start: usize, bytes: usize, region: T) -> Option<Opened<T>> {
        let table = self.lock();
        let at = table.partition_point(|entry| entry.start < start);
        let meets_before = at > 0 && table[at - 1].start + table[at - 1].bytes > start;
        let meets_behind = table.get(at).is_some_and(|next| next.start < start + bytes);
        if meets_before || meets_behind {
            return None;
        }
        let region = Arc::new(region);
        let entry = Entry {
            start,
            bytes,
            region: Arc::downgrade(&region),
        };
        let mut changed = table.to_vec();
        changed.insert(at, entry);
        self.change(table, changed);
        self.registrations.fetch_add(1, Ordering::Relaxed);
        Some(Opened {
            regions: Arc::clone(self),
            start,
            _region: region,
        })
    }

    fn remove(&self, start: usize) {
        let table = self.lock();
        let mut changed = table.to_vec();
        changed.retain(|entry| entry.start != start);
        self.change(table, changed);
    }

    fn change(&self, mut table: MutexGuard<'_, Arc<Vec<Entry<T>>>>, changed: Vec<Entry<T>>) {
        *table = Arc::new(changed);
        // Under the lock, so that whoever sees the number finds what it stands for, or something newer.
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// How much is open.
    pub fn counts(&self) -> RegionCounts {
        let table = self.lock();
        RegionCounts {
            regions: table.len() as u64,
            bytes: table.iter().map(|entry| entry.bytes as u64).sum(),
            registrations: self.registrations.load(Ordering::Relaxed),
        }
    }
}

/// An open region. Dropping it closes it: it is found no more, and the device gives it back when the last
/// request that uses it is done.
pub struct Opened<T> {
    regions: Arc<Regions<T>>,
    start: usize,
    _region: Arc<T>,
}

impl<T> Drop for Opened<T> {
    fn drop(&mut self) {
        self.regions.remove(self.start);
    }
}

/// What one data thread sees of them.
pub struct View<T> {
    regions: Arc<Regions<T>>,
    generation: u64,
    table: Arc<Vec<Entry<T>>>,
}

impl<T> View<T> {
    /// Of these.
    pub fn new(regions: &Arc<Regions<T>>) -> Self {
        Self {
            generation: regions.generation.load(Ordering::Acquire),
            table: Arc::clone(&regions.lock()),
            regions: Arc::clone(regions),
        }
    }

    /// The region in which all of these bytes lie, and how far behind its beginning.
    pub fn find(&mut self, start: usize, bytes: usize) -> Option<(Arc<T>, usize)> {
        let generation = self.regions.generation.load(Ordering::Acquire);
        if generation != self.generation {
            self.table = Arc::clone(&self.regions.lock());
            self.generation = generation;
        }
        let behind = self.table.partition_point(|entry| entry.start <= start);
        let entry = self.table[..behind].last()?;
        let offset = start - entry.start;
        let lies_within = bytes <= entry.bytes.checked_sub(offset)?;
        let region = entry.region.upgrade().filter(|_| lies_within)?;
        Some((region, offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_found_in_the_region_that_has_all_of_it() {
        let regions = Arc::new(Regions::default());
        let mut view = View::new(&regions);
        assert!(view.find(0x1000, 1).is_none());
        let low = regions.insert(0x1000, 0x1000, 'a').unwrap();
        let _high = regions.insert(0x2000, 0x100, 'b').unwrap();
        let found = |view: &mut View<char>, start, bytes| {
            view.find(start, bytes).map(|(region, at)| (*region, at))
        };
        assert_eq!(found(&mut view, 0x1000, 0x1000), Some(('a', 0)));
        assert_eq!(found(&mut view, 0x1fff, 1), Some(('a', 0xfff)));
        assert_eq!(found(&mut view, 0x2010, 0xf0), Some(('b', 0x10)));
        // Neighbours are two regions.
        assert_eq!(found(&mut view, 0x1fff, 2), None);
        assert_eq!(found(&mut view, 0x2010, 0xf1), None);
        assert_eq!(found(&mut view, 0x2100, 1), None);
        assert_eq!(found(&mut view, 0xfff, 1), None);
        drop(low);
        assert_eq!(found(&mut view, 0x1000, 1), None);
        assert_eq!(found(&mut view, 0x2000, 1), Some(('b', 0)));
    }

    #[test]
    fn closed_region_is_freed_by_its_last_user_despite_idle_views() {
        let regions = Arc::new(Regions::default());
        let mut view = View::new(&regions);
        let token = Arc::new(());
        let opened = regions.insert(0, 0x1000, Arc::clone(&token)).unwrap();
        let (used, _) = view.find(0, 1).unwrap();
        drop(opened);
        assert_eq!(Arc::strong_count(&token), 2);
        drop(used);
        assert_eq!(Arc::strong_count(&token), 1);
        let counts = RegionCounts {
            registrations: 1,
            ..RegionCounts::default()
        };
        assert_eq!(regions.counts(), counts);
    }

    #[test]
    fn a_region_is_opened_once() {
        let regions = Arc::new(Regions::default());
        let first = regions.insert(0x1000, 0x1000, ()).unwrap();
        for (start, bytes) in [(0x1000, 1), (0x1fff, 1), (0xfff, 2), (0x800, 0x4000)] {
            assert!(regions.insert(start, bytes, ()).is_none(), "{start:x}");
        }
        let next = regions.insert(0x2000, 1, ()).unwrap();
        let before = regions.insert(0xfff, 1, ()).unwrap();
        assert_eq!(regions.counts().bytes, 0x1002);
        drop((first, next, before));
        assert_eq!(regions.counts().regions, 0);
    }
}
