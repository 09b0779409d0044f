//! Asking the leader, whoever that is: this node first, then whom it names, until there is an answer or time
//! is over.

use std::time::{Duration, Instant};

use openraft::BasicNode;

use super::Core;
use super::raft_calls::COMMIT_WAIT_MAX;
use super::redirects::Redirects;
use crate::command::Command;
use crate::error::MetaError;
use crate::ids::{Generation, Incarnation, NodeId, VolumeId};
use crate::level::Level;
use crate::net::{BoxFuture, PeerReply, PeerRequest, ProposeError, TransportError};
use crate::reach::Reach;
use crate::report::NodeReport;
use crate::stored::NodeStored;

/// A request waits this long for a leader, and fails then.
const LEADER_WAIT_MAX: Duration = Duration::from_secs(20);
/// What may be asked twice is asked again when there is no answer in this time: whoever led may have been cut
/// off, and somebody else lead by now.
const ANSWER_WAIT_MAX: Duration = Duration::from_secs(2);
/// Pause before the leader is looked for again.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// Redirects that a request follows before it pauses and starts again with this node.
const REDIRECTS_MAX: usize = 4;

/// How long a request may take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wait {
    /// Until a leader answers.
    pub(crate) leader: Duration,
    /// From then on, until a command is committed or what was asked for is applied here.
    pub(crate) commit: Duration,
}

impl Wait {
    /// As long as a daemon waits that can do nothing else.
    pub(crate) const PATIENT: Self = Self {
        leader: LEADER_WAIT_MAX,
        commit: COMMIT_WAIT_MAX,
    };
}

/// What is asked of the leader.
pub(super) enum LeaderRequest {
    Propose(Box<Command>),
    RenewLease {
        volume: VolumeId,
        node: NodeId,
        generation: Generation,
    },
    Heartbeat {
        node: NodeId,
        incarnation: Incarnation,
        level: Level,
    },
    ReadIndex,
    Tell {
        node: NodeId,
        word: NodeReport,
    },
    Report,
    TellStored {
        node: NodeId,
        told: NodeStored,
    },
    Stored,
}

impl LeaderRequest {
    fn is_command(&self) -> bool {
        matches!(self, Self::Propose(_))
    }

    fn request(&self) -> PeerRequest {
        match self {
            Self::Propose(command) => PeerRequest::Propose(command.as_ref().clone()),
            Self::RenewLease {
                volume,
                node,
                generation,
            } => PeerRequest::RenewLease {
                volume: *volume,
                node: *node,
                generation: *generation,
            },
            Self::Heartbeat {
                node,
                incarnation,
                level,
            } => PeerRequest::Heartbeat {
                node: *node,
                incarnation: *incarnation,
                level: *level,
            },
            Self::ReadIndex => PeerRequest::ReadIndex,
            Self::Tell { node, word } => PeerRequest::Tell {
                node: *node,
                word: word.clone(),
            },
            Self::Report => PeerRequest::Report,
            Self::TellStored { node, told } => PeerRequest::TellStored {
                node: *node,
                told: told.clone(),
            },
            Self::Stored => PeerRequest::Stored,
        }
    }
}

/// An attempt on one node, this or another.
enum LeaderAttempt {
    Done(PeerReply),
    /// Nothing was done: try again, there if known.
    Again(Option<NodeId>),
    Failed(MetaError),
}

impl Core {
    /// Asks this node, then whoever it says leads, until there is an answer or time is over.
    pub(super) fn ask_leader<'a>(
        &'a self,
        ask: &'a LeaderRequest,
        wait: Wait,
    ) -> BoxFuture<'a, Result<PeerReply, MetaError>> {
        Box::pin(self.ask_leader_until_answered(ask, wait))
    }

    async fn ask_leader_until_answered(
        &self,
        ask: &LeaderRequest,
        wait: Wait,
    ) -> Result<PeerReply, MetaError> {
        let deadline = Instant::now() + wait.leader;
        let redirects = || Redirects::from(self.id, REDIRECTS_MAX);
        let (mut leader, mut followed) = (None, redirects());
        loop {
            let within = match ask.is_command() {
                true => wait.commit,
                false => ANSWER_WAIT_MAX.min(deadline.saturating_duration_since(Instant::now())),
            };
            let named = match self.attempt(leader, ask, within).await {
                LeaderAttempt::Done(answer) => return Ok(answer),
                LeaderAttempt::Failed(error) => return Err(error),
                LeaderAttempt::Again(named) => named,
            };
            // Nothing is kept of a node that does not exist.
            let named = named.filter(|node| self.may_lead(*node));
            leader = followed.follow(named);
            if leader.is_none() {
                if Instant::now() >= deadline {
                    return Err(MetaError::NoLeader {
                        waited: wait.leader,
                        is_command: ask.is_command(),
                        reach: Reach::default(),
                    });
                }
                self.succeed().await;
                tokio::time::sleep(RETRY_PAUSE).await;
                followed = redirects();
            }
        }
    }

    async fn attempt(
        &self,
        leader: Option<NodeId>,
        ask: &LeaderRequest,
        within: Duration,
    ) -> LeaderAttempt {
        let answer = match leader {
            None => {
                let handled = tokio::time::timeout(within, self.handle(ask.request())).await;
                handled.map_err(|_| late(self.id))
            }
            Some(leader) => self.call(leader, ask.request(), within).await,
        };
        match answer {
            Ok(
                PeerReply::Propose(Err(error))
                | PeerReply::Heartbeat(Err(error))
                | PeerReply::ReadIndex(Err(error))
                | PeerReply::Tell(Err(error))
                | PeerReply::Report(Err(error))
                | PeerReply::Stored(Err(error)),
            ) => error.means(leader),
            Ok(answer) => LeaderAttempt::Done(answer),
            Err(TransportError::Unreachable { .. } | TransportError::Removed { .. }) => {
                LeaderAttempt::Again(None)
            }
            Err(TransportError::Gone { target }) => {
                self.signs().gone(target);
                LeaderAttempt::Again(None)
            }
            Err(TransportError::Lost { .. }) => match ask.is_command() {
                true => LeaderAttempt::Failed(interrupted()),
                // Asking again is harmless.
                false => LeaderAttempt::Again(None),
            },
        }
    }

    pub(super) async fn call(
        &self,
        target: NodeId,
        request: PeerRequest,
        within: Duration,
    ) -> Result<PeerReply, TransportError> {
        let metrics = self.raft.metrics();
        let address = metrics
            .borrow()
            .membership_config
            .membership()
            .get_node(&target)
            .cloned();
        let address = address.unwrap_or_else(|| {
            let map = self.map.borrow();
            let node = map.node(target);
            BasicNode::new(node.map_or("", |node| node.control_address.as_str()))
        });
        let timed =
            tokio::time::timeout(within, self.transport.call(target, &address, request)).await;
        let answer = timed.unwrap_or_else(|_| Err(late(target)));
        if let Err(TransportError::Removed { .. }) = answer {
            self.note_removed_by(target);
        }
        answer
    }
}

impl ProposeError {
    /// What it means to whoever asked this node (`None`) or another.
    fn means(self, asked: Option<NodeId>) -> LeaderAttempt {
        match self {
            Self::NotLeader { leader } => LeaderAttempt::Again(leader),
            Self::Unknown => LeaderAttempt::Failed(interrupted()),
            // When another node fails or stops, somebody else will lead.
            Self::Failed { .. } | Self::Stopped | Self::NoSpace { begun: false, .. }
                if asked.is_some() =>
            {
                LeaderAttempt::Again(None)
            }
            Self::NoSpace { dir, begun } => {
                LeaderAttempt::Failed(MetaError::NoSpace { dir, begun })
            }
            Self::Failed { detail } | Self::Refused { detail } => {
                LeaderAttempt::Failed(MetaError::Failed { detail })
            }
            Self::Stopped => LeaderAttempt::Failed(MetaError::Stopped),
        }
    }
}

/// Nobody looked yet whom this node reaches.
fn interrupted() -> MetaError {
    MetaError::Interrupted {
        reach: Reach::default(),
    }
}

fn late(target: NodeId) -> TransportError {
    TransportError::Lost {
        target,
        detail: "no answer in time".to_owned(),
    }
}

/// The leader runs another version that answers differently.
pub(super) fn unfit(answer: &PeerReply) -> MetaError {
    MetaError::Failed {
        detail: format!(
            "the leader gave an answer that this version does not understand: {answer:?}"
        ),
    }
}
