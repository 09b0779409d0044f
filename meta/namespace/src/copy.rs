//! Copying within the filesystem: both files name the same data.
//!
//! How often an address is named is kept by address, not by extent ([`crate::segments`]), so that either
//! file may be overwritten in any part, or cut, without looking at the other.

use crate::STEP_MAX;
use crate::apply::Update;
use crate::attributes::clear_privileges;
use crate::error::{Error, Failure};
use crate::extents::{BLOCK, SIZE_MAX, block_end, file_content, in_range, insert, remove_range};
use crate::operation::{Attributes, CopyRange, Outcome};
use crate::record::Extent;
use crate::segments;

pub(crate) fn copy(update: &mut Update<'_, '_>, range: &CopyRange) -> Result<Outcome, Failure> {
    let source = update.inode(range.from)?;
    let mut inode = update.inode(range.to)?;
    let content = (range.from, file_content(&source)?);
    file_content(&inode)?;
    let ends = [range.from_offset, range.to_offset].map(|at| at.checked_add(range.length));
    let [Some(from_end), Some(to_end)] = ends else {
        return Err(Error::TooLarge.into());
    };
    if to_end > SIZE_MAX {
        return Err(Error::TooLarge.into());
    }
    let length = from_end.min(source.size).saturating_sub(range.from_offset);
    if length == 0 {
        let attributes = Attributes::of(range.to, &inode);
        return Ok(Outcome::Copied { length, attributes });
    }
    check(range, length, source.size, inode.size)?;
    let span = (range.from_offset, range.from_offset + length);
    let found = in_range(
        update.view(),
        update.filesystem,
        content,
        span,
        STEP_MAX + 1,
    )?;
    // What follows the extents that one step copies is for another request.
    let length = match found.get(STEP_MAX) {
        Some(next) => next.offset - range.from_offset,
        None => length,
    };
    let target = (range.to_offset, block_end(range.to_offset + length));
    let cleared = remove_range(update, range.to, &mut inode, target, STEP_MAX)?;
    let length = length.min(cleared - range.to_offset);
    let end = range.from_offset + block_end(length);
    for extent in found.iter().filter(|extent| extent.offset < end) {
        let part = extent.within(range.from_offset, end);
        segments::share(update, part.segment, (part.address, part.length))?;
        let offset = range.to_offset + (part.offset - range.from_offset);
        insert(update, range.to, &mut inode, Extent { offset, ..part })?;
    }
    if range.clear_privileges {
        clear_privileges(update, range.to, &mut inode)?;
    }
    inode.size = inode.size.max(range.to_offset + length);
    inode.mtime = update.at;
    let attributes = update.put_changed(range.to, &mut inode);
    Ok(Outcome::Copied { length, attributes })
}

/// Refuses what cannot be copied by naming whole blocks.
fn check(range: &CopyRange, length: u64, from_size: u64, to_size: u64) -> Result<(), Error> {
    let (from, to) = (range.from_offset, range.to_offset);
    let is_aligned = from % BLOCK == 0 && to % BLOCK == 0;
    // The rest of the last block is zero: it may only become the rest of a file's last block.
    let is_end = from + length == from_size && to + length >= to_size;
    let is_whole = length % BLOCK == 0 || is_end;
    let overlaps =
        range.from == range.to && from < to + block_end(length) && to < from + block_end(length);
    match is_aligned && is_whole && !overlaps {
        true => Ok(()),
        false => Err(Error::Invalid),
    }
}
