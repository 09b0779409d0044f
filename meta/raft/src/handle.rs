//! Calls to a group's Raft machine on this node.
//!
//! openraft logs an error for each call that reaches a stopped machine, and for each call that the stop
//! interrupts. It logs a warning for each write whose caller no longer waits. Neither is a fault: nodes are
//! shut down while peers and clients use them, and connections end at any time. All calls therefore go
//! through this handle. Once the machine is about to stop, calls end with [`Fatal::Stopped`] and do not reach
//! openraft.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use fabric_types::ids::NodeId;
use openraft::error::{
    CheckIsLeaderError, ClientWriteError, Fatal, InitializeError, InstallSnapshotError, RaftError,
};
use openraft::metrics::{RaftServerMetrics, WaitError};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, InstallSnapshotRequest, InstallSnapshotResponse,
    VoteRequest, VoteResponse,
};
use openraft::{BasicNode, ChangeMembers, RaftMetrics, RaftState, ServerState, TokioInstant};
use tokio::sync::{Semaphore, oneshot, watch};

use crate::BoxFuture;
use crate::config::{CommandBytes, LogId, TypeConfig};
use crate::message::{RaftMessage, RaftReply};
use crate::network::{Connections, RaftTransport};
use crate::storage::{DbError, LogStore, Machine, StateMachine};

type Outcome<T, E = openraft::error::Infallible> = Result<T, RaftError<NodeId, E>>;
type WriteError = ClientWriteError<NodeId, BasicNode>;
type ReadError = CheckIsLeaderError<NodeId, BasicNode>;
type Metrics = RaftMetrics<NodeId, BasicNode>;
type State = RaftState<NodeId, BasicNode, TokioInstant>;

/// Reason why a group's Raft machine did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The snapshots could not be read.
    #[error(transparent)]
    Storage(#[from] DbError),
    /// openraft could not read the log or the records.
    #[error(transparent)]
    Raft(#[from] Fatal<NodeId>),
}

/// Progress of a machine towards its end.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    /// No call is polled any more.
    Stopping,
    Stopped,
}

/// The Raft machine of a group on this node. Cheap to clone.
#[derive(Clone)]
pub struct RaftHandle {
    raft: openraft::Raft<TypeConfig>,
    phase: Arc<watch::Sender<Phase>>,
    /// A leader sends the pieces of a snapshot one after the other. A piece in progress outlives its
    /// connection, so that only one is kept however often a peer connects.
    snapshot_pieces: Arc<Semaphore>,
    /// See [`RaftTuning::vote_hold`](crate::RaftTuning::vote_hold).
    vote_hold: Duration,
}

impl RaftHandle {
    /// Starts the machine of a group.
    ///
    /// # Errors
    /// The storage could not be read.
    pub fn start(
        node: NodeId,
        config: Arc<openraft::Config>,
        transport: Arc<dyn RaftTransport>,
        machine: Arc<dyn StateMachine>,
    ) -> BoxFuture<'static, Result<Self, StartError>> {
        Box::pin(async move {
            let connections = Connections {
                group: machine.store().group(),
                transport,
            };
            let log = LogStore::new(Arc::clone(machine.store()));
            let opened = tokio::task::spawn_blocking(move || Machine::new(machine)).await;
            let machine = opened.map_err(|error| DbError::from(std::io::Error::other(error)))??;
            let vote_hold = Duration::from_millis(config.election_timeout_max);
            Ok(Self {
                raft: openraft::Raft::new(node, config, connections, log, machine).await?,
                phase: Arc::new(watch::Sender::new(Phase::Running)),
                snapshot_pieces: Arc::new(Semaphore::new(1)),
                vote_hold,
            })
        })
    }

    /// Metrics of the machine.
    #[must_use]
    pub fn metrics(&self) -> watch::Receiver<Metrics> {
        self.raft.metrics()
    }

    /// The metrics that change with leadership and membership only.
    #[must_use]
    pub fn server_metrics(&self) -> watch::Receiver<RaftServerMetrics<NodeId, BasicNode>> {
        self.raft.server_metrics()
    }

    /// Waits at most `within` for the metrics to meet a condition. `what` names it in the error.
    ///
    /// # Errors
    /// Time is over, or the machine has ended.
    pub fn wait(
        &self,
        within: Duration,
        what: &'static str,
        condition: impl Fn(&Metrics) -> bool + Send + Sync + 'static,
    ) -> BoxFuture<'_, Result<(), WaitError>> {
        self.wait_for(within, what, Box::new(condition))
    }

    fn wait_for(
        &self,
        within: Duration,
        what: &'static str,
        condition: Box<dyn Fn(&Metrics) -> bool + Send + Sync>,
    ) -> BoxFuture<'_, Result<(), WaitError>> {
        let wait = self.raft.wait(Some(within));
        Box::pin(async move { wait.metrics(condition, what).await.map(drop) })
    }

    /// Waits at most `within` until the entry of this index is applied here.
    ///
    /// # Errors
    /// Time is over, or the machine has ended.
    pub fn wait_applied(
        &self,
        index: u64,
        within: Duration,
    ) -> BoxFuture<'_, Result<(), WaitError>> {
        let is_applied = move |metrics: &Metrics| {
            let applied = metrics.last_applied.map(|applied| applied.index);
            applied >= Some(index)
        };
        self.wait_for(within, "a read", Box::new(is_applied))
    }

    /// Sets whether this node seeks election.
    pub fn set_elections(&self, enabled: bool) {
        self.raft.runtime_config().elect(enabled);
    }

    /// Runs a function on the machine's state.
    ///
    /// # Errors
    /// The machine has ended.
    pub async fn with_state<T: Send + 'static>(
        &self,
        function: impl FnOnce(&State) -> T + Send + 'static,
    ) -> Result<T, Fatal<NodeId>> {
        let (answer, answered) = oneshot::channel();
        self.request(Box::new(move |state| {
            // The caller may no longer wait.
            let _ = answer.send(function(state));
        }));
        match answered.await {
            Ok(answer) => Ok(answer),
            Err(_) => Err(self.end_reason().await),
        }
    }

    fn request(&self, function: Box<dyn FnOnce(&State) + Send>) {
        self.raft.external_request(function);
    }

    /// Returns whether the node knows members of the group.
    ///
    /// # Errors
    /// The machine has ended.
    pub fn is_initialized(&self) -> BoxFuture<'_, Result<bool, Fatal<NodeId>>> {
        let raft = self.raft.clone();
        Box::pin(self.ask_to_the_end(async move { raft.is_initialized().await }))
    }

    /// Founds the group with these voters.
    ///
    /// # Errors
    /// It was founded before, or the machine has ended.
    pub fn initialize(
        &self,
        members: BTreeMap<NodeId, BasicNode>,
    ) -> BoxFuture<'_, Outcome<(), InitializeError<NodeId, BasicNode>>> {
        Box::pin(self.ask(self.raft.initialize(members)))
    }

    /// Handles a message of another member.
    pub fn handle(&self, message: RaftMessage) -> BoxFuture<'_, RaftReply> {
        Box::pin(async move {
            match message {
                RaftMessage::AppendEntries(rpc) => {
                    RaftReply::AppendEntries(self.append_entries(rpc).await)
                }
                RaftMessage::Vote(rpc) => RaftReply::Vote(self.vote(rpc).await),
                RaftMessage::InstallSnapshot(rpc) => {
                    RaftReply::InstallSnapshot(self.install_snapshot(rpc).await)
                }
            }
        })
    }

    async fn append_entries(
        &self,
        request: AppendEntriesRequest<TypeConfig>,
    ) -> Outcome<AppendEntriesResponse<NodeId>> {
        self.ask(self.raft.append_entries(request)).await
    }

    /// Answers a candidate. A leader that a majority follows stays leader. openraft makes only followers
    /// refuse their vote for a while: a leader would give way to any candidate with a newer term, such as a
    /// node that the leader's messages do not reach.
    async fn vote(&self, request: VoteRequest<NodeId>) -> Outcome<VoteResponse<NodeId>> {
        let kept = {
            let metrics = self.raft.metrics();
            let metrics = metrics.borrow();
            let acked = metrics.millis_since_quorum_ack.map(Duration::from_millis);
            let is_followed = acked.is_some_and(|ago| ago < self.vote_hold);
            (metrics.state == ServerState::Leader && is_followed).then_some(metrics.vote)
        };
        match kept {
            Some(vote) => Ok(VoteResponse {
                vote,
                vote_granted: false,
                last_log_id: None,
            }),
            None => self.ask_vote(request).await,
        }
    }

    async fn ask_vote(&self, request: VoteRequest<NodeId>) -> Outcome<VoteResponse<NodeId>> {
        self.ask(self.raft.vote(request)).await
    }

    async fn install_snapshot(
        &self,
        request: InstallSnapshotRequest<TypeConfig>,
    ) -> Outcome<InstallSnapshotResponse<NodeId>, InstallSnapshotError> {
        let piece = Arc::clone(&self.snapshot_pieces).acquire_owned().await;
        let raft = self.raft.clone();
        self.ask_to_the_end(async move {
            let _piece = piece;
            raft.install_snapshot(request).await
        })
        .await
    }

    /// Returns the position that a reader must have applied, confirmed by a majority.
    ///
    /// # Errors
    /// This node does not lead, no majority answers, or the machine has ended.
    pub fn read_log_id(&self) -> BoxFuture<'_, Outcome<Option<LogId>, ReadError>> {
        Box::pin(async move {
            let (position, _) = self.ask(self.raft.get_read_log_id()).await?;
            Ok(position)
        })
    }

    /// Commits and applies a command. Returns its reply.
    ///
    /// # Errors
    /// This node does not lead, or the machine has ended.
    pub fn write(&self, command: Vec<u8>) -> BoxFuture<'_, Outcome<Vec<u8>, WriteError>> {
        Box::pin(async move {
            let command = CommandBytes(command);
            let answer = self.ask(self.raft.client_write_ff(command)).await?;
            // The task receives the answer even when nobody waits for it.
            match tokio::spawn(answer).await {
                Ok(Ok(written)) => Ok(written.map_err(RaftError::APIError)?.data),
                Ok(Err(_)) => Err(self.end_reason().await.into()),
                Err(_) => Err(Fatal::Stopped.into()),
            }
        })
    }

    /// Makes a node a learner. Returns when it has caught up.
    ///
    /// # Errors
    /// This node does not lead, or the machine has ended.
    pub fn add_learner(
        &self,
        id: NodeId,
        node: BasicNode,
    ) -> BoxFuture<'_, Outcome<(), WriteError>> {
        let raft = self.raft.clone();
        Box::pin(self.ask_to_the_end(async move {
            let added = raft.add_learner(id, node, true).await;
            added.map(drop)
        }))
    }

    /// Changes the members. With `retain`, voters that are replaced stay learners.
    ///
    /// # Errors
    /// This node does not lead, another change is in progress, or the machine has ended.
    pub fn change_membership(
        &self,
        change: ChangeMembers<NodeId, BasicNode>,
        retain: bool,
    ) -> BoxFuture<'_, Outcome<(), WriteError>> {
        let raft = self.raft.clone();
        Box::pin(self.ask_to_the_end(async move {
            let changed = raft.change_membership(change, retain).await;
            changed.map(drop)
        }))
    }

    /// Makes this node seek election.
    ///
    /// # Errors
    /// The machine has ended.
    pub fn trigger_election(&self) -> BoxFuture<'_, Result<(), Fatal<NodeId>>> {
        Box::pin(async move { self.ask(self.raft.trigger().elect()).await })
    }

    /// Begins to make a snapshot.
    ///
    /// # Errors
    /// The machine has ended.
    pub fn trigger_snapshot(&self) -> BoxFuture<'_, Result<(), Fatal<NodeId>>> {
        Box::pin(async move { self.ask(self.raft.trigger().snapshot()).await })
    }

    /// Ends the machine, and with it all calls. A second shutdown does nothing.
    ///
    /// # Errors
    /// The machine panicked.
    pub fn shutdown(&self) -> BoxFuture<'_, Result<(), tokio::task::JoinError>> {
        Box::pin(async move {
            let is_first = self.phase.send_if_modified(|phase| {
                let was_running = *phase == Phase::Running;
                if was_running {
                    *phase = Phase::Stopping;
                }
                was_running
            });
            if !is_first {
                return Ok(());
            }
            let ended = self.raft.shutdown().await;
            self.phase.send_replace(Phase::Stopped);
            ended
        })
    }

    /// Waits for a call. The machine drops the answer silently if this is dropped.
    async fn ask<T, E>(&self, call: impl Future<Output = Result<T, E>>) -> Result<T, E>
    where
        E: From<Fatal<NodeId>>,
    {
        let answer = self.poll_while_running(pin!(call)).await;
        answer.unwrap_or_else(|| Err(Fatal::Stopped.into()))
    }

    /// Waits for a call in whose absence the machine would complain. It has its own task, which keeps it
    /// until there is an answer or no machine.
    async fn ask_to_the_end<T, E>(
        &self,
        call: impl Future<Output = Result<T, E>> + Send + 'static,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<Fatal<NodeId>> + Send + 'static,
    {
        let this = self.clone();
        let asked = tokio::spawn(async move {
            let mut call = pin!(call);
            match this.poll_while_running(call.as_mut()).await {
                Some(answer) => answer,
                None => {
                    this.reached(|phase| phase == Phase::Stopped).await;
                    Err(Fatal::Stopped.into())
                }
            }
        });
        asked.await.unwrap_or_else(|_| Err(Fatal::Stopped.into()))
    }

    /// Drives a call as long as the machine runs; returns nothing once it is to stop.
    async fn poll_while_running<F: Future>(&self, mut call: Pin<&mut F>) -> Option<F::Output> {
        let mut stopping = pin!(self.reached(|phase| phase != Phase::Running));
        poll_fn(|context| {
            {
                // Locks out `shutdown`: the machine does not end while a call is polled.
                let phase = self.phase.borrow();
                if *phase == Phase::Running
                    && let Poll::Ready(answer) = call.as_mut().poll(context)
                {
                    return Poll::Ready(Some(answer));
                }
            }
            stopping.as_mut().poll(context).map(|()| None)
        })
        .await
    }

    async fn reached(&self, is_there: impl Fn(Phase) -> bool) {
        let mut phase = self.phase.subscribe();
        // It cannot fail: this handle has a sender.
        let _ = phase.wait_for(|phase| is_there(*phase)).await.map(drop);
    }

    /// The reason why the machine has ended. Waits for that.
    async fn end_reason(&self) -> Fatal<NodeId> {
        let mut metrics = self.raft.metrics();
        let ended = metrics.wait_for(|metrics| metrics.running_state.is_err());
        // A panic says nothing there, but drops the other end.
        let Ok(metrics) = ended.await else {
            return Fatal::Panicked;
        };
        match &metrics.running_state {
            Err(reason) => reason.clone(),
            Ok(()) => Fatal::Stopped,
        }
    }
}

#[cfg(test)]
mod tests;
