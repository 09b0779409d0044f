//! What volumes store, as nodes tell the leader, and what it answers. In memory only; see [`crate::stored`].

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Core;
use super::leader_request::{LeaderRequest, Wait, unfit};
use crate::error::MetaError;
use crate::ids::NodeId;
use crate::model::{NodeState, Role};
use crate::net::{PeerReply, ProposeError};
use crate::stored::{NodeStored, StoredReport, StoredReports};

/// Sums are answered again for so long: to add up what a hundred nodes tell takes a while.
const REPORT_AGE_MAX: Duration = Duration::from_secs(2);

/// What nodes have told this leader.
#[derive(Debug, Default)]
pub(crate) struct StoredLeading {
    term: u64,
    reports: StoredReports,
    /// What was answered last, and when it was added up.
    report: Option<(Instant, StoredReport)>,
}

impl Core {
    /// Tells the leader what this node has counted.
    pub(crate) async fn tell_stored(&self, told: NodeStored) -> Result<(), MetaError> {
        let (node, told) = (self.id, told.bounded());
        let ask = LeaderRequest::TellStored { node, told };
        match self.ask_leader(&ask, Wait::PATIENT).await? {
            PeerReply::Tell(Ok(())) => Ok(()),
            other => Err(unfit(&other)),
        }
    }

    /// Asks the leader what volumes store.
    pub(crate) async fn stored(&self) -> Result<StoredReport, MetaError> {
        let asked = self.ask_leader(&LeaderRequest::Stored, Wait::PATIENT).await;
        match asked? {
            PeerReply::Stored(Ok(report)) => Ok(report),
            other => Err(unfit(&other)),
        }
    }

    pub(super) fn take_stored_here(
        &self,
        node: NodeId,
        told: NodeStored,
    ) -> Result<(), ProposeError> {
        let term = self.leading_term()?;
        let map = Arc::clone(&self.map.borrow());
        // A node without storage has nothing to count. A host that claims to have counted groups would make
        // all sums of their pools wrong.
        let stores = map
            .node(node)
            .is_some_and(|node| node.roles.contains(&Role::Storage));
        if stores {
            let told = told.bounded();
            let before = self
                .stored_in(term)
                .reports
                .take(node, told, Instant::now());
            drop(before);
        }
        Ok(())
    }

    pub(super) fn stored_here(&self) -> Result<StoredReport, ProposeError> {
        let term = self.leading_term()?;
        let mut leading = self.stored_in(term);
        let now = Instant::now();
        let known = leading.report.as_ref();
        if let Some((at, report)) = known
            && now.saturating_duration_since(*at) < REPORT_AGE_MAX
        {
            return Ok(report.clone());
        }
        let map = Arc::clone(&self.map.borrow());
        let is_up = |id| map.node(id).is_some_and(|node| node.state == NodeState::Up);
        let groups = map.groups().map(|group| group.id());
        leading.reports.add_up(groups, is_up, now);
        let report = leading.reports.report(now);
        leading.report = Some((now, report.clone()));
        Ok(report)
    }

    fn leading_term(&self) -> Result<u64, ProposeError> {
        let term = self.failure_detector.leading_term();
        term.ok_or_else(|| self.not_leader())
    }

    /// What was told in this term. A lock of its own: heartbeats do not wait for sums.
    fn stored_in(&self, term: u64) -> MutexGuard<'_, StoredLeading> {
        let mut leading = self.stored.lock().unwrap_or_else(PoisonError::into_inner);
        if leading.term != term {
            *leading = StoredLeading {
                term,
                ..StoredLeading::default()
            };
        }
        leading
    }
}
