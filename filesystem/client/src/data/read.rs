//! Reading.
//!
//! Between a look at a file and the read of its data, another host may overwrite the file, and the space of
//! the old data may be discarded. Nothing waits for such readers. A block of a segment is written once, so a
//! read of it finds what was written, or zeros once it is discarded: never other data. Blocks that are not
//! zero are therefore right. For zeros the reader looks at the file again. If the file still names the same
//! addresses, they were not freed when they were read, and the zeros are its content. If not, it reads again.
//!
//! The second look mostly costs nothing: it is answered from the cache while the file's capability is held.

use fuse_codec::{Errno, Read};
use namespace::{BLOCK, Extent, Ino, Inode, SegmentId};

use super::{EXTENTS_MAX, spans_of};
use crate::backend::{Backend, DataError};
use crate::client::Client;
use crate::data_cache::{Fetched, Span};
use crate::failure::Failure;
use crate::mount::{Call, Served};
use crate::questions::Look;
use crate::read_data::ReadData;
use crate::reply::OwnedReply;

/// Bytes of a READ. Kernels ask for 1 MiB at most; more than this is refused with EINVAL.
const READ_BYTES_MAX: u32 = 8 << 20;

/// How often a file is looked at again because its data could not be read. Their segment may be deleted, and
/// others may go on changing the file.
const FREED_TRIES_MAX: u32 = 16;

/// A block that was discarded, or holds zeros.
static ZERO_BLOCK: [u8; BLOCK as usize] = [0; BLOCK as usize];

/// Reason why the bytes of a look are not known.
pub(super) enum Unread {
    /// They were freed before they were read.
    Freed,
    /// The second look failed.
    NotLookedUp(Failure),
    /// The backend could not read them.
    Failed(DataError),
}

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
            // Each time, somebody else has changed the file: all together get on.
            Err(Unread::Freed) => {
                client.counters.freed_meanwhile.add(1);
                continue;
            }
            Err(Unread::NotLookedUp(failure)) => return Err(failure),
            Err(Unread::Failed(DataError::Late)) => {
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
) -> Result<Vec<u8>, Unread> {
    Ok(parts_of(client, look, range).await?.into_vec())
}

/// The same, where the bytes are.
async fn parts_of<B: Backend>(
    client: &Client<B>,
    look: &Look,
    (from, to): (u64, u64),
) -> Result<ReadData, Unread> {
    let parts = spans_of(&look.extents, (from, to));
    let (begins, spans): (Vec<u64>, Vec<_>) = parts
        .map(|(begin, span, epoch)| (begin, (span, epoch)))
        .unzip();
    let fetched = client.fetch(&spans).await.map_err(Unread::Failed)?;
    let read = begins.iter().zip(&spans).zip(&fetched);
    let zeros = read.flat_map(|((begin, (span, _)), parts)| zeros_of(*begin, *span, parts));
    let zeros: Vec<Named> = zeros.collect();
    confirm(client, look.ino, (from, to), &zeros).await?;
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

/// A block by its offset in the file, with the segment and the address that the file named for it.
type Named = (u64, SegmentId, u64);

/// Blocks of zeros in the data that were read of a span.
fn zeros_of(begin: u64, span: Span, parts: &[Fetched]) -> Vec<Named> {
    let blocks = parts
        .iter()
        .flat_map(|part| part.bytes().chunks(BLOCK as usize));
    let blocks = (0..).step_by(BLOCK as usize).zip(blocks);
    let zeros = blocks.filter(|(_, block)| *block == ZERO_BLOCK);
    zeros
        .map(|(at, _)| (begin + at, span.segment, span.address + at))
        .collect()
}

/// Looks whether the file still names these blocks of a range, which were read as zeros.
async fn confirm<B: Backend>(
    client: &Client<B>,
    ino: Ino,
    range: (u64, u64),
    zeros: &[Named],
) -> Result<(), Unread> {
    #[cfg(feature = "testing")]
    if client.options.mistake == Some(crate::cache::Mistake::TakeDiscarded) {
        return Ok(());
    }
    if zeros.is_empty() {
        return Ok(());
    }
    let look = client.look(ino, range, EXTENTS_MAX).await;
    let look = look.map_err(Unread::NotLookedUp)?;
    match zeros.iter().all(|zero| is_named(&look.extents, zero)) {
        true => Ok(()),
        false => Err(Unread::Freed),
    }
}

/// Returns true if one of a file's extents, in the order of their offsets, names a block.
fn is_named(extents: &[Extent], (offset, segment, address): &Named) -> bool {
    let at = extents.partition_point(|extent| extent.end() <= *offset);
    let extent = extents.get(at).filter(|extent| extent.offset <= *offset);
    extent.is_some_and(|extent| {
        extent.segment == *segment && extent.address + (offset - extent.offset) == *address
    })
}
