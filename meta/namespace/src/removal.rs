//! Removal of a whole filesystem, in bounded steps.
//!
//! The filesystem's record is changed first and goes last, so that nothing else is done in between, and
//! nobody makes the filesystem anew beside what is left of it. Which inodes, names or segments they were does
//! not matter any more: records go in the order of their keys.

use records::{Read, Txn};

use crate::STEP_MAX;
use crate::error::Failure;
use crate::ids::FilesystemId;
use crate::keys::{FILESYSTEM, prefix_of};
use crate::operation::Outcome;
use crate::record::Filesystem;

/// Removes about `limit` records of a filesystem, and its own when there is no other.
pub(crate) fn step(
    txn: &mut Txn<'_>,
    filesystem: FilesystemId,
    found: Option<Filesystem>,
    limit: u32,
) -> Result<Outcome, Failure> {
    let Some(mut record) = found else {
        return Ok(Outcome::Step { done: true });
    };
    let limit = (limit as usize).clamp(1, STEP_MAX);
    let (prefix, own) = (prefix_of(filesystem), FILESYSTEM.key(filesystem, &()));
    let from = record.removed_below.unwrap_or_else(|| prefix.clone());
    let (mut gone, mut next) = (Vec::new(), None);
    txn.scan_from(&prefix, &from, &mut |key, _| {
        match gone.len() < limit {
            true if key != own => gone.push(key.to_vec()),
            true => {}
            false => next = Some(key.to_vec()),
        }
        Ok(next.is_none())
    })?;
    for key in gone {
        txn.delete(key);
    }
    let done = next.is_none();
    record.removed_below = next;
    match done {
        true => FILESYSTEM.delete(txn, filesystem, &()),
        false => FILESYSTEM.put(txn, filesystem, &(), &record),
    }
    Ok(Outcome::Step { done })
}
