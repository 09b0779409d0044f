//! The state machine of the cluster map's group. Commands and replies are JSON.

use std::path::Path;
use std::sync::Arc;

use raft_host::{Applied, DbError, GroupStore, StateMachine};

use super::Db;
use crate::command::{decode_command, encode_reply};
use crate::state::{self, Txn, Writes};

impl StateMachine for Db {
    fn store(&self) -> &Arc<GroupStore> {
        &self.group
    }

    fn apply(&self, records: &mut Txn<'_>, command: &[u8]) -> Result<Vec<u8>, DbError> {
        let command = decode_command(command).map_err(|detail| DbError::Damaged {
            what: "a log entry".to_owned(),
            detail,
        })?;
        Ok(encode_reply(&state::apply(records, &command)?))
    }

    fn write_records(&self, writes: Writes, applied: &Applied) -> Result<(), DbError> {
        Self::write_records(self, writes, applied)
    }

    fn replace_records(&self, file: &Path, expected: &Applied) -> Result<(), DbError> {
        Self::replace_records(self, file, expected)
    }
}
