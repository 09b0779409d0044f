//! The log of a group on a node that does not run goes on by itself: after a disaster it need not ask the
//! others.

use std::collections::{BTreeMap, BTreeSet};

use openraft::{BasicNode, CommittedLeaderId, Entry, EntryPayload, Membership};

use super::group::GroupStore;
use super::{Db, DbError, LOG};
use crate::ids::{NamespaceGroupId, NodeId};
use crate::raft::{GroupConfig, LogId, Vote};

/// Terms that may have begun unseen.
const TERMS: u64 = 1 << 20;

impl<C: GroupConfig> GroupStore<C> {
    /// The last entry of the log, applied or not.
    pub(crate) fn last_entry(&self) -> Result<Option<LogId>, DbError> {
        let applied = self.read(|view| view.applied())?.last;
        Ok(self.log_state()?.last_log_id.max(applied))
    }

    /// The nodes that vote by the newest that the log says, applied or not.
    pub(crate) fn voters(&self) -> Result<BTreeSet<NodeId>, DbError> {
        Ok(self.newest_membership()?.voter_ids().collect())
    }

    /// All nodes of the group by the newest that the log says, applied or not, with their addresses.
    pub(crate) fn members(&self) -> Result<BTreeMap<NodeId, String>, DbError> {
        let newest = self.newest_membership()?;
        let members = newest.nodes();
        Ok(members
            .map(|(node, member)| (*node, member.addr.clone()))
            .collect())
    }

    fn newest_membership(&self) -> Result<Membership<NodeId, BasicNode>, DbError> {
        let applied = self.read(|view| view.applied())?;
        let mut newest = applied.membership.membership().clone();
        self.for_each_entry(|index, entry| match entry.payload {
            EntryPayload::Membership(said) if Some(index) > applied.last.map(|last| last.index) => {
                newest = said;
            }
            _ => {}
        })?;
        Ok(newest)
    }

    /// Appends what makes this node the only one that votes, and then `data`, if any. Whatever the log holds
    /// is thereby committed, also what the others never agreed to: it may be what they acknowledged.
    pub(crate) fn go_on_alone(
        &self,
        node: NodeId,
        address: &str,
        data: Option<C::D>,
    ) -> Result<(), DbError> {
        let last = self.last_entry()?;
        if let Some(last) =
            last.filter(|_| self.log_state().is_ok_and(|log| log.last_log_id < last))
        {
            // A snapshot was installed, and the log not cut to it yet.
            self.purge_to(last)?;
        }
        let vote = self.vote()?.unwrap_or_default();
        let seen = last.map_or(0, |last| last.leader_id.term);
        let term = seen.max(vote.leader_id().term) + TERMS;
        // A vote before the entries of its term: they are never newer than it.
        self.set_vote(&Vote::new(term, node))?;
        let leader = CommittedLeaderId::new(term, node);
        let first = last.map_or(0, |last| last.index + 1);
        let members = BTreeMap::from([(node, BasicNode::new(address))]);
        let alone = Membership::new(vec![BTreeSet::from([node])], members);
        let data = data.map(EntryPayload::Normal);
        let entries = [EntryPayload::Membership(alone)];
        let numbered = entries
            .into_iter()
            .chain(data)
            .zip(first..)
            .map(|(payload, index)| Entry {
                log_id: LogId::new(leader, index),
                payload,
            });
        self.append_entries(&numbered.collect::<Vec<_>>())
    }
}

impl Db {
    /// The namespace groups that were ever opened here.
    pub(crate) fn namespace_groups(&self) -> Vec<NamespaceGroupId> {
        let families = self.database().families.iter();
        let number = |family: &String| {
            let of_group = family.strip_prefix(LOG)?.strip_prefix('.')?;
            of_group.parse().ok().map(NamespaceGroupId)
        };
        families.filter_map(number).collect()
    }
}
