//! Asking the leader of a namespace group, from any node.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use namespace::{Answer, FilesystemId, Query, Reply, Request};
use openraft::BasicNode;
use tokio::time::timeout;

use super::coordination::SessionLink;
use super::messages::{GroupCall, GroupReply, GroupRequest, LinkCall, LinkReply};
use super::reads::Answers;
use crate::error::MetaError;
use crate::ids::{NamespaceGroupId, NodeId};
use crate::model::NodeState;
use crate::net::{ProposeError, TransportError};
use crate::node::Core;
use crate::node::redirects::Redirects;

/// A request waits this long for a leader, and fails then. It covers an election and a slow disk.
const LEADER_WAIT_MAX: Duration = Duration::from_secs(30);
/// Without an answer in this time another node is asked. A node that was cut off is noticed by its connection
/// sooner; a leader that is slow would be made slower by asking it again.
const ANSWER_WAIT_MAX: Duration = Duration::from_secs(8);
/// Pause before the leader is looked for again.
const RETRY_PAUSE: Duration = Duration::from_millis(20);
/// Redirects that a request follows before it pauses and asks the next candidate.
const REDIRECTS_MAX: usize = 1;

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

/// Replies to operations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replies {
    /// One to each operation.
    pub replies: Vec<Reply>,
    /// An earlier try may have been carried out, whose replies were lost: then a session that is not there
    /// ([`namespace::Error::Stale`]) may have been there, and done it.
    pub may_be_repeated: bool,
}

/// What one node said.
enum Attempt {
    Done(GroupReply),
    /// Ask that one, which leads.
    Redirected(NodeId),
    /// Ask again, for this reason.
    Again(Option<String>),
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
        Ok(self.apply_repeated(requests).await?.replies)
    }

    /// The same, and tells whether it may have been done by an earlier try.
    ///
    /// # Errors
    /// As [`apply`](Self::apply).
    pub async fn apply_repeated(
        &self,
        requests: Vec<(FilesystemId, Request)>,
    ) -> Result<Replies, MetaError> {
        match self.ask(|| GroupRequest::Apply(requests.clone())).await? {
            (GroupReply::Apply(Ok(replies)), may_be_repeated) => Ok(Replies {
                replies,
                may_be_repeated,
            }),
            (other, _) => Err(unfit(&other)),
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
            (GroupReply::Read(Ok(answers)), _) => Ok(answers),
            (other, _) => Err(unfit(&other)),
        }
    }

    /// Answers questions of a session, which may cache the answers as its link says.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub async fn read_as(
        &self,
        reader: SessionLink,
        queries: Vec<(FilesystemId, Query)>,
    ) -> Result<Answers, MetaError> {
        let request = || GroupRequest::ReadAs(reader, queries.clone());
        match self.ask(request).await? {
            (GroupReply::ReadAs(Ok(answers)), _) => Ok(answers),
            (other, _) => Err(unfit(&other)),
        }
    }

    /// Says something to the leader about what sessions may cache. One that leads since not long may not
    /// have the link: then the session is to connect anew.
    ///
    /// # Errors
    /// There is no leader, or this node has stopped.
    pub async fn link(
        &self,
        filesystem: FilesystemId,
        call: LinkCall,
    ) -> Result<LinkReply, MetaError> {
        match self
            .ask(|| GroupRequest::Link(filesystem, call.clone()))
            .await?
        {
            (GroupReply::Link(Ok(reply)), _) => Ok(reply),
            (other, _) => Err(unfit(&other)),
        }
    }

    /// Asks until there is a reply. True with it: an earlier try may have been carried out.
    async fn ask(
        &self,
        request: impl Fn() -> GroupRequest,
    ) -> Result<(GroupReply, bool), MetaError> {
        let deadline = Instant::now() + LEADER_WAIT_MAX;
        let leaders = &self.core.groups.leaders;
        let mut known = leaders.get(self.group);
        let (mut turn, mut may_be_repeated) = (0, false);
        loop {
            let first = known.take().or_else(|| self.candidate(turn));
            let first = first.unwrap_or(self.core.id);
            let mut redirects = Redirects::from(first, REDIRECTS_MAX);
            let (mut next, mut last) = (Some(first), None);
            while let Some(target) = next.take() {
                match self.attempt(target, request()).await {
                    Attempt::Done(reply) => {
                        leaders.set(self.group, target);
                        return Ok((reply, may_be_repeated));
                    }
                    Attempt::Failed(error) => return Err(error),
                    Attempt::Redirected(leader) => {
                        let named = Some(leader).filter(|node| self.core.keeps_metadata(*node));
                        next = redirects.follow(named);
                    }
                    Attempt::Again(why) => last = why,
                }
            }
            // One that does not lead says so, and has done nothing.
            may_be_repeated |= last.is_some();
            if self.core.has_stopped() {
                return Err(MetaError::Stopped);
            }
            if Instant::now() >= deadline {
                return Err(MetaError::NoGroupLeader {
                    group: self.group,
                    waited: LEADER_WAIT_MAX,
                    last,
                });
            }
            tokio::time::sleep(RETRY_PAUSE).await;
            turn += 1;
        }
    }

    /// The nodes that may lead, one after the other: those that vote and are up first, this one before
    /// others.
    fn candidate(&self, turn: usize) -> Option<NodeId> {
        let map = self.core.map.borrow();
        let mut groups = map.namespace_groups();
        let voters = groups.find(|group| group.id == self.group)?.voters.clone();
        let is_down = |id: NodeId| map.node(id).is_none_or(|node| node.state != NodeState::Up);
        let voters = voters.into_iter();
        let mut ranked: Vec<_> = voters
            .map(|id| (is_down(id), id != self.core.id, id))
            .collect();
        ranked.sort_unstable();
        let len = ranked.len();
        (len > 0).then(|| ranked[turn % len].2)
    }

    async fn attempt(&self, target: NodeId, request: GroupRequest) -> Attempt {
        let group = self.group;
        let call = GroupCall { group, request };
        let answered = if target == self.core.id {
            let handled = self.core.groups.handle(&self.core, target, call);
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
        let name = || self.core.map.borrow().node_name(target);
        match answered {
            // The same numbers get the same reply, so asking again is harmless.
            Err(_) => Attempt::Again(Some(format!("node {} has not answered", name()))),
            Ok(Err(error)) => {
                if let TransportError::Removed { .. } = error {
                    self.core.note_removed_by(target);
                }
                Attempt::Again(Some(error.text(&name())))
            }
            Ok(Ok(
                GroupReply::Apply(Err(error))
                | GroupReply::Read(Err(error))
                | GroupReply::ReadAs(Err(error))
                | GroupReply::Link(Err(error)),
            )) => meaning(error, &name()),
            Ok(Ok(reply)) => Attempt::Done(reply),
        }
    }
}

/// Next step of a caller whose request a node refused with this error.
fn meaning(error: ProposeError, asked: &str) -> Attempt {
    match error {
        ProposeError::NotLeader {
            leader: Some(leader),
        } => Attempt::Redirected(leader),
        ProposeError::NotLeader { leader: None } => Attempt::Again(None),
        ProposeError::NoSpace { dir, begun } => Attempt::Failed(MetaError::NoSpace { dir, begun }),
        ProposeError::Refused { detail } => Attempt::Failed(MetaError::Failed { detail }),
        // Another node may lead by now, and be well.
        ProposeError::Unknown | ProposeError::Stopped | ProposeError::Failed { .. } => {
            Attempt::Again(Some(format!("node {asked}: {error}")))
        }
    }
}

/// The leader runs another version that answers differently.
fn unfit(reply: &GroupReply) -> MetaError {
    let detail =
        format!("the leader gave an answer that this version does not understand: {reply:?}");
    MetaError::Failed { detail }
}
