//! Writing.

use fuse_codec::{AccessMode, Errno, Write};
use namespace::{BLOCK, Body, Commit, Content, Error, Ino, SIZE_MAX};

use super::read::Unread;
use super::staging::{commit, stage};
use super::tries::Tries;
use super::{EXTENTS_MAX, block_begin, block_end, read};
use crate::backend::{Backend, DataError};
use crate::buffer;
use crate::caller::Caller;
use crate::client::Client;
use crate::failure::Failure;
use crate::mount::{Call, Served};
use crate::questions::Look;
use crate::reply::OwnedReply;
use crate::sync::Mode;

/// Bytes of a WRITE. Kernels send 1 MiB at most; more than this is refused with EINVAL.
const WRITE_BYTES_MAX: usize = 8 << 20;

/// Bytes to write.
pub(crate) struct NewBytes {
    pub(crate) ino: Ino,
    pub(crate) place: Place,
    pub(crate) data: Vec<u8>,
    /// Set-user-id and set-group-id go.
    pub(crate) clear_privileges: bool,
}

/// Where to write.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    At(u64),
    /// At the end of the file, wherever that is by then.
    End,
}

pub(crate) async fn serve<B: Backend>(
    call: &Call<'_, B>,
    write: &Write,
    payload: Vec<u8>,
) -> Served {
    let file = call.file(write.handle, call.header.nodeid)?;
    if file.access == AccessMode::Read {
        return Err(Errno::EBADF);
    }
    if payload.len() != write.size as usize {
        return Err(Errno::EIO);
    }
    if payload.is_empty() {
        return Ok(OwnedReply::Written(0));
    }
    if payload.len() > WRITE_BYTES_MAX {
        return Err(Errno::EINVAL);
    }
    // Pages of a shared mapping know where they belong, however the file was opened.
    let place = match write.flags.append() && !write.from_page_cache {
        true => Place::End,
        false => Place::At(write.offset),
    };
    let new = NewBytes {
        ino: file.ino,
        place,
        data: payload,
        clear_privileges: write.kill_suidgid,
    };
    call.check_written(write.handle)?;
    call.client.await_admission(write.size.into()).await;
    // A kernel that does not pass sync(2) on would take for durable what is buffered here.
    let is_through = write.flags.data_sync()
        || write.flags.sync()
        || write.flags.direct() && !write.from_page_cache
        || !call.agreed.passes_sync_on();
    if is_through || !buffer::write::write(call.client, &new).await? {
        put(call.client, &new).await?;
    }
    call.client.counters.written_bytes.add(write.size.into());
    Ok(OwnedReply::Written(write.size))
}

impl NewBytes {
    /// Whether it replaces whole blocks, so that it does not matter what the file holds.
    fn is_whole(&self) -> bool {
        let is_whole = |number: u64| number % BLOCK == 0;
        matches!(self.place, Place::At(at) if is_whole(at)) && is_whole(self.data.len() as u64)
    }
}

/// Writes at least one byte past the buffer.
pub(super) async fn put<B: Backend>(client: Caller<'_, B>, new: &NewBytes) -> Result<(), Failure> {
    client.as_space_returns(|| put_in_turn(client, new)).await
}

async fn put_in_turn<B: Backend>(client: Caller<'_, B>, new: &NewBytes) -> Result<(), Failure> {
    let mode = match new.is_whole() {
        true => Mode::Shared,
        false => Mode::Exclusive,
    };
    let _turn = client.turn(new.ino, mode).await;
    let _permit = client.writes.acquire().await;
    let mut tries = Tries::default();
    loop {
        match put_once(client, new).await {
            Ok(()) => return Ok(()),
            Err(failure) => tries.again(&client, failure).await?,
        }
    }
}

async fn put_once<B: Backend>(client: Caller<'_, B>, new: &NewBytes) -> Result<(), Failure> {
    let length = new.data.len() as u64;
    let look = match new.place {
        Place::At(_) if new.is_whole() => None,
        Place::At(offset) => {
            let range = (offset, offset.saturating_add(length));
            Some(client.look(new.ino, range, EXTENTS_MAX).await?)
        }
        Place::End => Some(look_at_end(&client, new.ino).await?),
    };
    let offset = match (new.place, &look) {
        (Place::At(offset), _) => offset,
        (Place::End, Some(look)) => look.inode.size,
        (Place::End, None) => return Err(Failure::EIO),
    };
    let end = offset.checked_add(length).filter(|end| *end <= SIZE_MAX);
    let end = end.ok_or(Failure::Refused(Error::TooLarge))?;
    let data = match &look {
        None => new.data.clone(),
        Some(look) => complete(&client, new, look, (offset, end)).await?,
    };
    let session = client.session().await?;
    let staged = stage(&client, &session, new.ino, data).await?;
    let request = Commit {
        ino: new.ino,
        expected: look.map(|look| look.inode.change),
        extents: Vec::new(),
        size: end,
        mtime: client.backend.now(),
        clear_privileges: new.clear_privileges,
    };
    commit(client, &session, staged, block_begin(offset), request).await?;
    Ok(())
}

/// A file's inode, and the extents of the block that its end lies in.
async fn look_at_end<B: Backend>(client: &Client<B>, ino: Ino) -> Result<Look, Failure> {
    let inode = client.inode(ino).await?;
    let extents = match inode.body {
        Body::File(Content::Empty) => Vec::new(),
        Body::File(Content::Inline(extent)) => vec![extent],
        Body::File(Content::Table(_)) => {
            let block = block_begin(inode.size);
            let look = client
                .look(ino, (block, block + BLOCK), EXTENTS_MAX)
                .await?;
            if look.inode.size != inode.size {
                return Err(Failure::Refused(Error::Changed));
            }
            return Ok(look);
        }
        Body::Directory(_) => return Err(Failure::Refused(Error::IsDirectory)),
        _ => return Err(Failure::Refused(Error::Invalid)),
    };
    Ok(Look {
        ino,
        inode,
        extents,
    })
}

/// The whole blocks that a range lies in, with the new bytes.
async fn complete<B: Backend>(
    client: &Client<B>,
    new: &NewBytes,
    look: &Look,
    (offset, end): (u64, u64),
) -> Result<Vec<u8>, Failure> {
    let (first, last) = (block_begin(offset), block_end(end));
    let mut blocks = vec![0; (last - first) as usize];
    if first < offset {
        let head = present(client, new.ino, look, (first, offset)).await?;
        blocks[..head.len()].copy_from_slice(&head);
    }
    // Behind the end of the file there is nothing.
    let old_end = last.min(look.inode.size);
    if end < old_end {
        let tail = present(client, new.ino, look, (end, old_end)).await?;
        let at = (end - first) as usize;
        blocks[at..at + tail.len()].copy_from_slice(&tail);
    }
    let at = (offset - first) as usize;
    blocks[at..at + new.data.len()].copy_from_slice(&new.data);
    Ok(blocks)
}

/// What a file holds within one block.
pub(crate) async fn present<B: Backend>(
    client: &Client<B>,
    ino: Ino,
    look: &Look,
    range: (u64, u64),
) -> Result<Vec<u8>, Failure> {
    match read::extents(client, look, range).await {
        Ok(bytes) => return Ok(bytes),
        // Replicas are waited for, as when it is read.
        Err(Unread::Freed | Unread::Failed(DataError::Late)) => {
            return Err(Failure::Refused(Error::Changed));
        }
        Err(Unread::NotLookedUp(failure)) => return Err(failure),
        Err(Unread::Failed(_)) => {}
    }
    // The data may have been freed meanwhile, and then the file has changed.
    match client.ask_inode(ino).await?.change == look.inode.change {
        true => Err(Failure::EIO),
        false => Err(Failure::Refused(Error::Changed)),
    }
}
