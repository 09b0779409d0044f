//! Reading.

use fuse_codec::{Errno, Read};
use namespace::{Ino, Inode};

use super::{EXTENTS_MAX, spans_of};
use crate::backend::{Backend, DataError, LOOK_MAX};
use crate::client::Client;
use crate::failure::Failure;
use crate::mount::{Call, Served};
use crate::questions::Look;
use crate::read_data::ReadData;
use crate::reply::OwnedReply;

/// Bytes of a READ. Kernels ask for 1 MiB at most; more than this is refused with EINVAL.
const READ_BYTES_MAX: u32 = 8 << 20;

/// How often a file is looked at again because its data had been freed before they were read. They are not
/// given back at once, so that once is enough; others may go on changing the file.
const FREED_TRIES_MAX: u32 = 16;

pub(crate) async fn serve<B: Backend>(call: &Call<'_, B>, read: &Read) -> Served {
    let client = call.client;
    let file = call.file(read.handle, call.header.nodeid)?;
    if read.size > READ_BYTES_MAX {
        return Err(Errno::EINVAL);
    }
    let (data, mut inode) = parts(&client, file.ino, read.offset, read.size.into()).await?;
    client.counters.read_bytes.add(data.len() as u64);
    let range = (read.offset, read.offset + data.len() as u64);
    let sequences = &call.mount.sequences;
    client.note_read(sequences, (read.handle, file.ino), range, inode.size);
    if !call.mount.read_only {
        client.buffer.cover_inode(file.ino, &mut inode);
        let (times, now) = (&client.access_times, client.backend.now());
        times.note(file.ino, &inode, read.flags, now);
    }
    Ok(OwnedReply::Data(data))
}

/// The bytes of a range as far as the file goes, and its inode.
pub(super) async fn bytes<B: Backend>(
    client: &Client<B>,
    ino: Ino,
    offset: u64,
    length: u64,
) -> Result<(Vec<u8>, Inode), Failure> {
    let (data, inode) = parts(client, ino, offset, length).await?;
    Ok((data.into_vec(), inode))
}

/// The same, where the bytes are.
async fn parts<B: Backend>(
    client: &Client<B>,
    ino: Ino,
    offset: u64,
    length: u64,
) -> Result<(ReadData, Inode), Failure> {
    let end = offset.saturating_add(length);
    let mut unreadable = None;
    let (mut tries, mut looks) = (0, 0);
    while looks < FREED_TRIES_MAX {
        let buffered = client.buffered(ino, (offset, end));
        let look = match unreadable {
            None => client.look_to_read(ino, (offset, end), EXTENTS_MAX).await?,
            Some(_) => client.ask_content(ino, (offset, end), EXTENTS_MAX).await?,
        };
        let end = end.min(buffered.size(look.inode.size)).max(offset);
        match parts_of(client, &look, (offset, end)).await {
            // What was buffered may be written back meanwhile, and more be written.
            Ok(_) if client.is_stale(ino, &buffered) => continue,
            Ok(data) => return Ok((buffered.covered(client, offset, data), look.inode)),
            Err(DataError::Late) => {
                tries += 1;
                client.pause(tries).await;
                continue;
            }
            Err(_) if unreadable.as_ref() == Some(&look.extents) => break,
            Err(_) => client.counters.freed_meanwhile.add(1),
        }
        unreadable = Some(look.extents);
        looks += 1;
    }
    Err(Failure::EIO)
}

/// The bytes of a range by the extents of a look, which are all that reach into it. What lies between them is
/// zero.
pub(super) async fn extents<B: Backend>(
    client: &Client<B>,
    look: &Look,
    range: (u64, u64),
) -> Result<Vec<u8>, DataError> {
    Ok(parts_of(client, look, range).await?.into_vec())
}

/// The same, where the bytes are.
async fn parts_of<B: Backend>(
    client: &Client<B>,
    look: &Look,
    (from, to): (u64, u64),
) -> Result<ReadData, DataError> {
    let parts = spans_of(&look.extents, (from, to));
    let (begins, spans): (Vec<u64>, Vec<_>) = parts
        .map(|(begin, span, epoch)| (begin, (span, epoch)))
        .unzip();
    let fetched = client.fetch(&spans).await?;
    if client.backend.monotonic().since(look.begun) >= LOOK_MAX {
        return Err(DataError::Late);
    }
    // Extents come in the order of their offsets.
    let mut data = ReadData::default();
    for (begin, parts) in begins.into_iter().zip(fetched) {
        let mut at = begin;
        for part in parts {
            let end = at + part.bytes().len() as u64;
            let (first, last) = (from.max(at), to.min(end));
            if first < last {
                data.pad((first - from) as usize);
                data.push(part, (first - at) as usize..(last - at) as usize);
            }
            at = end;
        }
    }
    data.pad((to - from) as usize);
    Ok(data)
}
