//! What client and server side of a node share: reaching the leader, and doing what only the leader can.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use openraft::BasicNode;
use openraft::error::{CheckIsLeaderError, ClientWriteError, Fatal, RaftError};
use tokio::sync::watch;

use crate::command::{Command, NodeSpec, Outcome, Reply};
use crate::error::MetaError;
use crate::ids::{Generation, Incarnation, NodeId, VolumeId};
use crate::leases::LeaseWatch;
use crate::map::ClusterMap;
use crate::net::{Beat, PeerReply, PeerRequest, ProposeError, Transport, TransportError};
use crate::node::succession::Signs;
use crate::node::vigil::Vigil;
use crate::raft::{LogId, Raft, RaftTuning};
use crate::reach::Reach;
use crate::report::NodeWord;
use crate::state::tables::{LEASES, VOLUMES};
use crate::state::{ReadError, check_lease_holder};
use crate::storage::{Db, DbError, View};

/// A request waits this long for a leader, and fails then.
const LEADER_WAIT_MAX: Duration = Duration::from_secs(20);
/// A command that the leader has taken must be committed in this time; then its outcome is unknown. Covers an election
/// and a slow disk.
const COMMIT_WAIT_MAX: Duration = Duration::from_secs(20);
/// What may be asked twice is asked again when there is no answer in this time: whoever led may have been cut off, and somebody
/// else lead by now.
const ANSWER_WAIT_MAX: Duration = Duration::from_secs(2);
/// Pause before the leader is looked for again.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// The heart of a node.
pub(crate) struct Core {
    pub(crate) id: NodeId,
    /// This start of the node's process.
    pub(crate) incarnation: Incarnation,
    pub(crate) raft: Raft,
    /// Absent after shutdown.
    db: RwLock<Option<Arc<Db>>>,
    transport: Arc<dyn Transport>,
    leases: Mutex<LeaseWatch>,
    pub(super) vigil: Vigil,
    signs: Mutex<Signs>,
    /// Whether this node was removed from the cluster, as others said.
    pub(super) removed: watch::Sender<bool>,
    /// The cluster map as this node has applied it.
    pub(crate) map: watch::Receiver<Arc<ClusterMap>>,
}

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
pub(super) enum Ask {
    Propose(Command),
    RenewLease {
        volume: VolumeId,
        node: NodeId,
        generation: Generation,
    },
    Heartbeat {
        node: NodeId,
        incarnation: Incarnation,
    },
    ReadIndex,
    Tell {
        node: NodeId,
        word: NodeWord,
    },
    Report,
}

impl Ask {
    fn is_command(&self) -> bool {
        matches!(self, Self::Propose(_))
    }

    fn request(&self) -> PeerRequest {
        match self {
            Self::Propose(command) => PeerRequest::Propose(command.clone()),
            Self::RenewLease {
                volume,
                node,
                generation,
            } => PeerRequest::RenewLease {
                volume: *volume,
                node: *node,
                generation: *generation,
            },
            Self::Heartbeat { node, incarnation } => PeerRequest::Heartbeat {
                node: *node,
                incarnation: *incarnation,
            },
            Self::ReadIndex => PeerRequest::ReadIndex,
            Self::Tell { node, word } => PeerRequest::Tell {
                node: *node,
                word: word.clone(),
            },
            Self::Report => PeerRequest::Report,
        }
    }
}

/// An attempt on one node, this or another.
enum Attempt {
    Done(PeerReply),
    /// Nothing was done: try again, there if known.
    Again(Option<NodeId>),
    Failed(MetaError),
}

impl Core {
    pub(crate) fn new(
        node: &NodeSpec,
        raft: Raft,
        db: Arc<Db>,
        transport: Arc<dyn Transport>,
        tuning: &RaftTuning,
    ) -> Self {
        Self {
            id: node.id,
            incarnation: node.incarnation,
            raft,
            map: db.map(),
            db: RwLock::new(Some(db)),
            transport,
            leases: Mutex::default(),
            vigil: Vigil::default(),
            signs: Mutex::new(Signs::new(tuning.vote_hold(), Instant::now())),
            removed: watch::Sender::default(),
        }
    }

    pub(super) fn signs(&self) -> MutexGuard<'_, Signs> {
        // Whole after every statement.
        self.signs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn take_db(&self) -> Option<Arc<Db>> {
        self.db
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    fn db(&self) -> Option<Arc<Db>> {
        let db = self.db.read().unwrap_or_else(PoisonError::into_inner);
        db.clone()
    }

    /// Returns when a write of this node has begun to wait for room.
    pub(crate) async fn full(&self) {
        match self.db() {
            Some(db) => db.full().await,
            None => std::future::pending().await,
        }
    }

    /// From here on no write of this node waits for room.
    pub(crate) fn give_up_waiting(&self) {
        if let Some(db) = self.db() {
            db.give_up_waiting();
        }
    }

    fn no_room(&self, begun: bool) -> ProposeError {
        match self.db() {
            Some(db) => ProposeError::NoRoom {
                dir: db.dir().to_owned(),
                begun,
            },
            None => ProposeError::Stopped,
        }
    }

    /// Whether this node is the only one that votes, as far as it knows.
    fn is_alone(&self) -> bool {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow();
        let mut voters = metrics.membership_config.membership().voter_ids();
        voters.next() == Some(self.id) && voters.next().is_none()
    }

    /// Why this node's service is not as it should be, and the mend.
    pub(crate) fn problem(&self) -> Option<String> {
        let db = self.db()?;
        if let Some(detail) = self.death() {
            return Some(MetaError::Failed { detail }.to_string());
        }
        let dir = db.dir().display();
        if db.is_full() {
            return Some(format!(
                "the metadata service waits: the file system under {dir} is full, so volumes and attachments cannot be \
                 changed; make room, and it goes on by itself"
            ));
        }
        db.is_nearly_full().then(|| {
            format!(
                "the file system under {dir} is nearly full, so no volumes and attachments are made; make room"
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

    /// Has a command committed and applied by the leader, wherever that is.
    pub(crate) async fn propose(&self, command: Command, wait: Wait) -> Result<Reply, MetaError> {
        match self.ask_leader(&Ask::Propose(command), wait).await? {
            PeerReply::Propose(Ok(reply)) => Ok(reply),
            other => Err(unfit(&other)),
        }
    }

    /// Tells the leader that the holder of a lease still wants it.
    pub(crate) async fn renew_lease(
        &self,
        volume: VolumeId,
        node: NodeId,
        generation: Generation,
    ) -> Result<Reply, MetaError> {
        let ask = Ask::RenewLease {
            volume,
            node,
            generation,
        };
        match self.ask_leader(&ask, Wait::PATIENT).await? {
            PeerReply::Propose(Ok(reply)) => Ok(reply),
            other => Err(unfit(&other)),
        }
    }

    /// Tells the leader that a node lives.
    pub(super) async fn beat(
        &self,
        node: NodeId,
        incarnation: Incarnation,
    ) -> Result<Beat, MetaError> {
        let ask = Ask::Heartbeat { node, incarnation };
        match self.ask_leader(&ask, Wait::PATIENT).await? {
            PeerReply::Heartbeat(Ok(beat)) => Ok(beat),
            other => Err(unfit(&other)),
        }
    }

    /// Runs a function on records that hold everything acknowledged before this call.
    pub(crate) async fn read<T>(
        &self,
        wait: Wait,
        read: impl FnOnce(&View<'_>) -> Result<T, ReadError>,
    ) -> Result<T, MetaError> {
        let index = self.read_index(wait).await?;
        self.wait_applied(index, wait.commit).await?;
        self.view(read)
    }

    /// Returns once there is a leader that a majority follows. A command that goes to one that none follows has an unknown outcome.
    pub(crate) async fn confirm_leader(&self, wait: Wait) -> Result<(), MetaError> {
        if self.db().is_some_and(|db| db.is_full()) {
            // It confirms nothing while it waits for room, and says so to the command itself.
            return Ok(());
        }
        self.read_index(wait).await.map(drop)
    }

    async fn read_index(&self, wait: Wait) -> Result<Option<LogId>, MetaError> {
        match self.ask_leader(&Ask::ReadIndex, wait).await? {
            PeerReply::ReadIndex(Ok(index)) => Ok(index),
            other => Err(unfit(&other)),
        }
    }

    /// Asks this node, then whoever it says leads, until there is an answer or time is over.
    pub(super) async fn ask_leader(&self, ask: &Ask, wait: Wait) -> Result<PeerReply, MetaError> {
        let deadline = Instant::now() + wait.leader;
        let mut leader = None;
        loop {
            let within = match ask.is_command() {
                true => wait.commit,
                false => ANSWER_WAIT_MAX.min(deadline.saturating_duration_since(Instant::now())),
            };
            leader = match self.attempt(leader, ask, within).await {
                Attempt::Done(answer) => return Ok(answer),
                Attempt::Failed(error) => return Err(error),
                Attempt::Again(Some(next)) if leader.is_none() && next != self.id => Some(next),
                Attempt::Again(_) => {
                    if Instant::now() >= deadline {
                        return Err(MetaError::NoLeader {
                            waited: wait.leader,
                            is_command: ask.is_command(),
                            reach: Reach::default(),
                        });
                    }
                    self.succeed().await;
                    tokio::time::sleep(RETRY_PAUSE).await;
                    None
                }
            };
        }
    }

    async fn attempt(&self, leader: Option<NodeId>, ask: &Ask, within: Duration) -> Attempt {
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
                | PeerReply::Report(Err(error)),
            ) => error.means(leader),
            Ok(answer) => Attempt::Done(answer),
            Err(TransportError::Unreachable { .. }) => Attempt::Again(None),
            Err(TransportError::Gone { target }) => {
                self.signs().gone(target);
                Attempt::Again(None)
            }
            Err(TransportError::Lost { .. }) => match ask.is_command() {
                true => Attempt::Failed(interrupted()),
                // Asking again is harmless.
                false => Attempt::Again(None),
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
        let address = address.unwrap_or_else(|| BasicNode::new(""));
        let timed =
            tokio::time::timeout(within, self.transport.call(target, &address, request)).await;
        timed.unwrap_or_else(|_| Err(late(target)))
    }

    async fn wait_applied(&self, index: Option<LogId>, within: Duration) -> Result<(), MetaError> {
        let Some(index) = index else { return Ok(()) };
        let wait = self.raft.wait(Some(within));
        match wait
            .applied_index_at_least(Some(index.index), "a read")
            .await
        {
            Ok(_) => Ok(()),
            Err(openraft::metrics::WaitError::ShuttingDown) => Err(MetaError::Stopped),
            Err(openraft::metrics::WaitError::Timeout(..)) => Err(MetaError::NoLeader {
                waited: within,
                is_command: false,
                reach: Reach::default(),
            }),
        }
    }

    /// Does what a peer asks for.
    pub(crate) async fn handle(&self, request: PeerRequest) -> PeerReply {
        match request {
            PeerRequest::AppendEntries(rpc) => {
                self.signs().heard(Instant::now());
                PeerReply::AppendEntries(self.raft.append_entries(rpc).await)
            }
            PeerRequest::Vote(rpc) => PeerReply::Vote(self.raft.vote(rpc).await),
            PeerRequest::InstallSnapshot(rpc) => {
                self.signs().heard(Instant::now());
                PeerReply::InstallSnapshot(self.raft.install_snapshot(rpc).await)
            }
            PeerRequest::Propose(command) => PeerReply::Propose(self.propose_here(command).await),
            PeerRequest::RenewLease {
                volume,
                node,
                generation,
            } => PeerReply::Propose(self.renew_here(volume, node, generation).await),
            PeerRequest::Heartbeat { node, incarnation } => {
                PeerReply::Heartbeat(self.beat_here(node, incarnation))
            }
            PeerRequest::ReadIndex => PeerReply::ReadIndex(self.read_index_here().await),
            PeerRequest::Tell { node, word } => PeerReply::Tell(self.take_word_here(node, word)),
            PeerRequest::Report => PeerReply::Report(self.report_here()),
            PeerRequest::WasRemoved { node } => PeerReply::WasRemoved(self.was_removed_here(node)),
        }
    }

    pub(super) async fn propose_here(&self, command: Command) -> Result<Reply, ProposeError> {
        if self
            .db()
            .is_some_and(|db| db.is_full() || command.makes_something_new() && db.is_nearly_full())
        {
            return Err(self.no_room(false));
        }
        let command = self.judge_lease(command)?;
        let command = self.find_witness(command).await;
        let released = match command {
            Command::ReleaseLease { volume, .. } | Command::VolumeDataDropped { volume } => {
                Some(volume)
            }
            _ => None,
        };
        let write = tokio::time::timeout(COMMIT_WAIT_MAX, self.raft.client_write(command));
        let written = tokio::select! {
            written = write => written.map_err(|_| ProposeError::Unknown)?,
            () = self.full() => return Err(self.no_room(true)),
        };
        let reply = match written {
            Ok(written) => written.data,
            Err(RaftError::APIError(ClientWriteError::ForwardToLeader(forward))) => {
                return Err(ProposeError::NotLeader {
                    leader: forward.leader_id,
                });
            }
            Err(RaftError::APIError(error)) => {
                return Err(ProposeError::Failed {
                    detail: error.to_string(),
                });
            }
            Err(RaftError::Fatal(error)) => return Err(ended(&error)),
        };
        let mut leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        match (&reply, released) {
            (Ok(Outcome::Lease(lease)), None) => {
                leases.heard(lease.volume, lease.generation, Instant::now())
            }
            (Ok(_), Some(volume)) => leases.forget(volume),
            _ => {}
        }
        Ok(reply)
    }

    /// Adds to a request for a lease what only the leader's clock knows: whether the present holder's has run out.
    fn judge_lease(&self, command: Command) -> Result<Command, ProposeError> {
        let Command::GrantLease {
            volume: name,
            node,
            at,
            ..
        } = command
        else {
            return Ok(command);
        };
        let held = self.view(|view| match VOLUMES.get(view, &name)? {
            Some(volume) => LEASES.get(view, &volume.id),
            None => Ok(None),
        });
        let held = held.map_err(|error| ProposeError::Failed {
            detail: error.to_string(),
        })?;
        let expired = held
            .filter(|lease| lease.holder.is_some_and(|holder| holder != node))
            .and_then(|lease| {
                let mut leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
                let over = leases.has_run_out(lease.volume, lease.generation, Instant::now());
                over.then_some(lease.generation)
            });
        Ok(Command::GrantLease {
            volume: name,
            node,
            expired,
            at,
        })
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
        let lease = self
            .view(|view| LEASES.get(view, &volume))
            .map_err(failed)?;
        Ok(
            check_lease_holder(lease, volume, node, generation).map(|lease| {
                let mut leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
                leases.heard(volume, generation, Instant::now());
                Outcome::Lease(lease)
            }),
        )
    }

    pub(super) async fn read_index_here(&self) -> Result<Option<LogId>, ProposeError> {
        let index = tokio::select! {
            index = self.raft.get_read_log_id() => index,
            // Raft stands still meanwhile. Of the only voter whatever was acknowledged is applied.
            () = self.full() => {
                return if self.is_alone() {
                    Ok(None)
                } else {
                    Err(ProposeError::NotLeader { leader: None })
                };
            }
        };
        match index {
            Ok((index, _)) => Ok(index),
            Err(RaftError::APIError(CheckIsLeaderError::ForwardToLeader(forward))) => {
                Err(ProposeError::NotLeader {
                    leader: forward.leader_id,
                })
            }
            // It may have been deposed: somebody else may lead by now.
            Err(RaftError::APIError(CheckIsLeaderError::QuorumNotEnough(_))) => {
                Err(ProposeError::NotLeader { leader: None })
            }
            Err(RaftError::Fatal(error)) => Err(ended(&error)),
        }
    }
}

impl ProposeError {
    /// What it means to whoever asked this node (`None`) or another.
    fn means(self, asked: Option<NodeId>) -> Attempt {
        match self {
            Self::NotLeader { leader } => Attempt::Again(leader),
            Self::Unknown => Attempt::Failed(interrupted()),
            // When another node fails or stops, somebody else will lead.
            Self::Failed { .. } | Self::Stopped | Self::NoRoom { begun: false, .. }
                if asked.is_some() =>
            {
                Attempt::Again(None)
            }
            Self::NoRoom { dir, begun } => Attempt::Failed(MetaError::NoRoom { dir, begun }),
            Self::Failed { detail } => Attempt::Failed(MetaError::Failed { detail }),
            Self::Stopped => Attempt::Failed(MetaError::Stopped),
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

fn ended(error: &Fatal<NodeId>) -> ProposeError {
    match error {
        Fatal::Stopped => ProposeError::Stopped,
        error => ProposeError::Failed {
            detail: error.to_string(),
        },
    }
}

pub(super) fn fatal(error: &Fatal<NodeId>) -> MetaError {
    match error {
        Fatal::Stopped => MetaError::Stopped,
        error => failed(error),
    }
}

pub(super) fn failed(error: &impl std::error::Error) -> MetaError {
    MetaError::Failed {
        detail: error.to_string(),
    }
}
