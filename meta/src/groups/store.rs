//! The records of a namespace group.

use std::path::Path;

use namespace::Reply;
use records::{Txn, Writes};

use super::config::{NamespaceConfig, Operations};
use crate::storage::group::GroupStore;
use crate::storage::machine::Group;
use crate::storage::{Applied, DbError};

/// A namespace group's part of the database.
pub(crate) struct NamespaceStore(pub(crate) GroupStore<NamespaceConfig>);

impl Group for NamespaceStore {
    type Config = NamespaceConfig;

    fn store(&self) -> &GroupStore<NamespaceConfig> {
        &self.0
    }

    fn apply(records: &mut Txn<'_>, operations: &Operations) -> Result<Vec<Reply>, DbError> {
        let mut replies = Vec::new();
        for (filesystem, batch) in &operations.0 {
            replies.extend(namespace::apply(records, *filesystem, batch)?);
        }
        Ok(replies)
    }

    fn no_reply() -> Vec<Reply> {
        Vec::new()
    }

    fn write_records(&self, writes: Writes, applied: &Applied) -> Result<(), DbError> {
        self.0.write_records(writes, applied)
    }

    fn replace_records(&self, file: &Path, expected: &Applied) -> Result<(), DbError> {
        self.0.replace_records(file, expected, |_| Ok(()))
    }
}
