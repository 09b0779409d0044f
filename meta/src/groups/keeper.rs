//! The namespace groups of this node: opened once the cluster map has them, and ended with the node.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use openraft::BasicNode;
use tokio::task::JoinHandle;

use super::client;
use super::group::{NamespaceGroup, Surroundings};
use super::leader;
use super::network::{GroupCall, GroupReply, GroupRequest};
use crate::command::Command;
use crate::error::MetaError;
use crate::ids::{NamespaceGroupId, NodeId};
use crate::map::ClusterMap;
use crate::model::{self, Role};
use crate::net::ProposeError;
use crate::node::report::status_of;
use crate::node::{Core, Wait};
use crate::report::RaftStatus;

/// What could not be done is tried again so often.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// A group that runs here, and what looks after it.
struct Running {
    group: Arc<NamespaceGroup>,
    leader: JoinHandle<()>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.leader.abort();
    }
}

/// The namespace groups that run on this node.
#[derive(Default)]
pub(crate) struct Groups {
    running: Mutex<BTreeMap<NamespaceGroupId, Running>>,
    pub(super) leaders: client::Leaders,
}

impl Groups {
    fn running(&self) -> MutexGuard<'_, BTreeMap<NamespaceGroupId, Running>> {
        // Whole after every statement.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn get(&self, id: NamespaceGroupId) -> Option<Arc<NamespaceGroup>> {
        let running = self.running();
        running.get(&id).map(|running| Arc::clone(&running.group))
    }

    /// Does what another node asks for.
    pub(crate) async fn handle(
        &self,
        from: NodeId,
        map: &ClusterMap,
        call: GroupCall,
    ) -> GroupReply {
        let is_member = map
            .node(from)
            .is_some_and(|node| node.roles.contains(&Role::Meta));
        match (self.get(call.group), call.request) {
            (Some(group), request) => group.handle((from, is_member), request).await,
            (None, GroupRequest::Raft(_)) => GroupReply::Absent,
            (None, GroupRequest::Apply(_)) => GroupReply::Apply(Err(absent())),
            (None, GroupRequest::Read(_)) => GroupReply::Read(Err(absent())),
        }
    }

    /// How each group stands, as far as this node knows.
    pub(crate) fn status(&self) -> BTreeMap<NamespaceGroupId, RaftStatus> {
        let running = self.running();
        let status =
            |(id, running): (&NamespaceGroupId, &Running)| (*id, status_of(&running.group.raft));
        running.iter().map(status).collect()
    }

    /// Ends all groups.
    pub(crate) async fn shutdown(&self) {
        let all = std::mem::take(&mut *self.running());
        for running in all.into_values() {
            running.leader.abort();
            running.group.shutdown().await;
        }
    }
}

fn absent() -> ProposeError {
    ProposeError::NotLeader { leader: None }
}

/// Opens the groups that the cluster map has and this node may be a member of, as long as the node lives.
pub(crate) async fn keep(core: Arc<Core>, of: Surroundings) {
    let mut map = core.map.clone();
    loop {
        let now = Arc::clone(&map.borrow_and_update());
        let mut is_done = true;
        let may_vote = now
            .node(core.id)
            .is_some_and(|node| node.roles.contains(&Role::Meta));
        for group in now.namespace_groups().filter(|_| may_vote) {
            if let Err(error) = follow(&core, &of, &now, group).await {
                tracing::warn!(group = group.id.0, %error, "a namespace group does not run here yet");
                is_done = false;
            }
        }
        let changed = match is_done {
            true => map.changed().await,
            false => {
                tokio::time::sleep(RETRY_PAUSE).await;
                Ok(())
            }
        };
        if changed.is_err() {
            return;
        }
    }
}

/// Opens a group if it does not run here, and makes it if that is still to be done.
async fn follow(
    core: &Arc<Core>,
    of: &Surroundings,
    map: &ClusterMap,
    record: &model::NamespaceGroup,
) -> Result<(), MetaError> {
    let group = match core.groups.get(record.id) {
        Some(group) => group,
        None => {
            let group = Arc::new(NamespaceGroup::open(record.id, of).await?);
            let leader = leader::keep(Arc::clone(&group), record.id, core.map.clone());
            let running = Running {
                group: Arc::clone(&group),
                leader: tokio::spawn(leader),
            };
            core.groups.running().insert(record.id, running);
            group
        }
    };
    if record.is_founded || !record.founders.contains(&core.id) {
        return Ok(());
    }
    let address = |id: &NodeId| {
        let node = map.node(*id);
        let address = node.map_or("", |node| node.control_address.as_str());
        (*id, BasicNode::new(address))
    };
    group
        .found(record.founders.iter().map(address).collect())
        .await?;
    // From then on a founder that has lost its disk waits to be told, instead of voting with an empty log.
    group
        .read(Vec::new())
        .await
        .map_err(|error| MetaError::Failed {
            detail: format!("it has no leader here yet: {error}"),
        })?;
    let founded = Command::NamespaceGroupFounded { group: record.id };
    core.propose(founded, Wait::PATIENT).await?.map(drop)?;
    Ok(())
}
