//! The log of a node that does not run goes on by itself: after a disaster it need not ask the others.

use std::collections::{BTreeMap, BTreeSet};

use openraft::{BasicNode, CommittedLeaderId, EntryPayload, Membership};

use super::{Db, DbError};
use crate::command::Command;
use crate::ids::NodeId;
use crate::raft::{Entry, LogId, Vote};

/// Terms that may have begun unseen.
const TERMS: u64 = 1 << 20;

impl Db {
    /// The last entry of the log, applied or not.
    pub(crate) fn last_entry(&self) -> Result<Option<LogId>, DbError> {
        let applied = self.read(|view| view.applied())?.last;
        Ok(self.group.log_state()?.last_log_id.max(applied))
    }

    /// Appends what makes this node the only one that votes, and then a command. Whatever the log holds is
    /// thereby committed, also what the others never agreed to: it may be what they acknowledged.
    pub(crate) fn go_on_alone(
        &self,
        node: NodeId,
        address: &str,
        command: Command,
    ) -> Result<(), DbError> {
        let last = self.last_entry()?;
        if let Some(last) = last.filter(|_| {
            self.group
                .log_state()
                .is_ok_and(|log| log.last_log_id < last)
        }) {
            // A snapshot was installed, and the log not cut to it yet.
            self.group.purge_to(last)?;
        }
        let vote = self.group.vote()?.unwrap_or_default();
        let seen = last.map_or(0, |last| last.leader_id.term);
        let term = seen.max(vote.leader_id().term) + TERMS;
        // A vote before the entries of its term: they are never newer than it.
        self.group.set_vote(&Vote::new(term, node))?;
        let leader = CommittedLeaderId::new(term, node);
        let first = last.map_or(0, |last| last.index + 1);
        let members = BTreeMap::from([(node, BasicNode::new(address))]);
        let alone = Membership::new(vec![BTreeSet::from([node])], members);
        let entries = [
            EntryPayload::Membership(alone),
            EntryPayload::Normal(command),
        ];
        let numbered = entries
            .into_iter()
            .zip(first..)
            .map(|(payload, index)| Entry {
                log_id: LogId::new(leader, index),
                payload,
            });
        self.group.append_entries(&numbered.collect::<Vec<_>>())
    }
}
