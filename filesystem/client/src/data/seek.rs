//! LSEEK: where data and holes of a file are.

use fuse_codec::{Errno, Handle, Whence};
use namespace::{Ino, SIZE_MAX};

use super::EXTENTS_MAX;
use crate::backend::Backend;
use crate::client::Client;
use crate::mount::{Call, Served};
use crate::reply::OwnedReply;

pub(crate) async fn serve<B: Backend>(
    call: &Call<'_, B>,
    handle: Handle,
    offset: u64,
    whence: Whence,
) -> Served {
    let file = call.file(handle, call.header.nodeid)?;
    call.client.write_back(file.ino).await;
    let found = match whence {
        Whence::Data => data(&call.client, file.ino, offset).await?,
        Whence::Hole => hole(&call.client, file.ino, offset).await?,
    };
    Ok(OwnedReply::Offset(found))
}

async fn data<B: Backend>(client: &Client<B>, ino: Ino, offset: u64) -> Result<u64, Errno> {
    let look = client.look(ino, (offset, SIZE_MAX), 1).await?;
    let found = look.extents.first().map(|extent| extent.offset.max(offset));
    // Its last block has nothing behind the file's end.
    found.filter(|at| *at < look.inode.size).ok_or(Errno::ENXIO)
}

async fn hole<B: Backend>(client: &Client<B>, ino: Ino, offset: u64) -> Result<u64, Errno> {
    let mut at = offset;
    loop {
        let look = client.look(ino, (at, SIZE_MAX), EXTENTS_MAX).await?;
        let size = look.inode.size;
        if offset >= size {
            return Err(Errno::ENXIO);
        }
        for extent in &look.extents {
            if extent.offset > at {
                return Ok(at.min(size));
            }
            at = extent.end();
        }
        // The end of the file counts as a hole.
        if at >= size || look.extents.len() < EXTENTS_MAX as usize {
            return Ok(at.min(size));
        }
    }
}
