//! Writes on top of a view.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use crate::{Direction, Read, ReadError, Visit, within};

/// Changed records: a value, or `None` for a removed one.
pub type Writes = BTreeMap<Vec<u8>, Option<Vec<u8>>>;

/// Writes on top of a view, which they hide.
pub struct Txn<'a> {
    base: &'a dyn Read,
    writes: Writes,
}

impl<'a> Txn<'a> {
    /// A transaction over a view, without writes.
    pub fn over(base: &'a dyn Read) -> Self {
        Self {
            base,
            writes: Writes::new(),
        }
    }

    /// Writes a record.
    pub fn put(&mut self, key: Vec<u8>, value: Vec<u8>) {
        self.writes.insert(key, Some(value));
    }

    /// Removes a record, which need not be there.
    pub fn delete(&mut self, key: Vec<u8>) {
        self.writes.insert(key, None);
    }

    /// Takes over the writes of a transaction that was made over this one.
    pub fn absorb(&mut self, writes: Writes) {
        self.writes.extend(writes);
    }

    /// Whether a record whose key begins so was written.
    pub fn has_written(&self, prefix: u8) -> bool {
        let mut from = self.writes.range(vec![prefix]..);
        from.next()
            .is_some_and(|(key, _)| key.first() == Some(&prefix))
    }

    /// The writes, to be kept.
    pub fn into_writes(self) -> Writes {
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

    fn scan_towards(
        &self,
        prefix: &[u8],
        from: &[u8],
        direction: Direction,
        visit: &mut Visit<'_>,
    ) -> Result<(), ReadError> {
        let ahead = match direction {
            Direction::Forward => Ordering::Less,
            Direction::Backward => Ordering::Greater,
        };
        merge(
            within(&self.writes, prefix, from, direction),
            ahead,
            |visit| self.base.scan_towards(prefix, from, direction, visit),
            visit,
        )
    }
}

/// Visits written records and those below them that they do not hide, both in the same order. A written
/// record whose key compares as `ahead` to the next one below comes first.
fn merge<'w>(
    written: impl Iterator<Item = (&'w Vec<u8>, &'w Option<Vec<u8>>)>,
    ahead: Ordering,
    scan_base: impl FnOnce(&mut Visit<'_>) -> Result<(), ReadError>,
    visit: &mut Visit<'_>,
) -> Result<(), ReadError> {
    let mut written = written.peekable();
    let mut go_on = true;
    scan_base(&mut |key, value| {
        while let Some((changed, new)) =
            written.next_if(|(changed, _)| changed.as_slice().cmp(key) == ahead)
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

#[cfg(test)]
mod tests {
    use super::*;

    type Map = BTreeMap<Vec<u8>, Vec<u8>>;
    type Scan = fn(&dyn Read, &[u8], &[u8], &mut Visit<'_>) -> Result<(), ReadError>;

    fn seen(
        view: &dyn Read,
        scan: Scan,
        (prefix, from): (&[u8], &[u8]),
        limit: usize,
    ) -> Vec<(Vec<u8>, Vec<u8>)> {
        let mut found = Vec::new();
        scan(view, prefix, from, &mut |key, value| {
            found.push((key.to_vec(), value.to_vec()));
            Ok(found.len() < limit)
        })
        .unwrap();
        found
    }

    /// What a scan must find, by looking at every record.
    fn expected_of(
        map: &Map,
        back: bool,
        (prefix, from): (&[u8], &[u8]),
        limit: usize,
    ) -> Vec<(Vec<u8>, Vec<u8>)> {
        let within = |key: &[u8]| match back {
            false => key >= from,
            true => key <= from,
        };
        let mut found: Vec<_> = (map.iter())
            .filter(|(key, _)| key.starts_with(prefix) && within(key))
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect();
        if back {
            found.reverse();
        }
        found.truncate(limit);
        found
    }

    fn check_scans(txn: &Txn<'_>, expected: &Map, case: usize) {
        let ranges: [(&[u8], &[u8]); 10] = [
            (b"", b""),
            (b"", b"o"),
            (b"", b"pa"),
            (b"", b"z"),
            (b"p", b"p"),
            (b"p", b"pa"),
            (b"p", b"paa"),
            (b"p", b"p\xff"),
            (b"pb", b"pb"),
            (b"z", b"z"),
        ];
        let forward: Scan = |view, prefix, from, visit| view.scan_from(prefix, from, visit);
        let back: Scan = |view, prefix, from, visit| view.scan_back(prefix, from, visit);
        let whole: Scan = |view, prefix, _, visit| view.scan(prefix, visit);
        for range in ranges {
            for limit in [1, 2, usize::MAX] {
                for (scan, is_back) in [(forward, false), (back, true)] {
                    let right = expected_of(expected, is_back, range, limit);
                    assert_eq!(seen(txn, scan, range, limit), right, "case {case}");
                    assert_eq!(seen(expected, scan, range, limit), right, "case {case}");
                }
                let right = expected_of(expected, false, (range.0, range.0), limit);
                assert_eq!(seen(txn, whole, range, limit), right, "case {case}");
            }
        }
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
            check_scans(&txn, &expected, case);
        }
    }
}
