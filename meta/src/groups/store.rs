//! The state machine of a namespace group.

use std::sync::Arc;

use raft_host::{CheckError, Database, DbError, GroupId, GroupStore, StateMachine};
use records::Txn;

use super::operations::{check_operations, decode_operations, encode_replies};
use crate::ids::NamespaceGroupId;

/// A namespace group's part of the database.
pub(crate) struct NamespaceStore(pub(crate) Arc<GroupStore>);

impl StateMachine for NamespaceStore {
    fn store(&self) -> &Arc<GroupStore> {
        &self.0
    }

    fn apply(&self, records: &mut Txn<'_>, command: &[u8]) -> Result<Vec<u8>, DbError> {
        let operations = decode_operations(command).map_err(|detail| DbError::Damaged {
            what: "a log entry".to_owned(),
            detail,
        })?;
        let mut replies = Vec::new();
        for (filesystem, batch) in &operations.0 {
            replies.extend(namespace::apply(records, *filesystem, batch)?);
        }
        Ok(encode_replies(&replies))
    }
}

/// Opens a namespace group's part of a database, or makes it.
///
/// # Errors
/// Damaged, or not accessible.
pub(crate) fn open_namespace_group(
    database: Arc<Database>,
    group: NamespaceGroupId,
) -> Result<GroupStore, DbError> {
    let opened = GroupStore::open(database, GroupId::Numbered(group.0));
    let checked = opened.and_then(|store| {
        store.check_log(check_operations)?;
        Ok(store)
    });
    checked.map_err(|error| match error {
        CheckError::Db(error) => error,
        CheckError::Damaged(detail) => DbError::Damaged {
            what: format!("namespace group {group}"),
            detail,
        },
    })
}
