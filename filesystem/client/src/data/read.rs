//! Reading.

use futures_util::future::try_join_all;

use fuse_codec::{Errno, Read};
use namespace::{Extent, Ino, Inode};

use super::{EXTENTS_MAX, block_begin, block_end};
use crate::backend::{Backend, DataError};
use crate::client::Client;
use crate::failure::Failure;
use crate::mount::{Call, Served};
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
    let (data, mut inode) = bytes(&client, file.ino, read.offset, read.size.into()).await?;
    client.counters.read_bytes.add(data.len() as u64);
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
        match extents(client, &look.extents, (offset, end)).await {
            // What was buffered may be written back meanwhile, and more be written.
            Ok(_) if client.is_stale(ino, &buffered) => continue,
            Ok(mut data) => {
                #[cfg(feature = "testing")]
                if client.options.mistake == Some(crate::cache::Mistake::ReadPastBuffer) {
                    return Ok((data, look.inode));
                }
                buffered.cover(offset, &mut data);
                return Ok((data, look.inode));
            }
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

/// The bytes of a range by these extents, which are all that reach into it. What lies between them is zero.
pub(super) async fn extents<B: Backend>(
    client: &Client<B>,
    extents: &[Extent],
    (from, to): (u64, u64),
) -> Result<Vec<u8>, DataError> {
    let parts = extents.iter().filter_map(|extent| {
        // Whole blocks, as they are stored.
        let begin = extent.offset.max(block_begin(from));
        let end = extent.end().min(block_end(to));
        (begin < end).then_some((extent, begin, end))
    });
    let parts: Vec<_> = parts.collect();
    let reads = parts.iter().map(|(extent, begin, end)| {
        let address = extent.address + (begin - extent.offset);
        let length = end - begin;
        let read = client
            .backend
            .read_data(extent.segment, address, length, extent.epoch);
        async move {
            match read.await {
                Ok(data) if data.len() as u64 == length => Ok(data),
                Ok(_) => Err(DataError::Io),
                Err(error) => Err(error),
            }
        }
    });
    let mut read = try_join_all(reads).await?;
    if let ([(_, begin, end)], [data]) = (parts.as_slice(), read.as_mut_slice()) {
        if *begin == from && *end >= to {
            data.truncate((to - from) as usize);
            return Ok(std::mem::take(data));
        }
    }
    let mut bytes = vec![0; (to - from) as usize];
    for ((_, begin, end), data) in parts.iter().zip(read) {
        let (first, last) = (from.max(*begin), to.min(*end));
        let part = &data[(first - begin) as usize..(last - begin) as usize];
        bytes[(first - from) as usize..(last - from) as usize].copy_from_slice(part);
    }
    Ok(bytes)
}
