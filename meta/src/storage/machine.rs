//! Feeds committed entries to the state machine of a group, and hands out its snapshots.

use std::path::Path;
use std::sync::Arc;

use openraft::storage::RaftStateMachine;
use openraft::{
    Entry, EntryPayload, ErrorSubject, ErrorVerb, OptionalSend, RaftSnapshotBuilder,
    RaftTypeConfig, Snapshot, StorageIOError,
};

use super::group::GroupStore;
use super::log::{blocking, lasting};
use super::snapshot::{SnapshotFile, Snapshots};
use super::{Applied, Db, DbError};
use crate::command::{Command, Outcome, Reply};
use crate::ids::NodeId;
use crate::raft::{GroupConfig, LogId, SnapshotMeta, StorageError, StoredMembership, TypeConfig};
use crate::state::{self, Txn, Writes};

/// A Raft group of this node: a state machine over its records.
pub(crate) trait Group: Send + Sync + 'static {
    /// What its entries are.
    type Config: GroupConfig;

    /// Its part of the database.
    fn store(&self) -> &GroupStore<Self::Config>;

    /// Applies one command.
    fn apply(records: &mut Txn<'_>, command: &DataOf<Self>) -> Result<ReplyOf<Self>, DbError>;

    /// The reply to an entry that is none.
    fn no_reply() -> ReplyOf<Self>;

    /// Writes what was applied, together with how far that is.
    fn write_records(&self, writes: Writes, applied: &Applied) -> Result<(), DbError>;

    /// Replaces all records with those of an exported file, which must be what `expected` says.
    fn replace_records(&self, file: &Path, expected: &Applied) -> Result<(), DbError>;
}

type DataOf<G> = <<G as Group>::Config as RaftTypeConfig>::D;
type ReplyOf<G> = <<G as Group>::Config as RaftTypeConfig>::R;

impl Group for Db {
    type Config = TypeConfig;

    fn store(&self) -> &GroupStore<TypeConfig> {
        &self.group
    }

    fn apply(records: &mut Txn<'_>, command: &Command) -> Result<Reply, DbError> {
        Ok(state::apply(records, command)?)
    }

    fn no_reply() -> Reply {
        Ok(Outcome::Done)
    }

    fn write_records(&self, writes: Writes, applied: &Applied) -> Result<(), DbError> {
        Self::write_records(self, writes, applied)
    }

    fn replace_records(&self, file: &Path, expected: &Applied) -> Result<(), DbError> {
        Self::replace_records(self, file, expected)
    }
}

/// Applies entries in one write, which holds the position too: each is applied exactly once, whatever
/// happens.
fn apply<G: Group>(group: &G, entries: &[Entry<G::Config>]) -> Result<Vec<ReplyOf<G>>, DbError> {
    let (replies, writes, applied) = group.store().read(|view| {
        let mut applied: Applied = view.applied()?;
        let mut records = Txn::over(view);
        let mut replies = Vec::with_capacity(entries.len());
        for entry in entries {
            let reply = match &entry.payload {
                EntryPayload::Blank => G::no_reply(),
                EntryPayload::Normal(command) => G::apply(&mut records, command)?,
                EntryPayload::Membership(membership) => {
                    applied.membership =
                        StoredMembership::new(Some(entry.log_id), membership.clone());
                    G::no_reply()
                }
            };
            applied.last = Some(entry.log_id);
            replies.push(reply);
        }
        Ok::<_, DbError>((replies, records.into_writes(), applied))
    })?;
    group.write_records(writes, &applied)?;
    Ok(replies)
}

/// The state machine of a group on this node, as openraft uses it.
pub(crate) struct Machine<G> {
    group: Arc<G>,
    snapshots: Arc<Snapshots>,
}

impl<G> Clone for Machine<G> {
    fn clone(&self) -> Self {
        Self {
            group: Arc::clone(&self.group),
            snapshots: Arc::clone(&self.snapshots),
        }
    }
}

impl<G: Group> Machine<G> {
    pub(crate) fn new(group: Arc<G>) -> Result<Self, DbError> {
        let snapshots = Arc::new(Snapshots::open(group.store())?);
        Ok(Self { group, snapshots })
    }

    async fn install(
        &self,
        meta: &SnapshotMeta,
        mut snapshot: Box<SnapshotFile>,
    ) -> Result<(), StorageError> {
        let failed = |error: &std::io::Error| -> StorageError {
            StorageIOError::<NodeId>::write_snapshot(Some(meta.signature()), error).into()
        };
        let slot = self.snapshots.new_slot().map_err(|error| failed(&error))?;
        slot.fill(&mut snapshot)
            .await
            .map_err(|error| failed(&error))?;
        let (machine, meta) = (self.clone(), meta.clone());
        let subject = ErrorSubject::Snapshot(Some(meta.signature()));
        blocking(subject, ErrorVerb::Write, move || {
            machine.snapshots.install(&*machine.group, slot, meta)
        })
        .await
    }
}

impl<G: Group> RaftSnapshotBuilder<G::Config> for Machine<G> {
    async fn build_snapshot(&mut self) -> Result<Snapshot<G::Config>, StorageError> {
        let machine = self.clone();
        let build = move || machine.snapshots.build(machine.group.store());
        let database = &self.group.store().database;
        let subject = ErrorSubject::Snapshot(None);
        let current = lasting(database, subject, ErrorVerb::Write, build).await?;
        Ok(Snapshot {
            meta: current.meta().clone(),
            snapshot: Box::new(SnapshotFile::of(current)),
        })
    }
}

impl<G: Group> RaftStateMachine<G::Config> for Machine<G> {
    type SnapshotBuilder = Self;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembership), StorageError> {
        let group = Arc::clone(&self.group);
        let read = move || group.store().read(|view| view.applied());
        let applied = blocking(ErrorSubject::StateMachine, ErrorVerb::Read, read).await?;
        Ok((applied.last, applied.membership))
    }

    async fn apply<I>(&mut self, entries: I) -> Result<Vec<ReplyOf<G>>, StorageError>
    where
        I: IntoIterator<Item = Entry<G::Config>> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let entries: Vec<_> = entries.into_iter().collect();
        let group = Arc::clone(&self.group);
        let apply = move || apply(&*group, &entries);
        let database = &self.group.store().database;
        lasting(
            database,
            ErrorSubject::StateMachine,
            ErrorVerb::Write,
            apply,
        )
        .await
    }

    async fn get_snapshot_builder(&mut self) -> Self {
        self.clone()
    }

    async fn begin_receiving_snapshot(&mut self) -> Result<Box<SnapshotFile>, StorageError> {
        self.group.store().installation_begins();
        let snapshots = Arc::clone(&self.snapshots);
        let file = blocking(ErrorSubject::Snapshot(None), ErrorVerb::Write, move || {
            snapshots.receive()
        })
        .await?;
        Ok(Box::new(file))
    }

    async fn install_snapshot(
        &mut self,
        meta: &SnapshotMeta,
        snapshot: Box<SnapshotFile>,
    ) -> Result<(), StorageError> {
        let result = self.install(meta, snapshot).await;
        // Whoever waits to cut the log must learn of a failure too.
        self.group.store().installation_ended(result.is_ok());
        result
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot<G::Config>>, StorageError> {
        Ok(self.snapshots.current().map(|current| Snapshot {
            meta: current.meta().clone(),
            snapshot: Box::new(SnapshotFile::of(current)),
        }))
    }
}
