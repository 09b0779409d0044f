//! A metadata node: opened, made part of a cluster, stopped.

mod admission;
mod core;
mod end;
mod failure_detector;
mod hearing;
mod identify;
mod leader_request;
mod leader_search;
pub(crate) mod members;
mod offers;
pub(crate) mod raft_calls;
mod reach;
pub(crate) mod redirects;
mod removal;
pub(crate) mod report;
mod space;
mod stored;
mod succession;
#[cfg(test)]
mod testing;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use openraft::{BasicNode, ChangeMembers};
use raft_host::{RaftHandle, RaftTuning, StartError};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use uuid::Uuid;

use crate::client::Meta;
use crate::command::{Command, NodeSpec, PoolSpec};
use crate::error::{MetaError, OpenError};
use crate::first;
use crate::groups::{self, GroupCall, GroupReply, GroupRequest};
use crate::ids::{Incarnation, NodeId, UnixMillis};
use crate::model::DEFAULT_POOL;
use crate::net::{
    AddressSource, BoxFuture, Gate, NoPeers, PeerReply, PeerRequest, ProposeError, RaftPeers,
    Transport,
};
use crate::storage::Db;

pub(crate) use core::{Core, failed, fatal};
pub(crate) use end::death_of;
pub(crate) use leader_request::Wait;
pub use members::voters_wanted;

/// A shutdown waits this long for the last task to let go of the database, and fails then.
const CLOSE_WAIT_MAX: Duration = Duration::from_secs(10);

/// Most entries in one message of the cluster map's group.
const MESSAGE_ENTRIES_MAX: u64 = 256;

/// How a node comes into its cluster at its first start. Later starts find it in the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// It makes a cluster, with itself as the only node and one replica of everything.
    NewCluster,
    /// It makes a cluster that others are to join.
    Found {
        /// The cluster, named already in the certificates of its nodes.
        cluster: Uuid,
        /// Copies of every chunk in the default pool.
        replicas: u8,
        /// Copies that must be in sync for a write there.
        min_in_sync: u8,
    },
    /// It waits until a node of this cluster adds it.
    Join {
        /// The cluster to join.
        cluster: Uuid,
    },
}

/// What a node must know to open its metadata.
#[derive(Clone)]
pub struct MetaConfig {
    /// The node; its name and roles are recorded when it makes a cluster.
    pub node: NodeSpec,
    /// Where peers reach it; empty without peers.
    pub address: String,
    /// The history that its metadata are of, if they are not of the first; see [`crate::recovery`]. Of a node
    /// that is alone nobody asks.
    pub history: Option<Uuid>,
    /// What the first start does.
    pub start: Start,
    /// Timing of Raft.
    pub tuning: RaftTuning,
    /// The way to the peers.
    pub transport: Arc<dyn Transport>,
    /// Runtime of the namespace groups; if absent, the caller's runtime, which runs everything else. With a
    /// separate runtime, many file operations do not delay heartbeats, leases and failovers.
    pub group_runtime: Option<Handle>,
}

impl MetaConfig {
    /// The only node of a cluster of its own, with all roles and no network.
    #[must_use]
    pub fn embedded(name: impl Into<String>) -> Self {
        Self {
            node: NodeSpec {
                incarnation: crate::ids::draw_incarnation(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
                ..NodeSpec::new(NodeId(1), name)
            },
            address: String::new(),
            history: None,
            start: Start::NewCluster,
            tuning: RaftTuning::default(),
            transport: Arc::new(NoPeers),
            group_runtime: None,
        }
    }
}

/// Answers what peers ask.
#[derive(Clone)]
pub struct Peer {
    core: Arc<Core>,
}

impl Peer {
    /// Does what a peer asks for.
    pub fn handle(&self, request: PeerRequest) -> BoxFuture<'_, PeerReply> {
        Box::pin(self.core.handle(request))
    }

    /// The same for a peer that the transport knows for sure: nobody sends another's heartbeat, and commands
    /// are checked against the sender's roles.
    pub async fn handle_from(&self, from: NodeId, request: PeerRequest) -> PeerReply {
        self.core.hearing.note();
        match request {
            PeerRequest::Propose(command) => match self.refuses(from, &command).await {
                Some(refused) => refused,
                None => self.handle(PeerRequest::Propose(command)).await,
            },
            PeerRequest::RenewLease {
                volume,
                node,
                generation,
            } => {
                // Whoever may give it back may keep it.
                let may = Command::ReleaseLease {
                    volume,
                    node,
                    generation,
                };
                match self.refuses(from, &may).await {
                    Some(refused) => refused,
                    None => self.handle(request).await,
                }
            }
            PeerRequest::Heartbeat { node, .. } if node != from => {
                let detail = format!("node {from} sent a heartbeat of node {node}");
                PeerReply::Heartbeat(Err(ProposeError::Failed { detail }))
            }
            PeerRequest::Tell { node, .. } | PeerRequest::TellStored { node, .. }
                if node != from =>
            {
                let detail = format!("node {from} sent a report of node {node}");
                PeerReply::Tell(Err(ProposeError::Failed { detail }))
            }
            request => self.handle(request).await,
        }
    }

    /// Returns the runtime for requests about namespace groups.
    pub(crate) fn group_runtime(&self) -> &Handle {
        &self.core.group_runtime
    }

    /// Does what a peer asks for about a namespace group.
    pub async fn handle_group_from(&self, from: NodeId, call: GroupCall) -> GroupReply {
        self.core.hearing.note();
        self.core.groups.handle(&self.core, from, call).await
    }

    /// Why a request about a namespace group is not even answered: its connection ends.
    pub(crate) fn check_group_call(&self, from: NodeId, call: &GroupCall) -> Result<(), String> {
        match call.request {
            GroupRequest::Raft(_) => self.core.check_raft(from),
            GroupRequest::Apply(_)
            | GroupRequest::Read(_)
            | GroupRequest::ReadAs(..)
            | GroupRequest::Link(..) => Ok(()),
        }
    }

    /// The answer to a command that a peer may not have done.
    async fn refuses(&self, from: NodeId, command: &Command) -> Option<PeerReply> {
        match self.core.authorize(from, command).await {
            Ok(Ok(())) => None,
            Ok(Err(refusal)) => Some(PeerReply::Propose(Ok(Err(refusal)))),
            Err(error) => Some(PeerReply::Propose(Err(error))),
        }
    }

    /// Why a request of a peer is not even answered: its connection ends.
    pub(crate) fn check_request(&self, from: NodeId, request: &PeerRequest) -> Result<(), String> {
        match request {
            PeerRequest::Raft(_) => self.core.check_raft(from),
            _ => Ok(()),
        }
    }

    /// Whether a node was removed from the cluster and is not to be heard any more, as far as is known here.
    pub(crate) fn is_removed(&self, node: NodeId) -> bool {
        self.core.is_removed(node)
    }

    /// Returns when that is so.
    pub(crate) async fn until_removed(&self, node: NodeId) {
        self.core.until_removed(node).await;
    }

    /// Stores the address that a node with a verified certificate announces.
    pub(crate) fn learn_address(&self, node: NodeId, address: &str) {
        self.core
            .transport
            .learn(node, address, AddressSource::Itself);
    }

    /// Whether a newer start of a node has registered than this one, as far as is known here.
    pub(crate) fn is_former_start(&self, node: NodeId, incarnation: Incarnation) -> bool {
        self.core.is_former_start(node, incarnation)
    }

    /// Returns when that is so.
    pub(crate) async fn until_replaced(&self, node: NodeId, incarnation: Incarnation) {
        self.core.until_replaced(node, incarnation).await;
    }
}

/// A running metadata node.
pub struct MetaNode {
    pub(crate) core: Arc<Core>,
    cluster: Uuid,
    dir: PathBuf,
    closed: oneshot::Receiver<()>,
    tasks: Tasks,
}

/// What runs beside the node; ended when it is dropped.
#[derive(Default)]
struct Tasks(Vec<JoinHandle<()>>);

impl Tasks {
    /// Returns when nothing of them runs any more.
    async fn end(mut self) {
        for task in std::mem::take(&mut self.0) {
            task.abort();
            // It was aborted, or had ended before.
            let _ = task.await;
        }
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        self.0.iter().for_each(JoinHandle::abort);
    }
}

impl MetaNode {
    /// Whether there are metadata in `dir` already.
    #[must_use]
    pub fn exists(dir: &Path) -> bool {
        Db::exists(dir)
    }

    /// Opens the metadata in `dir`, makes them at the first start, and begins to serve.
    ///
    /// The only node of a cluster is ready when this returns. One of several may still lack a leader: its
    /// clients wait.
    ///
    /// # Errors
    /// In use by another process, damaged, not accessible, or of another node, cluster or version.
    pub fn open(
        dir: impl AsRef<Path>,
        config: MetaConfig,
    ) -> BoxFuture<'static, Result<Self, OpenError>> {
        Box::pin(Self::open_in(dir.as_ref().to_owned(), config))
    }

    async fn open_in(dir: PathBuf, config: MetaConfig) -> Result<Self, OpenError> {
        let raft_config = config
            .tuning
            .to_config(MESSAGE_ENTRIES_MAX)
            .map_err(|detail| OpenError::BadConfig { detail })?;
        let open_dir = dir.clone();
        let opened = tokio::task::spawn_blocking(move || Db::open(&open_dir)).await;
        let failed = |detail: String| OpenError::Start {
            dir: dir.clone(),
            source: MetaError::Failed { detail },
        };
        let (db, closed) = opened.map_err(|error| failed(error.to_string()))??;
        let cluster = identify::identify(&db, &dir, &config)?;
        if let Start::Found { .. } = config.start {
            let (node, address) = (config.node.id, &config.address);
            first::give_address((&db, &dir), node, address)?;
        }
        let db = Arc::new(db);
        let gate = Gate::default();
        let peers = Arc::new(RaftPeers {
            transport: Arc::clone(&config.transport),
            gate: gate.clone(),
            map: db.map(),
        });
        let machine = Arc::clone(&db);
        let raft = RaftHandle::start(config.node.id, raft_config, peers, machine).await;
        let raft = raft.map_err(|error| match error {
            StartError::Storage(error) => OpenError::Corrupt {
                dir: dir.clone(),
                detail: error.to_string(),
            },
            StartError::Raft(error) => failed(error.to_string()),
        })?;
        let core = Arc::new(Core::new(
            &config.node,
            raft,
            db,
            (Arc::clone(&config.transport), gate),
            &config.tuning,
            config.group_runtime.clone().unwrap_or_else(Handle::current),
        ));
        let mut node = Self {
            core,
            cluster,
            dir: dir.clone(),
            closed,
            tasks: Tasks::default(),
        };
        let (spec, tuning) = (config.node.clone(), config.tuning.clone());
        let started = tokio::select! {
            started = node.start(config) => started,
            () = node.core.full() => Err(MetaError::NoSpace {
                dir: dir.clone(),
                begun: false,
            }),
        };
        if started.is_ok() {
            node.begin_tasks(spec, tuning);
        }
        if let Err(source) = started {
            if let Err(error) = node.shutdown().await {
                tracing::warn!(%error, "cannot close the metadata after a failed start");
            }
            return Err(OpenError::Start { dir, source });
        }
        Ok(node)
    }

    /// Begins what goes on as long as the node lives.
    fn begin_tasks(&mut self, spec: NodeSpec, tuning: RaftTuning) {
        let core = || Arc::clone(&self.core);
        let tasks = [
            tokio::spawn(failure_detector::watch(core())),
            tokio::spawn(failure_detector::beat(core(), spec)),
            tokio::spawn(members::keep(core())),
            tokio::spawn(leader_search::run(core())),
            tokio::spawn(removal::watch(core())),
            tokio::spawn(removal::forget(core())),
            tokio::spawn(space::keep_ballast(core())),
            tokio::spawn(offers::expire(core())),
        ];
        self.tasks.0.extend(tasks);
        if let Some(context) = self.core.group_context(tuning) {
            let groups = groups::open_groups(core(), context);
            self.tasks.0.push(self.core.group_runtime.spawn(groups));
        }
    }

    /// Makes the cluster, if that is still to be done, and waits until a cluster of one is ready.
    async fn start(&self, config: MetaConfig) -> Result<(), MetaError> {
        let initialized = self
            .core
            .raft
            .is_initialized()
            .await
            .map_err(|error| fatal(&error))?;
        if !initialized && !matches!(config.start, Start::Join { .. }) {
            let members = [(config.node.id, BasicNode::new(&config.address))]
                .into_iter()
                .collect::<std::collections::BTreeMap<_, _>>();
            self.core
                .raft
                .initialize(members)
                .await
                .map_err(|error| failed(&error))?;
        }
        // Asked of the machine itself: what it shows to the outside lags behind.
        let voters = |state: &openraft::RaftState<NodeId, BasicNode, _>| {
            state
                .membership_state
                .effective()
                .membership()
                .voter_ids()
                .collect::<BTreeSet<_>>()
        };
        let voters = self
            .core
            .raft
            .with_state(voters)
            .await
            .map_err(|error| fatal(&error))?;
        if voters != BTreeSet::from([config.node.id]) {
            return Ok(());
        }
        let at = UnixMillis::now();
        let (cluster, node) = (self.cluster, config.node);
        let pool = match config.start {
            Start::Found {
                replicas,
                min_in_sync,
                ..
            } => Some(Box::new(PoolSpec {
                min_in_sync: Some(min_in_sync),
                ..PoolSpec::new(DEFAULT_POOL, replicas)
            })),
            Start::NewCluster | Start::Join { .. } => None,
        };
        // Done again at every start: a crash may have come between making the log and this, and the name of
        // the node may have changed.
        self.meta()
            .propose(Command::Bootstrap {
                cluster,
                node: node.clone(),
                pool,
                at,
            })
            .await?;
        self.meta().register_node(node).await?;
        Ok(())
    }

    /// The client side.
    #[must_use]
    pub fn meta(&self) -> Meta {
        Meta::new(Arc::clone(&self.core))
    }

    /// The side that serves peers.
    #[must_use]
    pub fn peer(&self) -> Peer {
        Peer {
            core: Arc::clone(&self.core),
        }
    }

    /// Identity of the cluster.
    #[must_use]
    pub fn cluster_uuid(&self) -> Uuid {
        self.cluster
    }

    /// Identity of this node.
    #[must_use]
    pub fn id(&self) -> NodeId {
        self.core.id
    }

    /// Who leads, as far as this node knows.
    pub fn leader(&self) -> BoxFuture<'_, Option<NodeId>> {
        Box::pin(async { self.core.raft.metrics().borrow().current_leader })
    }

    /// The nodes that vote, as far as this node knows.
    #[must_use]
    pub fn voters(&self) -> BTreeSet<NodeId> {
        let metrics = self.core.raft.metrics();
        let metrics = metrics.borrow();
        metrics.membership_config.membership().voter_ids().collect()
    }

    /// Index of the last log entry that this node has applied; 0 before the first.
    #[must_use]
    pub fn applied_index(&self) -> u64 {
        self.core
            .raft
            .metrics()
            .borrow()
            .last_applied
            .map_or(0, |last| last.index)
    }

    /// Index of the last log entry that is in this node's newest snapshot, if it has one.
    #[must_use]
    pub fn snapshot_index(&self) -> Option<u64> {
        self.core
            .raft
            .metrics()
            .borrow()
            .snapshot
            .map(|last| last.index)
    }

    /// Begins to send the metadata to a node, which does not vote yet. Only on the leader; returns when the
    /// node has caught up.
    ///
    /// # Errors
    /// This node does not lead.
    pub fn add_learner(&self, id: NodeId, address: &str) -> BoxFuture<'_, Result<(), MetaError>> {
        let node = BasicNode::new(address);
        Box::pin(async move {
            let added = self.core.raft.add_learner(id, node).await;
            added.map(|_| ()).map_err(|error| failed(&error))
        })
    }

    /// Makes these nodes the voters; each must be a learner or voter already. Only on the leader.
    ///
    /// # Errors
    /// This node does not lead, or a node was not added before.
    pub fn set_voters(&self, voters: BTreeSet<NodeId>) -> BoxFuture<'_, Result<(), MetaError>> {
        Box::pin(async move {
            let change = ChangeMembers::ReplaceAllVoters(voters);
            let changed = self.core.raft.change_membership(change, false).await;
            changed.map(|_| ()).map_err(|error| failed(&error))
        })
    }

    /// Begins to make a snapshot of what is applied, so that the log can be cut.
    ///
    /// # Errors
    /// The service has stopped.
    pub fn begin_snapshot(&self) -> BoxFuture<'_, Result<(), MetaError>> {
        Box::pin(async move {
            let begun = self.core.raft.trigger_snapshot().await;
            begun.map_err(|error| fatal(&error))
        })
    }

    /// Stops serving, and closes the database so that it can be opened again at once. Clients get
    /// [`MetaError::Stopped`].
    ///
    /// # Errors
    /// The database could not be flushed or closed; nothing acknowledged is lost by that.
    pub fn shutdown(self) -> BoxFuture<'static, Result<(), MetaError>> {
        Box::pin(self.close())
    }

    async fn close(mut self) -> Result<(), MetaError> {
        self.core.give_up_waiting();
        std::mem::take(&mut self.tasks).end().await;
        self.core.groups.shutdown().await;
        let stopped = self.core.raft.shutdown().await;
        if let Err(error) = stopped {
            tracing::warn!(%error, "the metadata service ended abnormally");
        }
        let Self {
            core, closed, dir, ..
        } = self;
        let flushed = match core.take_db() {
            Some(db) => {
                let flush = tokio::task::spawn_blocking(move || db.group.flush_wal());
                flush
                    .await
                    .map_err(|error| error.to_string())
                    .and_then(|done| done.map_err(|error| error.to_string()))
            }
            None => Ok(()),
        };
        drop(core);
        let gone = tokio::time::timeout(CLOSE_WAIT_MAX, closed).await;
        flushed.map_err(|detail| MetaError::Failed { detail })?;
        gone.map(|_| ()).map_err(|_| MetaError::Failed {
            detail: format!(
                "{} is still in use {} s after the end",
                dir.display(),
                CLOSE_WAIT_MAX.as_secs()
            ),
        })
    }
}
