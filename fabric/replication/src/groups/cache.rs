//! One data thread's view of [`Groups`], so that a request takes no lock and no reference count.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use fabric_types::{Epoch, PgId, Refusal, Request};

use super::{Group, Groups};

/// Groups that a thread finds without asking the shared table. Two that share an entry displace each other.
const ENTRIES: usize = 256;

type Entry = Option<(PgId, Arc<Group>)>;

/// See the module.
#[derive(Debug)]
pub struct GroupCache {
    groups: Arc<Groups>,
    entries: Box<[Entry]>,
    /// [`Groups::changes`] when the entries were looked up.
    changes: u64,
}

impl GroupCache {
    /// An empty cache over `groups`.
    pub fn new(groups: Arc<Groups>) -> Self {
        Self {
            changes: groups.changes.load(Ordering::Acquire),
            groups,
            entries: (0..ENTRIES).map(|_| None).collect(),
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
        if self.changes != changes {
            self.changes = changes;
            self.entries.fill(None);
        }
        let entry = &mut self.entries[index_of(pg)];
        if !matches!(entry, Some((known, _)) if *known == pg) {
            *entry = self.groups.get(pg).map(|group| (pg, group));
        }
        entry.as_ref().map(|(_, group)| &**group)
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
fn index_of(pg: PgId) -> usize {
    (pg.0 ^ (pg.0 >> 32).wrapping_mul(37)) as usize % ENTRIES
}

#[cfg(test)]
mod tests {
    use fabric_types::membership::ReplicaState;
    use fabric_types::{Command, RequestId};

    use super::*;

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
        assert_eq!(index_of(PG), index_of(other));
        groups.place(PG, 1, 8, Epoch(1));
        groups.place(other, 2, 8, Epoch(1));
        for _ in 0..2 {
            assert_eq!(cache.get(PG).map(Group::device), Some(1));
            assert_eq!(cache.get(other).map(Group::device), Some(2));
        }
    }
}
