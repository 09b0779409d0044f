//! One namespace group on this node.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use namespace::{Answer, FilesystemId, Namespace, Operation, Query, Reply, Request, SessionId};
use openraft::BasicNode;
use openraft::error::{InitializeError, RaftError};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use super::config::Raft;
use super::network::{Connections, GroupReply, GroupRequest, RaftMessage, RaftReply};
use super::proposals::{self, Proposal};
use super::reads::{self, Reading};
use super::store::NamespaceStore;
use crate::error::MetaError;
use crate::ids::{NamespaceGroupId, NodeId};
use crate::net::{ProposeError, Transport};
use crate::node::{failed, fatal};
use crate::raft::{NAMESPACE_MESSAGE_ENTRIES_MAX, RaftTuning};
use crate::storage::database::Database;
use crate::storage::log::LogStore;
use crate::storage::machine::Machine;
use crate::storage::{self, DbError};

/// Callers whose operations or questions wait for the leader's attention; more wait to be one of them.
const WAITING_MAX: usize = 1024;

/// A namespace group that runs on this node, as a member or in wait of being made one.
pub(crate) struct NamespaceGroup {
    pub(super) raft: Raft,
    store: Arc<NamespaceStore>,
    proposals: mpsc::Sender<Proposal>,
    readings: mpsc::Sender<Reading>,
    tasks: [JoinHandle<()>; 2],
}

impl Drop for NamespaceGroup {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// What all groups of a node have in common.
#[derive(Clone)]
pub(crate) struct Surroundings {
    pub(crate) node: NodeId,
    pub(crate) database: Arc<Database>,
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) tuning: RaftTuning,
}

impl NamespaceGroup {
    /// Opens a group, or makes its place in the database.
    ///
    /// # Errors
    /// Its part of the database is damaged, or cannot be made.
    pub(super) async fn open(id: NamespaceGroupId, of: &Surroundings) -> Result<Self, MetaError> {
        let config = of.tuning.to_config(NAMESPACE_MESSAGE_ENTRIES_MAX);
        let config = config.map_err(|detail| MetaError::Failed { detail })?;
        let database = Arc::clone(&of.database);
        let opened = tokio::task::spawn_blocking(move || {
            let store = Arc::new(NamespaceStore(storage::open_namespace_group(database, id)?));
            let machine = Machine::new(Arc::clone(&store))?;
            Ok::<_, DbError>((store, machine))
        });
        let opened = opened.await.map_err(|error| failed(&error))?;
        let (store, machine) = opened.map_err(|error| failed(&error))?;
        let connections = Connections {
            group: id,
            transport: Arc::clone(&of.transport),
        };
        let log = LogStore::new(Arc::clone(&store));
        let raft = Raft::new(of.node, config, connections, log, machine).await;
        let raft = raft.map_err(|error| fatal(&error))?;
        let (proposals, proposed) = mpsc::channel(WAITING_MAX);
        let (readings, asked) = mpsc::channel(WAITING_MAX);
        let database = Arc::clone(&of.database);
        let tasks = [
            tokio::spawn(proposals::batch(raft.clone(), database, proposed)),
            tokio::spawn(reads::answer(raft.clone(), Arc::clone(&store), asked)),
        ];
        Ok(Self {
            raft,
            store,
            proposals,
            readings,
            tasks,
        })
    }

    /// Makes the group, if this node knows of no members of it. All founders may do so: they write the same
    /// first entry, and then elect a leader.
    pub(super) async fn found(
        &self,
        founders: BTreeMap<NodeId, BasicNode>,
    ) -> Result<(), MetaError> {
        match self.raft.initialize(founders).await {
            Ok(()) | Err(RaftError::APIError(InitializeError::NotAllowed(_))) => Ok(()),
            Err(error) => Err(failed(&error)),
        }
    }

    /// Whether this node leads the group, as far as it knows.
    pub(super) fn leads(&self) -> bool {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow();
        metrics.current_leader == Some(metrics.id)
    }

    /// Has operations done, in their order, if this node leads. The replies come once they are committed.
    pub(super) async fn apply(
        &self,
        operations: Vec<(FilesystemId, Request)>,
    ) -> Result<Vec<Reply>, ProposeError> {
        let (answer, answered) = oneshot::channel();
        let proposal = Proposal::new(operations, answer)?;
        let sent = self.proposals.send(proposal).await;
        sent.map_err(|_| ProposeError::Stopped)?;
        answered.await.unwrap_or(Err(ProposeError::Stopped))
    }

    /// Answers questions by all that was acknowledged before this call, if this node leads.
    pub(super) async fn read(
        &self,
        queries: Vec<(FilesystemId, Query)>,
    ) -> Result<Vec<Result<Answer, namespace::Error>>, ProposeError> {
        let (answer, answered) = oneshot::channel();
        let sent = self.readings.send(Reading { queries, answer }).await;
        sent.map_err(|_| ProposeError::Stopped)?;
        answered.await.unwrap_or(Err(ProposeError::Stopped))
    }

    /// Does what another node asks for. Whether a node may send Raft messages at all, the caller knows; a
    /// `member` may also do what is the leader's own.
    pub(super) async fn handle(
        &self,
        (from, is_member): (NodeId, bool),
        request: GroupRequest,
    ) -> GroupReply {
        match request {
            GroupRequest::Raft(message) => GroupReply::Raft(self.take(message).await),
            GroupRequest::Apply(operations) if is_member => {
                GroupReply::Apply(self.apply(operations).await)
            }
            GroupRequest::Apply(operations) => {
                GroupReply::Apply(self.apply_for(from, operations).await)
            }
            GroupRequest::Read(queries) => GroupReply::Read(self.read(queries).await),
        }
    }

    async fn take(&self, message: RaftMessage) -> RaftReply {
        match message {
            RaftMessage::AppendEntries(rpc) => {
                RaftReply::AppendEntries(self.raft.append_entries(rpc).await)
            }
            RaftMessage::Vote(rpc) => RaftReply::Vote(self.raft.vote(rpc).await),
            RaftMessage::InstallSnapshot(rpc) => {
                RaftReply::InstallSnapshot(self.raft.install_snapshot(rpc).await)
            }
        }
    }

    /// The same for a host, which opens sessions of its own and acts in them alone.
    async fn apply_for(
        &self,
        from: NodeId,
        operations: Vec<(FilesystemId, Request)>,
    ) -> Result<Vec<Reply>, ProposeError> {
        if let Sender::Unknown = self.check_sender(from, &operations)? {
            // Of a new leader, the records may not be as new as the session.
            self.read(Vec::new()).await?;
            if let Sender::Unknown = self.check_sender(from, &operations)? {
                return Ok(vec![Err(namespace::Error::Stale); operations.len()]);
            }
        }
        self.apply(operations).await
    }

    fn check_sender(
        &self,
        from: NodeId,
        operations: &[(FilesystemId, Request)],
    ) -> Result<Sender, ProposeError> {
        for (filesystem, request) in operations {
            let owner = match (&request.operation, request.session) {
                (Operation::OpenSession { node, .. }, SessionId::NONE) => Some(*node),
                (_, SessionId::NONE) => None,
                (_, session) => match self.owner(*filesystem, session)? {
                    Some(owner) => Some(owner),
                    None => return Ok(Sender::Unknown),
                },
            };
            if owner != Some(from.0) {
                let detail = format!("node {from} acts for a session that is not its own");
                return Err(ProposeError::Failed { detail });
            }
        }
        Ok(Sender::Owns)
    }

    fn owner(
        &self,
        filesystem: FilesystemId,
        session: SessionId,
    ) -> Result<Option<u64>, ProposeError> {
        let found = self.store.0.read(|view| {
            let sessions = Namespace::new(view, filesystem).sessions(session, 1)?;
            let found = sessions.into_iter().find(|(id, _)| *id == session);
            Ok::<_, DbError>(found.map(|(_, session)| session.node))
        });
        found.map_err(|error| ProposeError::Failed {
            detail: error.to_string(),
        })
    }

    /// Ends it. The database is let go of when the last reference to this is gone.
    pub(super) async fn shutdown(&self) {
        if let Err(error) = self.raft.shutdown().await {
            tracing::warn!(%error, "a namespace group ended abnormally");
        }
        let store = Arc::clone(&self.store);
        let flushed = tokio::task::spawn_blocking(move || store.0.flush_wal()).await;
        if let Ok(Err(error)) = flushed {
            tracing::warn!(%error, "cannot flush the records of a namespace group");
        }
    }
}

/// What a host is to the sessions that it acts in.
enum Sender {
    Owns,
    /// One of them is not there.
    Unknown,
}

/// How long the leader of a namespace group has for an entry or a majority's word.
pub(super) const COMMIT_WAIT_MAX: Duration = Duration::from_secs(20);
