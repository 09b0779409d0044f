//! The ordered key-value space that metadata records live in, and the write set of a command.
//!
//! State machines read through [`Read`] and write through [`Txn`]: production keeps the records in RocksDB,
//! tests in a `BTreeMap`. Begin with [`Read`].
//!
//! Invariant: a [`Txn`] reads like the map that its writes would make of the records below it.

mod txn;

use std::collections::BTreeMap;

pub use txn::{Txn, Writes};

/// Records could not be read. The node stops: it must not guess.
#[derive(Debug, Clone, thiserror::Error)]
#[error("cannot read the metadata record {key}: {detail}")]
pub struct ReadError {
    /// The record, in hexadecimal.
    pub key: String,
    /// What went wrong.
    pub detail: String,
}

impl ReadError {
    /// The record of this key could not be read, for this reason.
    pub fn new(key: &[u8], detail: impl ToString) -> Self {
        use std::fmt::Write as _;
        let mut hex = String::with_capacity(key.len() * 2);
        for byte in key {
            let _ = write!(hex, "{byte:02x}");
        }
        Self {
            key: hex,
            detail: detail.to_string(),
        }
    }
}

/// Called with each record; returns whether to go on.
pub type Visit<'a> = dyn FnMut(&[u8], &[u8]) -> Result<bool, ReadError> + 'a;

/// A consistent view of the records.
pub trait Read {
    /// The value of a key.
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, ReadError>;

    /// Visits the records whose key begins with `prefix`, from the key `from` on, in the order of their keys,
    /// until told to stop. `from` begins with `prefix`; a record need not be there.
    fn scan_from(&self, prefix: &[u8], from: &[u8], visit: &mut Visit<'_>)
    -> Result<(), ReadError>;

    /// Like [`Read::scan_from`], in descending order: the first record visited is the last at or before
    /// `from`.
    fn scan_back(&self, prefix: &[u8], from: &[u8], visit: &mut Visit<'_>)
    -> Result<(), ReadError>;

    /// Visits the records whose key begins with `prefix`, in the order of their keys, until told to stop.
    fn scan(&self, prefix: &[u8], visit: &mut Visit<'_>) -> Result<(), ReadError> {
        self.scan_from(prefix, prefix, visit)
    }
}

impl Read for BTreeMap<Vec<u8>, Vec<u8>> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, ReadError> {
        Ok(BTreeMap::get(self, key).cloned())
    }

    fn scan_from(
        &self,
        prefix: &[u8],
        from: &[u8],
        visit: &mut Visit<'_>,
    ) -> Result<(), ReadError> {
        assert!(from.starts_with(prefix), "a scan begins within its prefix");
        for (key, value) in self
            .range(from.to_vec()..)
            .take_while(|(key, _)| key.starts_with(prefix))
        {
            if !visit(key, value)? {
                break;
            }
        }
        Ok(())
    }

    fn scan_back(
        &self,
        prefix: &[u8],
        from: &[u8],
        visit: &mut Visit<'_>,
    ) -> Result<(), ReadError> {
        assert!(from.starts_with(prefix), "a scan begins within its prefix");
        for (key, value) in self
            .range(..=from.to_vec())
            .rev()
            .take_while(|(key, _)| key.starts_with(prefix))
        {
            if !visit(key, value)? {
                break;
            }
        }
        Ok(())
    }
}
