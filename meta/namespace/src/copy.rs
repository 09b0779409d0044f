//! Copying within the filesystem: both files name the same data.
//!
//! How often an address is named is kept by address, not by extent ([`crate::segments`]), so that either
//! file may be overwritten in any part, or cut, without looking at the other.

use crate::STEP_MAX;
use crate::attributes::take_privileges;
use crate::error::{Error, Failure};
use crate::extents::{BLOCK, SIZE_MAX, block_end, file_content, in_range, insert, remove_range};
use crate::ids::Ino;
use crate::operation::{Attributes, CopyRange, Outcome};
use crate::record::{Content, Extent, Inode};
use crate::segments;
use crate::update::Update;

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
    let end = range.from_offset + block_end(length);
    let copied = copy_blocks(update, range, &mut inode, (content, end))?;
    let length = length.min(copied);
    take_privileges(update, range.to, &mut inode, range.clear_privileges)?;
    inode.size = inode.size.max(range.to_offset + length);
    inode.mtime = update.at;
    let attributes = update.put_changed(range.to, &mut inode);
    Ok(Outcome::Copied { length, attributes })
}

/// Names the source's blocks up to `end` in the destination, in order, until about [`STEP_MAX`] records were
/// changed: extents overwritten, and runs of what is shared. How many bytes that was; what lies behind them
/// in the destination is as before.
fn copy_blocks(
    update: &mut Update<'_, '_>,
    range: &CopyRange,
    inode: &mut Inode,
    (content, end): ((Ino, Content), u64),
) -> Result<u64, Failure> {
    let (from, to) = (range.from_offset, range.to_offset);
    let target = |at: u64| to + (at - from);
    let (view, filesystem) = (update.view(), update.filesystem);
    let found = in_range(view, filesystem, content, (from, end), STEP_MAX)?;
    let (mut at, mut left) = (from, STEP_MAX);
    for extent in &found {
        if left == 0 {
            return Ok(at - from);
        }
        let mut part = extent.within(from, end);
        let gone = (target(at), target(part.end()));
        let removal = remove_range(update, range.to, inode, gone, left)?;
        left = left.saturating_sub(removal.spent);
        at = from + (removal.end - to);
        let is_cut = at < part.end();
        if at > part.offset {
            part = part.within(part.offset, at);
            let spent = segments::share(update, part.segment, (part.address, part.length))?;
            left = left.saturating_sub(spent);
            let offset = target(part.offset);
            insert(update, range.to, inode, Extent { offset, ..part })?;
        }
        if is_cut {
            return Ok(at - from);
        }
    }
    // Each extent takes a record at least, so there are no more.
    if left > 0 {
        let gone = (target(at), target(end));
        let removal = remove_range(update, range.to, inode, gone, left)?;
        at = from + (removal.end - to);
    }
    Ok(at - from)
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
