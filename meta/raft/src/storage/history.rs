//! Changes to the log of a group while the node does not run: after a disaster a node continues without the
//! others.

use std::collections::{BTreeMap, BTreeSet};

use fabric_types::ids::NodeId;
use openraft::{BasicNode, CommittedLeaderId, Entry, EntryPayload, Membership};

use super::error::DbError;
use super::group::GroupStore;
use crate::config::{CommandBytes, LogId, Vote};

/// Terms that may have begun unseen.
const TERMS: u64 = 1 << 20;

impl GroupStore {
    /// Returns the last entry of the log, applied or not.
    ///
    /// # Errors
    /// The database cannot be read.
    pub fn last_entry(&self) -> Result<Option<LogId>, DbError> {
        let applied = self.read(|view| view.applied())?.last;
        Ok(self.log_state()?.last_log_id.max(applied))
    }

    /// Returns the voters of the newest membership in the log, applied or not.
    ///
    /// # Errors
    /// The database cannot be read.
    pub fn voters(&self) -> Result<BTreeSet<NodeId>, DbError> {
        Ok(self.newest_membership()?.voter_ids().collect())
    }

    /// Returns all nodes of the newest membership in the log, applied or not, with their addresses.
    ///
    /// # Errors
    /// The database cannot be read.
    pub fn members(&self) -> Result<BTreeMap<NodeId, String>, DbError> {
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

    /// Appends a membership with this node as the only voter, and then `command`, if any. This commits the
    /// whole log, including entries that the others never agreed to: they may have acknowledged them.
    ///
    /// # Errors
    /// The database cannot be read or written.
    pub fn go_on_alone(
        &self,
        node: NodeId,
        address: &str,
        command: Option<Vec<u8>>,
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
        let command = command.map(|command| EntryPayload::Normal(CommandBytes(command)));
        let entries = [EntryPayload::Membership(alone)];
        let numbered = entries
            .into_iter()
            .chain(command)
            .zip(first..)
            .map(|(payload, index)| Entry {
                log_id: LogId::new(leader, index),
                payload,
            });
        self.append_entries(&numbered.collect::<Vec<_>>())
    }
}
