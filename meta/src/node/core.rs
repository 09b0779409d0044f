//! What client and server side of a node share: what is asked of the leader (`ask.rs`: how), and doing what
//! only the leader can.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use openraft::ServerState;
use openraft::error::Fatal;
use openraft::metrics::WaitError;
use raft_host::{LogId, RaftHandle, RaftMessage, RaftTuning};
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};

use crate::command::{Command, NodeSpec, Outcome, Reply, decode_reply, encode_command};
use crate::error::MetaError;
use crate::groups::{GroupContext, Groups};
use crate::ids::{Generation, Incarnation, NodeId, UnixMillis, VolumeId};
use crate::layers::Layers;
use crate::leases::LeaseWatch;
use crate::level::Level;
use crate::map::ClusterMap;
use crate::model::{AttachmentTarget, Lease};
use crate::net::{Gate, HeartbeatReply, PeerReply, PeerRequest, ProposeError, Transport};
use crate::node::failure_detector::FailureDetector;
use crate::node::hearing::Hearing;
use crate::node::leader_request::{LeaderRequest, Wait, unfit};
use crate::node::raft_calls::{COMMIT_WAIT_MAX, not_written, read_index};
use crate::node::stored::StoredLeading;
use crate::node::succession::LeaderLiveness;
use crate::reach::{REPAIR, Reach};
use crate::recovery::Authority;
use crate::refusal::{MapRefusal, Refusal};
use crate::state::tables::{ATTACHMENTS, LEASES, VOLUMES};
use crate::state::{ReadError, renewable_lease};
use crate::storage::{Db, DbError, View};

/// The heart of a node.
pub(crate) struct Core {
    pub(crate) id: NodeId,
    pub(super) name: String,
    /// This start of the node's process.
    pub(crate) incarnation: Incarnation,
    pub(crate) raft: RaftHandle,
    /// Absent after shutdown.
    db: RwLock<Option<Arc<Db>>>,
    pub(crate) transport: Arc<dyn Transport>,
    leases: Mutex<LeaseWatch>,
    pub(super) failure_detector: FailureDetector,
    signs: Mutex<LeaderLiveness>,
    pub(super) hearing: Hearing,
    pub(super) stored: Mutex<StoredLeading>,
    /// The namespace groups that run here.
    pub(crate) groups: Groups,
    /// Runtime of the namespace groups.
    pub(crate) group_runtime: Handle,
    /// Wakes the search for a leader that does not find this node (`leader_search.rs`).
    pub(super) leader_wanted: Notify,
    /// Why the cluster does not want this node any more, as others said.
    pub(super) unwanted: watch::Sender<Option<MapRefusal>>,
    /// The cluster map as this node has applied it.
    pub(crate) map: watch::Receiver<Arc<ClusterMap>>,
    /// The layers of all volumes likewise.
    pub(crate) layers: watch::Receiver<Layers>,
    /// Counts the changes of volumes, leases and attachments that it has applied.
    pub(crate) openings: watch::Receiver<u64>,
}

impl Core {
    pub(crate) fn new(
        node: &NodeSpec,
        raft: RaftHandle,
        db: Arc<Db>,
        (transport, gate): (Arc<dyn Transport>, Gate),
        tuning: &RaftTuning,
        group_runtime: Handle,
    ) -> Self {
        Self {
            id: node.id,
            name: node.name.clone(),
            incarnation: node.incarnation,
            raft,
            map: db.map(),
            layers: db.layers(),
            openings: db.openings(),
            db: RwLock::new(Some(db)),
            transport,
            leases: Mutex::default(),
            failure_detector: FailureDetector::default(),
            signs: Mutex::new(LeaderLiveness::new(tuning.vote_hold(), Instant::now())),
            hearing: Hearing::new(gate),
            stored: Mutex::default(),
            groups: Groups::default(),
            group_runtime,
            leader_wanted: Notify::new(),
            unwanted: watch::Sender::default(),
        }
    }

    pub(super) fn signs(&self) -> MutexGuard<'_, LeaderLiveness> {
        // Whole after every statement.
        self.signs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn take_db(&self) -> Option<Arc<Db>> {
        self.db
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    pub(super) fn db(&self) -> Option<Arc<Db>> {
        let db = self.db.read().unwrap_or_else(PoisonError::into_inner);
        db.clone()
    }

    /// What was heard of leases in this term.
    fn leases(&self) -> MutexGuard<'_, LeaseWatch> {
        let term = self.raft.metrics().borrow().current_term;
        let mut leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        leases.enter(term);
        leases
    }

    /// Returns when a write of this node has begun to wait for space.
    pub(crate) async fn full(&self) {
        match self.db() {
            Some(db) => db.database().full().await,
            None => std::future::pending().await,
        }
    }

    /// From here on no write of this node waits for space.
    pub(crate) fn give_up_waiting(&self) {
        if let Some(db) = self.db() {
            db.database().give_up_waiting();
        }
    }

    fn no_space(&self, begun: bool) -> ProposeError {
        match self.db() {
            Some(db) => ProposeError::NoSpace {
                dir: db.database().dir().to_owned(),
                begun,
            },
            None => ProposeError::Stopped,
        }
    }

    /// What the namespace groups of this node have in common; nothing once it has stopped.
    pub(super) fn group_context(&self, tuning: RaftTuning) -> Option<GroupContext> {
        Some(GroupContext {
            node: self.id,
            map: self.map.clone(),
            database: Arc::clone(self.db()?.database()),
            transport: Arc::clone(&self.transport),
            gate: self.hearing.gate().clone(),
            tuning,
        })
    }

    /// Whether the node has stopped.
    pub(crate) fn has_stopped(&self) -> bool {
        self.db().is_none()
    }

    /// Why this node's service is impaired, with a hint.
    pub(crate) fn problem(&self) -> Option<String> {
        let db = self.db()?;
        if let Some(detail) = self.death() {
            return Some(MetaError::Failed { detail }.to_string());
        }
        if self.hearing.has_withdrawn() {
            return Some(format!(
                "nothing that other nodes send arrives at this node, though it reaches them, so they take it \
                 for dead: {REPAIR}"
            ));
        }
        if let Some(problem) = self.groups.problem(&self.map.borrow()) {
            return Some(problem);
        }
        let dir = db.database().dir().display();
        if db.database().is_full() {
            return Some(format!(
                "the metadata service waits: the file system under {dir} is full, so volumes and attachments \
                 cannot be changed; free some space"
            ));
        }
        db.database().is_nearly_full().then(|| {
            format!(
                "the file system under {dir} is nearly full, so no volume or attachment can be created; \
                 free some space"
            )
        })
    }

    /// Runs a function on the records that this node has applied.
    pub(crate) fn view<T>(
        &self,
        read: impl FnOnce(&View<'_>) -> Result<T, ReadError>,
    ) -> Result<T, MetaError> {
        let db = self.db().ok_or(MetaError::Stopped)?;
        db.read(|view| read(view).map_err(DbError::from))
            .map_err(|error| failed(&error))
    }

    /// All records that this node has applied, as a backup.
    pub(crate) async fn backup(&self, authority: Option<Authority>) -> Result<Vec<u8>, MetaError> {
        let db = self.db().ok_or(MetaError::Stopped)?;
        let made = tokio::task::spawn_blocking(move || db.backup(authority)).await;
        let made = made.map_err(|error| failed(&error))?;
        made.map_err(|error| failed(&error))
    }

    /// Has a command committed and applied by the leader, wherever that is.
    pub(crate) async fn propose(&self, command: Command, wait: Wait) -> Result<Reply, MetaError> {
        match self
            .ask_leader(&LeaderRequest::Propose(Box::new(command)), wait)
            .await?
        {
            PeerReply::Propose(Ok(reply)) => Ok(self.naming(reply)),
            other => Err(unfit(&other)),
        }
    }

    /// Puts the name of this node into a refusal that has its number.
    fn naming(&self, reply: Reply) -> Reply {
        reply.map_err(|refusal| match refusal {
            Refusal::Map(refusal) => refusal.naming(self.id, &self.name).into(),
            other => other,
        })
    }

    /// Tells the leader that the holder of a lease still wants it.
    pub(crate) async fn renew_lease(
        &self,
        volume: VolumeId,
        node: NodeId,
        generation: Generation,
    ) -> Result<Reply, MetaError> {
        let ask = LeaderRequest::RenewLease {
            volume,
            node,
            generation,
        };
        match self.ask_leader(&ask, Wait::PATIENT).await? {
            PeerReply::Propose(Ok(reply)) => Ok(self.naming(reply)),
            other => Err(unfit(&other)),
        }
    }

    /// Tells the leader that a node lives.
    pub(super) async fn beat(
        &self,
        node: NodeId,
        incarnation: Incarnation,
        level: Level,
    ) -> Result<HeartbeatReply, MetaError> {
        let ask = LeaderRequest::Heartbeat {
            node,
            incarnation,
            level,
        };
        match self.ask_leader(&ask, Wait::PATIENT).await? {
            PeerReply::Heartbeat(Ok(beat)) => Ok(beat),
            other => Err(unfit(&other)),
        }
    }

    /// Returns once this node has applied everything that was acknowledged before this call.
    pub(crate) async fn catch_up(&self, wait: Wait) -> Result<(), MetaError> {
        let index = self.read_index(wait).await?;
        self.wait_applied(index, wait.commit).await
    }

    /// Returns once there is a leader that a majority follows. A command that goes to one that none follows
    /// has an unknown outcome.
    pub(crate) async fn confirm_leader(&self, wait: Wait) -> Result<(), MetaError> {
        if self.db().is_some_and(|db| db.database().is_full()) {
            // It confirms nothing while it waits for space, and says so to the command itself.
            return Ok(());
        }
        self.read_index(wait).await.map(drop)
    }

    async fn read_index(&self, wait: Wait) -> Result<Option<LogId>, MetaError> {
        match self.ask_leader(&LeaderRequest::ReadIndex, wait).await? {
            PeerReply::ReadIndex(Ok(index)) => Ok(index),
            other => Err(unfit(&other)),
        }
    }

    pub(super) async fn wait_applied(
        &self,
        index: Option<LogId>,
        within: Duration,
    ) -> Result<(), MetaError> {
        let Some(index) = index else { return Ok(()) };
        match self.raft.wait_applied(index.index, within).await {
            Ok(()) => Ok(()),
            Err(WaitError::ShuttingDown) => Err(MetaError::Stopped),
            Err(WaitError::Timeout(..)) => Err(MetaError::NoLeader {
                waited: within,
                is_command: false,
                reach: Reach::default(),
            }),
        }
    }

    /// Does what a peer asks for.
    pub(crate) async fn handle(&self, request: PeerRequest) -> PeerReply {
        match request {
            PeerRequest::Raft(message) => {
                if !matches!(message, RaftMessage::Vote(_)) {
                    self.signs().heard(Instant::now());
                }
                PeerReply::Raft(self.raft.handle(message).await)
            }
            PeerRequest::Propose(command) => PeerReply::Propose(self.propose_here(command).await),
            PeerRequest::RenewLease {
                volume,
                node,
                generation,
            } => PeerReply::Propose(self.renew_here(volume, node, generation).await),
            PeerRequest::Heartbeat {
                node,
                incarnation,
                level,
            } => PeerReply::Heartbeat(self.beat_here(node, incarnation, level)),
            PeerRequest::ReadIndex => PeerReply::ReadIndex(self.read_index_here().await),
            PeerRequest::Tell { node, word } => PeerReply::Tell(self.take_word_here(node, word)),
            PeerRequest::Report => PeerReply::Report(self.report_here()),
            PeerRequest::TellStored { node, told } => {
                PeerReply::Tell(self.take_stored_here(node, told))
            }
            PeerRequest::Stored => PeerReply::Stored(self.stored_here()),
            PeerRequest::WasRemoved { node } => PeerReply::WasRemoved(self.was_removed_here(node)),
            PeerRequest::FindLeader => PeerReply::Leader(self.leader_here()),
        }
    }

    pub(super) async fn propose_here(&self, command: Command) -> Result<Reply, ProposeError> {
        self.check_hearing()?;
        if self.db().is_some_and(|db| {
            db.database().is_full()
                || command.makes_something_new() && db.database().is_nearly_full()
        }) {
            return Err(self.no_space(false));
        }
        let command = command.without_claims(UnixMillis::now());
        let (command, run_out) = self.judge_lease(command)?;
        let command = self.find_witness(command).await;
        let released = match command {
            Command::ReleaseLease { volume, .. } | Command::VolumeDataDropped { volume } => {
                Some(volume)
            }
            _ => None,
        };
        let write = self.raft.write(encode_command(&command));
        let write = tokio::time::timeout(COMMIT_WAIT_MAX, write);
        let written = tokio::select! {
            written = write => written.map_err(|_| ProposeError::Unknown)?,
            () = self.full() => return Err(self.no_space(true)),
        };
        let reply = decode_reply(&written.map_err(not_written)?);
        let reply = reply.map_err(|detail| ProposeError::Failed { detail })?;
        let mut leases = self.leases();
        match (&reply, released) {
            (Ok(Outcome::Lease(lease)), None) => {
                leases.heard(lease.volume, lease.generation, Instant::now())
            }
            (Ok(_), Some(volume)) => leases.forget(volume),
            (Err(_), _) => {
                if let Some(lease) = run_out {
                    leases.stays(lease.volume, lease.generation);
                }
            }
            (Ok(_), None) => {}
        }
        Ok(reply)
    }

    /// Adds to a request for a lease what only the leader's clock knows: whether the present holder's has run
    /// out; that lease then.
    fn judge_lease(&self, mut command: Command) -> Result<(Command, Option<Lease>), ProposeError> {
        if self.raft.metrics().borrow().state != ServerState::Leader {
            // The leader judges it.
            return Ok((command, None));
        }
        let held = match &command {
            Command::GrantLease { volume, node, .. } => self
                .view(|view| match VOLUMES.get(view, volume)? {
                    Some(volume) => LEASES.get(view, &volume.id),
                    None => Ok(None),
                })
                .map(|lease| (lease, *node)),
            Command::TakeOverAttachment { attachment, .. } => self.view(|view| {
                let Some(incoming) = ATTACHMENTS.get(view, attachment)? else {
                    return Ok((None, self.id));
                };
                let AttachmentTarget::Volume { id, .. } = incoming.target;
                Ok((LEASES.get(view, &id)?, incoming.node))
            }),
            _ => return Ok((command, None)),
        };
        let (held, node) = held.map_err(|error| ProposeError::Failed {
            detail: error.to_string(),
        })?;
        let found = held
            .filter(|lease| lease.holder.is_some_and(|holder| holder != node))
            .filter(|lease| {
                let mut leases = self.leases();
                leases.has_run_out(lease.volume, lease.generation, Instant::now())
            });
        if let Command::GrantLease { expired, .. } | Command::TakeOverAttachment { expired, .. } =
            &mut command
        {
            *expired = found.as_ref().map(|lease| lease.generation);
        }
        Ok((command, found))
    }

    async fn renew_here(
        &self,
        volume: VolumeId,
        node: NodeId,
        generation: Generation,
    ) -> Result<Reply, ProposeError> {
        let index = self.read_index_here().await?;
        let failed = |error: MetaError| ProposeError::Failed {
            detail: error.to_string(),
        };
        let applied = self.wait_applied(index, COMMIT_WAIT_MAX).await;
        applied.map_err(failed)?;
        let found = self.view(|view| renewable_lease(view, volume, node, generation));
        let lease = match found.map_err(failed)? {
            Ok(lease) => lease,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let mut leases = self.leases();
        if leases.renew(volume, generation, Instant::now()) {
            Ok(Ok(Outcome::Lease(lease)))
        } else {
            Err(ProposeError::Failed {
                detail: "the lease had run out, and another node asks for it at this moment"
                    .to_owned(),
            })
        }
    }

    pub(super) async fn read_index_here(&self) -> Result<Option<LogId>, ProposeError> {
        self.check_hearing()?;
        read_index(&self.raft, self.full()).await
    }
}

pub(crate) fn fatal(error: &Fatal<NodeId>) -> MetaError {
    match error {
        Fatal::Stopped => MetaError::Stopped,
        error => failed(error),
    }
}

pub(crate) fn failed(error: &impl std::error::Error) -> MetaError {
    MetaError::Failed {
        detail: error.to_string(),
    }
}
