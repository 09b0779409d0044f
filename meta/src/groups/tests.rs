//! The storage of a namespace group under openraft's own suite, and beside another group.

use std::path::Path;
use std::sync::Arc;

use namespace::{Answer, Batch, FilesystemId, Ino, Operation, Query, Request, SessionId, Time};
use openraft::storage::{RaftLogStorage, RaftStateMachine};
use openraft::testing::{StoreBuilder, Suite};
use openraft::{CommittedLeaderId, EntryPayload, RaftLogReader, RaftSnapshotBuilder};
use tempfile::TempDir;

use super::config::{Entry, NamespaceConfig, Operations};
use super::store::NamespaceStore;
use crate::ids::{NamespaceGroupId, NodeId};
use crate::raft::{GroupConfig, LogId, StorageError, Vote};
use crate::storage::log::LogStore;
use crate::storage::machine::Machine;
use crate::storage::{Db, DbError, open_namespace_group};

const FS: FilesystemId = FilesystemId(7);

type Opened = (
    Arc<NamespaceStore>,
    LogStore<NamespaceStore>,
    Machine<NamespaceStore>,
);

fn open(db: &Db, group: u32) -> Opened {
    let store = open_namespace_group(Arc::clone(db.database()), NamespaceGroupId(group)).unwrap();
    let store = Arc::new(NamespaceStore(store));
    let log = LogStore::new(Arc::clone(&store));
    (Arc::clone(&store), log, Machine::new(store).unwrap())
}

fn database(dir: &Path) -> Db {
    Db::open(dir).unwrap().0
}

struct Builder;

impl StoreBuilder<NamespaceConfig, LogStore<NamespaceStore>, Machine<NamespaceStore>, TempDir>
    for Builder
{
    async fn build(
        &self,
    ) -> Result<(TempDir, LogStore<NamespaceStore>, Machine<NamespaceStore>), StorageError> {
        let dir = tempfile::tempdir().unwrap();
        let (_, log, machine) = open(&database(dir.path()), 1);
        Ok((dir, log, machine))
    }
}

#[test]
fn the_storage_passes_the_suite_of_openraft() {
    Suite::test_all(Builder).unwrap();
}

fn id(index: u64) -> LogId {
    LogId::new(CommittedLeaderId::new(1, NodeId(1)), index)
}

/// Makes a filesystem whose root has these permission bits.
fn create(index: u64, mode: u16) -> Entry {
    let operation = Operation::CreateFilesystem {
        mode,
        uid: 0,
        gid: 0,
    };
    let request = Request {
        session: SessionId::NONE,
        slot: 0,
        sequence: 0,
        at: Time::default(),
        operation,
    };
    let batch = Batch {
        operations: vec![request],
    };
    Entry {
        log_id: id(index),
        payload: EntryPayload::Normal(Operations(vec![(FS, batch)])),
    }
}

fn mode(store: &NamespaceStore) -> Option<u16> {
    let query = Query::Inode(Ino::ROOT);
    let answer = store
        .0
        .read(|view| namespace::answer(view, FS, &query, 1 << 20).map_err(DbError::from))
        .unwrap();
    match answer {
        Ok(Answer::Inode(_, inode)) => Some(inode.mode),
        _ => None,
    }
}

#[tokio::test]
async fn groups_of_one_database_do_not_see_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let db = database(dir.path());
    let (one, mut log, mut machine) = open(&db, 1);
    let (two, mut other_log, mut other) = open(&db, 2);
    one.0.append_entries(&[create(0, 0o700)]).unwrap();
    log.save_vote(&Vote::new(3, NodeId(1))).await.unwrap();
    machine.apply([create(0, 0o700)]).await.unwrap();
    assert_eq!((mode(&one), mode(&two)), (Some(0o700), None));
    assert_eq!(other_log.read_vote().await.unwrap(), None);
    other.apply([create(0, 0o755)]).await.unwrap();
    drop((one, log, machine, two, other_log, other, db));

    let db = database(dir.path());
    let (one, mut log, _) = open(&db, 1);
    let (two, mut other_log, _) = open(&db, 2);
    assert_eq!((mode(&one), mode(&two)), (Some(0o700), Some(0o755)));
    let vote = log.read_vote().await.unwrap();
    assert_eq!(vote, Some(Vote::new(3, NodeId(1))));
    let entries = log.try_get_log_entries(..).await.unwrap();
    assert_eq!(entries, [create(0, 0o700)]);
    assert_eq!(other_log.try_get_log_entries(..).await.unwrap(), []);
}

#[tokio::test]
async fn a_snapshot_replaces_the_records_of_its_group_alone() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (_, _, mut machine) = open(&database(from.path()), 1);
    machine.apply([create(0, 0o711)]).await.unwrap();
    let mut builder = machine.get_snapshot_builder().await;
    let built = builder.build_snapshot().await.unwrap();

    let db = database(to.path());
    let (one, _, mut target) = open(&db, 1);
    let (two, _, mut other) = open(&db, 2);
    other.apply([create(0, 0o755)]).await.unwrap();
    target
        .install_snapshot(&built.meta, built.snapshot)
        .await
        .unwrap();
    assert_eq!((mode(&one), mode(&two)), (Some(0o711), Some(0o755)));
    drop((one, target, two, other, db));
    let db = database(to.path());
    let (one, _, mut target) = open(&db, 1);
    assert_eq!(mode(&one), Some(0o711));
    let current = target.get_current_snapshot().await.unwrap().unwrap();
    assert_eq!(current.meta, built.meta);
}

#[test]
fn an_entry_of_another_version_is_refused() {
    let mut bytes = NamespaceConfig::encode_entry(&create(3, 0o700));
    let decoded = NamespaceConfig::decode_entry(&bytes);
    assert_eq!(decoded, Ok(create(3, 0o700)));
    bytes.push(0);
    assert!(NamespaceConfig::decode_entry(&bytes).is_err());
    bytes.pop();
    bytes[0] += 1;
    let refused = NamespaceConfig::decode_entry(&bytes).unwrap_err();
    assert!(refused.contains("version 2"), "{refused}");
    assert!(NamespaceConfig::decode_entry(&[]).is_err());
}
