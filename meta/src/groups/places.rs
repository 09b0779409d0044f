//! Limit on the operations of a session in flight at the leader.
//!
//! An operation runs to its end even if its caller has gone. Without a limit, a host that breaks its
//! connection and repeats its request would have ever more operations in flight.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use namespace::{FilesystemId, SLOTS_MAX, SessionId};

use crate::ids::NodeId;

/// Operations of one session in flight. A session has fewer slots, but repeats a request that takes long. A
/// further operation is refused, and the host repeats it.
const PLACES_MAX: usize = 4 * SLOTS_MAX as usize;

/// Origin of an operation: a node, and its session or the session that it opens.
type Owner = (NodeId, FilesystemId, SessionId);

/// Operations in flight by owner.
#[derive(Debug, Default)]
pub(super) struct Places(Mutex<BTreeMap<Owner, usize>>);

/// Place of one operation in flight. Dropping it frees the place.
#[derive(Debug)]
pub(super) struct Place {
    places: Arc<Places>,
    owner: Owner,
}

impl Places {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Owner, usize>> {
        // A count is complete after each statement, so a poisoned lock is safe to use.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place. Returns `None` if too many operations are in flight.
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
    fn operations_in_flight_of_a_session_are_limited() {
        let places = Arc::<Places>::default();
        let owner = |session| (NodeId(1), FilesystemId(1), SessionId(session));
        let mut taken: Vec<Place> = (0..PLACES_MAX)
            .map(|_| places.take(owner(1)).expect("a place is free"))
            .collect();
        assert!(places.take(owner(1)).is_none());
        assert!(
            places.take(owner(2)).is_some(),
            "other sessions have their own limit"
        );
        taken.pop();
        assert!(places.take(owner(1)).is_some());
        taken.clear();
        assert!(places.lock().is_empty());
    }
}
