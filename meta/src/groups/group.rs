//! One namespace group on this node.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use fs_capabilities::Gone;
use namespace::{Answer, FilesystemId, Namespace, Operation, Query, Reply, Request, SessionId};
use openraft::{BasicNode, ServerState};
use raft_host::{RaftHandle, RaftMessage, RaftReply, RaftTuning, StartError};
use tokio::sync::{RwLock, mpsc, oneshot, watch};
use tokio::task::JoinHandle;

use super::blocking;
use super::coordination::{Coordination, SessionLink};
use super::messages::{GroupReply, GroupRequest, LinkCall, LinkReply};
use super::places::Places;
use super::proposals::{self, Proposal};
use super::reads::{self, Answers, Reading};
use super::store::{NamespaceStore, open_namespace_group};
use crate::error::MetaError;
use crate::ids::{Incarnation, NamespaceGroupId, NodeId};
use crate::map::ClusterMap;
use crate::net::{Gate, ProposeError, RaftPeers, Transport};
use crate::node::{death_of, failed, fatal};
use crate::storage::{Database, DbError};

/// Callers whose operations or questions wait for the leader's attention; more wait to be one of them.
const WAITING_MAX: usize = 1024;

/// Most entries in one message of a namespace group. An entry has up to 512 KiB, a message thus up to 8 MiB.
const MESSAGE_ENTRIES_MAX: u64 = 16;
/// See [`RaftTuning::snapshot_every_entries`] and [`RaftTuning::keep_entries`]. Entries of namespace groups
/// are much longer than those of the cluster map's group, so fewer are kept.
const SNAPSHOT_ENTRIES: u64 = 2_000;
const KEEP_ENTRIES: u64 = 500;

/// A namespace group that runs on this node, as a member or in wait of being made one.
pub(crate) struct NamespaceGroup {
    pub(super) raft: RaftHandle,
    pub(super) store: Arc<NamespaceStore>,
    pub(super) coordination: Arc<Coordination>,
    /// Limits the operations of hosts in flight.
    places: Arc<Places>,
    proposals: mpsc::Sender<Proposal>,
    readings: mpsc::Sender<Reading>,
    /// The nodes of sessions that have acted. A session is never another node's.
    owners: Mutex<Owners>,
    /// Held for writing while the group is founded, and for reading while a message of another member is
    /// handled.
    founding: RwLock<()>,
    tasks: [JoinHandle<()>; 3],
}

impl Drop for NamespaceGroup {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// The nodes of sessions.
type Owners = BTreeMap<(FilesystemId, SessionId), NodeId>;

/// Who asks for something.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asker {
    pub(super) node: NodeId,
    /// The start of it that the cluster map has.
    pub(super) incarnation: Option<Incarnation>,
    /// Whether it may do what is the leader's own.
    pub(super) is_meta: bool,
}

/// What all groups of a node have in common.
#[derive(Clone)]
pub(crate) struct GroupContext {
    pub(crate) node: NodeId,
    pub(crate) map: watch::Receiver<Arc<ClusterMap>>,
    pub(crate) database: Arc<Database>,
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) gate: Gate,
    pub(crate) tuning: RaftTuning,
}

impl NamespaceGroup {
    /// Opens a group, or makes its place in the database.
    ///
    /// # Errors
    /// Its part of the database is damaged, or cannot be made.
    pub(super) async fn open(id: NamespaceGroupId, of: &GroupContext) -> Result<Self, MetaError> {
        let config = namespace_tuning(&of.tuning).to_config(MESSAGE_ENTRIES_MAX);
        let config = config.map_err(|detail| MetaError::Failed { detail })?;
        let database = Arc::clone(&of.database);
        let open = move || open_namespace_group(database, id);
        let opened = tokio::task::spawn_blocking(open).await;
        let opened = opened.map_err(|error| failed(&error))?;
        let store = Arc::new(opened.map_err(|error| failed(&error))?);
        let store = Arc::new(NamespaceStore(store));
        let peers = Arc::new(RaftPeers {
            transport: Arc::clone(&of.transport),
            gate: of.gate.clone(),
            map: of.map.clone(),
        });
        let machine = Arc::clone(&store);
        let raft = RaftHandle::start(of.node, config, peers, machine).await;
        let raft = raft.map_err(|error| match error {
            StartError::Storage(error) => failed(&error),
            StartError::Raft(error) => fatal(&error),
        })?;
        let (proposals, proposed) = mpsc::channel(WAITING_MAX);
        let (readings, asked) = mpsc::channel(WAITING_MAX);
        let database = Arc::clone(&of.database);
        let coordination = Arc::new(Coordination::new(
            raft.clone(),
            Arc::clone(&store),
            Arc::clone(&database),
            &of.tuning,
        ));
        let looking = Arc::clone(&coordination);
        let tasks = [
            tokio::spawn(proposals::batch(raft.clone(), database, proposed)),
            tokio::spawn(reads::answer(
                raft.clone(),
                Arc::clone(&store),
                looking,
                asked,
            )),
            tokio::spawn(Arc::clone(&coordination).drive()),
        ];
        Ok(Self {
            raft,
            store,
            coordination,
            places: Arc::default(),
            proposals,
            readings,
            owners: Mutex::default(),
            founding: RwLock::default(),
            tasks,
        })
    }

    /// Makes the group, if this node knows of no members of it. All founders may do so: they write the same
    /// first entry, and then elect a leader.
    pub(super) async fn found(
        &self,
        founders: BTreeMap<NodeId, BasicNode>,
    ) -> Result<(), MetaError> {
        // A vote of another founder between the check and `initialize` would make openraft log an error.
        // Messages therefore wait. Those that arrived earlier precede the check in the queue of the Raft
        // core.
        let _founding = self.founding.write().await;
        let is_known = self.raft.is_initialized().await;
        if is_known.map_err(|error| fatal(&error))? {
            return Ok(());
        }
        let founded = self.raft.initialize(founders).await;
        founded.map_err(|error| failed(&error))
    }

    /// Whether this node leads the group, as far as it knows.
    pub(super) fn leads(&self) -> bool {
        self.raft.metrics().borrow().state == ServerState::Leader
    }

    /// The nodes that vote, of both sets while that changes.
    pub(super) fn voters(&self) -> BTreeSet<NodeId> {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow();
        metrics.membership_config.membership().voter_ids().collect()
    }

    /// Whether nothing of the group ever came here.
    pub(super) fn is_empty(&self) -> bool {
        self.raft.metrics().borrow().last_log_index.is_none()
    }

    /// Why its Raft machine has ended; nothing while it runs.
    pub(super) fn death(&self) -> Option<String> {
        death_of(&self.raft)
    }

    /// A filesystem whose changes wait for a host since long, and the host if that is known.
    pub(super) fn late(&self) -> Option<(FilesystemId, Option<NodeId>)> {
        let late = self.coordination.late().into_iter().next()?;
        let owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        Some((late.0, owners.get(&late).copied()))
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
        Ok(self.read_as(None, queries).await?.answers)
    }

    /// The same, for a session that may cache the answers.
    pub(super) async fn read_as(
        &self,
        reader: Option<SessionLink>,
        queries: Vec<(FilesystemId, Query)>,
    ) -> Result<Answers, ProposeError> {
        let (answer, answered) = oneshot::channel();
        let reading = Reading::new(reader, queries, answer)?;
        let sent = self.readings.send(reading).await;
        sent.map_err(|_| ProposeError::Stopped)?;
        answered.await.unwrap_or(Err(ProposeError::Stopped))
    }

    /// Does what a node asks for. Whether it may send Raft messages at all, the caller knows.
    pub(super) async fn handle(
        self: &Arc<Self>,
        asker: Asker,
        request: GroupRequest,
    ) -> GroupReply {
        match request {
            GroupRequest::Raft(message) => GroupReply::Raft(self.take(message).await),
            GroupRequest::Apply(operations) => {
                GroupReply::Apply(self.apply_for(asker, operations).await)
            }
            GroupRequest::Read(queries) => GroupReply::Read(self.read(queries).await),
            GroupRequest::ReadAs(reader, queries) => {
                GroupReply::ReadAs(self.read_as(Some(reader), queries).await)
            }
            GroupRequest::Link(filesystem, call) => {
                GroupReply::Link(self.link_for(asker, filesystem, call).await)
            }
        }
    }

    /// Messages about what a node's session may cache.
    async fn link_for(
        &self,
        asker: Asker,
        filesystem: FilesystemId,
        call: LinkCall,
    ) -> Result<LinkReply, ProposeError> {
        let (session, link) = match call {
            LinkCall::Term => {
                return Ok(LinkReply::Term(self.coordination.term(filesystem).await?));
            }
            LinkCall::Counts => {
                return Ok(LinkReply::Counts(
                    self.coordination.counts(filesystem).await?,
                ));
            }
            LinkCall::Send { session, link, .. } | LinkCall::Receive { session, link, .. } => {
                (session, link)
            }
        };
        let key = (filesystem, session);
        match self.owners(&[key].into()).await?.get(&key) {
            Some(owner) if *owner == asker.node => {}
            Some(_) => return Err(asker.refused("sends messages of a session that is not its own")),
            None => return Ok(LinkReply::Gone),
        }
        let of = SessionLink {
            filesystem,
            session,
            link,
        };
        Ok(match call {
            LinkCall::Send {
                first, messages, ..
            } => match self.coordination.take(of, first, messages).await? {
                Ok(()) => LinkReply::Taken,
                Err(Gone) => LinkReply::Gone,
            },
            LinkCall::Receive { behind, .. } => {
                match self.coordination.messages(of, behind).await? {
                    Ok(messages) => LinkReply::Messages(messages),
                    Err(Gone) => LinkReply::Gone,
                }
            }
            LinkCall::Term | LinkCall::Counts => LinkReply::Gone,
        })
    }

    async fn take(&self, message: RaftMessage) -> RaftReply {
        let _handled = self.founding.read().await;
        self.raft.handle(message).await
    }

    /// Has operations of a node done: it acts in sessions that it opened itself.
    async fn apply_for(
        self: &Arc<Self>,
        asker: Asker,
        operations: Vec<(FilesystemId, Request)>,
    ) -> Result<Vec<Reply>, ProposeError> {
        if !self.leads() {
            let leader = self.raft.metrics().borrow().current_leader;
            let leader = leader.filter(|leader| *leader != asker.node);
            return Err(ProposeError::NotLeader { leader });
        }
        let sessions: BTreeSet<_> = operations
            .iter()
            .map(|(filesystem, request)| (*filesystem, request.session))
            .filter(|(_, session)| *session != SessionId::NONE)
            .collect();
        let owners = self.owners(&sessions).await?;
        let mut replies: Vec<Option<Reply>> = vec![None; operations.len()];
        let mut allowed = Vec::with_capacity(operations.len());
        for (reply, (filesystem, request)) in replies.iter_mut().zip(operations) {
            match owners.get(&(filesystem, request.session)) {
                _ if request.session == SessionId::NONE => asker.may_begin(&request.operation)?,
                Some(owner) if *owner == asker.node => {}
                Some(_) => return Err(asker.refused("acts for a session that is not its own")),
                None => {
                    *reply = Some(Err(namespace::Error::Stale));
                    continue;
                }
            }
            allowed.push((filesystem, request));
        }
        // One after the other, as their order is. Hosts send one at a time, and many requests.
        let mut done = Vec::with_capacity(allowed.len());
        for (filesystem, request) in allowed {
            let place = self.places.take((asker.node, filesystem, request.session));
            let place = place.ok_or(ProposeError::Unknown)?;
            done.push(self.apply_coordinated(filesystem, request, place).await?);
        }
        let mut done = done.into_iter();
        let each = replies.into_iter();
        let each = each.map(|reply| reply.or_else(|| done.next()));
        Ok(each
            .map(|reply| reply.expect("an entry is answered with a reply to each operation"))
            .collect())
    }

    /// The nodes of these sessions; without those that are not there.
    async fn owners(
        &self,
        sessions: &BTreeSet<(FilesystemId, SessionId)>,
    ) -> Result<Owners, ProposeError> {
        let known = || self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found: Owners = {
            let known = known();
            let known = sessions
                .iter()
                .filter_map(|key| Some((*key, *known.get(key)?)));
            known.collect()
        };
        let missing = || sessions.iter().filter(|key| !found.contains_key(key));
        if missing().next().is_none() {
            return Ok(found);
        }
        // Of a new leader, the records may not be as new as the sessions.
        self.read(Vec::new()).await?;
        let (store, missing): (_, Vec<_>) = (Arc::clone(&self.store), missing().copied().collect());
        let looked = blocking::read(move || owners_in(&store, &missing)).await;
        let looked = looked.map_err(|error| failed_to(&error))?;
        let looked = looked.map_err(|error| failed_to(&error))?;
        let mut known = known();
        if known.len() + looked.len() > OWNERS_MAX {
            known.clear();
        }
        known.extend(&looked);
        found.extend(looked);
        Ok(found)
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

impl Asker {
    /// Whether it may ask for this without a session.
    fn may_begin(&self, operation: &Operation) -> Result<(), ProposeError> {
        match operation {
            Operation::OpenSession { node, .. } if *node != self.node.0 => {
                Err(self.refused("opens a session that is not its own"))
            }
            Operation::OpenSession { incarnation, .. } => match self.incarnation {
                Some(Incarnation(known)) if u128::from(known) == *incarnation => Ok(()),
                // It has registered it, and that has not come here yet; or an older start has lived on.
                _ => Err(ProposeError::Unknown),
            },
            _ if self.is_meta => Ok(()),
            _ => Err(self.refused("asks for what is the leader's own")),
        }
    }

    fn refused(&self, what: &str) -> ProposeError {
        let detail = format!("node {} {what}", self.node);
        ProposeError::Refused { detail }
    }
}

/// Tuning of a namespace group, from that of the cluster map's group.
fn namespace_tuning(tuning: &RaftTuning) -> RaftTuning {
    RaftTuning {
        snapshot_every_entries: tuning.snapshot_every_entries.min(SNAPSHOT_ENTRIES),
        keep_entries: tuning.keep_entries.min(KEEP_ENTRIES),
        ..tuning.clone()
    }
}

fn owners_in(
    store: &NamespaceStore,
    sessions: &[(FilesystemId, SessionId)],
) -> Result<Owners, DbError> {
    store.0.read(|view| {
        let mut owners = Owners::new();
        for (filesystem, session) in sessions {
            let found = Namespace::new(view, *filesystem).sessions(*session, 1)?;
            let found = found.into_iter().find(|(id, _)| id == session);
            owners.extend(found.map(|(_, found)| ((*filesystem, *session), NodeId(found.node))));
        }
        Ok(owners)
    })
}

fn failed_to(error: &dyn std::error::Error) -> ProposeError {
    let detail = error.to_string();
    ProposeError::Failed { detail }
}

/// Sessions whose nodes are kept in memory.
const OWNERS_MAX: usize = 16_384;
