//! Feeds committed entries to the state machine, and hands out its snapshots.

use std::sync::Arc;

use openraft::storage::RaftStateMachine;
use openraft::{
    EntryPayload, ErrorSubject, ErrorVerb, OptionalSend, RaftSnapshotBuilder, StorageIOError,
};

use super::log::{blocking, lasting};
use super::snapshot::{SnapshotFile, Snapshots};
use super::{Applied, Db, DbError};
use crate::command::{Outcome, Reply};
use crate::ids::NodeId;
use crate::raft::{
    Entry, LogId, Snapshot, SnapshotMeta, StorageError, StoredMembership, TypeConfig,
};
use crate::state::{self, Txn};

impl Db {
    /// Applies entries in one write, which holds the position too: each is applied exactly once, whatever
    /// happens.
    fn apply(&self, entries: &[Entry]) -> Result<Vec<Reply>, DbError> {
        let (replies, writes, applied) = self.read(|view| {
            let mut applied: Applied = view.applied()?;
            let mut records = Txn::over(view);
            let mut replies = Vec::with_capacity(entries.len());
            for entry in entries {
                let reply = match &entry.payload {
                    EntryPayload::Blank => Ok(Outcome::Done),
                    EntryPayload::Normal(command) => state::apply(&mut records, command)?,
                    EntryPayload::Membership(membership) => {
                        applied.membership =
                            StoredMembership::new(Some(entry.log_id), membership.clone());
                        Ok(Outcome::Done)
                    }
                };
                applied.last = Some(entry.log_id);
                replies.push(reply);
            }
            Ok::<_, DbError>((replies, records.into_writes(), applied))
        })?;
        self.write_records(writes, &applied)?;
        Ok(replies)
    }
}

/// The state machine of this node, as openraft uses it.
#[derive(Clone)]
pub(crate) struct Machine {
    db: Arc<Db>,
    snapshots: Arc<Snapshots>,
}

impl Machine {
    pub(crate) fn new(db: Arc<Db>) -> Result<Self, DbError> {
        let snapshots = Arc::new(Snapshots::open(&db)?);
        Ok(Self { db, snapshots })
    }
}

impl Machine {
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
            machine.snapshots.install(&machine.db, slot, meta)
        })
        .await
    }
}

impl RaftSnapshotBuilder<TypeConfig> for Machine {
    async fn build_snapshot(&mut self) -> Result<Snapshot, StorageError> {
        let machine = self.clone();
        let db = Arc::clone(&self.db);
        let build = move |db: &Db| machine.snapshots.build(db);
        let current = lasting(&db, ErrorSubject::Snapshot(None), ErrorVerb::Write, build).await?;
        Ok(Snapshot {
            meta: current.meta().clone(),
            snapshot: Box::new(SnapshotFile::of(current)),
        })
    }
}

impl RaftStateMachine<TypeConfig> for Machine {
    type SnapshotBuilder = Self;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembership), StorageError> {
        let db = Arc::clone(&self.db);
        let read = move || db.read(|view| view.applied());
        let applied = blocking(ErrorSubject::StateMachine, ErrorVerb::Read, read).await?;
        Ok((applied.last, applied.membership))
    }

    async fn apply<I>(&mut self, entries: I) -> Result<Vec<Reply>, StorageError>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let entries: Vec<Entry> = entries.into_iter().collect();
        let apply = move |db: &Db| db.apply(&entries);
        lasting(
            &self.db,
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
        self.db.installation_begins();
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
        self.db.installation_ended(result.is_ok());
        result
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot>, StorageError> {
        Ok(self.snapshots.current().map(|current| Snapshot {
            meta: current.meta().clone(),
            snapshot: Box::new(SnapshotFile::of(current)),
        }))
    }
}
