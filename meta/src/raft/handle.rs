//! The way to a group's Raft machine on this node.
//!
//! openraft logs an error for each call that reaches a stopped machine, and for each call that the stop
//! interrupts. It logs a warning for each write whose caller no longer waits. Neither is a fault: nodes are
//! shut down while peers and clients use them, and connections end at any time. So no call goes past this
//! handle. Once the machine is about to stop, calls end with [`Fatal::Stopped`] and openraft is not asked.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use openraft::error::{
    CheckIsLeaderError, ClientWriteError, Fatal, InitializeError, InstallSnapshotError, RaftError,
};
use openraft::metrics::{RaftServerMetrics, Wait};
use openraft::network::RaftNetworkFactory;
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, ClientWriteResponse, InstallSnapshotRequest,
    InstallSnapshotResponse, VoteRequest, VoteResponse,
};
use openraft::storage::{RaftLogStorage, RaftStateMachine};
use openraft::{BasicNode, ChangeMembers, RaftMetrics, RaftState, TokioInstant, TokioRuntime};
use tokio::sync::{Semaphore, watch};

use super::{GroupConfig, LogId};
use crate::ids::NodeId;

type Outcome<T, E = openraft::error::Infallible> = Result<T, RaftError<NodeId, E>>;
type Written<C> = Outcome<ClientWriteResponse<C>, ClientWriteError<NodeId, BasicNode>>;

/// Progress of a machine towards its end.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    /// No call is polled any more.
    Stopping,
    Stopped,
}

/// The Raft machine of a group on this node.
pub(crate) struct RaftHandle<C: GroupConfig> {
    raft: openraft::Raft<C>,
    phase: Arc<watch::Sender<Phase>>,
    /// A leader sends the pieces of a snapshot one after the other. What is taken outlives its connection, so
    /// that only one piece is kept however often a peer connects.
    snapshot_pieces: Arc<Semaphore>,
}

impl<C: GroupConfig> Clone for RaftHandle<C> {
    fn clone(&self) -> Self {
        Self {
            raft: self.raft.clone(),
            phase: Arc::clone(&self.phase),
            snapshot_pieces: Arc::clone(&self.snapshot_pieces),
        }
    }
}

impl<C: GroupConfig> RaftHandle<C> {
    /// Starts the machine.
    ///
    /// # Errors
    /// The storage could not be read.
    pub(crate) async fn new(
        id: NodeId,
        config: Arc<openraft::Config>,
        network: impl RaftNetworkFactory<C>,
        log: impl RaftLogStorage<C>,
        machine: impl RaftStateMachine<C>,
    ) -> Result<Self, Fatal<NodeId>> {
        Ok(Self {
            raft: openraft::Raft::new(id, config, network, log, machine).await?,
            phase: Arc::new(watch::Sender::new(Phase::Running)),
            snapshot_pieces: Arc::new(Semaphore::new(1)),
        })
    }

    pub(crate) fn metrics(&self) -> watch::Receiver<RaftMetrics<NodeId, BasicNode>> {
        self.raft.metrics()
    }

    pub(crate) fn server_metrics(&self) -> watch::Receiver<RaftServerMetrics<NodeId, BasicNode>> {
        self.raft.server_metrics()
    }

    /// Waits at most `within` for the metrics to meet a condition.
    pub(crate) fn wait(&self, within: Duration) -> Wait<NodeId, BasicNode, TokioRuntime> {
        self.raft.wait(Some(within))
    }

    /// Sets whether this node seeks election.
    pub(crate) fn set_elections(&self, enabled: bool) {
        self.raft.runtime_config().elect(enabled);
    }

    /// Runs a function on the machine's state.
    pub(crate) async fn with_state<T: Send + 'static>(
        &self,
        function: impl FnOnce(&RaftState<NodeId, BasicNode, TokioInstant>) -> T + Send + 'static,
    ) -> Result<T, Fatal<NodeId>> {
        let (answer, answered) = tokio::sync::oneshot::channel();
        self.raft.external_request(move |state| {
            // The caller may no longer wait.
            let _ = answer.send(function(state));
        });
        match answered.await {
            Ok(answer) => Ok(answer),
            Err(_) => Err(self.end_reason().await),
        }
    }

    pub(crate) async fn is_initialized(&self) -> Result<bool, Fatal<NodeId>> {
        let raft = self.raft.clone();
        self.ask_to_the_end(async move { raft.is_initialized().await })
            .await
    }

    pub(crate) async fn initialize(
        &self,
        members: BTreeMap<NodeId, BasicNode>,
    ) -> Outcome<(), InitializeError<NodeId, BasicNode>> {
        self.ask(self.raft.initialize(members)).await
    }

    pub(crate) async fn append_entries(
        &self,
        request: AppendEntriesRequest<C>,
    ) -> Outcome<AppendEntriesResponse<NodeId>> {
        self.ask(self.raft.append_entries(request)).await
    }

    pub(crate) async fn vote(&self, request: VoteRequest<NodeId>) -> Outcome<VoteResponse<NodeId>> {
        self.ask(self.raft.vote(request)).await
    }

    pub(crate) async fn install_snapshot(
        &self,
        request: InstallSnapshotRequest<C>,
    ) -> Outcome<InstallSnapshotResponse<NodeId>, InstallSnapshotError> {
        let piece = Arc::clone(&self.snapshot_pieces).acquire_owned().await;
        let raft = self.raft.clone();
        self.ask_to_the_end(async move {
            let _piece = piece;
            raft.install_snapshot(request).await
        })
        .await
    }

    /// Index that a reader must have applied, confirmed by a majority, and the last one applied here.
    pub(crate) async fn read_log_id(
        &self,
    ) -> Outcome<(Option<LogId>, Option<LogId>), CheckIsLeaderError<NodeId, BasicNode>> {
        self.ask(self.raft.get_read_log_id()).await
    }

    pub(crate) async fn client_write(&self, command: C::D) -> Written<C> {
        let answer = self.ask(self.raft.client_write_ff(command)).await?;
        // The task receives the answer even when nobody waits for it.
        match tokio::spawn(answer).await {
            Ok(Ok(written)) => written.map_err(RaftError::APIError),
            Ok(Err(_)) => Err(self.end_reason().await.into()),
            Err(_) => Err(Fatal::Stopped.into()),
        }
    }

    /// Makes a node a learner; returns when it has caught up.
    pub(crate) async fn add_learner(&self, id: NodeId, node: BasicNode) -> Written<C> {
        let raft = self.raft.clone();
        self.ask_to_the_end(async move { raft.add_learner(id, node, true).await })
            .await
    }

    pub(crate) async fn change_membership(
        &self,
        change: ChangeMembers<NodeId, BasicNode>,
        retain: bool,
    ) -> Written<C> {
        let raft = self.raft.clone();
        self.ask_to_the_end(async move { raft.change_membership(change, retain).await })
            .await
    }

    pub(crate) async fn trigger_election(&self) -> Result<(), Fatal<NodeId>> {
        self.ask(self.raft.trigger().elect()).await
    }

    pub(crate) async fn trigger_snapshot(&self) -> Result<(), Fatal<NodeId>> {
        self.ask(self.raft.trigger().snapshot()).await
    }

    /// Ends the machine, and with it all calls. A second shutdown does nothing.
    ///
    /// # Errors
    /// The machine panicked.
    pub(crate) async fn shutdown(&self) -> Result<(), tokio::task::JoinError> {
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
