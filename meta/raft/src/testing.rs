//! State machine for tests.

use std::path::Path;
use std::sync::Arc;

use records::{Read, Txn};

use crate::storage::{Database, DatabaseError, DbError, GroupId, GroupStore, StateMachine};

/// Machine whose command is the key of a record, which it writes with the key as its value. The reply is the
/// command.
pub(crate) struct Keys(Arc<GroupStore>);

impl StateMachine for Keys {
    fn store(&self) -> &Arc<GroupStore> {
        &self.0
    }

    fn apply(&self, records: &mut Txn<'_>, command: &[u8]) -> Result<Vec<u8>, DbError> {
        records.put(command.to_vec(), command.to_vec());
        Ok(command.to_vec())
    }
}

impl Keys {
    /// Opens a group of a database.
    pub(crate) fn of(database: &Arc<Database>, group: GroupId) -> Result<Self, DatabaseError> {
        let store = GroupStore::open(Arc::clone(database), group)?;
        store.check_log(check)?;
        Ok(Self(Arc::new(store)))
    }

    /// Opens the main group of the database in `dir`.
    pub(crate) fn open(dir: &Path) -> Result<Self, DatabaseError> {
        let (database, _) = Database::open(dir)?;
        Self::of(&database, GroupId::Main)
    }

    /// Keys of all records.
    pub(crate) fn all(&self) -> Vec<String> {
        let mut keys = Vec::new();
        let read = self.0.read(|view| {
            // Above the applied position.
            view.scan(b"k", &mut |key, _| {
                keys.push(String::from_utf8_lossy(key).into_owned());
                Ok(true)
            })
            .map_err(DbError::from)
        });
        read.unwrap();
        keys
    }
}

/// Refuses a command of another encoding.
fn check(command: &[u8]) -> Result<(), String> {
    match command.starts_with(b"k") {
        true => Ok(()),
        false => Err("it is not a key".to_owned()),
    }
}
