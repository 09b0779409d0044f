//! What one data thread has looked up in a table that threads share, so that a request takes no lock.

use std::sync::Arc;

/// Entries of a cache: more than a thread usually serves. Two keys that share an entry displace each other.
pub(crate) const ENTRIES: usize = 256;

type Entry<K, V> = Option<(K, Arc<V>)>;

/// See the module. The shared table counts its changes; after one, everything is looked up anew.
#[derive(Debug)]
pub(crate) struct ThreadCache<K, V> {
    entries: Box<[Entry<K, V>]>,
    /// The table's changes when the entries were looked up.
    changes: u64,
}

impl<K: Copy + PartialEq, V> ThreadCache<K, V> {
    /// An empty cache. `changes` is the table's count of changes now.
    pub(crate) fn new(changes: u64) -> Self {
        Self {
            entries: (0..ENTRIES).map(|_| None).collect(),
            changes,
        }
    }

    /// The value of `key`, from the table if it is not here. `spread` is a number that keys differ in, and
    /// `changes` the table's count now.
    #[inline]
    pub(crate) fn get(
        &mut self,
        key: K,
        spread: u64,
        changes: u64,
        look_up: impl FnOnce() -> Option<Arc<V>>,
    ) -> Option<&Arc<V>> {
        if self.changes != changes {
            self.changes = changes;
            self.entries.fill_with(|| None);
        }
        let entry = &mut self.entries[spread as usize % ENTRIES];
        if !matches!(entry, Some((known, _)) if *known == key) {
            *entry = look_up().map(|value| (key, value));
        }
        entry.as_ref().map(|(_, value)| value)
    }
}
