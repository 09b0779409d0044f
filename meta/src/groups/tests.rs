//! The records of namespace groups in one database. Crate `raft-host` tests the log, votes and snapshots.

use std::path::Path;
use std::sync::Arc;

use namespace::{Answer, Batch, FilesystemId, Ino, Operation, Query, Request, SessionId, Time};
use openraft::CommittedLeaderId;
use raft_host::{Applied, LogId, StateMachine};
use records::Txn;

use super::operations::{Operations, decode_operations, decode_replies, encode_operations};
use super::store::{NamespaceStore, open_namespace_group};
use crate::ids::{NamespaceGroupId, NodeId};
use crate::storage::{Db, DbError};

const FS: FilesystemId = FilesystemId(7);

fn open(db: &Db, group: u32) -> NamespaceStore {
    let store = open_namespace_group(Arc::clone(db.database()), NamespaceGroupId(group));
    NamespaceStore(Arc::new(store.unwrap()))
}

fn database(dir: &Path) -> Db {
    Db::open(dir).unwrap().0
}

/// Makes a filesystem whose root has these permission bits.
fn create(mode: u16) -> Operations {
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
    Operations(vec![(FS, batch)])
}

/// Applies operations as the first entry of the log.
fn apply(store: &NamespaceStore, operations: &Operations) -> Applied {
    let applied = Applied {
        last: Some(LogId::new(CommittedLeaderId::new(1, NodeId(1)), 0)),
        ..Applied::default()
    };
    let writes = store.0.read(|view| {
        let mut records = Txn::over(view);
        let replies = store.apply(&mut records, &encode_operations(operations))?;
        let replies = decode_replies(&replies).unwrap();
        assert!(replies.iter().all(Result::is_ok), "{replies:?}");
        assert_eq!(replies.len(), 1);
        Ok::<_, DbError>(records.into_writes())
    });
    store.write_records(writes.unwrap(), &applied).unwrap();
    applied
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

#[test]
fn groups_of_one_database_do_not_see_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let db = database(dir.path());
    let (one, two) = (open(&db, 1), open(&db, 2));
    apply(&one, &create(0o700));
    assert_eq!((mode(&one), mode(&two)), (Some(0o700), None));
    apply(&two, &create(0o755));
    drop((one, two, db));

    let db = database(dir.path());
    let groups = [NamespaceGroupId(1), NamespaceGroupId(2)];
    assert_eq!(db.namespace_groups(), groups);
    let (one, two) = (open(&db, 1), open(&db, 2));
    assert_eq!((mode(&one), mode(&two)), (Some(0o700), Some(0o755)));
}

#[test]
fn exported_records_replace_those_of_their_group_alone() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let source = open(&database(from.path()), 1);
    let applied = apply(&source, &create(0o711));
    let file = from.path().join("exported.sst");
    source.0.export(&file, u64::MAX).unwrap();

    let db = database(to.path());
    let (one, two) = (open(&db, 1), open(&db, 2));
    apply(&two, &create(0o755));
    one.replace_records(&file, &applied).unwrap();
    assert_eq!((mode(&one), mode(&two)), (Some(0o711), Some(0o755)));
    drop((one, two, db));
    let db = database(to.path());
    assert_eq!(mode(&open(&db, 1)), Some(0o711));
}

#[test]
fn operations_of_another_version_are_refused() {
    let mut bytes = encode_operations(&create(0o700));
    assert_eq!(decode_operations(&bytes), Ok(create(0o700)));
    bytes.push(0);
    assert!(decode_operations(&bytes).is_err());
    bytes.pop();
    bytes[0] += 1;
    let refused = decode_operations(&bytes).unwrap_err();
    assert!(refused.contains("version 2"), "{refused}");
    assert!(decode_operations(&[]).is_err());
}

#[test]
fn operations_that_this_program_does_not_know_are_found_at_open() {
    let dir = tempfile::tempdir().unwrap();
    let db = database(dir.path());
    let group = open(&db, 1);
    let mut unknown = encode_operations(&create(0o700));
    unknown[0] += 1;
    group.0.go_on_alone(NodeId(1), "", Some(unknown)).unwrap();
    drop((group, db));
    let db = database(dir.path());
    let error = open_namespace_group(Arc::clone(db.database()), NamespaceGroupId(1));
    let error = error.err().unwrap().to_string();
    assert!(error.contains("version 2"), "{error}");
}
