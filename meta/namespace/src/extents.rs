//! Where a file's data are.
//!
//! Extents never overlap, lie within the file's blocks, and each names its own run of a segment's addresses.
//! Neighbours in the file that are neighbours in a segment become one. Holes have no record.

use records::{Read, ReadError};

use crate::STEP_MAX;
use crate::attributes::{check_unchanged, take_privileges};
use crate::error::{Error, Failure};
use crate::ids::{FilesystemId, Ino};
use crate::keys::{EXTENTS, number_at};
use crate::operation::{Commit, Outcome, Punch, Tail};
use crate::record::{Body, Content, Extent, Inode, Run};
use crate::segments;
use crate::update::Update;

/// Bytes of a block, the unit of extents. A file's last block is zero behind the file's end.
pub const BLOCK: u64 = 4096;

/// Bytes of a file, as Linux has it. A larger one is refused with EFBIG.
pub const SIZE_MAX: u64 = i64::MAX as u64;

/// Bytes that one commit names, so that it overwrites no more than 4,096 extents. More is refused with
/// EINVAL.
pub const COMMIT_BYTES_MAX: u64 = 16 << 20;

/// Bytes of an extent. Neighbours that are longer together stay apart: what is shared of one extent is
/// listed in one step.
const EXTENT_LENGTH_MAX: u64 = 64 << 20;

/// The end of the block that ends at this offset or holds the byte before it.
pub(crate) fn block_end(offset: u64) -> u64 {
    offset.next_multiple_of(BLOCK)
}

/// The content of a regular file.
pub(crate) fn file_content(inode: &Inode) -> Result<Content, Error> {
    match inode.body {
        Body::File(content) => Ok(content),
        Body::Directory(_) => Err(Error::IsDirectory),
        _ => Err(Error::Invalid),
    }
}

pub(crate) fn extent_of(key: &[u8], run: Run) -> Result<Extent, ReadError> {
    Ok(Extent {
        offset: number_at(key, 8)?,
        length: run.length,
        segment: run.segment,
        address: run.address,
        epoch: run.epoch,
    })
}

/// The extents that reach into a range, the first ones if there are more than `max`.
pub(crate) fn in_range(
    view: &dyn Read,
    filesystem: FilesystemId,
    (ino, content): (Ino, Content),
    (from, to): (u64, u64),
    max: usize,
) -> Result<Vec<Extent>, ReadError> {
    let mut found = Vec::new();
    if from >= to {
        return Ok(found);
    }
    match content {
        Content::Empty => {}
        Content::Inline(extent) => {
            if extent.offset < to && extent.end() > from {
                found.push(extent);
            }
        }
        Content::Table(_) => {
            let (mut first, start) = (from, (ino, from));
            EXTENTS.scan_back(view, filesystem, &ino, &start, &mut |key, run| {
                let extent = extent_of(key, run)?;
                if extent.end() > from {
                    first = extent.offset;
                }
                Ok(false)
            })?;
            let start = (ino, first);
            EXTENTS.scan(view, filesystem, &ino, &start, &mut |key, run| {
                let extent = extent_of(key, run)?;
                if extent.offset < to {
                    found.push(extent);
                }
                Ok(extent.offset < to && found.len() < max)
            })?;
        }
    }
    Ok(found)
}

/// The extents that reach behind an offset, from the last on, at most `max`.
fn behind(
    update: &Update<'_, '_>,
    (ino, content): (Ino, Content),
    from: u64,
    max: usize,
) -> Result<Vec<Extent>, ReadError> {
    let Content::Table(_) = content else {
        let range = (from, u64::MAX);
        return in_range(update.view(), update.filesystem, (ino, content), range, max);
    };
    let mut found = Vec::new();
    let (filesystem, start) = (update.filesystem, (ino, u64::MAX));
    EXTENTS.scan_back(update.view(), filesystem, &ino, &start, &mut |key, run| {
        let extent = extent_of(key, run)?;
        if extent.end() > from {
            found.push(extent);
        }
        Ok(extent.end() > from && found.len() < max)
    })?;
    Ok(found)
}

fn put_run(update: &mut Update<'_, '_>, ino: Ino, extent: &Extent) {
    let run = Run {
        length: extent.length,
        segment: extent.segment,
        address: extent.address,
        epoch: extent.epoch,
    };
    update.put(&EXTENTS, &(ino, extent.offset), &run);
}

/// Adds an extent where there is none.
fn add(
    update: &mut Update<'_, '_>,
    ino: Ino,
    inode: &mut Inode,
    extent: Extent,
) -> Result<(), Failure> {
    inode.allocated += extent.length;
    let content = match file_content(inode)? {
        Content::Empty => Content::Inline(extent),
        Content::Inline(other) => {
            put_run(update, ino, &other);
            put_run(update, ino, &extent);
            Content::Table(2)
        }
        Content::Table(count) => {
            put_run(update, ino, &extent);
            Content::Table(count + 1)
        }
    };
    inode.body = Body::File(content);
    Ok(())
}

/// Takes an extent out of its file. Its data stay named until they are released.
fn take_out(
    update: &mut Update<'_, '_>,
    ino: Ino,
    inode: &mut Inode,
    extent: &Extent,
) -> Result<(), Failure> {
    inode.allocated -= extent.length;
    let content = match file_content(inode)? {
        Content::Empty | Content::Inline(_) => Content::Empty,
        Content::Table(count) => {
            update.delete(&EXTENTS, &(ino, extent.offset));
            match count {
                2 => Content::Inline(take_only(update, ino)?),
                _ => Content::Table(count - 1),
            }
        }
    };
    inode.body = Body::File(content);
    Ok(())
}

/// Takes the only extent of a file out of the table.
fn take_only(update: &mut Update<'_, '_>, ino: Ino) -> Result<Extent, Failure> {
    let mut only = None;
    let filesystem = update.filesystem;
    EXTENTS.scan(update.view(), filesystem, &ino, &ino, &mut |key, run| {
        only = Some(extent_of(key, run)?);
        Ok(false)
    })?;
    let Some(only) = only else {
        let key = EXTENTS.key(filesystem, &ino);
        return Err(ReadError::new(&key, "a counted extent is not there").into());
    };
    update.delete(&EXTENTS, &(ino, only.offset));
    Ok(only)
}

/// Whether the data of two extents are one run, which is not too long.
fn joins(first: &Extent, second: &Extent) -> bool {
    first.end() == second.offset
        && first.segment == second.segment
        && first.address + first.length == second.address
        && first.length + second.length <= EXTENT_LENGTH_MAX
}

/// Adds an extent where there is none, as one with its neighbours if they are one run of addresses.
pub(crate) fn insert(
    update: &mut Update<'_, '_>,
    ino: Ino,
    inode: &mut Inode,
    mut extent: Extent,
) -> Result<(), Failure> {
    let neighbours = (extent.offset.saturating_sub(1), extent.end() + 1);
    let content = (ino, file_content(inode)?);
    let near = in_range(update.view(), update.filesystem, content, neighbours, 2)?;
    for neighbour in near {
        let joined = match () {
            () if joins(&neighbour, &extent) => Extent {
                length: neighbour.length + extent.length,
                ..neighbour
            },
            () if joins(&extent, &neighbour) => Extent {
                length: extent.length + neighbour.length,
                ..extent
            },
            () => continue,
        };
        take_out(update, ino, inode, &neighbour)?;
        // A map that is new enough for both.
        let epoch = extent.epoch.max(neighbour.epoch);
        extent = Extent { epoch, ..joined };
    }
    add(update, ino, inode, extent)
}

/// Cuts a range out of an extent and releases its data. How many records of space it took.
fn cut(
    update: &mut Update<'_, '_>,
    ino: Ino,
    inode: &mut Inode,
    extent: &Extent,
    (from, to): (u64, u64),
) -> Result<usize, Failure> {
    take_out(update, ino, inode, extent)?;
    if extent.offset < from {
        add(update, ino, inode, extent.within(extent.offset, from))?;
    }
    if extent.end() > to {
        add(update, ino, inode, extent.within(to, extent.end()))?;
    }
    let gone = extent.within(from, to);
    segments::release(update, gone.segment, (gone.address, gone.length))
}

/// What [`remove_range`] did.
pub(crate) struct Hole {
    /// Records removed.
    pub(crate) spent: usize,
    /// The offset up to which the hole is made.
    pub(crate) end: u64,
}

/// Makes a hole, until about `max` records were removed.
pub(crate) fn remove_range(
    update: &mut Update<'_, '_>,
    ino: Ino,
    inode: &mut Inode,
    (from, to): (u64, u64),
    max: usize,
) -> Result<Hole, Failure> {
    let content = (ino, file_content(inode)?);
    let limit = max.saturating_add(1);
    let found = in_range(update.view(), update.filesystem, content, (from, to), limit)?;
    let mut spent = 0;
    for extent in found {
        if spent >= max {
            let end = extent.offset;
            return Ok(Hole { spent, end });
        }
        spent += cut(update, ino, inode, &extent, (from, to))?;
    }
    Ok(Hole { spent, end: to })
}

/// What [`remove_from_end`] did.
pub(crate) struct Removal {
    /// Records removed.
    pub(crate) spent: usize,
    /// The end of the last extent, if some reach behind the offset still.
    pub(crate) left: Option<u64>,
}

/// Removes what is behind a block's border, from the end on, until about `max` records were removed.
pub(crate) fn remove_from_end(
    update: &mut Update<'_, '_>,
    ino: Ino,
    inode: &mut Inode,
    from: u64,
    max: usize,
) -> Result<Removal, Failure> {
    let content = file_content(inode).unwrap_or(Content::Empty);
    let mut spent = 0;
    for extent in behind(update, (ino, content), from, max.saturating_add(1))? {
        if spent >= max {
            let left = Some(extent.end());
            return Ok(Removal { spent, left });
        }
        spent += cut(update, ino, inode, &extent, (from, extent.end()))?;
    }
    Ok(Removal { spent, left: None })
}

/// Gives a file another size. Whether it has it: a file with many extents shrinks in steps.
pub(crate) fn resize(
    update: &mut Update<'_, '_>,
    ino: Ino,
    inode: &mut Inode,
    size: u64,
    tail: Option<Tail>,
) -> Result<bool, Failure> {
    let content = (ino, file_content(inode)?);
    if size > SIZE_MAX {
        return Err(Error::TooLarge.into());
    }
    let end = block_end(size);
    let block = (end.saturating_sub(BLOCK), end);
    let cuts_block = size < inode.size && size % BLOCK != 0;
    let needs_tail =
        cuts_block && !in_range(update.view(), update.filesystem, content, block, 1)?.is_empty();
    if needs_tail != tail.is_some() {
        return Err(Error::Invalid.into());
    }
    if size < inode.size {
        if let Some(left) = remove_from_end(update, ino, inode, end, STEP_MAX)?.left {
            inode.size = inode.size.min(left);
            return Ok(false);
        }
    }
    if let Some(tail) = tail {
        segments::claim(update, tail.segment, (tail.address, BLOCK))?;
        remove_range(update, ino, inode, block, usize::MAX)?;
        let extent = Extent {
            offset: block.0,
            length: BLOCK,
            segment: tail.segment,
            address: tail.address,
            epoch: tail.epoch,
        };
        insert(update, ino, inode, extent)?;
    }
    inode.size = size;
    Ok(true)
}

/// Refuses extents that are not as [`Commit`] says.
fn check_extents(extents: &[Extent], size: u64) -> Result<(), Error> {
    let (mut end, mut total) = (0, 0_u64);
    for extent in extents {
        let numbers = [extent.offset, extent.length, extent.address];
        let is_aligned = numbers.iter().all(|number| number % BLOCK == 0);
        if !is_aligned || extent.length == 0 || extent.offset < end {
            return Err(Error::Invalid);
        }
        total = total.saturating_add(extent.length);
        if total > COMMIT_BYTES_MAX || extent.offset > SIZE_MAX {
            return Err(Error::Invalid);
        }
        end = extent.end();
    }
    match end > block_end(size) {
        true => Err(Error::Invalid),
        false => Ok(()),
    }
}

pub(crate) fn commit(update: &mut Update<'_, '_>, commit: &Commit) -> Result<Outcome, Failure> {
    let ino = commit.ino;
    let mut inode = update.inode(ino)?;
    check_unchanged(&inode, commit.expected)?;
    file_content(&inode)?;
    if commit.size > SIZE_MAX {
        return Err(Error::TooLarge.into());
    }
    let size = commit.size.max(inode.size);
    check_extents(&commit.extents, size)?;
    if !commit.mtime.is_valid() {
        return Err(Error::Invalid.into());
    }
    for extent in &commit.extents {
        segments::claim(update, extent.segment, (extent.address, extent.length))?;
        let range = (extent.offset, extent.end());
        // Bounded by the bytes of a commit.
        remove_range(update, ino, &mut inode, range, usize::MAX)?;
        insert(update, ino, &mut inode, *extent)?;
    }
    take_privileges(update, ino, &mut inode, commit.clear_privileges)?;
    inode.size = size;
    inode.mtime = commit.mtime;
    Ok(Outcome::Inode(update.put_changed(ino, &mut inode)))
}

pub(crate) fn punch(update: &mut Update<'_, '_>, punch: &Punch) -> Result<Outcome, Failure> {
    let ino = punch.ino;
    let mut inode = update.inode(ino)?;
    file_content(&inode)?;
    let end = punch.offset.checked_add(punch.length);
    let end = end.filter(|end| *end <= SIZE_MAX).ok_or(Error::TooLarge)?;
    let is_whole = end % BLOCK == 0 || end >= inode.size;
    if punch.length == 0 || punch.offset % BLOCK != 0 || !is_whole {
        return Err(Error::Invalid.into());
    }
    let range = (punch.offset, block_end(end));
    let done = remove_range(update, ino, &mut inode, range, STEP_MAX)?.end == range.1;
    if done && punch.extend {
        inode.size = inode.size.max(end);
    }
    take_privileges(update, ino, &mut inode, punch.clear_privileges)?;
    inode.mtime = update.at;
    let attributes = update.put_changed(ino, &mut inode);
    Ok(Outcome::Changed { attributes, done })
}
