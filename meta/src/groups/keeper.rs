//! The namespace groups of this node: opened once the cluster map has them, opened again when they have
//! failed, and ended with the node.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use namespace::{FilesystemId, Operation, Request};
use openraft::BasicNode;
use raft_host::RaftMessage;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::client::Leaders;
use super::group::{Asker, GroupContext, NamespaceGroup};
use super::leader;
use super::messages::{GroupCall, GroupReply, GroupRequest, LinkCall};
use super::upkeep;
use crate::error::MetaError;
use crate::ids::{NamespaceGroupId, NodeId};
use crate::map::ClusterMap;
use crate::model::{self, Role};
use crate::net::ProposeError;
use crate::node::report::status_of;
use crate::node::{Core, Wait};
use crate::report::RaftStatus;
use crate::state::filesystem_attachment;

/// What could not be done is tried again so often.
const RETRY_PAUSE: Duration = Duration::from_millis(500);
/// Groups that have failed are looked for so often.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);

/// A group that runs here, and what looks after it.
struct Running {
    group: Arc<NamespaceGroup>,
    tasks: [JoinHandle<()>; 2],
}

impl Drop for Running {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// The namespace groups that run on this node.
#[derive(Default)]
pub(crate) struct Groups {
    running: Mutex<BTreeMap<NamespaceGroupId, Running>>,
    pub(super) leaders: Leaders,
}

impl Groups {
    fn running(&self) -> MutexGuard<'_, BTreeMap<NamespaceGroupId, Running>> {
        // Whole after every statement.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, id: NamespaceGroupId) -> Option<Arc<NamespaceGroup>> {
        let running = self.running();
        running.get(&id).map(|running| Arc::clone(&running.group))
    }

    /// Does what a node asks for.
    pub(crate) async fn handle(&self, core: &Core, from: NodeId, call: GroupCall) -> GroupReply {
        let map = Arc::clone(&core.map.borrow());
        let is_raft = matches!(call.request, GroupRequest::Raft(_));
        let group = self.get(call.group);
        // Others could not ask it, if it still led.
        let group = group.filter(|_| is_raft || core.check_hearing().is_ok());
        let Some(group) = group else {
            let not_here = ProposeError::NotLeader { leader: None };
            return match call.request {
                GroupRequest::Raft(_) => GroupReply::Absent,
                GroupRequest::Apply(_) => GroupReply::Apply(Err(not_here)),
                GroupRequest::Read(_) => GroupReply::Read(Err(not_here)),
                GroupRequest::ReadAs(..) => GroupReply::ReadAs(Err(not_here)),
                GroupRequest::Link(..) => GroupReply::Link(Err(not_here)),
            };
        };
        let is_vote = matches!(call.request, GroupRequest::Raft(RaftMessage::Vote(_)));
        let mut records = map.namespace_groups();
        let is_founded = records.any(|record| record.id == call.group && record.is_founded);
        if is_vote && is_founded && group.is_empty() {
            // It may have voted for other entries before it lost its disk.
            return GroupReply::Absent;
        }
        if let GroupRequest::Link(filesystem, LinkCall::Term | LinkCall::Counts) = &call.request
            && !map.filesystems().any(|one| one.id == *filesystem)
        {
            // It was created a moment ago, or a host invents it: no coordinator is made for it.
            return GroupReply::Link(Err(ProposeError::Unknown));
        }
        let node = map.node(from);
        let asker = Asker {
            node: from,
            incarnation: node.map(|node| node.incarnation),
            is_meta: node.is_some_and(|node| node.roles.contains(&Role::Meta)),
        };
        if let GroupRequest::Apply(operations) = &call.request
            && !asker.is_meta
            && let Err(error) = may_open_sessions(core, from, operations).await
        {
            return GroupReply::Apply(Err(error));
        }
        group.handle(asker, call.request).await
    }

    /// Whether this node leads a group, as far as it knows.
    pub(crate) fn leads_any(&self) -> bool {
        self.running().values().any(|running| running.group.leads())
    }

    /// Whether this node seeks election in its groups from now on.
    pub(crate) fn set_elections(&self, enabled: bool) {
        for running in self.running().values() {
            running.group.raft.set_elections(enabled);
        }
    }

    /// How each group stands, as far as this node knows.
    pub(crate) fn status(&self) -> BTreeMap<NamespaceGroupId, RaftStatus> {
        let running = self.running();
        let status =
            |(id, running): (&NamespaceGroupId, &Running)| (*id, status_of(&running.group.raft));
        running.iter().map(status).collect()
    }

    /// Why a group does not run here as it should, in one line.
    pub(crate) fn problem(&self, map: &ClusterMap) -> Option<String> {
        let running = self.running();
        running.iter().find_map(|(id, running)| {
            if let Some(death) = running.group.death() {
                return Some(format!(
                    "namespace group {id} has stopped on this node and is opened again: {death}"
                ));
            }
            let (filesystem, host) = running.group.late()?;
            let mut filesystems = map.filesystems();
            let name = filesystems.find(|one| one.id == filesystem)?.name.clone();
            let host = host.and_then(|host| map.node(host));
            let host = host.map_or_else(|| "a node".to_owned(), |host| format!("node '{}'", host.name));
            Some(format!(
                "changes of filesystem '{name}' wait: {host} does not give up what it has cached; they go on \
                 once it answers, or its session has ended: restart it if it is well otherwise"
            ))
        })
    }

    /// Ends all groups.
    pub(crate) async fn shutdown(&self) {
        let all = std::mem::take(&mut *self.running());
        for running in all.into_values() {
            running.tasks.iter().for_each(JoinHandle::abort);
            running.group.shutdown().await;
        }
    }
}

/// Whether the filesystems are attached to a node that it opens sessions of.
async fn may_open_sessions(
    core: &Core,
    node: NodeId,
    operations: &[(FilesystemId, Request)],
) -> Result<(), ProposeError> {
    let serves =
        |filesystem| core.view(|view| filesystem_attachment::serves(view, node, filesystem));
    let opens =
        |(_, request): &&(_, Request)| matches!(request.operation, Operation::OpenSession { .. });
    for (filesystem, _) in operations.iter().filter(opens) {
        if matches!(serves(*filesystem), Ok(true)) {
            continue;
        }
        // It may have been attached just now.
        let caught_up = core.catch_up(Wait::PATIENT).await;
        caught_up.map_err(|_| ProposeError::Unknown)?;
        match serves(*filesystem) {
            Ok(true) => {}
            Ok(false) => {
                let map = core.map.borrow();
                let detail = format!(
                    "filesystem {} is not attached to node {}",
                    map.filesystem_name(*filesystem),
                    map.node_name(node)
                );
                return Err(ProposeError::Refused { detail });
            }
            Err(_) => return Err(ProposeError::Unknown),
        }
    }
    Ok(())
}

/// Opens the groups that the cluster map has and this node may be a member of, as long as the node lives.
pub(crate) async fn open_groups(core: Arc<Core>, context: GroupContext) {
    let mut map = core.map.clone();
    loop {
        let now = Arc::clone(&map.borrow_and_update());
        let mut pause = LOOK_INTERVAL;
        let may_vote = now
            .node(core.id)
            .is_some_and(|node| node.roles.contains(&Role::Meta));
        for group in now.namespace_groups().filter(|_| may_vote) {
            if let Err(error) = open_group(&core, &context, &now, group).await {
                tracing::warn!(group = group.id.0, %error, "a namespace group does not run here yet");
                pause = RETRY_PAUSE;
            }
        }
        if let Ok(Err(_)) = timeout(pause, map.changed()).await {
            return;
        }
    }
}

/// Opens a group if it does not run here, and begins it if that is still to be done.
async fn open_group(
    core: &Arc<Core>,
    context: &GroupContext,
    map: &ClusterMap,
    record: &model::NamespaceGroup,
) -> Result<(), MetaError> {
    let id = record.id;
    let mut running = core.groups.get(id);
    if let Some(death) = running.as_ref().and_then(|group| group.death()) {
        tracing::error!(group = id.0, %death, "a namespace group has stopped, and is opened again");
        let dead = core.groups.running().remove(&id);
        if let Some(dead) = dead {
            dead.group.shutdown().await;
        }
        running = None;
    }
    let group = match running {
        Some(group) => group,
        None => {
            let group = Arc::new(NamespaceGroup::open(id, context).await?);
            let looks_after = leader::look_after(Arc::clone(core), Arc::clone(&group), id);
            let clears_away = upkeep::keep(Arc::clone(core), Arc::clone(&group), id);
            let running = Running {
                group: Arc::clone(&group),
                tasks: [tokio::spawn(looks_after), tokio::spawn(clears_away)],
            };
            core.groups.running().insert(id, running);
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
        .await
}
