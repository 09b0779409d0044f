//! Going on after a disaster, on a node that does not run: without the majority of the metadata nodes, which
//! is gone for good, or from a backup. `docs/OPERATIONS.md` is the operator's side, `state/recovery.rs` what
//! the cluster does then.
//!
//! **Architecture Invariant:** metadata of two histories never meet. Each recovery begins a new history,
//! which nodes say in their first message (`net/frame.rs`); a node of another one is turned away, so that no
//! log is compared with one that was not made from it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use namespace::Batch;
use raft_host::{GroupStore, LogId};
use uuid::Uuid;

use crate::command::{Command, encode_command};
use crate::error::OpenError;
use crate::groups::{Operations, encode_operations, of_leader, open_namespace_group};
use crate::ids::{Epoch, NamespaceGroupId, NodeId, UnixMillis};
use crate::model::{FilesystemState, Node, Role};
use crate::state::tables::{FILESYSTEMS, NODES};
use crate::storage::{Db, DbError, Identity};

pub use crate::storage::backup::{Authority, Backup, BackupError, BackupHeader};

/// How far the metadata of a node are that does not run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Position {
    /// The cluster.
    pub cluster: Uuid,
    /// The node.
    pub node: NodeId,
    /// Term and index of the last entry in its log: of several nodes the one with the greatest has the newest
    /// metadata.
    pub last: (u64, u64),
    /// Version of the cluster map.
    pub epoch: Epoch,
    /// The nodes that it knows.
    pub nodes: Vec<Node>,
    /// Those that vote.
    pub voters: BTreeSet<NodeId>,
    /// The filesystems, with the last entry of the log that their names are kept by: nothing if this node
    /// does not keep them.
    pub filesystems: BTreeMap<String, Option<(u64, u64)>>,
}

/// A namespace group that a node votes in.
pub(crate) type VotedIn = (NamespaceGroupId, GroupStore);

/// Why metadata do not go on.
#[derive(Debug, thiserror::Error)]
pub enum RecoveryError {
    /// The database cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// There is none.
    #[error("there are no metadata in {dir}")]
    NoMetadata {
        /// Where.
        dir: std::path::PathBuf,
    },
    /// Reading or writing it failed.
    #[error("{0}")]
    Failed(String),
    /// The records do not know the node.
    #[error("the metadata know no node {node}, only {}", names(.known))]
    UnknownNode {
        /// The node.
        node: NodeId,
        /// Those that they know.
        known: Vec<(NodeId, String)>,
    },
    /// The node may not lead.
    #[error("node {node} may not have the role meta, which {} may have", names(.may))]
    NotMeta {
        /// The node.
        node: NodeId,
        /// Those that may.
        may: Vec<(NodeId, String)>,
    },
}

impl From<DbError> for RecoveryError {
    fn from(error: DbError) -> Self {
        Self::Failed(error.to_string())
    }
}

fn names(nodes: &[(NodeId, String)]) -> String {
    let one = |(id, name): &(NodeId, String)| format!("{id} ('{name}')");
    nodes.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// Term and index.
fn numbers(entry: LogId) -> (u64, u64) {
    (entry.leader_id.term, entry.index)
}

/// How far the metadata in `dir` are. Changes nothing.
///
/// # Errors
/// There are none, they are in use, or damaged.
pub fn position(dir: &Path) -> Result<Position, RecoveryError> {
    let db = open(dir)?;
    let identity = db.identity()?.ok_or_else(|| RecoveryError::NoMetadata {
        dir: dir.to_owned(),
    })?;
    let last = db.group.last_entry()?;
    let voters = db.read(|view| view.applied())?.membership;
    let epoch = db.map().borrow().epoch();
    let groups = groups_voted_in(&db, identity.node)?;
    let mut filesystems = BTreeMap::new();
    let all = db.read(|view| Ok::<_, DbError>(FILESYSTEMS.all(view)?))?;
    for filesystem in all
        .into_iter()
        .filter(|one| one.state == FilesystemState::Ready)
    {
        let group = groups.iter().find(|(id, _)| *id == filesystem.group);
        let last = group.map(|(_, group)| group.last_entry()).transpose()?;
        let last = last.map(|last| last.map_or((0, 0), numbers));
        filesystems.insert(filesystem.name.into(), last);
    }
    Ok(Position {
        cluster: identity.cluster,
        node: identity.node,
        last: last.map_or((0, 0), numbers),
        filesystems,
        epoch,
        nodes: nodes(&db)?,
        voters: voters.membership().voter_ids().collect(),
    })
}

/// Makes the node in `dir` the only one that votes, in a history of its own: it goes on with what it has when
/// it is started next. `address` is where peers reach it. Another node may have newer metadata (`choose`):
/// then which replicas count is found out by what devices say.
///
/// # Errors
/// There are no metadata, they are in use or damaged, or the node may not have the role `meta`.
pub fn go_on_alone(
    dir: &Path,
    address: &str,
    (history, choose): (Uuid, bool),
) -> Result<(), RecoveryError> {
    let db = open(dir)?;
    let identity = db.identity()?.ok_or_else(|| RecoveryError::NoMetadata {
        dir: dir.to_owned(),
    })?;
    let groups = groups_voted_in(&db, identity.node)?;
    let begins = Command::BeginHistory {
        history,
        node: identity.node,
        backup_at: None,
        choose,
        groups: groups.iter().map(|(id, _)| *id).collect(),
        at: UnixMillis::now(),
    };
    begin(&db, identity.node, address, begins)?;
    for (_, group) in &groups {
        let raised = raise_numbers(group)?;
        group.go_on_alone(identity.node, address, Some(encode_operations(&raised)))?;
        group.flush_wal()?;
    }
    // Last: before that the node does not start with both.
    Ok(db.set_identity(&Identity {
        history: Some(history),
        ..identity
    })?)
}

/// Makes metadata in `dir`, which is empty or not there, from a backup: the node goes on with them when it is
/// started next.
///
/// # Errors
/// There is something, it cannot be written, or the backup does not know the node.
pub fn restore(
    dir: &Path,
    backup: &Backup,
    (node, address): (NodeId, &str),
    history: Uuid,
) -> Result<(), RecoveryError> {
    if Db::exists(dir) {
        return Err(RecoveryError::Failed(format!(
            "there are metadata in {} already",
            dir.display()
        )));
    }
    let db = unpack(dir, backup)?;
    db.set_identity(&Identity {
        node,
        cluster: backup.header.cluster,
        history: Some(history),
    })?;
    if let Some(last) = backup.header.applied.last {
        db.group.purge_to(last)?;
    }
    let begins = Command::BeginHistory {
        history,
        node,
        backup_at: Some(backup.header.taken_at),
        choose: true,
        // It holds none.
        groups: BTreeSet::new(),
        at: UnixMillis::now(),
    };
    begin(&db, node, address, begins)
}

/// What a backup knows of a node. Its records are read in `scratch`, which is empty or not there, and is
/// removed.
///
/// # Errors
/// The backup does not know the node, or `scratch` cannot be written.
pub fn known_node(backup: &Backup, node: NodeId, scratch: &Path) -> Result<Node, RecoveryError> {
    let known = unpack(scratch, backup).and_then(|db| Ok(nodes(&db)?));
    let removed = std::fs::remove_dir_all(scratch);
    let known = known?;
    removed.map_err(DbError::from)?;
    let found = known.iter().find(|one| one.id == node);
    found.cloned().ok_or_else(|| unknown_node(node, &known))
}

/// The records of a backup in a new database.
fn unpack(dir: &Path, backup: &Backup) -> Result<Db, RecoveryError> {
    // It is closed when it is dropped: nobody else has it.
    let (db, _closed) = Db::open(dir)?;
    let records = dir.join("snapshots/restored.sst");
    std::fs::write(&records, &backup.records).map_err(DbError::from)?;
    db.replace_records(&records, &backup.header.applied)?;
    std::fs::remove_file(&records).map_err(DbError::from)?;
    Ok(db)
}

fn begin(db: &Db, node: NodeId, address: &str, begins: Command) -> Result<(), RecoveryError> {
    check_may_lead(&nodes(db)?, node)?;
    db.group
        .go_on_alone(node, address, Some(encode_command(&begins)))?;
    Ok(db.group.flush_wal()?)
}

/// The namespace groups whose names this node has, as one that votes on them.
pub(crate) fn groups_voted_in(db: &Db, node: NodeId) -> Result<Vec<VotedIn>, DbError> {
    let mut found = Vec::new();
    for id in db.namespace_groups() {
        let database = Arc::clone(db.database());
        let group = open_namespace_group(database, id)?;
        if group.voters()?.contains(&node) {
            found.push((id, group));
        }
    }
    Ok(found)
}

/// No number is given twice that was given by an entry which this log does not have.
fn raise_numbers(group: &GroupStore) -> Result<Operations, DbError> {
    let filesystems = group.read(|view| Ok::<_, DbError>(namespace::filesystems(view)?))?;
    let raise = || Batch {
        operations: vec![of_leader(namespace::Operation::RaiseNumbers)],
    };
    let all = filesystems
        .into_iter()
        .map(|filesystem| (filesystem, raise()));
    Ok(Operations(all.collect()))
}

/// Its number, and what people call it.
fn named(node: &Node) -> (NodeId, String) {
    (node.id, node.name.to_string())
}

fn unknown_node(node: NodeId, known: &[Node]) -> RecoveryError {
    let known = known.iter().map(named).collect();
    RecoveryError::UnknownNode { node, known }
}

fn check_may_lead(nodes: &[Node], node: NodeId) -> Result<(), RecoveryError> {
    let own = nodes.iter().find(|one| one.id == node);
    let own = own.ok_or_else(|| unknown_node(node, nodes))?;
    if !own.may_have(Role::Meta) {
        let may = nodes.iter().filter(|one| one.may_have(Role::Meta));
        let may = may.map(named).collect();
        return Err(RecoveryError::NotMeta { node, may });
    }
    Ok(())
}

impl Position {
    /// Whether the node may go on alone.
    ///
    /// # Errors
    /// It may not have the role `meta`.
    pub fn check(&self) -> Result<(), RecoveryError> {
        check_may_lead(&self.nodes, self.node)
    }
}

pub(crate) fn open(dir: &Path) -> Result<Db, RecoveryError> {
    if !Db::exists(dir) {
        return Err(RecoveryError::NoMetadata {
            dir: dir.to_owned(),
        });
    }
    // It is closed when it is dropped: nobody else has it.
    let (db, _closed) = Db::open(dir)?;
    Ok(db)
}

fn nodes(db: &Db) -> Result<Vec<Node>, DbError> {
    db.read(|view| Ok(NODES.all(view)?))
}
