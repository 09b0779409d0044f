//! COPY_FILE_RANGE: both files name the same data where blocks allow for it, else the bytes are copied.

use fuse_codec::{AccessMode, CopyFileRange, Errno};
use futures_util::future::try_join;
use namespace::{BLOCK, Body, CopyRange, Error, Operation, Outcome, SIZE_MAX};

use super::block_begin;
use super::read;
use super::write::{self, NewBytes, Place};
use crate::backend::Backend;
use crate::failure::Failure;
use crate::mount::{Call, Served};
use crate::reply::OwnedReply;
use crate::sync::Mode;

/// Bytes that are copied by value for one request. The kernel asks again for the rest.
const COPY_BYTES_MAX: u64 = 1 << 20;

pub(crate) async fn serve<B: Backend>(call: &Call<'_, B>, copy: &CopyFileRange) -> Served {
    let client = call.client;
    let from = call.file(copy.from, call.header.nodeid)?;
    let to = call.file(copy.to, copy.to_inode)?;
    if from.access == AccessMode::Write || to.access == AccessMode::Read {
        return Err(Errno::EBADF);
    }
    client.write_back(from.ino).await;
    let (source, target) = try_join(client.inode(from.ino), client.inode(to.ino)).await?;
    if !matches!(source.body, Body::File(_)) || !matches!(target.body, Body::File(_)) {
        return Err(Errno::EINVAL);
    }
    let left = source.size.saturating_sub(copy.from_offset);
    let length = copy.length.min(left).min(CopyFileRange::MAX_BYTES);
    if length == 0 {
        return Ok(OwnedReply::Written(0));
    }
    let to_end = copy.to_offset.checked_add(length);
    let to_end = to_end.filter(|end| *end <= SIZE_MAX).ok_or(Errno::EFBIG)?;
    let is_aligned = copy.from_offset % BLOCK == 0 && copy.to_offset % BLOCK == 0;
    // The rest of the source's last block is zero: it may only become the end of a file.
    let is_end = length == left && to_end >= target.size;
    let shared = match is_aligned {
        true if is_end => length,
        true => block_begin(length),
        false => 0,
    };
    if shared > 0 {
        let range = CopyRange {
            from: from.ino,
            from_offset: copy.from_offset,
            to: to.ino,
            to_offset: copy.to_offset,
            length: shared,
            clear_privileges: true,
        };
        if let Some(copied) = share(call, range).await? {
            return Ok(OwnedReply::Written(copied));
        }
    }
    let length = length.min(COPY_BYTES_MAX);
    client.await_admission(length).await;
    let (data, _) = read::bytes(&client, from.ino, copy.from_offset, length).await?;
    let copied = data.len() as u32;
    if copied > 0 {
        let new = NewBytes {
            ino: to.ino,
            place: Place::At(copy.to_offset),
            data,
            clear_privileges: true,
        };
        write::put(client, &new).await?;
    }
    Ok(OwnedReply::Written(copied))
}

/// Has both files name the same data; how many bytes. None if the range cannot be shared, as one of the files
/// has another size by now, or both are one file and the ranges overlap.
async fn share<B: Backend>(call: &Call<'_, B>, range: CopyRange) -> Result<Option<u32>, Failure> {
    let client = call.client;
    let _turn = client.turn(range.to, Mode::Exclusive).await;
    match client.apply(Operation::CopyRange(range)).await {
        // Less than was asked, which fits 32 bits.
        Ok(Outcome::Copied { length, .. }) => Ok(Some(length as u32)),
        Ok(other) => Err(Failure::unfit(&other)),
        Err(Failure::Refused(Error::Invalid)) => Ok(None),
        Err(failure) => Err(failure),
    }
}
