//! Asking the leader of a namespace group, from any node.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use namespace::{Answer, FilesystemId, Query, Reply, Request};
use openraft::BasicNode;
use tokio::time::timeout;

use super::network::{GroupCall, GroupReply, GroupRequest};
use crate::error::MetaError;
use crate::ids::{NamespaceGroupId, NodeId};
use crate::model::{NodeState, Role};
use crate::net::{ProposeError, TransportError};
use crate::node::Core;
use crate::reach::Reach;

/// A request waits this long for a leader, and fails then. It covers an election and a slow disk.
const LEADER_WAIT_MAX: Duration = Duration::from_secs(20);
/// Without an answer in this time another node is asked: whoever led may have been cut off.
const ANSWER_WAIT_MAX: Duration = Duration::from_secs(2);
/// Pause before the leader is looked for again.
const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// Who led each group when it last answered.
#[derive(Default)]
pub(super) struct Leaders(Mutex<BTreeMap<NamespaceGroupId, NodeId>>);

impl Leaders {
    fn get(&self, group: NamespaceGroupId) -> Option<NodeId> {
        let leaders = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        leaders.get(&group).copied()
    }

    fn set(&self, group: NamespaceGroupId, leader: NodeId) {
        let mut leaders = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        leaders.insert(group, leader);
    }
}

/// The filesystems of one namespace group, for a host. Cheap to clone.
#[derive(Clone)]
pub struct Filesystems {
    core: Arc<Core>,
    group: NamespaceGroupId,
}

/// What one node said.
enum Attempt {
    Done(GroupReply),
    /// Ask again, there if known.
    Again(Option<NodeId>),
    Failed(MetaError),
}

impl Filesystems {
    pub(crate) fn new(core: Arc<Core>, group: NamespaceGroupId) -> Self {
        Self { core, group }
    }

    /// Has operations done in this order, each on its own: one that is refused changes nothing, and those
    /// behind it are done. Sent again after a leader was lost, each is done once, because it names its
    /// session, slot and sequence number.
    ///
    /// # Errors
    /// There is no leader, or this node has stopped. Then the outcome is unknown: the same requests may be
    /// sent again.
    pub async fn apply(
        &self,
        requests: Vec<(FilesystemId, Request)>,
    ) -> Result<Vec<Reply>, MetaError> {
        match self.ask(|| GroupRequest::Apply(requests.clone())).await? {
            GroupReply::Apply(Ok(replies)) => Ok(replies),
            other => Err(unfit(&other)),
        }
    }

    /// Answers questions by all that was acknowledged before this call.
    ///
    /// # Errors
    /// There is no leader, or this node has stopped.
    pub async fn read(
        &self,
        queries: Vec<(FilesystemId, Query)>,
    ) -> Result<Vec<Result<Answer, namespace::Error>>, MetaError> {
        match self.ask(|| GroupRequest::Read(queries.clone())).await? {
            GroupReply::Read(Ok(answers)) => Ok(answers),
            other => Err(unfit(&other)),
        }
    }

    async fn ask(&self, request: impl Fn() -> GroupRequest) -> Result<GroupReply, MetaError> {
        let deadline = Instant::now() + LEADER_WAIT_MAX;
        let leaders = &self.core.groups.leaders;
        let mut hint = leaders.get(self.group);
        let (mut turn, mut is_redirected) = (0, false);
        loop {
            let target = hint
                .or_else(|| self.candidate(turn))
                .unwrap_or(self.core.id);
            hint = match self.attempt(target, request()).await {
                Attempt::Done(reply) => {
                    leaders.set(self.group, target);
                    return Ok(reply);
                }
                Attempt::Failed(error) => return Err(error),
                Attempt::Again(Some(leader)) if leader != target && !is_redirected => {
                    is_redirected = true;
                    Some(leader)
                }
                Attempt::Again(_) => {
                    if Instant::now() >= deadline {
                        return Err(MetaError::NoLeader {
                            waited: LEADER_WAIT_MAX,
                            is_command: false,
                            reach: Reach::default(),
                        });
                    }
                    tokio::time::sleep(RETRY_PAUSE).await;
                    (turn, is_redirected) = (turn + 1, false);
                    None
                }
            };
        }
    }

    /// The nodes that may lead, one after the other: those that are up first, this one before others.
    fn candidate(&self, turn: usize) -> Option<NodeId> {
        let map = self.core.map.borrow();
        let may_lead = map.nodes().filter(|node| node.roles.contains(&Role::Meta));
        let mut ranked: Vec<_> = may_lead
            .map(|node| {
                (
                    node.state != NodeState::Up,
                    node.id != self.core.id,
                    node.id,
                )
            })
            .collect();
        ranked.sort_unstable();
        let len = ranked.len();
        (len > 0).then(|| ranked[turn % len].2)
    }

    async fn attempt(&self, target: NodeId, request: GroupRequest) -> Attempt {
        let group = self.group;
        let call = GroupCall { group, request };
        let answered = if target == self.core.id {
            let map = Arc::clone(&self.core.map.borrow());
            let handled = self.core.groups.handle(target, &map, call);
            timeout(ANSWER_WAIT_MAX, handled).await.map(Ok)
        } else {
            let address = {
                let map = self.core.map.borrow();
                let node = map.node(target);
                BasicNode::new(node.map_or("", |node| node.control_address.as_str()))
            };
            let transport = &self.core.transport;
            let called = transport.call_group(target, &address, call);
            timeout(ANSWER_WAIT_MAX, called).await
        };
        match answered {
            // The same numbers get the same reply, so asking again is harmless.
            Err(_) => Attempt::Again(None),
            Ok(Err(TransportError::Removed { .. })) => {
                self.core.note_removed();
                Attempt::Again(None)
            }
            Ok(Err(_)) => Attempt::Again(None),
            Ok(Ok(GroupReply::Apply(Err(error)) | GroupReply::Read(Err(error)))) => {
                self.meaning(error, target)
            }
            Ok(Ok(reply)) => Attempt::Done(reply),
        }
    }

    fn meaning(&self, error: ProposeError, asked: NodeId) -> Attempt {
        match error {
            ProposeError::NotLeader { leader } => Attempt::Again(leader),
            ProposeError::Unknown => Attempt::Again(None),
            ProposeError::NoSpace { .. } | ProposeError::Stopped if asked != self.core.id => {
                Attempt::Again(None)
            }
            ProposeError::NoSpace { dir, begun } => {
                Attempt::Failed(MetaError::NoSpace { dir, begun })
            }
            ProposeError::Stopped => Attempt::Failed(MetaError::Stopped),
            ProposeError::Failed { detail } => Attempt::Failed(MetaError::Failed { detail }),
        }
    }
}

/// The leader runs another version that answers differently.
fn unfit(reply: &GroupReply) -> MetaError {
    let detail =
        format!("the leader gave an answer that this version does not understand: {reply:?}");
    MetaError::Failed { detail }
}
