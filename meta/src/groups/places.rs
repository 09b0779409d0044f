//! How many operations of a session are under way at the leader.
//!
//! An operation goes on to its end also if nobody waits for it. So a host that breaks its connection and asks
//! again has more and more under way.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use namespace::{FilesystemId, SLOTS_MAX, SessionId};

use crate::ids::NodeId;

/// Operations of one session under way. A session has a slot for each, and asks again for one that takes
/// long. A further one is not begun, and its host asks again.
const PLACES_MAX: usize = 4 * SLOTS_MAX as usize;

/// Who asks for an operation: a node, in a session of it or to open one.
type Owner = (NodeId, FilesystemId, SessionId);

/// Operations under way.
#[derive(Debug, Default)]
pub(super) struct Places(Mutex<BTreeMap<Owner, usize>>);

/// One operation under way, until this is dropped.
#[derive(Debug)]
pub(super) struct Place {
    places: Arc<Places>,
    owner: Owner,
}

impl Places {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Owner, usize>> {
        // Whole after every statement.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins an operation; none if too many are under way.
    pub(super) fn take(self: &Arc<Self>, owner: Owner) -> Option<Place> {
        let mut places = self.lock();
        let taken = places.entry(owner).or_default();
        if *taken >= PLACES_MAX {
            return None;
        }
        *taken += 1;
        let places = Arc::clone(self);
        Some(Place { places, owner })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut places = self.places.lock();
        if let Some(taken) = places.get_mut(&self.owner) {
            *taken -= 1;
            if *taken == 0 {
                places.remove(&self.owner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_has_so_many_operations_under_way_at_most() {
        let places = Arc::<Places>::default();
        let owner = |session| (NodeId(1), FilesystemId(1), SessionId(session));
        let mut taken: Vec<Place> = (0..PLACES_MAX)
            .map(|_| places.take(owner(1)).expect("there is room"))
            .collect();
        assert!(places.take(owner(1)).is_none());
        assert!(places.take(owner(2)).is_some(), "others have their own");
        taken.pop();
        assert!(places.take(owner(1)).is_some());
        taken.clear();
        assert!(places.lock().is_empty());
    }
}
