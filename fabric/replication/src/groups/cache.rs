//! One data thread's view of [`Groups`], so that a request takes no lock and no reference count.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use fabric_types::{Epoch, PgId, Refusal, Request};

use super::{Group, Groups};
use crate::thread_cache::ThreadCache;

/// See the module.
#[derive(Debug)]
pub struct GroupCache {
    groups: Arc<Groups>,
    known: ThreadCache<PgId, Group>,
}

impl GroupCache {
    /// An empty cache over `groups`.
    pub fn new(groups: Arc<Groups>) -> Self {
        Self {
            known: ThreadCache::new(groups.changes.load(Ordering::Acquire)),
            groups,
        }
    }

    /// What is cached.
    pub fn shared(&self) -> &Arc<Groups> {
        &self.groups
    }

    /// A group, as [`Groups::get`].
    #[inline]
    pub fn get(&mut self, pg: PgId) -> Option<&Group> {
        let changes = self.groups.changes.load(Ordering::Acquire);
        let group = self
            .known
            .get(pg, spread(pg), changes, || self.groups.get(pg));
        group.map(|group| &**group)
    }

    /// Whether a request may be executed, as [`Groups::admit`].
    ///
    /// # Errors
    /// What the client is told.
    #[inline]
    pub fn admit(&mut self, request: &Request) -> Result<(), Refusal> {
        // Before the group is looked up: whoever sees the number of a map finds what that map has changed.
        let Some(known) = self.groups.admit_map(request)? else {
            return Ok(());
        };
        match self.get(request.pg) {
            Some(group) => group.admit(request, known),
            None => Err(Refusal::StaleEpoch(known)),
        }
    }

    /// Notes a write that was admitted, as [`Groups::note`].
    #[inline]
    pub fn note(&mut self, request: &Request) -> Option<Epoch> {
        self.get(request.pg)?.note(request)
    }
}

/// Groups of a pool are numbered from 0 on, pools in the upper half.
fn spread(pg: PgId) -> u64 {
    pg.0 ^ (pg.0 >> 32).wrapping_mul(37)
}

#[cfg(test)]
mod tests {
    use fabric_types::membership::ReplicaState;
    use fabric_types::{Command, RequestId};

    use super::*;
    use crate::thread_cache::ENTRIES;

    const PG: PgId = PgId(3);

    fn at(epoch: u64) -> Request {
        Request {
            id: RequestId(1),
            pg: PG,
            epoch: Epoch(epoch),
            command: Command::Join,
            ..Request::NOTHING
        }
    }

    #[test]
    fn what_a_map_changes_is_seen_by_requests_of_that_map() {
        let groups = Arc::new(Groups::default());
        let mut cache = GroupCache::new(Arc::clone(&groups));
        groups.applied(Epoch(1));
        assert_eq!(cache.admit(&at(1)), Err(Refusal::StaleEpoch(Epoch(1))));
        groups.place(PG, 2, 8, Epoch(2));
        groups.set(PG, ReplicaState::InSync, Epoch(2));
        groups.applied(Epoch(2));
        assert_eq!(cache.admit(&at(2)), Ok(()));
        assert_eq!(cache.get(PG).map(Group::device), Some(2));
        // It has come to another device: that replica is the node's now.
        groups.place(PG.incoming(), 1, 8, Epoch(3));
        groups.set(PG.incoming(), ReplicaState::InSync, Epoch(3));
        groups.place(PG, 1, 8, Epoch(4));
        groups.applied(Epoch(4));
        assert_eq!(cache.get(PG).map(Group::device), Some(1));
        groups.forget(PG);
        groups.applied(Epoch(5));
        assert_eq!(cache.admit(&at(5)), Err(Refusal::StaleEpoch(Epoch(5))));
    }

    #[test]
    fn groups_that_share_an_entry_displace_each_other() {
        let groups = Arc::new(Groups::default());
        let mut cache = GroupCache::new(Arc::clone(&groups));
        let other = PgId(PG.0 + ENTRIES as u64);
        assert_eq!(
            spread(PG) as usize % ENTRIES,
            spread(other) as usize % ENTRIES
        );
        groups.place(PG, 1, 8, Epoch(1));
        groups.place(other, 2, 8, Epoch(1));
        for _ in 0..2 {
            assert_eq!(cache.get(PG).map(Group::device), Some(1));
            assert_eq!(cache.get(other).map(Group::device), Some(2));
        }
    }
}
