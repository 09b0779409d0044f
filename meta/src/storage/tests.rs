//! Records of the cluster map's group in the database. Crate `raft-host` tests the log, votes and snapshots.

use std::path::Path;

use openraft::CommittedLeaderId;
use raft_host::{LogId, StateMachine, Sync};

use super::{Applied, Db, DbError};
use crate::command::{Command, NodeSpec, encode_command};
use crate::error::OpenError;
use crate::ids::{NodeId, UnixMillis};
use crate::level::Level;
use crate::state::Txn;
use crate::state::tables::{CLUSTER, NODES};

fn open(dir: &Path) -> Db {
    Db::open(dir).unwrap().0
}

/// Applies a command as the log entry of this index.
fn apply(db: &Db, index: u64, command: &Command) -> Result<(), DbError> {
    let machine: &dyn StateMachine = db;
    let writes = db.read(|view| {
        let mut records = Txn::over(view);
        machine.apply(&mut records, &encode_command(command))?;
        Ok::<_, DbError>(records.into_writes())
    })?;
    let applied = Applied {
        last: Some(LogId::new(CommittedLeaderId::new(1, NodeId(1)), index)),
        ..Applied::default()
    };
    machine.write_records(writes, &applied)
}

fn bootstrap() -> Command {
    Command::Bootstrap {
        cluster: uuid::Uuid::from_u128(1),
        node: NodeSpec::new(NodeId(1), "one".to_owned()),
        pool: None,
        at: UnixMillis(1),
    }
}

fn register(node: u64) -> Command {
    Command::RegisterNode {
        replaces: crate::ids::Incarnation::default(),
        node: NodeSpec::new(NodeId(node), format!("node{node}")),
        at: UnixMillis(node),
    }
}

fn node_names(db: &Db) -> Vec<String> {
    let nodes = db
        .read(|view| NODES.all(view).map_err(DbError::from))
        .unwrap();
    nodes.into_iter().map(|node| node.name.into()).collect()
}

/// Number of nodes in the cluster map that others follow.
fn nodes_in_map(db: &Db) -> usize {
    db.map().borrow().nodes().count()
}

#[test]
fn the_map_follows_the_records_and_is_read_again_at_open() {
    let dir = tempfile::tempdir().unwrap();
    let db = open(dir.path());
    apply(&db, 1, &bootstrap()).unwrap();
    apply(&db, 2, &register(2)).unwrap();
    assert_eq!((node_names(&db).len(), nodes_in_map(&db)), (2, 2));
    drop(db);
    let db = open(dir.path());
    assert_eq!(node_names(&db), ["one", "node2"]);
    assert_eq!(nodes_in_map(&db), 2);
}

#[test]
fn exported_records_replace_others_and_the_map_follows() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (db, other) = (open(one.path()), open(two.path()));
    apply(&db, 1, &bootstrap()).unwrap();
    apply(&db, 2, &register(2)).unwrap();
    let file = one.path().join("exported.sst");
    let applied = db.group.export(&file, u64::MAX).unwrap().unwrap();
    assert_eq!(db.group.export(&one.path().join("x.sst"), 8).unwrap(), None);

    apply(&other, 1, &bootstrap()).unwrap();
    for (index, node) in [(2, 8), (3, 9)] {
        apply(&other, index, &register(node)).unwrap();
    }
    let openings = *other.openings().borrow();
    let machine: &dyn StateMachine = &other;
    assert!(machine.replace_records(&file, &Applied::default()).is_err());
    assert_eq!((node_names(&other).len(), nodes_in_map(&other)), (3, 3));
    machine.replace_records(&file, &applied).unwrap();
    assert_eq!(node_names(&other), ["one", "node2"]);
    assert_eq!(nodes_in_map(&other), 2);
    assert!(*other.openings().borrow() > openings);
}

#[test]
fn a_newer_format_is_refused_by_its_number() {
    let dir = tempfile::tempdir().unwrap();
    let db = open(dir.path());
    db.database().put(b"format", &2_u32, Sync::Yes).unwrap();
    drop(db);
    let error = Db::open(dir.path()).err().unwrap();
    assert!(
        matches!(
            error,
            OpenError::NewerFormat {
                found: 2,
                known: 1,
                ..
            }
        ),
        "{error:?}"
    );
}

#[test]
fn what_a_program_of_a_higher_level_wrote_is_not_touched() {
    let dir = tempfile::tempdir().unwrap();
    let db = open(dir.path());
    apply(&db, 1, &bootstrap()).unwrap();
    let to = Level(Level::KNOWN.0 + 1);
    let at = UnixMillis(2);
    let raise = Command::RaiseLevel { to, at };
    let refused = apply(&db, 2, &raise).unwrap_err().to_string();
    assert!(
        refused.contains("install a newer version of penstock"),
        "{refused}"
    );
    let applied = db.read(|view| view.applied()).unwrap().last;
    assert_eq!(applied.map(|last| last.index), Some(1));
    // As a newer program leaves it.
    let cluster = db.read(|view| CLUSTER.get(view, &()).map_err(DbError::from));
    let mut cluster = cluster.unwrap().unwrap();
    cluster.level = to;
    let value = serde_json::to_vec(&cluster).unwrap();
    let writes = [(vec![CLUSTER.prefix()], Some(value))].into();
    db.group.write_records(writes, &Applied::default()).unwrap();
    drop(db);
    let error = Db::open(dir.path()).err().unwrap();
    assert!(
        matches!(error, OpenError::NewerLevel { found, .. } if found == to),
        "{error:?}"
    );
}

#[test]
fn an_unknown_command_in_the_log_is_found_at_open() {
    let dir = tempfile::tempdir().unwrap();
    let db = open(dir.path());
    let unknown = br#"{"Unknown":1}"#.to_vec();
    db.group.go_on_alone(NodeId(1), "", Some(unknown)).unwrap();
    drop(db);
    let error = Db::open(dir.path()).err().unwrap();
    assert!(matches!(&error, OpenError::Corrupt { .. }), "{error:?}");
    assert!(error.to_string().contains("a log entry"), "{error}");
}
