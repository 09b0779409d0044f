//! The ordered key-value space that the records live in, and the write set of a command.

use std::collections::BTreeMap;

/// Records could not be read. The node stops: it must not guess.
#[derive(Debug, Clone, thiserror::Error)]
#[error("cannot read the metadata record {key}: {detail}")]
pub(crate) struct ReadError {
    /// The record, in hexadecimal.
    pub(crate) key: String,
    /// What went wrong.
    pub(crate) detail: String,
}

impl ReadError {
    pub(crate) fn new(key: &[u8], detail: impl ToString) -> Self {
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

/// Changed records: a value, or `None` for a removed one.
pub(crate) type Writes = BTreeMap<Vec<u8>, Option<Vec<u8>>>;

/// Called with each record; returns whether to go on.
pub(crate) type Visit<'a> = dyn FnMut(&[u8], &[u8]) -> Result<bool, ReadError> + 'a;

/// A consistent view of the records.
pub(crate) trait Read {
    /// The value of a key.
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, ReadError>;

    /// Visits the records whose key begins with `prefix`, in the order of their keys, until told to stop.
    fn scan(&self, prefix: &[u8], visit: &mut Visit<'_>) -> Result<(), ReadError>;
}

impl Read for BTreeMap<Vec<u8>, Vec<u8>> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, ReadError> {
        Ok(BTreeMap::get(self, key).cloned())
    }

    fn scan(&self, prefix: &[u8], visit: &mut Visit<'_>) -> Result<(), ReadError> {
        for (key, value) in self
            .range(prefix.to_vec()..)
            .take_while(|(key, _)| key.starts_with(prefix))
        {
            if !visit(key, value)? {
                break;
            }
        }
        Ok(())
    }
}

/// Writes on top of a view, which they hide.
pub(crate) struct Txn<'a> {
    base: &'a dyn Read,
    writes: Writes,
}

impl<'a> Txn<'a> {
    pub(crate) fn over(base: &'a dyn Read) -> Self {
        Self {
            base,
            writes: Writes::new(),
        }
    }

    pub(crate) fn put(&mut self, key: Vec<u8>, value: Vec<u8>) {
        self.writes.insert(key, Some(value));
    }

    pub(crate) fn delete(&mut self, key: Vec<u8>) {
        self.writes.insert(key, None);
    }

    /// Takes over the writes of a transaction that was made over this one.
    pub(crate) fn absorb(&mut self, writes: Writes) {
        self.writes.extend(writes);
    }

    /// Whether a record whose key begins so was written.
    pub(crate) fn has_written(&self, prefix: u8) -> bool {
        let mut from = self.writes.range(vec![prefix]..);
        from.next()
            .is_some_and(|(key, _)| key.first() == Some(&prefix))
    }

    pub(crate) fn into_writes(self) -> Writes {
        self.writes
    }
}

impl Read for Txn<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, ReadError> {
        match self.writes.get(key) {
            Some(written) => Ok(written.clone()),
            None => self.base.get(key),
        }
    }

    fn scan(&self, prefix: &[u8], visit: &mut Visit<'_>) -> Result<(), ReadError> {
        let mut written = self
            .writes
            .range(prefix.to_vec()..)
            .take_while(|(key, _)| key.starts_with(prefix))
            .peekable();
        let mut go_on = true;
        self.base.scan(prefix, &mut |key, value| {
            while let Some((changed, new)) =
                written.next_if(|(changed, _)| changed.as_slice() < key)
            {
                if let Some(new) = new {
                    go_on = visit(changed, new)?;
                    if !go_on {
                        return Ok(false);
                    }
                }
            }
            go_on = match written.next_if(|(changed, _)| changed.as_slice() == key) {
                Some((_, Some(new))) => visit(key, new)?,
                Some((_, None)) => true,
                None => visit(key, value)?,
            };
            Ok(go_on)
        })?;
        for (key, new) in written {
            if !go_on {
                break;
            }
            if let Some(new) = new {
                go_on = visit(key, new)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Map = BTreeMap<Vec<u8>, Vec<u8>>;

    fn seen(view: &dyn Read, prefix: &[u8], limit: usize) -> Vec<(Vec<u8>, Vec<u8>)> {
        let mut found = Vec::new();
        view.scan(prefix, &mut |key, value| {
            found.push((key.to_vec(), value.to_vec()));
            Ok(found.len() < limit)
        })
        .unwrap();
        found
    }

    #[test]
    fn a_transaction_reads_like_the_map_it_would_make() {
        // Every combination of (absent, base, written, overwritten, deleted) for four keys in and around a
        // prefix.
        let keys: [&[u8]; 4] = [b"a", b"p", b"pa", b"pb"];
        for case in 0..6_usize.pow(4) {
            let (mut base, mut expected, mut txn_writes) = (Map::new(), Map::new(), Writes::new());
            for (position, key) in keys.iter().enumerate() {
                let what = case / 6_usize.pow(u32::try_from(position).unwrap()) % 6;
                if matches!(what, 1 | 3 | 4) {
                    base.insert(key.to_vec(), b"old".to_vec());
                    expected.insert(key.to_vec(), b"old".to_vec());
                }
                if matches!(what, 2 | 3) {
                    txn_writes.insert(key.to_vec(), Some(b"new".to_vec()));
                    expected.insert(key.to_vec(), b"new".to_vec());
                }
                if matches!(what, 4 | 5) {
                    txn_writes.insert(key.to_vec(), None);
                    expected.remove(*key);
                }
            }
            let mut txn = Txn::over(&base);
            txn.absorb(txn_writes);
            for key in keys {
                assert_eq!(
                    Read::get(&txn, key).unwrap(),
                    Read::get(&expected, key).unwrap(),
                    "case {case}"
                );
            }
            for prefix in [&b""[..], b"p", b"pb", b"z"] {
                for limit in [1, 2, usize::MAX] {
                    assert_eq!(
                        seen(&txn, prefix, limit),
                        seen(&expected, prefix, limit),
                        "case {case}"
                    );
                }
            }
        }
    }
}
