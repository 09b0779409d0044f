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

/// Which way a scan goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// In the order of the keys.
    Forward,
    /// Against it.
    Backward,
}

/// A consistent view of the records.
pub trait Read {
    /// The value of a key.
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, ReadError>;

    /// Visits the records whose key begins with `prefix`, from the key `from` on, until told to stop. `from`
    /// begins with `prefix`; a record need not be there. Backward, the first record visited is the last at or
    /// before `from`.
    fn scan_towards(
        &self,
        prefix: &[u8],
        from: &[u8],
        direction: Direction,
        visit: &mut Visit<'_>,
    ) -> Result<(), ReadError>;

    /// Visits the records whose key begins with `prefix`, from the key `from` on, in the order of their keys,
    /// until told to stop.
    fn scan_from(
        &self,
        prefix: &[u8],
        from: &[u8],
        visit: &mut Visit<'_>,
    ) -> Result<(), ReadError> {
        self.scan_towards(prefix, from, Direction::Forward, visit)
    }

    /// Like [`Read::scan_from`], in descending order.
    fn scan_back(
        &self,
        prefix: &[u8],
        from: &[u8],
        visit: &mut Visit<'_>,
    ) -> Result<(), ReadError> {
        self.scan_towards(prefix, from, Direction::Backward, visit)
    }

    /// Visits the records whose key begins with `prefix`, in the order of their keys, until told to stop.
    fn scan(&self, prefix: &[u8], visit: &mut Visit<'_>) -> Result<(), ReadError> {
        self.scan_from(prefix, prefix, visit)
    }
}

impl Read for BTreeMap<Vec<u8>, Vec<u8>> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, ReadError> {
        Ok(BTreeMap::get(self, key).cloned())
    }

    fn scan_towards(
        &self,
        prefix: &[u8],
        from: &[u8],
        direction: Direction,
        visit: &mut Visit<'_>,
    ) -> Result<(), ReadError> {
        for (key, value) in within(self, prefix, from, direction) {
            if !visit(key, value)? {
                break;
            }
        }
        Ok(())
    }
}

/// The entries of a map that a scan of it visits.
fn within<'a, V>(
    map: &'a BTreeMap<Vec<u8>, V>,
    prefix: &'a [u8],
    from: &[u8],
    direction: Direction,
) -> impl Iterator<Item = (&'a Vec<u8>, &'a V)> + use<'a, V> {
    assert!(from.starts_with(prefix), "a scan begins within its prefix");
    let from = from.to_vec();
    let (forward, backward) = match direction {
        Direction::Forward => (Some(map.range(from..)), None),
        Direction::Backward => (None, Some(map.range(..=from).rev())),
    };
    let all = forward.into_iter().flatten();
    all.chain(backward.into_iter().flatten())
        .take_while(move |(key, _)| key.starts_with(prefix))
}
