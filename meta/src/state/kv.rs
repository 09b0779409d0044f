//! The ordered key-value space that the records live in, and the write set of a command.

pub(crate) use records::{Read, ReadError, Txn, Writes};
