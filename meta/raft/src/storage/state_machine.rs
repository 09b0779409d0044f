//! Behaviour of a group.

use std::path::Path;
use std::sync::Arc;

use records::{Txn, Writes};

use super::error::DbError;
use super::format::Applied;
use super::group::GroupStore;

/// State machine of a group: knows the encoding of commands and replies, and what commands do to records.
pub trait StateMachine: Send + Sync + 'static {
    /// Part of the database with the machine's records.
    fn store(&self) -> &Arc<GroupStore>;

    /// Applies a command to the records. Returns the encoded reply.
    ///
    /// # Errors
    /// Records cannot be read, or the command is damaged. The group then stops.
    fn apply(&self, records: &mut Txn<'_>, command: &[u8]) -> Result<Vec<u8>, DbError>;

    /// Writes changed records together with the position that they have reached. May be called again after
    /// an error.
    ///
    /// # Errors
    /// The database cannot be written, or the machine refuses the records.
    fn write_records(&self, writes: Writes, applied: &Applied) -> Result<(), DbError> {
        self.store().write_records(writes, applied)
    }

    /// Replaces all records with those of an exported file, which must be at the position `expected`.
    ///
    /// # Errors
    /// The file is damaged or at another position, the machine refuses the records, or the database cannot
    /// be written.
    fn replace_records(&self, file: &Path, expected: &Applied) -> Result<(), DbError> {
        self.store().replace_records(file, expected, |_| Ok(()))
    }
}
