//! Adapter between openraft and the state machine of a group: applies committed entries, makes and installs
//! snapshots.

use std::sync::Arc;

use fabric_types::ids::NodeId;
use openraft::storage::RaftStateMachine;
use openraft::{
    EntryPayload, ErrorSubject, ErrorVerb, OptionalSend, RaftSnapshotBuilder, Snapshot,
    StorageIOError,
};
use records::Txn;

use super::error::DbError;
use super::format::Applied;
use super::log::{blocking, lasting};
use super::snapshot::{SnapshotFile, Snapshots};
use super::state_machine::StateMachine;
use crate::config::{Entry, LogId, SnapshotMeta, StorageError, StoredMembership, TypeConfig};

/// Applies entries in one write, which holds the position too: each is applied exactly once, whatever
/// happens.
fn apply(machine: &dyn StateMachine, entries: &[Entry]) -> Result<Vec<Vec<u8>>, DbError> {
    let (replies, writes, applied) = machine.store().read(|view| {
        let mut applied: Applied = view.applied()?;
        let mut records = Txn::over(view);
        let mut replies = Vec::with_capacity(entries.len());
        for entry in entries {
            let reply = match &entry.payload {
                EntryPayload::Blank => Vec::new(),
                EntryPayload::Normal(command) => machine.apply(&mut records, &command.0)?,
                EntryPayload::Membership(membership) => {
                    applied.membership =
                        StoredMembership::new(Some(entry.log_id), membership.clone());
                    Vec::new()
                }
            };
            applied.last = Some(entry.log_id);
            replies.push(reply);
        }
        Ok::<_, DbError>((replies, records.into_writes(), applied))
    })?;
    machine.write_records(writes, &applied)?;
    Ok(replies)
}

/// State machine of a group on this node, as openraft uses it.
#[derive(Clone)]
pub(crate) struct Machine {
    machine: Arc<dyn StateMachine>,
    snapshots: Arc<Snapshots>,
}

impl Machine {
    pub(crate) fn new(machine: Arc<dyn StateMachine>) -> Result<Self, DbError> {
        let snapshots = Arc::new(Snapshots::open(machine.store())?);
        Ok(Self { machine, snapshots })
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
        let (this, meta) = (self.clone(), meta.clone());
        let subject = ErrorSubject::Snapshot(Some(meta.signature()));
        blocking(subject, ErrorVerb::Write, move || {
            this.snapshots.install(&*this.machine, slot, meta)
        })
        .await
    }
}

impl RaftSnapshotBuilder<TypeConfig> for Machine {
    async fn build_snapshot(&mut self) -> Result<Snapshot<TypeConfig>, StorageError> {
        let this = self.clone();
        let build = move || this.snapshots.build(this.machine.store());
        let database = &self.machine.store().database;
        let subject = ErrorSubject::Snapshot(None);
        let current = lasting(database, subject, ErrorVerb::Write, build).await?;
        Ok(Snapshot {
            meta: current.meta().clone(),
            snapshot: Box::new(SnapshotFile::of(current)),
        })
    }
}

impl RaftStateMachine<TypeConfig> for Machine {
    type SnapshotBuilder = Self;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembership), StorageError> {
        let machine = Arc::clone(&self.machine);
        let read = move || machine.store().read(|view| view.applied());
        let applied = blocking(ErrorSubject::StateMachine, ErrorVerb::Read, read).await?;
        Ok((applied.last, applied.membership))
    }

    async fn apply<I>(&mut self, entries: I) -> Result<Vec<Vec<u8>>, StorageError>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let entries: Vec<_> = entries.into_iter().collect();
        let machine = Arc::clone(&self.machine);
        let apply = move || apply(&*machine, &entries);
        let database = &self.machine.store().database;
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
        self.machine.store().installation_begins();
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
        self.machine.store().installation_ended(result.is_ok());
        result
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot<TypeConfig>>, StorageError> {
        Ok(self.snapshots.current().map(|current| Snapshot {
            meta: current.meta().clone(),
            snapshot: Box::new(SnapshotFile::of(current)),
        }))
    }
}
