//! The storage under openraft's own suite, and cases that the suite does not cover.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use fabric_types::ids::NodeId;
use openraft::storage::{RaftLogStorage, RaftStateMachine};
use openraft::testing::{StoreBuilder, Suite};
use openraft::{
    CommittedLeaderId, EntryPayload, ErrorSubject, ErrorVerb, RaftLogReader, RaftSnapshotBuilder,
};
use records::Read;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncSeekExt};

use super::format::{FORMAT, KEY_FORMAT};
use super::log::lasting;
use super::options::family_options;
use super::{
    Applied, Database, DatabaseError, DbError, GroupId, LogStore, Machine, StateMachine, Sync,
};
use crate::config::{CommandBytes, Entry, LogId, StorageError, TypeConfig, Vote};
use crate::testing::Keys;

type Opened = (Arc<Keys>, LogStore, Machine);

fn opened(keys: Keys) -> Opened {
    let keys = Arc::new(keys);
    let log = LogStore::new(Arc::clone(keys.store()));
    (Arc::clone(&keys), log, Machine::new(keys).unwrap())
}

fn open(dir: &Path) -> Opened {
    opened(Keys::open(dir).unwrap())
}

fn open_group(database: &Arc<Database>, number: u32) -> Opened {
    opened(Keys::of(database, GroupId::Numbered(number)).unwrap())
}

struct Builder(GroupId);

impl StoreBuilder<TypeConfig, LogStore, Machine, TempDir> for Builder {
    async fn build(&self) -> Result<(TempDir, LogStore, Machine), StorageError> {
        let dir = tempfile::tempdir().unwrap();
        let (database, _) = Database::open(dir.path()).unwrap();
        let (_, log, machine) = opened(Keys::of(&database, self.0).unwrap());
        Ok((dir, log, machine))
    }
}

#[test]
fn the_storage_passes_the_suite_of_openraft() {
    for group in [GroupId::Main, GroupId::Numbered(1)] {
        Suite::test_all(Builder(group)).unwrap();
    }
}

fn id(index: u64) -> LogId {
    LogId::new(CommittedLeaderId::new(1, NodeId(1)), index)
}

fn entry(index: u64, payload: EntryPayload<TypeConfig>) -> Entry {
    Entry {
        log_id: id(index),
        payload,
    }
}

/// Entry that writes the record `k` with this number.
fn put(index: u64, key: u64) -> Entry {
    let command = CommandBytes(format!("k{key}").into_bytes());
    entry(index, EntryPayload::Normal(command))
}

fn append(keys: &Keys, entries: &[Entry]) {
    keys.store().append_entries(entries).unwrap();
}

#[tokio::test]
async fn log_vote_and_records_survive_a_reopen_of_the_database() {
    let dir = tempfile::tempdir().unwrap();
    let (db, mut log, mut machine) = open(dir.path());
    append(&db, &[entry(0, EntryPayload::Blank), put(1, 1), put(2, 2)]);
    log.save_vote(&Vote::new(3, NodeId(1))).await.unwrap();
    log.save_committed(Some(id(1))).await.unwrap();
    machine
        .apply([entry(0, EntryPayload::Blank), put(1, 1)])
        .await
        .unwrap();
    drop((db, log, machine));

    let (db, mut log, mut machine) = open(dir.path());
    assert_eq!(
        log.read_vote().await.unwrap(),
        Some(Vote::new(3, NodeId(1)))
    );
    assert_eq!(log.read_committed().await.unwrap(), Some(id(1)));
    assert_eq!(log.get_log_state().await.unwrap().last_log_id, Some(id(2)));
    assert_eq!(machine.applied_state().await.unwrap().0, Some(id(1)));
    assert_eq!(
        db.all(),
        ["k1"],
        "what was not applied is not in the records"
    );
    let entries = log.try_get_log_entries(2..).await.unwrap();
    assert_eq!(entries, [put(2, 2)]);
}

#[tokio::test]
async fn snapshot_holds_the_applied_state_and_replaces_other_records() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (db, _, mut machine) = open(one.path());
    machine.apply([put(0, 1), put(1, 2)]).await.unwrap();
    let built = machine
        .get_snapshot_builder()
        .await
        .build_snapshot()
        .await
        .unwrap();
    machine.apply([put(2, 3)]).await.unwrap();
    assert_eq!(built.meta.last_log_id, Some(id(1)));
    assert_eq!(db.all().len(), 3);

    let (other, mut log, mut target) = open(two.path());
    target.apply([put(0, 1), put(1, 9)]).await.unwrap();
    target
        .install_snapshot(&built.meta, built.snapshot)
        .await
        .unwrap();
    assert_eq!(other.all(), ["k1", "k2"]);
    log.purge(id(1)).await.unwrap();
    append(&other, &[put(2, 4)]);
    target.apply([put(2, 4)]).await.unwrap();
    drop((other, log, target));
    let (other, _, mut target) = open(two.path());
    assert_eq!(other.all(), ["k1", "k2", "k4"]);
    assert_eq!(
        target.get_current_snapshot().await.unwrap().unwrap().meta,
        built.meta
    );
}

#[tokio::test]
async fn snapshot_older_than_the_log_is_not_offered_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let (db, mut log, mut machine) = open(dir.path());
    machine.apply([put(0, 1)]).await.unwrap();
    machine
        .get_snapshot_builder()
        .await
        .build_snapshot()
        .await
        .unwrap();
    machine.apply([put(1, 2)]).await.unwrap();
    log.purge(id(1)).await.unwrap();
    drop((db, log, machine));
    let (_, _, mut machine) = open(dir.path());
    assert!(machine.get_current_snapshot().await.unwrap().is_none());
}

#[tokio::test]
async fn a_reader_of_a_snapshot_is_not_disturbed_by_newer_ones() {
    let dir = tempfile::tempdir().unwrap();
    let (db, _, mut machine) = open(dir.path());
    machine.apply([put(0, 1)]).await.unwrap();
    let mut builder = machine.get_snapshot_builder().await;
    builder.build_snapshot().await.unwrap();
    let mut reading = machine
        .get_current_snapshot()
        .await
        .unwrap()
        .unwrap()
        .snapshot;
    for index in 1..4 {
        machine.apply([put(index, index + 1)]).await.unwrap();
        builder.build_snapshot().await.unwrap();
    }
    let end = reading.seek(std::io::SeekFrom::End(0)).await.unwrap();
    reading.rewind().await.unwrap();
    let mut bytes = Vec::new();
    reading.read_to_end(&mut bytes).await.unwrap();
    assert!(!bytes.is_empty() && bytes.len() as u64 == end);
    drop((reading, machine, builder));
    let slots = std::fs::read_dir(db.store().snapshots_dir())
        .unwrap()
        .count();
    assert_eq!(slots, 1, "only the newest is kept");
}

#[tokio::test]
async fn a_snapshot_that_is_not_what_it_says_changes_nothing() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (_, _, mut machine) = open(one.path());
    machine.apply([put(0, 1), put(1, 2)]).await.unwrap();
    let built = machine
        .get_snapshot_builder()
        .await
        .build_snapshot()
        .await
        .unwrap();
    let (other, _, mut target) = open(two.path());
    target.apply([put(0, 1)]).await.unwrap();

    let mut lying = built.meta.clone();
    lying.last_log_id = Some(id(7));
    assert!(
        target
            .install_snapshot(&lying, built.snapshot)
            .await
            .is_err()
    );
    let current = machine.get_current_snapshot().await.unwrap().unwrap();
    let mut received = Vec::new();
    let mut content = current.snapshot;
    content.read_to_end(&mut received).await.unwrap();
    // Damage every 64th byte, one at a time: an error or, where nothing depends on the byte, the right
    // records.
    let mut refused = 0;
    for position in (0..received.len()).step_by(64) {
        let mut damaged = received.clone();
        damaged[position] ^= 0x10;
        let mut incoming = target.begin_receiving_snapshot().await.unwrap();
        tokio::io::AsyncWriteExt::write_all(&mut incoming, &damaged)
            .await
            .unwrap();
        match target.install_snapshot(&current.meta, incoming).await {
            Err(_) => refused += 1,
            Ok(()) => assert_eq!(other.all(), ["k1", "k2"]),
        }
    }
    assert!(refused > 0);
    let mut incoming = target.begin_receiving_snapshot().await.unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut incoming, &received)
        .await
        .unwrap();
    target
        .install_snapshot(&current.meta, incoming)
        .await
        .unwrap();
    assert_eq!(other.all(), ["k1", "k2"]);
}

#[tokio::test]
async fn log_is_purged_to_a_received_snapshot_only_once_installed() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (_, _, mut machine) = open(one.path());
    machine.apply([put(0, 1), put(1, 2)]).await.unwrap();
    let built = machine
        .get_snapshot_builder()
        .await
        .build_snapshot()
        .await
        .unwrap();

    let (_, mut log, mut target) = open(two.path());
    let mut incoming = target.begin_receiving_snapshot().await.unwrap();
    let mut content = built.snapshot;
    tokio::io::copy(&mut content, &mut incoming).await.unwrap();
    let mut same_log = log.clone();
    let purge = same_log.purge(id(1));
    tokio::pin!(purge);
    // Polled as often as one likes, it is not done before the installation.
    for _ in 0..100 {
        assert!(futures_poll_once(purge.as_mut()).await.is_none());
        tokio::task::yield_now().await;
    }
    target
        .install_snapshot(&built.meta, incoming)
        .await
        .unwrap();
    purge.await.unwrap();
    assert_eq!(
        log.get_log_state().await.unwrap().last_purged_log_id,
        Some(id(1))
    );
}

#[tokio::test]
async fn the_log_is_not_cut_when_the_installation_fails() {
    let dir = tempfile::tempdir().unwrap();
    let (_, mut log, mut target) = open(dir.path());
    let incoming = target.begin_receiving_snapshot().await.unwrap();
    let meta = openraft::SnapshotMeta {
        last_log_id: Some(id(5)),
        ..Default::default()
    };
    assert!(target.install_snapshot(&meta, incoming).await.is_err());
    assert!(log.purge(id(5)).await.is_err());
    assert_eq!(log.get_log_state().await.unwrap().last_purged_log_id, None);
}

async fn futures_poll_once<F: Future>(mut future: std::pin::Pin<&mut F>) -> Option<F::Output> {
    std::future::poll_fn(|cx| match future.as_mut().poll(cx) {
        std::task::Poll::Ready(output) => std::task::Poll::Ready(Some(output)),
        std::task::Poll::Pending => std::task::Poll::Ready(None),
    })
    .await
}

#[test]
fn a_database_whose_making_was_cut_short_is_made_anew() {
    let dir = tempfile::tempdir().unwrap();
    let new = dir.path().join("db.new");
    // As RocksDB leaves it before all families are there.
    let mut options = family_options();
    options.create_if_missing(true);
    let partial = rocksdb::DB::open_cf(&options, &new, ["default"]).unwrap();
    drop(partial);
    let (db, _, _) = open(dir.path());
    assert_eq!(db.all(), [""; 0]);
    assert!(!new.exists());
}

#[test]
fn a_database_that_lost_its_first_file_is_not_made_anew() {
    for left in ["000004.log", "000009.sst"] {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("db").join(left);
        std::fs::create_dir(dir.path().join("db")).unwrap();
        std::fs::write(&file, "data").unwrap();
        let refused = Keys::open(dir.path()).err().expect("it is damaged");
        assert!(refused.to_string().contains("CURRENT"), "{refused}");
        assert_eq!(std::fs::read(&file).unwrap(), b"data");
    }
}

#[test]
fn a_family_of_records_left_by_a_crash_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (db, _, _) = open(dir.path());
    db.store()
        .database()
        .rocks
        .create_cf("state.2", &family_options())
        .unwrap();
    drop(db);
    let (db, _, _) = open(dir.path());
    assert!(
        db.store().database().rocks.cf_handle("state.2").is_none()
            && db.store().database().rocks.cf_handle("state.1").is_some()
    );
}

#[test]
fn a_newer_format_is_refused_by_its_number() {
    let dir = tempfile::tempdir().unwrap();
    let (db, _, _) = open(dir.path());
    db.store()
        .database()
        .put(KEY_FORMAT, &(FORMAT + 1), Sync::Yes)
        .unwrap();
    drop(db);
    let error = Keys::open(dir.path()).err().unwrap();
    let (found, known) = (FORMAT + 1, FORMAT);
    assert_eq!(error, DatabaseError::NewerFormat { found, known });
}

#[test]
fn a_hole_in_the_log_is_found_at_open() {
    let dir = tempfile::tempdir().unwrap();
    let (db, _, _) = open(dir.path());
    append(
        &db,
        &[entry(0, EntryPayload::Blank), entry(2, EntryPayload::Blank)],
    );
    drop(db);
    let error = Keys::open(dir.path()).err().unwrap();
    let detail = "the log has entry 2 where 1 must be".to_owned();
    assert_eq!(error, DatabaseError::Corrupt(detail));
}

#[test]
fn a_command_that_the_machine_does_not_know_is_found_at_open() {
    let dir = tempfile::tempdir().unwrap();
    let (db, _, _) = open(dir.path());
    let unknown = CommandBytes(b"x".to_vec());
    append(&db, &[put(0, 1), entry(1, EntryPayload::Normal(unknown))]);
    drop(db);
    let error = Keys::open(dir.path()).err().unwrap();
    let expected = "metadata database: a log entry is damaged: it is not a key".to_owned();
    assert_eq!(error, DatabaseError::Corrupt(expected));
}

/// Work that finds no space so many times.
fn out_of_space(times: u32) -> impl Fn() -> Result<u32, DbError> {
    let tries = AtomicU32::new(0);
    move || match tries.fetch_add(1, Ordering::Relaxed) {
        tried if tried < times => Err(std::io::Error::from(std::io::ErrorKind::StorageFull).into()),
        tried => Ok(tried),
    }
}

#[tokio::test]
async fn a_write_without_space_is_repeated_until_there_is_some() {
    let dir = tempfile::tempdir().unwrap();
    let (db, _log, _machine) = open(dir.path());
    let (subject, verb) = (ErrorSubject::Store, ErrorVerb::Write);
    let writing = lasting(db.store().database(), subject, verb, out_of_space(2));
    let (written, ()) = tokio::join!(writing, db.store().database().full());
    assert_eq!(written.unwrap(), 2);
    assert!(!db.store().database().is_full());
}

#[tokio::test]
async fn no_write_waits_for_space_once_the_node_ends() {
    let dir = tempfile::tempdir().unwrap();
    let (db, _log, _machine) = open(dir.path());
    let (subject, verb) = (ErrorSubject::Store, ErrorVerb::Write);
    let writing = lasting(
        db.store().database(),
        subject.clone(),
        verb,
        out_of_space(u32::MAX),
    );
    let end = async {
        db.store().database().full().await;
        db.store().database().give_up_waiting();
    };
    let (written, ()) = tokio::join!(writing, end);
    assert!(written.is_err());
    // Nor does a later one begin to.
    assert!(
        lasting(db.store().database(), subject, verb, out_of_space(u32::MAX))
            .await
            .is_err()
    );
}

#[tokio::test]
async fn other_errors_of_a_write_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let (db, _log, _machine) = open(dir.path());
    let broken = || Err::<(), _>(std::io::Error::from_raw_os_error(5).into());
    let (subject, verb) = (ErrorSubject::Store, ErrorVerb::Write);
    assert!(
        lasting(db.store().database(), subject, verb, broken)
            .await
            .is_err()
    );
    assert!(!db.store().database().is_full());
}

/// Every range that a scan may have in and around some records of the namespace's part of key space.
#[test]
fn the_database_scans_like_a_map() {
    let dir = tempfile::tempdir().unwrap();
    let (db, _, _) = open(dir.path());
    let keys: [&[u8]; 5] = [b"\x80a", b"\x80p", b"\x80pa", b"\x80pb", b"\x80q"];
    let map: BTreeMap<Vec<u8>, Vec<u8>> = keys
        .iter()
        .map(|key| (key.to_vec(), key[1..].to_vec()))
        .collect();
    let writes = map.clone().into_iter();
    let writes = writes.map(|(key, value)| (key, Some(value))).collect();
    db.write_records(writes, &Applied::default()).unwrap();
    for prefix in [&b"\x80"[..], b"\x80p", b"\x80pa", b"\x80z"] {
        for rest in [&b""[..], b"\0", b"a", b"aa", b"b", b"p", b"\xff"] {
            let from = [prefix, rest].concat();
            let found = db
                .store()
                .read(|view| Ok::<_, DbError>(scans(view, prefix, &from)));
            assert_eq!(found.unwrap(), scans(&map, prefix, &from), "{from:x?}");
        }
    }
}

/// The keys that a scan visits, forwards and backwards.
fn scans(view: &dyn Read, prefix: &[u8], from: &[u8]) -> [Vec<Vec<u8>>; 2] {
    let (mut forwards, mut backwards) = (Vec::new(), Vec::new());
    view.scan_from(prefix, from, &mut |key, _| {
        forwards.push(key.to_vec());
        Ok(true)
    })
    .unwrap();
    view.scan_back(prefix, from, &mut |key, _| {
        backwards.push(key.to_vec());
        Ok(true)
    })
    .unwrap();
    [forwards, backwards]
}

#[tokio::test]
async fn groups_of_one_database_do_not_see_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let (database, _) = Database::open(dir.path()).unwrap();
    let (one, mut log, mut machine) = open_group(&database, 1);
    let (two, mut other_log, mut other) = open_group(&database, 2);
    append(&one, &[put(0, 1)]);
    log.save_vote(&Vote::new(3, NodeId(1))).await.unwrap();
    machine.apply([put(0, 1)]).await.unwrap();
    assert_eq!((one.all(), two.all()), (vec!["k1".to_owned()], vec![]));
    assert_eq!(other_log.read_vote().await.unwrap(), None);
    other.apply([put(0, 2)]).await.unwrap();
    drop((one, log, machine, two, other_log, other, database));

    let (database, _) = Database::open(dir.path()).unwrap();
    assert_eq!(database.numbered_groups(), [1, 2]);
    let (one, mut log, _) = open_group(&database, 1);
    let (two, mut other_log, _) = open_group(&database, 2);
    assert_eq!(
        (one.all(), two.all()),
        (vec!["k1".to_owned()], vec!["k2".to_owned()])
    );
    let vote = log.read_vote().await.unwrap();
    assert_eq!(vote, Some(Vote::new(3, NodeId(1))));
    let entries = log.try_get_log_entries(..).await.unwrap();
    assert_eq!(entries, [put(0, 1)]);
    assert_eq!(other_log.try_get_log_entries(..).await.unwrap(), []);
}

#[tokio::test]
async fn a_snapshot_replaces_the_records_of_its_group_alone() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (database, _) = Database::open(from.path()).unwrap();
    let (_, _, mut machine) = open_group(&database, 1);
    machine.apply([put(0, 3)]).await.unwrap();
    let mut builder = machine.get_snapshot_builder().await;
    let built = builder.build_snapshot().await.unwrap();

    let (database, _) = Database::open(to.path()).unwrap();
    let (one, _, mut target) = open_group(&database, 1);
    let (two, _, mut other) = open_group(&database, 2);
    other.apply([put(0, 5)]).await.unwrap();
    target
        .install_snapshot(&built.meta, built.snapshot)
        .await
        .unwrap();
    assert_eq!(
        (one.all(), two.all()),
        (vec!["k3".to_owned()], vec!["k5".to_owned()])
    );
    drop((one, target, two, other, database));
    let (database, _) = Database::open(to.path()).unwrap();
    let (one, _, mut target) = open_group(&database, 1);
    assert_eq!(one.all(), ["k3"]);
    let current = target.get_current_snapshot().await.unwrap().unwrap();
    assert_eq!(current.meta, built.meta);
}
